//! The configuration from files, drop-ins and flags, and what people are told when it is wrong.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests fail by panicking"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Arg, Args, Command, FromArgMatches};
use holdfast::kubeletconfig::fields::{FIELDS, Field, Kind, Support};
use holdfast::kubeletconfig::flags::KubeletFlags;
use holdfast::kubeletconfig::tables::tables;
use holdfast::kubeletconfig::unsupported::{Effect, UNSUPPORTED_FLAGS};
use holdfast::kubeletconfig::{
    AgentConfig, AuthorizationMode, BackOffEarlyEnd, CgroupDriver, ConfigError, DeviceReadiness,
    EvictionThreshold, KubeletConfiguration, LogFormat, NEVER_ROTATE, OfflineStart, PullFallback,
    TlsVersion, Warning, load, resolve,
};

const HEAD: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";

/// A directory with configuration files.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn arg(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    /// Writes a document with the right type.
    fn config(&self, name: &str, body: &str) -> PathBuf {
        self.write(name, &format!("{HEAD}{body}"))
    }

    /// Puts `DIR` in place of the directory's name, for comparing messages.
    fn plain(&self, text: &str) -> String {
        text.replace(&self.0.path().display().to_string(), "DIR")
    }

    /// The lines of the error that `config.yaml` with this body gives.
    fn errors(&self, body: &str) -> Vec<String> {
        let path = self.config("config.yaml", body);
        lines(&self.plain(&load::load(Some(&path), None).unwrap_err().to_string()))
    }
}

/// The problems in the text of a [`ConfigError::Invalid`], one per line.
fn lines(text: &str) -> Vec<String> {
    let problems = text.strip_prefix("invalid configuration:\n").unwrap();
    problems
        .lines()
        .map(|line| line.trim().to_owned())
        .collect()
}

fn flags(args: &[&str]) -> Result<KubeletFlags, clap::Error> {
    let command = KubeletFlags::augment_args(Command::new("run"));
    let matches =
        command.try_get_matches_from(std::iter::once("run").chain(args.iter().copied()))?;
    KubeletFlags::from_arg_matches(&matches)
}

fn run(args: &[&str]) -> Result<(AgentConfig, Vec<Warning>), ConfigError> {
    let mut all = vec!["--hostname-override=n1"];
    all.extend(args);
    resolve(&flags(&all).unwrap())
}

#[test]
fn defaults_are_upstreams() {
    let (config, warnings) = run(&[]).unwrap();
    assert_eq!(warnings, []);
    let k = &config.kubelet;
    assert_eq!(k.sync_frequency, Duration::from_secs(60));
    assert_eq!(k.file_check_frequency, Duration::from_secs(20));
    assert_eq!(k.runtime_request_timeout, Duration::from_secs(120));
    assert_eq!(k.http_check_frequency, Duration::from_secs(20));
    assert_eq!(k.cpu_cfs_quota_period, Duration::from_millis(100));
    assert_eq!(k.max_container_restart_period, Duration::from_secs(300));
    assert_eq!((k.event_record_qps, k.event_burst), (50, 100));
    assert_eq!(k.container_log_max_size, 10 << 20);
    assert_eq!(k.container_log_max_files, 5);
    assert_eq!(k.container_log_max_workers, 1);
    assert_eq!(k.container_log_monitor_interval, Duration::from_secs(10));
    assert_eq!(k.max_parallel_image_pulls, None);
    assert_eq!(
        (k.logging.format, k.logging.verbosity),
        (LogFormat::Text, 0)
    );
    assert_eq!(
        (k.cgroup_root.as_str(), k.cluster_domain.as_str()),
        ("", "")
    );
    assert_eq!(k.max_pods, 110);
    assert_eq!(k.pod_pids_limit, None);
    assert!(k.serialize_image_pulls && k.cgroups_per_qos && k.cpu_cfs_quota);
    assert!(!k.fail_cgroup_v1, "the documented deviation");
    assert_eq!(k.cgroup_driver, CgroupDriver::Cgroupfs);
    assert_eq!(
        k.resolv_conf.as_deref(),
        Some(Path::new("/etc/resolv.conf"))
    );
    assert_eq!(config.root_dir, Path::new("/var/lib/kubelet"));
    assert_eq!(config.pods_dir(), Path::new("/var/lib/kubelet/pods"));
    assert_eq!(config.state_dir, Path::new("/var/lib/holdfast"));
    assert_eq!(
        config.admin_socket(),
        Path::new("/var/lib/holdfast/holdfast.sock")
    );
    assert_eq!(config.pod_logs_dir(), Path::new("/var/log/pods"));
    assert_eq!(config.container_logs_dir, Path::new("/var/log/containers"));
    assert_eq!(
        config.runtime_endpoint.to_string(),
        "unix:///run/containerd/containerd.sock"
    );
    assert_eq!(config.image_endpoint, config.runtime_endpoint);
    assert_eq!(
        config.healthz_address().unwrap().to_string(),
        "127.0.0.1:10248"
    );
    assert_eq!(config.offline_start, OfflineStart::Safe);
    assert_eq!(config.image_pull_policy_fallback, PullFallback::Never);
    assert_eq!(config.back_off_early_end, BackOffEarlyEnd::Enabled);
    assert_eq!(config.device_readiness, DeviceReadiness::Fail);
    assert!(!config.streaming_requires_create);
    assert_eq!(config.container_gc.max_per_container, Some(1));
    assert_eq!(config.container_gc.max_total, None);
}

#[test]
fn typo_names_file_line_field_and_suggestion() {
    let files = Files::new();
    assert_eq!(
        files.errors("maxPods: 50\nsyncFrequncy: 10s\nlogging:\n  verbosty: 2\nMaxPods: 1\n"),
        [
            "DIR/config.yaml:4:1: syncFrequncy: unknown field; did you mean \"syncFrequency\"?",
            "DIR/config.yaml:6:3: logging.verbosty: unknown field; did you mean \"verbosity\"?",
            "DIR/config.yaml:7:1: MaxPods: unknown field; did you mean \"maxPods\"?",
        ]
    );
}

#[test]
fn a_field_of_a_newer_release_is_warned_about_by_name_and_place() {
    let files = Files::new();
    let path = files.config(
        "c.yaml",
        "maxPods: 50\nquantumManagerPolicy: static\nlogging: {verbosity: 2, color: [a, {b: c}]}\n\
         registerWithTaints: [{key: a, effect: NoSchedule, expiresAfter: 1h}]\n\
         authentication: {webhook: {enabled: false}, oidc: {issuer: {url: https://x}}}\n",
    );
    files.config("d/x.conf", "futureThing: null\n");
    let loaded = load::load(Some(&path), Some(&files.path("d"))).unwrap();
    let told: Vec<_> = loaded
        .warnings
        .iter()
        .map(|warning| {
            let text = files.plain(&warning.to_string());
            let place = text.strip_suffix(
                ": is not a field of Kubernetes 1.36, which this version knows, and has no effect",
            );
            place.unwrap_or(&text).to_owned()
        })
        .collect();
    assert_eq!(
        told,
        [
            "DIR/c.yaml:4:1: quantumManagerPolicy",
            "DIR/c.yaml:5:25: logging.color",
            "DIR/c.yaml:6:51: registerWithTaints[0].expiresAfter",
            "DIR/c.yaml:7:45: authentication.oidc",
            "DIR/d/x.conf:3:1: futureThing",
        ]
    );
    // What stands beside it counts.
    let config = loaded.config;
    assert_eq!((config.max_pods, config.logging.verbosity), (50, 2));
    assert_eq!(config.register_with_taints[0].effect, "NoSchedule");
    assert!(!config.authentication.webhook);
}

#[test]
fn the_fields_are_of_the_release_that_the_node_reports() {
    let release = format!("v{}.", holdfast::kubeletconfig::fields::RELEASE);
    assert!(holdfast::core::node_status::KUBELET_VERSION.starts_with(&release));
}

#[test]
fn wrong_types_are_reported_together_at_their_values() {
    let files = Files::new();
    assert_eq!(
        files.errors(
            "maxPods: many\nsyncFrequency: 20\nclusterDNS: 10.0.0.1\nfailSwapOn: maybe\n\
             evictionHard:\n  memory.available: 5\nserializeImagePulls: [true]\n"
        ),
        [
            "DIR/config.yaml:3:10: maxPods: expected a whole number, found the string \"many\"",
            "DIR/config.yaml:4:16: syncFrequency: expected a duration, like \"20s\", found the number 20",
            "DIR/config.yaml:5:13: clusterDNS: expected a list of strings, found the string \"10.0.0.1\"",
            "DIR/config.yaml:6:13: failSwapOn: expected true or false, found the string \"maybe\"",
            "DIR/config.yaml:8:21: evictionHard.memory.available: expected a string, found the number 5",
            "DIR/config.yaml:9:22: serializeImagePulls: expected true or false, found a list",
        ]
    );
}

#[test]
fn numbers_must_fit_their_type_and_are_told_about_once() {
    let files = Files::new();
    assert_eq!(
        files.errors(
            "maxPods: 3000000000\nport: -3000000000\nmaxOpenFiles: 3000000000\n\
             userNamespaces: {idsPerPod: 9223372036854775808}\nlogging: {verbosity: -1}\n\
             tlsCurvePreferences: [23, X25519]\nkubeAPIQPS: 1.5\n"
        ),
        [
            "DIR/config.yaml:3:10: maxPods: is 3000000000, expected a whole number from -2147483648 to 2147483647",
            "DIR/config.yaml:4:7: port: is -3000000000, expected a whole number from -2147483648 to 2147483647",
            "DIR/config.yaml:6:29: userNamespaces.idsPerPod: is 9223372036854775808, expected a whole number from -9223372036854775808 to 9223372036854775807",
            "DIR/config.yaml:7:22: logging.verbosity: is -1, expected a whole number from 0 to 4294967295",
            "DIR/config.yaml:8:27: tlsCurvePreferences[1]: expected a whole number, found the string \"X25519\"",
            "DIR/config.yaml:9:13: kubeAPIQPS: expected a whole number, found the number 1.5",
        ]
    );
    for ids in ["0", "65535", "65537", "4294901760"] {
        assert_eq!(
            files.errors(&format!("userNamespaces: {{idsPerPod: {ids}}}\n")),
            [format!(
                "DIR/config.yaml:3:29: userNamespaces.idsPerPod: is {ids}, expected a multiple of 65536 from 65536 to 4294836224"
            )]
        );
    }
    assert_eq!(
        files.errors("logging: {verbosity: 2147483648}\n"),
        ["DIR/config.yaml:3:22: logging.verbosity: is 2147483648, allowed are 0 to 2147483647"]
    );
}

