//! What needs nothing but the node: emptyDir, hostPath, and how containers see a volume.

use std::fs;

use crate::features::{Feature, Scene, host};
use crate::seen::{deleted, said};

pub const FEATURES: &[Feature] = &[
    ("empty-dir-disk", empty_dir_disk),
    ("empty-dir-memory", empty_dir_memory),
    ("host-path-types", host_path_types),
    ("host-path-wrong", host_path_wrong),
    ("fs-group", fs_group),
    ("read-only-mounts", read_only_mounts),
    ("unused", unused),
];

fn empty_dir_disk(cluster: &Scene) {
    let parts = ["mode=777", "first=kept", "other=shared"];
    said(cluster, "empty-dir-disk", "main", &parts);
    cluster.wait_pod_phase("empty-dir-disk", "Succeeded");
}

fn empty_dir_memory(cluster: &Scene) {
    let parts = [
        "type=tmpfs",
        "size=1024k",
        "No space left on device",
        "bytes=1048576",
        "small=again",
    ];
    said(cluster, "empty-dir-memory", "main", &parts);
}

fn host_path_types(cluster: &Scene) {
    let parts = [
        "/at/any is directory,",
        "/at/dir is directory,",
        "/at/dir-new is directory, 755",
        "/at/file is regular file,",
        "/at/file-new is regular empty file, 644",
        "/at/socket is socket,",
        "/at/char is character special file, 600",
        "/at/block is block special file, 600",
        "a file of the node",
        "kept",
    ];
    said(cluster, "host-path-types", "main", &parts);
    cluster.wait_pod_phase("host-path-types", "Succeeded");
    let made = host(cluster).join("made/dir/word");
    assert_eq!(fs::read_to_string(made).unwrap(), "from the pod\n");
    deleted(cluster, "host-path-types");
    assert!(host(cluster).join("made/dir/word").exists());
}

fn host_path_wrong(cluster: &Scene) {
    let at = host(cluster);
    for (pod, file, wanted) in [
        ("directory", "file", "directory"),
        ("directory-or-create", "file", "directory"),
        ("file", "dir", "file"),
        ("file-or-create", "dir", "file"),
        ("socket", "file", "socket file"),
        ("char-device", "file", "character device"),
        ("block-device", "char", "block device"),
        ("absent", "late", "directory"),
    ] {
        let pod = format!("host-path-wrong-{pod}");
        let words = format!(
            "hostPath type check failed: {} is not a {wanted}",
            at.join(file).display()
        );
        let message = cluster.wait_event(&pod, "FailedMount", &words);
        assert!(message.contains("volume \"wrong\""), "{message}");
        let phase = cluster.pod(&pod)["status"]["phase"].clone();
        assert_eq!(phase, "Pending", "{pod}");
    }
    fs::create_dir(at.join("late")).unwrap();
    cluster.wait_running("host-path-wrong-absent");
    for pod in ["directory", "socket"] {
        deleted(cluster, &format!("host-path-wrong-{pod}"));
    }
    let kept = fs::read_to_string(at.join("file")).unwrap();
    assert_eq!(kept, "a file of the node\n");
}

fn fs_group(cluster: &Scene) {
    let parts = [
        "groups=1000 2000",
        "/disk 2000",
        "/disk/file 2000",
        "/memory 2000",
        "/memory/file 2000",
        "/host 0",
        "secret=hidden 2000:440",
    ];
    said(cluster, "fs-group", "main", &parts);
}

fn read_only_mounts(cluster: &Scene) {
    let parts = [
        "read=one-two-kept",
        "disk is read-only",
        "memory is read-only",
        "host is read-only",
        "done",
    ];
    said(cluster, "read-only-mounts", "main", &parts);
    assert!(!host(cluster).join("dir/new").exists());
}

fn unused(cluster: &Scene) {
    cluster.wait_pod_phase("unused", "Succeeded");
}
