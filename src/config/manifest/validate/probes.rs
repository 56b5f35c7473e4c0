//! Probes, lifecycle hooks and stop signals.

use k8s_openapi::api::core::v1::{
    ExecAction, HTTPGetAction, LifecycleHandler, PodSpec, Probe, TCPSocketAction,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::super::Problems;
use super::names::{is_port_name, one_of};
use crate::kuberuntime::cri::stop_signal;
use crate::types::containers::{ContainerKind, ContainerSpec};

/// All of it, of one container.
pub(super) fn container(
    spec: &PodSpec,
    member: &ContainerSpec<'_>,
    path: &str,
    problems: &mut Problems<'_>,
) {
    let c = member.container.as_ref();
    let probes = [
        ("livenessProbe", c.liveness_probe.as_ref()),
        ("readinessProbe", c.readiness_probe.as_ref()),
        ("startupProbe", c.startup_probe.as_ref()),
    ];
    if member.kind == ContainerKind::Init {
        let probes = probes.iter().map(|(name, probe)| (*name, probe.is_some()));
        let set = probes.chain([
            ("lifecycle", c.lifecycle.is_some()),
            (
                "resizePolicy",
                c.resize_policy.as_ref().is_some_and(|p| !p.is_empty()),
            ),
        ]);
        for (name, _) in set.filter(|(_, set)| *set) {
            problems.add(
                format!("{path}.{name}"),
                "is not for init containers that run to their end; remove it, or make a sidecar of the container with restartPolicy: Always",
            );
        }
        return;
    }
    for (name, probe) in probes {
        if let Some(found) = probe {
            check(name, found, &format!("{path}.{name}"), problems);
        }
    }
    let Some(lifecycle) = &c.lifecycle else {
        return;
    };
    let grace = spec.termination_grace_period_seconds.unwrap_or(30);
    let hooks = [
        ("postStart", lifecycle.post_start.as_ref()),
        ("preStop", lifecycle.pre_stop.as_ref()),
    ];
    for (name, hook) in hooks {
        if let Some(found) = hook {
            handler(found, grace, &format!("{path}.lifecycle.{name}"), problems);
        }
    }
    if let Some(signal) = lifecycle.stop_signal.as_deref() {
        stop_signal(
            spec,
            signal,
            &format!("{path}.lifecycle.stopSignal"),
            problems,
        );
    }
}

fn stop_signal(spec: &PodSpec, signal: &str, path: &str, problems: &mut Problems<'_>) {
    if stop_signal::number_of(signal).is_none() {
        problems.add(
            path,
            format!("{signal:?} is not a signal; write its name in full, like SIGTERM, SIGUSR1 or SIGRTMIN+3"),
        );
    }
    if spec.os.as_ref().is_none_or(|os| os.name.is_empty()) {
        problems.add(path, "needs spec.os.name beside it; set it to linux");
    }
}

fn check(name: &str, probe: &Probe, path: &str, problems: &mut Problems<'_>) {
    let handlers = [
        probe.exec.is_some(),
        probe.grpc.is_some(),
        probe.http_get.is_some(),
        probe.tcp_socket.is_some(),
    ];
    one_handler(&handlers, path, "exec, grpc, httpGet, tcpSocket", problems);
    exec(probe.exec.as_ref(), path, problems);
    http_get(probe.http_get.as_ref(), path, problems);
    tcp_socket(probe.tcp_socket.as_ref(), path, problems);
    if let Some(grpc) = &probe.grpc {
        number(grpc.port, &format!("{path}.grpc.port"), problems);
    }
    let numbers = [
        ("failureThreshold", probe.failure_threshold),
        ("initialDelaySeconds", probe.initial_delay_seconds),
        ("periodSeconds", probe.period_seconds),
        ("successThreshold", probe.success_threshold),
        ("timeoutSeconds", probe.timeout_seconds),
    ];
    for (field, value) in numbers {
        if let Some(value) = value.filter(|v| *v < 0) {
            problems.add(
                format!("{path}.{field}"),
                format!("{value} is negative; leave it out for the default"),
            );
        }
    }
    let readiness = name == "readinessProbe";
    if let Some(threshold) = probe.success_threshold.filter(|t| *t > 1)
        && !readiness
    {
        problems.add(
            format!("{path}.successThreshold"),
            format!("is {threshold}; a {name} takes 1 only, more is for readiness probes"),
        );
    }
    if let Some(grace) = probe.termination_grace_period_seconds {
        let path = format!("{path}.terminationGracePeriodSeconds");
        if readiness {
            problems.add(
                path,
                "has no meaning here, since a readiness probe kills nothing; remove it",
            );
        } else if grace < 1 {
            problems.add(path, format!("is {grace}; it has to be 1 or more"));
        }
    }
}

fn handler(hook: &LifecycleHandler, grace: i64, path: &str, problems: &mut Problems<'_>) {
    let handlers = [
        hook.exec.is_some(),
        hook.http_get.is_some(),
        hook.sleep.is_some(),
        hook.tcp_socket.is_some(),
    ];
    one_handler(&handlers, path, "exec, httpGet, sleep", problems);
    exec(hook.exec.as_ref(), path, problems);
    http_get(hook.http_get.as_ref(), path, problems);
    tcp_socket(hook.tcp_socket.as_ref(), path, problems);
    if let Some(sleep) = &hook.sleep
        && !(0..=grace.max(0)).contains(&sleep.seconds)
    {
        problems.add(
            format!("{path}.sleep.seconds"),
            format!(
                "is {}; it has to be between 0 and the pod's terminationGracePeriodSeconds, {grace}",
                sleep.seconds
            ),
        );
    }
}

fn one_handler(set: &[bool], path: &str, names: &str, problems: &mut Problems<'_>) {
    match set.iter().filter(|s| **s).count() {
        1 => {}
        0 => problems.add(path, format!("does nothing; give it one of {names}")),
        n => problems.add(path, format!("has {n} handlers; keep one of {names}")),
    }
}

fn exec(exec: Option<&ExecAction>, path: &str, problems: &mut Problems<'_>) {
    let command = exec.map(|e| e.command.as_deref().unwrap_or_default());
    if command.is_some_and(<[String]>::is_empty) {
        problems.add(format!("{path}.exec.command"), "is missing");
    }
}

fn http_get(http: Option<&HTTPGetAction>, path: &str, problems: &mut Problems<'_>) {
    let Some(http) = http else { return };
    let path = format!("{path}.httpGet");
    port(&http.port, &format!("{path}.port"), problems);
    if http.scheme.is_some() {
        one_of(
            &format!("{path}.scheme"),
            http.scheme.as_deref(),
            &["", "HTTP", "HTTPS"],
            problems,
        );
    }
    for (index, header) in http.http_headers.iter().flatten().enumerate() {
        let name = header.name.as_str();
        let token = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        if name.is_empty() || !name.bytes().all(token) {
            problems.add(
                format!("{path}.httpHeaders[{index}].name"),
                format!("{name:?} is not the name of a header: letters, digits, '-' and '_'"),
            );
        }
    }
}

fn tcp_socket(tcp: Option<&TCPSocketAction>, path: &str, problems: &mut Problems<'_>) {
    if let Some(tcp) = tcp {
        port(&tcp.port, &format!("{path}.tcpSocket.port"), problems);
    }
}

fn port(value: &IntOrString, path: &str, problems: &mut Problems<'_>) {
    match value {
        IntOrString::Int(port) => number(*port, path, problems),
        IntOrString::String(name) if is_port_name(name) => {}
        IntOrString::String(name) => problems.add(
            path,
            format!("{name:?} is neither a number nor the name of a port: at most 15 lower-case letters, digits and '-', with at least one letter"),
        ),
    }
}

fn number(port: i32, path: &str, problems: &mut Problems<'_>) {
    if !(1..=65535).contains(&port) {
        problems.add(path, format!("{port} has to be between 1 and 65535"));
    }
}
