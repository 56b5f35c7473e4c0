//! Settings of the kernel that Kubernetes wants to be the same on every node. Upstream: `setupKernelTunables`.
//!
//! Unlike upstream, a setting that `protectKernelDefaults` leaves as it is does not keep the agent from starting: a node would be
//! down for a value that its pods run with.

use std::fs;
use std::path::{Path, PathBuf};

use tracing::{info, warn};

use crate::types::{Event, EventRecorder, EventType};

/// Directory in which the kernel shows them.
pub(super) const ROOT: &str = "/proc/sys";

const TUNABLES: [(&str, i64); 6] = [
    ("vm/overcommit_memory", 1),
    ("vm/panic_on_oom", 0),
    ("kernel/panic", 10),
    ("kernel/panic_on_oops", 1),
    ("kernel/keys/root_maxkeys", 1_000_000),
    ("kernel/keys/root_maxbytes", 25_000_000),
];

/// Outcome for one setting that differed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Set,
    Kept,
    Failed(String),
}

/// One setting that was another than is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Different {
    name: String,
    found: String,
    wanted: i64,
    outcome: Outcome,
}

/// Sets the kernel's settings below `root`, or with `is_protected` only reports which are others. Blocking, briefly.
pub(super) fn settle(root: &Path, is_protected: bool, recorder: &dyn EventRecorder) {
    let different = differences(root, is_protected);
    for one in different.iter().filter(|one| one.outcome == Outcome::Set) {
        let (name, found, wanted) = (&one.name, &one.found, one.wanted);
        info!(name, found, wanted, "changed a setting of the kernel");
    }
    if let Some(text) = failures(&different) {
        warn!(
            settings = text,
            "settings of the kernel could not be changed"
        );
    }
    if let Some(text) = kept(&different) {
        warn!(
            settings = text,
            "settings of the kernel are not those of a Kubernetes node"
        );
        let event = Event::node(EventType::Warning, "KernelDefaultsDiffer", text);
        recorder.record(event);
    }
}

fn differences(root: &Path, is_protected: bool) -> Vec<Different> {
    TUNABLES
        .iter()
        .filter_map(|(below, wanted)| {
            let file: PathBuf = root.join(below);
            let found = match fs::read_to_string(&file) {
                Ok(found) => found.trim().to_owned(),
                Err(error) => format!("unreadable: {error}"),
            };
            if found == wanted.to_string() {
                return None;
            }
            let outcome = if is_protected {
                Outcome::Kept
            } else {
                match fs::OpenOptions::new()
                    .write(true)
                    .open(&file)
                    .and_then(|mut file| {
                        std::io::Write::write_all(&mut file, wanted.to_string().as_bytes())
                    }) {
                    Ok(()) => Outcome::Set,
                    Err(error) => Outcome::Failed(error.to_string()),
                }
            };
            Some(Different {
                name: below.replace('/', "."),
                found,
                wanted: *wanted,
                outcome,
            })
        })
        .collect()
}

/// Returns the settings that could not be set, as one text.
fn failures(different: &[Different]) -> Option<String> {
    let texts: Vec<String> = different
        .iter()
        .filter_map(|one| match &one.outcome {
            Outcome::Failed(why) => Some(format!("{}: {} ({why})", one.name, one.found)),
            Outcome::Set | Outcome::Kept => None,
        })
        .collect();
    (!texts.is_empty()).then(|| texts.join("; "))
}

/// Returns the settings that `protectKernelDefaults` leaves as they are, as one text.
fn kept(different: &[Different]) -> Option<String> {
    let texts: Vec<String> = different
        .iter()
        .filter(|one| one.outcome == Outcome::Kept)
        .map(|one| format!("{} is {}, expected {}", one.name, one.found, one.wanted))
        .collect();
    (!texts.is_empty()).then(|| {
        format!(
            "protectKernelDefaults leaves settings of the kernel as they are: {}; set them by sysctl, or protectKernelDefaults: false",
            texts.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_the_kernel_are_set_or_reported() {
        let dir = tempfile::tempdir().unwrap();
        let file = |below: &str| dir.path().join(below);
        for (below, wanted) in TUNABLES
            .iter()
            .filter(|(name, _)| *name != "vm/panic_on_oom")
        {
            fs::create_dir_all(file(below).parent().unwrap()).unwrap();
            fs::write(file(below), format!("{wanted}\n")).unwrap();
        }
        fs::write(file("kernel/panic"), "0\n").unwrap();

        let reported = differences(dir.path(), true);
        assert_eq!(fs::read_to_string(file("kernel/panic")).unwrap(), "0\n");
        let text = kept(&reported).unwrap();
        assert!(text.contains("kernel.panic is 0, expected 10"), "{text}");
        assert!(text.contains("vm.panic_on_oom is unreadable"), "{text}");
        assert_eq!(failures(&reported), None);

        let changed = differences(dir.path(), false);
        assert_eq!(fs::read_to_string(file("kernel/panic")).unwrap(), "10");
        assert_eq!(kept(&changed), None);
        let failed = failures(&changed).unwrap();
        assert!(failed.starts_with("vm.panic_on_oom"), "{failed}");
        assert!(!file("vm/panic_on_oom").exists(), "nothing is made");
        assert_eq!(differences(dir.path(), false).len(), 1);
    }
}
