use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::core::state::{FactRecord, State, Transaction};

const BOOT: BootId = BootId(1);
const GPU: &str = "gpu.example.com";

fn pod(claims: Value, status: Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "ns", "uid": "u1"},
        "spec": {"resourceClaims": claims, "containers": [
            {"name": "all", "resources": {"claims": [{"name": "g"}]}},
            {"name": "one", "resources": {"claims": [{"name": "g", "request": "a"}, {"name": "g", "request": "a"}]}},
            {"name": "none"},
            {"name": "odd", "resources": {"claims": [{"name": "unknown"}]}},
        ]},
        "status": status,
    }))
    .unwrap()
}

fn direct() -> Pod {
    pod(json!([{"name": "g", "resourceClaimName": "c"}]), json!({}))
}

fn generated(status: Value) -> Pod {
    let claims = json!([{"name": "g", "resourceClaimTemplateName": "t"}]);
    pod(claims, json!({"resourceClaimStatuses": status}))
}

fn claim(change: &dyn Fn(&mut Value)) -> ResourceClaim {
    let mut claim = json!({
        "metadata": {"name": "c", "namespace": "ns", "uid": "c1", "ownerReferences": [
            {"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": "u1", "controller": true},
        ]},
        "spec": {},
        "status": {
            "reservedFor": [{"resource": "pods", "name": "web", "uid": "u1"}],
            "allocation": {
                "devices": {"results": [
                    {"request": "a", "driver": GPU, "pool": "p", "device": "d0"},
                    {"request": "b", "driver": "nic.example.com", "pool": "p", "device": "d1"},
                ]},
                "nodeSelector": {"nodeSelectorTerms": [
                    {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]},
                ]},
            },
        },
    });
    change(&mut claim);
    serde_json::from_value(claim).unwrap()
}

fn node(name: &str) -> Node {
    serde_json::from_value(json!({"metadata": {"name": name}})).unwrap()
}

#[test]
fn an_entry_stands_for_a_claim_by_name_or_by_the_status() {
    let named_of = |pod: &Pod| named(pod, &references(pod)[0]);
    let of = |name: &str, is_generated| {
        Ok(Some(Named {
            name: name.to_owned(),
            is_generated,
        }))
    };
    assert_eq!(named_of(&direct()), of("c", false));
    let made = generated(json!([{"name": "x"}, {"name": "g", "resourceClaimName": "web-g"}]));
    assert_eq!(named_of(&made), of("web-g", true));
    let needless = generated(json!([{"name": "g"}]));
    assert_eq!(named_of(&needless), Ok(None));
    let early = generated(json!([{"name": "x", "resourceClaimName": "web-x"}]));
    let not_created = Err(ClaimError::NotCreated("g".to_owned()));
    assert_eq!(named_of(&early), not_created);
    let odd = pod(json!([{"name": "g"}]), json!({}));
    assert_eq!(named_of(&odd), Err(ClaimError::NoSource("g".to_owned())));
}

#[test]
fn claims_that_were_made_for_a_pod_make_it_another_version() {
    let made = || generated(json!([{"name": "g", "resourceClaimName": "web-g"}]));
    let early = generated(json!([]));
    let (other, mut none) = (generated(json!([{"name": "g"}])), early.clone());
    none.status = None;
    let mut started = made();
    started.status.as_mut().unwrap().phase = Some("Running".to_owned());
    for (a, b, expected) in [
        (&made(), &early, true),
        (&made(), &other, true),
        (&early, &none, false),
        (&made(), &started, false),
    ] {
        assert_eq!(made_differ(a, b), expected);
    }
}

