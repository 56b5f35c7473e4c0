//! The layering of `ARCHITECTURE.md`, read off the sources.
//!
//! Every file below `src` and `migrations` is cut into tokens (comments and literals dropped), every path that begins
//! at the crate's root is collected (`crate::a`, `crate::{a, b}`, `super::super::a`), and three rules are
//! checked: imports point downward only, sled and bincode are reached from `store` and `migrations` alone,
//! and `core` has no async, no clock and no I/O. The rules are also tried on planted violations.
//!
//! In the same way: every metric that is registered is written to somewhere, every error shows its cause, and what is in
//! table `objects` has a declared kind, whose class decides what is synced. Functions are short and have few parameters
//! ([`limits`]).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests may panic"
)]

#[path = "layers/limits.rs"]
mod limits;
#[path = "layers/messages.rs"]
mod messages;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Modules by rank; a module may use what ranks lower. Tens are the layers of ARCHITECTURE.md, a five is what
/// the modules of the layer above it share. Within the ranks of [`SIBLINGS`] modules may use each other.
const RANKS: &[(u32, &[&str])] = &[
    (0, &["types"]),
    (5, &["kubeletconfig"]),
    (10, &["core"]),
    (20, &["store"]),
    (30, &["apiserver", "kuberuntime"]),
    (
        35,
        &["node_object", "objects", "pod_manager", "runtime_state"],
    ),
    (
        40,
        &[
            "cm",
            "config",
            "container_logs",
            "devicemanager",
            "events",
            "eviction",
            "images",
            "nodeshutdown",
            "nodestatus",
            "oom_watcher",
            "pleg",
            "prober",
            "status",
            "volumemanager",
        ],
    ),
    (45, &["dra", "stats"]),
    (50, &["pod_workers"]),
    (
        60,
        &["sync_loop", "server", "admin", "podresources", "podsapi"],
    ),
    (70, &["agent", "cli", "fuzzing", "main", "lib"]),
];
const SIBLINGS: &[u32] = &[60, 70];

/// Where the storage engine and the record encoding are known.
const STORAGE: &[&str] = &["store", "migrations"];

/// Words that would make `core` depend on when or where it runs.
const IMPURE: &[&str] = &[
    "async",
    "await",
    "tokio",
    "futures",
    "SystemTime",
    "Instant",
    "SystemClock",
    "Clock",
];
/// Modules of `std` that do I/O.
const IMPURE_STD: &[&str] = &["fs", "net", "process", "thread", "env", "os"];

#[derive(Clone, Debug, PartialEq, Eq)]
struct Token<'a> {
    text: &'a str,
    line: usize,
}

/// Identifiers, `::`, and single other characters. Comments, strings and character literals are dropped.
fn tokens(source: &str) -> Vec<Token<'_>> {
    let bytes = source.as_bytes();
    let mut found = Vec::new();
    let (mut at, mut line) = (0, 1);
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b >= 0x80;
    while at < bytes.len() {
        let start = at;
        match bytes[at] {
            b'\n' | b' ' | b'\t' | b'\r' => at += 1,
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                while at < bytes.len() && bytes[at] != b'\n' {
                    at += 1;
                }
            }
            b'/' if bytes.get(at + 1) == Some(&b'*') => at = end_of_block_comment(bytes, at),
            b'"' => at = end_of_string(bytes, at),
            b'\'' => at = end_of_char_or_lifetime(bytes, at),
            b if is_word(b) => {
                while at < bytes.len() && is_word(bytes[at]) {
                    at += 1;
                }
                let word = &source[start..at];
                let next = bytes.get(at);
                if matches!(word, "r" | "br" | "cr") && matches!(next, Some(b'"' | b'#')) {
                    at = end_of_raw_string(bytes, at);
                } else if !(matches!(word, "b" | "c") && matches!(next, Some(b'"' | b'\''))) {
                    found.push(Token { text: word, line });
                }
            }
            b':' if bytes.get(at + 1) == Some(&b':') => {
                at += 2;
                found.push(Token { text: "::", line });
            }
            _ => {
                at += 1;
                found.push(Token {
                    text: &source[start..at],
                    line,
                });
            }
        }
        line += bytes[start..at].iter().filter(|b| **b == b'\n').count();
    }
    found
}

