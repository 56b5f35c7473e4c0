//! From the security contexts of a pod and its containers to the runtime's; upstream's
//! `determineEffectiveSecurityContext`, `getSeccompProfile` and `getAppArmorProfile`.
//!
//! Comes in: a pod, a container, the user its image names. Goes out: the `security_context` of the
//! messages that make sandboxes and containers. Pure.
//!
//! **Invariant:** what a container says goes before what its pod says, and what cannot be enforced on this
//! node is an error, never left out.

use std::path::{Component, Path};

use k8s_cri::v1;
use k8s_openapi::api::core::v1::{
    AppArmorProfile, Capabilities, Container, Pod, PodSecurityContext, SELinuxOptions,
    SeccompProfile, SecurityContext,
};

use super::node_context::NodeContext;
use super::sandbox_config::ConfigError;
use crate::types::PodExt;
use crate::types::containers::containers_of;

/// Paths in `/proc` and `/sys` that are hidden from containers: upstream's default masked paths, without those that
/// depend on the machine ([`MachineFacts::masked_paths`](super::node_context::MachineFacts::masked_paths)).
const MASKED_PATHS: &[&str] = &[
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
/// Paths that containers may only read; upstream's default read-only paths.
const READONLY_PATHS: &[&str] = &[
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];
/// Prefix of the annotation that named a container's AppArmor profile before there was a field.
const APPARMOR_ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";
/// Highest user or group that Kubernetes takes.
const MAX_ID: i64 = i32::MAX as i64;

/// The user an image is made for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageUser {
    /// As a number, when the image gives one.
    pub uid: Option<i64>,
    /// As a name, else empty.
    pub username: String,
}

impl ImageUser {
    /// The user of an image as the runtime reports it; root if it reports none. Upstream: `getImageUser`.
    pub fn of(image: &v1::Image) -> Self {
        match &image.uid {
            Some(uid) => Self {
                uid: Some(uid.value),
                username: String::new(),
            },
            None if image.username.is_empty() => Self {
                uid: Some(0),
                username: String::new(),
            },
            None => Self {
                uid: None,
                username: image.username.clone(),
            },
        }
    }
}

/// Inputs of a container's isolation other than its spec.
#[derive(Clone, Copy, Debug, Default)]
pub struct Isolation<'a> {
    /// User of the image; the runtime looks itself when `None`.
    pub image_user: Option<&'a ImageUser>,
    /// ID of the container whose processes an ephemeral container is to see.
    pub target: Option<&'a str>,
    /// User namespace of the sandbox.
    pub user_namespace: Option<&'a v1::UserNamespace>,
}

/// Effective security settings of one container: its own over those of the pod; upstream's
/// `DetermineEffectiveSecurityContext`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Effective<'a> {
    /// `runAsUser`.
    pub run_as_user: Option<i64>,
    /// `runAsGroup`.
    pub run_as_group: Option<i64>,
    /// `runAsNonRoot`.
    pub run_as_non_root: bool,
    /// `seLinuxOptions`.
    pub selinux: Option<&'a SELinuxOptions>,
    /// `seccompProfile`.
    pub seccomp: Option<&'a SeccompProfile>,
    own: Option<&'a SecurityContext>,
    pod: Option<&'a PodSecurityContext>,
}

impl<'a> Effective<'a> {
    /// The settings of a container.
    pub fn of(pod: &'a Pod, container: &'a Container) -> Self {
        let pod = pod.spec_ref().security_context.as_ref();
        let own = container.security_context.as_ref();
        Self {
            run_as_user: own.and_then(|c| c.run_as_user).or_else(|| pod?.run_as_user),
            run_as_group: own
                .and_then(|c| c.run_as_group)
                .or_else(|| pod?.run_as_group),
            run_as_non_root: own
                .and_then(|c| c.run_as_non_root)
                .or_else(|| pod?.run_as_non_root)
                .unwrap_or(false),
            selinux: own
                .and_then(|c| c.se_linux_options.as_ref())
                .or_else(|| pod?.se_linux_options.as_ref()),
            seccomp: own
                .and_then(|c| c.seccomp_profile.as_ref())
                .or_else(|| pod?.seccomp_profile.as_ref()),
            own,
            pod,
        }
    }

