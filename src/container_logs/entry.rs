//! One file's bytes to entries, and entries to what the client asked for.
//!
//! **Invariant:** what is kept of an unfinished line is at most [`LONG_LINE`] bytes; a longer one is passed on as it comes.

use memchr::memchr;

/// An entry's head (time, stream, tags) is never longer.
pub(super) const MAX_HEAD: usize = 128;
/// A line is passed on when it is complete; one longer than this as it comes.
const LONG_LINE: usize = 64 * 1024;
/// Digits of a second's fraction in what is given out.
const FRACTION: usize = 9;

/// Selection of a container's streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Streams {
    /// Both.
    #[default]
    All,
    /// `stdout` only.
    Stdout,
    /// `stderr` only.
    Stderr,
}

/// Selection of a log's content; upstream's `LogOptions`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// Go on with what is written later, until the container has ended.
    pub follow: bool,
    /// Only so many lines from the end; `None` for all. Rotated files count.
    pub tail: Option<u64>,
    /// Only what was written then or later.
    pub since: Option<jiff::Timestamp>,
    /// At most so many bytes.
    pub limit: Option<u64>,
    /// Each line begins with its time.
    pub timestamps: bool,
    /// Streams to read.
    pub streams: Streams,
}

/// The head of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head<'a> {
    time: &'a str,
    stderr: bool,
    /// The line goes on in the next entry.
    pub(super) partial: bool,
    /// Length of the head, at whose end the content begins.
    len: usize,
}

impl<'a> Head<'a> {
    /// Reads the head of `line`; `None` when it is none. Upstream: `parseCRILog`.
    pub(super) fn parse(line: &'a [u8]) -> Option<Self> {
        let start = &line[..line.len().min(MAX_HEAD)];
        let first = memchr(b' ', start)?;
        let second = first + 1 + memchr(b' ', &start[first + 1..])?;
        let third = second + 1 + memchr(b' ', &start[second + 1..])?;
        let time = std::str::from_utf8(&start[..first]).ok()?;
        if !is_time(time.as_bytes()) {
            return None;
        }
        let stderr = match &start[first + 1..second] {
            b"stdout" => false,
            b"stderr" => true,
            _ => return None,
        };
        // Tags are separated by colons; the first says whether the line is complete.
        let partial = match start[second + 1..third].split(|b| *b == b':').next() {
            Some(b"P") => true,
            Some(b"F") => false,
            _ => return None,
        };
        Some(Self {
            time,
            stderr,
            partial,
            len: third + 1,
        })
    }

    /// The time with nine digits of the second's fraction, as upstream prints it.
    fn push_time(&self, out: &mut Vec<u8>) {
        let time = self.time.as_bytes();
        let (seconds, rest) = time.split_at(19);
        let digits = rest.iter().skip(1).take_while(|b| b.is_ascii_digit());
        let digits = match rest.first() {
            Some(b'.') => digits.count(),
            _ => 0,
        };
        let fraction = if digits == 0 { &[] } else { &rest[1..=digits] };
        let zone = if digits == 0 {
            rest
        } else {
            &rest[digits + 1..]
        };
        out.extend_from_slice(seconds);
        out.push(b'.');
        out.extend_from_slice(&fraction[..digits.min(FRACTION)]);
        out.resize(out.len() + FRACTION.saturating_sub(digits), b'0');
        out.extend_from_slice(if zone == b"+00:00" { b"Z" } else { zone });
    }
}

/// Returns whether this looks like RFC 3339: `2026-01-02T03:04:05[.6…](Z|+07:00)`.
fn is_time(text: &[u8]) -> bool {
    const SHAPE: &[u8] = b"dddd-dd-ddTdd:dd:dd";
    let fits = |shape: &[u8], text: &[u8]| {
        shape.iter().zip(text).all(|(s, t)| match s {
            b'd' => t.is_ascii_digit(),
            b's' => matches!(t, b'+' | b'-'),
            _ => s == t,
        })
    };
    if text.len() <= SHAPE.len() || !fits(SHAPE, text) {
        return false;
    }
    let mut zone = &text[SHAPE.len()..];
    if let Some(fraction) = zone.strip_prefix(b".") {
        let digits = fraction.iter().take_while(|b| b.is_ascii_digit()).count();
        if digits == 0 {
            return false;
        }
        zone = &fraction[digits..];
    }
    zone == b"Z" || (zone.len() == 6 && fits(b"sdd:dd", zone))
}

