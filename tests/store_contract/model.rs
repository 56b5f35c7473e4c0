//! The store against a map.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast::core::state::*;
use holdfast::store::{CommitError, StoreOptions};
use proptest::prelude::*;

use super::world::*;

#[derive(Clone, Debug)]
enum Step {
    /// Durable.
    PutVolume(u8, u64),
    /// Relaxed, of a size.
    PutObject(u8, usize),
    Delete(u8, bool),
    /// Two records in one transaction, decided on what was seen.
    Move(u8, u8),
    /// Decided on an old snapshot.
    Stale(u8),
    Sync,
    Reopen,
    FailWrite,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let key = 0..6_u8;
    let step = prop_oneof![
        4 => (key.clone(), 0..1000_u64).prop_map(|(k, n)| Step::PutVolume(k, n)),
        4 => (key.clone(), prop_oneof![0..100_usize, 4_000..40_000_usize]).prop_map(|(k, n)| Step::PutObject(k, n)),
        2 => (key.clone(), any::<bool>()).prop_map(|(k, v)| Step::Delete(k, v)),
        2 => (key.clone(), key.clone()).prop_map(|(a, b)| Step::Move(a, b)),
        1 => key.prop_map(Step::Stale),
        1 => Just(Step::Sync),
        1 => Just(Step::Reopen),
        1 => Just(Step::FailWrite),
    ];
    proptest::collection::vec(step, 1..40)
}

type Model = BTreeMap<(Table, String), AnyRecord>;

async fn run(engine: Engine, steps: Vec<Step>) {
    let world = World::new(engine);
    let options = || StoreOptions {
        relaxed_delay: Duration::from_secs(3600),
        backoff_min: Duration::ZERO,
        ..options()
    };
    let mut store = world.start_with(options());
    let mut model = Model::new();
    for step in steps {
        match step {
            Step::PutVolume(key, n) => {
                let key = key.to_string();
                store
                    .commit(Transaction::new().put(&key, volume(n)))
                    .await
                    .unwrap();
                model.insert((Table::Volumes, key), volume(n).into_any());
            }
            Step::PutObject(key, size) => {
                let key = key.to_string();
                let record = object(noise(size, size as u64));
                store
                    .commit(Transaction::new().put(&key, record.clone()))
                    .await
                    .unwrap();
                model.insert((Table::Objects, key), record.into_any());
            }
            Step::Delete(key, durable) => {
                let key = key.to_string();
                let (table, transaction) = if durable {
                    (
                        Table::Volumes,
                        Transaction::new().delete::<VolumeRecord>(&key),
                    )
                } else {
                    (
                        Table::Objects,
                        Transaction::new().delete::<ObjectRecord>(&key),
                    )
                };
                store.commit(transaction).await.unwrap();
                model.remove(&(table, key));
            }
            Step::Move(from, to) => {
                let (from, to) = (from.to_string(), to.to_string());
                let seen = store.snapshot();
                let Some(record) = seen.record::<VolumeRecord>(&from).cloned() else {
                    continue;
                };
                store
                    .commit(
                        Transaction::new()
                            .expect::<VolumeRecord>(&seen, &from)
                            .delete::<VolumeRecord>(&from)
                            .put(&to, record.clone()),
                    )
                    .await
                    .unwrap();
                model.remove(&(Table::Volumes, from));
                model.insert((Table::Volumes, to), record.into_any());
            }
            Step::Stale(key) => {
                let key = key.to_string();
                let seen = store.snapshot();
                store
                    .commit(Transaction::new().put(&key, volume(7)))
                    .await
                    .unwrap();
                model.insert((Table::Volumes, key.clone()), volume(7).into_any());
                let refused = store
                    .commit(
                        Transaction::new()
                            .put("other", volume(1))
                            .expect::<VolumeRecord>(&seen, &key),
                    )
                    .await;
                assert!(matches!(refused, Err(CommitError::Stale { .. })));
            }
            Step::Sync => store.sync().await.unwrap(),
            Step::Reopen => {
                store.close().await.unwrap();
                store = world.start_with(options());
            }
            Step::FailWrite => {
                // Only the faulty backend listens. Nothing of the batch happens.
                if engine == Engine::Faulty {
                    world.faults.fail_apply(1);
                    let failed = store
                        .commit(Transaction::new().put("failed", volume(0)))
                        .await;
                    assert!(matches!(failed, Err(CommitError::Unknown { .. })));
                    healthy(&store).await;
                }
            }
        }
        assert_eq!(content(&store.snapshot()), model);
    }
    store.close().await.unwrap();
    let loaded = world.on_disk();
    assert!(loaded.quarantined.is_empty());
    assert_eq!(content(&loaded.state), model);
}

fn check(engine: Engine, steps: Vec<Step>) {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(run(engine, steps));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_store_on_sled_behaves_like_a_map_across_restarts(steps in steps()) {
        check(Engine::Sled, steps);
    }

    #[test]
    fn the_store_behaves_like_a_map_across_restarts_and_failed_writes(steps in steps()) {
        check(Engine::Faulty, steps);
    }
}
