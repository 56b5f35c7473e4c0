//! A node whose files, names and texts are as hostile as they may be, and the combinations of what may be wrong with it.
//!
//! Changes mounts and umask of the calling thread alone ([`apart`]), so a combination runs in a thread of its own, as root.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, umask};
use nix::unistd::mkfifo;

const NAMES: &[&str] = &["plain", "bytes", "blank", "newline", "long"];
const FILES: &[&str] = &[
    "plain",
    "bytes",
    "missing",
    "dangling",
    "directory",
    "pipe",
    "huge",
];

/// What may be wrong, and how.
pub const FACTORS: [(&str, &[&str]); 10] = [
    ("mount", NAMES),
    ("stray", NAMES),
    ("manifest", NAMES),
    ("beside", FILES),
    ("hosts", FILES),
    ("resolver", FILES),
    ("login", FILES),
    ("environment", &["plain", "bytes", "newline", "long"]),
    ("text", &["plain", "blank", "newline", "long"]),
    ("umask", &["022", "077"]),
];

/// Longest name of a file.
const LONGEST_NAME: usize = 255;
/// Longer than any file that the agent has to read.
const HUGE: u64 = 64 << 20;

/// One level of each factor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Combination(Vec<usize>);

impl Combination {
    /// The level of a factor.
    pub fn of(&self, factor: &str) -> &'static str {
        let at = FACTORS.iter().position(|(name, _)| *name == factor);
        let at = at.unwrap_or_else(|| panic!("no factor {factor}"));
        FACTORS[at].1[self.0[at]]
    }
}

impl std::fmt::Display for Combination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let of = |(name, _): &(&str, &[&str])| format!("{name} {}", self.of(name));
        let levels: Vec<String> = FACTORS.iter().map(of).collect();
        f.write_str(&levels.join(", "))
    }
}

/// Two levels of two factors: factor, level, factor, level.
type Pair = (usize, usize, usize, usize);

fn pairs_of(row: &[usize]) -> impl Iterator<Item = Pair> + '_ {
    let pairs = (0..row.len()).flat_map(move |a| (a + 1..row.len()).map(move |b| (a, b)));
    pairs.map(|(a, b)| (a, row[a], b, row[b]))
}

/// Every pair of levels that any two factors have.
pub fn every_pair() -> BTreeSet<Pair> {
    let mut pairs = BTreeSet::new();
    for (a, one) in FACTORS.iter().enumerate() {
        for (b, other) in FACTORS.iter().enumerate().skip(a + 1) {
            for x in 0..one.1.len() {
                pairs.extend((0..other.1.len()).map(|y| (a, x, b, y)));
            }
        }
    }
    pairs
}

/// Combinations in which any two levels of two factors meet, always the same: each begins with the first pair that none had so
/// far, and takes of each other factor the level that meets most that is new.
pub fn pairwise() -> Vec<Combination> {
    let mut left = every_pair();
    let mut rows = Vec::new();
    while let Some((a, x, b, y)) = left.first().copied() {
        let mut row: Vec<Option<usize>> = vec![None; FACTORS.len()];
        (row[a], row[b]) = (Some(x), Some(y));
        for factor in 0..row.len() {
            if row[factor].is_some() {
                continue;
            }
            let levels = FACTORS[factor].1.len();
            let gain = |level: usize| {
                let set = row.iter().enumerate();
                let set = set.filter_map(|(other, l)| Some((other, (*l)?)));
                let pair = |(other, l): (usize, usize)| match other < factor {
                    true => (other, l, factor, level),
                    false => (factor, level, other, l),
                };
                set.map(pair).filter(|pair| left.contains(pair)).count()
            };
            // Of those that are equal another one each time.
            let turn = |level: usize| (level + rows.len()) % levels;
            row[factor] = (0..levels).max_by_key(|level| (gain(*level), turn(*level)));
        }
        let row: Vec<usize> = row.into_iter().flatten().collect();
        left.retain(|pair| !pairs_of(&row).any(|met| met == *pair));
        rows.push(Combination(row));
    }
    rows
}

/// How many pairs these combinations meet.
pub fn met(rows: &[Combination]) -> BTreeSet<Pair> {
    rows.iter().flat_map(|row| pairs_of(&row.0)).collect()
}

/// At least `count` different combinations, always the same, those of [`pairwise`] first.
pub fn combinations(count: usize) -> Vec<Combination> {
    let mut rows = pairwise();
    let mut seen: BTreeSet<Combination> = rows.iter().cloned().collect();
    let mut random: u64 = 1;
    while rows.len() < count {
        let mut level = |levels: usize| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(random >> 33).unwrap() % levels
        };
        let row = FACTORS.iter().map(|(_, levels)| level(levels.len()));
        let row = Combination(row.collect());
        if seen.insert(row.clone()) {
            rows.push(row);
        }
    }
    rows
}

