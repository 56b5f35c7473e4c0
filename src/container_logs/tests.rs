//! Logs read while a runtime writes them and a rotator rotates them.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt;
use holdfast_testkit::fake_cri::{FakeCri, Fault};
use k8s_cri::v1;
use proptest::prelude::*;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::core::state::{PlegRecord, Transaction};
use crate::kuberuntime::cri::{CriClient, CriTimeouts};
use crate::store::Store;
use crate::types::metrics::Metrics;
use crate::types::runtime::{ContainerState, ContainerStatus, PodStatus};
use crate::types::{BootId, Clock, ContainerId, PodUid, Stamp};

/// A log and what writes it.
pub(super) struct Writer {
    pub(super) path: PathBuf,
    file: File,
    rotations: i64,
}

impl Writer {
    pub(super) fn new(dir: &Path) -> Self {
        let path = dir.join("0.log");
        let file = append(&path);
        Self {
            path,
            file,
            rotations: 0,
        }
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.file.write_all(bytes).unwrap();
    }

    /// The agent renames the log; the runtime goes on writing it. Files before it are compressed.
    pub(super) fn rename(&mut self, max_files: u32) -> Rotated {
        self.rotations += 1;
        let now = jiff::Timestamp::from_second(1_800_000_000 + self.rotations).unwrap();
        rename_away(&self.path, max_files, now).unwrap()
    }

    /// The runtime makes a new file; gives the old one.
    pub(super) fn reopen(&mut self) -> File {
        std::mem::replace(&mut self.file, append(&self.path))
    }
}

fn append(path: &Path) -> File {
    let mut options = OpenOptions::new();
    options.create(true).append(true).open(path).unwrap()
}

fn read_all(reader: &mut LogReader, out: &mut Vec<u8>) {
    loop {
        match reader.step(true).unwrap() {
            Step::Data(data) => out.extend(data),
            Step::Wait(_) => {}
            Step::End => return,
        }
    }
}

/// Reads the present content, without waiting for the end.
fn read_some(reader: &mut LogReader, out: &mut Vec<u8>, steps: usize) {
    for _ in 0..steps {
        match reader.step(false).unwrap() {
            Step::Data(data) => out.extend(data),
            Step::Wait(_) | Step::End => return,
        }
    }
}

fn following() -> LogOptions {
    LogOptions {
        follow: true,
        ..LogOptions::default()
    }
}

fn read_now(path: &Path, options: &LogOptions) -> Vec<u8> {
    let mut out = Vec::new();
    read_all(&mut LogReader::open(path, options).unwrap(), &mut out);
    out
}

#[derive(Clone, Debug)]
struct Entry {
    time: i64,
    partial: bool,
    content: Vec<u8>,
}

impl Entry {
    fn bytes(&self) -> Vec<u8> {
        let at = jiff::Timestamp::from_second(1_700_000_000 + self.time).unwrap();
        let tag = if self.partial { 'P' } else { 'F' };
        let mut line = format!("{at} stdout {tag} ").into_bytes();
        line.extend_from_slice(&self.content);
        line.push(b'\n');
        line
    }
}

fn content(entries: &[Entry]) -> Vec<u8> {
    let mut all = Vec::new();
    for entry in entries {
        all.extend_from_slice(&entry.content);
        if !entry.partial {
            all.push(b'\n');
        }
    }
    all
}

fn entries() -> impl Strategy<Value = Vec<Entry>> {
    let byte = any::<u8>().prop_filter("one line", |b| *b != b'\n');
    let short = proptest::collection::vec(byte, 0..40);
    let long = (1..100_000_usize).prop_map(|len| vec![b'x'; len]);
    let content = prop_oneof![20 => short, 1 => long];
    proptest::collection::vec((any::<bool>(), content), 1..30).prop_map(|all| {
        let numbered = all.into_iter().enumerate();
        numbered
            .map(|(i, (partial, content))| Entry {
                time: i64::try_from(i).unwrap(),
                partial,
                content,
            })
            .collect()
    })
}

