//! The cgroups of all pods together, and of the QoS classes.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use k8s_openapi::api::core::v1::Pod;

use super::settings::shared_huge_page_settings;
use super::{CgroupError, CgroupManager, Limits, NO_MEMORY_LIMIT, reserves};
use crate::kuberuntime::resources::{self, QosClass};
use crate::types::{PodExt, causes};

/// The shares of all pods together.
fn shares_of(cpu_milli: Option<u64>) -> Option<u64> {
    cpu_milli.map(|m| resources::milli_cpu_to_shares(i64::try_from(m).unwrap_or(i64::MAX)))
}

impl CgroupManager {
    /// Makes `kubepods` and the two QoS cgroups.
    ///
    /// # Errors
    /// When cgroupfs cannot be written.
    pub fn setup(&self) -> Result<(), CgroupError> {
        if !self.config.per_qos {
            return Ok(());
        }
        let top = Limits {
            shares: shares_of(self.config.allocatable_cpu_milli),
            ..Limits::default()
        };
        let cpus = self.config.cpus;
        self.make(&self.top, |whole| {
            whole.merge(top);
            whole.cpus = cpus;
        })?;
        let least = Limits {
            shares: Some(resources::MIN_SHARES),
            ..Limits::default()
        };
        let unlimited = shared_huge_page_settings(self.version, &self.config, &BTreeMap::new());
        self.make(&self.qos(QosClass::BestEffort), |whole| {
            whole.merge(least);
            whole.huge_pages.clone_from(&unlimited);
        })?;
        // Burstable shares are the sum over its pods; see `refresh_qos`.
        self.make(&self.qos(QosClass::Burstable), |whole| {
            whole.huge_pages = unlimited;
        })?;
        if let Err(error) = self.unshare_memory() {
            let error = causes(&error);
            tracing::warn!(
                error,
                "cannot remove memory limits and protection that are no longer configured"
            );
        }
        Ok(())
    }

    /// Limits the memory, the huge pages and the processes of all pods together, so that what is reserved is left; upstream's
    /// `enforceNodeAllocatableCgroups`.
    ///
    /// # Errors
    /// `AboveLimit` while the pods use more than that, since version 2 would kill them; when the kernel refuses. The node can
    /// do without.
    pub fn limit_all(&self) -> Result<(), CgroupError> {
        self.bound_all(None)
    }

    /// Memory of all pods together in bytes: since the machine's size changed, the new one.
    pub(super) fn memory_for_pods(&self) -> Option<u64> {
        match self.resized_memory.load(Ordering::Relaxed) {
            0 => self.config.allocatable_memory,
            resized => Some(resized),
        }
    }

    /// Limits of the huge pages of all pods together.
    fn huge_pages_for_pods(&self) -> Vec<(String, String)> {
        let resized = self.resized_huge_pages.lock();
        let resized = resized.unwrap_or_else(PoisonError::into_inner);
        let limits = (resized.as_ref()).unwrap_or(&self.config.allocatable_huge_pages);
        shared_huge_page_settings(self.version, &self.config, limits)
    }

    /// Sets what all pods together get; their shares too if they are given.
    fn bound_all(&self, shares: Option<u64>) -> Result<(), CgroupError> {
        if !self.config.per_qos {
            return Ok(());
        }
        let used = self.memory_used(&self.pods_path()).unwrap_or(0);
        let mut above = None;
        self.make(&self.top, |whole| {
            // Read here, where nobody else changes the limits at the same time.
            let memory = self.memory_for_pods();
            above = memory.filter(|limit| used > *limit);
            whole.merge(Limits {
                shares,
                memory: memory.filter(|_| above.is_none()),
                ..Limits::default()
            });
            whole.pids = Some(self.config.allocatable_pids);
            whole.huge_pages = self.huge_pages_for_pods();
        })?;
        above.map_or(Ok(()), |limit| {
            Err(CgroupError::AboveLimit {
                path: self.pods_path(),
                used,
                limit,
            })
        })
    }

    /// Changes what all pods together get, as after processors or memory were added to the machine. `huge_pages` are limits in
    /// bytes by the size of a page.
    ///
    /// # Errors
    /// As [`Self::limit_all`].
    pub fn resize_all(
        &self,
        cpu_milli: Option<u64>,
        memory: Option<u64>,
        huge_pages: &BTreeMap<u64, u64>,
    ) -> Result<(), CgroupError> {
        let memory = memory.unwrap_or(NO_MEMORY_LIMIT);
        self.resized_memory.store(memory, Ordering::Relaxed);
        *(self.resized_huge_pages.lock()).unwrap_or_else(PoisonError::into_inner) =
            Some(huge_pages.clone());
        self.bound_all(shares_of(cpu_milli))
    }

    /// Sets the shares and the memory of the QoS cgroups by the pods that are active; upstream's `UpdateCgroups`, each
    /// minute and with each new pod.
    ///
    /// # Errors
    /// When a quantity does not parse or cgroupfs cannot be written.
    pub fn refresh_qos(&self, pods: &[Arc<Pod>]) -> Result<(), CgroupError> {
        if !self.config.per_qos {
            return Ok(());
        }
        let mut milli = 0_i64;
        let mut requests = reserves::Requests::default();
        for pod in pods {
            let of = |source| CgroupError::Quantity {
                pod: pod.uid(),
                source,
            };
            let class = resources::qos_class(pod);
            if class != QosClass::BestEffort {
                let sum = resources::pod_resources_with_overhead(pod).map_err(of)?;
                requests.add(class, sum);
                if class == QosClass::Burstable {
                    milli = milli.saturating_add(sum.cpu_request.unwrap_or(0));
                }
            }
        }
        let limits = Limits {
            shares: Some(resources::milli_cpu_to_shares(milli)),
            ..Limits::default()
        };
        self.make(&self.qos(QosClass::Burstable), |whole| whole.merge(limits))?;
        self.share_memory(requests)
    }
}