    fn privileged(&self) -> bool {
        self.own.and_then(|c| c.privileged).unwrap_or(false)
    }
}

/// Returns whether a container is privileged.
pub fn is_privileged(container: &Container) -> bool {
    let own = container.security_context.as_ref();
    own.and_then(|c| c.privileged).unwrap_or(false)
}

/// The one user all containers run as, who then owns the pod's tokens; upstream's `FsUserFrom`.
pub fn fs_user(pod: &Pod) -> Option<u32> {
    let mut users = pod
        .init_containers()
        .iter()
        .chain(pod.containers())
        .map(|c| Effective::of(pod, c).run_as_user);
    let first = users.next()??;
    users
        .all(|user| user == Some(first))
        .then(|| u32::try_from(first).ok())
        .flatten()
}

/// `fsGroup`: the group that owns the pod's volumes.
pub fn fs_group(pod: &Pod) -> Option<u32> {
    let context = pod.spec_ref().security_context.as_ref()?;
    context.fs_group.and_then(|group| u32::try_from(group).ok())
}

/// Refuses a container that must not run as root and would, or might; upstream's `verifyRunAsNonRoot`.
///
/// # Errors
/// Upstream's texts.
pub fn verify_run_as_non_root(
    pod: &Pod,
    container: &Container,
    image: &ImageUser,
) -> Result<(), ConfigError> {
    let effective = Effective::of(pod, container);
    if !effective.run_as_non_root {
        return Ok(());
    }
    let whose = format!("(pod: {:?}, container: {})", describe(pod), container.name);
    let error = |text: String| Err(ConfigError::Security(text));
    match (effective.run_as_user, image) {
        (Some(0), _) => error(format!(
            "container's runAsUser breaks non-root policy {whose}"
        )),
        (Some(_), _) => Ok(()),
        (None, ImageUser { uid: Some(0), .. }) => error(format!(
            "container has runAsNonRoot and image will run as root {whose}"
        )),
        (
            None,
            ImageUser {
                uid: None,
                username,
            },
        ) if !username.is_empty() => error(format!(
            "container has runAsNonRoot and image has non-numeric user ({username}), cannot verify user is non-root {whose}"
        )),
        (None, _) => Ok(()),
    }
}

/// `name_namespace(uid)`; upstream's `format.Pod`.
fn describe(pod: &Pod) -> String {
    format!("{}_{}({})", pod.name(), pod.namespace(), pod.uid())
}

/// The security context of a container.
///
/// # Errors
/// When it contradicts itself or cannot be enforced on this node.
pub fn container_context(
    pod: &Pod,
    container: &Container,
    isolation: &Isolation<'_>,
    ctx: &NodeContext,
) -> Result<v1::LinuxContainerSecurityContext, ConfigError> {
    let effective = Effective::of(pod, container);
    let whose = format!("container {}", container.name);
    check_ids(
        &whose,
        &[
            ("runAsUser", effective.run_as_user),
            ("runAsGroup", effective.run_as_group),
        ],
    )?;
    if let Some(image) = isolation.image_user {
        verify_run_as_non_root(pod, container, image)?;
    }
    let own = effective.own;
    let privileged = effective.privileged();
    let no_new_privs = own.and_then(|c| c.allow_privilege_escalation) == Some(false);
    if no_new_privs && privileged {
        return Err(ConfigError::Security(format!(
            "{whose}: cannot set `allowPrivilegeEscalation` to false and `privileged` to true"
        )));
    }
    let (run_as_user, run_as_username) = user(&effective, isolation.image_user);
    let hidden = !privileged && !unmasked(pod, container)?;
    let paths = |list: &[&str]| -> Vec<String> {
        let list = list.iter().filter(|_| hidden);
        list.map(ToString::to_string).collect()
    };
    let mut masked_paths = paths(MASKED_PATHS);
    masked_paths.extend(
        ctx.machine
            .get()
            .masked_paths
            .iter()
            .filter(|_| hidden)
            .cloned(),
    );
    let (supplemental_groups, policy) = groups(pod)?;
    Ok(v1::LinuxContainerSecurityContext {
        capabilities: own.and_then(|c| c.capabilities.as_ref()).map(capabilities),
        privileged,
        namespace_options: Some(container_namespaces(pod, isolation)),
        selinux_options: effective.selinux.map(selinux),
        run_as_user: run_as_user.map(int64),
        run_as_group: effective.run_as_group.map(int64),
        run_as_username,
        readonly_rootfs: own
            .and_then(|c| c.read_only_root_filesystem)
            .unwrap_or(false),
        supplemental_groups,
        supplemental_groups_policy: policy.into(),
        no_new_privs,
        masked_paths,
        readonly_paths: paths(READONLY_PATHS),
        seccomp: Some(container_seccomp(&effective, &whose, ctx)?),
        apparmor: apparmor(pod, container, ctx)?,
        ..Default::default()
    })
}

