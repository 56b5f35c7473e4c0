//! The node log query: what is asked for, and whether it makes sense. Upstream: `nodeLogQuery`.

use std::fmt;

use jiff::Timestamp;

const MAX_SERVICE: usize = 256;
const MAX_LINES: i64 = 100_000;

/// Errors of a query, formatted as upstream's aggregate of field errors.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Problems(Vec<String>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_slice() {
            [one] => f.write_str(one),
            many => write!(f, "[{}]", many.join(", ")),
        }
    }
}

impl Problems {
    fn invalid(&mut self, field: &str, value: impl fmt::Display, detail: impl fmt::Display) {
        let text = format!("{field}: Invalid value: {value}: {detail}");
        self.0.push(text);
    }

    fn or<T>(self, value: T) -> Result<T, Self> {
        if self.0.is_empty() {
            Ok(value)
        } else {
            Err(self)
        }
    }
}

/// Options beside what is queried.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Options {
    pub(super) since: Option<Timestamp>,
    pub(super) until: Option<Timestamp>,
    pub(super) tail: Option<i64>,
    pub(super) boot: Option<i64>,
    pub(super) pattern: String,
}

/// A query.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NodeLogQuery {
    pub(super) services: Vec<String>,
    files: Vec<String>,
    pub(super) options: Options,
}

/// Strings as Go prints them in field errors.
fn list(values: &[String]) -> String {
    serde_json::to_string(values).unwrap_or_default()
}

impl NodeLogQuery {
    /// Reads a query; `None` when nothing is asked for.
    ///
    /// # Errors
    /// The parts that cannot be read.
    pub(super) fn parse(query: &str) -> Result<Option<Self>, Problems> {
        let pairs: Vec<_> = form_urlencoded::parse(query.as_bytes()).collect();
        let value = |name: &str| {
            let first = pairs.iter().find(|(n, _)| n == name).map(|(_, v)| &**v);
            first.filter(|value| !value.is_empty())
        };
        let mut problems = Problems(Vec::new());
        let mut this = Self::default();
        let queries: Vec<String> = pairs
            .iter()
            .filter(|(name, _)| name == "query")
            .map(|(_, value)| value.clone().into_owned())
            .collect();
        for query in &queries {
            // A separator tells a file from a service.
            if query.contains(['/', '\\']) {
                this.files.push(query.clone());
            } else if !query.trim().is_empty() {
                this.services.push(query.clone());
            }
        }
        if !queries.is_empty() && this.files.is_empty() && this.services.is_empty() {
            problems.invalid("query", list(&queries), "query cannot be empty");
        }
        for (field, target) in [
            ("sinceTime", &mut this.options.since),
            ("untilTime", &mut this.options.until),
        ] {
            if let Some(text) = value(field) {
                match text.parse() {
                    Ok(time) => *target = Some(time),
                    Err(_) => problems.invalid(field, format!("{text:?}"), "invalid time format"),
                }
            }
        }
        for (field, target) in [
            ("boot", &mut this.options.boot),
            ("tailLines", &mut this.options.tail),
        ] {
            if let Some(text) = value(field) {
                match text.parse() {
                    Ok(number) => *target = Some(number),
                    Err(_) => {
                        let detail = format!("strconv.Atoi: parsing {text:?}: invalid syntax");
                        problems.invalid(field, format!("{text:?}"), detail);
                    }
                }
            }
        }
        value("pattern")
            .unwrap_or_default()
            .clone_into(&mut this.options.pattern);
        let this = (this != Self::default()).then_some(this);
        problems.or(this)
    }

    /// Checks the query. The existence of a file is checked when it is opened.
    ///
    /// # Errors
    /// The invalid fields, with the reasons.
    pub(super) fn validate(&self) -> Result<(), Problems> {
        let mut problems = Problems(Vec::new());
        for service in &self.services {
            if let Err(detail) = safe_service_name(service) {
                problems.invalid("query", format!("{service:?}"), detail);
            }
        }
        let options = &self.options;
        let files = &self.files;
        if files.is_empty() && self.services.is_empty() {
            let text = "query: Required value: cannot be empty with options";
            problems.0.push(text.to_owned());
        } else if !files.is_empty() && !self.services.is_empty() {
            let both = format!("[{}], [{}]", files.join(" "), self.services.join(" "));
            problems.invalid(
                "query",
                format!("{both:?}"),
                "cannot specify a file and service",
            );
        } else if files.len() > 1 {
            problems.invalid("query", list(files), "cannot specify more than one file");
        } else if files.len() == 1 && *options != Options::default() {
            problems.invalid("query", list(files), "cannot specify file with options");
        }
        if let (Some(since), Some(until)) = (options.since, options.until)
            && since > until
        {
            problems.invalid(
                "untilTime",
                format!("\"{until}\""),
                "must be after `sinceTime`",
            );
        }
        if let Some(boot) = options.boot.filter(|boot| *boot > 0) {
            problems.invalid("boot", boot, "must be less than 1");
        }
        if let Some(lines) = options
            .tail
            .filter(|lines| !(0..=MAX_LINES).contains(lines))
        {
            let detail = format!("must be between 0 and {MAX_LINES}, inclusive");
            problems.invalid("tailLines", lines, detail);
        }
        if let Err(error) = regex::Regex::new(&options.pattern) {
            let error = error.to_string();
            let detail = error.lines().last().unwrap_or_default().to_owned();
            problems.invalid("pattern", format!("{:?}", options.pattern), detail);
        }
        problems.or(())
    }

