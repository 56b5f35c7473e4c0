//! One schedule of a node: how long each step of the store's writer, each call of the runtime and each request to the API server
//! takes, and which of them go wrong, all from one seed.
//!
//! What the agent does at the same moment of simulated time follows from these times alone: another seed is another order of
//! everything that waits for anything.

use std::collections::BTreeSet;
use std::fs::File;
use std::future::Future;
use std::io::Write;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use holdfast::store::{Pace, Step};
use holdfast_testkit::fake_api;
use holdfast_testkit::fake_cri;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use sha2::{Digest, Sha256};
use tokio::time::Instant;
use tonic::Code;

use crate::node::{Crash, Life};
use crate::world::EFFECTS;

/// Shared by everything that takes its time. Cheap to clone.
#[derive(Clone)]
pub struct Schedule(Arc<Mutex<Plan>>);

/// What a schedule has faults and delays of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    Disk,
    Calls,
    Requests,
}

impl Part {
    pub const ALL: [Self; 3] = [Self::Disk, Self::Calls, Self::Requests];
}

struct Plan {
    random: StdRng,
    /// Nothing goes wrong any more, and nothing takes long.
    calm: bool,
    /// What nothing goes wrong with, when a failure is shrunk.
    spared: BTreeSet<Part>,
    /// No step of the disk ends.
    disk_hangs: bool,
    /// How often the agent died or was stopped.
    ends: u64,
    trace: Trace,
}

/// What happened, in its order: two runs with one trace are the same run.
struct Trace {
    /// Of the first step.
    began: Option<Instant>,
    digest: Sha256,
    steps: u64,
    /// Where to write it, for a look at where two runs part (`HOLDFAST_SIM_TRACE` names a file).
    file: Option<File>,
}

impl Trace {
    fn new() -> Self {
        let file = std::env::var_os("HOLDFAST_SIM_TRACE");
        Self {
            began: None,
            digest: Sha256::new(),
            steps: 0,
            file: file.map(|path| File::create(path).unwrap()),
        }
    }

    fn note(&mut self, what: std::fmt::Arguments<'_>) {
        let began = *self.began.get_or_insert_with(Instant::now);
        let line = format!("{:?} {what}\n", began.elapsed());
        self.steps += 1;
        self.digest.update(&line);
        if let Some(file) = &mut self.file {
            file.write_all(line.as_bytes()).unwrap();
        }
    }
}

impl Schedule {
    pub fn new(seed: u64) -> Self {
        Self::sparing(seed, BTreeSet::new())
    }

    /// One in which nothing goes wrong with some parts.
    pub fn sparing(seed: u64, spared: BTreeSet<Part>) -> Self {
        Self(Arc::new(Mutex::new(Plan {
            // Not the stream that chooses what happens.
            random: StdRng::seed_from_u64(seed ^ 0x5ced_01e5),
            calm: false,
            spared,
            disk_hangs: false,
            ends: 0,
            trace: Trace::new(),
        })))
    }

    /// How many steps of the disk, calls and requests there were, and a digest of all of them.
    pub fn trace(&self) -> (u64, String) {
        let plan = self.plan();
        let digest = plan.trace.digest.clone().finalize();
        let hex: String = digest.iter().take(8).map(|b| format!("{b:02x}")).collect();
        (plan.trace.steps, hex)
    }

    /// How often the agent came to an end.
    pub fn ends(&self) -> u64 {
        self.plan().ends
    }

    /// The agent has come to an end.
    pub fn note_end(&self) {
        self.plan().ends += 1;
    }

    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.0.lock().unwrap()
    }

    /// Steps of the disk end only when this is called with `false`.
    pub fn hang_disk(&self, hangs: bool) {
        self.plan().disk_hangs = hangs;
    }

    fn disk_hangs(&self, step: Step) -> bool {
        self.plan().disk_hangs && matches!(step, Step::Write | Step::Sync | Step::Reopen)
    }

    /// From now on nothing fails, and everything takes milliseconds.
    pub fn calm(&self) {
        self.plan().calm = true;
    }

    /// What becomes of a call of the runtime.
    pub fn call(&self, call: &fake_cri::Call) -> fake_cri::Fault {
        use fake_cri::Fault;
        let mut plan = self.plan();
        plan.trace
            .note(format_args!("{} {}", call.operation, call.object));
        let usual = Fault::Delay(plan.latency());
        if plan.calm || !plan.random.random_bool(0.03) || plan.spares(Part::Calls) {
            return usual;
        }
        let changes = EFFECTS.contains(&call.operation);
        match plan.random.random_range(0..8) {
            0 | 1 => Fault::Error(Code::Unknown, "the schedule says no".to_owned()),
            2 => Fault::Error(Code::Unavailable, "the connection broke".to_owned()),
            3 => Fault::Hang,
            4 | 5 if changes => Fault::LoseReply,
            6 if changes => Fault::HangAfterEffect,
            _ => Fault::Delay(Duration::from_millis(plan.random.random_range(500..20_000))),
        }
    }

    /// What becomes of a request to the API server.
    pub fn request(&self, request: &fake_api::Request) -> fake_api::Fault {
        use fake_api::Fault;
        let mut plan = self.plan();
        plan.trace.note(format_args!("{}", request.line()));
        let usual = Fault::Delay(plan.latency());
        if plan.calm || !plan.random.random_bool(0.02) || plan.spares(Part::Requests) {
            return usual;
        }
        match plan.random.random_range(0..4) {
            0 => Fault::Status(500),
            1 => Fault::LoseReply,
            2 => Fault::Error("connection reset".to_owned()),
            _ => Fault::Delay(Duration::from_millis(plan.random.random_range(500..8_000))),
        }
    }

    /// How long a step of the store's writer takes.
    fn disk(&self, step: Step) -> Duration {
        let mut plan = self.plan();
        plan.trace.note(format_args!("{step:?}"));
        let on_disk = matches!(step, Step::Write | Step::Sync | Step::Reopen);
        if on_disk && !plan.calm && plan.random.random_bool(0.01) && !plan.spares(Part::Disk) {
            // Beyond the time after which stops go ahead of their records.
            return Duration::from_millis(plan.random.random_range(1_000..15_000));
        }
        match step {
            Step::Sync => plan.latency(),
            _ => plan.latency() / 4,
        }
    }
}

impl Plan {
    fn spares(&self, part: Part) -> bool {
        self.spared.contains(&part)
    }

    /// Mostly some milliseconds, at times much more.
    fn latency(&mut self) -> Duration {
        let longest = match self.random.random_range(0..40) {
            0 if !self.calm => 2_000_000,
            1..4 if !self.calm => 100_000,
            _ => 4_000,
        };
        Duration::from_micros(self.random.random_range(200..longest))
    }
}

/// The schedule as the writer of one life's store asks it.
pub struct LifePace {
    pub life: Arc<Life>,
    pub schedule: Schedule,
}

impl Pace for LifePace {
    fn before(&self, step: Step) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let n = self.life.steps.fetch_add(1, Ordering::Relaxed) + 1;
        if self.life.crash == Crash::Step(n) {
            self.life.end();
        }
        let (life, takes) = (Arc::clone(&self.life), self.schedule.disk(step));
        let schedule = self.schedule.clone();
        Box::pin(async move {
            while schedule.disk_hangs(step) && !life.is_over() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            if !life.is_over() {
                tokio::time::sleep(takes).await;
            }
            // A process that has died makes no further step.
            if life.is_over() {
                std::future::pending::<()>().await;
            }
        })
    }
}
