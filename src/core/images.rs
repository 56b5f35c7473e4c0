//! Trust in the files of images, and the choice of images to remove and to pull or import again.
//!
//! A runtime syncs its own records of an image, and not the files that it unpacks. After a power loss an image may be
//! listed as complete while its files are empty or missing, and a new pull changes nothing, since the runtime believes
//! its own records. So the agent keeps a record per image name ([`ImageFiles`], kind `imagefiles` in the table of
//! objects) with the progress of the last pull or import.
//!
//! **Invariant:** an image is possibly corrupt only if a pull or import of it was not recorded as complete when the
//! machine went down, or if one of its containers failed in a way that points to its files. Images without a record
//! existed before the agent, and are trusted.
//!
//! **Invariant:** an image is removed only after [`FilesState::Removed`] is on the disk, so it is pulled or imported
//! again whatever happens in between.

use k8s_openapi::api::core::v1::{Container, Probe};
use serde::{Deserialize, Serialize};

use super::state::State;
use super::state::kinds::{self, Declared, Key, Kind};
use super::volumes::sha256_hex;
use crate::types::runtime::{ContainerState, ContainerStatus};
use crate::types::{BootId, Stamp};

/// Known state of the files of one image, by its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageFiles {
    /// Name with registry and tag or digest.
    pub image: String,
    /// ID in the runtime; empty as long as it is not known.
    pub id: String,
    /// See [`FilesState`].
    pub state: FilesState,
    /// Boot in which a container's failure last made it a suspect ([`BootId`]). One boot counts such failures once.
    pub suspected: Option<u64>,
    /// Boot in which files of the image that is there were not written to the disk. No later sync of that boot makes them whole.
    /// Agents before this field leave it out.
    #[serde(default)]
    pub lost: Option<u64>,
}

impl Kind for ImageFiles {
    const DECLARED: Declared = kinds::IMAGE_FILES;
}

/// Progress of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum FilesState {
    /// It was there without a pull of the agent.
    Trusted,
    /// A pull or import has begun, and its files are not known to be on the disk.
    Pulling {
        /// Previous image of the name.
        good: Option<GoodImage>,
        /// It replaces a suspect.
        repairs: bool,
    },
    /// Its files are on the disk.
    Whole,
    /// Its files cannot be believed.
    Suspect {
        /// For a human.
        why: String,
    },
    /// A possibly corrupt image that was removed from the runtime, or is about to be. It has to be pulled or imported
    /// again.
    Removed,
}

/// Image of a name before a pull.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GoodImage {
    /// ID in the runtime.
    pub id: String,
    /// True if it was recorded as whole; otherwise it is trusted.
    pub whole: bool,
}

/// Permitted use of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It does not exist, and no repair needs it.
    Absent,
    /// It was there without a pull of the agent.
    Trusted,
    /// Its files are on the disk.
    Whole,
    /// It was brought in this boot and its files are not known to be on the disk. Containers may use it: they see
    /// what the kernel has in memory.
    Unsynced,
    /// It has to be removed and pulled or imported again before a container uses it.
    Suspect,
    /// It was removed as possibly corrupt, and has to be pulled or imported again.
    Owed,
}

/// Returns the permitted use of an image. `record` has the time it was written, `present` is the ID under which the
/// runtime has the name, `is_whole` is true if another name of that ID is recorded as complete.
pub fn standing(
    record: Option<(&ImageFiles, Stamp)>,
    boot: BootId,
    present: Option<&str>,
    is_whole: bool,
) -> Standing {
    let owes = |state: &FilesState| {
        matches!(
            state,
            FilesState::Removed | FilesState::Pulling { repairs: true, .. }
        )
    };
    let Some(id) = present else {
        return match record {
            Some((files, _)) if owes(&files.state) => Standing::Owed,
            _ => Standing::Absent,
        };
    };
    let Some((files, at)) = record else {
        return Standing::Trusted;
    };
    let is_same = files.id == id;
    match &files.state {
        FilesState::Whole if is_same => Standing::Whole,
        FilesState::Pulling {
            good: Some(good), ..
        } if good.id == id => {
            if good.whole {
                Standing::Whole
            } else {
                Standing::Trusted
            }
        }
        FilesState::Pulling { .. } if at.boot == boot => Standing::Unsynced,
        FilesState::Pulling { .. } if is_whole => Standing::Whole,
        FilesState::Pulling { .. } => Standing::Suspect,
        // It was removed, and brought again by another name.
        FilesState::Removed if is_same && is_whole => Standing::Whole,
        FilesState::Suspect { .. } | FilesState::Removed if is_same => Standing::Suspect,
        // Somebody replaced it behind the agent's back.
        _ => Standing::Trusted,
    }
}

