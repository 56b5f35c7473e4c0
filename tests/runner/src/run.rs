//! One whole run: clean ground, the cluster that tests share, nextest, second runs, the report, clean ground again.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, bail, ensure};

use crate::ground::{self, RunDir};
use crate::guard::{CLOCK, CRASH, MEMORY_DIR, PURE, RUN_DIR};
use crate::records::{self, TestName};
use crate::report::{self, Report, SecondRun};
use crate::results::{self, Counts, Outcome, TestRun};

/// Below the checkout: nextest's reports, outputs of failed tests.
const STORE: &str = "target/nextest";
/// Names the directory of the cluster that tests share.
const SHARED_CLUSTER: &str = "HOLDFAST_TEST_CLUSTER";
/// The name of that directory.
const CLUSTER: &str = "cluster";
/// Where tests put what helps to understand a failure.
const KEEP: &str = "HOLDFAST_TEST_KEEP";
/// What a whole run selects; the same in every call of cargo, so that nothing is compiled twice.
const SELECTION: [&str; 3] = ["--workspace", "--all-features", "--locked"];
/// nextest's exit code when tests have failed.
const TESTS_FAILED: i32 = 100;

/// Runs the tests that nextest selects by the arguments. Fails when a test fails, or something is left behind.
///
/// # Errors
/// When the tests cannot be run: they do not compile, or there is no nextest.
pub(crate) fn run(arguments: &[OsString]) -> Result<ExitCode> {
    let Options {
        shared_cluster,
        scope,
        arguments,
    } = Options::parse(arguments)?;

    report::print_found("cleared the ground of", &ground::sweep());
    let run_dir = RunDir::new()?;
    let keep = std::path::absolute(STORE)?.join("failed");
    remove(&keep)?;
    fs::create_dir_all(&keep).with_context(|| format!("make {}", keep.display()))?;
    let nextest = Nextest {
        run_dir: run_dir.path.clone(),
        in_memory: run_dir.in_memory.clone(),
        keep: keep.clone(),
        triple: host_triple()?,
    };
    // Whoever interrupts the run stops nextest; what it has left is removed nevertheless.
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted)).context("catch signals")?;
    }

    let cluster = shared_cluster
        .then(|| Cluster::start(&run_dir.path))
        .transpose()?;
    let outcome = nextest.run_all(scope, arguments);
    let second = match &outcome {
        Ok(all) if !interrupted.load(Ordering::Relaxed) => {
            // A test that was ended at its deadline could not remove its cgroups.
            if all.runs.values().any(|run| run.outcome != Outcome::Passed) {
                report::print_found("removed", &ground::clear_cgroups());
            }
            nextest.run_failed_again(&all.runs)
        }
        _ => Ok(BTreeMap::new()),
    };
    drop(cluster);
    let records = records::read(&run_dir.path.join(ground::RECORDS));
    let mut left = ground::clear(&run_dir.path);
    left.extend(run_dir.in_memory.iter().flat_map(|dir| ground::clear(dir)));
    left.extend(ground::clear_cgroups());

    let all = outcome?;
    let report = Report {
        runs: all.runs,
        counts: all.counts,
        records: records.context("read what the guards noted")?,
        second: second?,
        left,
    };
    report.keep_outputs(&keep)?;
    report.print();
    Ok(if report.is_green() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// What comes before the arguments for nextest.
struct Options<'a> {
    /// Tests share an API server.
    shared_cluster: bool,
    /// The tests that this kind of run is about, as nextest's filters name them. Others do not count as skipped.
    scope: Option<&'a OsString>,
    arguments: &'a [OsString],
}

impl<'a> Options<'a> {
    fn parse(mut arguments: &'a [OsString]) -> Result<Self> {
        let (mut shared_cluster, mut scope) = (true, None);
        loop {
            match arguments {
                [first, rest @ ..] if first == "--no-cluster" => {
                    shared_cluster = false;
                    arguments = rest;
                }
                [first, expression, rest @ ..] if first == "--scope" => {
                    scope = Some(expression);
                    arguments = rest;
                }
                [first] if first == "--scope" => bail!("--scope needs an expression"),
                _ => break,
            }
        }
        Ok(Self {
            shared_cluster,
            scope,
            arguments,
        })
    }
}

struct All {
    runs: BTreeMap<TestName, TestRun>,
    counts: Counts,
}

struct Nextest {
    run_dir: PathBuf,
    in_memory: Option<PathBuf>,
    keep: PathBuf,
    triple: String,
}

impl Nextest {
    fn run_all(&self, scope: Option<&OsString>, arguments: &[OsString]) -> Result<All> {
        let mut counts = match scope {
            None => self.run("default", arguments)?,
            Some(scope) if arguments.is_empty() => {
                let all = [
                    OsString::from("--ignore-default-filter"),
                    "-E".into(),
                    scope.clone(),
                ];
                self.run("default", &all)?
            }
            Some(_) => {
                let all = [OsString::from("--ignore-default-filter")];
                self.run("default", &[&all, arguments].concat())?
            }
        };
        // nextest counts the tests of other kinds of runs, too.
        if let Some(scope) = scope.filter(|_| counts.skipped > 0) {
            counts.skipped = count(scope)?.saturating_sub(counts.selected);
        }
        let runs = results::read(&junit("default"))?;
        ensure!(!runs.is_empty(), "no test ran");
        Ok(All { runs, counts })
    }

