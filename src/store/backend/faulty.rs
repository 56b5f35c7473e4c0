//! A backend that fails on purpose, around any other.
//!
//! [`Faults`] is the remote control: it stays with the test while the backend moves into the writer.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::{Backend, BackendError, Op, RawIter, RawPair};

/// Remote control of a [`FaultyBackend`]. Clones control the same backend.
#[derive(Clone, Debug, Default)]
pub struct Faults(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    plan: Mutex<Plan>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Plan {
    applies: u64,
    syncs: u64,
    fail_apply: Option<u64>,
    fail_sync: Option<u64>,
    fail_reopen: bool,
    out_of_space: bool,
    broken: bool,
    hang: bool,
    hanging: bool,
    buffer: bool,
    crash: bool,
    panic: bool,
}

impl Faults {
    /// No faults yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.0.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, change: impl FnOnce(&mut Plan)) {
        change(&mut self.plan());
        self.0.changed.notify_all();
    }

    /// The `n`-th `apply` from now (1 = the next) fails; nothing of it reaches the inner backend.
    pub fn fail_apply(&self, n: u64) {
        self.set(|p| p.fail_apply = Some(p.applies + n));
    }

    /// The `n`-th `flush` or `sync` from now (1 = the next) fails.
    pub fn fail_sync(&self, n: u64) {
        self.set(|p| p.fail_sync = Some(p.syncs + n));
    }

    /// Every write, sync and reopen fails until it is switched off.
    pub fn set_broken(&self, broken: bool) {
        self.set(|p| p.broken = broken);
    }

    /// Every write and sync reports a full disk until it is switched off. Reopening works.
    pub fn set_out_of_space(&self, full: bool) {
        self.set(|p| p.out_of_space = full);
    }

    /// Reopening fails until it is switched off.
    pub fn set_fail_reopen(&self, fail: bool) {
        self.set(|p| p.fail_reopen = fail);
    }

    /// `flush` and `sync` hang until it is switched off.
    pub fn set_hang(&self, hang: bool) {
        self.set(|p| p.hang = hang);
    }

    /// Blocks until a call hangs. For tests: run it where blocking is allowed.
    pub fn wait_until_hanging(&self) {
        let mut plan = self.plan();
        while !plan.hanging {
            plan = self
                .0
                .changed
                .wait(plan)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// From now on what is applied reaches the inner backend at the next `sync` only.
    pub fn set_buffer_until_sync(&self, buffer: bool) {
        self.set(|p| p.buffer = buffer);
    }

    /// The next reopen forgets everything that was not synced (needs `set_buffer_until_sync`).
    pub fn crash(&self) {
        self.set(|p| p.crash = true);
    }

    /// The next `apply` panics, as a database does that finds itself in a state which must not be.
    pub fn panic_next(&self) {
        self.set(|p| p.panic = true);
    }

    /// Returns the number of calls of `apply`.
    pub fn applies(&self) -> u64 {
        self.plan().applies
    }

    /// Returns the number of calls of `flush` and `sync`.
    pub fn syncs(&self) -> u64 {
        self.plan().syncs
    }

    fn check_apply(&self) -> Result<(), BackendError> {
        let mut plan = self.plan();
        assert!(!std::mem::take(&mut plan.panic), "injected panic");
        plan.applies += 1;
        let hit = plan.fail_apply == Some(plan.applies);
        plan.result("write a batch", hit)
    }

    fn check_sync(&self) -> Result<(), BackendError> {
        let mut plan = self.plan();
        plan.syncs += 1;
        let hit = plan.fail_sync == Some(plan.syncs);
        while plan.hang {
            plan.hanging = true;
            self.0.changed.notify_all();
            plan = self
                .0
                .changed
                .wait(plan)
                .unwrap_or_else(PoisonError::into_inner);
        }
        plan.hanging = false;
        plan.result("sync", hit)
    }
}

impl Plan {
    fn result(&self, action: &'static str, hit: bool) -> Result<(), BackendError> {
        if self.out_of_space {
            return Err(BackendError::OutOfSpace { action });
        }
        if self.broken || hit {
            return Err(BackendError::io(action, io::Error::other("injected fault")));
        }
        Ok(())
    }
}

/// See the module.
pub struct FaultyBackend {
    inner: Box<dyn Backend>,
    faults: Faults,
    unsynced: Vec<Op>,
}

impl FaultyBackend {
    /// Wraps `inner`; without faults set it behaves like it.
    pub fn new(inner: impl Backend, faults: Faults) -> Self {
        Self {
            inner: Box::new(inner),
            faults,
            unsynced: Vec::new(),
        }
    }

    fn pass_on(&mut self) -> Result<(), BackendError> {
        if self.unsynced.is_empty() {
            return Ok(());
        }
        self.inner.apply(&self.unsynced)?;
        self.unsynced.clear();
        Ok(())
    }
}

impl std::fmt::Debug for FaultyBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FaultyBackend({})", self.inner.name())
    }
}

impl Backend for FaultyBackend {
    fn apply(&mut self, batch: &[Op]) -> Result<(), BackendError> {
        self.faults.check_apply()?;
        if self.faults.plan().buffer {
            self.unsynced.extend_from_slice(batch);
            return Ok(());
        }
        self.pass_on()?;
        self.inner.apply(batch)
    }

    fn flush(&mut self) -> Result<(), BackendError> {
        self.faults.check_sync()?;
        self.inner.flush()
    }

    fn sync(&mut self) -> Result<(), BackendError> {
        self.faults.check_sync()?;
        self.pass_on()?;
        self.inner.sync()
    }

    fn iter(&self) -> RawIter<'_> {
        if self.unsynced.is_empty() {
            return self.inner.iter();
        }
        let mut map: BTreeMap<Vec<u8>, Vec<u8>> = match self.inner.iter().collect() {
            Ok(map) => map,
            Err(e) => return Box::new(std::iter::once(Err(e))),
        };
        for op in &self.unsynced {
            match op {
                Op::Put { key, value } => {
                    map.insert(key.clone(), value.clone());
                }
                Op::Delete { key } => {
                    map.remove(key);
                }
            }
        }
        let pairs: Vec<RawPair> = map.into_iter().collect();
        Box::new(pairs.into_iter().map(Ok))
    }

    fn size_on_disk(&self) -> Result<u64, BackendError> {
        self.inner.size_on_disk()
    }

    fn reopen(&mut self) -> Result<(), BackendError> {
        let crashed = {
            let mut plan = self.faults.plan();
            if plan.fail_reopen || plan.broken {
                return Err(BackendError::io(
                    "reopen",
                    io::Error::other("injected fault"),
                ));
            }
            std::mem::take(&mut plan.crash)
        };
        if crashed {
            self.unsynced.clear();
        }
        self.inner.reopen()
    }

    fn name(&self) -> &'static str {
        "faulty"
    }
}
