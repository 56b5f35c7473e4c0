//! Nodes with pods that have everything in play, and what their containers and commands do.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_testkit::fake_cri::{Behaviour, ExecResult};
use serde_json::Value;
use tokio::time::Instant;

pub use crate::rich_pod::*;
use crate::watch::label;
use crate::world::World;

/// Of every probe here, in seconds.
pub const PERIOD: u64 = 10;

/// [`rich_every`] ten seconds.
pub fn rich(policy: &str) -> Value {
    rich_every(policy, PERIOD)
}

/// What the containers of pods like [`rich`] do: init containers end well after a second, all others run on.
pub fn usual(container: &str) -> Behaviour {
    if is_init(container) {
        Behaviour::Exit {
            code: 0,
            after: Duration::from_secs(1),
        }
    } else {
        Behaviour::RunForever
    }
}

pub fn is_init(container: &str) -> bool {
    container.starts_with('i')
}

/// What commands in containers answer: probes and hooks.
#[derive(Clone, Default)]
pub struct Answers {
    failing: Arc<Mutex<BTreeSet<String>>>,
    takes: Arc<Mutex<BTreeMap<String, u64>>>,
    runs: Arc<Mutex<Vec<(String, Instant)>>>,
}

impl Answers {
    /// Of all pods of a world, as `<pod>/<command>`.
    pub fn of(world: &World) -> Self {
        let answers = Self::default();
        let given = answers.clone();
        world.fake.on_exec(move |config, command| {
            let pod = label(&config.labels, "io.kubernetes.pod.name");
            let pod = pod.strip_suffix("-sim").unwrap_or(&pod);
            let name = format!("{pod}/{}", command[0]);
            let fails = given.failing.lock().unwrap().contains(&name);
            let takes = given.takes.lock().unwrap().get(&name).copied();
            given.runs.lock().unwrap().push((name, Instant::now()));
            ExecResult {
                code: i32::from(fails),
                takes: Duration::from_secs(takes.unwrap_or(0)),
                ..ExecResult::default()
            }
        });
        answers
    }

    pub fn fail(&self, name: &str, fails: bool) {
        let mut failing = self.failing.lock().unwrap();
        if fails {
            failing.insert(name.to_owned());
        } else {
            failing.remove(name);
        }
    }

    /// A command takes this many seconds from now on.
    pub fn take(&self, name: &str, seconds: u64) {
        self.takes.lock().unwrap().insert(name.to_owned(), seconds);
    }

    /// When a command was run, oldest first.
    pub fn times(&self, name: &str) -> Vec<Instant> {
        let runs = self.runs.lock().unwrap();
        let of_name = runs.iter().filter(|(ran, _)| ran == name);
        of_name.map(|(_, at)| *at).collect()
    }

    pub fn count(&self, name: &str) -> usize {
        self.times(name).len()
    }

    pub fn clear(&self) {
        self.runs.lock().unwrap().clear();
    }
}

impl World {
    /// [`summary`] of what is on record.
    pub fn summary(&self, pod: &str) -> Vec<String> {
        match self.status(pod) {
            Some(record) => summary(&record.status),
            None => Vec::new(),
        }
    }

    /// [`summary`] of what the API server has.
    pub fn shown_summary(&self, pod: &str) -> Vec<String> {
        let status = self.shown(pod)["status"].clone();
        summary(&serde_json::from_value(status).unwrap_or_default())
    }

    /// Waits until a pod of [`rich`] is up.
    pub async fn up(&self, pod: &str) {
        self.until(&format!("{pod} is up"), 120, |w| w.summary(pod) == UP)
            .await;
    }

    #[track_caller]
    pub fn assert_summary(&self, pod: &str, want: &[&str]) {
        assert_eq!(self.summary(pod), want, "{}", self.describe());
    }

    /// The names of a pod's containers in the order of their starts.
    pub fn started(&self, pod: &str) -> Vec<String> {
        let starts = self.starts(pod).into_iter();
        starts.map(|s| s.container).collect()
    }

    /// When a container was started, oldest first.
    pub fn starts_of(&self, pod: &str, container: &str) -> Vec<crate::watch::Start> {
        let mut starts = self.starts(pod);
        starts.retain(|s| s.container == container);
        starts
    }

    /// IDs of the running containers by their names.
    pub fn running_ids(&self, pod: &str) -> BTreeMap<String, String> {
        let running = self.running(pod);
        let all = self.of_pod(pod).into_iter();
        all.filter(|c| running.contains(&c.id))
            .map(|c| (c.metadata.unwrap_or_default().name, c.id))
            .collect()
    }

    /// The ID of a running container.
    pub fn id(&self, pod: &str, container: &str) -> String {
        let ids = self.running_ids(pod);
        let id = ids.get(container).cloned();
        id.unwrap_or_else(|| panic!("{container} does not run\n{}", self.describe()))
    }

    pub fn is_running(&self, pod: &str, container: &str) -> bool {
        self.running_ids(pod).contains_key(container)
    }
}

/// A world whose containers do what is usual, with the answers of their commands.
pub fn usual_world(api: bool) -> (World, Answers) {
    let world = if api { World::with_api() } else { World::new() };
    world.behave_each(|_, container, _| usual(container));
    let answers = Answers::of(&world);
    (world, answers)
}
