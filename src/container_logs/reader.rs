//! Reads one container's log across its files, a bounded piece at a time. Blocking; see `follow` for the async side.
//!
//! Without `follow` the files that are there at the start are read, the newest up to the size it has then. With
//! `follow` the reader goes from file to file by their stamps: after a rotated file comes the one with the next greater
//! stamp, after the newest comes the one the runtime writes. The file being read stays open, so it may be renamed,
//! compressed or removed meanwhile. A runtime may write the last lines to a file after it has made the next one: a
//! file that was left is looked at for two seconds more.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, warn};

use super::chain::{Current, Late, Position, Source, decoder, read_at};
use super::entry::{Assembler, Filter, LogOptions};
use super::files::{LogPath, RotatedFile, identity, open};
use super::tail::{self, Tail, is_damage};

/// Bytes that are read at a time, and roughly those that are returned at a time.
const CHUNK: usize = 32 * 1024;
/// Bytes that are read without any wanted content before control returns to the caller.
const BUDGET: usize = 1 << 20;
/// Time for which lines may still arrive in a file after a newer file exists.
const LATE: Duration = Duration::from_secs(2);
/// Time for which lines may still arrive after the container has ended.
const SETTLE: Duration = Duration::from_millis(300);
/// Number of times that the files are listed again if they change during the read.
const TRIES: usize = 100;

/// Outcome of [`LogReader::step`].
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Read something; of what was wanted this, which may be nothing.
    Data(Vec<u8>),
    /// There is nothing now: look again when the log changes, or after this time.
    Wait(Option<Duration>),
    /// There will be nothing more.
    End,
}

enum Segment {
    Rotated(RotatedFile),
    Base(File, u64),
}

/// Reads one log.
#[derive(Debug)]
pub struct LogReader {
    log: LogPath,
    filter: Filter,
    current: Option<Current>,
    late: Option<Late>,
    /// Without `follow`: files to be read yet.
    rest: VecDeque<(Position, Option<File>, Option<u64>)>,
    follow: bool,
    settled: bool,
    done: bool,
}

enum Moved {
    Yes,
    No,
    /// Everything that was to be read is read.
    AtEnd,
}

