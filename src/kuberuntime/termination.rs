//! Reads the termination message of a container; upstream's `getTerminationMessage`.
//!
//! Input: paths, a policy, an exit code. Output: at most 4 KiB of text from the message file, or at most 2 KiB and 80
//! lines from the log. Never fails: a container may write anything, so only regular files are read, links are not
//! followed, and reads are bounded. The message describes what could not be read.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Most bytes taken from the message file.
pub const MAX_MESSAGE: u64 = 4 << 10;
/// Most bytes taken from the log.
pub const MAX_LOG_MESSAGE: usize = 2 << 10;
/// Most lines taken from the log.
pub const MAX_LOG_LINES: usize = 80;
/// Bytes of the log's end that are read. Lines carry a prefix and may be partial.
const LOG_WINDOW: u64 = 64 << 10;

/// `terminationMessagePolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessagePolicy {
    /// The file alone.
    File,
    /// The end of the log when the file is empty and the container failed.
    FallbackToLogsOnError,
}

impl MessagePolicy {
    /// The policy of a spec or annotation; the default is `File`.
    pub fn parse(name: Option<&str>) -> Self {
        match name {
            Some("FallbackToLogsOnError") => Self::FallbackToLogsOnError,
            _ => Self::File,
        }
    }
}

/// The message of a container that ended with `exit_code`.
pub fn read_message(
    file: Option<&Path>,
    policy: MessagePolicy,
    exit_code: i32,
    log: Option<&Path>,
) -> String {
    if let Some(path) = file {
        match read_end(path, MAX_MESSAGE) {
            Ok((bytes, _)) if !bytes.is_empty() => {
                return String::from_utf8_lossy(&bytes).into_owned();
            }
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return format!("Error on reading termination log {}: {e}", path.display());
            }
            _ => {}
        }
    }
    match (policy, exit_code, log) {
        (MessagePolicy::FallbackToLogsOnError, code, Some(log)) if code != 0 => tail_log(log),
        _ => String::new(),
    }
}

fn tail_log(path: &Path) -> String {
    match read_end(path, LOG_WINDOW) {
        Ok((bytes, cut)) => last_of_log(&String::from_utf8_lossy(&bytes), cut),
        Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
        Err(e) => format!("Error on reading termination message from logs: {e}"),
    }
}

/// Opens a regular file without following a link in its last component and without blocking on what is
/// not a file.
///
/// # Errors
/// `InvalidInput` for anything but a regular file.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let flags = nix::fcntl::OFlag::O_NOFOLLOW | nix::fcntl::OFlag::O_NONBLOCK;
    let file = File::options()
        .read(true)
        .custom_flags(flags.bits())
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is not a regular file",
        ));
    }
    Ok(file)
}

/// The last `most` bytes, and whether something came before them.
fn read_end(path: &Path, most: u64) -> io::Result<(Vec<u8>, bool)> {
    let mut file = open_regular(path)?;
    let start = file.metadata()?.len().saturating_sub(most);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok((bytes, start > 0))
}

/// The texts of the last lines of a CRI log (`<time> <stream> <P|F> <text>`).
fn last_of_log(text: &str, cut: bool) -> String {
    // The first line of a cut text may be half a line.
    let text = if cut {
        text.split_once('\n').map_or("", |(_, rest)| rest)
    } else {
        text
    };
    let mut lines: Vec<&str> = text.lines().collect();
    let first = lines.len().saturating_sub(MAX_LOG_LINES);
    lines.drain(..first);
    let mut message = String::new();
    for line in lines {
        let mut parts = line.splitn(4, ' ');
        let (Some(_), Some(_), Some(tag)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        message.push_str(parts.next().unwrap_or_default());
        if tag.split(':').next() != Some("P") {
            message.push('\n');
        }
    }
    let mut start = message.len().saturating_sub(MAX_LOG_MESSAGE);
    while !message.is_char_boundary(start) {
        start += 1;
    }
    message.split_off(start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn message(file: &Path, policy: MessagePolicy, code: i32, log: &Path) -> String {
        read_message(Some(file), policy, code, Some(log))
    }

    #[test]
    fn the_file_wins_and_the_log_serves_only_by_policy_and_on_error() {
        use MessagePolicy::{FallbackToLogsOnError, File};
        let dir = tempfile::tempdir().unwrap();
        let (file, log) = (dir.path().join("m"), dir.path().join("l"));
        fs::write(&log, "t stdout P first \nt stdout F half\nt stderr F end\n").unwrap();
        let none = dir.path().join("none");
        for (content, policy, code, want) in [
            ("said", File, 1, "said"),
            ("said", FallbackToLogsOnError, 1, "said"),
            ("", File, 1, ""),
            ("", FallbackToLogsOnError, 0, ""),
            ("", FallbackToLogsOnError, 1, "first half\nend\n"),
        ] {
            fs::write(&file, content).unwrap();
            assert_eq!(
                message(&file, policy, code, &log),
                want,
                "{content} {policy:?} {code}"
            );
        }
        assert_eq!(
            message(&none, FallbackToLogsOnError, 1, &log),
            "first half\nend\n"
        );
        assert_eq!(message(&none, FallbackToLogsOnError, 1, &none), "");
    }

    #[test]
    fn long_messages_keep_their_end() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("m");
        fs::write(&file, "x".repeat(10_000) + "end").unwrap();
        let said = read_message(Some(&file), MessagePolicy::File, 0, None);
        assert_eq!((said.len(), said.ends_with("end")), (4096, true));
        let log = dir.path().join("l");
        let lines: String = (0..10_000).map(|i| format!("t stdout F {i}\n")).collect();
        fs::write(&log, lines).unwrap();
        let said = read_message(None, MessagePolicy::FallbackToLogsOnError, 1, Some(&log));
        assert_eq!(said.lines().count(), 80);
        assert_eq!(said.lines().next_back(), Some("9999"));
        fs::write(&log, format!("t stdout F {}\n", "é".repeat(5_000))).unwrap();
        let said = read_message(None, MessagePolicy::FallbackToLogsOnError, 1, Some(&log));
        assert!(
            said.len() <= 2048 && said.starts_with('é'),
            "{}",
            said.len()
        );
    }

    #[test]
    fn links_pipes_and_directories_are_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let secret = dir.path().join("secret");
        fs::write(&secret, "password").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&secret, &link).unwrap();
        let pipe = dir.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for path in [&link, &pipe, &dir.path().to_owned()] {
            let said = read_message(Some(path), MessagePolicy::File, 0, None);
            assert!(
                said.starts_with("Error on reading termination log"),
                "{said}"
            );
            assert!(!said.contains("password"));
        }
    }
}
