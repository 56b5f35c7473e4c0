//! Certificates of pods: requested once, kept through restarts, reboots and outages, replaced in time, forgotten with their
//! pod. Against the API server of the test kit, which has the Node authorizer and NodeRestriction.

use std::time::Duration;

use holdfast_testkit::fake_api::{FakeApi, Fault, Identity, Request};
use holdfast_testkit::pod_signer::PodSigner;
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::{Life, World, change, pod};
use crate::apiserver::ApiClient;
use crate::core::pod_certificates::CertificateRef;
use crate::kuberuntime::sources::PodKeyPair;
use crate::objects::{ObjectError, Objects};
use crate::types::{Clock, PodExt as _, PodUid};

const KEY: &str = "podcertificates/ns/a/cert/1";
const MINUTE: i64 = 60_000;

struct Cluster {
    world: World,
    api: FakeApi,
    signer: PodSigner,
}

fn spec() -> Value {
    json!({
        "nodeName": "node", "serviceAccountName": "robot",
        "containers": [{"name": "main", "image": "x",
                        "volumeMounts": [{"name": "cert", "mountPath": "/cert"}]}],
        "volumes": [
            {"name": "cert", "projected": {"sources": [
                {"downwardAPI": {}},
                {"podCertificate": {
                    "signerName": "example.com/signer", "keyType": "ECDSAP256",
                    "maxExpirationSeconds": 3600, "credentialBundlePath": "bundle.pem",
                    "userAnnotations": {"example.com/role": "db"}}}]}},
            {"name": "unused", "projected": {"sources": [
                {"podCertificate": {"signerName": "example.com/signer", "keyType": "ED25519"}}]}},
        ],
    })
}

fn web() -> Pod {
    pod("a", spec())
}

fn source() -> CertificateRef {
    CertificateRef {
        volume: "cert".to_owned(),
        index: 1,
    }
}

fn creates(request: &Request) -> bool {
    request.verb == "create" && request.kind == "podcertificaterequests"
}

impl Cluster {
    fn new() -> Self {
        let api = FakeApi::new();
        for object in [
            json!({"kind": "Namespace", "metadata": {"name": "ns"}}),
            json!({"kind": "Node", "metadata": {"name": "node"}}),
            json!({"kind": "ServiceAccount", "metadata": {"name": "robot", "namespace": "ns"}}),
            json!({"kind": "Pod", "spec": spec(),
                   "metadata": {"name": "pod-a", "namespace": "ns", "uid": "a"}}),
        ] {
            let mut object = object;
            object["apiVersion"] = "v1".into();
            api.create_json(object);
        }
        Self {
            world: World::new(),
            api,
            signer: PodSigner::new(),
        }
    }

    /// An agent starts and finds the pod.
    fn start(&self) -> Life {
        self.start_at(&self.world.clock)
    }

    fn start_at(&self, clock: &std::sync::Arc<dyn Clock>) -> Life {
        let life = self.start_without_pods(clock);
        life.objects.register(&web());
        life
    }

    fn start_without_pods(&self, clock: &std::sync::Arc<dyn Clock>) -> Life {
        let service = self.api.service_as(Identity::Node("node".to_owned()));
        let client = ApiClient::over(service, (1000, 1000), std::sync::Arc::clone(clock));
        let world = &self.world;
        let objects = Objects::with_vault(
            world.store.clone(),
            std::sync::Arc::clone(clock),
            Some(client),
            std::sync::Arc::clone(&world.vault),
            world.metrics.clone(),
            Some(std::sync::Arc::new(world.events.clone())),
        );
        let stop = CancellationToken::new();
        let running = tokio::spawn(objects.clone().run(stop.clone()));
        Life {
            objects,
            stop,
            running,
        }
    }

    fn now(&self) -> i64 {
        self.world.clock.now().wall_ms
    }

    fn requests(&self) -> Vec<Value> {
        self.api.list_json("podcertificaterequests", "ns")
    }

