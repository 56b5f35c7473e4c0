#![no_main]

holdfast_fuzz::program!(node_log_query);
