//! The cgroup driver: the container runtime's, where it reports one. Upstream: `getCgroupDriverFromCRI`.
//!
//! Cgroups are made before the runtime has answered, so its answer is recorded. One that comes later and says something else has
//! the agent start again.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tracing::{debug, warn};

use super::AgentError;
use super::base::Base;
use crate::core::state::kinds::{self, Declared, Key, Kind};
use crate::core::state::{State, Transaction};
use crate::kubeletconfig::{AgentConfig, CgroupDriver};
use crate::kuberuntime::cri::{CriClient, v1};
use crate::store::Store;
use crate::types::Stamp;

/// Longest wait for a runtime of which nothing is on record.
const PATIENCE: Duration = Duration::from_secs(3);
/// Longest wait for one that is on record: `check` asks again.
const SHORT: Duration = Duration::from_millis(300);
/// Pause between two requests.
const PAUSE: Duration = Duration::from_millis(100);

/// The cgroup driver that the runtime has last reported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Reported {
    cgroup_driver: String,
}

impl Kind for Reported {
    const DECLARED: Declared = kinds::CGROUP_DRIVER;
}

impl Reported {
    fn key() -> Key<Self> {
        Key::new("", "runtime")
    }

    fn of(state: &State) -> Option<CgroupDriver> {
        let record: Self = state.stored(&Self::key())?.content()?;
        record.cgroup_driver.parse().ok()
    }
}

/// Knowledge about the runtime's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// The runtime does not answer.
    None,
    /// The runtime reports no driver.
    Silent,
    /// The runtime reports this driver.
    Told(CgroupDriver),
}

/// Returns the driver to use: the reported one, else the recorded one while the runtime does not answer, else the configured one.
fn driver_of(
    answer: Answer,
    recorded: Option<CgroupDriver>,
    configured: CgroupDriver,
) -> CgroupDriver {
    match answer {
        Answer::Told(driver) => driver,
        Answer::Silent => configured,
        Answer::None => recorded.unwrap_or(configured),
    }
}

async fn ask(cri: &CriClient) -> Answer {
    match cri.runtime_config().await {
        Ok(answer) => match answer.and_then(|answer| answer.linux) {
            None => Answer::Silent,
            Some(linux) => Answer::Told(match linux.cgroup_driver() {
                v1::CgroupDriver::Systemd => CgroupDriver::Systemd,
                v1::CgroupDriver::Cgroupfs => CgroupDriver::Cgroupfs,
            }),
        },
        Err(error) => {
            debug!(%error, "the runtime does not report its cgroup driver");
            Answer::None
        }
    }
}

/// Asks until there is an answer, for so long at most.
async fn ask_patiently(cri: &CriClient, patience: Duration) -> Answer {
    let end = Instant::now() + patience;
    loop {
        let answer = tokio::time::timeout_at(end, ask(cri)).await;
        match answer {
            Ok(Answer::None) if Instant::now() + PAUSE < end => tokio::time::sleep(PAUSE).await,
            answer => return answer.unwrap_or(Answer::None),
        }
    }
}

/// Returns the configuration with the driver to use. Waits a few seconds at most.
pub(super) async fn settled(config: &AgentConfig, base: &Base, cri: &CriClient) -> AgentConfig {
    let mut config = config.clone();
    let configured = config.kubelet.cgroup_driver;
    base.configured_driver.get_or_init(|| configured);
    let driver = settle(cri, &base.store, base.clock.now(), configured).await;
    if driver != configured {
        warn!(%configured, %driver, "using the cgroup driver of the container runtime in place of the configured one");
    }
    config.kubelet.cgroup_driver = driver;
    config
}

async fn settle(
    cri: &CriClient,
    store: &Store,
    now: Stamp,
    configured: CgroupDriver,
) -> CgroupDriver {
    let recorded = Reported::of(&store.snapshot());
    let patience = recorded.map_or(PATIENCE, |_| SHORT);
    let answer = ask_patiently(cri, patience).await;
    record(store, answer, now);
    driver_of(answer, recorded, configured)
}

/// Compares the driver in use with that of the runtime, which answers now.
///
/// # Errors
/// When they differ: the agent has to start again. It asks the runtime first then.
pub(super) async fn check(
    cri: &CriClient,
    base: &Base,
    used: CgroupDriver,
) -> Result<(), AgentError> {
    let configured = base.configured_driver.get().copied().unwrap_or(used);
    let now = base.clock.now();
    match wanted(cri, &base.store, now, (used, configured)).await {
        driver if driver == used => Ok(()),
        _ => Err(AgentError::CgroupDriver { used }),
    }
}

