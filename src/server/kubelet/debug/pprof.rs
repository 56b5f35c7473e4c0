//! The format of `pprof`: the messages of `profile.proto` that a CPU profile has, and a profile made of samples.

use std::collections::HashMap;
use std::time::Duration;

use ::pprof::Report;
use prost::Message;

/// `perftools.profiles.Profile`. Strings are numbers of entries in `string_table`, of which the first is empty.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Profile {
    #[prost(message, repeated, tag = "1")]
    pub(super) sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    pub(super) sample: Vec<Sample>,
    #[prost(message, repeated, tag = "4")]
    pub(super) location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    pub(super) function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    pub(super) string_table: Vec<String>,
    #[prost(int64, tag = "9")]
    pub(super) time_nanos: i64,
    #[prost(int64, tag = "10")]
    pub(super) duration_nanos: i64,
    #[prost(message, optional, tag = "11")]
    pub(super) period_type: Option<ValueType>,
    #[prost(int64, tag = "12")]
    pub(super) period: i64,
}

/// Kind and unit of a value, as indexes of strings.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct ValueType {
    #[prost(int64, tag = "1")]
    pub(super) kind: i64,
    #[prost(int64, tag = "2")]
    pub(super) unit: i64,
}

/// A stack, innermost frame first, and how often it was seen.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Sample {
    #[prost(uint64, repeated, tag = "1")]
    pub(super) location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    pub(super) value: Vec<i64>,
    #[prost(message, repeated, tag = "3")]
    pub(super) label: Vec<Label>,
}

/// A property of a sample.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Label {
    #[prost(int64, tag = "1")]
    pub(super) key: i64,
    #[prost(int64, tag = "2")]
    pub(super) text: i64,
}

/// A place in the code.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Location {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    #[prost(message, repeated, tag = "4")]
    pub(super) line: Vec<Line>,
}

/// A line of a function.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Line {
    #[prost(uint64, tag = "1")]
    pub(super) function_id: u64,
    #[prost(int64, tag = "2")]
    pub(super) line: i64,
}

/// A function.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Function {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    #[prost(int64, tag = "2")]
    pub(super) name: i64,
    #[prost(int64, tag = "3")]
    pub(super) system_name: i64,
    #[prost(int64, tag = "4")]
    pub(super) filename: i64,
}

/// A profile under construction.
struct Builder {
    profile: Profile,
    strings: HashMap<String, i64>,
    functions: HashMap<(i64, i64), u64>,
    locations: HashMap<(u64, i64), u64>,
}

impl Builder {
    fn new() -> Self {
        let mut this = Self {
            profile: Profile::default(),
            strings: HashMap::new(),
            functions: HashMap::new(),
            locations: HashMap::new(),
        };
        this.string("");
        this
    }

    fn string(&mut self, text: &str) -> i64 {
        if let Some(known) = self.strings.get(text) {
            return *known;
        }
        let index = i64::try_from(self.profile.string_table.len()).unwrap_or(0);
        self.profile.string_table.push(text.to_owned());
        self.strings.insert(text.to_owned(), index);
        index
    }

    fn value_type(&mut self, kind: &str, unit: &str) -> ValueType {
        ValueType {
            kind: self.string(kind),
            unit: self.string(unit),
        }
    }

    fn location(&mut self, name: &str, system_name: &str, file: &str, line: u32) -> u64 {
        let (name, system_name) = (self.string(name), self.string(system_name));
        let filename = self.string(file);
        let functions = &mut self.profile.function;
        let function_id = *self.functions.entry((name, filename)).or_insert_with(|| {
            let id = functions.len() as u64 + 1;
            functions.push(Function {
                id,
                name,
                system_name,
                filename,
            });
            id
        });
        let line = i64::from(line);
        let locations = &mut self.profile.location;
        *self
            .locations
            .entry((function_id, line))
            .or_insert_with(|| {
                let id = locations.len() as u64 + 1;
                locations.push(Location {
                    id,
                    line: vec![Line { function_id, line }],
                });
                id
            })
    }
}

/// `report` as `pprof` reads it: how often a stack was seen, and the CPU time that stands for.
pub(super) fn encode(
    report: &Report,
    started_ms: i64,
    duration: Duration,
    frequency: i32,
) -> Vec<u8> {
    let mut builder = Builder::new();
    let samples = builder.value_type("samples", "count");
    let cpu = builder.value_type("cpu", "nanoseconds");
    let thread = builder.string("thread");
    let period = 1_000_000_000 / i64::from(frequency);
    for (frames, count) in &report.data {
        let mut location_id = Vec::new();
        let symbols = frames.frames.iter().flatten();
        // The innermost frames are those of the sampling itself.
        let own = symbols
            .clone()
            .position(|symbol| symbol.name().contains("pprof::backtrace"))
            .map_or(0, |last| last + 1);
        for symbol in symbols.skip(own) {
            location_id.push(builder.location(
                &symbol.name(),
                &symbol.sys_name(),
                &symbol.filename(),
                symbol.lineno(),
            ));
        }
        let label = Label {
            key: thread,
            text: builder.string(&frames.thread_name_or_id()),
        };
        let count = i64::try_from(*count).unwrap_or(0);
        builder.profile.sample.push(Sample {
            location_id,
            value: vec![count, count.saturating_mul(period)],
            label: vec![label],
        });
    }
    let mut profile = builder.profile;
    profile.sample_type = vec![samples, cpu];
    profile.period_type = Some(cpu);
    profile.period = period;
    profile.time_nanos = started_ms.saturating_mul(1_000_000);
    profile.duration_nanos = i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX);
    profile.encode_to_vec()
}

#[cfg(test)]
pub(super) fn read(bytes: &[u8]) -> Profile {
    Profile::decode(bytes).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_there_once_however_often_it_was_seen() {
        let mut builder = Builder::new();
        let first = builder.location("a", "_a", "a.rs", 1);
        let line = builder.location("a", "_a", "a.rs", 2);
        assert_eq!(builder.location("a", "_a", "a.rs", 1), first);
        assert_ne!(first, line);
        let profile = builder.profile;
        assert_eq!(profile.function.len(), 1);
        assert_eq!(profile.location.len(), 2);
        assert_eq!(profile.string_table, ["", "a", "_a", "a.rs"]);
        let read = Profile::decode(profile.encode_to_vec().as_slice()).unwrap();
        assert_eq!(read, profile);
    }
}
