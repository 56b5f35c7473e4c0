use super::*;
use crate::core::state::{FactRecord, Transaction};

const BOOT: BootId = BootId(1);
const NEXT: BootId = BootId(2);

fn at(boot: BootId) -> Stamp {
    Stamp {
        boot,
        boottime_ms: 1_000,
        wall_ms: 1_000,
    }
}

fn files(id: &str, state: FilesState) -> ImageFiles {
    ImageFiles {
        image: "r/x:1".to_owned(),
        id: id.to_owned(),
        state,
        suspected: None,
        lost: None,
    }
}

fn pulling(good: Option<(&str, bool)>, repairs: bool) -> FilesState {
    FilesState::Pulling {
        good: good.map(|(id, whole)| GoodImage {
            id: id.to_owned(),
            whole,
        }),
        repairs,
    }
}

fn suspected() -> FilesState {
    FilesState::Suspect {
        why: "test".to_owned(),
    }
}

#[test]
fn only_what_was_not_whole_at_the_end_of_a_boot_is_a_suspect() {
    use Standing::*;
    let present = Some("a");
    for (what, record, now, present, whole_elsewhere, want) in [
        ("no record", None, NEXT, present, false, Trusted),
        ("no record, no image", None, NEXT, None, false, Absent),
        (
            "whole",
            Some(files("a", FilesState::Whole)),
            NEXT,
            present,
            false,
            Whole,
        ),
        (
            "trusted",
            Some(files("a", FilesState::Trusted)),
            NEXT,
            present,
            false,
            Trusted,
        ),
        (
            "whole, then replaced by hand",
            Some(files("b", FilesState::Whole)),
            NEXT,
            present,
            false,
            Trusted,
        ),
        (
            "pulled in this boot",
            Some(files("", pulling(None, false))),
            BOOT,
            present,
            false,
            Unsynced,
        ),
        (
            "pull cut off by power",
            Some(files("", pulling(None, false))),
            NEXT,
            present,
            false,
            Suspect,
        ),
        (
            "cut off before it was there",
            Some(files("", pulling(None, false))),
            NEXT,
            None,
            false,
            Absent,
        ),
        (
            "whole by another name",
            Some(files("", pulling(None, false))),
            NEXT,
            present,
            true,
            Whole,
        ),
        (
            "cut off, the former image is there",
            Some(files("a", pulling(Some(("a", true)), false))),
            NEXT,
            present,
            false,
            Whole,
        ),
        (
            "cut off, the former image was trusted",
            Some(files("a", pulling(Some(("a", false)), false))),
            NEXT,
            present,
            false,
            Trusted,
        ),
        (
            "cut off, the new image is there",
            Some(files("b", pulling(Some(("b", true)), false))),
            NEXT,
            present,
            false,
            Suspect,
        ),
        (
            "suspect",
            Some(files("a", suspected())),
            BOOT,
            present,
            false,
            Suspect,
        ),
        (
            "suspect, then replaced by hand",
            Some(files("b", suspected())),
            BOOT,
            present,
            false,
            Trusted,
        ),
        (
            "removal cut off",
            Some(files("a", FilesState::Removed)),
            NEXT,
            present,
            false,
            Suspect,
        ),
        (
            "brought again by another name",
            Some(files("a", FilesState::Removed)),
            NEXT,
            present,
            true,
            Whole,
        ),
        (
            "removed",
            Some(files("a", FilesState::Removed)),
            NEXT,
            None,
            false,
            Owed,
        ),
        (
            "repair cut off",
            Some(files("a", pulling(None, true))),
            NEXT,
            None,
            false,
            Owed,
        ),
        (
            "repair cut off by power",
            Some(files("a", pulling(None, true))),
            NEXT,
            present,
            false,
            Suspect,
        ),
    ] {
        let record = record.as_ref().map(|files| (files, at(BOOT)));
        assert_eq!(
            standing(record, now, present, whole_elsewhere),
            want,
            "{what}"
        );
    }
}

