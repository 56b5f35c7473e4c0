use serde_json::json;

use super::*;

fn pod(container: serde_json::Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "shop", "uid": "u1", "deletionGracePeriodSeconds": 5},
        "spec": {
            "terminationGracePeriodSeconds": 20,
            "hostAliases": [{"ip": "1.2.3.4", "hostnames": ["foo", "bar"]}],
            "volumes": [
                {"name": "v", "emptyDir": {}},
                {"name": "node", "hostPath": {"path": "/node"}},
                {"name": "data", "image": {"reference": "data:1"}},
            ],
            "containers": [container],
        },
    }))
    .unwrap()
}

fn config(container: serde_json::Value) -> Result<v1::ContainerConfig, ConfigError> {
    config_on(container, &NodeContext::new("n", "/r"))
}

fn config_on(
    container: serde_json::Value,
    ctx: &NodeContext,
) -> Result<v1::ContainerConfig, ConfigError> {
    config_with(container, &BTreeMap::new(), ctx).map(|config| config.message)
}

fn config_with(
    container: serde_json::Value,
    remotes: &BTreeMap<String, Remote>,
    ctx: &NodeContext,
) -> Result<ContainerConfig, ConfigError> {
    config_of(container, remotes, &BTreeSet::new(), ctx)
}

fn config_of(
    container: serde_json::Value,
    remotes: &BTreeMap<String, Remote>,
    without_labels: &BTreeSet<String>,
    ctx: &NodeContext,
) -> Result<ContainerConfig, ConfigError> {
    let pod = pod(container);
    let volumes = BTreeMap::from([
        ("v".to_owned(), PathBuf::from("/host/v")),
        ("node".to_owned(), PathBuf::from("/node")),
    ]);
    let files = ContainerFiles {
        hosts: Some("/r/pods/u1/etc-hosts".into()),
        termination_log: Some("/r/pods/u1/containers/c/00000002".into()),
    };
    let sub_paths = BTreeMap::from([(1, PathBuf::from("/r/pods/u1/volume-subpaths/v/c/1"))]);
    let env = env::make_env(
        &env::EnvInputs {
            pod: &pod,
            container: &pod.containers()[0],
            pod_ips: &["10.0.0.2".to_owned()],
            sources: &crate::kuberuntime::sources::Sources {
                services: Some(Vec::new()),
                ..Default::default()
            },
        },
        ctx,
    )
    .unwrap();
    build(
        &ContainerInputs {
            pod: &pod,
            container: &pod.containers()[0],
            attempt: 2,
            hash: "abc",
            image_ref: "sha256:1",
            env: &env,
            volumes: &volumes,
            remotes,
            sub_paths: &sub_paths,
            without_labels,
            recursive_read_only: false,
            files: &files,
            isolation: Isolation::default(),
        },
        ctx,
    )
}

#[test]
fn a_container_gets_the_groups_of_its_pods_volumes() {
    let remote = json!({"name": "pv", "claim": "ns/c", "mode": "Filesystem", "read_only": false,
        "mount_options": [], "unique_name": null, "terms": {"gid": 5123, "alone": false},
        "source": {"Nfs": {"path": "/", "server": "s"}}});
    let remotes = BTreeMap::from([("x".to_owned(), serde_json::from_value(remote).unwrap())]);
    let container = json!({"name": "c", "image": "busybox"});
    let config = config_with(container, &remotes, &NodeContext::new("n", "/r")).unwrap();
    let security = config.message.linux.unwrap().security_context.unwrap();
    assert_eq!(security.supplemental_groups, [5123]);
}

