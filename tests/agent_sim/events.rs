//! How many events are told is what the configuration says; what the API server was not told in an outage it is told
//! afterwards, by whichever agent.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_testkit::fake_cri::{Behaviour, Fault};
use serde_json::Value;

use crate::api_restart::cluster;
use crate::world::{World, spec};

const PODS: usize = 20;

/// Events in the journal after [`PODS`] pods have come up, and the seconds that took.
async fn told(qps: u32, burst: u32) -> (usize, usize) {
    let mut w = World::new();
    w.behave(|_, _| Behaviour::RunForever);
    w.config.kubelet.event_record_qps = qps;
    w.config.kubelet.event_burst = burst;
    for n in 0..PODS {
        w.manifest(&format!("p{n:02}"), &spec("Always", ""));
    }
    w.start().await;
    w.until("the pods run", 60, |w| w.running("p").len() == PODS)
        .await;
    let state = w.state();
    let whats = state.journal.values().map(|v| v.record.what.clone());
    let events = whats.filter(|what| what.starts_with("event ")).count();
    let seconds = w.began.elapsed().as_secs();
    w.stop().await;
    (events, usize::try_from(seconds).unwrap())
}

#[tokio::test(start_paused = true)]
async fn events_are_limited_to_the_configured_rate_and_burst() {
    let (all, _) = told(0, 5).await;
    assert!(
        all >= 2 * PODS,
        "{all}: nothing is left out without a limit"
    );
    let (few, seconds) = told(1, 5).await;
    assert!(
        (5..=6 + seconds).contains(&few) && few < all,
        "{few} of {all} events in {seconds} s"
    );
}

/// Event objects of the API server, by what they are about and what they say.
fn objects(w: &World) -> BTreeMap<(String, String, String), Vec<Value>> {
    let mut objects = BTreeMap::<_, Vec<Value>>::new();
    for object in w.api().list_json("events", "") {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let key = (
            text(&object["involvedObject"]["name"]),
            text(&object["reason"]),
            text(&object["message"]),
        );
        objects.entry(key).or_default().push(object);
    }
    objects
}

/// The one object about something, with a reason; null when there is none.
fn object(w: &World, about: &str, reason: &str) -> Value {
    let all = objects(w);
    let mut found = all
        .iter()
        .filter(|((name, r, _), _)| name == about && r == reason);
    found.next().map_or(Value::Null, |(_, all)| all[0].clone())
}

fn assert_no_event_twice(w: &World) {
    for (key, all) in objects(w) {
        assert_eq!(all.len(), 1, "{key:?}: {all:#?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_event_told_during_an_outage_reaches_the_server_after_a_restart() {
    for reboot in [false, true] {
        let mut w = cluster(|_, _| Behaviour::RunForever).await;
        w.start().await;
        w.joined().await;
        w.pass(10).await;
        w.set_api(false);
        w.manifest("web", &spec("Always", ""));
        w.until("it runs", 60, |w| w.running("web").len() == 1)
            .await;
        w.pass(5).await;
        assert_eq!(object(&w, "web-sim", "Started"), Value::Null);
        w.remove_manifest("web");
        w.until("its end is done", 120, |w| !w.has_record("web"))
            .await;
        w.pass(5).await;
        if reboot {
            w.reboot().await;
            w.start().await;
        } else {
            w.restart().await;
        }
        let restarted = w.began.elapsed().as_secs();
        w.pass(300).await;
        // The pod is long gone.
        w.restart().await;
        w.set_api(true);
        w.until("it is told", 60, |w| {
            object(w, "web-sim", "Killing") != Value::Null
        })
        .await;
        let (started, killed) = (
            object(&w, "web-sim", "Started"),
            object(&w, "web-sim", "Killing"),
        );
        let time = |event: &Value, field: &str| -> jiff::Timestamp {
            let text = event[field].as_str().unwrap();
            text.parse().unwrap()
        };
        let first = time(&started, "firstTimestamp");
        assert_eq!(first, time(&started, "lastTimestamp"));
        let between = time(&killed, "firstTimestamp").duration_since(first);
        assert!(between.as_secs() >= 5, "{started} {killed}");
        assert!(between.as_secs() <= i64::try_from(restarted).unwrap());
        assert_eq!(started["eventTime"], Value::Null);
        assert_no_event_twice(&w);
    }
}

#[tokio::test(start_paused = true)]
async fn a_restart_counts_in_the_event_there_is() {
    let mut w = cluster(|_, _| Behaviour::RunForever).await;
    w.start().await;
    w.joined().await;
    w.create("web", &spec("Always", ""));
    w.until("it runs", 60, |w| w.running("web").len() == 1)
        .await;
    w.pass(10).await;
    for starts in [2, 3] {
        w.restart().await;
        w.pass(10).await;
        assert_eq!(object(&w, "sim", "Starting")["count"], starts);
    }
    assert_no_event_twice(&w);
}

/// A step that is under way when the agent is asked to stop is ended, and what it tells is told.
#[tokio::test(start_paused = true)]
async fn what_is_told_while_the_agent_stops_reaches_the_server() {
    for outage in [false, true] {
        let mut w = cluster(|_, _| Behaviour::RunForever).await;
        w.start().await;
        w.joined().await;
        w.pass(5).await;
        w.set_api(!outage);
        w.fail_once("start_container", Fault::Delay(Duration::from_secs(3)));
        w.manifest("web", &spec("Always", ""));
        w.until("it is being started", 60, |w| w.has_record("web"))
            .await;
        w.pass(2).await;
        assert_eq!(object(&w, "web-sim", "Started"), Value::Null);
        w.stop().await;
        assert_eq!(w.running("web").len(), 1, "the step was ended");
        w.set_api(true);
        w.start().await;
        w.until("it is told", 60, |w| {
            object(w, "web-sim", "Started") != Value::Null
        })
        .await;
        assert_eq!(object(&w, "web-sim", "Started")["count"], 1);
        assert_no_event_twice(&w);
        w.stop().await;
    }
}
