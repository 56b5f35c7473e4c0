//! Detection of pods that use more local storage than they may; the decision of upstream's `localStorageEviction`.
//!
//! The input is a pod and its usage. The output is the reason of its eviction, in upstream's words. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::admission::is_critical;
use super::resources::{self, NANOS, amount};
use crate::types::PodExt;

/// Reason of a pod that used too much.
pub const EVICTED: &str = "Evicted";

const EPHEMERAL_STORAGE: &str = "ephemeral-storage";
/// Upstream's names of signals.
const OF_EMPTY_DIR: &str = "emptydirfs.limit";
const OF_POD: &str = "ephemeralpodfs.limit";
const OF_CONTAINER: &str = "ephemeralcontainerfs.limit";
/// Number of times in a row that a pod may prevent its measurement.
const MAX_MISSED: u32 = 3;

/// Local storage of a pod, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StorageUsage {
    /// emptyDir volumes by name.
    pub empty_dirs: BTreeMap<String, u64>,
    /// Containers by name.
    pub containers: BTreeMap<String, ContainerUsage>,
    /// The hosts file, which its containers share.
    pub hosts: u64,
}

/// Local storage of one container, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContainerUsage {
    /// The writable layer.
    pub rootfs: u64,
    /// Its logs.
    pub logs: u64,
    /// Its termination message, and what earlier versions of the agent have left of earlier attempts.
    pub messages: u64,
}

impl ContainerUsage {
    fn all(self) -> u64 {
        let written = self.rootfs.saturating_add(self.logs);
        written.saturating_add(self.messages)
    }
}

/// Usage of a pod that has to be measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Names of emptyDir volumes.
    pub empty_dirs: Vec<String>,
    /// True for the files of containers: their layers, logs and termination messages, the hosts file.
    pub containers: bool,
}

impl Wanted {
    /// Nothing of the pod is limited.
    pub fn is_empty(&self) -> bool {
        self.empty_dirs.is_empty() && !self.containers
    }
}

/// Returns the usage to measure for a decision on a pod: nothing when it has no limits, and nothing of a critical pod,
/// which is never evicted; a static one would not come back. Upstream: `evictPod`.
pub fn wanted(pod: &Pod) -> Wanted {
    if is_critical(pod) {
        return Wanted::default();
    }
    let containers = resources::ephemeral_storage_limit(pod).is_some();
    let volumes = pod.spec_ref().volumes.iter().flatten();
    let empty_dirs = volumes
        .filter_map(|v| Some((v, v.empty_dir.as_ref()?)))
        .filter(|(_, e)| {
            let limited = e.size_limit.as_ref().is_some_and(|l| amount(l) > 0);
            limited || (containers && !is_memory(e.medium.as_deref()))
        })
        .map(|(v, _)| v.name.clone())
        .collect();
    Wanted {
        empty_dirs,
        containers,
    }
}

fn is_memory(medium: Option<&str>) -> bool {
    medium.is_some_and(|m| !m.is_empty())
}

/// Returns the reason for which a pod is evicted, if it is. Checks volumes first, then the pod, then its containers, as
/// upstream does, and reports the first limit that is exceeded.
pub fn over_limit(pod: &Pod, usage: &StorageUsage) -> Option<String> {
    over_limit_by(pod, usage).map(|(_, message)| message)
}

/// As [`over_limit`], with upstream's name of the signal before the message.
pub fn over_limit_by(pod: &Pod, usage: &StorageUsage) -> Option<(&'static str, String)> {
    let empty_dir = empty_dir_over(pod, usage).map(|m| (OF_EMPTY_DIR, m));
    empty_dir
        .or_else(|| pod_over(pod, usage).map(|m| (OF_POD, m)))
        .or_else(|| container_over(pod, usage).map(|m| (OF_CONTAINER, m)))
}

/// Returns the reason for which a pod is evicted that has prevented its measurement so many `times` in a row, if that
/// is too often. Otherwise a pod could evade a limit with files that take too long to count. The result is as of
/// [`over_limit_by`]. Upstream evicts no pod for this.
pub fn unmeasured(pod: &Pod, times: u32, what: &str) -> Option<(&'static str, String)> {
    let signal = match wanted(pod) {
        wanted if wanted.is_empty() => return None,
        Wanted {
            containers: true, ..
        } => OF_POD,
        _ => OF_EMPTY_DIR,
    };
    (times >= MAX_MISSED).then(|| {
        let message = format!(
            "Usage of local storage could not be measured {times} times in a row and counts as over the limit: {what}. "
        );
        (signal, message)
    })
}

