//! Images that nothing needs are removed, and no others.

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use holdfast_testkit::containerd::{BUSYBOX, Version};
use serde_json::json;
use sha2::{Digest as _, Sha256};

use crate::agent_process::{eventually, within};
use crate::world::{FOREVER, World, ids};

const UNUSED: &str = "holdfast.local/unused:1";
/// `imageMaximumGCAge` in the test.
const AGE: Duration = Duration::from_secs(15);

fn tar_of(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, *bytes).unwrap();
    }
    builder.into_inner().unwrap()
}

/// An archive of an image of one file.
fn archive(world: &World) -> PathBuf {
    let layer = tar_of(&[("file", b"nobody needs it")]);
    let digest = Sha256::digest(&layer);
    let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": {},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]},
    });
    let manifest = json!([{"Config": "c.json", "RepoTags": [UNUSED], "Layers": ["layer.tar"]}]);
    let path = world.dir().join("unused.tar");
    let image = tar_of(&[
        ("c.json", config.to_string().as_bytes()),
        ("layer.tar", &layer),
        ("manifest.json", manifest.to_string().as_bytes()),
    ]);
    fs::File::create(&path).unwrap().write_all(&image).unwrap();
    path
}

fn images(world: &World) -> String {
    world.runtime.ctr(&["images", "ls", "-q"]).unwrap()
}

/// R26: an image is removed at its time, however often the agent restarts, and none that is in use or that sandboxes are
/// made of.
#[test]
fn r26_an_unused_image_goes_at_its_time_across_restarts() {
    let world = World::new(Version::Installed);
    world.configure("imageMinimumGCAge: 3s\nimageMaximumGCAge: 15s\n");
    let file = archive(&world);
    world
        .runtime
        .ctr(&["images", "import", &file.to_string_lossy()])
        .unwrap();
    world.add(&world.pod("web", "Always", &[("only", FOREVER)]));
    let mut agent = world.start();
    world.wait_running("web", "only");
    let before = ids(&world.running());
    eventually("the images are on record", || {
        let dump = world.try_dump(&["images"])?;
        let known = dump["tables"]["images"].as_array().map_or(0, Vec::len);
        (known > 1).then_some(()).ok_or_else(|| dump.to_string())
    });
    let seen = Instant::now();
    world.recorded();
    // Three times on a quick machine; on a slow one, as often as leaves the age time to pass while an agent runs.
    for _ in 0..3 {
        std::thread::sleep(Duration::from_secs(3));
        agent.kill9();
        agent = world.start();
        let left = images(&world);
        // A look that took until the image was due says nothing.
        let is_early = seen.elapsed() + Duration::from_secs(1) < AGE;
        let is_there = left.contains(UNUSED);
        assert!(is_there || !is_early, "after {:?}", seen.elapsed());
        if seen.elapsed() > AGE / 2 {
            break;
        }
    }
    within(
        AGE + Duration::from_secs(10),
        "the image is removed",
        || {
            let left = images(&world);
            (!left.contains(UNUSED)).then_some(()).ok_or(left)
        },
    );
    let took = seen.elapsed();
    assert!(took + Duration::from_secs(2) >= AGE, "gone after {took:?}");
    assert!(took <= AGE + Duration::from_secs(10), "gone after {took:?}");
    let left = images(&world);
    for needed in [BUSYBOX, "holdfast.local/pause:1"] {
        assert!(left.contains(needed), "{left}");
    }
    assert_eq!(ids(&world.running()), before);
    let removed = agent.metric("kubelet_image_garbage_collected_total{reason=\"age\"}");
    assert!((removed - 1.0).abs() < f64::EPSILON, "{removed}");
}
