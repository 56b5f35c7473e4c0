//! Waits for the file systems of the root directory and the state directory, before anything is locked, made or opened.
//!
//! It takes as long as it takes: an agent that goes on without them would begin as another node. The wait ends by itself
//! when the file systems are mounted, or an operator has declared that they are gone (`holdfast store new-disk`).

use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

use super::root_dir::waits_for;
use super::systemd::Systemd;
use crate::types::blocking;

/// Time between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// Time between two lines in the log that say the same.
const AGAIN: Duration = Duration::from_secs(60);

/// Returns once both file systems are there. Cancel-safe.
///
/// If a check fails, that is logged, and the start proceeds. The store then stays in use.
pub(super) async fn wait(root_dir: &Path, state_dir: &Path, systemd: Systemd) {
    let mut reports = Reports::default();
    loop {
        let (root, state) = (root_dir.to_owned(), state_dir.to_owned());
        let missing = match blocking::spawn(move || waits_for(&root, &state)).await {
            Ok(Ok(missing)) => missing,
            Ok(Err(error)) => {
                warn!(
                    root_dir = %root_dir.display(),
                    state_dir = %state_dir.display(),
                    %error,
                    "cannot check whether the file systems of the agent's directories are mounted, starting"
                );
                return;
            }
            Err(error) => {
                warn!(%error, "checking the agent's directories failed");
                return;
            }
        };
        if missing.is_empty() {
            if reports.is_waiting() {
                info!("the file systems of the agent's directories are mounted, starting");
            }
            return;
        }
        if let Some(text) = reports.due(missing.join("; "), Instant::now()) {
            systemd.status(&format!("waiting for a file system: {text}"));
            warn!(reason = text, "waiting for the file system of a directory");
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// The newest report and its time.
#[derive(Debug, Default)]
struct Reports(Option<(String, Instant)>);

impl Reports {
    fn is_waiting(&self) -> bool {
        self.0.is_some()
    }

    /// Returns the text if it is another one than before, or a minute has passed.
    fn due(&mut self, text: String, now: Instant) -> Option<&str> {
        let is_due = self
            .0
            .as_ref()
            .is_none_or(|(last, at)| *last != text || now.duration_since(*at) >= AGAIN);
        if !is_due {
            return None;
        }
        let (text, _) = self.0.insert((text, now));
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::root_dir;
    use crate::store::mounts::{Directory, Mount, testkit};
    use crate::types::{BootId, Stamp};

    #[test]
    fn a_wait_is_reported_at_once_and_every_minute() {
        let start = Instant::now();
        let mut reports = Reports::default();
        assert!(!reports.is_waiting());
        for (text, seconds, due) in [
            ("a", 0, true),
            ("a", 1, false),
            ("b", 2, true),
            ("b", 61, false),
            ("b", 62, true),
            ("b", 63, false),
        ] {
            let at = start + Duration::from_secs(seconds);
            let reported = reports.due(text.to_owned(), at).is_some();
            assert_eq!(reported, due, "{text} {seconds}");
        }
        assert!(reports.is_waiting());
    }

    #[tokio::test]
    async fn the_wait_ends_when_the_file_system_is_mounted() {
        let dir = tempfile::tempdir().unwrap();
        let (root, state) = (dir.path().join("root"), dir.path().join("state"));
        std::fs::create_dir(&state).unwrap();
        let now = Stamp {
            boot: BootId(1),
            boottime_ms: 1_000,
            wall_ms: 1_000,
        };
        assert_eq!(root_dir::claim(&root, &state, now), None);
        let mount = Mount::new(Directory::Root, &root, &state);
        let record = testkit::unmounted(&mount).unwrap();
        let waiting = wait(&root, &state, Systemd::default());
        let mut waiting = std::pin::pin!(waiting);
        let patience = Duration::from_millis(300);
        assert!(tokio::time::timeout(patience, &mut waiting).await.is_err());
        std::fs::write(state.join("mounts/root-dir"), record).unwrap();
        waiting.await;
    }
}
