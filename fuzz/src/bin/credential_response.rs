#![no_main]

holdfast_fuzz::program!(credential_response);
