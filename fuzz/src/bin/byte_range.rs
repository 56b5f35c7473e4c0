#![no_main]

holdfast_fuzz::program!(byte_range);