#[test]
fn objects_in_lists_are_checked_too() {
    let files = Files::new();
    assert_eq!(
        files.errors(
            "registerWithTaints:\n- {key: a, efect: NoSchedule}\n- dedicated\n\
             reservedMemory:\n- numaNode: zero\n  limits: {memory: 1Gi, hugepages-1Gi: 2, cpu: many}\n\
             logging:\n  flushFrequency: often\n  vmodule: [{filePattern: a, verbosity: high}]\n  \
             options: {json: {infoBufferSize: true}, text: {splitSteam: true}}\n\
             shutdownGracePeriodByPodPriority: [{priority: 1, shutdownGracePeriodSecond: 10}]\n"
        ),
        [
            "DIR/config.yaml:4:12: registerWithTaints[0].efect: unknown field; did you mean \"effect\"?",
            "DIR/config.yaml:5:3: registerWithTaints[1]: expected an object, found the string \"dedicated\"",
            "DIR/config.yaml:7:13: reservedMemory[0].numaNode: expected a whole number, found the string \"zero\"",
            "DIR/config.yaml:8:48: reservedMemory[0].limits.cpu: \"many\" is not a quantity; write it like \"1Gi\", \"500M\" or \"1048576\"",
            "DIR/config.yaml:10:19: logging.flushFrequency: \"often\" is not a duration; write it like \"20s\", \"1m30s\" or \"2h\"",
            "DIR/config.yaml:11:41: logging.vmodule[0].verbosity: expected a whole number, found the string \"high\"",
            "DIR/config.yaml:12:36: logging.options.json.infoBufferSize: expected a quantity, like \"1Gi\", found the boolean true",
            "DIR/config.yaml:12:50: logging.options.text.splitSteam: unknown field; did you mean \"splitStream\"?",
            "DIR/config.yaml:13:50: shutdownGracePeriodByPodPriority[0].shutdownGracePeriodSecond: unknown field; did you mean \"shutdownGracePeriodSeconds\"?",
            "DIR/config.yaml:8:48: reservedMemory: \"cpu\" cannot be reserved on a NUMA node; possible are memory and hugepages-<size>",
        ]
    );
    let path = files.config(
        "good.yaml",
        "registerWithTaints: [{key: a, value: b, effect: NoSchedule, timeAdded: null}]\n\
         logging: {flushFrequency: 7000000000, options: {json: {infoBufferSize: 1}}}\n\
         reservedMemory: [{numaNode: 0, limits: {memory: 1Gi, hugepages-2Mi: 64}}]\n",
    );
    let warned: Vec<_> = load::load(Some(&path), None)
        .unwrap()
        .warnings
        .into_iter()
        .map(|warning| warning.field)
        .collect();
    assert_eq!(
        warned,
        [
            "logging.flushFrequency",
            "logging.options.json.infoBufferSize",
            "reservedMemory",
        ],
        "a list is warned about as a whole"
    );
}

#[test]
fn odd_values_mean_what_they_mean_upstream() {
    let files = Files::new();
    for (body, limit) in [
        ("podPidsLimit: -5\n", None),
        ("podPidsLimit: 0\n", None),
        ("podPidsLimit: 7\n", Some(7)),
        ("podPidsLimit: null\n", None),
    ] {
        let path = files.config("c.yaml", body);
        let config = load::load(Some(&path), None).unwrap().config;
        assert_eq!(config.pod_pids_limit, limit, "{body}");
    }
    let path = files.config(
        "c.yaml",
        "eventBurst: 0\neventRecordQPS: 0\nmaxPods: 0\npodLogsDir: logs/../x\n",
    );
    let config = load::load(Some(&path), None).unwrap().config;
    assert_eq!((config.event_burst, config.event_record_qps), (100, 0));
    assert_eq!(config.max_pods, 110);
    assert_eq!(config.pod_logs_dir, files.path("x"), "below the file's");
}

#[test]
fn values_out_of_range_name_value_and_range() {
    let files = Files::new();
    assert_eq!(
        files.errors(
            "cpuCFSQuotaPeriod: 2s\nhealthzPort: 70000\nmaxPods: -1\ncontainerLogMaxFiles: 1\n\
             crashLoopBackOff:\n  maxContainerRestartPeriod: 10m\npodLogsDir: /logs/../x\n\
             cgroupDriver: systemdd\nmaxParallelImagePulls: 3\nserializeImagePulls: true\n\
             staticPodURL: ftp://x\nclusterDNS: [10.0.0.10, nope]\nclusterDomain: No!\n\
             syncFrequency: 5 minutes\n"
        ),
        [
            "DIR/config.yaml:16:16: syncFrequency: \"5 minutes\" is not a duration; write it like \"20s\", \"1m30s\" or \"2h\"",
            "DIR/config.yaml:4:14: healthzPort: is 70000, expected a port from 1 to 65535, or 0 to turn it off",
            "DIR/config.yaml:5:10: maxPods: is -1, expected a number from 0 (which means 110)",
            "DIR/config.yaml:10:15: cgroupDriver: \"systemdd\" is neither \"cgroupfs\" nor \"systemd\"",
            "DIR/config.yaml:14:25: clusterDNS: \"nope\" is not an IP address",
            "DIR/config.yaml:3:20: cpuCFSQuotaPeriod: is 2s, allowed are 1ms to 1s",
            "DIR/config.yaml:8:30: crashLoopBackOff.maxContainerRestartPeriod: is 10m0s, allowed are 1s to 5m0s",
            "DIR/config.yaml:11:24: maxParallelImagePulls: is 3, but serializeImagePulls is true, which allows only 1; set it to false",
            "DIR/config.yaml:6:23: containerLogMaxFiles: is 1, expected a number of files, at least 2",
            "DIR/config.yaml:9:13: podLogsDir: is \"/logs/../x\", expected an absolute path without \".\", \"..\" or double slashes",
            "DIR/config.yaml:13:15: staticPodURL: is \"ftp://x\", expected a URL like \"http://host:port/path\" or \"https://…\"",
            "DIR/config.yaml:15:16: clusterDomain: is \"No!\", expected a DNS name like \"cluster.local\"",
        ]
    );
}

#[test]
fn log_rotation_is_configured_and_checked() {
    let files = Files::new();
    let path = files.config(
        "c.yaml",
        "containerLogMaxSize: 5Mi\ncontainerLogMaxFiles: 3\ncontainerLogMaxWorkers: 4\n\
         containerLogMonitorInterval: 5s\n",
    );
    let loaded = load::load(Some(&path), None).unwrap();
    assert!(loaded.warnings.is_empty());
    let k = &loaded.config;
    assert_eq!(k.container_log_max_size, 5 << 20);
    assert_eq!(
        (k.container_log_max_files, k.container_log_max_workers),
        (3, 4)
    );
    assert_eq!(k.container_log_monitor_interval, Duration::from_secs(5));
    assert_eq!(
        files.errors("containerLogMaxWorkers: 0\ncontainerLogMonitorInterval: 2s\n"),
        [
            "DIR/config.yaml:4:30: containerLogMonitorInterval: is 2s, allowed are 3s to 24h0m0s",
            "DIR/config.yaml:3:25: containerLogMaxWorkers: is 0, expected a number from 1",
        ]
    );
    let (config, warnings) =
        run(&["--container-log-max-files=3", "--container-log-max-size=-1"]).unwrap();
    assert!(warnings.is_empty());
    assert_eq!(config.kubelet.container_log_max_files, 3);
    assert_eq!(config.kubelet.container_log_max_size, NEVER_ROTATE);
}

#[test]
fn of_a_duplicate_key_the_last_value_counts_with_a_warning() {
    let files = Files::new();
    let path = files.config(
        "config.yaml",
        "maxPods: 50\nauthentication: {anonymous: {enabled: true}, webhook: {enabled: false}}\n\
         registerWithTaints: [{key: a, effect: NoSchedule, key: b}]\n\
         maxPods: 60\nauthentication: {webhook: {enabled: true}}\n",
    );
    let loaded = load::load(Some(&path), None).unwrap();
    assert_eq!(loaded.config.max_pods, 60);
    assert_eq!(loaded.config.register_with_taints[0].key, "b");
    // The first object is gone with all that is in it.
    assert!(!loaded.config.authentication.anonymous);
    let warnings: Vec<_> = loaded.warnings.iter().map(ToString::to_string).collect();
    let warnings: Vec<_> = warnings.iter().map(|text| files.plain(text)).collect();
    let says = |field: &str, line| {
        format!(
            "{field}: is given twice: this value counts, and the one of line {line} does not; keep one of them"
        )
    };
    assert_eq!(
        warnings,
        [
            format!("DIR/config.yaml:6:1: {}", says("maxPods", 3)),
            format!("DIR/config.yaml:7:1: {}", says("authentication", 4)),
            format!(
                "DIR/config.yaml:5:51: {}",
                says("registerWithTaints[0].key", 5)
            ),
        ]
    );
}

#[test]
fn yaml_bomb_is_refused_quickly() {
    let files = Files::new();
    let mut bomb = String::from("a: &a [x,x,x,x,x,x,x,x,x,x]\n");
    for (before, name) in ('a'..='h').zip('b'..='i') {
        let aliases = vec![format!("*{before}"); 10].join(",");
        bomb.push_str(&format!("{name}: &{name} [{aliases}]\n"));
    }
    let start = tokio::time::Instant::now();
    let text = files.errors(&bomb).join("\n");
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
    assert!(text.contains("DIR/config.yaml:"), "{text}");
    assert!(
        text.contains("too many values, aliases or levels"),
        "{text}"
    );
    let nested = files.errors(&format!("maxPods: {}", "[".repeat(10_000)));
    assert!(nested[0].contains("DIR/config.yaml:"), "{nested:?}");
}

#[test]
fn documents_of_another_type_are_refused() {
    let files = Files::new();
    let errors = |text: &str| {
        let path = files.write("c.yaml", text);
        lines(&files.plain(&load::load(Some(&path), None).unwrap_err().to_string()))
    };
    assert_eq!(
        errors("apiVersion: kubelet.config.k8s.io/v1\nkind: Deployment\nspec: {}\n"),
        [
            "DIR/c.yaml:1:13: apiVersion: is the string \"kubelet.config.k8s.io/v1\", expected \"kubelet.config.k8s.io/v1beta1\"",
            "DIR/c.yaml:2:7: kind: is the string \"Deployment\", expected \"KubeletConfiguration\"",
        ]
    );
    assert_eq!(
        errors("maxPods: 5\n"),
        [
            "DIR/c.yaml:1:1: apiVersion: is missing; add \"apiVersion: kubelet.config.k8s.io/v1beta1\"",
            "DIR/c.yaml:1:1: kind: is missing; add \"kind: KubeletConfiguration\"",
        ]
    );
    for empty in ["", "\n\n", "# nothing\n", "---\n"] {
        let text = errors(empty).join("\n");
        assert!(
            text.contains("the file is empty; it needs at least"),
            "{empty:?}: {text}"
        );
    }
    let text = errors("- a\n").join("\n");
    assert!(
        text.contains("expected a KubeletConfiguration object, found a list"),
        "{text}"
    );
    let text = errors(&format!("{HEAD}---\n{HEAD}")).join("\n");
    assert!(text.contains("more than one YAML document"), "{text}");
    let text = errors("a: [1\nb: }\n").join("\n");
    assert!(text.contains("DIR/c.yaml:2:"), "{text}");
    let text = errors(&"#".repeat(1_048_577)).join("\n");
    assert!(text.contains("larger than 1048576 bytes"), "{text}");
    let path = files.path("c.yaml");
    fs::write(&path, [b'a', 0xff]).unwrap();
    let text = load::load(Some(&path), None).unwrap_err().to_string();
    assert!(text.contains("not UTF-8 text (byte 1)"), "{text}");
}

