//! Helpers shared by the tests of events.

use std::time::Duration;

use crate::types::{BootId, Event, EventType, PodRef, Stamp};

/// Returns the stamp of that many seconds after the boot, when the test's time begins.
pub(super) fn at(seconds: i64) -> Stamp {
    Stamp {
        boot: BootId(1),
        boottime_ms: seconds * 1000,
        wall_ms: seconds * 1000,
    }
}

/// A container of a pod is restarted slowly.
pub(super) fn event(pod: &str, message: &str) -> Event {
    Event {
        pod: Some(PodRef {
            uid: format!("uid-{pod}").into(),
            name: pod.into(),
            namespace: "shop".into(),
        }),
        container: Some("main".into()),
        kind: EventType::Warning,
        reason: "BackOff".into(),
        message: message.into(),
        annotations: Default::default(),
    }
}

pub(super) async fn pass(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}
