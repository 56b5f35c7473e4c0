#![no_main]

holdfast_fuzz::program!(image_name);
