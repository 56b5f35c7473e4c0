#![no_main]

holdfast_fuzz::program!(api_answers);
