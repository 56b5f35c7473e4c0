//! kubectl as a process: piped, or in a terminal.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::agent_process::{PATIENCE, eventually, within};

/// Everything read from somewhere so far, by a thread of its own.
struct Reader {
    seen: Arc<Mutex<Vec<u8>>>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    fn of(mut source: impl Read + Send + 'static) -> Self {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&seen);
        let thread = std::thread::spawn(move || {
            let mut buffer = vec![0; 64 * 1024];
            // A terminal whose other side is closed is an error to its reader.
            while let Ok(count @ 1..) = source.read(&mut buffer) {
                let mut seen = told.lock().unwrap_or_else(PoisonError::into_inner);
                seen.extend_from_slice(&buffer[..count]);
            }
        });
        Self {
            seen,
            thread: Some(thread),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.clone()
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes()).into_owned()
    }

    /// Waits for the end of the source.
    fn end(&mut self) -> Vec<u8> {
        if let Some(thread) = self.thread.take() {
            thread.join().expect("read what kubectl says");
        }
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *seen)
    }
}

/// How a kubectl ended.
pub struct Outcome {
    /// `None` when a signal ended it.
    pub code: Option<i32>,
    pub out: Vec<u8>,
    pub err: Vec<u8>,
}

impl Outcome {
    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.out).into_owned()
    }

    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.err).into_owned()
    }
}

impl std::fmt::Debug for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let beginning = |bytes: &[u8]| {
            let shown = &bytes[..bytes.len().min(2000)];
            String::from_utf8_lossy(shown).into_owned()
        };
        f.debug_struct("Outcome")
            .field("code", &self.code)
            .field("out", &beginning(&self.out))
            .field("err", &beginning(&self.err))
            .finish()
    }
}

/// A running kubectl, killed when dropped.
pub struct Kubectl {
    child: Child,
    stdin: Option<ChildStdin>,
    out: Reader,
    err: Reader,
    what: String,
}

impl Kubectl {
    pub fn start(mut command: Command) -> Self {
        let what = format!("kubectl {:?}", command.get_args().collect::<Vec<_>>());
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("start kubectl");
        Self {
            stdin: child.stdin.take(),
            out: Reader::of(child.stdout.take().expect("a pipe")),
            err: Reader::of(child.stderr.take().expect("a pipe")),
            child,
            what,
        }
    }

    /// Gives it more to read.
    pub fn write(&mut self, text: &str) {
        let stdin = self.stdin.as_mut().expect("not closed yet");
        stdin.write_all(text.as_bytes()).expect("write to kubectl");
        stdin.flush().expect("write to kubectl");
    }

    /// Gives it the last there is to read, beside the caller.
    pub fn write_and_close(&mut self, bytes: Vec<u8>) {
        let stdin = self.stdin.take();
        std::thread::spawn(move || {
            if let Some(mut stdin) = stdin {
                // One that has ended reads no more; its end is looked at elsewhere.
                drop(stdin.write_all(&bytes));
            }
        });
    }

    pub fn stdout(&self) -> String {
        self.out.text()
    }

    pub fn stderr(&self) -> String {
        self.err.text()
    }

    #[track_caller]
    pub fn wait_stdout(&mut self, word: &str) -> String {
        let what = format!("{} prints {word:?}", self.what);
        let (child, out, err) = (&mut self.child, &self.out, &self.err);
        eventually(&what, || {
            let text = out.text();
            if text.contains(word) {
                return Ok(text);
            }
            let ended = child.try_wait().expect("look at kubectl");
            Err(format!("{ended:?} {text:?} {:?}", err.text()))
        })
    }

    pub fn ended(&mut self) -> bool {
        self.child.try_wait().expect("look at kubectl").is_some()
    }

    #[track_caller]
    pub fn wait(self) -> Outcome {
        self.wait_within(2 * PATIENCE)
    }

