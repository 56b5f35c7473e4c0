//! The file with the keys that secrets on disk are encrypted with.
//!
//! In: a path, or the text of the file. Out: a [`Keyring`], or what is wrong, with the line. The file is text:
//!
//! ```text
//! # comments and empty lines are kept
//! 5f2a90c1d3e4b687 <32 bytes in base64> 2026-01-02T03:04:05Z
//! ```
//! One key a line: its id, the key, when it was made. The first key is the active one: what is encrypted from now
//! on is encrypted with it. The others only decrypt. An id is the first 8 bytes of
//! `SHA-256("holdfast secrets key" ‖ key)` in hex, so that a line that was damaged does not pass for a key; `-` in its
//! place lets the reader compute it, for lines written by hand.
//!
//! **Invariants:** the file is replaced as a whole and synced before a key of it is used; a key that is in the file is
//! never changed; keys appear in no `Debug` output and in no error.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chacha20poly1305::aead::OsRng;
use chacha20poly1305::aead::rand_core::RngCore as _;
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use crate::types::Stamp;

/// Name of the systemd credential that wins over every file.
pub const CREDENTIAL: &str = "holdfast.secrets-key";
/// Bytes of a key.
const KEY_BYTES: usize = 32;
/// No key file is larger; what is larger is something else.
const FILE_LIMIT: u64 = 1 << 20;
const HEAD: &str =
    "# Keys for secrets on disk, the active one first. `holdfast keys` looks after this file.\n";

/// ID of a key, derived from the key itself.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId(pub [u8; 8]);

impl KeyId {
    fn of(secret: &[u8; KEY_BYTES]) -> Self {
        let mut digest = Sha256::new();
        digest.update(b"holdfast secrets key");
        digest.update(secret);
        let digest: [u8; 32] = digest.finalize().into();
        let mut id = [0; 8];
        id.copy_from_slice(&digest[..8]);
        Self(id)
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:016x}", u64::from_be_bytes(self.0)))
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Not the id of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the id of a key has 16 hexadecimal digits")]
pub struct BadKeyId;

impl FromStr for KeyId {
    type Err = BadKeyId;

    fn from_str(text: &str) -> Result<Self, BadKeyId> {
        if text.len() != 16 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(BadKeyId);
        }
        let number = u64::from_str_radix(text, 16).map_err(|_| BadKeyId)?;
        Ok(Self(number.to_be_bytes()))
    }
}

/// One key. Wiped when it is dropped.
#[derive(Clone)]
pub struct Key {
    id: KeyId,
    secret: Zeroizing<[u8; KEY_BYTES]>,
    created: String,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key")
            .field("id", &self.id)
            .field("created", &self.created)
            .finish_non_exhaustive()
    }
}

impl Key {
    /// A new key from the kernel's random numbers.
    pub fn generate(now: Stamp) -> Self {
        let mut secret = Zeroizing::new([0; KEY_BYTES]);
        OsRng.fill_bytes(&mut *secret);
        Self {
            id: KeyId::of(&secret),
            secret,
            created: now.rfc3339(),
        }
    }

    /// Its id.
    pub fn id(&self) -> KeyId {
        self.id
    }

    /// Returns the time of its creation, as written in the file.
    pub fn created(&self) -> &str {
        &self.created
    }

    pub(super) fn secret(&self) -> &[u8; KEY_BYTES] {
        &self.secret
    }

    fn line(&self) -> Zeroizing<String> {
        let secret = Zeroizing::new(STANDARD.encode(*self.secret));
        Zeroizing::new(format!("{} {} {}\n", self.id, *secret, self.created))
    }
}

/// Error in a line of a key file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct BadLine {
    /// Counted from 1; 0 when it is about the file as a whole.
    pub line: usize,
    /// Description of the error. It contains no key.
    pub what: &'static str,
}

/// The keys of a file, at least one.
#[derive(Clone, Debug)]
pub struct Keyring {
    active: Key,
    others: Vec<Key>,
}

impl Keyring {
    /// A ring with one key.
    pub fn new(active: Key) -> Self {
        Self {
            active,
            others: Vec::new(),
        }
    }

