//! What a run says at its end: a table of suites, the slowest tests, what failed, what was flaky, one line that counts.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::records::{Record, TestName};
use crate::results::{Counts, Outcome, TestRun};

/// How many of the slowest tests are named.
const SLOWEST: usize = 20;

/// The run of a failed test that was repeated alone.
#[derive(Clone, Debug)]
pub(crate) struct SecondRun(pub(crate) TestRun);

/// All that is known of a run.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) runs: BTreeMap<TestName, TestRun>,
    pub(crate) counts: Counts,
    pub(crate) records: BTreeMap<TestName, Record>,
    pub(crate) second: BTreeMap<TestName, SecondRun>,
    /// What the run as a whole left behind.
    pub(crate) left: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Suite {
    tests: usize,
    took: Duration,
    processor: Duration,
}

impl Report {
    /// Whether every test has passed, if only the second time, and nothing was left behind.
    pub(crate) fn is_green(&self) -> bool {
        self.failed().next().is_none()
            && self.missing() == 0
            && self.left.is_empty()
            && self.leavers().next().is_none()
    }

    /// Tests that were to run and did not, since the run was interrupted.
    fn missing(&self) -> usize {
        self.counts.selected.saturating_sub(self.runs.len())
    }

    fn failed(&self) -> impl Iterator<Item = (&TestName, &TestRun)> {
        self.runs
            .iter()
            .filter(|(name, run)| run.outcome != Outcome::Passed && !self.passed_again(name))
    }

    fn flaky(&self) -> impl Iterator<Item = &TestName> {
        self.runs
            .iter()
            .filter(|(name, run)| run.outcome != Outcome::Passed && self.passed_again(name))
            .map(|(name, _)| name)
    }

    fn passed_again(&self, name: &TestName) -> bool {
        self.second
            .get(name)
            .is_some_and(|second| second.0.outcome == Outcome::Passed)
    }

    /// Tests that passed and left something behind. One that failed is red already, or has left nothing the second
    /// time.
    fn leavers(&self) -> impl Iterator<Item = (&TestName, &Record)> {
        self.records
            .iter()
            .filter(|(name, record)| !record.left.is_empty() && self.has_passed(name))
    }

    fn has_passed(&self, name: &TestName) -> bool {
        let first = self.runs.get(name);
        first.is_some_and(|run| run.outcome == Outcome::Passed) || self.passed_again(name)
    }

