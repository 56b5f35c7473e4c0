//! Fuzz targets of container logs: their lines, their ends, and their rotation.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;

use rustix::fs::{MemfdFlags, memfd_create};

use super::entry::{Assembler, Filter, LogOptions, Streams};
use super::files::{LogPath, is_stamp};
use super::{rotate, tail};

/// Stands for more bytes than a reader holds back.
const LONG: u8 = 0xfe;
const LONG_BYTES: usize = 65 * 1024;

/// Reads the lines of a log. The first byte says what is asked for, the second how many bytes are read at a time; the
/// rest is the file, in which a byte 0xFE stands for a part that is longer than what a reader holds back.
///
/// Asserts that the answer does not depend on how the file is read, that it keeps its limit, and that the last lines
/// are the same whether they are looked for from the end or from the beginning.
pub(crate) fn log_lines(data: &[u8]) {
    let [asked, step, file @ ..] = data else {
        return;
    };
    let file = expanded(file);
    let options = LogOptions {
        follow: false,
        tail: None,
        since: (asked & 1 != 0).then(|| "2026-01-02T03:04:05.6Z".parse().unwrap()),
        limit: (asked & 2 != 0).then_some(u64::from(asked >> 5) * 16),
        timestamps: asked & 4 != 0,
        streams: match asked >> 3 & 3 {
            1 => Streams::Stdout,
            2 => Streams::Stderr,
            _ => Streams::All,
        },
    };
    let at_once = lines(&file, file.len().max(1), &options);
    assert_eq!(at_once, lines(&file, usize::from(*step) * 8 + 1, &options));
    if let Some(limit) = options.limit {
        assert!(at_once.0.len() as u64 <= limit);
    }
    last_lines(&file, u64::from(*step % 8));
}

fn expanded(file: &[u8]) -> Vec<u8> {
    let mut parts = file.split(|b| *b == LONG);
    let mut all = parts.next().unwrap_or_default().to_vec();
    for (index, part) in parts.enumerate() {
        // Two of them show all that more would.
        if index < 2 {
            all.resize(all.len() + LONG_BYTES, b'x');
        }
        all.extend_from_slice(part);
    }
    all
}

fn lines(file: &[u8], step: usize, options: &LogOptions) -> (Vec<u8>, u64) {
    let mut filter = Filter::new(options);
    let mut assembler = Assembler::default();
    let mut out = Vec::new();
    for piece in file.chunks(step) {
        assembler.feed(piece, &mut filter, &mut out);
    }
    assembler.finish(&mut filter, &mut out);
    // What stands behind the limit is not looked at.
    let unreadable = if filter.is_full() {
        0
    } else {
        filter.unreadable
    };
    (out, unreadable)
}

fn last_lines(file: &[u8], wanted: u64) {
    let length = file.len() as u64;
    let mut plain = File::from(memfd_create("log", MemfdFlags::CLOEXEC).unwrap());
    plain.write_all(file).unwrap();
    let from_end = tail::of_plain(&plain, length, wanted).unwrap();
    let from_start = tail::of_stream(|| Ok(file), wanted).unwrap();
    assert_eq!(from_end, from_start);
    assert!(from_end.start <= length && from_end.lines <= wanted);
    let before = usize::try_from(from_end.start).unwrap();
    assert!(before == 0 || before == file.len() || file[before - 1] == b'\n');
}

/// Rotates a log twice. The first byte is the number of files to keep, the next eight are the time in seconds, little
/// endian; the rest are names of files beside the log, one a line.
///
/// Asserts that the log is rotated whatever lies beside it, that its name sorts behind all older ones, that no more
/// files than wanted are left, and that files of other logs stay.
pub(crate) fn log_rotation(data: &[u8]) {
    let Some(([keep, now @ ..], names)) = data.split_first_chunk::<9>() else {
        return;
    };
    // A clock that runs: 1970 to 9998.
    let seconds = u64::from_le_bytes(*now) % 253_339_228_800;
    let now = jiff::Timestamp::from_second(seconds as i64).unwrap();
    let keep = u32::from(keep % 6);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.log");
    fs::write(&path, "first").unwrap();
    let mut others = Vec::new();
    for name in names.split(|b| *b == b'\n').take(8) {
        let Ok(name) = std::str::from_utf8(name) else {
            continue;
        };
        let file = Path::new(name);
        // After the last second of 9999 there is no other one.
        if name.len() > 64
            || name.contains('\0')
            || name.contains("99991231-23595")
            || file.file_name() != Some(file.as_os_str())
        {
            continue;
        }
        fs::write(dir.path().join(name), name).unwrap();
        if !name.starts_with("0.log") {
            others.push(name.to_owned());
        }
    }
    let log = LogPath::new(&path).unwrap();
    for content in ["first", "second"] {
        fs::write(&path, content).unwrap();
        let rotated = rotate::rename_away(&path, keep, now).unwrap();
        assert!(!path.exists());
        assert_eq!(fs::read_to_string(&rotated.to).unwrap(), content);
        let files = log.list().unwrap();
        assert!(files.iter().all(|file| is_stamp(&file.stamp)));
        let newest = files.last().unwrap();
        assert_eq!(log.rotated(&newest.stamp, newest.compressed), rotated.to);
        let most = usize::try_from(keep).unwrap().saturating_sub(1).max(1);
        assert!(files.len() <= most, "{files:?}");
    }
    for name in others {
        assert_eq!(fs::read_to_string(dir.path().join(&name)).unwrap(), name);
    }
}