fn exceeds(used: u64, limit: i128) -> bool {
    i128::from(used).saturating_mul(NANOS) > limit
}

/// Upstream's `emptyDirLimitEviction`.
fn empty_dir_over(pod: &Pod, usage: &StorageUsage) -> Option<String> {
    pod.spec_ref().volumes.iter().flatten().find_map(|volume| {
        let limit = volume.empty_dir.as_ref()?.size_limit.as_ref()?;
        let used = *usage.empty_dirs.get(&volume.name)?;
        (amount(limit) > 0 && exceeds(used, amount(limit))).then(|| {
            format!(
                "Usage of EmptyDir volume {:?} exceeds the limit {:?}. ",
                volume.name, limit.0
            )
        })
    })
}

/// Upstream's `podEphemeralStorageLimitEviction`.
fn pod_over(pod: &Pod, usage: &StorageUsage) -> Option<String> {
    let limit = resources::ephemeral_storage_limit(pod)?;
    let on_disk = pod.spec_ref().volumes.iter().flatten().filter(|v| {
        let empty = v.empty_dir.as_ref();
        empty.is_some_and(|e| !is_memory(e.medium.as_deref()))
    });
    let volumes = on_disk.filter_map(|v| usage.empty_dirs.get(&v.name).copied());
    let containers = usage.containers.values();
    let used = containers
        .map(|c| c.all())
        .chain(volumes)
        .chain([usage.hosts])
        .fold(0_u64, u64::saturating_add);
    exceeds(used, limit).then(|| {
        let shown = shown(pod, limit);
        format!("Pod ephemeral local storage usage exceeds the total limit of containers {shown}. ")
    })
}

/// Upstream's `containerEphemeralStorageLimitEviction`.
fn container_over(pod: &Pod, usage: &StorageUsage) -> Option<String> {
    pod.containers().iter().find_map(|container| {
        let limits = container.resources.as_ref()?.limits.as_ref()?;
        let limit = limits.get(EPHEMERAL_STORAGE)?;
        let used = usage.containers.get(&container.name)?.all();
        (amount(limit) > 0 && exceeds(used, amount(limit))).then(|| {
            format!(
                "Container {} exceeded its local ephemeral storage limit {:?}. ",
                container.name, limit.0
            )
        })
    })
}