#[test]
fn a_pull_that_fails_leaves_what_was_there_as_it_was() {
    for (what, old, want) in [
        ("nothing", None, AfterFailure::Forget),
        (
            "whole",
            Some(files("a", FilesState::Whole)),
            AfterFailure::Put(files("a", FilesState::Whole)),
        ),
        (
            "trusted",
            Some(files("a", FilesState::Trusted)),
            AfterFailure::Put(files("a", FilesState::Trusted)),
        ),
        (
            "removed",
            Some(files("a", FilesState::Removed)),
            AfterFailure::Put(files("a", FilesState::Removed)),
        ),
    ] {
        let is_removed = |old: &ImageFiles| old.state == FilesState::Removed;
        let present = if old.as_ref().is_some_and(is_removed) {
            Presence::Absent
        } else {
            Presence::Unknown
        };
        let begun = begun(old.as_ref(), "r/x:1", present).unwrap();
        assert!(matches!(begun.state, FilesState::Pulling { .. }), "{what}");
        assert_eq!(failed(Some(&begun)), want, "{what}");
        // Begun twice, by two pods.
        let again = super::begun(Some(&begun), "r/x:1", Presence::Unknown).unwrap();
        assert_eq!(failed(Some(&again)), want, "{what}");
    }
    assert_eq!(
        begun(Some(&files("a", suspected())), "r/x:1", Presence::Is("a")),
        None
    );
    assert_eq!(failed(Some(&files("a", suspected()))), AfterFailure::Keep);
    assert_eq!(failed(None), AfterFailure::Keep);
}

#[test]
fn an_image_that_was_there_before_the_agent_is_what_a_first_pull_falls_back_to() {
    let begun = begun(None, "r/x:1", Presence::Is("old")).unwrap();
    let record = Some((&begun, at(BOOT)));
    assert_eq!(
        standing(record, NEXT, Some("old"), false),
        Standing::Trusted
    );
    assert_eq!(
        standing(record, NEXT, Some("new"), false),
        Standing::Suspect
    );
}

#[test]
fn only_what_was_removed_before_is_repaired_by_a_pull() {
    for (what, old, state, repaired) in [
        ("first pull", None, FilesState::Whole, false),
        (
            "again",
            Some(files("a", FilesState::Whole)),
            FilesState::Whole,
            false,
        ),
        (
            "the removal has failed",
            Some(files("a", FilesState::Removed)),
            FilesState::Removed,
            false,
        ),
        (
            "removed, and the name has another image now",
            Some(files("b", FilesState::Removed)),
            FilesState::Whole,
            true,
        ),
        (
            "repair",
            Some(files("a", pulling(None, true))),
            FilesState::Whole,
            true,
        ),
        (
            "pull",
            Some(files("", pulling(None, false))),
            FilesState::Whole,
            false,
        ),
        (
            "not removed",
            Some(files("a", suspected())),
            suspected(),
            false,
        ),
        (
            "the name has another image now",
            Some(files("b", suspected())),
            FilesState::Whole,
            true,
        ),
    ] {
        let (new, repairs) = finished(old.as_ref(), "r/x:1", "a", false);
        assert_eq!((new.state, repairs), (state, repaired), "{what}");
        assert_eq!(new.id, "a", "{what}");
    }
}

#[test]
fn a_pull_repairs_what_was_removed_only_if_the_damaged_image_is_gone() {
    let removed = files("a", FilesState::Removed);
    for (present, want) in [
        (Presence::Absent, Some(pulling(None, true))),
        (Presence::Is("a"), None),
        (Presence::Unknown, None),
        (Presence::Is("b"), Some(pulling(Some(("b", false)), true))),
    ] {
        let begun = begun(Some(&removed), "r/x:1", present);
        assert_eq!(begun.map(|files| files.state), want, "{present:?}");
    }
}

