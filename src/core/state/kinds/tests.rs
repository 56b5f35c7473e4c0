use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::*;
use crate::core::state::Mutation;
use crate::core::testkit::at;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Note {
    text: String,
}

impl Kind for Note {
    const DECLARED: Declared = ATTACHED;
}

fn note(text: &str) -> Note {
    Note {
        text: text.to_owned(),
    }
}

fn apply(state: &mut State, transaction: &Transaction) -> Durability {
    let applied = transaction.mutations.iter().map(|m| state.apply(m, 1));
    applied.max().unwrap_or(Relaxed)
}

/// A record of any content, in the table of its kind.
fn raw(kind: &Declared, data: &[u8]) -> AnyRecord {
    let data = data.to_vec();
    match kind.table() {
        Table::Facts => AnyRecord::Facts(FactRecord {
            data,
            ..FactRecord::of("", at(1))
        }),
        _ => AnyRecord::Objects(ObjectRecord {
            resource_version: String::new(),
            encrypted: false,
            data,
            at: at(1),
        }),
    }
}

#[test]
fn names_are_unique_and_stand_before_the_slash() {
    let names: BTreeSet<&str> = ALL.iter().map(|kind| kind.name).collect();
    assert_eq!(names.len(), ALL.len());
    for kind in ALL {
        assert_eq!(kind.prefix, format!("{}/", kind.name));
        assert_eq!(of_key(&format!("{}a/b", kind.prefix)), Some(kind));
    }
    assert_eq!(of_key("unheard/a/b"), None);
    assert_eq!(of_key("attached"), None);
}

#[test]
fn the_kind_alone_decides_how_durable_a_change_is() {
    for kind in ALL {
        let key = format!("{}ns/name", kind.prefix);
        let mut state = State::default();
        let put = Transaction::new().put_any(&key, raw(kind, b"x"));
        assert_eq!(apply(&mut state, &put), kind.class, "put of {key}");
        let delete = Transaction::new().delete_from(kind.table(), &key);
        assert_eq!(apply(&mut state, &delete), kind.class, "delete of {key}");
        // Nothing is gone, so nothing has to reach the disk.
        assert_eq!(apply(&mut state, &delete), Relaxed, "second delete");
    }
}

