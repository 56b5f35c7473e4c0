//! The syncer against a model of the API server: what is sent, when, and what is not.

use k8s_openapi::api::core::v1::PodCondition;
use serde_json::json;

use super::*;
use crate::apiserver::testkit::FakeApi;
use crate::core::state::{EpochRecord, META_KEY, MetaRecord, TerminationCause};
use crate::status::{CommitMode, Observed};
use crate::store::Store;
use crate::types::{BootId, Clock, Stamp};

struct StillClock;

impl Clock for StillClock {
    fn now(&self) -> Stamp {
        stamp(1_000_000)
    }
}

fn stamp(ms: i64) -> Stamp {
    Stamp {
        boot: BootId(1),
        boottime_ms: ms,
        wall_ms: ms,
    }
}

struct Rig {
    api: FakeApi,
    store: Store,
    status: StatusManager,
    pods: PodManager,
    token: CancellationToken,
}

impl Rig {
    fn new() -> Self {
        Self::over(FakeApi::new(), Store::in_memory(Arc::new(StillClock)))
    }

    /// An agent that starts on what another one left.
    fn over(api: FakeApi, store: Store) -> Self {
        Self {
            api,
            status: StatusManager::new(store.clone(), Arc::new(StillClock)),
            store,
            pods: PodManager::default(),
            token: CancellationToken::new(),
        }
    }

    fn start(&self) -> tokio::task::JoinHandle<()> {
        let syncer = self.status.syncer(
            self.api.client.clone(),
            self.pods.clone(),
            Metrics::default(),
        );
        tokio::spawn(syncer.run(self.token.clone()))
    }

    fn restarted(&self) -> Self {
        self.token.cancel();
        Self::over(self.api.clone(), self.store.clone())
    }

    /// The API server has the pod and the source shows it.
    fn show(&self, pod: &Pod) -> Arc<Pod> {
        let pod = self.api.put(pod);
        self.pods.update(Arc::clone(&pod));
        self.status.observed(Observed::Current(Arc::clone(&pod)));
        pod
    }

    async fn set(&self, pod: &Pod, phase: &str) {
        let status = phase_of(phase);
        self.status
            .set(pod, status, CommitMode::Normal)
            .await
            .unwrap();
    }

    fn record(&self, uid: &str) -> StatusRecord {
        self.store
            .snapshot()
            .record::<StatusRecord>(uid)
            .unwrap()
            .clone()
    }

    async fn worker(&self, uid: &str, phase: WorkerPhase) {
        let record = WorkerRecord {
            full_name: "web_default".into(),
            queued: stamp(0),
            started: None,
            phase,
            deleted: false,
            restart_requested: false,
            runtime_only: false,
        };
        let transaction = Transaction::new().put(uid, record);
        self.store.commit(transaction).await.unwrap();
    }

    fn shown_phase(&self, name: &str) -> String {
        let status = self.api.pod(name).and_then(|p| p.status.clone());
        status.and_then(|s| s.phase).unwrap_or_default()
    }
}

/// Lets everything happen that does not wait for more than `ms`.
async fn pass(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

fn pod(name: &str, uid: &str) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": "default", "uid": uid},
        "spec": {"containers": [{"name": "main"}]},
        "status": {"phase": "Pending", "qosClass": "BestEffort"},
    }))
    .unwrap()
}

fn deleting(name: &str, uid: &str) -> Pod {
    let mut pod = pod(name, uid);
    pod.metadata.deletion_timestamp =
        Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    pod
}