    /// The request that has no answer, as soon as there is one.
    async fn waiting(&self) -> Value {
        for _ in 0..600 {
            if let Some(request) = PodSigner::waiting(&self.api).pop() {
                return request;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("there is no request");
    }

    /// Issues for an hour, to be replaced after so many minutes.
    async fn issue(&self, minutes: i64) -> String {
        let request = self.waiting().await;
        let now = self.now();
        let times = (now + minutes * MINUTE, now + 60 * MINUTE);
        self.signer.issue(&self.api, &request, times)
    }

    fn told(&self) -> Vec<String> {
        let events = self.world.events.events().into_iter();
        events.map(|event| event.reason).collect()
    }
}

async fn get(life: &Life) -> Result<PodKeyPair, ObjectError> {
    life.objects.pod_certificate(&web(), &source()).await
}

/// Waits until the chain is this one.
async fn gets(life: &Life, chain: &str) -> PodKeyPair {
    for _ in 0..600 {
        if let Ok(found) = get(life).await
            && found.chain == chain
        {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{:?}", get(life).await);
}

async fn pass(minutes: u64) {
    tokio::time::sleep(Duration::from_secs(60 * minutes)).await;
}

#[tokio::test(start_paused = true)]
async fn a_certificate_is_requested_as_the_node_and_handed_out_once_it_is_issued() {
    let cluster = Cluster::new();
    let life = cluster.start();
    let mut changes = life.objects.changes();
    let error = get(&life).await.unwrap_err().to_string();
    let request = cluster.waiting().await;
    let name = request["metadata"]["name"].as_str().unwrap();
    assert!(
        error.contains("credential bundle is not issued yet") && error.contains(name),
        "{error}"
    );
    assert_eq!(cluster.requests().len(), 1, "no container mounts the other");
    assert_eq!(request["apiVersion"], "certificates.k8s.io/v1");
    assert_eq!(request["metadata"]["ownerReferences"][0]["uid"], "a");
    let mut spec = request["spec"].clone();
    for field in ["stubPKCS10Request", "nodeUID", "serviceAccountUID"] {
        assert!(spec[field].take().is_string(), "{field}");
    }
    assert_eq!(
        spec,
        json!({
            "signerName": "example.com/signer", "podName": "pod-a", "podUID": "a",
            "serviceAccountName": "robot", "serviceAccountUID": null,
            "nodeName": "node", "nodeUID": null, "maxExpirationSeconds": 3600,
            "unverifiedUserAnnotations": {"example.com/role": "db"}, "stubPKCS10Request": null,
        })
    );
    let record = cluster.world.record(KEY).unwrap();
    assert!(record.encrypted);
    assert!(!String::from_utf8_lossy(&record.data).contains("PRIVATE KEY"));
    let chain = cluster.issue(30).await;
    let found = gets(&life, &chain).await;
    assert!(found.key.pem().starts_with("-----BEGIN PRIVATE KEY-----\n"));
    assert!(!format!("{found:?}").contains("PRIVATE"));
    let mut told = Vec::new();
    while let Ok(change) = changes.try_recv() {
        told.push(change);
    }
    told.retain(|change| change.kind != "Service");
    assert_eq!(told, [change("PodCertificate", "a")]);
    assert_eq!(life.objects.pods_referring(&told[0]), [PodUid::new("a")]);
    assert_eq!(cluster.told(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_restart_between_request_and_answer_goes_on_with_the_same_request() {
    let cluster = Cluster::new();
    let life = cluster.start();
    let asked = cluster.waiting().await;
    life.end().await;
    let life = cluster.start();
    pass(1).await;
    let names: Vec<_> = cluster
        .requests()
        .into_iter()
        .map(|request| request["metadata"]["name"].clone())
        .collect();
    assert_eq!(names, [asked["metadata"]["name"].clone()]);
    // That the key is the request's is checked before it is handed out.
    let chain = cluster.issue(30).await;
    gets(&life, &chain).await;
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_came_while_the_agent_did_not_run_is_taken() {
    let cluster = Cluster::new();
    let life = cluster.start();
    cluster.waiting().await;
    life.end().await;
    let chain = cluster.issue(30).await;
    let life = cluster.start();
    gets(&life, &chain).await;
    assert_eq!(cluster.requests().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_creation_whose_answer_is_lost_makes_no_second_request() {
    let cluster = Cluster::new();
    cluster.api.fail_next(creates, Fault::LoseReply, 1);
    let life = cluster.start();
    let chain = cluster.issue(30).await;
    gets(&life, &chain).await;
    assert_eq!(cluster.requests().len(), 1);
    assert_eq!(cluster.api.count(creates), 2);
}

#[tokio::test(start_paused = true)]
async fn a_restart_and_a_reboot_without_the_api_server_hand_out_what_is_on_record() {
    let cluster = Cluster::new();
    let life = cluster.start();
    let chain = cluster.issue(30).await;
    let issued = gets(&life, &chain).await;
    life.end().await;

    let life = cluster.start();
    assert_eq!(get(&life).await.unwrap(), issued);
    pass(1).await;
    assert_eq!(cluster.requests().len(), 1, "nobody is asked again");
    life.end().await;

    cluster.api.set_down(Some("cut off"));
    for (minutes, is_valid) in [(50, true), (70, false)] {
        let clock: std::sync::Arc<dyn Clock> = std::sync::Arc::new(super::SimClock {
            started: tokio::time::Instant::now(),
            boot: 2,
            offset_ms: cluster.now() - super::BASE_MS + minutes * MINUTE,
        });
        let life = cluster.start_at(&clock);
        let found = get(&life).await;
        match is_valid {
            true => assert_eq!(found.unwrap(), issued),
            false => {
                let error = found.unwrap_err().to_string();
                assert!(error.contains("the certificate has expired"), "{error}");
            }
        }
        life.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_final_told_once_and_kept() {
    for (verdict, says) in [("Denied", "was denied"), ("Failed", "failed")] {
        let cluster = Cluster::new();
        let life = cluster.start();
        let request = cluster.waiting().await;
        PodSigner::refuse(&cluster.api, &request, verdict, "NotForYou");
        pass(1).await;
        let error = get(&life).await.unwrap_err().to_string();
        assert!(
            error.contains(&format!("permanently {}", verdict.to_lowercase())),
            "{error}"
        );
        assert!(error.contains("NotForYou"), "{error}");
        let events = cluster.world.events.events();
        assert_eq!(events.len(), 1, "{events:?}");
        assert_eq!(events[0].reason, verdict);
        assert!(events[0].message.contains(says), "{events:?}");
        life.end().await;

        let life = cluster.start();
        pass(60).await;
        assert!(get(&life).await.is_err());
        assert_eq!(cluster.requests().len(), 1);
        assert_eq!(cluster.world.events.events().len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_certificate_is_replaced_in_time_and_the_old_one_serves_meanwhile() {
    let cluster = Cluster::new();
    let life = cluster.start();
    let first = cluster.issue(20).await;
    let old = gets(&life, &first).await;
    pass(19).await;
    assert_eq!(cluster.requests().len(), 1);
    // Five minutes at most by chance, and a minute until the clock is looked at.
    pass(7).await;
    assert_eq!(cluster.requests().len(), 2);
    assert_eq!(get(&life).await.unwrap(), old);
    // The agent is killed while it waits.
    life.end().await;
    let life = cluster.start();
    assert_eq!(get(&life).await.unwrap(), old);
    assert_eq!(cluster.told(), [""; 0]);
    pass(12).await;
    assert_eq!(cluster.told(), ["CertificateOverdueForRefresh"]);
    pass(30).await;
    assert_eq!(
        cluster.told(),
        ["CertificateOverdueForRefresh", "CertificateExpired"]
    );
    assert!(get(&life).await.is_err());
    let second = cluster.issue(20).await;
    let new = gets(&life, &second).await;
    assert_ne!(new.key, old.key);
    assert_eq!(cluster.requests().len(), 2);
    assert_eq!(cluster.told().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_somebody_deletes_is_made_again() {
    let cluster = Cluster::new();
    let life = cluster.start();
    let request = cluster.waiting().await;
    let name = request["metadata"]["name"].as_str().unwrap();
    assert!(cluster.api.remove::<PodCertificateRequest>("ns", name));
    let again = cluster.waiting().await;
    assert_eq!(again["metadata"]["name"], name);
    let chain = cluster.issue(30).await;
    gets(&life, &chain).await;
}

#[tokio::test(start_paused = true)]
async fn a_certificate_of_another_key_is_not_used() {
    let cluster = Cluster::new();
    let life = cluster.start();
    let request = cluster.waiting().await;
    let other = rcgen::KeyPair::generate().unwrap();
    let chain = rcgen::CertificateParams::default()
        .self_signed(&other)
        .unwrap()
        .pem();
    let now = cluster.now();
    let times = (now + 30 * MINUTE, now + 60 * MINUTE);
    cluster
        .signer
        .issue_chain(&cluster.api, &request, &chain, times);
    let again = cluster.waiting().await;
    assert_ne!(again["metadata"]["name"], request["metadata"]["name"]);
    let chain = cluster.issue(30).await;
    gets(&life, &chain).await;
}

#[tokio::test(start_paused = true)]
async fn certificates_that_are_of_no_use_are_requested_ever_more_rarely() {
    let cluster = Cluster::new();
    let _life = cluster.start();
    let other = rcgen::KeyPair::generate().unwrap();
    let chain = rcgen::CertificateParams::default()
        .self_signed(&other)
        .unwrap()
        .pem();
    let end = tokio::time::Instant::now() + Duration::from_secs(3600);
    while tokio::time::Instant::now() < end {
        if let Some(request) = PodSigner::waiting(&cluster.api).pop() {
            // The agent has looked for an answer before there is one.
            tokio::time::sleep(Duration::from_secs(2)).await;
            let now = cluster.now();
            let times = (now + 30 * MINUTE, now + 60 * MINUTE);
            cluster
                .signer
                .issue_chain(&cluster.api, &request, &chain, times);
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    // Nine with pauses up to 256 s, and one in five minutes from then on.
    let made = cluster.requests().len();
    assert!((12..=28).contains(&made), "{made}");
}

#[tokio::test(start_paused = true)]
async fn older_servers_are_asked_in_their_own_words() {
    const BETA: &str = "certificates.k8s.io/v1beta1";
    let is_v1 = |r: &Request| creates(r) && r.body["apiVersion"] != BETA;
    // Kubernetes 1.36.
    let cluster = Cluster::new();
    cluster.api.fail_always(is_v1, 404);
    let life = cluster.start();
    let request = cluster.waiting().await;
    assert_eq!(request["apiVersion"], BETA);
    assert!(request["spec"]["stubPKCS10Request"].is_string());
    let chain = cluster.issue(30).await;
    gets(&life, &chain).await;

    // Kubernetes 1.35.
    let cluster = Cluster::new();
    cluster.api.fail_always(is_v1, 404);
    let has_stub = |r: &Request| creates(r) && r.body["spec"]["stubPKCS10Request"].is_string();
    cluster.api.fail_always(has_stub, 422);
    let _life = cluster.start();
    let request = cluster.waiting().await;
    assert!(request["spec"]["pkixPublicKey"].is_string());
    assert!(request["spec"]["proofOfPossession"].is_string());

    // Neither.
    let cluster = Cluster::new();
    cluster.api.fail_always(creates, 404);
    let life = cluster.start();
    pass(1).await;
    let error = get(&life).await.unwrap_err().to_string();
    assert!(
        error.contains("does not serve podcertificaterequests"),
        "{error}"
    );
    let tries = cluster.api.count(creates);
    assert!(
        (8..=16).contains(&tries),
        "{tries}: two a try, with a pause"
    );
}

#[tokio::test(start_paused = true)]
async fn certificates_go_with_their_pod() {
    let cluster = Cluster::new();
    let life = cluster.start();
    let chain = cluster.issue(20).await;
    gets(&life, &chain).await;
    assert!(cluster.world.record(KEY).is_some());
    life.objects.unregister(&web().uid());
    pass(1).await;
    assert_eq!(cluster.world.record(KEY), None);
    assert!(get(&life).await.is_err());
    pass(60).await;
    assert_eq!(cluster.requests().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn certificates_of_pods_that_went_while_the_agent_did_not_run_are_forgotten() {
    let cluster = Cluster::new();
    let life = cluster.start();
    let chain = cluster.issue(20).await;
    gets(&life, &chain).await;
    life.end().await;

    let life = cluster.start();
    life.objects.sweep();
    pass(1).await;
    assert!(cluster.world.record(KEY).is_some());
    life.end().await;

    let life = cluster.start_without_pods(&cluster.world.clock);
    life.objects.sweep();
    pass(1).await;
    assert_eq!(cluster.world.record(KEY), None);
}
