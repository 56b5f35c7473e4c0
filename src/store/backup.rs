//! Backups: one file that holds every record of a snapshot.
//!
//! In comes a [`State`] (an immutable snapshot: the agent need not stop), out goes a file, or the other
//! way round. When to take one is [`due`], which to delete is [`rotate`].
//!
//! ```text
//!  0  "HFBACKUP"   8  format = 1, u16 LE   10  length of the head, u32 LE
//! 14  head: bincode of BackupMeta
//!  …  length of the body, u64 LE; body: zstd of (key length u32, value length u32, key, value)*
//!  …  SHA-256 of everything before it
//! ```
//! Keys and values are those of the store (see [`super::codec`]), each with its own checksum.
//!
//! **Invariant:** a file with a backup's name is complete: it is written under another name, synced,
//! renamed, and its directory is synced. **Invariant:** nothing of a file is used before its checksum matched.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::backend::RawPair;
use super::codec::{self, CodecError, Loaded};
use super::layout::{sync_dir, write_atomically};
use crate::core::state::{State, Version};
use crate::types::{Stamp, causes};

/// Time between automatic backups.
pub const INTERVAL: Duration = Duration::from_secs(600);
/// Automatic backups that are kept.
pub const KEPT: usize = 3;

const MAGIC: &[u8; 8] = b"HFBACKUP";
const FORMAT: u16 = 1;
const DIGEST: usize = 32;
const BODY_LIMIT: u64 = 1 << 30;
const PREFIX: &str = "backup-";
const SUFFIX: &str = ".holdfast";

/// Failure to write or read a backup.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// The file system refused.
    #[error("{action} backup {}", path.display())]
    Io {
        /// Operation that failed.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A record could not be encoded.
    #[error("encode a record for backup {}", path.display())]
    Codec {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: CodecError,
    },
    /// Not a backup, cut off, or changed since it was written.
    #[error("backup {} cannot be used: {reason}; use another backup", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Description of the problem.
        reason: &'static str,
    },
    /// Written by a newer binary.
    #[error("backup {} has format {found}, this binary knows {FORMAT}; use the binary that wrote it", path.display())]
    NewerFormat {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u16,
    },
}

/// Description that a backup holds of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupMeta {
    /// Schema of its records.
    pub schema: u32,
    /// Node it was taken on.
    pub node_name: String,
    /// `/etc/machine-id` of that node.
    pub machine_id: String,
    /// Number of the store's epoch.
    pub epoch: u64,
    /// Key of the newest journal record, empty without one. With `epoch` it orders backups and stores of
    /// one node without trusting a clock.
    pub last_journal: String,
    /// Time of the backup.
    pub taken: Stamp,
    /// Version of the snapshot, of the process that took it.
    pub version: Version,
    /// Version of the agent that took it.
    pub agent: String,
}

