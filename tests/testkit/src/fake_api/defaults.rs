//! What the server makes of an object before it stores it: types, defaults, canonical forms.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use super::resource::Resource;
use super::state::State;

/// An object as it is stored: through its type, without what is empty, with canonical quantities.
///
/// # Errors
/// It is not of the type.
pub(super) fn normalize(resource: &Resource, object: Value) -> Result<Value, String> {
    Ok(tidy(resource, (resource.typed)(object)?))
}

/// The second half of [`normalize`], for an object that went through its type.
pub(super) fn tidy(resource: &Resource, mut typed: Value) -> Value {
    prune(&mut typed, "");
    if resource.is("pods") {
        pod_ips(&mut typed);
    }
    typed
}

/// `Convert_v1_PodStatus_To_core_PodStatus` and back: podIP is the first of podIPs, and wins.
fn pod_ips(pod: &mut Value) {
    let Some(status) = pod.get_mut("status").and_then(Value::as_object_mut) else {
        return;
    };
    let first = status.get("podIPs").map(|ips| ips[0]["ip"].clone());
    match (status.get("podIP").cloned(), first) {
        (Some(own), first) if first.as_ref() != Some(&own) => {
            status.insert("podIPs".to_owned(), json!([{ "ip": own }]));
        }
        (None, Some(first)) => {
            status.insert("podIP".to_owned(), first);
        }
        _ => {}
    }
}

fn prune(value: &mut Value, field: &str) {
    match value {
        Value::Object(fields) => {
            if matches!(field, "capacity" | "allocatable" | "limits" | "requests") {
                for quantity in fields.values_mut() {
                    if let Some(canonical) = quantity.as_str().and_then(canonical) {
                        *quantity = canonical.into();
                    }
                }
            }
            for (name, value) in fields.iter_mut() {
                prune(value, name);
            }
            fields.retain(|name, value| match value {
                Value::Null => false,
                Value::Array(items) => !items.is_empty(),
                Value::Object(inner) => {
                    !(inner.is_empty() && matches!(name.as_str(), "labels" | "annotations"))
                }
                Value::String(text) => {
                    !(text.is_empty()
                        && matches!(
                            name.as_str(),
                            "reason" | "message" | "podIP" | "hostIP" | "containerID" | "phase"
                        ))
                }
                _ => true,
            });
        }
        Value::Array(items) => items.iter_mut().for_each(|item| prune(item, "")),
        _ => {}
    }
}

/// A quantity as the server writes it: `1000m` is `1`, `1024Mi` is `1Gi`. `None` when it is none, or one
/// with an exponent.
fn canonical(quantity: &str) -> Option<String> {
    let digits = quantity
        .find(|c: char| !c.is_ascii_digit() && c != '.' && c != '-' && c != '+')
        .unwrap_or(quantity.len());
    let (number, suffix) = quantity.split_at(digits);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    const DECIMAL: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];
    if fraction.len() > 9 || whole.is_empty() {
        return None;
    }
    let nanos: i128 = format!("{whole}{fraction:0<9}").parse().ok()?;
    if !suffix.is_empty()
        && let Some(power) = BINARY.iter().position(|s| *s == suffix)
    {
        let nanos = nanos.checked_mul(1024_i128.checked_pow(u32::try_from(power).ok()?)?)?;
        if nanos % 1_000_000_000 == 0 && (nanos / 1_000_000_000).abs() >= 1024 {
            let mut value = nanos / 1_000_000_000;
            let mut power = 0;
            while value % 1024 == 0 && power + 1 < BINARY.len() {
                value /= 1024;
                power += 1;
            }
            return Some(format!("{value}{}", BINARY[power]));
        }
        return Some(decimal(nanos, &DECIMAL));
    }
    let power = DECIMAL.iter().position(|s| *s == suffix)?;
    // Nano is the smallest; what is finer is rounded up.
    let scaled = if power >= 3 {
        nanos.checked_mul(1000_i128.checked_pow(u32::try_from(power - 3).ok()?)?)?
    } else {
        let by = 1000_i128.pow(u32::try_from(3 - power).ok()?);
        nanos.div_euclid(by) + i128::from(nanos.rem_euclid(by) != 0)
    };
    Some(decimal(scaled, &DECIMAL))
}

fn decimal(mut value: i128, suffixes: &[&str; 10]) -> String {
    if value == 0 {
        return "0".to_owned();
    }
    let mut power = 0;
    while value % 1000 == 0 && power + 1 < suffixes.len() {
        value /= 1000;
        power += 1;
    }
    format!("{value}{}", suffixes[power])
}

