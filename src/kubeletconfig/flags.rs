//! The command line of `holdfast run`: the kubelet's own flag names, and a few of our own.
//!
//! Every flag is an `Option`: `None` means it was not given, so that the file decides. Syntax is
//! pflag's: `--flag value`, `--flag=value`, and for booleans `--flag` or `--flag=false`. Given twice, the
//! last one wins, except that lists and maps that "may be repeated" add up.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Arg, ArgMatches, Command};

use super::codec::{Given, path};
use super::decode::{Settings, parse_ip};
use super::duration::parse_duration;
use super::fields::{self, Setting};
use super::problem::Origin;
use super::types::{BackOffEarlyEnd, DeviceReadiness, OfflineStart, PullFallback};
use super::unsupported::UnsupportedFlags;

/// The order of the flags in the help. Those of other fields follow.
const ORDER: &str = "\
    root-dir state-dir config config-dir hostname-override container-runtime-endpoint \
    image-service-endpoint pod-manifest-path manifest-url manifest-url-header file-check-frequency \
    http-check-frequency sync-frequency runonce v logging-format log-file healthz-port \
    healthz-bind-address cgroup-driver cgroup-root cgroups-per-qos fail-cgroupv1 seccomp-default \
    node-ip node-labels max-pods pods-per-core oom-score-adj pod-max-pids runtime-request-timeout \
    serialize-image-pulls cpu-cfs-quota cpu-cfs-quota-period resolv-conf cluster-dns cluster-domain \
    event-qps event-burst container-log-max-size container-log-max-files image-gc-high-threshold \
    image-gc-low-threshold minimum-image-ttl-duration container-logs-dir \
    minimum-container-ttl-duration maximum-dead-containers-per-container maximum-dead-containers \
    offline-start image-pull-policy-fallback back-off-early-end device-readiness kubeconfig \
    bootstrap-kubeconfig lifeline-kubeconfig cert-dir rotate-certificates secrets-key-file \
    image-credential-provider-config image-credential-provider-bin-dir kube-api-qps kube-api-burst \
    kube-api-content-type register-node register-with-taints provider-id cloud-provider port \
    node-status-update-frequency node-status-max-images system-reserved kube-reserved \
    enforce-node-allocatable allowed-unsafe-sysctls system-reserved-cgroup kube-reserved-cgroup \
    kubelet-cgroups system-cgroups qos-reserved protect-kernel-defaults fail-swap-on \
    make-iptables-util-chains enable-controller-attach-detach eviction-hard eviction-soft eviction-soft-grace-period \
    eviction-minimum-reclaim eviction-pressure-transition-period eviction-max-pod-grace-period \
    cpu-manager-policy cpu-manager-policy-options cpu-manager-reconcile-period memory-manager-policy \
    reserved-memory reserved-cpus topology-manager-policy topology-manager-scope \
    topology-manager-policy-options enable-server address read-only-port tls-cert-file \
    tls-private-key-file tls-min-version tls-cipher-suites tls-curve-preferences \
    rotate-server-certificates client-ca-file anonymous-auth authentication-token-webhook \
    authentication-token-webhook-cache-ttl authorization-mode \
    authorization-webhook-cache-authorized-ttl authorization-webhook-cache-unauthorized-ttl \
    streaming-connection-idle-timeout enable-debugging-handlers streaming-requires-create";

/// Flags of `holdfast run`.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(args_override_self = true)]
pub struct KubeletFlags {
    /// Directory for pod volumes and other files of the node [default: /var/lib/kubelet]
    #[arg(long, value_name = "DIR", value_parser = path())]
    pub root_dir: Option<PathBuf>,

    /// Directory of the store; one agent per directory [default: /var/lib/holdfast]
    #[arg(long, value_name = "DIR", value_parser = path())]
    pub state_dir: Option<PathBuf>,

    /// KubeletConfiguration file; flags win over it
    #[arg(long, value_name = "FILE", value_parser = path())]
    pub config: Option<PathBuf>,

    /// Directory of drop-ins (*.conf), which win over --config and lose against flags
    #[arg(long, value_name = "DIR", value_parser = path())]
    pub config_dir: Option<PathBuf>,

    /// Node name to use instead of the host name
    #[arg(long, value_name = "NAME")]
    pub hostname_override: Option<String>,

    /// Start the pods of the manifests, wait until they run, exit
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub runonce: Option<bool>,

