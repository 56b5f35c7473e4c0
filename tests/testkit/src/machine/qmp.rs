//! QEMU's control protocol, as far as machines need it: one JSON object a line.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Qmp {
    reader: BufReader<UnixStream>,
}

/// Operations of all disks of a machine since it was switched on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operations {
    pub(super) read: u64,
    pub(super) written: u64,
}

impl Qmp {
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut qmp = Self {
            reader: BufReader::new(stream),
        };
        // The greeting.
        qmp.read()?;
        qmp.execute("qmp_capabilities")?;
        Ok(qmp)
    }

    pub(super) fn execute(&mut self, command: &str) -> io::Result<()> {
        self.call(json!({"execute": command})).map(drop)
    }

    pub(super) fn execute_with(&mut self, command: &str, arguments: Value) -> io::Result<()> {
        self.call(json!({"execute": command, "arguments": arguments}))
            .map(drop)
    }

    /// `running`, `paused`, `inmigrate`, …
    pub(super) fn status(&mut self) -> io::Result<String> {
        self.word("query-status")
    }

    /// `active`, `completed`, `failed`, …
    pub(super) fn migration(&mut self) -> io::Result<String> {
        self.word("query-migrate")
    }

    /// What the machine has done with its disks.
    pub(super) fn disk_operations(&mut self) -> io::Result<Operations> {
        let answer = self.call(json!({"execute": "query-blockstats"}))?;
        let disks = answer.as_array().map(Vec::as_slice).unwrap_or_default();
        let sum = |of: &str| {
            disks
                .iter()
                .filter_map(|disk| disk["stats"][of].as_u64())
                .sum()
        };
        Ok(Operations {
            read: sum("rd_operations"),
            written: sum("wr_operations"),
        })
    }

    /// The addresses that the processors work at and whether they wait (`HLT=1`), one after the other.
    pub(super) fn instructions(&mut self) -> io::Result<String> {
        let command = json!({"command-line": "info registers -a"});
        let answer =
            self.call(json!({"execute": "human-monitor-command", "arguments": command}))?;
        let text = answer.as_str().unwrap_or_default();
        let words = text
            .split_whitespace()
            .filter(|word| word.starts_with("RIP=") || word.starts_with("HLT="));
        Ok(words.collect::<Vec<_>>().join(" "))
    }

    fn word(&mut self, command: &str) -> io::Result<String> {
        let answer = self.call(json!({"execute": command}))?;
        Ok(answer["status"].as_str().unwrap_or_default().to_owned())
    }

    fn call(&mut self, request: Value) -> io::Result<Value> {
        let mut line = request.to_string();
        line.push('\n');
        self.reader.get_mut().write_all(line.as_bytes())?;
        loop {
            let mut answer = self.read()?;
            if let Some(error) = answer.get("error") {
                return Err(io::Error::other(format!("QEMU refuses {request}: {error}")));
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            // An event: machines tell of resets and stops.
        }
    }

    fn read(&mut self) -> io::Result<Value> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "QEMU has ended",
            ));
        }
        serde_json::from_str(&line).map_err(io::Error::other)
    }
}
