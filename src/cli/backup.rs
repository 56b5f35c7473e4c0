//! `holdfast backup`: from a live agent, or from a copy of a store that no agent holds.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use futures::StreamExt;

use super::output::{note, print};
use super::{CliError, StateDir, offline};
use crate::admin::client::{Client, ClientError};
use crate::store::verify;
use crate::types::{BootId, Clock, SystemClock};

#[derive(Clone, Debug, Args)]
pub(super) struct BackupArgs {
    /// File to write, `-` for stdout [default: holdfast-TIME.backup in the current directory]
    file: Option<PathBuf>,
    /// Replace the file if it exists
    #[arg(short, long)]
    force: bool,
    /// Let the running agent write the backup below its state directory, like its automatic backups
    #[arg(long, conflicts_with_all = ["file", "force"])]
    in_state_dir: bool,
    #[command(flatten)]
    state_dir: StateDir,
}

pub(super) async fn run(args: BackupArgs) -> anyhow::Result<()> {
    let dir = &args.state_dir.state_dir;
    let client = match Client::connect(dir).await {
        Ok(client) => Some(client),
        Err(ClientError::NotRunning { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    match &client {
        Some(_) => note("source: live agent"),
        None => {
            verify::present(dir)?;
            note(format_args!(
                "source: copy of the store in {} (no agent runs)",
                dir.display()
            ));
        }
    }
    if args.in_state_dir {
        let Some(client) = client else {
            let message = "--in-state-dir needs a live agent; name a file instead";
            return Err(CliError::Usage(message.into()).into());
        };
        let path = client.save_backup().await?;
        return print(&format!("{}\n", path.display()));
    }
    let file = match &args.file {
        Some(file) => file.clone(),
        None => default_file()?,
    };
    if file.as_os_str() == "-" {
        return fill(client.as_ref(), dir, &mut io::stdout().lock()).await;
    }
    if !args.force && file.exists() {
        let message = format!("{} exists; --force replaces it", file.display());
        return Err(CliError::Usage(message).into());
    }
    let bytes = write_file(client.as_ref(), dir, &file).await?;
    print(&format!("{} ({bytes} bytes)\n", file.display()))
}

/// A name with the time, in the current directory; the whole path, for whoever looks for it later.
fn default_file() -> anyhow::Result<PathBuf> {
    let now = SystemClock::new(BootId(0)).now().rfc3339();
    let compact: String = now.chars().filter(|c| !matches!(c, '-' | ':')).collect();
    let here =
        std::env::current_dir().context("find the current directory; name a file instead")?;
    Ok(here.join(format!("holdfast-{compact}.backup")))
}

/// Writes to a new file beside `file` (mode 0600) and puts it in place when it is complete and on disk.
async fn write_file(client: Option<&Client>, dir: &Path, file: &Path) -> anyhow::Result<u64> {
    let parent = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut draft = tempfile::Builder::new()
        .prefix(".holdfast-backup-")
        .tempfile_in(parent)
        .with_context(|| format!("create a file in {}", parent.display()))?;
    fill(client, dir, draft.as_file_mut()).await?;
    draft
        .as_file()
        .sync_all()
        .with_context(|| format!("sync {}", draft.path().display()))?;
    let bytes = draft
        .as_file()
        .metadata()
        .context("read the size of the backup")?
        .len();
    draft
        .persist(file)
        .with_context(|| format!("put the backup in place as {}", file.display()))?;
    fs::File::open(parent)
        .and_then(|dir| dir.sync_all())
        .with_context(|| format!("sync directory {}", parent.display()))?;
    Ok(bytes)
}

async fn fill(client: Option<&Client>, dir: &Path, to: &mut dyn Write) -> anyhow::Result<()> {
    let Some(client) = client else {
        return offline::write_backup(dir, to);
    };
    let mut pieces = client.backup().await?.pieces();
    while let Some(piece) = pieces.next().await {
        let piece = piece.context("the agent aborted the backup; see its log")?;
        to.write_all(&piece).context("write the backup")?;
    }
    to.flush().context("write the backup")
}