/// What a new object gets that its maker left out.
pub(super) fn on_create(state: &State, resource: &Resource, object: &mut Value) {
    match resource.plural {
        "pods" => pod(state, object),
        "nodes" => {
            default(&mut object["spec"], json!({}));
            default(&mut object["status"], json!({}));
        }
        "secrets" => {
            let strings = object["stringData"].take();
            if let Value::Object(strings) = strings {
                for (name, text) in strings {
                    let bytes = text.as_str().unwrap_or_default();
                    object["data"][name] = STANDARD.encode(bytes).into();
                }
            }
            if let Value::Object(fields) = object {
                fields.shift_remove("stringData");
            }
            default(&mut object["type"], json!("Opaque"));
        }
        "services" => {
            default(&mut object["spec"]["type"], json!("ClusterIP"));
            default(&mut object["spec"]["sessionAffinity"], json!("None"));
            each(&mut object["spec"]["ports"], |port| {
                default(&mut port["protocol"], json!("TCP"));
                let own = port["port"].clone();
                default(&mut port["targetPort"], own);
            });
            object["status"] = json!({ "loadBalancer": {} });
        }
        "namespaces" => {
            object["spec"] = json!({ "finalizers": ["kubernetes"] });
            object["status"] = json!({ "phase": "Active" });
        }
        "certificatesigningrequests" => object["status"] = json!({}),
        _ => {}
    }
}

fn pod(state: &State, pod: &mut Value) {
    let spec = &mut pod["spec"];
    default(&mut spec["restartPolicy"], json!("Always"));
    default(&mut spec["terminationGracePeriodSeconds"], json!(30));
    default(&mut spec["dnsPolicy"], json!("ClusterFirst"));
    default(&mut spec["securityContext"], json!({}));
    default(&mut spec["schedulerName"], json!("default-scheduler"));
    default(&mut spec["enableServiceLinks"], json!(true));
    priority(state, spec);
    match spec["serviceAccountName"].as_str().map(str::to_owned) {
        Some(name) => default(&mut spec["serviceAccount"], name.into()),
        None => {
            if let Some(name) = spec["serviceAccount"].as_str().map(str::to_owned) {
                spec["serviceAccountName"] = name.into();
            }
        }
    }
    let host_network = spec["hostNetwork"] == true;
    for list in ["initContainers", "containers"] {
        each(&mut spec[list], |c| container(c, host_network));
    }
    each(&mut spec["volumes"], volume);
    let qos = qos_class(spec);
    // Whatever the maker says: a new pod is pending.
    pod["status"] = json!({ "phase": "Pending", "qosClass": qos });
}

fn priority(state: &State, spec: &mut Value) {
    let (value, policy) = priority_of(state, spec);
    default(&mut spec["priority"], value);
    default(&mut spec["preemptionPolicy"], policy);
}

/// What the priority class of a pod comes to: `spec.priority` and `spec.preemptionPolicy`.
pub(super) fn priority_of(state: &State, spec: &Value) -> (Value, Value) {
    let (mut value, mut policy) = (json!(0), json!("PreemptLowerPriority"));
    if let Some(name) = spec["priorityClassName"].as_str() {
        let class = super::resource::find("scheduling.k8s.io", "v1", "priorityclasses")
            .and_then(|index| state.get(&(index, String::new(), name.to_owned())));
        match (name, class) {
            (_, Some(class)) => {
                value = class["value"].clone();
                if let Some(own) = class.get("preemptionPolicy") {
                    policy = own.clone();
                }
            }
            ("system-node-critical", None) => value = json!(2_000_001_000),
            ("system-cluster-critical", None) => value = json!(2_000_000_000),
            _ => {}
        }
    }
    (value, policy)
}

fn container(container: &mut Value, host_network: bool) {
    default(&mut container["resources"], json!({}));
    default(
        &mut container["terminationMessagePath"],
        json!("/dev/termination-log"),
    );
    default(&mut container["terminationMessagePolicy"], json!("File"));
    let image = container["image"].as_str().unwrap_or_default();
    let name = image.rsplit('/').next().unwrap_or_default();
    let latest = !name.contains('@') && (!name.contains(':') || name.ends_with(":latest"));
    let policy = if latest { "Always" } else { "IfNotPresent" };
    default(&mut container["imagePullPolicy"], json!(policy));
    each(&mut container["ports"], |port| {
        default(&mut port["protocol"], json!("TCP"));
        if host_network {
            let own = port["containerPort"].clone();
            default(&mut port["hostPort"], own);
        }
    });
    each(&mut container["env"], |env| {
        if let Some(field) = env.pointer_mut("/valueFrom/fieldRef") {
            default(&mut field["apiVersion"], json!("v1"));
        }
        if let Some(field) = env.pointer_mut("/valueFrom/resourceFieldRef") {
            default(&mut field["divisor"], json!("0"));
        }
    });
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        let probe = &mut container[probe];
        if !probe.is_object() {
            continue;
        }
        for (field, value) in [
            ("timeoutSeconds", 1),
            ("periodSeconds", 10),
            ("successThreshold", 1),
            ("failureThreshold", 3),
        ] {
            default(&mut probe[field], json!(value));
        }
        if probe["httpGet"].is_object() {
            default(&mut probe["httpGet"]["path"], json!("/"));
            default(&mut probe["httpGet"]["scheme"], json!("HTTP"));
        }
    }
    let limits = container["resources"]["limits"].clone();
    if let Value::Object(limits) = limits {
        for (name, value) in limits {
            default(&mut container["resources"]["requests"][name], value);
        }
    }
}

