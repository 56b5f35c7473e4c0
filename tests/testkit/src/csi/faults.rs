//! What goes wrong on purpose: one file for each time, so that the test and the driver need not agree on who writes.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use serde::{Deserialize, Serialize};

/// What goes wrong with a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fault {
    /// It is refused with this code and has no effect.
    Fail(i32, String),
    /// It has its effect, and then this code all the same.
    FailAfter(i32, String),
    /// It has no effect and is never answered.
    Hang,
    /// It has its effect and is never answered.
    HangAfter,
    /// It has no effect, and the answer is no message.
    Garbage,
    /// The driver is killed before it has an effect.
    KillBefore,
    /// The driver is killed when it has had its effect, before the answer.
    KillAfter,
    /// The driver is killed when half of its effect was had: what is mounted is not remembered.
    KillBetween,
}

const ALWAYS: &str = "always";

pub(super) fn add(state: &Path, rpc: &str, fault: &Fault, always: bool) -> io::Result<()> {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let dir = state.join("faults");
    fs::create_dir_all(&dir)?;
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let name = if always {
        format!("{rpc}.{ALWAYS}")
    } else {
        format!("{rpc}.{:010}-{serial:06}", std::process::id())
    };
    let text = serde_json::to_vec(fault).map_err(io::Error::other)?;
    let temporary = dir.join(format!(".{name}"));
    fs::write(&temporary, text)?;
    fs::rename(&temporary, dir.join(name))
}

pub(super) fn clear(state: &Path) -> io::Result<()> {
    match fs::remove_dir_all(state.join("faults")) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The fault of this call, if any. One that counts is used up.
pub(super) fn take(state: &Path, rpc: &str) -> Option<Fault> {
    let dir = state.join("faults");
    let mut names: Vec<String> = fs::read_dir(&dir)
        .ok()?
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.split('.').next() == Some(rpc))
        .collect();
    names.sort();
    for name in names {
        let path = dir.join(&name);
        let Ok(text) = fs::read(&path) else {
            continue;
        };
        // Who removes it has it.
        if !name.ends_with(ALWAYS) && fs::remove_file(&path).is_err() {
            continue;
        }
        if let Ok(fault) = serde_json::from_slice(&text) {
            return Some(fault);
        }
    }
    None
}
