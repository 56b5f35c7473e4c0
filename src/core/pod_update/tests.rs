use super::*;
use k8s_openapi::api::core::v1::{PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

fn pod(name: &str, uid: &str) -> Pod {
    Pod {
        metadata: ObjectMeta {
            name: Some(name.into()),
            uid: Some(uid.into()),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec::default()),
        status: None,
    }
}

fn from(origin: &str, pod: Pod) -> SourcedPod {
    SourcedPod {
        origin: origin.into(),
        pod: Arc::new(pod),
    }
}

fn set(pods: Vec<SourcedPod>) -> SourceSet {
    SourceSet {
        source: PodSource::File,
        location: "/m".into(),
        reading: Reading::Complete,
        broken: BTreeMap::new(),
        pods,
        set_back: false,
    }
}

const NOW: Stamp = Stamp {
    boot: crate::types::BootId(1),
    boottime_ms: 1_000,
    wall_ms: 1_000,
};

fn free(_: &str) -> bool {
    false
}

fn names(pods: &[Arc<Pod>]) -> Vec<&str> {
    pods.iter().map(|p| p.name()).collect()
}

#[test]
fn difference_of_full_sets() {
    let known = SourcePods::seeded([from("/m/a", pod("a", "1")), from("/m/b", pod("b", "2"))]);
    let mut changed = pod("b", "2");
    changed.metadata.labels = Some([("k".to_owned(), "v".to_owned())].into());
    let merged = merge(
        &known,
        &set(vec![from("/m/b", changed), from("/m/c", pod("c", "3"))]),
        &free,
        NOW,
    );
    assert_eq!(names(&merged.removes), ["a"]);
    assert_eq!(names(&merged.adds), ["c"]);
    assert_eq!(names(&merged.updates), ["b"]);
    assert!(merged.deletes.is_empty() && merged.reconciles.is_empty() && merged.ready);
    let again = merge(
        &merged.pods,
        &set(merged.pods.pods.values().cloned().collect()),
        &free,
        NOW,
    );
    assert_eq!(again.pods, merged.pods);
    assert!(again.removes.is_empty() && again.adds.is_empty() && again.updates.is_empty());
}

#[test]
fn seeded_pod_keeps_what_the_node_gave_it() {
    let mut recorded = pod("a", "1");
    recorded.metadata.annotations = Some([(CONFIG_SEEN.to_owned(), "then".to_owned())].into());
    let known = SourcePods::seeded([from("/m/a", recorded)]);
    let mut again = pod("a", "1");
    again.metadata.annotations = Some([(CONFIG_SEEN.to_owned(), "now".to_owned())].into());
    let merged = merge(&known, &set(vec![from("/m/a", again.clone())]), &free, NOW);
    assert!(merged.updates.is_empty() && merged.adds.is_empty());
    assert_eq!(merged.pods, known);

    again.spec = None;
    let merged = merge(&known, &set(vec![from("/m/a", again)]), &free, NOW);
    assert_eq!(merged.updates.len(), 1);
    assert_eq!(merged.updates[0].annotation(CONFIG_SEEN), Some("then"));
}

#[test]
fn deletion_and_status_have_their_own_operations() {
    let known = SourcePods::seeded([from("", pod("a", "1")), from("", pod("b", "2"))]);
    let mut deleted = pod("a", "1");
    deleted.metadata.deletion_timestamp = Some(Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH));
    let mut reported = pod("b", "2");
    reported.status = Some(PodStatus::default());
    let merged = merge(
        &known,
        &set(vec![from("", deleted), from("", reported)]),
        &free,
        NOW,
    );
    assert_eq!(names(&merged.deletes), ["a"]);
    assert_eq!(names(&merged.reconciles), ["b"]);
    assert!(merged.updates.is_empty());
}

#[test]
fn a_source_that_was_set_back_has_every_status_looked_at() {
    let known = SourcePods::seeded([from("", pod("a", "1"))]);
    let again = |set_back| SourceSet {
        set_back,
        ..set(vec![from("", pod("a", "1"))])
    };
    assert!(
        merge(&known, &again(false), &free, NOW)
            .reconciles
            .is_empty()
    );
    let merged = merge(&known, &again(true), &free, NOW);
    assert_eq!(names(&merged.reconciles), ["a"]);
    assert!(merged.updates.is_empty() && merged.adds.is_empty());
}