impl LogReader {
    /// Finds where to begin. Blocking: with `tail` it may have to decompress rotated files.
    ///
    /// # Errors
    /// When there is no log, or what is there cannot be read.
    pub fn open(path: &Path, options: &LogOptions) -> io::Result<Self> {
        let log = LogPath::new(path)?;
        let (base, rotated) = look(&log)?;
        let newest = rotated.last().map(|file| file.stamp.clone());
        let mut segments: Vec<Segment> = rotated.into_iter().map(Segment::Rotated).collect();
        if let Some(file) = base {
            let len = file.metadata()?.len();
            segments.push(Segment::Base(file, len));
        }
        let Some((first, skip)) = begin(&log, &segments, options)? else {
            let text = format!("{}: no such file or directory", path.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        };
        let mut reader = Self {
            filter: Filter::new(options),
            log,
            current: None,
            late: None,
            rest: VecDeque::new(),
            follow: options.follow,
            settled: false,
            done: false,
        };
        let mut segments = segments.into_iter().skip(first);
        // A rotated file that went meanwhile is passed over, as one that was gone before.
        let mut skip = skip;
        for segment in segments.by_ref() {
            reader.current = match segment {
                Segment::Rotated(file) => reader.log.open_rotated(&file.stamp)?.map(|opened| {
                    let position = Position::Rotated(file.stamp);
                    Current::rotated(opened, skip, position)
                }),
                Segment::Base(file, len) => Some(Current {
                    source: Source::Plain {
                        file,
                        offset: skip,
                        end: (!options.follow).then_some(len),
                    },
                    assembler: Assembler::default(),
                    position: Position::Base {
                        after: newest.clone(),
                    },
                }),
            };
            if reader.current.is_some() {
                break;
            }
            skip = 0;
        }
        if !options.follow {
            let after = newest;
            reader.rest.extend(segments.map(|segment| match segment {
                Segment::Rotated(file) => (Position::Rotated(file.stamp), None, None),
                Segment::Base(file, len) => {
                    let after = after.clone();
                    (Position::Base { after }, Some(file), Some(len))
                }
            }));
        }
        Ok(reader)
    }

    /// Reads on. `ended`: the container writes no more; the log is then read to its end, and half a line given as
    /// it is.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn step(&mut self, ended: bool) -> io::Result<Step> {
        let mut out = Vec::new();
        let mut budget = BUDGET;
        let mut tries = TRIES;
        self.read_late(&mut out)?;
        while !self.done {
            if self.filter.is_full() {
                self.done = true;
                break;
            }
            let read = self.read(&mut out)?;
            if read > 0 {
                self.settled = false;
                budget = budget.saturating_sub(read);
                if out.len() >= CHUNK || budget == 0 {
                    return Ok(Step::Data(out));
                }
                continue;
            }
            tries -= 1;
            match self.advance(&mut out)? {
                Moved::Yes if tries == 0 => return Ok(Step::Data(out)),
                Moved::Yes => {}
                Moved::AtEnd => self.finish(&mut out)?,
                Moved::No if !out.is_empty() => return Ok(Step::Data(out)),
                Moved::No if !ended => {
                    let left = |late: &Late| late.until.saturating_duration_since(Instant::now());
                    return Ok(Step::Wait(self.late.as_ref().map(left)));
                }
                Moved::No if self.settled => self.finish(&mut out)?,
                Moved::No => {
                    self.settled = true;
                    return Ok(Step::Wait(Some(SETTLE)));
                }
            }
        }
        Ok(if out.is_empty() {
            Step::End
        } else {
            Step::Data(out)
        })
    }

    /// Gives what is left of the open files and ends.
    fn finish(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        self.finish_late(out)?;
        if let Some(mut current) = self.current.take() {
            current.assembler.finish(&mut self.filter, out);
        }
        if self.filter.unreadable > 0 {
            let (path, lines) = (self.log.base(), self.filter.unreadable);
            debug!(path = %path.display(), lines, "left out invalid log lines");
        }
        self.done = true;
        Ok(())
    }

    /// One piece of the current file; how many bytes it had.
    fn read(&mut self, out: &mut Vec<u8>) -> io::Result<usize> {
        let Some(current) = &mut self.current else {
            return Ok(0);
        };
        let mut chunk = vec![0; CHUNK];
        let read = match &mut current.source {
            Source::Plain { file, offset, end } => {
                let room = end.map_or(u64::MAX, |end| end.saturating_sub(*offset));
                let room = usize::try_from(room).map_or(CHUNK, |room| room.min(CHUNK));
                let read = read_at(file, &mut chunk[..room], *offset)?;
                *offset += read as u64;
                read
            }
            Source::Packed(decoder) => match decoder.read(&mut chunk) {
                Err(error) if is_damage(&error) => {
                    warn!(path = %self.log.base().display(), position = ?current.position, %error,
                        "a rotated log is damaged, skipping the rest of it");
                    0
                }
                other => other?,
            },
        };
        current
            .assembler
            .feed(&chunk[..read], &mut self.filter, out);
        Ok(read)
    }

    /// Reads what came to the file that was left, and forgets it when its time is over.
    fn read_late(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        let Some(late) = &mut self.late else {
            return Ok(());
        };
        let over = Instant::now() >= late.until;
        late.drain(&mut self.filter, out)?;
        if over {
            late.assembler.finish(&mut self.filter, out);
            self.late = None;
        }
        Ok(())
    }

    fn finish_late(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        if let Some(mut late) = self.late.take() {
            late.drain(&mut self.filter, out)?;
            late.assembler.finish(&mut self.filter, out);
        }
        Ok(())
    }

