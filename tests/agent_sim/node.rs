//! What an agent process stands on: the clock, its life, the disk.
//!
//! The disk keeps what was synced; what was only flushed survives a crash of the agent and not a loss of
//! power. A [`Life`] is one agent process: once it is over, nothing it still does reaches the disk or the
//! runtime.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast::core::state::State;
use holdfast::store::backend::{Backend, BackendError, MemoryBackend, Op, RawIter};
use holdfast::store::codec;
use holdfast::types::{BootIdentity, Clock, Stamp};
use tokio::sync::Notify;
use tokio::time::Instant;

// ---------------------------------------------------------------------------------------------- time

/// The clock of the node: it follows tokio's, and a test may set its wall.
#[derive(Clone)]
pub struct SimClock(Arc<Mutex<Dial>>);

pub struct Dial {
    pub boot: BootIdentity,
    pub booted: Instant,
    pub wall_ms: i64,
    pub wall_at: Instant,
    /// How much later than this clock tokio's is read: the thread is held up in between.
    pub held_up: Duration,
}

impl SimClock {
    #[expect(
        clippy::disallowed_methods,
        reason = "starts where the fake runtime's wall clock starts"
    )]
    pub fn new() -> Self {
        let wall = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap();
        let now = Instant::now();
        Self(Arc::new(Mutex::new(Dial {
            boot: boot(1),
            booted: now - Duration::from_secs(100),
            wall_ms: i64::try_from(wall.as_millis()).unwrap(),
            wall_at: now,
            held_up: Duration::ZERO,
        })))
    }

    /// The wall clock jumps.
    pub fn jump_wall(&self, by_ms: i64) {
        self.0.lock().unwrap().wall_ms += by_ms;
    }

    /// From now on, whoever reads this clock and then tokio's is held up for so long in between.
    pub fn hold_up(&self, readers: Duration) {
        self.0.lock().unwrap().held_up = readers;
    }

    pub fn boot(&self) -> BootIdentity {
        self.0.lock().unwrap().boot.clone()
    }

    pub fn reboot(&self) {
        let mut dial = self.0.lock().unwrap();
        dial.boot = boot(dial.boot.pid1_start + 1);
        dial.booted = Instant::now() - Duration::from_secs(3);
    }
}

pub fn boot(number: u64) -> BootIdentity {
    BootIdentity {
        kernel_boot_id: format!("boot-{number}"),
        pid1_start: number,
        runtime_state: String::new(),
    }
}

impl Clock for SimClock {
    fn now(&self) -> Stamp {
        let dial = self.0.lock().unwrap();
        let ms = |d: Duration| i64::try_from(d.as_millis()).unwrap();
        Stamp {
            boot: dial.boot.id(),
            boottime_ms: ms(dial.booted.elapsed().saturating_sub(dial.held_up)),
            wall_ms: dial.wall_ms + ms(dial.wall_at.elapsed().saturating_sub(dial.held_up)),
        }
    }
}

// --------------------------------------------------------------------------------------------- lives

/// Where a life ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    Never,
    /// At its n-th write to the disk (1 = the first; every sync, and some that are flushed only): before anything of it is there, or when all of it is
    /// and the answer is on its way.
    Write(usize, When),
    /// At its n-th call of the runtime that changes something.
    Call(usize, When),
    /// At its n-th request to the API server that changes a pod.
    Request(usize, When),
    /// Before the n-th step of the store's writer, under a schedule.
    Step(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    Before,
    After,
}

/// One agent process.
pub struct Life {
    pub crash: Crash,
    pub over: AtomicBool,
    pub ended: Notify,
    pub writes: AtomicUsize,
    pub calls: AtomicUsize,
    pub requests: AtomicUsize,
    pub steps: AtomicUsize,
}

impl Life {
    pub fn new(crash: Crash) -> Arc<Self> {
        Arc::new(Self {
            crash,
            over: AtomicBool::new(false),
            ended: Notify::new(),
            writes: AtomicUsize::new(0),
            calls: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
            steps: AtomicUsize::new(0),
        })
    }

    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    pub fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
        self.ended.notify_one();
    }

    pub fn writes(&self) -> usize {
        self.writes.load(Ordering::Relaxed)
    }

    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    pub fn requests(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }
}

// ---------------------------------------------------------------------------------------------- disk

/// The disk: what survives a loss of power, and what survives the death of the process only.
#[derive(Clone, Default)]
pub struct Disk {
    pub synced: MemoryBackend,
    pub flushed: Arc<Mutex<Vec<Op>>>,
}

impl Disk {
    /// Everything that was written, or only what was synced.
    pub fn settle(&self, power_lost: bool) {
        let flushed = std::mem::take(&mut *self.flushed.lock().unwrap());
        if !power_lost {
            self.synced.clone().apply(&flushed).unwrap();
        }
    }

