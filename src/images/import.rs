//! Importing archives by the tool of the runtime: CRI has no call for it.
//!
//! containerd's own API could, over the socket that CRI uses: the transfer service of 2.0 takes a stream, and before that a
//! client has to unpack layers with the content, diff, snapshot and image services itself, under a lease. That is `ctr`
//! written again for every version. So `ctr` is run, which comes in the package of containerd and fits its version; for
//! CRI-O it is `podman`, or `skopeo` where that is all there is, which share its storage.
//!
//! No shell, no input, an environment of three variables. What an archive says never becomes an option: names of images
//! were checked when the archive was read, paths are absolute.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use futures::future::BoxFuture;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::process::{Child, Command};

use crate::kuberuntime::cri::PULL_LEASES;
use crate::types::Stamp;

/// Longest duration of an import.
const PATIENCE: Duration = Duration::from_secs(1800);
/// Bytes of a tool's complaints that are shown.
const SHOWN: usize = 1024;
/// Search path for tools if the environment has none.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Keeps containerd's and the kubelet's collections of unused images away.
const PINNED: &str = "io.cri-containerd.pinned";
/// The label of leases that end by themselves: those of a client that pulls or imports.
const EXPIRES: &str = "containerd.io/gc.expire=";
/// The namespace in which containerd keeps what CRI made.
const NAMESPACE: &str = "k8s.io";

/// An import that failed.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// No tool of this runtime imports archives.
    #[error("no way to import an archive into {runtime} is known; load the images by hand")]
    Runtime {
        /// Name of the runtime.
        runtime: String,
    },
    /// The tool is not there.
    #[error("{tools} not found in {path}; install it")]
    Missing {
        /// Names of the tools.
        tools: &'static str,
        /// Where.
        path: String,
    },
    /// It failed or did not end in time.
    #[error("{command}: {why}")]
    Failed {
        /// Command line.
        command: String,
        /// Its status, and the end of what it said.
        why: String,
    },
}

/// Imports archives into a runtime.
pub trait Importer: Send + Sync + 'static {
    /// Imports all images of an archive and pins them. Dropping the future stops it; an import can be made again.
    fn import<'a>(
        &'a self,
        archive: &'a Path,
        images: &'a [String],
    ) -> BoxFuture<'a, Result<(), ImportError>>;

    /// Takes the pins off images whose archive is gone.
    fn unpin<'a>(&'a self, images: &'a [String]) -> BoxFuture<'a, Result<(), ImportError>>;

    /// Removes images that the runtime keeps and does not show in CRI, since it cannot read them, with every other name of their
    /// content. Returns the number of names.
    fn remove_unreadable<'a>(
        &'a self,
        images: &'a [String],
    ) -> BoxFuture<'a, Result<usize, ImportError>>;

    /// Has the runtime let go of what pulls and imports held that the end of the machine cut off. Where nothing else
    /// holds it, the runtime forgets it, so that it is not taken for what the next pull brings. Returns how many there were.
    fn release<'a>(&'a self, now: Stamp) -> BoxFuture<'a, Result<usize, ImportError>>;
}

/// The tool that comes with the runtime.
#[derive(Clone, Debug)]
pub struct RuntimeTool {
    runtime: String,
    socket: PathBuf,
    /// Directories in which tools are looked for, as in `$PATH`.
    path: String,
}

impl RuntimeTool {
    /// The tool for a runtime by the name that it gives itself in CRI, on this socket. Looks in `$PATH`.
    pub fn new(runtime: impl Into<String>, socket: impl Into<PathBuf>) -> Self {
        let path = std::env::var_os("PATH").unwrap_or_default();
        // A directory with an odd name costs that directory, not the others.
        let path = path.to_string_lossy().into_owned();
        Self {
            runtime: runtime.into(),
            socket: socket.into(),
            path: if path.is_empty() {
                PATH.to_owned()
            } else {
                path
            },
        }
    }