    /// Goes to the next file, if there is one.
    fn advance(&mut self, out: &mut Vec<u8>) -> io::Result<Moved> {
        if self.follow {
            return self.advance_following(out);
        }
        if let Some(mut current) = self.current.take() {
            current.assembler.finish(&mut self.filter, out);
        }
        while let Some((position, file, end)) = self.rest.pop_front() {
            self.current = match (&position, file) {
                (Position::Rotated(stamp), _) => {
                    let opened = self.log.open_rotated(stamp)?;
                    opened.map(|opened| Current::rotated(opened, 0, position))
                }
                (_, Some(file)) => Some(Current::plain(file, end, position)),
                (_, None) => None,
            };
            if self.current.is_some() {
                return Ok(Moved::Yes);
            }
        }
        Ok(Moved::AtEnd)
    }

    fn advance_following(&mut self, out: &mut Vec<u8>) -> io::Result<Moved> {
        let Some(current) = &mut self.current else {
            // What there was went before it could be opened: begin with what the runtime writes now.
            let (base, rotated) = look(&self.log)?;
            let Some(file) = base else {
                return Ok(Moved::No);
            };
            let after = rotated.into_iter().next_back().map(|file| file.stamp);
            self.current = Some(Current::plain(file, None, Position::Base { after }));
            return Ok(Moved::Yes);
        };
        match &current.position {
            Position::Rotated(stamp) => {
                let stamp = stamp.clone();
                // In this order: a file that is rotated in between is found in the list.
                let base = open(&self.log.base())?;
                let newer = newer(&self.log, Some(&stamp))?;
                match (newer, base) {
                    (Some(next), _) => match self.log.open_rotated(&next)? {
                        Some(opened) => {
                            self.go_to(Current::rotated(opened, 0, Position::Rotated(next)), out)?;
                        }
                        None => current_position(&mut self.current, Position::Rotated(next)),
                    },
                    (None, Some(base)) if current.is_file(&base)? => {
                        // The rotation was taken back.
                        let after = look(&self.log)?.1.into_iter().next_back();
                        let after = after.map(|file| file.stamp);
                        current_position(&mut self.current, Position::Base { after });
                    }
                    (None, Some(base)) => {
                        let position = Position::Base { after: Some(stamp) };
                        self.go_to(Current::plain(base, None, position), out)?;
                    }
                    // The runtime still writes the renamed file.
                    (None, None) => return Ok(Moved::No),
                }
                Ok(Moved::Yes)
            }
            Position::Base { after } => {
                let after = after.clone();
                let Source::Plain { file, offset, .. } = &mut current.source else {
                    return Ok(Moved::No);
                };
                let metadata = file.metadata()?;
                let own = identity(&metadata);
                let at_base = self.log.base_identity()?;
                if at_base == Some(own) {
                    if metadata.size() >= *offset {
                        return Ok(Moved::No);
                    }
                    // Somebody emptied it.
                    *offset = 0;
                    current.assembler.finish(&mut self.filter, out);
                    return Ok(Moved::Yes);
                }
                self.leave_base(after, own, out)
            }
        }
    }

    /// The current file is not the one the runtime writes any more: finds its rotated name, or what came after it.
    fn leave_base(
        &mut self,
        after: Option<String>,
        own: (u64, u64),
        out: &mut Vec<u8>,
    ) -> io::Result<Moved> {
        let base = open(&self.log.base())?;
        let Some(next) = newer(&self.log, after.as_deref())? else {
            // Replaced without being rotated, or removed.
            let Some(base) = base else {
                return Ok(Moved::No);
            };
            if identity(&base.metadata()?) != own {
                self.go_to(Current::plain(base, None, Position::Base { after }), out)?;
            }
            return Ok(Moved::Yes);
        };
        let same = match (self.log.open_rotated(&next)?, &self.current) {
            // Ours or the one after ours: either way it is gone, and what is newer comes next.
            (None, _) | (_, None) => true,
            (Some((file, false)), _) if identity(&file.metadata()?) == own => true,
            (Some((file, true)), Some(current)) if current.begins_like(&file)? => true,
            (Some(opened), _) => {
                let position = Position::Rotated(next.clone());
                self.go_to(Current::rotated(opened, 0, position), out)?;
                false
            }
        };
        if same {
            current_position(&mut self.current, Position::Rotated(next));
        }
        Ok(Moved::Yes)
    }

