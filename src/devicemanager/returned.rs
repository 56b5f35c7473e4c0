//! Devices that were away while a container had them, such as one on USB that was plugged in again: it may be another device
//! node now.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use tracing::{debug, info, warn};

use super::DeviceManager;
use crate::core::devices::{self, Allocation, Granted, PodDevices, allocations_key};
use crate::core::state::Transaction;
use crate::store::CommitError;
use crate::types::{ContainerId, PodExt};

/// A container's devices about which its plugin is asked.
struct Question {
    container: String,
    resource: String,
    ids: BTreeSet<String>,
    had: Granted,
    /// Number of returns of devices of the resource at that time.
    returns: u64,
}

impl DeviceManager {
    /// Asks plugins again about devices of the pod that were away, and records what they give with them now. `running`
    /// returns the container that runs under a name. Returns the containers that run with something else, and have to be
    /// restarted: the record names them, so that each is restarted once.
    ///
    /// # Errors
    /// When the answer cannot be recorded. A plugin that does not answer is asked with the next call.
    pub async fn outdated(
        &self,
        pod: &Pod,
        running: impl Fn(&str) -> Option<ContainerId>,
    ) -> Result<Vec<ContainerId>, CommitError> {
        if !devices::may_want(pod) {
            return Ok(Vec::new());
        }
        let Ok(held) = self.held(pod) else {
            return Ok(Vec::new());
        };
        for question in self.questions(&held) {
            self.ask_again(pod, question, &running).await?;
        }
        let held = self.held(pod).unwrap_or_default();
        Ok(held.outdated().into_iter().cloned().collect())
    }

    fn questions(&self, held: &PodDevices) -> Vec<Question> {
        let shared = self.shared();
        let mut questions = Vec::new();
        for (resource, returned) in shared.inventory.returned() {
            for (container, allocation) in held.with_returned(resource, returned) {
                questions.push(Question {
                    container: container.clone(),
                    resource: resource.clone(),
                    ids: allocation.ids.keys().cloned().collect(),
                    had: allocation.granted.clone().unwrap_or_default(),
                    returns: shared.inventory.returns(resource),
                });
            }
        }
        questions
    }

    async fn ask_again(
        &self,
        pod: &Pod,
        question: Question,
        running: impl Fn(&str) -> Option<ContainerId>,
    ) -> Result<(), CommitError> {
        let Question {
            container,
            resource,
            ids,
            had,
            returns,
        } = question;
        let Some(client) = self.connected(&resource) else {
            return Ok(());
        };
        let uid = pod.uid();
        let granted = match client.allocate(ids.iter().cloned().collect()).await {
            Ok(granted) => granted,
            Err(error) => {
                warn!(pod = %uid, container, resource, %error, "cannot ask whether devices that are back have changed");
                return Ok(());
            }
        };
        if granted == had {
            debug!(pod = %uid, container, resource, "devices are back, as they were");
        } else {
            info!(pod = %uid, container, resource, ?ids, "devices are back, and have changed");
            self.record_again(pod, &container, &resource, (granted, running(&container)))
                .await?;
        }
        let mut shared = self.shared();
        shared.inventory.settle_returned(&resource, &ids, returns);
        drop(shared);
        self.published(&resource);
        Ok(())
    }

    /// Records what a container gets from now on, and which one runs without it. It is on the disk when this returns.
    async fn record_again(
        &self,
        pod: &Pod,
        container: &str,
        resource: &str,
        (granted, outdated): (Granted, Option<ContainerId>),
    ) -> Result<(), CommitError> {
        let key = allocations_key(pod);
        loop {
            let seen = self.store().snapshot();
            let Ok(Some(held)) = PodDevices::of(&seen, pod) else {
                return Ok(());
            };
            let Some(known) = held.allocation(container, resource) else {
                return Ok(());
            };
            let allocation = Allocation {
                granted: Some(granted.clone()),
                outdated: outdated.clone(),
                ..known.clone()
            };
            let held = held.with(container, resource, allocation);
            let text = format!("{container}: {resource} is back and has changed");
            let put = Transaction::new()
                .expect_object(&seen, &key)
                .put_object(&key, &held, self.now())
                .journal(Some(&pod.uid()), "devices changed", text);
            match self.store().commit(put).await {
                Ok(_) => return Ok(()),
                Err(CommitError::Stale { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }
}
