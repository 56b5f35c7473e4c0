//! The text formats of metrics: OpenMetrics 1.0, in which everything is written, and Prometheus' 0.0.4, into which it is
//! turned for those who do not ask for the other.
//!
//! **Invariant:** the samples of a family stand together, below its head; a family without samples is left out.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus' text format 0.0.4.
    Text,
}

impl Format {
    /// By the `Accept` of a request: OpenMetrics for those who ask for it and do not prefer the other.
    pub fn negotiate(accept: Option<&str>) -> Self {
        let mut best = (0.0_f32, Self::Text);
        for range in accept.unwrap_or_default().split(',') {
            let mut parts = range.split(';').map(str::trim);
            let format = match parts.next() {
                Some("application/openmetrics-text") => Self::OpenMetrics,
                Some("text/plain" | "text/*" | "*/*") => Self::Text,
                _ => continue,
            };
            let mut quality = 1.0;
            let mut known = true;
            for parameter in parts {
                match parameter.split_once('=') {
                    Some(("q", value)) => quality = value.trim().parse().unwrap_or(0.0),
                    Some(("version", version)) if format == Self::OpenMetrics => {
                        known = matches!(version.trim_matches('"'), "1.0.0" | "0.0.1");
                    }
                    _ => {}
                }
            }
            if known && quality > best.0 {
                best = (quality, format);
            }
        }
        best.1
    }

    /// The value of `Content-Type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// Brings a text in OpenMetrics into this format.
    pub fn of(self, open_metrics: String) -> String {
        match self {
            Self::OpenMetrics => open_metrics,
            Self::Text => to_text(&open_metrics),
        }
    }
}

/// Type of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows. The samples' names end in `_total`, the family's does not.
    Counter,
    /// Goes up and down.
    Gauge,
    /// A counter of upstream's whose name does not end in `_total`.
    Unknown,
}

/// A text that is being written.
#[derive(Clone, Debug, Default)]
pub struct Exposition {
    text: String,
}

impl Exposition {
    /// Begins a family.
    pub fn family<'a>(&'a mut self, name: &'a str, kind: Kind, help: &'a str) -> Family<'a> {
        Family {
            text: &mut self.text,
            name,
            kind,
            help,
            begun: false,
        }
    }

    /// Families in OpenMetrics that were written elsewhere; their end mark is dropped.
    pub fn append(&mut self, open_metrics: &str) {
        let text = open_metrics.strip_suffix("# EOF\n").unwrap_or(open_metrics);
        self.text.push_str(text);
    }

    /// The whole, in OpenMetrics.
    pub fn finish(mut self) -> String {
        self.text.push_str("# EOF\n");
        self.text
    }
}

/// A family that is being written.
#[derive(Debug)]
pub struct Family<'a> {
    text: &'a mut String,
    name: &'a str,
    kind: Kind,
    help: &'a str,
    begun: bool,
}

impl Family<'_> {
    /// A sample of now.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: f64) {
        self.sample_at(labels, value, None);
    }

    /// A sample of a moment, in milliseconds since the Unix epoch.
    pub fn sample_at(&mut self, labels: &[(&str, &str)], value: f64, at_ms: Option<i64>) {
        let name = self.name;
        if !self.begun {
            self.begun = true;
            let kind = match self.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
                Kind::Unknown => "unknown",
            };
            let help = escape(self.help);
            self.push(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
        }
        let suffix = match self.kind {
            Kind::Counter => "_total",
            _ => "",
        };
        self.push(format_args!("{name}{suffix}"));
        for (index, (key, label)) in labels.iter().enumerate() {
            let mark = if index == 0 { '{' } else { ',' };
            self.push(format_args!("{mark}{key}=\"{}\"", escape(label)));
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        if value.is_infinite() {
            let sign = if value > 0.0 { '+' } else { '-' };
            self.push(format_args!(" {sign}Inf"));
        } else {
            self.push(format_args!(" {value}"));
        }
        if let Some(at) = at_ms {
            let (seconds, milliseconds) = (at.div_euclid(1000), at.rem_euclid(1000));
            self.push(format_args!(" {seconds}.{milliseconds:03}"));
        }
        self.text.push('\n');
    }

    fn push(&mut self, text: std::fmt::Arguments<'_>) {
        push(self.text, text);
    }
}

fn escape(text: &str) -> Cow<'_, str> {
    if text.contains(['\\', '"', '\n']) {
        let text = text.replace('\\', "\\\\");
        Cow::Owned(text.replace('"', "\\\"").replace('\n', "\\n"))
    } else {
        Cow::Borrowed(text)
    }
}

