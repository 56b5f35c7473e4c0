use std::collections::BTreeMap;

use k8s_openapi::api::core::v1 as api;

use super::*;
use crate::core::testkit::started;
use crate::types::ContainerId;
use crate::types::cpu_set::CpuSet;

fn state_of(keys: &[&str]) -> State {
    let mut state = State::default();
    for (version, key) in (1..).zip(keys) {
        let put = Transaction::new().put(*key, started("a", 0));
        state.apply(&put.mutations[0], version);
    }
    state
}

#[test]
fn records_are_found_by_the_beginning_of_their_key_and_in_order() {
    let state = state_of(&["u2/a", "u1/b", "u1/a", "u10/a", "u1"]);
    let keys = |prefix: &str| -> Vec<String> {
        let found = state.with_prefix::<ContainerRecord>(prefix);
        found.map(|(key, _)| key.to_string()).collect()
    };
    assert_eq!(keys("u1/"), ["u1/a", "u1/b"]);
    assert_eq!(keys("u1"), ["u1", "u1/a", "u1/b", "u10/a"]);
    assert_eq!(keys("u3"), Vec::<String>::new());
    assert_eq!(keys("").len(), 5);
}

#[test]
fn records_are_counted_by_table() {
    let counts = state_of(&["u1/a", "u1/b"]).counts();
    assert_eq!(counts["containers"], 2);
    assert_eq!(counts["pods"], 0);
    assert_eq!(counts.len(), Table::ALL.len());
}

#[test]
fn a_record_has_the_version_it_was_written_at() {
    let mut state = state_of(&["u1/a", "u1/b"]);
    let version = |state: &State, key: &str| state.get::<ContainerRecord>(key).map(|v| v.version);
    assert_eq!(version(&state, "u1/b"), Some(2));
    let put = Transaction::new().put("u1/a", started("a", 1));
    state.apply(&put.mutations[0], 9);
    assert_eq!(version(&state, "u1/a"), Some(9));
    assert_eq!(version(&state, "u1/c"), None);
}

/// Classes of the records that have to be on the disk before they have an effect, and of those that may be lost with
/// the last second before a power loss.
#[test]
fn what_must_survive_a_power_cut_is_durable_and_what_is_found_again_is_not() {
    use Durability::{Durable, Relaxed};
    let at = crate::core::testkit::at;
    let meta = MetaRecord {
        schema: 1,
        node_name: "n".to_owned(),
        machine_id: String::new(),
        boot: crate::types::boot::BootIdentity {
            kernel_boot_id: "b".to_owned(),
            pid1_start: 1,
            runtime_state: String::new(),
        },
        generation: 1,
        clean_shutdown: false,
        heartbeat: at(1),
        epoch: EpochRecord {
            number: 1,
            since: at(0),
            reason: EpochReason::Fresh,
        },
    };
    let beaten = MetaRecord {
        heartbeat: at(2),
        ..meta.clone()
    };
    let ended = MetaRecord {
        clean_shutdown: true,
        ..beaten.clone()
    };
    assert_eq!(MetaRecord::durability(None, Some(&meta)), Durable);
    assert_eq!(MetaRecord::durability(Some(&meta), Some(&beaten)), Relaxed);
    assert_eq!(MetaRecord::durability(Some(&meta), Some(&ended)), Durable);
    assert_eq!(MetaRecord::durability(Some(&meta), None), Durable);

    let image = ImageRecord {
        pulled_ref: None,
        backoffs: BTreeMap::new(),
        first_seen: at(1),
        last_used: at(1),
    };
    let used = ImageRecord {
        last_used: at(2),
        ..image.clone()
    };
    let pulled = ImageRecord {
        pulled_ref: Some("sha256:1".to_owned()),
        ..image.clone()
    };
    let backoff = BackoffRecord {
        duration_ms: 10_000,
        since: at(1),
    };
    let waiting = ImageRecord {
        backoffs: [("u1".into(), backoff)].into(),
        ..image.clone()
    };
    for (before, after, want) in [
        (None, Some(&image), Relaxed),
        (None, Some(&pulled), Durable),
        (None, Some(&waiting), Durable),
        (Some(&image), Some(&used), Relaxed),
        (Some(&image), Some(&pulled), Durable),
        (Some(&image), Some(&waiting), Durable),
        (Some(&waiting), Some(&image), Durable),
        (Some(&pulled), None, Relaxed),
    ] {
        let got = ImageRecord::durability(before, after);
        assert_eq!(got, want, "{before:?} to {after:?}");
    }

    let status = |phase: &str, finished| StatusRecord {
        name: "web".to_owned(),
        namespace: "ns".to_owned(),
        status: crate::types::Json(std::sync::Arc::new(api::PodStatus {
            phase: Some(phase.to_owned()),
            ..api::PodStatus::default()
        })),
        version: 1,
        acknowledged: 0,
        at: at(1),
        finished,
    };
    for (phase, finished, want) in [
        ("Running", false, Relaxed),
        ("Running", true, Durable),
        ("Succeeded", false, Durable),
        ("Failed", false, Durable),
    ] {
        let new = status(phase, finished);
        assert_eq!(StatusRecord::durability(None, Some(&new)), want, "{phase}");
    }
    let last = status("Failed", true);
    assert_eq!(StatusRecord::durability(Some(&last), None), Relaxed);
}

#[test]
fn what_a_container_may_use_in_addition_is_durable() {
    use Durability::{Durable, Relaxed};
    let may_use = |id: &str, cpus: &str| CpusetRecord {
        container_id: ContainerId::new(id),
        cpus: cpus.parse().unwrap(),
        nodes: CpuSet::new(),
    };
    let old = may_use("a", "0-1");
    for (new, class) in [
        (may_use("a", "0"), Relaxed),
        (may_use("a", "0-2"), Durable),
        (may_use("b", "0"), Durable),
    ] {
        let found = CpusetRecord::durability(Some(&old), Some(&new));
        assert_eq!(found, class, "{new:?}");
    }
    assert_eq!(CpusetRecord::durability(None, Some(&old)), Durable);
    assert_eq!(CpusetRecord::durability(Some(&old), None), Relaxed);
}
