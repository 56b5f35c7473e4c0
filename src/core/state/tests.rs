use super::*;
use crate::core::testkit::started;

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
