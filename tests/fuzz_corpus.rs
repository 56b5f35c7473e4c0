//! The corpora of the fuzz targets: every file of `fuzz/corpus/<target>` goes through its target. `make fuzz` looks for
//! new ones.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests may panic"
)]

use std::collections::BTreeSet;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use holdfast::fuzzing::TARGETS;

/// Longest file of a corpus, bytes: many small files say more than a few large ones.
const LONGEST: u64 = 4096;

fn directory(of: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz").join(of)
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn names(dir: &Path) -> BTreeSet<String> {
    let stem = |path: &PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
    files(dir).iter().map(stem).collect()
}

#[test]
fn every_file_of_every_corpus_passes_its_target() {
    let mut failed = Vec::new();
    for (name, target) in TARGETS {
        let corpus = files(&directory("corpus").join(name));
        assert!(corpus.len() >= 5, "the corpus of {name} is too small");
        for file in corpus {
            let data = fs::read(&file).unwrap();
            assert!(
                data.len() as u64 <= LONGEST,
                "{} is too long",
                file.display()
            );
            if catch_unwind(AssertUnwindSafe(|| target(&data))).is_err() {
                failed.push(file);
            }
        }
    }
    assert!(failed.is_empty(), "these inputs fail: {failed:#?}");
}

#[test]
fn every_target_has_a_program_and_a_corpus_and_nothing_else_does() {
    let targets: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(names(&directory("src/bin")), targets);
    assert_eq!(names(&directory("corpus")), targets);
    for name in names(&directory("dict")) {
        assert!(
            targets.contains(&name),
            "{name} has a dictionary and no target"
        );
    }
}