#[test]
fn moved_pod_is_an_update_so_that_its_new_origin_is_recorded() {
    let known = SourcePods::seeded([from("/m/a", pod("a", "1"))]);
    let merged = merge(&known, &set(vec![from("/m/b", pod("a", "1"))]), &free, NOW);
    assert_eq!(names(&merged.updates), ["a"]);
    assert!(merged.removes.is_empty() && merged.adds.is_empty());
    assert_eq!(merged.pods.get("1").unwrap().origin, "/m/b");
}

#[test]
fn broken_origin_freezes_its_own_pods_only() {
    let known = SourcePods::seeded([from("/m/a", pod("a", "1")), from("/m/b", pod("b", "2"))]);
    let mut sent = set(vec![from("/m/c", pod("c", "3"))]);
    sent.broken.insert("/m/a".into(), "bad".into());
    let merged = merge(&known, &sent, &free, NOW);
    assert_eq!(names(&merged.removes), ["b"]);
    assert_eq!(names(&merged.adds), ["c"]);
    assert!(merged.pods.get("1").is_some());
}

#[test]
fn absent_path_is_empty_unless_pods_are_recorded_from_it() {
    let mut sent = set(Vec::new());
    sent.reading = Reading::Absent;
    let merged = merge(&SourcePods::default(), &sent, &free, NOW);
    assert!(merged.ready && merged.frozen.is_none());

    let here = SourcePods::seeded([from("/m/a", pod("a", "1"))]);
    let merged = merge(&here, &sent, &free, NOW);
    assert!(merged.removes.is_empty() && merged.frozen.is_some() && merged.ready);
    assert_eq!(merged.pods, here);

    let elsewhere = SourcePods::seeded([from("/other/a", pod("a", "1"))]);
    let merged = merge(&elsewhere, &sent, &free, NOW);
    assert_eq!(names(&merged.removes), ["a"]);
}

#[test]
fn unreadable_source_without_records_is_not_ready() {
    let mut sent = set(Vec::new());
    sent.reading = Reading::Unreadable("permission denied".into());
    assert!(!merge(&SourcePods::default(), &sent, &free, NOW).ready);
}

#[test]
fn first_origin_wins_a_name_and_the_second_waits_for_it() {
    let both = set(vec![
        from("/m/b", pod("a", "2")),
        from("/m/a", pod("a", "1")),
    ]);
    let merged = merge(&SourcePods::default(), &both, &free, NOW);
    assert_eq!(merged.adds[0].uid(), "1".into());
    assert_eq!(merged.duplicates.len(), 1);
    assert_eq!(merged.duplicates[0].origin, "/m/b");
    assert!(merged.duplicates[0].message.contains("/m/a"));

    let second = merge(
        &merged.pods,
        &set(vec![from("/m/b", pod("a", "2"))]),
        &free,
        NOW,
    );
    assert_eq!(second.removes[0].uid(), "1".into());
    assert_eq!(second.adds[0].uid(), "2".into());
}

#[test]
fn a_copy_of_a_manifest_takes_no_name_from_the_pod_that_has_it() {
    let known = SourcePods::seeded([from("/m/web.yaml", pod("web", "1"))]);
    // `/m/web-old.yaml` comes first by name. Identical or edited, the original counts.
    for original in [pod("web", "1"), pod("web", "2")] {
        let both = set(vec![
            from("/m/web-old.yaml", pod("web", "3")),
            from("/m/web.yaml", original.clone()),
        ]);
        let merged = merge(&known, &both, &free, NOW);
        let uid = original.uid();
        assert!(merged.pods.get(uid.as_str()).is_some(), "{uid}");
        assert!(merged.pods.get("3").is_none());
        assert_eq!(merged.duplicates.len(), 1);
        assert_eq!(merged.duplicates[0].origin, "/m/web-old.yaml");
        assert!(merged.duplicates[0].message.contains("/m/web.yaml"));
        let kept = merged.duplicates[0].kept.as_ref();
        assert_eq!(kept.map(|pod| pod.uid()), Some(uid));
    }
    // The copy waits until the original is gone.
    let copy = set(vec![from("/m/web-old.yaml", pod("web", "3"))]);
    let merged = merge(&known, &copy, &free, NOW);
    assert_eq!(names(&merged.removes), ["web"]);
    assert_eq!(merged.adds[0].uid(), "3".into());
}

