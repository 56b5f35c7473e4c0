//! Rows, selectors, histories and changes over a small state.

use k8s_openapi::api::core::v1 as api;
use serde_json::json;

use super::*;
use crate::core::claims::{ClaimDevice, ClaimId, ClaimRecord, DriverClaim, claim_key};
use crate::core::state::{
    ContainerRecord, FactRecord, JournalRecord, Mutation, ObjectRecord, PodRecord, QueueRecord,
    Record, SourceRecord, StatusRecord, TerminationCause, WorkerPhase, WorkerRecord, journal_key,
};
use crate::types::{BootId, Json, PodSource, Stamp};

const WEB: &str = "aaaa-web";
const OLD_WEB: &str = "bbbb-web";
const DB: &str = "aabb-db";

fn at(boot: u64, seconds: i64) -> Stamp {
    Stamp {
        boot: BootId(boot),
        boottime_ms: seconds * 1000,
        wall_ms: seconds * 1000,
    }
}

struct Builder(State, u64);

impl Builder {
    fn put<R: Record>(&mut self, key: &str, record: R) {
        self.1 += 1;
        let mutation = Mutation::Put {
            key: key.into(),
            record: record.into_any(),
        };
        self.0.apply(&mutation, self.1);
    }

    fn pod(&mut self, uid: &str, namespace: &str, name: &str, phase: &str) {
        let pod: api::Pod = serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "spec": {"containers": [{"name": "main", "env": [{"name": "A", "value": "plain"}]}]},
        }))
        .unwrap();
        self.put(
            uid,
            PodRecord {
                source: PodSource::File,
                origin: "/manifests/web.yaml".into(),
                pod: Json::new(pod),
                first_seen: at(1, 100),
                confirmed_epoch: 1,
            },
        );
        let status: api::PodStatus =
            serde_json::from_value(json!({"phase": phase, "podIP": "10.0.0.1"})).unwrap();
        self.put(
            uid,
            StatusRecord {
                name: name.into(),
                namespace: namespace.into(),
                status: Json::new(status),
                version: 3,
                acknowledged: 0,
                at: at(1, 101),
                finished: false,
            },
        );
    }

    fn line(&mut self, sequence: u64, generation: u64, boot: u64, uid: Option<&str>, what: &str) {
        self.put(
            &journal_key(sequence),
            JournalRecord {
                at: at(boot, 100 + i64::try_from(sequence).unwrap()),
                generation,
                pod: uid.map(Into::into),
                what: what.into(),
                why: "because".into(),
            },
        );
    }
}

fn state() -> State {
    let mut b = Builder(State::default(), 0);
    b.pod(WEB, "default", "web", "Running");
    b.pod(DB, "data", "db", "Pending");
    b.put(
        &format!("{WEB}/main"),
        ContainerRecord {
            restart_count: 2,
            ..ContainerRecord::new()
        },
    );
    b.put(
        WEB,
        QueueRecord {
            due: at(1, 160),
            why: "resync".into(),
        },
    );
    b.line(1, 1, 1, Some(WEB), "admitted");
    b.line(2, 2, 1, None, "agent started");
    b.line(3, 2, 1, Some(DB), "admitted");
    b.line(4, 2, 1, Some(WEB), "container started");
    b.line(5, 4, 2, Some(WEB), "container started");
    b.0
}

#[test]
fn a_pod_that_was_forgotten_is_found_by_its_name() {
    let mut b = Builder(state(), 100);
    b.line(6, 4, 2, Some("cccc-gone"), "admitted");
    b.put(
        &journal_key(7),
        JournalRecord {
            at: at(2, 107),
            generation: 4,
            pod: Some("cccc-gone".into()),
            what: "forgotten".into(),
            why: "batch/gone is gone and cleaned up".into(),
        },
    );
    let state = b.0;
    for name in ["batch/gone", "gone", "cccc"] {
        let history = history(&state, name).unwrap();
        assert_eq!(history.pods, [PodUid::new("cccc-gone")], "{name}");
        assert_eq!(history.items.len(), 2, "{name}");
        let HistoryItem::Entry { entry } = &history.items[0] else {
            panic!("{name}: {history:?}");
        };
        assert_eq!(entry["namespace"], "batch");
        assert_eq!(entry["name"], "gone");
    }
    let journal = View::Table(Table::Journal);
    let by_namespace = Selector {
        namespace: Some("batch".into()),
        ..Selector::default()
    };
    let found = dump(&state, Vec::new(), &query(&[journal], by_namespace)).unwrap();
    assert_eq!(found.rows(journal).count(), 2);
    let all = query(&[View::Overview], Selector::default());
    let overview = dump(&state, Vec::new(), &all).unwrap();
    assert!(overview.rows(View::Overview).all(|r| r["name"] != "gone"));
}

