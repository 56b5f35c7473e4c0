//! Flags over drop-ins over the file over the defaults: one configuration the agent can use as it is.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::decode::{Settings, parse_ip};
use super::flags::{KubeletFlags, Labels};
use super::load::{read, take_content};
use super::problem::{ConfigError, Origin, Problem, Warning};
use super::server::AuthorizationMode;
use super::types::{
    BackOffEarlyEnd, DeviceReadiness, KubeletConfiguration, OfflineStart, PullFallback,
};
use super::validate::{is_dns_subdomain, validate};

/// The longest path a unix socket address can hold.
const MAX_SOCKET_PATH: usize = 107;

/// A unix socket of the container runtime. Displays as `unix:///path`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint(PathBuf);

impl Endpoint {
    /// Reads `unix:///path` or `/path`.
    ///
    /// # Errors
    /// Text that says what is wrong, fit to follow the name of the field.
    pub fn parse(text: &str) -> Result<Self, String> {
        let hint = "expected a unix socket like \"unix:///run/containerd/containerd.sock\"";
        let path = match text.split_once(':') {
            Some(("unix", rest)) => match rest.strip_prefix("//") {
                Some(path) => path,
                None => rest,
            },
            Some((scheme, _)) if !scheme.contains('/') => {
                return Err(format!(
                    "is {text:?}, but {scheme:?} endpoints are not supported; {hint}"
                ));
            }
            _ => text,
        };
        if !path.starts_with('/') {
            return Err(format!(
                "is {text:?}, which is not an absolute path; {hint}"
            ));
        }
        if path.len() > MAX_SOCKET_PATH {
            return Err(format!(
                "is {text:?}, {} bytes long; a socket's path has at most {MAX_SOCKET_PATH}",
                path.len()
            ));
        }
        Ok(Self(PathBuf::from(path)))
    }

    /// The socket's absolute path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix://{}", self.0.display())
    }
}

/// Limits on the dead containers that are kept, as upstream's `GCPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerGcPolicy {
    /// Age a dead container must have before it may be removed.
    pub min_age: Duration,
    /// Dead instances kept per container of a pod; `None` for all.
    pub max_per_container: Option<u32>,
    /// Dead instances kept on the node; `None` for no limit.
    pub max_total: Option<u32>,
}

/// The agent's complete configuration, checked. All paths are absolute. The headers of the manifest URL may hold
/// credentials: do not log the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentConfig {
    /// Name of the node: `--hostname-override` or the host name, lowercase.
    pub node_name: String,
    /// `--node-ip`, up to two.
    pub node_ips: Vec<IpAddr>,
    /// `--node-labels`.
    pub node_labels: BTreeMap<String, String>,
    /// `--root-dir`.
    pub root_dir: PathBuf,
    /// `--state-dir`.
    pub state_dir: PathBuf,
    /// `--container-logs-dir`: links to the logs, named by pod and container.
    pub container_logs_dir: PathBuf,
    /// `--log-file`.
    pub log_file: Option<PathBuf>,
    /// Endpoint of the container runtime.
    pub runtime_endpoint: Endpoint,
    /// Endpoint of the image service.
    pub image_endpoint: Endpoint,
    /// `--runonce`.
    pub run_once: bool,
    /// `--offline-start`.
    pub offline_start: OfflineStart,
    /// `--image-pull-policy-fallback`.
    pub image_pull_policy_fallback: PullFallback,
    /// `--back-off-early-end`.
    pub back_off_early_end: BackOffEarlyEnd,
    /// `--device-readiness`.
    pub device_readiness: DeviceReadiness,
    /// Limits on the dead containers that are kept.
    pub container_gc: ContainerGcPolicy,
    /// `--kubeconfig`: how the API server is reached; `None` runs static pods only.
    pub kubeconfig: Option<PathBuf>,
    /// `--bootstrap-kubeconfig`; only with a kubeconfig.
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// `--lifeline-kubeconfig`: asks for a certificate when the node's has expired; only with a kubeconfig.
    pub lifeline_kubeconfig: Option<PathBuf>,
    /// `--cert-dir`: where client certificates that were asked for are kept.
    pub cert_dir: PathBuf,
    /// `--secrets-key-file`: the key that secrets on disk are encrypted with.
    pub secrets_key_file: Option<PathBuf>,
    /// `--image-credential-provider-config` and `--image-credential-provider-bin-dir`, which go together.
    pub image_credential_providers: Option<(PathBuf, PathBuf)>,
    /// `--streaming-requires-create`: exec, attach and port-forward need the verb `create`, also by GET.
    pub streaming_requires_create: bool,
    /// `--cloud-provider external`: a cloud controller manager initialises the node.
    pub external_cloud_provider: bool,
    /// The merged and checked configuration.
    pub kubelet: KubeletConfiguration,
}