/// Returns whether a container may start from an image that no registry vouches for now. No record may mark a name of
/// this ID as possibly corrupt.
pub fn is_sound(state: &State, id: &str, boot: BootId) -> bool {
    let is_whole = is_whole(state, id);
    let stands = |files: &ImageFiles, at| standing(Some((files, at)), boot, Some(id), is_whole);
    all_files(state)
        .filter(|(files, _)| files.id == id)
        .all(|(files, at)| !matches!(stands(&files, at), Standing::Suspect | Standing::Owed))
}

/// Answer of the runtime about a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence<'a> {
    /// It does not say anything.
    Unknown,
    /// It has no image of that name.
    Absent,
    /// It has this ID.
    Is(&'a str),
}

/// Returns whether the runtime had the name under this ID before the agent pulled or imported it. An image recorded as
/// complete was pulled or imported by the agent.
pub fn was_there(files: Option<&ImageFiles>, id: &str) -> bool {
    match files.map(|files| (&files.state, &files.id)) {
        Some((FilesState::Pulling { good, .. }, _)) => good
            .as_ref()
            .is_some_and(|good| good.id == id && !good.whole),
        Some((FilesState::Trusted, known)) => known == id,
        _ => false,
    }
}

/// Returns the record of a pull or import that begins; `None` leaves the record as it is. `present` is the runtime's
/// answer for the name: an image that was removed or replaced since the record was written is none to fall back to. For
/// a name recorded as removed it is also the runtime's answer for the recorded ID: another name may keep the damaged
/// files. Records of an earlier boot have been judged before.
pub fn begun(old: Option<&ImageFiles>, image: &str, present: Presence<'_>) -> Option<ImageFiles> {
    let fresh = |good, repairs| FilesState::Pulling { good, repairs };
    let good = |id: &str, whole| {
        Some(GoodImage {
            id: id.to_owned(),
            whole,
        })
    };
    let Some(old) = old else {
        return Some(ImageFiles {
            image: image.to_owned(),
            id: String::new(),
            state: match present {
                Presence::Is(id) => fresh(good(id, false), false),
                Presence::Unknown | Presence::Absent => fresh(None, false),
            },
            suspected: None,
            lost: None,
        });
    };
    let known = |whole| match present {
        Presence::Absent => None,
        Presence::Is(id) if id != old.id => good(id, false),
        Presence::Is(_) | Presence::Unknown => good(&old.id, whole),
    };
    let state = match &old.state {
        FilesState::Trusted => fresh(known(false), false),
        FilesState::Whole => fresh(known(true), false),
        FilesState::Pulling { repairs, .. } if present == Presence::Absent => fresh(None, *repairs),
        // Written again, for the boot it belongs to.
        FilesState::Pulling { .. } => old.state.clone(),
        FilesState::Removed => match present {
            Presence::Absent => fresh(None, true),
            Presence::Is(id) if id != old.id => fresh(good(id, false), true),
            // The removal failed, or nobody knows: a pull would bring the damaged files back into use.
            Presence::Is(_) | Presence::Unknown => return None,
        },
        // The runtime would believe the files that are there: such a pull repairs nothing.
        FilesState::Suspect { .. } => return None,
    };
    Some(ImageFiles {
        state,
        // It is unpacked anew.
        lost: old.lost.filter(|_| present != Presence::Absent),
        ..old.clone()
    })
}

