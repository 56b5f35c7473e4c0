#![no_main]

holdfast_fuzz::program!(kubelet_config);
