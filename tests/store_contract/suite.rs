//! What every backend has to do.

use std::time::Duration;

use holdfast::core::state::*;
use holdfast::store::backend::{Backend, Op};
use holdfast::store::codec;
use holdfast::store::{
    CommitError, Intent, StartIntent, StopDecision, Store, StoreHealth, StoreOptions,
};
use holdfast::types::{ContainerId, PodUid};

use super::world::*;

macro_rules! suite {
    ($($test:ident),+ $(,)?) => {
        mod sled { $( #[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $test() { super::$test(super::World::new(super::Engine::Sled)).await; } )+ }
        mod memory { $( #[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $test() { super::$test(super::World::new(super::Engine::Memory)).await; } )+ }
        mod redb { $( #[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $test() { super::$test(super::World::new(super::Engine::Redb)).await; } )+ }
        mod faulty { $( #[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $test() { super::$test(super::World::new(super::Engine::Faulty)).await; } )+ }
    };
}

suite!(
    every_table_round_trips_across_a_restart,
    a_stale_decision_is_refused_whole,
    transactions_are_committed_in_the_order_of_submission,
    a_relaxed_change_is_written_without_further_commits,
    a_durable_commit_takes_earlier_relaxed_changes_along,
    the_journal_is_a_ring_whose_sequence_survives_a_restart,
    a_big_record_that_shrinks_leaves_no_chunks_behind,
    a_closed_store_answers_closed_and_still_shows_its_state,
    dropping_the_last_handle_writes_what_is_queued,
    concurrent_writers_never_lose_an_update,
    a_damaged_record_is_set_aside_and_blocks_nothing,
    what_cannot_be_stored_is_refused_alone,
    receipts_tell_the_version_on_disk,
    backend_batches_and_iteration_order,
    the_same_expectation_twice_in_one_group_lets_one_through,
);

async fn every_table_round_trips_across_a_restart(world: World) {
    let store = world.start();
    let version = store.commit(every_table()).await.unwrap();
    let before = store.snapshot();
    assert_eq!(*store.published().borrow(), version);
    for table in Table::ALL {
        assert_eq!(before.len_of(*table), 1, "{} has a record", table.name());
    }
    store.close().await.unwrap();

    let store = world.start();
    assert_eq!(content(&store.snapshot()), content(&before));
    assert_eq!(*store.health().borrow(), StoreHealth::Ok);
    let line = store.snapshot();
    let line = line.record::<JournalRecord>(&journal_key(1)).unwrap();
    assert_eq!((line.what.as_str(), line.generation), ("admitted", 4));

    let mut delete = Transaction::new();
    for (table, key, _) in before.iter_all() {
        delete.mutations.push(Mutation::Delete { table, key });
    }
    store.commit(delete).await.unwrap();
    store.close().await.unwrap();
    assert_eq!(content(&world.on_disk().state).len(), 0);
}

async fn a_stale_decision_is_refused_whole(world: World) {
    let store = world.start();
    store
        .commit(Transaction::new().put("a", volume(1)).put("b", volume(1)))
        .await
        .unwrap();
    let seen = store.snapshot();
    store
        .commit(Transaction::new().put("b", volume(2)))
        .await
        .unwrap();
    let refused = store
        .commit(
            Transaction::new()
                .expect::<VolumeRecord>(&seen, "a")
                .expect::<VolumeRecord>(&seen, "b")
                .put("a", volume(9))
                .journal(None, "never", "stale"),
        )
        .await;
    assert!(
        matches!(refused, Err(CommitError::Stale { table: Table::Volumes, ref key }) if key == "b")
    );
    let absent = Transaction::new().expect::<VolumeRecord>(&State::default(), "a");
    assert!(matches!(
        store.commit(absent.put("a", volume(9))).await,
        Err(CommitError::Stale { .. })
    ));
    assert_eq!(number(&store.snapshot(), "a"), Some(1));
    assert!(store.snapshot().journal.is_empty());
    assert_eq!(world.metrics.store_stale.get(), 2);
    store.close().await.unwrap();
}

async fn transactions_are_committed_in_the_order_of_submission(world: World) {
    let store = world.start();
    let mut pending = Vec::new();
    for n in 0..200 {
        pending.push(store.submit(if n % 3 == 0 {
            Transaction::new().put("k", volume(n))
        } else {
            Transaction::new()
                .put("o", object(vec![n as u8]))
                .delete::<VolumeRecord>("k")
        }));
    }
    pending.push(store.submit(Transaction::new().put("k", volume(1000))));
    let mut last = 0;
    for one in pending {
        let version = one.wait().await.unwrap();
        assert!(version > last, "versions follow the order of submission");
        last = version;
    }
    store.close().await.unwrap();
    let state = world.on_disk().state;
    assert_eq!(number(&state, "k"), Some(1000));
    assert_eq!(state.record::<ObjectRecord>("o").unwrap().data, [199]);
}

async fn a_relaxed_change_is_written_without_further_commits(world: World) {
    let store = world.start_with(StoreOptions {
        relaxed_delay: Duration::from_millis(1),
        ..options()
    });
    let batches = || {
        let text = world.metrics.encode().unwrap();
        text.contains("holdfast_store_batch_transactions_count 1")
    };
    store
        .commit(Transaction::new().put("o", object(vec![1])))
        .await
        .unwrap();
    assert!(store.snapshot().record::<ObjectRecord>("o").is_some());
    tokio::time::timeout(Duration::from_secs(10), async {
        while !batches() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the writer wakes up by itself and writes the batch");
    store.close().await.unwrap();
}

async fn a_durable_commit_takes_earlier_relaxed_changes_along(world: World) {
    let store = world.start_with(StoreOptions {
        relaxed_delay: Duration::from_secs(3600),
        ..options()
    });
    store
        .commit(Transaction::new().put("o", object(vec![1])))
        .await
        .unwrap();
    store
        .commit(Transaction::new().put("v", volume(1)))
        .await
        .unwrap();
    store
        .commit(Transaction::new().put("p", object(vec![2])))
        .await
        .unwrap();
    store.sync().await.unwrap();
    let batches = world.metrics.encode().unwrap();
    assert!(
        batches.contains("holdfast_store_batch_transactions_count 2"),
        "one batch for the durable commit with the relaxed one, one for the sync"
    );
    store.close().await.unwrap();
    let state = world.on_disk().state;
    assert_eq!(state.objects.len(), 2);
    assert_eq!(state.volumes.len(), 1);
}

async fn the_journal_is_a_ring_whose_sequence_survives_a_restart(world: World) {
    let ring = || StoreOptions {
        journal_lines: 5,
        ..options()
    };
    let store = world.start_with(ring());
    for n in 0..8 {
        store
            .commit(
                Transaction::new()
                    .put("v", volume(n))
                    .journal(None, "changed", n.to_string()),
            )
            .await
            .unwrap();
    }
    store.close().await.unwrap();
    let lines = |state: &State| -> Vec<String> {
        state
            .journal
            .values()
            .map(|v| v.record.why.clone())
            .collect()
    };
    assert_eq!(lines(&world.on_disk().state), ["3", "4", "5", "6", "7"]);

    let store = world.start_with(ring());
    store
        .commit(Transaction::new().journal(None, "changed", "after"))
        .await
        .unwrap();
    assert_eq!(lines(&store.snapshot()), ["4", "5", "6", "7", "after"]);
    assert!(
        store
            .snapshot()
            .record::<JournalRecord>(&journal_key(9))
            .is_some()
    );
    store.close().await.unwrap();
    assert_eq!(lines(&world.on_disk().state), ["4", "5", "6", "7", "after"]);
}

async fn a_big_record_that_shrinks_leaves_no_chunks_behind(world: World) {
    let store = world.start();
    for size in [300_000, 0, 40_000, 20_000, 41_000, 10] {
        let record = object(noise(size, size as u64));
        store
            .commit(Transaction::new().put("big", record.clone()))
            .await
            .unwrap();
        store.sync().await.unwrap();
        assert_eq!(
            store.snapshot().record::<ObjectRecord>("big"),
            Some(&record)
        );
    }
    store.close().await.unwrap();
    let backend = world.backend();
    assert_eq!(backend.iter().count(), 1, "one value is left");
    drop(backend);

    // Chunks written by an earlier run are known too.
    let store = world.start();
    store
        .commit(Transaction::new().put("big", object(noise(100_000, 3))))
        .await
        .unwrap();
    store.close().await.unwrap();
    assert!(world.backend().iter().count() > 10);
    let store = world.start();
    store
        .commit(Transaction::new().delete::<ObjectRecord>("big"))
        .await
        .unwrap();
    store.close().await.unwrap();
    assert_eq!(world.backend().iter().count(), 0);
}

async fn a_closed_store_answers_closed_and_still_shows_its_state(world: World) {
    let store = world.start();
    let queued = store.submit(Transaction::new().put("v", volume(1)));
    store.clone().close().await.unwrap();
    queued.wait().await.expect("what was queued is committed");
    let late = store.commit(Transaction::new().put("v", volume(2))).await;
    assert!(matches!(late, Err(CommitError::Closed)));
    assert!(matches!(
        store
            .commit_stop(StopDecision::unrecorded_leftovers())
            .await,
        Err(CommitError::Closed)
    ));
    assert!(matches!(store.sync().await, Err(CommitError::Closed)));
    assert_eq!(number(&store.snapshot(), "v"), Some(1));
    assert!(matches!(store.close().await, Err(CommitError::Closed)));
}

async fn dropping_the_last_handle_writes_what_is_queued(world: World) {
    let store = world.start_with(StoreOptions {
        relaxed_delay: Duration::from_secs(3600),
        ..options()
    });
    let pending = store.submit(Transaction::new().put("o", object(vec![7])));
    drop(store);
    pending.wait().await.unwrap();
    // The writer gives the backend back when it ends; sled's lock says when.
    let state = tokio::task::spawn_blocking(move || {
        for _ in 0..1000 {
            let ready = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.on_disk()));
            match ready {
                Ok(loaded) if !loaded.state.objects.is_empty() => return loaded.state,
                _ => std::thread::yield_now(),
            }
        }
        panic!("the relaxed change was never written");
    })
    .await
    .unwrap();
    assert_eq!(state.record::<ObjectRecord>("o").unwrap().data, [7]);
}

async fn concurrent_writers_never_lose_an_update(world: World) {
    let store = world.start();
    let mut tasks = Vec::new();
    for _ in 0..16 {
        let store = store.clone();
        tasks.push(tokio::spawn(async move {
            for _ in 0..10 {
                loop {
                    let seen = store.snapshot();
                    let n = number(&seen, "n").unwrap_or(0);
                    let result = store
                        .commit(
                            Transaction::new()
                                .expect::<VolumeRecord>(&seen, "n")
                                .put("n", volume(n + 1)),
                        )
                        .await;
                    match result {
                        Ok(_) => break,
                        Err(CommitError::Stale { .. }) => {}
                        Err(e) => panic!("{e}"),
                    }
                }
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    store.close().await.unwrap();
    assert_eq!(number(&world.on_disk().state, "n"), Some(160));
}

async fn a_damaged_record_is_set_aside_and_blocks_nothing(world: World) {
    let store = world.start();
    store
        .commit(
            Transaction::new()
                .put("bad", volume(1))
                .put("good", volume(2))
                .put("chunked", object(noise(30_000, 5))),
        )
        .await
        .unwrap();
    store.close().await.unwrap();

    let mut backend = world.backend();
    let key = codec::record_key(Table::Volumes, "bad");
    let (_, mut value) = backend
        .iter()
        .map(Result::unwrap)
        .find(|(k, _)| *k == key)
        .unwrap();
    let last = value.len() - 1;
    value[last] ^= 0x40;
    let lost = codec::chunk_key(Table::Objects, "chunked", 1);
    backend
        .apply(&[Op::Put { key, value }, Op::Delete { key: lost }])
        .unwrap();
    backend.sync().unwrap();
    drop(backend);

    let store = world.start();
    assert_eq!(number(&store.snapshot(), "good"), Some(2));
    assert_eq!(number(&store.snapshot(), "bad"), None);
    assert!(store.snapshot().objects.is_empty());
    let set_aside = world.metrics.store_quarantined.get();
    assert!(set_aside >= 2, "{set_aside} raw values were set aside");
    store
        .commit(Transaction::new().put("bad", volume(3)))
        .await
        .unwrap();
    store.close().await.unwrap();

    let loaded = world.on_disk();
    assert!(loaded.quarantined.is_empty(), "nothing damaged is left");
    assert_eq!(number(&loaded.state, "bad"), Some(3));
    assert!(
        loaded
            .kept
            .iter()
            .any(|q| q.key == "bad" && q.table == Some(Table::Volumes))
    );
}

async fn what_cannot_be_stored_is_refused_alone(world: World) {
    let store = world.start();
    let good = store.submit(Transaction::new().put("a", volume(1)));
    for bad in [
        Transaction::new().put("", volume(1)),
        Transaction::new().put("x".repeat(600), volume(1)),
        Transaction::new().put("a", object(vec![0; codec::RECORD_LIMIT + 1])),
        Transaction::new().journal(None, "what", "x".repeat(1 << 20)),
    ] {
        let refused = store.commit(bad).await;
        assert!(
            matches!(refused, Err(CommitError::Invalid { .. })),
            "{refused:?}"
        );
    }
    good.wait().await.unwrap();
    assert_eq!(*store.health().borrow(), StoreHealth::Ok);
    store.close().await.unwrap();
    assert_eq!(world.on_disk().state.volumes.len(), 1);
}

fn start_intent() -> StartIntent {
    StartIntent {
        pod: PodUid::new("uid"),
        container: "c".to_owned(),
        container_id: ContainerId::new("id"),
        attempt: 3,
        hash: "h".to_owned(),
        why: "crashed".to_owned(),
        at: stamp(1),
    }
}

/// A decision whose record alone would be relaxed.
#[derive(Clone)]
struct Relaxed;

impl Intent for Relaxed {
    fn transaction(&self, _: &State) -> Transaction {
        Transaction::new().put("o", object(vec![1]))
    }
}

async fn receipts_tell_the_version_on_disk(world: World) {
    let store = world.start_with(StoreOptions {
        relaxed_delay: Duration::from_secs(3600),
        ..options()
    });
    let receipt = store
        .commit_intent(start_intent(), Transaction::new())
        .await
        .unwrap();
    assert_eq!(receipt.get(), &start_intent());
    assert_eq!(*store.published().borrow(), receipt.version());

    // Even where the record alone would be relaxed.
    let batches = |n: u32| {
        let text = world.metrics.encode().unwrap();
        text.contains(&format!("holdfast_store_batch_transactions_count {n}"))
    };
    assert!(batches(1));
    store
        .commit_intent(Relaxed, Transaction::new())
        .await
        .unwrap();
    assert!(batches(2));
    let permit = store
        .commit_stop(
            StopDecision::recorded_by(Transaction::new().put("o", object(vec![2]))).unwrap(),
        )
        .await
        .unwrap();
    assert!(!permit.is_held());
    assert!(batches(3));
    store.close().await.unwrap();
    let state = world.on_disk().state;
    let container = state.record::<ContainerRecord>("uid/c").unwrap();
    assert_eq!(container.restart_count, 3);
    assert_eq!(container.intent.as_ref().unwrap().attempt, 3);
}

async fn backend_batches_and_iteration_order(world: World) {
    let put = |k: &[u8], v: &[u8]| Op::Put {
        key: k.to_vec(),
        value: v.to_vec(),
    };
    let mut backend: Box<dyn Backend> = world.backend();
    backend
        .apply(&[put(b"b", b"1"), put(b"a", b"2"), put(b"c", b"3")])
        .unwrap();
    backend
        .apply(&[
            Op::Delete { key: b"b".to_vec() },
            Op::Delete {
                key: b"none".to_vec(),
            },
            put(b"c", b""),
        ])
        .unwrap();
    backend.flush().unwrap();
    backend.sync().unwrap();
    for _ in 0..2 {
        let pairs: Vec<_> = backend.iter().map(Result::unwrap).collect();
        assert_eq!(
            pairs,
            [
                (b"a".to_vec(), b"2".to_vec()),
                (b"c".to_vec(), b"".to_vec())
            ]
        );
        assert!(backend.size_on_disk().unwrap() > 0);
        backend.reopen().unwrap();
    }
}

async fn the_same_expectation_twice_in_one_group_lets_one_through(world: World) {
    let store: Store = world.start();
    let seen = store.snapshot();
    let decide = |n| {
        Transaction::new()
            .expect::<VolumeRecord>(&seen, "slot")
            .put("slot", volume(n))
    };
    let pending: Vec<_> = (0..50).map(|n| store.submit(decide(n))).collect();
    let mut won = Vec::new();
    for (n, one) in (0_u64..).zip(pending) {
        if one.wait().await.is_ok() {
            won.push(n);
        }
    }
    assert_eq!(won, [0]);
    store.close().await.unwrap();
    assert_eq!(number(&world.on_disk().state, "slot"), Some(0));
}