/// The record of a pull or import that has ended well and whose files are on the disk, and whether that repaired a
/// suspect. `is_doubted`: see [`is_doubted`].
pub fn finished(
    old: Option<&ImageFiles>,
    image: &str,
    id: &str,
    is_doubted: bool,
) -> (ImageFiles, bool) {
    let repaired = match old.map(|old| &old.state) {
        Some(FilesState::Suspect { .. } | FilesState::Removed)
            if old.is_some_and(|old| old.id == id) =>
        {
            // It was there when the pull began, so nothing was unpacked anew.
            return (
                old.cloned().unwrap_or_else(|| whole(image, id, None)),
                false,
            );
        }
        _ if is_doubted => {
            let why = "another name of it has damaged files";
            return (suspect(old, image, id, why, None), false);
        }
        Some(FilesState::Suspect { .. } | FilesState::Removed) => true,
        Some(FilesState::Pulling { repairs, .. }) => *repairs,
        _ => false,
    };
    let suspected = old.and_then(|old| old.suspected);
    (whole(image, id, suspected), repaired)
}

fn whole(image: &str, id: &str, suspected: Option<u64>) -> ImageFiles {
    ImageFiles {
        image: image.to_owned(),
        id: id.to_owned(),
        state: FilesState::Whole,
        suspected,
        lost: None,
    }
}

/// Returns the record of a possibly corrupt image whose name stands for another image by now, which is not known to be
/// synced.
pub fn replaced(old: &ImageFiles, id: &str) -> ImageFiles {
    ImageFiles {
        id: id.to_owned(),
        state: FilesState::Trusted,
        lost: None,
        ..old.clone()
    }
}

/// New state of a record after a pull that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AfterFailure {
    /// Stays as it is.
    Keep,
    /// Becomes this.
    Put(ImageFiles),
    /// Goes.
    Forget,
}

/// The record of a pull or import that has ended, and has certainly brought nothing.
pub fn failed(old: Option<&ImageFiles>) -> AfterFailure {
    let Some(old) = old else {
        return AfterFailure::Keep;
    };
    let FilesState::Pulling { good, repairs } = &old.state else {
        return AfterFailure::Keep;
    };
    match good {
        Some(good) => AfterFailure::Put(ImageFiles {
            id: good.id.clone(),
            state: if good.whole {
                FilesState::Whole
            } else {
                FilesState::Trusted
            },
            ..old.clone()
        }),
        None if *repairs => AfterFailure::Put(ImageFiles {
            state: FilesState::Removed,
            ..old.clone()
        }),
        None => AfterFailure::Forget,
    }
}

/// The record of an image that is there, and that the agent did not bring; `None` when nothing changes.
pub fn noticed(old: Option<&ImageFiles>, image: &str, id: &str) -> Option<ImageFiles> {
    let is_known = old.is_some_and(|old| {
        old.id == id || !matches!(old.state, FilesState::Trusted | FilesState::Whole)
    });
    (!is_known).then(|| ImageFiles {
        image: image.to_owned(),
        id: id.to_owned(),
        state: FilesState::Trusted,
        suspected: old.and_then(|old| old.suspected),
        lost: None,
    })
}

/// The record of a suspect. `failed_in` is the boot in which a failure of a container made it one.
pub fn suspect(
    old: Option<&ImageFiles>,
    image: &str,
    id: &str,
    why: &str,
    failed_in: Option<BootId>,
) -> ImageFiles {
    ImageFiles {
        image: image.to_owned(),
        id: id.to_owned(),
        state: FilesState::Suspect {
            why: why.to_owned(),
        },
        suspected: failed_in
            .map(|boot| boot.0)
            .or_else(|| old.and_then(|old| old.suspected)),
        lost: old.and_then(|old| old.lost),
    }
}

