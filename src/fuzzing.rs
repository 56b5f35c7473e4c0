//! Fuzz targets: functions that take any bytes and panic when what they read breaks a promise.
//!
//! `fuzz/` makes a libFuzzer program of each of them (`make fuzz`), and `tests/fuzz_corpus.rs` hands them every file of
//! `fuzz/corpus`. They stand beside what they test, in modules called `fuzzing`.
//!
//! **Invariant:** a target depends on its input alone and leaves nothing behind.

pub use targets::*;

/// Lists the targets by name, and makes each of them a public function.
macro_rules! targets {
    ($( $module:path: $($name:ident),+ ; )+) => {
        mod targets {
            $($(
                #[doc = concat!("Runs the target `", stringify!($name), "`.")]
                pub fn $name(data: &[u8]) {
                    use $module as module;
                    module::$name(data);
                }
            )+)+
        }

        /// Every target by its name.
        pub const TARGETS: &[(&str, fn(&[u8]))] = &[ $($( (stringify!($name), targets::$name), )+)+ ];
    };
}

targets! {
    crate::apiserver::fuzzing: exec_credential, kubeconfig;
    crate::cm::fuzzing: cgroup_names;
    crate::config::fuzzing: api_answers, manifest;
    crate::container_logs::fuzzing: log_lines, log_rotation;
    crate::core::oom::fuzzing: kernel_log;
    crate::images::fuzzing: credential_response, docker_config, image_name;
    crate::kubeletconfig::fuzzing: config_values, kubelet_config;
    crate::kuberuntime::fuzzing: cri_answers;
    crate::objects::fuzzing: keyring;
    crate::podresources::fuzzing: hpack_authority;
    crate::server::kubelet::fuzzing: byte_range, node_log_query, pod_log_query, spdy, spdy_headers, stream_parameters,
        websocket, websocket_channels;
    crate::stats::fuzzing: cgroup_files, proc_files;
    crate::store::fuzzing: backup, salvage, store_envelope, store_migration, store_record;
    crate::volumemanager::fuzzing: csi_answers, mountinfo;
}