#[test]
fn a_pod_uses_a_claim_that_is_allocated_here_and_reserved_for_it() {
    let check = |is_generated, claim: &ResourceClaim, node: Option<&Node>| {
        let pod = direct();
        let named = Named {
            name: "c".to_owned(),
            is_generated,
        };
        usable(&pod, &references(&pod)[0], &named, claim, node)
    };
    let good = claim(&|_| {});
    let here = node("n1");
    for is_generated in [false, true] {
        for node in [None, Some(&here)] {
            let bound = check(is_generated, &good, node).unwrap();
            assert_eq!(bound.id, ClaimId::new("ns", "c"));
            assert_eq!(bound.uid, "c1");
            let drivers: Vec<_> = bound.drivers.iter().map(String::as_str).collect();
            assert_eq!(drivers, [GPU, "nic.example.com"]);
        }
    }
    let name = || "c".to_owned();
    let not_reserved = || ClaimError::NotReserved {
        claim: name(),
        uid: "c1".to_owned(),
    };
    type Case<'a> = (bool, &'a dyn Fn(&mut Value), &'a str, ClaimError);
    let cases: [Case<'_>; 8] = [
        (
            true,
            &|c| c["metadata"]["ownerReferences"] = json!([]),
            "n1",
            ClaimError::NotOwner(name()),
        ),
        (
            true,
            &|c| c["metadata"]["ownerReferences"][0]["controller"] = json!(false),
            "n1",
            ClaimError::NotOwner(name()),
        ),
        (
            false,
            &|c| c["status"]["reservedFor"] = Value::Null,
            "n1",
            not_reserved(),
        ),
        (
            false,
            &|c| c["status"]["reservedFor"][0]["uid"] = json!("u2"),
            "n1",
            not_reserved(),
        ),
        (
            false,
            &|c| c["status"]["reservedFor"][0]["resource"] = json!("podgroups"),
            "n1",
            not_reserved(),
        ),
        (
            false,
            &|c| c["status"]["allocation"] = Value::Null,
            "n1",
            ClaimError::NotAllocated(name()),
        ),
        (false, &|_| {}, "n2", ClaimError::OtherNode(name())),
        (false, &|c| c["status"] = Value::Null, "n1", not_reserved()),
    ];
    for (is_generated, change, on, expected) in cases {
        let found = check(is_generated, &claim(change), Some(&node(on)));
        assert_eq!(found, Err(expected));
    }
}

fn device(name: &str, requests: &[&str], cdi: &[&str]) -> ClaimDevice {
    let owned = |all: &[&str]| all.iter().map(ToString::to_string).collect();
    ClaimDevice {
        pool: "p".to_owned(),
        device: name.to_owned(),
        requests: owned(requests),
        cdi: owned(cdi),
        share: None,
    }
}

fn prepared_record(devices: Vec<ClaimDevice>) -> ClaimRecord {
    let bound = bound("c", "c1", &[GPU], "g");
    let record = reserved(None, &bound, &PodUid::new("u1")).unwrap();
    prepared(record, GPU, BOOT, devices)
}

fn bound(name: &str, uid: &str, drivers: &[&str], entry: &str) -> Bound {
    Bound {
        id: ClaimId::new("ns", name),
        uid: uid.to_owned(),
        drivers: drivers.iter().map(ToString::to_string).collect(),
        references: [entry.to_owned()].into(),
    }
}