fn end_of_block_comment(bytes: &[u8], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0);
    while at < bytes.len() {
        match &bytes[at..bytes.len().min(at + 2)] {
            b"/*" => (at, depth) = (at + 2, depth + 1),
            b"*/" => (at, depth) = (at + 2, depth - 1),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn end_of_string(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    bytes.len().min(at + 1)
}

/// From the first `#` or `"` after the prefix.
fn end_of_raw_string(bytes: &[u8], start: usize) -> usize {
    let hashes = bytes[start..].iter().take_while(|b| **b == b'#').count();
    if bytes.get(start + hashes) != Some(&b'"') {
        return start + hashes; // A raw identifier.
    }
    let end: Vec<u8> = std::iter::once(b'"')
        .chain(std::iter::repeat_n(b'#', hashes))
        .collect();
    let body = start + hashes + 1;
    bytes[body..]
        .windows(end.len())
        .position(|window| window == end)
        .map_or(bytes.len(), |found| body + found + end.len())
}

fn end_of_char_or_lifetime(bytes: &[u8], start: usize) -> usize {
    if bytes.get(start + 1) == Some(&b'\\') {
        let mut at = start + 3;
        while at < bytes.len() && bytes[at] != b'\'' {
            at += 1;
        }
        return bytes.len().min(at + 1);
    }
    // A character has its closing quote within its (at most four) bytes; a lifetime has none.
    let close = bytes[start + 1..].iter().take(5).position(|b| *b == b'\'');
    match close {
        Some(len)
            if len > 0
                && std::str::from_utf8(&bytes[start + 1..start + 1 + len])
                    .is_ok_and(|s| s.chars().count() == 1) =>
        {
            start + 1 + len + 1
        }
        _ => start + 1,
    }
}

/// First segments of all paths that begin at the crate's root, with their lines. `depth` is how many modules
/// below the root the file's own module is.
fn root_paths(tokens: &[Token<'_>], depth: usize) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    // For each open brace, whether it is that of an inline module.
    let mut braces: Vec<bool> = Vec::new();
    for at in 0..tokens.len() {
        let text = |offset: usize| tokens.get(at + offset).map_or("", |t| t.text);
        match tokens[at].text {
            "{" => braces.push(at >= 2 && tokens[at - 2].text == "mod"),
            "}" => {
                braces.pop();
            }
            "crate" if text(1) == "::" => found.extend(first_segments(&tokens[at + 2..])),
            "super" if at == 0 || tokens[at - 1].text != "::" => {
                let chain = (0..).take_while(|i| text(2 * i) == "super" && text(2 * i + 1) == "::");
                let ups = chain.count();
                let own = depth + braces.iter().filter(|is_mod| **is_mod).count();
                if ups == own {
                    found.extend(first_segments(&tokens[at + 2 * ups..]));
                }
            }
            _ => {}
        }
    }
    found
}

/// The identifier a path goes on with, or all of them for a group.
fn first_segments(rest: &[Token<'_>]) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    if rest.first().is_none_or(|t| t.text != "{") {
        return rest
            .first()
            .map(|t| vec![(t.text.to_owned(), t.line)])
            .unwrap_or_default();
    }
    let mut depth = 0;
    let mut previous = "";
    for token in rest {
        match token.text {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            break;
        }
        let begins = previous == "{" || previous == ",";
        if depth == 1 && begins && token.text != "}" {
            found.push((token.text.to_owned(), token.line));
        }
        previous = token.text;
    }
    found
}

fn rank(module: &str) -> Option<u32> {
    RANKS
        .iter()
        .find(|(_, modules)| modules.contains(&module))
        .map(|(rank, _)| *rank)
}

/// Everything wrong with one file. `module` is the file's module path below the crate, such as
/// `["core", "state"]`; the crate's root is `["lib"]`.
fn violations(file: &str, module: &[&str], source: &str) -> Vec<String> {
    let tokens = tokens(source);
    let mut found = Vec::new();
    let top = module[0];
    let mut complain = |line: usize, what: String| found.push(format!("{file}:{line}: {what}"));

    let is_root = matches!(top, "lib" | "main");
    if let Some(own) = rank(top) {
        let depth = if is_root { 0 } else { module.len() };
        for (used, line) in root_paths(&tokens, depth) {
            let Some(other) = rank(&used) else {
                if !is_root && used.starts_with(|c: char| c.is_ascii_lowercase()) {
                    complain(line, format!("`{used}` has no layer in tests/layers.rs"));
                }
                continue;
            };
            let sideways = other == own && SIBLINGS.contains(&own);
            if used != top && other >= own && !sideways {
                complain(
                    line,
                    format!("`{top}` uses `{used}`: imports point downward only"),
                );
            }
        }
    } else if !STORAGE.contains(&top) {
        complain(1, format!("`{top}` has no layer in tests/layers.rs"));
    }

    if !STORAGE.contains(&top) {
        for (line, name) in external(&tokens, &["sled", "bincode"]) {
            complain(line, format!("`{name}` outside `store` and `migrations`"));
        }
    }

    if top == "core" {
        for token in &tokens {
            if IMPURE.contains(&token.text) {
                complain(
                    token.line,
                    format!("`{}` in `core`, which is pure", token.text),
                );
            }
        }
        for window in tokens.windows(3) {
            if window[0].text != "std" || window[1].text != "::" {
                continue;
            }
            let at = tokens
                .iter()
                .position(|t| std::ptr::eq(t, &window[2]))
                .unwrap_or(0);
            for (name, line) in first_segments(&tokens[at..]) {
                if IMPURE_STD.contains(&name.as_str()) {
                    complain(line, format!("`std::{name}` in `core`, which is pure"));
                }
            }
        }
    }
    found
}

/// Places where a path begins with one of these crates.
fn external<'a>(tokens: &[Token<'a>], crates: &[&str]) -> Vec<(usize, &'a str)> {
    let mut found = Vec::new();
    // For each open brace, whether a path leads up to it: `use a::{`.
    let mut braces: Vec<bool> = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let previous = at.checked_sub(1).map_or("", |i| tokens[i].text);
        let before = at.checked_sub(2).map_or("", |i| tokens[i].text);
        let next = tokens.get(at + 1).map_or("", |t| t.text);
        match token.text {
            "{" => braces.push(previous == "::"),
            "}" => {
                braces.pop();
            }
            name if crates.contains(&name) => {
                let is_word = |s: &str| s.ends_with(|c: char| c.is_alphanumeric() || c == '_');
                let continues = previous == "::" && (is_word(before) || before == ">");
                let in_group = braces.last() == Some(&true) && matches!(previous, "{" | ",");
                let names_crate = next == "::"
                    || previous == "use"
                    || (previous == "crate" && before == "extern");
                if names_crate && !continues && !in_group {
                    found.push((token.line, name));
                }
            }
            _ => {}
        }
    }
    found
}

fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// `src/core/state/mod.rs` → `["core", "state"]`.
fn module_path(relative: &Path) -> Vec<String> {
    let mut path: Vec<String> = relative
        .with_extension("")
        .components()
        .map(|c| c.as_os_str().to_string_lossy().into_owned())
        .collect();
    if path.last().is_some_and(|last| last == "mod") {
        path.pop();
    }
    path
}

#[test]
fn every_file_respects_the_layers() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let src = root.join("src");
    let mut found = Vec::new();
    let mut files = 0;
    for path in rust_files(&src) {
        let module = module_path(path.strip_prefix(&src).unwrap());
        let module: Vec<&str> = module.iter().map(String::as_str).collect();
        let name = path.strip_prefix(root).unwrap().display().to_string();
        found.extend(violations(
            &name,
            &module,
            &fs::read_to_string(&path).unwrap(),
        ));
        files += 1;
    }
    let migrations = root.join("migrations");
    if migrations.is_dir() {
        for path in rust_files(&migrations) {
            let name = path.strip_prefix(root).unwrap().display().to_string();
            let source = fs::read_to_string(&path).unwrap();
            found.extend(violations(&name, &["migrations"], &source));
        }
    }
    assert!(
        files > 50,
        "found only {files} files below {}",
        src.display()
    );
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