#[test]
fn a_manifest_that_comes_back_after_a_restart_of_the_agent_is_the_source_of_its_pod() {
    let (original, copy) = ("/m/web.yaml", "/m/web-old.yaml");
    let known = SourcePods::seeded([from(original, pod("web", "1"))]);
    let moved = set(vec![from(copy, pod("web", "2"))]);
    let merged = merge(&known, &moved, &free, NOW);
    // As the store has it: the pods, and the manifests that went away.
    let pods = merged.pods.iter().map(|(_, pod)| pod.clone());
    let left = serde_json::to_vec(&merged.pods.left_manifests()).unwrap();
    let left: Vec<LeftManifest> = serde_json::from_slice(&left).unwrap();
    assert_eq!((left.len(), left[0].origin.as_str()), (1, original));
    let restarted = SourcePods::seeded(pods).with_left(left);
    let both = set(vec![
        from(copy, pod("web", "2")),
        from(original, pod("web", "3")),
    ]);
    for (later, uid) in [(Duration::from_secs(60), "3"), (RETURN, "2")] {
        let merged = merge(&restarted, &both, &free, NOW.plus(later));
        assert!(merged.pods.get(uid).is_some(), "{later:?}");
        assert_eq!(merged.duplicates.len(), 1, "{later:?}");
    }
}

/// The manifests at one moment: file, name of the pod, UID; no pod for one that is broken.
type Listing<'a> = &'a [(&'a str, Option<(&'a str, &'a str)>)];

/// Merges listings a second apart, the first one as known. Returns the file and UID of each pod in the end, and the files
/// that are refused.
fn in_sequence(listings: &[Listing<'_>]) -> (Vec<(String, String)>, Vec<String>) {
    let (mut known, mut refused) = (SourcePods::default(), Vec::new());
    for (n, listing) in (0..).zip(listings) {
        let pods = listing.iter();
        let pods = pods.filter_map(|(file, p)| p.map(|(name, uid)| from(file, pod(name, uid))));
        let mut sent = set(pods.collect());
        let broken = listing.iter().filter(|(_, pod)| pod.is_none());
        sent.broken = broken
            .map(|(file, _)| ((*file).to_owned(), "bad".to_owned()))
            .collect();
        let merged = merge(&known, &sent, &free, NOW.plus(Duration::from_secs(n)));
        (known, refused) = (merged.pods, merged.duplicates);
    }
    let pods = known
        .iter()
        .map(|(uid, pod)| (pod.origin.clone(), uid.to_string()));
    (
        pods.collect(),
        refused.into_iter().map(|d| d.origin).collect(),
    )
}

/// A case: what was done, what was listed, the file and UID of the pod in the end, the files that are refused then.
type Sequence<'a> = (
    &'a str,
    &'a [Listing<'a>],
    (&'a str, &'a str),
    &'a [&'a str],
);

