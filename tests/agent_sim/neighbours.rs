//! What one tenant does, or has happen to it, costs the others no time: their pods start, are probed and go as on a quiet node.
//!
//! A seed says how many pods the tenant has, what they do, and what the runtime does with each kind of call about them. Nothing goes wrong
//! with anybody else. `HOLDFAST_SIM_NEIGHBOUR=n` tries one seed alone; `make sim` tries new ones.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_testkit::exploration::stride;
use holdfast_testkit::fake_cri::{Behaviour, Call, ExecResult, FakeCri, Fault};
use k8s_openapi::api::core::v1::Pod;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::time::Instant;
use tonic::Code;

use crate::schedule::Schedule;
use crate::watch::label;
use crate::world::{EFFECTS, IMAGE, World, spec};

const SEEDS: u64 = 6;
/// Simulated time for each.
const LASTS: Duration = Duration::from_secs(120);
/// Of the pods that are judged, seconds.
const PERIOD: u64 = 2;
/// From its creation to the Running phase in the API server. A start that hangs makes way for the next after 3 s, and the tenant
/// may have several ahead.
const STARTS_WITHIN: Duration = Duration::from_secs(12);
/// From its deletion until it is gone from there.
const GOES_WITHIN: Duration = Duration::from_secs(6);
/// From one probe to the next.
const PROBED_WITHIN: Duration = Duration::from_millis(1_000 * PERIOD + 500);

/// What the runtime does with calls about the tenant's pods.
type Hostility = BTreeMap<&'static str, Fault>;

fn hostility(random: &mut StdRng) -> Hostility {
    let others = ["podsandbox_status", "container_status", "exec_sync"];
    let mut all = Hostility::new();
    for operation in EFFECTS.into_iter().chain(others) {
        let fault = match random.random_range(0..10) {
            0 => Fault::Hang,
            1 => Fault::HangAfterEffect,
            2 => Fault::LoseReply,
            3 => Fault::Error(Code::Unknown, "not for this tenant".to_owned()),
            4 => Fault::Delay(Duration::from_millis(random.random_range(1_000..90_000))),
            _ => continue,
        };
        all.insert(operation, fault);
    }
    all
}

fn is_tenants(fake: &FakeCri, call: &Call) -> bool {
    let id = call.object.split(' ').next().unwrap_or_default();
    let pod = "io.kubernetes.pod.name";
    let of = fake.config(id).map(|config| label(&config.labels, pod));
    let of = of.or_else(|| Some(label(&fake.sandbox_config(id)?.labels, pod)));
    call.object.contains("tenant") || of.is_some_and(|name| name.starts_with("tenant"))
}

fn tenant_spec(random: &mut StdRng) -> String {
    let probe = r#"{"exec":{"command":["hang"]},"periodSeconds":1,"timeoutSeconds":3600}"#;
    let containers: Vec<String> = (0..random.random_range(1..12))
        .map(|n| {
            format!(
                r#"{{"name":"tenant{n}","image":"{IMAGE}","readinessProbe":{probe},"livenessProbe":{probe}}}"#
            )
        })
        .collect();
    let grace = random.random_range(0..600);
    format!(
        r#"{{"terminationGracePeriodSeconds":{grace},"containers":[{}]}}"#,
        containers.join(",")
    )
}