/// Selection of the content, applied to the entries of all files of a log in turn.
#[derive(Debug)]
pub(super) struct Filter {
    since: Option<jiff::Timestamp>,
    timestamps: bool,
    streams: Streams,
    left: Option<u64>,
    /// The next entry begins a line.
    at_start: bool,
    /// The last file ended within a line that nobody finishes any more.
    torn: bool,
    /// Lines that were no entries.
    pub(super) unreadable: u64,
}

impl Filter {
    pub(super) fn new(options: &LogOptions) -> Self {
        Self {
            since: options.since,
            timestamps: options.timestamps,
            streams: options.streams,
            left: options.limit,
            at_start: true,
            torn: false,
            unreadable: 0,
        }
    }

    /// Returns whether the limit is reached.
    pub(super) fn is_full(&self) -> bool {
        self.left == Some(0)
    }

    /// Begins an entry; whether its content is wanted.
    fn begin(&mut self, head: &Head<'_>, out: &mut Vec<u8>) -> bool {
        let streams_fit = match self.streams {
            Streams::All => true,
            Streams::Stdout => !head.stderr,
            Streams::Stderr => head.stderr,
        };
        if !streams_fit {
            return false;
        }
        if let Some(since) = self.since
            && head
                .time
                .parse::<jiff::Timestamp>()
                .is_ok_and(|at| at < since)
        {
            self.at_start = !head.partial;
            return false;
        }
        if std::mem::take(&mut self.torn) {
            self.push(b"\n", out);
            self.at_start = true;
        }
        if self.timestamps && self.at_start {
            let mut prefix = Vec::with_capacity(36);
            head.push_time(&mut prefix);
            prefix.push(b' ');
            self.push(&prefix, out);
        }
        true
    }

    fn end(&mut self, partial: bool, wanted: bool, out: &mut Vec<u8>) {
        if wanted {
            if !partial {
                self.push(b"\n", out);
            }
            self.at_start = !partial;
        }
    }

    fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let bytes = match &mut self.left {
            None => bytes,
            Some(left) => {
                let len = usize::try_from(*left).map_or(bytes.len(), |l| l.min(bytes.len()));
                *left -= len as u64;
                &bytes[..len]
            }
        };
        out.extend_from_slice(bytes);
    }
}

/// Bytes of one file that are not passed on yet.
#[derive(Debug, Default)]
pub(super) struct Assembler {
    /// A line without its end.
    pending: Vec<u8>,
    /// Within a long line whose head was passed on: whether it is partial, and whether it is wanted.
    long: Option<(bool, bool)>,
}

impl Assembler {
    /// Takes the next bytes of the file; complete lines go to `out`.
    pub(super) fn feed(&mut self, mut data: &[u8], filter: &mut Filter, out: &mut Vec<u8>) {
        while !data.is_empty() && !filter.is_full() {
            let end = memchr(b'\n', data);
            let piece = &data[..end.unwrap_or(data.len())];
            data = &data[end.map_or(data.len(), |end| end + 1)..];
            if let Some((partial, wanted)) = self.long {
                if wanted {
                    filter.push(piece, out);
                }
                if end.is_some() {
                    self.long = None;
                    filter.end(partial, wanted, out);
                }
            } else if end.is_none() {
                self.pending.extend_from_slice(piece);
                if self.pending.len() > LONG_LINE {
                    let line = std::mem::take(&mut self.pending);
                    let began = self.begin(&line, filter, out);
                    // What is no entry is passed over up to its end.
                    self.long = Some(began.unwrap_or((false, false)));
                }
            } else if self.pending.is_empty() {
                self.line(piece, filter, out);
            } else {
                self.pending.extend_from_slice(piece);
                let line = std::mem::take(&mut self.pending);
                self.line(&line, filter, out);
            }
        }
    }

    /// Nothing more comes from this file: what is left of it is given as it is.
    pub(super) fn finish(&mut self, filter: &mut Filter, out: &mut Vec<u8>) {
        let line = std::mem::take(&mut self.pending);
        let began = match self.long.take() {
            Some(long) => Some(long),
            None if line.is_empty() => None,
            None => self.begin(&line, filter, out),
        };
        if let Some((partial, true)) = began {
            filter.at_start = false;
            filter.torn = !partial;
        }
    }

    fn line(&self, line: &[u8], filter: &mut Filter, out: &mut Vec<u8>) {
        if let Some((partial, wanted)) = self.begin(line, filter, out) {
            filter.end(partial, wanted, out);
        }
    }

