//! `holdfast keys`: the keys that secrets on disk are encrypted with.
//!
//! A running agent is not in the way: it takes up a changed file by itself. Which key is needed is read off the store
//! (of a live agent by way of a backup) and off every backup.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Subcommand, ValueEnum};
use futures::StreamExt;
use serde_json::{Value, json};

use super::output::{Grid, note, print, printable};
use super::{CliError, StateDir, offline};
use crate::admin::client::{Client, ClientError};
use crate::admin::view::API_VERSION;
use crate::core::state::{State, Table};
use crate::objects::keyring::{KeyFile, KeyFileError, KeyId, Keyring};
use crate::objects::vault;
use crate::store::codec::{Loaded, Quarantined};
use crate::store::layout::Layout;
use crate::store::{backup, verify};

pub(super) const LONG_HELP: &str = "\
List, rotate or remove the keys that encrypt stored secrets and tokens.

The keys are in a file that only root may read, the active key first; the agent creates it at its first start. The agent \
may keep running: it loads a changed file within 10 s and encrypts its records again with the active key. A key that a \
backup needs stays in the file until that backup is deleted. Databases in quarantine are not checked.

If the agent gets its keys as the systemd credential holdfast.secrets-key, edit the file of LoadCredential= with \
--secrets-key-file and restart the agent.";

#[derive(Clone, Debug, Args)]
pub(super) struct KeysArgs {
    #[command(subcommand)]
    command: KeysCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum KeysCommand {
    /// List the keys by ID, with the number of records that need them
    List(ListArgs),
    /// Add a new key and make it the active one
    Rotate(RotateArgs),
    /// Remove keys that neither the store nor a backup needs
    Prune(PruneArgs),
}

#[derive(Clone, Debug, Args)]
struct Place {
    /// File with the keys [default: keys/secrets.key in the state directory]
    #[arg(long, value_name = "FILE")]
    secrets_key_file: Option<PathBuf>,
    #[command(flatten)]
    state_dir: StateDir,
}

#[derive(Clone, Debug, Args)]
struct Backups {
    /// Another backup to check, such as one that was moved elsewhere; may be repeated
    #[arg(long = "backup", value_name = "FILE")]
    backups: Vec<PathBuf>,
}

#[derive(Clone, Debug, Args)]
struct ListArgs {
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: Format,
    #[command(flatten)]
    backups: Backups,
    #[command(flatten)]
    place: Place,
}

#[derive(Clone, Debug, Args)]
struct RotateArgs {
    #[command(flatten)]
    place: Place,
}

#[derive(Clone, Debug, Args)]
struct PruneArgs {
    /// IDs of the keys to remove [default: every key that is not needed]
    #[arg(value_name = "KEY")]
    keys: Vec<String>,
    /// Print the keys that would be removed, and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    backups: Backups,
    #[command(flatten)]
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For humans
    Text,
    /// An object
    Json,
}

pub(super) async fn run(args: KeysArgs) -> anyhow::Result<()> {
    match args.command {
        KeysCommand::List(args) => list(&args).await,
        KeysCommand::Rotate(args) => rotate(&args).await,
        KeysCommand::Prune(args) => prune(&args).await,
    }
}

impl Place {
    fn file(&self) -> KeyFile {
        KeyFile::locate(
            &self.state_dir.state_dir,
            self.secrets_key_file.as_deref(),
            None,
        )
    }
}

/// Converts an error; an absent file has an exit code of its own.
fn explain(error: KeyFileError) -> anyhow::Error {
    match &error {
        KeyFileError::Absent { .. } => CliError::NotFound(format!(
            "{error}; the agent creates it at its first start. Check --state-dir, and whether the agent runs \
             with --secrets-key-file"
        ))
        .into(),
        _ => error.into(),
    }
}

/// Something that holds encrypted records, and how many of them need which key.
struct Holder {
    what: String,
    records: BTreeMap<KeyId, usize>,
}

impl Holder {
    fn of(what: String, state: &State, damaged: &[&Quarantined], ring: &Keyring) -> Self {
        let mut records = BTreeMap::new();
        for versioned in state.objects.values() {
            let record = &versioned.record;
            if record.encrypted
                && let Some(id) = vault::key_of(&record.data)
            {
                *records.entry(id).or_default() += 1;
            }
        }
        // Of what cannot be read, a version that can may still be found: it counts when it names a key.
        for bad in damaged {
            if bad.table.is_some_and(|table| table != Table::Objects) {
                continue;
            }
            for id in ring.iter().map(|key| key.id()) {
                if bad.raw.windows(id.0.len()).any(|bytes| bytes == id.0) {
                    *records.entry(id).or_default() += 1;
                }
            }
        }
        Self { what, records }
    }