    /// Leaves the current file for `next`. What was written to the current one until now comes first.
    fn go_to(&mut self, next: Current, out: &mut Vec<u8>) -> io::Result<()> {
        self.finish_late(out)?;
        let Some(left) = self.current.replace(next) else {
            return Ok(());
        };
        let mut assembler = left.assembler;
        match left.source {
            Source::Plain { file, offset, .. } => {
                let mut late = Late {
                    file,
                    offset,
                    assembler,
                    until: Instant::now() + LATE,
                };
                late.drain(&mut self.filter, out)?;
                self.late = Some(late);
            }
            Source::Packed(_) => assembler.finish(&mut self.filter, out),
        }
        Ok(())
    }
}

/// The oldest rotated file that is newer than `stamp`.
fn newer(log: &LogPath, stamp: Option<&str>) -> io::Result<Option<String>> {
    let newer = |file: &RotatedFile| stamp.is_none_or(|stamp| file.stamp.as_str() > stamp);
    Ok(log.list()?.into_iter().find(newer).map(|file| file.stamp))
}

fn current_position(current: &mut Option<Current>, position: Position) {
    if let Some(current) = current {
        current.position = position;
    }
}

/// The file the runtime writes, and the rotated ones that are older.
fn look(log: &LogPath) -> io::Result<(Option<File>, Vec<RotatedFile>)> {
    for _ in 0..TRIES {
        let base = open(&log.base())?;
        let rotated = log.list()?;
        let opened = match &base {
            Some(file) => Some(identity(&file.metadata()?)),
            None => None,
        };
        if log.base_identity()? == opened {
            return Ok((base, rotated));
        }
    }
    let text = format!("{} changes too often", log.base().display());
    Err(io::Error::other(text))
}

/// The first file that is wanted and where in it to begin; `None` when there is no file.
fn begin(
    log: &LogPath,
    segments: &[Segment],
    options: &LogOptions,
) -> io::Result<Option<(usize, u64)>> {
    if segments.is_empty() {
        return Ok(None);
    }
    let since = options.since.map(|since| since.as_second());
    let mut needed = options.tail;
    let mut begin = (segments.len() - 1, 0);
    for (index, segment) in segments.iter().enumerate().rev() {
        let tail = match segment {
            Segment::Base(file, len) => match needed {
                Some(lines) => Some(tail::of_plain(file, *len, lines)?),
                None => None,
            },
            Segment::Rotated(file) => {
                let Some((file, compressed)) = log.open_rotated(&file.stamp)? else {
                    continue;
                };
                let metadata = file.metadata()?;
                // Written last before that: nothing of it, and of older ones, is wanted.
                if since.is_some_and(|since| metadata.mtime() < since - 1) && index != begin.0 {
                    break;
                }
                match needed {
                    Some(lines) if compressed => {
                        let reader = || -> io::Result<_> {
                            (&file).seek(SeekFrom::Start(0))?;
                            Ok(BufReader::with_capacity(
                                32 * 1024,
                                decoder(file.try_clone()?),
                            ))
                        };
                        Some(tail::of_stream(reader, lines)?)
                    }
                    Some(lines) => Some(tail::of_plain(&file, metadata.len(), lines)?),
                    None => None,
                }
            }
        };
        match (tail, &mut needed) {
            (Some(Tail { start, lines }), Some(needed)) => {
                begin = (index, start);
                *needed = needed.saturating_sub(lines);
                if *needed == 0 {
                    break;
                }
            }
            _ => begin = (index, 0),
        }
    }
    Ok(Some(begin))
}
