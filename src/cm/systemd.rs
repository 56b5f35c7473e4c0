//! Slices as units of systemd, over D-Bus. systemd keeps the limits of its units itself: what is written to cgroupfs alone is
//! lost as soon as it applies its own idea of a unit, at `daemon-reload` at the latest.
//!
//! Comes in: the name of a slice and all of its limits. Goes out: StartTransientUnit, SetUnitProperties (until the next
//! boot, not on disk), StopUnit and ResetFailedUnit; upstream's `libcontainer/cgroups/systemd`.
//!
//! **Invariant:** the limits of a slice are sent as a whole. systemd may put those that one call leaves out back to their
//! defaults.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Mutex;
use zbus::Connection;
use zbus::connection::Builder;
use zbus::zvariant::{DynamicType, Value};

use super::settings::{MAX_PIDS, Whole};
use super::{CgroupName, CgroupVersion, NO_MEMORY_LIMIT};
use crate::kuberuntime::resources;

/// Deadline of an answer of systemd; upstream waits as long for a job.
const PATIENCE: Duration = Duration::from_secs(30);
const SERVICE: &str = "org.freedesktop.systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
/// systemd's own socket, for root. It answers there while the bus is restarted, too.
const PRIVATE_SOCKET: &str = "/run/systemd/private";
/// systemd knows quotas in whole percents of a processor.
const QUOTA_STEP_US: u64 = 10_000;
/// No limit.
const INFINITY: u64 = u64::MAX;

/// systemd did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum SystemdError {
    /// There is no way to it.
    #[error("reach systemd on the system bus and at {PRIVATE_SOCKET}")]
    Unreachable(#[source] Box<zbus::Error>),
    /// It refused.
    #[error("{method} {unit} over D-Bus")]
    Refused {
        /// The method of its manager.
        method: &'static str,
        /// The unit.
        unit: String,
        /// Why.
        #[source]
        source: Box<zbus::Error>,
    },
    /// It did not answer.
    #[error("{method} {unit} over D-Bus: no answer within {} s", PATIENCE.as_secs())]
    Silent {
        /// The method of its manager.
        method: &'static str,
        /// The unit.
        unit: String,
    },
}

/// Address of systemd.
enum Place {
    /// By the system bus, else by its own socket.
    Machine,
    /// By a socket of a test.
    #[cfg(test)]
    Socket(PathBuf),
}

/// The manager of systemd. Reconnects by itself.
pub struct Systemd {
    runtime: Handle,
    place: Place,
    connection: Mutex<Option<(Connection, bool)>>,
    /// Properties that this version of systemd does not know.
    unknown: std::sync::Mutex<BTreeSet<&'static str>>,
}

impl fmt::Debug for Systemd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Systemd")
    }
}

impl Systemd {
    /// The systemd of this machine; `None` when another program is its PID 1. Connects with the first call.
    pub fn of_this_machine(runtime: Handle) -> Option<Self> {
        // What sd_booted(3) looks at.
        Path::new("/run/systemd/system").is_dir().then(|| Self {
            runtime,
            place: Place::Machine,
            connection: Mutex::new(None),
            unknown: std::sync::Mutex::default(),
        })
    }

    #[cfg(test)]
    fn at(socket: &Path, runtime: Handle) -> Self {
        Self {
            runtime,
            place: Place::Socket(socket.to_owned()),
            connection: Mutex::new(None),
            unknown: std::sync::Mutex::default(),
        }
    }

