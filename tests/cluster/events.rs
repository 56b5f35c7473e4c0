//! Events about an outage, and of before a restart.

use k8s_openapi::api::core::v1::Event;
use kube::api::{Api, ListParams};
use serde_json::Value;

use crate::agent_process::eventually;
use crate::setup::{Cluster, FOREVER, script};

/// Rows of `holdfast dump events` about something with a reason.
fn rows(cluster: &Cluster, about: Option<&str>, reason: &str) -> Result<Vec<Value>, String> {
    let dump = cluster.try_dump(&["events"])?;
    let rows = dump["tables"]["events"].as_array().ok_or("no such table")?;
    let wanted = |row: &&Value| row["name"].as_str() == about && row["reason"] == reason;
    Ok(rows.iter().filter(wanted).cloned().collect())
}

/// The event waits, and that is on the disk.
fn wait_on_record(cluster: &Cluster, about: Option<&str>, reason: &str, count: i64) {
    eventually(&format!("{reason} waits"), || {
        let rows = rows(cluster, about, reason)?;
        let waits = rows.iter().any(|row| {
            let object = &row["apiServer"];
            object["state"] == "Waiting" && object["count"] == count
        });
        if waits {
            Ok(())
        } else {
            Err(format!("{rows:?}"))
        }
    });
    cluster.site.recorded();
}

// Invariant API-4.
/// What happens during an outage is told after it, once, with its times, though the agent is killed twice meanwhile.
#[test]
fn an_event_of_an_outage_survives_kills_and_is_told_once() {
    let cluster = Cluster::new();
    let agent = cluster.join();
    eventually("its start is told", || {
        let rows = rows(&cluster, None, "Starting")?;
        match rows.iter().any(|row| row["apiServer"]["state"] == "Told") {
            true => Ok(()),
            false => Err(format!("{rows:?}")),
        }
    });
    cluster.proxy.cut();
    let lonely = cluster.add_static("lonely", script("Always", FOREVER));
    eventually("it runs", || cluster.try_one(&lonely, "main"));
    wait_on_record(&cluster, Some(&lonely), "Started", 1);
    agent.kill9();
    let killed = jiff::Timestamp::now();
    let agent = cluster.start();
    wait_on_record(&cluster, Some(&lonely), "Started", 1);
    wait_on_record(&cluster, None, "Starting", 2);
    agent.kill9();
    cluster.proxy.heal();
    let _agent = cluster.start();
    cluster.wait_event(&lonely, "Started", "main");
    let about = ListParams::default().fields(&format!("involvedObject.name={lonely}"));
    let events = cluster.run(cluster.api::<Event>().list(&about)).unwrap();
    let mut said: Vec<_> = events.iter().map(|e| (&e.reason, &e.message)).collect();
    let all = said.len();
    said.sort();
    said.dedup();
    assert_eq!(said.len(), all, "each is told once: {events:?}");
    let started = events
        .iter()
        .find(|e| e.reason.as_deref() == Some("Started"))
        .unwrap();
    assert_eq!(started.count, Some(1));
    let first = started.first_timestamp.as_ref().unwrap().0;
    assert!(first <= killed, "{first} {killed}");
    assert_eq!(started.first_timestamp, started.last_timestamp);
    // The starts of the agent are one event, counted across its lives.
    let of_node: Api<Event> = Api::default_namespaced(cluster.client());
    let about = ListParams::default().fields(&format!("involvedObject.name={}", cluster.node));
    eventually("three starts are counted", || {
        let events = cluster.run(of_node.list(&about)).unwrap();
        let starts: Vec<_> = events
            .iter()
            .filter(|e| e.reason.as_deref() == Some("Starting"))
            .map(|e| e.count)
            .collect();
        match starts == [Some(3)] {
            true => Ok(()),
            false => Err(format!("{starts:?}")),
        }
    });
}
