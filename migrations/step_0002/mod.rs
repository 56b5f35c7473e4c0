//! Schema 2: the agent's own state leaves table `objects` for a table of its own, and the runtime's view of a container
//! names the user that it runs as.

pub mod records;

use super::step_0001::{self, records as former};
use super::{Record, Records, Step, StepError, codec};
use records::{ContainerStatus, Fact, Pleg};

/// The step.
pub const STEP: Step = Step {
    to: 2,
    name: "the agent's own state in table facts, users of containers",
    forward,
    backward,
};

/// Tag of table `pleg`.
const PLEG: u8 = 8;
/// Tag of table `objects`.
const OBJECTS: u8 = 13;
/// Tag of table `facts`.
pub const FACTS: u8 = 20;

/// Kinds of the records that table `facts` has.
pub const KINDS: &[&str] = &[
    "apisource",
    "attached",
    "backoffends",
    "cgroupdriver",
    "claims",
    "csiplugins",
    "deviceallocations",
    "deviceplugins",
    "devices",
    "dradrivers",
    "events",
    "eventsources",
    "imagearchives",
    "imagecollection",
    "imagefiles",
    "imagepullerrors",
    "imagepullintents",
    "imagepulls",
    "kmsg",
    "leftmanifests",
    "media",
    "mounts",
    "nodestatus",
    "pressure",
    "resizepending",
    "resizes",
    "restarts",
    "shutdown",
    "shutdownmanager",
    "sizes",
    "sourceconflicts",
    "subpaths",
    "userns",
    "volumes",
];

/// Layout that the JSON of all kinds has in schema 1.
const LAYOUT: u16 = 1;

fn forward(records: Records) -> Result<Records, StepError> {
    let mut changed = Records::new();
    for (at, record) in records {
        let (at, record) = match at.0 {
            PLEG => {
                let record = with_users(&at, &record)?;
                (at, record)
            }
            OBJECTS if is_fact(&at.1) => {
                let object: former::Object = codec::decode(&at, &record, 1)?;
                let fact = Fact {
                    layout: LAYOUT,
                    mark: object.resource_version,
                    data: object.data,
                    at: object.at,
                };
                let record = codec::encode(&at, &fact, 1)?;
                ((FACTS, at.1), record)
            }
            _ => (at, record),
        };
        changed.insert(at, record);
    }
    set_schema(&mut changed, 2)?;
    Ok(changed)
}

fn backward(records: Records) -> Result<Records, StepError> {
    let mut changed = Records::new();
    for (at, record) in records {
        let (at, record) = match at.0 {
            PLEG => {
                let record = without_users(&at, &record)?;
                (at, record)
            }
            FACTS => {
                let fact: Fact = codec::decode(&at, &record, 1)?;
                // What schema 1 cannot read is absent there.
                if fact.layout != LAYOUT {
                    continue;
                }
                let object = former::Object {
                    resource_version: fact.mark,
                    encrypted: false,
                    data: fact.data,
                    at: fact.at,
                };
                let record = codec::encode(&at, &object, 1)?;
                ((OBJECTS, at.1), record)
            }
            _ => (at, record),
        };
        changed.insert(at, record);
    }
    set_schema(&mut changed, 1)?;
    Ok(changed)
}

fn is_fact(key: &str) -> bool {
    let kind = key.split_once('/').map(|(kind, _)| kind);
    kind.is_some_and(|kind| KINDS.contains(&kind))
}

fn with_users(at: &(u8, String), record: &Record) -> Result<Record, StepError> {
    let pod: former::Pleg = codec::decode(at, record, 1)?;
    let containers = pod.containers.into_iter().map(|c| ContainerStatus {
        id: c.id,
        name: c.name,
        attempt: c.attempt,
        sandbox_id: c.sandbox_id,
        state: c.state,
        created_at_ns: c.created_at_ns,
        image: c.image,
        image_ref: c.image_ref,
        hash: c.hash,
        started_at_ns: c.started_at_ns,
        finished_at_ns: c.finished_at_ns,
        exit_code: c.exit_code,
        reason: c.reason,
        message: c.message,
        log_path: c.log_path,
        user: None,
    });
    let pod = Pleg {
        containers: containers.collect(),
        uid: pod.uid,
        name: pod.name,
        namespace: pod.namespace,
        ips: pod.ips,
        sandboxes: pod.sandboxes,
    };
    codec::encode(at, &pod, 2)
}

fn without_users(at: &(u8, String), record: &Record) -> Result<Record, StepError> {
    let pod: Pleg = codec::decode(at, record, 2)?;
    let containers = pod.containers.into_iter().map(|c| former::ContainerStatus {
        id: c.id,
        name: c.name,
        attempt: c.attempt,
        sandbox_id: c.sandbox_id,
        state: c.state,
        created_at_ns: c.created_at_ns,
        image: c.image,
        image_ref: c.image_ref,
        hash: c.hash,
        started_at_ns: c.started_at_ns,
        finished_at_ns: c.finished_at_ns,
        exit_code: c.exit_code,
        reason: c.reason,
        message: c.message,
        log_path: c.log_path,
    });
    let pod = former::Pleg {
        containers: containers.collect(),
        uid: pod.uid,
        name: pod.name,
        namespace: pod.namespace,
        ips: pod.ips,
        sandboxes: pod.sandboxes,
    };
    codec::encode(at, &pod, 1)
}

pub(super) fn set_schema(records: &mut Records, schema: u32) -> Result<(), StepError> {
    let at = (step_0001::META.0, step_0001::META.1.to_owned());
    if let Some(meta) = records.get_mut(&at) {
        let mut decoded: former::Meta = codec::decode(&at, meta, 1)?;
        decoded.schema = schema;
        *meta = codec::encode(&at, &decoded, 1)?;
    }
    Ok(())
}
