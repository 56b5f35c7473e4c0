use std::time::Duration;

use super::*;
use crate::core::state::{ExitRecord, IntentRecord};
use crate::types::{BootId, Stamp};

struct Fixture {
    _dir: tempfile::TempDir,
    ctx: NodeContext,
}

/// With the log directory of container `c` of pod `web`.
fn fixture() -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    let mut ctx = NodeContext::new("n", dir.path());
    ctx.pod_log_root = dir.path().join("pods-logs");
    ctx.container_log_root = dir.path().join("containers-logs");
    fs::create_dir_all(logs_of_c(&ctx)).unwrap();
    Fixture { _dir: dir, ctx }
}

fn logs_of_c(ctx: &NodeContext) -> PathBuf {
    owner().log_dir(ctx).join("c")
}

fn owner() -> Owner {
    Owner {
        uid: "u1".into(),
        namespace: "shop".to_owned(),
        name: "web".to_owned(),
    }
}

fn container(id: &str, attempt: u32, log: &Path) -> ContainerStatus {
    ContainerStatus {
        id: id.into(),
        name: "c".to_owned(),
        attempt,
        sandbox_id: "s0".into(),
        state: ContainerState::Exited,
        created_at_ns: 0,
        image: String::new(),
        image_ref: String::new(),
        hash: String::new(),
        started_at_ns: 0,
        finished_at_ns: 0,
        exit_code: 0,
        reason: String::new(),
        message: String::new(),
        log_path: log.display().to_string(),
        user: None,
    }
}

fn at() -> Stamp {
    Stamp {
        boot: BootId(1),
        boottime_ms: 1,
        wall_ms: 1,
    }
}

/// A container whose newest attempt on record began, and whose end is that of another one.
fn record(intent: (&str, u32), ended: (&str, u32)) -> ContainerRecord {
    ContainerRecord {
        restart_count: intent.1,
        intent: Some(IntentRecord {
            container_id: intent.0.into(),
            attempt: intent.1,
            hash: String::new(),
            at: at(),
        }),
        last_exit: Some(ExitRecord {
            container_id: ended.0.into(),
            attempt: ended.1,
            image: String::new(),
            image_ref: String::new(),
            started_at_ns: 0,
            finished_at_ns: 0,
            finished: at(),
            exit_code: 0,
            reason: String::new(),
            message: String::new(),
            inferred: false,
        }),
        ..ContainerRecord::new()
    }
}

fn files_of(
    ctx: &NodeContext,
    containers: Vec<ContainerStatus>,
    record: &ContainerRecord,
) -> PodFiles {
    let status = PodStatus {
        name: owner().name,
        namespace: owner().namespace,
        containers,
        ..PodStatus::empty(owner().uid)
    };
    PodFiles::of(ctx, &status, &[("c", record)].into_iter().collect()).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    names_in(dir).unwrap().into_iter().collect()
}

#[test]
fn a_container_has_one_message_file_that_is_empty_at_each_start() {
    let Fixture { ctx, _dir } = fixture();
    let path = message_path(&ctx, &owner().uid, "c");
    for _ in 0..3 {
        prepare_message(&path).unwrap();
        clear_message(&path, None).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"");
        fs::write(&path, "last words").unwrap();
        prepare_message(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"last words");
    }
    let written = fs::metadata(&path).unwrap().modified().unwrap();
    clear_message(&path, Some(written - Duration::from_secs(1))).unwrap();
    let kept = fs::read(&path).unwrap();
    assert_eq!(kept, b"last words", "of the attempt itself");
    clear_message(&path, Some(written + Duration::from_secs(1))).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"", "of the one before");
    assert_eq!(names(path.parent().unwrap()), ["message"]);
}

#[test]
fn links_lead_to_the_log_and_go_with_it() {
    let Fixture { ctx, _dir } = fixture();
    let dir = logs_of_c(&ctx);
    let make = || link(&ctx, &owner(), "c", &"abc".into(), 0).unwrap();
    let path = make();
    assert_eq!(path.file_name().unwrap(), "web_shop_c-abc.log");
    let dead = remove_dead_links(&ctx).unwrap();
    assert_eq!(dead, 0, "a log that is about to be written");
    fs::write(dir.join("0.log"), "x").unwrap();
    make();
    assert_eq!(fs::read_to_string(&path).unwrap(), "x");
    fs::remove_dir_all(&dir).unwrap();
    fs::write(ctx.container_log_root.join("foreign"), "").unwrap();
    assert_eq!(remove_dead_links(&ctx).unwrap(), 1);
    assert_eq!(names(&ctx.container_log_root), ["foreign"]);
}

