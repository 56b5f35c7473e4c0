//! Small tasks beside the sync loop: the runtime's health, the heartbeat, automatic backups, the store's
//! health as events, systemd's watchdog.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use super::systemd::Systemd;
use crate::core::state::{META_KEY, MetaRecord, State, Transaction};
use crate::kuberuntime::cri::{CriClient, CriError};
use crate::pod_workers::PodWorkers;
use crate::runtime_state::RuntimeState;
use crate::server::TimedCheck;
use crate::status::StatusManager;
use crate::store::backup::{self, BackupError, BackupMeta};
use crate::store::{Store, StoreHealth};
use crate::types::metrics::Metrics;
use crate::types::{Clock, Event, EventRecorder, EventType, Stamp, causes};

const RUNTIME_PERIOD: Duration = Duration::from_secs(5);
const HEARTBEAT_PERIOD: Duration = Duration::from_secs(10);
const BACKUP_CHECK: Duration = Duration::from_secs(30);
const DISK_CHECK: Duration = Duration::from_secs(1);
/// Work on the disk that takes longer than this is logged, as the store does later.
const SLOW: Duration = Duration::from_secs(5);

/// Waits for `work`, and calls `tell` when that takes more than 5 s.
pub(super) async fn patiently<T>(work: impl Future<Output = T>, tell: impl FnOnce()) -> T {
    let mut work = std::pin::pin!(work);
    if let Ok(done) = tokio::time::timeout(SLOW, &mut work).await {
        return done;
    }
    tell();
    work.await
}

/// Asks the runtime how it is. Upstream: `updateRuntimeUp`.
pub(super) async fn update_runtime_up(cri: &CriClient, state: &RuntimeState, clock: &dyn Clock) {
    match cri.status(false).await {
        Ok(answer) => {
            let conditions = answer.status.map(|s| s.conditions).unwrap_or_default();
            let problem = |name: &str| {
                conditions.iter().find(|c| c.r#type == name).map_or_else(
                    || Err(format!("the runtime reports no condition {name}")),
                    |c| {
                        if c.status {
                            Ok(())
                        } else {
                            Err(format!("{}: {}", c.reason, c.message))
                        }
                    },
                )
            };
            state.set_handlers(answer.runtime_handlers);
            let features = answer.features.unwrap_or_default();
            state.set_strict_groups(features.supplemental_groups_policy);
            state.set_network(problem("NetworkReady"));
            match problem("RuntimeReady") {
                Ok(()) => state.set_runtime_ok(clock.now()),
                Err(why) => state.set_runtime_error(why),
            }
        }
        Err(error) => state.set_runtime_error(error.to_string()),
    }
}

/// Keeps the runtime's state up to date every 5 s.
pub(super) async fn runtime_up(
    cri: CriClient,
    state: RuntimeState,
    clock: Arc<dyn Clock>,
    token: CancellationToken,
) {
    loop {
        tokio::select! {
            () = token.cancelled() => return,
            () = tokio::time::sleep(RUNTIME_PERIOD) => update_runtime_up(&cri, &state, &*clock).await,
        }
    }
}

/// Waits until the runtime answers and returns its name. Says once what is wrong, and again when that
/// changes. `None` when cancelled.
pub(super) async fn wait_for_runtime(
    cri: &CriClient,
    state: &RuntimeState,
    token: &CancellationToken,
) -> Option<String> {
    let mut delay = Duration::from_millis(50);
    let mut said = String::new();
    loop {
        let answer: Result<_, CriError> = tokio::select! {
            () = token.cancelled() => return None,
            answer = cri.version() => answer,
        };
        match answer {
            Ok(version) => {
                info!(
                    runtime = version.runtime_name,
                    version = version.runtime_version,
                    api = version.runtime_api_version,
                    "container runtime answers"
                );
                return Some(version.runtime_name);
            }
            Err(error) => {
                let message = error.to_string();
                state.set_runtime_error(message.clone());
                if message != said {
                    warn!(error = message, "waiting for the container runtime");
                    said = message;
                }
            }
        }
        tokio::select! {
            () = token.cancelled() => return None,
            () = tokio::time::sleep(delay) => {}
        }
        delay = (delay * 2).min(Duration::from_secs(1));
    }
}

/// Writes a sign of life every 10 s: what deadlines are measured by after a reboot. After one, nothing is written
/// until the plan of this start is committed: what was decided in the earlier boot is measured by its last sign of
/// life, and an agent that ends before the plan must leave that one to the next.
pub(super) async fn heartbeat(store: Store, clock: Arc<dyn Clock>, token: CancellationToken) {
    loop {
        tokio::select! {
            () = token.cancelled() => return,
            () = tokio::time::sleep(HEARTBEAT_PERIOD) => {}
        }
        if let Some(transaction) = alive(&store.snapshot(), clock.now()) {
            // Relaxed; a degraded store reports itself.
            drop(store.submit(transaction));
        }
    }
}