/// The limit as it was written where it comes from one place, else in the largest unit that divides it.
fn shown(pod: &Pod, limit: i128) -> String {
    let containers = pod.init_containers().iter().chain(pod.containers());
    let written = containers
        .filter_map(|c| {
            c.resources
                .as_ref()?
                .limits
                .as_ref()?
                .get(EPHEMERAL_STORAGE)
        })
        .find(|q| amount(q) == limit);
    match written {
        Some(Quantity(text)) => text.clone(),
        None => {
            let mut bytes = limit / NANOS;
            let mut unit = 0;
            let units = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
            while bytes > 0 && bytes % 1024 == 0 && unit + 1 < units.len() {
                bytes /= 1024;
                unit += 1;
            }
            format!("{bytes}{}", units[unit])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const MI: u64 = 1 << 20;

    fn pod(spec: Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u"}, "spec": spec}))
            .unwrap()
    }

    fn container(name: &str, limit: &str) -> Value {
        json!({"name": name, "resources": {"limits": {"ephemeral-storage": limit}}})
    }

    fn usage(volumes: &[(&str, u64)], containers: &[(&str, u64, u64)]) -> StorageUsage {
        StorageUsage {
            empty_dirs: volumes.iter().map(|(n, u)| ((*n).to_owned(), *u)).collect(),
            containers: containers
                .iter()
                .map(|(n, rootfs, logs)| {
                    let usage = ContainerUsage {
                        rootfs: *rootfs,
                        logs: *logs,
                        messages: 0,
                    };
                    ((*n).to_owned(), usage)
                })
                .collect(),
            hosts: 0,
        }
    }

    #[test]
    fn limits_of_local_storage() {
        let dir = |limit: &str| json!([{"name": "x", "emptyDir": {"sizeLimit": limit}}]);
        let limited = json!({"volumes": dir("1Mi"), "containers": [{"name": "c"}]});
        let one = json!({"containers": [container("c", "1Mi")]});
        let two = json!({"containers": [container("c", "1Mi"), container("d", "2Mi")]});
        let mixed = json!({"volumes": [{"name": "x", "emptyDir": {}}, {"name": "m", "emptyDir": {"medium": "Memory"}}],
            "containers": [container("c", "4Mi"), {"name": "free"}]});
        let init = json!({"initContainers": [container("i", "8Mi")], "containers": [container("c", "1Mi")]});
        let sidecar = json!({"initContainers": [{"name": "s", "restartPolicy": "Always", "resources": {"limits": {"ephemeral-storage": "1Mi"}}}],
            "containers": [container("c", "1Mi")]});
        let none =
            json!({"volumes": [{"name": "x", "emptyDir": {}}], "containers": [{"name": "c"}]});
        let overhead = json!({"overhead": {"ephemeral-storage": "1Mi"}, "containers": [container("c", "4Mi"), container("d", "4Mi")]});
        let zero = json!({"volumes": dir("0"), "containers": [container("c", "0")]});
        let volume = "Usage of EmptyDir volume \"x\" exceeds the limit \"1Mi\". ";
        let total = |n: &str| {
            format!("Pod ephemeral local storage usage exceeds the total limit of containers {n}. ")
        };
        let own = "Container c exceeded its local ephemeral storage limit \"1Mi\". ";
        for (what, spec, usage, want) in [
            (
                "a volume at its limit",
                &limited,
                usage(&[("x", MI)], &[]),
                None,
            ),
            (
                "a volume over it",
                &limited,
                usage(&[("x", MI + 1)], &[]),
                Some(volume.to_owned()),
            ),
            (
                "a volume that was not measured",
                &limited,
                usage(&[], &[]),
                None,
            ),
            (
                "a container at its limit",
                &one,
                usage(&[], &[("c", MI, 0)]),
                None,
            ),
            (
                "the only container over it",
                &one,
                usage(&[], &[("c", MI, 1)]),
                Some(total("1Mi")),
            ),
            (
                "one of two over its own",
                &two,
                usage(&[], &[("c", MI, 1)]),
                Some(own.to_owned()),
            ),
            (
                "what the sandbox may use comes on top",
                &overhead,
                usage(&[], &[("c", 4 * MI, 0), ("d", 4 * MI, 0), ("e", MI, 0)]),
                None,
            ),
            (
                "and no more",
                &overhead,
                usage(&[], &[("c", 4 * MI, 0), ("d", 4 * MI, 0), ("e", MI, 1)]),
                Some(total("9Mi")),
            ),
            (
                "both together",
                &two,
                usage(&[], &[("c", MI, 0), ("d", 2 * MI, 1)]),
                Some(total("3Mi")),
            ),
            (
                "volumes on disk count",
                &mixed,
                usage(&[("x", 3 * MI), ("m", 9 * MI)], &[("c", MI, 1)]),
                Some(total("4Mi")),
            ),
            (
                "volumes in memory do not",
                &mixed,
                usage(&[("x", MI), ("m", 9 * MI)], &[("c", MI, 1)]),
                None,
            ),
            (
                "a container without a limit counts",
                &mixed,
                usage(&[], &[("free", 4 * MI, 1)]),
                Some(total("4Mi")),
            ),
            (
                "an init container raises the pod's limit, not the container's",
                &init,
                usage(&[], &[("c", 2 * MI, 0)]),
                Some(own.to_owned()),
            ),
            (
                "more than the init container may",
                &init,
                usage(&[], &[("i", 8 * MI, 1)]),
                Some(total("8Mi")),
            ),
            (
                "a sidecar adds",
                &sidecar,
                usage(&[], &[("s", MI, 0), ("c", MI, 0)]),
                None,
            ),
            (
                "a sidecar alone is not evicted for",
                &sidecar,
                usage(&[], &[("s", 2 * MI, 0)]),
                None,
            ),
            (
                "no limits",
                &none,
                usage(&[("x", u64::MAX)], &[("c", u64::MAX, u64::MAX)]),
                None,
            ),
            (
                "limits of zero are none",
                &zero,
                usage(&[("x", u64::MAX)], &[("c", 1, 1)]),
                None,
            ),
        ] {
            assert_eq!(over_limit(&pod(spec.clone()), &usage), want, "{what}");
        }
    }

    #[test]
    fn files_that_containers_write_besides_their_layer_count() {
        let one = pod(json!({"containers": [container("c", "1Mi")]}));
        let mut used = usage(&[], &[("c", 0, MI)]);
        used.hosts = 1;
        let total = |limit: &str| {
            format!(
                "Pod ephemeral local storage usage exceeds the total limit of containers {limit}. "
            )
        };
        assert_eq!(over_limit(&one, &used), Some(total("1Mi")));
        used.hosts = 0;
        assert_eq!(over_limit(&one, &used), None);
        let message = used.containers.get_mut("c").unwrap();
        (message.logs, message.messages) = (0, MI + 1);
        assert_eq!(over_limit(&one, &used), Some(total("1Mi")));
        // One of two over its own limit.
        let two = pod(json!({"containers": [container("c", "1Mi"), container("d", "2Mi")]}));
        let own = "Container c exceeded its local ephemeral storage limit \"1Mi\". ";
        assert_eq!(over_limit(&two, &used), Some(own.to_owned()));
    }

    #[test]
    fn what_cannot_be_measured_again_and_again_is_over_its_limit() {
        let limited = pod(json!({"containers": [container("c", "1Mi")]}));
        let volumes = json!([{"name": "x", "emptyDir": {"sizeLimit": "1Mi"}}]);
        let volume = pod(json!({"volumes": volumes, "containers": [{"name": "c"}]}));
        let free = pod(json!({"containers": [{"name": "c"}]}));
        for (of, times, signal) in [
            (&limited, MAX_MISSED - 1, None),
            (&limited, MAX_MISSED, Some(OF_POD)),
            (&volume, MAX_MISSED, Some(OF_EMPTY_DIR)),
            (&free, u32::MAX, None),
        ] {
            let told = unmeasured(of, times, "the reason");
            assert_eq!(told.as_ref().map(|(signal, _)| *signal), signal);
            assert!(told.is_none_or(|(_, message)| message.contains("the reason")));
        }
    }

    #[test]
    fn only_what_limits_need_is_measured() {
        let c = json!([{"name": "c"}]);
        for (spec, empty_dirs, containers) in [
            (
                json!({"containers": c, "volumes": [{"name": "x", "emptyDir": {}}]}),
                vec![],
                false,
            ),
            (
                json!({"containers": c, "volumes": [{"name": "x", "emptyDir": {"sizeLimit": "1Mi"}}, {"name": "y", "emptyDir": {}}]}),
                vec!["x"],
                false,
            ),
            (
                json!({"containers": c, "volumes": [{"name": "x", "emptyDir": {"sizeLimit": "0"}}]}),
                vec![],
                false,
            ),
            (
                json!({"containers": [container("c", "1Mi")], "volumes": [{"name": "y", "emptyDir": {}}, {"name": "m", "emptyDir": {"medium": "Memory"}}]}),
                vec!["y"],
                true,
            ),
            (
                json!({"containers": [{"name": "c", "resources": {"requests": {"ephemeral-storage": "1Mi"}}}]}),
                vec![],
                false,
            ),
        ] {
            let got = wanted(&pod(spec.clone()));
            assert_eq!(got.empty_dirs, empty_dirs, "{spec}");
            assert_eq!(got.containers, containers, "{spec}");
            assert_eq!(got.is_empty(), empty_dirs.is_empty() && !containers);
        }
    }

    #[test]
    fn critical_pods_are_not_measured() {
        let mut pod = pod(json!({"containers": [container("c", "1Mi")]}));
        assert!(!wanted(&pod).is_empty());
        pod.spec.as_mut().unwrap().priority = Some(2_000_000_000);
        assert!(wanted(&pod).is_empty());
        pod.spec.as_mut().unwrap().priority = None;
        pod.metadata.annotations =
            serde_json::from_value(json!({"kubernetes.io/config.source": "file"})).unwrap();
        assert!(wanted(&pod).is_empty());
    }
}
