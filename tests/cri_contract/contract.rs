//! What every runtime does for the client.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::StreamExt;
use holdfast::kuberuntime::cri::{ContainerConfig, ContainerEventKind, CriErrorKind, v1};
use holdfast::types::runtime::{ContainerState, SandboxState};
use holdfast::types::{ContainerId, PodUid};
use holdfast_testkit::containerd::{BUSYBOX, Version};
use tokio::time::Instant;

use super::world::{UNREACHABLE, World};

/// Handles SIGTERM, runs until then.
const POLITE: &str = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done";
/// Does not care about SIGTERM.
const STUBBORN: &str = "trap '' TERM; while :; do sleep 3600 & wait $!; done";

macro_rules! contracts {
    ($world:ident: $($name:ident),+ $(,)?) => {
        $(
            let start = Instant::now();
            println!("contract: {}", stringify!($name));
            // Boxed: in a debug build the futures of all contracts together outgrow a test's stack.
            Box::pin($name(&$world)).await;
            println!("contract: {} met in {:?}", stringify!($name), start.elapsed());
        )+
    };
}

pub(crate) async fn run(world: World) {
    contracts!(world:
        says_who_and_how_it_is,
        newer_ones_say_what_they_can,
        sandbox_has_an_address_until_it_is_stopped,
        sandbox_on_the_nodes_network_has_no_address,
        same_sandbox_is_not_made_twice,
        container_goes_from_created_to_running_to_exited,
        container_without_its_command_does_not_start,
        variables_need_not_be_text,
        stop_lets_a_polite_container_end_and_kills_a_stubborn_one,
        stopping_and_removing_again_is_no_error,
        what_is_not_there_is_not_found,
        pods_are_listed_with_all_attempts_newest_first,
        commands_run_inside_a_container,
        last_log_lines_become_the_termination_message,
        limits_change_and_logs_reopen_on_a_running_container,
        images_are_listed_and_unknown_ones_are_not_there,
        events_tell_of_containers_where_offered,
    );
}