/// The fields of the `metrics!` block: names before a colon at the beginning of an entry.
fn registered_metrics(tokens: &[Token<'_>]) -> Vec<String> {
    let start = tokens
        .windows(3)
        .position(|w| w[0].text == "metrics" && w[1].text == "!" && w[2].text == "{")
        .unwrap();
    let mut found = Vec::new();
    let mut depth = 0;
    for window in tokens[start + 2..].windows(3) {
        match window[0].text {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            break;
        }
        if depth == 1 && matches!(window[0].text, "{" | ";") && window[2].text == ":" {
            found.push(window[1].text.to_owned());
        }
    }
    found
}

/// Names that follow `metrics.`, unless the value is only read.
fn written_metrics<'a>(tokens: &[Token<'a>]) -> Vec<&'a str> {
    let text = |at: usize| tokens.get(at).map_or("", |t| t.text);
    (0..tokens.len())
        .filter(|at| text(*at) == "metrics" && text(at + 1) == ".")
        .filter(|at| !(text(at + 3) == "." && text(at + 4) == "get"))
        .map(|at| text(at + 2))
        .collect()
}

#[test]
fn every_registered_metric_has_a_writer() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let own = src.join("types/metrics.rs");
    let source = fs::read_to_string(&own).unwrap();
    let definition = &source[source.find("\nmetrics! {").unwrap()..];
    let registered = registered_metrics(&tokens(definition));
    assert!(registered.len() > 30, "found only {registered:?}");
    let mut written = BTreeSet::new();
    for path in rust_files(&src) {
        if path == own || path.ends_with("tests.rs") {
            continue;
        }
        let source = fs::read_to_string(&path).unwrap();
        written.extend(
            written_metrics(&tokens(&source))
                .iter()
                .map(|n| n.to_string()),
        );
    }
    let silent: Vec<_> = registered
        .iter()
        .filter(|n| !written.contains(*n))
        .collect();
    assert!(silent.is_empty(), "registered and never set: {silent:?}");
}

#[test]
fn a_metric_that_is_only_read_has_no_writer() {
    let definition = "metrics! { a: Gauge = Gauge::default(), \"a\"; b: Family<X, Gauge> = f(|x: u8| x), \"b\"; }";
    assert_eq!(registered_metrics(&tokens(definition)), ["a", "b"]);
    let source = "self.metrics.a.get(); metrics.b.inc(); f(&x.metrics\n.c, 1); // metrics.d.inc()";
    assert_eq!(written_metrics(&tokens(source)), ["b", "c"]);
}

#[test]
fn every_layer_names_modules_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut seen = BTreeSet::new();
    for (_, modules) in RANKS {
        for module in *modules {
            assert!(seen.insert(module), "`{module}` is in two layers");
            let exists = root.join(format!("{module}.rs")).exists()
                || root.join(module).join("mod.rs").exists();
            assert!(exists, "`{module}` is in a layer and not in src");
        }
    }
}

fn check(module: &[&str], source: &str) -> Vec<String> {
    violations("x.rs", module, source)
}

#[test]
fn an_upward_import_is_found_however_it_is_written() {
    let upward = [
        "use crate::pod_workers::PodWorkers;",
        "use crate::{types::PodUid, pod_workers::{PodWorkers, Queue}};",
        "use crate::{\n    store::Store,\n    agent,\n};",
        "fn f() -> crate::sync_loop::SyncLoop { todo!() }",
        "use super::super::pod_workers::PodWorkers;",
        "mod tests { use super::super::super::pod_workers::PodWorkers; }",
        "pub(in crate::pod_workers) fn f() {}",
    ];
    for source in upward {
        let found = check(&["store", "codec"], source);
        assert_eq!(found.len(), 1, "{source}: {found:?}");
        assert!(found[0].contains("downward only"), "{source}: {found:?}");
    }
    let line = &check(&["types"], "\n/* a\n b */\nuse crate::core::x;")[0];
    assert!(line.starts_with("x.rs:4: `types` uses `core`"), "{line}");
}

