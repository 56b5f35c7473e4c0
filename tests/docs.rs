//! The documents do not point into the void: relative links lead to files and headings that exist, and paths
//! written as code (`src/…`, `tests/…`, `hack/…`, …) are there.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests may panic"
)]

use std::fs;
use std::path::{Path, PathBuf};

/// Directories whose mention in backticks must be true.
const OWN: &[&str] = &[
    "src/",
    "tests/",
    "hack/",
    "docs/",
    "examples/",
    "contrib/",
    "benches/",
    "migrations/",
    ".ci/",
];

fn documents(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for dir in ["", "docs", "examples", "contrib", "migrations"] {
        let Ok(entries) = fs::read_dir(root.join(dir)) else {
            continue;
        };
        found.extend(
            entries
                .map(|entry| entry.unwrap().path())
                .filter(|path| path.extension().is_some_and(|e| e == "md")),
        );
    }
    found.sort();
    found
}

/// Lines outside fenced code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            return None;
        }
        (!fenced).then_some((index + 1, line))
    })
}

/// Targets of `[text](target)`.
fn links(line: &str) -> Vec<&str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
        .collect()
}

fn code_spans(line: &str) -> Vec<&str> {
    line.split('`').skip(1).step_by(2).collect()
}

/// The fragment a heading gets when the document is shown as a page.
fn fragment(heading: &str) -> String {
    heading
        .trim_start_matches('#')
        .trim()
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

fn has_heading(text: &str, wanted: &str) -> bool {
    prose(text).any(|(_, line)| line.starts_with('#') && fragment(line) == wanted)
}

fn broken_links(root: &Path, document: &Path, text: &str) -> Vec<String> {
    let dir = document.parent().unwrap();
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        let at = || {
            format!(
                "{}:{number}",
                document.strip_prefix(root).unwrap().display()
            )
        };
        for target in links(line) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (path, heading) = target.split_once('#').unwrap_or((target, ""));
            let file = dir.join(path);
            if !path.is_empty() && !file.exists() {
                found.push(format!("{}: {target} does not exist", at()));
                continue;
            }
            if heading.is_empty() {
                continue;
            }
            let other = (!path.is_empty()).then(|| fs::read_to_string(&file).unwrap_or_default());
            if !has_heading(other.as_deref().unwrap_or(text), heading) {
                found.push(format!("{}: {target}: no such heading", at()));
            }
        }
        for span in code_spans(line) {
            let is_path = OWN.iter().any(|own| span.starts_with(own))
                && span
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c));
            if is_path && !root.join(span).exists() {
                found.push(format!("{}: `{span}` does not exist", at()));
            }
        }
    }
    found
}

#[test]
fn links_and_paths_in_documents_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let documents = documents(root);
    assert!(documents.len() >= 5, "{documents:?}");
    let found: Vec<String> = documents
        .iter()
        .flat_map(|document| broken_links(root, document, &fs::read_to_string(document).unwrap()))
        .collect();
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn broken_links_and_paths_are_found() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let check = |text: &str| broken_links(root, &root.join("docs/x.md"), text);
    for broken in [
        "see [a](nothing.md)",
        "see [a](../Cargo.toml) and [b](../nothing)",
        "see [a](#no-such-heading)\n# Heading",
        "in `src/nothing.rs`",
        "in `src/lib.rs` and `hack/nothing.sh`",
    ] {
        assert_eq!(check(broken).len(), 1, "{broken}: {:?}", check(broken));
    }
    for fine in [
        "see [a](../Cargo.toml), [b](https://example.com/x), [c](#a-heading)\n## A `heading`",
        "```\n[a](nothing.md) `src/nothing.rs`\n```",
        "in `src/lib.rs`, `src/<module>/mod.rs`",
    ] {
        assert_eq!(check(fine), Vec::<String>::new(), "{fine}");
    }
}

#[test]
fn index_lists_every_document() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let index = fs::read_to_string(docs.join("README.md")).unwrap();
    for entry in fs::read_dir(&docs).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let listed = name == "README.md" || index.contains(&format!("]({name})"));
        assert!(listed, "docs/README.md does not list {name}");
    }
}
