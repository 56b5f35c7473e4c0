//! The settings that share the node between pods and everything else: how they are read and which rules they must obey.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde_json::{Value as Json, json};

use super::codec::Plain;
use super::decode::{Reader, Settings};
use super::flags::parse_pairs;
use super::problem::Warning;
use super::yaml::Value;

/// Parts of one, as `memoryThrottlingFactor` is kept.
const MILLION: f64 = 1_000_000.0;

/// `memorySwap.swapBehavior`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SwapBehavior {
    /// Pods get no swap.
    #[default]
    NoSwap,
    /// Burstable pods get a share of it by their memory requests.
    LimitedSwap,
}

impl FromStr for SwapBehavior {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "NoSwap" => Ok(Self::NoSwap),
            "LimitedSwap" => Ok(Self::LimitedSwap),
            _ => Err(format!(
                "{text:?} is not known; possible are NoSwap and LimitedSwap"
            )),
        }
    }
}

impl fmt::Display for SwapBehavior {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoSwap => "NoSwap",
            Self::LimitedSwap => "LimitedSwap",
        })
    }
}

/// `memoryReservationPolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryReservation {
    /// No memory is protected from reclaim.
    #[default]
    None,
    /// The requests of Guaranteed pods are protected by `memory.min`, those of Burstable pods by `memory.low`.
    Tiered,
}

impl FromStr for MemoryReservation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "None" => Ok(Self::None),
            "TieredReservation" => Ok(Self::Tiered),
            _ => Err(format!(
                "{text:?} is not known; possible are None and TieredReservation"
            )),
        }
    }
}

impl fmt::Display for MemoryReservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Tiered => "TieredReservation",
        })
    }
}

/// Settings that share the node between pods and everything else, beside the amounts that are reserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserves {
    /// `systemReservedCgroup`: the cgroup that is held to `systemReserved`.
    pub system_cgroup: Option<String>,
    /// `kubeReservedCgroup`: the cgroup that is held to `kubeReserved`.
    pub kube_cgroup: Option<String>,
    /// `kubeletCgroups`: the cgroup that the agent runs in.
    pub kubelet_cgroups: Option<String>,
    /// `systemCgroups`: the cgroup of processes that have none of their own.
    pub system_cgroups: Option<String>,
    /// `qosReserved.memory`: the percentage of memory requests that lower classes cannot use.
    pub qos_memory: Option<u8>,
    /// `protectKernelDefaults`: the kernel's settings are not changed.
    pub protect_kernel_defaults: bool,
    /// `failSwapOn`: swap that is on is reported. Upstream's default is true.
    pub fail_swap_on: bool,
    /// `makeIPTablesUtilChains`.
    pub make_iptables_util_chains: bool,
    /// `enableControllerAttachDetach`.
    pub controller_attach_detach: bool,
    /// `memorySwap.swapBehavior`.
    pub swap: SwapBehavior,
    /// `memoryThrottlingFactor` in millionths; `None` for no throttling.
    pub memory_throttling: Option<u32>,
    /// `memoryReservationPolicy`.
    pub memory_reservation: MemoryReservation,
}

impl Default for Reserves {
    fn default() -> Self {
        Self {
            system_cgroup: None,
            kube_cgroup: None,
            kubelet_cgroups: None,
            system_cgroups: None,
            qos_memory: None,
            protect_kernel_defaults: false,
            fail_swap_on: false,
            make_iptables_util_chains: true,
            controller_attach_detach: true,
            swap: SwapBehavior::default(),
            memory_throttling: None,
            memory_reservation: MemoryReservation::default(),
        }
    }
}

/// The percentage of memory in `qosReserved`.
pub(super) const QOS_MEMORY: Plain<Option<u8>> = Plain::new(
    |r, _| Some(qos_memory(r)),
    |value| match value {
        Some(percent) => json!({"memory": format!("{percent}%")}),
        None => Json::Null,
    },
)
.flag(
    |arg| arg.value_parser(|text: &str| parse_pairs(text, '=', parse_qos_reserved)),
    |flag| {
        let shares = flag.one::<BTreeMap<String, u8>>();
        Ok(shares.map(|shares| shares.get("memory").copied()))
    },
);