    /// Reads the text of a key file.
    ///
    /// # Errors
    /// The first line that is wrong; a file without a key; the same key twice.
    pub fn parse(text: &str) -> Result<Self, BadLine> {
        let mut keys: Vec<Key> = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let wrong = |what| BadLine {
                line: number + 1,
                what,
            };
            let Some(key) = parse_line(line).map_err(wrong)? else {
                continue;
            };
            if keys.iter().any(|known| known.id == key.id) {
                return Err(wrong(
                    "this key is in the file twice; remove one of the lines",
                ));
            }
            keys.push(key);
        }
        let mut keys = keys.into_iter();
        let active = keys.next().ok_or(BadLine {
            line: 0,
            what: "there is no key in it; put one back from a copy, or move the file away to have a new one made",
        })?;
        Ok(Self {
            active,
            others: keys.collect(),
        })
    }

    /// The key that encrypts.
    pub fn active(&self) -> &Key {
        &self.active
    }

    /// The key of an id.
    pub fn get(&self, id: KeyId) -> Option<&Key> {
        self.iter().find(|key| key.id == id)
    }

    /// Every key, the active one first.
    pub fn iter(&self) -> impl Iterator<Item = &Key> {
        std::iter::once(&self.active).chain(&self.others)
    }
}

fn parse_line(line: &str) -> Result<Option<Key>, &'static str> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return Ok(None);
    }
    let words: Vec<&str> = line.split_whitespace().collect();
    let [id, secret, created] = words[..] else {
        return Err("a key is three words: id, key in base64, time at which it was made");
    };
    let bytes = STANDARD.decode(secret).map(Zeroizing::new);
    let bytes = bytes.map_err(|_| "the key is not base64")?;
    let secret: [u8; KEY_BYTES] = bytes
        .as_slice()
        .try_into()
        .map_err(|_| "the key does not have 32 bytes")?;
    let secret = Zeroizing::new(secret);
    let computed = KeyId::of(&secret);
    if id != "-"
        && id.parse::<KeyId>().map_err(
            |_| "the id does not have 16 hexadecimal digits; write - to have it computed",
        )? != computed
    {
        return Err("the id does not belong to the key: one of them was changed");
    }
    if created.parse::<jiff::Timestamp>().is_err() {
        return Err("the time is not like 2026-01-02T03:04:05Z");
    }
    Ok(Some(Key {
        id: computed,
        secret,
        created: created.to_owned(),
    }))
}

/// Reason why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// It is not there.
    #[error("there is no secrets key file {}", path.display())]
    Absent {
        /// The file.
        path: PathBuf,
    },
    /// Others may read it.
    #[error("secrets key file {} has mode {mode:04o}, others may read or change it; it is not used until `chmod 600 {}`", path.display(), path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// It belongs to somebody else.
    #[error("secrets key file {} belongs to uid {owner}, not to this user or root; it is not used until `chown {user} {}`", path.display(), path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// User that should own it.
        user: u32,
    },
    /// It has a line that is wrong.
    #[error("read secrets key file {}", path.display())]
    Bad {
        /// The file.
        path: PathBuf,
        /// Error in the line.
        #[source]
        source: BadLine,
    },
    /// The key to be removed is not in it, or is the active one.
    #[error("remove key {id} from {}: {why}", path.display())]
    Remove {
        /// The file.
        path: PathBuf,
        /// The key.
        id: KeyId,
        /// Reason for the refusal.
        why: &'static str,
    },
    /// systemd's copy cannot be changed.
    #[error("{} is a systemd credential and cannot be changed here; change what LoadCredential= names and restart the agent", path.display())]
    Credential {
        /// The file.
        path: PathBuf,
    },
    /// The file system refused.
    #[error("{action} secrets key file {}", path.display())]
    Io {
        /// Verb of the failed operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// Location of the keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFile {
    path: PathBuf,
    credential: bool,
}

