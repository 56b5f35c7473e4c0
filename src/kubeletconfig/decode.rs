//! One document laid over the settings so far: the schema is checked first, then the typed fields are
//! taken over. A `null` puts a field back to its default, lists replace, maps merge.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Component, Path, PathBuf};

use super::duration::parse_duration;
use super::fields::{FIELDS, Field, Kind, RELEASE, Setting, Support, misspelt};
use super::given::{self, is_unset};
use super::problem::{Origin, Problem, Warning};
use super::types::KubeletConfiguration;
use super::yaml::{Entry, Node, Place, Value};
use super::{API_VERSION, KIND};
use crate::types::quantity::nanos;

/// The configuration under construction, and where each of its fields was set last.
#[derive(Debug, Default)]
pub(super) struct Settings {
    pub(super) config: KubeletConfiguration,
    /// By dotted field name; a field that is not here has its default.
    pub(super) origins: BTreeMap<&'static str, Origin>,
    pub(super) problems: Vec<Problem>,
    pub(super) warnings: Vec<Warning>,
}

impl Settings {
    /// Returns the place that set `field`.
    pub(super) fn origin(&self, field: &str) -> Origin {
        self.origins.get(field).cloned().unwrap_or(Origin::Default)
    }

    /// Reports that the value of `field` cannot be used.
    pub(super) fn reject(&mut self, field: &str, message: impl Into<String>) {
        self.problems
            .push(Problem::new(self.origin(field), field, message));
    }

    /// Reports that the value of `flag` cannot be used.
    pub(super) fn reject_flag(&mut self, flag: &str, message: impl Into<String>) {
        self.problems
            .push(Problem::new(Origin::Flag(flag.to_owned()), flag, message));
    }
}

/// Lays the document `root` of `file` over `settings`, adding what is wrong with it to the problems.
pub(super) fn overlay(settings: &mut Settings, file: &Path, root: &Node) {
    let Value::Map(entries) = &root.value else {
        let message = match root.value {
            Value::Null => format!(
                "the file is empty; it needs at least \"apiVersion: {API_VERSION}\" and \"kind: {KIND}\""
            ),
            ref other => format!("expected a {KIND} object, found {}", other.describe()),
        };
        settings
            .problems
            .push(Problem::new(at(file, root.place), "", message));
        return;
    };
    if !check_type(settings, file, root.place, entries) {
        return;
    }
    let body: Vec<&Entry> = entries
        .iter()
        .filter(|entry| entry.key != "apiVersion" && entry.key != "kind")
        .collect();
    let mut checker = Checker {
        file,
        settings: &mut *settings,
    };
    checker.object("", FIELDS, body.iter().copied());
    given::record(
        &mut settings.config.without_effect,
        FIELDS,
        body.iter().copied(),
    );
    let defaults = KubeletConfiguration::default();
    for entry in body {
        let Some(field) = FIELDS.iter().find(|field| field.name == entry.key) else {
            continue;
        };
        let is_null = matches!(entry.node.value, Value::Null);
        let is_tracing = field.name == "tracing";
        if is_tracing && !is_null {
            settings.config.tracing.get_or_insert_default();
        }
        take(settings, &defaults, file, field, &entry.node);
        if is_tracing && is_null {
            settings.config.tracing = None;
        }
    }
}

/// Takes over what `node` sets of a field and of those within. A `null` above a field is one of the field.
fn take(
    settings: &mut Settings,
    defaults: &KubeletConfiguration,
    file: &Path,
    field: &Field,
    node: &Node,
) {
    match (field.kind, &node.value) {
        (Kind::Object(fields), Value::Map(entries)) => {
            for entry in entries {
                if let Some(field) = fields.iter().find(|field| field.name == entry.key) {
                    take(settings, defaults, file, field, &entry.node);
                }
            }
        }
        (Kind::Object(fields), Value::Null) => {
            for field in fields {
                take(settings, defaults, file, field, node);
            }
        }
        _ => {
            // What has no setting is known, checked, and without effect: the warning is out already.
            if let Some(setting) = field.setting {
                set(settings, defaults, file, setting, node);
            }
        }
    }
}

