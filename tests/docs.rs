//! The documents do not point into the void: relative links lead to files and headings that exist, paths
//! written as code (`src/…`, `tests/…`, `hack/…`, …) are there, and so are the tests that documents name. Commands are run by a
//! test or marked, the site has every page, and tests cite every invariant of ARCHITECTURE.md.
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

/// Tests have names of several words.
fn is_test_name(span: &str) -> bool {
    let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    span.chars().all(word) && span.matches('_').count() >= 3
}

/// How many tests a document names, each behind the file that has it, and which of them are not there.
fn named_tests(root: &Path, text: &str) -> (usize, Vec<String>) {
    let (mut named, mut missing) = (0, Vec::new());
    for (number, line) in prose(text) {
        let mut source = String::new();
        for span in code_spans(line) {
            if span.ends_with(".rs") {
                source = fs::read_to_string(root.join(span)).unwrap_or_default();
            } else if is_test_name(span) {
                named += 1;
                if !source.contains(&format!("fn {span}(")) {
                    missing.push(format!(
                        "line {number}: `{span}` is not in the file before it"
                    ));
                }
            }
        }
    }
    (named, missing)
}

#[test]
fn tests_that_the_security_document_names_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("docs/security.md")).unwrap();
    let (named, missing) = named_tests(root, &text);
    assert!(named > 50, "{named}");
    assert!(missing.is_empty(), "\n{}", missing.join("\n"));
}

#[test]
fn tests_that_do_not_exist_are_found() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let check = |text: &str| named_tests(root, text).1.len();
    assert_eq!(
        check("`tests/docs.rs` `tests_that_do_not_exist_are_found`"),
        0
    );
    assert_eq!(check("`tests/docs.rs` `a_test_that_nobody_wrote`"), 1);
    assert_eq!(check("`tests_that_do_not_exist_are_found`"), 1);
    assert_eq!(check("`src/lib.rs` `tests_that_do_not_exist_are_found`"), 1);
    assert_eq!(check("`no_new_privs` and `--a-flag`"), 0);
}

/// Documents that name tests by their program and their path in it.
const NAMING_TESTS: &[&str] = &["CHANGELOG.md", "docs/testing.md", "tests/flaky.md"];

/// Modules of tests without a file of their own: written inside another one, or made by a macro.
const WITHOUT_FILE: &[&str] = &["tests", "fake", "real", "sled", "memory", "faulty"];

/// The program of a test and the test's path in it, as in `lib pleg::tests::a_list_that_fails_loses_no_request`.
fn program_and_path(span: &str) -> Option<(&str, &str)> {
    let (program, path) = span.split_once(' ')?;
    let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let is_path = path
        .split("::")
        .all(|part| !part.is_empty() && part.chars().all(word));
    let name = path.rsplit("::").next()?;
    (program.chars().all(word) && is_path && is_test_name(name)).then_some((program, path))
}

/// The Rust files below the sources and the tests: path from the root, and text.
fn rust_files(root: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut open = vec![root.join("src"), root.join("tests")];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let file = path.strip_prefix(root).unwrap().display().to_string();
                found.push((file, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    found
}

/// Returns the part of a file's path that tells the module, when the file belongs to the program.
fn place_in<'f>(program: &str, file: &'f str) -> Option<&'f str> {
    let file = file.strip_suffix(".rs")?;
    match program {
        "lib" => file.strip_prefix("src/"),
        "testkit" => file.strip_prefix("tests/testkit/src/"),
        _ => {
            let rest = file.strip_prefix("tests/")?.strip_prefix(program)?;
            (rest.is_empty() || rest.starts_with('/')).then_some(rest)
        }
    }
}

/// Whether a file of the program has the test. The innermost module that has a file must be named in the file's path, so that
/// a test that moves is noticed.
fn has_test(files: &[(String, String)], program: &str, path: &str) -> bool {
    let (modules, name) = path.rsplit_once("::").unwrap_or(("", path));
    let module = modules
        .rsplit("::")
        .find(|module| !module.is_empty() && !WITHOUT_FILE.contains(module));
    let is_module =
        |part: &str| module.is_none_or(|m| part == m || part.strip_suffix("_tests") == Some(m));
    let function = format!("fn {name}(");
    files.iter().any(|(file, text)| {
        place_in(program, file).is_some_and(|place| place.split('/').any(is_module))
            && text.contains(&function)
    })
}

/// How many tests a document names with their program, and which of them are not there.
fn listed_tests(files: &[(String, String)], text: &str) -> (usize, Vec<String>) {
    let (mut listed, mut missing) = (0, Vec::new());
    for (number, line) in prose(text) {
        for span in code_spans(line) {
            let Some((program, path)) = program_and_path(span) else {
                continue;
            };
            listed += 1;
            if !has_test(files, program, path) {
                missing.push(format!("line {number}: `{span}` does not exist"));
            }
        }
    }
    (listed, missing)
}