#[test]
fn an_empty_path_is_none_or_the_default_as_with_the_kubelet() {
    for flag in [
        "config",
        "config-dir",
        "kubeconfig",
        "bootstrap-kubeconfig",
        "cert-dir",
        "root-dir",
        "resolv-conf",
        "client-ca-file",
        "tls-cert-file",
        "tls-private-key-file",
        "pod-manifest-path",
        "image-credential-provider-config",
        "image-credential-provider-bin-dir",
        "tls-min-version",
        "tls-curve-preferences",
        "log-file",
        "state-dir",
    ] {
        let (config, _) = run(&[&format!("--{flag}=")]).unwrap_or_else(|e| panic!("{flag}: {e}"));
        assert_eq!(config.kubeconfig, None);
        assert_eq!(config.root_dir, Path::new("/var/lib/kubelet"));
        assert_eq!(config.state_dir, Path::new("/var/lib/holdfast"));
        assert_eq!(config.kubelet.static_pod_path, None);
        assert_eq!(
            config.kubelet.resolv_conf.is_none(),
            flag == "resolv-conf",
            "{flag}"
        );
    }
}

#[test]
fn absent_file_is_named() {
    let files = Files::new();
    let error = run(&["--config", &files.arg("none.yaml")]).unwrap_err();
    assert_eq!(
        files.plain(&error.to_string()),
        "read configuration file DIR/none.yaml"
    );
    let error = run(&["--config-dir", &files.arg("none.d")]).unwrap_err();
    assert_eq!(
        files.plain(&error.to_string()),
        "read drop-in directory DIR/none.d"
    );
}

#[test]
fn json_is_read_too() {
    let files = Files::new();
    let path = files.write(
        "c.json",
        r#"{"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "maxPods": 7, "staticPodURLHeader": {"X-A": ["1", "2"]}, "syncFrequency": "1m30s"}"#,
    );
    let config = load::load(Some(&path), None).unwrap().config;
    assert_eq!(config.max_pods, 7);
    assert_eq!(config.sync_frequency, Duration::from_secs(90));
    assert_eq!(config.static_pod_url_header["X-A"], ["1", "2"]);
}

#[test]
fn drop_ins_win_over_the_file_in_the_order_of_their_names() {
    let files = Files::new();
    let file = files.config(
        "c.yaml",
        "maxPods: 1\nsyncFrequency: 11s\nhttpCheckFrequency: 12s\nclusterDNS: [10.0.0.1, 10.0.0.2]\n\
         staticPodURLHeader: {a: [one], b: [two]}\nlogging: {format: json, verbosity: 3}\n",
    );
    files.config(
        "d/20-last.conf",
        "maxPods: 3\nclusterDNS: [10.0.0.3]\nhttpCheckFrequency: null\n",
    );
    files.config(
        "d/10-first.conf",
        "maxPods: 2\nstaticPodURLHeader: {b: [three]}\nlogging: {verbosity: 5}\n",
    );
    files.write("d/30-ignored.yaml", "not: read");
    let config = load::load(Some(&file), Some(&files.path("d")))
        .unwrap()
        .config;
    assert_eq!(config.max_pods, 3);
    assert_eq!(config.sync_frequency, Duration::from_secs(11), "untouched");
    assert_eq!(
        config.http_check_frequency,
        Duration::from_secs(20),
        "null is the default"
    );
    assert_eq!(
        config.cluster_dns,
        ["10.0.0.3".parse::<std::net::IpAddr>().unwrap()]
    );
    assert_eq!(config.static_pod_url_header["a"], ["one"]);
    assert_eq!(config.static_pod_url_header["b"], ["three"]);
    assert_eq!(config.logging.format, LogFormat::Json);
    assert_eq!(config.logging.verbosity, 5);
}

#[test]
fn broken_drop_in_and_broken_file_are_reported_together() {
    let files = Files::new();
    let file = files.config("c.yaml", "maxPdos: 1\n");
    files.write("d/x.conf", "maxPods: 1\n");
    let error = load::load(Some(&file), Some(&files.path("d"))).unwrap_err();
    let text = files.plain(&error.to_string());
    assert!(
        text.contains("DIR/c.yaml:3:1: maxPdos: unknown field"),
        "{text}"
    );
    assert!(
        text.contains("DIR/d/x.conf:1:1: apiVersion: is missing"),
        "{text}"
    );
}

#[test]
fn flags_win_over_files_only_when_given() {
    let files = Files::new();
    let file = files.config(
        "c.yaml",
        "maxPods: 5\nstaticPodPath: manifests\nserializeImagePulls: false\npodPidsLimit: 99\n\
         staticPodURLHeader: {a: [file]}\nlogging: {verbosity: 2}\nhealthzPort: 1\n",
    );
    files.config("d/x.conf", "maxPods: 6\nhealthzPort: 2\n");
    let (file, dir) = (file.display().to_string(), files.arg("d"));
    let (config, _) = run(&["--config", &file, "--config-dir", &dir]).unwrap();
    assert_eq!(config.kubelet.max_pods, 6);
    assert_eq!(
        config.kubelet.static_pod_path,
        Some(files.path("manifests")),
        "relative to the file"
    );
    assert!(!config.kubelet.serialize_image_pulls);
    assert_eq!(config.kubelet.pod_pids_limit, Some(99));

    let mut args = vec!["--config", &file, "--config-dir", &dir];
    args.extend("--max-pods=8 --serialize-image-pulls --pod-max-pids -1 --v=4".split(' '));
    args.extend("--manifest-url-header a:x,b:y --manifest-url-header=a:z".split(' '));
    args.extend("--healthz-port 0 --pod-manifest-path here".split(' '));
    let (config, warnings) = run(&args).unwrap();
    let warned: Vec<_> = warnings.iter().map(|w| w.field.as_str()).collect();
    assert_eq!(warned, [""; 0]);
    assert_eq!(config.kubelet.max_pods, 8);
    assert!(config.kubelet.serialize_image_pulls);
    assert_eq!(config.kubelet.pod_pids_limit, None);
    let headers = &config.kubelet.static_pod_url_header;
    assert_eq!(headers["a"], ["x", "z"], "the flag replaces the map");
    assert_eq!(headers["b"], ["y"]);
    assert_eq!(config.kubelet.logging.verbosity, 4);
    assert_eq!(config.healthz_address(), None);
    assert_eq!(
        config.kubelet.static_pod_path,
        Some(std::env::current_dir().unwrap().join("here")),
        "relative to the working directory"
    );
}

#[test]
fn several_parallel_pulls_turn_serial_pulls_off_unless_asked_for() {
    let files = Files::new();
    let path = files.config("c.yaml", "maxParallelImagePulls: 3\n");
    let config = load::load(Some(&path), None).unwrap().config;
    assert!(!config.serialize_image_pulls);
}

#[test]
fn fields_without_effect_are_warned_about_by_name_and_place() {
    let files = Files::new();
    let path = files.config(
        "c.yaml",
        "maxPods: 5\nregistryPullQPS: 7\nauthentication:\n  webhook: {enabled: false}\n\
         logging: {format: text, flushFrequency: 7s}\nhairpinMode: none\n",
    );
    let loaded = load::load(Some(&path), None).unwrap();
    let told: Vec<_> = loaded
        .warnings
        .iter()
        .map(|warning| {
            let text = files.plain(&warning.to_string());
            let place = text.strip_suffix(": is not supported in this version and has no effect");
            place.unwrap().to_owned()
        })
        .collect();
    assert_eq!(
        told,
        [
            "DIR/c.yaml:4:1: registryPullQPS",
            "DIR/c.yaml:7:25: logging.flushFrequency",
            "DIR/c.yaml:8:1: hairpinMode",
        ]
    );
}

/// What `kubeadm init` of Kubernetes 1.36 writes to `/var/lib/kubelet/config.yaml`.
const KUBEADM: &str = r#"
authentication:
  anonymous:
    enabled: false
  webhook:
    cacheTTL: 0s
    enabled: true
  x509:
    clientCAFile: /etc/kubernetes/pki/ca.crt
authorization:
  mode: Webhook
  webhook:
    cacheAuthorizedTTL: 0s
    cacheUnauthorizedTTL: 0s
cgroupDriver: systemd
clusterDNS:
- 10.96.0.10
clusterDomain: cluster.local
containerRuntimeEndpoint: ""
cpuManagerReconcilePeriod: 0s
crashLoopBackOff: {}
evictionPressureTransitionPeriod: 0s
fileCheckFrequency: 0s
healthzBindAddress: 127.0.0.1
healthzPort: 10248
httpCheckFrequency: 0s
imageMaximumGCAge: 0s
imageMinimumGCAge: 0s
logging:
  flushFrequency: 0
  options:
    json:
      infoBufferSize: "0"
    text:
      infoBufferSize: "0"
  verbosity: 0
memorySwap: {}
nodeStatusReportFrequency: 0s
nodeStatusUpdateFrequency: 0s
resolvConf: /run/systemd/resolve/resolv.conf
rotateCertificates: true
runtimeRequestTimeout: 0s
shutdownGracePeriod: 0s
shutdownGracePeriodCriticalPods: 0s
staticPodPath: /etc/kubernetes/manifests
streamingConnectionIdleTimeout: 0s
syncFrequency: 0s
volumeStatsAggPeriod: 0s
"#;

#[test]
fn the_file_that_kubeadm_writes_gives_no_warning() {
    let files = Files::new();
    let path = files.config("c.yaml", KUBEADM);
    let loaded = load::load(Some(&path), None).unwrap();
    assert_eq!(loaded.warnings, []);
    let default = KubeletConfiguration::default();
    let k = loaded.config;
    assert_eq!(k.sync_frequency, default.sync_frequency);
    assert_eq!(k.runtime_request_timeout, default.runtime_request_timeout);
    assert_eq!(
        k.node_status_report_frequency,
        default.node_status_report_frequency
    );
    assert!(k.rotate_certificates);
}

#[test]
fn a_field_without_effect_that_is_set_to_its_default_is_not_warned_about() {
    let files = Files::new();
    let warned = |body: &str| -> Vec<String> {
        let path = files.config("c.yaml", body);
        let loaded = load::load(Some(&path), None).unwrap();
        loaded.warnings.into_iter().map(|w| w.field).collect()
    };
    for body in [
        "imageMinimumGCAge: 120s\nimageGCHighThresholdPercent: 85\nimageGCLowThresholdPercent: 80\n",
        "cpuManagerPolicy: none\nmemoryManagerPolicy: None\ntopologyManagerPolicy: none\n",
        "failSwapOn: false\n",
        "failSwapOn: true\nprotectKernelDefaults: false\nmemoryThrottlingFactor: 0.9\n",
        "featureGates: {}\nevictionSoft: {}\nshutdownGracePeriodByPodPriority: []\nkubeletCgroups: \"\"\n",
        "logging: {flushFrequency: 5s, vmodule: []}\nuserNamespaces: {idsPerPod: 65536}\n",
        "logging: {flushFrequency: 5000000000}\nregistryPullQPS: 5\n",
        "contentType: application/vnd.kubernetes.protobuf\nmaxOpenFiles: 1000000\n",
    ] {
        assert_eq!(warned(body), [""; 0], "{body}");
    }
    // Zeros that upstream does not take for the default, and other values.
    for (body, field) in [
        ("registryPullQPS: 0\n", "registryPullQPS"),
        ("volumeStatsAggPeriod: 5m\n", "volumeStatsAggPeriod"),
        ("hairpinMode: none\n", "hairpinMode"),
        ("featureGates: {A: false}\n", "featureGates"),
        ("registryBurst: 3\n", "registryBurst"),
    ] {
        assert_eq!(warned(body), [field], "{body}");
    }
}

