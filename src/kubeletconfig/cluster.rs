//! The settings of a node that joins a cluster: how they are read and which rules they must obey.

use std::collections::BTreeMap;

use serde_json::json;

use super::codec::{Map, Plain, number};
use super::decode::{Reader, Settings};
use super::encode::quantity;
use super::fields::misspelt;
use super::flags::{KubeletFlags, Labels};
use super::problem::{Origin, Warning};
use super::types::{KubeletConfiguration, Taint};
use super::validate::is_dns_subdomain;
use super::yaml::{Node, Value};
use crate::types::quantity::nanos;

const RESERVABLE: [&str; 4] = ["cpu", "memory", "ephemeral-storage", "pid"];

const EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];

/// Labels of the `kubernetes.io` namespace a node may give itself, as upstream's `KubeletLabels`.
const OWN_LABELS: [&str; 11] = [
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "beta.kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "kubernetes.io/arch",
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
];

const OWN_LABEL_NAMESPACES: [&str; 2] = ["kubelet.kubernetes.io", "node.kubernetes.io"];

/// Amounts that are kept from pods, by resource.
pub(super) const RESERVED: Map<i128> = Map {
    parse: parse_reserved,
    show: |nanos| quantity(*nanos),
    separator: '=',
    hides_empty: false,
};

/// Reads the reservation of one resource, in billionths.
fn parse_reserved(resource: &str, text: &str) -> Result<i128, String> {
    if !RESERVABLE.contains(&resource) {
        return Err(format!(
            "{resource:?} cannot be reserved; possible are {}",
            RESERVABLE.join(", ")
        ));
    }
    match nanos(text) {
        Ok(amount) if amount < 0 => Err(format!("{resource}: {text:?} is negative")),
        Ok(amount) => Ok(amount),
        Err(error) => Err(format!("{resource}: {error}")),
    }
}

/// Reads a taint as upstream's `ParseTaints` does: `key=value:effect` or `key:effect`.
fn parse_taint(text: &str) -> Result<Taint, String> {
    let text = text.trim();
    let (what, effect) = text.split_once(':').ok_or_else(|| {
        format!(
            "{text:?} is not a taint; write it like \"key=value:NoSchedule\" or \"key:NoSchedule\""
        )
    })?;
    let (key, value) = what.split_once('=').unwrap_or((what, ""));
    let taint = Taint {
        key: key.to_owned(),
        value: value.to_owned(),
        effect: effect.to_owned(),
    };
    check_taint(&taint).map(|()| taint)
}

fn parse_taints(text: &str) -> Result<Vec<Taint>, String> {
    let taints = text.split(',').filter(|part| !part.trim().is_empty());
    taints.map(parse_taint).collect()
}

fn check_taint(taint: &Taint) -> Result<(), String> {
    if !is_qualified_name(&taint.key) {
        return Err(format!("{:?} is not the key of a taint", taint.key));
    }
    if !is_label_value(&taint.value) {
        return Err(format!(
            "{:?} is not the value of a taint: at most 63 letters, digits, \"-\", \"_\" and \".\"",
            taint.value
        ));
    }
    if !EFFECTS.contains(&taint.effect.as_str()) {
        return Err(format!(
            "{:?} is not the effect of a taint; possible are {}",
            taint.effect,
            EFFECTS.join(", ")
        ));
    }
    Ok(())
}

/// The taints of `registerWithTaints`.
pub(super) const TAINTS: Plain<Vec<Taint>> = Plain::new(
    |r, _| match &r.node.value {
        Value::List(items) => Some(taints(r, items)),
        _ => None,
    },
    |value| {
        let taint = |t: &Taint| json!({"key": t.key, "value": t.value, "effect": t.effect});
        value.iter().map(taint).collect()
    },
)
.flag(|arg| arg.value_parser(parse_taints), |flag| Ok(flag.one()));