/// The security context of a pod's sandbox. Its own process always has the runtime's seccomp profile.
///
/// # Errors
/// When the pod contradicts itself.
pub fn sandbox_context(pod: &Pod) -> Result<v1::LinuxSandboxSecurityContext, ConfigError> {
    let spec = pod.spec_ref();
    if spec.host_users == Some(false) {
        let shared = [
            ("hostNetwork", pod.host_network()),
            ("hostPID", spec.host_pid.unwrap_or(false)),
            ("hostIPC", spec.host_ipc.unwrap_or(false)),
        ];
        if let Some((field, _)) = shared.iter().find(|(_, set)| *set) {
            return Err(ConfigError::Security(format!(
                "pod {}: {field} may not be set when `hostUsers` is false",
                describe(pod)
            )));
        }
    }
    let context = spec.security_context.as_ref();
    let user = context.and_then(|c| c.run_as_user);
    let group = context.and_then(|c| c.run_as_group);
    check_ids(
        &format!("pod {}", describe(pod)),
        &[("runAsUser", user), ("runAsGroup", group)],
    )?;
    let (supplemental_groups, policy) = groups(pod)?;
    Ok(v1::LinuxSandboxSecurityContext {
        namespace_options: Some(pod_namespaces(pod)),
        selinux_options: context
            .and_then(|c| c.se_linux_options.as_ref())
            .map(selinux),
        run_as_user: user.map(int64),
        // A runtime takes no group without a user; the sandbox's process needs none.
        run_as_group: user.and(group).map(int64),
        supplemental_groups,
        supplemental_groups_policy: policy.into(),
        privileged: containers_of(pod).any(|c| is_privileged(&c.container)),
        seccomp: Some(profile(
            v1::security_profile::ProfileType::RuntimeDefault,
            String::new(),
        )),
        ..Default::default()
    })
}

/// Returns the modes of a pod's namespaces: the node's, the pod's or the container's; upstream's `NamespacesForPod`.
pub fn pod_namespaces(pod: &Pod) -> v1::NamespaceOption {
    let spec = pod.spec_ref();
    let node_or_pod = |node: bool| {
        if node {
            v1::NamespaceMode::Node
        } else {
            v1::NamespaceMode::Pod
        }
    };
    let pid = if spec.host_pid.unwrap_or(false) {
        v1::NamespaceMode::Node
    } else if spec.share_process_namespace.unwrap_or(false) {
        v1::NamespaceMode::Pod
    } else {
        v1::NamespaceMode::Container
    };
    v1::NamespaceOption {
        network: node_or_pod(pod.host_network()).into(),
        pid: pid.into(),
        ipc: node_or_pod(spec.host_ipc.unwrap_or(false)).into(),
        target_id: String::new(),
        userns_options: None,
    }
}

fn container_namespaces(pod: &Pod, isolation: &Isolation<'_>) -> v1::NamespaceOption {
    let mut options = pod_namespaces(pod);
    options.userns_options = isolation.user_namespace.cloned();
    // Where containers share a namespace the target's processes are seen anyway.
    if let Some(target) = isolation.target
        && options.pid() == v1::NamespaceMode::Container
    {
        options.set_pid(v1::NamespaceMode::Target);
        target.clone_into(&mut options.target_id);
    }
    options
}

