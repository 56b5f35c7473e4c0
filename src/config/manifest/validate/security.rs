//! Security contexts, and what shares namespaces with the host.

use k8s_openapi::api::core::v1::{
    AppArmorProfile, Capabilities, Container, PodSpec, SeccompProfile,
};

use super::super::Problems;
use super::names::one_of;

const PROFILES: &[&str] = &["RuntimeDefault", "Localhost", "Unconfined"];
/// Without `CAP_`, as the API writes them.
const CAPABILITIES: &[&str] = &[
    "ALL",
    "AUDIT_CONTROL",
    "AUDIT_READ",
    "AUDIT_WRITE",
    "BLOCK_SUSPEND",
    "BPF",
    "CHECKPOINT_RESTORE",
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "IPC_LOCK",
    "IPC_OWNER",
    "KILL",
    "LEASE",
    "LINUX_IMMUTABLE",
    "MAC_ADMIN",
    "MAC_OVERRIDE",
    "MKNOD",
    "NET_ADMIN",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_RAW",
    "PERFMON",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYSLOG",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_CHROOT",
    "SYS_MODULE",
    "SYS_NICE",
    "SYS_PACCT",
    "SYS_PTRACE",
    "SYS_RAWIO",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "WAKE_ALARM",
];

/// The pod's security context and namespaces.
pub(super) fn pod(spec: &PodSpec, problems: &mut Problems<'_>) {
    let on = |flag: Option<bool>| flag.unwrap_or(false);
    if on(spec.host_pid) && on(spec.share_process_namespace) {
        problems.add(
            "spec.shareProcessNamespace",
            "cannot stand beside hostPID: true; remove one of the two",
        );
    }
    if spec.host_users == Some(false) {
        let shared = [
            ("hostNetwork", spec.host_network),
            ("hostPID", spec.host_pid),
            ("hostIPC", spec.host_ipc),
        ];
        for (name, _) in shared.iter().filter(|(_, flag)| on(*flag)) {
            problems.add(
                format!("spec.{name}"),
                "cannot stand beside hostUsers: false; users of another namespace have no rights in the host's",
            );
        }
    }
    let Some(context) = &spec.security_context else {
        return;
    };
    let path = "spec.securityContext";
    windows(spec, context.windows_options.is_some(), path, problems);
    let ids = [
        ("fsGroup", context.fs_group),
        ("runAsGroup", context.run_as_group),
        ("runAsUser", context.run_as_user),
    ];
    for (name, id) in ids {
        identity(id, &format!("{path}.{name}"), problems);
    }
    for (index, group) in context.supplemental_groups.iter().flatten().enumerate() {
        identity(
            Some(*group),
            &format!("{path}.supplementalGroups[{index}]"),
            problems,
        );
    }
    let words: [(&str, Option<&str>, &[&str]); 3] = [
        (
            "fsGroupChangePolicy",
            context.fs_group_change_policy.as_deref(),
            &["Always", "OnRootMismatch"],
        ),
        (
            "seLinuxChangePolicy",
            context.se_linux_change_policy.as_deref(),
            &["MountOption", "Recursive"],
        ),
        (
            "supplementalGroupsPolicy",
            context.supplemental_groups_policy.as_deref(),
            &["Merge", "Strict"],
        ),
    ];
    for (name, value, allowed) in words {
        if value.is_some() {
            one_of(&format!("{path}.{name}"), value, allowed, problems);
        }
    }
    let mut names = std::collections::BTreeSet::new();
    for (index, sysctl) in context.sysctls.iter().flatten().enumerate() {
        let path = format!("{path}.sysctls[{index}].name");
        let name = sysctl.name.as_str();
        if !is_sysctl(name) {
            problems.add(
                &path,
                format!("{name:?} is not a sysctl; write one like net.ipv4.ip_forward"),
            );
        } else if !names.insert(name.replace('/', ".")) {
            problems.add(&path, format!("{name:?} is set twice; keep one"));
        }
    }
    seccomp(context.seccomp_profile.as_ref(), path, problems);
    app_armor(context.app_armor_profile.as_ref(), path, problems);
}