    /// The file that is asked for, if it is one.
    pub(super) fn file(&self) -> Option<&str> {
        self.files.first().map(String::as_str)
    }
}

fn safe_service_name(name: &str) -> Result<(), &'static str> {
    if name.len() > MAX_SERVICE {
        return Err("length must be less than 256");
    }
    let safe = |b: u8| b.is_ascii_alphanumeric() || b"-_.:@".contains(&b);
    if !name.bytes().all(safe) {
        return Err("input contains unsupported characters");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(query: &str) -> String {
        let parsed = NodeLogQuery::parse(query);
        match parsed {
            Err(problems) => problems.to_string(),
            Ok(query) => query.unwrap().validate().unwrap_err().to_string(),
        }
    }

    #[test]
    fn nothing_asked_is_no_query() {
        assert_eq!(NodeLogQuery::parse(""), Ok(None));
        assert_eq!(NodeLogQuery::parse("pretty=true&tailLines="), Ok(None));
    }

    #[test]
    fn a_separator_makes_it_a_file() {
        let query = NodeLogQuery::parse("query=%2Ffoo.log").unwrap().unwrap();
        assert_eq!(query.file(), Some("/foo.log"));
        assert!(query.validate().is_ok());
        let query = NodeLogQuery::parse("query=kubelet&query=foo.log&tailLines=3&boot=-1")
            .unwrap()
            .unwrap();
        assert_eq!(query.services, ["kubelet", "foo.log"]);
        assert_eq!(
            (query.options.tail, query.options.boot),
            (Some(3), Some(-1))
        );
        assert!(query.validate().is_ok());
    }

    #[test]
    fn problems_are_upstreams() {
        for (query, says) in [
            (
                "query=",
                r#"query: Invalid value: [""]: query cannot be empty"#,
            ),
            (
                "query=+&query=",
                r#"query: Invalid value: [" ",""]: query cannot be empty"#,
            ),
            (
                "query=a&sinceTime=x",
                r#"sinceTime: Invalid value: "x": invalid time format"#,
            ),
            (
                "query=a&boot=x",
                r#"boot: Invalid value: "x": strconv.Atoi: parsing "x": invalid syntax"#,
            ),
            (
                "tailLines=1",
                "query: Required value: cannot be empty with options",
            ),
            (
                "query=a%3Bb",
                r#"query: Invalid value: "a;b": input contains unsupported characters"#,
            ),
            (
                "query=a%20-x",
                r#"query: Invalid value: "a -x": input contains unsupported characters"#,
            ),
            (
                "query=a&query=/b",
                r#"query: Invalid value: "[/b], [a]": cannot specify a file and service"#,
            ),
            (
                "query=/a&query=/b",
                r#"query: Invalid value: ["/a","/b"]: cannot specify more than one file"#,
            ),
            (
                "query=/a&boot=0",
                r#"query: Invalid value: ["/a"]: cannot specify file with options"#,
            ),
            (
                "query=a&boot=1",
                "boot: Invalid value: 1: must be less than 1",
            ),
            (
                "query=a&tailLines=100001",
                "tailLines: Invalid value: 100001: must be between 0 and 100000, inclusive",
            ),
            (
                "query=a&sinceTime=2026-01-02T00:00:00Z&untilTime=2026-01-01T00:00:00Z&boot=2",
                "[untilTime: Invalid value: \"2026-01-01T00:00:00Z\": must be after `sinceTime`, \
                 boot: Invalid value: 2: must be less than 1]",
            ),
        ] {
            assert_eq!(problem(query), says, "{query}");
        }
        assert!(problem("query=a&pattern=%28").starts_with(r#"pattern: Invalid value: "(": "#));
        assert!(problem(&format!("query={}", "a".repeat(257))).contains("length must be"));
    }
}
