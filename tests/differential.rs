//! What upstream's own libraries made of many inputs, against what the agent makes of them: `tests/golden/differential`.
//!
//! Both accept an input or both refuse it, and they read the same value. Where they do not, `differences.jsonl` says why;
//! a difference that is not listed fails, and so does a list that is longer than the truth.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests may panic"
)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use holdfast::config::manifest::{self, StaticOrigin};
use holdfast::images::Keyring;
use holdfast::kubeletconfig::{encode, load, parse_duration};
use holdfast::kuberuntime::env::expand;
use holdfast::kuberuntime::resources::{milli_value, value};
use holdfast::types::PodSource;
use holdfast::types::quantity::nanos;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::Deserialize;
use serde_json::{Value, json};

/// One line of a golden file that is an input.
#[derive(Deserialize)]
struct Case {
    /// The template, where the group has some.
    #[serde(default)]
    t: String,
    i: String,
    ok: bool,
    #[serde(default)]
    v: Value,
}

/// A golden file: lines about all of it, and the inputs.
struct Group {
    about: Vec<Value>,
    cases: Vec<Case>,
}

impl Group {
    fn read(name: &str) -> Self {
        let (about, cases) = lines(name)
            .into_iter()
            .partition(|line: &Value| line.get("i").is_none());
        let cases = serde_json::from_value(Value::Array(cases)).unwrap();
        Self { about, cases }
    }

    fn setting(&self, key: &str) -> Value {
        let found = self.about.iter().find_map(|line| line.get(key));
        found.unwrap().clone()
    }

    /// The text of a case, and the pointer to the value that it is about.
    fn document(&self, case: &Case) -> (String, String) {
        let text = |line: &Value, key: &str| line[key].as_str().unwrap().to_owned();
        let template = self.about.iter().find(|line| line["template"] == *case.t);
        let template = template.unwrap();
        let document = text(template, "text").replace('@', &case.i);
        (document, text(template, "at"))
    }
}

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/differential")
}