#[test]
fn a_container_has_the_devices_of_the_requests_that_it_names() {
    let record = prepared_record(vec![
        device("d0", &["a/fast"], &["v/c=0", "v/c=all"]),
        device("d1", &["b"], &["v/c=1", "v/c=all"]),
        device("d2", &[], &["v/c=2"]),
        device("d3", &["ab"], &[]),
    ]);
    let held = BTreeMap::from([(ClaimId::new("ns", "c"), record.clone())]);
    let of = |pod: &Pod, index: usize, held: &BTreeMap<ClaimId, ClaimRecord>| {
        let claims = of_container(pod, &pod.containers()[index], held, BOOT)?;
        Ok(cdi_devices(&claims))
    };
    let pod = direct();
    assert_eq!(
        of(&pod, 0, &held).unwrap(),
        ["v/c=0", "v/c=all", "v/c=1", "v/c=2"]
    );
    assert_eq!(of(&pod, 1, &held).unwrap(), ["v/c=0", "v/c=all", "v/c=2"]);
    assert_eq!(of(&pod, 2, &held).unwrap(), [""; 0]);
    let unknown = ClaimError::NoClaim("unknown".to_owned());
    assert_eq!(of(&pod, 3, &held), Err(unknown));

    // What is not recorded or not prepared in this boot starts nothing.
    let none = BTreeMap::new();
    assert_eq!(of(&pod, 0, &none), Err(ClaimError::NoClaim("g".to_owned())));
    let needless = generated(json!([{"name": "g"}]));
    assert_eq!(of(&needless, 0, &none), Ok(Vec::new()));
    let later = of_container(&pod, &pod.containers()[0], &held, BootId(2));
    let not_prepared = ClaimError::NotPrepared("c".to_owned());
    assert_eq!(later, Err(not_prepared));
    assert!(is_ready(&pod, &held, BOOT));
    assert!(!is_ready(&pod, &held, BootId(2)));
    assert!(!is_ready(&pod, &none, BOOT));
    assert!(is_ready(&needless, &none, BOOT));
}

#[test]
fn extended_resources_come_by_the_claim_that_the_scheduler_made() {
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "ns", "uid": "u1"},
        "spec": {"containers": [
            {"name": "main", "resources": {"requests": {"example.com/gpu": "1"}}},
            {"name": "zero", "resources": {"requests": {"example.com/gpu": "0"}}},
            {"name": "other", "resources": {"requests": {"example.com/gpu": "1"}}},
        ]},
        "status": {"extendedResourceClaimStatus": {"resourceClaimName": "c", "requestMappings": [
            {"containerName": "main", "resourceName": "example.com/gpu", "requestName": "r0"},
            {"containerName": "zero", "resourceName": "example.com/gpu", "requestName": "r0"},
        ]}},
    }))
    .unwrap();
    let entries = references(&pod);
    let claim_name = entries[0].resource_claim_name.as_deref();
    assert_eq!((entries.len(), claim_name), (1, Some("c")));
    let bound = bound("c", "c1", &[GPU], &entries[0].name);
    let record = reserved(None, &bound, &pod.uid()).unwrap();
    let devices = vec![
        device("d0", &["r0"], &["v/c=0"]),
        device("d1", &["r1"], &["v/c=1"]),
    ];
    let record = prepared(record, GPU, BOOT, devices);
    let held = BTreeMap::from([(bound.id, record)]);
    assert!(is_ready(&pod, &held, BOOT));
    let found = pod.containers().iter().map(|container| {
        let claims = of_container(&pod, container, &held, BOOT).unwrap();
        cdi_devices(&claims)
    });
    let found: Vec<_> = found.collect();
    assert_eq!(found, [vec!["v/c=0".to_owned()], vec![], vec![]]);
}

#[test]
fn devices_of_a_second_answer_replace_those_of_the_first() {
    let record = prepared_record(vec![device("d0", &[], &["v/c=0"])]);
    let again = prepared(record, GPU, BOOT, vec![device("d0", &[], &["v/c=new"])]);
    let cdi: Vec<_> = again.devices().flat_map(|(_, d)| &d.cdi).collect();
    assert_eq!(cdi, ["v/c=new"]);
}

#[test]
fn drivers_are_asked_again_after_a_reboot_or_a_new_instance() {
    let record = prepared_record(Vec::new());
    let asked = |boot, is_current| due(&record, boot, |_| is_current).into_iter().next();
    assert_eq!(asked(BOOT, true), None);
    assert_eq!(asked(BOOT, false).as_deref(), Some(GPU));
    assert_eq!(asked(BootId(2), true).as_deref(), Some(GPU));
}

#[test]
fn another_claim_of_the_same_name_waits_for_the_former() {
    let record = prepared_record(Vec::new());
    let recreated = bound("c", "c2", &[GPU], "g");
    let refused = reserved(Some(&record), &recreated, &PodUid::new("u2"));
    let former = ClaimError::FormerClaim {
        claim: "c".to_owned(),
        uid: "c1".to_owned(),
    };
    assert_eq!(refused, Err(former));
}