/// Takes the value of one setting over. Kinds were checked; a value that failed that check is not taken.
fn set(
    settings: &mut Settings,
    defaults: &KubeletConfiguration,
    file: &Path,
    setting: Setting,
    node: &Node,
) {
    let mut r = Reader {
        file,
        node,
        again: settings.origins.contains_key(setting.name),
        problems: Vec::new(),
    };
    (setting.read)(&mut r, &mut settings.config, defaults);
    for (place, message) in r.problems {
        let problem = Problem::new(at(file, place), setting.name, message);
        let told = |other: &Problem| other.origin == problem.origin && other.field == problem.field;
        // A number out of its type's range was told about with its type.
        if !settings.problems.iter().any(told) {
            settings.problems.push(problem);
        }
    }
    // Of these two, one that is zero has a default that depends on whether the other one is set.
    let is_frequency = ["nodeStatusUpdateFrequency", "nodeStatusReportFrequency"];
    let is_unset = is_frequency.contains(&setting.name) && is_zero_duration(&node.value);
    if is_unset || matches!(node.value, Value::Null) {
        settings.origins.remove(setting.name);
    } else {
        settings.origins.insert(setting.name, at(file, node.place));
    }
}

fn is_zero_duration(value: &Value) -> bool {
    match value {
        Value::Int(number) => *number == 0,
        Value::String(text) => parse_duration(text).is_ok_and(|duration| duration.is_zero()),
        _ => false,
    }
}

fn at(file: &Path, place: Place) -> Origin {
    Origin::File {
        path: file.to_owned(),
        line: place.line,
        column: place.column,
    }
}

/// Checks `apiVersion` and `kind`; a document of another type is not read any further.
fn check_type(settings: &mut Settings, file: &Path, root: Place, entries: &[Entry]) -> bool {
    let mut good = true;
    for (key, want) in [("apiVersion", API_VERSION), ("kind", KIND)] {
        let found = entries.iter().find(|entry| entry.key == key);
        let (place, message) = match found.map(|entry| &entry.node) {
            None => (root, format!("is missing; add \"{key}: {want}\"")),
            Some(node) => match &node.value {
                Value::String(text) if text == want => continue,
                other => (
                    node.place,
                    format!("is {}, expected {want:?}", other.describe()),
                ),
            },
        };
        good = false;
        settings
            .problems
            .push(Problem::new(at(file, place), key, message));
    }
    good
}

/// Checks names and types of everything in a document.
struct Checker<'a> {
    file: &'a Path,
    settings: &'a mut Settings,
}

impl Checker<'_> {
    fn object<'e>(
        &mut self,
        prefix: &str,
        fields: &'static [Field],
        entries: impl Iterator<Item = &'e Entry>,
    ) {
        for entry in entries {
            let path = format!("{prefix}{}", entry.key);
            match fields.iter().find(|field| field.name == entry.key) {
                Some(field) => self.field(&path, field, entry),
                None => self.unknown(&path, fields, entry),
            }
        }
    }

    /// Refuses a misspelt field and warns of one that only a newer release can know.
    fn unknown(&mut self, path: &str, fields: &'static [Field], entry: &Entry) {
        let origin = at(self.file, entry.place);
        match misspelt(&entry.key, fields.iter().map(|field| field.name)) {
            Some(name) => {
                let message = format!("unknown field; did you mean {name:?}?");
                self.settings
                    .problems
                    .push(Problem::new(origin, path, message));
            }
            None => self.settings.warnings.push(Warning {
                origin,
                field: path.to_owned(),
                message: format!(
                    "is not a field of Kubernetes {RELEASE}, which this version knows, and has no effect"
                ),
            }),
        }
    }

    fn field(&mut self, path: &str, field: &Field, entry: &Entry) {
        let node = &entry.node;
        if let (Kind::Object(fields), Value::Map(entries)) = (&field.kind, &node.value) {
            self.object(&format!("{path}."), fields, entries.iter());
            return;
        }
        if field.support == Support::NotYet && !is_unset(field, &node.value) {
            self.settings.warnings.push(Warning {
                origin: at(self.file, entry.place),
                field: path.to_owned(),
                message: "is not supported in this version and has no effect".to_owned(),
            });
        }
        self.value(path, field.kind, node);
    }

    /// Checks the type of a value and of what is in it. `null` fits everywhere.
    fn value(&mut self, path: &str, kind: Kind, node: &Node) {
        match (items_of(kind), &node.value) {
            (Some(inner), Value::List(items)) if is_list(kind) => {
                for (index, item) in items.iter().enumerate() {
                    self.value(&format!("{path}[{index}]"), inner, item);
                }
            }
            (Some(inner), Value::Map(entries)) if !is_list(kind) => {
                for entry in entries {
                    self.value(&format!("{path}.{}", entry.key), inner, &entry.node);
                }
            }
            (_, Value::Map(entries)) if matches!(kind, Kind::Object(_)) => {
                // In a list of objects; the list was warned about.
                let Kind::Object(fields) = kind else { return };
                for entry in entries {
                    let path = format!("{path}.{}", entry.key);
                    match fields.iter().find(|field| field.name == entry.key) {
                        Some(field) => self.value(&path, field.kind, &entry.node),
                        None => self.unknown(&path, fields, entry),
                    }
                }
            }
            (_, value) => {
                if let Err(message) = check_kind(kind, value) {
                    let origin = at(self.file, node.place);
                    self.settings
                        .problems
                        .push(Problem::new(origin, path, message));
                }
            }
        }
    }
}

