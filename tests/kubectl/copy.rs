//! `kubectl cp`.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::client::noise;
use crate::node::{Node, shared};
use crate::setup::{FOREVER, script};

#[test]
fn directories_are_copied_there_and_back() {
    there_and_back(&shared());
}

pub fn there_and_back(node: &Node) {
    node.create_pod("store", script("Always", FOREVER));
    node.wait_running("store");
    let here = node.dir().join("there");
    let back = node.dir().join("back");
    fs::create_dir_all(here.join("deep/er")).unwrap();
    let files = [
        ("big", noise(3, 5_000_000)),
        ("empty", Vec::new()),
        ("deep/er/text", b"some words\n".to_vec()),
    ];
    for (name, bytes) in &files {
        fs::write(here.join(name), bytes).unwrap();
    }
    fs::write(here.join("run"), "#!/bin/sh\necho it runs\n").unwrap();
    fs::set_permissions(here.join("run"), fs::Permissions::from_mode(0o755)).unwrap();

    node.ok(&["cp", &here.to_string_lossy(), "store:/tmp/copied"]);
    assert_eq!(
        node.ok(&["exec", "store", "--", "/tmp/copied/run"]),
        "it runs\n"
    );
    node.ok(&["cp", "store:/tmp/copied", &back.to_string_lossy()]);
    for (name, bytes) in &files {
        assert!(
            fs::read(back.join(name)).unwrap() == *bytes,
            "{name} has changed"
        );
    }
    // What is not there: nothing appears here. kubectl ends as soon as the archive does, often before the complaint of the
    // container's tar has reached it, so the complaint is looked for where the client waits for it.
    let nowhere = node.dir().join("x");
    node.run_kubectl(&["cp", "store:/tmp/missing", &nowhere.to_string_lossy()]);
    assert!(!nowhere.exists());
    let outcome = node.run_kubectl(&["exec", "store", "--", "tar", "cf", "-", "/tmp/missing"]);
    assert!(outcome.stderr().contains("No such file"), "{outcome:?}");
    assert_ne!(outcome.code, Some(0), "{outcome:?}");
}
