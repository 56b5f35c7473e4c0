//! What the guards note about each test, in one file per run: a line when a test begins and one when it has ended.
//!
//! nextest's report has neither the test's group nor its processor time, and a guard that was killed with its test
//! has noted the beginning only.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;
use std::time::Duration;

/// A test by the name of its binary in nextest (`holdfast::cluster`) and its own (`rows::r1_…`).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TestName {
    pub(crate) binary: String,
    pub(crate) test: String,
}

impl std::fmt::Display for TestName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.binary, self.test)
    }
}

/// What is known of a test's last run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    /// nextest's group, which says what the test needs of the machine.
    pub(crate) group: String,
    /// Processor time of the test and of all processes that it started, once it has ended.
    pub(crate) processor: Option<Duration>,
    /// What it left behind.
    pub(crate) left: Vec<String>,
}

/// Appends the line of a beginning.
pub(crate) fn note_begin(file: &Path, name: &TestName, group: &str) -> io::Result<()> {
    append(file, &["begin", &name.binary, &name.test, group])
}

/// Appends the line of an end.
pub(crate) fn note_end(
    file: &Path,
    name: &TestName,
    processor: Duration,
    left: &[String],
) -> io::Result<()> {
    let millis = processor.as_millis().to_string();
    let mut fields = vec!["end", &name.binary, &name.test, &millis];
    let left: Vec<String> = left.iter().map(|l| l.replace(['\t', '\n'], " ")).collect();
    fields.extend(left.iter().map(String::as_str));
    append(file, &fields)
}

fn append(file: &Path, fields: &[&str]) -> io::Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).open(file)?;
    // One write: lines of guards that end at the same time do not mix.
    file.write_all(format!("{}\n", fields.join("\t")).as_bytes())
}

/// Reads the file; one that is missing has no records.
pub(crate) fn read(file: &Path) -> io::Result<BTreeMap<TestName, Record>> {
    match fs::read_to_string(file) {
        Ok(text) => Ok(parse(&text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(error),
    }
}

fn parse(text: &str) -> BTreeMap<TestName, Record> {
    let mut records: BTreeMap<TestName, Record> = BTreeMap::new();
    for line in text.lines() {
        let mut fields = line.split('\t');
        let (Some(what), Some(binary), Some(test), Some(value)) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let name = TestName {
            binary: binary.to_owned(),
            test: test.to_owned(),
        };
        let record = records.entry(name).or_default();
        match what {
            "begin" => {
                *record = Record {
                    group: value.to_owned(),
                    ..Record::default()
                };
            }
            "end" => {
                record.processor = value.parse().ok().map(Duration::from_millis);
                record.left = fields.map(str::to_owned).collect();
            }
            _ => {}
        }
    }
    records
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_read_as_it_was_noted() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("records");
        let name = |test: &str| TestName {
            binary: "holdfast::cli".to_owned(),
            test: test.to_owned(),
        };
        assert!(read(&file).unwrap().is_empty());
        note_begin(&file, &name("a::b"), "pure").unwrap();
        note_begin(&file, &name("hangs"), "runtime").unwrap();
        let left = ["process 7: sleep\t9".to_owned(), "file x".to_owned()];
        note_end(&file, &name("a::b"), Duration::from_millis(1500), &left).unwrap();
        let records = read(&file).unwrap();
        assert_eq!(records.len(), 2);
        assert_eq!(
            records[&name("a::b")],
            Record {
                group: "pure".to_owned(),
                processor: Some(Duration::from_millis(1500)),
                left: vec!["process 7: sleep 9".to_owned(), "file x".to_owned()],
            }
        );
        assert_eq!(records[&name("hangs")].processor, None);
    }

    #[test]
    fn a_second_run_counts_instead_of_the_first() {
        let text = "begin\tb\tt\truntime\nend\tb\tt\t20\tfile x\nbegin\tb\tt\truntime\n";
        let records = parse(text);
        let record = records.values().next().unwrap();
        assert_eq!((record.processor, record.left.len()), (None, 0));
    }
}
