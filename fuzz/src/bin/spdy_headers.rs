#![no_main]

holdfast_fuzz::program!(spdy_headers);
