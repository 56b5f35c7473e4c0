//! The CRI message that makes a pod's sandbox; upstream's `generatePodSandboxConfig`.
//!
//! Comes in: a pod, the attempt, its cgroup, its DNS settings. Goes out: `PodSandboxConfig`. Pure: the same
//! input gives the same message, so a sandbox may be asked for again after a crash.

use std::collections::HashMap;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::Pod;

use super::env::NotText;
use super::labels;
use super::node_context::NodeContext;
use super::resources::{self, QuantityError};
use super::security;
use crate::types::PodExt;
use crate::types::containers::is_sidecar;

/// A pod or container spec that cannot become a CRI message; upstream's `CreateContainerConfigError`.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A quantity does not parse.
    #[error("read resources of {object}: {source}")]
    Quantity {
        /// Pod or container.
        object: String,
        /// Why.
        #[source]
        source: QuantityError,
    },
    /// A port names a protocol that does not exist.
    #[error(
        "unknown protocol {protocol:?} of port {port} of container {container}; use TCP, UDP or SCTP"
    )]
    Protocol {
        /// The container.
        container: String,
        /// The container port.
        port: i32,
        /// As written.
        protocol: String,
    },
    /// A mount cannot be made as it is written.
    #[error("mount volume {volume} of container {container}: {reason}")]
    Mount {
        /// The container.
        container: String,
        /// The volume.
        volume: String,
        /// Description of the error, with its remedy.
        reason: String,
    },
    /// A command line refers to a variable that is not text.
    #[error("expand {field} of container {container}: {source}")]
    Command {
        /// The container.
        container: String,
        /// `command` or `args`.
        field: &'static str,
        /// Names of the variables.
        #[source]
        source: NotText,
    },
    /// A security context that contradicts itself or cannot be enforced; upstream's words.
    #[error("{0}")]
    Security(String),
    /// A hostname that cannot be given to a pod; upstream's words.
    #[error("{0}")]
    Hostname(String),
    /// A stop signal that cannot be given to the runtime.
    #[error("stop signal {signal:?} of container {container}: {reason}")]
    StopSignal {
        /// The container.
        container: String,
        /// As written.
        signal: String,
        /// Description of the error, with its remedy.
        reason: String,
    },
}

/// Longest hostname the kernel keeps.
const MAX_KERNEL_HOSTNAME: usize = 64;

/// The hostname containers see: `spec.hostnameOverride` as it is, else `spec.hostname`, else the pod's name,
/// cut to 63 characters; upstream's `GeneratePodHostNameAndDomain`.
pub fn hostname(pod: &Pod) -> String {
    if let Some(name) = hostname_override(pod) {
        return name.to_owned();
    }
    let name = pod
        .spec_ref()
        .hostname
        .as_deref()
        .filter(|h| !h.is_empty())
        .unwrap_or_else(|| pod.name());
    let mut end = name.len().min(63);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name[..end].trim_end_matches(['-', '.']).to_owned()
}

fn hostname_override(pod: &Pod) -> Option<&str> {
    let name = pod.spec_ref().hostname_override.as_deref();
    name.filter(|name| !name.is_empty())
}

/// The domain below which the hostname is known, `None` without `spec.subdomain` or where the hostname is
/// given whole.
pub fn host_domain(pod: &Pod, ctx: &NodeContext) -> Option<String> {
    let subdomain = pod.spec_ref().subdomain.as_deref()?;
    (!subdomain.is_empty() && hostname_override(pod).is_none()).then(|| {
        format!("{subdomain}.{}.svc.{}", pod.namespace(), ctx.cluster_domain)
            .trim_end_matches('.')
            .to_owned()
    })
}

