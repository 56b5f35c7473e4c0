//! The v1 defaults an API server would have set; upstream's `SetObjectDefaults_Pod` for the fields that
//! this version supports.

use k8s_openapi::api::core::v1::{
    Container, EmptyDirVolumeSource, HTTPGetAction, Pod, PodSpec, Probe, Volume,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Priority of `system-cluster-critical`.
const SYSTEM_CLUSTER_CRITICAL: i32 = 2_000_000_000;
/// Priority of `system-node-critical`.
const SYSTEM_NODE_CRITICAL: i32 = 2_000_001_000;

/// Fills in what the manifest leaves open.
pub(super) fn apply(pod: &mut Pod) {
    let Some(spec) = pod.spec.as_mut() else {
        return;
    };
    set(&mut spec.restart_policy, "Always");
    set(&mut spec.dns_policy, "ClusterFirst");
    set(&mut spec.scheduler_name, "default-scheduler");
    spec.termination_grace_period_seconds.get_or_insert(30);
    spec.enable_service_links.get_or_insert(true);
    if spec.priority.is_none() {
        spec.priority = match spec.priority_class_name.as_deref() {
            Some("system-node-critical") => Some(SYSTEM_NODE_CRITICAL),
            Some("system-cluster-critical") => Some(SYSTEM_CLUSTER_CRITICAL),
            _ => None,
        };
    }
    let host_network = spec.host_network.unwrap_or(false);
    let init = spec.init_containers.iter_mut().flatten();
    for container in init.chain(&mut spec.containers) {
        apply_container(container, host_network);
    }
    apply_pod_resources(spec);
    for volume in spec.volumes.iter_mut().flatten() {
        apply_volume(volume);
    }
}

fn apply_container(container: &mut Container, host_network: bool) {
    let image = container.image.as_deref().unwrap_or_default();
    let pull = pull_policy(image);
    set(&mut container.image_pull_policy, pull);
    set(
        &mut container.termination_message_path,
        "/dev/termination-log",
    );
    set(&mut container.termination_message_policy, "File");
    for port in container.ports.iter_mut().flatten() {
        set(&mut port.protocol, "TCP");
        if host_network && port.host_port.unwrap_or(0) == 0 {
            port.host_port = Some(port.container_port);
        }
    }
    let probes = [
        &mut container.liveness_probe,
        &mut container.readiness_probe,
        &mut container.startup_probe,
    ];
    probes.into_iter().flatten().for_each(apply_probe);
    if let Some(lifecycle) = container.lifecycle.as_mut() {
        let hooks = [&mut lifecycle.post_start, &mut lifecycle.pre_stop];
        let hooks = hooks.into_iter().flatten();
        hooks.for_each(|hook| apply_http_get(hook.http_get.as_mut()));
    }
    let Some(resources) = container.resources.as_mut() else {
        return;
    };
    if let Some(limits) = &resources.limits {
        let requests = resources.requests.get_or_insert_default();
        for (name, limit) in limits {
            requests
                .entry(name.clone())
                .or_insert_with(|| Quantity(limit.0.clone()));
        }
    }
}

fn apply_probe(probe: &mut Probe) {
    let numbers = [
        (&mut probe.timeout_seconds, 1),
        (&mut probe.period_seconds, 10),
        (&mut probe.success_threshold, 1),
        (&mut probe.failure_threshold, 3),
    ];
    for (field, default) in numbers {
        if field.unwrap_or(0) == 0 {
            *field = Some(default);
        }
    }
    apply_http_get(probe.http_get.as_mut());
    if let Some(grpc) = probe.grpc.as_mut() {
        grpc.service.get_or_insert_default();
    }
}

fn apply_http_get(http: Option<&mut HTTPGetAction>) {
    if let Some(http) = http {
        set(&mut http.path, "/");
        set(&mut http.scheme, "HTTP");
    }
}

/// The pod requests its limit of what no container requests.
fn apply_pod_resources(spec: &mut PodSpec) {
    let Some(resources) = spec.resources.as_mut() else {
        return;
    };
    let Some(limits) = &resources.limits else {
        return;
    };
    for (name, limit) in limits {
        let of_containers = spec.containers.iter().any(|c| {
            let requests = c.resources.as_ref().and_then(|r| r.requests.as_ref());
            requests.is_some_and(|r| r.contains_key(name))
        });
        if !of_containers {
            let requests = resources.requests.get_or_insert_default();
            requests
                .entry(name.clone())
                .or_insert_with(|| Quantity(limit.0.clone()));
        }
    }
}

/// A volume without a source is an empty directory.
fn apply_volume(volume: &mut Volume) {
    let bare = Volume {
        name: volume.name.clone(),
        ..Volume::default()
    };
    if *volume == bare {
        volume.empty_dir = Some(EmptyDirVolumeSource::default());
    }
    if let Some(host_path) = volume.host_path.as_mut() {
        host_path.type_.get_or_insert_default();
    }
    if let Some(image) = volume.image.as_mut() {
        let pull = pull_policy(image.reference.as_deref().unwrap_or_default());
        set(&mut image.pull_policy, pull);
    }
}

/// `latest`, said or implied, is always pulled; a digest or another tag only when it is absent.
fn pull_policy(image: &str) -> &'static str {
    if image.contains('@') {
        return "IfNotPresent";
    }
    let last = image.rsplit('/').next().unwrap_or_default();
    match last.split_once(':') {
        None | Some((_, "latest")) => "Always",
        Some(_) => "IfNotPresent",
    }
}

fn set(field: &mut Option<String>, default: &str) {
    if field.as_deref().is_none_or(str::is_empty) {
        *field = Some(default.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::pull_policy;

    #[test]
    fn pull_policy_follows_the_tag() {
        assert_eq!(pull_policy("busybox"), "Always");
        assert_eq!(pull_policy("busybox:latest"), "Always");
        assert_eq!(pull_policy("host:5000/busybox"), "Always");
        assert_eq!(pull_policy("host:5000/busybox:1"), "IfNotPresent");
        assert_eq!(pull_policy("busybox@sha256:00"), "IfNotPresent");
    }
}
