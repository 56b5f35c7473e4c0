#![no_main]

holdfast_fuzz::program!(kubeconfig);