/// The record of an image of which files were not written to the disk in this boot. It is a suspect unless it was one in this
/// boot before: a disk that fails for good is not made to write the same image for ever.
pub fn lost(
    old: Option<&ImageFiles>,
    image: &str,
    id: &str,
    why: &str,
    boot: BootId,
) -> ImageFiles {
    let known = old.filter(|old| old.suspected == Some(boot.0));
    let files = match known {
        Some(old) => old.clone(),
        None => suspect(old, image, id, why, Some(boot)),
    };
    ImageFiles {
        lost: Some(boot.0),
        ..files
    }
}

/// Evidence in the failure of a container about the files of its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// The runtime misses files that its own records name.
    Storage,
    /// The kernel does not know the format of the program: an empty file, or one for another machine.
    Format,
    /// The program is not there: a file that was lost, or a wrong command.
    Program,
}

/// Texts that follow each other in one error; the runtime says the first in its own words.
type Pattern = &'static [&'static str];

/// Errors of storage, by who reports them.
const STORAGE: &[Pattern] = &[
    // containerd, overlayfs snapshotter: `createSnapshot` looks at the directory of the parent.
    &["failed to stat parent", "no such file or directory"],
    // containerd, metadata of snapshots: `createSnapshot`, `storage.CreateSnapshot`.
    &["parent snapshot ", " does not exist"],
    &["missing parent ", " bucket"],
    // containerd, the shim mounts the layers: one of the lower directories is gone.
    &[
        "failed to mount rootfs component",
        "no such file or directory",
    ],
    // containerd, content store: a blob that metadata name.
    &["content digest sha256:", "not found"],
    &["blob not found"],
    // containerd, unpacking: the record of the image has the type that a proxy answered with.
    &["unexpected media type ", " for sha256:", "not found"],
    // containers/storage, used by CRI-O.
    &["layer not known"],
    &["consider removing the image to resolve the issue"],
    &[
        "creating read-write layer with ID",
        "no such file or directory",
    ],
    &[
        "readlink /",
        "/storage/overlay/l/",
        "no such file or directory",
    ],
    &["can't stat lower layer", "because it does not exist"],
];

const PROGRAM: &[Pattern] = &[
    // runc: `exec: "/bin/x": stat /bin/x: no such file or directory`.
    &["exec: \"", "no such file or directory"],
    &["exec: \"", "executable file not found in $PATH"],
    // crun.
    &["executable file `", "not found"],
];

/// The kernel's answer to a program in no format that it knows.
const FORMAT: &str = ": exec format error";

/// Phrases that runtimes and gRPC append to the answer of the kernel.
const TAILS: &[&str] = &[": unknown", ": OCI runtime error"];

/// Phrases that end the runtime's own words: commands, paths, users and profiles that a pod names follow without
/// quotes.
const POD_WORDS: &[&str] = &[
    "OCI runtime ",
    "runc create failed",
    "runc run failed",
    "unable to start container process",
    "crun: ",
    "exec: ",
    "exec /",
    "failed to generate",
    " spec: ",
    // Of path errors: stat, lstat.
    "stat /",
    "open /",
    "mkdir ",
    "chdir ",
    "symlink",
    "profile",
    "find user",
    "find group",
    "device",
];

/// Returns the evidence in an error of CreateContainer, StartContainer or PullImage about the files of an image; `None`
/// if there is none.
///
/// Errors repeat requests of the pod. None of that is evidence: the author of a command must not make the images of
/// others suspect.
pub fn evidence(error: &str) -> Option<Evidence> {
    let said = without_quotes(error);
    let ends = POD_WORDS.iter().filter_map(|words| said.find(words));
    let own = ends.min().unwrap_or(said.len());
    let mut of_kernel = said.as_str();
    while let Some(rest) = TAILS.iter().find_map(|tail| of_kernel.strip_suffix(tail)) {
        of_kernel = rest;
    }
    let begin = of_kernel.len().saturating_sub(FORMAT.len());
    let is_format = of_kernel
        .get(begin..)
        .is_some_and(|end| end.eq_ignore_ascii_case(FORMAT));
    if STORAGE.iter().any(|pattern| is_said(&said, pattern, own)) {
        Some(Evidence::Storage)
    } else if is_format {
        Some(Evidence::Format)
    } else if PROGRAM
        .iter()
        .any(|pattern| is_said(&said, pattern, said.len()))
    {
        Some(Evidence::Program)
    } else {
        None
    }
}

