#![no_main]

holdfast_fuzz::program!(mountinfo);
