//! Label and field selectors.

use serde_json::Value;

use super::failure::Failure;
use super::resource::Resource;

#[derive(Clone, Debug)]
enum Labels {
    Is(String, String),
    IsNot(String, String),
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Has(String),
    HasNot(String),
}

/// What a list or a watch asks for.
#[derive(Clone, Debug, Default)]
pub(super) struct Selector {
    labels: Vec<Labels>,
    fields: Vec<(String, String, bool)>,
}

impl Selector {
    pub(super) fn parse(
        resource: &Resource,
        labels: Option<&str>,
        fields: Option<&str>,
    ) -> Result<Self, Failure> {
        let mut selector = Self::default();
        for term in split(labels.unwrap_or_default()) {
            selector.labels.push(label_term(term)?);
        }
        for term in fields.unwrap_or_default().split(',') {
            if term.is_empty() {
                continue;
            }
            let (name, value, equal) = if let Some((name, value)) = term.split_once("!=") {
                (name, value, false)
            } else if let Some((name, value)) = term.split_once("==") {
                (name, value, true)
            } else if let Some((name, value)) = term.split_once('=') {
                (name, value, true)
            } else {
                let message =
                    format!("invalid selector: '{term}'; can't understand it as a field selector");
                return Err(Failure::bad_request(message));
            };
            let known = ["metadata.name", "metadata.namespace"].contains(&name)
                || resource.fields.contains(&name);
            if !known {
                let message = format!("field label not supported: {name}");
                return Err(Failure::bad_request(message));
            }
            selector
                .fields
                .push((name.to_owned(), value.to_owned(), equal));
        }
        Ok(selector)
    }

    pub(super) fn matches(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        let label = |name: &String| labels.get(name).and_then(Value::as_str);
        self.labels.iter().all(|term| match term {
            Labels::Is(name, value) => label(name) == Some(value),
            Labels::IsNot(name, value) => label(name) != Some(value),
            Labels::In(name, values) => label(name).is_some_and(|v| values.iter().any(|x| x == v)),
            Labels::NotIn(name, values) => {
                label(name).is_none_or(|v| values.iter().all(|x| x != v))
            }
            Labels::Has(name) => label(name).is_some(),
            Labels::HasNot(name) => label(name).is_none(),
        }) && self
            .fields
            .iter()
            .all(|(name, value, equal)| (field(object, name) == *value) == *equal)
    }

    /// The one value a field must have.
    pub(super) fn requires(&self, name: &str) -> Option<&str> {
        self.fields
            .iter()
            .find(|(field, _, equal)| field == name && *equal)
            .map(|(_, value, _)| value.as_str())
    }
}

fn field(object: &Value, name: &str) -> String {
    let path = match name {
        "reportingComponent" => "reportingComponent",
        "source" => "source.component",
        name => name,
    };
    let value = path.split('.').fold(object, |value, step| &value[step]);
    match value {
        Value::String(text) => text.clone(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        _ if name == "spec.unschedulable" => "false".to_owned(),
        _ => String::new(),
    }
}

/// At the commas that are not inside parentheses.
fn split(selector: &str) -> Vec<&str> {
    let mut depth = 0_usize;
    selector
        .split(move |c: char| {
            match c {
                '(' => depth += 1,
                ')' => depth = depth.saturating_sub(1),
                _ => {}
            }
            c == ',' && depth == 0
        })
        .map(str::trim)
        .filter(|term| !term.is_empty())
        .collect()
}

fn label_term(term: &str) -> Result<Labels, Failure> {
    let own = |text: &str| text.trim().to_owned();
    if let Some(open) = term.find('(') {
        let words: Vec<&str> = term[..open].split_whitespace().collect();
        let values: Vec<String> = term[open + 1..]
            .trim_end_matches(')')
            .split(',')
            .map(own)
            .collect();
        return match words[..] {
            [name, "in"] => Ok(Labels::In(own(name), values)),
            [name, "notin"] => Ok(Labels::NotIn(own(name), values)),
            _ => Err(Failure::bad_request(format!(
                "unable to parse requirement: {term}"
            ))),
        };
    }
    Ok(if let Some((name, value)) = term.split_once("!=") {
        Labels::IsNot(own(name), own(value))
    } else if let Some((name, value)) = term.split_once("==") {
        Labels::Is(own(name), own(value))
    } else if let Some((name, value)) = term.split_once('=') {
        Labels::Is(own(name), own(value))
    } else if let Some(name) = term.strip_prefix('!') {
        Labels::HasNot(own(name))
    } else {
        Labels::Has(own(term))
    })
}
