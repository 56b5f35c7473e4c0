#![no_main]

holdfast_fuzz::program!(kernel_log);