fn alive(state: &State, now: Stamp) -> Option<Transaction> {
    let meta = state
        .meta()
        .filter(|meta| meta.heartbeat.boot == now.boot)?;
    let next = MetaRecord {
        heartbeat: now,
        ..meta.clone()
    };
    // The plan of a start may be on its way.
    Some(
        Transaction::new()
            .expect::<MetaRecord>(state, META_KEY)
            .put(META_KEY, next),
    )
}

/// Marks the end as orderly. The last sign of life of an earlier boot stays, as for [`heartbeat`].
pub(super) fn orderly_end(state: &State, now: Stamp) -> Option<Transaction> {
    let meta = state.meta()?;
    let mut next = meta.clone();
    next.clean_shutdown = true;
    if meta.heartbeat.boot == now.boot {
        next.heartbeat = now;
    }
    Some(
        Transaction::new()
            .expect::<MetaRecord>(state, META_KEY)
            .put(META_KEY, next)
            .journal(None, "agent stopped", "in order"),
    )
}

/// Writes a backup every 10 minutes if something changed, and keeps three. The 10 minutes go on across
/// restarts: the first backup of a life is due by the age of the newest one on the disk.
pub(super) async fn backups(
    store: Store,
    dir: PathBuf,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    recorder: Arc<dyn EventRecorder>,
    token: CancellationToken,
) {
    let mut newest: Option<BackupMeta> = None;
    let mut last: Option<(Stamp, Arc<State>)> = None;
    let mut looked = false;
    loop {
        tokio::select! {
            () = token.cancelled() => return,
            () = tokio::time::sleep(BACKUP_CHECK) => {}
        }
        if !looked {
            newest = newest_backup(dir.clone()).await;
            looked = true;
        }
        let (now, state) = (clock.now(), store.snapshot());
        let due = match &last {
            Some((at, old)) => backup::due(Some((*at, old)), &state, now),
            None => backup::first_due(newest.as_ref(), &state, now),
        };
        if !due {
            continue;
        }
        match save_backup(&store, dir.clone(), now).await {
            Ok(path) => {
                metrics.backups.inc();
                debug!(path = %path.display(), "backup written");
            }
            Err(error) => {
                metrics.backup_errors.inc();
                let error = causes(&error);
                warn!(error, "cannot write the automatic backup");
                recorder.record(Event::node(EventType::Warning, "BackupFailed", error));
            }
        }
        last = Some((now, state));
    }
}

/// Returns the metadata of the newest usable backup. Unreadable backups are logged and skipped.
async fn newest_backup(dir: PathBuf) -> Option<BackupMeta> {
    let read = tokio::task::spawn_blocking(move || backup::newest_meta(&dir));
    let (newest, errors) = read.await.ok()?;
    for error in errors {
        warn!(%error, "cannot use a backup");
    }
    newest
}

async fn save_backup(store: &Store, dir: PathBuf, now: Stamp) -> Result<PathBuf, BackupError> {
    let on_disk = store.snapshot_on_disk().await;
    let (state, version) = on_disk.map_err(|error| BackupError::Io {
        action: "bring the store up to date for",
        path: dir.clone(),
        source: std::io::Error::other(error),
    })?;
    tokio::task::spawn_blocking(move || write_backup_file(&state, version, &dir, now))
        .await
        .unwrap_or_else(|error| {
            Err(BackupError::Io {
                action: "write",
                path: PathBuf::from("backup"),
                source: std::io::Error::other(error),
            })
        })
}

/// Writes one backup into `dir` and drops the oldest. Blocking.
pub(super) fn write_backup_file(
    state: &State,
    version: u64,
    dir: &std::path::Path,
    now: Stamp,
) -> Result<PathBuf, BackupError> {
    let meta = BackupMeta::of(state, version, now);
    let path = dir.join(meta.file_name());
    backup::write(state, &path, &meta)?;
    if let Err(error) = backup::rotate(dir, backup::KEPT) {
        warn!(%error, "cannot remove old backups");
    }
    Ok(path)
}

