//! Schema 3 of the tests: a step that no release has. Crash-test builds of the binary take it when told to
//! be a newer one, so that upgrade and downgrade are tested with the program itself.
//!
//! Containers gain a counter that is made from the record on the way up and dropped on the way down.

use serde::{Deserialize, Serialize};

use super::{MigrationSet, Record, Records, Step, StepError, codec, step_0001, step_0002};
use step_0002::set_schema;

/// The steps of the newer binary.
pub const NEWER: MigrationSet = MigrationSet::new(&[
    step_0001::STEP,
    step_0002::STEP,
    Step {
        to: 3,
        name: "count restarts seen (test only)",
        forward,
        backward,
    },
]);

/// Tag of the containers table.
const CONTAINERS: u8 = 7;

#[derive(Serialize, Deserialize)]
struct Container {
    v1: step_0001::records::Container,
    restarts_seen: u64,
}

fn forward(mut records: Records) -> Result<Records, StepError> {
    each_container(&mut records, |at, record| {
        let v1: step_0001::records::Container = codec::decode(at, record, 1)?;
        let restarts_seen = u64::from(v1.restart_count);
        codec::encode(at, &Container { v1, restarts_seen }, 2)
    })?;
    set_schema(&mut records, 3)?;
    Ok(records)
}

fn backward(mut records: Records) -> Result<Records, StepError> {
    each_container(&mut records, |at, record| {
        let v2: Container = codec::decode(at, record, 2)?;
        codec::encode(at, &v2.v1, 1)
    })?;
    set_schema(&mut records, 2)?;
    Ok(records)
}

fn each_container(
    records: &mut Records,
    map: impl Fn(&(u8, String), &Record) -> Result<Record, StepError>,
) -> Result<(), StepError> {
    for (at, record) in records.iter_mut().filter(|(at, _)| at.0 == CONTAINERS) {
        *record = map(at, record)?;
    }
    Ok(())
}