    /// Passes on the head and what there is of the content; whether it is partial and whether it is wanted.
    fn begin(&self, line: &[u8], filter: &mut Filter, out: &mut Vec<u8>) -> Option<(bool, bool)> {
        let Some(head) = Head::parse(line) else {
            filter.unreadable += 1;
            return None;
        };
        let wanted = filter.begin(&head, out);
        if wanted {
            filter.push(&line[head.len..], out);
        }
        Some((head.partial, wanted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(log: &[u8], options: &LogOptions) -> String {
        let (mut filter, mut out) = (Filter::new(options), Vec::new());
        let mut assembler = Assembler::default();
        assembler.feed(log, &mut filter, &mut out);
        assembler.finish(&mut filter, &mut out);
        String::from_utf8(out).unwrap()
    }

    const LOG: &[u8] = b"2026-01-02T03:04:05Z stdout F one\n\
        2026-01-02T03:04:06.5+02:00 stderr P tw\n\
        2026-01-02T03:04:07.123456789Z stderr F o\n\
        not an entry\n\
        2026-01-02T03:04:08Z stdout F:x  three \n\
        2026-01-02T03:04:09Z stdout F \n";

    #[test]
    fn parts_are_joined_and_what_is_no_entry_is_left_out() {
        let all = read(LOG, &LogOptions::default());
        assert_eq!(all, "one\ntwo\n three \n\n");
    }

    #[test]
    fn times_have_nine_digits_and_stand_before_lines_only() {
        let options = LogOptions {
            timestamps: true,
            ..LogOptions::default()
        };
        assert_eq!(
            read(LOG, &options),
            "2026-01-02T03:04:05.000000000Z one\n\
             2026-01-02T03:04:06.500000000+02:00 two\n\
             2026-01-02T03:04:08.000000000Z  three \n\
             2026-01-02T03:04:09.000000000Z \n"
        );
    }

    #[test]
    fn streams_times_and_limits_choose() {
        let options = |streams| LogOptions {
            streams,
            ..LogOptions::default()
        };
        assert_eq!(read(LOG, &options(Streams::Stderr)), "two\n");
        assert_eq!(read(LOG, &options(Streams::Stdout)), "one\n three \n\n");
        let since = LogOptions {
            since: Some("2026-01-02T03:04:07.2Z".parse().unwrap()),
            ..LogOptions::default()
        };
        assert_eq!(read(LOG, &since), " three \n\n");
        let limit = LogOptions {
            limit: Some(6),
            ..LogOptions::default()
        };
        assert_eq!(read(LOG, &limit), "one\ntw");
    }

    #[test]
    fn a_half_line_is_given_as_it_is_at_the_end() {
        let half = b"2026-01-02T03:04:05Z stdout F hal";
        assert_eq!(read(half, &LogOptions::default()), "hal");
        let cut_head = b"2026-01-02T03:04:05Z std";
        assert_eq!(read(cut_head, &LogOptions::default()), "");
    }

    #[test]
    fn a_line_of_a_mebibyte_is_not_kept() {
        let mut log = b"2026-01-02T03:04:05Z stdout F ".to_vec();
        log.resize(log.len() + (1 << 20), b'x');
        let (mut filter, mut out) = (Filter::new(&LogOptions::default()), Vec::new());
        let mut assembler = Assembler::default();
        for chunk in log.chunks(4096) {
            assembler.feed(chunk, &mut filter, &mut out);
            assert!(assembler.pending.len() <= LONG_LINE);
        }
        assembler.feed(
            b"\n2026-01-02T03:04:05Z stdout F y\n",
            &mut filter,
            &mut out,
        );
        assert_eq!(out.len(), (1 << 20) + 3);
        assert!(out.ends_with(b"x\ny\n"));
    }

    #[test]
    fn only_times_are_times() {
        for good in ["2026-01-02T03:04:05Z", "2026-01-02T03:04:05.1-07:00"] {
            assert!(is_time(good.as_bytes()), "{good}");
        }
        for bad in [
            "",
            "2026-01-02T03:04:05",
            "2026-01-02 03:04:05Z",
            "2026-01-02T03:04:05.Z",
            "2026-01-02T03:04:05.1",
            "2026-01-02T03:04:05+0100",
        ] {
            assert!(!is_time(bad.as_bytes()), "{bad}");
        }
    }
}
