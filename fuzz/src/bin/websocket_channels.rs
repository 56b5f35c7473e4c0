#![no_main]

holdfast_fuzz::program!(websocket_channels);
