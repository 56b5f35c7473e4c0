//! Env files: the files in a pod's volumes from which `fileKeyRef` takes environment variables.
//!
//! **Invariant:** a file is looked up below the opened root of its volume, so that no link in it leads outside. Only
//! regular files are opened for reading: a FIFO or a device cannot block the agent.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Container;

use super::{VolumeManager, subpath};
use crate::core::state::child_key;
use crate::kuberuntime::sources::EnvFile;
use crate::types::{PodUid, blocking};

/// Bytes of all files of a container together. They are in memory at once, and searched for each variable.
const MAX_BYTES: u64 = 256 * 1024;
/// Most variables of a container that come from files.
const MAX_VARIABLES: usize = 1000;
/// Longest wait for a file; its volume may be on a server that does not answer.
const DEADLINE: Duration = Duration::from_secs(10);

/// Name of the operation that reads a file.
const READ: &str = "read env file";

impl VolumeManager {
    /// Reads the files that the variables of a pod's container refer to. `volumes` holds the host path of each mounted
    /// volume. Returns the files by volume and path.
    pub async fn env_files(
        &self,
        uid: &PodUid,
        container: &Container,
        volumes: &BTreeMap<String, PathBuf>,
    ) -> BTreeMap<(String, String), EnvFile> {
        let (mut files, mut left) = (BTreeMap::new(), MAX_BYTES);
        let variables = container.env.iter().flatten();
        let sources = variables.filter_map(|var| var.value_from.as_ref()?.file_key_ref.as_ref());
        let too_many = sources.clone().count() > MAX_VARIABLES;
        for source in sources {
            let volume = &source.volume_name;
            let key = (volume.clone(), source.path.clone());
            if files.contains_key(&key) {
                continue;
            }
            let file = match volumes.get(volume) {
                _ if too_many => Err(format!(
                    "more than {MAX_VARIABLES} variables of the container come from files"
                )),
                Some(root) => {
                    let (root, path) = (root.clone(), source.path.clone());
                    let work = move || read_below(&root, Path::new(&path), left);
                    self.read_in_time(uid, volume, work).await
                }
                None => Err("the pod has no such volume, or it is not mounted".to_owned()),
            };
            if let Ok(Some(content)) = &file {
                left = left.saturating_sub(u64::try_from(content.len()).unwrap_or(left));
            }
            files.insert(key, file);
        }
        files
    }

