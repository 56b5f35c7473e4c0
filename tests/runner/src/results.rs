//! How each test of a run ended, read from nextest's JUnit report.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::records::TestName;

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It passed.
    Passed,
    /// It failed, or died.
    Failed,
    /// It was ended at its deadline.
    Hung,
}

/// One run of one test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TestRun {
    pub(crate) outcome: Outcome,
    pub(crate) took: Duration,
    /// What it wrote to both outputs, where the report has that.
    pub(crate) output: String,
}

impl TestRun {
    /// The first panic in the output: where, and how its message begins.
    pub(crate) fn reason(&self) -> Option<String> {
        const LONGEST: usize = 400;
        let mut lines = self
            .output
            .lines()
            .skip_while(|line| !(line.starts_with("thread '") && line.contains(" panicked at ")))
            .map(str::trim);
        let place = lines.next()?.split("panicked at ").nth(1)?;
        let message: Vec<&str> = lines
            .take_while(|line| !line.starts_with("note: ") && !line.starts_with("stack backtrace"))
            .take(4)
            .collect();
        let text = format!("{place} {}", message.join(" "));
        Some(text.chars().take(LONGEST).collect())
    }
}

/// What nextest says beside its report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Tests that it set out to run.
    pub(crate) selected: usize,
    /// Tests that it did not select.
    pub(crate) skipped: usize,
}

impl Counts {
    /// Reads a line such as `Starting 5 tests across 2 binaries` or
    /// `Summary [  1.2s] 5 tests run: 5 passed, 2 skipped`.
    pub(crate) fn note(&mut self, line: &str) {
        let line = line.trim_start();
        if let Some(rest) = line.strip_prefix("Starting ")
            && let Some(Ok(count)) = rest.split(' ').next().map(str::parse)
        {
            self.selected = count;
        } else if line.starts_with("Summary [")
            && let Some(before) = line.strip_suffix(" skipped")
            && let Some(Ok(count)) = before.rsplit(' ').next().map(str::parse)
        {
            self.skipped = count;
        }
    }
}

/// Reads a report.
///
/// # Errors
/// When it is missing or not what nextest writes.
pub(crate) fn read(path: &Path) -> Result<BTreeMap<TestName, TestRun>> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("read nextest's report {}", path.display()))?;
    parse(&text).with_context(|| format!("read nextest's report {}", path.display()))
}

fn parse(text: &str) -> Result<BTreeMap<TestName, TestRun>> {
    let document = roxmltree::Document::parse(text)?;
    let mut runs = BTreeMap::new();
    for case in document
        .descendants()
        .filter(|node| node.has_tag_name("testcase"))
    {
        let attribute = |name: &str| {
            case.attribute(name)
                .with_context(|| format!("a testcase has no {name}"))
        };
        let name = TestName {
            binary: attribute("classname")?.to_owned(),
            test: attribute("name")?.to_owned(),
        };
        let failure = case
            .children()
            .find(|node| node.has_tag_name("failure") || node.has_tag_name("error"));
        let outcome = match failure {
            None => Outcome::Passed,
            Some(failure)
                if failure
                    .attribute("type")
                    .is_some_and(|kind| kind.contains("timeout")) =>
            {
                Outcome::Hung
            }
            Some(_) => Outcome::Failed,
        };
        let output = case
            .children()
            .filter(|node| node.has_tag_name("system-out") || node.has_tag_name("system-err"))
            .filter_map(|node| node.text())
            .collect::<Vec<_>>()
            .join("\n");
        let took = Duration::try_from_secs_f64(attribute("time")?.parse()?)?;
        runs.insert(
            name,
            TestRun {
                outcome,
                took,
                output,
            },
        );
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_times_and_outputs_are_read() {
        let report = r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="nextest-run" tests="3" failures="2" errors="0" time="4.5">
    <testsuite name="holdfast::cli" tests="3" disabled="0" errors="0" failures="2">
        <testcase name="good" classname="holdfast::cli" timestamp="2026-01-01T00:00:00Z" time="0.250"/>
        <testcase name="m::bad" classname="holdfast::cli" timestamp="2026-01-01T00:00:00Z" time="1">
            <failure message="thread panicked" type="test failure with exit code 101">a &lt; b</failure>
            <system-out>out</system-out>
            <system-err>err</system-err>
        </testcase>
        <testcase name="slow" classname="holdfast::cli" timestamp="2026-01-01T00:00:00Z" time="3">
            <failure type="test timeout"/>
        </testcase>
    </testsuite>
</testsuites>"#;
        let runs = parse(report).unwrap();
        let of = |test: &str| {
            &runs[&TestName {
                binary: "holdfast::cli".to_owned(),
                test: test.to_owned(),
            }]
        };
        assert_eq!(of("good").outcome, Outcome::Passed);
        assert_eq!(of("good").took, Duration::from_millis(250));
        assert_eq!(of("m::bad").outcome, Outcome::Failed);
        assert_eq!(of("m::bad").output, "out\nerr");
        assert_eq!(of("slow").outcome, Outcome::Hung);
    }

    #[test]
    fn a_failure_has_a_reason_of_some_lines() {
        let of = |output: &str| {
            let run = TestRun {
                outcome: Outcome::Failed,
                took: Duration::ZERO,
                output: output.to_owned(),
            };
            run.reason()
        };
        let output = "some\noutput\nthread 'a::b' (17) panicked at tests/a.rs:7:5:\nassertion failed\n  left: 1\n right: 2\n\
                      note: run with `RUST_BACKTRACE=1`";
        assert_eq!(
            of(output).as_deref(),
            Some("tests/a.rs:7:5: assertion failed left: 1 right: 2")
        );
        let long = format!("thread 'a' panicked at x.rs:1:1:\n{}", "y".repeat(9000));
        assert_eq!(of(&long).map(|reason| reason.len()), Some(400));
        assert_eq!(of("error: it was killed"), None);
    }

    #[test]
    fn tests_are_counted_as_nextest_says() {
        let mut counts = Counts::default();
        for line in [
            "    Starting 17 tests across 3 binaries (12 tests skipped)",
            "        PASS [   0.1s] x 3 skipped",
            "     Summary [   4.502s] 5/17 tests run: 4 passed, 1 failed, 12 skipped",
        ] {
            counts.note(line);
        }
        let expected = Counts {
            selected: 17,
            skipped: 12,
        };
        assert_eq!(counts, expected);
    }

    #[test]
    fn what_is_no_report_is_refused() {
        assert!(parse("<testsuites><testcase name='x'/></testsuites>").is_err());
        assert!(parse("nothing").is_err());
        assert!(read(Path::new("/nonexistent/junit.xml")).is_err());
    }
}