#[test]
fn a_container_is_what_its_spec_says() {
    let container = json!({
        "name": "c", "image": "busybox",
        "command": ["sh", "-c", "echo $(A) $$(A) $(NO)"], "args": ["$(A)"],
        "workingDir": "/w", "tty": true, "stdin": true,
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)2"}],
        "ports": [{"containerPort": 80, "name": "http"}],
        "volumeMounts": [{"name": "v", "mountPath": "data", "readOnly": true, "mountPropagation": "HostToContainer"}],
    });
    let built = config_with(container, &BTreeMap::new(), &NodeContext::new("n", "/r")).unwrap();
    let (config, envs) = (built.message, built.envs);
    assert_eq!(config.command, ["sh", "-c", "echo 1 $(A) $(NO)"]);
    assert_eq!(config.args, ["1"]);
    assert_eq!(envs[1].1, b"12");
    assert_eq!(config.working_dir, "/w");
    assert_eq!(
        (config.stdin, config.stdin_once, config.tty),
        (true, false, true)
    );
    assert_eq!(config.log_path, "c/2.log");
    let image = config.image.unwrap();
    assert_eq!(
        (image.image.as_str(), image.user_specified_image.as_str()),
        ("sha256:1", "busybox")
    );
    let mounts: Vec<_> = config
        .mounts
        .iter()
        .map(|m| {
            (
                m.container_path.as_str(),
                m.host_path.as_str(),
                m.readonly,
                m.propagation,
            )
        })
        .collect();
    assert_eq!(
        mounts,
        [
            ("/data", "/host/v", true, 1),
            ("/etc/hosts", "/r/pods/u1/etc-hosts", false, 0),
            (
                "/dev/termination-log",
                "/r/pods/u1/containers/c/00000002",
                false,
                0
            ),
        ]
    );
}

#[test]
fn with_selinux_what_the_agent_makes_is_labelled_and_what_is_the_nodes_is_not() {
    let container = json!({"name": "c", "volumeMounts": [
        {"name": "v", "mountPath": "/v"},
        {"name": "node", "mountPath": "/node"},
        {"name": "data", "mountPath": "/data"},
    ]});
    let mut ctx = NodeContext::new("n", "/r");
    for selinux in [false, true] {
        ctx.selinux = selinux;
        let config = config_on(container.clone(), &ctx).unwrap();
        let labelled: Vec<_> = config
            .mounts
            .iter()
            .map(|m| (m.container_path.as_str(), m.selinux_relabel))
            .collect();
        assert_eq!(
            labelled,
            [
                ("/v", selinux),
                ("/node", false),
                ("/etc/hosts", selinux),
                ("/dev/termination-log", selinux),
            ],
            "the mount of an image is not made here"
        );
    }
    // The kernel refuses labels of files that have none.
    let without = BTreeSet::from(["v".to_owned()]);
    let config = config_of(container, &BTreeMap::new(), &without, &ctx).unwrap();
    assert!(!config.message.mounts[0].selinux_relabel);
}

#[test]
fn stop_signals_are_given_to_the_runtime_or_refused_with_the_reason() {
    for (signal, os, want) in [
        ("SIGUSR1", "linux", Ok(29)),
        ("SIGRTMIN+3", "linux", Ok(38)),
        ("SIGRTMAX", "linux", Ok(65)),
        ("SIGUSR1", "", Err("spec.os.name: linux")),
        ("SIGRTMIN+16", "linux", Err("no such signal")),
        ("USR1", "linux", Err("no such signal")),
        ("SIGNOT", "linux", Err("no such signal")),
    ] {
        let container = json!({"name": "c", "lifecycle": {"stopSignal": signal}});
        let mut pod = pod(container);
        if !os.is_empty() {
            pod.spec.as_mut().unwrap().os = serde_json::from_value(json!({"name": os})).unwrap();
        }
        let got = stop_signal(&pod, &pod.containers()[0]).map_err(|e| e.to_string());
        match (got, want) {
            (Ok(number), Ok(want)) => assert_eq!(number, want, "{signal}"),
            (Err(error), Err(want)) => assert!(error.contains(want), "{signal}: {error}"),
            (got, _) => panic!("{signal}: {got:?}"),
        }
    }
    let without = pod(json!({"name": "c"}));
    assert_eq!(stop_signal(&without, &without.containers()[0]).unwrap(), 0);
}

