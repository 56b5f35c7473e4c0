//! The programs that know better (`hack/metrics-tools.sh`).

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn dir() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let script = root().join("hack/metrics-tools.sh");
        let done = Command::new(script).output().unwrap();
        assert!(
            done.status.success(),
            "{}",
            String::from_utf8_lossy(&done.stderr)
        );
        PathBuf::from(String::from_utf8(done.stdout).unwrap().trim())
    })
}

/// What a program says of its input; `Err` when it is not content.
pub fn run(program: &str, arguments: &[&str], input: &str) -> Result<String, String> {
    let mut child = Command::new(dir().join(program))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_owned();
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let done = child.wait_with_output().unwrap();
    // A program that is not content may leave the rest unread.
    drop(writer.join().unwrap());
    let said = String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned();
    if done.status.success() {
        Ok(said)
    } else {
        Err(said)
    }
}