impl BackupMeta {
    /// Describes a snapshot.
    pub fn of(state: &State, version: Version, now: Stamp) -> Self {
        let meta = state.meta();
        Self {
            schema: meta.map_or(crate::store::migrate::SCHEMA, |m| m.schema),
            node_name: meta.map(|m| m.node_name.clone()).unwrap_or_default(),
            machine_id: meta.map(|m| m.machine_id.clone()).unwrap_or_default(),
            epoch: meta.map_or(0, |m| m.epoch.number),
            last_journal: last_journal(state),
            taken: now,
            version,
            agent: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// Name under which [`newest`] and [`rotate`] find it. Names sort by age.
    pub fn file_name(&self) -> String {
        format!(
            "{PREFIX}{:08x}-{:0>16}-{:013}{SUFFIX}",
            self.epoch, self.last_journal, self.taken.wall_ms
        )
    }
}

/// A backup that has been read and verified.
#[derive(Clone, Debug)]
pub struct Backup {
    /// Description of the backup.
    pub meta: BackupMeta,
    /// Raw pairs as in the store.
    pub pairs: Vec<RawPair>,
}

impl Backup {
    /// Its records. Those of another schema are in `quarantined`; `store::migrate` converts them.
    pub fn load(&self) -> Loaded {
        codec::load(self.pairs.iter().cloned().map(Ok), 1)
    }
}

/// Key of the newest journal record of a state, empty without one.
pub fn last_journal(state: &State) -> String {
    state
        .journal
        .get_max()
        .map(|(key, _)| key.to_string())
        .unwrap_or_default()
}

/// Writes a snapshot to `path`, readable by root only. Blocks for as long as the disk does.
///
/// # Errors
/// When the file cannot be written; an existing file of that name is then still the old one.
pub fn write(state: &State, path: &Path, meta: &BackupMeta) -> Result<(), BackupError> {
    let pairs: Result<Vec<_>, _> = codec::encode_state(state).collect();
    let pairs = pairs.map_err(|source| BackupError::Codec {
        path: path.to_owned(),
        source,
    })?;
    write_pairs(&pairs, path, meta)
}

/// [`write()`] for raw pairs, of whatever schema.
pub(super) fn write_pairs(
    pairs: &[RawPair],
    path: &Path,
    meta: &BackupMeta,
) -> Result<(), BackupError> {
    let bytes = serialize(pairs, meta, path)?;
    write_atomically(path, &bytes).map_err(|source| BackupError::Io {
        action: "write",
        path: path.to_owned(),
        source,
    })
}

pub(super) fn serialize(
    pairs: &[RawPair],
    meta: &BackupMeta,
    path: &Path,
) -> Result<Vec<u8>, BackupError> {
    let io = |source| BackupError::Io {
        action: "compress",
        path: path.to_owned(),
        source,
    };
    let head = codec::encode_payload(meta).map_err(|source| BackupError::Codec {
        path: path.to_owned(),
        source,
    })?;
    let mut encoder = zstd::Encoder::new(Vec::new(), 3).map_err(io)?;
    for (key, value) in pairs {
        encoder
            .write_all(&(key.len() as u32).to_le_bytes())
            .map_err(io)?;
        encoder
            .write_all(&(value.len() as u32).to_le_bytes())
            .map_err(io)?;
        encoder.write_all(key).map_err(io)?;
        encoder.write_all(value).map_err(io)?;
    }
    let body = encoder.finish().map_err(io)?;
    let mut bytes = Vec::with_capacity(body.len() + head.len() + 64);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&FORMAT.to_le_bytes());
    bytes.extend_from_slice(&(head.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&head);
    bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&body);
    let digest = Sha256::digest(&bytes);
    bytes.extend_from_slice(&digest);
    Ok(bytes)
}

/// Reads and verifies a backup.
///
/// # Errors
/// When it cannot be read, is damaged in any way, or has a newer format.
pub fn read(path: &Path) -> Result<Backup, BackupError> {
    let bytes = read_file(path)?;
    let (meta, pairs) = parse(path, &bytes, BODY_LIMIT)?;
    Ok(Backup { meta, pairs })
}

/// The content of a file whose body is at most `limit` bytes long.
pub(super) fn parse(
    path: &Path,
    bytes: &[u8],
    limit: u64,
) -> Result<(BackupMeta, Vec<RawPair>), BackupError> {
    let (meta, body) = verify(path, bytes)?;
    let pairs =
        parse_body(body, limit).ok_or_else(|| damaged(path, "its content does not decode"))?;
    Ok((meta, pairs))
}

/// Returns the description in the head of a backup. Verifies the whole file, decodes the head only.
///
/// # Errors
/// As [`read`].
pub fn read_meta(path: &Path) -> Result<BackupMeta, BackupError> {
    let bytes = read_file(path)?;
    Ok(verify(path, &bytes)?.0)
}

fn read_file(path: &Path) -> Result<Vec<u8>, BackupError> {
    fs::read(path).map_err(|source| BackupError::Io {
        action: "read",
        path: path.to_owned(),
        source,
    })
}

fn damaged(path: &Path, reason: &'static str) -> BackupError {
    BackupError::Damaged {
        path: path.to_owned(),
        reason,
    }
}

/// Head and compressed body of a file whose checksum is right.
pub(super) fn verify<'a>(
    path: &Path,
    bytes: &'a [u8],
) -> Result<(BackupMeta, &'a [u8]), BackupError> {
    let damaged = |reason| damaged(path, reason);
    if !bytes.starts_with(MAGIC) {
        return Err(damaged("it does not begin like a backup"));
    }
    let format = bytes
        .get(8..10)
        .and_then(|b| b.try_into().ok())
        .map(u16::from_le_bytes)
        .ok_or_else(|| damaged("it is cut off"))?;
    let split = bytes.len().checked_sub(DIGEST);
    let (content, digest) = split
        .filter(|at| *at >= 10)
        .map(|at| bytes.split_at(at))
        .ok_or_else(|| damaged("it is cut off"))?;
    if Sha256::digest(content).as_slice() != digest {
        return Err(damaged("its checksum does not match"));
    }
    if format != FORMAT {
        return Err(BackupError::NewerFormat {
            path: path.to_owned(),
            found: format,
        });
    }
    split_content(&content[10..]).ok_or_else(|| damaged("its content does not decode"))
}

