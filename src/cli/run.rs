//! `holdfast run`: flags in, configuration out.

use std::net::TcpListener;
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, umask};
use tracing::warn;

use crate::agent::{self, RunOptions};
use crate::core::node_status::KUBELET_VERSION;
use crate::kubeletconfig::flags::{KubeletFlags, parse_bool};
use crate::kubeletconfig::{AgentConfig, ConfigError, Warning, resolve};
use crate::types::boot::node_name_of;

use super::host_name;
use super::logging::{LogOptions, TraceOptions};
use super::offline;
use super::output::{note, print};

/// Arguments of `holdfast run`.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct RunArgs {
    /// The kubelet's flags, and ours.
    #[command(flatten)]
    pub kubelet: KubeletFlags,

    /// Validate the configuration, print all errors, and exit
    #[arg(long)]
    pub validate: bool,

    /// Print the Kubernetes release that this kubelet implements, and exit
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub version: Option<bool>,

    /// Replaces the kernel's boot id, to rehearse a reboot.
    #[arg(long, hide = true, value_name = "ID")]
    pub boot_id: Option<String>,
}

/// Reads the configuration the arguments name. The warnings are returned, since logging starts with what is
/// in the configuration; hand them to [`log_warnings`] then. Blocking.
///
/// # Errors
/// Everything that is wrong with the configuration at once; its text has one line per problem.
pub fn load(args: &RunArgs) -> Result<(AgentConfig, Vec<Warning>), ConfigError> {
    resolve(&args.kubelet)
}

/// Returns the logging options of the configuration.
pub fn log_options(config: &AgentConfig) -> LogOptions {
    LogOptions {
        format: config.kubelet.logging.format,
        verbosity: config.kubelet.logging.verbosity,
        file: config.log_file.clone(),
        traces: config
            .kubelet
            .tracing
            .clone()
            .filter(|tracing| tracing.sampling_rate_per_million > 0)
            .map(|tracing| TraceOptions {
                tracing,
                node_name: config.node_name.clone(),
            }),
    }
}

/// Logs the warnings of [`load`].
pub fn log_warnings(warnings: &[Warning]) {
    for warning in warnings {
        warn!(
            field = %warning.field,
            origin = %warning.origin,
            reason = %warning.message,
            "configuration warning"
        );
    }
}

/// Runs the agent until it is asked to exit.
///
/// # Errors
/// When the configuration is wrong or the agent cannot be started.
pub async fn run(mut args: RunArgs, listener: Option<TcpListener>) -> anyhow::Result<()> {
    if args.version == Some(true) {
        // kubeadm reads this line, and the node's status has the same version.
        return print(&format!("Kubernetes {KUBELET_VERSION}\n"));
    }
    let flags = &args.kubelet;
    if !args.validate && flags.hostname_override.is_none() {
        // Empty is none, as in the configuration.
        let is_given = |path: &Option<PathBuf>| {
            path.as_ref()
                .is_some_and(|path| !path.as_os_str().is_empty())
        };
        let in_cluster = is_given(&flags.kubeconfig) || is_given(&flags.bootstrap_kubeconfig);
        let state_dir = flags.state_dir.as_deref();
        let state_dir = state_dir.filter(|dir| !dir.as_os_str().is_empty());
        let known = node_name_of(state_dir.unwrap_or(Path::new("/var/lib/holdfast")));
        let recorded = host_name::wait(in_cluster, known, offline::host_name).await?;
        args.kubelet.hostname_override = recorded;
    }
    let (config, warnings) = load(&args)?;
    if args.validate {
        for warning in &warnings {
            note(format_args!("warning: {warning}"));
        }
        return print("the configuration is valid\n");
    }
    // Modes of what is made must not depend on who starts the agent: other programs read logs and links.
    umask(Mode::S_IWGRP | Mode::S_IWOTH);
    let log = super::logging::init(&log_options(&config))?;
    log_warnings(&warnings);
    let options = RunOptions {
        log: log.clone(),
        boot_id: args.boot_id,
        listener,
    };
    let result = agent::run(config, options).await;
    tokio::task::spawn_blocking(move || log.end()).await?;
    Ok(result?)
}
