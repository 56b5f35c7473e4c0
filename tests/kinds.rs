//! The kinds of records in the tables `objects` and `facts` are documented as they are declared: in ARCHITECTURE.md for developers, in
//! docs/dump.md for operators.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests may panic"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use holdfast::core::state::Durability;
use holdfast::core::state::kinds::{ALL, Owner};

fn declared() -> BTreeSet<String> {
    ALL.iter().map(|kind| kind.name.to_owned()).collect()
}

/// Returns the rows of the first table below a heading, without its head: the cells of each.
fn table(document: &str, heading: &str) -> Vec<Vec<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(document);
    let text = fs::read_to_string(path).unwrap();
    let mut lines = text.lines().skip_while(|line| *line != heading);
    assert!(lines.next().is_some(), "{document} has no {heading:?}");
    let section = lines.take_while(|line| !line.starts_with('#'));
    let rows = section.filter(|line| line.starts_with('|'));
    let rows = rows.map(|row| row.trim_matches('|').split('|'));
    let cells = rows.map(|cells| cells.map(|cell| cell.trim().to_owned()).collect());
    cells.skip(2).collect()
}

/// Returns what is written as code, but in parentheses.
fn code(cell: &str) -> Vec<&str> {
    let mut depth = 0_i32;
    let outside = cell.split('`').enumerate().filter_map(|(index, part)| {
        if index % 2 == 1 {
            return (depth == 0).then_some(part);
        }
        depth += i32::try_from(part.matches('(').count()).unwrap();
        depth -= i32::try_from(part.matches(')').count()).unwrap();
        None
    });
    outside.collect()
}

#[test]
fn architecture_has_a_row_for_every_kind_with_its_class_and_its_owner() {
    let mut durable: BTreeMap<String, bool> = BTreeMap::new();
    let mut of_pods: BTreeMap<String, bool> = BTreeMap::new();
    for row in table("ARCHITECTURE.md", "## Kinds of records") {
        let [key, _, writer, deleted] = &row[..] else {
            panic!("not four cells: {row:?}");
        };
        for key in code(key) {
            let (kind, _) = key.split_once('/').unwrap();
            *durable.entry(kind.to_owned()).or_default() |= writer.contains("durable");
            *of_pods.entry(kind.to_owned()).or_default() |= deleted.contains("with the pod");
        }
    }
    let documented: BTreeSet<String> = durable.keys().cloned().collect();
    assert_eq!(
        documented,
        declared(),
        "left: ARCHITECTURE.md, right: src/core/state/kinds.rs"
    );
    for kind in ALL {
        let is_durable = kind.class == Durability::Durable;
        assert_eq!(
            durable[kind.name], is_durable,
            "the row of {} says \"durable\" in \"written by\" if its declaration does",
            kind.name
        );
        let is_of_pod = matches!(kind.owner, Owner::Pod(_));
        assert_eq!(
            of_pods[kind.name], is_of_pod,
            "the row of {} says \"with the pod\" in \"deleted\" if a pod owns it",
            kind.name
        );
    }
}

#[test]
fn the_documentation_of_dump_has_a_row_for_every_kind() {
    let rows = table("docs/dump.md", "### objects");
    let documented: Vec<String> = rows
        .iter()
        .flat_map(|row| code(&row[0]))
        .map(str::to_owned)
        .collect();
    let kinds: BTreeSet<String> = documented.iter().cloned().collect();
    assert_eq!(kinds.len(), documented.len(), "a kind has two rows");
    assert_eq!(
        kinds,
        declared(),
        "left: docs/dump.md, right: src/core/state/kinds.rs"
    );
}

#[test]
fn code_in_parentheses_is_no_kind() {
    let cell = "`volumes` (`namespace` is the UID, `name` it), `devices` (`name` is `x`)";
    assert_eq!(code(cell), ["volumes", "devices"]);
}
