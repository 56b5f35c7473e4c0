//! The CRI message that makes a container, and the files it needs on the node; upstream's
//! `generateContainerConfig` and `ensureHostsFile`.
//!
//! [`build`] is pure. [`prepare_files`] writes the managed hosts file and makes the termination message file before each
//! create; both are below the pod's directory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::{Container, HostAlias, Pod};

use super::attempt_files;
use super::container_mounts::{self, absolute};
use super::cri::ContainerConfig;
use super::cri::stop_signal::number_of;
use super::devices;
use super::env;
use super::labels;
use super::node_context::{NodeContext, is_path_component};
use super::node_file;
use super::resources;
use super::sandbox_config::{self, ConfigError};
use super::security::{self, Isolation};
use crate::core::volumes::{Remote, extra_groups};
use crate::types::{PodExt, blocking};

/// Default of `terminationMessagePath`.
pub const DEFAULT_TERMINATION_PATH: &str = "/dev/termination-log";
const HOSTS_FILE: &str = "/etc/hosts";

/// Everything a container's message depends on.
#[derive(Clone, Copy, Debug)]
pub struct ContainerInputs<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// Its container.
    pub container: &'a Container,
    /// Restart count, which is the CRI attempt.
    pub attempt: u32,
    /// Hash of the container spec, for the annotation.
    pub hash: &'a str,
    /// Image as the runtime resolved it.
    pub image_ref: &'a str,
    /// Its variables, see [`env::make_env`].
    pub env: &'a env::Environment,
    /// Host paths of the pod's volumes by name.
    pub volumes: &'a BTreeMap<String, PathBuf>,
    /// Resolved remote volumes, by name.
    pub remotes: &'a BTreeMap<String, Remote>,
    /// Host paths of its subPath mounts, by the index of the mount in its `volumeMounts`.
    pub sub_paths: &'a BTreeMap<usize, PathBuf>,
    /// Volumes whose files have no SELinux labels that could be set.
    pub without_labels: &'a BTreeSet<String>,
    /// True if the pod's runtime handler can mount read-only recursively.
    pub recursive_read_only: bool,
    /// Files on the node, see [`prepare_files`].
    pub files: &'a ContainerFiles,
    /// Inputs of its isolation other than its spec.
    pub isolation: Isolation<'a>,
}

/// Files on the node that are mounted into a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerFiles {
    /// The managed hosts file.
    pub hosts: Option<PathBuf>,
    /// Host path of the file for the container's termination message.
    pub termination_log: Option<PathBuf>,
}

/// A file a container needs could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{verb} {} for container {container}: {source}", path.display())]
pub struct FileError {
    /// Verb of the failed operation.
    pub verb: &'static str,
    /// The file.
    pub path: PathBuf,
    /// The container.
    pub container: String,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// Builds the message.
///
/// # Errors
/// When the spec cannot become a message; the container then waits with `CreateContainerConfigError`.
pub fn build(
    inputs: &ContainerInputs<'_>,
    ctx: &NodeContext,
) -> Result<ContainerConfig, ConfigError> {
    let ContainerInputs {
        pod,
        container,
        attempt,
        image_ref,
        ..
    } = *inputs;
    let stop_signal = stop_signal(pod, container)?;
    let mut security = security::container_context(pod, container, &inputs.isolation, ctx)?;
    let groups = extra_groups(pod, inputs.remotes.values());
    security.supplemental_groups.extend(groups);
    let message = v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata {
            name: container.name.clone(),
            attempt,
        }),
        image: Some(v1::ImageSpec {
            image: image_ref.to_owned(),
            user_specified_image: container.image.clone().unwrap_or_default(),
            ..Default::default()
        }),
        command: expanded(inputs, "command", container.command.as_deref())?,
        args: expanded(inputs, "args", container.args.as_deref())?,
        working_dir: container.working_dir.clone().unwrap_or_default(),
        mounts: mounts(inputs, ctx)?,
        devices: devices::devices(pod, container, inputs.volumes)?,
        labels: container_labels(pod, container),
        annotations: container_annotations(inputs),
        log_path: attempt_files::log_path(&container.name, attempt),
        stdin: container.stdin.unwrap_or(false),
        stdin_once: container.stdin_once.unwrap_or(false),
        tty: container.tty.unwrap_or(false),
        linux: Some(v1::LinuxContainerConfig {
            resources: Some(
                resources::container_linux_resources(pod, container, ctx).map_err(|source| {
                    ConfigError::Quantity {
                        object: format!("container {}", container.name),
                        source,
                    }
                })?,
            ),
            security_context: Some(security),
        }),
        ..Default::default()
    };
    Ok(ContainerConfig {
        message,
        envs: inputs.env.vars.clone(),
        images: Vec::new(),
        stop_signal,
    })
}