#[test]
fn damaged_files_are_not_whole_by_another_name() {
    let state = |others: &[(&str, FilesState)]| {
        let mut state = State::default();
        for (name, of) in others {
            let record = FactRecord {
                mark: String::new(),
                layout: 1,
                data: serde_json::to_vec(&files("a", of.clone())).unwrap(),
                at: at(BOOT),
            };
            for mutation in &Transaction::new().put(files_key(name), record).mutations {
                state.apply(mutation, 1);
            }
        }
        state
    };
    for (own, other, want) in [
        (None, suspected(), true),
        (None, FilesState::Removed, true),
        (Some(pulling(None, false)), FilesState::Removed, true),
        (Some(pulling(None, true)), FilesState::Removed, false),
        (None, FilesState::Whole, false),
    ] {
        let mut all = vec![("r/y:1", other)];
        all.extend(own.map(|own| ("r/x:1", own)));
        let state = state(&all);
        assert_eq!(is_doubted(&state, "r/x:1", "a"), want, "{all:?}");
        assert!(!is_doubted(&state, "r/x:1", "b"), "{all:?}");
    }
    let (doubted, repaired) = finished(None, "r/x:1", "a", true);
    assert!(matches!(doubted.state, FilesState::Suspect { .. }) && !repaired);
    for (other, boot, want) in [
        (FilesState::Whole, NEXT, true),
        (pulling(None, true), BOOT, true),
        (pulling(None, true), NEXT, false),
        (pulling(None, false), BOOT, false),
        (FilesState::Removed, BOOT, false),
    ] {
        let state = state(&[("r/y:1", other.clone())]);
        assert_eq!(is_brought(&state, "a", boot), want, "{other:?}");
    }
}

#[test]
fn what_was_there_already_is_noted_once_and_takes_nothing_back() {
    let trusted = files("a", FilesState::Trusted);
    assert_eq!(noticed(None, "r/x:1", "a"), Some(trusted.clone()));
    assert_eq!(noticed(Some(&trusted), "r/x:1", "a"), None);
    assert_eq!(
        noticed(Some(&files("b", FilesState::Whole)), "r/x:1", "a"),
        Some(trusted)
    );
    for state in [suspected(), FilesState::Removed, pulling(None, false)] {
        assert_eq!(noticed(Some(&files("b", state)), "r/x:1", "a"), None);
    }
}

#[test]
fn errors_that_point_to_the_files_of_an_image_are_told_from_others() {
    use Evidence::*;
    for (error, want) in [
        (
            "failed to create containerd container: failed to stat parent: stat /var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/214/fs: no such file or directory",
            Some(Storage),
        ),
        (
            "failed to create containerd container: failed to create snapshot: missing parent \"k8s.io/2/sha256:ab\" bucket: not found",
            Some(Storage),
        ),
        (
            "failed to create containerd container: parent snapshot sha256:ab does not exist: not found",
            Some(Storage),
        ),
        (
            "failed to create containerd task: failed to create shim task: failed to mount rootfs component &{overlay overlay [workdir=/w upperdir=/u lowerdir=/l]}: no such file or directory: unknown",
            Some(Storage),
        ),
        (
            "failed to create containerd container: content digest sha256:ab: not found",
            Some(Storage),
        ),
        (
            "failed to pull and unpack image \"x\": failed to extract layer: blob sha256:ab expected at /var/lib/containerd/io.containerd.content.v1.content/blobs/sha256/ab: blob not found: not found",
            Some(Storage),
        ),
        (
            "error creating pod sandbox with name \"k8s_x\": layer not known",
            Some(Storage),
        ),
        (
            "reading image: locating item named \"manifest\" for image with ID \"ab\" (consider removing the image to resolve the issue): file does not exist",
            Some(Storage),
        ),
        (
            "creating read-write layer with ID \"ab\": Stat /var/lib/containers/storage/overlay/cd: no such file or directory",
            Some(Storage),
        ),
        (
            "mounting: readlink /var/lib/containers/storage/overlay/l/ABC: no such file or directory",
            Some(Storage),
        ),
        (
            "failed to create shim task: OCI runtime create failed: runc create failed: exec /bin/app: exec format error: unknown",
            Some(Format),
        ),
        (
            "OCI runtime create failed: unable to start container process: exec: \"/bin/app\": stat /bin/app: no such file or directory: unknown",
            Some(Program),
        ),
        (
            "OCI runtime create failed: unable to start container process: exec: \"app\": executable file not found in $PATH: unknown",
            Some(Program),
        ),
        (
            "crun: executable file `app` not found in $PATH: No such file or directory: OCI runtime attempted to invoke a command that was not found",
            Some(Program),
        ),
        // Files that are not the image's.
        (
            "failed to generate container \"x\" spec: failed to stat \"/host/path\": stat /host/path: no such file or directory",
            None,
        ),
        ("failed to mount rootfs component: invalid argument", None),
        (
            "error unpacking image: unexpected media type application/octet-stream for sha256:ab12: not found",
            Some(Evidence::Storage),
        ),
        (
            "failed to reserve container name \"m_p_ns_u_0\": name is reserved for \"ab\"",
            None,
        ),
        (
            "failed to create containerd container: write /var/lib/containerd/x: no space left on device",
            None,
        ),
        (
            "failed to pull image: dial tcp 10.0.0.1:443: connect: no route to host",
            None,
        ),
        ("", None),
    ] {
        assert_eq!(evidence(error), want, "{error}");
    }
}