/// Errors of containerd for content that it keeps and cannot decode: files that were cut off, or are zeros.
const UNREADABLE: &[&str] = &[
    "unexpected EOF",
    "unexpected end of JSON input",
    "invalid character ",
];

/// Returns whether an import may have failed because of content that the runtime keeps: files of it are missing, cut off or
/// overwritten. A damaged archive has the same errors.
pub fn is_content_unreadable(error: &str) -> bool {
    evidence(error) == Some(Evidence::Storage)
        || UNREADABLE.iter().any(|words| error.contains(words))
}

/// Returns whether the parts of a pattern follow each other in an error, and the first begins within its first `own`
/// bytes.
fn is_said(said: &str, pattern: Pattern, own: usize) -> bool {
    let mut from = 0;
    for (at, part) in pattern.iter().enumerate() {
        let Some(found) = said[from..].find(part).map(|found| from + found) else {
            return false;
        };
        if at == 0 && found > own {
            return false;
        }
        from = found + part.len();
    }
    true
}

/// An error without what stands in double quotes or backticks. Go escapes quotes within quotes.
fn without_quotes(error: &str) -> String {
    let mut said = String::with_capacity(error.len());
    let mut quote = None;
    let mut is_escaped = false;
    for c in error.chars() {
        match quote {
            None => {
                said.push(c);
                quote = matches!(c, '"' | '`').then_some(c);
            }
            Some('"') if is_escaped => is_escaped = false,
            Some('"') if c == '\\' => is_escaped = true,
            Some(end) if c == end => {
                said.push(c);
                quote = None;
            }
            Some(_) => {}
        }
    }
    said
}

/// Words of low-level runtimes in the log of a container whose program the kernel refuses. Between the two is the path of the program.
const EXEC_FAILED: &[(&str, &str)] = &[
    // runc: the error of execve, after it has closed the pipe to its parent.
    ("exec ", ": exec format error"),
    // crun.
    ("exec container process `", "`: Exec format error"),
];

/// Mount path of the credentials for the API server.
const API_CREDENTIALS: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Longest log that can be a line of the runtime alone: a path and a few words.
pub const SHORT_LOG: usize = 5 << 10;
/// A container that ran for longer has run its program.
const INSTANT: i64 = 5_000_000_000;
/// Number of failures of the program: the start with this number checks the last failure.
const FAILED_STARTS: u32 = 2;

/// Returns whether the log of an ended container is to be read before the start with number `attempt`: it has failed repeatedly, at
/// once, and what ran is the image's own program, as the image has it.
pub fn is_log_of_interest(container: &Container, ended: &ContainerStatus, attempt: u32) -> bool {
    let ran_for = ended.finished_at_ns.saturating_sub(ended.started_at_ns);
    attempt >= FAILED_STARTS
        && ended.state == ContainerState::Exited
        && ended.exit_code != 0
        && (0..=INSTANT).contains(&ran_for)
        && runs_own_program(container)
        // A terminal mixes both streams.
        && container.tty != Some(true)
        && !may_speak(container)
}

/// Returns true if a container executes what its image says, as the image has it: nothing of the pod is in place of the program or
/// of its interpreter. Arguments are the program where an image has no entry point.
pub fn runs_own_program(container: &Container) -> bool {
    let mut words = container.command.iter().chain(&container.args).flatten();
    let mut mounts = container.volume_mounts.iter().flatten();
    words.next().is_none() && mounts.all(|mount| mount.mount_path == API_CREDENTIALS)
}