/// Emits an event for every change of the store's health, and looks every second whether the disk hangs.
///
/// Ends when the writer has panicked, and the agent with it: nothing could be started, and nothing stopped, any more.
pub(super) async fn store_health(
    store: Store,
    recorder: Arc<dyn EventRecorder>,
    token: CancellationToken,
) {
    let mut health = store.health();
    loop {
        tokio::select! {
            () = token.cancelled() => return,
            () = store.panicked() => {
                error!("the writer of the store panicked");
                return;
            }
            () = tokio::time::sleep(DISK_CHECK) => {
                store.check_disk();
                continue;
            }
            changed = health.changed() => if changed.is_err() {
                return;
            },
        }
        let now = health.borrow_and_update().clone();
        match now {
            StoreHealth::Ok => recorder.record(Event::node(
                EventType::Normal,
                "StoreRecovered",
                "the store takes commits again",
            )),
            StoreHealth::Degraded {
                reason,
                out_of_space,
            } => recorder.record(Event::node(
                EventType::Warning,
                if out_of_space {
                    "StoreFull"
                } else {
                    "StoreDegraded"
                },
                format!(
                    "the store takes no commits: {reason}; pods keep running, nothing new starts"
                ),
            )),
        }
    }
}

/// Feeds systemd's watchdog while the sync loop moves.
pub(super) async fn watchdog(
    systemd: Systemd,
    check: TimedCheck,
    clock: Arc<dyn Clock>,
    token: CancellationToken,
) {
    let Some(interval) = systemd.watchdog_interval() else {
        return token.cancelled().await;
    };
    loop {
        match check(clock.now()) {
            Ok(()) => systemd.watchdog(),
            Err(error) => warn!(error, "not feeding the watchdog"),
        }
        tokio::select! {
            () = token.cancelled() => return,
            () = tokio::time::sleep(interval / 2) => {}
        }
    }
}

