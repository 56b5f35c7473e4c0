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
