//! The agent inside another program: everything but the process around it (lock, signals, sockets). For
//! simulations, which bring a store, a clock and a runtime of their own.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::base::{Base, Parts};
use super::started::Started;
use super::{AgentError, DRAIN, Tasks, cgroup_driver, close, shutdown, start, tasks};
use crate::kubeletconfig::AgentConfig;
use crate::kuberuntime::cri::CriClient;
use crate::nodeshutdown::LocalDrain;
use crate::pod_workers::PodWorkers;
use crate::store::Store;

/// A running agent.
pub struct Embedded {
    base: Base,
    started: Started,
    tasks: Tasks,
    token: CancellationToken,
}

impl Embedded {
    /// Restores and starts. Waits until the runtime answers.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn start(
        config: &AgentConfig,
        parts: Parts,
        cri: CriClient,
    ) -> Result<Self, AgentError> {
        let base = Base::new(config, parts);
        let token = CancellationToken::new();
        let mut tasks = Tasks::default();
        tasks.add(
            "heartbeat",
            tasks::heartbeat(base.store.clone(), Arc::clone(&base.clock), token.clone()),
        );
        let config = cgroup_driver::settled(config, &base, &cri).await;
        let started = start::start(&config, &base, cri, &mut tasks, &token).await?;
        Ok(Self {
            base,
            started,
            tasks,
            token,
        })
    }

    /// Its workers.
    pub fn workers(&self) -> &PodWorkers {
        &self.started.workers
    }

    /// Its store.
    pub fn store(&self) -> &Store {
        &self.base.store
    }

    /// Takes orders of `holdfast drain-local`.
    pub fn local_drain(&self) -> &LocalDrain {
        &self.base.local_drain
    }

    /// Makes the sources look again.
    pub fn reload(&self) {
        self.started.config.reload();
    }

    /// Ends in order, as after SIGTERM, and closes the store.
    ///
    /// # Errors
    /// When the store cannot record the end.
    pub async fn stop(self) -> Result<(), AgentError> {
        self.token.cancel();
        self.started.workers.drain(DRAIN).await;
        self.tasks.end().await;
        Ok(close(&self.base).await?)
    }

    /// Ends in order because the machine goes down, as after SIGTERM then.
    ///
    /// # Errors
    /// When the store cannot record the end.
    pub async fn power_off(self) -> Result<(), AgentError> {
        self.token.cancel();
        self.started.workers.drain(DRAIN).await;
        let limit = shutdown::LAST_STOP;
        self.started.workers.stop_containers(limit).await;
        self.tasks.end().await;
        Ok(close(&self.base).await?)
    }

    /// Ends wherever it is, as after SIGKILL: every task is dropped at its await, the store is left as it is.
    pub fn crash(mut self) {
        self.started.workers.abort();
        self.tasks.abort();
        self.token.cancel();
    }
}
