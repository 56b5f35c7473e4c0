//! Schema 1: the first one. All record layouts have version 1.

pub mod records;

use super::{Records, Step, StepError};

/// The step.
pub const STEP: Step = Step {
    to: 1,
    name: "initial schema",
    forward,
    backward,
};

/// Tag of the meta table and key of its one record.
pub const META: (u8, &str) = (1, "meta");

fn forward(records: Records) -> Result<Records, StepError> {
    // Schema 0 is an empty store.
    Ok(records)
}

fn backward(_: Records) -> Result<Records, StepError> {
    Err(StepError::First)
}
