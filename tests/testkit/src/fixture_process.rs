//! A fixture that is a process of its own, so that it can be killed: the test binary itself, told by its environment to be
//! the fixture. Commands come by its standard input, answers by its standard output; it ends when its input does.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Before each answer: the test harness prints as well.
const MARK: &str = "fixture> ";
/// Time for an answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running fixture; killed when dropped.
#[derive(Debug)]
pub struct FixtureProcess {
    child: Child,
    input: ChildStdin,
    answers: Receiver<String>,
    log: std::path::PathBuf,
}

impl FixtureProcess {
    /// Runs the test `test` of this binary with `arguments` in the environment variable `variable`, and waits until it is ready.
    /// What it complains of is in the file `log`.
    ///
    /// # Errors
    /// When it does not start, or is not ready in time.
    pub fn start(test: &str, variable: &str, arguments: &str, log: &Path) -> io::Result<Self> {
        let complaints = fs::File::options().create(true).append(true).open(log)?;
        let mut child = Command::new(std::env::current_exe()?)
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(variable, arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(complaints)
            .spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = (input, output) else {
            return Err(io::Error::other("the fixture has no pipes"));
        };
        let (send, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some((_, answer)) = line.split_once(MARK)
                    && send.send(answer.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        let fixture = Self {
            child,
            input,
            answers,
            log: log.to_owned(),
        };
        fixture.answer()?;
        Ok(fixture)
    }

    fn answer(&self) -> io::Result<String> {
        self.answers.recv_timeout(PATIENCE).map_err(|error| {
            let said = fs::read_to_string(&self.log).unwrap_or_default();
            io::Error::other(format!("the fixture does not answer: {error}; {said}"))
        })
    }

    /// Gives it a command and returns its answer.
    ///
    /// # Errors
    /// When it is gone, or does not answer.
    pub fn ask(&mut self, command: &str) -> io::Result<String> {
        writeln!(self.input, "{command}")?;
        self.answer()
    }

    /// Whether it runs: it may have killed itself.
    ///
    /// # Errors
    /// When the process cannot be looked at.
    pub fn runs(&mut self) -> io::Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Kills it in the middle of whatever it does.
    pub fn kill9(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Drop for FixtureProcess {
    fn drop(&mut self) {
        self.kill9();
    }
}

/// In the process of a fixture: says that it is ready, then answers each command, until the input ends.
pub fn serve(mut act: impl FnMut(&str) -> String) {
    println!("\n{MARK}ready");
    for line in io::stdin().lines().map_while(Result::ok) {
        println!("\n{MARK}{}", act(&line));
    }
}

/// Kills this process as a crash would.
pub fn die() {
    nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL).ok();
}
