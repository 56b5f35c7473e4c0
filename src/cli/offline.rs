//! Access of the command line to a store that no agent holds, and to facts of its machine.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;

use super::output::note;
use crate::admin::view::Quarantined;
use crate::agent::lock::StateLock;
use crate::core::state::{MetaRecord, State};
use crate::store::backup::{self, BackupMeta};
use crate::store::migrate::SCHEMA;
use crate::store::recover::Identity;
use crate::store::verify;
use crate::types::boot::machine_id_of;
use crate::types::{BootIdentity, Clock, Stamp, SystemClock};

/// Readable content of a store.
pub(super) struct Copy {
    pub(super) state: State,
    pub(super) quarantined: Vec<Quarantined>,
    schema: Option<u32>,
}

/// Reads a copy of the store and prints its problems on stderr.
pub(super) fn read_copy(dir: &Path) -> anyhow::Result<Copy> {
    let copy = verify::read_copy(dir)?;
    for text in &copy.notes {
        note(format_args!("warning: {text}"));
    }
    if copy.salvaged {
        note("warning: the database cannot be opened; showing the records recovered from its log");
    }
    if let Some(schema) = copy.schema.filter(|schema| *schema != SCHEMA) {
        note(format_args!(
            "warning: the store has schema {schema}, this binary reads schema {SCHEMA}"
        ));
    }
    let bad = copy.loaded.quarantined.iter().chain(&copy.loaded.kept);
    Ok(Copy {
        quarantined: bad.map(Quarantined::from).collect(),
        state: copy.loaded.state,
        schema: copy.schema,
    })
}

/// Writes a backup of a copy of the store.
pub(super) fn write_backup(dir: &Path, to: &mut dyn Write) -> anyhow::Result<()> {
    let copy = read_copy(dir)?;
    if let Some(schema) = copy.schema.filter(|schema| *schema != SCHEMA) {
        anyhow::bail!(
            "back up the store in {}: it has schema {schema}, this binary knows schema {SCHEMA}; \
             use the binary that wrote it",
            dir.display()
        );
    }
    if !copy.quarantined.is_empty() {
        note(format_args!(
            "warning: {} records cannot be read and are not in the backup",
            copy.quarantined.len()
        ));
    }
    let temporary = tempfile::tempdir().context("create a temporary directory")?;
    let path = temporary.path().join("backup");
    let meta = BackupMeta::of(&copy.state, 0, now(copy.state.meta()));
    backup::write(&copy.state, &path, &meta)?;
    let mut file = fs::File::open(&path).context("read the backup")?;
    io::copy(&mut file, to).context("write the backup")?;
    to.flush().context("write the backup")
}

/// The running boot, as the agent that wrote `meta` would tell it.
fn boot(meta: Option<&MetaRecord>) -> BootIdentity {
    BootIdentity {
        runtime_state: meta
            .map(|m| m.boot.runtime_state.clone())
            .unwrap_or_default(),
        ..BootIdentity::read(None, None)
    }
}

/// The present moment, in the boot of `meta` if that is still the running one.
pub(super) fn now(meta: Option<&MetaRecord>) -> Stamp {
    SystemClock::new(boot(meta).id()).now()
}

/// Returns the node's identity for the store in `dir`: by the argument, else by the store, else by the host name.
pub(super) fn identity(dir: &Path, node_name: Option<&str>, meta: Option<&MetaRecord>) -> Identity {
    let node_name = node_name
        .map(str::to_owned)
        .or_else(|| meta.map(|m| m.node_name.clone()))
        .unwrap_or_else(host_name);
    Identity {
        node_name,
        machine_id: machine_id_of(dir),
        boot: boot(meta),
    }
}

/// The name of the host as a node has it; empty when it cannot be read.
pub(super) fn host_name() -> String {
    nix::unistd::gethostname()
        .map(|name| name.to_string_lossy().trim().to_lowercase())
        .unwrap_or_default()
}

/// The lock of a state directory that must be there.
pub(super) fn lock_existing(dir: &Path) -> anyhow::Result<StateLock> {
    if !dir.is_dir() {
        anyhow::bail!("there is no directory {}; check --state-dir", dir.display());
    }
    Ok(StateLock::acquire(dir)?)
}
