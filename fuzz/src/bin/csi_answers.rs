#![no_main]

holdfast_fuzz::program!(csi_answers);