fn taints(r: &mut Reader<'_>, items: &[Node]) -> Vec<Taint> {
    let mut taints = Vec::new();
    for item in items {
        let Value::Map(entries) = &item.value else {
            continue;
        };
        let known = ["key", "value", "effect", "timeAdded"];
        let refused = |key: &str| !known.contains(&key) && misspelt(key, known).is_some();
        if entries.iter().any(|entry| refused(&entry.key)) {
            // The misspelt field is reported already.
            continue;
        }
        let text = |name: &str| {
            let entry = entries.iter().find(|entry| entry.key == name);
            match entry.map(|entry| &entry.node.value) {
                Some(Value::String(text)) => text.clone(),
                _ => String::new(),
            }
        };
        let taint = Taint {
            key: text("key"),
            value: text("value"),
            effect: text("effect"),
        };
        let checked = match text("timeAdded").as_str() {
            "" => check_taint(&taint),
            _ => Err("timeAdded is set by the cluster; leave it out".to_owned()),
        };
        match checked {
            Ok(()) => taints.push(taint),
            Err(message) => {
                r.fail_at(item.place, message);
            }
        }
    }
    taints
}

/// Number of images in a status; -1 for all.
pub(super) const MAX_IMAGES: Plain<Option<u32>> = Plain::new(
    |r, _| match max_images(r.int("a number from -1 (which means all)")?) {
        Ok(images) => Some(images),
        Err(message) => r.fail(message),
    },
    |value| value.map_or(json!(-1), |images| json!(images)),
)
.flag(number::<i32>, |flag| flag.one().map(max_images).transpose());

fn max_images(images: i32) -> Result<Option<u32>, String> {
    match images {
        -1 => Ok(None),
        images => u32::try_from(images)
            .map(Some)
            .map_err(|_| format!("is {images}, expected a number from -1 (which means all)")),
    }
}

/// Checks the flags that no field has.
pub(super) fn check_flags(settings: &mut Settings, f: &KubeletFlags) {
    if !matches!(f.cloud_provider.as_deref(), None | Some("" | "external")) {
        settings.reject_flag(
            "--cloud-provider",
            format!(
                "is {:?}, but providers are not built in any more; give \"external\", or leave it out",
                f.cloud_provider.as_deref().unwrap_or_default()
            ),
        );
    }
    let given = |path: &Option<std::path::PathBuf>| {
        path.as_ref()
            .is_some_and(|path| !path.as_os_str().is_empty())
    };
    if given(&f.bootstrap_kubeconfig) && !given(&f.kubeconfig) {
        settings.reject_flag(
            "--bootstrap-kubeconfig",
            "needs --kubeconfig, the file that is written when the node has its certificate",
        );
    }
    if given(&f.lifeline_kubeconfig) && !given(&f.kubeconfig) {
        settings.reject_flag(
            "--lifeline-kubeconfig",
            "needs --kubeconfig: it replaces the certificate of that file when it has expired",
        );
    }
    check_labels(settings, &f.node_labels);
}

/// Upstream's checks of `--node-labels`.
fn check_labels(settings: &mut Settings, given: &[Labels]) {
    let labels: BTreeMap<_, _> = given.iter().flat_map(|Labels(labels)| labels).collect();
    for (key, value) in labels {
        let message = if !is_qualified_name(key) {
            format!("{key:?} is not a label's key: write it like \"name\" or \"example.com/name\"")
        } else if !is_label_value(value) {
            format!(
                "{value:?} is not a label's value: at most 63 letters, digits, \"-\", \"_\" and \".\""
            )
        } else if is_reserved(key) {
            format!(
                "nodes may not give themselves {key:?}; in the kubernetes.io namespace they may set {}, and labels below {}",
                OWN_LABELS.join(", "),
                OWN_LABEL_NAMESPACES.join(" and ")
            )
        } else {
            continue;
        };
        settings.reject_flag("--node-labels", message);
    }
}