    /// Runs `work` on a thread where it may block, one at a time of a volume: while one hangs, none is added to it.
    async fn read_in_time(
        &self,
        uid: &PodUid,
        volume: &str,
        work: impl FnOnce() -> EnvFile + Send + 'static,
    ) -> EnvFile {
        let key = format!("env-files/{}", child_key(uid, volume));
        let done = self.operations.run(&key, READ, blocking::run(work));
        match tokio::time::timeout(DEADLINE, done).await {
            Ok(Ok(Ok(file))) => file,
            Ok(Ok(Err(error))) => Err(error.to_string()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => {
                let since = self.operations.running(&key);
                let since = since.map_or(DEADLINE, |(_, since)| since.max(DEADLINE));
                Err(format!(
                    "volume {volume:?} has not answered for {} s: a read of a file in it still waits for the server or \
                     disk of the volume, and no other is started until it ends",
                    since.as_secs()
                ))
            }
        }
    }
}

/// Reads a file of at most `most` bytes below the root of its volume, `None` when it does not exist. Blocking.
fn read_below(root: &Path, path: &Path, most: u64) -> EnvFile {
    let inside = path
        .components()
        .all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if !inside {
        return Err("the path must be relative and must not contain '..'".to_owned());
    }
    let Some(found) = subpath::open_existing(root, path)? else {
        return Ok(None);
    };
    let handle = format!("/proc/self/fd/{}", found.as_raw_fd());
    let found = File::from(found);
    let text = |error: io::Error| error.to_string();
    if !found.metadata().map_err(text)?.is_file() {
        return Err("it is not a regular file".to_owned());
    }
    let mut content = Vec::new();
    let file = File::open(handle).map_err(text)?;
    let read = file.take(most.saturating_add(1)).read_to_end(&mut content);
    let read = read.map_err(text)?;
    if u64::try_from(read).is_ok_and(|read| read <= most) {
        return Ok(Some(content));
    }
    Err(format!(
        "the files of the container's variables are larger than {MAX_BYTES} bytes together"
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::sync::{Arc, Mutex, mpsc};

    use nix::sys::stat::Mode;
    use serde_json::json;

    use super::*;
    use crate::store::Store;
    use crate::types::{BootId, Clock, SystemClock};

    fn manager(root: &Path) -> VolumeManager {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new(BootId(1)));
        VolumeManager::new(root, None, Store::in_memory(Arc::clone(&clock)), clock)
    }

    #[tokio::test(start_paused = true)]
    async fn a_volume_that_does_not_answer_holds_one_thread() {
        let dir = tempfile::tempdir().unwrap();
        let manager = manager(dir.path());
        let (begun, mut begins) = tokio::sync::mpsc::unbounded_channel();
        let (release, hang) = mpsc::channel::<()>();
        let hang = Arc::new(Mutex::new(hang));
        let read = || {
            let (manager, begun, hang) = (manager.clone(), begun.clone(), Arc::clone(&hang));
            tokio::spawn(async move {
                let work = move || {
                    begun.send(()).unwrap();
                    hang.lock().unwrap().recv().ok();
                    Ok(None)
                };
                manager.read_in_time(&PodUid::new("u1"), "data", work).await
            })
        };
        for attempt in 0..2 {
            let reading = read();
            if attempt == 0 {
                begins.recv().await.unwrap();
            }
            while !reading.is_finished() {
                tokio::time::advance(Duration::from_secs(1)).await;
            }
            let why = reading.await.unwrap().unwrap_err();
            assert!(
                why.contains("volume \"data\" has not answered for"),
                "{why}"
            );
            assert!(why.contains("still waits for the server"), "{why}");
        }
        assert!(begins.try_recv().is_err(), "a second read was started");
        drop(release);
        assert_eq!(read().await.unwrap(), Ok(None));
    }

    #[test]
    fn only_regular_files_inside_of_the_volume_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("volume");
        fs::create_dir_all(root.join("sub")).unwrap();
        fs::write(dir.path().join("outside"), "A='secret'").unwrap();
        fs::write(root.join("sub/env"), "A='1'").unwrap();
        let most = usize::try_from(MAX_BYTES).unwrap();
        fs::write(root.join("most"), vec![b'#'; most]).unwrap();
        fs::write(root.join("large"), vec![b'#'; most + 1]).unwrap();
        symlink("sub/env", root.join("link")).unwrap();
        symlink("../outside", root.join("climbs")).unwrap();
        symlink(dir.path().join("outside"), root.join("absolute")).unwrap();
        nix::unistd::mkfifo(&root.join("fifo"), Mode::S_IRUSR).unwrap();

        let read = |path: &str| read_below(&root, Path::new(path), MAX_BYTES);
        assert_eq!(read("sub/env"), Ok(Some(b"A='1'".to_vec())));
        assert_eq!(read("link"), Ok(Some(b"A='1'".to_vec())));
        assert_eq!(read("most").unwrap().unwrap().len(), most);
        assert_eq!(read("none"), Ok(None));
        assert_eq!(read("sub/none"), Ok(None));
        for (path, why) in [
            ("climbs", "leads out of the volume"),
            ("absolute", "leads out of the volume"),
            ("../outside", "must not contain '..'"),
            ("sub/../../outside", "must not contain '..'"),
            ("/etc/hostname", "must be relative"),
            ("fifo", "not a regular file"),
            ("sub", "not a regular file"),
            ("large", "larger than 262144 bytes together"),
        ] {
            let error = read(path).unwrap_err();
            assert!(error.contains(why), "{path}: {error}");
        }
    }

    #[tokio::test]
    async fn each_file_is_read_once_and_a_volume_that_is_not_mounted_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("env"), "A='1'").unwrap();
        let var = |volume: &str, path: &str| {
            let source = json!({"volumeName": volume, "path": path, "key": "A"});
            json!({"name": "A", "valueFrom": {"fileKeyRef": source}})
        };
        let container = serde_json::from_value(json!({"name": "c", "env": [
            {"name": "B", "value": "b"}, var("v", "env"), var("v", "env"), var("w", "env"),
        ]}))
        .unwrap();
        let volumes = BTreeMap::from([("v".to_owned(), dir.path().to_owned())]);
        let files = manager(dir.path())
            .env_files(&PodUid::new("u1"), &container, &volumes)
            .await;
        let files: Vec<_> = files.into_iter().collect();
        let [(first, there), (second, missing)] = files.as_slice() else {
            panic!("{files:?}");
        };
        assert_eq!((first.0.as_str(), second.0.as_str()), ("v", "w"));
        assert_eq!(there, &Ok(Some(b"A='1'".to_vec())));
        assert!(missing.as_ref().unwrap_err().contains("no such volume"));
    }

    #[tokio::test]
    async fn what_a_container_reads_is_bounded_whatever_its_pod_refers_to() {
        let dir = tempfile::tempdir().unwrap();
        let half = usize::try_from(MAX_BYTES / 2).unwrap();
        fs::write(dir.path().join("env"), vec![b'#'; half]).unwrap();
        let volumes = BTreeMap::from([("v".to_owned(), dir.path().to_owned())]);
        let (manager, uid) = (manager(dir.path()), PodUid::new("u1"));
        let of = |paths: &[&str]| {
            let vars: Vec<_> = (paths.iter())
                .map(|path| json!({"volumeName": "v", "path": path, "key": "A"}))
                .map(|source| json!({"name": "A", "valueFrom": {"fileKeyRef": source}}))
                .collect();
            serde_json::from_value::<Container>(json!({"name": "c", "env": vars})).unwrap()
        };
        // One file by many names is many files.
        let container = of(&["env", "./env", "././env"]);
        let files = manager.env_files(&uid, &container, &volumes).await;
        let read_of = |path: &str| files[&("v".to_owned(), path.to_owned())].clone();
        assert_eq!(files.values().filter(|file| file.is_ok()).count(), 2);
        assert!(read_of("././env").unwrap_err().contains("262144 bytes"));
        let container = of(&["env"; MAX_VARIABLES + 1]);
        let files = manager.env_files(&uid, &container, &volumes).await;
        let [Err(why)] = files.values().collect::<Vec<_>>()[..] else {
            panic!("{files:?}");
        };
        assert!(why.contains("more than 1000 variables"), "{why}");
    }
}