#[test]
fn how_the_node_is_shared_is_read_and_contradictions_are_warned_about() {
    use holdfast::kubeletconfig::{MemoryReservation, Reserves, SwapBehavior};
    let files = Files::new();
    let load = |body: &str| load::load(Some(&files.config("c.yaml", body)), None);
    let loaded = load(
        "systemReservedCgroup: /system.slice\nkubeReservedCgroup: /kube\nkubeletCgroups: /agent\n\
         systemCgroups: /system\nqosReserved: {memory: 50%}\nprotectKernelDefaults: true\nfailSwapOn: true\n\
         makeIPTablesUtilChains: false\nmemorySwap: {swapBehavior: LimitedSwap}\n\
         memoryThrottlingFactor: 0.85\nmemoryReservationPolicy: TieredReservation\n\
         enforceNodeAllocatable: [pods, system-reserved, kube-reserved-compressible]\n",
    )
    .unwrap();
    assert_eq!(loaded.warnings, []);
    let wanted = Reserves {
        system_cgroup: Some("/system.slice".to_owned()),
        kube_cgroup: Some("/kube".to_owned()),
        kubelet_cgroups: Some("/agent".to_owned()),
        system_cgroups: Some("/system".to_owned()),
        qos_memory: Some(50),
        protect_kernel_defaults: true,
        fail_swap_on: true,
        make_iptables_util_chains: false,
        controller_attach_detach: true,
        swap: SwapBehavior::LimitedSwap,
        memory_throttling: Some(850_000),
        memory_reservation: MemoryReservation::Tiered,
    };
    assert_eq!(loaded.config.reserves, wanted);
    for (body, field) in [
        (
            "enforceNodeAllocatable: [system-reserved]\n",
            "enforceNodeAllocatable",
        ),
        ("kubeReservedCgroup: /k\n", "kubeReservedCgroup"),
        (
            "qosReserved: {memory: 10%}\ncgroupsPerQOS: false\n",
            "qosReserved",
        ),
        (
            "enableControllerAttachDetach: false\n",
            "enableControllerAttachDetach",
        ),
    ] {
        let warnings = load(body).unwrap().warnings;
        let fields: Vec<_> = warnings.iter().map(|w| w.field.as_str()).collect();
        assert_eq!(fields, [field], "{body}");
    }
    for (body, why) in [
        ("qosReserved: {cpu: 50%}\n", "possible is memory"),
        ("qosReserved: {memory: 101%}\n", "not a percentage"),
        ("memoryThrottlingFactor: 1.5\n", "1 at most"),
        ("memoryThrottlingFactor: 0\n", "more than 0"),
        (
            "memorySwap: {swapBehavior: Some}\n",
            "NoSwap and LimitedSwap",
        ),
        (
            "memoryReservationPolicy: Hard\n",
            "None and TieredReservation",
        ),
        ("systemCgroups: /\n", "are in already"),
    ] {
        let error = load(body).unwrap_err().to_string();
        assert!(error.contains(why), "{body}: {error}");
    }
    let (config, _) = run(&[
        "--qos-reserved=memory=30%",
        "--protect-kernel-defaults",
        "--fail-swap-on",
        "--enable-controller-attach-detach",
        "--system-cgroups=/s",
    ])
    .unwrap();
    let reserves = config.kubelet.reserves;
    assert_eq!(reserves.qos_memory, Some(30));
    assert!(reserves.protect_kernel_defaults && reserves.controller_attach_detach);
    assert!(reserves.fail_swap_on && !Reserves::default().fail_swap_on);
    assert_eq!(reserves.system_cgroups.as_deref(), Some("/s"));
}

#[test]
fn pods_per_core_and_who_ends_when_memory_is_out_are_read() {
    let files = Files::new();
    let read = |body: &str| {
        let path = files.config("c.yaml", body);
        let loaded = load::load(Some(&path), None).unwrap();
        assert_eq!(loaded.warnings, [], "{body}");
        let config = loaded.config;
        (config.pods_per_core, config.single_process_oom_kill)
    };
    assert_eq!(read("maxPods: 5\n"), (0, None));
    assert_eq!(
        read("podsPerCore: 7\nsingleProcessOOMKill: false\n"),
        (7, Some(false))
    );
    assert_eq!(
        read("podsPerCore: 0\nsingleProcessOOMKill: true\n"),
        (0, Some(true))
    );
}

#[test]
fn the_periods_of_a_shutdown_are_read_and_checked() {
    let files = Files::new();
    let path = files.config(
        "c.yaml",
        "shutdownGracePeriod: 30s\nshutdownGracePeriodCriticalPods: 10s\n",
    );
    let loaded = load::load(Some(&path), None).unwrap();
    assert_eq!(loaded.warnings, []);
    assert_eq!(loaded.config.shutdown_grace_period.as_secs(), 30);
    let critical = loaded.config.shutdown_grace_period_critical_pods;
    assert_eq!(critical.as_secs(), 10);

    let path = files.config(
        "c.yaml",
        "shutdownGracePeriodByPodPriority: [{priority: -5, shutdownGracePeriodSeconds: 20}, {priority: 7}]\n",
    );
    let loaded = load::load(Some(&path), None).unwrap();
    assert_eq!(loaded.warnings, []);
    let groups = loaded.config.shutdown_grace_period_by_pod_priority;
    let groups: Vec<_> = groups.iter().map(|g| (g.priority, g.seconds)).collect();
    assert_eq!(groups, [(-5, 20), (7, 0)]);

    for (body, errors) in [
        (
            "shutdownGracePeriod: 500ms\n",
            vec![
                "DIR/config.yaml:3:22: shutdownGracePeriod: is shorter than a second; make it 0s or at least 1s",
            ],
        ),
        (
            "shutdownGracePeriod: 10s\nshutdownGracePeriodCriticalPods: 20s\n",
            vec![
                "DIR/config.yaml:4:34: shutdownGracePeriodCriticalPods: is longer than shutdownGracePeriod, of which it is a part",
            ],
        ),
        (
            "shutdownGracePeriod: 10s\nshutdownGracePeriodByPodPriority: [{priority: 1, shutdownGracePeriodSeconds: 1}]\n",
            vec![
                "DIR/config.yaml:4:35: shutdownGracePeriodByPodPriority: is set beside shutdownGracePeriod; leave one of them out",
            ],
        ),
        (
            "shutdownGracePeriodByPodPriority: [{priority: 1, shutdownGracePeriodSeconds: -1}]\n",
            vec![
                "DIR/config.yaml:3:36: shutdownGracePeriodByPodPriority: shutdownGracePeriodSeconds is -1, allowed are 0 and more",
            ],
        ),
    ] {
        assert_eq!(files.errors(body), errors, "{body}");
    }
}

#[test]
fn flags_without_effect_are_accepted_and_warned_about() {
    let (_, warnings) = run(&[
        "--pod-infra-container-image=registry/pause:3.9",
        "--hairpin-mode=none",
        "--feature-gates",
        "A=true",
        "--iptables-drop-bit=3",
        "--containerd=/run/containerd/containerd.sock",
    ])
    .unwrap();
    let told: Vec<_> = warnings.iter().map(ToString::to_string).collect();
    assert_eq!(
        told,
        [
            "--containerd: is not supported in this version and has no effect",
            "--feature-gates: is not supported in this version and has no effect",
            "--hairpin-mode: is not supported in this version and has no effect",
            "--iptables-drop-bit: was removed upstream in 1.31 and has no effect",
            "--pod-infra-container-image: was removed upstream in 1.35 and has no effect; set the sandbox image in the configuration of the container runtime",
        ]
    );
}

#[test]
fn limits_of_processes_and_events_come_from_flags_without_a_warning() {
    for (args, pids, events) in [
        ("--pod-max-pids=100 --event-qps=0", Some(100), (0, 100)),
        ("--pod-max-pids=0 --event-burst=5", None, (50, 5)),
        ("--event-qps=7 --event-burst=0", None, (7, 100)),
    ] {
        let args: Vec<_> = args.split(' ').collect();
        let (config, warnings) = run(&args).unwrap();
        let k = &config.kubelet;
        assert_eq!(warnings, [], "{args:?}");
        assert_eq!(k.pod_pids_limit, pids, "{args:?}");
        assert_eq!((k.event_record_qps, k.event_burst), events, "{args:?}");
    }
}

#[test]
fn the_oom_score_of_the_agent_comes_from_file_and_flag_without_a_warning() {
    let files = Files::new();
    let file = files.config("c.yaml", "oomScoreAdj: 0\n");
    let file = file.display().to_string();
    for (args, want) in [
        (vec![], -999),
        (vec!["--config", &file], 0),
        (vec!["--config", &file, "--oom-score-adj=-1000"], -1000),
        (vec!["--oom-score-adj", "-5"], -5),
    ] {
        let (config, warnings) = run(&args).unwrap();
        assert_eq!(warnings, [], "{args:?}");
        assert_eq!(config.kubelet.oom_score_adj, want, "{args:?}");
    }
    assert_eq!(
        files.errors("oomScoreAdj: 1001\n"),
        ["DIR/config.yaml:3:14: oomScoreAdj: is 1001, expected a number from -1000 to 1000"]
    );
}

#[test]
fn a_seccomp_default_comes_from_file_and_flag_without_a_warning() {
    let files = Files::new();
    let file = files.config("c.yaml", "seccompDefault: true\n");
    let file = file.display().to_string();
    for (args, want) in [
        (vec![], false),
        (vec!["--config", &file], true),
        (vec!["--config", &file, "--seccomp-default=false"], false),
        (vec!["--seccomp-default"], true),
    ] {
        let (config, warnings) = run(&args).unwrap();
        assert_eq!(warnings, [], "{args:?}");
        assert_eq!(config.kubelet.seccomp_default, want, "{args:?}");
    }
}

#[test]
fn a_process_limit_without_pod_cgroups_is_warned_about_where_it_was_set() {
    let files = Files::new();
    let file = files.config("c.yaml", "podPidsLimit: 9\ncgroupsPerQOS: false\n");
    let told = |warnings: Vec<Warning>| -> Vec<_> {
        let texts = warnings.iter().map(|w| files.plain(&w.to_string()));
        texts.collect()
    };
    let why = "has no effect while cgroupsPerQOS is false: pods have no cgroup of their own";
    let loaded = load::load(Some(&file), None).unwrap();
    assert_eq!(
        told(loaded.warnings),
        [format!("DIR/c.yaml:3:15: podPidsLimit: {why}")]
    );
    let (_, warnings) = run(&["--pod-max-pids=9", "--cgroups-per-qos=false"]).unwrap();
    assert_eq!(
        told(warnings),
        [format!("--pod-max-pids: podPidsLimit: {why}")]
    );
    let (_, warnings) = run(&["--pod-max-pids=-1", "--cgroups-per-qos=false"]).unwrap();
    assert_eq!(told(warnings), [""; 0]);
}

