#![no_main]

holdfast_fuzz::program!(docker_config);
