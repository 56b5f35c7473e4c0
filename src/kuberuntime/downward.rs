//! The downward API: fields and resources of a pod as text, for variables and for files.
//!
//! Pure; upstream's `fieldpath.ExtractFieldPathAsString` and `resource.ExtractContainerResourceValue`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceFieldSelector};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::core::resources;
use crate::types::PodExt;
use crate::types::quantity;

/// Resources whose missing limit is what the node has to give.
const DEFAULTED: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];
const MILLI: i128 = 1_000_000;
const UNIT: i128 = 1_000_000_000;

/// A `metadata` field of the pod; `None` = there is no such field. A key without a value is empty.
pub fn metadata_field(pod: &Pod, path: &str) -> Option<String> {
    if let Some((map, key)) = subscript(path) {
        let map = match map {
            "metadata.labels" => pod.labels(),
            "metadata.annotations" => pod.annotations(),
            _ => return None,
        };
        return Some(map.get(key).cloned().unwrap_or_default());
    }
    Some(match path {
        "metadata.name" => pod.name().to_owned(),
        "metadata.namespace" => pod.namespace().to_owned(),
        "metadata.uid" => pod.uid().to_string(),
        "metadata.labels" => format_map(pod.labels()),
        "metadata.annotations" => format_map(pod.annotations()),
        _ => return None,
    })
}

/// `map['key']` taken apart.
fn subscript(path: &str) -> Option<(&str, &str)> {
    let (map, rest) = path.split_once("['")?;
    Some((map, rest.strip_suffix("']")?))
}

/// One `key="value"` per line, sorted; upstream's `FormatMap`.
fn format_map(map: &BTreeMap<String, String>) -> String {
    let lines: Vec<String> = map
        .iter()
        .map(|(key, value)| format!("{key}={}", quote(value)))
        .collect();
    lines.join("\n")
}

/// A string as Go's `%q` writes it.
fn quote(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{b}' => out.push_str("\\v"),
            c if is_printable(c) => out.push(c),
            // Writing to a string does not fail.
            c if u32::from(c) < 0x80 => drop(write!(out, "\\x{:02x}", u32::from(c))),
            c if u32::from(c) < 0x1_0000 => drop(write!(out, "\\u{:04x}", u32::from(c))),
            c => drop(write!(out, "\\U{:08x}", u32::from(c))),
        }
    }
    out.push('"');
    out
}

fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    // Behind a letter a combining mark is not escaped.
    let pair: String = ['a', c].into_iter().collect();
    pair.escape_debug().nth(1) == Some(c)
}

/// A container's request or limit in units of the divisor, rounded up. A limit that is not set is that of the pod
/// as a whole, else what the node has to give; any other amount that is not set is 0. `own` is the container that asks, if one does.
///
/// # Errors
/// The error in the reference, and the remedy.
pub fn resource_field(
    pod: &Pod,
    own: Option<&Container>,
    selector: &ResourceFieldSelector,
    allocatable: &BTreeMap<String, Quantity>,
) -> Result<String, String> {
    let container = match selector.container_name.as_deref().filter(|n| !n.is_empty()) {
        Some(name) => pod
            .container(name)
            .or_else(|| {
                let mut init = pod.spec_ref().init_containers.iter().flatten();
                init.find(|c| c.name == name)
            })
            .ok_or_else(|| format!("container {name} not found"))?,
        None => own.ok_or_else(|| "containerName is required in a volume".to_owned())?,
    };
    let (what, resource) = selector.resource.split_once('.').unwrap_or_default();
    let known = DEFAULTED.contains(&resource) || resource.starts_with("hugepages-");
    let own = container.resources.as_ref();
    let map = match what {
        "limits" if known => own.and_then(|r| r.limits.as_ref()),
        "requests" if known => own.and_then(|r| r.requests.as_ref()),
        _ => {
            return Err(format!(
                "unsupported container resource: {}; use limits or requests of cpu, memory, ephemeral-storage or hugepages-<size>",
                selector.resource
            ));
        }
    };
    let amount_of = |quantity: &Quantity| {
        quantity::nanos(&quantity.0).map_err(|error| format!("read {}: {error}", selector.resource))
    };
    let set = map
        .and_then(|m| m.get(resource))
        .map(amount_of)
        .transpose()?;
    let amount = match set {
        Some(amount) if amount != 0 => amount,
        _ if what == "limits" && DEFAULTED.contains(&resource) => {
            match resources::pod_level_limits(pod).get(resource) {
                Some(whole) if *whole != 0 => *whole,
                _ => allocatable
                    .get(resource)
                    .map(amount_of)
                    .transpose()?
                    .unwrap_or(0),
            }
        }
        _ => 0,
    };
    let unit = if resource == "cpu" { MILLI } else { UNIT };
    let divisor = match &selector.divisor {
        Some(divisor) => {
            quantity::nanos(&divisor.0).map_err(|error| format!("divisor: {error}"))?
        }
        None => 0,
    };
    let divisor = if divisor == 0 { UNIT } else { divisor };
    // Both are counted in thousandths (cpu) or whole units first, each rounded up.
    let (amount, divisor) = (ceil(amount, unit), ceil(divisor, unit));
    if divisor <= 0 {
        return Err("divisor must be positive".to_owned());
    }
    Ok(ceil(amount, divisor).to_string())
}