fn split_content(content: &[u8]) -> Option<(BackupMeta, &[u8])> {
    let (len, rest) = content.split_first_chunk::<4>()?;
    let (head, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    let meta: BackupMeta = codec::decode_payload(head).ok()?;
    let (len, body) = rest.split_first_chunk::<8>()?;
    (u64::from_le_bytes(*len) == body.len() as u64).then_some((meta, body))
}

fn parse_body(body: &[u8], limit: u64) -> Option<Vec<RawPair>> {
    let mut plain = Vec::new();
    let read = zstd::Decoder::new(body)
        .ok()?
        .take(limit.saturating_add(1))
        .read_to_end(&mut plain)
        .ok()?;
    // Never the beginning alone.
    if read as u64 > limit {
        return None;
    }
    let mut pairs = Vec::new();
    let mut rest = plain.as_slice();
    while !rest.is_empty() {
        let (key_len, next) = rest.split_first_chunk::<4>()?;
        let (value_len, next) = next.split_first_chunk::<4>()?;
        let (key, next) = next.split_at_checked(u32::from_le_bytes(*key_len) as usize)?;
        let (value, next) = next.split_at_checked(u32::from_le_bytes(*value_len) as usize)?;
        pairs.push((key.to_vec(), value.to_vec()));
        rest = next;
    }
    Some(pairs)
}

/// Returns whether an automatic backup is due. With an earlier backup, that is [`INTERVAL`] after it if anything but
/// the agent's sign of life has changed since. Without one, it is at once if there is something to save.
pub fn due(last: Option<(Stamp, &State)>, state: &State, now: Stamp) -> bool {
    match last {
        None => state.meta().is_some(),
        Some((taken, old)) => {
            if now.since(taken) < INTERVAL {
                return false;
            }
            let mut old = old.clone();
            old.meta = state.meta.clone();
            old != *state
        }
    }
}

/// Returns whether an agent that has taken no backup yet should take one: [`INTERVAL`] after the newest backup of its
/// previous runs, or at once if there is none or it is from an earlier boot. It need not check for changes since then:
/// a start is a change.
pub fn first_due(newest: Option<&BackupMeta>, state: &State, now: Stamp) -> bool {
    let recent = newest
        .is_some_and(|backup| backup.taken.boot == now.boot && now.since(backup.taken) < INTERVAL);
    state.meta().is_some() && !recent
}

/// Backups in a directory, newest first. A directory that is not there holds none.
///
/// # Errors
/// When the directory cannot be read.
pub fn list(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(PREFIX) && name.ends_with(SUFFIX) {
            found.push(entry.path());
        }
    }
    found.sort();
    found.reverse();
    Ok(found)
}

/// The newest backup in a directory that verifies, with the errors of newer ones that do not.
pub fn newest(dir: &Path) -> (Option<Backup>, Vec<String>) {
    first_good(dir, read)
}

/// As [`newest`], without its records.
pub fn newest_meta(dir: &Path) -> (Option<BackupMeta>, Vec<String>) {
    first_good(dir, read_meta)
}

fn first_good<T>(
    dir: &Path,
    read: impl Fn(&Path) -> Result<T, BackupError>,
) -> (Option<T>, Vec<String>) {
    let mut errors = Vec::new();
    let files = match list(dir) {
        Ok(files) => files,
        Err(error) => {
            return (
                None,
                vec![format!("list backups {}: {error}", dir.display())],
            );
        }
    };
    for path in files {
        match read(&path) {
            Ok(found) => return (Some(found), errors),
            Err(error) => errors.push(causes(&error)),
        }
    }
    (None, errors)
}

/// Deletes all but the newest `keep` backups of a directory, and unfinished ones. Returns what was deleted.
///
/// # Errors
/// When the directory cannot be read or a file not be deleted.
pub fn rotate(dir: &Path, keep: usize) -> io::Result<Vec<PathBuf>> {
    let mut surplus = list(dir)?.split_off(keep.min(list(dir)?.len()));
    if dir.is_dir() {
        for entry in fs::read_dir(dir)? {
            let path = entry?.path();
            if path.to_string_lossy().ends_with(&format!("{SUFFIX}.tmp")) {
                surplus.push(path);
            }
        }
    }
    for path in &surplus {
        fs::remove_file(path)?;
    }
    if !surplus.is_empty() {
        sync_dir(dir)?;
    }
    Ok(surplus)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::BootId;

    #[test]
    fn a_body_beyond_the_limit_is_refused_as_a_whole() {
        let path = Path::new("backup");
        let now = Stamp {
            boot: BootId(1),
            boottime_ms: 1,
            wall_ms: 1,
        };
        let meta = BackupMeta::of(&State::default(), 1, now);
        let pairs = vec![(vec![1], vec![2]), (vec![3], vec![4])];
        let file = serialize(&pairs, &meta, path).unwrap();
        // Each pair takes ten bytes: a limit between them must not give the first alone.
        assert_eq!(parse(path, &file, 20).unwrap().1, pairs);
        for limit in [0, 10, 19] {
            let error = parse(path, &file, limit).unwrap_err();
            assert!(matches!(error, BackupError::Damaged { .. }), "{error}");
        }
    }
}
