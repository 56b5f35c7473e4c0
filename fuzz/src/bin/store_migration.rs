#![no_main]

holdfast_fuzz::program!(store_migration);