    /// Write logs to this file instead of standard error; SIGHUP reopens it
    #[arg(long, value_name = "FILE", value_parser = path())]
    pub log_file: Option<PathBuf>,

    /// IP address of the node, or two of different families separated by a comma
    #[arg(long, value_name = "IP[,IP]")]
    pub node_ip: Option<String>,

    /// Labels the node registers with, key=value separated by commas; may be repeated
    #[arg(long, value_name = "LABELS", value_parser = parse_labels, action = clap::ArgAction::Append)]
    pub node_labels: Vec<Labels>,

    /// Directory of the links to container logs [default: /var/log/containers]
    #[arg(long, value_name = "DIR", value_parser = path())]
    pub container_logs_dir: Option<PathBuf>,

    /// Age a dead container has before it may be removed [default: 0s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub minimum_container_ttl_duration: Option<Duration>,

    /// Dead instances kept per container [default: 1]
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true)]
    pub maximum_dead_containers_per_container: Option<i32>,

    /// Dead instances kept on the node; negative for no limit [default: -1]
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true)]
    pub maximum_dead_containers: Option<i32>,

    /// API pods that start after a reboot while the API server is unreachable: All, Safe or None [default: Safe]
    #[arg(long, value_name = "POLICY", value_parser = str::parse::<OfflineStart>)]
    pub offline_start: Option<OfflineStart>,

    /// Start of a container of policy Always from its previous image, once its registry has not answered for 10 s: Never or Offline [default: Never]
    #[arg(long, value_name = "POLICY", value_parser = str::parse::<PullFallback>)]
    pub image_pull_policy_fallback: Option<PullFallback>,

    /// End back-offs of containers, image pulls and mounts early once their likely cause is gone: Enabled or Disabled [default: Enabled]
    #[arg(long, value_name = "POLICY", value_parser = str::parse::<BackOffEarlyEnd>)]
    pub back_off_early_end: Option<BackOffEarlyEnd>,

    /// Reaction to a pod that has to start again before its device plugin is back: Fail or Wait [default: Fail]
    #[arg(long, value_name = "POLICY", value_parser = str::parse::<DeviceReadiness>)]
    pub device_readiness: Option<DeviceReadiness>,

    /// Kubeconfig of the API server to join; without one, static pods only
    #[arg(long, value_name = "FILE", value_parser = path())]
    pub kubeconfig: Option<PathBuf>,

    /// Kubeconfig used to request a client certificate while --kubeconfig does not exist or has expired
    #[arg(long, value_name = "FILE", value_parser = path())]
    pub bootstrap_kubeconfig: Option<PathBuf>,

    /// Kubeconfig used to request a client certificate when the node's has expired and the bootstrap kubeconfig gives none;
    /// the systemd credential holdfast.lifeline wins
    #[arg(long, value_name = "FILE", value_parser = path())]
    pub lifeline_kubeconfig: Option<PathBuf>,

    /// Directory of requested and self-signed certificates [default: pki in the root directory]
    #[arg(long, value_name = "DIR", value_parser = path())]
    pub cert_dir: Option<PathBuf>,

    /// Key that secrets on disk are encrypted with; the systemd credential holdfast.secrets-key wins
    #[arg(long, value_name = "FILE", value_parser = path())]
    pub secrets_key_file: Option<PathBuf>,

    /// CredentialProviderConfig file: programs that provide credentials of registries
    #[arg(long, value_name = "FILE", value_parser = path())]
    pub image_credential_provider_config: Option<PathBuf>,

    /// Directory of these programs
    #[arg(long, value_name = "DIR", value_parser = path())]
    pub image_credential_provider_bin_dir: Option<PathBuf>,

    /// Component that initialises the node: empty for none, external for a cloud controller manager
    #[arg(long, value_name = "PROVIDER")]
    pub cloud_provider: Option<String>,

    /// Require the verb create of nodes/proxy for exec, attach and port-forward, also of WebSocket clients, whose requests are GET [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub streaming_requires_create: Option<bool>,

    /// Flags the kubelet knows and this version does not act on.
    #[command(flatten)]
    pub unsupported: UnsupportedFlags,

    /// Flags that override a field of the configuration file.
    #[command(flatten)]
    pub fields: FieldFlags,
}

