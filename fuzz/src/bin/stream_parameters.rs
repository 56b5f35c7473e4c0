#![no_main]

holdfast_fuzz::program!(stream_parameters);