#[test]
fn modules_of_layer_four_do_not_use_each_other_but_what_they_share() {
    assert_eq!(check(&["pleg"], "use crate::status::Manager;").len(), 1);
    assert_eq!(check(&["types"], "use crate::kubeletconfig::X;").len(), 1);
    assert!(check(&["pleg"], "use crate::runtime_state::RuntimeState;").is_empty());
    assert!(check(&["admin"], "use crate::server::conn;").is_empty());
}

#[test]
fn what_only_looks_like_an_upward_import_is_let_through() {
    let fine = [
        "use crate::store::codec;",
        "// use crate::agent;\n/* use crate::agent; /* nested */ crate::agent */",
        "const S: &str = \"crate::agent\";",
        "const S: &str = r#\"crate::agent \" \"#;",
        "const C: char = '\"'; fn f<'a>(x: &'a str) {} // crate::agent \"",
        "const C: char = '\\''; const D: &str = \"crate::agent\";",
        "use super::pod_workers; use super::super::store::agent;",
        "pub(crate) fn f() {}",
        "use crate::types::{agent, cli};",
    ];
    for source in fine {
        assert_eq!(
            check(&["store", "codec"], source),
            Vec::<String>::new(),
            "{source}"
        );
    }
    // What follows a literal is still read.
    assert_eq!(
        check(&["core"], "const C: char = 'é'; use crate::agent;").len(),
        1
    );
    assert_eq!(
        check(&["core"], "const C: u8 = b'\"'; use crate::agent;").len(),
        1
    );
}

#[test]
fn storage_engine_outside_the_store_is_found() {
    for source in [
        "use sled::Db;",
        "use sled;",
        "fn f(db: &sled::Db) {}",
        "use {std::fs, sled::Db};",
        "fn f() { bincode::serialize(&1); }",
        "fn f(db: ::sled::Db) {}",
    ] {
        assert_eq!(check(&["pleg"], source).len(), 1, "{source}");
        assert!(check(&["store"], source).is_empty(), "{source}");
        assert!(check(&["migrations"], source).is_empty(), "{source}");
    }
    for source in [
        "use crate::store::backend::sled::SledBackend;",
        "use crate::store::backend::{memory, sled::SledBackend};",
        "let sled = 1;",
    ] {
        assert!(check(&["agent"], source).is_empty(), "{source}");
    }
}

#[test]
fn async_clocks_and_io_in_core_are_found() {
    for source in [
        "async fn f() {}",
        "fn f() { x.await; }",
        "use tokio::sync::mpsc;",
        "use std::time::SystemTime;",
        "use std::time::{Duration, Instant};",
        "use std::{fs, io};",
        "fn f() { std::fs::read(\"x\"); }",
        "use crate::types::Clock;",
    ] {
        assert_eq!(check(&["core", "backoff"], source).len(), 1, "{source}");
        assert!(check(&["agent"], source).is_empty(), "{source}");
    }
    assert!(check(&["core"], "use std::time::Duration; // async").is_empty());
}

#[test]
fn a_module_without_a_layer_is_found() {
    assert_eq!(check(&["gadget"], "fn f() {}").len(), 1);
    assert_eq!(check(&["agent"], "use crate::gadget::Gadget;").len(), 1);
}

/// Error types with a variant whose text leaves its source out, and why the source is shown all the same.
const SHOWN_BY_OTHERS: &[(&str, &[&str])] = &[
    (
        "a command prints the chain with `{:#}` of anyhow, the agent's log with `types::causes`",
        &[
            "admin::AdminError",
            "admin::client::ClientError",
            "agent::AgentError",
            "agent::lock::LockError",
            "apiserver::ApiError",
            "cli::logging::LoggingError",
            "config::SourceError",
            "images::collect::CollectError",
            "images::credentials::CredentialError",
            "kubeletconfig::problem::ConfigError",
            "objects::keyring::KeyFileError",
            "server::kubelet::auth::x509::ClientCaError",
            "server::kubelet::tls::TlsError",
            "store::backup::BackupError",
            "store::health::StoreError",
            "store::migrate::MigrateError",
            "store::outcome::OpenError",
            "store::restore::RestoreError",
            "store::verify::VerifyError",
        ],
    ),
    (
        "the text has what the source says in another field",
        &[
            "apiserver::plugin::PluginError",
            "images::error::ImageError",
            "kuberuntime::cri::error::CriError",
        ],
    ),
    (
        "whoever prints it prints the chain: `types::causes` or a like function, or a field `error` that is a `dyn Error`",
        &[
            "apiserver::csr::CsrError",
            "apiserver::tunnel::TunnelError",
            "cm::error::CgroupError",
            "cm::systemd::SystemdError",
            "events::api::SinkError",
            "nodestatus::error::NodeError",
            "pod_workers::execute::StepError",
            "status::StatusError",
            "status::mirror::MirrorError",
            "status::syncer::SyncError",
            "store::backend::BackendError",
            "store::codec::CodecError",
            "types::causes::Silent",
            "volumemanager::csi::node_info::TellError",
            "volumemanager::error::VolumeError",
            "volumemanager::host_path::HostPathError",
            "volumemanager::subpath::SubPathError",
        ],
    ),
];