/// A container's security context.
pub(super) fn container(
    spec: &PodSpec,
    container: &Container,
    path: &str,
    problems: &mut Problems<'_>,
) {
    let Some(context) = &container.security_context else {
        return;
    };
    let path = format!("{path}.securityContext");
    windows(spec, context.windows_options.is_some(), &path, problems);
    identity(
        context.run_as_group,
        &format!("{path}.runAsGroup"),
        problems,
    );
    identity(context.run_as_user, &format!("{path}.runAsUser"), problems);
    let added = context.capabilities.as_ref().and_then(|c| c.add.as_deref());
    let admin = added
        .unwrap_or_default()
        .iter()
        .any(|c| c == "SYS_ADMIN" || c == "CAP_SYS_ADMIN");
    if context.allow_privilege_escalation == Some(false) {
        let field = format!("{path}.allowPrivilegeEscalation");
        if context.privileged == Some(true) {
            problems.add(
                field,
                "cannot be false beside privileged: true; remove one of the two",
            );
        } else if admin {
            problems.add(
                field,
                "cannot be false beside the capability SYS_ADMIN; remove one of the two",
            );
        }
    }
    if let Some(mount) = context.proc_mount.as_deref().filter(|m| !m.is_empty()) {
        let field = format!("{path}.procMount");
        one_of(&field, Some(mount), &["Default", "Unmasked"], problems);
        if mount == "Unmasked" && spec.host_users != Some(false) {
            problems.add(
                field,
                "Unmasked needs spec.hostUsers: false, since it shows the host's kernel to root in the container",
            );
        }
    }
    if let Some(set) = &context.capabilities {
        capabilities(set, &format!("{path}.capabilities"), problems);
    }
    seccomp(context.seccomp_profile.as_ref(), &path, problems);
    app_armor(context.app_armor_profile.as_ref(), &path, problems);
}

/// A pod that says it is for Linux has no options of Windows. Without `spec.os` they do no harm.
fn windows(spec: &PodSpec, has_options: bool, path: &str, problems: &mut Problems<'_>) {
    let is_linux = spec.os.as_ref().is_some_and(|os| os.name == "linux");
    if is_linux && has_options {
        problems.add(
            format!("{path}.windowsOptions"),
            "cannot stand beside spec.os.name linux; remove one of the two",
        );
    }
}

fn capabilities(set: &Capabilities, path: &str, problems: &mut Problems<'_>) {
    let lists = [("add", set.add.as_deref()), ("drop", set.drop.as_deref())];
    for (list, names) in lists {
        for (index, name) in names.unwrap_or_default().iter().enumerate() {
            let upper = name.to_uppercase();
            let bare = upper.strip_prefix("CAP_").unwrap_or(&upper);
            if !CAPABILITIES.contains(&bare) {
                problems.add(
                    format!("{path}.{list}[{index}]"),
                    format!("{name:?} is not a capability; write it like NET_ADMIN, or ALL"),
                );
            }
        }
    }
}

fn identity(id: Option<i64>, path: &str, problems: &mut Problems<'_>) {
    if let Some(id) = id.filter(|id| !(0..=i64::from(i32::MAX)).contains(id)) {
        problems.add(path, format!("{id} has to be between 0 and 2147483647"));
    }
}

fn is_sysctl(name: &str) -> bool {
    let part = |part: &str| {
        let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_';
        let end = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
        part.bytes().all(inner) && end(part.as_bytes().first()) && end(part.as_bytes().last())
    };
    name.len() <= 253 && name.split(['.', '/']).all(part)
}

fn seccomp(profile: Option<&SeccompProfile>, path: &str, problems: &mut Problems<'_>) {
    let Some(profile) = profile else { return };
    let path = format!("{path}.seccompProfile");
    one_of(
        &format!("{path}.type"),
        Some(&profile.type_),
        PROFILES,
        problems,
    );
    let file = profile.localhost_profile.as_deref().unwrap_or_default();
    localhost(&profile.type_, file, &path, problems);
    if file.starts_with('/') || file.split('/').any(|part| part == "..") {
        problems.add(
            format!("{path}.localhostProfile"),
            format!("{file:?} has to be a path below the node's seccomp directory, without `..`"),
        );
    }
}

fn app_armor(profile: Option<&AppArmorProfile>, path: &str, problems: &mut Problems<'_>) {
    let Some(profile) = profile else { return };
    let path = format!("{path}.appArmorProfile");
    one_of(
        &format!("{path}.type"),
        Some(&profile.type_),
        PROFILES,
        problems,
    );
    let name = profile.localhost_profile.as_deref().unwrap_or_default();
    localhost(&profile.type_, name, &path, problems);
}

fn localhost(kind: &str, profile: &str, path: &str, problems: &mut Problems<'_>) {
    let path = format!("{path}.localhostProfile");
    if kind == "Localhost" && profile.trim().is_empty() {
        problems.add(
            path,
            "is missing; type Localhost names a profile of this node",
        );
    } else if kind != "Localhost" && !profile.is_empty() {
        problems.add(
            path,
            format!("is for type Localhost only, the type is {kind:?}"),
        );
    }
}
