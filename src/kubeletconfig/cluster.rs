//! The settings of a node that joins a cluster: how they are read and which rules they must obey.

use std::collections::BTreeMap;

use super::decode::{Reader, Settings};
use super::fields::misspelt;
use super::flags::{KubeletFlags, Labels, Reserved, Taints};
use super::problem::{Origin, Warning};
use super::types::{KubeletConfiguration, Taint};
use super::validate::is_dns_subdomain;
use super::yaml::Value;
use crate::types::quantity::nanos;

/// client-go's rate and burst for a configuration that says 0.
const CLIENT_GO_LIMITS: (u32, u32) = (5, 10);

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

/// Reads the reservation of one resource, in billionths.
pub(super) fn parse_reserved(resource: &str, text: &str) -> Result<i128, String> {
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
pub(super) fn parse_taint(text: &str) -> Result<Taint, String> {
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

/// Takes one field over from a file. `again`: an earlier file or flag set it. False when the field is none of
/// these.
pub(super) fn take(
    r: &mut Reader<'_>,
    c: &mut KubeletConfiguration,
    d: &KubeletConfiguration,
    path: &str,
    again: bool,
) -> bool {
    let owned = |text: Option<&str>| text.map(str::to_owned);
    match path {
        "port" => {
            let port: Option<u16> = r.int("a port from 1 to 65535, or 0 for the default");
            c.port = port.filter(|port| *port != 0).unwrap_or(d.port);
        }
        "rotateCertificates" => c.rotate_certificates = r.bool().unwrap_or(d.rotate_certificates),
        "nodeStatusUpdateFrequency" => {
            c.node_status_update_frequency = r.period().unwrap_or(d.node_status_update_frequency);
        }
        "nodeStatusReportFrequency" => {
            c.node_status_report_frequency = r.period().unwrap_or(d.node_status_report_frequency);
        }
        "nodeLeaseDurationSeconds" => {
            let seconds: Option<i32> = r.int("a number from 0 (which means 40)");
            c.node_lease_duration_seconds = seconds
                .filter(|seconds| *seconds != 0)
                .unwrap_or(d.node_lease_duration_seconds);
        }
        "nodeStatusMaxImages" => {
            let images: Option<i32> = r.int("a number from -1 (which means all)");
            match images.map(max_images) {
                Some(Err(message)) => {
                    let place = r.node.place;
                    r.fail_at(place, message);
                }
                Some(Ok(images)) => c.node_status_max_images = images,
                None => c.node_status_max_images = d.node_status_max_images,
            }
        }
        "contentType" => {
            c.content_type = owned(r.filled()).unwrap_or_else(|| d.content_type.clone());
        }
        "kubeAPIQPS" => {
            let rate: Option<u32> = r.int("a number from 0 (which means 5)");
            c.kube_api_qps = rate.map_or(d.kube_api_qps, qps);
        }
        "kubeAPIBurst" => {
            let count: Option<u32> = r.int("a number from 0 (which means 10)");
            c.kube_api_burst = count.map_or(d.kube_api_burst, burst);
        }
        "configMapAndSecretChangeDetectionStrategy" => {
            c.config_map_and_secret_change_detection_strategy = owned(r.filled())
                .unwrap_or_else(|| d.config_map_and_secret_change_detection_strategy.clone());
        }
        "systemReserved" => map(
            r,
            &mut c.system_reserved,
            &d.system_reserved,
            again,
            parse_reserved,
        ),
        "kubeReserved" => map(
            r,
            &mut c.kube_reserved,
            &d.kube_reserved,
            again,
            parse_reserved,
        ),
        "enforceNodeAllocatable" => {
            c.enforce_node_allocatable = match r.strings() {
                Some(names) => names.into_iter().map(|(_, name)| name.to_owned()).collect(),
                None => d.enforce_node_allocatable.clone(),
            };
        }
        "allowedUnsafeSysctls" => {
            let names = r.strings().unwrap_or_default();
            c.allowed_unsafe_sysctls = names.into_iter().map(|(_, name)| name.to_owned()).collect();
        }
        "providerID" => c.provider_id = owned(r.filled()),
        "registerNode" => c.register_node = r.bool().unwrap_or(d.register_node),
        "registerWithTaints" => c.register_with_taints = taints(r),
        _ => return false,
    }
    true
}

/// A map of which the first document to name it replaces the default, and later ones add to it.
pub(super) fn map<T: Clone>(
    r: &mut Reader<'_>,
    into: &mut BTreeMap<String, T>,
    default: &BTreeMap<String, T>,
    again: bool,
    parse: impl Fn(&str, &str) -> Result<T, String>,
) {
    let node = r.node;
    let Value::Map(entries) = &node.value else {
        into.clone_from(default);
        return;
    };
    if !again {
        into.clear();
    }
    for entry in entries {
        match &entry.node.value {
            Value::Null => {
                into.remove(&entry.key);
            }
            Value::String(text) => match parse(&entry.key, text) {
                Ok(value) => {
                    into.insert(entry.key.clone(), value);
                }
                Err(message) => {
                    r.fail_at(entry.node.place, message);
                }
            },
            // Its type was told about.
            _ => {}
        }
    }
}

fn taints(r: &mut Reader<'_>) -> Vec<Taint> {
    let node = r.node;
    let Value::List(items) = &node.value else {
        return Vec::new();
    };
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

fn max_images(images: i32) -> Result<Option<u32>, String> {
    match images {
        -1 => Ok(None),
        images => u32::try_from(images)
            .map(Some)
            .map_err(|_| format!("is {images}, expected a number from -1 (which means all)")),
    }
}

fn qps(rate: u32) -> u32 {
    if rate == 0 { CLIENT_GO_LIMITS.0 } else { rate }
}

fn burst(count: u32) -> u32 {
    if count == 0 {
        CLIENT_GO_LIMITS.1
    } else {
        count
    }
}

/// Lays the flags that were given over the settings.
pub(super) fn apply_flags(settings: &mut Settings, flags: &KubeletFlags) {
    macro_rules! over {
        ($flag:literal, $field:literal, $value:expr => $target:ident) => {
            if let Some(value) = $value {
                settings.config.$target = value;
                settings
                    .origins
                    .insert($field, Origin::Flag($flag.to_owned()));
            }
        };
    }
    let f = flags.clone();
    let filled = |text: String| (!text.is_empty()).then_some(text);
    over!("--rotate-certificates", "rotateCertificates", f.rotate_certificates => rotate_certificates);
    over!("--kube-api-qps", "kubeAPIQPS", f.kube_api_qps.map(qps) => kube_api_qps);
    over!("--kube-api-burst", "kubeAPIBurst", f.kube_api_burst.map(burst) => kube_api_burst);
    over!("--kube-api-content-type", "contentType", f.kube_api_content_type.and_then(filled) => content_type);
    over!("--register-node", "registerNode", f.register_node => register_node);
    over!("--register-with-taints", "registerWithTaints", f.register_with_taints.map(|Taints(taints)| taints) => register_with_taints);
    over!("--provider-id", "providerID", f.provider_id.map(filled) => provider_id);
    over!("--port", "port", f.port => port);
    over!("--node-status-update-frequency", "nodeStatusUpdateFrequency", f.node_status_update_frequency => node_status_update_frequency);
    let reserved = |given: Vec<Reserved>| {
        let given = (!given.is_empty()).then_some(given);
        given.map(|given| given.into_iter().flat_map(|Reserved(map)| map).collect())
    };
    over!("--system-reserved", "systemReserved", reserved(f.system_reserved) => system_reserved);
    over!("--kube-reserved", "kubeReserved", reserved(f.kube_reserved) => kube_reserved);
    let names = |names: Vec<String>| names.into_iter().filter(|name| !name.is_empty()).collect();
    over!("--enforce-node-allocatable", "enforceNodeAllocatable", f.enforce_node_allocatable.map(names) => enforce_node_allocatable);
    let sysctls = (!f.allowed_unsafe_sysctls.is_empty()).then_some(f.allowed_unsafe_sysctls);
    over!("--allowed-unsafe-sysctls", "allowedUnsafeSysctls", sysctls.map(names) => allowed_unsafe_sysctls);
    match f.node_status_max_images.map(max_images) {
        Some(Err(message)) => settings.reject_flag("--node-status-max-images", message),
        images => {
            over!("--node-status-max-images", "nodeStatusMaxImages", images.and_then(Result::ok) => node_status_max_images);
        }
    }
    if f.port == Some(0) {
        settings.reject_flag("--port", "is 0, expected a port from 1 to 65535");
    }
    if !matches!(f.cloud_provider.as_deref(), None | Some("" | "external")) {
        settings.reject_flag(
            "--cloud-provider",
            format!(
                "is {:?}, but providers are not built in any more; give \"external\", or leave it out",
                f.cloud_provider.unwrap_or_default()
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
                "{key:?} is not for nodes to give themselves; in the kubernetes.io namespace only these are: {}, and what is below {}",
                OWN_LABELS.join(", "),
                OWN_LABEL_NAMESPACES.join(" and ")
            )
        } else {
            continue;
        };
        settings.reject_flag("--node-labels", message);
    }
}

/// Whether a label is of Kubernetes' namespace and none that a kubelet may set.
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
    let seconds = config.node_lease_duration_seconds;
    if seconds < 1 {
        let message = format!("is {seconds}, expected a number of seconds from 1");
        settings.reject("nodeLeaseDurationSeconds", message);
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