fn phase_of(phase: &str) -> k8s_openapi::api::core::v1::PodStatus {
    serde_json::from_value(json!({
        "phase": phase,
        "qosClass": "BestEffort",
        "hostIP": "10.0.0.1",
        "hostIPs": [{"ip": "10.0.0.1"}],
        "conditions": [{"type": "Ready", "status": "False"}],
    }))
    .unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_status_is_told_once_and_acknowledged_without_a_read() {
    let rig = Rig::new();
    let pod = rig.show(&pod("web", "u1"));
    rig.start();
    rig.set(&pod, "Running").await;
    pass(100).await;
    assert_eq!(rig.shown_phase("web"), "Running");
    let record = rig.record("u1");
    assert_eq!(record.acknowledged, record.version);
    // The watch shows what was written, then time passes.
    let echoed = rig.api.pod("web").unwrap();
    rig.status.observed(Observed::Current(echoed));
    pass(600_000).await;
    assert_eq!((rig.api.count("PATCH"), rig.api.count("GET")), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn changes_that_come_together_are_one_patch_of_the_newest() {
    let rig = Rig::new();
    let pod = rig.show(&pod("web", "u1"));
    for (at, phase) in ["Pending", "Running", "Pending", "Running"]
        .iter()
        .enumerate()
    {
        let mut status = phase_of(phase);
        status.message = Some(format!("change {at}"));
        rig.status
            .set(&pod, status, CommitMode::Normal)
            .await
            .unwrap();
    }
    rig.start();
    pass(100).await;
    assert_eq!(rig.api.count("PATCH"), 1);
    assert_eq!(rig.record("u1").acknowledged, 4);
    let told = rig.api.pod("web").unwrap().status.clone().unwrap();
    assert_eq!(told.message.as_deref(), Some("change 3"));
}

#[tokio::test(start_paused = true)]
async fn the_status_of_a_replaced_pod_is_dropped() {
    let rig = Rig::new();
    let old = rig.show(&pod("web", "u1"));
    rig.api.put(&pod("web", "u2"));
    rig.start();
    rig.set(&old, "Failed").await;
    pass(300_000).await;
    assert_eq!(
        rig.shown_phase("web"),
        "Pending",
        "the new pod is not touched"
    );
    assert_eq!((rig.api.count("PATCH"), rig.api.count("GET")), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn the_status_of_a_deleted_pod_is_dropped() {
    let rig = Rig::new();
    let pod = rig.show(&pod("web", "u1"));
    rig.api.with(|model| model.objects.clear());
    rig.start();
    rig.set(&pod, "Running").await;
    pass(300_000).await;
    assert_eq!(rig.api.count("PATCH"), 1);
}

#[tokio::test(start_paused = true)]
async fn conditions_of_others_survive() {
    let rig = Rig::new();
    let mut pod = pod("web", "u1");
    let gate = PodCondition {
        type_: "example.com/gate".into(),
        status: "True".into(),
        ..PodCondition::default()
    };
    pod.status.as_mut().unwrap().conditions = Some(vec![gate.clone()]);
    let pod = rig.show(&pod);
    rig.start();
    rig.set(&pod, "Running").await;
    pass(100).await;
    let told = rig.api.pod("web").unwrap().status.clone().unwrap();
    let types: Vec<_> = told
        .conditions
        .iter()
        .flatten()
        .map(|c| c.type_.as_str())
        .collect();
    assert_eq!(types, ["example.com/gate", "Ready"]);
}

#[tokio::test(start_paused = true)]
async fn a_restart_with_nothing_changed_sends_nothing_even_to_a_server_that_drops_fields() {
    let rig = Rig::new();
    rig.api
        .with(|model| model.drops = vec!["hostIPs", "observedGeneration"]);
    let names: Vec<String> = (0..20).map(|n| format!("web-{n}")).collect();
    rig.start();
    for name in &names {
        let pod = rig.show(&pod(name, name));
        rig.set(&pod, "Running").await;
    }
    pass(1000).await;
    assert_eq!(rig.api.count("PATCH"), 20);

    let next = rig.restarted();
    rig.api.with(|model| model.log.clear());
    next.start();
    for name in &names {
        let pod = rig.api.pod(name).unwrap();
        next.pods.update(Arc::clone(&pod));
        next.status.observed(Observed::Current(Arc::clone(&pod)));
        next.set(&pod, "Running").await;
    }
    pass(120_000).await;
    assert_eq!(
        rig.api.with(|model| model.log.clone()),
        Vec::<String>::new()
    );
}

#[tokio::test(start_paused = true)]
async fn what_somebody_overwrote_is_told_again() {
    let rig = Rig::new();
    let pod = rig.show(&pod("web", "u1"));
    rig.start();
    rig.set(&pod, "Running").await;
    pass(100).await;
    let mut tampered = (*rig.api.pod("web").unwrap()).clone();
    tampered.status.as_mut().unwrap().phase = Some("Pending".into());
    rig.show(&tampered);
    pass(100).await;
    assert_eq!(rig.shown_phase("web"), "Running");
    assert_eq!(rig.api.count("PATCH"), 2);
}

#[tokio::test(start_paused = true)]
async fn an_outage_and_a_restart_within_it_lose_no_status() {
    let rig = Rig::new();
    let pods: Vec<_> = (0..12)
        .map(|n| rig.show(&pod(&format!("web-{n}"), &format!("u{n}"))))
        .collect();
    rig.api.set_down(true);
    rig.start();
    for pod in &pods {
        rig.set(pod, "Running").await;
    }
    pass(60_000).await;
    for pod in &pods {
        rig.status
            .terminate(pod, phase_of("Failed"), CommitMode::Stop)
            .await
            .unwrap();
    }
    pass(60_000).await;
    let next = rig.restarted();
    for pod in &pods {
        // As restored from the records: older than what the API server has.
        next.pods.update(Arc::clone(pod));
    }
    next.start();
    pass(60_000).await;
    rig.api.set_down(false);
    pass(30_000).await;
    for n in 0..12 {
        assert_eq!(rig.shown_phase(&format!("web-{n}")), "Failed");
        let record = rig.record(&format!("u{n}"));
        assert_eq!(record.acknowledged, record.version);
    }
    assert_eq!((rig.api.count("PATCH"), rig.api.count("GET")), (12, 12));
}

// Invariant API-6.
#[tokio::test(start_paused = true)]
async fn an_outage_is_not_a_storm_of_requests() {
    let rig = Rig::new();
    let pods: Vec<_> = (0..100)
        .map(|n| rig.show(&pod(&format!("web-{n}"), &format!("u{n}"))))
        .collect();
    let attempts = Arc::new(Mutex::new(0));
    rig.api.set_down(true);
    let service = tower::service_fn({
        let (attempts, connection) = (Arc::clone(&attempts), rig.api.client.connection().clone());
        move |_: hyper::Request<kube::client::Body>| {
            *attempts.lock().unwrap() += 1;
            connection.failed("refused");
            async { Err::<hyper::Response<kube::client::Body>, tower::BoxError>("refused".into()) }
        }
    });
    let client = ApiClient::new(
        kube::Client::new(service, "default"),
        rig.api.client.connection().clone(),
    );
    let syncer = rig
        .status
        .syncer(client, rig.pods.clone(), Metrics::default());
    for pod in &pods {
        rig.set(pod, "Running").await;
    }
    tokio::spawn(syncer.run(rig.token.clone()));
    pass(600_000).await;
    let attempts = *attempts.lock().unwrap();
    assert!(
        attempts > 50 && attempts < 120,
        "{attempts} attempts in ten minutes"
    );
}

#[tokio::test(start_paused = true)]
async fn a_server_error_is_tried_again_and_a_refusal_seldom() {
    let rig = Rig::new();
    let pod = rig.show(&pod("web", "u1"));
    rig.start();
    rig.api.with(|model| model.fails = Some(500));
    rig.set(&pod, "Running").await;
    pass(5_000).await;
    rig.api.with(|model| model.fails = None);
    pass(15_000).await;
    assert_eq!(rig.shown_phase("web"), "Running");

    rig.api.with(|model| {
        model.fails = Some(403);
        model.log.clear();
    });
    rig.set(&pod, "Pending").await;
    pass(600_000).await;
    let requests = rig.api.with(|model| model.log.len());
    assert!(requests < 20, "{requests} requests in ten minutes");
    let record = rig.record("u1");
    assert!(
        record.acknowledged < record.version,
        "it is still to be told"
    );
}

// Invariant API-5.
#[tokio::test(start_paused = true)]
async fn a_pod_is_deleted_only_when_all_of_it_holds() {
    // (deletionTimestamp, phase, finished) → deleted
    let table = [
        (true, "Failed", true, true),
        (false, "Failed", true, false),
        (true, "Running", true, false),
        (true, "Failed", false, false),
    ];
    for (is_deleting, phase, finished, expected) in table {
        let rig = Rig::new();
        let pod = if is_deleting {
            deleting("web", "u1")
        } else {
            pod("web", "u1")
        };
        let pod = rig.show(&pod);
        rig.start();
        let status = phase_of(phase);
        if finished {
            rig.status
                .terminate(&pod, status, CommitMode::Stop)
                .await
                .unwrap();
        } else {
            rig.status
                .set(&pod, status, CommitMode::Stop)
                .await
                .unwrap();
        }
        pass(30_000).await;
        let case = format!("{is_deleting} {phase} {finished}");
        assert_eq!(rig.api.count("DELETE"), usize::from(expected), "{case}");
        let log = rig.api.with(|model| model.log.clone());
        assert!(
            log[0].starts_with("PATCH"),
            "the status comes first: {log:?}"
        );
        if expected {
            let body = rig.api.with(|model| model.bodies.last().cloned().unwrap());
            assert_eq!(body["gracePeriodSeconds"], 0);
            assert_eq!(body["preconditions"]["uid"], "u1");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_final_delete_that_was_cut_off_by_a_crash_comes_after_the_restart() {
    let rig = Rig::new();
    let alive = rig.show(&pod("web", "u1"));
    let first = rig.start();
    rig.status
        .terminate(&alive, phase_of("Failed"), CommitMode::Stop)
        .await
        .unwrap();
    pass(1000).await;
    assert_eq!(rig.record("u1").acknowledged, 1);
    let next = rig.restarted();
    first.await.unwrap();
    let pod = next.show(&deleting("web", "u1"));
    next.start();
    pass(5_000).await;
    assert!(rig.api.pod("web").is_none());
    next.status.observed(Observed::Gone(pod));
    pass(60_000).await;
    assert_eq!(rig.api.count("DELETE"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_terminal_phase_waits_for_the_worker_and_costs_one_patch() {
    let rig = Rig::new();
    let pod = rig.show(&pod("web", "u1"));
    rig.worker("u1", WorkerPhase::Sync).await;
    rig.start();
    rig.set(&pod, "Succeeded").await;
    pass(200).await;
    assert_eq!(rig.api.count("PATCH"), 0);
    let terminated = WorkerPhase::Terminated {
        since: stamp(0),
        cause: TerminationCause::Completed,
    };
    rig.worker("u1", terminated).await;
    rig.status
        .terminate(&pod, phase_of("Succeeded"), CommitMode::Stop)
        .await
        .unwrap();
    pass(1500).await;
    assert_eq!(rig.shown_phase("web"), "Succeeded");
    assert_eq!(rig.api.count("PATCH"), 1);
}

// Invariant API-5.
#[tokio::test(start_paused = true)]
async fn while_containers_may_run_everything_but_the_terminal_phase_is_told() {
    let rig = Rig::new();
    let pod = rig.show(&pod("web", "u1"));
    rig.worker("u1", WorkerPhase::Sync).await;
    rig.start();
    rig.set(&pod, "Failed").await;
    pass(60_000).await;
    assert_eq!(rig.api.count("PATCH"), 1);
    assert_eq!(rig.shown_phase("web"), "Pending");
    let told = rig.api.pod("web").unwrap().status.clone().unwrap();
    assert_eq!(told.host_ip.as_deref(), Some("10.0.0.1"));
    assert_eq!(rig.record("u1").acknowledged, 0);
}

#[tokio::test(start_paused = true)]
async fn a_restored_status_waits_until_it_was_computed_again() {
    let rig = Rig::new();
    let meta = MetaRecord {
        schema: 1,
        node_name: "n".into(),
        machine_id: "m".into(),
        boot: boot(),
        generation: 1,
        clean_shutdown: false,
        heartbeat: stamp(0),
        epoch: EpochRecord {
            number: 2,
            since: stamp(2_000_000),
            reason: EpochReason::Restored,
        },
    };
    let stale = StatusRecord {
        name: "web".into(),
        namespace: "default".into(),
        status: crate::types::Json::new(phase_of("Running")),
        version: 5,
        acknowledged: 4,
        at: stamp(1000),
        finished: false,
    };
    let transaction = Transaction::new().put(META_KEY, meta).put("u1", stale);
    rig.store.commit(transaction).await.unwrap();
    let pod = rig.show(&pod("web", "u1"));
    rig.start();
    pass(60_000).await;
    assert_eq!(rig.api.count("PATCH"), 0);
    rig.set(&pod, "Running").await;
    pass(100).await;
    assert_eq!(rig.shown_phase("web"), "Running");
}

/// The newest status was sent, and a crash came before it was on the disk.
#[tokio::test(start_paused = true)]
async fn a_status_of_an_earlier_run_is_computed_anew_before_it_replaces_what_the_server_shows() {
    let rig = Rig::new();
    let older = StatusRecord {
        name: "web".into(),
        namespace: "default".into(),
        status: crate::types::Json::new(phase_of("Pending")),
        version: 5,
        acknowledged: 5,
        at: stamp(1000),
        finished: false,
    };
    let put = Transaction::new().put("u1", older);
    rig.store.commit(put).await.unwrap();
    let mut newer = pod("web", "u1");
    newer.status = Some(phase_of("Running"));
    rig.start();
    pass(100).await;
    let newer = rig.show(&newer);
    pass(60_000).await;
    assert_eq!(rig.api.count("PATCH"), 0);
    let asked = tokio::time::timeout(Duration::from_secs(1), rig.status.outdated()).await;
    assert_eq!(asked.unwrap(), [PodUid::new("u1")].into());
    rig.set(&newer, "Running").await;
    pass(100).await;
    assert_eq!(rig.shown_phase("web"), "Running");
    // Somebody else's change is taken back by this run.
    let mut changed = (*newer).clone();
    changed.status = Some(phase_of("Pending"));
    rig.show(&changed);
    pass(60_000).await;
    assert_eq!(rig.shown_phase("web"), "Running");
}

fn boot() -> crate::types::BootIdentity {
    crate::types::BootIdentity {
        kernel_boot_id: "b".into(),
        pid1_start: 1,
        runtime_state: String::new(),
    }
}

#[tokio::test(start_paused = true)]
async fn a_static_pod_is_told_through_its_mirror_pod_and_never_deleted() {
    let rig = Rig::new();
    let mut real = pod("web", "static");
    real.status = None;
    real.metadata.annotations = Some(
        [(
            crate::types::pod::CONFIG_SOURCE.to_owned(),
            "file".to_owned(),
        )]
        .into(),
    );
    rig.pods.update(Arc::new(real.clone()));
    rig.start();
    rig.status
        .terminate(&real, phase_of("Failed"), CommitMode::Stop)
        .await
        .unwrap();
    pass(60_000).await;
    assert_eq!(
        rig.api.with(|model| model.log.len()),
        0,
        "there is no mirror pod yet"
    );

    let mut mirror = deleting("web", "mirror");
    let annotations = [
        (
            crate::types::pod::CONFIG_SOURCE.to_owned(),
            "file".to_owned(),
        ),
        (crate::types::pod::CONFIG_MIRROR.to_owned(), "h".to_owned()),
    ];
    mirror.metadata.annotations = Some(annotations.into());
    rig.show(&mirror);
    pass(5_000).await;
    assert_eq!(rig.shown_phase("web"), "Failed");
    let body = rig.api.with(|model| model.bodies[0].clone());
    assert_eq!(body["metadata"]["uid"], "mirror");
    assert_eq!(rig.api.count("DELETE"), 0);
    let record = rig.record("static");
    assert_eq!(record.acknowledged, record.version);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_went_back_in_time_is_told_again() {
    let rig = Rig::new();
    let before = rig.show(&pod("web", "u1"));
    rig.start();
    rig.set(&before, "Running").await;
    pass(100).await;
    // Restored from a backup: the older version is what there is.
    let value = serde_json::to_value(&*before).unwrap();
    rig.api.with(|model| {
        model
            .objects
            .insert("/api/v1/namespaces/default/pods/web".into(), value)
    });
    rig.status.observed(Observed::Current(before));
    pass(60_000).await;
    assert_eq!(rig.shown_phase("web"), "Running");
}

#[tokio::test(start_paused = true)]
async fn nothing_is_remembered_of_pods_that_came_and_went_in_any_order() {
    let rig = Rig::new();
    let syncer = rig
        .status
        .syncer(rig.api.client.clone(), rig.pods.clone(), Metrics::default());
    let mut queue = Queue::default();
    for n in 0..200 {
        let (name, uid) = (format!("p{n}"), format!("u{n}"));
        let gone = rig.show(&deleting(&name, &uid));
        rig.set(&gone, "Succeeded").await;
        let status = phase_of("Succeeded");
        let ended = rig.status.terminate(&gone, status, CommitMode::Normal);
        ended.await.unwrap();
        let uid = PodUid::new(&uid);
        let deleted = Observed::Gone(Arc::clone(&gone));
        if n % 2 == 0 {
            // The watch is faster than the answers to the last patch and to DELETE.
            rig.status.observed(deleted);
            syncer.take_wakes(&mut queue);
            syncer.keep((*gone).clone());
            syncer.delete(&gone).await.unwrap();
        } else {
            syncer.try_sync(&uid, true).await.unwrap();
            assert!(syncer.is_gone(&uid));
            rig.status.observed(deleted);
            syncer.take_wakes(&mut queue);
        }
        // Its worker tells of it once more before it ends.
        rig.set(&gone, "Failed").await;
        rig.status.forget(&uid);
        syncer.take_wakes(&mut queue);
    }
    assert!(syncer.gone().is_empty());
    pass(301_000).await;
    syncer.shared().take_behind();
    syncer.shared().take();
    assert_eq!(syncer.shared().remembered(), 0);
}