/// The kind of what is in a list or map of this kind.
const fn items_of(kind: Kind) -> Option<Kind> {
    match kind {
        Kind::Strings | Kind::StringMap => Some(Kind::String),
        Kind::Ints => Some(Kind::Int32),
        Kind::StringsMap => Some(Kind::Strings),
        Kind::BoolMap => Some(Kind::Bool),
        Kind::QuantityMap => Some(Kind::Quantity),
        Kind::Objects(fields) => Some(Kind::Object(fields)),
        _ => None,
    }
}

const fn is_list(kind: Kind) -> bool {
    matches!(kind, Kind::Strings | Kind::Ints | Kind::Objects(_))
}

/// Checks a value that is not one of the kind's own collections.
fn check_kind(kind: Kind, value: &Value) -> Result<(), String> {
    let whole = |min: i128, max: i128| match value {
        Value::Int(number) if (min..=max).contains(number) => Ok(()),
        Value::Int(number) => Err(format!(
            "is {number}, expected a whole number from {min} to {max}"
        )),
        _ => Err(format!(
            "expected a whole number, found {}",
            value.describe()
        )),
    };
    let (good, expected) = match (kind, value) {
        (_, Value::Null) => return Ok(()),
        (Kind::Duration | Kind::DurationOrNanos, Value::String(text)) => {
            return parse_duration(text).map(|_| ());
        }
        (Kind::Int32, _) => return whole(i32::MIN.into(), i32::MAX.into()),
        (Kind::Uint32, _) => return whole(0, u32::MAX.into()),
        (Kind::Int64, _) => return whole(i64::MIN.into(), i64::MAX.into()),
        (Kind::DurationOrNanos, Value::Int(_)) => return whole(0, i64::MAX.into()),
        (Kind::Duration, _) => (false, "a duration, like \"20s\""),
        (Kind::DurationOrNanos, _) => (false, "a duration, like \"5s\", or nanoseconds"),
        (Kind::Quantity, Value::String(text)) if nanos(text).is_err() => {
            return Err(format!(
                "{text:?} is not a quantity; write it like \"1Gi\", \"500M\" or \"1048576\""
            ));
        }
        (Kind::Quantity, value) => (
            matches!(value, Value::String(_) | Value::Int(_) | Value::Float(_)),
            "a quantity, like \"1Gi\"",
        ),
        (Kind::Bool, value) => (matches!(value, Value::Bool(_)), "true or false"),
        (Kind::Number, value) => (matches!(value, Value::Int(_) | Value::Float(_)), "a number"),
        (Kind::String, value) => (matches!(value, Value::String(_)), "a string"),
        (Kind::Strings, _) => (false, "a list of strings"),
        (Kind::Ints, _) => (false, "a list of whole numbers"),
        (Kind::StringMap, _) => (false, "a map of strings"),
        (Kind::StringsMap, _) => (false, "a map of lists of strings"),
        (Kind::BoolMap, _) => (false, "a map of booleans"),
        (Kind::QuantityMap, _) => (false, "a map of quantities"),
        (Kind::Objects(_), _) => (false, "a list of objects"),
        (Kind::Object(_), _) => (false, "an object"),
    };
    if good {
        Ok(())
    } else {
        Err(format!("expected {expected}, found {}", value.describe()))
    }
}