/// Gives the calling thread, and what it starts, mounts and an umask of their own.
pub fn apart(mask: &str) {
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_FS).expect("a mount namespace");
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("make it private");
    let mask = u32::from_str_radix(mask, 8).expect("an umask");
    umask(Mode::from_bits_truncate(mask));
}

/// A file name of that kind, with an ending.
pub fn name(kind: &str, ending: &str) -> OsString {
    let mut bytes = match kind {
        "bytes" => b"caf\xe9".to_vec(),
        "blank" => b" two  words ".to_vec(),
        "newline" => b"two\nlines".to_vec(),
        "long" => vec![b'n'; LONGEST_NAME - ending.len()],
        _ => b"plain".to_vec(),
    };
    bytes.extend(ending.bytes());
    OsString::from_vec(bytes)
}

/// A text of that kind.
pub fn text(kind: &str) -> String {
    match kind {
        "blank" => "  two  words ".to_owned(),
        "newline" => "two\nlines\n".to_owned(),
        "long" => "n".repeat(4096),
        _ => "plain".to_owned(),
    }
}

/// Variables for the agent.
pub fn environment(kind: &str) -> Vec<(OsString, OsString)> {
    let odd = |bytes: &[u8]| OsStr::from_bytes(bytes).to_owned();
    match kind {
        "bytes" => vec![
            (odd(b"HOME"), odd(b"/caf\xe9")),
            (odd(b"CAF\xc9"), odd(b"\xff\xfe")),
        ],
        "newline" => vec![
            (odd(b"HOME"), odd(b"/two\nlines")),
            (odd(b"A B"), odd(b" ")),
        ],
        "long" => vec![(odd(b"HOME"), OsString::from(format!("/{}", text("long"))))],
        _ => Vec::new(),
    }
}

/// Puts something of that kind at a path, in place of what is there. `content` is what belongs there.
pub fn place(kind: &str, path: &Path, content: &str) {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir(path).expect("remove a directory"),
        Ok(_) => fs::remove_file(path).expect("remove a file"),
        Err(_) => {}
    }
    let text = |more: &[u8]| {
        let bytes = [content.as_bytes(), more].concat();
        fs::write(path, bytes).expect("write a file");
    };
    match kind {
        "missing" => {}
        "dangling" => symlink("/nowhere/at/all", path).expect("make a link"),
        "directory" => fs::create_dir(path).expect("make a directory"),
        "pipe" => mkfifo(path, Mode::from_bits_truncate(0o600)).expect("make a pipe"),
        "bytes" => text(b"\n# caf\xe9\n"),
        "huge" => {
            text(b"\n");
            let file = fs::File::options().write(true).open(path);
            file.and_then(|file| file.set_len(HUGE))
                .expect("make it huge");
        }
        _ => text(b""),
    }
}

/// Mounts of this thread, which are gone with this. To be dropped before anybody removes what is below them.
pub struct Mounted(Vec<PathBuf>);

impl Mounted {
    fn new(source: &Path, point: &Path, fstype: Option<&str>, flags: MsFlags) -> Self {
        mount(Some(source), point, fstype, flags, None::<&str>).expect("mount it");
        Self(vec![point.to_owned()])
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        for point in self.0.iter().rev() {
            if let Err(error) = umount2(point, MntFlags::MNT_DETACH) {
                eprintln!("unmount {}: {error}", point.display());
            }
        }
    }
}

/// Mounts something below `dir`, at a place with such a name. A long one has a path of nearly 4 KiB.
pub fn mount_at(kind: &str, dir: &Path) -> Mounted {
    let mut point = dir.join(name(kind, ""));
    if kind == "long" {
        while point.as_os_str().len() + 2 * LONGEST_NAME < 4096 {
            point.push(name(kind, ""));
        }
    }
    fs::create_dir_all(&point).expect("make a mount point");
    Mounted::new(Path::new("odd"), &point, Some("tmpfs"), MsFlags::empty())
}

/// Leaves something with such a name in each of these directories.
pub fn strays(kind: &str, dirs: &[PathBuf]) {
    for dir in dirs {
        fs::create_dir_all(dir.join(name(kind, ""))).expect("make a stray directory");
        let link = dir.join(name(kind, ".log"));
        symlink("/nowhere/at/all", link).expect("make a stray link");
    }
}

/// Replaces `/etc/hosts` for the calling thread, which is [`apart`]: it sees a copy of `/etc`, made in memory at `dir`.
pub fn hosts(kind: &str, dir: &Path) -> Mounted {
    fs::create_dir_all(dir).expect("make a directory");
    let none = MsFlags::empty();
    let mut mounted = Mounted::new(Path::new("odd"), dir, Some("tmpfs"), none);
    let copied = Command::new("cp").args(["-dR", "/etc/."]).arg(dir).status();
    assert!(copied.expect("run cp").success(), "copy /etc");
    place(kind, &dir.join("hosts"), "127.0.0.1 localhost\n");
    let mut on_top = Mounted::new(dir, Path::new("/etc"), None, MsFlags::MS_BIND);
    mounted.0.append(&mut on_top.0);
    mounted
}
