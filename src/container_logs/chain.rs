//! A file of a log while it is read.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use flate2::read::MultiGzDecoder;
use tokio::time::Instant;
use tracing::debug;

use super::entry::{Assembler, Filter};
use super::files::identity;
use super::tail::is_damage;

/// Bytes of a late file that are read at a time.
const LATE_BUDGET: usize = 1 << 20;

/// A place in the chain of files.
#[derive(Debug)]
pub(super) enum Position {
    Rotated(String),
    /// The file the runtime wrote when it was opened; rotated ones up to `after` are older.
    Base {
        after: Option<String>,
    },
}

#[derive(Debug)]
pub(super) enum Source {
    Plain {
        file: File,
        offset: u64,
        end: Option<u64>,
    },
    Packed(Box<MultiGzDecoder<BufReader<File>>>),
}

#[derive(Debug)]
pub(super) struct Current {
    pub(super) source: Source,
    pub(super) assembler: Assembler,
    pub(super) position: Position,
}

/// A file that was left and may get last lines.
#[derive(Debug)]
pub(super) struct Late {
    pub(super) file: File,
    pub(super) offset: u64,
    pub(super) assembler: Assembler,
    pub(super) until: Instant,
}

impl Current {
    pub(super) fn plain(file: File, end: Option<u64>, position: Position) -> Self {
        Self {
            source: Source::Plain {
                file,
                offset: 0,
                end,
            },
            assembler: Assembler::default(),
            position,
        }
    }

    pub(super) fn rotated((file, compressed): (File, bool), skip: u64, position: Position) -> Self {
        if !compressed {
            let mut current = Self::plain(file, None, position);
            if let Source::Plain { offset, .. } = &mut current.source {
                *offset = skip;
            }
            return current;
        }
        let mut decoder = decoder(file);
        if skip > 0 {
            let skipped = io::copy(&mut decoder.by_ref().take(skip), &mut io::sink());
            if let Err(error) = skipped {
                debug!(%error, "a rotated log is damaged");
            }
        }
        Self {
            source: Source::Packed(Box::new(decoder)),
            assembler: Assembler::default(),
            position,
        }
    }

    /// Returns whether this is that very file.
    pub(super) fn is_file(&self, other: &File) -> io::Result<bool> {
        Ok(match &self.source {
            Source::Plain { file, .. } => {
                identity(&file.metadata()?) == identity(&other.metadata()?)
            }
            Source::Packed(_) => false,
        })
    }

    /// Returns whether a compressed file is the copy of this one. It compares the first entries: no two logs begin with
    /// the same time.
    pub(super) fn begins_like(&self, compressed: &File) -> io::Result<bool> {
        let Source::Plain { file, .. } = &self.source else {
            return Ok(false);
        };
        let mut own = [0; 512];
        let read = read_at(file, &mut own, 0)?;
        let mut theirs = Vec::new();
        let mut at = compressed;
        at.seek(SeekFrom::Start(0))?;
        let unpacked = decoder(compressed.try_clone()?)
            .take(read as u64)
            .read_to_end(&mut theirs);
        // The clone shares its place with the file that may be read next.
        at.seek(SeekFrom::Start(0))?;
        match unpacked {
            Err(error) if !is_damage(&error) => Err(error),
            _ => Ok(own[..read] == theirs),
        }
    }
}

impl Late {
    pub(super) fn drain(&mut self, filter: &mut Filter, out: &mut Vec<u8>) -> io::Result<()> {
        let mut chunk = vec![0; 4096];
        // What one pass cannot finish waits for the next: the output stays bounded.
        let mut rounds = LATE_BUDGET / chunk.len();
        while rounds > 0 {
            let read = read_at(&self.file, &mut chunk, self.offset)?;
            if read == 0 {
                break;
            }
            self.offset += read as u64;
            self.assembler.feed(&chunk[..read], filter, out);
            rounds -= 1;
        }
        Ok(())
    }
}

pub(super) fn decoder(file: File) -> MultiGzDecoder<BufReader<File>> {
    MultiGzDecoder::new(BufReader::with_capacity(8 * 1024, file))
}

pub(super) fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    loop {
        match file.read_at(buffer, offset) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}
