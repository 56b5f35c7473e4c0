//! Dashboard, rules and alerts ask for metrics that exist.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::families::samples;
use crate::filled::Filled;
use crate::tools::{root, run};

/// Others make them.
const FOREIGN: &[&str] = &["up"];
/// Words of PromQL that look like names.
const WORDS: &[&str] = &[
    "by",
    "without",
    "on",
    "ignoring",
    "and",
    "or",
    "unless",
    "bool",
    "group_left",
    "group_right",
];

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

/// Names of metrics in an expression: words that are neither functions nor labels.
fn metrics_of(expression: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut rest = expression;
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut labels_follow = false;
    while let Some(first) = rest.chars().next() {
        let skip_to = |end: char| rest.find(end).map_or(rest.len(), |at| at + 1);
        match first {
            '{' => rest = &rest[skip_to('}')..],
            '[' => rest = &rest[skip_to(']')..],
            '(' if labels_follow => rest = &rest[skip_to(')')..],
            c if is_word(c) => {
                let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
                let word = &rest[..end];
                rest = &rest[end..];
                let after = rest.trim_start();
                let is_function = ["(", "by ", "without "]
                    .iter()
                    .any(|s| after.starts_with(s));
                let number = word.chars().all(|c| c.is_ascii_digit());
                let grouping = WORDS.contains(&word);
                if !is_function && !number && !grouping {
                    found.insert(word.to_owned());
                }
                labels_follow = [
                    "by",
                    "without",
                    "on",
                    "ignoring",
                    "group_left",
                    "group_right",
                ]
                .contains(&word);
                continue;
            }
            c if c.is_whitespace() => {
                rest = &rest[1..];
                continue;
            }
            c => rest = &rest[c.len_utf8()..],
        }
        labels_follow = false;
    }
    found
}

#[test]
fn metrics_are_found_in_expressions() {
    let found = metrics_of(
        "histogram_quantile(0.99, sum by (le, verb) (rate(a_bucket{x=~\"b\"}[5m]))) / on (instance) group_left c:d > 3 and e",
    );
    assert_eq!(found, ["a_bucket", "c:d", "e"].map(str::to_owned).into());
}

fn dashboard_expressions() -> Vec<String> {
    fn walk(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                found.extend(map.get("expr").and_then(Value::as_str).map(str::to_owned));
                map.values().for_each(|v| walk(v, found));
            }
            Value::Array(list) => list.iter().for_each(|v| walk(v, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    let dashboard: Value = serde_json::from_str(&read("contrib/grafana/holdfast.json")).unwrap();
    walk(&dashboard, &mut found);
    found
}

/// Expressions of rules, and the names that they record.
fn rules(path: &str) -> (Vec<String>, BTreeSet<String>) {
    let text = read(path);
    let rules: Value = serde_saphyr::from_str(&text).unwrap();
    let mut expressions = Vec::new();
    let mut recorded = BTreeSet::new();
    for group in rules["groups"].as_array().unwrap() {
        for rule in group["rules"].as_array().unwrap() {
            expressions.push(rule["expr"].as_str().unwrap().to_owned());
            recorded.extend(rule["record"].as_str().map(str::to_owned));
        }
    }
    (expressions, recorded)
}

#[tokio::test]
async fn the_dashboard_and_the_alerts_ask_for_metrics_that_exist() {
    let filled = Filled::new().await;
    let texts = filled.as_text();
    let texts: Vec<&str> = texts.iter().map(|(_, text)| text.as_str()).collect();
    let mut known = samples(&texts);
    known.extend(FOREIGN.iter().map(|name| (*name).to_owned()));
    let (recording, recorded) = rules("contrib/prometheus/rules.yaml");
    known.extend(recorded);
    let (alerts, _) = rules("contrib/prometheus/alerts.yaml");
    let dashboard = dashboard_expressions();
    assert!(
        dashboard.len() > 40 && alerts.len() > 15,
        "{} {}",
        dashboard.len(),
        alerts.len()
    );
    for expression in dashboard.iter().chain(&recording).chain(&alerts) {
        let asked = metrics_of(expression);
        assert!(!asked.is_empty(), "{expression}");
        for name in asked {
            assert!(known.contains(&name), "{name} does not exist: {expression}");
        }
    }
}

#[test]
fn promtool_accepts_the_rules() {
    for file in ["alerts.yaml", "rules.yaml"] {
        let path = root().join("contrib/prometheus").join(file);
        let said = run("promtool", &["check", "rules", path.to_str().unwrap()], "");
        assert!(said.is_ok(), "{said:?}");
    }
}