    /// Looks for tools in these directories instead, separated by colons.
    #[must_use]
    pub fn in_path(mut self, path: impl Into<String>) -> Self {
        self.path = path.into();
        self
    }

    fn find(&self, tool: &str) -> Option<PathBuf> {
        use std::os::unix::fs::PermissionsExt as _;
        let dirs = self.path.split(':').filter(|dir| dir.starts_with('/'));
        let paths = dirs.map(|dir| Path::new(dir).join(tool));
        let runs = |path: &PathBuf| {
            std::fs::metadata(path)
                .is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
        };
        paths.into_iter().find(runs)
    }

    fn require(&self, tools: &'static str, tool: &str) -> Result<PathBuf, ImportError> {
        self.find(tool).ok_or_else(|| ImportError::Missing {
            tools,
            path: self.path.clone(),
        })
    }

    /// `ctr` on the runtime's socket.
    fn ctr(&self, what: &str) -> Result<Command, ImportError> {
        let mut command = self.command(&self.require("ctr", "ctr")?);
        command
            .arg("--address")
            .arg(&self.socket)
            .args(["--namespace", NAMESPACE, what]);
        Ok(command)
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env_clear()
            .env("PATH", &self.path)
            .env("LANG", "C")
            // podman looks for its configuration there.
            .env("HOME", "/root")
            .current_dir("/");
        command
    }

    async fn import_all(&self, archive: &Path, images: &[String]) -> Result<(), ImportError> {
        match self.runtime.as_str() {
            "containerd" => {
                let mut import = self.ctr("images")?;
                import.arg("import").arg(archive);
                run(import).await?;
                for image in images {
                    self.label(image, &format!("{PINNED}=pinned")).await?;
                }
                Ok(())
            }
            "cri-o" => self.load(archive, images).await,
            other => Err(ImportError::Runtime {
                runtime: other.to_owned(),
            }),
        }
    }

    /// containerd keeps what a pull has brought by a lease of a day. Whoever held one of an earlier boot is gone.
    async fn release_leases(&self, now: Stamp) -> Result<usize, ImportError> {
        let mut list = self.ctr("leases")?;
        list.arg("list");
        let stale = stale_leases(&run(list).await?, now);
        if !stale.is_empty() {
            let mut delete = self.ctr("leases")?;
            // Answers after the collection of what they held.
            delete.args(["delete", "--sync"]).args(&stale);
            run(delete).await?;
        }
        Ok(stale.len())
    }

    /// Removes the names of an image and of its content. CRI gives an image the name of its ID beside its own.
    async fn remove_names(&self, images: &[String]) -> Result<usize, ImportError> {
        let mut list = self.ctr("images")?;
        list.arg("list");
        let names = names_of_content(&run(list).await?, images);
        if !names.is_empty() {
            let mut remove = self.ctr("images")?;
            // Answers after the collection of what they held.
            remove.args(["remove", "--sync"]).args(&names);
            run(remove).await?;
        }
        Ok(names.len())
    }

    async fn label(&self, image: &str, label: &str) -> Result<(), ImportError> {
        let mut command = self.ctr("images")?;
        // Names in containerd have a registry.
        command.args(["label", &super::qualified(image), label]);
        run(command).await.map(drop)
    }

    /// CRI-O pins images by its own configuration (`pinned_images`).
    async fn load(&self, archive: &Path, images: &[String]) -> Result<(), ImportError> {
        if let Some(podman) = self.find("podman") {
            let mut command = self.command(&podman);
            command.args(["load", "--quiet", "--input"]).arg(archive);
            return run(command).await.map(drop);
        }
        let skopeo = self.require("podman and skopeo", "skopeo")?;
        for image in images {
            let mut command = self.command(&skopeo);
            command.args(["copy", "--quiet"]);
            command.arg(format!("docker-archive:{}:{image}", archive.display()));
            command.arg(format!("containers-storage:{}", super::qualified(image)));
            run(command).await?;
        }
        Ok(())
    }
}

