//! The writer of simulations: the same commits as the thread's, with other tasks between its steps.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast::core::state::Transaction;
use holdfast::store::{CommitError, Pace, Step, Store, StoreHealth, codec};

use super::world::*;

/// Each step takes a second, but for the one that it never gets past.
#[derive(Default)]
struct Steps {
    made: Mutex<Vec<Step>>,
    dies_at: Option<usize>,
}

impl Pace for Steps {
    fn before(&self, step: Step) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let mut made = self.made.lock().unwrap();
        made.push(step);
        if self.dies_at == Some(made.len()) {
            return Box::pin(std::future::pending());
        }
        Box::pin(tokio::time::sleep(Duration::from_secs(1)))
    }
}

fn start(world: &World, dies_at: Option<usize>) -> (Store, Arc<Steps>) {
    let steps = Arc::new(Steps {
        dies_at,
        ..Steps::default()
    });
    let backend = world.backend();
    let loaded = codec::load(backend.iter(), 1);
    let store = Store::start_paced(
        backend,
        loaded,
        options(),
        Arc::new(Ticking::default()),
        world.metrics.clone(),
        Arc::clone(&steps) as _,
    );
    (store, steps)
}

fn put(key: &str, n: u64) -> Transaction {
    Transaction::new().put(key, volume(n))
}

#[tokio::test(start_paused = true)]
async fn a_commit_goes_step_by_step_and_others_see_how_far_it_is() {
    let world = World::new(Engine::Faulty);
    let (store, steps) = start(&world, None);
    let pending = store.submit(put("v", 1));
    let relaxed = store.submit(Transaction::new().put("o", object(vec![1])));
    let half = Duration::from_millis(500);
    tokio::time::sleep(3 * half).await;
    assert_eq!(number(&world.below().state, "v"), None, "before the write");
    tokio::time::sleep(2 * half).await;
    assert_eq!(number(&world.below().state, "v"), Some(1), "written");
    assert_eq!(number(&store.snapshot(), "v"), None, "not synced");
    tokio::time::sleep(4 * half).await;
    assert_eq!(number(&store.snapshot(), "v"), Some(1), "published");
    pending.wait().await.unwrap();
    relaxed.wait().await.unwrap();
    let made = steps.made.lock().unwrap().clone();
    let all = [
        Step::Take,
        Step::Write,
        Step::Sync,
        Step::Publish,
        Step::Answer,
    ];
    assert_eq!(made, all);
    store.close().await.unwrap();
    assert_eq!(number(&world.on_disk().state, "v"), Some(1));
}

#[tokio::test(start_paused = true)]
async fn wherever_the_writer_dies_what_was_acknowledged_is_there() {
    let mut acknowledged = 0;
    for dies_at in 1..30 {
        let world = World::new(Engine::Faulty);
        world.faults.set_buffer_until_sync(true);
        let (store, _) = start(&world, Some(dies_at));
        let mut last = None;
        for n in 1..=5 {
            let commit = store.submit(put("v", n)).wait();
            match tokio::time::timeout(Duration::from_secs(60), commit).await {
                Ok(answer) => answer.unwrap(),
                Err(_) => break,
            };
            last = Some(n);
        }
        let on_disk = number(&world.below().state, "v");
        assert!(
            on_disk >= last,
            "died at {dies_at}: {on_disk:?} is there, {last:?} was acknowledged"
        );
        assert!(
            number(&store.snapshot(), "v") <= on_disk,
            "died at {dies_at}"
        );
        acknowledged += last.unwrap_or(0);
    }
    assert!(acknowledged > 0);
}

#[tokio::test(start_paused = true)]
async fn a_step_that_hangs_counts_as_a_disk_that_hangs() {
    let world = World::new(Engine::Faulty);
    // The sync of the first commit.
    let (store, _) = start(&world, Some(3));
    let _pending = store.submit(put("v", 1));
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        store.check_disk();
    }
    let health = store.health().borrow().clone();
    assert!(matches!(health, StoreHealth::Degraded { .. }), "{health:?}");
    assert!(store.commit_or_hold(put("stop", 1)).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_paced_store_degrades_and_recovers_as_well() {
    let world = World::new(Engine::Faulty);
    let (store, steps) = start(&world, None);
    world.faults.set_broken(true);
    let answer = store.commit(put("v", 1)).await;
    assert!(
        matches!(answer, Err(CommitError::Unknown { .. })),
        "{answer:?}"
    );
    assert!(store.commit_or_hold(put("stop", 1)).await.unwrap());
    world.faults.set_broken(false);
    healthy(&store).await;
    store.commit(put("v", 2)).await.unwrap();
    assert!(steps.made.lock().unwrap().contains(&Step::Reopen));
    store.close().await.unwrap();
    assert_eq!(number(&world.on_disk().state, "v"), Some(2));
    assert_eq!(number(&world.on_disk().state, "stop"), Some(1));
}