/// The types with a variant that has a source and a text without it.
fn silent_errors(source: &str) -> BTreeSet<String> {
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    let source: String = source
        .lines()
        .filter(is_code)
        .map(|l| format!("{l}\n"))
        .collect();
    let mut found = BTreeSet::new();
    for (start, mark) in source.match_indices("#[error(") {
        let end = end_of_group(source.as_bytes(), start + mark.len());
        let (text, rest) = (&source[start + mark.len()..end], &source[end..]);
        let declared = rest.trim_start_matches([')', ']', ' ', '\n']);
        let is_variant = !declared.starts_with(char::is_lowercase);
        let ends = ["#[error(", "\n}", if is_variant { "\n}" } else { ";\n" }];
        let body = ends.iter().filter_map(|end| rest.find(end)).min();
        let body = &rest[..body.unwrap_or(rest.len())];
        let has_source = ["#[source]", "#[from]", " source:"]
            .iter()
            .any(|s| body.contains(s));
        let shown = ["transparent", "{source", "{error", "{0", "{1", "source)"];
        if has_source && !shown.iter().any(|s| text.contains(s)) {
            found.insert(if is_variant {
                last_name(&source[..start])
            } else {
                last_name(body)
            });
        }
    }
    found
}

/// The index of the parenthesis that closes a group which is open at `at`.
fn end_of_group(bytes: &[u8], mut at: usize) -> usize {
    let mut depth = 1;
    while at < bytes.len() {
        match bytes[at] {
            b'"' => {
                at = end_of_string(bytes, at);
                continue;
            }
            b'(' => depth += 1,
            b')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            break;
        }
        at += 1;
    }
    at
}

/// The name of the last type that is declared in some text.
fn last_name(text: &str) -> String {
    let begins = ["enum ", "struct "].map(|word| text.rfind(word).map(|at| at + word.len()));
    let name = &text[begins.into_iter().flatten().max().unwrap_or(0)..];
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    name.chars().take_while(|c| is_word(*c)).collect()
}

