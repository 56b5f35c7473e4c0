//! What a user sees of a pod: one manifest per feature under `tests/e2e/`, all of them on one agent and one
//! containerd at the same time; each assertion waits for what it is about.
//!
//! `HOLDFAST_E2E=name,name` runs only some. Needs root and containerd (`hack/deps.sh runtime`).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    missing_docs,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

#[path = "support/agent_process.rs"]
mod agent_process;
#[path = "e2e/bad.rs"]
mod bad;
#[path = "e2e/basics.rs"]
mod basics;
#[path = "e2e/hooks.rs"]
mod hooks;
#[path = "e2e/init.rs"]
mod init;
#[path = "e2e/mounts.rs"]
mod mounts;
#[path = "e2e/probes.rs"]
mod probes;
#[path = "e2e/restarts.rs"]
mod restarts;
#[path = "e2e/security.rs"]
mod security;
#[path = "e2e/seen.rs"]
mod seen;
#[path = "agent_real/world.rs"]
#[allow(dead_code, reason = "shared with agent_real, which uses all of it")]
mod world;

use std::collections::BTreeSet;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use holdfast_testkit::containerd::Version;

use seen::Feature;
use world::World;

fn features() -> Vec<Feature> {
    let topics = [
        basics::FEATURES,
        restarts::FEATURES,
        init::FEATURES,
        hooks::FEATURES,
        probes::FEATURES,
        security::FEATURES,
        mounts::FEATURES,
        bad::FEATURES,
    ];
    topics.concat()
}

fn manifests() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e")
}

#[test]
fn every_manifest_has_an_assertion() {
    let named: BTreeSet<String> = features().iter().map(|(n, _)| (*n).to_owned()).collect();
    assert_eq!(named.len(), features().len(), "a name is used twice");
    let files = fs::read_dir(manifests()).expect("list the manifests");
    let files = files.map(|entry| entry.expect("a file").path());
    let there: BTreeSet<String> = files
        .filter(|path| path.extension().is_some_and(|e| e == "yaml"))
        .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    assert_eq!(named, there);
}

#[test]
fn every_feature_is_seen_by_users() {
    let wanted = std::env::var("HOLDFAST_E2E").unwrap_or_default();
    let wanted: BTreeSet<&str> = wanted.split(',').filter(|w| !w.is_empty()).collect();
    let mut chosen = features();
    chosen.retain(|(name, _)| wanted.is_empty() || wanted.contains(name));
    assert!(!chosen.is_empty(), "no such feature: {wanted:?}");

    let world = World::new(Version::Installed);
    world.configure("clusterDomain: cluster.local\n");
    let starts = world.starts().display().to_string();
    for (name, _) in &chosen {
        let file = format!("{name}.yaml");
        let text = fs::read_to_string(manifests().join(&file)).expect("read a manifest");
        world.write_manifest(&file, &bad::expand(&text.replace("@STARTS@", &starts)));
    }
    let _shared = mounts::Shared::new(&world.starts());
    let agent = world.start();
    let mut failed = Vec::new();
    for (name, assertion) in chosen {
        if catch_unwind(AssertUnwindSafe(|| assertion(&world))).is_err() {
            let journal = world.journal(name);
            let lines = journal.iter().map(|(what, why)| format!("  {what}: {why}"));
            let lines = lines.collect::<Vec<_>>().join("\n");
            eprintln!("{name} failed; its journal:\n{lines}");
            failed.push(name);
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
    agent.kill9();
}
