//! The settings of the CPU, memory and topology managers: how they are read and which rules they must obey.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use clap::ArgAction;
use serde_json::{Value as Json, json};

use super::codec::{Map, Plain};
use super::decode::{Reader, Settings};
use super::problem::Warning;
use super::types::KubeletConfiguration;
use super::yaml::{Node, Value};
use crate::types::cpu_set::CpuSet;
use crate::types::quantity::{nanos, of_bytes};

const BILLION: i128 = 1_000_000_000;
/// Least value and default of `max-allowable-numa-nodes`.
const LEAST_NUMA_NODES: usize = 8;

/// Reads and writes the names of a policy.
macro_rules! names {
    ($type:ident, $what:literal : $($variant:ident => $name:literal),+ $(,)?) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $( Self::$variant => $name, )+ })
            }
        }

        impl FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $( $name => Ok(Self::$variant), )+
                    _ => Err(format!("{text:?} is not {}; possible are {}", $what, [$($name),+].join(", "))),
                }
            }
        }
    };
}

/// `cpuManagerPolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpuManagerPolicy {
    /// All containers share all CPUs.
    #[default]
    None,
    /// Containers of Guaranteed pods get whole CPUs for themselves.
    Static,
}
names!(CpuManagerPolicy, "a policy of the CPU manager": None => "none", Static => "static");

/// `memoryManagerPolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryManagerPolicy {
    /// Memory comes from any NUMA node.
    #[default]
    None,
    /// Containers of Guaranteed pods have their memory on chosen NUMA nodes.
    Static,
}
names!(MemoryManagerPolicy, "a policy of the memory manager": None => "None", Static => "Static");

/// `topologyManagerPolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TopologyPolicy {
    /// Nothing is aligned.
    #[default]
    None,
    /// Aligned where possible.
    BestEffort,
    /// Refused where not aligned.
    Restricted,
    /// Refused where not on a single node.
    SingleNumaNode,
}
names!(TopologyPolicy, "a policy of the topology manager":
    None => "none", BestEffort => "best-effort", Restricted => "restricted", SingleNumaNode => "single-numa-node");

/// `topologyManagerScope`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TopologyScope {
    /// Each container is aligned by itself.
    #[default]
    Container,
    /// All containers of a pod are aligned together.
    Pod,
}
names!(TopologyScope, "a scope of the topology manager": Container => "container", Pod => "pod");

/// `cpuManagerPolicyOptions`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// `full-pcpus-only`: whole cores alone are given.
    pub full_cores: bool,
    /// `strict-cpu-reservation`: containers that share CPUs do not use reserved ones.
    pub strict_reservation: bool,
    /// `prefer-align-cpus-by-uncorecache`: CPUs share a last-level cache where possible.
    pub align_by_cache: bool,
    /// `distribute-cpus-across-numa`: CPUs come from as few NUMA nodes as will do, in equal shares.
    pub across_nodes: bool,
    /// `align-by-socket`: CPUs of one socket count as aligned.
    pub align_by_socket: bool,
    /// `distribute-cpus-across-cores`: CPUs come from different cores.
    pub across_cores: bool,
}

impl CpuOptions {
    fn read(given: &BTreeMap<String, String>) -> Result<Self, String> {
        let mut options = Self::default();
        for (name, text) in given {
            let field = match name.as_str() {
                "full-pcpus-only" => &mut options.full_cores,
                "strict-cpu-reservation" => &mut options.strict_reservation,
                "prefer-align-cpus-by-uncorecache" => &mut options.align_by_cache,
                "distribute-cpus-across-numa" => &mut options.across_nodes,
                "align-by-socket" => &mut options.align_by_socket,
                "distribute-cpus-across-cores" => &mut options.across_cores,
                _ => return Err(format!("{name:?} is not an option of the CPU manager")),
            };
            *field = boolean(name, text)?;
        }
        Ok(options)
    }
}

/// `topologyManagerPolicyOptions`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopologyOptions {
    /// `prefer-closest-numa-nodes`.
    pub closest: bool,
    /// `max-allowable-numa-nodes`.
    pub max_nodes: usize,
}

impl TopologyOptions {
    fn read(given: &BTreeMap<String, String>) -> Result<Self, String> {
        let mut options = Self {
            closest: false,
            max_nodes: LEAST_NUMA_NODES,
        };
        for (name, text) in given {
            match name.as_str() {
                "prefer-closest-numa-nodes" => options.closest = boolean(name, text)?,
                "max-allowable-numa-nodes" => {
                    let nodes = text.parse().ok().filter(|n| *n >= LEAST_NUMA_NODES);
                    options.max_nodes = nodes.ok_or_else(|| {
                        format!("{name} is {text:?}, expected a number from {LEAST_NUMA_NODES}")
                    })?;
                }
                _ => return Err(format!("{name:?} is not an option of the topology manager")),
            }
        }
        Ok(options)
    }
}

fn boolean(name: &str, text: &str) -> Result<bool, String> {
    super::flags::parse_bool(text).map_err(|error| format!("{name}: {error}"))
}

