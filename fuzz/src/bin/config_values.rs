#![no_main]

holdfast_fuzz::program!(config_values);