    fn loaded(what: String, loaded: &Loaded, ring: &Keyring) -> anyhow::Result<Self> {
        if loaded.newer().is_some() {
            anyhow::bail!(
                "a newer holdfast wrote the {what}; use that one to see which keys it needs"
            );
        }
        let damaged: Vec<_> = loaded.quarantined.iter().chain(&loaded.kept).collect();
        Ok(Self::of(what, &loaded.state, &damaged, ring))
    }
}

/// Returns the store and every backup. An unreadable one is an error: the keys that it needs are unknown.
async fn holders(place: &Place, backups: &Backups, ring: &Keyring) -> anyhow::Result<Vec<Holder>> {
    let dir = &place.state_dir.state_dir;
    let mut found = Vec::new();
    let store = format!("store in {}", dir.display());
    match Client::connect(dir).await {
        Ok(client) => {
            let loaded = live(&client).await?;
            found.push(Holder::loaded(store, &loaded, ring)?);
        }
        Err(ClientError::NotRunning { .. }) => match verify::read_copy(dir) {
            Ok(copy) => {
                for text in &copy.notes {
                    note(format_args!("warning: {text}"));
                }
                found.push(Holder::loaded(store, &copy.loaded, ring)?);
            }
            Err(verify::VerifyError::Absent { .. }) => {
                note(format_args!("there is no store in {}", dir.display()));
            }
            Err(error) => return Err(error.into()),
        },
        Err(error) => return Err(error.into()),
    }
    let automatic = Layout::new(dir).backups();
    let automatic = backup::list(&automatic)
        .with_context(|| format!("list backups {}", automatic.display()))?;
    for path in automatic.iter().chain(&backups.backups) {
        let backup = backup::read(path).with_context(|| {
            format!(
                "determine the keys that {} needs; delete it if it is not needed",
                path.display()
            )
        })?;
        let what = format!("backup {}", path.display());
        found.push(Holder::loaded(what, &backup.load(), ring)?);
    }
    Ok(found)
}

/// The records of a live agent.
async fn live(client: &Client) -> anyhow::Result<Loaded> {
    let temporary = tempfile::tempdir().context("create a temporary directory")?;
    let path = temporary.path().join("backup");
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .context("create a temporary file")?;
    let mut pieces = client.backup().await?.pieces();
    while let Some(piece) = pieces.next().await {
        let piece = piece.context("the agent stopped sending its records; see its log")?;
        file.write_all(&piece).context("write a temporary file")?;
    }
    drop(file);
    let backup = backup::read(&path).context("read the records sent by the agent")?;
    Ok(backup.load())
}

async fn list(args: &ListArgs) -> anyhow::Result<()> {
    let file = args.place.file();
    let ring = file.read().map_err(explain)?;
    let holders = holders(&args.place, &args.backups, &ring).await?;
    match args.output {
        Format::Text => print(&list_text(&ring, &holders)),
        Format::Json => print(&format!("{:#}\n", list_json(file.path(), &ring, &holders))),
    }
}

/// Keys that something needs and that are not in the file.
fn missing(ring: &Keyring, holders: &[Holder]) -> BTreeSet<KeyId> {
    let needed = holders.iter().flat_map(|holder| holder.records.keys());
    needed
        .copied()
        .filter(|id| ring.get(*id).is_none())
        .collect()
}

fn needed_by(id: KeyId, holders: &[Holder]) -> Vec<(&str, usize)> {
    let needing = holders.iter().filter_map(|holder| {
        let records = holder.records.get(&id)?;
        Some((holder.what.as_str(), *records))
    });
    needing.collect()
}

fn list_text(ring: &Keyring, holders: &[Holder]) -> String {
    let head = ["KEY", "STATE", "CREATED", "NEEDED BY"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let mut row = |id: KeyId, state: &str, created: &str| {
        let needed: Vec<String> = needed_by(id, holders)
            .into_iter()
            .map(|(what, records)| format!("{} ({records})", printable(what)))
            .collect();
        let needed = match needed.is_empty() {
            true => "-".to_owned(),
            false => needed.join(", "),
        };
        rows.push(vec![
            id.to_string(),
            state.to_owned(),
            printable(created),
            needed,
        ]);
    };
    for key in ring.iter() {
        let is_active = key.id() == ring.active().id();
        row(
            key.id(),
            if is_active { "active" } else { "old" },
            key.created(),
        );
    }
    for id in missing(ring, holders) {
        row(id, "missing", "-");
    }
    Grid::default().lines(&rows)
}

fn list_json(path: &Path, ring: &Keyring, holders: &[Holder]) -> Value {
    let needed = |id: KeyId| -> Vec<Value> {
        let needed = needed_by(id, holders).into_iter();
        needed
            .map(|(what, records)| json!({"what": what, "records": records}))
            .collect()
    };
    let keys: Vec<_> = ring
        .iter()
        .map(|key| {
            json!({
                "id": key.id().to_string(),
                "active": key.id() == ring.active().id(),
                "created": key.created(),
                "neededBy": needed(key.id()),
            })
        })
        .collect();
    let missing: Vec<_> = missing(ring, holders)
        .into_iter()
        .map(|id| json!({"id": id.to_string(), "neededBy": needed(id)}))
        .collect();
    json!({
        "apiVersion": API_VERSION,
        "kind": "SecretsKeys",
        "file": path,
        "keys": keys,
        "missing": missing,
    })
}

async fn rotate(args: &RotateArgs) -> anyhow::Result<()> {
    let file = args.place.file();
    let before = file.read().map_err(explain)?.active().id();
    let ring = file.rotate(offline::now(None)).map_err(explain)?;
    match Client::connect(&args.place.state_dir.state_dir).await {
        Ok(_) => note("the agent loads the key within 10 s and encrypts its records again"),
        Err(_) => note("no agent runs; at its next start it encrypts its records again"),
    }
    print(&format!(
        "active key: {}\n{before} is kept for existing records, until `holdfast keys prune`\n",
        ring.active().id()
    ))
}

async fn prune(args: &PruneArgs) -> anyhow::Result<()> {
    let file = args.place.file();
    let ring = file.read().map_err(explain)?;
    let wanted = wanted(&args.keys, file.path(), &ring)?;
    let holders = holders(&args.place, &args.backups, &ring).await?;
    let old = ring.iter().map(|key| key.id());
    let old: Vec<KeyId> = old.filter(|id| *id != ring.active().id()).collect();
    let mut gone = Vec::new();
    for id in wanted.as_deref().unwrap_or(&old) {
        let needed = needed_by(*id, &holders);
        if needed.is_empty() {
            gone.push(*id);
            continue;
        }
        let by: Vec<_> = needed.iter().map(|(what, _)| printable(what)).collect();
        let by = by.join(", ");
        if wanted.is_some() {
            anyhow::bail!("remove key {id}: it is needed by {by}; nothing was removed");
        }
        note(format_args!("key {id} is kept: it is needed by {by}"));
    }
    if gone.is_empty() {
        note("nothing to remove");
        return Ok(());
    }
    note("backups outside the state directory are checked only if --backup names them");
    if !args.dry_run {
        file.remove(&gone).map_err(explain)?;
    }
    let verb = if args.dry_run {
        "would remove"
    } else {
        "removed"
    };
    print(
        &gone
            .iter()
            .map(|id| format!("{verb} {id}\n"))
            .collect::<String>(),
    )
}

/// The keys that were named; `None` when none were.
fn wanted(keys: &[String], path: &Path, ring: &Keyring) -> anyhow::Result<Option<Vec<KeyId>>> {
    let mut found = Vec::new();
    for text in keys {
        let id: KeyId = match text.parse() {
            Ok(id) => id,
            Err(error) => return Err(CliError::Usage(format!("{text}: {error}")).into()),
        };
        if id == ring.active().id() {
            let message =
                format!("{id} is the active key; `holdfast keys rotate` makes another one active");
            return Err(CliError::Usage(message).into());
        }
        if ring.get(id).is_none() {
            let message = format!("there is no key {id} in {}", path.display());
            return Err(CliError::NotFound(message).into());
        }
        found.push(id);
    }
    Ok((!found.is_empty()).then_some(found))
}