/// The words of a command line with their references replaced.
fn expanded(
    inputs: &ContainerInputs<'_>,
    field: &'static str,
    words: Option<&[String]>,
) -> Result<Vec<String>, ConfigError> {
    let lookup = env::lookup_in(&inputs.env.vars);
    words
        .iter()
        .copied()
        .flatten()
        .map(|word| env::expand_text(word, &lookup))
        .collect::<Result<_, _>>()
        .map_err(|source| ConfigError::Command {
            container: inputs.container.name.clone(),
            field,
            source,
        })
}

/// As [`prepare_files`], on a thread where it may block. It goes on when the future is dropped; made again, it does the same.
///
/// # Errors
/// As [`prepare_files`].
pub async fn prepare_files_beside(
    pod: &Arc<Pod>,
    container: &Container,
    pod_ips: &[String],
    ctx: &NodeContext,
) -> Result<ContainerFiles, FileError> {
    let (of, in_it, ips) = (Arc::clone(pod), container.clone(), pod_ips.to_vec());
    let node = ctx.clone();
    let work = move || prepare_files(&of, &in_it, &ips, &node);
    blocking::run(work).await.unwrap_or_else(|error| {
        Err(FileError {
            verb: "write files in",
            path: ctx.container_dir(&pod.uid(), &container.name),
            container: container.name.clone(),
            source: io::Error::other(error),
        })
    })
}

/// Writes the hosts file, and makes the termination message file if there is none. Blocking.
///
/// # Errors
/// When one cannot be written.
pub fn prepare_files(
    pod: &Pod,
    container: &Container,
    pod_ips: &[String],
    ctx: &NodeContext,
) -> Result<ContainerFiles, FileError> {
    let uid = pod.uid();
    let error = |verb: &'static str, path: &Path| {
        let (path, container) = (path.to_owned(), container.name.clone());
        move |source| FileError {
            verb,
            path,
            container,
            source,
        }
    };
    let mut files = ContainerFiles::default();
    if !mounts_at(container, HOSTS_FILE) && (pod.host_network() || !pod_ips.is_empty()) {
        let path = ctx.hosts_file(&uid);
        let content =
            hosts_content(pod, pod_ips, ctx).map_err(error("read", &ctx.node_hosts_file))?;
        // In place, not renamed: earlier containers of the pod have the very file mounted.
        if !is_so(&path, &content, 0o644) {
            write_file(&path, &content, 0o644).map_err(error("write", &path))?;
        }
        files.hosts = Some(path);
    }
    if is_path_component(&container.name) {
        let path = attempt_files::message_path(ctx, &uid, &container.name);
        attempt_files::prepare_message(&path).map_err(error("create", &path))?;
        files.termination_log = Some(path);
    }
    Ok(files)
}

/// Returns whether a file has this content and mode. One that other containers have mounted is never empty then, as it
/// would be for a moment while it is written.
fn is_so(path: &Path, content: &[u8], mode: u32) -> bool {
    let is_alike = |meta: fs::Metadata| {
        let length = u64::try_from(content.len()).ok();
        meta.is_file() && Some(meta.len()) == length && meta.mode() & 0o7777 == mode
    };
    fs::symlink_metadata(path).is_ok_and(is_alike) && fs::read(path).is_ok_and(|now| now == content)
}

fn write_file(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    if fs::symlink_metadata(path).is_ok_and(|m| !m.is_file()) {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "something that is not a file is in its place",
        ));
    }
    fs::write(path, content)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

fn hosts_content(pod: &Pod, pod_ips: &[String], ctx: &NodeContext) -> io::Result<Vec<u8>> {
    let aliases = pod.spec_ref().host_aliases.as_deref().unwrap_or_default();
    if pod.host_network() {
        let node = match node_file::read(&ctx.node_hosts_file) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        return Ok(node_hosts(&node, aliases));
    }
    let hostname = sandbox_config::hostname(pod);
    let domain = sandbox_config::host_domain(pod, ctx);
    Ok(pod_hosts(pod_ips, &hostname, domain.as_deref(), aliases).into_bytes())
}

/// Hosts file of a pod on the host network: the node's own, byte for byte, and the aliases.
fn node_hosts(node: &[u8], aliases: &[HostAlias]) -> Vec<u8> {
    let mut added = String::new();
    push_aliases(&mut added, aliases);
    [
        b"# Kubernetes-managed hosts file (host network).\n",
        node,
        added.as_bytes(),
    ]
    .concat()
}

/// Hosts file of a pod with addresses of its own.
fn pod_hosts(
    ips: &[String],
    hostname: &str,
    domain: Option<&str>,
    aliases: &[HostAlias],
) -> String {
    let mut text = String::from(
        "# Kubernetes-managed hosts file.\n\
         127.0.0.1\tlocalhost\n\
         ::1\tlocalhost ip6-localhost ip6-loopback\n\
         fe00::0\tip6-localnet\n\
         fe00::0\tip6-mcastprefix\n\
         fe00::1\tip6-allnodes\n\
         fe00::2\tip6-allrouters\n",
    );
    for ip in ips {
        match domain {
            Some(domain) => text.push_str(&format!("{ip}\t{hostname}.{domain}\t{hostname}\n")),
            None => text.push_str(&format!("{ip}\t{hostname}\n")),
        }
    }
    push_aliases(&mut text, aliases);
    text
}