#[test]
fn claims_show_their_pods_drivers_and_devices() {
    let device = ClaimDevice {
        pool: "pool".into(),
        device: "d0".into(),
        cdi: vec!["v/c=0".into()],
        ..ClaimDevice::default()
    };
    let drivers = [("gpu", Some(BootId(1))), ("nic", None)].map(|(name, prepared)| {
        let devices = prepared.map(|_| device.clone()).into_iter().collect();
        (name.to_owned(), DriverClaim { prepared, devices })
    });
    let record = ClaimRecord {
        uid: "c1".into(),
        pods: [(PodUid::new(WEB), ["g".to_owned()].into())].into(),
        drivers: drivers.into(),
    };
    let mut b = Builder(state(), 100);
    let key = claim_key(&ClaimId::new("default", "c"));
    b.put(&key, FactRecord::of(&record, at(1, 1)));
    let all = query(&[View::Claims], Selector::default());
    let found = dump(&b.0, Vec::new(), &all).unwrap();
    let rows: Vec<_> = found.rows(View::Claims).collect();
    let shown =
        |row: &Row| [&row["claim"], &row["name"], &row["driver"], &row["state"]].map(Value::clone);
    assert_eq!(
        shown(rows[0]),
        ["c", "web", "gpu", "Prepared"].map(Value::from)
    );
    assert_eq!(
        shown(rows[1]),
        ["c", "web", "nic", "Asked"].map(Value::from)
    );
    assert_eq!(rows[0]["devices"], json!(["pool/d0"]));
    assert_eq!(rows[0]["cdi"], json!(["v/c=0"]));
    assert_eq!(rows[0]["boot"], "0000000000000001");
    assert_eq!(rows[1]["boot"], Value::Null);
}

fn query(views: &[View], selector: Selector) -> Query {
    Query {
        views: views.to_vec(),
        selector,
    }
}

fn keys(dump: &Dump, view: View) -> Vec<String> {
    dump.rows(view).map(key_of).collect()
}

#[test]
fn every_table_has_a_name_that_parses_in_both_numbers() {
    for view in View::all() {
        assert_eq!(view.name().parse(), Ok(view));
    }
    assert_eq!("pod".parse(), Ok(View::Table(Table::Pods)));
    assert_eq!("status".parse(), Ok(View::Table(Table::Statuses)));
    let error = "podz".parse::<View>().unwrap_err().to_string();
    assert!(
        error.contains("overview, node, events, devices, claims, pressure, shutdown, meta, pods"),
        "{error}"
    );
}

#[test]
fn the_overview_joins_what_the_tables_know() {
    let dump = dump(
        &state(),
        Vec::new(),
        &query(&[View::Overview], Selector::default()),
    )
    .unwrap();
    let rows: Vec<_> = dump.rows(View::Overview).collect();
    assert_eq!(rows.len(), 2);
    assert_eq!(rows[0]["name"], "db", "sorted by namespace");
    let web = rows[1];
    assert_eq!(web["restarts"], 2);
    assert_eq!(web["status"], "Running");
    assert_eq!(web["ip"], "10.0.0.1");
    assert_eq!(web["containers"], 1);
    assert_eq!(web["nextSync"]["time"], "1970-01-01T00:02:40.000Z");
    assert_eq!(web["nextSync"]["boot"], "0000000000000001");
}

#[test]
fn a_finished_pod_has_no_next_sync() {
    let mut b = Builder(state(), 100);
    b.put(
        WEB,
        WorkerRecord {
            full_name: "web_default".into(),
            queued: at(1, 100),
            started: Some(at(1, 100)),
            phase: WorkerPhase::Finished {
                since: at(1, 110),
                cause: TerminationCause::Completed,
            },
            deleted: false,
            restart_requested: false,
            runtime_only: false,
        },
    );
    let overview = query(&[View::Overview], Selector::default());
    let dump = dump(&b.0, Vec::new(), &overview).unwrap();
    let web = dump.rows(View::Overview).nth(1).unwrap();
    assert_eq!(web["worker"], "Finished");
    assert_eq!(web["nextSync"], Value::Null);
}

