//! A clean Debian in a directory, and the packages that are put into it.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use holdfast_testkit::fixture::{self, Fixture};

/// The binary under test; crash-test build, so that it can play one with a newer schema.
pub const BINARY: &str = env!("CARGO_BIN_EXE_holdfast");
const CURRENT: &str = "holdfast_0.1.0-1.deb";
const LATER: &str = "holdfast_0.2.0-1.deb";
/// What [`Packages::newer`] says it is.
pub const NEWER: &str = "0.2.0-1";

/// Both kinds of output of a command that has to succeed.
#[track_caller]
pub fn run(command: &mut Command) -> String {
    let (success, said) = attempt(command);
    assert!(success, "{command:?}:\n{said}");
    said
}

/// Whether a command succeeds, and what it says.
pub fn attempt(command: &mut Command) -> (bool, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.stdin(Stdio::null()).output().unwrap();
    let said = [stdout, stderr].concat();
    (
        status.success(),
        String::from_utf8_lossy(&said).into_owned(),
    )
}

/// A program of this repository.
pub fn script(name: &str) -> Command {
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join(name));
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command
}

/// The package, and the same under a later version whose binary writes schema 2 (with `HOLDFAST_NEWER_SCHEMA`).
pub struct Packages {
    fixture: Fixture,
}

impl Packages {
    /// Makes them, once.
    pub fn get() -> Self {
        let fixture = fixture::once("packages", |dir| {
            run(script("hack/deb.sh")
                .arg(BINARY)
                .arg(dir.join(CURRENT))
                .env("FAST", "1"));
            let tree = dir.join("tree");
            run(Command::new("dpkg-deb")
                .arg("--raw-extract")
                .args([&dir.join(CURRENT), &tree]));
            let edit = |file: &str, from: &str, to: &str| {
                let path = tree.join("DEBIAN").join(file);
                let text = fs::read_to_string(&path).unwrap();
                assert!(text.contains(from), "{file} has no {from:?}: {text}");
                fs::write(&path, text.replace(from, to)).unwrap();
            };
            edit(
                "control",
                "\nVersion: 0.1.0-1\n",
                &format!("\nVersion: {NEWER}\n"),
            );
            edit("preinst", "\nschema=2\n", "\nschema=3\n");
            run(Command::new("dpkg-deb")
                .args(["--root-owner-group", "-Zgzip", "-z1", "--build"])
                .args([&tree, &dir.join(LATER)]));
            fs::remove_dir_all(&tree).unwrap();
        });
        Self {
            fixture: fixture.expect("make a directory for the packages"),
        }
    }

    pub fn current(&self) -> PathBuf {
        self.fixture.path().join(CURRENT)
    }

    pub fn newer(&self) -> PathBuf {
        self.fixture.path().join(LATER)
    }
}

/// A root directory with a clean Debian.
pub struct Root {
    dir: tempfile::TempDir,
}

impl Root {
    /// Unpacks one: `minbase` or `systemd`.
    pub fn new(kind: &str) -> Self {
        let archive = run(script("hack/debroot.sh").arg(kind));
        let archive = archive.lines().last().unwrap().to_owned();
        // The socket of the fake runtime is in there, and its path must be short.
        let dir = tempfile::Builder::new()
            .prefix("hf-root-")
            .tempdir()
            .unwrap();
        run(Command::new("tar")
            .args(["--numeric-owner", "-xf", &archive, "-C"])
            .arg(dir.path()));
        Self { dir }
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A path inside, as seen from outside.
    pub fn path(&self, inside: &str) -> PathBuf {
        self.dir.path().join(inside.trim_start_matches('/'))
    }

    pub fn read(&self, inside: &str) -> String {
        let path = self.path(inside);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    pub fn write(&self, inside: &str, text: &str) {
        let path = self.path(inside);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Makes a package available inside, and gives its path there.
    pub fn offer(&self, package: &Path) -> String {
        let name = package.file_name().unwrap().to_str().unwrap();
        let inside = format!("/root/{name}");
        if !self.path(&inside).exists() {
            fs::copy(package, self.path(&inside)).unwrap();
        }
        inside
    }

    /// A command inside.
    pub fn chroot<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Command {
        let mut command = Command::new("chroot");
        command.arg(self.dir()).args(arguments);
        clean(&mut command);
        command
    }

    /// Installs a package, and gives what was said.
    #[track_caller]
    pub fn install(&self, package: &Path) -> String {
        let package = self.offer(package);
        // No loss of power is to be survived here.
        run(&mut self.chroot(&["dpkg", "--force-unsafe-io", "--install", &package]))
    }

    /// The installed version.
    pub fn version(&self) -> String {
        run(&mut self.chroot(&[
            "dpkg-query",
            "--show",
            "--showformat=${Version}",
            "holdfast",
        ]))
    }
}

/// Nothing of this process's environment gets inside.
pub fn clean(command: &mut Command) {
    command
        .env_clear()
        .env(
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        )
        .env("DEBIAN_FRONTEND", "noninteractive")
        .env("LC_ALL", "C.UTF-8");
}
