#![no_main]

holdfast_fuzz::program!(hpack_authority);