/// Syncs the pods of which the API server shows another status than an earlier run recorded, until `token` is cancelled.
pub(super) async fn compute_outdated(
    status: StatusManager,
    workers: PodWorkers,
    token: CancellationToken,
) {
    while let Some(pods) = token.run_until_cancelled(status.outdated()).await {
        for uid in &pods {
            workers.sync(uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::store::StoreOptions;
    use crate::store::backend::{Faults, FaultyBackend, MemoryBackend};
    use crate::store::codec::Loaded;
    use crate::types::SystemClock;

    /// A clock that the runtime's paused time moves.
    struct TokioClock(tokio::time::Instant);

    impl Clock for TokioClock {
        fn now(&self) -> Stamp {
            let ms = i64::try_from(self.0.elapsed().as_millis()).unwrap();
            Stamp {
                boot: crate::types::BootId(1),
                boottime_ms: ms,
                wall_ms: ms,
            }
        }
    }

    fn meta(heartbeat: Stamp) -> MetaRecord {
        MetaRecord {
            schema: 1,
            node_name: "node".to_owned(),
            machine_id: String::new(),
            boot: crate::types::BootIdentity {
                kernel_boot_id: String::new(),
                pid1_start: 1,
                runtime_state: String::new(),
            },
            generation: 1,
            clean_shutdown: false,
            heartbeat,
            epoch: crate::core::state::EpochRecord {
                number: 1,
                since: heartbeat,
                reason: crate::core::state::EpochReason::Fresh,
            },
        }
    }

    fn in_boot(boot: u64, boottime_ms: i64) -> Stamp {
        Stamp {
            boot: crate::types::BootId(boot),
            boottime_ms,
            wall_ms: boottime_ms,
        }
    }

    #[test]
    fn the_last_sign_of_life_of_an_earlier_boot_stays_until_the_plan_is_committed() {
        let state = |meta: MetaRecord| {
            let mut state = State::default();
            let put = Transaction::new().put(META_KEY, meta);
            state.apply(&put.mutations[0], 1);
            state
        };
        let after = |state: &State, transaction: Transaction| {
            let mut next = state.clone();
            next.apply(&transaction.mutations[0], 2);
            next.meta().unwrap().clone()
        };
        let old = state(meta(in_boot(1, 90_000)));
        assert!(alive(&old, in_boot(2, 15_000)).is_none());
        let ended = after(&old, orderly_end(&old, in_boot(2, 15_000)).unwrap());
        assert!(ended.clean_shutdown);
        assert_eq!(ended.heartbeat, in_boot(1, 90_000));

        let now = in_boot(1, 100_000);
        assert_eq!(after(&old, alive(&old, now).unwrap()).heartbeat, now);
        let ended = after(&old, orderly_end(&old, now).unwrap());
        assert_eq!((ended.clean_shutdown, ended.heartbeat), (true, now));

        // Neither overwrites a plan that was committed meanwhile.
        let mut planned = old.clone();
        let put = Transaction::new().put(META_KEY, meta(in_boot(1, 95_000)));
        planned.apply(&put.mutations[0], 2);
        for late in [alive(&old, now), orderly_end(&old, now)] {
            assert!(late.unwrap().stale_on(&planned).is_some());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn restarts_do_not_put_off_the_backup() {
        let dir = tempfile::tempdir().unwrap();
        let clock: Arc<dyn Clock> = Arc::new(TokioClock(tokio::time::Instant::now()));
        let store = Store::in_memory(Arc::clone(&clock));
        let transaction = Transaction::new().put(META_KEY, meta(clock.now()));
        store.commit(transaction).await.unwrap();
        // Each life lasts a minute.
        let mut written = Vec::new();
        for life in 0..21 {
            let line = Transaction::new().journal(None, "agent started", life.to_string());
            store.commit(line).await.unwrap();
            let token = CancellationToken::new();
            let task = tokio::spawn(backups(
                store.clone(),
                dir.path().to_owned(),
                Arc::clone(&clock),
                Metrics::default(),
                Arc::new(Recorded::default()),
                token.clone(),
            ));
            tokio::time::sleep(Duration::from_secs(59)).await;
            token.cancel();
            task.await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
            written.push(backup::list(dir.path()).unwrap().len());
        }
        assert_eq!((written[0], written[8]), (1, 1), "{written:?}");
        assert_eq!((written[11], written[18]), (2, 2), "{written:?}");
        assert_eq!(written[20], 3, "{written:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn work_that_takes_long_is_told_while_it_goes_on() {
        let told = std::cell::Cell::new(None);
        let start = tokio::time::Instant::now();
        let tell = || told.set(Some(start.elapsed().as_secs()));
        patiently(tokio::time::sleep(Duration::from_secs(4)), tell).await;
        assert_eq!(told.get(), None);
        let start = tokio::time::Instant::now();
        let tell = || told.set(Some(start.elapsed().as_secs()));
        patiently(tokio::time::sleep(Duration::from_secs(12)), tell).await;
        assert_eq!(told.get(), Some(5));
        assert_eq!(start.elapsed().as_secs(), 12);
    }

    #[derive(Default)]
    struct Recorded(Mutex<Vec<(String, String)>>, tokio::sync::Notify);

    impl EventRecorder for Recorded {
        fn record(&self, event: Event) {
            let mut events = self.0.lock().unwrap();
            events.push((event.reason.clone(), event.message));
            self.1.notify_one();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_hangs_is_told_once_and_so_is_its_return() {
        let faults = Faults::new();
        let store = Store::start(
            Box::new(FaultyBackend::new(MemoryBackend::new(), faults.clone())),
            Loaded::default(),
            StoreOptions::default(),
            Arc::new(SystemClock::new(crate::types::BootId(1))),
            Metrics::default(),
        )
        .unwrap();
        let recorded = Arc::new(Recorded::default());
        let token = CancellationToken::new();
        faults.set_hang(true);
        let pending = store.submit(Transaction::new().journal(None, "written", "some time"));
        let synced = tokio::spawn({
            let store = store.clone();
            async move { store.sync().await }
        });
        let hanging = faults.clone();
        tokio::task::spawn_blocking(move || hanging.wait_until_hanging())
            .await
            .unwrap();
        let watching = tokio::spawn(store_health(
            store.clone(),
            Arc::clone(&recorded) as Arc<dyn EventRecorder>,
            token.clone(),
        ));
        // Time runs by itself from one look of the task to the next.
        recorded.1.notified().await;
        tokio::time::sleep(Duration::from_secs(30)).await;
        faults.set_hang(false);
        recorded.1.notified().await;
        pending.wait().await.unwrap();
        synced.await.unwrap().unwrap();
        token.cancel();
        watching.await.unwrap();
        let events = recorded.0.lock().unwrap();
        let reasons: Vec<_> = events.iter().map(|(reason, _)| reason.as_str()).collect();
        assert_eq!(reasons, ["StoreDegraded", "StoreRecovered"]);
        assert!(
            events[0].1.contains("the database") && events[0].1.contains("has not returned for"),
            "{}",
            events[0].1
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_writer_that_panics_ends_the_agent() {
        let faults = Faults::new();
        let store = Store::start(
            Box::new(FaultyBackend::new(MemoryBackend::new(), faults.clone())),
            Loaded::default(),
            StoreOptions::default(),
            Arc::new(SystemClock::new(crate::types::BootId(1))),
            Metrics::default(),
        )
        .unwrap();
        let mut tasks = crate::agent::Tasks::default();
        let recorder: Arc<dyn EventRecorder> = Arc::new(Recorded::default());
        let watching = store_health(store.clone(), recorder, CancellationToken::new());
        tasks.add("store health", watching);
        faults.panic_next();
        let commit = Transaction::new().journal(None, "written", "never");
        drop(store.submit(commit));
        store.sync().await.unwrap_err();
        // The agent waits for this, drains its workers, and ends with an error.
        assert_eq!(tasks.ended().await, "store health");
    }
}