#[test]
fn bad_flag_values_are_reported_with_the_flag() {
    let error = run(&[
        "--container-runtime-endpoint=tcp://1.2.3.4:5",
        "--image-service-endpoint=run/x.sock",
        "--bootstrap-kubeconfig=/etc/bootstrap",
        "--lifeline-kubeconfig=/etc/lifeline",
        "--max-pods=0",
        "--node-ip=10.0.0.1,10.0.0.2",
        "--hostname-override=Bad_Name",
        "--cpu-cfs-quota-period=2s",
    ])
    .unwrap_err();
    let socket = "expected a unix socket like \"unix:///run/containerd/containerd.sock\"";
    assert_eq!(
        lines(&error.to_string()),
        [
            "--max-pods: is 0, expected a number from 1".to_owned(),
            "--bootstrap-kubeconfig: needs --kubeconfig, the file that is written when the node has its certificate".to_owned(),
            "--lifeline-kubeconfig: needs --kubeconfig: it replaces the certificate of that file when it has expired".to_owned(),
            "--cpu-cfs-quota-period: cpuCFSQuotaPeriod: is 2s, allowed are 1ms to 1s".to_owned(),
            "--hostname-override: \"Bad_Name\" is not a node name: it must be a DNS name of lowercase letters, digits, \"-\" and \".\"".to_owned(),
            "--node-ip: expected one address, or one IPv4 and one IPv6 address".to_owned(),
            format!("--container-runtime-endpoint: containerRuntimeEndpoint: is \"tcp://1.2.3.4:5\", but \"tcp\" endpoints are not supported; {socket}"),
            format!("--image-service-endpoint: imageServiceEndpoint: is \"run/x.sock\", which is not an absolute path; {socket}"),
        ]
    );
}

#[test]
fn too_long_state_dir_is_refused_before_the_socket_fails() {
    let dir = format!("/tmp/{}", "x".repeat(100));
    let text = run(&["--state-dir", &dir]).unwrap_err().to_string();
    assert!(text.contains("--state-dir: is too long"), "{text}");
}

#[test]
fn node_name_is_trimmed_and_lowercase() {
    let flags = flags(&["--hostname-override", " Node-1.Example "]).unwrap();
    assert_eq!(resolve(&flags).unwrap().0.node_name, "node-1.example");
}

#[test]
fn an_ipv4_address_of_the_node_is_written_as_one() {
    for (given, node_ips) in [
        ("::ffff:10.0.0.1", &["10.0.0.1"][..]),
        ("fd00::1,::ffff:10.0.0.1", &["fd00::1", "10.0.0.1"]),
        ("fd00:0::0:1", &["fd00::1"]),
    ] {
        let flags = flags(&["--node-ip", given]).unwrap();
        let ips = resolve(&flags).unwrap().0.node_ips;
        let ips: Vec<String> = ips.iter().map(ToString::to_string).collect();
        assert_eq!(ips, node_ips, "{given}");
    }
    // As with the kubelet, what is none keeps no node from starting: a unit file did not fill in a variable.
    for (given, left) in [("${NODE_IP:-}", &[][..]), ("x,10.0.0.1", &["10.0.0.1"])] {
        let (config, warnings) = run(&["--node-ip", given]).unwrap();
        let ips: Vec<String> = config.node_ips.iter().map(ToString::to_string).collect();
        assert_eq!(ips, left, "{given}");
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        let text = warnings[0].to_string();
        assert!(
            text.contains("--node-ip") && text.contains("is not an IP address; it is ignored"),
            "{text}"
        );
    }
    for (wrong, why) in [
        ("10.0.0.1,::ffff:10.0.0.2", "one IPv4 and one IPv6 address"),
        ("0.0.0.0,fd00::1", "name both"),
        ("10.0.0.1,::", "name both"),
    ] {
        let error = run(&["--node-ip", wrong]).unwrap_err().to_string();
        assert!(
            error.contains("--node-ip") && error.contains(why),
            "{wrong}: {error}"
        );
    }
}

#[test]
fn booleans_repeats_and_short_flags_follow_pflag() {
    assert_eq!(flags(&["--runonce"]).unwrap().runonce, Some(true));
    assert_eq!(flags(&["--runonce=F"]).unwrap().runonce, Some(false));
    assert_eq!(flags(&[]).unwrap().runonce, None);
    assert!(flags(&["--runonce=maybe"]).is_err());
    assert!(
        flags(&["--runonce", "false"]).is_err(),
        "as with pflag, = is needed"
    );
    assert_eq!(run(&["-v", "2"]).unwrap().0.kubelet.logging.verbosity, 2);
    assert_eq!(run(&["-v=3"]).unwrap().0.kubelet.logging.verbosity, 3);
    assert_eq!(run(&["-v3"]).unwrap().0.kubelet.logging.verbosity, 3);
    let (twice, _) = run(&["--max-pods=1", "--max-pods=2"]).unwrap();
    assert_eq!(twice.kubelet.max_pods, 2, "the last one wins");
    let (config, _) = run(&[
        "--cluster-dns=10.0.0.1",
        "--cluster-dns=10.0.0.2,10.0.0.3",
        "--node-labels=a=1,b=2",
        "--node-labels=b=3,c",
    ])
    .unwrap();
    assert_eq!(config.kubelet.cluster_dns.len(), 3, "lists add up");
    let labels: Vec<_> = config.node_labels.iter().collect();
    let labels: Vec<_> = labels.iter().map(|(k, v)| format!("{k}={v}")).collect();
    assert_eq!(labels, ["a=1", "b=3", "c="], "maps add up");
    assert!(flags(&["--node-labels==x"]).is_err());
    let unknown = flags(&["--max-pod=1"]).unwrap_err().to_string();
    assert!(unknown.contains("'--max-pods'"), "suggests: {unknown}");
    let bad = flags(&["--sync-frequency=5"]).unwrap_err().to_string();
    assert!(bad.contains("has no unit"), "{bad}");
}

#[test]
fn examples_load_without_problems_or_warnings() {
    let mut count = 0;
    for entry in fs::read_dir("examples/config").unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ext| ext == "yaml") {
            let loaded = load::load(Some(&path), None).unwrap();
            assert_eq!(loaded.warnings, [], "{}", path.display());
            count += 1;
        }
    }
    assert!(count > 0, "there are examples");
}

#[test]
fn the_complete_example_has_every_supported_field_with_its_default() {
    let path = Path::new("examples/config/complete.yaml");
    let text = fs::read_to_string(path).unwrap();
    let loaded = load::load(Some(path), None).unwrap().config;
    let default = KubeletConfiguration {
        static_pod_path: Some("/etc/kubernetes/manifests".into()),
        cgroup_root: "/".to_owned(),
        ..KubeletConfiguration::default()
    };
    assert_eq!(loaded, default, "what counts in it is the default");

    // A line `#name: …` is an example, a line `# …` prose.
    let example = |line: &str| {
        let rest = line.strip_prefix('#')?;
        let more = rest.starts_with("  ") || rest.starts_with("- ");
        let key = rest.starts_with(|c: char| c.is_ascii_lowercase());
        (more || key).then(|| rest.to_owned())
    };
    let lines: Vec<String> = text
        .lines()
        .map(|line| example(line).unwrap_or_else(|| line.to_owned()))
        .collect();
    let mut names = Vec::new();
    field_names("", FIELDS, &mut names);
    for (name, _, supported) in names {
        let last = name.rsplit('.').next().unwrap();
        let named = lines
            .iter()
            .any(|line| line.contains(&format!("{last}:")) && !line.starts_with("# "));
        assert!(
            named || !supported,
            "{} lacks {name}, which has an effect",
            path.display()
        );
    }
    // All examples at once are right, too; those that have no effect give warnings.
    let dir = tempfile::tempdir().unwrap();
    let all = dir.path().join("all.yaml");
    fs::write(&all, lines.join("\n")).unwrap();
    load::load(Some(&all), None).unwrap();
}

/// The dotted names of all fields that hold a value, with their types and whether they are supported.
fn field_names(prefix: &str, fields: &[Field], into: &mut Vec<(String, Kind, bool)>) {
    for field in fields {
        let path = format!("{prefix}{}", field.name);
        match field.kind {
            Kind::Object(inner) => field_names(&format!("{path}."), inner, into),
            kind => into.push((path, kind, field.support == Support::Supported)),
        }
    }
}

/// The type's name in the list of upstream's fields.
fn type_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Bool => "bool",
        Kind::Int32 => "int32",
        Kind::Uint32 => "uint32",
        Kind::Int64 => "int64",
        Kind::Number => "number",
        Kind::String => "string",
        Kind::Duration => "duration",
        Kind::DurationOrNanos => "duration-or-nanoseconds",
        Kind::Quantity => "quantity",
        Kind::Strings => "string-list",
        Kind::Ints => "int32-list",
        Kind::StringMap => "string-map",
        Kind::StringsMap => "map-of-string-lists",
        Kind::BoolMap => "bool-map",
        Kind::QuantityMap => "quantity-map",
        Kind::Objects(_) | Kind::Object(_) => panic!("has fields of its own"),
    }
}

/// The lines of a list, without its comments.
fn listed(text: &str) -> Vec<String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(str::to_owned).collect()
}

#[test]
fn the_fields_are_upstreams() {
    fn fields(prefix: &str, fields_of: &[Field], into: &mut Vec<String>) {
        for field in fields_of {
            let path = format!("{prefix}{}", field.name);
            match field.kind {
                Kind::Object(inner) => fields(&format!("{path}."), inner, into),
                Kind::Objects(inner) => fields(&format!("{path}[]."), inner, into),
                kind => into.push(format!("{path} {}", type_name(kind))),
            }
        }
    }
    let mut ours = Vec::new();
    fields("", FIELDS, &mut ours);
    let upstreams = listed(include_str!("kubeletconfig/kubelet-1.36-fields.txt"));
    assert_eq!(ours, upstreams);
}

#[test]
fn the_flags_are_upstreams_and_a_few_of_our_own() {
    const OWN: [&str; 10] = [
        "state-dir",
        "log-file",
        "container-logs-dir",
        "offline-start",
        "image-pull-policy-fallback",
        "back-off-early-end",
        "device-readiness",
        "secrets-key-file",
        "lifeline-kubeconfig",
        "streaming-requires-create",
    ];
    let command = KubeletFlags::augment_args(Command::new("run"));
    let line = |arg: &Arg| {
        let name = arg.get_long().unwrap();
        // Only a boolean may stand without a value.
        let optional = arg
            .get_num_args()
            .is_some_and(|range| range.min_values() == 0);
        let takes = if optional { "bool" } else { "value" };
        let unsupported = UNSUPPORTED_FLAGS.iter().find(|flag| flag.name == name);
        match unsupported.map(|flag| flag.effect) {
            Some(Effect::Removed { release, .. }) => format!("{name} {takes} removed-in-{release}"),
            _ => format!("{name} {takes}"),
        }
    };
    let mut command = command;
    command.build();
    let mut ours: Vec<_> = command
        .get_arguments()
        .filter(|arg| {
            let name = arg.get_long().unwrap_or("help");
            name != "help" && !OWN.contains(&name)
        })
        .map(line)
        .collect();
    ours.sort_by(|a, b| a.split(' ').next().cmp(&b.split(' ').next()));
    let upstreams = listed(include_str!("kubeletconfig/kubelet-1.36-flags.txt"));
    assert_eq!(ours, upstreams);
}

