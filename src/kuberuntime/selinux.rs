//! SELinux labels of volumes: the one a volume can be mounted with as a whole (`-o context=`), instead of giving it to
//! each of its files; upstream's `GetMountSELinuxLabel`.
//!
//! Pure. A label is made of what the policy of the node gives to files of containers, and of what the containers
//! that mount the volume ask for. Two labels at one volume cannot be had by mounting.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Pod, SELinuxOptions};

use super::node_context::NodeContext;
use super::security::Effective;
use crate::types::PodExt;
use crate::types::containers::containers_of;

/// File of a policy with the labels for files of containers, below `/etc/selinux/<policy>`.
pub const CONTEXTS_FILE: &str = "contexts/lxc_contexts";

/// Reason why a volume cannot be mounted with a label. The text is upstream's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    /// Containers of the pod want different ones.
    #[error("multiple SELinux labels found: {}; give the containers that mount volume {volume:?} the same seLinuxOptions, or set seLinuxChangePolicy: Recursive", labels.join(", "))]
    Several {
        /// The volume.
        volume: String,
        /// The labels.
        labels: Vec<String>,
    },
    /// The value that a label would be based on is not a context.
    #[error(
        "failed to construct SELinux label of volume {volume:?}: {what:?} is no context user:role:type:level"
    )]
    Context {
        /// The volume.
        volume: String,
        /// The value.
        what: String,
    },
}

/// The label a volume of a pod is to be mounted with, for storage that can be mounted with one. `None` = none is to be
/// given: no SELinux on this node, no label asked for, or `seLinuxChangePolicy: Recursive`.
///
/// # Errors
/// See [`LabelError`].
pub fn mount_label(
    pod: &Pod,
    volume: &str,
    ctx: &NodeContext,
) -> Result<Option<String>, LabelError> {
    let Some(of_files) = ctx.selinux_file_context.as_deref().filter(|_| ctx.selinux) else {
        return Ok(None);
    };
    let policy = pod.spec_ref().security_context.as_ref();
    let policy = policy.and_then(|c| c.se_linux_change_policy.as_deref());
    if policy == Some("Recursive") {
        return Ok(None);
    }
    let mut labels = BTreeSet::new();
    for spec in containers_of(pod) {
        let container = &spec.container;
        let mut mounts = container.volume_mounts.iter().flatten();
        if !mounts.any(|m| m.name == volume) {
            continue;
        }
        let options = Effective::of(pod, container).selinux;
        if let Some(options) = options
            && let Some(label) =
                file_label(options, of_files).ok_or_else(|| LabelError::Context {
                    volume: volume.to_owned(),
                    what: of_files.to_owned(),
                })?
        {
            labels.insert(label);
        }
    }
    if labels.len() > 1 {
        return Err(LabelError::Several {
            volume: volume.to_owned(),
            labels: labels.into_iter().collect(),
        });
    }
    Ok(labels.into_iter().next())
}

/// The label of the files of a container with these options: user and level are its own, role and type are those of
/// files. `Some(None)` = it has none of its own; `None` = the node's context is none.
fn file_label(options: &SELinuxOptions, of_files: &str) -> Option<Option<String>> {
    let given = |text: &Option<String>| text.clone().filter(|t| !t.is_empty());
    let asked = [&options.user, &options.role, &options.type_, &options.level];
    if asked.into_iter().all(|o| given(o).is_none()) {
        return Some(None);
    }
    let mut parts = of_files.splitn(4, ':').map(str::to_owned);
    let (user, role, kind) = (parts.next()?, parts.next()?, parts.next()?);
    let level = given(&options.level).or(parts.next());
    let user = given(&options.user).unwrap_or(user);
    let label = match level {
        Some(level) => format!("{user}:{role}:{kind}:{level}"),
        None => format!("{user}:{role}:{kind}"),
    };
    Some(Some(label))
}

/// The context of containers' files, from the text of [`CONTEXTS_FILE`].
pub fn file_context(contexts: &str) -> Option<String> {
    contexts.lines().find_map(|line| {
        let (key, value) = line.split_once('=')?;
        let value = value.trim().trim_matches('"');
        (key.trim() == "file" && !value.is_empty()).then(|| value.to_owned())
    })
}