fn ceil(amount: i128, by: i128) -> i128 {
    amount.div_euclid(by) + i128::from(amount.rem_euclid(by) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod() -> Pod {
        serde_json::from_value(json!({
            "metadata": {
                "name": "web", "namespace": "shop", "uid": "u1",
                "labels": {"b": "2", "a": "x\"y"},
                "annotations": {"note": "line\nnext\\ \u{1} ü \u{ad}", "kubernetes.io/x": "y"},
            },
            "spec": {"containers": [
                {"name": "c", "resources": {
                    "limits": {"cpu": "1500m", "hugepages-2Mi": "4Mi"},
                    "requests": {"cpu": "250m", "memory": "100M"},
                }},
                {"name": "bare"},
            ]},
        }))
        .unwrap()
    }

    #[test]
    fn fields_are_text() {
        for (path, want) in [
            ("metadata.name", Some("web")),
            ("metadata.namespace", Some("shop")),
            ("metadata.uid", Some("u1")),
            ("metadata.labels['b']", Some("2")),
            ("metadata.labels['none']", Some("")),
            ("metadata.annotations['kubernetes.io/x']", Some("y")),
            ("metadata.labels", Some("a=\"x\\\"y\"\nb=\"2\"")),
            (
                "metadata.annotations",
                Some("kubernetes.io/x=\"y\"\nnote=\"line\\nnext\\\\ \\x01 ü \\u00ad\""),
            ),
            ("metadata.labels['b", None),
            ("metadata.name['x']", None),
            ("spec.nodeName", None),
            ("", None),
        ] {
            assert_eq!(metadata_field(&pod(), path).as_deref(), want, "{path}");
        }
    }

    #[test]
    fn amounts_are_rounded_up_and_a_missing_limit_is_the_nodes() {
        let allocatable = BTreeMap::from([
            ("cpu".to_owned(), Quantity("1930m".to_owned())),
            ("memory".to_owned(), Quantity("4Gi".to_owned())),
        ]);
        for (container, resource, divisor, want) in [
            ("c", "limits.cpu", "", Ok("2")),
            ("c", "limits.cpu", "0", Ok("2")),
            ("c", "limits.cpu", "1m", Ok("1500")),
            ("c", "requests.cpu", "100m", Ok("3")),
            ("c", "requests.memory", "", Ok("100000000")),
            ("c", "requests.memory", "1Mi", Ok("96")),
            ("c", "limits.memory", "1Gi", Ok("4")),
            ("c", "limits.hugepages-2Mi", "1Mi", Ok("4")),
            ("c", "requests.hugepages-2Mi", "", Ok("0")),
            ("bare", "limits.cpu", "1m", Ok("1930")),
            ("bare", "limits.cpu", "", Ok("2")),
            ("bare", "requests.cpu", "", Ok("0")),
            ("bare", "limits.ephemeral-storage", "", Ok("0")),
            ("none", "limits.cpu", "", Err("container none not found")),
            ("c", "limits.gpu", "", Err("unsupported container resource")),
            ("c", "cpu", "", Err("unsupported container resource")),
            ("c", "limits.cpu", "x", Err("divisor")),
            ("c", "limits.cpu", "-1", Err("divisor")),
        ] {
            let selector = ResourceFieldSelector {
                container_name: Some(container.to_owned()),
                resource: resource.to_owned(),
                divisor: (!divisor.is_empty()).then(|| Quantity(divisor.to_owned())),
            };
            let got = resource_field(&pod(), None, &selector, &allocatable);
            match want {
                Ok(want) => {
                    assert_eq!(got.as_deref(), Ok(want), "{container} {resource} {divisor}")
                }
                Err(word) => assert!(got.unwrap_err().contains(word), "{container} {resource}"),
            }
        }
        let mut whole = pod();
        whole.spec.as_mut().unwrap().resources =
            serde_json::from_value(json!({"limits": {"cpu": "1200m"}})).unwrap();
        for (container, resource, want) in [
            ("c", "limits.cpu", "2"),
            ("bare", "limits.cpu", "2"),
            ("bare", "limits.memory", "4294967296"),
            ("bare", "requests.cpu", "0"),
        ] {
            let selector = ResourceFieldSelector {
                container_name: Some(container.to_owned()),
                resource: resource.to_owned(),
                divisor: None,
            };
            let got = resource_field(&whole, None, &selector, &allocatable);
            assert_eq!(got.as_deref(), Ok(want), "{container} {resource}");
        }
        let milli = ResourceFieldSelector {
            container_name: Some("bare".to_owned()),
            resource: "limits.cpu".to_owned(),
            divisor: Some(Quantity("1m".to_owned())),
        };
        assert_eq!(
            resource_field(&whole, None, &milli, &allocatable).as_deref(),
            Ok("1200"),
            "the limit of the pod as a whole"
        );
        let own = ResourceFieldSelector {
            resource: "limits.cpu".to_owned(),
            ..Default::default()
        };
        let pod = pod();
        assert_eq!(
            resource_field(&pod, pod.container("c"), &own, &allocatable).as_deref(),
            Ok("2")
        );
        assert!(resource_field(&pod, None, &own, &allocatable).is_err());
    }
}
