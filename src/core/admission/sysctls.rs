//! Kernel parameters that a pod may set; upstream's `sysctl.patternAllowlist`.

use k8s_openapi::api::core::v1::Pod;

use super::Refusal;
use crate::types::PodExt;

/// Parameters that cannot hurt other pods; upstream's `SafeSysctlAllowlist`.
const SAFE: [&str; 14] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "net.ipv4.tcp_slow_start_after_idle",
    "net.ipv4.tcp_notsent_lowat",
];
/// Prefixes of the parameters of the IPC namespace; `net.` is that of the network namespace.
const IPC: [&str; 4] = ["kernel.sem", "kernel.shm", "kernel.msg", "fs.mqueue."];

/// The first parameter that the pod may not set.
pub(super) fn forbidden(pod: &Pod, allowed: &[String]) -> Option<Refusal> {
    let spec = pod.spec_ref();
    let host_ipc = spec.host_ipc.unwrap_or(false);
    let sysctls = spec.security_context.as_ref()?.sysctls.as_ref()?;
    sysctls
        .iter()
        .find_map(|sysctl| refusal(&dotted(&sysctl.name), pod.host_network(), host_ipc, allowed))
        .map(|why| {
            (
                "SysctlForbidden".to_owned(),
                format!("forbidden sysctl: {why}"),
            )
        })
}

fn refusal(name: &str, host_network: bool, host_ipc: bool, allowed: &[String]) -> Option<String> {
    let listed = SAFE.contains(&name)
        || allowed
            .iter()
            .any(|pattern| match pattern.strip_suffix('*') {
                Some(prefix) => name.starts_with(&dotted(prefix)),
                None => name == dotted(pattern),
            });
    if !listed {
        return Some(format!("{name:?} not allowlisted"));
    }
    if host_network && name.starts_with("net.") {
        return Some(format!("{name:?} not allowed with host net enabled"));
    }
    if host_ipc && IPC.iter().any(|prefix| name.starts_with(prefix)) {
        return Some(format!("{name:?} not allowed with host ipc enabled"));
    }
    None
}

/// `net/ipv4/tcp_rmem` names the same as `net.ipv4.tcp_rmem`: what the first separator is, the other one
/// stands for itself. Upstream: `ConvertSysctlVariableToDotsSeparator`.
fn dotted(name: &str) -> String {
    match name.find(['.', '/']) {
        Some(at) if name.as_bytes().get(at) == Some(&b'/') => name
            .chars()
            .map(|c| match c {
                '/' => '.',
                '.' => '/',
                other => other,
            })
            .collect(),
        _ => name.to_owned(),
    }
}