#[test]
fn a_record_that_cannot_be_read_concerns_its_claim_only() {
    let record = prepared_record(Vec::new());
    let mut state = State::default();
    let stamp = crate::core::testkit::at(0);
    let put = |state: &mut State, name: &str, record: FactRecord| {
        let key = claim_key(&ClaimId::new("ns", name));
        for mutation in &Transaction::new().put(key, record).mutations {
            state.apply(mutation, 1);
        }
    };
    put(&mut state, "c", FactRecord::of(&record, stamp));
    let mut broken = FactRecord::of(&record, stamp);
    broken.data = b"{\"pods\":1}".to_vec();
    put(&mut state, "broken", broken);
    let of = |name: &str| ClaimRecord::of(&state, &ClaimId::new("ns", name));
    assert_eq!(of("c"), Ok(Some(record)));
    assert_eq!(of("absent"), Ok(None));
    let unreadable = ClaimError::Unreadable("broken".to_owned());
    assert_eq!(of("broken"), Err(unreadable));
    let held = ClaimRecord::of_pod(&state, &PodUid::new("u1"));
    assert_eq!(held.len(), 1);
}

/// Something that happens to the node. Pods and claims are numbers; pod `p` uses claims 0 and `p % 2 + 1`.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// The agent starts a pod. It is killed after so many effects.
    Start(u8, u8),
    /// A pod ends. As above.
    End(u8, u8),
    /// A call of a driver fails from now on, or works again.
    Driver(bool),
    /// The machine starts again: no pod runs, and nothing is prepared.
    Reboot,
    /// A claim that no living pod uses is deleted and made anew.
    Recreate(u8),
}

struct Killed;

/// A node with two drivers.
#[derive(Default)]
struct Model {
    records: BTreeMap<ClaimId, ClaimRecord>,
    /// By driver and UID of the claim.
    prepared: BTreeSet<(String, String)>,
    /// Name of each prepared claim by its UID.
    names: BTreeMap<String, String>,
    running: BTreeSet<u8>,
    confirmed: BTreeSet<(String, String)>,
    boot: u64,
    generation: [u8; 3],
    is_broken: bool,
    effects: u8,
}

impl Model {
    fn boot(&self) -> BootId {
        BootId(self.boot)
    }

    fn claims_of(&self, pod: u8) -> Vec<Bound> {
        let of = |index: u8| {
            let uid = format!("{index}-{}", self.generation[usize::from(index)]);
            let drivers: &[&str] = if index == 0 { &["a", "b"] } else { &["a"] };
            bound(&index.to_string(), &uid, drivers, &format!("e{index}"))
        };
        vec![of(0), of(pod % 2 + 1)]
    }

    fn effect(&mut self) -> Result<(), Killed> {
        self.check();
        if self.effects == 0 {
            self.confirmed.clear();
            return Err(Killed);
        }
        self.effects -= 1;
        Ok(())
    }

    fn write(&mut self, id: &ClaimId, record: Option<ClaimRecord>) -> Result<(), Killed> {
        self.effect()?;
        match record {
            Some(record) => self.records.insert(id.clone(), record),
            None => self.records.remove(id),
        };
        Ok(())
    }

    /// Does what the executor does, in its order.
    fn start(&mut self, pod: u8) -> Result<(), Killed> {
        let uid = PodUid::new(pod.to_string());
        let all = self.claims_of(pod);
        for of in &all {
            let Ok(record) = reserved(self.records.get(&of.id), of, &uid) else {
                return Ok(());
            };
            self.write(&of.id, Some(record))?;
        }
        for of in &all {
            let record = self.records[&of.id].clone();
            let confirmed = self.confirmed.clone();
            let is_current =
                |driver: &str| confirmed.contains(&(driver.to_owned(), of.uid.clone()));
            for driver in due(&record, self.boot(), is_current) {
                self.effect()?;
                let key = (driver.clone(), of.uid.clone());
                if self.is_broken {
                    return Ok(());
                }
                self.prepared.insert(key.clone());
                self.names.insert(of.uid.clone(), of.id.name.clone());
                let record = self.records[&of.id].clone();
                let record = prepared(record, &driver, self.boot(), Vec::new());
                self.write(&of.id, Some(record))?;
                self.confirmed.insert(key);
            }
        }
        self.effect()?;
        self.running.insert(pod);
        Ok(())
    }

