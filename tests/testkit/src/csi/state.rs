//! What the driver remembers, on disk.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{CsiOptions, mounts};

/// Where a volume is staged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staged {
    /// Path.
    pub path: PathBuf,
    /// What it was staged with; secrets do not count.
    pub arguments: String,
    /// Whether it is a device.
    pub block: bool,
}

/// A volume that is published.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    /// Its handle.
    pub volume: String,
    /// What it was published with; secrets and tokens do not count.
    pub arguments: String,
    /// Whether it is a device.
    pub block: bool,
    /// Whether it goes with its pod.
    pub ephemeral: bool,
}

/// What a driver has staged and published.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Truth {
    /// By handle.
    pub staged: BTreeMap<String, Staged>,
    /// By target path.
    pub published: BTreeMap<PathBuf, Published>,
    /// Sizes of volumes that were expanded, in bytes.
    pub sizes: BTreeMap<String, u64>,
    /// What is mounted below the kubelet's root directory. Not remembered but looked up.
    #[serde(skip)]
    pub mounted: Vec<PathBuf>,
}

impl Truth {
    /// Whether nothing is staged, published or mounted.
    pub fn is_clean(&self) -> bool {
        self.staged.is_empty() && self.published.is_empty() && self.mounted.is_empty()
    }
}

fn file(state: &Path) -> PathBuf {
    state.join("state.json")
}

pub(super) fn load(state: &Path) -> io::Result<Truth> {
    match fs::read(file(state)) {
        Ok(text) => serde_json::from_slice(&text).map_err(io::Error::other),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Truth::default()),
        Err(error) => Err(error),
    }
}

pub(super) fn save(state: &Path, truth: &Truth) -> io::Result<()> {
    let temporary = state.join(".state.json");
    let text = serde_json::to_vec_pretty(truth).map_err(io::Error::other)?;
    fs::write(&temporary, text)?;
    fs::rename(temporary, file(state))
}

pub(super) fn truth(options: &CsiOptions) -> io::Result<Truth> {
    let mut truth = load(&options.state)?;
    truth.mounted = mounts::table()?;
    truth.mounted.retain(|point| {
        point.starts_with(&options.root)
            && (point
                .components()
                .any(|c| c.as_os_str() == "kubernetes.io~csi")
                || point.starts_with(options.root.join("plugins/kubernetes.io/csi")))
    });
    Ok(truth)
}

/// A handle as a file name.
fn encoded(volume: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    volume.bytes().fold(String::new(), |mut name, b| {
        if plain(b) {
            name.push(char::from(b));
        } else {
            name.push_str(&format!("%{b:02x}"));
        }
        name
    })
}

pub(super) fn volume_dir(state: &Path, volume: &str) -> PathBuf {
    state.join("volumes").join(encoded(volume))
}

pub(super) fn volume_file(state: &Path, volume: &str) -> PathBuf {
    state.join("blocks").join(encoded(volume))
}

/// Unmounts what a driver that was killed left behind.
pub(super) fn clean_up(options: &CsiOptions) {
    let Ok(truth) = truth(options) else {
        return;
    };
    for point in truth.published.keys().chain(&truth.mounted) {
        mounts::unmount_lazily(point);
    }
    for staged in truth.staged.values() {
        mounts::unmount_lazily(&staged.path);
    }
    let blocks = fs::read_dir(options.state.join("blocks"));
    for entry in blocks.into_iter().flatten().flatten() {
        mounts::detach_loops(&entry.path());
    }
}
