//! Reading and writing values of configuration fields, and their flags: one [`Codec`] for each shape of values. A row of
//! [`super::table`] names the one of its field.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser, ValueParser, ValueParserFactory};
use clap::{Arg, ArgAction, ArgMatches};
use serde_json::{Value as Json, json};

use super::decode::{Reader, parse_ip, strings_of};
use super::duration::{format_duration, parse_duration};
use super::encode::{hidden, without_user};
use super::flags::{parse_bool, parse_headers, parse_ips, parse_pairs};
use super::quantity::parse_log_size;
use super::types::{KubeletConfiguration, NEVER_ROTATE, Tracing};
use super::yaml::Value;
use crate::types::quantity::of_bytes;

/// Reads and writes the values of a field.
pub(super) trait Codec<T> {
    /// Reads the value in a file, whose kind was checked. `now` is the value so far, for maps that are merged.
    /// `None` means unset, so that the default applies: `null`, or upstream's zero value that means the default.
    fn read(&self, r: &mut Reader<'_>, now: &T) -> Option<T>;

    /// Returns the value as a file has it; `null` leaves the field out.
    fn write(&self, value: &T) -> Json;

    /// Makes `arg` the argument of a flag with such a value: its parser and its action.
    fn arg(&self, arg: Arg) -> Arg;

    /// Returns the value that a flag sets; `None` when it was not given.
    ///
    /// # Errors
    /// Text that says what is wrong, fit to follow the name of the flag.
    fn given(&self, flag: Given<'_>) -> Result<Option<T>, String>;
}

/// A flag among those that were given.
#[derive(Clone, Copy)]
pub(super) struct Given<'a> {
    pub(super) matches: &'a ArgMatches,
    /// Without dashes.
    pub(super) name: &'a str,
}

impl Given<'_> {
    /// Returns the value of a flag that has one.
    pub(super) fn one<T: Clone + Send + Sync + 'static>(self) -> Option<T> {
        let value = self.matches.try_get_one::<T>(self.name);
        value.ok().flatten().cloned()
    }

    /// Returns the values of a flag that may be repeated.
    pub(super) fn all<T: Clone + Send + Sync + 'static>(self) -> Option<Vec<T>> {
        let values = self.matches.try_get_many::<T>(self.name).ok().flatten()?;
        Some(values.cloned().collect())
    }
}

/// Takes the value of a field in a file over.
pub(super) fn take<T: Clone>(
    codec: &impl Codec<T>,
    r: &mut Reader<'_>,
    value: &mut T,
    default: &T,
) {
    let read = codec.read(r, value);
    *value = read.unwrap_or_else(|| default.clone());
}

/// Lays the value of a flag over that of the files. Returns whether it was given.
pub(super) fn lay<T>(
    codec: &impl Codec<T>,
    flag: Given<'_>,
    value: &mut T,
) -> Result<bool, String> {
    let Some(given) = codec.given(flag)? else {
        return Ok(false);
    };
    *value = given;
    Ok(true)
}

/// As [`Codec::arg`]; `member` has the type of the value.
pub(super) fn arg_of<T>(
    codec: &impl Codec<T>,
    arg: Arg,
    _member: fn(&KubeletConfiguration) -> &T,
) -> Arg {
    codec.arg(arg)
}