#[test]
fn selectors_combine_and_reach_every_table_of_a_pod() {
    let state = state();
    let views = View::all();
    let select = |selector| dump(&state, Vec::new(), &query(&views, selector));
    let by_namespace = Selector {
        namespace: Some("default".into()),
        ..Selector::default()
    };
    let found = select(by_namespace).unwrap();
    assert_eq!(keys(&found, View::Table(Table::Pods)), [WEB]);
    assert_eq!(keys(&found, View::Table(Table::Queue)), [WEB]);
    assert_eq!(keys(&found, View::Table(Table::Journal)).len(), 3);

    let by_phase = Selector {
        phase: Some("Pending".into()),
        ..Selector::default()
    };
    assert_eq!(
        keys(&select(by_phase.clone()).unwrap(), View::Table(Table::Pods)),
        [DB]
    );
    let contradiction = Selector {
        name: Some("web".into()),
        ..by_phase
    };
    let error = select(contradiction).unwrap_err().to_string();
    assert!(
        error.contains("with name \"web\" with phase \"Pending\" not found"),
        "{error}"
    );

    for pod in ["web", "default/web", "aaaa"] {
        let one = Selector {
            pod: Some(pod.into()),
            ..Selector::default()
        };
        let found = select(one).unwrap();
        assert_eq!(keys(&found, View::Table(Table::Pods)), [WEB], "{pod}");
    }
    let nobody = Selector {
        phase: Some("Failed".into()),
        ..Selector::default()
    };
    let none = select(nobody).expect("an empty phase is an answer");
    assert!(keys(&none, View::Table(Table::Pods)).is_empty());
}

#[test]
fn a_query_survives_its_query_string() {
    let query = query(
        &[View::Overview, View::Table(Table::Pleg)],
        Selector {
            pod: Some("a b/c&d=e".into()),
            phase: Some("Running".into()),
            ..Selector::default()
        },
    );
    assert_eq!(
        Query::from_query_string(&query.to_query_string()),
        Ok(query)
    );
    assert!(Query::from_query_string("tables=nope").is_err());
    assert!(Query::from_query_string("colour=red").is_err());
}

#[test]
fn history_marks_every_restart_with_its_first_line_and_the_boot() {
    let mut b = Builder(state(), 100);
    b.line(6, 4, 2, Some(OLD_WEB), "deleted");
    let history = history(&b.0, "web").unwrap();
    let shown: Vec<_> = history
        .items
        .iter()
        .map(|item| match item {
            HistoryItem::Entry { entry } => entry["what"].as_str().unwrap().to_owned(),
            HistoryItem::Restart {
                from_generation,
                to_generation,
                at,
                rebooted,
            } => format!(
                "{from_generation}>{to_generation} {} {rebooted}",
                at["bootTimeMs"]
            ),
        })
        .collect();
    assert_eq!(
        shown,
        [
            "admitted",
            "1>2 102000 false",
            "container started",
            "2>4 105000 true",
            "container started"
        ]
    );
    let summed: Vec<_> = history
        .containers
        .iter()
        .map(|c| (&c["key"], &c["restartCount"]))
        .collect();
    assert_eq!(summed, [(&json!("aaaa-web/main"), &json!(2))]);
    let other = super::history(&b.0, "db").unwrap();
    assert!(other.containers.is_empty(), "{other:?}");
    assert!(super::history(&b.0, "nobody").is_err());
    assert_eq!(super::history(&b.0, "bbbb").unwrap().items.len(), 1);
}