#[test]
fn tests_that_documents_name_with_their_program_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = rust_files(root);
    let mut missing = Vec::new();
    for document in NAMING_TESTS {
        let text = fs::read_to_string(root.join(document)).unwrap();
        let (listed, absent) = listed_tests(&files, &text);
        assert!(listed > 50 || *document != "CHANGELOG.md", "{listed}");
        missing.extend(absent.iter().map(|told| format!("{document}: {told}")));
    }
    assert!(missing.is_empty(), "\n{}", missing.join("\n"));
}

#[test]
fn tests_that_do_not_exist_in_their_program_are_found() {
    let files = rust_files(Path::new(env!("CARGO_MANIFEST_DIR")));
    let listed = |text| {
        let (listed, missing) = listed_tests(&files, text);
        (listed, missing.len())
    };
    for text in [
        "`docs tests_that_documents_name_with_their_program_exist`",
        "`lib pleg::agenda::tests::many_pods_are_listed_together`",
        "`store_contract suite::sled::receipts_tell_the_version_on_disk`",
        "`api_contract fake::names_are_unique_and_may_be_generated`",
    ] {
        assert_eq!(listed(text), (1, 0), "{text}");
    }
    for text in [
        "`docs a_test_that_nobody_wrote`",
        "`lib pleg::cache::tests::many_pods_are_listed_together`",
        "`agent_sim pleg::agenda::tests::many_pods_are_listed_together`",
        "`doc tests_that_documents_name_with_their_program_exist`",
    ] {
        assert_eq!(listed(text), (1, 1), "{text}");
    }
    for text in [
        "`kubectl logs --tail`",
        "`holdfast dump images`",
        "`kubelet_pod_start_duration_seconds`",
    ] {
        assert_eq!(listed(text), (0, 0), "{text}");
    }
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

/// Pages of docs/, without the list of the site's chapters.
fn pages(root: &Path) -> Vec<String> {
    let entries = fs::read_dir(root.join("docs")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names
        .filter(|name| name.ends_with(".md") && name != "SUMMARY.md")
        .collect()
}

#[test]
fn index_lists_every_document() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let index = fs::read_to_string(root.join("docs/README.md")).unwrap();
    for name in pages(root) {
        let listed = name == "README.md" || index.contains(&format!("]({name})"));
        assert!(listed, "docs/README.md does not list {name}");
    }
}

#[test]
fn site_has_every_document_once() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let summary = fs::read_to_string(root.join("docs/SUMMARY.md")).unwrap();
    let chapters: Vec<&str> = summary.lines().flat_map(links).collect();
    let of_the_top = documents(root)
        .into_iter()
        .filter(|path| path.parent() == Some(root))
        .map(|path| format!("../{}", path.file_name().unwrap().to_str().unwrap()));
    for name in pages(root).into_iter().chain(of_the_top) {
        let times = chapters.iter().filter(|chapter| **chapter == name).count();
        assert_eq!(times, 1, "docs/SUMMARY.md lists {name} {times} times");
    }
}

/// A fenced block of a document: line of its fence, language, content, and the mark before it or at the document's top.
struct Block<'t> {
    line: usize,
    language: &'t str,
    content: Vec<&'t str>,
    mark: Option<&'t str>,
}

/// What a comment says that marks the commands of a block.
fn mark(line: &str) -> Option<&str> {
    let inner = line.trim().strip_prefix("<!-- ")?.strip_suffix(" -->")?;
    (inner.starts_with("run by: ") || inner.starts_with("not run: ")).then_some(inner)
}

fn blocks(text: &str) -> Vec<Block<'_>> {
    let of_page = text.lines().next().and_then(mark);
    let (mut blocks, mut open, mut before) = (Vec::<Block<'_>>::new(), false, "");
    for (index, line) in text.lines().enumerate() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            if !open {
                blocks.push(Block {
                    line: index + 1,
                    language,
                    content: Vec::new(),
                    mark: mark(before).or(of_page),
                });
            }
            open = !open;
        } else if open {
            blocks.last_mut().unwrap().content.push(line);
        }
        before = line;
    }
    blocks
}

/// Programs that documents tell readers to run.
const PROGRAMS: &[&str] = &[
    "apt",
    "curl",
    "ctr",
    "docker",
    "findmnt",
    "go",
    "holdfast",
    "kubectl",
    "make",
    "openssl",
    "systemctl",
];

/// What is wrong with the blocks of a document: commands that are neither run by a test nor marked as not run.
fn unmarked(files: &[(String, String)], gate: &str, text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    for block in blocks(text) {
        let at = format!("line {}", block.line);
        let first = |line: &&str| {
            line.split_whitespace()
                .next()
                .unwrap_or_default()
                .to_owned()
        };
        if block.language.is_empty() {
            let mut words = block.content.iter().map(first);
            if let Some(program) = words.find(|word| PROGRAMS.contains(&word.as_str())) {
                wrong.push(format!(
                    "{at}: a block that runs {program} is no block of `sh`"
                ));
            }
        }
        if block.language != "sh" {
            continue;
        }
        let Some(mark) = block.mark else {
            wrong.push(format!("{at}: commands without `run by` or `not run`"));
            continue;
        };
        if let Some(runner) = mark.strip_prefix("run by: ") {
            let is_phase =
                runner.starts_with("make ") && gate.contains(&format!("phase \"{runner}\""));
            let is_test = runner
                .split_once(' ')
                .is_some_and(|(program, path)| has_test(files, program, path));
            if !is_phase && !is_test {
                wrong.push(format!("{at}: there is no `{runner}` that could run it"));
            }
        }
    }
    wrong
}