/// Returns true if something of the pod may put its own words into the log of a container that runs the program of its image.
/// Loaders and interpreters take code from variables (`LD_PRELOAD`, `BASH_ENV`), and from files anywhere (`/etc/ld.so.preload`,
/// modules, scripts of an entry point). Commands that run beside the program can write to its output.
fn may_speak(container: &Container) -> bool {
    let runs_command = |probe: &Option<Probe>| probe.as_ref().is_some_and(|p| p.exec.is_some());
    let probes = [
        &container.liveness_probe,
        &container.readiness_probe,
        &container.startup_probe,
    ];
    container.env.iter().flatten().next().is_some()
        || container.env_from.iter().flatten().next().is_some()
        || (container.lifecycle.as_ref()).is_some_and(|hooks| hooks.post_start.is_some())
        || probes.into_iter().any(runs_command)
}

/// Returns the words of the runtime if they are all that a container has logged, and say that the kernel refuses the program
/// of its image. `log` is in the format of CRI.
///
/// A pod that can put its own words there must not bring an image of others under suspicion: the caller checks
/// [`is_log_of_interest`].
pub fn evidence_in_log(log: &[u8]) -> Option<&str> {
    let line = std::str::from_utf8(log).ok()?.strip_suffix('\n')?;
    let mut parts = line.splitn(4, ' ').skip(1);
    let (stream, tag, said) = (parts.next()?, parts.next()?, parts.next()?);
    if stream != "stderr" || tag != "F" || said.contains('\n') {
        return None;
    }
    let program = EXEC_FAILED
        .iter()
        .find_map(|(begin, end)| said.strip_prefix(begin)?.strip_suffix(end))?;
    program.starts_with('/').then_some(said)
}

/// Returns whether such a failure makes an image possibly corrupt. One failure per image counts in a boot, so that an
/// image that fails for another reason is not removed and pulled forever.
pub fn makes_suspect(
    evidence: Evidence,
    standing: Standing,
    suspected: Option<u64>,
    boot: BootId,
) -> bool {
    if suspected == Some(boot.0) {
        return false;
    }
    match standing {
        Standing::Absent | Standing::Suspect | Standing::Owed => false,
        Standing::Unsynced => true,
        Standing::Trusted => evidence != Evidence::Program,
        Standing::Whole => evidence == Evidence::Storage,
    }
}

/// Returns whether a failure points to a layer that another image has too: the runtime misses files of an image that was a suspect in
/// this boot already, and is none any more. A pull brings no layer that another image keeps.
pub fn may_share_damage(
    evidence: Evidence,
    standing: Standing,
    suspected: Option<u64>,
    boot: BootId,
) -> bool {
    evidence == Evidence::Storage
        && suspected == Some(boot.0)
        && matches!(
            standing,
            Standing::Trusted | Standing::Whole | Standing::Unsynced
        )
}

/// An archive of the preload directory, as it was imported last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ArchiveRecord {
    /// File name.
    pub name: String,
    /// The file at that time.
    pub stamp: ArchiveStamp,
    /// Names of the images it holds, as they are written in it.
    pub images: Vec<String>,
    /// Error of reading or importing it; empty on success.
    pub error: String,
}

/// Changes whenever the file does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ArchiveStamp {
    /// Inode.
    pub inode: u64,
    /// Bytes.
    pub size: u64,
    /// Last change of the content, nanoseconds since the Unix epoch.
    pub modified_ns: i64,
}

/// Next step for an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArchiveStep {
    /// Nothing.
    Keep,
    /// Read which images it holds.
    Read,
    /// Import it.
    Import,
}

/// Returns the next step for an archive that exists as `stamp`. `is_first` is true if the agent has just started: an
/// error may have gone since. `is_present` returns whether the runtime has an image.
pub fn archive_step(
    record: Option<&ArchiveRecord>,
    stamp: ArchiveStamp,
    is_first: bool,
    is_present: impl Fn(&str) -> bool,
) -> ArchiveStep {
    match record {
        Some(record) if record.stamp == stamp => {
            if !record.error.is_empty() {
                if is_first {
                    ArchiveStep::Read
                } else {
                    ArchiveStep::Keep
                }
            } else if record.images.iter().all(|image| is_present(image)) {
                ArchiveStep::Keep
            } else {
                ArchiveStep::Import
            }
        }
        _ => ArchiveStep::Read,
    }
}

