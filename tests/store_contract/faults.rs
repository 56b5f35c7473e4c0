//! What only injected faults can show.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use holdfast::core::state::*;
use holdfast::store::{
    CommitError, SpaceReserve, StartIntent, StopDecision, StopPermit, Store, StoreHealth,
    StoreOptions,
};
use holdfast::types::{ContainerId, PodUid};

use super::world::*;

fn put(key: &str, n: u64) -> Transaction {
    Transaction::new().put(key, volume(n))
}

async fn stop(store: &Store, transaction: Transaction) -> Result<StopPermit, CommitError> {
    let decision = StopDecision::recorded_by(transaction)?;
    store.commit_stop(decision).await
}

async fn degraded(store: &Store) {
    store
        .health()
        .wait_for(|h| matches!(h, StoreHealth::Degraded { .. }))
        .await
        .unwrap();
}

/// Waits until the writer hangs in a sync.
async fn hanging(world: &World) {
    let faults = world.faults.clone();
    tokio::task::spawn_blocking(move || faults.wait_until_hanging())
        .await
        .unwrap();
}

// Invariant STORE-1.
#[tokio::test(flavor = "multi_thread")]
async fn readers_never_see_a_durable_commit_that_is_not_synced() {
    let world = World::new(Engine::Faulty);
    let store = world.start();
    store.commit(put("v", 1)).await.unwrap();
    world.faults.set_hang(true);
    let durable = store.submit(put("v", 2));
    hanging(&world).await;
    let relaxed = store.submit(Transaction::new().put("o", object(vec![1])));
    assert_eq!(number(&store.snapshot(), "v"), Some(1));
    assert!(store.snapshot().objects.is_empty());
    world.faults.set_hang(false);
    durable.wait().await.unwrap();
    assert_eq!(number(&store.snapshot(), "v"), Some(2));
    relaxed.wait().await.unwrap();
    store.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relaxed_commit_does_not_wait_for_a_sync() {
    let world = World::new(Engine::Faulty);
    let store = world.start_with(StoreOptions {
        relaxed_delay: Duration::from_secs(3600),
        ..options()
    });
    let syncs = world.faults.syncs();
    for n in 0..100 {
        store
            .commit(Transaction::new().put("o", object(vec![n])))
            .await
            .unwrap();
    }
    assert_eq!(world.faults.syncs(), syncs);
    assert_eq!(world.faults.applies(), 0, "not even a batch was written");
    store.close().await.unwrap();
    assert_eq!(world.faults.applies(), 1, "a hundred puts of a key are one");
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_durable_commits_share_syncs() {
    let world = World::new(Engine::Faulty);
    let store = world.start();
    world.faults.set_hang(true);
    let first = store.submit(put("first", 1));
    hanging(&world).await;
    let rest: Vec<_> = (0..100)
        .map(|n| store.submit(put(&n.to_string(), n)))
        .collect();
    world.faults.set_hang(false);
    first.wait().await.unwrap();
    for one in rest {
        one.wait().await.unwrap();
    }
    assert_eq!(world.faults.syncs(), 2);
    store.close().await.unwrap();
}

// Invariant STORE-2.
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_sync_is_unknown_and_what_reached_the_disk_counts_after_recovery() {
    let world = World::new(Engine::Faulty);
    let store = world.start();
    store.commit(put("v", 1)).await.unwrap();
    let seen = store.snapshot();
    world.faults.fail_sync(1);
    world.faults.set_fail_reopen(true);
    let unknown = store.commit(put("v", 2)).await;
    assert!(
        matches!(unknown, Err(CommitError::Unknown { .. })),
        "{unknown:?}"
    );
    assert_eq!(number(&store.snapshot(), "v"), Some(1), "not published");
    let refused = store.commit(put("w", 1)).await;
    assert!(matches!(refused, Err(CommitError::Unavailable { .. })));
    assert!(matches!(
        store.sync().await,
        Err(CommitError::Unavailable { .. })
    ));
    assert_eq!(world.metrics.store_degraded.get(), 1);

    world.faults.set_fail_reopen(false);
    healthy(&store).await;
    assert_eq!(number(&store.snapshot(), "v"), Some(2), "it had happened");
    assert_eq!(world.metrics.store_recoveries.get(), 1);
    assert_eq!(world.metrics.store_degraded.get(), 0);
    let stale = store
        .commit(put("x", 1).expect::<VolumeRecord>(&seen, "v"))
        .await;
    assert!(matches!(stale, Err(CommitError::Stale { .. })));
    store.commit(put("w", 1)).await.unwrap();
    store.close().await.unwrap();
    let state = world.on_disk().state;
    assert_eq!(
        (number(&state, "v"), number(&state, "w")),
        (Some(2), Some(1))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_failed_sync_lost_is_rolled_back_and_acknowledged_changes_stay() {
    let world = World::new(Engine::Faulty);
    let store = world.start_with(StoreOptions {
        relaxed_delay: Duration::from_secs(3600),
        ..options()
    });
    world.faults.set_buffer_until_sync(true);
    store.commit(put("v", 1)).await.unwrap();
    store
        .commit(Transaction::new().put("o", object(noise(50_000, 1))))
        .await
        .unwrap();
    let seen = store.snapshot();
    world.faults.fail_sync(1);
    world.faults.crash();
    let unknown = store.commit(put("v", 2)).await;
    assert!(matches!(unknown, Err(CommitError::Unknown { .. })));
    healthy(&store).await;
    assert_eq!(number(&store.snapshot(), "v"), Some(1));
    assert!(
        store.snapshot().record::<ObjectRecord>("o").is_some(),
        "an acknowledged relaxed change survives while the process lives"
    );
    let stale = store
        .commit(put("x", 1).expect::<VolumeRecord>(&seen, "v"))
        .await;
    assert!(matches!(stale, Err(CommitError::Stale { .. })));
    let below = world.below();
    assert_eq!(number(&below.state, "v"), Some(1));
    assert!(below.state.record::<ObjectRecord>("o").is_some());

    // Chunks written by the recovery are known to later commits.
    store
        .commit(Transaction::new().delete::<ObjectRecord>("o"))
        .await
        .unwrap();
    store.close().await.unwrap();
    let loaded = world.on_disk();
    assert!(loaded.quarantined.is_empty() && loaded.state.objects.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_batch_leaves_no_trace() {
    let world = World::new(Engine::Faulty);
    let store = world.start();
    store.commit(put("v", 1)).await.unwrap();
    world.faults.fail_apply(1);
    let unknown = store
        .commit(put("v", 2).journal(None, "never", "failed"))
        .await;
    assert!(matches!(unknown, Err(CommitError::Unknown { .. })));
    healthy(&store).await;
    assert_eq!(number(&store.snapshot(), "v"), Some(1));
    assert!(store.snapshot().journal.is_empty());
    assert!(store.commit(put("v", 3)).await.is_ok());
    store.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relaxed_batch_that_fails_degrades_and_is_written_on_recovery() {
    let world = World::new(Engine::Faulty);
    let store = world.start_with(StoreOptions {
        relaxed_delay: Duration::from_millis(1),
        ..options()
    });
    world.faults.set_broken(true);
    store
        .commit(Transaction::new().put("o", object(vec![1])))
        .await
        .unwrap();
    degraded(&store).await;
    world.faults.set_broken(false);
    healthy(&store).await;
    assert!(world.below().state.record::<ObjectRecord>("o").is_some());
    store.close().await.unwrap();
}

// Invariant CORE-2.
#[tokio::test(flavor = "multi_thread")]
async fn stops_are_held_visible_and_written_first() {
    let world = World::new(Engine::Faulty);
    let store = world.start();
    store.commit(put("v", 1)).await.unwrap();
    world.faults.set_broken(true);
    // The failing group itself contains a stop.
    let plain = store.submit(put("other", 1));
    let permit = stop(&store, put("v", 2).journal(None, "stopped", "first"))
        .await
        .unwrap();
    assert!(permit.is_held());
    assert!(matches!(
        plain.wait().await,
        Err(CommitError::Unknown { .. })
    ));
    assert_eq!(number(&store.snapshot(), "v"), Some(2), "held and visible");

    let seen = store.snapshot();
    let second = put("v", 3)
        .expect::<VolumeRecord>(&seen, "v")
        .journal(None, "stopped", "second");
    let permit = stop(&store, second).await.unwrap();
    assert!(permit.is_held());
    let stale = stop(&store, put("v", 4).expect::<VolumeRecord>(&seen, "v")).await;
    assert!(matches!(stale, Err(CommitError::Stale { .. })));
    assert_eq!(world.metrics.store_held.get(), 2);

    let intent = StartIntent {
        pod: PodUid::new("uid"),
        container: "c".to_owned(),
        container_id: ContainerId::new("id"),
        attempt: 0,
        hash: String::new(),
        why: String::new(),
        at: stamp(0),
    };
    let start = store.commit_intent(intent, Transaction::new()).await;
    assert!(
        matches!(start, Err(CommitError::Unavailable { .. })),
        "starts fail closed"
    );
    assert_eq!(number(&world.below().state, "v"), Some(1));

    world.faults.set_broken(false);
    healthy(&store).await;
    let below = world.below().state;
    assert_eq!(number(&below, "v"), Some(3), "written before anything else");
    assert_eq!(below.journal.len(), 2);
    assert_eq!(world.metrics.store_held.get(), 0);
    assert_eq!(content(&below), content(&store.snapshot()));
    store.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_stop_wins_over_an_unknown_commit_that_had_happened() {
    let world = World::new(Engine::Faulty);
    let store = world.start();
    store.commit(put("v", 1).put("w", volume(1))).await.unwrap();
    world.faults.fail_sync(1);
    world.faults.set_fail_reopen(true);
    let unknown = store
        .commit(put("v", 5).put("w", volume(5)).journal(None, "unknown", ""))
        .await;
    assert!(matches!(unknown, Err(CommitError::Unknown { .. })));
    let permit = stop(&store, put("v", 9).journal(None, "held", ""))
        .await
        .unwrap();
    assert!(permit.is_held());
    world.faults.set_fail_reopen(false);
    healthy(&store).await;
    let state = store.snapshot();
    assert_eq!(number(&state, "v"), Some(9));
    assert_eq!(number(&state, "w"), Some(5));
    let lines: Vec<_> = state
        .journal
        .values()
        .map(|l| l.record.what.clone())
        .collect();
    assert_eq!(lines, ["unknown", "held"]);
    store.close().await.unwrap();
    assert_eq!(content(&world.on_disk().state), content(&state));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_does_not_wait_for_a_disk_that_hangs() {
    let world = World::new(Engine::Faulty);
    let store = world.start_with(StoreOptions {
        stall_timeout: Duration::from_millis(20),
        ..options()
    });
    world.faults.set_hang(true);
    let durable = store.submit(put("v", 1));
    hanging(&world).await;
    let permit = stop(&store, put("stop", 1)).await.unwrap();
    assert!(permit.is_held());
    world.faults.set_hang(false);
    durable.wait().await.unwrap();
    store.close().await.unwrap();
    assert_eq!(number(&world.on_disk().state, "stop"), Some(1));
}

fn reason(store: &Store) -> String {
    match &*store.health().borrow() {
        StoreHealth::Ok => String::new(),
        StoreHealth::Degraded { reason, .. } => reason.clone(),
    }
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_hangs_degrades_the_health_until_it_answers() {
    let world = World::new(Engine::Faulty);
    let store = world.start();
    store.commit(put("v", 1)).await.unwrap();
    let mut health = store.health();
    world.faults.set_hang(true);
    let durable = store.submit(put("v", 2));
    hanging(&world).await;
    store.check_disk();
    tokio::time::advance(Duration::from_secs(4)).await;
    store.check_disk();
    assert_eq!(*health.borrow(), StoreHealth::Ok, "a slow disk is no event");

    tokio::time::advance(Duration::from_secs(2)).await;
    store.check_disk();
    assert_eq!(
        reason(&store),
        "the disk hangs: syncing the database file has not returned for 6 s"
    );
    assert_eq!(world.metrics.store_degraded.get(), 1);
    assert!(health.has_changed().unwrap());
    health.mark_unchanged();
    tokio::time::advance(Duration::from_secs(60)).await;
    store.check_disk();
    assert!(reason(&store).ends_with("for 66 s"), "{}", reason(&store));
    assert!(!health.has_changed().unwrap(), "told once");
    let began = tokio::time::Instant::now();
    let permit = store
        .commit_stop(StopDecision::unrecorded_leftovers())
        .await
        .unwrap();
    assert!(permit.is_held());
    assert_eq!(began.elapsed(), Duration::ZERO, "known to hang: no waiting");

    world.faults.set_hang(false);
    durable.wait().await.unwrap();
    assert_eq!(*store.health().borrow(), StoreHealth::Ok);
    assert_eq!(world.metrics.store_degraded.get(), 0);
    assert!(health.has_changed().unwrap());
    store.check_disk();
    assert_eq!(*store.health().borrow(), StoreHealth::Ok);
    store.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_hangs_and_then_fails_is_a_failed_one() {
    let world = World::new(Engine::Faulty);
    let store = world.start();
    world.faults.set_hang(true);
    let durable = store.submit(put("v", 2));
    hanging(&world).await;
    store.check_disk();
    tokio::time::advance(Duration::from_secs(10)).await;
    store.check_disk();
    assert!(reason(&store).contains("hangs"));
    world.faults.set_broken(true);
    world.faults.set_hang(false);
    assert!(matches!(
        durable.wait().await,
        Err(CommitError::Unknown { .. })
    ));
    assert!(reason(&store).contains("injected"), "{}", reason(&store));
    world.faults.set_broken(false);
    healthy(&store).await;
    store.close().await.unwrap();
}

// Invariant STORE-3.
#[tokio::test(start_paused = true)]
async fn the_queue_is_bounded_while_the_disk_hangs_and_loses_nothing_it_took() {
    let world = World::new(Engine::Faulty);
    let store = world.start_with(StoreOptions {
        queue_limit: 64 * 1024,
        ..options()
    });
    world.faults.set_hang(true);
    let first = store.submit(put("first", 1));
    hanging(&world).await;

    // Relaxed or not: who does not wait is taken as long as there is room, and refused from then on.
    let mut taken = Vec::new();
    let refused = loop {
        assert!(taken.len() < 64, "nothing bounds the queue");
        let key = taken.len().to_string();
        let pending = store.submit(Transaction::new().put(key, object(noise(4_000, 7))));
        if !reason(&store).is_empty() {
            break pending;
        }
        taken.push(pending);
    };
    assert!(taken.len() >= 4, "{}", taken.len());
    let error = refused.wait().await.unwrap_err();
    assert!(
        matches!(&error, CommitError::Unavailable { reason } if reason.contains("queue")),
        "{error}"
    );
    assert!(reason(&store).contains("does not keep up"));
    assert_eq!(world.metrics.store_degraded.get(), 1);
    assert_eq!(world.metrics.store_commit_errors.get(), 1);

    // Who waits, waits for room; a caller that goes away meanwhile has committed nothing.
    let big = || put("big", 1).put("big", object(noise(200_000, 9)));
    let gone = tokio::time::timeout(Duration::from_secs(1), store.commit(big())).await;
    assert!(gone.is_err());
    let waiting = tokio::spawn({
        let store = store.clone();
        let transaction = put("waited", 1).put("waited", object(noise(200_000, 9)));
        async move { store.commit(transaction).await }
    });
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished());
    // A stop needs no room.
    let permit = stop(&store, put("stop", 1)).await.unwrap();
    assert!(permit.is_held());

    world.faults.set_hang(false);
    first.wait().await.unwrap();
    for pending in &mut taken.drain(..) {
        pending.wait().await.unwrap();
    }
    waiting
        .await
        .unwrap()
        .expect("bigger than the queue, alone in it");
    store.sync().await.unwrap();
    store.check_disk();
    assert_eq!(*store.health().borrow(), StoreHealth::Ok);
    let state = store.snapshot();
    assert_eq!(number(&state, "stop"), Some(1));
    assert_eq!(number(&state, "waited"), Some(1));
    assert_eq!(number(&state, "big"), None);
    store.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_recovery_sets_aside_is_known_at_once() {
    let world = World::new(Engine::Faulty);
    let store = world.start();
    store.commit(put("v", 1)).await.unwrap();
    assert!(store.set_aside().is_empty());
    world.faults.fail_apply(1);
    world.faults.set_fail_reopen(true);
    store.commit(put("v", 2)).await.unwrap_err();
    world.damage_below("bad");
    world.faults.set_fail_reopen(false);
    healthy(&store).await;
    store.sync().await.unwrap();
    let bad = store.set_aside();
    assert_eq!(bad.len(), 1);
    assert_eq!(
        (bad[0].table, bad[0].key.as_str()),
        (Some(Table::Volumes), "bad")
    );
    assert_eq!(world.metrics.store_quarantined.get(), 1);
    store.close().await.unwrap();
}

#[derive(Clone, Default)]
struct Reserve {
    released: Arc<AtomicU32>,
    restored: Arc<AtomicU32>,
}

impl SpaceReserve for Reserve {
    fn release(&mut self) -> std::io::Result<()> {
        self.released.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn restore(&mut self) -> std::io::Result<()> {
        self.restored.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_releases_the_reserve_and_recovers_without_a_restart() {
    let world = World::new(Engine::Faulty);
    let reserve = Reserve::default();
    let store = world.start_with(StoreOptions {
        reserve: Some(Box::new(reserve.clone())),
        ..options()
    });
    store.commit(put("v", 1)).await.unwrap();
    world.faults.set_out_of_space(true);
    assert!(matches!(
        store.commit(put("v", 2)).await,
        Err(CommitError::Unknown { .. })
    ));
    assert!(matches!(
        *store.health().borrow(),
        StoreHealth::Degraded {
            out_of_space: true,
            ..
        }
    ));
    assert!(reserve.released.load(Ordering::SeqCst) >= 1);
    assert_eq!(reserve.restored.load(Ordering::SeqCst), 0);
    assert!(stop(&store, put("stop", 1)).await.unwrap().is_held());
    world.faults.set_out_of_space(false);
    healthy(&store).await;
    store.commit(put("v", 3)).await.unwrap();
    store.close().await.unwrap();
    assert_eq!(reserve.restored.load(Ordering::SeqCst), 1);
    let state = world.on_disk().state;
    assert_eq!(
        (number(&state, "v"), number(&state, "stop")),
        (Some(3), Some(1))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_closed_while_degraded_says_what_it_could_not_write() {
    let world = World::new(Engine::Faulty);
    let store = world.start();
    world.faults.set_broken(true);
    assert!(stop(&store, put("v", 1)).await.unwrap().is_held());
    assert!(matches!(
        store.close().await,
        Err(CommitError::Unavailable { .. })
    ));

    let world = World::new(Engine::Faulty);
    let store = world.start();
    world.faults.fail_sync(1);
    assert!(stop(&store, put("v", 1)).await.unwrap().is_held());
    store.close().await.expect("one more try when it is closed");
    assert_eq!(number(&world.on_disk().state, "v"), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn no_acknowledged_durable_commit_is_lost_when_unsynced_writes_are() {
    let world = World::new(Engine::Faulty);
    world.faults.set_buffer_until_sync(true);
    let store = world.start();
    for n in 1..=50 {
        store.commit(put("v", n)).await.unwrap();
        assert_eq!(number(&world.below().state, "v"), Some(n));
    }
    store.close().await.unwrap();
}

#[tokio::test]
async fn an_inline_store_degrades_and_recovers_as_well() {
    let world = World::new(Engine::Faulty);
    let store = world.start_with(StoreOptions {
        inline: true,
        backoff_min: Duration::ZERO,
        ..options()
    });
    store.commit(put("v", 1)).await.unwrap();
    world.faults.set_broken(true);
    assert!(matches!(
        store.commit(put("v", 2)).await,
        Err(CommitError::Unknown { .. })
    ));
    assert!(matches!(
        store.commit(put("v", 3)).await,
        Err(CommitError::Unavailable { .. })
    ));
    assert!(stop(&store, put("stop", 1)).await.unwrap().is_held());
    world.faults.set_broken(false);
    store.commit(put("v", 4)).await.unwrap();
    store
        .commit(Transaction::new().put("o", object(vec![1])))
        .await
        .unwrap();
    assert_eq!(
        world.below().state.objects.len(),
        1,
        "an inline store writes relaxed changes at once"
    );
    store.clone().close().await.unwrap();
    assert!(matches!(
        store.commit(put("v", 5)).await,
        Err(CommitError::Closed)
    ));
    assert_eq!(number(&world.on_disk().state, "v"), Some(4));
    assert_eq!(number(&world.on_disk().state, "stop"), Some(1));
}

#[tokio::test]
async fn a_store_that_cannot_set_damage_aside_starts_degraded() {
    use holdfast::store::backend::Op;
    let world = World::new(Engine::Faulty);
    let mut backend = world.backend();
    let key = holdfast::store::codec::record_key(Table::Volumes, "bad");
    backend
        .apply(&[Op::Put {
            key,
            value: vec![1, 2, 3],
        }])
        .unwrap();
    drop(backend);
    world.faults.fail_apply(1);
    let store = world.start();
    healthy(&store).await;
    assert_eq!(world.metrics.store_recoveries.get(), 1);
    store.close().await.unwrap();
    let loaded = world.on_disk();
    assert!(loaded.quarantined.is_empty());
    assert_eq!(loaded.kept.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_watches_learns_that_the_writer_has_panicked() {
    let world = World::new(Engine::Faulty);
    let store = world.start();
    store.commit(put("v", 1)).await.unwrap();
    let watching = tokio::spawn({
        let store = store.clone();
        async move { store.panicked().await }
    });
    world.faults.panic_next();
    let answer = store.commit(put("v", 2)).await;
    assert!(matches!(answer, Err(CommitError::Closed)), "{answer:?}");
    watching.await.unwrap();
    assert_eq!(number(&store.snapshot(), "v"), Some(1));
    let answer = stop(&store, put("stop", 1)).await;
    assert!(matches!(answer, Err(CommitError::Closed)), "{answer:?}");
}