#[test]
fn what_is_put_is_found_again_under_the_key_and_as_the_json_of_earlier_releases() {
    let key = Key::<Note>::new("", "5a");
    assert_eq!(key, "attached//5a");
    let mut state = State::default();
    assert!(state.stored(&key).is_none());
    let put = Transaction::new().put_object(&key, &note("a"), at(7));
    apply(&mut state, &put);
    let record = state.record::<FactRecord>("attached//5a").unwrap();
    assert_eq!(record.data, br#"{"text":"a"}"#);
    assert_eq!((record.layout, record.at), (1, at(7)));
    assert_eq!(state.object(&key), Some(note("a")));
    let stored: Vec<_> = state.all_stored::<Note>().collect();
    assert_eq!(stored.len(), 1);
    assert_eq!(stored[0].key(), "attached//5a");
    assert_eq!(stored[0].place(), ("", "5a"));
    assert!(stored[0].is(&note("a")) && !stored[0].is(&note("b")));
    assert_eq!((stored[0].mark(), stored[0].at()), ("", at(7)));

    let put = Transaction::new().put_marked(&key, "9", &note("b"), at(8));
    apply(&mut state, &put);
    assert_eq!(state.stored(&key).unwrap().mark(), "9");
    let stale = Transaction::new().expect_object(&State::default(), &key);
    assert!(stale.stale_on(&state).is_some());
    let current = Transaction::new().expect_object(&state, &key);
    assert!(current.stale_on(&state).is_none());
    apply(&mut state, &Transaction::new().delete_object(&key));
    assert!(state.stored(&key).is_none());
}

#[test]
fn content_is_read_once_for_each_version_of_a_record() {
    let key = Key::<Note>::new("", "5a");
    let mut state = State::default();
    apply(
        &mut state,
        &Transaction::new().put_object(&key, &note("a"), at(7)),
    );
    let first = state.stored(&key).unwrap().shared().unwrap();
    assert_eq!(*first, note("a"));
    let older = state.clone();
    let again = state.stored(&key).unwrap().shared().unwrap();
    assert!(Arc::ptr_eq(&first, &again));
    apply(
        &mut state,
        &Transaction::new().put_object(&key, &note("b"), at(8)),
    );
    assert_eq!(*state.stored(&key).unwrap().shared().unwrap(), note("b"));
    let before = older.stored(&key).unwrap().shared().unwrap();
    assert!(Arc::ptr_eq(&first, &before), "a snapshot keeps its own");

    let damaged = raw(&ATTACHED, b"{");
    apply(&mut state, &Transaction::new().put_any(&key, damaged));
    for _ in 0..2 {
        let error = state.stored(&key).unwrap().shared().unwrap_err();
        assert_eq!(error.key, "attached//5a");
    }
}

#[test]
fn a_damaged_record_is_an_error_to_who_reads_it_and_absent_where_its_kind_says_so() {
    let mut state = State::default();
    let damaged = raw(&ATTACHED, b"{");
    apply(
        &mut state,
        &Transaction::new().put_any("attached//5a", damaged),
    );
    let key = Key::<Note>::new("", "5a");
    let error = state.stored(&key).unwrap().read().unwrap_err();
    assert_eq!(
        error.to_string(),
        "read record attached//5a of table facts: EOF while parsing an object at line 1 column 1"
    );
    assert_eq!(state.object(&key), None);
}

#[test]
fn content_of_a_newer_layout_is_not_guessed_at() {
    let newer = FactRecord {
        layout: 2,
        ..FactRecord::of(&note("a"), at(1))
    };
    let mut state = State::default();
    apply(&mut state, &Transaction::new().put("attached//5a", newer));
    let key = Key::<Note>::new("", "5a");
    let error = state.stored(&key).unwrap().read().unwrap_err();
    assert_eq!(
        error.to_string(),
        "read record attached//5a of table facts: it has layout 2, 1 is known"
    );
}

#[test]
fn the_agents_own_state_is_no_object_of_the_api_server() {
    for kind in ALL {
        let expected = if kind.content == Content::Own {
            Table::Facts
        } else {
            Table::Objects
        };
        assert_eq!(kind.table(), expected, "{}", kind.name);
        assert!(!(kind.is_of_api() && kind.table() == Table::Facts));
    }
    let encrypted = [SECRETS, TOKENS, POD_CERTIFICATES];
    assert!(encrypted.iter().all(|kind| kind.table() == Table::Objects));
}

#[test]
fn everything_that_belongs_to_a_pod_is_forgotten_with_it_and_nothing_else() {
    let mut state = State::default();
    let mut owned = BTreeSet::new();
    for kind in ALL {
        for (namespace, uid) in [("ns", "u1"), ("ns", "u11"), ("other", "u2")] {
            let key = match kind.owner {
                Owner::Pod(Part::Namespace) => format!("{}{uid}/a/b", kind.prefix),
                Owner::Pod(Part::Name) if *kind == TOKENS => {
                    format!("{}{namespace}/{uid}/hash", kind.prefix)
                }
                _ => format!("{}{namespace}/{uid}", kind.prefix),
            };
            if uid == "u1" && matches!(kind.owner, Owner::Pod(_)) {
                assert_eq!(kind.pod_of(&key), Some("u1"), "{key}");
                owned.insert(key.clone());
            }
            let put = Transaction::new().put_any(&key, raw(kind, b"x"));
            apply(&mut state, &put);
        }
    }
    // Of no pod, although its kind belongs to pods.
    let turn = Transaction::new().put_any("resizes//turn", raw(&RESIZES, b"x"));
    apply(&mut state, &turn);
    assert_eq!(RESIZES.pod_of("resizes//turn"), None);
    let forgotten = forget_pod(&state, "ns", &"u1".into());
    let gone: BTreeSet<String> = (forgotten.mutations.iter())
        .map(|mutation| match mutation {
            Mutation::Delete { key, .. } => key.to_string(),
            Mutation::Put { key, .. } => panic!("{key} is put"),
        })
        .collect();
    assert_eq!(gone, owned);
}
