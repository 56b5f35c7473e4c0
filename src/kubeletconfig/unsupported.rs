//! Flags that the kubelet has, or had in a release people still come from, and that this version does not act
//! on. They are accepted, so that a unit file written for the kubelet starts, and each one given is named in a
//! warning.

use std::fmt;

use clap::{Arg, ArgAction, ArgMatches, Command};

/// Kind of value that a flag takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// `--flag VALUE` or `--flag=VALUE`.
    Value,
    /// `--flag` or `--flag=false`.
    Bool,
}

/// Reason why a flag has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The kubelet acts on it, this version does not.
    NotYet,
    /// The kubelet has it no more.
    Removed {
        /// The Kubernetes release that was the first without it.
        release: &'static str,
        /// Advice, or empty.
        instead: &'static str,
    },
    /// There is nothing left for it to do.
    Needless(&'static str),
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotYet => f.write_str("is not supported in this version and has no effect"),
            Self::Removed { release, instead } => {
                write!(f, "was removed upstream in {release} and has no effect")?;
                if instead.is_empty() {
                    return Ok(());
                }
                write!(f, "; {instead}")
            }
            Self::Needless(why) => write!(f, "has no effect: {why}"),
        }
    }
}

/// A flag without effect.
#[derive(Clone, Copy, Debug)]
pub struct UnsupportedFlag {
    /// Its name, without dashes.
    pub name: &'static str,
    /// Kind of value that it takes.
    pub takes: Takes,
    /// Reason why it has no effect, as users see it.
    pub effect: Effect,
}

const fn value(name: &'static str) -> UnsupportedFlag {
    flag(name, Takes::Value, Effect::NotYet)
}

const fn switch(name: &'static str) -> UnsupportedFlag {
    flag(name, Takes::Bool, Effect::NotYet)
}

const fn removed(
    name: &'static str,
    takes: Takes,
    release: &'static str,
    instead: &'static str,
) -> UnsupportedFlag {
    flag(name, takes, Effect::Removed { release, instead })
}

const fn flag(name: &'static str, takes: Takes, effect: Effect) -> UnsupportedFlag {
    UnsupportedFlag {
        name,
        takes,
        effect,
    }
}

/// All of them, by name.
pub const UNSUPPORTED_FLAGS: &[UnsupportedFlag] = &[
    removed("add-dir-header", Takes::Bool, "1.26", ""),
    removed("alsologtostderr", Takes::Bool, "1.26", ""),
    value("application-metrics-count-limit"),
    removed(
        "azure-container-registry-config",
        Takes::Value,
        "1.30",
        "credentials of registries come from credential provider plugins",
    ),
    value("boot-id-file"),
    removed("cloud-config", Takes::Value, "1.34", ""),
    value("container-hints"),
    removed(
        "container-runtime",
        Takes::Value,
        "1.27",
        "CRI is the only runtime interface and --container-runtime-endpoint names its socket",
    ),
    value("containerd"),
    value("containerd-namespace"),
    switch("contention-profiling"),
    switch("enable-load-reader"),
    value("event-storage-age-limit"),
    value("event-storage-event-limit"),
    flag(
        "exit-on-lock-contention",
        Takes::Bool,
        Effect::Needless(
            "the state directory (--state-dir) is always locked, and a second agent always exits",
        ),
    ),
    switch("experimental-allocatable-ignore-eviction"),
    value("experimental-mounter-path"),
    value("feature-gates"),
    value("global-housekeeping-interval"),
    value("hairpin-mode"),
    value("housekeeping-interval"),
    removed("iptables-drop-bit", Takes::Value, "1.31", ""),
    removed("iptables-masquerade-bit", Takes::Value, "1.31", ""),
    removed("keep-terminated-pod-volumes", Takes::Bool, "1.31", ""),
    flag(
        "lock-file",
        Takes::Value,
        Effect::Needless("the state directory (--state-dir) is always locked"),
    ),
    removed("log-backtrace-at", Takes::Value, "1.26", ""),
    switch("log-cadvisor-usage"),
    removed("log-dir", Takes::Value, "1.26", ""),
    removed("log-file-max-size", Takes::Value, "1.26", ""),
    value("log-flush-frequency"),
    value("log-json-info-buffer-size"),
    switch("log-json-split-stream"),
    value("log-text-info-buffer-size"),
    switch("log-text-split-stream"),
    removed("logtostderr", Takes::Bool, "1.26", ""),
    value("machine-id-file"),
    removed("master-service-namespace", Takes::Value, "1.27", ""),
    removed("one-output", Takes::Bool, "1.26", ""),
    removed(
        "pod-infra-container-image",
        Takes::Value,
        "1.35",
        "set the sandbox image in the configuration of the container runtime",
    ),
    removed("register-schedulable", Takes::Bool, "1.34", ""),
    value("registry-burst"),
    value("registry-qps"),
    value("runtime-cgroups"),
    removed("skip-headers", Takes::Bool, "1.26", ""),
    removed("skip-log-headers", Takes::Bool, "1.26", ""),
    removed("stderrthreshold", Takes::Value, "1.26", ""),
    value("storage-driver-buffer-duration"),
    value("storage-driver-db"),
    value("storage-driver-host"),
    value("storage-driver-password"),
    switch("storage-driver-secure"),
    value("storage-driver-table"),
    value("storage-driver-user"),
    value("vmodule"),
    value("volume-plugin-dir"),
    value("volume-stats-agg-period"),
];

/// Flags of [`UNSUPPORTED_FLAGS`] that were given.
#[derive(Clone, Debug, Default)]
pub struct UnsupportedFlags {
    /// In the order of the list.
    pub given: Vec<&'static UnsupportedFlag>,
}

impl clap::FromArgMatches for UnsupportedFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = UNSUPPORTED_FLAGS
            .iter()
            .filter(|flag| matches.contains_id(flag.name))
            .collect();
        Ok(Self { given })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl clap::Args for UnsupportedFlags {
    fn augment_args(command: Command) -> Command {
        command.args(UNSUPPORTED_FLAGS.iter().map(|flag| {
            let arg = Arg::new(flag.name)
                .long(flag.name)
                .hide(true)
                .action(ArgAction::Append)
                .allow_hyphen_values(true);
            match flag.takes {
                Takes::Value => arg.num_args(1),
                Takes::Bool => arg
                    .num_args(0..=1)
                    .require_equals(true)
                    .default_missing_value("true"),
            }
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}