/// `HOLDFAST_UPDATE_DOCS=1 cargo test --test kubeletconfig` writes the tables of `docs/configuration.md` anew.
#[test]
fn the_tables_of_the_documentation_are_those_of_the_fields() {
    let path = "docs/configuration.md";
    let mut page = fs::read_to_string(path).unwrap();
    let mut stale = Vec::new();
    for (name, table) in tables() {
        let begin = format!("<!-- begin of the table: {name} -->\n");
        let end = format!("<!-- end of the table: {name} -->\n");
        let (head, rest) = page.split_once(&begin).unwrap();
        let (written, tail) = rest.split_once(&end).unwrap();
        if written.trim() != table.trim() {
            stale.push(name);
        }
        page = format!("{head}{begin}\n{table}{end}{tail}");
    }
    if std::env::var_os("HOLDFAST_UPDATE_DOCS").is_some() {
        fs::write(path, page).unwrap();
        return;
    }
    assert!(
        stale.is_empty(),
        "the tables {stale:?} of {path} are not those of src/kubeletconfig/table.rs; \
         HOLDFAST_UPDATE_DOCS=1 cargo test --test kubeletconfig writes them anew"
    );
}

#[test]
fn documentation_lists_every_field_and_flag_with_its_support() {
    let text = fs::read_to_string("docs/configuration.md").unwrap();
    let row = |name: &str| {
        let start = format!("| `{name}` |");
        text.lines().find(|line| line.starts_with(&start))
    };
    let mut fields = Vec::new();
    field_names("", FIELDS, &mut fields);
    assert!(fields.len() > 120);
    let mut wrong = Vec::new();
    for (name, kind, supported) in &fields {
        let typed = format!("| `{name}` | {} |", kind.words());
        match row(name) {
            Some(line) if line.contains("not yet") != *supported && line.starts_with(&typed) => {}
            _ => wrong.push(name.clone()),
        }
    }
    let known = |name: &str| fields.iter().any(|(field, ..)| field == name);
    let section = text.split_once("## Fields").unwrap().1;
    let section = section.split_once("## Flags").unwrap().0;
    for line in section.lines() {
        let name = line
            .strip_prefix("| `")
            .and_then(|rest| rest.split_once('`'));
        if let Some((name, _)) = name.filter(|(name, _)| !known(name)) {
            wrong.push(format!("{name} (does not exist)"));
        }
    }
    let command = KubeletFlags::augment_args(Command::new("run"));
    for name in command.get_arguments().filter_map(|arg| arg.get_long()) {
        let without_effect = UNSUPPORTED_FLAGS.iter().any(|flag| flag.name == name);
        let listed = if without_effect {
            text.contains(&format!("`--{name}`"))
        } else {
            row(&format!("--{name}")).is_some()
        };
        if !listed {
            wrong.push(format!("--{name}"));
        }
    }
    for name in text.split('`').filter_map(|word| word.strip_prefix("--")) {
        let name = name.split(['=', ' ']).next().unwrap();
        if name == "flag" {
            continue; // stands for any flag
        }
        if !command
            .get_arguments()
            .any(|arg| arg.get_long() == Some(name))
        {
            wrong.push(format!("--{name} (does not exist)"));
        }
    }
    assert!(
        wrong.is_empty(),
        "docs/configuration.md lacks or misstates {wrong:?}"
    );
}

#[test]
fn settings_of_the_cluster_have_upstreams_defaults() {
    let (config, _) = run(&[]).unwrap();
    let k = &config.kubelet;
    assert_eq!((k.port, k.kube_api_qps, k.kube_api_burst), (10250, 50, 100));
    assert_eq!(k.node_status_update_frequency, Duration::from_secs(10));
    assert_eq!(k.node_status_report_frequency, Duration::from_secs(300));
    assert_eq!(k.node_lease_duration_seconds, 40);
    assert_eq!(k.node_status_max_images, Some(50));
    assert!(k.register_node && !k.rotate_certificates);
    assert_eq!(k.enforce_node_allocatable, ["pods"]);
    let thresholds: Vec<_> = k
        .eviction_hard
        .iter()
        .map(|(s, t)| format!("{s} {t:?}"))
        .collect();
    assert_eq!(
        thresholds,
        [
            "imagefs.available Fraction(0.15)",
            "imagefs.inodesFree Fraction(0.05)",
            "memory.available Quantity(104857600)",
            "nodefs.available Fraction(0.1)",
            "nodefs.inodesFree Fraction(0.05)",
        ]
    );
    assert_eq!(config.kubeconfig, None);
    assert_eq!(config.cert_dir, Path::new("/var/lib/kubelet/pki"));
    assert!(!config.external_cloud_provider);
}

#[test]
fn of_two_frequencies_of_reports_the_one_that_is_zero_has_a_default() {
    for (given, update, report) in [
        (
            "nodeStatusUpdateFrequency: 5s\nnodeStatusReportFrequency: 0s\n",
            5,
            5,
        ),
        ("nodeStatusUpdateFrequency: 0s\n", 10, 300),
        (
            "nodeStatusUpdateFrequency: 0s\nnodeStatusReportFrequency: 0s\n",
            10,
            300,
        ),
        (
            "nodeStatusUpdateFrequency: 5s\nnodeStatusReportFrequency: 60s\n",
            5,
            60,
        ),
        ("nodeStatusReportFrequency: 60s\n", 10, 60),
    ] {
        let files = Files::new();
        let file = files.config("c.yaml", given);
        let (config, _) = run(&["--config", &file.display().to_string()]).unwrap();
        let k = &config.kubelet;
        let found = (
            k.node_status_update_frequency,
            k.node_status_report_frequency,
        );
        let wanted = (Duration::from_secs(update), Duration::from_secs(report));
        assert_eq!(found, wanted, "{given}");
    }
}

#[test]
fn settings_of_the_cluster_come_from_files_and_flags() {
    let files = Files::new();
    let file = files.config(
        "c.yaml",
        "kubeAPIQPS: 0\nkubeAPIBurst: 7\nnodeStatusUpdateFrequency: 5s\nnodeStatusMaxImages: -1\n\
         nodeLeaseDurationSeconds: 20\nrotateCertificates: true\nregisterNode: false\nproviderID: p://1\n\
         evictionHard: {memory.available: 1Gi, nodefs.available: 5%, pid.available: 100%}\n\
         systemReserved: {cpu: 250m, memory: 64Mi}\nkubeReserved: {pid: \"100\"}\n\
         registerWithTaints: [{key: a/b, value: c, effect: NoExecute}]\nallowedUnsafeSysctls: [net.core.*]\n\
         enforceNodeAllocatable: []\n",
    );
    files.config(
        "d/x.conf",
        "evictionHard: {nodefs.available: null, nodefs.inodesFree: 1%}\n",
    );
    let (file, dir) = (file.display().to_string(), files.arg("d"));
    let (config, warnings) = run(&["--config", &file, "--config-dir", &dir]).unwrap();
    assert_eq!(warnings, []);
    let k = &config.kubelet;
    assert_eq!(
        (k.kube_api_qps, k.kube_api_burst),
        (5, 7),
        "0 is client-go's default"
    );
    assert_eq!(
        k.node_status_report_frequency,
        Duration::from_secs(5),
        "follows the other"
    );
    assert_eq!(
        (k.node_status_max_images, k.node_lease_duration_seconds),
        (None, 20)
    );
    assert!(k.rotate_certificates && !k.register_node);
    assert_eq!(k.provider_id.as_deref(), Some("p://1"));
    assert_eq!(
        k.eviction_hard["memory.available"],
        EvictionThreshold::Quantity(1 << 30)
    );
    assert_eq!(
        k.eviction_hard["pid.available"].of(1000),
        0,
        "100% is no threshold"
    );
    assert_eq!(
        k.eviction_hard["nodefs.inodesFree"].of(1000),
        9,
        "single precision, as upstream"
    );
    assert_eq!(
        k.eviction_hard.len(),
        3,
        "null takes an entry away, defaults are gone"
    );
    assert_eq!(k.system_reserved["cpu"], 250_000_000);
    assert_eq!(k.kube_reserved["pid"], 100_000_000_000);
    assert_eq!(k.register_with_taints[0].effect, "NoExecute");
    assert_eq!(k.enforce_node_allocatable, [""; 0]);

    let mut args = vec![
        "--config",
        &file,
        "--kubeconfig=k",
        "--bootstrap-kubeconfig=/b",
    ];
    args.extend(
        "--root-dir=/r --kube-api-qps=9 --node-status-max-images=-1 --register-node".split(' '),
    );
    args.extend("--system-reserved=cpu=1 --system-reserved=memory=1Ki,pid=2".split(' '));
    args.extend("--eviction-hard=memory.available<2Gi,nodefs.available<10%".split(' '));
    args.extend(
        "--register-with-taints=a=b:NoSchedule,c:NoExecute --cloud-provider=external".split(' '),
    );
    args.extend(
        "--allowed-unsafe-sysctls=net.a,kernel.sem --enforce-node-allocatable=none".split(' '),
    );
    args.extend(
        "--node-labels=node.kubernetes.io/x=y,example.com/z=1 --offline-start=All".split(' '),
    );
    args.push("--back-off-early-end=Disabled");
    let (config, warnings) = run(&args).unwrap();
    assert_eq!(warnings, []);
    let k = &config.kubelet;
    assert_eq!(
        config.kubeconfig,
        Some(std::env::current_dir().unwrap().join("k"))
    );
    assert_eq!(config.back_off_early_end, BackOffEarlyEnd::Disabled);
    assert_eq!(config.cert_dir, Path::new("/r/pki"));
    assert_eq!((k.kube_api_qps, k.kube_api_burst), (9, 7));
    assert_eq!(
        k.system_reserved.len(),
        3,
        "repeats add up, the file's are replaced"
    );
    assert_eq!(k.system_reserved["memory"], 1_024_000_000_000);
    assert_eq!(k.eviction_hard.len(), 2);
    assert_eq!(k.register_with_taints.len(), 2);
    assert!(k.register_node && config.external_cloud_provider);
    assert_eq!(k.allowed_unsafe_sysctls, ["net.a", "kernel.sem"]);

    let merged = files.config(
        "m.yaml",
        "mergeDefaultEvictionSettings: true\nevictionHard: {nodefs.available: 0%}\n",
    );
    let config = load::load(Some(&merged), None).unwrap().config;
    assert_eq!(config.eviction_hard.len(), 5);
    assert_eq!(
        config.eviction_hard["nodefs.available"],
        EvictionThreshold::Quantity(0)
    );
}