fn push_aliases(text: &mut String, aliases: &[HostAlias]) {
    if aliases.is_empty() {
        return;
    }
    text.push_str("\n# Entries added by HostAliases.\n");
    for alias in aliases {
        let names = alias.hostnames.as_deref().unwrap_or_default().join("\t");
        text.push_str(&format!("{}\t{names}\n", alias.ip));
    }
}

fn mounts_at(container: &Container, path: &str) -> bool {
    container
        .volume_mounts
        .iter()
        .flatten()
        .any(|m| m.mount_path.trim_end_matches('/') == path)
}

fn termination_path(container: &Container) -> &str {
    container
        .termination_message_path
        .as_deref()
        .filter(|p| !p.is_empty())
        .unwrap_or(DEFAULT_TERMINATION_PATH)
}

fn mounts(inputs: &ContainerInputs<'_>, ctx: &NodeContext) -> Result<Vec<v1::Mount>, ConfigError> {
    let mut mounts = container_mounts::of_volumes(inputs, ctx)?;
    if let Some(hosts) = &inputs.files.hosts {
        mounts.push(file_mount(hosts, HOSTS_FILE, ctx));
    }
    if let Some(log) = &inputs.files.termination_log {
        mounts.push(file_mount(log, termination_path(inputs.container), ctx));
    }
    Ok(mounts)
}

fn file_mount(host: &Path, container: &str, ctx: &NodeContext) -> v1::Mount {
    v1::Mount {
        container_path: absolute(container),
        host_path: host.to_string_lossy().into_owned(),
        selinux_relabel: ctx.selinux,
        ..Default::default()
    }
}

fn container_labels(pod: &Pod, container: &Container) -> HashMap<String, String> {
    let name = (labels::CONTAINER_NAME.to_owned(), container.name.clone());
    sandbox_config::pod_labels(pod)
        .into_iter()
        .chain([name])
        .collect()
}

fn container_annotations(inputs: &ContainerInputs<'_>) -> HashMap<String, String> {
    let ContainerInputs { pod, container, .. } = *inputs;
    let mut all = HashMap::from([
        (labels::CONTAINER_HASH.to_owned(), inputs.hash.to_owned()),
        (
            labels::CONTAINER_RESTART_COUNT.to_owned(),
            inputs.attempt.to_string(),
        ),
        (
            labels::CONTAINER_TERMINATION_MESSAGE_PATH.to_owned(),
            termination_path(container).to_owned(),
        ),
        (
            labels::CONTAINER_TERMINATION_MESSAGE_POLICY.to_owned(),
            container
                .termination_message_policy
                .clone()
                .filter(|p| !p.is_empty())
                .unwrap_or_else(|| "File".to_owned()),
        ),
    ]);
    let mut put = |key: &str, value: Option<String>| {
        if let Some(value) = value {
            all.insert(key.to_owned(), value);
        }
    };
    put(
        labels::POD_DELETION_GRACE_PERIOD,
        pod.metadata
            .deletion_grace_period_seconds
            .map(|s| s.to_string()),
    );
    put(
        labels::POD_TERMINATION_GRACE_PERIOD,
        pod.spec_ref()
            .termination_grace_period_seconds
            .map(|s| s.to_string()),
    );
    let pre_stop = container
        .lifecycle
        .as_ref()
        .and_then(|l| l.pre_stop.as_ref());
    put(
        labels::CONTAINER_PRE_STOP_HANDLER,
        pre_stop.and_then(|h| serde_json::to_string(h).ok()),
    );
    let ports = container.ports.as_ref().filter(|p| !p.is_empty());
    put(
        labels::CONTAINER_PORTS,
        ports.and_then(|p| serde_json::to_string(p).ok()),
    );
    all
}

/// Returns the CRI's number of the signal that stops a container, 0 for none of its own. Upstream:
/// `buildContainerConfig`'s stop signal, with what the API server checks.
fn stop_signal(pod: &Pod, container: &Container) -> Result<i32, ConfigError> {
    let lifecycle = container.lifecycle.as_ref();
    let Some(signal) = lifecycle.and_then(|l| l.stop_signal.as_deref()) else {
        return Ok(0);
    };
    let error = |reason: &str| ConfigError::StopSignal {
        container: container.name.clone(),
        signal: signal.to_owned(),
        reason: reason.to_owned(),
    };
    let no_such = "there is no such signal; use a name like SIGTERM or SIGRTMIN+1";
    let number = number_of(signal).ok_or_else(|| error(no_such))?;
    let os = pod.spec_ref().os.as_ref();
    if os.is_none_or(|os| os.name != "linux") {
        return Err(error("it needs spec.os.name: linux"));
    }
    Ok(number)
}

#[cfg(test)]
#[path = "container_config_tests.rs"]
mod tests;