impl KeyFile {
    /// The file that holds the keys: the systemd credential [`CREDENTIAL`] below `credentials`
    /// (`$CREDENTIALS_DIRECTORY`) if there is one, else `configured` (`--secrets-key-file`), else
    /// `<state-dir>/keys/secrets.key`.
    pub fn locate(state_dir: &Path, configured: Option<&Path>, credentials: Option<&Path>) -> Self {
        let credential = credentials.map(|dir| dir.join(CREDENTIAL));
        if let Some(path) = credential.filter(|path| path.exists()) {
            return Self {
                path,
                credential: true,
            };
        }
        Self {
            path: configured.map_or_else(|| Self::default_path(state_dir), Path::to_owned),
            credential: false,
        }
    }

    /// A key file at `path`.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            credential: false,
        }
    }

    /// Returns the default path of the keys of a state directory.
    pub fn default_path(state_dir: &Path) -> PathBuf {
        state_dir.join("keys").join("secrets.key")
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether it is a systemd credential: a copy, made at the start of the agent.
    pub fn is_credential(&self) -> bool {
        self.credential
    }

    /// Returns a fingerprint of the file's version: inode, change time and size. `None` if there is no file.
    pub(super) fn fingerprint(&self) -> Option<(u64, i64, i64, u64)> {
        let found = fs::metadata(&self.path).ok()?;
        Some((found.ino(), found.ctime(), found.ctime_nsec(), found.len()))
    }

    /// Reads and checks the file. Blocks for as long as the disk does.
    ///
    /// # Errors
    /// See [`KeyFileError`].
    pub fn read(&self) -> Result<Keyring, KeyFileError> {
        self.read_text().map(|(ring, _)| ring)
    }

    fn read_text(&self) -> Result<(Keyring, Zeroizing<String>), KeyFileError> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(KeyFileError::Absent {
                    path: self.path.clone(),
                });
            }
            Err(error) => return Err(self.io("open")(error)),
        };
        // systemd guards its credentials itself, and may grant them by an ACL that shows in the mode.
        if !self.credential {
            self.check_access(&file)?;
        }
        let length = file.metadata().map_err(self.io("look at"))?.len();
        if length > FILE_LIMIT {
            return Err(self.io("read")(io::Error::other(
                "it is too large to be one",
            )));
        }
        // Room for all of it, so that no copy is left behind when it grows.
        let room = usize::try_from(length).unwrap_or(0) + 1;
        let mut text = Zeroizing::new(String::with_capacity(room));
        (&mut file)
            .take(FILE_LIMIT)
            .read_to_string(&mut text)
            .map_err(self.io("read"))?;
        let ring = Keyring::parse(&text).map_err(|source| KeyFileError::Bad {
            path: self.path.clone(),
            source,
        })?;
        Ok((ring, text))
    }

    fn check_access(&self, file: &File) -> Result<(), KeyFileError> {
        let found = file.metadata().map_err(self.io("look at"))?;
        let mode = found.permissions().mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(KeyFileError::Exposed {
                path: self.path.clone(),
                mode,
            });
        }
        let user = nix::unistd::geteuid().as_raw();
        if found.uid() != user && found.uid() != 0 {
            return Err(KeyFileError::Foreign {
                path: self.path.clone(),
                owner: found.uid(),
                user,
            });
        }
        Ok(())
    }

    /// Makes the file with a first key, or reads the one that another process made meanwhile. Its directory is
    /// made (0700) if only that is missing.
    ///
    /// # Errors
    /// See [`KeyFileError`].
    pub fn create(&self, now: Stamp) -> Result<Keyring, KeyFileError> {
        let parent = self.parent();
        match DirBuilder::new().mode(0o700).create(&parent) {
            Ok(()) => {
                let above = parent.parent().filter(|dir| !dir.as_os_str().is_empty());
                sync_dir(above.unwrap_or(Path::new("."))).map_err(self.io("sync directory of"))?;
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(self.io("make the directory of")(error)),
        }
        let _lock = self.lock()?;
        match self.read() {
            Err(KeyFileError::Absent { .. }) => {}
            found => return found,
        }
        let key = Key::generate(now);
        let mut text = Zeroizing::new(String::from(HEAD));
        text.push_str(&key.line());
        self.replace(&text)?;
        Ok(Keyring::new(key))
    }

    /// Adds a new key at the top, which makes it the active one. Returns the ring as it is now.
    ///
    /// # Errors
    /// See [`KeyFileError`]; the file is then unchanged.
    pub fn rotate(&self, now: Stamp) -> Result<Keyring, KeyFileError> {
        self.change(|_, text| {
            let key = Key::generate(now);
            let mut changed = Zeroizing::new(String::with_capacity(text.len() + 128));
            let mut pending = true;
            for line in text.lines() {
                if pending && !matches!(parse_line(line), Ok(None)) {
                    changed.push_str(&key.line());
                    pending = false;
                }
                changed.push_str(line);
                changed.push('\n');
            }
            Ok(changed)
        })
    }

    /// Removes keys; never the active one. Returns the ring as it is now.
    ///
    /// # Errors
    /// See [`KeyFileError`]; the file is then unchanged.
    pub fn remove(&self, ids: &[KeyId]) -> Result<Keyring, KeyFileError> {
        self.change(|ring, text| {
            let refuse = |id: KeyId, why| KeyFileError::Remove {
                path: self.path.clone(),
                id,
                why,
            };
            for id in ids {
                if ring.active().id() == *id {
                    return Err(refuse(*id, "it is the active key; rotate first"));
                }
                if ring.get(*id).is_none() {
                    return Err(refuse(*id, "it is not in the file"));
                }
            }
            let mut changed = Zeroizing::new(String::with_capacity(text.len()));
            for line in text.lines() {
                let goes = matches!(parse_line(line), Ok(Some(key)) if ids.contains(&key.id));
                if !goes {
                    changed.push_str(line);
                    changed.push('\n');
                }
            }
            Ok(changed)
        })
    }

    fn change(
        &self,
        edit: impl FnOnce(&Keyring, &str) -> Result<Zeroizing<String>, KeyFileError>,
    ) -> Result<Keyring, KeyFileError> {
        if self.credential {
            return Err(KeyFileError::Credential {
                path: self.path.clone(),
            });
        }
        let _lock = self.lock()?;
        let (ring, text) = self.read_text()?;
        let text = edit(&ring, &text)?;
        let ring = Keyring::parse(&text).map_err(|source| KeyFileError::Bad {
            path: self.path.clone(),
            source,
        })?;
        self.replace(&text)?;
        Ok(ring)
    }

    /// Keeps other processes from changing the file, until it is dropped.
    fn lock(&self) -> Result<File, KeyFileError> {
        let parent = self.parent();
        let dir = match File::open(&parent) {
            Ok(dir) => dir,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(KeyFileError::Absent {
                    path: self.path.clone(),
                });
            }
            Err(error) => return Err(self.io("open the directory of")(error)),
        };
        dir.lock().map_err(self.io("lock the directory of"))?;
        Ok(dir)
    }

    /// Writes the file so that after a crash it has either the old or the new content.
    fn replace(&self, text: &str) -> Result<(), KeyFileError> {
        let mut name = self.path.file_name().unwrap_or_default().to_owned();
        name.push(".tmp");
        let temporary = self.parent().join(name);
        let written = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)
            .and_then(|mut file| {
                file.set_permissions(Permissions::from_mode(0o600))?;
                file.write_all(text.as_bytes())?;
                file.sync_all()
            })
            .and_then(|()| fs::rename(&temporary, &self.path));
        if let Err(error) = written {
            // What is left of it holds keys.
            return match fs::remove_file(&temporary) {
                Err(left) if left.kind() != io::ErrorKind::NotFound => {
                    Err(self.io("remove the unfinished copy of")(left))
                }
                _ => Err(self.io("write")(error)),
            };
        }
        sync_dir(&self.parent()).map_err(self.io("sync the directory of"))
    }

    fn parent(&self) -> PathBuf {
        match self.path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        }
    }

    fn io(&self, action: &'static str) -> impl FnOnce(io::Error) -> KeyFileError {
        let path = self.path.clone();
        move |source| KeyFileError::Io {
            action,
            path,
            source,
        }
    }
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}