    /// Writes both outputs of each test that failed at first.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub(crate) fn keep_outputs(&self, dir: &Path) -> Result<()> {
        let failed = self
            .runs
            .iter()
            .filter(|(_, run)| run.outcome != Outcome::Passed);
        for (name, run) in failed {
            let second = self.second.get(name).map(|second| &second.0);
            for (which, run) in [("first", Some(run)), ("second", second)] {
                let Some(run) = run else { continue };
                let file = format!("{}.{}.{which}.log", name.binary, name.test);
                let file = dir.join(file.replace("::", "."));
                fs::write(&file, &run.output)
                    .with_context(|| format!("write {}", file.display()))?;
            }
        }
        Ok(())
    }

    /// Prints all of it.
    pub(crate) fn print(&self) {
        println!(
            "\n{}\n{}\n{}{}",
            self.suites(),
            self.slowest(),
            self.reasons(),
            self.verdict()
        );
    }

    fn suites(&self) -> String {
        let mut suites: BTreeMap<&str, Suite> = BTreeMap::new();
        let mut whole = Suite::default();
        for (name, run) in &self.runs {
            let processor = self.processor(name);
            for suite in [suites.entry(&name.binary).or_default(), &mut whole] {
                suite.tests += 1;
                suite.took += run.took;
                suite.processor += processor;
            }
        }
        let mut rows: Vec<(&str, Suite)> = suites.into_iter().collect();
        rows.sort_by_key(|(_, suite)| std::cmp::Reverse(suite.took));
        rows.push(("all", whole));
        let mut lines = vec![format!(
            "{:<32} {:>7} {:>9} {:>9}",
            "suite", "tests", "seconds", "CPU s"
        )];
        for (name, suite) in rows {
            let (took, processor) = (suite.took.as_secs_f64(), suite.processor.as_secs_f64());
            lines.push(format!(
                "{name:<32} {:>7} {took:>9.1} {processor:>9.1}",
                suite.tests
            ));
        }
        lines.join("\n") + "\n"
    }

    fn slowest(&self) -> String {
        let mut runs: Vec<_> = self.runs.iter().collect();
        runs.sort_by_key(|(_, run)| std::cmp::Reverse(run.took));
        let mut lines = vec![format!("{:>9} {:>9}  slowest tests", "seconds", "CPU s")];
        for (name, run) in runs.into_iter().take(SLOWEST) {
            let (took, processor) = (run.took.as_secs_f64(), self.processor(name).as_secs_f64());
            lines.push(format!("{took:>9.1} {processor:>9.1}  {name}"));
        }
        lines.join("\n") + "\n"
    }

    /// Where and how each test failed, in a line or two: whoever reads only the end of a run knows that much.
    fn reasons(&self) -> String {
        let mut lines = Vec::new();
        for (name, run) in &self.runs {
            if run.outcome == Outcome::Passed {
                continue;
            }
            let second = self.second.get(name).map(|second| &second.0);
            for (which, run) in [("", Some(run)), (", alone", second)] {
                if let Some(reason) = run.and_then(TestRun::reason) {
                    lines.push(format!("{name}{which}: {reason}\n"));
                }
            }
        }
        if !lines.is_empty() {
            lines.push("\n".to_owned());
        }
        lines.concat()
    }

    fn processor(&self, name: &TestName) -> Duration {
        let record = self.records.get(name);
        record
            .and_then(|record| record.processor)
            .unwrap_or_default()
    }

    fn verdict(&self) -> String {
        let mut lines = Vec::new();
        for (name, record) in self.leavers() {
            for found in &record.left {
                lines.push(format!("left behind by {name}: {found}"));
            }
        }
        for found in &self.left {
            lines.push(format!("left behind: {found}"));
        }
        let mut failed = 0;
        for (name, run) in self.failed() {
            failed += 1;
            let twice = if self.second.contains_key(name) {
                ", and failed again alone"
            } else {
                ""
            };
            lines.push(match run.outcome {
                Outcome::Hung => {
                    let seconds = run.took.as_secs();
                    format!("HUNG {name} (ended at its deadline, after {seconds} s{twice})")
                }
                _ => format!("FAILED {name}{twice}"),
            });
        }
        if self.missing() > 0 {
            lines.push(format!("{} tests did not run", self.missing()));
        }
        for name in self.flaky() {
            lines.push(format!("FLAKY {name}"));
        }
        let passed = self.runs.len() - failed;
        lines.push(format!(
            "{passed} passed, {failed} failed, {} skipped",
            self.counts.skipped
        ));
        lines.join("\n")
    }
}

