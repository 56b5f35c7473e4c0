#![no_main]

holdfast_fuzz::program!(cgroup_files);