#[test]
fn labels_and_annotations_are_upstreams() {
    let config = config(json!({
        "name": "c", "ports": [{"containerPort": 80}], "terminationMessagePolicy": "FallbackToLogsOnError",
        "lifecycle": {"preStop": {"exec": {"command": ["x"]}}},
    }))
    .unwrap();
    for (key, value) in [
        ("io.kubernetes.container.name", "c"),
        ("io.kubernetes.pod.name", "web"),
        ("io.kubernetes.pod.namespace", "shop"),
        ("io.kubernetes.pod.uid", "u1"),
    ] {
        assert_eq!(config.labels[key], value);
    }
    for (key, value) in [
        ("io.kubernetes.container.hash", "abc"),
        ("io.kubernetes.container.restartCount", "2"),
        (
            "io.kubernetes.container.terminationMessagePath",
            "/dev/termination-log",
        ),
        (
            "io.kubernetes.container.terminationMessagePolicy",
            "FallbackToLogsOnError",
        ),
        ("io.kubernetes.container.ports", r#"[{"containerPort":80}]"#),
        (
            "io.kubernetes.container.preStopHandler",
            r#"{"exec":{"command":["x"]}}"#,
        ),
        ("io.kubernetes.pod.deletionGracePeriod", "5"),
        ("io.kubernetes.pod.terminationGracePeriod", "20"),
    ] {
        assert_eq!(config.annotations[key], value, "{key}");
    }
}

#[test]
fn privileged_containers_see_everything_others_do_not() {
    let security = |privileged: bool| {
        config(json!({"name": "c", "securityContext": {"privileged": privileged}}))
            .unwrap()
            .linux
            .unwrap()
            .security_context
            .unwrap()
    };
    let plain = security(false);
    assert!(plain.masked_paths.contains(&"/proc/kcore".to_owned()));
    assert!(plain.readonly_paths.contains(&"/proc/sys".to_owned()));
    assert_eq!(plain.seccomp.unwrap().profile_type, 1, "Unconfined");
    let privileged = security(true);
    assert!(privileged.privileged && privileged.masked_paths.is_empty());
}

#[test]
fn mounts_that_cannot_be_made_say_why() {
    for (mount, word) in [
        (
            json!({"name": "missing", "mountPath": "/a"}),
            "spec.volumes",
        ),
        (
            json!({"name": "v", "mountPath": "/a", "subPath": "x"}),
            "subPath was not prepared",
        ),
        (json!({"name": "v", "mountPath": "/a:/b"}), "without ':'"),
        (
            json!({"name": "v", "mountPath": "/a", "readOnly": true, "recursiveReadOnly": "Enabled"}),
            "not supported by the runtime",
        ),
        (
            json!({"name": "v", "mountPath": "/a", "mountPropagation": "Bidirectional"}),
            "privileged",
        ),
        (
            json!({"name": "v", "mountPath": "/a", "mountPropagation": "both"}),
            "HostToContainer",
        ),
    ] {
        let error = config(json!({"name": "c", "volumeMounts": [mount]})).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn mounts_keep_their_order_and_parts_of_volumes_are_what_was_bound() {
    let config = config(json!({"name": "c", "workingDir": "/w", "volumeMounts": [
        {"name": "v", "mountPath": "/deep/er/", "readOnly": true, "recursiveReadOnly": "IfPossible"},
        {"name": "v", "mountPath": "part", "subPath": "p"},
        {"name": "node", "mountPath": "/deep"},
    ]}))
    .unwrap();
    let mounts: Vec<_> = config.mounts[..3]
        .iter()
        .map(|m| {
            assert!(!m.recursive_read_only, "the runtime cannot");
            (m.container_path.as_str(), m.host_path.as_str(), m.readonly)
        })
        .collect();
    assert_eq!(
        mounts,
        [
            ("/deep/er/", "/host/v", true),
            ("/part", "/r/pods/u1/volume-subpaths/v/c/1", false),
            ("/deep", "/node", false),
        ]
    );
    assert_eq!(config.devices, []);
}

#[test]
fn files_are_written_for_each_start() {
    let dir = tempfile::tempdir().unwrap();
    let ctx = NodeContext::new("n", dir.path());
    let pod = pod(json!({"name": "c"}));
    let container = &pod.containers()[0];
    let ips = ["10.0.0.2".to_owned(), "fd00::2".to_owned()];
    let files = prepare_files(&pod, container, &ips, &ctx).unwrap();
    let hosts = fs::read_to_string(files.hosts.unwrap()).unwrap();
    assert!(
        hosts.starts_with("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n"),
        "{hosts}"
    );
    assert!(
        hosts.ends_with(
            "10.0.0.2\tweb\nfd00::2\tweb\n\n# Entries added by HostAliases.\n1.2.3.4\tfoo\tbar\n"
        ),
        "{hosts}"
    );
    let log = files.termination_log.unwrap();
    assert_eq!(log, attempt_files::message_path(&ctx, &pod.uid(), "c"));
    fs::write(&log, "said before").unwrap();
    prepare_files(&pod, container, &ips, &ctx).unwrap();
    assert_eq!(
        fs::read_to_string(&log).unwrap(),
        "said before",
        "the message of the attempt before may not be on record yet"
    );
    assert_eq!(
        fs::metadata(&log).unwrap().permissions().mode() & 0o777,
        0o666
    );
}

#[test]
fn a_hosts_file_that_is_right_already_is_never_empty_for_a_moment() {
    let dir = tempfile::tempdir().unwrap();
    let ctx = NodeContext::new("n", dir.path());
    let pod = pod(json!({"name": "c"}));
    let container = &pod.containers()[0];
    let write = |ip: &str| {
        let files = prepare_files(&pod, container, &[ip.to_owned()], &ctx).unwrap();
        files.hosts.unwrap()
    };
    let hosts = write("10.0.0.2");
    let (before, long_ago) = (fs::metadata(&hosts).unwrap(), std::time::UNIX_EPOCH);
    let file = fs::File::options().write(true).open(&hosts).unwrap();
    file.set_modified(long_ago).unwrap();
    write("10.0.0.2");
    let modified = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
    assert_eq!(modified(&hosts), long_ago, "it is not written again");
    write("10.0.0.3");
    assert!(fs::read_to_string(&hosts).unwrap().contains("10.0.0.3"));
    let after = fs::metadata(&hosts).unwrap();
    assert_eq!(after.ino(), before.ino(), "containers have this file");
    fs::set_permissions(&hosts, fs::Permissions::from_mode(0o600)).unwrap();
    write("10.0.0.3");
    let mode = fs::metadata(&hosts).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o644);
}

#[test]
fn a_link_in_place_of_the_message_file_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let ctx = NodeContext::new("n", dir.path());
    let pod = pod(json!({"name": "c"}));
    let secret = dir.path().join("secret");
    fs::write(&secret, "keep").unwrap();
    let path = attempt_files::message_path(&ctx, &pod.uid(), "c");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink(&secret, &path).unwrap();
    assert!(prepare_files(&pod, &pod.containers()[0], &[], &ctx).is_err());
    assert_eq!(fs::read_to_string(&secret).unwrap(), "keep");
}

#[test]
fn a_mount_of_its_own_at_etc_hosts_is_left_alone_and_host_network_copies_the_nodes() {
    let dir = tempfile::tempdir().unwrap();
    let mut ctx = NodeContext::new("n", dir.path());
    ctx.node_hosts_file = dir.path().join("node-hosts");
    // Bytes, not text.
    fs::write(&ctx.node_hosts_file, b"127.0.0.1 node\n# caf\xe9\n").unwrap();
    let mut own =
        pod(json!({"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/etc/hosts"}]}));
    let files = prepare_files(&own, &own.containers()[0], &["1.1.1.1".to_owned()], &ctx).unwrap();
    assert_eq!(files.hosts, None);
    own = pod(json!({"name": "c"}));
    if let Some(spec) = own.spec.as_mut() {
        spec.host_network = Some(true);
    }
    let files = prepare_files(&own, &own.containers()[0], &[], &ctx).unwrap();
    let hosts = fs::read(files.hosts.unwrap()).unwrap();
    assert!(hosts.starts_with(
        b"# Kubernetes-managed hosts file (host network).\n127.0.0.1 node\n# caf\xe9\n"
    ));
}
