//! A field of upstream's `KubeletConfiguration` (v1beta1 at Kubernetes 1.36): its name, its type and its
//! effect in this version. The module `table` has all of them.

use std::time::Duration;

use clap::Arg;

use super::codec::Given;
use super::decode::Reader;
pub use super::table::FIELDS;
use super::types::KubeletConfiguration;

/// The Kubernetes release whose fields these are.
pub const RELEASE: &str = "1.36";

/// Level of support for a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// The agent acts on it.
    Supported,
    /// Its value is checked, but nothing acts on it yet: setting it gives a warning.
    NotYet,
}

/// The type of a field's value.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// A whole number of 32 bits.
    Int32,
    /// A whole number of 32 bits that is not negative.
    Uint32,
    /// A whole number of 64 bits.
    Int64,
    /// Any number.
    Number,
    /// A string.
    String,
    /// A string holding a Go duration.
    Duration,
    /// A string holding a Go duration, or a whole number of nanoseconds.
    DurationOrNanos,
    /// A quantity like `10Mi`: a string or a number.
    Quantity,
    /// A list of strings.
    Strings,
    /// A list of whole numbers of 32 bits.
    Ints,
    /// A map from strings to strings.
    StringMap,
    /// A map from strings to lists of strings.
    StringsMap,
    /// A map from strings to booleans.
    BoolMap,
    /// A map from strings to quantities.
    QuantityMap,
    /// A list of objects with these fields.
    Objects(&'static [Field]),
    /// An object with these fields.
    Object(&'static [Field]),
}

impl Kind {
    /// The type in words, as the documentation names it.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Bool => "boolean",
            Self::Int32 | Self::Uint32 | Self::Int64 => "integer",
            Self::Number => "number",
            Self::String => "string",
            Self::Duration => "duration",
            Self::DurationOrNanos => "duration or nanoseconds",
            Self::Quantity => "quantity",
            Self::Strings => "list of strings",
            Self::Ints => "list of integers",
            Self::StringMap => "map of strings",
            Self::StringsMap => "map of lists of strings",
            Self::BoolMap => "map of booleans",
            Self::QuantityMap => "map of quantities",
            Self::Objects(_) => "list of objects",
            Self::Object(_) => "object",
        }
    }
}

/// One field.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its name in the file.
    pub name: &'static str,
    /// The type of its value.
    pub kind: Kind,
    /// Level of support. For an object, that of its fields decides.
    pub support: Support,
    /// For a field without effect: the values that say what it is without being set, upstream's default first.
    /// An empty list or map always does.
    pub unset: &'static [&'static str],
    /// Its notes in the documentation.
    pub notes: &'static str,
    /// For a field that holds a value the agent acts on: how it is read and written.
    pub(super) setting: Option<Setting>,
}

/// A value of [`KubeletConfiguration`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    /// The dotted name of its field.
    pub(super) name: &'static str,
    /// Takes the value in a file over. The last argument has the defaults.
    pub(super) read: fn(&mut Reader<'_>, &mut KubeletConfiguration, &KubeletConfiguration),
    /// Returns the value as a file has it; `null` leaves the field out.
    pub(super) write: fn(&KubeletConfiguration) -> serde_json::Value,
    /// Lays the value of its flag over that of the files. Returns whether the flag was given.
    pub(super) lay: fn(Given<'_>, &mut KubeletConfiguration) -> Result<bool, String>,
    /// Gives the argument of its flag the parser of its values.
    pub(super) arg: fn(Arg) -> Arg,
    /// Its flag, if it has one.
    pub(super) flag: Option<Flag>,
    /// For a duration: those that are allowed.
    pub(super) within: Option<Within>,
    /// Check of the value by itself. A text says what is wrong, fit to follow the name of the field.
    pub(super) check: Option<fn(&KubeletConfiguration) -> Option<String>>,
    /// The default in the words of the documentation; `None` for the value itself.
    pub(super) default: Option<&'static str>,
}

/// The durations that a field allows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Within {
    /// Returns the field's.
    pub(super) value: fn(&KubeletConfiguration) -> Duration,
    /// The shortest.
    pub(super) min: Duration,
    /// The longest.
    pub(super) max: Duration,
}

/// A flag that overrides a field.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flag {
    /// Its name, without dashes.
    pub(super) name: &'static str,
    /// The name of its value in the help.
    pub(super) value_name: &'static str,
    /// The help.
    pub(super) help: &'static str,
}

impl Setting {
    /// Gives it a flag.
    pub(super) const fn flag(
        mut self,
        name: &'static str,
        value_name: &'static str,
        help: &'static str,
    ) -> Self {
        self.flag = Some(Flag {
            name,
            value_name,
            help,
        });
        self
    }

    /// Documents a default that says little by itself.
    pub(super) const fn default(mut self, words: &'static str) -> Self {
        self.default = Some(words);
        self
    }

    /// Allows durations from `min` to `max` only.
    pub(super) const fn within(
        mut self,
        value: fn(&KubeletConfiguration) -> Duration,
        min: Duration,
        max: Duration,
    ) -> Self {
        self.within = Some(Within { value, min, max });
        self
    }