/// Reads one value of an already checked kind. `None`: unset (null, or upstream's zero value that
/// means the default), so the default applies.
pub(super) struct Reader<'a> {
    file: &'a Path,
    pub(super) node: &'a Node,
    /// True if an earlier file set the field.
    pub(super) again: bool,
    /// Problems so far, with their places.
    pub(super) problems: Vec<(Place, String)>,
}

impl Reader<'_> {
    /// Reports what is wrong with the value.
    pub(super) fn fail<T>(&mut self, message: String) -> Option<T> {
        self.fail_at(self.node.place, message);
        None
    }

    /// Reports what is wrong at a place within the value; the first report counts.
    pub(super) fn fail_at(&mut self, place: Place, message: String) {
        if self.problems.is_empty() {
            self.problems.push((place, message));
        }
    }

    pub(super) fn bool(&self) -> Option<bool> {
        match self.node.value {
            Value::Bool(value) => Some(value),
            _ => None,
        }
    }

    pub(super) fn int<T: TryFrom<i128>>(&mut self, range: &str) -> Option<T> {
        match self.node.value {
            Value::Int(value) => match T::try_from(value) {
                Ok(value) => Some(value),
                Err(_) => self.fail(format!("is {value}, expected {range}")),
            },
            _ => None,
        }
    }

    pub(super) fn string(&self) -> Option<&str> {
        match &self.node.value {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn filled(&self) -> Option<&str> {
        self.string().filter(|text| !text.is_empty())
    }

    pub(super) fn parsed<T>(&mut self, parse: impl Fn(&str) -> Result<T, String>) -> Option<T> {
        match self.filled().map(parse)? {
            Ok(value) => Some(value),
            Err(message) => self.fail(message),
        }
    }

    /// A path; a relative one is relative to the directory of the file it stands in.
    pub(super) fn path(&self) -> Option<PathBuf> {
        let text = self.filled()?;
        Some(match self.file.parent() {
            Some(directory) => directory.join(text),
            None => PathBuf::from(text),
        })
    }

    /// As [`Self::path`], and a relative one is made absolute and cleaned as Go's `filepath.Join` does. An
    /// absolute one stays as it was written.
    pub(super) fn absolute_path(&mut self) -> Option<PathBuf> {
        let path = self.path()?;
        if self.filled().is_some_and(|text| text.starts_with('/')) {
            return Some(path);
        }
        match std::path::absolute(&path) {
            Ok(path) => Some(cleaned(&path)),
            Err(error) => self.fail(format!("cannot be made an absolute path: {error}")),
        }
    }

    /// Those of a list that are whole numbers of 32 bits; the others were reported.
    pub(super) fn ints(&self) -> Option<Vec<i32>> {
        match &self.node.value {
            Value::List(nodes) => {
                let numbers = nodes.iter().filter_map(|node| match node.value {
                    Value::Int(value) => i32::try_from(value).ok(),
                    _ => None,
                });
                Some(numbers.collect())
            }
            _ => None,
        }
    }

    pub(super) fn strings(&self) -> Option<Vec<(Place, &str)>> {
        match &self.node.value {
            Value::List(nodes) => Some(strings_of(nodes)),
            _ => None,
        }
    }
}

/// `path` without `.` and with each `..` taken off its predecessor.
fn cleaned(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                clean.pop();
            }
            part => clean.push(part),
        }
    }
    clean
}

/// The strings of a list. The others were reported.
pub(super) fn strings_of(nodes: &[Node]) -> Vec<(Place, &str)> {
    nodes
        .iter()
        .filter_map(|node| match &node.value {
            Value::String(text) => Some((node.place, text.as_str())),
            _ => None,
        })
        .collect()
}

/// Reads an IP address.
pub(super) fn parse_ip(text: &str) -> Result<IpAddr, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is not an IP address"))
}