/// The hostname for the kernel: the name with its domain where `setHostnameAsFQDN` says so; upstream's
/// `GetNodenameForKernel`.
///
/// # Errors
/// When a name is none, or is longer than the kernel keeps.
pub fn kernel_hostname(pod: &Pod, ctx: &NodeContext) -> Result<String, ConfigError> {
    let spec = pod.spec_ref();
    if let Some(name) = hostname_override(pod) {
        if name.len() > MAX_KERNEL_HOSTNAME {
            return Err(ConfigError::Hostname(format!(
                "pod HostnameOverride {name:?} is too long ({MAX_KERNEL_HOSTNAME} characters is the max, {} characters requested)",
                name.len()
            )));
        }
        return Ok(name.to_owned());
    }
    for (field, value) in [("Hostname", &spec.hostname), ("Subdomain", &spec.subdomain)] {
        let value = value.as_deref().filter(|v| !v.is_empty());
        if let Some(value) = value.filter(|v| !is_dns_label(v)) {
            return Err(ConfigError::Hostname(format!(
                "pod {field} {value:?} is not a valid DNS label: use at most 63 lower case letters, digits and '-', beginning and ending with a letter or digit"
            )));
        }
    }
    let name = hostname(pod);
    match host_domain(pod, ctx) {
        Some(domain) if spec.set_hostname_as_fqdn.unwrap_or(false) => {
            let fqdn = format!("{name}.{domain}");
            if fqdn.len() > MAX_KERNEL_HOSTNAME {
                return Err(ConfigError::Hostname(format!(
                    "failed to construct FQDN from pod hostname and cluster domain, FQDN {fqdn} is too long ({MAX_KERNEL_HOSTNAME} characters is the max, {} characters requested)",
                    fqdn.len()
                )));
            }
            Ok(fqdn)
        }
        _ => Ok(name),
    }
}

fn is_dns_label(name: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    name.len() <= 63
        && name.bytes().all(inner)
        && !name.starts_with('-')
        && !name.ends_with('-')
        && !name.is_empty()
}

/// Builds the message. `cgroup_parent` is the pod's cgroup as the runtime's driver wants it, empty for the
/// runtime's default. On the host network the hostname stays empty, as upstream leaves it: the runtime
/// refuses to set one without a UTS namespace of the pod's own, and containers see the node's name.
///
/// # Errors
/// When a quantity or a port of the spec is invalid.
pub fn build(
    pod: &Pod,
    attempt: u32,
    cgroup_parent: &str,
    dns: v1::DnsConfig,
    ctx: &NodeContext,
) -> Result<v1::PodSandboxConfig, ConfigError> {
    let uid = pod.uid();
    let host_network = pod.host_network();
    Ok(v1::PodSandboxConfig {
        metadata: Some(v1::PodSandboxMetadata {
            name: pod.name().to_owned(),
            uid: uid.to_string(),
            namespace: pod.namespace().to_owned(),
            attempt,
        }),
        hostname: if host_network {
            String::new()
        } else {
            kernel_hostname(pod, ctx)?
        },
        log_directory: ctx
            .pod_log_dir(pod.namespace(), pod.name(), &uid)
            .to_string_lossy()
            .into_owned(),
        dns_config: Some(dns),
        port_mappings: if host_network {
            Vec::new()
        } else {
            port_mappings(pod)?
        },
        labels: sandbox_labels(pod),
        annotations: strings(pod.annotations()),
        linux: Some(linux(pod, cgroup_parent, ctx)?),
        windows: None,
    })
}

/// Labels of the sandbox: the pod's and the three that identify the pod.
fn sandbox_labels(pod: &Pod) -> HashMap<String, String> {
    let mut all = strings(pod.labels());
    all.extend(pod_labels(pod));
    all
}

/// The three labels that identify the pod of a sandbox or container.
pub(super) fn pod_labels(pod: &Pod) -> [(String, String); 3] {
    [
        (labels::POD_NAME.to_owned(), pod.name().to_owned()),
        (labels::POD_NAMESPACE.to_owned(), pod.namespace().to_owned()),
        (labels::POD_UID.to_owned(), pod.uid().to_string()),
    ]
}