impl AgentConfig {
    /// Directory of the pods' own directories.
    pub fn pods_dir(&self) -> PathBuf {
        self.root_dir.join("pods")
    }

    /// Directory in which the runtime writes container logs.
    pub fn pod_logs_dir(&self) -> &Path {
        &self.kubelet.pod_logs_dir
    }

    /// Socket on which `dump` and `backup` talk to the agent.
    pub fn admin_socket(&self) -> PathBuf {
        admin_socket(&self.state_dir)
    }

    /// Address of the kubelet's API; `None` when it is turned off, or it could authorize nobody (see
    /// [`Self::server_locked`]).
    pub fn server_address(&self) -> Option<SocketAddr> {
        let k = &self.kubelet;
        (k.enable_server && self.server_locked().is_none())
            .then(|| SocketAddr::new(k.address, k.port))
    }

    /// Returns the reason why the kubelet's API would refuse every request; `None` if it would not. Without a
    /// kubeconfig there is no API server to review tokens and access.
    pub fn server_locked(&self) -> Option<&'static str> {
        let k = &self.kubelet;
        let identified = k.authentication.client_ca_file.is_some() || k.authentication.anonymous;
        if self.kubeconfig.is_some() {
            return None;
        }
        if k.authorization.mode == AuthorizationMode::Webhook {
            return Some(
                "authorization.mode is Webhook and there is no API server to ask (--kubeconfig)",
            );
        }
        (!identified).then_some(
            "there is neither authentication.x509.clientCAFile nor an API server that knows tokens (--kubeconfig)",
        )
    }

    /// Address of the read-only port; `None` when it is turned off.
    pub fn read_only_address(&self) -> Option<SocketAddr> {
        let k = &self.kubelet;
        (k.enable_server && k.read_only_port != 0)
            .then(|| SocketAddr::new(k.address, k.read_only_port))
    }

    /// Address of `/healthz`; `None` when it is turned off.
    pub fn healthz_address(&self) -> Option<SocketAddr> {
        let port = self.kubelet.healthz_port;
        (port != 0).then(|| SocketAddr::new(self.kubelet.healthz_bind_address, port))
    }
}

fn admin_socket(state_dir: &Path) -> PathBuf {
    state_dir.join("holdfast.sock")
}

/// Reads the files named by `flags`, lays the flags over them and checks the result. Blocking; reads
/// the files, the host name and the working directory, and changes nothing.
///
/// # Errors
/// [`ConfigError::Invalid`] with every problem at once; the other variants when something could not be read.
pub fn resolve(flags: &KubeletFlags) -> Result<(AgentConfig, Vec<Warning>), ConfigError> {
    let flags = flags.clone().without_empty_paths();
    let settings = read(flags.config.as_deref(), flags.config_dir.as_deref())?;
    settle(settings, &flags)
}

/// As [`resolve`], with the content of the file at `path` in place of the files that `flags` name.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_content(
    path: &Path,
    content: Vec<u8>,
    flags: &KubeletFlags,
) -> Result<(AgentConfig, Vec<Warning>), ConfigError> {
    let mut settings = Settings::default();
    take_content(&mut settings, path, content);
    settle(settings, &flags.clone().without_empty_paths())
}