/// Returns the driver that the runtime, which answers now, wants.
async fn wanted(
    cri: &CriClient,
    store: &Store,
    now: Stamp,
    (used, configured): (CgroupDriver, CgroupDriver),
) -> CgroupDriver {
    let answer = ask_patiently(cri, PATIENCE).await;
    if answer == Answer::None {
        warn!(
            "the container runtime does not say which cgroup driver it has; if it is another one than {used}, no pod will start"
        );
    }
    record(store, answer, now);
    driver_of(answer, Some(used), configured)
}

/// Records an answer, for a start before the runtime has answered. Nothing waits for that: without the record such a start takes the
/// driver of before, and `check` has the agent start once more.
fn record(store: &Store, answer: Answer, now: Stamp) {
    let known = Reported::of(&store.snapshot());
    let key = Reported::key();
    let transaction = match answer {
        Answer::Told(driver) if known != Some(driver) => {
            let cgroup_driver = driver.to_string();
            Transaction::new().put_object(&key, &Reported { cgroup_driver }, now)
        }
        Answer::Silent if known.is_some() => Transaction::new().delete_object(&key),
        _ => return,
    };
    let pending = store.submit(transaction);
    tokio::spawn(async move {
        if let Err(error) = pending.wait().await {
            warn!(%error, "cannot record the cgroup driver of the container runtime");
        }
    });
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use holdfast_testkit::fake_cri::{FakeCri, Fault};

    use super::*;
    use crate::kuberuntime::cri::CriTimeouts;
    use crate::types::metrics::Metrics;
    use crate::types::{BootId, Clock};

    #[test]
    fn the_runtimes_driver_wins_then_the_recorded_one_then_the_configured_one() {
        use CgroupDriver::{Cgroupfs, Systemd};
        for (answer, recorded, configured, want) in [
            (Answer::Told(Systemd), Some(Cgroupfs), Cgroupfs, Systemd),
            (Answer::Told(Cgroupfs), None, Systemd, Cgroupfs),
            (Answer::Silent, Some(Systemd), Cgroupfs, Cgroupfs),
            (Answer::None, Some(Systemd), Cgroupfs, Systemd),
            (Answer::None, None, Cgroupfs, Cgroupfs),
        ] {
            assert_eq!(driver_of(answer, recorded, configured), want, "{answer:?}");
        }
    }

    struct AtBoot;

    impl Clock for AtBoot {
        fn now(&self) -> Stamp {
            Stamp {
                boot: BootId(1),
                boottime_ms: 1,
                wall_ms: 1,
            }
        }
    }

    /// Waits until what was submitted is written: commits keep their order.
    async fn written(store: &Store) {
        let line = Transaction::new().journal(None, "written", "all before");
        store.commit(line).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_comes_late_counts_from_the_next_start_on() {
        use CgroupDriver::{Cgroupfs, Systemd};
        let fake = FakeCri::new();
        let metrics = Metrics::default();
        let cri = CriClient::over(fake.channel(), "fake", CriTimeouts::default(), metrics);
        let (store, now) = (Store::in_memory(Arc::new(AtBoot)), AtBoot.now());
        let recorded = || Reported::of(&store.snapshot());
        fake.set_cgroup_driver(Some(v1::CgroupDriver::Systemd));
        fake.fail_always("runtime_config", Fault::Hang);
        assert_eq!(settle(&cri, &store, now, Cgroupfs).await, Cgroupfs);
        assert_eq!(recorded(), None);
        fake.clear_faults();
        let driver = wanted(&cri, &store, now, (Cgroupfs, Cgroupfs)).await;
        assert_eq!(driver, Systemd);
        written(&store).await;
        assert_eq!(recorded(), Some(Systemd));
        // The next boot begins before the runtime.
        fake.fail_always("runtime_config", Fault::Hang);
        assert_eq!(settle(&cri, &store, now, Cgroupfs).await, Systemd);
        fake.clear_faults();
        let driver = wanted(&cri, &store, now, (Systemd, Cgroupfs)).await;
        assert_eq!(driver, Systemd);
        // A runtime that leaves it to the configuration.
        fake.set_cgroup_driver(None);
        let driver = wanted(&cri, &store, now, (Systemd, Cgroupfs)).await;
        assert_eq!(driver, Cgroupfs);
        written(&store).await;
        assert_eq!(recorded(), None);
        let driver = wanted(&cri, &store, now, (Cgroupfs, Cgroupfs)).await;
        assert_eq!(driver, Cgroupfs);
    }
}