/// `memoryThrottlingFactor`, in millionths.
pub(super) const FACTOR: Plain<Option<u32>> =
    Plain::new(|r, _| Some(factor(r)), |value| json!(value.map(factor_of)));

/// The percentage of memory in a map of percentages by resource.
fn qos_memory(r: &mut Reader<'_>) -> Option<u8> {
    let node = r.node;
    let Value::Map(entries) = &node.value else {
        return None;
    };
    let mut memory = None;
    for entry in entries {
        let Value::String(text) = &entry.node.value else {
            continue;
        };
        match parse_qos_reserved(&entry.key, text) {
            Ok(percent) => memory = Some(percent),
            Err(message) => r.fail_at(entry.node.place, message),
        }
    }
    memory
}

/// Reads one entry of `qosReserved`. Upstream: `ParseQOSReserved`.
fn parse_qos_reserved(resource: &str, text: &str) -> Result<u8, String> {
    if resource != "memory" {
        return Err(format!(
            "{resource:?} cannot be reserved by class; possible is memory"
        ));
    }
    let percent = text.strip_suffix('%').and_then(|n| n.parse::<u8>().ok());
    percent
        .filter(|percent| *percent <= 100)
        .ok_or_else(|| format!("{text:?} is not a percentage from 0% to 100%"))
}

/// The factor in millionths.
fn factor(r: &mut Reader<'_>) -> Option<u32> {
    #[expect(
        clippy::cast_precision_loss,
        reason = "numbers that are too large for it are refused"
    )]
    let value = match r.node.value {
        Value::Int(value) => value as f64,
        Value::Float(value) => value,
        _ => return None,
    };
    if !(value > 0.0 && value <= 1.0) {
        let place = r.node.place;
        r.fail_at(
            place,
            format!("is {value}, expected more than 0, and 1 at most"),
        );
        return None;
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "from 0 to a million"
    )]
    let millionths = (value * MILLION).round() as u32;
    Some(millionths.max(1))
}

/// `memoryThrottlingFactor` as the file has it.
fn factor_of(millionths: u32) -> f64 {
    f64::from(millionths) / MILLION
}

/// Warns of settings that another one takes the effect from. None of them keeps the agent from starting: pods run without
/// what is missing.
pub(super) fn validate(settings: &mut Settings) {
    let config = settings.config.clone();
    let reserves = &config.reserves;
    for (what, cgroup, field) in [
        ("system", &reserves.system_cgroup, "systemReservedCgroup"),
        ("kube", &reserves.kube_cgroup, "kubeReservedCgroup"),
    ] {
        let whole = format!("{what}-reserved");
        let compressible = format!("{whole}-compressible");
        let has = |name: &str| config.enforce_node_allocatable.iter().any(|n| n == name);
        let is_enforced = has(&whole) || has(&compressible);
        if is_enforced && cgroup.is_none() {
            let message =
                format!("{whole:?} needs {field}, which is not set: nothing is held to it");
            warn(settings, "enforceNodeAllocatable", message);
        }
        if has(&whole) && has(&compressible) {
            let message = format!("has both {whole:?} and {compressible:?}; {whole:?} counts");
            warn(settings, "enforceNodeAllocatable", message);
        }
        if !is_enforced && cgroup.is_some() {
            let message = format!(
                "has no effect: enforceNodeAllocatable has neither {whole:?} nor {compressible:?}"
            );
            warn(settings, field, message);
        }
    }
    if reserves.qos_memory.is_some() && !config.cgroups_per_qos {
        let message = "has no effect while cgroupsPerQOS is false: there are no classes";
        warn(settings, "qosReserved", message.to_owned());
    }
    if reserves.system_cgroups.as_deref() == Some("/") {
        settings.reject(
            "systemCgroups",
            "is \"/\", which these processes are in already",
        );
    }
    if !reserves.controller_attach_detach {
        let message = "is false, but the agent attaches no volumes itself: volumes that have to be attached never are";
        warn(settings, "enableControllerAttachDetach", message.to_owned());
    }
}

fn warn(settings: &mut Settings, field: &'static str, message: String) {
    settings.warnings.push(Warning {
        origin: settings.origin(field),
        field: field.to_owned(),
        message,
    });
}