impl KubeletConfiguration {
    /// Returns `cpuManagerPolicyOptions`; the settings were checked.
    pub fn cpu_options(&self) -> CpuOptions {
        CpuOptions::read(&self.cpu_manager_policy_options).unwrap_or_default()
    }

    /// Returns `topologyManagerPolicyOptions`; the settings were checked.
    pub fn topology_options(&self) -> TopologyOptions {
        let read = TopologyOptions::read(&self.topology_manager_policy_options);
        read.unwrap_or(TopologyOptions {
            closest: false,
            max_nodes: LEAST_NUMA_NODES,
        })
    }

    /// Returns how many CPUs are kept from pods: `systemReserved` and `kubeReserved` together, rounded up.
    pub fn reserved_cpus(&self) -> usize {
        let both = [&self.system_reserved, &self.kube_reserved];
        let sum: i128 = both.iter().filter_map(|r| r.get("cpu")).sum();
        usize::try_from((sum + BILLION - 1) / BILLION).unwrap_or(usize::MAX)
    }
}

/// Memory that is kept from pods on one NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReservedMemory {
    /// The node.
    pub node: u32,
    /// Bytes by `memory` and `hugepages-<size>`.
    pub limits: BTreeMap<String, u64>,
}

/// Reads a list of CPUs.
fn parse_cpus(text: &str) -> Result<CpuSet, String> {
    text.parse::<CpuSet>().map_err(|error| error.to_string())
}

/// The options of a policy.
pub(super) const OPTIONS: Map<String> = Map {
    parse: |_, text| Ok(text.to_owned()),
    show: String::clone,
    separator: '=',
    hides_empty: true,
};

/// A list of CPUs; an empty one is left out.
pub(super) const CPUS: Plain<CpuSet> = Plain::new(
    |r, _| r.parsed(parse_cpus),
    |cpus| {
        let text = (!cpus.is_empty()).then(|| cpus.to_string());
        json!(text)
    },
)
.flag(|arg| arg.value_parser(parse_cpus), |flag| Ok(flag.one()));

/// `reservedMemory`; an empty list is left out.
pub(super) const MEMORY_OF_NODES: Plain<Vec<ReservedMemory>> = Plain::new(
    |r, _| match &r.node.value {
        Value::List(entries) => Some(reserved_memory(r, entries)),
        _ => None,
    },
    |value| show_reserved_memory(value),
)
.flag(
    |arg| {
        arg.action(ArgAction::Append)
            .value_parser(parse_reserved_memory)
    },
    |flag| {
        let memory = flag.all::<Vec<ReservedMemory>>();
        let memory = memory.map(|lists| lists.concat());
        Ok(memory.filter(|memory| !memory.is_empty()))
    },
);

fn show_reserved_memory(value: &[ReservedMemory]) -> Json {
    if value.is_empty() {
        return Json::Null;
    }
    let node = |of: &ReservedMemory| {
        let limits = of.limits.iter();
        let limits: BTreeMap<&String, String> = limits
            .map(|(name, bytes)| (name, of_bytes(*bytes)))
            .collect();
        json!({"numaNode": of.node, "limits": limits})
    };
    value.iter().map(node).collect()
}

fn reserved_memory(r: &mut Reader<'_>, entries: &[Node]) -> Vec<ReservedMemory> {
    let mut memory = Vec::new();
    let mut wrong = None;
    for entry in entries {
        let mut of = ReservedMemory::default();
        let Value::Map(fields) = &entry.value else {
            continue;
        };
        for (name, node) in fields.iter().map(|field| (&*field.key, &field.node)) {
            match (name, &node.value) {
                ("numaNode", Value::Int(number)) => match u32::try_from(*number) {
                    Ok(number) if number < 64 => of.node = number,
                    _ => {
                        let message =
                            format!("numaNode is {number}, expected a number from 0 to 63");
                        wrong.get_or_insert((node.place, message));
                    }
                },
                ("limits", Value::Map(limits)) => {
                    for (resource, node) in limits.iter().map(|l| (&*l.key, &l.node)) {
                        let text = match &node.value {
                            Value::String(text) => text.clone(),
                            Value::Int(number) => number.to_string(),
                            _ => continue,
                        };
                        match parse_limit(resource, &text) {
                            Ok(bytes) => {
                                of.limits.insert(resource.to_owned(), bytes);
                            }
                            Err(message) => {
                                wrong.get_or_insert((node.place, message));
                            }
                        }
                    }
                }
                _ => {}
            }
        }
        memory.push(of);
    }
    if let Some((place, message)) = wrong {
        r.fail_at(place, message);
    }
    memory
}

