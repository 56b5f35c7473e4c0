//! No field of a Pod spec is ignored: every field of the API has a rule, every rule names a field of the API,
//! and `docs/pod-fields.md` tells users the same.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests may panic"
)]

use std::collections::{BTreeMap, BTreeSet};

use holdfast::core::supported::{Rule, refused, rules};
use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;
use serde::de::value::{Error, StrDeserializer};
use serde::de::{DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::Value;

fn everything() -> Value {
    serde_json::to_value(Pod::deserialize(Everything).unwrap()).unwrap()
}

/// Paths of the leaves, members of lists as `[]`.
fn leaves(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(members) => members.iter().for_each(|(key, member)| {
            let dot = if path.is_empty() { "" } else { "." };
            leaves(member, &format!("{path}{dot}{key}"), found);
        }),
        Value::Array(items) => items
            .iter()
            .for_each(|item| leaves(item, &format!("{path}[]"), found)),
        _ => {
            found.insert(path.to_owned());
        }
    }
}

fn is_below(path: &str, parent: &str) -> bool {
    let rest = path.strip_prefix(parent);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// A list of plain values, or a mapping with keys of the user's choice.
fn plain(leaf: &str) -> &str {
    let list = leaf.strip_suffix("[]");
    list.or_else(|| leaf.strip_suffix(".anykey"))
        .unwrap_or(leaf)
}

fn covered(leaf: &str, rules: &BTreeMap<String, Rule>) -> bool {
    let own = matches!(
        rules.get(plain(leaf)).or_else(|| rules.get(leaf)),
        Some(Rule::Any | Rule::Text(_) | Rule::Amounts(_))
    );
    own || rules
        .iter()
        .any(|(path, rule)| matches!(rule, Rule::Tree | Rule::No(_)) && is_below(leaf, path))
}

#[test]
fn every_field_of_the_api_has_a_rule() {
    let mut found = BTreeSet::new();
    leaves(&everything(), "", &mut found);
    assert!(found.len() > 800, "only {} fields", found.len());
    let missing: Vec<_> = found.iter().filter(|l| !covered(l, rules())).collect();
    assert!(
        missing.is_empty(),
        "neither supported nor refused, add to src/core/supported/fields.rs and docs/pod-fields.md: {missing:#?}"
    );
}

#[test]
fn every_field_of_the_api_has_a_number_in_protobuf() {
    let pod = Pod::deserialize(Everything).unwrap();
    let bytes = holdfast::podsapi::encode::pod(&pod).unwrap();
    assert!(bytes.len() > 4000, "only {} bytes", bytes.len());
}

#[test]
fn a_field_without_a_rule_is_found() {
    let mut fewer = rules().clone();
    for gone in [
        "spec.hostAliases[].ip",
        "spec.volumes[].gitRepo",
        "spec.nodeSelector",
    ] {
        fewer.remove(gone).unwrap();
    }
    let mut found = BTreeSet::new();
    leaves(&everything(), "", &mut found);
    let missing: Vec<_> = found.iter().filter(|l| !covered(l, &fewer)).collect();
    assert_eq!(missing.len(), 5, "{missing:?}");
}

#[test]
fn every_rule_names_a_field_of_the_api() {
    let mut found = BTreeSet::new();
    leaves(&everything(), "", &mut found);
    for path in rules().keys() {
        let known = ["apiVersion", "kind"].contains(&path.as_str())
            || found.iter().any(|leaf| is_below(leaf, path));
        assert!(known, "{path} is not a field of Pod");
    }
}

#[test]
fn a_pod_with_every_field_is_refused_for_those_that_are_not_supported() {
    let pod = Pod::deserialize(Everything).unwrap();
    let refusals = refused(&pod);
    for (path, rule) in rules() {
        let told = refusals
            .iter()
            .any(|r| is_below(&r.field.replace("[0]", "[]"), path));
        match rule {
            Rule::No(_) | Rule::Text(_) | Rule::Amounts(_) => assert!(told, "{path} passed"),
            Rule::Any | Rule::Tree => assert!(!told, "{path} was refused"),
            Rule::Inside => {}
        }
    }
}

const ABBREVIATIONS: &[(&str, &[&str])] = &[
    (
        "<hook>",
        &[
            "<restarted>.lifecycle.postStart",
            "<restarted>.lifecycle.preStop",
        ],
    ),
    (
        "<probe>",
        &[
            "<restarted>.livenessProbe",
            "<restarted>.readinessProbe",
            "<restarted>.startupProbe",
        ],
    ),
    (
        "<security>",
        &["spec.securityContext", "<container>.securityContext"],
    ),
    (
        "<files>",
        &["spec.volumes[]", "spec.volumes[].projected.sources[]"],
    ),
    (
        "<restarted>",
        &["spec.containers[]", "spec.initContainers[]"],
    ),
    (
        "<container>",
        &[
            "spec.containers[]",
            "spec.initContainers[]",
            "spec.ephemeralContainers[]",
        ],
    ),
];

fn expand(path: &str) -> Vec<String> {
    let mut paths = vec![path.to_owned()];
    for (short, long) in ABBREVIATIONS {
        paths = paths
            .iter()
            .flat_map(|path| -> Vec<String> {
                match path.strip_prefix(short) {
                    Some(rest) => long.iter().map(|long| format!("{long}{rest}")).collect(),
                    None => vec![path.clone()],
                }
            })
            .collect();
    }
    paths
}

/// State and note by path, as the document has them.
fn documented(text: &str) -> BTreeMap<String, (String, String)> {
    let mut found = BTreeMap::new();
    for line in text.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        assert_eq!(cells.len(), 3, "{line}");
        for path in expand(cells[0].trim_matches('`')) {
            let row = (cells[1].to_owned(), cells[2].to_owned());
            let before = found.insert(path.clone(), row);
            assert_eq!(before, None, "{path} stands there twice");
        }
    }
    found
}