impl Importer for RuntimeTool {
    fn import<'a>(
        &'a self,
        archive: &'a Path,
        images: &'a [String],
    ) -> BoxFuture<'a, Result<(), ImportError>> {
        Box::pin(self.import_all(archive, images))
    }

    fn unpin<'a>(&'a self, images: &'a [String]) -> BoxFuture<'a, Result<(), ImportError>> {
        Box::pin(async move {
            if self.runtime != "containerd" {
                return Ok(());
            }
            for image in images {
                // An empty value takes a label away.
                self.label(image, &format!("{PINNED}=")).await?;
            }
            Ok(())
        })
    }

    fn remove_unreadable<'a>(
        &'a self,
        images: &'a [String],
    ) -> BoxFuture<'a, Result<usize, ImportError>> {
        Box::pin(async move {
            // CRI-O writes what it cannot read anew.
            if self.runtime != "containerd" {
                return Ok(0);
            }
            self.remove_names(images).await
        })
    }

    fn release<'a>(&'a self, now: Stamp) -> BoxFuture<'a, Result<usize, ImportError>> {
        Box::pin(async move {
            // CRI-O tells layers that are not complete from others by itself.
            if self.runtime != "containerd" {
                return Ok(0);
            }
            self.release_leases(now).await
        })
    }
}

/// Returns all names of the content of these images, of a table that `ctr images list` prints: name, media type, digest.
fn names_of_content(table: &str, images: &[String]) -> Vec<String> {
    let images: Vec<String> = images.iter().map(|image| super::qualified(image)).collect();
    let rows: Vec<(&str, &str)> = table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            // A name never becomes an option.
            let name = words.next().filter(|name| !name.starts_with('-'))?;
            let digest = words
                .nth(1)
                .filter(|digest| digest.starts_with("sha256:"))?;
            Some((name, digest))
        })
        .collect();
    let is_of_images = |digest: &str| {
        let mut own = rows.iter().filter(|(_, of)| *of == digest);
        own.any(|(name, _)| images.iter().any(|image| image == name))
    };
    let found = rows.iter().filter(|(_, digest)| is_of_images(digest));
    found.map(|(name, _)| (*name).to_owned()).collect()
}

/// The leases of an earlier boot, of a table that `ctr leases list` prints: ID, time, labels. One that was made in the future
/// is of a time before the clock was set back.
fn stale_leases(table: &str, now: Stamp) -> Vec<String> {
    let booted = now.wall_ms - now.boottime_ms;
    let is_stale = |made: &str| {
        let made = made.parse::<jiff::Timestamp>().map(|t| t.as_millisecond());
        // The table has whole seconds.
        made.is_ok_and(|made| made + 1000 <= booted || made > now.wall_ms)
    };
    let lines = table.lines().skip(1);
    lines
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (id, made) = (words.next()?, words.next()?);
            let expires = words.any(|labels| labels.contains(EXPIRES));
            // An ID never becomes an option. Those of this agent's pulls were taken over.
            let is_foreign = !id.starts_with('-') && !id.starts_with(PULL_LEASES);
            (expires && is_stale(made) && is_foreign).then(|| id.to_owned())
        })
        .collect()
}

