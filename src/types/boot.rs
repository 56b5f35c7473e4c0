//! Identifies the boot of the machine.
//!
//! Containers and VM snapshots keep the kernel's boot id, so three facts are combined: the boot id, the
//! start time of PID 1, and the identity (device, inode, change time) of the runtime's volatile state
//! directory, which is recreated when the machine it serves was started anew.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::file_system::FileSystem;
use super::hardware;

/// A hash of a [`BootIdentity`]; two stamps with the same id share a boot-time clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BootId(pub u64);

/// The facts that distinguish one boot from another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootIdentity {
    /// `/proc/sys/kernel/random/boot_id`.
    pub kernel_boot_id: String,
    /// Start time of PID 1 in clock ticks since boot.
    pub pid1_start: u64,
    /// `<dev>:<inode>` of the runtime's state directory, empty when it is not known.
    pub runtime_state: String,
}

impl BootIdentity {
    /// Reads the identity of the running boot. `boot_id` overrides the kernel's id (used by tests to
    /// simulate a reboot); `runtime_state_dir` is the runtime's volatile directory, if known.
    pub fn read(boot_id: Option<&str>, runtime_state_dir: Option<&Path>) -> Self {
        let kernel_boot_id = match boot_id {
            Some(id) => id.to_owned(),
            None => fs::read_to_string("/proc/sys/kernel/random/boot_id")
                .map(|s| s.trim().to_owned())
                .unwrap_or_default(),
        };
        let pid1_start = procfs::process::Process::new(1)
            .and_then(|p| p.stat())
            .map(|s| s.starttime)
            .unwrap_or(0);
        let runtime_state = runtime_state_dir
            .and_then(|dir| fs::metadata(dir).ok())
            .map(|m| format!("{}:{}", m.dev(), m.ino()))
            .unwrap_or_default();
        Self {
            kernel_boot_id,
            pid1_start,
            runtime_state,
        }
    }

    /// The hash that stamps carry: it names the boot-time clock, so the runtime's directory, which can be
    /// made anew without that clock starting over, is left out.
    pub fn id(&self) -> BootId {
        let mut hasher = Sha256::new();
        hasher.update(self.kernel_boot_id.as_bytes());
        hasher.update([0]);
        hasher.update(self.pid1_start.to_le_bytes());
        let digest = hasher.finalize();
        let mut first = [0_u8; 8];
        first.copy_from_slice(&digest[..8]);
        BootId(u64::from_le_bytes(first))
    }

    /// Returns whether processes from the time of `earlier` may still run. If the runtime directory did not exist at
    /// one of the two moments (the runtime had not started yet), it is ignored.
    pub fn same_boot(&self, earlier: &Self) -> bool {
        self.kernel_boot_id == earlier.kernel_boot_id
            && self.pid1_start == earlier.pid1_start
            && (self.runtime_state == earlier.runtime_state
                || self.runtime_state.is_empty()
                || earlier.runtime_state.is_empty())
    }
}

/// `/etc/machine-id`, else that of D-Bus as on systems without systemd, or an empty string where there is none. Upstream's
/// `machine-id-file` has the same two files.
pub fn machine_id() -> String {
    machine_id_below(Path::new("/"))
}

fn machine_id_below(root: &Path) -> String {
    ["etc/machine-id", "var/lib/dbus/machine-id"]
        .iter()
        .filter_map(|file| fs::read_to_string(root.join(file)).ok())
        .map(|text| text.trim().to_owned())
        // An image that was never booted says so in the place of the ID.
        .find(|id| !id.is_empty() && id != "uninitialized")
        .unwrap_or_default()
}

/// Names what this machine was called when its store was begun, below the state directory.
pub const MACHINE_RECORD: &str = "machine";

/// Has the node's name, below the state directory.
pub const NODE_NAME_RECORD: &str = "node-name";

/// Returns the name of the node that the store in `state_dir` is kept for, if it is recorded. Blocking.
pub fn node_name_of(state_dir: &Path) -> Option<String> {
    let text = fs::read_to_string(state_dir.join(NODE_NAME_RECORD)).ok()?;
    let name = text.trim();
    (!name.is_empty()).then(|| name.to_owned())
}

/// Machine ID and hardware at the first start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct MachineRecord {
    machine_id: String,
    hardware: String,
}

/// The ID of this machine for the store in `state_dir`. A machine whose system is in memory makes another `/etc/machine-id`
/// at each boot; while its hardware is the recorded one, it keeps the recorded ID.
pub fn machine_id_of(state_dir: &Path) -> String {
    let recorded = fs::read(state_dir.join(MACHINE_RECORD)).ok();
    let recorded = recorded.and_then(|text| serde_json::from_slice(&text).ok());
    known_as(recorded, machine_id(), hardware(state_dir).as_deref())
}

/// Returns the content of [`MACHINE_RECORD`] for the machine `machine_id` with its store in `state_dir`; `None` where nothing
/// else is known of it. Blocking.
pub fn machine_record(machine_id: &str, state_dir: &Path) -> Option<String> {
    let record = MachineRecord {
        machine_id: machine_id.to_owned(),
        hardware: hardware(state_dir)?,
    };
    serde_json::to_string(&record).ok()
}

fn known_as(recorded: Option<MachineRecord>, machine_id: String, hardware: Option<&str>) -> String {
    match recorded {
        Some(recorded)
            if hardware.is_some_and(|now| hardware::is_same(&recorded.hardware, now)) =>
        {
            recorded.machine_id
        }
        _ => machine_id,
    }
}

fn hardware(state_dir: &Path) -> Option<String> {
    hardware::of(Path::new("/")).or_else(|| {
        let machine_id = FileSystem::of(Path::new("/etc/machine-id")).ok()?;
        hardware::by_disk(&machine_id, &FileSystem::of(state_dir).ok()?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_of_d_bus_counts_where_the_machine_has_none_of_its_own() {
        let root = tempfile::tempdir().unwrap();
        let id = || machine_id_below(root.path());
        assert_eq!(id(), "");
        fs::create_dir_all(root.path().join("etc")).unwrap();
        fs::write(root.path().join("etc/machine-id"), "uninitialized\n").unwrap();
        assert_eq!(id(), "");
        fs::create_dir_all(root.path().join("var/lib/dbus")).unwrap();
        fs::write(root.path().join("var/lib/dbus/machine-id"), "abc\n").unwrap();
        assert_eq!(id(), "abc");
        fs::write(root.path().join("etc/machine-id"), "").unwrap();
        assert_eq!(id(), "abc");
        fs::write(root.path().join("etc/machine-id"), "def\n").unwrap();
        assert_eq!(id(), "def");
    }

    #[test]
    fn a_machine_with_another_id_at_each_boot_stays_the_same() {
        let recorded = |hardware: &str| {
            Some(MachineRecord {
                machine_id: "first".to_owned(),
                hardware: hardware.to_owned(),
            })
        };
        let known = |recorded, hardware| known_as(recorded, "second".to_owned(), hardware);
        assert_eq!(known(recorded("uuid-1"), Some("uuid-1")), "first");
        // The disk is another machine's, or a copy of it.
        assert_eq!(known(recorded("uuid-1"), Some("uuid-2")), "second");
        assert_eq!(known(recorded("uuid-1"), None), "second");
        assert_eq!(known(None, Some("uuid-1")), "second");
        // Of two network devices one is left.
        assert_eq!(known(recorded("mac a b"), Some("mac b c")), "first");
    }
}