impl KubeletFlags {
    /// The same flags; a path that is empty is not given, as upstream.
    pub(super) fn without_empty_paths(mut self) -> Self {
        for path in [
            &mut self.root_dir,
            &mut self.state_dir,
            &mut self.config,
            &mut self.config_dir,
            &mut self.log_file,
            &mut self.container_logs_dir,
            &mut self.kubeconfig,
            &mut self.bootstrap_kubeconfig,
            &mut self.lifeline_kubeconfig,
            &mut self.cert_dir,
            &mut self.secrets_key_file,
            &mut self.image_credential_provider_config,
            &mut self.image_credential_provider_bin_dir,
        ] {
            path.take_if(|path| path.as_os_str().is_empty());
        }
        self
    }
}

/// Flags that override a field of the configuration file, as [`super::fields::FIELDS`] declares them.
#[derive(Clone, Debug, Default)]
pub struct FieldFlags {
    matches: ArgMatches,
}

impl FieldFlags {
    /// Lays the flags that were given over the settings.
    pub(super) fn apply(&self, settings: &mut Settings) {
        for setting in fields::settings() {
            let Some(flag) = setting.flag else { continue };
            let given = Given {
                matches: &self.matches,
                name: flag.name,
            };
            let name = format!("--{}", flag.name);
            match (setting.lay)(given, &mut settings.config) {
                Ok(true) => {
                    settings.origins.insert(setting.name, Origin::Flag(name));
                }
                Ok(false) => {}
                Err(message) => settings.reject_flag(&name, message),
            }
        }
    }
}

impl clap::FromArgMatches for FieldFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let matches = matches.clone();
        Ok(Self { matches })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl clap::Args for FieldFlags {
    /// Adds the flags, and brings those that the command has so far into their order in the help.
    fn augment_args(command: Command) -> Command {
        let arg = |setting: Setting| {
            let flag = setting.flag?;
            let arg = Arg::new(flag.name)
                .long(flag.name)
                .value_name(flag.value_name)
                .help(flag.help)
                .display_order(ORDER.split_whitespace().count());
            let arg = (setting.arg)(arg);
            Some(if flag.name == "v" {
                arg.short('v')
            } else {
                arg
            })
        };
        let command = command.args(fields::settings().into_iter().filter_map(arg));
        command.mut_args(|arg| {
            let mut names = ORDER.split_whitespace();
            let name = arg.get_long().unwrap_or_default();
            match names.position(|listed| listed == name) {
                Some(place) => arg.display_order(place),
                None => arg,
            }
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Labels of one `--node-labels`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels(pub BTreeMap<String, String>);

/// Reads a boolean as pflag does.
pub(crate) fn parse_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        other => Err(format!("{other:?} is neither \"true\" nor \"false\"")),
    }
}

/// Reads one `--manifest-url-header`.
pub(super) fn parse_headers(text: &str) -> Result<Vec<(String, String)>, String> {
    text.split(',')
        .filter(|pair| !pair.trim().is_empty())
        .map(|pair| {
            let (name, value) = pair
                .split_once(':')
                .ok_or("expected NAME:VALUE pairs separated by commas")?;
            Ok((name.trim().to_owned(), value.trim().to_owned()))
        })
        .collect::<Result<_, &str>>()
        .map_err(str::to_owned)
}

/// A key without `=` is a label with an empty value, as upstream reads it.
fn parse_labels(text: &str) -> Result<Labels, String> {
    let pairs = text.split(',').filter(|pair| !pair.trim().is_empty());
    pairs
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            match key.trim() {
                "" => Err(format!(
                    "{pair:?} is not a label; write it like \"key=value\""
                )),
                key => Ok((key.to_owned(), value.trim().to_owned())),
            }
        })
        .collect::<Result<_, _>>()
        .map(Labels)
}

/// Reads one `--cluster-dns`.
pub(super) fn parse_ips(text: &str) -> Result<Vec<IpAddr>, String> {
    text.split(',')
        .filter(|part| !part.trim().is_empty())
        .map(|part| parse_ip(part.trim()))
        .collect()
}

/// `KEY<separator>VALUE` pairs separated by commas.
pub(super) fn parse_pairs<T>(
    text: &str,
    separator: char,
    parse: impl Fn(&str, &str) -> Result<T, String>,
) -> Result<BTreeMap<String, T>, String> {
    let pairs = text.split(',').filter(|pair| !pair.trim().is_empty());
    pairs
        .map(|pair| {
            let (key, value) = pair
                .split_once(separator)
                .ok_or_else(|| format!("{pair:?} is not of the form \"key{separator}value\""))?;
            let (key, value) = (key.trim(), value.trim());
            Ok((key.to_owned(), parse(key, value)?))
        })
        .collect()
}