/// Runs a tool to its end and returns what it printed. When the future is dropped, the tool is killed with all that it has started.
async fn run(mut command: Command) -> Result<String, ImportError> {
    let shown = {
        let command = command.as_std();
        let program = Path::new(command.get_program()).file_name();
        let words = program.into_iter().chain(command.get_args());
        let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
        words.join(" ")
    };
    let failed = |why: String| ImportError::Failed {
        command: shown.clone(),
        why,
    };
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| failed(format!("start it: {error}")))?;
    let mut group = Group::of(&child);
    let output = match tokio::time::timeout(PATIENCE, child.wait_with_output()).await {
        Ok(output) => output.map_err(|error| failed(error.to_string()))?,
        Err(_) => {
            return Err(failed(format!(
                "it took longer than {} s",
                PATIENCE.as_secs()
            )));
        }
    };
    group.disarm();
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim();
    let mut begin = said.len().saturating_sub(SHOWN);
    while !said.is_char_boundary(begin) {
        begin += 1;
    }
    let said = said[begin..].replace('\n', "; ");
    Err(failed(format!("{}: {said}", output.status)))
}

/// Kills the process group that a program leads when it is dropped.
pub(super) struct Group(Option<i32>);

impl Group {
    pub(super) fn of(leader: &Child) -> Self {
        Self(leader.id().and_then(|id| i32::try_from(id).ok()))
    }