#[test]
fn commands_in_documents_are_run_or_marked() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = rust_files(root);
    let gate = fs::read_to_string(root.join("hack/gate.sh")).unwrap();
    let mut wrong = Vec::new();
    for document in documents(root) {
        let text = fs::read_to_string(&document).unwrap();
        let name = document.strip_prefix(root).unwrap().display();
        let found = unmarked(&files, &gate, &text);
        wrong.extend(found.iter().map(|what| format!("{name}: {what}")));
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn commands_that_are_neither_run_nor_marked_are_found() {
    let files = rust_files(Path::new(env!("CARGO_MANIFEST_DIR")));
    let check = |text: &str| unmarked(&files, "phase \"make demo\" 150", text).len();
    let own = "docs commands_that_are_neither_run_nor_marked_are_found";
    for fine in [
        "```sh\nls\n```".replace("```sh", "<!-- not run: it needs a cluster -->\n```sh"),
        format!("<!-- run by: {own} -->\n```sh\nls\n```"),
        format!("<!-- run by: {own} -->\n# Page\n\n```sh\nls\n```\n\n```sh\nls\n```"),
        "<!-- run by: make demo -->\n```sh\nmake demo\n```".to_owned(),
        "```\nsome output\n```\n```json\n{}\n```".to_owned(),
    ] {
        assert_eq!(check(&fine), 0, "{fine}");
    }
    for wrong in [
        "```sh\nls\n```",
        "<!-- a comment -->\n```sh\nls\n```",
        "<!-- run by: make coffee -->\n```sh\nmake coffee\n```",
        "<!-- run by: docs no_test_of_that_name -->\n```sh\nls\n```",
        "```\nholdfast dump\n```",
    ] {
        assert_eq!(check(wrong), 1, "{wrong}");
    }
}

/// IDs of invariants in a line, like `POD-3`.
fn invariants(line: &str) -> Vec<&str> {
    const GROUPS: &[&str] = &["CORE", "POD", "IMG", "VOL", "STORE", "API", "BOOT", "START"];
    line.split(|c: char| !c.is_ascii_alphanumeric() && c != '-')
        .filter(|word| {
            word.split_once('-').is_some_and(|(group, number)| {
                GROUPS.contains(&group)
                    && !number.is_empty()
                    && number.chars().all(|c| c.is_ascii_digit())
            })
        })
        .collect()
}

/// IDs in the comments that stand directly before a test. The flag is whether they do.
fn cited(text: &str) -> Vec<(&str, bool)> {
    let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let Some(comment) = line.strip_prefix("//") else {
            continue;
        };
        let is_head = |line: &&&str| line.starts_with("//") || line.starts_with("#[");
        let head = lines[index..].iter().take_while(is_head);
        let of_test = head
            .into_iter()
            .any(|line| line.starts_with("#[test]") || line.starts_with("#[tokio::test"));
        found.extend(invariants(comment).into_iter().map(|id| (id, of_test)));
    }
    found
}

#[test]
fn every_invariant_is_cited_by_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let architecture = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    let known: Vec<&str> = architecture
        .lines()
        .filter_map(|line| line.strip_prefix("- **"))
        .filter_map(|line| line.split("**").next())
        .filter(|id| invariants(id) == [*id])
        .collect();
    assert!(known.len() >= 62, "{}", known.len());
    let (mut proven, mut unknown) = (Vec::new(), Vec::new());
    for (file, text) in rust_files(root) {
        if file == "tests/docs.rs" {
            continue;
        }
        for (id, of_test) in cited(&text) {
            if !known.contains(&id) {
                unknown.push(format!("{file}: {id}"));
            } else if of_test {
                proven.push(id.to_owned());
            }
        }
    }
    assert!(unknown.is_empty(), "no invariants: {unknown:?}");
    let missing: Vec<_> = known
        .iter()
        .filter(|id| !proven.iter().any(|proven| proven == *id))
        .collect();
    assert!(missing.is_empty(), "no test cites {missing:?}");
    let mut once = known.clone();
    once.sort_unstable();
    once.dedup();
    assert_eq!(once.len(), known.len(), "an ID has one meaning");
}

#[test]
fn citations_of_invariants_are_found() {
    let text = "// Invariant POD-3 and VOL-11.\n/// A story.\n#[test]\nfn a() {}\n// See CORE-99.\nfn b() {}\nlet x = \"API-1\";";
    assert_eq!(
        cited(text),
        [("POD-3", true), ("VOL-11", true), ("CORE-99", false)]
    );
    assert_eq!(
        invariants("UTF-8, SHA-256, POD-x, POD-, a POD-3b and API-12"),
        ["API-12"]
    );
}
