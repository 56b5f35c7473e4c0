//! Findings of `holdfast check`, and their output.

use std::fmt;
use std::path::Path;

use serde_json::{Value, json};

use crate::admin::view::API_VERSION;
use crate::cli::CliError;
use crate::cli::output::printable;
use crate::config::manifest::{ManifestError, Position};

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Severity {
    /// The node rejects it.
    Error,
    /// The node takes it, but it does not do what its author may expect.
    Warning,
}

impl Severity {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
        }
    }
}

/// One thing that was found.
#[derive(Clone, Debug)]
pub(super) struct Finding {
    /// The file as it was named.
    pub(super) file: String,
    /// Line and column, from 1; 0 when unknown.
    pub(super) at: Position,
    pub(super) severity: Severity,
    /// Object that it concerns; empty for the file itself.
    pub(super) object: String,
    /// Cause and remedy.
    pub(super) message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable(&self.file))?;
        for number in [self.at.line, self.at.column] {
            if number == 0 {
                break;
            }
            write!(f, ":{number}")?;
        }
        write!(f, ": {}: ", self.severity.as_str())?;
        if !self.object.is_empty() {
            write!(f, "{}: ", printable(&self.object))?;
        }
        f.write_str(&printable(&self.message))
    }
}

/// A file, and what was found in it.
#[derive(Clone, Debug, Default)]
pub(super) struct Checked {
    pub(super) file: String,
    /// Valid objects in it.
    pub(super) objects: Vec<String>,
    pub(super) findings: Vec<Finding>,
    /// It was named and does not exist.
    pub(super) absent: bool,
}

impl Checked {
    pub(super) fn of(path: &Path) -> Self {
        Self {
            file: path.to_string_lossy().into_owned(),
            ..Self::default()
        }
    }

    /// Adds a finding at a place in the file.
    pub(super) fn find(&mut self, severity: Severity, at: Position, object: &str, message: String) {
        self.findings.push(Finding {
            file: self.file.clone(),
            at,
            severity,
            object: object.to_owned(),
            message,
        });
    }

    /// Adds an error without a place.
    pub(super) fn error(&mut self, object: &str, message: String) {
        self.find(Severity::Error, Position::default(), object, message);
    }

    /// Adds a warning without a place.
    pub(super) fn warning(&mut self, object: &str, message: String) {
        self.find(Severity::Warning, Position::default(), object, message);
    }

    /// Adds what is wrong with a manifest.
    pub(super) fn manifest(&mut self, object: &str, error: &ManifestError) {
        for problem in error.problems() {
            let message = match problem.field.as_str() {
                "" => problem.message,
                field => format!("{field}: {}", problem.message),
            };
            self.find(Severity::Error, problem.at, object, message);
        }
    }

    fn is_good(&self) -> bool {
        self.findings.iter().all(|f| f.severity != Severity::Error)
    }
}

/// All files, in the order in which they were checked.
#[derive(Debug, Default)]
pub(super) struct Report {
    files: Vec<Checked>,
}

impl Report {
    pub(super) fn add(&mut self, checked: Checked) {
        self.files.push(checked);
    }

    /// Returns the number of files, which is also the number of the next one.
    pub(super) fn len(&self) -> usize {
        self.files.len()
    }

    /// The file of that number.
    pub(super) fn file(&mut self, number: usize) -> Option<&mut Checked> {
        self.files.get_mut(number)
    }

    /// One line for each finding and, unless `quiet`, for each file that is good.
    pub(super) fn text(&self, quiet: bool) -> String {
        let mut text = String::new();
        for file in &self.files {
            for finding in &file.findings {
                text.push_str(&format!("{finding}\n"));
            }
            if file.is_good() && !quiet {
                let objects = file.objects.join(", ");
                let objects = match objects.as_str() {
                    "" => String::new(),
                    objects => format!(" ({})", printable(objects)),
                };
                text.push_str(&format!("{}: ok{objects}\n", printable(&file.file)));
            }
        }
        text
    }

    /// The same for programs.
    pub(super) fn json(&self) -> Value {
        let known = |number: u64| (number > 0).then_some(number);
        let files = self.files.iter().map(
            |file| json!({ "file": file.file, "ok": file.is_good(), "objects": file.objects }),
        );
        let findings = self.files.iter().flat_map(|file| &file.findings);
        let findings = findings.map(|finding| {
            json!({
                "file": finding.file,
                "line": known(finding.at.line),
                "column": known(finding.at.column),
                "severity": finding.severity.as_str(),
                "object": finding.object,
                "message": finding.message,
            })
        });
        json!({
            "apiVersion": API_VERSION,
            "kind": "CheckResult",
            "files": files.collect::<Vec<_>>(),
            "findings": findings.collect::<Vec<_>>(),
        })
    }

    /// Decides how the command ends.
    ///
    /// # Errors
    /// When the node would reject something, or a file does not exist.
    pub(super) fn verdict(&self) -> anyhow::Result<()> {
        let bad: Vec<_> = self.files.iter().filter(|file| !file.is_good()).collect();
        let absent: Vec<_> = bad.iter().filter(|file| file.absent).collect();
        if bad.is_empty() {
            return Ok(());
        }
        if absent.len() == bad.len() {
            let names: Vec<_> = absent.iter().map(|file| printable(&file.file)).collect();
            let text = format!("there is no {}; correct the path", names.join(", "));
            return Err(CliError::NotFound(text).into());
        }
        anyhow::bail!(
            "this node would reject {} of {} files; correct the listed errors",
            bad.len(),
            self.files.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(file: &str) -> Checked {
        Checked::of(Path::new(file))
    }

    #[test]
    fn a_finding_has_the_place_that_is_known_on_one_line() {
        let mut file = checked("a\nb.yaml");
        let at = |line, column| Position { line, column };
        file.find(
            Severity::Error,
            at(3, 5),
            "Pod default/web",
            "spec: x; y".into(),
        );
        file.find(Severity::Warning, at(3, 0), "", "z".into());
        let mut report = Report::default();
        report.add(file);
        let mut good = checked("good.yaml");
        good.objects.push("Pod default/web".to_owned());
        report.add(good);
        let bad = "a\\nb.yaml:3:5: error: Pod default/web: spec: x; y\na\\nb.yaml:3: warning: z\n";
        assert_eq!(report.text(true), bad);
        assert_eq!(
            report.text(false),
            format!("{bad}good.yaml: ok (Pod default/web)\n")
        );
        assert!(report.json()["findings"][1]["column"].is_null());
    }

    #[test]
    fn a_rejection_counts_more_than_a_file_that_does_not_exist() {
        let is_not_found = |report: &Report| {
            let error = report.verdict().unwrap_err();
            matches!(error.downcast_ref(), Some(CliError::NotFound(_)))
        };
        let mut report = Report::default();
        let mut warned = checked("warned");
        warned.warning("", "x".into());
        report.add(warned);
        assert!(report.verdict().is_ok());
        let mut absent = checked("absent");
        absent.absent = true;
        absent.error("", "cannot be read".into());
        report.add(absent);
        assert!(is_not_found(&report));
        let mut rejected = checked("rejected");
        rejected.error("", "x".into());
        report.add(rejected);
        assert!(!is_not_found(&report));
    }
}