/// Returns the user ID or user name of a container: from the spec, else from the image.
fn user(effective: &Effective<'_>, image: Option<&ImageUser>) -> (Option<i64>, String) {
    match (effective.run_as_user, image) {
        (Some(uid), _) => (Some(uid), String::new()),
        (None, Some(image)) => (image.uid, image.username.clone()),
        (None, None) => (None, String::new()),
    }
}

fn int64(value: i64) -> v1::Int64Value {
    v1::Int64Value { value }
}

fn check_ids(whose: &str, ids: &[(&str, Option<i64>)]) -> Result<(), ConfigError> {
    for (field, id) in ids {
        if let Some(id) = id.filter(|id| !(0..=MAX_ID).contains(id)) {
            return Err(ConfigError::Security(format!(
                "{whose}: invalid {field} {id}: must be between 0 and {MAX_ID}, inclusive"
            )));
        }
    }
    Ok(())
}

/// `fsGroup`, `supplementalGroups` and their policy, which only a pod gives.
fn groups(pod: &Pod) -> Result<(Vec<i64>, v1::SupplementalGroupsPolicy), ConfigError> {
    let Some(context) = pod.spec_ref().security_context.as_ref() else {
        return Ok((Vec::new(), v1::SupplementalGroupsPolicy::Merge));
    };
    let own = context.supplemental_groups.iter().flatten().copied();
    let groups: Vec<i64> = context.fs_group.into_iter().chain(own).collect();
    let whose = format!("pod {}", describe(pod));
    check_ids(&whose, &[("fsGroup", context.fs_group)])?;
    for group in &groups {
        check_ids(&whose, &[("supplementalGroups", Some(*group))])?;
    }
    let policy = match context.supplemental_groups_policy.as_deref() {
        None | Some("" | "Merge") => v1::SupplementalGroupsPolicy::Merge,
        Some("Strict") => v1::SupplementalGroupsPolicy::Strict,
        Some(other) => {
            return Err(ConfigError::Security(format!(
                "{whose}: unknown supplementalGroupsPolicy {other:?}; use Merge or Strict"
            )));
        }
    };
    Ok((groups, policy))
}

/// Names as the runtime takes them: without `CAP_`.
fn capabilities(wanted: &Capabilities) -> v1::Capability {
    let names = |list: &Option<Vec<String>>| -> Vec<String> {
        let names = list.iter().flatten();
        names
            .map(|name| match name.get(..4) {
                Some(prefix) if prefix.eq_ignore_ascii_case("CAP_") => name[4..].to_owned(),
                _ => name.clone(),
            })
            .collect()
    };
    v1::Capability {
        add_capabilities: names(&wanted.add),
        drop_capabilities: names(&wanted.drop),
        add_ambient_capabilities: Vec::new(),
    }
}

fn selinux(options: &SELinuxOptions) -> v1::SeLinuxOption {
    v1::SeLinuxOption {
        user: options.user.clone().unwrap_or_default(),
        role: options.role.clone().unwrap_or_default(),
        r#type: options.type_.clone().unwrap_or_default(),
        level: options.level.clone().unwrap_or_default(),
    }
}

fn unmasked(pod: &Pod, container: &Container) -> Result<bool, ConfigError> {
    let own = container.security_context.as_ref();
    match own.and_then(|c| c.proc_mount.as_deref()) {
        None | Some("" | "Default") => Ok(false),
        Some("Unmasked") if pod.spec_ref().host_users == Some(false) => Ok(true),
        Some("Unmasked") => Err(ConfigError::Security(format!(
            "container {}: `hostUsers` must be false to use `Unmasked` procMount",
            container.name
        ))),
        Some(other) => Err(ConfigError::Security(format!(
            "container {}: unknown procMount {other:?}; use Default or Unmasked",
            container.name
        ))),
    }
}

fn profile(type_: v1::security_profile::ProfileType, localhost_ref: String) -> v1::SecurityProfile {
    v1::SecurityProfile {
        profile_type: type_.into(),
        localhost_ref,
    }
}