#[test]
fn errors_without_their_cause_are_found() {
    let source = r#"
#[derive(Debug, thiserror::Error)]
pub enum Mixed {
    /// Shown.
    #[error("read {} (twice): {source}", path.display())]
    Shown { path: PathBuf, #[source] source: io::Error },
    #[error("no cause")]
    Alone,
}

#[derive(Debug, thiserror::Error)]
enum Hiding {
    #[error("read {}", .0.display())]
    Hidden(PathBuf, #[source] io::Error),
    #[error(transparent)]
    Whole(#[from] fmt::Error),
}

#[derive(Debug, thiserror::Error)]
#[error("write it")]
struct Bare {
    source: io::Error,
}

#[derive(Debug, thiserror::Error)]
#[error("parse it: {0}")]
struct Tuple(#[source] fmt::Error);
"#;
    let found: Vec<_> = silent_errors(source).into_iter().collect();
    assert_eq!(found, ["Bare", "Hiding"]);
}

#[test]
fn every_error_shows_its_cause() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = BTreeSet::new();
    for path in rust_files(&src) {
        let module = module_path(path.strip_prefix(&src).unwrap()).join("::");
        let silent = silent_errors(&fs::read_to_string(&path).unwrap());
        found.extend(silent.iter().map(|name| format!("{module}::{name}")));
    }
    let listed = SHOWN_BY_OTHERS.iter().flat_map(|(_, types)| *types);
    let listed: BTreeSet<String> = listed.map(|name| (*name).to_owned()).collect();
    let new: Vec<_> = found.difference(&listed).collect();
    assert!(
        new.is_empty(),
        "{new:?}: end the text with `: {{source}}`, or print the chain wherever it is printed and list it in \
         SHOWN_BY_OTHERS"
    );
    let stale: Vec<_> = listed.difference(&found).collect();
    assert!(
        stale.is_empty(),
        "no longer needed in SHOWN_BY_OTHERS: {stale:?}"
    );
}

/// Files that handle records of table `objects` without a type of their kind, and why.
const RAW: &[(&str, &str)] = &[
    ("src/core/state/", "it declares them"),
    ("src/admin/view/", "it shows records as they are"),
    (
        "src/objects/context.rs",
        "it encrypts what is secret, and compares before it writes",
    ),
    (
        "src/objects/recorder.rs",
        "it writes API objects of many kinds, as bytes that are encrypted already",
    ),
];

/// Whether a file below `src` is compiled for tests only.
fn is_for_tests(relative: &Path) -> bool {
    let name = relative.file_name().unwrap().to_str().unwrap();
    let mut dirs = relative.parent().unwrap().components();
    name.ends_with("tests.rs")
        || name == "testkit.rs"
        || dirs.any(|dir| matches!(dir.as_os_str().to_str(), Some("tests" | "testkit")))
}

/// Whether an item or a statement follows, after other attributes and its visibility: not an arm of a `match`, nor a field.
fn is_item(tokens: &[Token<'_>]) -> bool {
    const WORDS: [&str; 13] = [
        "mod",
        "fn",
        "impl",
        "use",
        "async",
        "const",
        "struct",
        "enum",
        "static",
        "type",
        "trait",
        "let",
        "macro_rules",
    ];
    let mut depth = 0;
    let words = tokens.iter().map(|token| token.text);
    let outside = words.filter(|word| match *word {
        "[" | "(" => {
            depth += 1;
            false
        }
        "]" | ")" => {
            depth -= 1;
            false
        }
        _ => depth == 0,
    });
    let mut rest = outside.skip_while(|word| matches!(*word, "#" | "pub"));
    rest.next().is_some_and(|word| WORDS.contains(&word))
}

/// Drops the items that are compiled for tests only.
fn without_tests<'a>(tokens: &[Token<'a>]) -> Vec<Token<'a>> {
    const MARK: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let here = tokens[at..].iter().map(|token| token.text);
        if !here.take(MARK.len()).eq(MARK) {
            kept.push(tokens[at].clone());
            at += 1;
            continue;
        }
        at += MARK.len();
        if !is_item(&tokens[at..]) {
            continue;
        }
        let mut depth = 0;
        while let Some(token) = tokens.get(at) {
            at += 1;
            match token.text {
                "{" => depth += 1,
                "}" => depth -= 1,
                ";" if depth == 0 => break,
                _ => continue,
            }
            if depth == 0 {
                break;
            }
        }
    }
    kept
}

/// Lines in which the store is synced by hand.
fn synced_by_hand(source: &str) -> Vec<usize> {
    let tokens = without_tests(&tokens(source));
    let text = |at: usize| tokens.get(at).map_or("", |token| token.text);
    let is_sync = |at: &usize| {
        let is_store = text(*at) == "store";
        let after = match text(at + 1) {
            "(" if text(at + 2) == ")" => at + 3,
            _ => at + 1,
        };
        is_store && text(after) == "." && text(after + 1) == "sync" && text(after + 2) == "("
    };
    let found = (0..tokens.len()).filter(is_sync);
    found.map(|at| tokens[at].line).collect()
}

/// Lines that make or read records of the tables `objects` and `facts` without a type of their kind, or declare a kind.
fn raw_objects(source: &str) -> Vec<usize> {
    let tokens = without_tests(&tokens(source));
    let text = |at: usize| tokens.get(at).map_or("", |token| token.text);
    let is_raw = |at: &usize| {
        let is_record = ["ObjectRecord", "FactRecord"].contains(&text(*at));
        is_record || (text(*at) == "Declared" && text(at + 1) == "{")
    };
    let found = (0..tokens.len()).filter(is_raw);
    found.map(|at| tokens[at].line).collect()
}