fn strings(map: &std::collections::BTreeMap<String, String>) -> HashMap<String, String> {
    map.iter().map(|(k, v)| (k.clone(), v.clone())).collect()
}

fn port_mappings(pod: &Pod) -> Result<Vec<v1::PortMapping>, ConfigError> {
    let mut mappings = Vec::new();
    let sidecars = pod.init_containers().iter().filter(|c| is_sidecar(c));
    for container in pod.containers().iter().chain(sidecars) {
        for port in container.ports.iter().flatten() {
            let protocol =
                protocol(port.protocol.as_deref()).ok_or_else(|| ConfigError::Protocol {
                    container: container.name.clone(),
                    port: port.container_port,
                    protocol: port.protocol.clone().unwrap_or_default(),
                })?;
            let Some(host_port) = port.host_port.filter(|p| *p > 0) else {
                continue;
            };
            mappings.push(v1::PortMapping {
                protocol: protocol.into(),
                container_port: port.container_port,
                host_port,
                host_ip: port.host_ip.clone().unwrap_or_default(),
            });
        }
    }
    Ok(mappings)
}

fn protocol(name: Option<&str>) -> Option<v1::Protocol> {
    match name {
        None | Some("" | "TCP") => Some(v1::Protocol::Tcp),
        Some("UDP") => Some(v1::Protocol::Udp),
        Some("SCTP") => Some(v1::Protocol::Sctp),
        Some(_) => None,
    }
}

fn linux(
    pod: &Pod,
    cgroup_parent: &str,
    ctx: &NodeContext,
) -> Result<v1::LinuxPodSandboxConfig, ConfigError> {
    let (overhead, resources) = resources_of(pod, ctx)?;
    Ok(v1::LinuxPodSandboxConfig {
        cgroup_parent: cgroup_parent.to_owned(),
        security_context: Some(security::sandbox_context(pod)?),
        sysctls: sysctls(pod),
        overhead: Some(overhead),
        resources: Some(resources),
    })
}

/// Returns what the sandbox itself needs, and what its pod has beside that.
///
/// # Errors
/// When a quantity does not parse.
pub fn resources_of(
    pod: &Pod,
    ctx: &NodeContext,
) -> Result<(v1::LinuxContainerResources, v1::LinuxContainerResources), ConfigError> {
    let sum = resources::pod_resources(pod).map_err(|source| ConfigError::Quantity {
        object: format!("pod {}", pod.full_name()),
        source,
    })?;
    Ok((overhead(pod, ctx)?, resources::linux_resources(sum, ctx)))
}

/// `spec.securityContext.sysctls` with dots for separators.
fn sysctls(pod: &Pod) -> HashMap<String, String> {
    let context = pod.spec_ref().security_context.as_ref();
    context
        .and_then(|c| c.sysctls.as_ref())
        .into_iter()
        .flatten()
        .map(|s| (dotted(&s.name), s.value.clone()))
        .collect()
}

/// Returns the name of a sysctl with dots as separators. If its first separator is a slash, slashes and dots are
/// swapped; upstream's `NormalizeName`.
fn dotted(name: &str) -> String {
    match name.find(['.', '/']) {
        Some(at) if name[at..].starts_with('/') => name
            .chars()
            .map(|c| match c {
                '/' => '.',
                '.' => '/',
                c => c,
            })
            .collect(),
        _ => name.to_owned(),
    }
}