/// A shape of values without parameters.
pub(super) struct Plain<T> {
    read: fn(&mut Reader<'_>, &T) -> Option<T>,
    write: fn(&T) -> Json,
    arg: fn(Arg) -> Arg,
    given: fn(Given<'_>) -> Result<Option<T>, String>,
}

impl<T> Plain<T> {
    pub(super) const fn new(
        read: fn(&mut Reader<'_>, &T) -> Option<T>,
        write: fn(&T) -> Json,
    ) -> Self {
        Self {
            read,
            write,
            arg: |arg| arg,
            given: |_| Ok(None),
        }
    }

    /// Makes it a shape that flags may have.
    pub(super) const fn flag(
        self,
        arg: fn(Arg) -> Arg,
        given: fn(Given<'_>) -> Result<Option<T>, String>,
    ) -> Self {
        Self {
            read: self.read,
            write: self.write,
            arg,
            given,
        }
    }
}

impl<T> Codec<T> for Plain<T> {
    fn read(&self, r: &mut Reader<'_>, now: &T) -> Option<T> {
        (self.read)(r, now)
    }

    fn write(&self, value: &T) -> Json {
        (self.write)(value)
    }

    fn arg(&self, arg: Arg) -> Arg {
        (self.arg)(arg)
    }

    fn given(&self, flag: Given<'_>) -> Result<Option<T>, String> {
        (self.given)(flag)
    }
}

/// A boolean.
pub(super) const BOOL: Plain<bool> =
    Plain::new(|r, _| r.bool(), |value| json!(value)).flag(bool_arg, |flag| Ok(flag.one()));

/// A boolean, unset by default.
pub(super) const OPTIONAL_BOOL: Plain<Option<bool>> =
    Plain::new(|r, _| r.bool().map(Some), |value| json!(value));

fn bool_arg(arg: Arg) -> Arg {
    arg.num_args(0..=1)
        .require_equals(true)
        .default_missing_value("true")
        .value_parser(parse_bool)
}

/// A duration of which zero means zero.
pub(super) const TIME: Plain<Duration> = Plain::new(|r, _| time(r), show_time);

/// A duration of which zero means the default.
pub(super) const PERIOD: Plain<Duration> = Plain::new(period, show_time).flag(
    |arg| arg.value_parser(parse_duration),
    |flag| Ok(flag.one()),
);

/// As [`PERIOD`], and a flag with zero sets nothing.
pub(super) const NONZERO_PERIOD: Plain<Duration> = Plain::new(period, show_time).flag(
    |arg| arg.value_parser(parse_duration),
    |flag| Ok(flag.one().filter(|period: &Duration| !period.is_zero())),
);

fn time(r: &Reader<'_>) -> Option<Duration> {
    r.filled().and_then(|text| parse_duration(text).ok())
}

fn period(r: &mut Reader<'_>, _: &Duration) -> Option<Duration> {
    time(r).filter(|period| !period.is_zero())
}

fn show_time(value: &Duration) -> Json {
    Json::from(format_duration(*value))
}

/// A type of whole numbers.
pub(super) trait Number:
    TryFrom<i128>
    + Into<Json>
    + ValueParserFactory<Parser: Into<ValueParser>>
    + Copy
    + Default
    + PartialEq
    + Send
    + Sync
    + 'static
{
}

impl Number for u8 {}
impl Number for u16 {}
impl Number for u32 {}
impl Number for i32 {}
impl Number for i64 {}
impl Number for u64 {}

/// Makes `arg` one with a number.
pub(super) fn number<T: Number>(arg: Arg) -> Arg {
    let is_signed = T::try_from(-1_i128).is_ok();
    arg.value_parser(T::value_parser())
        .allow_negative_numbers(is_signed)
}

/// A whole number, and in words which are possible.
pub(super) struct Int(pub(super) &'static str);

impl<T: Number> Codec<T> for Int {
    fn read(&self, r: &mut Reader<'_>, _: &T) -> Option<T> {
        r.int(self.0)
    }

    fn write(&self, value: &T) -> Json {
        (*value).into()
    }

    fn arg(&self, arg: Arg) -> Arg {
        number::<T>(arg)
    }

    fn given(&self, flag: Given<'_>) -> Result<Option<T>, String> {
        Ok(flag.one())
    }
}

/// As [`Int`], with 0 for the number in front.
pub(super) struct ZeroAs<T>(pub(super) T, pub(super) &'static str);

impl<T: Number> ZeroAs<T> {
    fn replace(&self, number: T) -> T {
        if number == T::default() {
            self.0
        } else {
            number
        }
    }
}

impl<T: Number> Codec<T> for ZeroAs<T> {
    fn read(&self, r: &mut Reader<'_>, _: &T) -> Option<T> {
        r.int::<T>(self.1).map(|number| self.replace(number))
    }

    fn write(&self, value: &T) -> Json {
        (*value).into()
    }

    fn arg(&self, arg: Arg) -> Arg {
        number::<T>(arg)
    }

    fn given(&self, flag: Given<'_>) -> Result<Option<T>, String> {
        Ok(flag.one::<T>().map(|number| self.replace(number)))
    }
}

/// As [`Int`]: 0 means the default in a file, and is refused as a flag. In words which are possible in both.
pub(super) struct Nonzero(pub(super) &'static str, pub(super) &'static str);

impl<T: Number> Codec<T> for Nonzero {
    fn read(&self, r: &mut Reader<'_>, _: &T) -> Option<T> {
        r.int::<T>(self.0).filter(|number| *number != T::default())
    }

    fn write(&self, value: &T) -> Json {
        (*value).into()
    }

    fn arg(&self, arg: Arg) -> Arg {
        number::<T>(arg)
    }

    fn given(&self, flag: Given<'_>) -> Result<Option<T>, String> {
        match flag.one::<T>() {
            Some(number) if number == T::default() => Err(format!("is 0, expected {}", self.1)),
            given => Ok(given),
        }
    }
}

/// A number from 1, unset by default.
pub(super) const OPTIONAL_INT: Plain<Option<u32>> = Plain::new(
    |r, _| r.int("a number from 1").map(Some),
    |value| json!(value),
);

/// The process limit of a pod. Upstream takes every number below 1 for no limit of its own.
pub(super) const PIDS_LIMIT: Plain<Option<u64>> = Plain::new(
    |r, _| r.int("a number, below 1 for no limit").map(pids_limit),
    |value| value.map_or(json!(-1), |limit| json!(limit)),
)
.flag(number::<i64>, |flag| Ok(flag.one().map(pids_limit)));

fn pids_limit(limit: i64) -> Option<u64> {
    u64::try_from(limit).ok().filter(|limit| *limit != 0)
}

/// The size of a log.
pub(super) const LOG_SIZE: Plain<u64> = Plain::new(
    |r, _| r.parsed(parse_log_size),
    |value| match *value {
        NEVER_ROTATE => json!("-1"),
        size => json!(of_bytes(size)),
    },
)
.flag(
    |arg| {
        arg.value_parser(parse_log_size)
            .allow_negative_numbers(true)
    },
    |flag| Ok(flag.one()),
);

/// One of several names.
pub(super) const fn names<T>() -> Plain<T>
where
    T: FromStr<Err = String> + Display + Clone + Send + Sync + 'static,
{
    Plain::new(|r, _| r.parsed(T::from_str), shown)
        .flag(|arg| arg.value_parser(T::from_str), |flag| Ok(flag.one()))
}

/// An IP address.
pub(super) const IP: Plain<IpAddr> = Plain::new(|r, _| r.parsed(parse_ip), shown)
    .flag(|arg| arg.value_parser(parse_ip), |flag| Ok(flag.one()));

fn shown<T: Display>(value: &T) -> Json {
    Json::from(value.to_string())
}

/// A string that may be empty.
pub(super) const TEXT: Plain<String> =
    Plain::new(|r, _| r.string().map(str::to_owned), |value| json!(value))
        .flag(|arg| arg, |flag| Ok(flag.one()));

/// A string of which the empty one means the default in a file, and is taken as it is from a flag.
pub(super) const ENDPOINT: Plain<String> =
    Plain::new(|r, _| r.filled().map(str::to_owned), |value| json!(value))
        .flag(|arg| arg, |flag| Ok(flag.one()));

/// A string of which the empty one means the default. A flag with it sets nothing.
pub(super) const FILLED: Plain<String> =
    Plain::new(|r, _| r.filled().map(str::to_owned), |value| json!(value)).flag(
        |arg| arg,
        |flag| Ok(flag.one().filter(|text: &String| !text.is_empty())),
    );

/// A string, unset by default. The empty one unsets it.
pub(super) const OPTIONAL_TEXT: Plain<Option<String>> =
    Plain::new(optional_text, |value| json!(value)).flag(|arg| arg, given_text);

/// A URL, whose user and password are not shown.
pub(super) const URL: Plain<Option<String>> = Plain::new(optional_text, |value| {
    json!(value.as_deref().map(without_user))
})
.flag(|arg| arg, given_text);

fn optional_text(r: &mut Reader<'_>, _: &Option<String>) -> Option<Option<String>> {
    r.filled().map(|text| Some(text.to_owned()))
}

fn given_text(flag: Given<'_>) -> Result<Option<Option<String>>, String> {
    let text = flag.one::<String>();
    Ok(text.map(|text| (!text.is_empty()).then_some(text)))
}

/// A path; a relative one is relative to the directory of the file it stands in.
pub(super) const FILE: Plain<Option<PathBuf>> =
    Plain::new(|r, _| r.path().map(Some), show_path).flag(path_arg, given_path);

/// As [`FILE`], and the empty string means no file.
pub(super) const FILE_OR_NONE: Plain<Option<PathBuf>> = Plain::new(
    |r, _| r.string().is_some().then(|| r.path()),
    |value| match value {
        Some(_) => show_path(value),
        None => json!(""),
    },
)
.flag(path_arg, given_path);

/// A path that is made absolute.
pub(super) const ABSOLUTE_PATH: Plain<PathBuf> = Plain::new(
    |r, _| r.absolute_path(),
    |value| json!(value.to_string_lossy()),
);

fn show_path(value: &Option<PathBuf>) -> Json {
    json!(value.as_deref().map(Path::to_string_lossy))
}

fn path_arg(arg: Arg) -> Arg {
    arg.value_parser(path())
}

/// A path that may be empty, as Go's flags take it; clap's own parser refuses that.
pub(super) fn path() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

fn given_path(flag: Given<'_>) -> Result<Option<Option<PathBuf>>, String> {
    let path = flag.one::<PathBuf>();
    Ok(path.map(|path| (!path.as_os_str().is_empty()).then_some(path)))
}

/// A list of strings.
pub(super) const STRINGS: Plain<Vec<String>> = Plain::new(
    |r, _| {
        let texts = r.strings()?.into_iter();
        Some(texts.map(|(_, text)| text.to_owned()).collect())
    },
    |value| json!(value),
)
.flag(
    |arg| arg.action(ArgAction::Append).value_delimiter(','),
    |flag| {
        let texts = flag.all::<String>().map(Vec::into_iter);
        Ok(texts.map(|texts| texts.filter(|text| !text.is_empty()).collect()))
    },
);

/// A list of whole numbers.
pub(super) const INTS: Plain<Vec<i32>> = Plain::new(|r, _| r.ints(), |value| json!(value)).flag(
    |arg| {
        arg.action(ArgAction::Append)
            .value_delimiter(',')
            .value_parser(number_or_none)
    },
    |flag| {
        let given = flag.all::<Option<i32>>();
        Ok(given.map(|given| given.into_iter().flatten().collect()))
    },
);

/// Reads a number; an empty text is none.
fn number_or_none(text: &str) -> Result<Option<i32>, String> {
    let number = (!text.is_empty()).then(|| text.parse().map_err(|error| format!("{error}")));
    number.transpose()
}

/// A list of IP addresses.
pub(super) const ADDRESSES: Plain<Vec<IpAddr>> =
    Plain::new(addresses, |value| value.iter().map(shown).collect()).flag(
        |arg| arg.action(ArgAction::Append).value_parser(parse_ips),
        |flag| Ok(flag.all::<Vec<IpAddr>>().map(|lists| lists.concat())),
    );

/// Reads IP addresses. Each wrong one is reported.
fn addresses(r: &mut Reader<'_>, _: &Vec<IpAddr>) -> Option<Vec<IpAddr>> {
    let mut addresses = Vec::new();
    let mut wrong = Vec::new();
    for (place, text) in r.strings()? {
        match parse_ip(text) {
            Ok(address) => addresses.push(address),
            Err(message) => wrong.push((place, message)),
        }
    }
    r.problems.extend(wrong);
    Some(addresses)
}

/// A map. The first document that names it replaces the default, and later ones add to it.
pub(super) struct Map<T> {
    /// Reads the value of a key.
    pub(super) parse: fn(&str, &str) -> Result<T, String>,
    /// Writes it.
    pub(super) show: fn(&T) -> String,
    /// The character between key and value in a flag.
    pub(super) separator: char,
    /// True if an empty one is left out.
    pub(super) hides_empty: bool,
}

impl<T: Clone + Send + Sync + 'static> Codec<BTreeMap<String, T>> for Map<T> {
    fn read(&self, r: &mut Reader<'_>, now: &BTreeMap<String, T>) -> Option<BTreeMap<String, T>> {
        let node = r.node;
        let Value::Map(entries) = &node.value else {
            return None;
        };
        let mut map = if r.again {
            now.clone()
        } else {
            BTreeMap::new()
        };
        for entry in entries {
            match &entry.node.value {
                Value::Null => {
                    map.remove(&entry.key);
                }
                Value::String(text) => match (self.parse)(&entry.key, text) {
                    Ok(value) => {
                        map.insert(entry.key.clone(), value);
                    }
                    Err(message) => r.fail_at(entry.node.place, message),
                },
                // Its type was reported.
                _ => {}
            }
        }
        Some(map)
    }

    fn write(&self, value: &BTreeMap<String, T>) -> Json {
        if self.hides_empty && value.is_empty() {
            return Json::Null;
        }
        let pairs = value.iter();
        let pairs = pairs.map(|(key, item)| (key.clone(), Json::from((self.show)(item))));
        Json::Object(pairs.collect())
    }

    fn arg(&self, arg: Arg) -> Arg {
        let (parse, separator) = (self.parse, self.separator);
        let pairs = move |text: &str| parse_pairs(text, separator, parse);
        arg.action(ArgAction::Append).value_parser(pairs)
    }

    fn given(&self, flag: Given<'_>) -> Result<Option<BTreeMap<String, T>>, String> {
        let maps = flag.all::<BTreeMap<String, T>>();
        Ok(maps.map(|maps| maps.into_iter().flatten().collect()))
    }
}

/// Values by the names of their headers.
type Values = BTreeMap<String, Vec<String>>;

/// Headers of requests, whose values are not shown.
pub(super) const HEADERS: Plain<Values> = Plain::new(headers, |value| {
    let pairs = value.iter();
    let pairs = pairs.map(|(name, values)| (name.clone(), hidden(values)));
    if value.is_empty() {
        Json::Null
    } else {
        Json::Object(pairs.collect())
    }
})
.flag(
    |arg| arg.action(ArgAction::Append).value_parser(parse_headers),
    |flag| {
        Ok(flag.all::<Vec<(String, String)>>().map(|lists| {
            let mut headers = Values::new();
            for (name, value) in lists.into_iter().flatten() {
                headers.entry(name).or_default().push(value);
            }
            headers
        }))
    },
);

fn headers(r: &mut Reader<'_>, now: &Values) -> Option<Values> {
    let Value::Map(entries) = &r.node.value else {
        return None;
    };
    let mut headers = now.clone();
    for entry in entries {
        if let Value::List(nodes) = &entry.node.value {
            let values = strings_of(nodes).into_iter();
            let values = values.map(|(_, text)| text.to_owned()).collect();
            headers.insert(entry.key.clone(), values);
        } else {
            headers.remove(&entry.key);
        }
    }
    Some(headers)
}

/// `tracing.endpoint`.
pub(super) const TRACING_ENDPOINT: Plain<Option<Tracing>> = Plain::new(
    |r, now| {
        let mut tracing = now.clone().unwrap_or_default();
        let endpoint = r.filled().map(str::to_owned);
        tracing.endpoint = endpoint.unwrap_or_else(|| Tracing::default().endpoint);
        Some(Some(tracing))
    },
    |value| json!(value.as_ref().map(|tracing| &tracing.endpoint)),
);

/// `tracing.samplingRatePerMillion`.
pub(super) const TRACING_RATE: Plain<Option<Tracing>> = Plain::new(
    |r, now| {
        let mut tracing = now.clone().unwrap_or_default();
        let rate = r.int("a number from 0 to 1000000");
        tracing.sampling_rate_per_million = rate.unwrap_or_default();
        Some(Some(tracing))
    },
    |value| json!(value.as_ref().map(|t| t.sampling_rate_per_million)),
);