#[derive(Clone, Debug)]
enum Op {
    Write(usize),
    Rename,
    Reopen,
    Read(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        4 => (1..300_usize).prop_map(Op::Write),
        1 => (1..120_000_usize).prop_map(Op::Write),
        2 => Just(Op::Rename),
        2 => Just(Op::Reopen),
        3 => (1..4_usize).prop_map(Op::Read),
    ];
    proptest::collection::vec(op, 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Bytes are written in pieces of any size, the log is renamed and reopened at any time, and older files are
    /// compressed: a follower that reads now and then has each byte once and in order.
    #[test]
    fn a_follower_loses_and_doubles_nothing(entries in entries(), ops in ops()) {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(dir.path());
        let mut reader = LogReader::open(&writer.path, &following()).unwrap();
        let log: Vec<u8> = entries.iter().flat_map(Entry::bytes).collect();
        let (mut written, mut out, mut renamed) = (0, Vec::new(), false);
        for op in ops {
            match op {
                Op::Write(len) => {
                    let end = (written + len).min(log.len());
                    writer.write(&log[written..end]);
                    written = end;
                }
                Op::Rename if !renamed => {
                    writer.rename(100);
                    renamed = true;
                }
                Op::Reopen if renamed => {
                    // A runtime writes an entry to one file.
                    let rest = &log[written..];
                    let at_start = written == 0 || log[written - 1] == b'\n';
                    let line = rest.iter().position(|b| *b == b'\n').map_or(0, |at| at + 1);
                    let end = written + if at_start { 0 } else { line };
                    writer.write(&log[written..end]);
                    written = end;
                    writer.reopen();
                    renamed = false;
                }
                Op::Rename | Op::Reopen => {}
                Op::Read(steps) => read_some(&mut reader, &mut out, steps),
            }
        }
        writer.write(&log[written..]);
        read_all(&mut reader, &mut out);
        prop_assert!(out == content(&entries), "{} of {} bytes", out.len(), content(&entries).len());
    }

    /// The content at once: all files, or their last lines.
    #[test]
    fn the_last_lines_are_those_of_all_files(
        entries in entries(),
        rotate_after in proptest::collection::vec(any::<bool>(), 30),
        tail in proptest::option::of(0..35_u64),
        since in proptest::option::of(0..30_i64),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(dir.path());
        for (entry, rotate) in entries.iter().zip(rotate_after) {
            writer.write(&entry.bytes());
            if rotate && !entry.partial {
                writer.rename(100);
                writer.reopen();
            }
        }
        let lines: Vec<&[Entry]> = entries.split_inclusive(|e| !e.partial).collect();
        let first = tail.map_or(0, |tail| {
            lines.len() - lines.len().min(usize::try_from(tail).unwrap())
        });
        let at = since.map(|since| jiff::Timestamp::from_second(1_700_000_000 + since).unwrap());
        let wanted: Vec<Entry> = lines[first..]
            .concat()
            .into_iter()
            .filter(|entry| since.is_none_or(|since| entry.time >= since))
            .collect();
        for follow in [false, true] {
            let options = LogOptions { tail, since: at, follow, ..LogOptions::default() };
            let out = read_now(&writer.path, &options);
            prop_assert!(out == content(&wanted), "{} of {}", out.len(), content(&wanted).len());
        }
    }
}

fn line(number: usize) -> Vec<u8> {
    format!("2026-01-02T03:04:05Z stdout F line {number}\n").into_bytes()
}

fn plain(numbers: impl IntoIterator<Item = usize>) -> String {
    numbers.into_iter().map(|n| format!("line {n}\n")).collect()
}

#[test]
fn lines_that_come_late_to_a_rotated_file_are_given() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::new(dir.path());
    let mut reader = LogReader::open(&writer.path, &following()).unwrap();
    let mut out = Vec::new();
    writer.write(&line(1));
    writer.rename(5);
    let mut old = writer.reopen();
    writer.write(&line(2));
    read_some(&mut reader, &mut out, 10);
    old.write_all(&line(3)).unwrap();
    old.write_all(&line(4)[..10]).unwrap();
    read_some(&mut reader, &mut out, 10);
    old.write_all(&line(4)[10..]).unwrap();
    read_some(&mut reader, &mut out, 10);
    assert_eq!(String::from_utf8(out).unwrap(), plain([1, 2, 3, 4]));
}