fn guest_spec() -> String {
    let probe = format!(
        r#""readinessProbe":{{"exec":{{"command":["true"]}},"periodSeconds":{PERIOD}}},"command""#
    );
    spec("Always", "").replace(r#""command""#, &probe)
}

struct Node {
    w: World,
    random: StdRng,
    wrong: Vec<String>,
    /// When each pod of the others was probed last.
    probed: Arc<Mutex<BTreeMap<String, Instant>>>,
    late: Arc<Mutex<Vec<String>>>,
    /// Pods that are waited for, with what for and since when.
    waits: BTreeMap<String, (&'static str, Instant)>,
}

impl Node {
    async fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mut w = World::with_api();
        let schedule = Schedule::new(seed);
        schedule.calm();
        w.schedule = Some(schedule);
        let (fake, hostility) = (w.fake.clone(), hostility(&mut random));
        w.tenant = Some(Arc::new(move |call| {
            let fault = hostility.get(call.operation)?;
            is_tenants(&fake, call).then(|| fault.clone())
        }));
        let kind = random.random_range(0..3);
        w.behave(move |pod, _| match kind {
            0 if pod.starts_with("tenant") => Behaviour::IgnoreTerm,
            1 if pod.starts_with("tenant") => Behaviour::Exit {
                code: 0,
                after: Duration::from_millis(10),
            },
            _ => Behaviour::RunForever,
        });
        let probed: Arc<Mutex<BTreeMap<String, Instant>>> = Arc::default();
        let late: Arc<Mutex<Vec<String>>> = Arc::default();
        let (last, told) = (Arc::clone(&probed), Arc::clone(&late));
        w.fake.on_exec(move |config, _| {
            let pod = label(&config.labels, "io.kubernetes.pod.name");
            let is_tenants = pod.starts_with("tenant");
            if !is_tenants {
                let now = Instant::now();
                let before = last.lock().unwrap().insert(pod.clone(), now);
                let since = before.map_or(Duration::ZERO, |before| now - before);
                if since > PROBED_WITHIN {
                    told.lock()
                        .unwrap()
                        .push(format!("{pod} was probed after {since:?}"));
                }
            }
            ExecResult {
                takes: Duration::from_secs(if is_tenants { 3_600 } else { 0 }),
                ..ExecResult::default()
            }
        });
        w.start().await;
        w.joined().await;
        Self {
            w,
            random,
            wrong: Vec::new(),
            probed,
            late,
            waits: BTreeMap::new(),
        }
    }

    /// The others: one pod comes or goes each time.
    fn guests(&mut self) {
        let name = format!("guest-{}", self.random.random_range(0..8));
        if self.waits.contains_key(&name) {
            return;
        }
        let now = Instant::now();
        if self.w.shown(&name).is_null() {
            self.w.create(&name, &guest_spec());
            self.waits.insert(name, ("to run", now));
        } else {
            self.w.delete(&name, Some(2));
            self.probed.lock().unwrap().remove(&name);
            self.waits.insert(name, ("to go", now));
        }
    }

    /// The tenant: pods come, go and change all the time.
    fn tenants(&mut self) {
        let name = format!("tenant-{}", self.random.random_range(0..6));
        let there = !self.w.shown(&name).is_null();
        match self.random.random_range(0..4) {
            _ if !there => {
                let spec = tenant_spec(&mut self.random);
                self.w.create(&name, &spec);
            }
            0 => drop(self.w.delete(&name, None)),
            1 => drop(self.w.delete(&name, Some(0))),
            _ => {
                let value = self.random.random_range(0..1_000).to_string();
                self.w.api().modify("default", &name, |pod: &mut Pod| {
                    let labels = pod.metadata.labels.get_or_insert_default();
                    labels.insert("n".to_owned(), value);
                });
            }
        }
    }

    fn judge(&mut self) {
        let w = &self.w;
        let (probed, wrong) = (&self.probed, &mut self.wrong);
        self.waits.retain(|name, (what, since)| {
            let shown = w.shown(name);
            let (done, within) = match *what {
                "to run" => (shown["status"]["phase"] == "Running", STARTS_WITHIN),
                _ => (shown.is_null(), GOES_WITHIN),
            };
            if *what == "to go" {
                probed.lock().unwrap().remove(name);
            }
            if !done && since.elapsed() > within {
                wrong.push(format!("{name} waits {what} for {:?}", since.elapsed()));
                return false;
            }
            !done
        });
        let late = self.late.lock().unwrap().drain(..).collect::<Vec<_>>();
        self.wrong.extend(late);
        for (pod, last) in &*self.probed.lock().unwrap() {
            if last.elapsed() > 2 * PROBED_WITHIN {
                self.wrong.push(format!("{pod} is probed no more"));
            }
        }
    }
}

async fn try_seed(seed: u64) {
    let mut node = Node::new(seed).await;
    let begun = Instant::now();
    while begun.elapsed() < LASTS {
        node.tenants();
        if node.random.random_bool(0.2) {
            node.guests();
        }
        let pause = node.random.random_range(50..1_000);
        tokio::time::sleep(Duration::from_millis(pause)).await;
        node.judge();
        assert!(
            node.wrong.is_empty(),
            "seed {seed}, at {:?}: {:#?}\n{}",
            begun.elapsed(),
            node.wrong,
            node.w.describe()
        );
    }
    let wrongs = node.w.wrongs();
    assert!(wrongs.is_empty(), "{wrongs:#?}");
}

fn run(seed: u64) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(try_seed(seed));
}

#[test]
fn whatever_one_tenant_does_the_others_start_go_and_are_probed_in_time() {
    if let Ok(seed) = std::env::var("HOLDFAST_SIM_NEIGHBOUR") {
        run(seed.parse().unwrap());
        return;
    }
    let mut failed = Vec::new();
    let first = std::env::var("HOLDFAST_SIM_FROM").map_or(0, |first| first.parse().unwrap());
    for seed in (first..first + SEEDS).step_by(stride()) {
        if std::panic::catch_unwind(|| run(seed)).is_err() {
            failed.push(seed);
        }
    }
    assert!(failed.is_empty(), "failed: seeds {failed:?}");
}