#[test]
fn an_import_that_fails_by_content_that_cannot_be_decoded_is_told_from_others() {
    for (said, expected) in [
        ("unable to resolve platform: unexpected EOF", true),
        (
            "unable to resolve platform: unexpected end of JSON input",
            true,
        ),
        (
            "unable to resolve platform: invalid character '\\x00' looking for beginning of value",
            true,
        ),
        (
            "blob sha256:ab expected at /b/ab: blob not found: not found",
            true,
        ),
        ("write /b/ingest/x: no space left on device", false),
        (
            "failed to dial \"/run/c.sock\": context deadline exceeded",
            false,
        ),
    ] {
        let said = format!("ctr images import /i/a.tar: exit status: 1: ctr: {said}");
        assert_eq!(is_content_unreadable(&said), expected, "{said}");
    }
}

#[test]
fn what_a_pod_names_is_no_evidence() {
    use Evidence::*;
    let runc = |said: &str| {
        format!(
            "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: {said}: unknown"
        )
    };
    for (error, want) in [
        (
            runc("exec: \"content digest sha256:x\": executable file not found in $PATH"),
            Some(Program),
        ),
        (
            runc(
                "exec: \"/a\\\"b: blob not found\": stat /a\"b: blob not found: no such file or directory",
            ),
            None,
        ),
        (
            runc("exec: \"exec format error\": executable file not found in $PATH"),
            Some(Program),
        ),
        (
            runc(
                "exec: \"/x: exec format error\": stat /x: exec format error: no such file or directory",
            ),
            Some(Program),
        ),
        (runc("error mounting \"/layer not known\" to rootfs at \"/m\": stat /layer not known: no such file or directory"), None),
        (runc("chdir to cwd (\"/layer not known\") set in config.json failed: no such file or directory"), None),
        (
            "failed to generate container \"c\" spec: failed to stat \"/blob not found\": stat /blob not found: no such file or directory".to_owned(),
            None,
        ),
        (
            "failed to resolve symlink \"/layer not known\": lstat /layer not known: no such file or directory".to_owned(),
            None,
        ),
        (
            "crun: executable file `layer not known` not found in $PATH: No such file or directory: OCI runtime attempted to invoke a command that was not found".to_owned(),
            Some(Program),
        ),
        (
            "crun: exec container process `/layer not known`: Exec format error: OCI runtime error".to_owned(),
            Some(Format),
        ),
    ] {
        assert_eq!(evidence(&error), want, "{error}");
    }
}

#[test]
fn a_failure_makes_a_suspect_once_per_boot_and_of_a_whole_image_by_storage_alone() {
    use Evidence::*;
    for (evidence, standing, want) in [
        (Storage, Standing::Whole, true),
        (Format, Standing::Whole, false),
        (Program, Standing::Whole, false),
        (Storage, Standing::Trusted, true),
        (Format, Standing::Trusted, true),
        (Program, Standing::Trusted, false),
        (Program, Standing::Unsynced, true),
        (Storage, Standing::Suspect, false),
        (Storage, Standing::Owed, false),
        (Storage, Standing::Absent, false),
    ] {
        let now = makes_suspect(evidence, standing, None, NEXT);
        assert_eq!(now, want, "{evidence:?} {standing:?}");
        let of_earlier_boot = makes_suspect(evidence, standing, Some(BOOT.0), NEXT);
        assert_eq!(of_earlier_boot, want, "{evidence:?} {standing:?}");
        assert!(!makes_suspect(evidence, standing, Some(NEXT.0), NEXT));
    }
    let failed = suspect(None, "r/x:1", "a", "why", Some(NEXT));
    assert_eq!(failed.suspected, Some(NEXT.0));
    let kept = suspect(Some(&failed), "r/x:1", "a", "why", None);
    assert_eq!(kept.suspected, Some(NEXT.0));
}

