//! Finds the last lines of a file. A line is what ends with an `F` entry: parts are one line together.
//!
//! A plain file is read from its end, block by block; a compressed one from its start.

use std::fs::File;
use std::io::{self, BufRead};
use std::os::unix::fs::FileExt;

use memchr::{memchr, memrchr};

use super::entry::{Head, MAX_HEAD};

const BLOCK: usize = 64 * 1024;

/// Position of the last lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tail {
    /// Byte at which they begin.
    pub(super) start: u64,
    /// Number of lines: fewer than requested if the file has no more.
    pub(super) lines: u64,
}

/// Returns whether an error comes from the decoder, and not from the disk.
pub(super) fn is_damage(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
    matches!(error.kind(), InvalidData | InvalidInput | UnexpectedEof)
}

/// The part of an entry that its head is in; `rest` begins with the entry.
fn head_of(rest: &[u8]) -> &[u8] {
    let head = &rest[..rest.len().min(MAX_HEAD)];
    memchr(b'\n', head).map_or(head, |newline| &head[..newline])
}

/// Returns whether the line ends with this entry.
fn ends_line(head: &[u8]) -> bool {
    Head::parse(head).is_none_or(|head| !head.partial)
}

/// The last `lines` lines of the first `end` bytes.
///
/// # Errors
/// When the file cannot be read.
pub(super) fn of_plain(file: &File, end: u64, lines: u64) -> io::Result<Tail> {
    let mut found = 0;
    if lines == 0 || end == 0 {
        return Ok(Tail {
            start: end,
            lines: 0,
        });
    }
    // The entry after the one that is looked at, and the bytes after the block.
    let mut next: Option<u64> = None;
    let mut after: Vec<u8> = Vec::new();
    let mut upper = end;
    while upper > 0 {
        let lower = upper.saturating_sub(BLOCK as u64);
        let len = usize::try_from(upper - lower).unwrap_or(BLOCK);
        let mut block = vec![0; len];
        file.read_exact_at(&mut block, lower)?;
        block.extend_from_slice(&after);
        let mut search = len;
        loop {
            let newline = memrchr(b'\n', &block[..search]);
            let at = match newline {
                Some(newline) => newline + 1,
                None if lower == 0 => 0,
                None => break,
            };
            let start = lower + at as u64;
            // The newline at the very end begins no entry.
            if start < end {
                let head = head_of(&block[at..]);
                if let Some(next) = next
                    && ends_line(head)
                {
                    found += 1;
                    if found == lines {
                        return Ok(Tail {
                            start: next,
                            lines: found,
                        });
                    }
                }
                next = Some(start);
            }
            match newline {
                Some(newline) => search = newline,
                None => break,
            }
        }
        block.truncate(MAX_HEAD);
        after = block;
        upper = lower;
    }
    Ok(Tail {
        start: 0,
        lines: found + 1,
    })
}

/// The last `lines` lines of what a decoder gives, which is read twice: where each line begins is not kept. Where it
/// finds damage, it ends.
///
/// # Errors
/// When the file cannot be read.
pub(super) fn of_stream<R: BufRead>(
    mut open: impl FnMut() -> io::Result<R>,
    lines: u64,
) -> io::Result<Tail> {
    let mut count = 0_u64;
    let end = line_starts(open()?, |_| count += 1)?;
    let lines = lines.min(count);
    let skipped = count - lines;
    let mut start = if lines == 0 { end } else { 0 };
    if lines > 0 && skipped > 0 {
        let mut seen = 0_u64;
        line_starts(open()?, |at| {
            if seen == skipped {
                start = at;
            }
            seen += 1;
        })?;
    }
    Ok(Tail { start, lines })
}

/// Tells where each line begins. Returns how many bytes there are.
fn line_starts(mut reader: impl BufRead, mut each: impl FnMut(u64)) -> io::Result<u64> {
    let (mut at, mut entry) = (0_u64, 0_u64);
    let mut head: Vec<u8> = Vec::with_capacity(MAX_HEAD);
    let mut begins = true;
    loop {
        let data = match reader.fill_buf() {
            Err(e) if is_damage(&e) => break,
            other => other?,
        };
        if data.is_empty() {
            break;
        }
        let newline = memchr(b'\n', data);
        let len = newline.map_or(data.len(), |newline| newline + 1);
        if at == entry && begins {
            each(entry);
        }
        let room = MAX_HEAD - head.len();
        head.extend_from_slice(&data[..len.min(room)]);
        reader.consume(len);
        at += len as u64;
        if newline.is_some() {
            begins = ends_line(&head);
            entry = at;
            head.clear();
        }
    }
    Ok(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufReader;

    /// Lines by definition: every entry after an entry that ends a line begins one.
    fn naive(log: &[u8], lines: u64) -> Tail {
        let mut starts = Vec::new();
        let (mut at, mut begins) = (0, true);
        for entry in log.split_inclusive(|b| *b == b'\n') {
            if begins {
                starts.push(at as u64);
            }
            begins = ends_line(entry);
            at += entry.len();
        }
        let count = starts.len().min(usize::try_from(lines).unwrap());
        let start = match count {
            0 => log.len() as u64,
            n => starts[starts.len() - n],
        };
        Tail {
            start,
            lines: count as u64,
        }
    }

    #[test]
    fn the_head_of_an_entry_ends_with_its_line() {
        let log = b"2026-01-02T03:04:05Z stdout P:\nx 2026-01-02T03:04:05Z stdout F y\n";
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, log).unwrap();
        let file = File::open(&path).unwrap();
        let want = naive(log, 1);
        assert_eq!(want.start, 31);
        assert_eq!(of_plain(&file, log.len() as u64, 1).unwrap(), want);
        assert_eq!(of_stream(|| Ok(log.as_slice()), 1).unwrap(), want);
    }

    proptest::proptest! {
        #[test]
        fn both_ways_find_what_counting_finds(
            entries in proptest::collection::vec((0..3_u8, 0..40_000_usize), 0..12),
            lines in 0..14_u64,
            torn in proptest::bool::ANY,
        ) {
            let mut log = Vec::new();
            for (kind, len) in entries {
                log.extend_from_slice(match kind {
                    0 => b"2026-01-02T03:04:05Z stdout F ".as_slice(),
                    1 => b"2026-01-02T03:04:05Z stderr P ",
                    _ => b"what is this ",
                });
                log.resize(log.len() + len, b'x');
                log.push(b'\n');
            }
            if torn {
                log.pop();
            }
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("0.log");
            std::fs::write(&path, &log).unwrap();
            let want = naive(&log, lines);
            let file = File::open(&path).unwrap();
            proptest::prop_assert_eq!(of_plain(&file, log.len() as u64, lines).unwrap(), want);
            let reader = || Ok(BufReader::with_capacity(1000, log.as_slice()));
            proptest::prop_assert_eq!(of_stream(reader, lines).unwrap(), want);
        }
    }
}