/// Lays the flags over the settings of the files and checks the result.
fn settle(
    mut settings: Settings,
    flags: &KubeletFlags,
) -> Result<(AgentConfig, Vec<Warning>), ConfigError> {
    flags.fields.apply(&mut settings);
    super::cluster::check_flags(&mut settings, flags);
    warn_flags(&mut settings, flags);
    validate(&mut settings);

    let base = std::env::current_dir().map_err(ConfigError::WorkingDirectory)?;
    let absolute = |path: &Option<PathBuf>, default: &str| {
        lexically_absolute(&base, path.as_deref().unwrap_or(Path::new(default)))
    };
    let optional = |path: &Option<PathBuf>| {
        let path = path.as_deref().filter(|path| !path.as_os_str().is_empty());
        path.map(|path| lexically_absolute(&base, path))
    };
    let root_dir = absolute(&flags.root_dir, "/var/lib/kubelet");
    if root_dir.to_str().is_none() {
        let message = "is not UTF-8, and the runtime takes paths only as such".to_owned();
        settings.reject_flag("--root-dir", message);
    }
    let state_dir = absolute(&flags.state_dir, "/var/lib/holdfast");
    let socket = admin_socket(&state_dir);
    if socket.as_os_str().len() > MAX_SOCKET_PATH {
        let message = format!(
            "is too long: the admin socket {} has {} bytes, a socket's path has at most {MAX_SOCKET_PATH}",
            socket.display(),
            socket.as_os_str().len()
        );
        settings.reject_flag("--state-dir", message);
    }
    let node_name = node_name(&mut settings, flags.hostname_override.as_deref())?;
    let node_ips = node_ips(&mut settings, flags.node_ip.as_deref());
    let (runtime_endpoint, image_endpoint) = endpoints(&mut settings);
    let container_gc = container_gc(flags);
    let image_credential_providers = credential_providers(&mut settings, flags);
    for path in [
        &mut settings.config.static_pod_path,
        &mut settings.config.resolv_conf,
        &mut settings.config.tls_cert_file,
        &mut settings.config.tls_private_key_file,
        &mut settings.config.authentication.client_ca_file,
    ]
    .into_iter()
    .flatten()
    {
        *path = lexically_absolute(&base, path);
    }

    match (runtime_endpoint, image_endpoint) {
        (Some(runtime_endpoint), Some(image_endpoint)) if settings.problems.is_empty() => {
            let config = AgentConfig {
                node_name,
                node_ips,
                node_labels: merge_labels(&flags.node_labels),
                state_dir,
                container_logs_dir: absolute(&flags.container_logs_dir, "/var/log/containers"),
                log_file: flags
                    .log_file
                    .as_deref()
                    .map(|path| lexically_absolute(&base, path)),
                runtime_endpoint,
                image_endpoint,
                run_once: flags.runonce.unwrap_or(false),
                offline_start: flags.offline_start.unwrap_or_default(),
                image_pull_policy_fallback: flags.image_pull_policy_fallback.unwrap_or_default(),
                back_off_early_end: flags.back_off_early_end.unwrap_or_default(),
                device_readiness: flags.device_readiness.unwrap_or_default(),
                container_gc,
                kubeconfig: optional(&flags.kubeconfig),
                bootstrap_kubeconfig: optional(&flags.bootstrap_kubeconfig),
                lifeline_kubeconfig: optional(&flags.lifeline_kubeconfig),
                cert_dir: match optional(&flags.cert_dir) {
                    Some(directory) => directory,
                    None => root_dir.join("pki"),
                },
                secrets_key_file: optional(&flags.secrets_key_file),
                image_credential_providers,
                streaming_requires_create: flags.streaming_requires_create.unwrap_or_default(),
                external_cloud_provider: flags.cloud_provider.as_deref() == Some("external"),
                root_dir,
                kubelet: settings.config,
            };
            Ok((config, settings.warnings))
        }
        _ => Err(ConfigError::Invalid(settings.problems)),
    }
}

/// Warns of the flags that were given and have no effect.
fn warn_flags(settings: &mut Settings, flags: &KubeletFlags) {
    for given in &flags.unsupported.given {
        let (flag, message) = (format!("--{}", given.name), given.effect.to_string());
        settings.warnings.push(Warning {
            origin: Origin::Flag(flag.clone()),
            field: flag,
            message,
        });
    }
}

fn merge_labels(given: &[Labels]) -> BTreeMap<String, String> {
    let labels = given.iter().flat_map(|Labels(labels)| labels.clone());
    labels.collect()
}

/// `path` below `base`, without `.` components and trailing slashes. `..` stays: only the kernel knows
/// where it leads.
fn lexically_absolute(base: &Path, path: &Path) -> PathBuf {
    base.join(path)
        .components()
        .filter(|part| part.as_os_str() != OsStr::new("."))
        .collect()
}

