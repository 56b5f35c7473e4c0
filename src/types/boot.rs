//! Which boot of which machine this is.
//!
//! Containers and VM snapshots keep the kernel's boot id, so three facts are combined: the boot id, the
//! start time of PID 1, and the identity (device, inode, change time) of the runtime's volatile state
//! directory, which is recreated when the machine it serves was started anew.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// A hash of a [`BootIdentity`]; two stamps with the same id share a boot-time clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BootId(pub u64);

/// The facts that tell one boot from another.
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

    /// Whether what ran at the time of `earlier` may still run. A runtime directory that was not there at
    /// one of the two moments (the runtime had not started yet) tells nothing.
    pub fn same_boot(&self, earlier: &Self) -> bool {
        self.kernel_boot_id == earlier.kernel_boot_id
            && self.pid1_start == earlier.pid1_start
            && (self.runtime_state == earlier.runtime_state
                || self.runtime_state.is_empty()
                || earlier.runtime_state.is_empty())
    }
}

/// `/etc/machine-id`, or an empty string where there is none.
pub fn machine_id() -> String {
    fs::read_to_string("/etc/machine-id")
        .map(|s| s.trim().to_owned())
        .unwrap_or_default()
}

/// Names what this machine was called when its store was begun, below the state directory.
pub const MACHINE_RECORD: &str = "machine";

/// Has the node's name, below the state directory.
pub const NODE_NAME_RECORD: &str = "node-name";

/// Returns the name of the node that the store in `state_dir` is kept for, if it is on record. Blocking.
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
/// at each boot; while its hardware is the one on record, it keeps the ID that is on record.
pub fn machine_id_of(state_dir: &Path) -> String {
    let recorded = fs::read(state_dir.join(MACHINE_RECORD)).ok();
    let recorded = recorded.and_then(|text| serde_json::from_slice(&text).ok());
    known_as(recorded, machine_id(), hardware().as_deref())
}

/// Returns the content of [`MACHINE_RECORD`] for the machine `machine_id`; `None` where the hardware has no number of
/// its own.
pub fn machine_record(machine_id: &str) -> Option<String> {
    let record = MachineRecord {
        machine_id: machine_id.to_owned(),
        hardware: hardware()?,
    };
    serde_json::to_string(&record).ok()
}

fn known_as(recorded: Option<MachineRecord>, machine_id: String, hardware: Option<&str>) -> String {
    match recorded {
        Some(recorded) if Some(recorded.hardware.as_str()) == hardware => recorded.machine_id,
        _ => machine_id,
    }
}

/// The numbers that the firmware gives this machine; `None` where none of them is its own.
fn hardware() -> Option<String> {
    let read = |path: &str| {
        let bytes = fs::read(path).ok()?;
        let text = String::from_utf8_lossy(&bytes);
        let text = text.trim_matches(|c: char| c == '\0' || c.is_whitespace());
        (!text.is_empty()).then(|| text.to_lowercase())
    };
    let own = [
        "/sys/class/dmi/id/product_uuid",
        "/proc/device-tree/serial-number",
    ]
    .into_iter()
    .filter_map(read)
    .find(|number| is_own(number))?;
    let more = [
        "/sys/class/dmi/id/product_serial",
        "/sys/class/dmi/id/board_serial",
    ];
    let all: Vec<String> = std::iter::once(own)
        .chain(more.into_iter().filter_map(read))
        .collect();
    Some(all.join(" "))
}

/// Returns whether a number is that of one machine: makers leave it empty, or give all boards the same one.
fn is_own(number: &str) -> bool {
    const SHARED: [&str; 3] = [
        "03000200-0400-0500-0006-000700080009",
        "00020003-0004-0005-0006-000700080009",
        "12345678-1234-5678-90ab-cddeefaabbcc",
    ];
    let digits: Vec<char> = number.chars().filter(char::is_ascii_alphanumeric).collect();
    digits.len() >= 8 && digits.iter().any(|digit| *digit != digits[0]) && !SHARED.contains(&number)
}

#[cfg(test)]
mod tests {
    use super::*;

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
    }

    #[test]
    fn numbers_that_many_machines_share_name_none() {
        for (number, own) in [
            ("4c4c4544-0051-3510-8057-b7c04f4c3333", true),
            ("10000000a3b1c2d4", true),
            ("00000000-0000-0000-0000-000000000000", false),
            ("ffffffff-ffff-ffff-ffff-ffffffffffff", false),
            ("03000200-0400-0500-0006-000700080009", false),
            ("none", false),
        ] {
            assert_eq!(is_own(number), own, "{number}");
        }
    }
}
