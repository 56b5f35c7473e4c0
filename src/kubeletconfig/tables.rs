//! The tables of `docs/configuration.md`, from the declared fields.

use serde_json::Value;

use super::KubeletConfiguration;
use super::fields::{FIELDS, Field, Kind, Setting, Support};

/// Returns the tables by name: `fields`, `fields without effect` and `flags`.
pub fn tables() -> [(&'static str, String); 3] {
    let mut fields = "| Field | Type | Default | Notes |\n|---|---|---|---|\n".to_owned();
    let mut without_effect = "| Field | Type | Supported | Notes |\n|---|---|---|---|\n".to_owned();
    let mut flags = "| Flag | Meaning | Default | Field |\n|---|---|---|---|\n".to_owned();
    let defaults = KubeletConfiguration::default();
    for (name, field) in leaves("", FIELDS) {
        let (kind, notes) = (field.kind.words(), field.notes);
        let Some(setting) = field
            .setting
            .filter(|_| field.support == Support::Supported)
        else {
            without_effect += &format!("| `{name}` | {kind} | not yet | {notes} |\n");
            continue;
        };
        let default = default_of(setting, field.kind, &defaults);
        fields += &format!("| `{name}` | {kind} | {default} | {notes} |\n");
        if let Some(flag) = setting.flag {
            let (help, default) = match flag.help.split_once(" [default: ") {
                Some((help, default)) => (help, default.trim_end_matches(']')),
                None => (flag.help, default.as_str()),
            };
            flags += &format!("| `--{}` | {help} | {default} | `{name}` |\n", flag.name);
        }
    }
    [
        ("fields", fields),
        ("fields without effect", without_effect),
        ("flags", flags),
    ]
}

/// The fields that hold a value, by their dotted names.
fn leaves(prefix: &str, fields: &'static [Field]) -> Vec<(String, &'static Field)> {
    let leaf = |field: &'static Field| {
        let name = format!("{prefix}{}", field.name);
        match field.kind {
            Kind::Object(fields) => leaves(&format!("{name}."), fields),
            _ => vec![(name, field)],
        }
    };
    fields.iter().flat_map(leaf).collect()
}

/// A default as the documentation has it.
fn default_of(setting: Setting, kind: Kind, defaults: &KubeletConfiguration) -> String {
    if let Some(words) = setting.default {
        return words.to_owned();
    }
    let none = || "none".to_owned();
    match (setting.write)(defaults) {
        Value::Null => none(),
        Value::String(text) if text.is_empty() => none(),
        Value::String(text) if matches!(kind, Kind::Duration) => format!("`{}`", short(&text)),
        Value::String(text) => format!("`{text}`"),
        Value::Array(items) if items.is_empty() => none(),
        Value::Array(items) => {
            let items = items.iter().map(|item| format!("`{}`", plain(item)));
            items.collect::<Vec<_>>().join(", ")
        }
        Value::Object(pairs) if pairs.is_empty() => none(),
        Value::Object(pairs) => {
            let pairs = pairs.iter();
            let pairs = pairs.map(|(key, value)| format!("`{key}` {}", plain(value)));
            pairs.collect::<Vec<_>>().join(", ")
        }
        value => value.to_string(),
    }
}

fn plain(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

/// A duration without the zeros at its end: `5m` for `5m0s`.
fn short(duration: &str) -> &str {
    let cut = |text: &'_ str, zero: &str, unit: char| {
        let rest = text.strip_suffix(zero)?;
        rest.ends_with(unit).then_some(rest.len())
    };
    let minutes = cut(duration, "0s", 'm').map_or(duration, |end| &duration[..end]);
    cut(minutes, "0m", 'h').map_or(minutes, |end| &minutes[..end])
}
