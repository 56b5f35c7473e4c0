//! Calls, and how they fail.

use std::fs;
use std::time::Duration;

use holdfast::types::metrics::{CsiLabel, Metrics};
use holdfast::volumemanager::csi::client::{CsiClient, CsiError, NodeCapabilities};
use holdfast::volumemanager::csi::proto::{
    CapacityRange, MountVolume, NodeExpandVolumeRequest, NodePublishVolumeRequest,
    NodeStageVolumeRequest,
};
use holdfast::volumemanager::remote::RemoteError;
use holdfast_testkit::csi::{Fault, mounts_at};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixListener;
use tonic::Code;

use crate::world::{Dirs, client_of, eventually, map};

#[tokio::test]
async fn every_call_does_what_it_says() {
    let dirs = Dirs::new();
    let driver = dirs.driver("d");
    let client = client_of(&driver);
    assert_eq!(client.get_plugin_info().await.unwrap().name, "d");
    let parts = client.get_plugin_capabilities().await.unwrap();
    assert!(parts.capabilities.is_empty());
    assert!(client.probe().await.unwrap());
    assert_eq!(client.node_get_info().await.unwrap().node_id, "csi-node");
    let expected = NodeCapabilities {
        stage: true,
        stats: true,
        expand: true,
        ..NodeCapabilities::default()
    };
    assert_eq!(client.node_get_capabilities().await.unwrap(), expected);

    let mut stage = dirs.stage("v");
    stage.secrets = map(&[("password", "s3cret")]);
    stage.publish_context = map(&[("device", "/dev/x")]);
    stage.volume_context = map(&[("kind", "fast")]);
    client.node_stage_volume(stage.clone()).await.unwrap();
    let publish = dirs.publish("p", "v");
    client.node_publish_volume(publish.clone()).await.unwrap();
    // Both can be made again.
    client.node_stage_volume(stage.clone()).await.unwrap();
    client.node_publish_volume(publish.clone()).await.unwrap();
    let target = std::path::Path::new(&publish.target_path);
    assert_eq!(mounts_at(target).unwrap(), 1);
    fs::write(target.join("file"), "text").unwrap();
    assert_eq!(
        fs::read(driver.volume_dir("v").join("file")).unwrap(),
        b"text"
    );

    let (at, from) = (&publish.target_path, &publish.staging_target_path);
    let stats = client.node_get_volume_stats("v", at, from).await.unwrap();
    assert_eq!(stats.usage.capacity, Some(64 << 20));
    assert_eq!(stats.usage.used, Some(4096));
    assert_eq!(stats.usage.inodes_used, Some(1));
    let expand = NodeExpandVolumeRequest {
        volume_id: "v".to_owned(),
        volume_path: at.clone(),
        staging_target_path: from.clone(),
        capacity_range: Some(CapacityRange {
            required_bytes: 128 << 20,
            limit_bytes: 0,
        }),
        ..NodeExpandVolumeRequest::default()
    };
    let size = client.node_expand_volume(expand).await.unwrap();
    assert_eq!(size, Some(128 << 20));

    for _ in 0..2 {
        client.node_unpublish_volume("v", at).await.unwrap();
    }
    for _ in 0..2 {
        client.node_unstage_volume("v", from).await.unwrap();
    }
    assert!(driver.truth().unwrap().is_clean());
    assert!(!target.exists());
    assert_eq!(driver.violations(), Vec::<String>::new());
    let staged = driver.calls_of("NodeStageVolume").remove(0);
    assert_eq!(staged.secrets, stage.secrets);
    assert_eq!(staged.publish_context, stage.publish_context);
    assert_eq!(staged.volume_context, stage.volume_context);
    assert_eq!(staged.access_mode, 1);
}

#[tokio::test]
async fn codes_tell_whether_a_call_may_have_taken_effect() {
    let dirs = Dirs::new();
    let driver = dirs.driver("d");
    let client = client_of(&driver);
    let unsure = [1, 4, 8, 10, 14];
    for code in 1..=16 {
        let fault = Fault::Fail(code, format!("because {code}"));
        driver.inject("NodeStageVolume", 1, &fault).unwrap();
        let error = client.node_stage_volume(dirs.stage("v")).await.unwrap_err();
        assert_eq!(error.code, Code::from_i32(code));
        assert_eq!(error.is_final(), !unsure.contains(&code), "{code}");
        let text = error.to_string();
        assert!(
            text.starts_with("CSI driver d: NodeStageVolume: "),
            "{text}"
        );
        assert!(text.ends_with(&format!("because {code}")), "{text}");
        match RemoteError::from(error) {
            RemoteError::Failed(_) => assert!(!unsure.contains(&code), "{code}"),
            RemoteError::Uncertain(_) => assert!(unsure.contains(&code), "{code}"),
            other => panic!("{code}: {other}"),
        }
    }
}