/// The node's name: trimmed and lowercase, as upstream's `GetHostname` gives it.
fn node_name(settings: &mut Settings, given: Option<&str>) -> Result<String, ConfigError> {
    let given = given.filter(|name| !name.trim().is_empty());
    let raw = match given {
        Some(name) => name.to_owned(),
        None => nix::unistd::gethostname()
            .map_err(|errno| ConfigError::Hostname(errno.into()))?
            .to_string_lossy()
            .into_owned(),
    };
    let name = raw.trim().to_lowercase();
    if !is_dns_subdomain(&name) {
        let (origin, hint) = match given {
            Some(_) => (Origin::Flag("--hostname-override".to_owned()), ""),
            None => (
                Origin::Default,
                "; set another host name or give --hostname-override",
            ),
        };
        let message = format!(
            "{raw:?} is not a node name: it must be a DNS name of lowercase letters, digits, \"-\" and \".\"{hint}"
        );
        settings
            .problems
            .push(Problem::new(origin, "--hostname-override", message));
    }
    Ok(name)
}

/// Both files of the credential providers, or neither.
fn credential_providers(
    settings: &mut Settings,
    flags: &KubeletFlags,
) -> Option<(PathBuf, PathBuf)> {
    let (config, dir) = (
        &flags.image_credential_provider_config,
        &flags.image_credential_provider_bin_dir,
    );
    match (config, dir) {
        (Some(config), Some(dir)) => Some((config.clone(), dir.clone())),
        (Some(_), None) => {
            let message = "needs --image-credential-provider-bin-dir too";
            settings.reject_flag("--image-credential-provider-config", message);
            None
        }
        (None, Some(_)) => {
            let message = "needs --image-credential-provider-config too";
            settings.reject_flag("--image-credential-provider-bin-dir", message);
            None
        }
        (None, None) => None,
    }
}

fn node_ips(settings: &mut Settings, given: Option<&str>) -> Vec<IpAddr> {
    let parts = given.unwrap_or_default().split(',').map(str::trim);
    let parts = parts.filter(|part| !part.is_empty());
    let mut ips = Vec::new();
    for part in parts {
        match parse_ip(part) {
            // The API server refuses an IPv4 address that is written as an IPv6 address.
            Ok(ip) => ips.push(ip.to_canonical()),
            // As upstream: a variable that a unit file has not filled in keeps no node from starting.
            Err(message) => settings.warnings.push(Warning {
                origin: Origin::Flag("--node-ip".to_owned()),
                field: "--node-ip".to_owned(),
                message: format!("{message}; it is ignored"),
            }),
        }
    }
    let message = match &*ips {
        [] | [_] => None,
        [one, other] if one.is_ipv4() != other.is_ipv4() => {
            let is_any = one.is_unspecified() || other.is_unspecified();
            is_any.then_some("two addresses cannot include 0.0.0.0 or ::, name both")
        }
        _ => Some("expected one address, or one IPv4 and one IPv6 address"),
    };
    match message {
        Some(message) => {
            settings.reject_flag("--node-ip", message);
            Vec::new()
        }
        None => ips,
    }
}

/// The runtime's endpoint and the image service's, which is the runtime's unless it is named.
fn endpoints(settings: &mut Settings) -> (Option<Endpoint>, Option<Endpoint>) {
    let runtime = endpoint(
        settings,
        "containerRuntimeEndpoint",
        settings.config.container_runtime_endpoint.clone(),
    );
    let image = match settings.config.image_service_endpoint.clone() {
        text if text.is_empty() => runtime.clone(),
        text => endpoint(settings, "imageServiceEndpoint", text),
    };
    (runtime, image)
}

fn endpoint(settings: &mut Settings, field: &'static str, text: String) -> Option<Endpoint> {
    match Endpoint::parse(&text) {
        Ok(endpoint) => Some(endpoint),
        Err(message) => {
            settings.reject(field, message);
            None
        }
    }
}

fn container_gc(flags: &KubeletFlags) -> ContainerGcPolicy {
    // Negative means unlimited, for both counts.
    let limit = |given: Option<i32>, default| u32::try_from(given.unwrap_or(default)).ok();
    ContainerGcPolicy {
        min_age: flags
            .minimum_container_ttl_duration
            .unwrap_or(Duration::ZERO),
        max_per_container: limit(flags.maximum_dead_containers_per_container, 1),
        max_total: limit(flags.maximum_dead_containers, -1),
    }
}