#[test]
fn an_unchanged_archive_is_imported_again_only_when_an_image_is_missing() {
    let stamp = ArchiveStamp {
        inode: 1,
        size: 2,
        modified_ns: 3,
    };
    let changed = ArchiveStamp { size: 4, ..stamp };
    let good = ArchiveRecord {
        name: "x.tar".to_owned(),
        stamp,
        images: vec!["a".to_owned(), "b".to_owned()],
        error: String::new(),
    };
    let bad = ArchiveRecord {
        error: "damaged".to_owned(),
        ..good.clone()
    };
    for (record, stamp, is_first, present, want) in [
        (None, stamp, true, "ab", ArchiveStep::Read),
        (Some(&good), stamp, true, "ab", ArchiveStep::Keep),
        (Some(&good), stamp, false, "ab", ArchiveStep::Keep),
        (Some(&good), stamp, true, "a", ArchiveStep::Import),
        (Some(&good), changed, false, "ab", ArchiveStep::Read),
        (Some(&bad), stamp, false, "", ArchiveStep::Keep),
        (Some(&bad), stamp, true, "", ArchiveStep::Read),
        (Some(&bad), changed, false, "", ArchiveStep::Read),
    ] {
        let step = archive_step(record, stamp, is_first, |image| present.contains(image));
        assert_eq!(step, want, "{record:?} {stamp:?} {is_first} {present}");
    }
}

#[test]
fn an_image_that_was_removed_meanwhile_is_nothing_to_fall_back_to() {
    for state in [FilesState::Whole, FilesState::Trusted] {
        let old = files("a", state.clone());
        let absent = begun(Some(&old), "r/x:1", Presence::Absent).unwrap();
        assert_eq!(
            standing(Some((&absent, at(BOOT))), NEXT, Some("a"), false),
            Standing::Suspect,
            "{state:?}"
        );
        assert!(!was_there(Some(&absent), "a"), "{state:?}");
        let other = begun(Some(&old), "r/x:1", Presence::Is("b")).unwrap();
        assert_eq!(
            standing(Some((&other, at(BOOT))), NEXT, Some("b"), false),
            Standing::Trusted,
            "{state:?}"
        );
    }
    let whole = begun(
        Some(&files("a", FilesState::Whole)),
        "r/x:1",
        Presence::Is("a"),
    )
    .unwrap();
    assert!(!was_there(Some(&whole), "a"), "the agent has brought it");
    let trusted = begun(
        Some(&files("a", FilesState::Trusted)),
        "r/x:1",
        Presence::Is("a"),
    );
    assert!(was_there(trusted.as_ref(), "a"));
}

fn container(of: serde_json::Value) -> Container {
    serde_json::from_value(of).unwrap()
}

#[test]
fn a_log_with_the_line_of_the_runtime_alone_is_evidence_against_the_image() {
    let said = "exec /app/server: exec format error";
    let of_crun = "exec container process `/app/server`: Exec format error";
    let line = |stream: &str, said: &str| format!("2026-11-27T02:00:00.0Z {stream} F {said}\n");
    let own = line("stderr", said);
    for (what, log, want) in [
        ("runc", own.clone(), Some(said)),
        ("crun", line("stderr", of_crun), Some(of_crun)),
        ("more lines", format!("{own}{own}"), None),
        ("no whole line", own.trim_end().to_owned(), None),
        ("of the program", line("stdout", said), None),
        ("a part", own.replace(" F ", " P "), None),
        ("other words", line("stderr", &format!("sh: {said}")), None),
        (
            "no path",
            line("stderr", "exec server: exec format error"),
            None,
        ),
        ("empty", String::new(), None),
    ] {
        assert_eq!(evidence_in_log(log.as_bytes()), want, "{what}");
    }
    assert_eq!(evidence(said), Some(Evidence::Format));
    assert_eq!(evidence_in_log(b"\xff stderr F x\n"), None);
}

