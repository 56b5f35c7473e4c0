#![no_main]

holdfast_fuzz::program!(keyring);