fn container_seccomp(
    effective: &Effective<'_>,
    whose: &str,
    ctx: &NodeContext,
) -> Result<v1::SecurityProfile, ConfigError> {
    use v1::security_profile::ProfileType::{Localhost, RuntimeDefault, Unconfined};
    let Some(wanted) = effective.seccomp else {
        // A runtime gives a privileged container no profile.
        let default = ctx.seccomp_default && !effective.privileged();
        let type_ = if default { RuntimeDefault } else { Unconfined };
        return Ok(profile(type_, String::new()));
    };
    let file = wanted.localhost_profile.as_deref().unwrap_or_default();
    match wanted.type_.as_str() {
        "RuntimeDefault" => Ok(profile(RuntimeDefault, String::new())),
        "Unconfined" => Ok(profile(Unconfined, String::new())),
        "Localhost" if file.is_empty() => Err(ConfigError::Security(format!(
            "{whose}: localhostProfile must be set if seccompProfile type is Localhost."
        ))),
        "Localhost" => {
            let stays_below = Path::new(file)
                .components()
                .all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
            if !stays_below || file.contains('\0') {
                return Err(ConfigError::Security(format!(
                    "{whose}: seccompProfile localhostProfile {file:?} must be a relative path without \"..\", below {}",
                    ctx.seccomp_root().display()
                )));
            }
            let path = ctx.seccomp_root().join(file);
            Ok(profile(Localhost, path.to_string_lossy().into_owned()))
        }
        other => Err(ConfigError::Security(format!(
            "{whose}: unknown seccompProfile type {other:?}; use RuntimeDefault, Unconfined or Localhost"
        ))),
    }
}

/// The AppArmor profile of a container; `None` where nothing is said. Field of the container, annotation, field of the pod; upstream's `apparmor.GetProfile`.
fn apparmor(
    pod: &Pod,
    container: &Container,
    ctx: &NodeContext,
) -> Result<Option<v1::SecurityProfile>, ConfigError> {
    use v1::security_profile::ProfileType::{Localhost, RuntimeDefault, Unconfined};
    let effective = Effective::of(pod, container);
    let error =
        |text: String| ConfigError::Security(format!("container {}: {text}", container.name));
    let annotation = || {
        let key = format!("{APPARMOR_ANNOTATION}{}", container.name);
        pod.annotations()
            .get(&key)
            .filter(|value| !value.is_empty())
            .map(|value| from_annotation(value))
    };
    let wanted = match effective.own.and_then(|c| c.app_armor_profile.as_ref()) {
        Some(field) => Some(field.clone()),
        None => match annotation() {
            Some(Ok(profile)) => Some(profile),
            Some(Err(why)) => return Err(error(why)),
            None => effective
                .pod
                .and_then(|p| p.app_armor_profile.as_ref())
                .cloned(),
        },
    };
    let Some(wanted) = wanted else {
        return Ok(None);
    };
    let name = wanted.localhost_profile.unwrap_or_default();
    if wanted.type_ != "Unconfined" && !ctx.apparmor {
        return Err(error(
            "Cannot enforce AppArmor: AppArmor is not enabled on the host".to_owned(),
        ));
    }
    match wanted.type_.as_str() {
        "RuntimeDefault" => Ok(Some(profile(RuntimeDefault, String::new()))),
        "Unconfined" => Ok(Some(profile(Unconfined, String::new()))),
        "Localhost" if name.trim().is_empty() => Err(error(
            "localhostProfile must be set if appArmorProfile type is Localhost".to_owned(),
        )),
        "Localhost" => Ok(Some(profile(Localhost, name))),
        other => Err(error(format!(
            "unknown appArmorProfile type {other:?}; use RuntimeDefault, Unconfined or Localhost"
        ))),
    }
}

fn from_annotation(value: &str) -> Result<AppArmorProfile, String> {
    let profile = |type_: &str, name: Option<&str>| AppArmorProfile {
        type_: type_.to_owned(),
        localhost_profile: name.map(str::to_owned),
    };
    match value {
        "runtime/default" => Ok(profile("RuntimeDefault", None)),
        "unconfined" => Ok(profile("Unconfined", None)),
        other => match other.strip_prefix("localhost/") {
            Some(name) => Ok(profile("Localhost", Some(name))),
            None => Err(format!(
                "invalid AppArmor profile name: {value:?}; use runtime/default, unconfined or localhost/<name>"
            )),
        },
    }
}

#[cfg(test)]
#[path = "security_tests.rs"]
mod tests;
