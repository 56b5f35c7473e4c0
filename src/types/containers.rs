//! The containers of a pod spec of all kinds, in one order.

use std::borrow::Cow;

use k8s_openapi::api::core::v1::{Container, EphemeralContainer, Pod};

use super::pod::PodExt;

/// Role of a container in a spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContainerKind {
    /// Runs to its end before the next one starts.
    Init,
    /// An init container with `restartPolicy: Always`: starts in its turn and stays.
    Sidecar,
    /// One of `spec.containers`.
    Main,
    /// Added to a running pod, never restarted.
    Ephemeral,
}

impl ContainerKind {
    /// Returns whether it belongs to `spec.initContainers`.
    pub fn is_init(self) -> bool {
        matches!(self, Self::Init | Self::Sidecar)
    }
}

/// A container of a spec.
#[derive(Clone, Debug)]
pub struct ContainerSpec<'a> {
    /// Its kind.
    pub kind: ContainerKind,
    /// Its place in its list.
    pub index: usize,
    /// Its spec; an ephemeral container's as that of a container.
    pub container: Cow<'a, Container>,
    /// `targetContainerName` of an ephemeral container.
    pub target: Option<&'a str>,
}

impl ContainerSpec<'_> {
    /// `spec.containers{a}`, `spec.initContainers{a}` or `spec.ephemeralContainers{a}`, as events name it.
    pub fn field_path(&self) -> String {
        let list = match self.kind {
            ContainerKind::Init | ContainerKind::Sidecar => "initContainers",
            ContainerKind::Main => "containers",
            ContainerKind::Ephemeral => "ephemeralContainers",
        };
        format!("spec.{list}{{{}}}", self.container.name)
    }
}

/// Returns whether an init container is a sidecar; upstream's `IsRestartableInitContainer`.
pub fn is_sidecar(init: &Container) -> bool {
    init.restart_policy.as_deref() == Some("Always")
}

/// All containers of a pod: init containers and sidecars, main ones, ephemeral ones, each in the order of
/// the spec.
pub fn containers_of(pod: &Pod) -> impl Iterator<Item = ContainerSpec<'_>> {
    let init = pod.init_containers().iter().enumerate().map(|(index, c)| {
        let kind = if is_sidecar(c) {
            ContainerKind::Sidecar
        } else {
            ContainerKind::Init
        };
        borrowed(kind, index, c)
    });
    let main = pod.containers().iter().enumerate();
    let main = main.map(|(index, c)| borrowed(ContainerKind::Main, index, c));
    let ephemeral = pod.ephemeral_containers().iter().enumerate();
    let ephemeral = ephemeral.map(|(index, c)| ContainerSpec {
        kind: ContainerKind::Ephemeral,
        index,
        container: Cow::Owned(as_container(c)),
        target: c.target_container_name.as_deref().filter(|t| !t.is_empty()),
    });
    init.chain(main).chain(ephemeral)
}

/// The container of that name, of whatever kind; names are unique in a pod.
pub fn container_of<'a>(pod: &'a Pod, name: &str) -> Option<ContainerSpec<'a>> {
    containers_of(pod).find(|c| c.container.name == name)
}

fn borrowed(kind: ContainerKind, index: usize, container: &Container) -> ContainerSpec<'_> {
    ContainerSpec {
        kind,
        index,
        container: Cow::Borrowed(container),
        target: None,
    }
}

/// An ephemeral container as a container; upstream's conversion of `EphemeralContainerCommon`.
pub fn as_container(ephemeral: &EphemeralContainer) -> Container {
    let e = ephemeral.clone();
    Container {
        args: e.args,
        command: e.command,
        env: e.env,
        env_from: e.env_from,
        image: e.image,
        image_pull_policy: e.image_pull_policy,
        lifecycle: e.lifecycle,
        liveness_probe: e.liveness_probe,
        name: e.name,
        ports: e.ports,
        readiness_probe: e.readiness_probe,
        resize_policy: e.resize_policy,
        resources: e.resources,
        restart_policy: e.restart_policy,
        restart_policy_rules: e.restart_policy_rules,
        security_context: e.security_context,
        startup_probe: e.startup_probe,
        stdin: e.stdin,
        stdin_once: e.stdin_once,
        termination_message_path: e.termination_message_path,
        termination_message_policy: e.termination_message_policy,
        tty: e.tty,
        volume_devices: e.volume_devices,
        volume_mounts: e.volume_mounts,
        working_dir: e.working_dir,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_kinds_come_in_one_order() {
        let pod: Pod = serde_json::from_value(serde_json::json!({"spec": {
            "containers": [{"name": "m"}],
            "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
            "ephemeralContainers": [{"name": "e", "image": "x", "targetContainerName": "m"}],
        }}))
        .unwrap();
        let seen: Vec<_> = containers_of(&pod)
            .map(|c| (c.kind, c.index, c.field_path()))
            .collect();
        use ContainerKind::{Ephemeral, Init, Main, Sidecar};
        let want = [
            (Init, 0, "spec.initContainers{i}"),
            (Sidecar, 1, "spec.initContainers{s}"),
            (Main, 0, "spec.containers{m}"),
            (Ephemeral, 0, "spec.ephemeralContainers{e}"),
        ];
        assert_eq!(seen, want.map(|(k, i, p)| (k, i, p.to_owned())));
        let debug = container_of(&pod, "e").unwrap();
        assert_eq!(debug.target, Some("m"));
        assert_eq!(debug.container.image.as_deref(), Some("x"));
        assert!(container_of(&pod, "nobody").is_none());
    }
}