    /// The leader has been waited for: its number may be somebody else's.
    pub(super) fn disarm(&mut self) {
        self.0 = None;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.0
            && let Err(error) = killpg(Pid::from_raw(leader), Signal::SIGKILL)
        {
            tracing::debug!(pid = leader, %error, "cannot kill an abandoned program");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A directory with a tool that notes its arguments, and does this then.
    fn tool(name: &str, then: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        let log = dir.path().join("log");
        let text = format!("#!/bin/sh\necho \"$@\" >>{}\n{then}\n", log.display());
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        dir
    }

    async fn import(
        runtime: &str,
        dir: &Path,
        images: &[&str],
    ) -> (Result<(), ImportError>, String) {
        let path = format!("{}:/usr/bin:/bin", dir.display());
        let tool = RuntimeTool::new(runtime, "/run/c.sock").in_path(path);
        let images: Vec<String> = images.iter().map(|i| (*i).to_owned()).collect();
        let done = tool.import(Path::new("/i/a.tar"), &images).await;
        let said = fs::read_to_string(dir.join("log")).unwrap_or_default();
        (done, said)
    }

    #[tokio::test]
    async fn an_archive_is_imported_by_ctr_and_its_images_are_pinned() {
        let dir = tool("ctr", "");
        let (done, said) = import("containerd", dir.path(), &["b:1", "r.example/a:2"]).await;
        done.unwrap();
        let on = "--address /run/c.sock --namespace k8s.io images";
        assert_eq!(
            said.lines().collect::<Vec<_>>(),
            [
                format!("{on} import /i/a.tar"),
                format!("{on} label docker.io/library/b:1 io.cri-containerd.pinned=pinned"),
                format!("{on} label r.example/a:2 io.cri-containerd.pinned=pinned"),
            ]
        );
    }

    /// An hour after the boot.
    const NOW: Stamp = Stamp {
        boot: crate::types::BootId(1),
        boottime_ms: 3_600_000,
        wall_ms: 1_795_000_000_000,
    };

    #[tokio::test]
    async fn leases_of_an_earlier_boot_are_dropped_and_no_others() {
        let table = "ID         CREATED AT                LABELS\n\
            old        2026-11-18T11:06:38+01:00 containerd.io/gc.expire=2026-11-19T10:06:38Z\n\
            kept       2026-11-18T10:06:38Z      -\n\
            young      2026-11-18T10:06:40Z      a=b,containerd.io/gc.expire=2026-11-19T10:06:40Z\n\
            future     2027-11-18T10:06:40Z      containerd.io/gc.expire=2027-11-19T10:06:40Z,a=b\n\
            holdfast-pull-ab-cd 2026-11-18T10:06:38Z containerd.io/gc.expire=2026-11-25T10:06:38Z\n\
            odd\n\
            -x         2026-11-18T10:06:38Z      containerd.io/gc.expire=2026-11-19T10:06:38Z\n";
        let booted = NOW.wall_ms - 3_600_000;
        let at: jiff::Timestamp = "2026-11-18T10:06:40Z".parse().unwrap();
        assert_eq!(at.as_millisecond(), booted);
        let dir = tool("ctr", &format!("[ $6 != list ] || printf '{table}'"));
        let path = format!("{}:/usr/bin:/bin", dir.path().display());
        let tool = RuntimeTool::new("containerd", "/run/c.sock").in_path(&path);
        assert_eq!(tool.release(NOW).await.unwrap(), 2);
        let said = fs::read_to_string(dir.path().join("log")).unwrap();
        let on = "--address /run/c.sock --namespace k8s.io leases";
        assert_eq!(
            said.lines().collect::<Vec<_>>(),
            [
                format!("{on} list"),
                format!("{on} delete --sync old future")
            ]
        );
        let other = RuntimeTool::new("cri-o", "/run/c.sock").in_path(&path);
        assert_eq!(other.release(NOW).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn an_image_that_cannot_be_read_is_removed_with_every_name_of_its_content() {
        let table = "REF  TYPE  DIGEST  SIZE  PLATFORMS  LABELS\n\
            docker.io/library/a:1  application/x+json  sha256:aa  1.0 B  -  a=b\n\
            r.example/other:2      application/x+json  sha256:bb  1.0 B  -  -\n\
            r.example/tag:3        application/x+json  sha256:aa  1.0 B  -  -\n\
            odd\n\
            -x                     application/x+json  sha256:aa  1.0 B  -  -\n\
            sha256:0a              application/x+json  sha256:aa  1.0 B  -  a=b\n";
        let dir = tool("ctr", &format!("[ $6 != list ] || printf '%s' '{table}'"));
        let path = format!("{}:/usr/bin:/bin", dir.path().display());
        let tool = RuntimeTool::new("containerd", "/run/c.sock").in_path(&path);
        let gone = ["gone:1".to_owned()];
        let both = ["a:1".to_owned(), "gone:1".to_owned()];
        assert_eq!(tool.remove_unreadable(&both).await.unwrap(), 3);
        let said = fs::read_to_string(dir.path().join("log")).unwrap();
        let on = "--address /run/c.sock --namespace k8s.io images";
        assert_eq!(
            said.lines().collect::<Vec<_>>(),
            [
                format!("{on} list"),
                format!("{on} remove --sync docker.io/library/a:1 r.example/tag:3 sha256:0a")
            ]
        );
        // Nothing to remove, and a runtime that needs no help.
        assert_eq!(tool.remove_unreadable(&gone).await.unwrap(), 0);
        let other = RuntimeTool::new("cri-o", "/run/c.sock").in_path(&path);
        assert_eq!(other.remove_unreadable(&both).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn an_archive_is_loaded_by_podman_or_skopeo_for_cri_o() {
        let dir = tool("podman", "");
        let (done, said) = import("cri-o", dir.path(), &["b:1"]).await;
        done.unwrap();
        assert_eq!(said.trim(), "load --quiet --input /i/a.tar");
    }

    #[tokio::test]
    async fn what_keeps_an_import_from_working_is_one_clear_line() {
        let dir = tool("ctr", "echo first >&2; echo 'no space left' >&2; exit 3");
        let (done, _) = import("containerd", dir.path(), &["b:1"]).await;
        let text = done.unwrap_err().to_string();
        assert!(
            text.ends_with("images import /i/a.tar: exit status: 3: first; no space left"),
            "{text}"
        );
        let empty = tempfile::tempdir().unwrap();
        let only = RuntimeTool::new("containerd", "/s").in_path(empty.path().to_str().unwrap());
        let text = only.import(Path::new("/a"), &[]).await.unwrap_err();
        assert!(text.to_string().starts_with("ctr not found in "), "{text}");
        let (done, _) = import("dockershim", dir.path(), &[]).await;
        let text = done.unwrap_err().to_string();
        assert!(text.contains("into dockershim"), "{text}");
    }
}