/// From OpenMetrics to Prometheus' text format.
fn to_text(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    // The head tells the name of the samples, for which the type must be known.
    let mut help: Option<(&str, &str)> = None;
    for line in open_metrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ').or(Some((rest, "")));
        } else if let Some((name, kind)) = line
            .strip_prefix("# TYPE ")
            .and_then(|rest| rest.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", kind),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                "stateset" => ("", "gauge"),
                _ => ("", kind),
            };
            if let Some((_, help)) = help.take().filter(|(of, _)| *of == name) {
                let help = help.replace("\\\"", "\"");
                push(&mut text, format_args!("# HELP {name}{suffix} {help}\n"));
            }
            push(&mut text, format_args!("# TYPE {name}{suffix} {kind}\n"));
        } else if !line.starts_with('#') && !line.is_empty() {
            sample_to_text(&mut text, line);
        }
    }
    text
}

fn push(text: &mut String, what: std::fmt::Arguments<'_>) {
    let written = text.write_fmt(what);
    debug_assert!(written.is_ok(), "writing to a string does not fail");
}

/// A sample: exemplars go, seconds become milliseconds.
fn sample_to_text(text: &mut String, line: &str) {
    let series = end_of_series(line);
    let (series, rest) = line.split_at(series);
    let rest = rest.split(" # ").next().unwrap_or_default();
    let mut words = rest.split_whitespace();
    let value = words.next().unwrap_or("NaN");
    push(text, format_args!("{series} {value}"));
    if let Some(seconds) = words.next() {
        let (whole, part) = seconds.split_once('.').unwrap_or((seconds, ""));
        let part: String = part.chars().chain("000".chars()).take(3).collect();
        push(text, format_args!(" {whole}{part}"));
    }
    text.push('\n');
}

/// Returns the end of name and labels.
fn end_of_series(line: &str) -> usize {
    let mut quoted = false;
    let mut escaped = false;
    for (at, c) in line.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            ' ' if !quoted => return at,
            _ => {}
        }
    }
    line.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_gets_open_metrics_only_when_it_asks_for_it() {
        for (accept, format) in [
            (None, Format::Text),
            (Some("*/*"), Format::Text),
            (Some("text/plain"), Format::Text),
            (
                Some(
                    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
                ),
                Format::OpenMetrics,
            ),
            (Some("application/openmetrics-text"), Format::OpenMetrics),
            (
                Some("application/openmetrics-text;version=2.0.0"),
                Format::Text,
            ),
            (
                Some("application/openmetrics-text;q=0.2,text/plain;q=0.9"),
                Format::Text,
            ),
            (Some("application/openmetrics-text;q=0"), Format::Text),
            (Some("application/json"), Format::Text),
        ] {
            assert_eq!(Format::negotiate(accept), format, "{accept:?}");
        }
    }

    #[test]
    fn both_formats_say_the_same() {
        let mut exposition = Exposition::default();
        let mut family = exposition.family("a_seconds", Kind::Counter, "Says \"a\"");
        family.sample_at(
            &[("x", "1 } \"2\\"), ("y", "")],
            0.25,
            Some(1_700_000_000_007),
        );
        exposition.family("none", Kind::Gauge, "Not there");
        exposition
            .family("b", Kind::Unknown, "Bees")
            .sample(&[], 3.0);
        exposition.append("# HELP c C.\n# TYPE c info\nc_info{v=\"1\"} 1\n# EOF\n");
        let open = exposition.finish();
        assert_eq!(
            open,
            "# HELP a_seconds Says \\\"a\\\"\n\
             # TYPE a_seconds counter\n\
             a_seconds_total{x=\"1 } \\\"2\\\\\",y=\"\"} 0.25 1700000000.007\n\
             # HELP b Bees\n\
             # TYPE b unknown\n\
             b 3\n\
             # HELP c C.\n\
             # TYPE c info\n\
             c_info{v=\"1\"} 1\n\
             # EOF\n"
        );
        assert_eq!(
            Format::Text.of(open),
            "# HELP a_seconds_total Says \"a\"\n\
             # TYPE a_seconds_total counter\n\
             a_seconds_total{x=\"1 } \\\"2\\\\\",y=\"\"} 0.25 1700000000007\n\
             # HELP b Bees\n\
             # TYPE b untyped\n\
             b 3\n\
             # HELP c_info C.\n\
             # TYPE c_info gauge\n\
             c_info{v=\"1\"} 1\n"
        );
    }

    #[test]
    fn exemplars_units_and_short_times_are_understood() {
        let open = "# HELP h_seconds H\n# UNIT h_seconds seconds\n# TYPE h_seconds histogram\n\
                    h_seconds_bucket{le=\"1\"} 2 1.5 # {id=\"x\"} 0.5 1\n# EOF\n";
        let text = Format::Text.of(open.to_owned());
        assert!(
            text.ends_with("\nh_seconds_bucket{le=\"1\"} 2 1500\n"),
            "{text}"
        );
        assert!(!text.contains("UNIT"), "{text}");
    }
}