/// The name of the policy, from the text of `/etc/selinux/config`.
pub fn policy_name(config: &str) -> Option<String> {
    config.lines().find_map(|line| {
        let (key, value) = line.split_once('=')?;
        let value = value.trim();
        (key.trim() == "SELINUXTYPE" && !value.is_empty()).then(|| value.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn context() -> NodeContext {
        let mut ctx = NodeContext::new("n", "/r");
        ctx.selinux = true;
        ctx.selinux_file_context = Some("system_u:object_r:container_file_t:s0".to_owned());
        ctx
    }

    fn pod(of_pod: Value, of_containers: [Value; 2]) -> Pod {
        let container = |name: &str, own: &Value| {
            json!({"name": name, "volumeMounts": [{"name": "v", "mountPath": "/v"}],
                "securityContext": {"seLinuxOptions": own}})
        };
        serde_json::from_value(json!({"spec": {
            "securityContext": of_pod,
            "containers": [
                container("a", &of_containers[0]), container("b", &of_containers[1]),
                {"name": "elsewhere", "volumeMounts": [{"name": "w", "mountPath": "/w"}],
                    "securityContext": {"seLinuxOptions": {"level": "s0:c9"}}},
            ],
        }}))
        .unwrap()
    }

    #[test]
    fn the_label_is_what_all_containers_at_the_volume_ask_for() {
        let none = || json!(null);
        let level = |level: &str| json!({"level": level});
        let options = |level: &str| json!({"seLinuxOptions": {"level": level}});
        let label = |level: &str| Some(format!("system_u:object_r:container_file_t:{level}"));
        for (of_pod, own, want) in [
            (json!({}), [none(), none()], None),
            (options("s0:c1,c2"), [none(), none()], label("s0:c1,c2")),
            (
                options("s0:c1"),
                [level("s0:c3"), level("s0:c3")],
                label("s0:c3"),
            ),
            (
                json!({"seLinuxOptions": {"level": "s0:c1"}, "seLinuxChangePolicy": "Recursive"}),
                [none(), none()],
                None,
            ),
            (
                json!({"seLinuxOptions": {"level": "s0:c1"}, "seLinuxChangePolicy": "MountOption"}),
                [none(), none()],
                label("s0:c1"),
            ),
            // The process's type and role are not those of files, its user is.
            (
                json!({"seLinuxOptions": {"type": "spc_t", "role": "r", "user": "u"}}),
                [none(), none()],
                Some("u:object_r:container_file_t:s0".to_owned()),
            ),
        ] {
            let pod = pod(of_pod.clone(), own);
            assert_eq!(mount_label(&pod, "v", &context()), Ok(want), "{of_pod}");
        }
    }

    #[test]
    fn two_labels_at_one_volume_are_refused_unless_files_are_labelled_one_by_one() {
        let own = [json!({"level": "s0:c1"}), json!({"level": "s0:c2"})];
        let several = pod(json!({}), own.clone());
        let error = mount_label(&several, "v", &context()).unwrap_err();
        let text = error.to_string();
        assert!(
            text.starts_with("multiple SELinux labels found: "),
            "{text}"
        );
        assert!(text.contains("s0:c1") && text.contains("s0:c2"), "{text}");
        let recursive = pod(json!({"seLinuxChangePolicy": "Recursive"}), own);
        assert_eq!(mount_label(&recursive, "v", &context()), Ok(None));
    }

    #[test]
    fn without_selinux_nothing_is_labelled() {
        let pod = pod(
            json!({"seLinuxOptions": {"level": "s0:c1"}}),
            [json!(null), json!(null)],
        );
        let mut ctx = context();
        ctx.selinux = false;
        assert_eq!(mount_label(&pod, "v", &ctx), Ok(None));
        ctx.selinux = true;
        ctx.selinux_file_context = None;
        assert_eq!(mount_label(&pod, "v", &ctx), Ok(None));
        ctx.selinux_file_context = Some("garbage".to_owned());
        assert!(mount_label(&pod, "v", &ctx).is_err());
    }

    #[test]
    fn the_policys_files_are_read() {
        let contexts = "# comment\nprocess = \"system_u:system_r:container_t:s0\"\n\
                        file = \"system_u:object_r:container_file_t:s0\"\nro_file=\"x\"\n";
        let found = file_context(contexts);
        assert_eq!(
            found.as_deref(),
            Some("system_u:object_r:container_file_t:s0")
        );
        assert_eq!(file_context("process = \"a\"\nfile = \n"), None);
        let config = "SELINUX=enforcing\n# SELINUXTYPE= can take\nSELINUXTYPE=targeted\n";
        assert_eq!(policy_name(config).as_deref(), Some("targeted"));
        assert_eq!(policy_name("SELINUX=disabled"), None);
    }
}