    fn end(&mut self, pod: u8) -> Result<(), Killed> {
        self.running.remove(&pod);
        let uid = PodUid::new(pod.to_string());
        for (id, known) in self.records.clone() {
            let last = match released(&known, &uid) {
                Release::Nothing => continue,
                Release::Shared(record) => {
                    self.write(&id, Some(record))?;
                    continue;
                }
                Release::Last(record) => record,
            };
            self.write(&id, Some(last.clone()))?;
            let mut left = Some(last.clone());
            for driver in last.drivers.keys() {
                let key = (driver.clone(), last.uid.clone());
                self.confirmed.remove(&key);
                self.effect()?;
                if self.is_broken {
                    continue;
                }
                self.prepared.remove(&key);
                left = left.and_then(|record| unprepared(record, driver));
                if left.is_some() {
                    self.write(&id, left.clone())?;
                }
            }
            if left.is_none() {
                self.write(&id, None)?;
            }
        }
        Ok(())
    }

    /// Asserts the invariants.
    fn check(&self) {
        let mut names = BTreeSet::new();
        for (driver, uid) in &self.prepared {
            let name = &self.names[uid];
            let record = self.records.get(&ClaimId::new("ns", name));
            let record = record.expect("what is prepared is on record");
            assert_eq!(&record.uid, uid, "for the same claim");
            assert!(record.drivers.contains_key(driver), "with its driver");
            names.insert((driver, name));
        }
        assert_eq!(names.len(), self.prepared.len(), "two claims of one name");
        for pod in &self.running {
            for of in self.claims_of(*pod) {
                for driver in of.drivers {
                    let key = (driver, of.uid.clone());
                    assert!(self.prepared.contains(&key), "{pod} lost {key:?}");
                }
            }
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Start(pod, effects) => {
                self.effects = effects;
                drop(self.start(pod));
            }
            Event::End(pod, effects) => {
                self.effects = effects;
                drop(self.end(pod));
            }
            Event::Driver(is_broken) => self.is_broken = is_broken,
            Event::Reboot => {
                self.boot += 1;
                self.running.clear();
                self.prepared.clear();
                self.confirmed.clear();
            }
            Event::Recreate(index) => {
                let of = |pod: &u8| self.claims_of(*pod);
                let mut used = self.running.iter().flat_map(of);
                if !used.any(|of| of.id.name == index.to_string()) {
                    self.generation[usize::from(index)] += 1;
                }
            }
        }
        self.check();
    }
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0..4_u8, 0..16_u8).prop_map(|(pod, effects)| Event::Start(pod, effects)),
        4 => (0..4_u8, 0..16_u8).prop_map(|(pod, effects)| Event::End(pod, effects)),
        1 => any::<bool>().prop_map(Event::Driver),
        1 => Just(Event::Reboot),
        1 => (0..3_u8).prop_map(Event::Recreate),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    #[test]
    fn what_is_prepared_is_on_record_and_nothing_leaks_over_any_crash(
        events in proptest::collection::vec(event(), 1..40),
    ) {
        let mut model = Model { boot: 1, ..Model::default() };
        for event in events {
            model.happen(event);
        }
        // In the end everything is given back.
        model.happen(Event::Driver(false));
        for pod in 0..4 {
            model.happen(Event::End(pod, u8::MAX));
        }
        prop_assert!(model.records.is_empty(), "{:?}", model.records);
        prop_assert!(model.prepared.is_empty(), "{:?}", model.prepared);
    }
}