    /// Makes a slice with these limits, or sets them on one that is there. Blocks until systemd has answered, and must not
    /// be called on a thread that runs futures.
    ///
    /// # Errors
    /// When systemd cannot be reached, refuses, or is silent for 30 seconds.
    pub(super) fn set(
        &self,
        name: &CgroupName,
        limits: &[(&'static str, Property)],
    ) -> Result<(), SystemdError> {
        let unit = name.slice();
        loop {
            let set = self.try_set(name, &unit, limits);
            let Some(property) = set.as_ref().err().and_then(unknown_property) else {
                return set;
            };
            let mut unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
            if !unknown.insert(property) {
                return set;
            }
            // The file of the cgroup is written all the same.
            tracing::info!(property, "this systemd lacks a property, doing without it");
        }
    }

    fn try_set(
        &self,
        name: &CgroupName,
        unit: &str,
        limits: &[(&'static str, Property)],
    ) -> Result<(), SystemdError> {
        let unknown = self
            .unknown
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let known = |all: &[(&'static str, Property)]| -> Vec<(&'static str, Property)> {
            let mut all = all.to_vec();
            all.retain(|(property, _)| !unknown.contains(property));
            all
        };
        let limits = known(limits);
        let mut all = known(&identity(name));
        all.extend_from_slice(&limits);
        let aux: Vec<(&str, Vec<(&str, Value<'_>)>)> = Vec::new();
        let started = self.call(
            "StartTransientUnit",
            unit,
            &(unit, "replace", values(&all), aux),
        );
        match started {
            Err(SystemdError::Refused { source, .. }) if is_error(&source, "UnitExists") => {}
            other => return other,
        }
        self.call("SetUnitProperties", unit, &(unit, true, values(&limits)))
    }

    /// Sets some limits of a unit that somebody else has made, and leaves its others. Blocks as [`Self::set`].
    ///
    /// # Errors
    /// As [`Self::set`].
    pub(super) fn set_some(
        &self,
        unit: &str,
        limits: &[(&'static str, Property)],
    ) -> Result<(), SystemdError> {
        self.call("SetUnitProperties", unit, &(unit, true, values(limits)))
    }

    /// Stops a slice with all that is in it and forgets it. One that is not there is no error.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub(super) fn remove(&self, name: &CgroupName) -> Result<(), SystemdError> {
        let unit = name.slice();
        let known = |result| match result {
            Err(SystemdError::Refused { source, .. }) if is_error(&source, "NoSuchUnit") => Ok(()),
            other => other,
        };
        known(self.call("StopUnit", &unit, &(&unit, "replace")))?;
        known(self.call("ResetFailedUnit", &unit, &(&unit,)))
    }

    fn call<B>(&self, method: &'static str, unit: &str, body: &B) -> Result<(), SystemdError>
    where
        B: serde::Serialize + DynamicType + Sync,
    {
        self.runtime.block_on(async {
            let mut slot = self.connection.lock().await;
            let mut fresh = slot.is_none();
            loop {
                let (connection, on_bus) = match &*slot {
                    Some((connection, on_bus)) => (connection.clone(), *on_bus),
                    None => {
                        let made = tokio::time::timeout(PATIENCE, self.connect()).await;
                        let made = made.map_err(|_| SystemdError::Silent {
                            method,
                            unit: unit.to_owned(),
                        })??;
                        slot.insert(made).clone()
                    }
                };
                let service = on_bus.then_some(SERVICE);
                let answer =
                    connection.call_method(service, MANAGER_PATH, Some(MANAGER), method, body);
                match tokio::time::timeout(PATIENCE, answer).await {
                    Ok(Ok(_)) => return Ok(()),
                    Err(_) => {
                        *slot = None;
                        return Err(SystemdError::Silent {
                            method,
                            unit: unit.to_owned(),
                        });
                    }
                    // The bus was restarted since the last call: these calls may be repeated.
                    Ok(Err(error)) if is_lost(&error) && !fresh => {
                        *slot = None;
                        fresh = true;
                    }
                    Ok(Err(source)) => {
                        if is_lost(&source) {
                            *slot = None;
                        }
                        return Err(SystemdError::Refused {
                            method,
                            unit: unit.to_owned(),
                            source: Box::new(source),
                        });
                    }
                }
            }
        })
    }

    /// The connection, and whether it is one to a bus.
    async fn connect(&self) -> Result<(Connection, bool), SystemdError> {
        let socket = match &self.place {
            Place::Machine => match Connection::system().await {
                Ok(connection) => return Ok((connection, true)),
                Err(_) => PathBuf::from(PRIVATE_SOCKET),
            },
            #[cfg(test)]
            Place::Socket(path) => path.clone(),
        };
        let stream = tokio::net::UnixStream::connect(&socket).await;
        let stream = stream.map_err(|error| SystemdError::Unreachable(Box::new(error.into())))?;
        let connection = Builder::unix_stream(stream).p2p().build().await;
        Ok((
            connection.map_err(|error| SystemdError::Unreachable(Box::new(error)))?,
            false,
        ))
    }
}

/// Returns true for a connection that is gone.
fn is_lost(error: &zbus::Error) -> bool {
    match error {
        zbus::Error::InputOutput(error) => error.kind() != io::ErrorKind::InvalidInput,
        // The bus answers for a service that is not on it, as systemd is not for a moment after `daemon-reexec`.
        other => {
            is_name(other, "org.freedesktop.DBus.Error.ServiceUnknown")
                || is_name(other, "org.freedesktop.DBus.Error.NoReply")
                || is_name(other, "org.freedesktop.DBus.Error.Disconnected")
        }
    }
}

/// Properties that were added after the oldest systemd on machines with Kubernetes: in 230, 242 and 244.
const LATER: [&str; 3] = ["IOAccounting", "CPUQuotaPeriodUSec", "AllowedCPUs"];

/// Returns the one of [`LATER`] that systemd has refused because it does not know it.
fn unknown_property(error: &SystemdError) -> Option<&'static str> {
    let SystemdError::Refused { source, .. } = error else {
        return None;
    };
    let zbus::Error::MethodError(_, Some(text), _) = &**source else {
        return None;
    };
    let is_named = |property: &&str| text.starts_with(&format!("Cannot set property {property},"));
    LATER.into_iter().find(is_named)
}

fn is_error(error: &zbus::Error, name: &str) -> bool {
    is_name(error, &format!("org.freedesktop.systemd1.{name}"))
}

fn is_name(error: &zbus::Error, wanted: &str) -> bool {
    matches!(error, zbus::Error::MethodError(name, ..) if name.as_str() == wanted)
}

/// The value of a property.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Property {
    Flag(bool),
    Number(u64),
    Bytes(Vec<u8>),
    Text(String),
    Units(Vec<String>),
}

fn values<'a>(properties: &'a [(&'static str, Property)]) -> Vec<(&'static str, Value<'a>)> {
    let value = |property: &'a Property| match property {
        Property::Flag(flag) => Value::from(*flag),
        Property::Number(number) => Value::from(*number),
        Property::Bytes(bytes) => Value::from(bytes.clone()),
        Property::Text(text) => Value::from(text.as_str()),
        Property::Units(units) => Value::from(units.clone()),
    };
    properties
        .iter()
        .map(|(name, property)| (*name, value(property)))
        .collect()
}

/// Returns the properties that make a transient unit the slice of that name, below its parent.
fn identity(name: &CgroupName) -> Vec<(&'static str, Property)> {
    let unit = name.slice();
    let mut all = vec![
        (
            "Description",
            Property::Text(format!("holdfast pods, {unit}")),
        ),
        ("DefaultDependencies", Property::Flag(false)),
        ("MemoryAccounting", Property::Flag(true)),
        ("CPUAccounting", Property::Flag(true)),
        ("IOAccounting", Property::Flag(true)),
        ("TasksAccounting", Property::Flag(true)),
    ];
    if let Some(parent) = name.parent() {
        all.push(("Wants", Property::Units(vec![parent.slice()])));
    }
    all
}

/// The limits of a cgroup as properties of its unit. Those that are not asked for get systemd's defaults, so that one
/// that is taken away goes.
pub(super) fn properties(version: CgroupVersion, whole: &Whole) -> Vec<(&'static str, Property)> {
    let number = |name, value| (name, Property::Number(value));
    let limits = whole.limits;
    let memory = match limits.memory {
        None | Some(NO_MEMORY_LIMIT) => INFINITY,
        Some(bytes) => bytes,
    };
    let tasks = match whole.pids.flatten() {
        Some(limit) if limit <= MAX_PIDS => limit,
        _ => INFINITY,
    };
    let mut all = Vec::new();
    match version {
        CgroupVersion::V2 => {
            if let Some(shares) = limits.shares {
                all.push(number("CPUWeight", resources::shares_to_weight(shares)));
            }
            all.push(number("MemoryMax", memory));
            if let Some(protection) = whole.protection {
                all.push(number("MemoryMin", protection.min));
                all.push(number("MemoryLow", protection.low));
            }
        }
        CgroupVersion::V1 { .. } => {
            if let Some(shares) = limits.shares {
                all.push(number("CPUShares", shares));
            }
            all.push(number("MemoryLimit", memory));
        }
    }
    let (per_second, period) = match limits.quota {
        Some((quota, period)) => (quota_per_second(quota, period), period),
        None => (INFINITY, INFINITY),
    };
    all.push(number("CPUQuotaPerSecUSec", per_second));
    all.push(number("CPUQuotaPeriodUSec", period));
    all.push(number("TasksMax", tasks));
    if let (CgroupVersion::V2, Some(cpus)) = (version, whole.cpus) {
        all.push(("AllowedCPUs", Property::Bytes(mask(cpus))));
    }
    all
}

/// Microseconds of processor time a second, rounded up to what systemd can keep.
pub(super) fn quota_per_second(quota: i64, period: u64) -> u64 {
    let Ok(quota) = u64::try_from(quota) else {
        return INFINITY;
    };
    let exact = quota.saturating_mul(1_000_000) / period.max(1);
    exact.div_ceil(QUOTA_STEP_US).saturating_mul(QUOTA_STEP_US)
}

/// The first `cpus` processors, one bit each, the lowest first.
fn mask(cpus: u32) -> Vec<u8> {
    let mut bytes = vec![0xff; (cpus / 8) as usize];
    if !cpus.is_multiple_of(8) {
        bytes.push((1_u8 << (cpus % 8)) - 1);
    }
    bytes
}

#[cfg(test)]
mod tests;