/// Returns whether a label belongs to Kubernetes' namespaces and is not one that a kubelet may set.
fn is_reserved(key: &str) -> bool {
    let Some((namespace, _)) = key.split_once('/') else {
        return false;
    };
    let within = |parent: &str| {
        namespace
            .strip_suffix(parent)
            .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    (within("kubernetes.io") || within("k8s.io"))
        && !OWN_LABELS.contains(&key)
        && !OWN_LABEL_NAMESPACES.into_iter().any(within)
}

/// Checks the merged settings.
pub(super) fn validate(settings: &mut Settings) {
    let config = &mut settings.config;
    // Upstream's default: a file that sets the one frequency and not the other means both.
    let from_file = |origin: Option<&Origin>| matches!(origin, Some(Origin::File { .. }));
    if from_file(settings.origins.get("nodeStatusUpdateFrequency"))
        && !settings.origins.contains_key("nodeStatusReportFrequency")
    {
        config.node_status_report_frequency = config.node_status_update_frequency;
    }
    enforcements(settings);
    sysctls(settings);
    duplicate_taints(settings);
    let content = settings.config.content_type.clone();
    let default = KubeletConfiguration::default().content_type;
    if content != "application/json" && content != default {
        warn(
            settings,
            "contentType",
            format!("is {content:?}, but the API server is spoken to in application/json"),
        );
    }
    let field = "configMapAndSecretChangeDetectionStrategy";
    let strategy = &settings
        .config
        .config_map_and_secret_change_detection_strategy;
    match strategy.as_str() {
        "Watch" => {}
        "Get" | "Cache" => {
            let message = format!("is {strategy:?}, but configMaps and secrets are watched");
            warn(settings, field, message);
        }
        other => {
            let message = format!("is {other:?}, possible are \"Watch\", \"Cache\" and \"Get\"");
            settings.reject(field, message);
        }
    }
}

fn enforcements(settings: &mut Settings) {
    let field = "enforceNodeAllocatable";
    let names = settings.config.enforce_node_allocatable.clone();
    if names.len() > 1 && names.iter().any(|name| name == "none") {
        settings.reject(field, "has \"none\" beside others; leave one of them out");
    }
    for name in names {
        match name.as_str() {
            "pods"
            | "none"
            | "system-reserved"
            | "kube-reserved"
            | "system-reserved-compressible"
            | "kube-reserved-compressible" => {}
            other => {
                let message = format!(
                    "{other:?} is not known; possible are \"pods\", \"system-reserved\", \"kube-reserved\", \"system-reserved-compressible\", \"kube-reserved-compressible\" and \"none\""
                );
                settings.reject(field, message);
            }
        }
    }
}

/// Upstream's checks of the patterns, in `sysctl.NewAllowlist`.
fn sysctls(settings: &mut Settings) {
    for pattern in settings.config.allowed_unsafe_sysctls.clone() {
        let name = pattern.strip_suffix('*').unwrap_or(&pattern);
        // Upstream takes both separators.
        let dotted = name.replace('/', ".");
        let spelled = !name.is_empty()
            && name
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"._-/".contains(&b))
            && name.starts_with(|c: char| c.is_ascii_alphanumeric());
        let namespaced = dotted.starts_with("kernel.shm")
            || dotted.starts_with("kernel.msg")
            || dotted == "kernel.sem"
            || dotted.starts_with("fs.mqueue.")
            || dotted.starts_with("net.");
        if !(spelled && namespaced) {
            settings.reject(
                "allowedUnsafeSysctls",
                format!(
                    "{pattern:?} is not a sysctl with a namespace of its own: possible are kernel.shm*, kernel.msg*, kernel.sem, fs.mqueue.* and net.*"
                ),
            );
        }
    }
}

fn duplicate_taints(settings: &mut Settings) {
    let taints = settings.config.register_with_taints.clone();
    for (index, taint) in taints.iter().enumerate() {
        let same = |other: &Taint| other.key == taint.key && other.effect == taint.effect;
        if taints[..index].iter().any(same) {
            let message = format!("has {}:{} twice; keep one of them", taint.key, taint.effect);
            settings.reject("registerWithTaints", message);
        }
    }
}

fn warn(settings: &mut Settings, field: &'static str, message: String) {
    settings.warnings.push(Warning {
        origin: settings.origin(field),
        field: field.to_owned(),
        message,
    });
}

/// Upstream's `IsQualifiedName`.
fn is_qualified_name(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_dns_subdomain(prefix) && is_name(name),
        None => is_name(text),
    }
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && is_label_value(text)
}

fn is_label_value(text: &str) -> bool {
    let bytes = text.as_bytes();
    let ends = [bytes.first(), bytes.last()];
    bytes.len() <= 63
        && ends.iter().flatten().all(|b| b.is_ascii_alphanumeric())
        && bytes
            .iter()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(b))
}