#[test]
fn the_manifest_that_a_pod_came_from_stays_its_source_whatever_wrote_it() {
    const WEB: &str = "/m/web.yaml";
    const COPY: &str = "/m/web-old.yaml";
    let (old, new) = (Some(("web", "old")), Some(("web", "new")));
    let copy = Some(("web", "copy"));
    let cases: [Sequence<'_>; 11] = [
        (
            "cp",
            &[&[(WEB, old)], &[(COPY, copy), (WEB, old)]],
            (WEB, "old"),
            &[COPY],
        ),
        (
            "mv and cp, each seen",
            &[&[(WEB, old)], &[(COPY, copy)], &[(COPY, copy), (WEB, new)]],
            (WEB, "new"),
            &[COPY],
        ),
        (
            "mv and cp in one burst",
            &[&[(WEB, old)], &[], &[(COPY, copy), (WEB, new)]],
            (WEB, "new"),
            &[COPY],
        ),
        (
            "mv and a cp that is half done",
            &[
                &[(WEB, old)],
                &[],
                &[(COPY, copy), (WEB, None)],
                &[(COPY, copy), (WEB, new)],
            ],
            (WEB, "new"),
            &[COPY],
        ),
        (
            "mv, seen, and a cp that is half done",
            &[
                &[(WEB, old)],
                &[(COPY, copy)],
                &[(COPY, copy), (WEB, None)],
                &[(COPY, copy), (WEB, new)],
            ],
            (WEB, "new"),
            &[COPY],
        ),
        (
            "sed -i.bak with its temporary file",
            &[
                &[(WEB, old)],
                &[("/m/sedXyz", new), (WEB, old)],
                &[("/m/sedXyz", new), ("/m/web.yaml.bak", copy)],
                &[(WEB, new), ("/m/web.yaml.bak", copy)],
            ],
            (WEB, "new"),
            &["/m/web.yaml.bak"],
        ),
        (
            "vim with a backup that it removes",
            &[&[(WEB, old)], &[("/m/web.yaml~", copy)], &[(WEB, new)]],
            (WEB, "new"),
            &[],
        ),
        (
            "vim twice, the second time in one burst",
            &[
                &[(WEB, old)],
                &[("/m/web.yaml~", copy)],
                &[(WEB, new)],
                &[],
                &[(WEB, old), ("/m/web.yaml~", copy)],
            ],
            (WEB, "old"),
            &["/m/web.yaml~"],
        ),
        (
            "a rename",
            &[
                &[(WEB, old)],
                &[("/m/new.yaml", new)],
                &[("/m/new.yaml", new)],
            ],
            ("/m/new.yaml", "new"),
            &[],
        ),
        (
            "a copy under another name with the same metadata.uid",
            &[&[(WEB, old)], &[(COPY, Some(("web2", "old"))), (WEB, old)]],
            (WEB, "old"),
            &[COPY],
        ),
        (
            "a rename of the pod beside a copy, both with the same metadata.uid",
            &[&[(WEB, old)], &[(COPY, old), (WEB, Some(("web2", "old")))]],
            (WEB, "old"),
            &[COPY],
        ),
    ];
    for (what, listings, (file, uid), refused) in cases {
        let (pods, not_taken) = in_sequence(listings);
        assert_eq!(pods, [(file.to_owned(), uid.to_owned())], "{what}");
        assert_eq!(not_taken, refused, "{what}");
    }
}

#[test]
fn a_copy_waits_for_a_manifest_that_is_half_written_and_says_so() {
    let known = SourcePods::seeded([from("/m/web.yaml", pod("web", "1"))]);
    let known = merge(&known, &set(Vec::new()), &free, NOW).pods;
    let mut half = set(vec![from("/m/a.yaml", pod("web", "2"))]);
    half.broken.insert("/m/web.yaml".into(), "bad".into());
    let merged = merge(&known, &half, &free, NOW.plus(RETURN * 2));
    assert_eq!(names(&merged.adds), [""; 0]);
    let message = &merged.duplicates[0].message;
    assert!(
        message.contains("/m/a.yaml") && message.contains("/m/web.yaml"),
        "{message}"
    );
    // It is gone for good.
    let only = set(vec![from("/m/a.yaml", pod("web", "2"))]);
    assert_eq!(names(&merge(&merged.pods, &only, &free, NOW).adds), ["web"]);
}

#[test]
fn a_manifest_that_comes_back_late_takes_nothing_from_what_runs() {
    let known = SourcePods::seeded([from("/m/web.yaml", pod("web", "1"))]);
    let copy = || from("/m/z.yaml", pod("web", "2"));
    let moved = merge(&known, &set(vec![copy()]), &free, NOW).pods;
    let both = set(vec![copy(), from("/m/web.yaml", pod("web", "3"))]);
    let at = |after| {
        merge(&moved, &both, &free, NOW.plus(after)).duplicates[0]
            .origin
            .clone()
    };
    assert_eq!(at(RETURN - Duration::from_millis(1)), "/m/z.yaml");
    assert_eq!(at(RETURN), "/m/web.yaml");
}