#[tokio::test]
async fn a_driver_that_does_not_answer_is_given_up_and_does_not_hold_up_other_calls() {
    let dirs = Dirs::new();
    let driver = dirs.driver("d");
    let client = client_of(&driver).with_deadline(Duration::from_millis(400));
    driver.inject("NodeStageVolume", 1, &Fault::Hang).unwrap();
    let (hung, other) = tokio::join!(
        client.node_stage_volume(dirs.stage("v")),
        client.node_get_info()
    );
    other.unwrap();
    let error = hung.unwrap_err();
    assert_eq!(error.code, Code::DeadlineExceeded);
    let text = error.to_string();
    assert!(text.contains("no answer within 400ms"), "{text}");
    assert!(matches!(
        RemoteError::from(error),
        RemoteError::Uncertain(_)
    ));
    // What was given up is no longer in the way.
    let patient = client_of(&driver);
    patient.node_stage_volume(dirs.stage("v")).await.unwrap();
}

#[tokio::test]
async fn a_stopped_process_is_given_up_as_well() {
    let dirs = Dirs::new();
    let driver = dirs.driver("d");
    let client = client_of(&driver).with_deadline(Duration::from_millis(300));
    driver.signal(nix::sys::signal::Signal::SIGSTOP).unwrap();
    // The signal reaches its threads some time later.
    let error = loop {
        if let Err(error) = client.node_get_info().await {
            break error;
        }
    };
    assert_eq!(error.code, Code::DeadlineExceeded, "{error}");
    driver.signal(nix::sys::signal::Signal::SIGCONT).unwrap();
    let patient = client_of(&driver);
    patient.node_get_info().await.unwrap();
}

#[tokio::test]
async fn garbage_names_driver_and_call() {
    let dirs = Dirs::new();
    let driver = dirs.driver("d");
    let client = client_of(&driver);
    for rpc in ["NodeGetInfo", "NodeGetCapabilities"] {
        driver.inject(rpc, 1, &Fault::Garbage).unwrap();
    }
    let check = |error: CsiError, call: &str| {
        let text = error.to_string();
        assert!(
            text.starts_with(&format!("CSI driver d: {call}: ")),
            "{text}"
        );
        assert!(text.contains("the answer cannot be used"), "{text}");
        assert!(matches!(
            RemoteError::from(error),
            RemoteError::Uncertain(_)
        ));
    };
    check(client.node_get_info().await.unwrap_err(), "NodeGetInfo");
    let capabilities = client.node_get_capabilities().await;
    check(capabilities.unwrap_err(), "NodeGetCapabilities");
    driver
        .inject("NodeUnpublishVolume", 1, &Fault::Garbage)
        .unwrap();
    let target = dirs.target("p", "v");
    let unpublished = client.node_unpublish_volume("v", &target).await;
    check(unpublished.unwrap_err(), "NodeUnpublishVolume");
}

#[tokio::test]
async fn an_answer_without_what_it_must_have_is_garbage() {
    let dirs = Dirs::new();
    let mut options = dirs.options("d");
    options.node_id = String::new();
    let mut driver = holdfast_testkit::csi::CsiDriver::start(options).unwrap();
    let client = client_of(&driver);
    let text = client.node_get_info().await.unwrap_err().to_string();
    assert_eq!(
        text,
        "CSI driver d: NodeGetInfo: the answer cannot be used: it has no node id"
    );
    driver.options_mut().node_id = "n".to_owned();
    driver.options_mut().max_volumes = -1;
    driver.restart().unwrap();
    let info = client.node_get_info().await.unwrap();
    assert_eq!(info.max_volumes_per_node, 0, "a negative limit is none");
}

#[tokio::test]
async fn something_that_speaks_no_grpc_is_told_apart() {
    let dirs = Dirs::new();
    let socket = dirs.path().join("x.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let talk = tokio::spawn(async move {
        let answers = ["HTTP/1.1 400 Bad Request\r\n\r\n", "", "\0\0\0\0\0\0\0"];
        for said in answers.into_iter().cycle() {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(said.as_bytes()).await.ok();
        }
    });
    let client =
        CsiClient::new("d", &socket, Metrics::default()).with_deadline(Duration::from_secs(5));
    for _ in 0..6 {
        let error = client.node_get_info().await.unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("CSI driver d: NodeGetInfo: "), "{text}");
        assert!(!error.is_final() || error.is_unreachable(), "{text}");
    }
    talk.abort();
}

#[tokio::test]
async fn a_driver_that_dies_leaves_the_call_in_doubt_and_is_found_again() {
    let dirs = Dirs::new();
    let mut driver = dirs.driver("d");
    let client = client_of(&driver);
    client.node_get_info().await.unwrap();
    for fault in [Fault::KillBefore, Fault::KillBetween, Fault::KillAfter] {
        driver.inject("NodeStageVolume", 1, &fault).unwrap();
        let error = client.node_stage_volume(dirs.stage("v")).await.unwrap_err();
        assert_eq!(error.code, Code::Unavailable, "{fault:?}: {error}");
        assert!(
            matches!(RemoteError::from(error), RemoteError::Uncertain(_)),
            "{fault:?}"
        );
        assert!(driver.wait_for_end(Duration::from_secs(10)));
        // Nobody listens: this was not even sent.
        let error = client.node_stage_volume(dirs.stage("v")).await.unwrap_err();
        assert!(error.is_unreachable(), "{error}");
        assert!(error.to_string().contains("nobody answers on"), "{error}");
        assert!(matches!(RemoteError::from(error), RemoteError::Waiting(_)));
        driver.restart().unwrap();
        client.node_stage_volume(dirs.stage("v")).await.unwrap();
        let staging = dirs.staging("v");
        assert_eq!(mounts_at(staging.as_ref()).unwrap(), 1, "{fault:?}");
        client.node_unstage_volume("v", &staging).await.unwrap();
        assert!(driver.truth().unwrap().is_clean());
    }
    assert_eq!(driver.violations(), Vec::<String>::new());
}

