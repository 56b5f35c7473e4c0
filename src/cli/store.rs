//! `holdfast store`: looks after the store of a stopped agent. `new-disk` alone is for one that waits.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};

use super::output::{note, print, printable};
use super::{CliError, StateDir, offline};
use crate::admin::client::{Client, ClientError};
use crate::admin::view::{API_VERSION, Quarantined};
use crate::store::backend::SledOptions;
use crate::store::mounts::{Directory, Mount};
use crate::store::open::{OpenOptions, Outcome};
use crate::store::verify::{self, Stats, VerifyReport};
use crate::store::{codec, migrate};

#[derive(Clone, Debug, Args)]
pub(super) struct StoreArgs {
    #[command(subcommand)]
    command: StoreCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum StoreCommand {
    /// Check every record and every backup; changes nothing; exit code 1 when something is damaged
    Verify(LookArgs),
    /// Repair the store as the agent does at its start: quarantine damaged parts, restore lost records from backups
    Repair(RepairArgs),
    /// Convert the store to another schema, for a downgrade; takes a backup first
    Migrate(MigrateArgs),
    /// Show the number and size of the records; changes nothing
    Stats(LookArgs),
    /// Accept the present file system of a directory for good; the agent may keep running
    #[command(name = "new-disk", long_about = NEW_DISK)]
    NewDisk(NewDiskArgs),
}

const NEW_DISK: &str = "\
Accept the present file system of a directory for good.

The agent records the file system of each directory that it takes facts from. While that file system is not mounted, the \
agent waits, since a disk that is mounted late looks like one that was wiped. This command records the file system that the \
directory is on now as the right one. The agent continues within seconds, or at its next start.

A root directory without the identity of the previous one then counts as wiped: the store is moved to quarantine and a new \
one is created. In an empty state directory, a new store is created. Files that are missing in the directory of manifests or \
of image archives count as removed.";

#[derive(Clone, Debug, Args)]
struct LookArgs {
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: Format,
    #[command(flatten)]
    state_dir: StateDir,
}

#[derive(Clone, Debug, Args)]
struct RepairArgs {
    /// Name of this node, if the agent runs with --hostname-override and the store's own record is lost
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    #[command(flatten)]
    state_dir: StateDir,
}

#[derive(Clone, Debug, Args)]
struct MigrateArgs {
    /// Schema of the binary to use from now on
    #[arg(long, value_name = "SCHEMA")]
    to: u32,
    #[command(flatten)]
    state_dir: StateDir,
}

#[derive(Clone, Debug, Args)]
struct NewDiskArgs {
    /// Directory whose present file system is accepted
    #[arg(value_name = "DIRECTORY")]
    directory: Named,
    #[command(flatten)]
    state_dir: StateDir,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Named {
    /// --root-dir
    RootDir,
    /// --state-dir
    StateDir,
    /// staticPodPath
    Manifests,
    /// Archives of images, below the state directory
    Preload,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For humans
    Text,
    /// An object
    Json,
}

pub(super) async fn run(args: StoreArgs) -> anyhow::Result<()> {
    match args.command {
        StoreCommand::Verify(args) => run_verify(&args).await,
        StoreCommand::Repair(args) => repair(&args),
        StoreCommand::Migrate(args) => run_migrate(&args),
        StoreCommand::Stats(args) => stats(&args),
        StoreCommand::NewDisk(args) => new_disk(&args),
    }
}

fn new_disk(args: &NewDiskArgs) -> anyhow::Result<()> {
    let state_dir = &args.state_dir.state_dir;
    let directory = match args.directory {
        Named::RootDir => Directory::Root,
        Named::StateDir => Directory::State,
        Named::Manifests => Directory::Manifests,
        Named::Preload => Directory::Preload,
    };
    let path = match directory {
        // Its record is in the root directory.
        Directory::State => Some(state_dir.clone()),
        Directory::Root | Directory::Manifests | Directory::Preload => {
            Mount::recorded_path(directory, state_dir)
                .with_context(|| format!("read the records in {}", state_dir.display()))?
        }
    };
    let name = directory.as_str();
    let path = path.ok_or_else(|| {
        CliError::NotFound(format!(
            "no file system of {name} is recorded in {}, so no agent waits for one; check --state-dir",
            state_dir.display()
        ))
    })?;
    let found = Mount::new(directory, &path, state_dir)
        .accept()
        .with_context(|| format!("accept the file system of {}", path.display()))?;
    print(&format!(
        "{} ({name}) is on {found} from now on\n",
        path.display()
    ))
}

async fn run_verify(args: &LookArgs) -> anyhow::Result<()> {
    let dir = &args.state_dir.state_dir;
    match Client::connect(dir).await {
        Err(ClientError::NotRunning { .. }) => {}
        _ => anyhow::bail!(
            "verify the store in {}: an agent writes to it now; stop the agent first, or check \
             `holdfast dump meta` and the metric holdfast_store_quarantined_records",
            dir.display()
        ),
    }
    let report = verify::verify(dir)?;
    match args.output {
        Format::Text => print(&verify_text(dir, &report))?,
        Format::Json => print(&format!("{:#}\n", verify_json(&report)))?,
    }
    match report.is_ok() {
        true => Ok(()),
        false => anyhow::bail!(
            "the store in {} is damaged; the agent repairs it at its next start, as does `holdfast store repair`",
            dir.display()
        ),
    }
}

fn verify_text(dir: &Path, report: &VerifyReport) -> String {
    let mut text = format!(
        "store in {}: schema {}\n",
        dir.display(),
        schema(report.schema)
    );
    text.push_str(&record_lines(&report.records));
    for problem in &report.problems {
        text.push_str(&format!("problem: {}\n", printable(problem)));
    }
    for (what, bad) in [
        ("bad record", &report.quarantined),
        ("quarantined before", &report.kept),
    ] {
        for bad in bad.iter().map(Quarantined::from) {
            text.push_str(&format!(
                "{what}: {} {} ({} bytes): {}\n",
                bad.table,
                printable(&bad.key),
                bad.bytes,
                printable(&bad.reason)
            ));
        }
    }
    for (path, wrong) in &report.backups {
        let state = wrong.as_deref().unwrap_or("ok");
        text.push_str(&format!("backup {}: {state}\n", path.display()));
    }
    text.push_str(match report.is_ok() {
        true => "the store is undamaged\n",
        false => "the store is damaged\n",
    });
    text
}

fn verify_json(report: &VerifyReport) -> Value {
    let list =
        |bad: &[codec::Quarantined]| -> Vec<_> { bad.iter().map(Quarantined::from).collect() };
    let backups: Vec<_> = report
        .backups
        .iter()
        .map(|(path, wrong)| json!({"path": path, "problem": wrong}))
        .collect();
    json!({
        "apiVersion": API_VERSION,
        "kind": "StoreVerification",
        "ok": report.is_ok(),
        "schema": report.schema,
        "records": report.records,
        "problems": report.problems,
        "quarantined": list(&report.quarantined),
        "setAsideBefore": list(&report.kept),
        "backups": backups,
    })
}

fn schema(schema: Option<u32>) -> String {
    schema.map_or_else(|| "unknown".to_owned(), |schema| schema.to_string())
}

fn record_lines(records: &BTreeMap<&'static str, usize>) -> String {
    let some = records.iter().filter(|(_, count)| **count > 0);
    some.map(|(table, count)| format!("  {table}: {count}\n"))
        .collect()
}

fn repair(args: &RepairArgs) -> anyhow::Result<()> {
    let dir = &args.state_dir.state_dir;
    let _lock = offline::lock_existing(dir)?;
    // Opening what is not there would make a new store, which is not what was asked for.
    let present = verify::read_copy(dir)?;
    let meta = present.loaded.state.meta();
    let options = OpenOptions {
        node_was_used: false,
        dir: dir.clone(),
        identity: offline::identity(dir, args.node_name.as_deref(), meta),
        sled: SledOptions::default(),
        now: offline::now(meta),
    };
    let report = verify::repair(&options, &present)?;
    let mut text = String::new();
    for message in &report.open.messages {
        text.push_str(&format!("{}\n", printable(message)));
    }
    text.push_str(&match &report.open.outcome {
        Outcome::Opened => "the database opened without a repair\n".to_owned(),
        Outcome::Created => "a new store was created\n".to_owned(),
        Outcome::SnapshotsRemoved => {
            "damaged snapshots or settings were moved aside, no record was lost\n".to_owned()
        }
        Outcome::Salvaged {
            kept,
            lost,
            from_backup,
        } => format!(
            "the database was rebuilt: {kept} records kept, {lost} lost, {from_backup} taken from a backup\n"
        ),
        Outcome::RecordsLost { lost, from_backup } => format!(
            "{lost} damaged records were moved to quarantine, {from_backup} of them restored from a backup\n"
        ),
        Outcome::EndMissing { lines } => format!(
            "the newest commits are missing{}: the database was cut off or is an older copy\n",
            lines.map_or_else(String::new, |n| format!(", {n} lines of the journal"))
        ),
        Outcome::NewerSchema { found } => format!(
            "the store has schema {}, newer than {}; it is untouched: use the binary that wrote it\n",
            schema(*found),
            migrate::SCHEMA
        ),
        Outcome::Unwritable { reason, .. } => format!("the store cannot be written: {reason}\n"),
    });
    for path in &report.open.quarantined {
        text.push_str(&format!("in quarantine: {}\n", path.display()));
    }
    text.push_str(&record_lines(&report.records));
    print(&text)?;
    match &report.open.outcome {
        Outcome::NewerSchema { .. } | Outcome::Unwritable { .. } => {
            anyhow::bail!("the store in {} was not repaired", dir.display())
        }
        _ => Ok(()),
    }
}

/// The steps of this binary. A crash-test build plays a newer one when `HOLDFAST_NEWER_SCHEMA` is set.
pub(super) fn steps() -> migrate::MigrationSet {
    #[cfg(feature = "failpoints")]
    if std::env::var_os("HOLDFAST_NEWER_SCHEMA").is_some() {
        return migrate::migrations::test_step::NEWER;
    }
    migrate::MigrationSet::default()
}

fn run_migrate(args: &MigrateArgs) -> anyhow::Result<()> {
    let dir = &args.state_dir.state_dir;
    let _lock = offline::lock_existing(dir)?;
    let report = migrate::migrate_with(steps(), dir, args.to, offline::now(None))?;
    let said = |what: &str, path: &Option<PathBuf>| match path {
        Some(path) => format!("{what}: {}\n", path.display()),
        None => String::new(),
    };
    if report.from == report.to {
        note("nothing to do");
    }
    print(&format!(
        "schema {} -> {}, {} records\n{}{}",
        report.from,
        report.to,
        report.records,
        said("backup taken before", &report.backup),
        said("previous database", &report.previous)
    ))
}

fn stats(args: &LookArgs) -> anyhow::Result<()> {
    let dir = &args.state_dir.state_dir;
    let stats = verify::stats(dir)?;
    match args.output {
        Format::Text => print(&stats_text(dir, &stats)),
        Format::Json => print(&format!(
            "{:#}\n",
            json!({
                "apiVersion": API_VERSION,
                "kind": "StoreStats",
                "schema": stats.schema,
                "records": stats.records,
                "liveBytes": stats.live_bytes,
                "databaseBytes": stats.db_bytes,
                "diskBytes": stats.disk_bytes,
                "backups": stats.backups,
                "backupBytes": stats.backup_bytes,
                "quarantined": stats.quarantined,
                "quarantineBytes": stats.quarantine_bytes,
                "ballastBytes": stats.ballast_bytes,
            })
        )),
    }
}

fn stats_text(dir: &Path, stats: &Stats) -> String {
    format!(
        "store in {}: schema {}\n{}live records: {} bytes\ndatabase: {} bytes\nbackups: {} ({} bytes)\n\
         quarantined records: {}\nquarantine: {} bytes\nballast: {} bytes\non disk, all of it: {} bytes\n",
        dir.display(),
        schema(stats.schema),
        record_lines(&stats.records),
        stats.live_bytes,
        stats.db_bytes,
        stats.backups,
        stats.backup_bytes,
        stats.quarantined,
        stats.quarantine_bytes,
        stats.ballast_bytes,
        stats.disk_bytes,
    )
}
