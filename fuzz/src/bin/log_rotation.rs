#![no_main]

holdfast_fuzz::program!(log_rotation);
