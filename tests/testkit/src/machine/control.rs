//! Commands in the machine: one line out is a script in base64, one line back its exit code and its output in base64.

#![allow(clippy::disallowed_methods, reason = "machines live in real time")]

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// How a script ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Its exit code.
    pub code: i32,
    /// What it printed to both outputs.
    pub text: String,
}

#[derive(Debug)]
pub(super) struct Control {
    stream: UnixStream,
    buffer: Vec<u8>,
}

/// Connects as soon as QEMU listens: it makes its sockets one after the other.
pub(super) fn connect(
    socket: &Path,
    process: &mut Child,
    limit: Duration,
) -> io::Result<UnixStream> {
    let deadline = Instant::now() + limit;
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() >= deadline => return Err(error),
            Err(_) => {}
        }
        if let Some(status) = process.try_wait()? {
            return Err(io::Error::other(format!("it ended with {status}")));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Control {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            buffer: Vec::new(),
        }
    }

    /// Waits for the line that a booting machine sends first.
    pub(super) fn greeting(&mut self, limit: Duration) -> io::Result<()> {
        let deadline = Instant::now() + limit;
        while !self.line(deadline)?.starts_with("HELLO") {}
        Ok(())
    }

    pub(super) fn send(&mut self, script: &str) -> io::Result<()> {
        let mut line = STANDARD.encode(script);
        line.push('\n');
        self.stream.write_all(line.as_bytes())
    }

    pub(super) fn run(&mut self, script: &str, limit: Duration) -> io::Result<Output> {
        let deadline = Instant::now() + limit;
        self.send(script)?;
        loop {
            let line = self.line(deadline)?;
            // Anything else is a greeting of a boot that nobody waited for.
            if let Some(answer) = line.strip_prefix("R ") {
                return parse(answer).ok_or_else(|| {
                    io::Error::other(format!("the machine answered {line:?}, which is no end"))
                });
            }
        }
    }

    fn line(&mut self, deadline: Instant) -> io::Result<String> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time"));
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut chunk = [0; 65_536];
            match self.stream.read(&mut chunk) {
                Ok(0) => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "QEMU has ended",
                    ));
                }
                Ok(read) => self.buffer.extend_from_slice(&chunk[..read]),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock
                            | io::ErrorKind::TimedOut
                            | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn parse(answer: &str) -> Option<Output> {
    let (code, text) = answer.split_once(' ').unwrap_or((answer, ""));
    let text = STANDARD.decode(text.trim()).ok()?;
    Some(Output {
        code: code.parse().ok()?,
        text: String::from_utf8_lossy(&text).into_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_a_code_and_text_in_base64() {
        let output = parse("3 aGFsbG8K").unwrap();
        assert_eq!((output.code, output.text.as_str()), (3, "hallo\n"));
        assert_eq!(parse("0 ").unwrap().text, "");
        assert_eq!(parse("0").unwrap().code, 0);
        assert_eq!(parse("x aGFsbG8K"), None);
        assert_eq!(parse("0 ?"), None);
    }
}