/// Returns the resources of the sandbox itself, from `spec.overhead` that the RuntimeClass gave the pod; all zero
/// without.
fn overhead(pod: &Pod, ctx: &NodeContext) -> Result<v1::LinuxContainerResources, ConfigError> {
    let Some(overhead) = pod.spec_ref().overhead.as_ref().filter(|o| !o.is_empty()) else {
        return Ok(v1::LinuxContainerResources::default());
    };
    let error = |source| ConfigError::Quantity {
        object: format!("spec.overhead of pod {}", pod.full_name()),
        source,
    };
    let cpu = overhead.get("cpu").map(resources::milli_value).transpose();
    let memory = overhead.get("memory").map(resources::value).transpose();
    let (cpu, memory) = (cpu.map_err(error)?, memory.map_err(error)?);
    Ok(resources::linux_resources(
        resources::CpuMemory {
            cpu_request: cpu,
            cpu_limit: cpu,
            memory_request: memory,
            memory_limit: memory,
        },
        ctx,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(spec: serde_json::Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {
                "name": "web", "namespace": "shop", "uid": "u1",
                "labels": {"app": "web", "io.kubernetes.pod.name": "forged"},
                "annotations": {"note": "x"},
            },
            "spec": spec,
        }))
        .unwrap()
    }

    fn config(spec: serde_json::Value) -> v1::PodSandboxConfig {
        let ctx = NodeContext::new("n", "/r");
        build(
            &pod(spec),
            3,
            "/kubepods/podu1",
            v1::DnsConfig::default(),
            &ctx,
        )
        .unwrap()
    }

    #[test]
    fn sandbox_says_whose_it_is() {
        let config = config(json!({"containers": [{"name": "c"}]}));
        let metadata = config.metadata.unwrap();
        assert_eq!((metadata.name.as_str(), metadata.attempt), ("web", 3));
        assert_eq!(config.log_directory, "/var/log/pods/shop_web_u1");
        assert_eq!(config.labels["app"], "web");
        assert_eq!(
            config.labels[labels::POD_NAME],
            "web",
            "a pod label cannot forge identity"
        );
        assert_eq!(config.labels[labels::POD_UID], "u1");
        assert_eq!(config.annotations["note"], "x");
        let linux = config.linux.unwrap();
        assert_eq!(linux.cgroup_parent, "/kubepods/podu1");
        let security = linux.security_context.unwrap();
        assert!(!security.privileged);
        assert_eq!(security.seccomp.unwrap().profile_type, 0, "RuntimeDefault");
        assert_eq!(linux.resources.unwrap().cpu_shares, 2);
    }

    #[test]
    fn hostnames_are_cut_and_never_end_in_a_dash() {
        let long = format!("{}-tail", "a".repeat(62));
        for (name, hostname_, want) in [
            ("web", None, "web".to_owned()),
            ("web", Some("db"), "db".to_owned()),
            (long.as_str(), None, "a".repeat(62)),
        ] {
            let mut pod = pod(json!({"containers": [], "hostname": hostname_}));
            pod.metadata.name = Some(name.to_owned());
            assert_eq!(hostname(&pod), want);
        }
    }

    #[test]
    fn the_kernel_is_told_a_name_it_can_keep() {
        let mut ctx = NodeContext::new("n", "/r");
        ctx.cluster_domain = "cluster.local".to_owned();
        let long = "a".repeat(40);
        for (spec, want) in [
            (json!({}), Ok("web")),
            (json!({"hostname": "db"}), Ok("db")),
            (json!({"setHostnameAsFQDN": true}), Ok("web")),
            (json!({"subdomain": "sub"}), Ok("web")),
            (
                json!({"subdomain": "sub", "setHostnameAsFQDN": false}),
                Ok("web"),
            ),
            (
                json!({"subdomain": "sub", "setHostnameAsFQDN": true}),
                Ok("web.sub.shop.svc.cluster.local"),
            ),
            (
                json!({"hostname": long, "subdomain": "sub", "setHostnameAsFQDN": true}),
                Err("is too long (64 characters is the max, 67 characters requested)"),
            ),
            (
                json!({"hostname": "no_label"}),
                Err("pod Hostname \"no_label\" is not a valid DNS label"),
            ),
            (
                json!({"subdomain": "a.b"}),
                Err("pod Subdomain \"a.b\" is not a valid DNS label"),
            ),
            (
                json!({"hostnameOverride": "any.name.at.all", "hostname": "db", "subdomain": "s", "setHostnameAsFQDN": true}),
                Ok("any.name.at.all"),
            ),
            (
                json!({"hostnameOverride": "a".repeat(65)}),
                Err("(64 characters is the max, 65 characters requested)"),
            ),
        ] {
            let mut spec = spec;
            spec["containers"] = json!([]);
            let got = kernel_hostname(&pod(spec.clone()), &ctx).map_err(|e| e.to_string());
            match want {
                Ok(want) => assert_eq!(got.as_deref(), Ok(want), "{spec}"),
                Err(want) => assert!(got.clone().unwrap_err().contains(want), "{spec}: {got:?}"),
            }
        }
    }

    #[test]
    fn host_ports_are_mapped_except_on_the_host_network() {
        let containers = json!([
            {"name": "a", "ports": [{"containerPort": 80, "hostPort": 8080}, {"containerPort": 81}]},
            {"name": "b", "ports": [{"containerPort": 53, "hostPort": 53, "protocol": "UDP", "hostIP": "127.0.0.1"}],
             "securityContext": {"privileged": true}},
        ]);
        let ports = json!([{"containerPort": 90, "hostPort": 9090}]);
        let init = json!([
            {"name": "i", "ports": ports},
            {"name": "s", "restartPolicy": "Always", "ports": ports},
        ]);
        let on_pod = config(json!({"containers": containers, "initContainers": init}));
        assert_eq!(
            on_pod.port_mappings.len(),
            3,
            "of main containers and sidecars"
        );
        assert_eq!(on_pod.port_mappings[2].host_port, 9090);
        assert_eq!(on_pod.port_mappings[1].protocol(), v1::Protocol::Udp);
        assert_eq!(on_pod.port_mappings[1].host_ip, "127.0.0.1");
        assert_eq!(on_pod.hostname, "web");
        assert!(on_pod.linux.unwrap().security_context.unwrap().privileged);
        let on_node = config(json!({"containers": containers, "hostNetwork": true}));
        assert!(on_node.port_mappings.is_empty());
        assert_eq!(on_node.hostname, "");
    }

    #[test]
    fn sysctls_and_overhead_are_passed_on() {
        let linux = |spec| config(spec).linux.unwrap();
        let given = linux(json!({
            "containers": [{"name": "c"}],
            "overhead": {"cpu": "250m", "memory": "64Mi"},
            "securityContext": {"sysctls": [
                {"name": "net.ipv4.tcp_syncookies", "value": "1"},
                {"name": "net/ipv4/conf/eth0.1/arp_filter", "value": "0"},
            ]},
        }));
        assert_eq!(
            given.sysctls,
            HashMap::from([
                ("net.ipv4.tcp_syncookies".to_owned(), "1".to_owned()),
                ("net.ipv4.conf.eth0/1.arp_filter".to_owned(), "0".to_owned()),
            ])
        );
        let overhead = given.overhead.unwrap();
        assert_eq!(
            (
                overhead.cpu_shares,
                overhead.cpu_quota,
                overhead.memory_limit_in_bytes
            ),
            (256, 25_000, 64 << 20)
        );
        let none = linux(json!({"containers": [{"name": "c"}]}));
        assert_eq!(
            none.overhead.unwrap(),
            v1::LinuxContainerResources::default()
        );
        assert!(none.sysctls.is_empty());
    }

    #[test]
    fn an_unknown_protocol_is_named() {
        let pod = pod(
            json!({"containers": [{"name": "a", "ports": [{"containerPort": 80, "protocol": "tcp"}]}]}),
        );
        let ctx = NodeContext::new("n", "/r");
        let error = build(&pod, 0, "", v1::DnsConfig::default(), &ctx).unwrap_err();
        assert!(error.to_string().contains("\"tcp\""), "{error}");
    }
}