fn volume(volume: &mut Value) {
    for source in ["configMap", "secret", "downwardAPI", "projected"] {
        if volume[source].is_object() {
            default(&mut volume[source]["defaultMode"], json!(0o644));
        }
    }
    if volume["hostPath"].is_object() {
        default(&mut volume["hostPath"]["type"], json!(""));
    }
    let items = |source: &mut Value| {
        if let Some(list) = source.pointer_mut("/downwardAPI/items") {
            each(list, |item| {
                if item["fieldRef"].is_object() {
                    default(&mut item["fieldRef"]["apiVersion"], json!("v1"));
                }
            });
        }
    };
    items(volume);
    if let Some(sources) = volume.pointer_mut("/projected/sources") {
        each(sources, |source| {
            items(source);
            if source["serviceAccountToken"].is_object() {
                let token = &mut source["serviceAccountToken"];
                default(&mut token["expirationSeconds"], json!(3600));
            }
        });
    }
    let sources = [
        "configMap",
        "secret",
        "downwardAPI",
        "projected",
        "hostPath",
        "emptyDir",
        "csi",
        "nfs",
        "persistentVolumeClaim",
        "ephemeral",
        "iscsi",
        "image",
    ];
    if sources.iter().all(|source| volume[*source].is_null()) {
        default(&mut volume["emptyDir"], json!({}));
    }
}

/// `GetPodQOS`.
fn qos_class(spec: &Value) -> &'static str {
    let (mut any, mut guaranteed) = (false, true);
    for list in ["initContainers", "containers"] {
        for container in spec[list].as_array().into_iter().flatten() {
            let resources = &container["resources"];
            for name in ["cpu", "memory"] {
                let (request, limit) = (&resources["requests"][name], &resources["limits"][name]);
                any |= !request.is_null() || !limit.is_null();
                guaranteed &= !limit.is_null() && request == limit;
            }
        }
    }
    match (any, guaranteed) {
        (false, _) => "BestEffort",
        (true, true) => "Guaranteed",
        (true, false) => "Burstable",
    }
}

/// Indexing makes nulls; they go again when the object is normalized.
fn default(slot: &mut Value, value: Value) {
    if slot.is_null() {
        *slot = value;
    }
}

fn each(list: &mut Value, mut change: impl FnMut(&mut Value)) {
    if let Value::Array(items) = list {
        items.iter_mut().for_each(&mut change);
    }
}

/// An event of one API as the other one shows it.
pub(super) fn convert_event(event: &Value, to_core: bool) -> Value {
    const PAIRS: [(&str, &str); 8] = [
        ("involvedObject", "regarding"),
        ("message", "note"),
        ("reportingComponent", "reportingController"),
        ("source", "deprecatedSource"),
        ("firstTimestamp", "deprecatedFirstTimestamp"),
        ("lastTimestamp", "deprecatedLastTimestamp"),
        ("count", "deprecatedCount"),
        ("", ""),
    ];
    let mut out = Map::new();
    for (name, value) in event.as_object().into_iter().flatten() {
        let other = PAIRS.iter().find_map(|(core, events)| match to_core {
            true if events == name => Some(*core),
            false if core == name => Some(*events),
            _ => None,
        });
        out.insert(other.unwrap_or(name).to_owned(), value.clone());
    }
    let version = if to_core { "v1" } else { "events.k8s.io/v1" };
    out.insert("apiVersion".to_owned(), version.into());
    if to_core && !out.contains_key("involvedObject") {
        out.insert("involvedObject".to_owned(), json!({}));
    }
    Value::Object(out)
}

#[cfg(test)]
mod tests {
    use super::canonical;

    #[test]
    fn quantities_are_written_as_the_server_writes_them() {
        for (given, stored) in [
            ("2000m", "2"),
            ("1500m", "1500m"),
            ("1048576Ki", "1Gi"),
            ("1.5", "1500m"),
            ("1000000000", "1G"),
            ("1.5Gi", "1536Mi"),
            ("512", "512"),
            ("0", "0"),
            ("0.5Ki", "512"),
        ] {
            assert_eq!(canonical(given).as_deref(), Some(stored), "{given}");
        }
        assert_eq!(canonical("x"), None);
    }
}