async fn says_who_and_how_it_is(world: &World) {
    let version = world.cri.version().await.unwrap();
    assert_eq!(version.runtime_api_version, "v1");
    let status = world.cri.status(false).await.unwrap().status.unwrap();
    for condition in ["RuntimeReady", "NetworkReady"] {
        let found = status.conditions.iter().find(|c| c.r#type == condition);
        assert!(found.unwrap().status, "{condition}: {found:?}");
    }
    world.cri.update_runtime_config("").await.unwrap();
}

async fn newer_ones_say_what_they_can(world: &World) {
    let status = world.cri.status(false).await.unwrap();
    let config = world.cri.runtime_config().await.unwrap();
    if world.version != Some(Version::V2) {
        assert_eq!(config, None);
        assert_eq!((status.runtime_handlers, status.features), (vec![], None));
        return;
    }
    let linux = config.and_then(|c| c.linux).unwrap();
    assert_eq!(linux.cgroup_driver(), v1::CgroupDriver::Cgroupfs);
    assert!(status.features.unwrap().supplemental_groups_policy);
    // The default has no name, and its own besides.
    let mut handlers = status.runtime_handlers;
    handlers.sort_by(|a, b| a.name.cmp(&b.name));
    let names: Vec<_> = handlers.iter().map(|h| h.name.as_str()).collect();
    assert_eq!(names, ["", "runc"]);
    for handler in handlers {
        let features = handler.features.unwrap();
        assert!(features.recursive_read_only_mounts, "{features:?}");
    }
}

async fn sandbox_has_an_address_until_it_is_stopped(world: &World) {
    let (pod, _, id) = world.sandbox().await;
    let seen = world.cri.pod_status(&pod.uid, &pod.name, "default").await;
    let seen = seen.unwrap();
    assert_eq!(seen.ips.len(), 1, "{seen:?}");
    assert!(seen.ips[0].starts_with("10."), "{seen:?}");
    assert_eq!(seen.sandboxes[0].host_network, Some(false));

    let permit = world.permit().await;
    world.cri.stop_pod_sandbox(&id, &permit).await.unwrap();
    let seen = world.cri.pod_status(&pod.uid, &pod.name, "default").await;
    let seen = seen.unwrap();
    assert_eq!(seen.sandboxes[0].state, SandboxState::NotReady);
    assert!(seen.ips.is_empty() && seen.ready_sandbox().is_none());

    let intent = world.sandbox_removal(&id).await;
    world.cri.remove_pod_sandbox(&intent).await.unwrap();
    assert!(!world.cri.list_pods().await.unwrap().contains_key(&pod.uid));
}

async fn sandbox_on_the_nodes_network_has_no_address(world: &World) {
    let pod = world.pod();
    let config = pod.sandbox(0, v1::NamespaceMode::Node);
    let id = world.cri.run_pod_sandbox(config, "").await.unwrap();
    let seen = world.cri.pod_status(&pod.uid, &pod.name, "default").await;
    let seen = seen.unwrap();
    assert_eq!(seen.sandboxes[0].host_network, Some(true));
    assert!(seen.ips.is_empty());
    let intent = world.sandbox_removal(&id).await;
    let permit = world.permit().await;
    world.cri.stop_pod_sandbox(&id, &permit).await.unwrap();
    world.cri.remove_pod_sandbox(&intent).await.unwrap();
}

async fn same_sandbox_is_not_made_twice(world: &World) {
    let (pod, config, _) = world.sandbox().await;
    let again = world.cri.run_pod_sandbox(config, "").await.unwrap_err();
    assert!(again.to_string().contains(&pod.name), "{again}");
    assert!(!again.outcome_unknown());
    let pods = world.cri.list_pods().await.unwrap();
    assert_eq!(pods[&pod.uid].sandboxes.len(), 1);
}

async fn container_goes_from_created_to_running_to_exited(world: &World) {
    let (pod, sandbox_config, sandbox) = world.sandbox().await;
    let config = pod.container("main", 3, &["sh", "-c", "echo hello; sleep 1; exit 7"]);
    let log = pod.logs.join(&config.log_path);
    let id = world
        .cri
        .create_container(&sandbox, config, sandbox_config)
        .await
        .unwrap();
    let created = world.cri.container_status(&id).await.unwrap();
    assert_eq!(created.state(), v1::ContainerState::ContainerCreated);

    let intent = world.start_intent(&pod.uid, &id).await;
    world.cri.start_container(&intent).await.unwrap();
    let running = world.cri.container_status(&id).await.unwrap();
    assert_eq!(running.state(), v1::ContainerState::ContainerRunning);
    let twice = world.cri.start_container(&intent).await.unwrap_err();
    assert!(!twice.outcome_unknown(), "{twice}");

    world.exited(&id).await;
    let seen = world.cri.pod_status(&pod.uid, &pod.name, "default").await;
    let seen = seen.unwrap();
    let main = seen.container("main").unwrap();
    assert_eq!(main.id, id);
    assert_eq!(main.sandbox_id, sandbox);
    assert_eq!(main.state, ContainerState::Exited);
    assert_eq!((main.exit_code, main.reason.as_str()), (7, "Error"));
    assert_eq!((main.attempt, main.hash.as_str()), (3, "hash"));
    assert_eq!(main.image, BUSYBOX);
    assert!(main.image_ref.contains("sha256:"), "{}", main.image_ref);
    assert!(main.created_at_ns > 0 && main.started_at_ns >= main.created_at_ns);
    assert!(main.finished_at_ns > main.started_at_ns);
    assert_eq!(main.log_path, log.display().to_string());
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(text.contains("stdout F hello"), "{text}");
}

async fn container_without_its_command_does_not_start(world: &World) {
    let (pod, sandbox_config, sandbox) = world.sandbox().await;
    let config = pod.container("main", 0, &["no-such-command"]);
    let id = world
        .cri
        .create_container(&sandbox, config, sandbox_config)
        .await
        .unwrap();
    let intent = world.start_intent(&pod.uid, &id).await;
    let error = world.cri.start_container(&intent).await.unwrap_err();
    assert!(error.message.contains("no-such-command"), "{error}");
    assert_eq!(error.kind, CriErrorKind::Other);
    let status = world.exited(&id).await;
    assert_eq!(status.exit_code, 128);
    assert_eq!(status.reason, "StartError");
}

async fn variables_need_not_be_text(world: &World) {
    let (pod, sandbox_config, sandbox) = world.sandbox().await;
    let script = "printf 'is %s, %s.\\n' \"$RAW\" \"$TEXT\"";
    let envs = vec![
        ("RAW".to_owned(), b"caf\xe9".to_vec()),
        ("TEXT".to_owned(), "th\u{e9}".into()),
    ];
    let config = ContainerConfig {
        message: pod.container("main", 0, &["sh", "-c", script]),
        envs: envs.clone(),
        ..ContainerConfig::default()
    };
    let log = pod.logs.join(&config.message.log_path);
    let created = world
        .cri
        .create_container(&sandbox, config, sandbox_config)
        .await;
    let id = created.unwrap();
    let intent = world.start_intent(&pod.uid, &id).await;
    world.cri.start_container(&intent).await.unwrap();
    if let Some(fake) = &world.fake {
        assert_eq!(fake.environment(id.as_str()), Some(envs));
        return;
    }
    world.exited(&id).await;
    // containerd hands variables on to runc as JSON, which replaces what is no text.
    let whole = b"is caf\xe9, th\xc3\xa9.\n".as_slice();
    let replaced = "is caf\u{fffd}, th\u{e9}.\n".as_bytes();
    let give_up = Instant::now() + Duration::from_secs(10);
    loop {
        let said = std::fs::read(&log).unwrap_or_default();
        if said.ends_with(whole) || said.ends_with(replaced) {
            return;
        }
        assert!(Instant::now() < give_up, "{}", said.escape_ascii());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn stop_lets_a_polite_container_end_and_kills_a_stubborn_one(world: &World) {
    let permit = world.permit().await;
    let (_, _, polite) = world.run(POLITE).await;
    await_trap(world, &polite).await;
    let start = Instant::now();
    world
        .cri
        .stop_container(&polite, 30, &permit)
        .await
        .unwrap();
    assert!(start.elapsed() < Duration::from_secs(20));
    assert_eq!(world.exited(&polite).await.exit_code, 0);

    // In nanoseconds, more than an int64 has: must not become no time at all.
    let (_, _, patient) = world.run(POLITE).await;
    await_trap(world, &patient).await;
    world
        .cri
        .stop_container(&patient, 10_000_000_000, &permit)
        .await
        .unwrap();
    assert_eq!(world.exited(&patient).await.exit_code, 0);

    let (_, _, stubborn) = world.run(STUBBORN).await;
    await_trap(world, &stubborn).await;
    let start = Instant::now();
    world
        .cri
        .stop_container(&stubborn, 2, &permit)
        .await
        .unwrap();
    assert!(start.elapsed() >= Duration::from_secs(2));
    assert_eq!(world.exited(&stubborn).await.exit_code, 137);

    let (_, _, at_once) = world.run(STUBBORN).await;
    world
        .cri
        .stop_container(&at_once, 0, &permit)
        .await
        .unwrap();
    assert_eq!(world.exited(&at_once).await.exit_code, 137);
}

/// Waits until the shell in the container got past its `trap`: only then does it have a child.
async fn await_trap(world: &World, id: &ContainerId) {
    let script = "until [ -n \"$(cat /proc/1/task/1/children)\" ]; do :; done; exit 0";
    let command = ["sh", "-c", script].map(str::to_owned).to_vec();
    let timeout = Duration::from_secs(10);
    let result = world.cri.exec_sync(id, command, timeout).await.unwrap();
    assert_eq!(result.exit_code, 0, "{result:?}");
}

async fn stopping_and_removing_again_is_no_error(world: &World) {
    let permit = world.permit().await;
    let (_, sandbox, id) = world.run(POLITE).await;
    for _ in 0..2 {
        world.cri.stop_container(&id, 5, &permit).await.unwrap();
    }
    let intent = world.removal(&id).await;
    for _ in 0..2 {
        world.cri.remove_container(&intent).await.unwrap();
    }
    for _ in 0..2 {
        world.cri.stop_pod_sandbox(&sandbox, &permit).await.unwrap();
    }
    let intent = world.sandbox_removal(&sandbox).await;
    for _ in 0..2 {
        world.cri.remove_pod_sandbox(&intent).await.unwrap();
    }
    world.cri.stop_container(&id, 5, &permit).await.unwrap();
    world.cri.stop_pod_sandbox(&sandbox, &permit).await.unwrap();
}

async fn what_is_not_there_is_not_found(world: &World) {
    let nobody = ContainerId::from("nobody");
    let error = world.cri.container_status(&nobody).await.unwrap_err();
    assert!(error.is_not_found(), "{error:?}");
    let text = error.to_string();
    assert!(text.starts_with("container_status nobody: "), "{text}");
    let error = world.cri.pod_sandbox_status(&nobody).await.unwrap_err();
    assert!(error.is_not_found(), "{error:?}");
    let intent = world.start_intent(&PodUid::from("x"), &nobody).await;
    let error = world.cri.start_container(&intent).await.unwrap_err();
    assert!(error.is_not_found(), "{error:?}");
    let seen = world
        .cri
        .pod_status(&PodUid::from("x"), "x", "default")
        .await;
    let seen = seen.unwrap();
    assert!(seen.sandboxes.is_empty() && seen.containers.is_empty());
}

async fn pods_are_listed_with_all_attempts_newest_first(world: &World) {
    let (pod, first_config, first) = world.sandbox().await;
    let old = pod.container("main", 0, &["sh", "-c", "exit 1"]);
    let old = world
        .cri
        .create_container(&first, old, first_config)
        .await
        .unwrap();
    let permit = world.permit().await;
    world.cri.stop_pod_sandbox(&first, &permit).await.unwrap();
    let config = pod.sandbox(1, v1::NamespaceMode::Pod);
    let second = world.cri.run_pod_sandbox(config.clone(), "").await.unwrap();
    let mut ids = Vec::new();
    for attempt in [1, 2] {
        let container = pod.container("main", attempt, &["sh", "-c", "exit 0"]);
        let created = world
            .cri
            .create_container(&second, container, config.clone())
            .await;
        ids.insert(0, created.unwrap());
    }
    ids.push(old);

    let mut stranger = world.pod().sandbox(0, v1::NamespaceMode::Node);
    stranger.labels.clear();
    world.cri.run_pod_sandbox(stranger, "").await.unwrap();

    let pods = world.cri.list_pods().await.unwrap();
    assert!(!pods.contains_key(&PodUid::from("")));
    let inspected = world.cri.pod_status(&pod.uid, &pod.name, "default").await;
    for seen in [&pods[&pod.uid], &inspected.unwrap()] {
        assert_eq!((&seen.uid, &seen.name), (&pod.uid, &pod.name));
        assert_eq!(seen.namespace, "default");
        let sandboxes: Vec<_> = seen.sandboxes.iter().map(|s| (&s.id, s.attempt)).collect();
        assert_eq!(sandboxes, [(&second, 1), (&first, 0)]);
        let containers: Vec<_> = seen.containers.iter().map(|c| c.id.clone()).collect();
        assert_eq!(containers, ids);
        assert_eq!(seen.containers[0].attempt, 2);
        assert_eq!(seen.containers[0].hash, "hash");
        assert_eq!(seen.containers[0].sandbox_id, second);
    }
}

async fn commands_run_inside_a_container(world: &World) {
    let (_, _, id) = world.run(POLITE).await;
    let command = |script: &str| ["sh", "-c", script].map(str::to_owned).to_vec();
    let minute = Duration::from_secs(60);
    let said = world
        .cri
        .exec_sync(&id, command("echo out; exit 0"), minute)
        .await;
    assert_eq!(String::from_utf8_lossy(&said.unwrap().stdout), "out\n");
    let failed = world.cri.exec_sync(&id, command("exit 5"), minute).await;
    assert_eq!(failed.unwrap().exit_code, 5);
    let short = Duration::from_millis(700);
    let late = world.cri.exec_sync(&id, command("sleep 30"), short).await;
    assert_eq!(late.unwrap_err().kind, CriErrorKind::DeadlineExceeded);
}

async fn last_log_lines_become_the_termination_message(world: &World) {
    let (pod, _, id) = world.run("echo it broke; exit 1").await;
    world.exited(&id).await;
    // The runtime copies the output to the log on its own time.
    let give_up = Instant::now() + Duration::from_secs(10);
    loop {
        let seen = world.cri.pod_status(&pod.uid, &pod.name, "default").await;
        let message = seen.unwrap().containers[0].message.clone();
        if message == "it broke\n" {
            return;
        }
        assert!(Instant::now() < give_up, "message is {message:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The content of a file in each cgroup named for a container.
fn cgroup_files(id: &ContainerId, file: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut left = vec![std::path::PathBuf::from("/sys/fs/cgroup")];
    while let Some(dir) = left.pop() {
        let entries = std::fs::read_dir(&dir).into_iter().flatten().flatten();
        let dirs = entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
        left.extend(dirs.map(|e| e.path()));
        let named = dir
            .file_name()
            .is_some_and(|n| n.to_string_lossy().contains(id.as_str()));
        if named && let Ok(text) = std::fs::read_to_string(dir.join(file)) {
            found.push(text.trim().to_owned());
        }
    }
    found.sort();
    found.dedup();
    found
}

async fn limits_change_and_logs_reopen_on_a_running_container(world: &World) {
    let (pod, _, id) = world.run(POLITE).await;
    let limits = v1::LinuxContainerResources {
        cpu_shares: 512,
        cpu_period: 100_000,
        cpu_quota: 25_000,
        ..Default::default()
    };
    let updated = world.cri.update_container_resources(&id, limits).await;
    updated.unwrap();
    if world.containerd.is_some() {
        let v1_quota = cgroup_files(&id, "cpu.cfs_quota_us");
        let v2_quota = cgroup_files(&id, "cpu.max");
        assert!(
            v1_quota == ["25000"] || v2_quota == ["25000 100000"],
            "{v1_quota:?} {v2_quota:?}"
        );
    }
    let log = pod.logs.join("main-0.log");
    std::fs::rename(&log, pod.logs.join("rotated")).unwrap();
    world.cri.reopen_container_log(&id).await.unwrap();
    assert!(log.exists());
    let stats = world.cri.list_container_stats(None).await.unwrap();
    let found = stats.iter().find(|s| {
        let attributes = s.attributes.as_ref();
        attributes.is_some_and(|a| a.id == id.as_str())
    });
    assert!(found.is_some());
}

async fn images_are_listed_and_unknown_ones_are_not_there(world: &World) {
    let busybox = world.cri.image_status(BUSYBOX).await.unwrap().unwrap();
    assert!(busybox.repo_tags.contains(&BUSYBOX.to_owned()));
    let all = world.cri.list_images(None).await.unwrap();
    assert!(all.iter().any(|image| image.id == busybox.id));
    assert_eq!(world.cri.image_status(UNREACHABLE).await.unwrap(), None);
    let spec = v1::ImageSpec {
        image: UNREACHABLE.to_owned(),
        ..Default::default()
    };
    let error = world.cri.pull_image(spec, None, None).await.unwrap_err();
    assert_eq!(error.operation, "pull_image");
    assert!(error.message.contains("connection refused"), "{error}");
    world.cri.remove_image(UNREACHABLE).await.unwrap();
    let usage = world.cri.image_fs_info().await.unwrap();
    assert_eq!(usage.image_filesystems.len(), 1);
}

async fn events_tell_of_containers_where_offered(world: &World) {
    let mut events = world.cri.container_events();
    if !world.offers_events {
        let error = events.next().await.unwrap().unwrap_err();
        assert!(error.is_unimplemented(), "{error:?}");
        assert!(events.next().await.is_none());
        return;
    }
    // When a subscription takes effect is not told, so containers are run until one shows.
    let busy = async {
        loop {
            let (_, _, id) = Box::pin(world.run("exit 4")).await;
            world.exited(&id).await;
        }
    };
    let told = async {
        let mut kinds = BTreeMap::<PodUid, Vec<ContainerEventKind>>::new();
        while let Some(event) = events.next().await {
            let event = event.unwrap();
            let Some(uid) = event.pod_uid else { continue };
            let of_pod = kinds.entry(uid).or_default();
            of_pod.push(event.kind);
            let wanted = [ContainerEventKind::Started, ContainerEventKind::Stopped];
            if wanted.iter().all(|kind| of_pod.contains(kind)) {
                return;
            }
        }
        panic!("the event stream ended");
    };
    let both = async {
        tokio::select! {
            () = busy => {}
            () = told => {}
        }
    };
    tokio::time::timeout(Duration::from_secs(30), both)
        .await
        .expect("no events of a started and stopped container");
}
