//! The runner over a small package of its own: what passes, fails, flickers, hangs and leaves things behind is told
//! by name.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests may panic"
)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const CONFIG: &str = r#"
[test-groups]
pure = { max-threads = 2 }
runtime = { max-threads = 2 }
crash = { max-threads = 1 }

[profile.default]
slow-timeout = { period = "60s", terminate-after = 2, grace-period = "5s" }

[profile.default.junit]
path = "junit.xml"

[profile.again.junit]
path = "junit.xml"
store-success-output = true

[[profile.default.overrides]]
filter = 'test(=real_hangs)'
slow-timeout = { period = "2s", terminate-after = 1, grace-period = "5s" }

[[profile.default.overrides]]
filter = 'test(/^crash/)'
test-group = "crash"

[[profile.default.overrides]]
filter = 'test(/^real/)'
test-group = "runtime"

[[profile.default.overrides]]
filter = 'all()'
test-group = "pure"
"#;

const TESTS: &str = r#"
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Whether it is the first time.
fn first(name: &str) -> bool {
    let mark = PathBuf::from(std::env::var_os("MARKS").unwrap()).join(name);
    std::fs::File::create_new(mark).is_ok()
}

#[test]
fn passes() {}

#[test]
fn real_fails_always() {
    panic!("as always");
}

#[test]
fn real_fails_every_other_time() {
    assert!(!first("other"), "the first time");
    println!("the second time");
}

#[test]
fn pure_fails_every_other_time() {
    assert!(!first("pure"));
}

#[test]
fn crash_fails_every_other_time() {
    assert!(!first("crash"));
}

#[test]
fn real_hangs() {
    loop {
        std::thread::park();
    }
}

#[test]
fn real_leaves_a_process() {
    // Not ours any more as soon as the shell has ended.
    let mut shell = Command::new("sh");
    shell.args(["-c", "setsid sleep 321 & :"]).stdout(Stdio::null()).stderr(Stdio::null());
    assert!(shell.status().unwrap().success());
}

#[test]
fn real_leaves_a_file() {
    let rest = std::env::temp_dir().join("rest");
    std::fs::write(&rest, "").unwrap();
    let mark = PathBuf::from(std::env::var_os("MARKS").unwrap()).join("rest");
    std::fs::write(mark, rest.to_str().unwrap()).unwrap();
}

#[test]
#[ignore]
fn skipped() {}
"#;

/// Runs chosen tests of the package.
fn run(dir: &Path, filter: &str) -> (Output, Vec<String>) {
    run_with(dir, &["-E", filter])
}

fn run_with(dir: &Path, arguments: &[&str]) -> (Output, Vec<String>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_test-runner"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("NEXTEST") || text.starts_with("HOLDFAST") || text.starts_with("CARGO_")
        {
            command.env_remove(&name);
        }
    }
    let output = command
        .args(["run", "--no-cluster"])
        .args(arguments)
        .current_dir(dir)
        .env("CARGO_TARGET_DIR", dir.join("target"))
        .env("MARKS", dir.join("marks"))
        .env("HOLDFAST_TEST_PARTING", "2")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let lines = said.lines().map(str::to_owned).collect();
    (output, lines)
}

fn package() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write(
        "Cargo.toml",
        "[package]\nname = \"small\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[workspace]\n",
    );
    write(
        "Cargo.lock",
        "version = 4\n\n[[package]]\nname = \"small\"\nversion = \"0.1.0\"\n",
    );
    write("src/lib.rs", "");
    write("tests/small.rs", TESTS);
    write(".config/nextest.toml", CONFIG);
    fs::create_dir(dir.path().join("marks")).unwrap();
    dir
}

/// From the first line that tells of a single test on.
fn verdict(lines: &[String]) -> Vec<&str> {
    let mut end: Vec<&str> = lines
        .iter()
        .rev()
        .map(String::as_str)
        .take_while(|l| !l.is_empty())
        .collect();
    end.reverse();
    end
}

#[test]
fn each_kind_of_end_is_told_by_name() {
    let package = package();
    let dir = package.path();

    let (output, lines) = run(dir, "test(passes)");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(verdict(&lines), ["1 passed, 0 failed, 8 skipped"]);

    // What this kind of run is not about is not skipped.
    let scope = ["--scope", "test(passes) | test(skipped)"];
    let (output, lines) = run_with(dir, &scope);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(verdict(&lines), ["1 passed, 0 failed, 1 skipped"]);

    let (output, lines) = run(dir, "test(/every_other_time/)");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(
        verdict(&lines),
        [
            "FAILED small::small crash_fails_every_other_time",
            "FAILED small::small pure_fails_every_other_time",
            "FLAKY small::small real_fails_every_other_time",
            "1 passed, 2 failed, 6 skipped",
        ]
    );
    let kept = |which: &str| {
        let file = format!("small.small.real_fails_every_other_time.{which}.log");
        fs::read_to_string(dir.join("target/nextest/failed").join(file)).unwrap()
    };
    assert!(kept("first").contains("the first time"));
    assert!(kept("second").contains("the second time"));

    // The same again: nothing fails any more.
    let (output, lines) = run(dir, "test(real_fails_every_other_time)");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(verdict(&lines), ["1 passed, 0 failed, 8 skipped"]);
    fs::remove_file(dir.join("marks/other")).unwrap();
    let (output, lines) = run(dir, "test(real_fails_every_other_time)");
    assert!(
        output.status.success(),
        "what passes alone lets the run pass: {output:?}"
    );
    assert_eq!(
        verdict(&lines)[0],
        "FLAKY small::small real_fails_every_other_time"
    );
}

#[test]
fn what_always_fails_and_what_hangs_fails_the_run() {
    let package = package();
    let (output, lines) = run(package.path(), "test(real_fails_always) | test(real_hangs)");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(
        verdict(&lines),
        [
            "FAILED small::small real_fails_always, and failed again alone",
            "HUNG small::small real_hangs (ended at its deadline, after 2 s, and failed again alone)",
            "0 passed, 2 failed, 7 skipped",
        ]
    );
}

#[test]
fn what_is_left_behind_is_ended_and_fails_the_run() {
    let package = package();
    let dir = package.path();
    let (output, lines) = run(dir, "test(/leaves/)");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let verdict = verdict(&lines);
    assert!(
        verdict[0].starts_with("left behind by small::small real_leaves_a_process: process ")
            && verdict[0].ends_with(": sleep 321"),
        "{verdict:?}"
    );
    assert_eq!(verdict[1..], ["2 passed, 0 failed, 7 skipped"]);
    let pid = verdict[0]
        .split(' ')
        .rev()
        .nth(2)
        .unwrap()
        .trim_end_matches(':');
    assert!(
        !Path::new("/proc").join(pid).exists(),
        "process {pid} lives"
    );
    let rest = fs::read_to_string(dir.join("marks/rest")).unwrap();
    assert!(!Path::new(&rest).exists(), "{rest} is there");
}

#[test]
fn what_does_not_compile_and_what_selects_nothing_is_no_run() {
    let package = package();
    let (output, _) = run(package.path(), "test(nothing_has_this_name)");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    fs::write(package.path().join("tests/small.rs"), "fn").unwrap();
    let (output, _) = run(package.path(), "all()");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("the tests did not all run"), "{said}");
}