#[test]
fn a_log_is_read_after_repeated_instant_failures_of_the_own_program_of_an_image() {
    let ended = |exit_code, ran_for: i64| ContainerStatus {
        id: crate::types::ContainerId::new("c1"),
        name: "c".to_owned(),
        attempt: 1,
        sandbox_id: crate::types::ContainerId::new("s1"),
        state: ContainerState::Exited,
        created_at_ns: 1,
        image: "x:1".to_owned(),
        image_ref: "id".to_owned(),
        hash: String::new(),
        started_at_ns: 1_000,
        finished_at_ns: 1_000 + ran_for,
        exit_code,
        reason: "Error".to_owned(),
        message: String::new(),
        log_path: String::new(),
        user: None,
    };
    let second = 1_000_000_000;
    let plain = serde_json::json!({"name": "c", "volumeMounts": [
        {"name": "t", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"},
    ]});
    for (what, of, status, attempt, want) in [
        ("as it is", plain.clone(), ended(255, second), 2, true),
        (
            "the first failure",
            plain.clone(),
            ended(255, second),
            1,
            false,
        ),
        ("it ran", plain.clone(), ended(255, 60 * second), 2, false),
        (
            "it has ended well",
            plain.clone(),
            ended(0, second),
            2,
            false,
        ),
        (
            "another command",
            serde_json::json!({"name": "c", "command": ["/bin/x"]}),
            ended(255, second),
            2,
            false,
        ),
        (
            "arguments for a shell",
            serde_json::json!({"name": "c", "args": ["-c", "echo"]}),
            ended(255, second),
            2,
            false,
        ),
        (
            "a terminal",
            serde_json::json!({"name": "c", "tty": true}),
            ended(255, second),
            2,
            false,
        ),
    ] {
        let got = is_log_of_interest(&container(of), &status, attempt);
        assert_eq!(got, want, "{what}");
    }
    // With each of these a pod can write what it likes, with the program of the image.
    for (field, value) in [
        (
            "env",
            serde_json::json!([{"name": "LD_PRELOAD", "value": "/data/x.so"}]),
        ),
        (
            "envFrom",
            serde_json::json!([{"configMapRef": {"name": "x"}}]),
        ),
        (
            "volumeMounts",
            serde_json::json!([{"name": "v", "mountPath": "/etc/ld.so.preload"}]),
        ),
        (
            "lifecycle",
            serde_json::json!({"postStart": {"exec": {"command": ["/x"]}}}),
        ),
        (
            "livenessProbe",
            serde_json::json!({"exec": {"command": ["/x"]}}),
        ),
    ] {
        let of = container(serde_json::json!({"name": "c", field: value}));
        let got = is_log_of_interest(&of, &ended(255, second), 2);
        assert!(!got, "{field}");
    }
}

#[test]
fn errors_of_sandboxes_are_evidence_if_content_is_missing() {
    for (error, want) in [
        (
            "failed to start sandbox \"ab\": failed to get sandbox image \"registry.k8s.io/pause:3.10\": failed to get image: content digest sha256:12: not found",
            true,
        ),
        (
            "failed to create containerd container: failed to create snapshot: missing parent \"k8s.io/3/sha256:12\" bucket: not found",
            true,
        ),
        (
            "failed to start sandbox \"ab\": failed to create containerd task: failed to create shim task: failed to mount rootfs component: mount source: \"overlay\", target: \"/run/x/rootfs\", fstype: overlay, flags: 0, err: no such file or directory",
            true,
        ),
        (
            "failed to setup network for sandbox \"ab\": plugin type=\"calico\" failed (add): stat /var/lib/calico/nodename: no such file or directory",
            false,
        ),
        (
            "failed to get sandbox runtime: no runtime for \"blob not found\" is configured",
            false,
        ),
    ] {
        let is_storage = evidence(error) == Some(Evidence::Storage);
        assert_eq!(is_storage, want, "{error}");
    }
}