#[test]
fn settings_of_the_cluster_are_checked_as_upstream_does() {
    let files = Files::new();
    assert_eq!(
        files.errors(
            "evictionHard: {memory.free: 1Gi}\nsystemReserved: {cpu: -1}\nkubeReserved:\n  gpu: \"1\"\n\
             registerWithTaints: [{key: a, effect: Never}, {key: b, effect: NoExecute, timeAdded: x}]\n\
             nodeStatusMaxImages: -2\nnodeLeaseDurationSeconds: -1\nkubeAPIQPS: -1\nport: 70000\n"
        )
        .iter()
        .map(|line| line.split(';').next().unwrap())
        .collect::<Vec<_>>(),
        [
            "DIR/config.yaml:4:23: systemReserved.cpu: expected a string, found the number -1",
            "DIR/config.yaml:3:29: evictionHard: \"memory.free\" is not an eviction signal",
            "DIR/config.yaml:6:8: kubeReserved: \"gpu\" cannot be reserved",
            "DIR/config.yaml:7:22: registerWithTaints: \"Never\" is not the effect of a taint",
            "DIR/config.yaml:8:22: nodeStatusMaxImages: is -2, expected a number from -1 (which means all)",
            "DIR/config.yaml:10:13: kubeAPIQPS: is -1, expected a number from 0 (which means 5)",
            "DIR/config.yaml:11:7: port: is 70000, expected a port from 1 to 65535, or 0 for the default",
            "DIR/config.yaml:9:27: nodeLeaseDurationSeconds: is -1, expected a number of seconds from 1",
        ]
    );
    for (body, says) in [
        (
            "enforceNodeAllocatable: [pods, none]\n",
            "\"none\" beside others",
        ),
        ("enforceNodeAllocatable: [all]\n", "\"all\" is not known"),
        (
            "allowedUnsafeSysctls: [vm.swappiness]\n",
            "\"vm.swappiness\" is not a sysctl with a namespace",
        ),
        (
            "configMapAndSecretChangeDetectionStrategy: Poll\n",
            "possible are \"Watch\"",
        ),
        (
            "evictionHard: {nodefs.available: 120%}\n",
            "neither a quantity above 0",
        ),
        (
            "registerWithTaints: [{key: a, effect: NoExecute}, {key: a, effect: NoExecute}]\n",
            "a:NoExecute twice",
        ),
    ] {
        let text = files.errors(body).join("\n");
        assert!(text.contains(says), "{body}: {text}");
    }
    for (flag, says) in [
        ("--cloud-provider=aws", "--cloud-provider: is \"aws\""),
        (
            "--node-labels=node-role.kubernetes.io/worker=",
            "nodes may not give themselves",
        ),
        (
            "--node-labels=a.k8s.io/b=c",
            "nodes may not give themselves",
        ),
        ("--node-labels=a=b c", "is not a label's value"),
        ("--node-labels=-a=b", "is not a label's key"),
        (
            "--node-status-max-images=-3",
            "--node-status-max-images: is -3",
        ),
        ("--port=0", "--port: is 0"),
    ] {
        let text = run(&[flag]).unwrap_err().to_string();
        assert!(text.contains(says), "{flag}: {text}");
    }
    for flag in [
        "--eviction-hard=memory.available>1Gi",
        "--system-reserved=gpu=1",
        "--register-with-taints=a",
    ] {
        assert!(flags(&[flag]).is_err(), "{flag}");
    }
}

#[test]
fn settings_of_eviction_come_from_files_and_flags() {
    let files = Files::new();
    let file = files.config(
        "c.yaml",
        "evictionHard: {memory.available: 100Mi}\n\
         evictionSoft: {memory.available: 200Mi, pid.available: 5%, nodefs.available: 100%}\n\
         evictionSoftGracePeriod: {memory.available: 1m30s, pid.available: 0s}\n\
         evictionPressureTransitionPeriod: 30s\nevictionMaxPodGracePeriod: -1\n\
         evictionMinimumReclaim: {memory.available: \"0\", nodefs.available: 1%}\n",
    );
    let file = file.display().to_string();
    let (config, warnings) = run(&["--config", &file]).unwrap();
    assert_eq!(warnings, []);
    let k = &config.kubelet;
    assert_eq!(
        k.eviction_soft["memory.available"],
        EvictionThreshold::Quantity(200 << 20)
    );
    assert_eq!(k.eviction_soft["nodefs.available"].of(1000), 0);
    assert_eq!(
        k.eviction_soft_grace_period["memory.available"],
        Duration::from_secs(90)
    );
    assert_eq!(
        k.eviction_pressure_transition_period,
        Duration::from_secs(30)
    );
    assert_eq!(k.eviction_max_pod_grace_period, -1);
    assert_eq!(k.eviction_minimum_reclaim["memory.available"].of(1), 0);
    let flags = "--eviction-soft=memory.available<1Gi --eviction-soft=pid.available<9 \
         --eviction-soft-grace-period=memory.available=1m,pid.available=2s --eviction-max-pod-grace-period=60 \
         --eviction-minimum-reclaim=imagefs.available=2Gi --eviction-pressure-transition-period=0s";
    let mut args = vec!["--config", &*file];
    args.extend(flags.split_whitespace());
    let (config, warnings) = run(&args).unwrap();
    assert_eq!(warnings, []);
    let k = &config.kubelet;
    assert_eq!(k.eviction_soft.len(), 2, "repeats add up");
    assert_eq!(
        k.eviction_soft_grace_period["pid.available"],
        Duration::from_secs(2)
    );
    assert_eq!(k.eviction_minimum_reclaim.len(), 1);
    assert_eq!(k.eviction_max_pod_grace_period, 60);
    assert_eq!(
        k.eviction_pressure_transition_period,
        Duration::from_secs(30)
    );
}

#[test]
fn settings_of_eviction_are_checked_by_name() {
    let files = Files::new();
    for (body, says) in [
        (
            "evictionSoft: {pid.available: 5%}\n",
            "evictionSoft: \"pid.available\" has no grace period",
        ),
        ("evictionSoft: {memory.free: 1}\n", "evictionSoft"),
        (
            "evictionSoftGracePeriod: {memory.free: 1s}\n",
            "evictionSoftGracePeriod: \"memory.free\" is not an eviction signal",
        ),
        (
            "evictionSoftGracePeriod: {memory.available: -1s}\n",
            "evictionSoftGracePeriod: \"-1s\" is negative",
        ),
        (
            "evictionMinimumReclaim: {memory.available: 101%}\n",
            "evictionMinimumReclaim: \"101%\" is neither",
        ),
        (
            "evictionMinimumReclaim: {memory.available: -1Mi}\n",
            "evictionMinimumReclaim: \"-1Mi\" is neither",
        ),
    ] {
        let text = files.errors(body).join("\n");
        assert!(text.contains(says), "{body}: {text}");
    }
    let path = files.config(
        "c.yaml",
        "evictionHard: {memory.available: 1Gi}\nevictionSoft: {memory.available: 1Mi, containerfs.available: 5%}\n\
         evictionSoftGracePeriod: {memory.available: 1s, containerfs.available: 1s, nodefs.available: 1s}\n",
    );
    let warnings = load::load(Some(&path), None).unwrap().warnings;
    let told: Vec<_> = warnings.iter().map(|w| w.field.as_str()).collect();
    assert_eq!(
        told,
        ["evictionSoft", "evictionSoftGracePeriod", "evictionSoft"]
    );
    for flag in [
        "--eviction-soft=memory.available",
        "--eviction-soft-grace-period=memory.available=x",
        "--eviction-minimum-reclaim=memory.free=1",
    ] {
        assert!(flags(&[flag]).is_err(), "{flag}");
    }
}

#[test]
fn settings_of_the_resource_managers_come_from_files_and_flags() {
    let files = Files::new();
    let file = files.config(
        "c.yaml",
        "cpuManagerPolicy: static\ncpuManagerPolicyOptions: {full-pcpus-only: \"true\"}\n\
         cpuManagerReconcilePeriod: 5s\nkubeReserved: {cpu: 500m, memory: 1Gi}\nsystemReserved: {cpu: 700m}\n\
         topologyManagerPolicy: best-effort\ntopologyManagerScope: pod\n\
         topologyManagerPolicyOptions: {max-allowable-numa-nodes: \"16\", prefer-closest-numa-nodes: \"1\"}\n\
         memoryManagerPolicy: Static\nreservedMemory: [{numaNode: 1, limits: {memory: 1100Mi}}]\n",
    );
    let file = file.display().to_string();
    let (config, warnings) = run(&["--config", &file]).unwrap();
    assert_eq!(warnings, []);
    let k = &config.kubelet;
    assert!(k.cpu_options().full_cores && !k.cpu_options().across_nodes);
    assert_eq!(k.reserved_cpus(), 2, "1200m rounded up");
    let topology = k.topology_options();
    assert!(topology.closest && topology.max_nodes == 16);
    assert_eq!(k.cpu_manager_reconcile_period, Duration::from_secs(5));
    assert_eq!(k.reserved_memory[0].limits["memory"], 1100 << 20);
    let flags = "--reserved-cpus=0-1,4 --cpu-manager-policy-options=full-pcpus-only=false \
         --cpu-manager-policy-options=distribute-cpus-across-numa=true --topology-manager-policy=single-numa-node \
         --topology-manager-scope=container --reserved-memory=0:memory=1Gi,hugepages-2Mi=2Mi;1:memory=2Gi \
         --cpu-manager-reconcile-period=0s --topology-manager-policy-options=max-allowable-numa-nodes=8";
    let mut args = vec!["--config", &*file];
    args.extend(flags.split_whitespace());
    let (config, warnings) = run(&args).unwrap();
    assert_eq!(warnings, []);
    let k = &config.kubelet;
    assert!(!k.cpu_options().full_cores && k.cpu_options().across_nodes);
    assert_eq!(k.reserved_system_cpus.to_string(), "0-1,4");
    assert_eq!(k.reserved_cpus(), 3, "replaces both reservations");
    assert_eq!(k.kube_reserved.get("cpu"), None);
    assert_eq!(k.kube_reserved["memory"], 1_000_000_000 << 30);
    assert_eq!(k.reserved_memory.len(), 2);
    assert_eq!(k.cpu_manager_reconcile_period, Duration::from_secs(5));
    let shown = (k.topology_manager_policy, k.topology_manager_scope);
    assert_eq!(
        (shown.0.to_string(), shown.1.to_string()),
        ("single-numa-node".to_owned(), "container".to_owned())
    );
}

