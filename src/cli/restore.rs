//! `holdfast restore`: verifies a backup, then puts it in the place of the store of a stopped agent.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;

use super::output::{note, print, printable};
use super::{StateDir, offline};
use crate::admin::view::PodIndex;
use crate::agent::lock::StateLock;
use crate::core::state::{MetaRecord, State};
use crate::store::backup::{self, Backup};
use crate::store::restore::{self, Diff, RestoreOptions};
use crate::store::verify;

pub(super) const LONG_HELP: &str = "\
Verifies a backup and replaces the store with it. The agent must be stopped; the previous store is kept in \
quarantine. A new epoch begins: the agent adopts running pods, and starts any other pod only after its source has \
confirmed it, so an old backup does not restart pods that have moved to another node.";

#[derive(Clone, Debug, Args)]
pub(super) struct RestoreArgs {
    /// Backup file
    file: PathBuf,
    /// Verify, print what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Accept the backup of another node or machine
    #[arg(long)]
    allow_other_node: bool,
    /// Name of this node, if the agent runs with --hostname-override and there is no store yet
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    #[command(flatten)]
    state_dir: StateDir,
}

pub(super) async fn run(args: RestoreArgs) -> anyhow::Result<()> {
    let dir = &args.state_dir.state_dir;
    let backup = backup::read(&args.file)?;
    if args.dry_run {
        return dry_run(&args, &backup);
    }
    // Everything is verified before the lock makes the directory.
    restore::state_of(&backup).with_context(|| format!("use {}", args.file.display()))?;
    let _lock = StateLock::acquire(dir)?;
    let present = verify::read_copy(dir).ok();
    let meta = present.as_ref().and_then(|copy| copy.loaded.state.meta());
    let options = options(&args, meta);
    let report = restore::apply(dir, &backup, &options)?;
    let mut text = format!(
        "restored {} records into {}, epoch {}\n",
        report.records,
        dir.display(),
        report.epoch
    );
    if let Some(previous) = &report.previous {
        text.push_str(&format!(
            "the previous store is in {}\n",
            previous.display()
        ));
    }
    print(&text)
}

fn options(args: &RestoreArgs, meta: Option<&MetaRecord>) -> RestoreOptions {
    RestoreOptions {
        identity: offline::identity(&args.state_dir.state_dir, args.node_name.as_deref(), meta),
        allow_other_node: args.allow_other_node,
        now: offline::now(meta),
    }
}

fn dry_run(args: &RestoreArgs, backup: &Backup) -> anyhow::Result<()> {
    let dir = &args.state_dir.state_dir;
    let present = match verify::read_copy(dir) {
        Ok(copy) => Some(copy.loaded.state),
        Err(error) => {
            note(format_args!("{:#}", anyhow::Error::new(error)));
            None
        }
    };
    let diff = restore::plan(present.as_ref(), backup)?;
    let meta = present.as_ref().and_then(|state| state.meta());
    let node = offline::identity(dir, args.node_name.as_deref(), meta).node_name;
    if backup.meta.node_name != node {
        note(format_args!(
            "warning: the backup is of node {:?}, this is {node:?}; the restore needs --allow-other-node",
            backup.meta.node_name
        ));
    }
    let restored = restore::state_of(backup)?;
    print(&describe(
        backup,
        &diff,
        &Names::of(&restored, present.as_ref()),
    ))
}

/// Names of pods: from the backup, else from the store.
struct Names([PodIndex; 2]);

impl Names {
    fn of(restored: &State, present: Option<&State>) -> Self {
        let present = present.map(PodIndex::of).unwrap_or_default();
        Self([PodIndex::of(restored), present])
    }

    /// ` namespace/name` when the key is a UID, or begins with one.
    fn of_key(&self, key: &str) -> String {
        let uid = key.split('/').next().unwrap_or(key);
        let mut names = self.0.iter().filter_map(|index| index.get(uid));
        match names.find(|names| !names.name.is_empty()) {
            Some(names) => format!(
                " {}/{}",
                printable(&names.namespace),
                printable(&names.name)
            ),
            None => String::new(),
        }
    }
}

fn describe(backup: &Backup, diff: &Diff, names: &Names) -> String {
    let meta = &backup.meta;
    let mut text = format!(
        "backup of node {} taken {} by holdfast {}, schema {}, epoch {}: it verifies\n",
        printable(&meta.node_name),
        meta.taken.rfc3339(),
        printable(&meta.agent),
        meta.schema,
        meta.epoch
    );
    if diff.tables.is_empty() {
        text.push_str("the store has the same records\n");
        return text;
    }
    for table in &diff.tables {
        text.push_str(&format!(
            "{}: {} added, {} changed, {} removed\n",
            table.table.name(),
            table.added.len(),
            table.changed.len(),
            table.removed.len()
        ));
        for (sign, keys) in [
            ('+', &table.added),
            ('~', &table.changed),
            ('-', &table.removed),
        ] {
            for key in keys {
                text.push_str(&format!(
                    "  {sign} {}{}\n",
                    printable(key),
                    names.of_key(key)
                ));
            }
        }
    }
    text.push_str("nothing was changed (dry run)\n");
    text
}