/// Prints what was found on the machine, a line each.
pub(crate) fn print_found(what: &str, found: &[String]) {
    for thing in found {
        println!("{what} {thing}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(test: &str) -> TestName {
        TestName {
            binary: "holdfast::cluster".to_owned(),
            test: test.to_owned(),
        }
    }

    fn run(outcome: Outcome, seconds: u64) -> TestRun {
        TestRun {
            outcome,
            took: Duration::from_secs(seconds),
            output: format!("{seconds} s"),
        }
    }

    fn report(runs: &[(&str, Outcome)], second: &[(&str, Outcome)]) -> Report {
        Report {
            runs: runs.iter().map(|(n, o)| (name(n), run(*o, 3))).collect(),
            counts: Counts {
                selected: runs.len(),
                skipped: 0,
            },
            records: BTreeMap::new(),
            second: second
                .iter()
                .map(|(n, o)| (name(n), SecondRun(run(*o, 1))))
                .collect(),
            left: Vec::new(),
        }
    }

    use Outcome::{Failed, Hung, Passed};

    #[test]
    fn a_test_that_passes_the_second_time_is_flaky_and_the_run_green() {
        let report = report(&[("a", Passed), ("b", Failed)], &[("b", Passed)]);
        assert!(report.is_green());
        assert_eq!(
            report.verdict(),
            "FLAKY holdfast::cluster b\n2 passed, 0 failed, 0 skipped"
        );
    }

    #[test]
    fn a_test_that_fails_twice_fails_the_run() {
        let report = report(&[("a", Passed), ("b", Failed)], &[("b", Failed)]);
        assert!(!report.is_green());
        assert_eq!(
            report.verdict(),
            "FAILED holdfast::cluster b, and failed again alone\n1 passed, 1 failed, 0 skipped"
        );
    }

    #[test]
    fn the_reasons_of_both_runs_are_told() {
        let mut report = report(&[("a", Passed), ("b", Failed)], &[("b", Failed)]);
        assert_eq!(report.reasons(), "", "nothing is known");
        let panic = |n| format!("thread 'b' panicked at b.rs:{n}:1:\nno");
        report.runs.get_mut(&name("b")).unwrap().output = panic(1);
        report.second.get_mut(&name("b")).unwrap().0.output = panic(2);
        assert_eq!(
            report.reasons(),
            "holdfast::cluster b: b.rs:1:1: no\nholdfast::cluster b, alone: b.rs:2:1: no\n\n"
        );
    }

    #[test]
    fn a_pure_test_that_fails_and_one_that_hangs_are_named() {
        let report = report(&[("a", Failed), ("b", Hung)], &[]);
        assert!(!report.is_green());
        assert_eq!(
            report.verdict(),
            "FAILED holdfast::cluster a\n\
             HUNG holdfast::cluster b (ended at its deadline, after 3 s)\n\
             0 passed, 2 failed, 0 skipped"
        );
    }

    #[test]
    fn what_is_left_behind_fails_the_run_and_is_named() {
        let mut report = report(&[("a", Passed)], &[]);
        report.records.insert(
            name("a"),
            Record {
                left: vec!["mount /m".to_owned()],
                ..Record::default()
            },
        );
        assert!(!report.is_green());
        assert!(
            report
                .verdict()
                .starts_with("left behind by holdfast::cluster a: mount /m\n")
        );
        report.records.clear();
        assert!(report.is_green());
        report.left.push("cgroup /x".to_owned());
        assert!(!report.is_green());
    }

    #[test]
    fn a_run_that_was_interrupted_is_not_green() {
        let mut report = report(&[("a", Passed)], &[]);
        report.counts.selected = 3;
        assert!(!report.is_green());
        assert_eq!(
            report.verdict(),
            "2 tests did not run\n1 passed, 0 failed, 0 skipped"
        );
    }

    #[test]
    fn both_outputs_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let report = report(&[("m::b", Failed)], &[("m::b", Passed)]);
        report.keep_outputs(dir.path()).unwrap();
        let read = |which: &str| {
            let file = format!("holdfast.cluster.m.b.{which}.log");
            fs::read_to_string(dir.path().join(file)).unwrap()
        };
        assert_eq!(
            (read("first"), read("second")),
            ("3 s".to_owned(), "1 s".to_owned())
        );
    }

    #[test]
    fn the_table_adds_up() {
        let mut report = report(&[("a", Passed), ("b", Passed)], &[]);
        for test in ["a", "b"] {
            report.records.insert(
                name(test),
                Record {
                    processor: Some(Duration::from_millis(1500)),
                    ..Record::default()
                },
            );
        }
        let table = report.suites();
        let rows: Vec<Vec<&str>> = table
            .lines()
            .map(|l| l.split_whitespace().collect())
            .collect();
        assert_eq!(rows[1], ["holdfast::cluster", "2", "6.0", "3.0"]);
        assert_eq!(rows[2], ["all", "2", "6.0", "3.0"]);
        assert_eq!(report.slowest().lines().count(), 3);
    }
}