#[test]
fn settings_of_the_resource_managers_are_checked_as_upstream_does() {
    let files = Files::new();
    let fixed = "cpuManagerPolicy: static\nreservedSystemCPUs: \"0\"\n";
    for (body, says) in [
        (
            "cpuManagerPolicy: dynamic\n",
            "cpuManagerPolicy: \"dynamic\" is not a policy",
        ),
        (
            "cpuManagerPolicy: static\n",
            "cpuManagerPolicy: is static, which needs CPUs",
        ),
        (
            "cpuManagerPolicyOptions: {full-pcpus-only: \"true\"}\n",
            "the policy none has no options",
        ),
        (
            "reservedSystemCPUs: 3-1\n",
            "reservedSystemCPUs: \"3-1\" is not a list of CPUs",
        ),
        (
            "memoryManagerPolicy: Static\n",
            "memoryManagerPolicy: is Static, which needs memory",
        ),
        (
            "topologyManagerPolicy: strict\n",
            "topologyManagerPolicy: \"strict\" is not a policy",
        ),
        (
            "topologyManagerScope: node\n",
            "topologyManagerScope: \"node\" is not a scope",
        ),
        (
            "topologyManagerPolicyOptions: {max-allowable-numa-nodes: \"7\"}\n",
            "max-allowable-numa-nodes is \"7\", expected a number from 8",
        ),
        (
            "topologyManagerPolicyOptions: {closest: \"true\"}\n",
            "\"closest\" is not an option of the topology manager",
        ),
        (
            "reservedMemory: [{numaNode: 0, limits: {memory: 0}}]\n",
            "reservedMemory: memory: \"0\" is not above 0",
        ),
        (
            "reservedMemory: [{numaNode: 0, limits: {memory: 1}}, {numaNode: 0, limits: {memory: 2}}]\n",
            "memory of NUMA node 0 is given twice",
        ),
        (
            "reservedMemory: [{numaNode: 64, limits: {memory: 1}}]\n",
            "numaNode is 64, expected a number from 0 to 63",
        ),
    ] {
        let text = files.errors(body).join("\n");
        assert!(text.contains(says), "{body}: {text}");
    }
    for (options, more, says) in [
        (
            "fast: \"true\"",
            "",
            "\"fast\" is not an option of the CPU manager",
        ),
        (
            "full-pcpus-only: \"yes\"",
            "",
            "full-pcpus-only: \"yes\" is neither",
        ),
        (
            "full-pcpus-only: \"true\", distribute-cpus-across-cores: \"true\"",
            "",
            "full-pcpus-only and distribute-cpus-across-cores exclude",
        ),
        (
            "distribute-cpus-across-numa: \"true\", distribute-cpus-across-cores: \"true\"",
            "",
            "distribute-cpus-across-numa and distribute-cpus-across-cores exclude",
        ),
        (
            "distribute-cpus-across-numa: \"true\", prefer-align-cpus-by-uncorecache: \"true\"",
            "",
            "prefer-align-cpus-by-uncorecache and distribute-cpus-across-numa exclude",
        ),
        (
            "align-by-socket: \"true\"",
            "topologyManagerPolicy: single-numa-node\n",
            "align-by-socket and the policy single-numa-node",
        ),
    ] {
        let body = format!("{fixed}{more}cpuManagerPolicyOptions: {{{options}}}\n");
        let text = files.errors(&body).join("\n");
        assert!(text.contains(says), "{body}: {text}");
    }
}

#[test]
fn what_the_cluster_settings_cannot_do_is_warned_about() {
    let files = Files::new();
    let path = files.config(
        "c.yaml",
        "contentType: application/cbor\nenforceNodeAllocatable: [pods, kube-reserved]\n\
         configMapAndSecretChangeDetectionStrategy: Cache\n",
    );
    let told: Vec<_> = load::load(Some(&path), None)
        .unwrap()
        .warnings
        .iter()
        .map(|warning| files.plain(&warning.to_string()))
        .collect();
    assert_eq!(
        told,
        [
            "DIR/c.yaml:3:14: contentType: is \"application/cbor\", but the API server is spoken to in application/json",
            "DIR/c.yaml:5:44: configMapAndSecretChangeDetectionStrategy: is \"Cache\", but configMaps and secrets are watched",
            "DIR/c.yaml:4:25: enforceNodeAllocatable: \"kube-reserved\" needs kubeReservedCgroup, which is not set: nothing is held to it",
        ]
    );
}

#[test]
fn settings_of_the_api_have_upstreams_defaults() {
    let (config, _) = run(&["--kubeconfig=/k"]).unwrap();
    let k = &config.kubelet;
    assert_eq!(
        config.server_address().unwrap().to_string(),
        "0.0.0.0:10250"
    );
    assert_eq!(config.read_only_address(), None);
    assert!(k.authentication.webhook && !k.authentication.anonymous);
    assert_eq!(k.authentication.webhook_cache_ttl, Duration::from_secs(120));
    assert_eq!(k.authorization.mode, AuthorizationMode::Webhook);
    assert_eq!(
        k.authorization.cache_authorized_ttl,
        Duration::from_secs(300)
    );
    assert_eq!(
        k.authorization.cache_unauthorized_ttl,
        Duration::from_secs(30)
    );
    assert_eq!(
        k.streaming_connection_idle_timeout,
        Duration::from_secs(4 * 3600)
    );
    assert!(k.enable_debugging_handlers && k.enable_profiling_handler);
    assert!(k.enable_debug_flags_handler && k.enable_system_log_handler);
    assert!(!k.enable_system_log_query && !k.server_tls_bootstrap);
    assert_eq!(k.tls_min_version, TlsVersion::Tls12);
}

#[test]
fn settings_of_the_api_come_from_files_and_flags() {
    let files = Files::new();
    let path = files.config(
        "c.yaml",
        "address: \"::\"\nport: 11250\nreadOnlyPort: 10255\ntlsCertFile: a.crt\ntlsPrivateKeyFile: a.key\n\
         tlsMinVersion: VersionTLS13\nauthentication: {x509: {clientCAFile: ca.crt}, webhook: {enabled: false, cacheTTL: 5s}, anonymous: {enabled: true}}\n\
         authorization: {mode: AlwaysAllow, webhook: {cacheAuthorizedTTL: 7s, cacheUnauthorizedTTL: 0s}}\n\
         streamingConnectionIdleTimeout: 0s\nenableSystemLogQuery: true\ntlsCurvePreferences: [24, 23]\n",
    );
    let file = path.display().to_string();
    let (config, warnings) = run(&["--config", &file]).unwrap();
    assert_eq!(warnings, []);
    let k = &config.kubelet;
    assert_eq!(config.server_address().unwrap().to_string(), "[::]:11250");
    assert_eq!(
        config.read_only_address().unwrap().to_string(),
        "[::]:10255"
    );
    assert_eq!(k.tls_cert_file, Some(files.path("a.crt")));
    assert_eq!(k.tls_private_key_file, Some(files.path("a.key")));
    assert_eq!(k.authentication.client_ca_file, Some(files.path("ca.crt")));
    assert!(!k.authentication.webhook && k.authentication.anonymous);
    assert_eq!(k.authentication.webhook_cache_ttl, Duration::from_secs(5));
    assert_eq!(k.authorization.cache_authorized_ttl, Duration::from_secs(7));
    assert_eq!(
        k.authorization.cache_unauthorized_ttl,
        Duration::from_secs(30),
        "0s is the default"
    );
    assert_eq!(
        k.streaming_connection_idle_timeout,
        Duration::from_secs(4 * 3600)
    );
    assert!(k.enable_system_log_query);
    assert_eq!(k.tls_curve_preferences, [24, 23]);

    let (config, _) = run(&[
        "--config",
        &file,
        "--enable-server=false",
        "--anonymous-auth=false",
        "--authorization-mode=Webhook",
        "--streaming-connection-idle-timeout=0",
        "--tls-cipher-suites=TLS_AES_128_GCM_SHA256,TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305",
        "--tls-curve-preferences=29,23",
    ])
    .unwrap();
    assert_eq!(config.kubelet.tls_curve_preferences, [29, 23]);
    assert_eq!(
        (config.server_address(), config.read_only_address()),
        (None, None)
    );
    assert!(!config.kubelet.authentication.anonymous);
    assert_eq!(
        config.kubelet.streaming_connection_idle_timeout,
        Duration::ZERO
    );
    assert_eq!(
        config.kubelet.tls_cipher_suites,
        ["TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256"]
    );
}

#[test]
fn a_null_section_of_a_drop_in_puts_its_fields_back() {
    let files = Files::new();
    let path = files.config(
        "c.yaml",
        "authentication: {webhook: {enabled: false}, anonymous: {enabled: true}}\nauthorization: {mode: AlwaysAllow}\n",
    );
    let dir = files.path("d");
    files.config(
        "d/1.conf",
        "authentication: {webhook: null}\nauthorization: null\n",
    );
    let loaded = load::load(Some(&path), Some(&dir)).unwrap();
    assert!(loaded.config.authentication.webhook);
    assert!(loaded.config.authentication.anonymous, "not named");
    assert_eq!(loaded.config.authorization.mode, AuthorizationMode::Webhook);
}

#[test]
fn without_an_api_server_the_api_is_served_only_where_somebody_can_be_let_in() {
    let open = |args: &[&str]| run(args).unwrap().0;
    let locked = open(&[]);
    assert_eq!(locked.server_address(), None);
    assert!(locked.server_locked().unwrap().contains("--kubeconfig"));
    let unknown = open(&["--authorization-mode=AlwaysAllow"]);
    assert_eq!(unknown.server_address(), None);
    assert!(unknown.server_locked().unwrap().contains("clientCAFile"));
    for more in ["--client-ca-file=/ca", "--anonymous-auth"] {
        let config = open(&["--authorization-mode=AlwaysAllow", more]);
        assert!(config.server_address().is_some(), "{more}");
    }
}

#[test]
fn mistakes_in_the_settings_of_the_api_are_told() {
    let files = Files::new();
    assert_eq!(
        files.errors(
            "readOnlyPort: 10250\ntlsCertFile: a\nenableSystemLogQuery: true\nenableSystemLogHandler: false\n\
             authorization: {mode: RBAC}\ntlsCipherSuites: [TLS_NOTHING]\ntlsMinVersion: \"1.2\"\naddress: here\n\
             tlsCurvePreferences: [22, 23]\n"
        ),
        [
            "DIR/config.yaml:7:23: authorization.mode: \"RBAC\" is neither \"AlwaysAllow\" nor \"Webhook\"",
            "DIR/config.yaml:9:16: tlsMinVersion: \"1.2\" is neither \"VersionTLS12\" nor \"VersionTLS13\", nor one of the older versions",
            "DIR/config.yaml:10:10: address: \"here\" is not an IP address",
            "DIR/config.yaml:3:15: readOnlyPort: is 10250, and so is port; choose another",
            "DIR/config.yaml:4:14: tlsCertFile: needs tlsPrivateKeyFile too",
            "DIR/config.yaml:8:18: tlsCipherSuites: \"TLS_NOTHING\" is not a cipher suite; possible are TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384, TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
            "DIR/config.yaml:11:22: tlsCurvePreferences: 22 is not the number of a group for key exchange; possible are 23 (P-256), 24 (P-384) and 29 (X25519)",
            "DIR/config.yaml:5:23: enableSystemLogQuery: is true, but enableSystemLogHandler is false; set that to true",
        ]
    );
    let only_weak = run(&["--tls-cipher-suites=TLS_RSA_WITH_AES_128_CBC_SHA"]).unwrap_err();
    assert!(only_weak.to_string().contains("has none that can be used"));
    let only_others = run(&["--tls-curve-preferences=25"]).unwrap_err();
    assert!(
        only_others
            .to_string()
            .contains("tlsCurvePreferences: has none that can be used")
    );
    let (config, warnings) = run(&["--tls-curve-preferences=4588,29"]).unwrap();
    assert_eq!(config.kubelet.tls_curve_preferences, [29]);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let (config, warnings) = run(&[
        "--tls-cipher-suites=TLS_RSA_WITH_AES_128_CBC_SHA,TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
        "--tls-min-version=VersionTLS10",
    ])
    .unwrap();
    assert_eq!(config.kubelet.tls_cipher_suites.len(), 1);
    assert_eq!(warnings.len(), 2, "{warnings:?}");
}