// Invariant API-10.
#[test]
fn secrets_are_never_shown() {
    let mut b = Builder(State::default(), 0);
    let mut object = |key: &str, encrypted, data: &str| {
        b.put(
            key,
            ObjectRecord {
                resource_version: "7".into(),
                encrypted,
                data: data.as_bytes().to_vec(),
                at: at(1, 1),
            },
        );
    };
    let plain = r#"{"data":{"password":"hunter2"}}"#;
    object("secrets/default/cipher", true, plain);
    object("secrets/default/plain", false, plain);
    object("serviceaccounttokens/default/t", false, plain);
    object(
        "configmaps/default/disguised",
        false,
        r#"{"kind":"Secret","data":{"password":"hunter2"}}"#,
    );
    object("configmaps/default/open", false, r#"{"data":{"a":"b"}}"#);
    let view = View::Table(Table::Objects);
    let dump = dump(&b.0, Vec::new(), &query(&[view], Selector::default())).unwrap();
    let text = serde_json::to_string(&dump).unwrap();
    assert!(!text.contains("hunter2"), "{text}");
    assert_eq!(dump.rows(view).count(), 5);
    assert!(text.contains(r#""object":{"data":{"a":"b"}}"#), "{text}");
}

#[test]
fn changes_are_told_as_in_a_kubernetes_watch() {
    let before = state();
    let mut b = Builder(before.clone(), 100);
    b.pod(WEB, "default", "web", "Failed");
    b.pod("cccc", "default", "new", "Pending");
    let mut after = b.0;
    for table in [Table::Pods, Table::Journal] {
        let key = match table {
            Table::Pods => DB.to_owned(),
            _ => journal_key(1),
        };
        after.apply(
            &Mutation::Delete {
                table,
                key: key.as_str().into(),
            },
            200,
        );
    }
    let views = [
        View::Table(Table::Pods),
        View::Table(Table::Journal),
        View::Overview,
    ];
    let told: Vec<_> = changes(&before, &after, &query(&views, Selector::default()))
        .into_iter()
        .map(|c| {
            (
                c.change,
                c.table,
                c.row["name"].as_str().unwrap().to_owned(),
            )
        })
        .collect();
    let line = |change, table: &str, name: &str| (change, table.to_owned(), name.to_owned());
    assert_eq!(
        told,
        [
            // The pod record of web was written again with the same content: not a change.
            line(ChangeType::Added, "pods", "new"),
            line(ChangeType::Deleted, "pods", "db"),
            line(ChangeType::Modified, "overview", "db"),
            line(ChangeType::Added, "overview", "new"),
            line(ChangeType::Modified, "overview", "web"),
        ]
    );
    let later = Selector {
        pod: Some("new".into()),
        ..Selector::default()
    };
    let told = changes(&before, &after, &query(&views[..1], later));
    assert_eq!(told.len(), 1, "a pod that came later is selected");
}

#[test]
fn rows_say_who_confirmed_them_and_events_are_read_off_the_journal() {
    let by = |state: &State, view: View, field: &str| {
        let dump = dump(state, Vec::new(), &query(&[view], Selector::default())).unwrap();
        let rows = dump.rows(view).map(|row| row[field].clone());
        rows.collect::<Vec<_>>()
    };
    for (error, confirmed) in [("", "apiserver"), ("refused", "checkpoint")] {
        let mut builder = Builder(state(), 99);
        let name = node_name(&builder.0);
        builder.put(
            &format!("nodes//{name}"),
            ObjectRecord {
                resource_version: "7".to_owned(),
                encrypted: false,
                data: br#"{"metadata":{"labels":{"zone":"a"}}}"#.to_vec(),
                at: at(1, 5),
            },
        );
        builder.put(
            "resizes//turn",
            FactRecord {
                layout: 1,
                mark: String::new(),
                data: Vec::new(),
                at: at(1, 5),
            },
        );
        builder.put(
            "api",
            SourceRecord {
                location: "https://api".to_owned(),
                read: at(1, 4),
                error: error.to_owned(),
                broken: std::collections::BTreeMap::new(),
            },
        );
        builder.put(
            &journal_key(900),
            JournalRecord {
                at: at(1, 6),
                generation: 1,
                pod: Some(PodUid::new(WEB)),
                what: "event BackOff".to_owned(),
                why: "Warning main: again: (x8)".to_owned(),
            },
        );
        let state = builder.0;
        assert_eq!(by(&state, View::Node, "confirmedBy"), [confirmed]);
        assert_eq!(by(&state, View::Node, "resourceVersion"), ["7"]);
        let last = |field| by(&state, View::Events, field).pop().unwrap();
        assert_eq!(last("reason"), "BackOff");
        assert_eq!(last("count"), 8);
        assert_eq!(last("name"), "web");
        let own = by(&state, View::Table(Table::Objects), "confirmedBy");
        let of_turn = own.last().unwrap();
        assert!(
            own.iter().any(|by| by == confirmed) && of_turn == "checkpoint",
            "{own:?}"
        );
        let statuses = by(&state, View::Table(Table::Statuses), "confirmedBy");
        assert!(statuses.iter().all(|by| by == "checkpoint"), "{statuses:?}");
    }
}

#[test]
fn events_say_what_the_api_server_knows_and_what_waits() {
    let record = |reason: &str, message: &str, combined: bool, place: Option<u64>| {
        FactRecord {
        layout: 1,
        mark: String::new(),
        data: serde_json::to_vec(&json!({
            "name": format!("web.{reason}"),
            "event": {
                "pod": {"uid": WEB, "name": "web", "namespace": "default"},
                "container": "main", "kind": "Warning", "reason": reason, "message": message,
            },
            "combined": combined, "count": 3, "first": at(1, 5), "last": at(1, 7), "made": true, "place": place,
        }))
        .unwrap(),
        at: at(1, 7),
    }
    };
    let before = {
        let mut builder = Builder(state(), 99);
        for (sequence, why) in [
            (900, "Warning main: again"),
            (901, "Warning main: again (x2)"),
            (902, "Warning main: m9"),
        ] {
            builder.put(
                &journal_key(sequence),
                JournalRecord {
                    at: at(1, 6),
                    generation: 1,
                    pod: Some(PodUid::new(WEB)),
                    what: "event BackOff".to_owned(),
                    why: why.to_owned(),
                },
            );
        }
        builder.put("events/default/1", record("BackOff", "again", false, None));
        let combined = "(combined from similar events): m9";
        builder.put(
            "events/default/2",
            record("BackOff", combined, true, Some(7)),
        );
        builder.put("events/default/3", record("Failed", "why", false, Some(8)));
        let mut damaged = record("Failed", "", false, None);
        damaged.data.truncate(20);
        builder.put("events/default/4", damaged);
        builder.0
    };
    let dump = dump(
        &before,
        Vec::new(),
        &query(&[View::Events], Selector::default()),
    );
    let dump = dump.unwrap();
    let rows: Vec<_> = dump.rows(View::Events).collect();
    let rows: Vec<_> = rows[rows.len() - 4..]
        .iter()
        .map(|row| {
            let object = &row["apiServer"];
            [
                &row["message"],
                &object["state"],
                &object["name"],
                &row["uid"],
                &row["name"],
            ]
            .map(|value| value.as_str().unwrap_or_default().to_owned())
        })
        .collect();
    assert_eq!(
        rows,
        [
            ["again", "", "", WEB, "web"],
            ["again", "Told", "web.BackOff", WEB, "web"],
            ["m9", "Waiting", "web.BackOff", WEB, "web"],
            ["why", "Waiting", "web.Failed", WEB, "web"],
        ]
    );
    // What was no line of the journal is said to be gone when it goes.
    let mut after = Builder(before.clone(), 200);
    for key in ["events/default/2", "events/default/3"] {
        let table = Table::Facts;
        let key = key.into();
        after.0.apply(&Mutation::Delete { table, key }, 201);
    }
    let told = changes(
        &before,
        &after.0,
        &query(&[View::Events], Selector::default()),
    );
    let told: Vec<_> = told
        .iter()
        .map(|c| (c.change, c.row["message"].as_str().unwrap_or_default()))
        .collect();
    assert_eq!(
        told,
        [(ChangeType::Modified, "m9"), (ChangeType::Deleted, "why")]
    );
}

#[test]
fn images_show_how_far_they_got_and_which_archive_holds_them() {
    use crate::core::images::{
        ArchiveRecord, ArchiveStamp, FilesState, ImageFiles, archive_key, files_key,
    };
    use crate::core::state::ImageRecord;
    use crate::images::qualified;

    let mut b = Builder(State::default(), 0);
    let object = |data: Vec<u8>| FactRecord {
        layout: 1,
        mark: String::new(),
        data,
        at: at(1, 200),
    };
    for image in ["app:1", "lost:1", "old:1"] {
        let record = ImageRecord {
            pulled_ref: None,
            backoffs: Default::default(),
            first_seen: at(1, 100),
            last_used: at(1, 101),
        };
        b.put(image, record);
    }
    let suspect = FilesState::Suspect {
        why: "cut off".to_owned(),
    };
    for (image, state) in [("app:1", FilesState::Whole), ("lost:1", suspect)] {
        let files = ImageFiles {
            image: image.to_owned(),
            id: format!("sha256:{image}"),
            state,
            suspected: None,
            lost: None,
        };
        let data = serde_json::to_vec(&files).unwrap();
        b.put(&files_key(&qualified(image)), object(data));
    }
    let archive = ArchiveRecord {
        name: "app.tar".to_owned(),
        stamp: ArchiveStamp {
            inode: 1,
            size: 2,
            modified_ns: 3,
        },
        images: vec!["docker.io/library/app:1".to_owned()],
        error: String::new(),
    };
    let data = serde_json::to_vec(&archive).unwrap();
    b.put(&archive_key("app.tar"), object(data));
    let query = query(&[View::Table(Table::Images)], Selector::default());
    let dump = dump(&b.0, Vec::new(), &query).unwrap();
    let shown: Vec<Value> = dump
        .rows(View::Table(Table::Images))
        .map(|row| {
            json!([
                row["image"],
                row["id"],
                row["state"],
                row["why"],
                row["pins"],
                row["archive"]
            ])
        })
        .collect();
    assert_eq!(
        shown,
        [
            json!([
                "app:1",
                "sha256:app:1",
                "whole",
                null,
                ["archive"],
                "app.tar"
            ]),
            json!(["lost:1", "sha256:lost:1", "suspect", "cut off", [], null]),
            json!(["old:1", null, "trusted", null, [], null]),
        ]
    );
    let since: Vec<&Value> = dump
        .rows(View::Table(Table::Images))
        .map(|row| &row["since"])
        .collect();
    assert_ne!(
        since[0], since[2],
        "since the record, else since first seen"
    );
}

#[test]
fn images_show_why_they_are_kept_and_when_they_may_go() {
    use crate::core::image_gc::report::{Judged, Report};
    use crate::core::state::ImageRecord;

    let used = |first_seen, last_used| ImageRecord {
        pulled_ref: None,
        backoffs: Default::default(),
        first_seen: at(1, first_seen),
        last_used: at(1, last_used),
    };
    let judged = |id: &str, name: &str, kept: Option<&str>, order| Judged {
        id: id.to_owned(),
        names: vec![name.to_owned()],
        size: 7,
        pinned: kept.is_some(),
        kept: kept.map(str::to_owned),
        order,
    };
    let report = Report {
        minimum_age_seconds: 120,
        maximum_age_seconds: 600,
        images: vec![
            judged("sha256:1", "docker.io/library/unused:1", None, Some(1)),
            judged("sha256:2", "r.io/pinned:1", Some("pinned"), None),
        ],
    };
    let mut b = Builder(State::default(), 0);
    b.put("unused:1", used(100, 200));
    b.put("sha256:2", used(100, 200));
    b.put("gone:1", used(100, 200));
    let before = b.0.clone();
    for mutation in &report.changes(&b.0, at(1, 300)).mutations {
        b.1 += 1;
        b.0.apply(mutation, b.1);
    }
    let images = query(&[View::Table(Table::Images)], Selector::default());
    let found = dump(&b.0, Vec::new(), &images).unwrap();
    let row = |key: &str| {
        let mut rows = found.rows(View::Table(Table::Images));
        rows.find(|row| row["key"] == key).unwrap()
    };
    let unused = row("unused:1");
    assert_eq!(
        (&unused["kept"], &unused["order"]),
        (&json!(null), &json!(1))
    );
    assert_eq!(unused["mayGo"]["bootTimeMs"], 220_000);
    assert_eq!(unused["tooOld"]["bootTimeMs"], 800_000);
    let pinned = row("sha256:2");
    assert_eq!(
        (&pinned["kept"], &pinned["mayGo"]),
        (&json!("pinned"), &json!(null))
    );
    assert_eq!(pinned["pins"], json!(["runtime"]));
    assert_eq!(row("gone:1")["size"], json!(null));
    let changed = changes(&before, &b.0, &images);
    assert_eq!(changed.len(), 2, "a watch tells of it");
}