#[test]
fn removing_a_container_takes_its_files_and_nothing_else() {
    let Fixture { ctx, _dir } = fixture();
    let dir = logs_of_c(&ctx);
    for name in ["1.log", "1.log.20260101-000000.gz", "10.log", "2.log"] {
        fs::write(dir.join(name), "").unwrap();
    }
    let messages = ctx.container_dir(&owner().uid, "c");
    fs::create_dir_all(&messages).unwrap();
    for name in ["00000001", "00000002", "message"] {
        fs::write(messages.join(name), "").unwrap();
    }
    link(&ctx, &owner(), "c", &"abc".into(), 1).unwrap();
    remove(&ctx, &owner(), &container("abc", 1, &dir.join("1.log"))).unwrap();
    assert_eq!(names(&dir), ["10.log", "2.log"]);
    assert_eq!(names(&messages), ["00000002", "message"]);
    assert_eq!(names(&ctx.container_log_root), [""; 0]);
    let outside = ctx.root_dir.join("outside.log");
    fs::write(&outside, "").unwrap();
    remove(&ctx, &owner(), &container("abc", 1, &outside)).unwrap();
    assert!(outside.exists(), "a path outside the log root is not ours");
}

#[test]
fn logs_are_not_removed_through_a_link() {
    let Fixture { ctx, _dir } = fixture();
    let (outside, dir) = (ctx.root_dir.join("outside"), logs_of_c(&ctx));
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("1.log"), "precious").unwrap();
    fs::remove_dir(&dir).unwrap();
    symlink(&outside, &dir).unwrap();
    let log = dir.join("1.log");
    assert!(remove(&ctx, &owner(), &container("abc", 1, &log)).is_err());
    let pod = files_of(&ctx, Vec::new(), &record(("ghi", 3), ("def", 2)));
    assert_eq!(tidy(&ctx, &[pod], Extent::Everything).errors.len(), 1);
    assert_eq!(names(&outside), ["1.log"]);
}

#[test]
fn tidying_restores_links_and_removes_what_is_of_attempts_that_are_gone() {
    let Fixture { ctx, _dir } = fixture();
    let (dir, messages) = (logs_of_c(&ctx), ctx.container_dir(&owner().uid, "c"));
    fs::create_dir_all(&messages).unwrap();
    for name in ["0.log", "0.log.1.gz", "1.log", "2.log", "3.log", "x.log"] {
        fs::write(dir.join(name), "").unwrap();
    }
    for name in ["00000000", "00000002", "message"] {
        fs::write(messages.join(name), "").unwrap();
    }
    link(&ctx, &owner(), "c", &"a0".into(), 0).unwrap();
    link(&ctx, &owner(), "c", &"a3".into(), 3).unwrap();
    let other = Owner {
        uid: "u2".into(),
        ..owner()
    };
    link(&ctx, &other, "c", &"a1".into(), 1).unwrap();
    // The runtime has attempt 2, which runs. Attempt 1 was removed, but its end is on record. Attempt 3 is newer than the look.
    let pod = || {
        let listed = vec![container("a2", 2, &dir.join("2.log"))];
        files_of(&ctx, listed, &record(("a2", 2), ("a1", 1)))
    };
    let tidied = tidy(&ctx, &[pod()], Extent::Links);
    assert_eq!((tidied.restored, tidied.removed), (1, 1));
    let links = ["a1", "a2", "a3"].map(|id| format!("web_shop_c-{id}.log"));
    assert_eq!(names(&ctx.container_log_root), links);
    let tidied = tidy(&ctx, &[pod()], Extent::Everything);
    assert_eq!((tidied.restored, tidied.removed), (0, 3));
    assert!(tidied.errors.is_empty());
    assert_eq!(names(&dir), ["1.log", "2.log", "3.log", "x.log"]);
    assert_eq!(names(&messages), ["00000002", "message"]);
}

#[test]
fn what_is_of_a_start_without_an_end_stays() {
    let Fixture { ctx, _dir } = fixture();
    let log = logs_of_c(&ctx).join("2.log");
    fs::write(&log, "").unwrap();
    link(&ctx, &owner(), "c", &"a2".into(), 2).unwrap();
    let open = files_of(&ctx, Vec::new(), &record(("a2", 2), ("a1", 1)));
    let ended = files_of(&ctx, Vec::new(), &record(("a2", 2), ("a2", 2)));
    assert_eq!((open.is_settled(), ended.is_settled()), (false, true));
    assert_eq!(tidy(&ctx, &[open], Extent::Everything).removed, 0);
    assert_eq!(tidy(&ctx, &[ended], Extent::Everything).removed, 1);
    assert!(log.exists(), "the log of the recorded end is served");
    assert_eq!(names(&ctx.container_log_root), [""; 0]);
}

#[test]
fn long_link_names_keep_the_id() {
    let id = ContainerId::from("f".repeat(64));
    let name = link_name(&"p".repeat(200), &"n".repeat(63), "c", &id);
    assert_eq!(name.len(), MAX_LINK_NAME);
    assert!(name.ends_with(&format!("-{id}.log")));
}
