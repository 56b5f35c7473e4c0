//! `hack/gate.sh` over phases that do what a test says: whatever goes wrong, the last paragraph names the cause, and a gate that was
//! killed keeps no other one from starting.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test fails by panicking"
)]
#![allow(
    clippy::disallowed_methods,
    reason = "child processes live in real time"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Everything that the gate starts, as `steps/NAME` below the checkout.
const SCRIPTS: [&str; 9] = [
    "deps", "nextest", "envtest", "debian", "deb", "deny", "mdbook", "debroot", "machine",
];
const TARGETS: [&str; 7] = ["check", "docs", "quick", "demo", "sim", "vmtest", "test"];

/// A checkout with the real gate and steps of a test's own.
struct Checkout {
    dir: tempfile::TempDir,
}

impl Checkout {
    fn new() -> Self {
        let this = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        let hack = Path::new(env!("CARGO_MANIFEST_DIR")).join("hack");
        for script in ["gate.sh", "lock.sh"] {
            let text = fs::read_to_string(hack.join(script)).unwrap();
            this.program(&format!("hack/{script}"), &text);
        }
        for script in SCRIPTS {
            this.program(
                &format!("hack/{script}.sh"),
                &format!("#!/bin/sh\nexec sh steps/{script} \"$@\"\n"),
            );
            this.step(script, "");
        }
        let mut makefile = String::new();
        for target in TARGETS {
            makefile.push_str(&format!(
                ".PHONY: {target}\n{target}:\n\t@sh steps/{target}\n"
            ));
            this.step(target, "");
        }
        fs::write(this.path("Makefile"), makefile).unwrap();
        this.program("bin/cargo", "#!/bin/sh\nexec sh steps/cargo \"$@\"\n");
        this.program("bin/rustc", "#!/bin/sh\necho rustc\n");
        this.step("cargo", "");
        this.git(&["init", "-q"]);
        this.git(&["add", "-A"]);
        this.git(&["commit", "-q", "-m", "all"]);
        this
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("checkout").join(name)
    }

    fn cache(&self) -> PathBuf {
        self.dir.path().join("cache")
    }