/// Reads an amount of memory. Upstream: `validateReservedMemoryConfiguration`.
fn parse_limit(resource: &str, text: &str) -> Result<u64, String> {
    if resource != "memory" && !resource.starts_with("hugepages-") {
        return Err(format!(
            "{resource:?} cannot be reserved on a NUMA node; possible are memory and hugepages-<size>"
        ));
    }
    let bytes = nanos(text).map_err(|error| format!("{resource}: {error}"))?;
    match u64::try_from(bytes / BILLION) {
        Ok(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(format!("{resource}: {text:?} is not above 0")),
    }
}

/// Reads one `--reserved-memory`: `0:memory=1Gi,hugepages-1Gi=2Gi;1:memory=2Gi`.
fn parse_reserved_memory(text: &str) -> Result<Vec<ReservedMemory>, String> {
    let nodes = text.split(';').filter(|part| !part.trim().is_empty());
    nodes
        .map(|part| {
            let (node, limits) = part.split_once(':').ok_or_else(|| {
                format!("{part:?} is not of the form \"node:memory=1Gi,hugepages-1Gi=2Gi\"")
            })?;
            let number = node.trim().parse().ok().filter(|number| *number < 64);
            Ok(ReservedMemory {
                node: number.ok_or_else(|| format!("{node:?} is not a NUMA node"))?,
                limits: super::flags::parse_pairs(limits, '=', parse_limit)?,
            })
        })
        .collect()
}

/// Upstream's checks of `NewStaticPolicyOptions`, `NewPolicyOptions` and `validateReservedMemoryConfiguration`.
/// `reservedSystemCPUs` replaces the CPU of both reservations.
pub(super) fn validate(settings: &mut Settings) {
    let config = &mut settings.config;
    if !config.reserved_system_cpus.is_empty() {
        let count = i128::try_from(config.reserved_system_cpus.len()).unwrap_or(0);
        let cpu = "cpu".to_owned();
        config.system_reserved.insert(cpu.clone(), count * BILLION);
        config.kube_reserved.remove(&cpu);
    }
    let config = settings.config.clone();
    let is_static = config.cpu_manager_policy == CpuManagerPolicy::Static;
    match CpuOptions::read(&config.cpu_manager_policy_options) {
        Err(message) => settings.reject("cpuManagerPolicyOptions", message),
        Ok(_) if !is_static && !config.cpu_manager_policy_options.is_empty() => {
            let message = "the policy none has no options; set cpuManagerPolicy to static";
            settings.reject("cpuManagerPolicyOptions", message);
        }
        Ok(options) => {
            for message in excluded(options, config.topology_manager_policy) {
                settings.reject("cpuManagerPolicyOptions", message);
            }
        }
    }
    if is_static && config.reserved_cpus() == 0 {
        let message = "is static, which needs CPUs that are kept from pods: set reservedSystemCPUs, or cpu of systemReserved \
                       or kubeReserved";
        settings.reject("cpuManagerPolicy", message);
    }
    if let Err(message) = TopologyOptions::read(&config.topology_manager_policy_options) {
        settings.reject("topologyManagerPolicyOptions", message);
    }
    memory(settings, &config);
}

/// Options that exclude each other.
fn excluded(options: CpuOptions, topology: TopologyPolicy) -> Vec<&'static str> {
    let mut wrong = Vec::new();
    let CpuOptions {
        full_cores,
        align_by_cache,
        across_nodes,
        align_by_socket,
        across_cores,
        ..
    } = options;
    if full_cores && across_cores {
        wrong.push("full-pcpus-only and distribute-cpus-across-cores exclude each other");
    }
    if across_nodes && across_cores {
        wrong.push(
            "distribute-cpus-across-numa and distribute-cpus-across-cores exclude each other",
        );
    }
    if align_by_cache && across_cores {
        wrong.push(
            "prefer-align-cpus-by-uncorecache and distribute-cpus-across-cores exclude each other",
        );
    }
    if align_by_cache && across_nodes {
        wrong.push(
            "prefer-align-cpus-by-uncorecache and distribute-cpus-across-numa exclude each other",
        );
    }
    if align_by_socket && topology == TopologyPolicy::SingleNumaNode {
        wrong.push(
            "align-by-socket and the policy single-numa-node of the topology manager exclude each other",
        );
    }
    wrong
}

fn memory(settings: &mut Settings, config: &KubeletConfiguration) {
    let mut known: Vec<(u32, &str)> = Vec::new();
    for entry in &config.reserved_memory {
        if entry.limits.is_empty() {
            let message = format!("NUMA node {} has no limits", entry.node);
            settings.reject("reservedMemory", message);
        }
        for resource in entry.limits.keys() {
            if known.contains(&(entry.node, resource)) {
                let message = format!("{resource} of NUMA node {} is given twice", entry.node);
                settings.reject("reservedMemory", message);
            }
            known.push((entry.node, resource));
        }
    }
    let is_static = config.memory_manager_policy == MemoryManagerPolicy::Static;
    if is_static && !known.iter().any(|(_, resource)| *resource == "memory") {
        let message = "is Static, which needs memory that is kept from pods: set reservedMemory";
        settings.reject("memoryManagerPolicy", message);
    }
    if !is_static && !config.reserved_memory.is_empty() {
        settings.warnings.push(Warning {
            origin: settings.origin("reservedMemory"),
            field: "reservedMemory".to_owned(),
            message: "has no effect while memoryManagerPolicy is None".to_owned(),
        });
    }
}
