//! Schema steps: one unit per step, with the way forward, the way back, the record types of that schema
//! frozen as they were, and a golden store written by it.
//!
//! A step is a pure function from all records of one schema to all records of the next. It sees bytes,
//! decodes them with *its own* frozen types, and never uses the live record types: those change, a step
//! does not. `store::migrate` reads and writes the store around it and takes a backup first.
//!
//! To add step N:
//! 1. copy the record structs that change into `step_N/records.rs`, as they are from now on;
//! 2. write `forward` and `backward`, bump the record versions, list the step in [`STEPS`];
//! 3. write the golden store, once: `HOLDFAST_WRITE_GOLDEN=migrations/step_N/golden.tar.zst cargo test
//!    --test store_recovery golden` (it refuses to overwrite one), and add the test that reads it.
//!
//! **Invariant:** a published step is never edited. A mistake is repaired by the next step.

pub mod codec;
pub mod step_0001;
pub mod step_0002;
#[cfg(any(feature = "failpoints", feature = "fuzzing"))]
pub mod test_step;

use std::collections::BTreeMap;

/// One record: which layout its bytes have, and the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Version of the layout.
    pub version: u16,
    /// The struct, as [`codec`] writes it.
    pub payload: Vec<u8>,
}

/// All records of a store by table tag and key.
pub type Records = BTreeMap<(u8, String), Record>;

/// Why a step could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// A record does not have the layout the step begins with.
    #[error("record {key} of table {table} has version {found}, the step expects {expected}")]
    Version {
        /// Table tag.
        table: u8,
        /// Key.
        key: String,
        /// On disk.
        found: u16,
        /// What the step begins with.
        expected: u16,
    },
    /// A record does not decode or encode.
    #[error("record {key} of table {table}")]
    Codec {
        /// Table tag.
        table: u8,
        /// Key.
        key: String,
        /// The cause.
        #[source]
        source: bincode::Error,
    },
    /// There is nothing before the first schema.
    #[error("schema 1 is the first one; there is nothing to go back to")]
    First,
}

/// The step from schema `to - 1` to schema `to`, and back.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Schema it leads to.
    pub to: u32,
    /// What it changes, for `holdfast store migrate` and the logs.
    pub name: &'static str,
    /// From `to - 1` to `to`.
    pub forward: fn(Records) -> Result<Records, StepError>,
    /// From `to` to `to - 1`.
    pub backward: fn(Records) -> Result<Records, StepError>,
}

/// The steps of this binary, in order and without a gap.
pub const STEPS: &[Step] = &[step_0001::STEP, step_0002::STEP];

/// The schema this binary reads and writes.
pub const SCHEMA: u32 = STEPS.len() as u32;

/// The steps a migration may take. Other sets than [`MigrationSet::default`] are for tests.
#[derive(Clone, Copy, Debug)]
pub struct MigrationSet {
    steps: &'static [Step],
}

impl Default for MigrationSet {
    fn default() -> Self {
        Self { steps: STEPS }
    }
}

impl MigrationSet {
    /// A set of steps; step number `i` must lead to schema `i + 1`.
    pub const fn new(steps: &'static [Step]) -> Self {
        Self { steps }
    }

    /// The newest schema of the set.
    pub fn newest(&self) -> u32 {
        u32::try_from(self.steps.len()).unwrap_or(u32::MAX)
    }

    /// The step that leads to `schema`.
    pub fn step(&self, schema: u32) -> Option<&'static Step> {
        let index = usize::try_from(schema.checked_sub(1)?).ok()?;
        self.steps.get(index).filter(|step| step.to == schema)
    }
}