    /// Runs failed tests of real parts once more, one after the other.
    fn run_failed_again(
        &self,
        runs: &BTreeMap<TestName, TestRun>,
    ) -> Result<BTreeMap<TestName, SecondRun>> {
        let groups = records::read(&self.run_dir.join(ground::RECORDS))?;
        let again: Vec<&TestName> = runs
            .iter()
            .filter(|(_, run)| run.outcome != Outcome::Passed)
            .map(|(name, _)| name)
            .filter(|name| {
                groups
                    .get(name)
                    .is_some_and(|record| may_run_again(&record.group))
            })
            .collect();
        let mut second = BTreeMap::new();
        for name in again {
            println!("once more, alone: {name}");
            let only = format!("binary_id(={}) & test(={})", name.binary, name.test);
            let arguments = [
                "--ignore-default-filter",
                "-E",
                &only,
                "--test-threads",
                "1",
            ];
            let arguments = arguments.map(OsString::from);
            self.run("again", &arguments)?;
            let run = results::read(&junit("again"))?
                .remove(name)
                .with_context(|| format!("nextest did not run {name} again"))?;
            second.insert(name.clone(), SecondRun(run));
        }
        Ok(second)
    }

    fn run(&self, profile: &str, arguments: &[OsString]) -> Result<Counts> {
        remove(&junit(profile))?;
        let guard = std::env::current_exe().context("find this program")?;
        let runner = format!(
            "target.{}.runner=[{:?}, \"guard\"]",
            self.triple,
            guard.to_string_lossy()
        );
        let mut command = Command::new("cargo");
        command
            .args(["nextest", "run", "--profile", profile, "--no-fail-fast"])
            .args(SELECTION)
            .args(["--config", &runner])
            .args(arguments)
            .env(RUN_DIR, &self.run_dir)
            .env(
                SHARED_CLUSTER,
                self.run_dir.join(ground::SHARED).join(CLUSTER),
            )
            .env(KEEP, &self.keep)
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        if let Some(dir) = &self.in_memory {
            command.env(MEMORY_DIR, dir);
        }
        let mut child = command.spawn().context(
            "run cargo nextest; hack/tool.sh builds it, or: cargo install --locked cargo-nextest",
        )?;
        let mut counts = Counts::default();
        let stderr = child.stderr.take().context("nextest's output")?;
        for line in BufReader::new(stderr).split(b'\n') {
            let line = line.context("read nextest's output")?;
            let line = String::from_utf8_lossy(&line);
            eprintln!("{line}");
            counts.note(&line);
        }
        let status = child.wait().context("wait for nextest")?;
        match status.code() {
            Some(0 | TESTS_FAILED) => Ok(counts),
            _ => bail!("the tests did not all run: cargo nextest ended with {status}"),
        }
    }
}

/// How many tests there are in a scope, those that are never run included.
fn count(scope: &OsString) -> Result<usize> {
    let output = Command::new("cargo")
        .args(["nextest", "list", "--run-ignored", "all"])
        .args(["--message-format", "oneline", "--cargo-quiet"])
        .args(SELECTION)
        .args(["--ignore-default-filter", "-E"])
        .arg(scope)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("run cargo nextest list")?;
    ensure!(
        output.status.success(),
        "cargo nextest list ended with {}",
        output.status
    );
    Ok(String::from_utf8_lossy(&output.stdout).lines().count())
}

/// Whether a test that failed may run a second time: it uses more than its own process and the clock, and looks for nothing that
/// shows only now and then.
fn may_run_again(group: &str) -> bool {
    ![PURE, CLOCK, CRASH].contains(&group)
}

fn junit(profile: &str) -> PathBuf {
    Path::new(STORE).join(profile).join("junit.xml")
}

fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn host_triple() -> Result<String> {
    let output = Command::new("rustc").arg("-vV").output();
    let output = output.context("ask rustc for its version")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV names no host")?.to_owned())
}

/// The etcd and kube-apiserver that tests share, run by the program `test-cluster` beside this one.
struct Cluster(Child);

impl Cluster {
    /// Starts it; tests wait until it is ready.
    fn start(run_dir: &Path) -> Result<Self> {
        let program = std::env::current_exe()
            .context("find this program")?
            .with_file_name("test-cluster");
        let shared = run_dir.join(ground::SHARED);
        let log = fs::File::create(shared.join("cluster.log")).context("make the cluster's log")?;
        let child = Command::new(&program)
            .arg(shared.join(CLUSTER))
            .env("TMPDIR", &shared)
            // It ends when this pipe does.
            .stdin(Stdio::piped())
            .stdout(log.try_clone().context("share the cluster's log")?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        Ok(Self(child))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        if let Err(error) = self.0.wait() {
            eprintln!("wait for the end of the tests' cluster: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pure_tests_and_crashes_never_run_again() {
        assert!(!may_run_again(PURE));
        assert!(!may_run_again(CLOCK));
        assert!(!may_run_again(CRASH));
        assert!(may_run_again("runtime"));
    }
}