#[test]
fn a_half_line_waits_for_its_end_while_it_is_followed() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::new(dir.path());
    let half = &line(1)[..line(1).len() - 3];
    writer.write(half);
    assert_eq!(read_now(&writer.path, &LogOptions::default()), b"line");
    let mut reader = LogReader::open(&writer.path, &following()).unwrap();
    let mut out = Vec::new();
    read_some(&mut reader, &mut out, 10);
    assert_eq!(out, b"");
    writer.write(b" 1\n");
    read_some(&mut reader, &mut out, 10);
    assert_eq!(out, b"line 1\n");
    writer.write(half);
    read_all(&mut reader, &mut out);
    assert_eq!(out, b"line 1\nline", "nothing more comes");
}

#[test]
fn a_rotation_that_is_taken_back_doubles_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::new(dir.path());
    writer.write(&line(1));
    writer.rename(5);
    writer.reopen();
    writer.write(&line(2));
    let mut reader = LogReader::open(&writer.path, &following()).unwrap();
    let mut out = Vec::new();
    read_some(&mut reader, &mut out, 10);
    for n in 3..6 {
        let rotated = writer.rename(9);
        writer.write(&line(n));
        read_some(&mut reader, &mut out, 10);
        assert!(rename_back(&rotated).unwrap());
        read_some(&mut reader, &mut out, 10);
    }
    writer.rename(9);
    writer.reopen();
    writer.write(&line(6));
    read_some(&mut reader, &mut out, 10);
    assert_eq!(String::from_utf8(out).unwrap(), plain(1..7));
}

#[test]
fn a_follower_that_slept_through_rotations_goes_on_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::new(dir.path());
    writer.write(&line(1));
    let mut reader = LogReader::open(&writer.path, &following()).unwrap();
    let mut out = Vec::new();
    read_some(&mut reader, &mut out, 10);
    for n in 2..6 {
        writer.write(&line(n));
        writer.rename(9);
        writer.reopen();
    }
    writer.write(&line(6));
    read_some(&mut reader, &mut out, 10);
    assert_eq!(String::from_utf8(out).unwrap(), plain(1..7));
}

#[test]
fn a_follower_whose_file_was_removed_goes_on_with_the_oldest_that_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::new(dir.path());
    writer.write(&line(1));
    let mut reader = LogReader::open(&writer.path, &following()).unwrap();
    let mut out = Vec::new();
    read_some(&mut reader, &mut out, 10);
    for n in 2..7 {
        writer.write(&line(n));
        writer.rename(3);
        writer.reopen();
    }
    writer.write(&line(7));
    read_some(&mut reader, &mut out, 10);
    // Its own file is open still; two rotated ones and the one that is written are on the disk.
    assert_eq!(String::from_utf8(out).unwrap(), plain([1, 2, 5, 6, 7]));
}

#[test]
fn an_emptied_log_is_read_from_its_start() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::new(dir.path());
    writer.write(&[line(1), line(2)].concat());
    let mut reader = LogReader::open(&writer.path, &following()).unwrap();
    let mut out = Vec::new();
    read_some(&mut reader, &mut out, 10);
    File::create(&writer.path).unwrap();
    writer.write(&line(3));
    read_some(&mut reader, &mut out, 10);
    assert_eq!(String::from_utf8(out).unwrap(), plain([1, 2, 3]));
}

#[test]
fn a_damaged_compressed_file_does_not_hide_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::new(dir.path());
    for n in 1..4 {
        writer.write(&line(n));
        writer.rename(9);
        writer.reopen();
    }
    writer.write(&line(4));
    let first = dir.path().join("0.log.20270115-080001.gz");
    let bytes = fs::read(&first).unwrap();
    fs::write(&first, &bytes[..12]).unwrap();
    let out = read_now(&writer.path, &LogOptions::default());
    assert_eq!(String::from_utf8(out).unwrap(), plain([2, 3, 4]));
    let options = LogOptions {
        tail: Some(9),
        ..LogOptions::default()
    };
    let out = read_now(&writer.path, &options);
    assert_eq!(String::from_utf8(out).unwrap(), plain([2, 3, 4]));
}