#[tokio::test]
async fn a_call_that_lacks_what_it_must_have_is_not_made() {
    let dirs = Dirs::new();
    let driver = dirs.driver("d");
    let client = client_of(&driver);
    let mut stage = dirs.stage("v");
    stage.volume_id.clear();
    let error = client.node_stage_volume(stage).await.unwrap_err();
    assert!(error.is_final() && error.code == Code::InvalidArgument);
    assert!(error.to_string().contains("no volume id"), "{error}");
    let error = client.node_unpublish_volume("v", "").await.unwrap_err();
    assert!(error.to_string().contains("no target path"), "{error}");
    assert!(driver.calls().is_empty());
}

#[tokio::test]
async fn calls_are_measured_as_upstream_does() {
    let dirs = Dirs::new();
    let driver = dirs.driver("d");
    let metrics = Metrics::default();
    let client = CsiClient::new("d", &driver.options().endpoint, metrics.clone());
    client.node_get_info().await.unwrap();
    let fault = Fault::Fail(8, "full".to_owned());
    driver.inject("NodeGetInfo", 1, &fault).unwrap();
    client.node_get_info().await.unwrap_err();
    let text = metrics.encode().unwrap();
    for code in ["OK", "ResourceExhausted"] {
        let label = CsiLabel {
            driver_name: "d".to_owned(),
            grpc_status_code: code.to_owned(),
            method_name: "/csi.v1.Node/NodeGetInfo".to_owned(),
            migrated: "false".to_owned(),
        };
        let line = format!(
            "csi_operations_seconds_count{{driver_name=\"{}\",grpc_status_code=\"{}\",method_name=\"{}\",\
             migrated=\"{}\"}} 1",
            label.driver_name, label.grpc_status_code, label.method_name, label.migrated
        );
        assert!(text.contains(&line), "{line} in {text}");
    }
}

#[test]
fn requests_show_no_secrets() {
    let hidden = map(&[("key", "s3cret")]);
    let mut stage = NodeStageVolumeRequest {
        volume_id: "v".to_owned(),
        publish_context: hidden.clone(),
        secrets: hidden.clone(),
        volume_context: hidden.clone(),
        volume_capability: Some(crate::world::files()),
        ..NodeStageVolumeRequest::default()
    };
    if let Some(capability) = &mut stage.volume_capability {
        capability.access_type = Some(holdfast::volumemanager::csi::proto::AccessType::Mount(
            MountVolume {
                mount_flags: vec!["password=s3cret".to_owned()],
                ..MountVolume::default()
            },
        ));
    }
    let publish = NodePublishVolumeRequest {
        volume_id: "v".to_owned(),
        publish_context: hidden.clone(),
        secrets: hidden.clone(),
        volume_context: hidden.clone(),
        volume_capability: stage.volume_capability.clone(),
        ..NodePublishVolumeRequest::default()
    };
    let expand = NodeExpandVolumeRequest {
        volume_id: "v".to_owned(),
        secrets: hidden,
        volume_capability: stage.volume_capability.clone(),
        ..NodeExpandVolumeRequest::default()
    };
    for text in [
        format!("{stage:?}"),
        format!("{publish:?}"),
        format!("{expand:#?}"),
    ] {
        assert!(text.contains("\"v\"") && text.contains("hidden"), "{text}");
        assert!(!text.contains("s3cret"), "{text}");
    }
}

#[tokio::test]
async fn a_call_that_is_dropped_is_cancelled_at_the_driver() {
    let dirs = Dirs::new();
    let driver = dirs.driver("d");
    let client = client_of(&driver);
    driver
        .inject("NodeStageVolume", 1, &Fault::HangAfter)
        .unwrap();
    let (caller, request) = (client.clone(), dirs.stage("v"));
    let call = tokio::spawn(async move { caller.node_stage_volume(request).await });
    eventually("the call has its effect", || {
        (!driver.calls_of("NodeStageVolume").is_empty()).then_some(())
    })
    .await;
    call.abort();
    call.await.unwrap_err();
    // It took effect; made again, it is no second mount.
    client.node_stage_volume(dirs.stage("v")).await.unwrap();
    assert_eq!(mounts_at(dirs.staging("v").as_ref()).unwrap(), 1);
    assert_eq!(driver.violations(), Vec::<String>::new());
}
