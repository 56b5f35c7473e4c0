#![no_main]

holdfast_fuzz::program!(proc_files);