#[test]
fn uid_of_another_source_is_refused() {
    let taken = |uid: &str| uid == "1";
    let merged = merge(
        &SourcePods::default(),
        &set(vec![from("/m/a", pod("a", "1"))]),
        &taken,
        NOW,
    );
    assert!(merged.adds.is_empty());
    assert!(merged.duplicates[0].message.contains("UID"));
}

#[test]
fn an_equal_copy_is_nothing_new_and_is_not_copied_again() {
    let mut reported = pod("a", "1");
    reported.status = Some(PodStatus::default());
    let known = SourcePods::seeded([from("", reported.clone())]);
    let merged = merge(&known, &set(vec![from("", reported.clone())]), &free, NOW);
    assert_eq!(merged.pods, known);
    let of = |pods: &SourcePods| Arc::clone(&pods.get("1").unwrap().pod);
    assert!(Arc::ptr_eq(&of(&merged.pods), &of(&known)));
    assert!(merged.updates.is_empty() && merged.reconciles.is_empty());
    assert!(same_desired_state(&reported, &pod("a", "1")));

    let mut wanted = from("", reported);
    Arc::make_mut(&mut wanted.pod).metadata.labels =
        Some([("k".to_owned(), "v".to_owned())].into());
    let merged = merge(&known, &set(vec![wanted.clone()]), &free, NOW);
    assert!(Arc::ptr_eq(&merged.updates[0], &wanted.pod));
}

/// The status of a static pod in its manifest changes nothing.
#[test]
fn the_status_in_a_manifest_is_nothing_new() {
    let mut manifest = pod("a", "1");
    manifest.metadata.annotations = Some([(CONFIG_SOURCE.to_owned(), "file".to_owned())].into());
    let known = SourcePods::seeded([from("/m/a", manifest.clone())]);
    manifest.status = Some(PodStatus::default());
    let merged = merge(&known, &set(vec![from("/m/a", manifest)]), &free, NOW);
    assert!(merged.reconciles.is_empty() && merged.updates.is_empty());
}

#[test]
fn each_part_of_the_wish_makes_a_difference_alone() {
    let changes: [fn(&mut Pod); 5] = [
        |pod| pod.spec.as_mut().unwrap().priority = Some(1),
        |pod| pod.metadata.labels = Some([("k".to_owned(), "v".to_owned())].into()),
        |pod| {
            let epoch = k8s_openapi::jiff::Timestamp::UNIX_EPOCH;
            pod.metadata.deletion_timestamp = Some(Time(epoch));
        },
        |pod| pod.metadata.deletion_grace_period_seconds = Some(5),
        |pod| pod.metadata.annotations = Some([("k".to_owned(), "v".to_owned())].into()),
    ];
    for (n, change) in changes.iter().enumerate() {
        let mut changed = pod("a", "1");
        change(&mut changed);
        assert!(!same_desired_state(&pod("a", "1"), &changed), "change {n}");
    }
}

/// A pod that keeps its last valid version at its origin is also sent from another one, which comes before or after
/// it.
#[test]
fn a_frozen_pod_that_another_origin_sends_stays_with_its_own() {
    for other in ["/m/a", "/m/z"] {
        let known = SourcePods::seeded([from("/m/b", pod("p", "1")), from("/m/c", pod("q", "2"))]);
        let mut sent = set(vec![from(other, pod("p", "1"))]);
        sent.broken.insert("/m/b".into(), "bad".into());
        let merged = merge(&known, &sent, &free, NOW);
        assert_eq!(names(&merged.removes), ["q"], "{other}");
        assert_eq!(merged.pods.get("1").unwrap().origin, "/m/b");
        assert_eq!(
            (merged.pods.get("2"), merged.pods.iter().count()),
            (None, 1)
        );
        assert_eq!(merged.duplicates.len(), 1, "{other}");
        assert_eq!(names(&merged.updates), [""; 0], "{other}");
    }
}