    /// Checks the value, once flags and files are merged.
    pub(super) const fn check(
        mut self,
        check: fn(&KubeletConfiguration) -> Option<String>,
    ) -> Self {
        self.check = Some(check);
        self
    }
}

/// Returns all settings, in the order of [`FIELDS`].
pub(super) fn settings() -> Vec<Setting> {
    fn add(fields: &[Field], into: &mut Vec<Setting>) {
        for field in fields {
            into.extend(field.setting);
            if let Kind::Object(fields) = field.kind {
                add(fields, into);
            }
        }
    }
    let mut settings = Vec::new();
    add(FIELDS, &mut settings);
    settings
}

const fn yes(name: &'static str, kind: Kind) -> Field {
    Field {
        name,
        kind,
        support: Support::Supported,
        unset: &[],
        notes: "",
        setting: None,
    }
}

pub(super) const fn later(
    name: &'static str,
    kind: Kind,
    unset: &'static [&'static str],
    notes: &'static str,
) -> Field {
    Field {
        name,
        kind,
        support: Support::NotYet,
        unset,
        notes,
        setting: None,
    }
}

/// Returns the part of a dotted name behind the last dot.
pub(super) const fn last(name: &'static str) -> &'static str {
    let mut start = name.len();
    while start > 0 {
        let (head, _) = name.split_at(start);
        if let [.., b'.'] = head.as_bytes() {
            break;
        }
        start -= 1;
    }
    name.split_at(start).1
}

pub(super) const LOGGING_OPTIONS: &[Field] = &[
    later("text", Kind::Object(OUTPUT_ROUTING), &[], ""),
    later("json", Kind::Object(OUTPUT_ROUTING), &[], ""),
];

pub(super) const VMODULE: &[Field] = &[
    later("filePattern", Kind::String, &[], ""),
    later("verbosity", Kind::Uint32, &[], ""),
];

const OUTPUT_ROUTING: &[Field] = &[
    later(
        "splitStream",
        Kind::Bool,
        &["false"],
        "All lines go to standard error.",
    ),
    later(
        "infoBufferSize",
        Kind::Quantity,
        &["0"],
        "Each line is written at once.",
    ),
];

pub(super) const TAINT: &[Field] = &[
    yes("key", Kind::String),
    yes("value", Kind::String),
    yes("effect", Kind::String),
    yes("timeAdded", Kind::String),
];

pub(super) const RESERVED_MEMORY: &[Field] = &[
    yes("numaNode", Kind::Int32),
    yes("limits", Kind::QuantityMap),
];

pub(super) const PRIORITY_PERIOD: &[Field] = &[
    yes("priority", Kind::Int32),
    yes("shutdownGracePeriodSeconds", Kind::Int64),
];

/// Returns the known name that `given` is a misspelling of; the closest, if there are several. A name that is
/// like none is one that a newer release may have.
///
/// Letter case does not count. Further edits are counted as in a Damerau–Levenshtein distance: one anywhere
/// makes a misspelling, and up to three if the names have the same words and no word has more than one edit
/// for every four letters. So `imageMedianGCAge` is not taken for `imageMinimumGCAge`, of which it differs by
/// another word.
pub(super) fn misspelt<'a>(
    given: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let near = |name: &'a str| distance(given, name).map(|edits| (edits, name));
    let nearest = known.into_iter().filter_map(near).min_by_key(|near| near.0);
    nearest.map(|(_, name)| name)
}

/// Returns how many edits make `given` of `name`; `None` if they are too many for a misspelling.
fn distance(given: &str, name: &str) -> Option<usize> {
    let (given_lower, name_lower) = (given.to_ascii_lowercase(), name.to_ascii_lowercase());
    let edits = strsim::damerau_levenshtein(&given_lower, &name_lower);
    if edits <= 1 {
        // Two short names are soon one edit apart.
        return (edits == 0 || name.chars().count() >= 3).then_some(edits);
    }
    let (given, name) = (words(given), words(name));
    let slips = |(given, name): (&String, &String)| {
        let edits = strsim::damerau_levenshtein(given, name);
        edits <= (name.chars().count() / 4).max(1)
    };
    (edits <= 3 && given.len() == name.len() && given.iter().zip(&name).all(slips)).then_some(edits)
}

/// Returns the words of a name in camel case, in lower case. An acronym is one word.
fn words(name: &str) -> Vec<String> {
    let letters: Vec<char> = name.chars().collect();
    let mut words: Vec<String> = Vec::new();
    for (at, letter) in letters.iter().enumerate() {
        let upper = |at: usize| letters.get(at).is_some_and(|c| !c.is_lowercase());
        let begins =
            at == 0 || (upper(at) && (!upper(at - 1) || !upper(at + 1)) && at + 1 < letters.len());
        match words.last_mut().filter(|_| !begins) {
            Some(word) => word.push(letter.to_ascii_lowercase()),
            None => words.push(letter.to_ascii_lowercase().to_string()),
        }
    }
    words
}