fn differences(text: &str) -> Vec<String> {
    let documented = documented(text);
    let of_spec = |path: &str| path.starts_with("spec.");
    let listed = rules().iter().filter(|(_, rule)| **rule != Rule::Inside);
    let listed: BTreeMap<_, _> = listed.filter(|(path, _)| of_spec(path)).collect();
    let mut found = Vec::new();
    for (path, rule) in &listed {
        let Some((state, note)) = documented.get(*path) else {
            found.push(format!("{path} is not in the document"));
            continue;
        };
        let (want, parts) = match rule {
            Rule::No(why) => ("refused", vec![(*why).to_owned()]),
            Rule::Tree => ("not acted on", Vec::new()),
            Rule::Text(values) => (
                "supported",
                // One that ends with `-` goes on.
                (values.iter())
                    .map(|v| format!("`{v}{}", if v.ends_with('-') { "" } else { "`" }))
                    .collect(),
            ),
            Rule::Amounts(values) => (
                "supported",
                values.iter().map(|v| format!("`{v}")).collect(),
            ),
            Rule::Any | Rule::Inside => ("supported", Vec::new()),
        };
        if state != want {
            found.push(format!("{path} is {want}, the document says {state}"));
        }
        let missing = parts.iter().filter(|part| !note.contains(part.as_str()));
        found.extend(missing.map(|part| format!("{path}: the document does not say {part}")));
    }
    let unknown = documented.keys().filter(|path| !listed.contains_key(path));
    found.extend(unknown.map(|path| format!("{path} has no rule")));
    found
}

#[test]
fn the_document_lists_every_field() {
    let found = differences(include_str!("../docs/pod-fields.md"));
    assert!(found.is_empty(), "docs/pod-fields.md: {found:#?}");
}

#[test]
fn a_wrong_document_is_found() {
    let text = include_str!("../docs/pod-fields.md");
    for (from, to, differing) in [
        (
            "| `spec.hostUsers` | supported",
            "| `spec.hostUsers` | refused",
            1,
        ),
        ("| `spec.hostname` |", "| `spec.hostnames` |", 2),
        ("| `<probe>.grpc.port` |", "| `<hook>.grpc.port` |", 10),
        ("`FallbackToLogsOnError`", "`Logs`", 3),
    ] {
        assert!(text.contains(from), "{from}");
        let found = differences(&text.replace(from, to));
        assert_eq!(found.len(), differing, "{from}: {found:?}");
    }
}

/// Answers every question of a deserialiser, so that the value it makes has every field set.
#[derive(Clone, Copy)]
struct Everything;

impl<'de> Deserializer<'de> for Everything {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_str("1")
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_bool(true)
    }

    fn deserialize_i32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_i32(1)
    }

    fn deserialize_i64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_i64(1)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        if name == "Time" || name == "MicroTime" {
            return visitor.visit_newtype_struct(StrDeserializer::new("2026-01-01T00:00:00Z"));
        }
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_seq(One(true))
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_map(All(["anykey"].iter(), "Map"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_map(All(fields.iter(), name))
    }

    forward_to_deserialize_any! {
        i8 i16 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        tuple tuple_struct enum identifier ignored_any
    }
}

struct One(bool);

impl<'de> SeqAccess<'de> for One {
    type Error = Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Error> {
        if std::mem::take(&mut self.0) {
            seed.deserialize(Everything).map(Some)
        } else {
            Ok(None)
        }
    }
}

struct All(std::slice::Iter<'static, &'static str>, &'static str);

impl<'de> MapAccess<'de> for All {
    type Error = Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Error> {
        let skipped = ["apiVersion", "kind"];
        let next = self.0.find(|f| self.1 != "Pod" || !skipped.contains(f));
        match next {
            Some(field) => {
                let field: StrDeserializer<'_, Error> = (*field).into_deserializer();
                seed.deserialize(field).map(Some)
            }
            None => Ok(None),
        }
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Error> {
        seed.deserialize(Everything)
    }
}
