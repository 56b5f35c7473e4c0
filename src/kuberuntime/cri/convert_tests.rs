use super::*;

fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs
        .iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
        .collect()
}

#[test]
fn attempt_comes_from_the_annotation_and_else_from_the_metadata() {
    let metadata = v1::ContainerMetadata {
        name: "web".to_owned(),
        attempt: 3,
    };
    let annotated = map(&[(labels::CONTAINER_RESTART_COUNT, "7")]);
    assert_eq!(attempt(&annotated, Some(&metadata)), 7);
    let broken = map(&[(labels::CONTAINER_RESTART_COUNT, "many")]);
    assert_eq!(attempt(&broken, Some(&metadata)), 3);
    assert_eq!(attempt(&HashMap::new(), None), 0);
}

#[test]
fn sandbox_shows_all_its_addresses_unless_it_uses_the_nodes_network() {
    let status = |mode: v1::NamespaceMode| v1::PodSandboxStatus {
        network: Some(v1::PodSandboxNetworkStatus {
            ip: "10.0.0.2".to_owned(),
            additional_ips: vec![v1::PodIp {
                ip: "fd00::2".to_owned(),
            }],
        }),
        linux: Some(v1::LinuxPodSandboxStatus {
            namespaces: Some(v1::Namespace {
                options: Some(v1::NamespaceOption {
                    network: mode as i32,
                    ..Default::default()
                }),
            }),
        }),
        ..Default::default()
    };
    let own = inspected_sandbox(&status(v1::NamespaceMode::Pod));
    assert_eq!(own.ips, ["10.0.0.2", "fd00::2"]);
    assert_eq!(own.host_network, Some(false));
    let shared = inspected_sandbox(&status(v1::NamespaceMode::Node));
    assert!(shared.ips.is_empty());
    assert_eq!(shared.host_network, Some(true));
}

#[test]
fn what_has_no_pod_label_belongs_to_somebody_else() {
    let mut pods = BTreeMap::new();
    assert!(pod_of(&mut pods, &map(&[])).is_none());
    assert!(pod_of(&mut pods, &map(&[(labels::POD_UID, "")])).is_none());
    assert!(pods.is_empty());
    let labels = map(&[(labels::POD_UID, "u"), (labels::POD_NAME, "web")]);
    assert_eq!(pod_of(&mut pods, &labels).unwrap().name, "web");
}

#[test]
fn a_start_that_was_cut_off_before_its_process_was_made_has_not_run() {
    let exited = |message: &str, started_at: i64| v1::ContainerStatus {
        id: "c".to_owned(),
        state: v1::ContainerState::ContainerExited as i32,
        exit_code: 128,
        reason: "StartError".to_owned(),
        message: message.to_owned(),
        started_at,
        finished_at: 5,
        annotations: map(&[(labels::CONTAINER_HASH, "abc")]),
        ..Default::default()
    };
    let state = |message, started_at| {
        let shown = inspected_container(&exited(message, started_at), "s".into());
        (shown.state, shown.hash)
    };
    let cut =
        "failed to create containerd task: failed to create shim task: context canceled: unknown";
    assert_eq!(state(cut, 0), (ContainerState::Created, String::new()));
    // It ran, or may have run, or failed by itself.
    let ended = (ContainerState::Exited, "abc".to_owned());
    assert_eq!(state(cut, 3), ended);
    assert_eq!(
        state("failed to start containerd task: context canceled", 0),
        ended
    );
    assert_eq!(
        state(
            "failed to create containerd task: exec: \"x\": not found",
            0
        ),
        ended
    );
}