impl Kind for ArchiveRecord {
    const DECLARED: Declared = kinds::IMAGE_ARCHIVES;
}

/// The key of the [`ImageFiles`] of a qualified name.
pub fn files_key(qualified: &str) -> Key<ImageFiles> {
    Key::new("", &sha256_hex(&[qualified]))
}

/// The key of the [`ArchiveRecord`] of a file name.
pub fn archive_key(name: &str) -> Key<ArchiveRecord> {
    Key::new("", &sha256_hex(&[name]))
}

/// The record of a qualified name, and when it was written. One that cannot be read counts as absent: its image is
/// trusted.
pub fn files_of(state: &State, qualified: &str) -> Option<(ImageFiles, Stamp)> {
    let key = files_key(qualified);
    let record = state.stored(&key)?;
    Some((record.content()?, record.at()))
}

/// Every record of files, and when it was written.
pub fn all_files(state: &State) -> impl Iterator<Item = (ImageFiles, Stamp)> + '_ {
    let records = state.all_stored::<ImageFiles>();
    records.filter_map(|record| Some((record.content()?, record.at())))
}

/// Returns whether a name of this ID is recorded as complete.
pub fn is_whole(state: &State, id: &str) -> bool {
    all_files(state).any(|(files, _)| files.state == FilesState::Whole && files.id == id)
}

/// Returns whether another name of this ID is recorded as possibly corrupt or as removed, so that a pull of the
/// qualified name may have reused the damaged files in the runtime. It has not, if the image was gone when the pull
/// began.
pub fn is_doubted(state: &State, qualified: &str, id: &str) -> bool {
    let own = files_of(state, qualified).map(|(files, _)| files.state);
    if own.as_ref().is_some_and(unpacks_anew) {
        return false;
    }
    let key = files_key(qualified);
    let records = state.all_stored::<ImageFiles>();
    let mut others = records.filter(|other| *other.key() != *key);
    others.any(|record| {
        record.content().is_some_and(|files| {
            let is_damaged = matches!(
                files.state,
                FilesState::Suspect { .. } | FilesState::Removed
            );
            files.id == id && is_damaged
        })
    })
}

/// Returns whether an image of this ID was pulled or imported after the damaged one was gone.
pub fn is_brought(state: &State, id: &str, boot: BootId) -> bool {
    all_files(state).any(|(files, at)| {
        let is_anew =
            files.state == FilesState::Whole || (at.boot == boot && unpacks_anew(&files.state));
        files.id == id && is_anew
    })
}

/// Returns whether the image of the name was gone when its pull began.
fn unpacks_anew(state: &FilesState) -> bool {
    matches!(
        state,
        FilesState::Pulling {
            good: None,
            repairs: true
        }
    )
}

/// Returns every recorded archive.
pub fn all_archives(state: &State) -> impl Iterator<Item = ArchiveRecord> + '_ {
    let records = state.all_stored::<ArchiveRecord>();
    records.filter_map(|record| record.content())
}

/// Returns the file name of an imported archive that holds an image. Such an image is pinned: no collection of unused
/// images may remove it.
///
/// `is_image` returns whether a name in an archive is one of that image.
pub fn archive_of(state: &State, is_image: impl Fn(&str) -> bool) -> Option<String> {
    all_archives(state)
        .find(|archive| {
            archive.error.is_empty() && archive.images.iter().any(|image| is_image(image))
        })
        .map(|archive| archive.name)
}

/// The state of an image for `holdfast dump`: `whole`, `pulling`, `suspect` or `trusted`.
pub fn shown_state(files: Option<&ImageFiles>) -> &'static str {
    match files.map(|files| &files.state) {
        None | Some(FilesState::Trusted) => "trusted",
        Some(FilesState::Pulling { .. }) => "pulling",
        Some(FilesState::Whole) => "whole",
        Some(FilesState::Suspect { .. } | FilesState::Removed) => "suspect",
    }
}

#[cfg(test)]
mod tests;