/// Names of the kinds that have a record type in a source: `const DECLARED: Declared = kinds::NAME`.
fn record_types(source: &str) -> Vec<String> {
    let tokens = without_tests(&tokens(source));
    let texts: Vec<&str> = tokens.iter().map(|token| token.text).collect();
    let declared = ["DECLARED", ":", "Declared", "="];
    let found = texts.windows(7).filter(|w| w[..4] == declared);
    let names = found.map(|w| if w[5] == "::" { w[6] } else { w[4] });
    names.map(str::to_owned).collect()
}

#[test]
fn nothing_outside_the_store_syncs_it_and_every_kind_of_object_is_declared() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let src = root.join("src");
    let mut found = Vec::new();
    let mut raw = BTreeSet::new();
    let mut types = BTreeSet::new();
    for path in rust_files(&src) {
        let relative = path.strip_prefix(&src).unwrap();
        if is_for_tests(relative) || relative.starts_with("store") {
            continue;
        }
        let name = path.strip_prefix(root).unwrap().display().to_string();
        let source = fs::read_to_string(&path).unwrap();
        for line in synced_by_hand(&source) {
            found.push(format!(
                "{name}:{line}: syncs the store; give the kind of the record the class Durable instead \
                 (src/core/state/kinds.rs)"
            ));
        }
        for kind in record_types(&source) {
            if !types.insert(kind.clone()) {
                found.push(format!("{name}: {kind} has a record type already"));
            }
        }
        let lines = raw_objects(&source);
        match RAW.iter().find(|(start, _)| name.starts_with(start)) {
            Some((start, _)) if !lines.is_empty() => {
                raw.insert(*start);
            }
            Some(_) => {}
            None => found.extend(lines.iter().map(|line| {
                format!(
                    "{name}:{line}: handles a record of table `objects` or `facts` without its kind; declare one in \
                     src/core/state/kinds.rs and use `Transaction::put_object` and its like"
                )
            })),
        }
    }
    let unused = RAW.iter().filter(|(start, _)| !raw.contains(start));
    found.extend(unused.map(|(start, _)| format!("{start} is typed, it needs no exception")));
    assert!(types.len() > 25, "found only {types:?}");
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn hand_made_syncs_and_untyped_objects_are_found_outside_tests_only() {
    for (source, expected) in [
        ("fn f() { self.store.sync().await?; }", 1),
        ("fn f() { self.store().sync().await?; }", 1),
        ("fn f() { context\n.store\n.sync()\n.await?; }", 1),
        ("fn f() { file.sync(); store.snapshot().sync(); }", 0),
        ("#[cfg(test)] mod tests { fn f() { store.sync(); } }", 0),
        ("#[cfg(test)] mod tests; fn f() { store.sync(); }", 1),
        ("#[cfg(test)] use a::{b, c}; fn f() { store.sync(); }", 1),
    ] {
        assert_eq!(synced_by_hand(source).len(), expected, "{source}");
    }
    for (source, expected) in [
        ("use crate::core::state::{ObjectRecord, State};", 1),
        ("fn f() { t.put(key, ObjectRecord { at }) }", 1),
        ("fn f() { t.put(key, FactRecord { at }) }", 1),
        ("const X: Declared = Declared { name };", 1),
        (
            "impl Kind for X { const DECLARED: Declared = kinds::X; }",
            0,
        ),
        ("/// An [`ObjectRecord`].\nfn f() {}", 0),
        ("#[cfg(test)] mod tests { use a::ObjectRecord; }", 0),
    ] {
        assert_eq!(raw_objects(source).len(), expected, "{source}");
    }
    let source = "impl Kind for X { const DECLARED: Declared = kinds::EVENTS; }";
    assert_eq!(record_types(source), ["EVENTS"]);
    let source = "impl Kind for X { const DECLARED: Declared = EVENTS; }";
    assert_eq!(record_types(source), ["EVENTS"]);
}