    pub fn load(&self) -> State {
        codec::load(self.synced.iter(), 1).state
    }

    /// A copy that changes by itself.
    pub fn copy(&self) -> Self {
        let copy = Self::default();
        let ops: Vec<Op> = self
            .synced
            .iter()
            .map(|pair| pair.unwrap())
            .map(|(key, value)| Op::Put { key, value })
            .collect();
        copy.synced.clone().apply(&ops).unwrap();
        copy
    }
}

/// The disk as one life has it.
pub struct LifeBackend {
    pub life: Arc<Life>,
    pub disk: Disk,
    /// Not even flushed.
    pub applied: Vec<Op>,
    pub flushes: usize,
}

impl LifeBackend {
    pub fn check(&self) -> Result<(), BackendError> {
        if self.life.is_over() {
            return Err(BackendError::Engine {
                action: "use the disk",
                reason: "this life is over".to_owned(),
            });
        }
        Ok(())
    }

    /// One write: everything applied since the last, whole or not at all.
    pub fn write(
        &mut self,
        is_point: bool,
        depth: impl FnOnce(&mut Self),
    ) -> Result<(), BackendError> {
        self.check()?;
        let mut point = None;
        if is_point {
            let n = self.life.writes.fetch_add(1, Ordering::Relaxed) + 1;
            point = match self.life.crash {
                Crash::Write(at, when) if at == n => Some(when),
                _ => None,
            };
        }
        if point == Some(When::Before) {
            self.life.end();
            return self.check();
        }
        let applied = std::mem::take(&mut self.applied);
        self.disk.flushed.lock().unwrap().extend(applied);
        depth(self);
        if point == Some(When::After) {
            self.life.end();
        }
        self.check()
    }
}

impl Backend for LifeBackend {
    fn apply(&mut self, batch: &[Op]) -> Result<(), BackendError> {
        self.check()?;
        self.applied.extend_from_slice(batch);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), BackendError> {
        self.flushes += 1;
        // Nothing depends on these: some of them stand for all.
        self.write(self.flushes.is_multiple_of(5), |_| ())
    }

    fn sync(&mut self) -> Result<(), BackendError> {
        self.write(true, |this| {
            let ops = std::mem::take(&mut *this.disk.flushed.lock().unwrap());
            this.disk.synced.apply(&ops).unwrap();
        })
    }

    fn iter(&self) -> RawIter<'_> {
        let mut all = self.disk.copy();
        let flushed = self.disk.flushed.lock().unwrap().clone();
        all.synced.apply(&flushed).unwrap();
        all.synced.apply(&self.applied).unwrap();
        let pairs: Vec<_> = all.synced.iter().collect();
        Box::new(pairs.into_iter())
    }

    fn size_on_disk(&self) -> Result<u64, BackendError> {
        Ok(0)
    }

    fn reopen(&mut self) -> Result<(), BackendError> {
        self.applied.clear();
        self.check()
    }

    fn name(&self) -> &'static str {
        "life"
    }
}

/// The engine behind a life's store on files; `None` once the process is gone, as its locks are then.
pub type Engine = Arc<Mutex<Option<Box<dyn Backend>>>>;

/// Files of a store as one life has them. What is synced is in `disk` as well, for those who look.
pub struct FileBackend {
    pub life: Arc<Life>,
    pub engine: Engine,
    pub disk: Disk,
}

impl FileBackend {
    fn with<T>(
        &self,
        call: impl FnOnce(&mut dyn Backend) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        match self.engine.lock().unwrap().as_mut() {
            Some(engine) if !self.life.is_over() => call(&mut **engine),
            _ => Err(BackendError::Engine {
                action: "use the disk",
                reason: "this life is over".to_owned(),
            }),
        }
    }
}

impl Backend for FileBackend {
    fn apply(&mut self, batch: &[Op]) -> Result<(), BackendError> {
        self.with(|engine| engine.apply(batch))?;
        self.disk.flushed.lock().unwrap().extend_from_slice(batch);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), BackendError> {
        self.with(Backend::flush)
    }

    fn sync(&mut self) -> Result<(), BackendError> {
        self.with(Backend::sync)?;
        self.disk.settle(false);
        Ok(())
    }

    fn iter(&self) -> RawIter<'_> {
        match self.with(|engine| Ok(engine.iter().collect::<Vec<_>>())) {
            Ok(pairs) => Box::new(pairs.into_iter()),
            Err(error) => Box::new(std::iter::once(Err(error))),
        }
    }

    fn size_on_disk(&self) -> Result<u64, BackendError> {
        self.with(|engine| engine.size_on_disk())
    }

    fn reopen(&mut self) -> Result<(), BackendError> {
        self.with(Backend::reopen)
    }

    fn name(&self) -> &'static str {
        "files"
    }
}
