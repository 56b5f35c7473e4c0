//! Writing results: stdout may be a pipe whose reader has gone, text may hold what a terminal obeys.

use std::fmt;
use std::io::{self, Write};

use anyhow::Context;

/// The reader of stdout has gone; not a failure.
#[derive(Debug, thiserror::Error)]
#[error("stdout is closed")]
pub(super) struct StdoutClosed;

/// Writes `text` to stdout, now.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    print_bytes(text.as_bytes())
}

/// Writes bytes to stdout, now.
pub(super) fn print_bytes(bytes: &[u8]) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(StdoutClosed.into()),
        result => result.context("write to stdout"),
    }
}

/// Prints a message about the command itself on stderr.
pub(super) fn note(text: impl fmt::Display) {
    // Nothing can be told when stderr is closed, and nothing depends on it.
    drop(writeln!(io::stderr().lock(), "holdfast: {text}"));
}

/// Makes text from a record safe for a terminal and keeps it on one line.
pub(super) fn printable(text: &str) -> String {
    if !text.chars().any(char::is_control) {
        return text.to_owned();
    }
    text.chars()
        .flat_map(|c| match c.is_control() {
            true => c.escape_default().collect::<Vec<_>>(),
            false => vec![c],
        })
        .collect()
}

/// Columns padded to the same width, three spaces apart, as kubectl prints them.
#[derive(Debug, Default)]
pub(super) struct Grid {
    widths: Vec<usize>,
}

impl Grid {
    /// Lines of `rows`; columns grow with what they have held, never shrink.
    pub(super) fn lines(&mut self, rows: &[Vec<String>]) -> String {
        for row in rows {
            self.widths.resize(self.widths.len().max(row.len()), 0);
            for (width, cell) in self.widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let mut text = String::new();
        for row in rows {
            let mut line = String::new();
            for (width, cell) in self.widths.iter().zip(row) {
                line.push_str(cell);
                let padding = width.saturating_sub(cell.chars().count()) + 3;
                line.extend(std::iter::repeat_n(' ', padding));
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_obeys_is_escaped() {
        assert_eq!(printable("plain ümlaut"), "plain ümlaut");
        assert_eq!(printable("a\u{1b}[31m\nb"), "a\\u{1b}[31m\\nb");
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [vec!["A", "B", "C"], vec!["long", "", "c"]];
        let rows = rows.map(|row| row.into_iter().map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(Grid::default().lines(&rows), "A      B   C\nlong       c\n");
    }
}
