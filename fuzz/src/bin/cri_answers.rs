#![no_main]

holdfast_fuzz::program!(cri_answers);