    #[track_caller]
    pub fn wait_within(mut self, patience: Duration) -> Outcome {
        self.stdin = None;
        let what = format!("{} ends", self.what);
        let (child, out, err) = (&mut self.child, &self.out, &self.err);
        let status = within(patience, &what, || {
            child.try_wait().expect("look at kubectl").ok_or_else(|| {
                let out = out.text();
                let last = out.lines().last().unwrap_or_default().to_owned();
                format!("it runs; its last line is {last:?}, {:?}", err.text())
            })
        });
        Outcome {
            code: status.code(),
            out: self.out.end(),
            err: self.err.end(),
        }
    }
}

impl Drop for Kubectl {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// kubectl in a terminal, killed when dropped.
pub struct Terminal {
    child: Child,
    keyboard: File,
    screen: Reader,
    path: std::path::PathBuf,
}

impl Terminal {
    pub fn start(command: &Command, rows: u16, columns: u16) -> Self {
        let pty = nix::pty::openpty(None, None).expect("open a terminal");
        let path = format!("/proc/self/fd/{}", pty.slave.as_raw_fd());
        let path = std::fs::read_link(path).expect("the terminal's name");
        resize(&path, rows, columns);
        let copy = || pty.slave.try_clone().expect("share the terminal");
        // In a session of its own, with this as its controlling terminal: that is how it learns of new sizes.
        let child = Command::new("setsid")
            .arg("--ctty")
            .arg(command.get_program())
            .args(command.get_args())
            .envs(
                command
                    .get_envs()
                    .filter_map(|(name, value)| Some((name, value?))),
            )
            .stdin(copy())
            .stdout(copy())
            .stderr(copy())
            .spawn()
            .expect("start kubectl");
        let master = File::from(pty.master);
        Self {
            child,
            keyboard: master.try_clone().expect("share the terminal"),
            screen: Reader::of(master),
            path,
        }
    }

    /// Types something.
    pub fn write(&mut self, text: &str) {
        self.keyboard
            .write_all(text.as_bytes())
            .expect("write to the terminal");
    }

    pub fn resize(&self, rows: u16, columns: u16) {
        resize(&self.path, rows, columns);
    }

    pub fn screen(&self) -> String {
        self.screen.text()
    }

    #[track_caller]
    pub fn wait_screen(&mut self, word: &str) {
        let (child, screen) = (&mut self.child, &self.screen);
        eventually(&format!("the terminal shows {word:?}"), || {
            let text = screen.text();
            if text.contains(word) {
                return Ok(());
            }
            let ended = child.try_wait().expect("look at kubectl");
            Err(format!("{ended:?} {text:?}"))
        });
    }

    /// Types a line again and again until a word is seen.
    #[track_caller]
    pub fn type_until(&mut self, line: &str, word: &str) {
        eventually(&format!("{line:?} shows {word:?}"), || {
            self.keyboard
                .write_all(line.as_bytes())
                .expect("write to the terminal");
            // Its answer takes a moment.
            std::thread::sleep(Duration::from_millis(200));
            let text = self.screen.text();
            if text.contains(word) {
                Ok(())
            } else {
                Err(text)
            }
        });
    }

    /// Waits for the end: exit code and everything on the screen.
    #[track_caller]
    pub fn wait(mut self) -> (Option<i32>, String) {
        let (child, screen) = (&mut self.child, &self.screen);
        let status = eventually("kubectl in a terminal ends", || {
            child
                .try_wait()
                .expect("look at kubectl")
                .ok_or_else(|| screen.text())
        });
        (status.code(), self.screen.text())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn resize(terminal: &std::path::Path, rows: u16, columns: u16) {
    let (rows, columns) = (rows.to_string(), columns.to_string());
    let status = Command::new("stty")
        .arg("-F")
        .arg(terminal)
        .args(["rows", &rows, "cols", &columns])
        .status()
        .expect("run stty");
    assert!(status.success(), "stty: {status}");
}

/// Bytes without a pattern, the same for the same seed.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// SHA-256 as `sha256sum` prints it.
pub fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    let digest = sha2::Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
