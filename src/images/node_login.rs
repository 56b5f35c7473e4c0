//! The node's own registry logins: docker configurations in files; upstream's `defaultDockerConfigProvider`.
//!
//! `docker login` or an operator writes them. They are read for each pull, since they may come or change at any time.
//!
//! **Invariant:** what is in the files is in no error and no log.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use nix::libc::O_NONBLOCK;
use tracing::warn;

use super::keyring::{Format, Keyring, KeyringError};

/// Most bytes of a file.
const LONGEST: u64 = 4 << 20;

/// Reason why a file gives no logins.
#[derive(Debug, thiserror::Error)]
enum LoginError {
    #[error("{0}")]
    Read(#[from] io::Error),
    #[error("{0}")]
    Content(#[from] KeyringError),
    #[error("it is no regular file of at most {LONGEST} bytes")]
    Kind,
}

/// Files that may contain logins, in the order in which they are tried.
#[derive(Debug, Default)]
pub struct NodeLogins {
    files: Vec<(PathBuf, Format)>,
    /// The last problem that was logged, so that it is not logged for each pull.
    logged: Mutex<Option<String>>,
}

impl NodeLogins {
    /// Returns upstream's places: `config.json` in the root directory, the working directory, `~/.docker` and `/.docker`, then
    /// `.dockercfg` in the root directory, the working directory, `~` and `/`.
    pub fn new(root_dir: &Path, working_dir: &Path, home: Option<&Path>) -> Self {
        let json = [
            Some(root_dir.to_owned()),
            Some(working_dir.to_owned()),
            home.map(|home| home.join(".docker")),
            Some("/.docker".into()),
        ];
        let cfg = [
            Some(root_dir.to_owned()),
            Some(working_dir.to_owned()),
            home.map(Path::to_owned),
            Some("/".into()),
        ];
        let json = json.into_iter().flatten();
        let json = json.map(|dir| (dir.join("config.json"), Format::ConfigJson));
        let cfg = cfg.into_iter().flatten();
        let cfg = cfg.map(|dir| (dir.join(".dockercfg"), Format::Cfg));
        Self {
            files: json.chain(cfg).collect(),
            logged: Mutex::default(),
        }
    }

    /// Returns whether there are no files to try.
    pub(super) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Reads the first file that is there and can be used. One that cannot is logged and passed over. Blocking.
    pub(super) fn read(&self) -> Keyring {
        let mut problem = None;
        let mut found = None;
        for (path, format) in &self.files {
            match read_file(path, *format) {
                Ok(None) => {}
                Ok(Some((keyring, left_out))) => {
                    if !left_out.is_empty() {
                        problem.get_or_insert_with(|| {
                            format!(
                                "the logins of {} in {} are left out: they are not UTF-8; log in again",
                                left_out.join(", "),
                                path.display()
                            )
                        });
                    }
                    found = Some(keyring);
                    break;
                }
                Err(error) => {
                    problem.get_or_insert_with(|| {
                        format!(
                            "the registry logins in {} cannot be used: {error}",
                            path.display()
                        )
                    });
                }
            }
        }
        let mut logged = self.logged.lock().unwrap_or_else(|e| e.into_inner());
        if *logged != problem {
            if let Some(problem) = &problem {
                warn!("{problem}");
            }
            *logged = problem;
        }
        found.unwrap_or_default()
    }
}

/// Returns the content of a file, and the registries whose login is left out; `None` where there is no file.
fn read_file(path: &Path, format: Format) -> Result<Option<(Keyring, Vec<String>)>, LoginError> {
    // A pipe must not hold up the pull.
    let opened = File::options()
        .read(true)
        .custom_flags(O_NONBLOCK)
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error)
            if [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory].contains(&error.kind()) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    };
    let meta = file.metadata()?;
    if !meta.is_file() || meta.len() > LONGEST {
        return Err(LoginError::Kind);
    }
    let mut bytes = Vec::new();
    file.take(LONGEST).read_to_end(&mut bytes)?;
    let mut keyring = Keyring::default();
    let left_out = keyring.add_file(&bytes, format)?;
    Ok(Some((keyring, left_out)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn config(user: &str) -> String {
        serde_json::json!({"auths": {"registry.example": {"username": user, "password": "hunter2"}},
            "credsStore": "none"})
        .to_string()
    }

    fn users(logins: &NodeLogins) -> Vec<String> {
        let found = logins.read().lookup("registry.example/app");
        assert!(found.iter().all(|login| login.source.is_none()));
        found.into_iter().map(|login| login.username).collect()
    }

    #[test]
    fn the_first_file_that_can_be_used_counts_as_it_is_now() {
        let dir = tempfile::tempdir().unwrap();
        let [root, work, home] = ["root", "work", "home"].map(|name| dir.path().join(name));
        for dir in [&root, &work, &home.join(".docker")] {
            fs::create_dir_all(dir).unwrap();
        }
        let logins = NodeLogins::new(&root, &work, Some(&home));
        assert_eq!(users(&logins), [""; 0]);

        let old = r#"{"https://registry.example/v1/": {"auth": "b2xkOmh1bnRlcjI="}}"#;
        fs::write(home.join(".dockercfg"), old).unwrap();
        assert_eq!(users(&logins), ["old"]);
        fs::write(home.join(".docker/config.json"), config("home")).unwrap();
        assert_eq!(users(&logins), ["home"]);
        fs::write(work.join("config.json"), config("work")).unwrap();
        assert_eq!(users(&logins), ["work"]);
        fs::write(root.join("config.json"), config("root")).unwrap();
        assert_eq!(users(&logins), ["root"]);
        // It changes, breaks, and goes.
        fs::write(root.join("config.json"), config("other")).unwrap();
        assert_eq!(users(&logins), ["other"]);
        for broken in [b"{\"auths\": hunter2".as_slice(), b"\xff", b""] {
            fs::write(root.join("config.json"), broken).unwrap();
            assert_eq!(users(&logins), ["work"]);
            let logged = logins.logged.lock().unwrap().clone().unwrap();
            assert!(logged.contains("root/config.json"), "{logged}");
            assert!(!logged.contains("hunter2"), "{logged}");
        }
        fs::remove_file(root.join("config.json")).unwrap();
        fs::create_dir(root.join("config.json")).unwrap();
        assert_eq!(users(&logins), ["work"]);
    }

    #[test]
    fn an_entry_without_a_login_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let logins = NodeLogins::new(dir.path(), dir.path(), None);
        let text =
            r#"{"auths": {"registry.example": {}}, "credHelpers": {"registry.example": "x"}}"#;
        fs::write(dir.path().join("config.json"), text).unwrap();
        assert_eq!(users(&logins), [""; 0]);
    }
}