fn lines(name: &str) -> Vec<Value> {
    let text = fs::read_to_string(directory().join(format!("{name}.jsonl"))).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// A kind of difference that there is a reason for.
#[derive(Deserialize)]
struct Known {
    group: String,
    kind: Kind,
    /// The templates; empty = all.
    #[serde(default)]
    templates: Vec<String>,
    /// Part of what the agent says when it refuses.
    #[serde(default)]
    says: String,
    /// The inputs; empty = all.
    #[serde(default)]
    inputs: Vec<String>,
    count: usize,
    #[expect(dead_code, reason = "for people")]
    reason: String,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Kind {
    /// Upstream accepts it.
    Refused,
    /// Upstream refuses it.
    Accepted,
    /// Both accept it, and read different values.
    Value,
}

/// Judges one group by what the agent makes of a case and by whether two values are the same.
fn judge(
    name: &str,
    group: &Group,
    read: impl Fn(&Case) -> Result<Value, String>,
    same: impl Fn(&Case, &Value) -> bool,
) {
    assert!(group.cases.len() > 100, "{name} has too few cases");
    let mut known: Vec<Known> = lines("differences")
        .into_iter()
        .map(|line| serde_json::from_value(line).unwrap())
        .collect();
    known.retain(|known| known.group == name);
    let mut seen = vec![0; known.len()];
    let mut unexpected = String::new();
    for case in &group.cases {
        let ours = read(case);
        let kind = match &ours {
            Err(_) if case.ok => Kind::Refused,
            Ok(_) if !case.ok => Kind::Accepted,
            Ok(ours) if !same(case, ours) => Kind::Value,
            _ => continue,
        };
        let said = ours.as_ref().err().map_or("", String::as_str);
        let expected = known.iter().position(|known| {
            known.kind == kind
                && (known.templates.is_empty() || known.templates.contains(&case.t))
                && (known.inputs.is_empty() || known.inputs.contains(&case.i))
                && said.contains(&known.says)
        });
        match expected {
            Some(index) => seen[index] += 1,
            None => writeln!(
                unexpected,
                "{name} {kind:?} {:?} {:?}: upstream {}, the agent {ours:?}",
                case.t, case.i, case.v
            )
            .unwrap(),
        }
    }
    for (known, seen) in known.iter().zip(seen) {
        if known.count != seen {
            writeln!(
                unexpected,
                "{name} {:?} {:?} {:?} {:?}: {seen} instead of {}",
                known.kind, known.templates, known.says, known.inputs, known.count
            )
            .unwrap();
        }
    }
    assert!(unexpected.is_empty(), "\n{unexpected}");
}

fn equal(case: &Case, ours: &Value) -> bool {
    case.v == *ours
}

#[test]
fn quantities() {
    let read = |case: &Case| {
        let quantity = Quantity(case.i.clone());
        let values = value(&quantity).and_then(|whole| Ok([whole, milli_value(&quantity)?]));
        values
            .map(|values| json!(values))
            .map_err(|e| e.to_string())
    };
    judge(
        "quantity",
        &Group::read("quantity"),
        read,
        // The first is how upstream writes it, which the agent never does.
        |case, ours| case.v[1] == ours[0] && case.v[2] == ours[1],
    );
}

#[test]
fn durations() {
    let read = |case: &Case| parse_duration(&case.i).map(|d| json!(d.as_nanos().to_string()));
    judge("duration", &Group::read("duration"), read, |case, ours| {
        ours.as_str() == Some(case.v.to_string().as_str())
    });
}

#[test]
fn expansions() {
    let group = Group::read("expansion");
    let env: BTreeMap<String, String> = serde_json::from_value(group.setting("env")).unwrap();
    let read = |case: &Case| {
        let value = expand(&case.i, &|name| {
            env.get(name).cloned().map(String::into_bytes)
        });
        Ok(json!(String::from_utf8(value).unwrap()))
    };
    judge("expansion", &group, read, equal);
}

fn manifest(text: &str) -> Result<Value, String> {
    let origin = StaticOrigin {
        source: PodSource::File,
        location: "/etc/kubernetes/manifests/pod.yaml",
        node_name: "node",
    };
    let pods = manifest::read(text.as_bytes(), &origin, "2026-01-02T03:04:05Z")
        .map_err(|e| e.to_string())?;
    Ok(serde_json::to_value(&pods[0]).unwrap())
}

/// Whether all that upstream read was read. What is empty is not written, and defaults are added.
fn covers(theirs: &Value, ours: &Value) -> bool {
    match (theirs, ours) {
        (Value::Null, _) => true,
        (Value::Object(fields), _) => fields.iter().all(|(key, theirs)| match ours.get(key) {
            Some(ours) => covers(theirs, ours),
            None => is_empty(theirs),
        }),
        (Value::Array(theirs), Value::Array(ours)) => {
            theirs.len() == ours.len() && theirs.iter().zip(ours).all(|(a, b)| covers(a, b))
        }
        (Value::Array(_), Value::Null) => is_empty(theirs),
        (Value::String(a), Value::String(b)) if a != b => {
            matches!((nanos(a), nanos(b)), (Ok(a), Ok(b)) if a == b)
        }
        _ => theirs == ours,
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => matches!(text.as_str(), "" | "0" | "0s"),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

fn without_empty(value: &Value) -> Value {
    let Value::Object(fields) = value else {
        return value.clone();
    };
    let fields = fields
        .iter()
        .map(|(key, value)| (key, without_empty(value)));
    let fields = fields.filter(|(_, value)| !is_empty(value));
    fields.map(|(key, value)| (key.clone(), value)).collect()
}

#[test]
fn values_in_manifests() {
    let group = Group::read("manifest");
    let read = |case: &Case| {
        let (text, at) = group.document(case);
        let pod = manifest(&text)?;
        Ok(pod.pointer(&at).cloned().unwrap_or_default())
    };
    judge("manifest", &group, read, |case, ours| {
        if ours.is_null() {
            is_empty(&case.v)
        } else {
            covers(&case.v, ours)
        }
    });
}

#[test]
fn whole_manifests() {
    let read = |case: &Case| manifest(&case.i);
    judge("document", &Group::read("document"), read, |case, ours| {
        let mut theirs = case.v.clone();
        let name = theirs["metadata"]["name"].take();
        theirs["status"].take();
        let name = format!("{}-node", name.as_str().unwrap());
        ours["metadata"]["name"] == *name && covers(&theirs, ours)
    });
}

#[test]
fn names_of_variables() {
    let read = |case: &Case| {
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "a"},
            "spec": {"containers": [{"name": "c", "image": "i", "env": [{"name": case.i}]}]},
        });
        Ok(json!(manifest(&pod.to_string()).is_ok()))
    };
    judge("env_name", &Group::read("env_name"), read, |case, ours| {
        case.v[1] == *ours
    });
}

#[test]
fn configurations() {
    let group = Group::read("kubelet_config");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.yaml");
    let read = |case: &Case| {
        let (text, at) = group.document(case);
        fs::write(&path, text).unwrap();
        let loaded = load::load(Some(&path), None).map_err(|e| e.to_string())?;
        let config = encode(&loaded.config);
        Ok(config.pointer(&at).cloned().unwrap_or_default())
    };
    // What is empty has its default.
    judge("kubelet_config", &group, read, |case, ours| {
        let theirs = without_empty(&case.v);
        is_empty(&theirs) || covers(&theirs, ours)
    });
}

#[test]
fn docker_configurations() {
    let group = Group::read("docker_config");
    let repositories: Vec<String> = serde_json::from_value(group.setting("repositories")).unwrap();
    let read = |case: &Case| {
        let type_ = format!("kubernetes.io/{}", case.t.trim_start_matches('.'));
        let secret = Secret {
            type_: Some(type_),
            data: Some([(case.t.clone(), ByteString(case.i.clone().into_bytes()))].into()),
            ..Secret::default()
        };
        let mut keyring = Keyring::default();
        keyring.add_secret(&secret).map_err(|e| e.to_string())?;
        let found = repositories.iter().map(|repository| {
            let found = keyring.lookup(repository).into_iter();
            json!(found.map(|c| [c.username, c.password]).collect::<Vec<_>>())
        });
        Ok(Value::Array(found.collect()))
    };
    judge("docker_config", &group, read, equal);
}

#[test]
fn data_of_secrets() {
    let read = |case: &Case| {
        let text = format!(
            r#"{{"apiVersion":"v1","kind":"Secret","data":{{"k":{}}}}}"#,
            case.i
        );
        let secret: Secret = serde_json::from_str(&text).map_err(|e| e.to_string())?;
        let data = secret.data.unwrap();
        let hex = data["k"].0.iter().map(|byte| format!("{byte:02x}"));
        Ok(json!(hex.collect::<String>()))
    };
    judge("base64", &Group::read("base64"), read, equal);
}