#[test]
fn no_log_is_an_error_and_a_renamed_one_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.log");
    let error = LogReader::open(&path, &following()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    let mut writer = Writer::new(dir.path());
    writer.write(&line(1));
    writer.rename(5);
    assert_eq!(read_now(&path, &LogOptions::default()), b"line 1\n");
    let mut reader = LogReader::open(&path, &following()).unwrap();
    let mut out = Vec::new();
    read_some(&mut reader, &mut out, 5);
    writer.write(&line(2));
    writer.reopen();
    writer.write(&line(3));
    read_some(&mut reader, &mut out, 5);
    assert_eq!(String::from_utf8(out).unwrap(), plain([1, 2, 3]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_ends_with_its_container_and_nobody_is_left_watching() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::new(dir.path());
    let (hub, ended) = (LogHub::default(), Arc::new(AtomicBool::new(false)));
    let has_ended = Arc::clone(&ended);
    let ended_now: Ended = Box::new(move || has_ended.load(Ordering::SeqCst));
    let subscription = hub.subscribe(&writer.path, ended_now);
    let reader = LogReader::open(&writer.path, &following()).unwrap();
    let mut stream = Box::pin(follow(reader, subscription, CancellationToken::new()));
    for n in 1..4 {
        writer.write(&line(n));
        let data = stream.next().await.unwrap().unwrap();
        assert_eq!(data, plain([n]));
    }
    ended.store(true, Ordering::SeqCst);
    writer.write(&line(4));
    let rest: Vec<_> = stream.by_ref().map(|data| data.unwrap()).collect().await;
    assert_eq!(rest.concat(), plain([4]).into_bytes());
    drop(stream);
    assert_eq!(hub.followers(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_ends_when_the_agent_stops() {
    let dir = tempfile::tempdir().unwrap();
    let writer = Writer::new(dir.path());
    let (hub, stop) = (LogHub::default(), CancellationToken::new());
    let subscription = hub.subscribe(&writer.path, Box::new(|| false));
    let reader = LogReader::open(&writer.path, &following()).unwrap();
    let mut stream = Box::pin(follow(reader, subscription, stop.clone()));
    let next = tokio::spawn(async move { stream.next().await.is_none() });
    stop.cancel();
    assert!(next.await.unwrap());
}

struct FixedClock;

impl Clock for FixedClock {
    fn now(&self) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: 0,
            wall_ms: 1_767_323_045_000,
        }
    }
}

/// A runtime with one running container, whose log is known.
struct Node {
    cri: FakeCri,
    rotator: LogRotator,
    log: PathBuf,
    store: Store,
    status: PodStatus,
    _dir: tempfile::TempDir,
}

impl Node {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let logs = dir.path().join("ns_p_u");
        fs::create_dir_all(logs.join("c")).unwrap();
        let fake = FakeCri::new();
        fake.add_image("img");
        let timeouts = CriTimeouts::default();
        let cri = CriClient::over(fake.channel(), "fake", timeouts, Metrics::default());
        let sandbox = v1::PodSandboxConfig {
            log_directory: logs.display().to_string(),
            ..v1::PodSandboxConfig::default()
        };
        let sandbox_id = cri.run_pod_sandbox(sandbox.clone(), "").await.unwrap();
        let mut runtime = v1::runtime_service_client::RuntimeServiceClient::new(fake.channel());
        let request = v1::CreateContainerRequest {
            pod_sandbox_id: sandbox_id.to_string(),
            config: Some(v1::ContainerConfig {
                metadata: Some(v1::ContainerMetadata {
                    name: "c".to_owned(),
                    attempt: 0,
                }),
                image: Some(v1::ImageSpec {
                    image: "img".to_owned(),
                    ..v1::ImageSpec::default()
                }),
                log_path: "c/0.log".to_owned(),
                ..v1::ContainerConfig::default()
            }),
            sandbox_config: Some(sandbox),
        };
        let created = runtime
            .create_container(request)
            .await
            .unwrap()
            .into_inner();
        let id = created.container_id;
        let start = v1::StartContainerRequest {
            container_id: id.clone(),
        };
        runtime.start_container(start).await.unwrap();
        let container = ContainerStatus {
            id: ContainerId::from(id),
            name: "c".to_owned(),
            attempt: 0,
            sandbox_id,
            state: ContainerState::Running,
            created_at_ns: 1,
            image: String::new(),
            image_ref: String::new(),
            hash: String::new(),
            started_at_ns: 1,
            finished_at_ns: 0,
            exit_code: 0,
            reason: String::new(),
            message: String::new(),
            log_path: String::new(),
            user: None,
        };
        let status = PodStatus {
            name: "p".to_owned(),
            namespace: "ns".to_owned(),
            containers: vec![container],
            ..PodStatus::empty(PodUid::from("u"))
        };
        let store = Store::in_memory(Arc::new(FixedClock));
        let policy = RotationPolicy {
            max_size: Some(100),
            max_files: 3,
            workers: 2,
            interval: Duration::from_secs(10),
        };
        let clock = Arc::new(FixedClock);
        let root = dir.path().to_owned();
        let rotator = LogRotator::new(store.clone(), cri, clock, policy, root);
        let node = Self {
            cri: fake,
            rotator,
            log: logs.join("c/0.log"),
            store,
            status,
            _dir: dir,
        };
        node.show().await;
        node.cri.clear_calls();
        node
    }

    /// The store has the status.
    async fn show(&self) {
        let status = self.status.clone();
        let transaction = Transaction::new().put("u", PlegRecord { status });
        self.store.commit(transaction).await.unwrap();
    }

    async fn tick(&mut self) {
        self.rotator.tick(&CancellationToken::new()).await;
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.log.parent().unwrap()).unwrap();
        let mut names: Vec<_> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

#[tokio::test]
async fn a_log_that_is_too_long_is_rotated_and_opened_anew() {
    let mut node = Node::new().await;
    fs::write(&node.log, [b'x'; 99]).unwrap();
    node.tick().await;
    assert_eq!(node.files(), ["0.log"]);
    assert_eq!(node.cri.calls().len(), 0, "a short log costs no call");
    for _ in 0..3 {
        fs::write(&node.log, [b'x'; 100]).unwrap();
        node.tick().await;
    }
    assert_eq!(node.cri.count("reopen_container_log"), 3);
    let want = ["0.log", "0.log.20260102-030406.gz", "0.log.20260102-030407"];
    assert_eq!(node.files(), want);
    node.status.containers[0].state = ContainerState::Exited;
    node.show().await;
    fs::write(&node.log, [b'x'; 100]).unwrap();
    node.tick().await;
    assert_eq!(
        node.files(),
        want,
        "of a container that ended nothing grows"
    );
}

#[tokio::test]
async fn a_log_that_is_not_opened_anew_keeps_its_name() {
    let mut node = Node::new().await;
    fs::write(&node.log, [b'x'; 100]).unwrap();
    let fault = || Fault::Error(tonic::Code::Unknown, "broken".to_owned());
    node.cri.fail_always("reopen_container_log", fault());
    node.tick().await;
    node.tick().await;
    assert_eq!(node.files(), ["0.log"]);
    assert_eq!(fs::metadata(&node.log).unwrap().len(), 100);
    node.cri.clear_faults();
    node.tick().await;
    assert_eq!(node.files(), ["0.log", "0.log.20260102-030405"]);
}

#[tokio::test]
async fn what_a_crash_left_is_put_right() {
    let mut node = Node::new().await;
    // The agent crashed after it renamed the log, and once before while it compressed another.
    fs::rename(&node.log, node.log.with_extension("log.20260102-030405")).unwrap();
    fs::write(node.log.with_extension("log.20260101-000000"), "whole").unwrap();
    fs::write(node.log.with_extension("log.20260101-000000.tmp"), "half").unwrap();
    node.tick().await;
    assert_eq!(
        node.files(),
        ["0.log", "0.log.20260101-000000", "0.log.20260102-030405"]
    );
    assert_eq!(node.cri.count("reopen_container_log"), 1);
}

#[tokio::test]
async fn a_log_that_the_runtime_does_not_make_is_asked_for_once() {
    let mut node = Node::new().await;
    node.status.containers[0].log_path = node.log.with_extension("elsewhere").display().to_string();
    node.show().await;
    for _ in 0..3 {
        node.tick().await;
    }
    assert_eq!(node.cri.count("reopen_container_log"), 1);
}
