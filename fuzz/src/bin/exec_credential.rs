#![no_main]

holdfast_fuzz::program!(exec_credential);
