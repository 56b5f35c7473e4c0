#![no_main]

holdfast_fuzz::program!(pod_log_query);