    fn program(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn step(&self, name: &str, text: &str) {
        self.program(&format!("steps/{name}"), text);
    }

    fn git(&self, arguments: &[&str]) {
        let identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"];
        let status = Command::new("git")
            .arg("-C")
            .arg(self.path("."))
            .args(identity)
            .args(arguments)
            .status();
        assert!(status.unwrap().success());
    }

    fn gate(&self, environment: &[(&str, &str)]) -> Command {
        let mut command = Command::new(self.path("hack/gate.sh"));
        let path = std::env::var("PATH").unwrap();
        command
            .env("PATH", format!("{}:{path}", self.path("bin").display()))
            .env("HOLDFAST_CACHE", self.cache())
            .env("HOLDFAST_GATE_ROOM", "10")
            .env_remove("CARGO_TARGET_DIR")
            .env_remove("HOLDFAST_GATE")
            .envs(environment.iter().copied())
            .stdin(Stdio::null());
        command
    }

    fn run(&self, environment: &[(&str, &str)]) -> Output {
        self.gate(environment).output().unwrap()
    }

    fn gated(&self) -> String {
        fs::read_to_string(self.cache().join("gated")).unwrap_or_default()
    }
}

fn said(output: &Output) -> String {
    let both = [output.stdout.as_slice(), &output.stderr].concat();
    String::from_utf8_lossy(&both).into_owned()
}

/// The last paragraph, and the line that counts.
#[track_caller]
fn end(output: &Output) -> (String, String) {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let paragraphs: Vec<&str> = text.trim_end().split("\n\n").collect();
    let [.., last, counts] = paragraphs.as_slice() else {
        panic!("{text}");
    };
    ((*last).to_owned(), (*counts).to_owned())
}

#[test]
fn a_commit_that_passes_is_noted_with_its_form_and_a_changed_tree_is_not() {
    let checkout = Checkout::new();
    checkout.step("test", "echo '7 passed, 0 failed, 2 skipped'");
    let output = checkout.run(&[]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(end(&output).1, "7 passed, 0 failed, 2 skipped");
    assert_eq!(checkout.gated(), "", "uncommitted changes");

    checkout.git(&["commit", "-q", "-a", "-m", "more"]);
    for (environment, form) in [
        (&[][..], " full "),
        (&[("FAST", "1")], " fast "),
        (&[("FRESH", "1")], " full "),
        (&[("FRESH", "1"), ("FAST", "1")], " fast "),
    ] {
        let before = checkout.gated();
        let output = checkout.run(environment);
        assert!(output.status.success(), "{}", said(&output));
        let gated = checkout.gated();
        let line = gated.strip_prefix(&before).unwrap();
        assert!(line.contains(form), "{environment:?}: {line}");
    }
}

#[test]
fn a_phase_that_fails_ends_with_a_paragraph_that_names_the_cause() {
    let checkout = Checkout::new();
    let clippy = "echo 'error: unused variable: `x`'; echo '   --> src/a.rs:1:2'; \
                  echo 'error: could not compile `holdfast`'; exit 101";
    let network = "echo 'Could not resolve deb.example' >&2; echo 'E: Unable to fetch' >&2; exit 1";
    let unit = "echo 'FAILED holdfast a::b'; echo '4 passed, 1 failed, 0 skipped'; exit 1";
    let machine =
        "echo 'FAILED holdfast::machine power::x'; echo '3 passed, 1 failed, 0 skipped'; exit 1";
    for (step, text, words, counts) in [
        (
            "check",
            clippy,
            &["make check", "unused variable", "src/a.rs:1:2"][..],
            "0 passed, 1 failed, 0 skipped",
        ),
        (
            "deps",
            network,
            &["packages", "no network"],
            "0 passed, 1 failed, 0 skipped",
        ),
        (
            "test",
            unit,
            &["make test", "FAILED holdfast a::b"],
            "4 passed, 1 failed, 0 skipped",
        ),
        (
            "vmtest",
            machine,
            &["make vmtest", "power::x"],
            "3 passed, 1 failed, 0 skipped",
        ),
        (
            "demo",
            "echo 'cp: No space left on device'; exit 1",
            &["make demo", "disk is full"],
            "0 passed, 1 failed, 0 skipped",
        ),
        (
            "demo",
            "kill -9 $$",
            &["make demo", "exit status"],
            "0 passed, 1 failed, 0 skipped",
        ),
    ] {
        checkout.step(step, text);
        let output = checkout.run(&[]);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        let (last, counted) = end(&output);
        for word in words {
            assert!(last.contains(word), "{step}: {word}: {last}");
        }
        assert_eq!(counted, counts, "{step}");
        assert_eq!(checkout.gated(), "");
        checkout.step(step, "");
    }
}

#[test]
fn too_little_room_is_named_with_the_disk_and_what_was_cleared() {
    let checkout = Checkout::new();
    let builds = checkout.cache().join("ci-target");
    fs::create_dir_all(&builds).unwrap();
    fs::write(builds.join("artefact"), "x").unwrap();
    let output = checkout.run(&[("HOLDFAST_GATE_ROOM", "1000000000")]);
    assert_eq!(output.status.code(), Some(1));
    let text = said(&output);
    assert!(text.contains("clearing all builds"), "{text}");
    assert!(text.contains("needs 1000000000"), "{text}");
    assert!(text.contains("0 passed, 1 failed, 0 skipped"), "{text}");
    assert!(!builds.join("artefact").exists());
}

#[test]
fn what_changes_from_day_to_day_is_printed_at_the_end_and_fails_nothing() {
    let checkout = Checkout::new();
    checkout.step("check", "echo 'WARNING: a crate was yanked'");
    let output = checkout.run(&[]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(end(&output).0, "WARNING: a crate was yanked");
}

/// Waits until the gate has printed a phase.
fn wait_phase(log: &Path, phase: &str) {
    let begun = Instant::now();
    while !fs::read_to_string(log).unwrap_or_default().contains(phase) {
        assert!(begun.elapsed() < Duration::from_secs(60), "no {phase}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn start(checkout: &Checkout, log: &Path) -> Child {
    let log = fs::File::create(log).unwrap();
    let copy = log.try_clone().unwrap();
    let mut command = checkout.gate(&[]);
    // It is killed alone, as by the kernel.
    command.stdout(log).stderr(copy).process_group(0);
    command.spawn().unwrap()
}

#[test]
fn a_gate_that_is_killed_lets_the_next_one_start_and_leaves_nothing_running() {
    let checkout = Checkout::new();
    // A program that outlives its phase, as a shim does, with whatever it inherits.
    let outlives = "setsid sleep 4321 & sleep 4321";
    for phase in [
        "deps", "machine", "check", "cargo", "demo", "vmtest", "test",
    ] {
        checkout.step(phase, outlives);
        let log = checkout.dir.path().join("log");
        let mut gate = start(&checkout, &log);
        let name = match phase {
            "deps" => "== packages",
            "machine" => "== test machine",
            "cargo" => "== test binaries",
            other => &format!("== make {other}"),
        };
        wait_phase(&log, name);
        gate.kill().unwrap();
        gate.wait().unwrap();
        checkout.step(phase, "");
        let begun = Instant::now();
        let output = checkout.run(&[]);
        assert!(output.status.success(), "{phase}: {}", said(&output));
        assert!(begun.elapsed() < Duration::from_secs(60), "{phase}");
        assert_eq!(sleepers(&checkout), [0; 0], "{phase}");
    }
}

#[test]
fn a_demo_that_was_killed_leaves_no_container_without_a_shim_running() {
    let checkout = Checkout::new();
    for script in ["demo.sh", "containerd.sh"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("hack")
            .join(script);
        let text = fs::read_to_string(path).unwrap();
        checkout.program(&format!("hack/{script}"), &text);
    }
    // The demo's cgroup has a name made of the path of its files.
    let files = format!(
        "{}/target/demo",
        checkout.path("").canonicalize().unwrap().display()
    );
    let sum = format!("printf %s '{files}' | cksum | cut -d' ' -f1");
    let sum = Command::new("sh").args(["-c", &sum]).output().unwrap();
    let name = format!(
        "holdfast-demo-{}",
        String::from_utf8(sum.stdout).unwrap().trim()
    );
    let root = [
        Path::new("/sys/fs/cgroup/pids"),
        Path::new("/sys/fs/cgroup"),
    ];
    let cgroup = root
        .into_iter()
        .find(|dir| dir.join("cgroup.procs").exists())
        .unwrap()
        .join(name);
    fs::create_dir_all(cgroup.join("pod/container")).unwrap();
    let mut container = Command::new("sleep").arg("4321").spawn().unwrap();
    fs::write(
        cgroup.join("pod/container/cgroup.procs"),
        container.id().to_string(),
    )
    .unwrap();

    let mut stop = Command::new(checkout.path("hack/demo.sh"));
    let output = stop.arg("stop").stdin(Stdio::null()).output().unwrap();

    let left = container.try_wait().unwrap().is_none();
    container.kill().unwrap();
    container.wait().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(!left, "{}", said(&output));
    assert!(!cgroup.exists(), "{}", said(&output));
}

/// Processes of the steps of this checkout.
fn sleepers(checkout: &Checkout) -> Vec<i32> {
    let mark = format!("HOLDFAST_GATE={}", checkout.cache().display());
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        String::from_utf8_lossy(&environment).contains(&mark)
    })
    .collect()
}

#[test]
fn a_second_gate_says_whom_it_waits_for_and_an_interrupted_one_says_where_it_was() {
    let checkout = Checkout::new();
    checkout.step("check", "sleep 4321");
    let log = checkout.dir.path().join("log");
    let mut first = start(&checkout, &log);
    wait_phase(&log, "== make check");
    let other = checkout.dir.path().join("other");
    let mut second = start(&checkout, &other);
    wait_phase(&other, "waiting for the gate");
    let text = fs::read_to_string(&other).unwrap();
    assert!(text.contains(&format!("process {}", first.id())), "{text}");
    second.kill().unwrap();
    second.wait().unwrap();

    kill(
        Pid::from_raw(first.id().try_into().unwrap()),
        Signal::SIGTERM,
    )
    .unwrap();
    let status = first.wait().unwrap();
    assert_eq!(status.code(), Some(1));
    let text = fs::read_to_string(&log).unwrap();
    assert!(
        text.contains("ended by signal TERM in the phase make check"),
        "{text}"
    );
    assert!(
        text.trim_end().ends_with("0 passed, 1 failed, 0 skipped"),
        "{text}"
    );
    assert_eq!(sleepers(&checkout), [0; 0]);
}

/// A checkout with `hack/words.sh`, which checks a document and a source file.
fn words(allowed: &str, document: &str, source: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    for name in ["hack", "docs", "src"] {
        fs::create_dir(path(name)).unwrap();
    }
    let script = path("hack/words.sh");
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("hack/words.sh");
    fs::copy(own, &script).unwrap();
    for name in [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
    ] {
        fs::write(path(name), "A plain sentence.\n").unwrap();
    }
    fs::write(path("hack/words.txt"), allowed).unwrap();
    fs::write(path("docs/page.md"), document).unwrap();
    fs::write(path("src/lib.rs"), source).unwrap();
    (dir, script)
}

#[test]
fn words_of_each_kind_are_found_and_counts_only_shrink() {
    let long = format!("It has {}words.\n", "many ".repeat(40));
    let plain = "/// Returns the answer.\nfn a() {}\n";
    let clause = "/// What it returns.\nfn a() {}\n";
    for (allowed, document, source, told) in [
        ("", "A page.\n", plain, ""),
        ("", &*long, plain, "docs/page.md: 1 of kind \"long\""),
        (
            "",
            "A pod tells it.\n",
            plain,
            "docs/page.md: 1 of kind \"glossary\"",
        ),
        ("", "A page.\n", clause, "src/lib.rs: 1 of kind \"clause\""),
        ("1 clause src/lib.rs\n", "A page.\n", clause, ""),
        (
            "1 long docs/page.md\n",
            "`tells`\n\n```\ntells\n```\n",
            plain,
            "",
        ),
    ] {
        let (_dir, script) = words(allowed, document, source);
        let output = Command::new(&script).output().unwrap();
        let said = said(&output);
        assert_eq!(output.status.success(), told.is_empty(), "{said}");
        assert!(said.contains(told), "{told}: {said}");
    }

    // A count that somebody raises.
    let (dir, script) = words("1 clause src/lib.rs\n", "A page.\n", clause);
    let git = |arguments: &[&str]| {
        let identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"];
        let mut git = Command::new("git");
        git.arg("-C").arg(dir.path()).args(identity).args(arguments);
        assert!(git.status().unwrap().success());
    };
    git(&["init", "-q"]);
    git(&["add", "-A"]);
    git(&["commit", "-q", "-m", "first"]);
    let is_fine = || Command::new(&script).output().unwrap();
    assert!(is_fine().status.success(), "{}", said(&is_fine()));
    fs::write(dir.path().join("hack/words.txt"), "2 clause src/lib.rs\n").unwrap();
    for _ in 0..2 {
        let output = is_fine();
        assert!(!output.status.success());
        assert!(
            said(&output).contains("they only shrink"),
            "{}",
            said(&output)
        );
        git(&["commit", "-q", "-a", "--allow-empty", "-m", "raised"]);
    }
    // An update lowers counts, and raises none.
    let (dir, script) = words("2 clause src/old.rs\n", "A page.\n", clause);
    fs::write(dir.path().join("src/old.rs"), "/// What a is.\nfn a() {}\n").unwrap();
    let output = Command::new(&script).arg("update").output().unwrap();
    assert!(!output.status.success(), "{}", said(&output));
    let left = fs::read_to_string(dir.path().join("hack/words.txt")).unwrap();
    assert_eq!(left, "1 clause src/old.rs\n");
}

#[test]
fn every_patch_that_weakens_the_code_applies_and_names_its_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let entries = fs::read_dir(root.join("tests/weakened")).unwrap();
    let patches: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    assert!(patches.len() >= 12, "{}", patches.len());
    for patch in patches {
        let text = fs::read_to_string(&patch).unwrap();
        assert!(text.contains("\ntests: --"), "{}", patch.display());
        let applies = Command::new("git")
            .current_dir(root)
            .args(["apply", "--check", "-C1"])
            .arg(&patch)
            .output()
            .unwrap();
        assert!(
            applies.status.success(),
            "{} does not apply, see hack/weakened.sh: {}",
            patch.display(),
            said(&applies)
        );
    }
}
