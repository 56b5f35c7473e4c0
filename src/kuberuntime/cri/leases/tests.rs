//! Leases of pulls, on a containerd that consists of its leases.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use k8s_cri::v1;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::Response;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::server::{Grpc, NamedService};

use super::super::{CriErrorKind, CriTimeouts};
use super::*;
use crate::types::metrics::Metrics;
use crate::types::{BootId, SystemClock};

/// A containerd that consists of its leases, and pulls everything at once.
#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Model>>);

#[derive(Default)]
struct Model {
    leases: BTreeMap<String, (HashMap<String, String>, Vec<Resource>)>,
    /// Calls, with the lease that they are about; a deletion that waits for a collection of garbage is a `Collect`.
    calls: Vec<String>,
    /// Method that has its effect and fails. `List` has none.
    fails: Option<&'static str>,
}

impl Fake {
    fn model(&self) -> MutexGuard<'_, Model> {
        self.0.lock().unwrap()
    }

    fn with_lease(self, id: &str, resources: &[(&str, &str)], expires: &str) -> Self {
        let labels = [(EXPIRES.to_owned(), expires.to_owned())].into();
        let resources = resources.iter().map(|(kind, id)| Resource {
            id: (*id).to_owned(),
            r#type: (*kind).to_owned(),
        });
        let lease = (labels, resources.collect());
        self.model().leases.insert(id.to_owned(), lease);
        self
    }

    fn leases(&self) -> Vec<String> {
        self.model().leases.keys().cloned().collect()
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.model().calls)
    }

    /// Answers one call.
    async fn answer<Q, A>(
        &self,
        request: http::Request<Body>,
        does: impl Fn(&mut Model, Q) -> (String, Result<A, Status>) + Send + Sync + 'static,
    ) -> http::Response<Body>
    where
        Q: Message + Default + 'static,
        A: Message + Default + 'static,
    {
        let fake = self.clone();
        let does = Arc::new(does);
        let service = tower::service_fn(move |request: Request<Q>| {
            let (fake, does) = (fake.clone(), Arc::clone(&does));
            async move {
                let mut model = fake.model();
                let (call, answer) = does(&mut model, request.into_inner());
                model.calls.push(call.clone());
                match model.fails.is_some_and(|method| call.starts_with(method)) {
                    true => Err(Status::internal("no answer")),
                    false => answer.map(Response::new),
                }
            }
        });
        let mut grpc = Grpc::new(ProstCodec::<A, Q>::default());
        grpc.unary(service, request).await
    }

    async fn serve(&self, request: http::Request<Body>) -> http::Response<Body> {
        let path = request.uri().path().to_owned();
        match path.rsplit('/').next().unwrap_or_default() {
            "List" => {
                let list = |model: &mut Model, _: ListRequest| {
                    let leases = model.leases.iter().map(|(id, (labels, _))| Lease {
                        id: id.clone(),
                        labels: labels.clone(),
                    });
                    let leases = leases.collect();
                    ("List".to_owned(), Ok(ListResponse { leases }))
                };
                self.answer(request, list).await
            }
            "Create" => {
                let create = |model: &mut Model, lease: CreateRequest| {
                    let call = format!("Create {}", lease.id);
                    if model.leases.contains_key(&lease.id) {
                        return (call, Err(Status::already_exists("it exists")));
                    }
                    model.leases.insert(lease.id, (lease.labels, Vec::new()));
                    (call, Ok(Empty {}))
                };
                self.answer(request, create).await
            }
            "Delete" => {
                let delete = |model: &mut Model, lease: DeleteRequest| {
                    let method = if lease.sync { "Collect" } else { "Delete" };
                    let call = format!("{method} {}", lease.id);
                    match model.leases.remove(&lease.id) {
                        Some(_) => (call, Ok(Empty {})),
                        None => (call, Err(Status::not_found("no such lease"))),
                    }
                };
                self.answer(request, delete).await
            }
            "ListResources" => {
                let list = |model: &mut Model, lease: ListResourcesRequest| {
                    let call = format!("Resources {}", lease.id);
                    let Some((_, resources)) = model.leases.get(&lease.id) else {
                        return (call, Err(Status::not_found("no such lease")));
                    };
                    let resources = resources.clone();
                    (call, Ok(ListResourcesResponse { resources }))
                };
                self.answer(request, list).await
            }
            "AddResource" => {
                let add = |model: &mut Model, added: AddResourceRequest| {
                    let call = format!("Add {}", added.id);
                    let Some((_, resources)) = model.leases.get_mut(&added.id) else {
                        return (call, Err(Status::not_found("no such lease")));
                    };
                    resources.extend(added.resource);
                    (call, Ok(Empty {}))
                };
                self.answer(request, add).await
            }
            _ => {
                let pull = |_: &mut Model, request: v1::PullImageRequest| {
                    let image_ref = request.image.unwrap_or_default().image;
                    let answer = v1::PullImageResponse { image_ref };
                    ("Pull".to_owned(), Ok(answer))
                };
                self.answer(request, pull).await
            }
        }
    }
}

/// One of its services.
#[derive(Clone)]
struct Served<const IMAGES: bool>(Fake);

impl NamedService for Served<true> {
    const NAME: &'static str = "runtime.v1.ImageService";
}

impl NamedService for Served<false> {
    const NAME: &'static str = "containerd.services.leases.v1.Leases";
}

impl<const IMAGES: bool> tower::Service<http::Request<Body>> for Served<IMAGES> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let fake = self.0.clone();
        Box::pin(async move { Ok(fake.serve(request).await) })
    }
}

/// Serves it on a socket in a directory, and returns the client of an agent in boot `b2`.
fn agent(fake: &Fake, dir: &tempfile::TempDir) -> CriClient {
    let path = dir.path().join("containerd.sock");
    if !path.exists() {
        let incoming = UnixListenerStream::new(UnixListener::bind(&path).unwrap());
        let server = tonic::transport::Server::builder()
            .add_service(Served::<true>(fake.clone()))
            .add_service(Served::<false>(fake.clone()));
        tokio::spawn(server.serve_with_incoming(incoming));
    }
    let endpoint = format!("unix://{}", path.display());
    let client = CriClient::new(&endpoint, None, CriTimeouts::default(), Metrics::default());
    let clock = Arc::new(SystemClock::new(BootId(2)));
    client.unwrap().resuming_pulls("b2", clock)
}

async fn pull(agent: &CriClient) -> Result<String, super::super::CriError> {
    let image = v1::ImageSpec {
        image: "big:1".to_owned(),
        ..Default::default()
    };
    agent.pull_image(image, None, None).await
}

fn of_boot(boot: &str, image: &str) -> String {
    format!("{PULL_LEASES}{}-{}", short(boot, 4), short(image, 16))
}

const PARTS: [(&str, &str); 2] = [("content", "sha256:a"), ("snapshots/overlayfs", "s")];
const LATER: &str = "2100-01-01T00:00:00Z";

// Invariant IMG-5.
#[tokio::test]
async fn a_pull_waits_until_the_leases_of_an_earlier_boot_are_replaced() {
    for fails in ["List", "Create", "Delete", "Collect"] {
        let dir = tempfile::tempdir().unwrap();
        let fake = Fake::default().with_lease(&of_boot("b1", "big:1"), &PARTS, LATER);
        let first = agent(&fake, &dir);
        fake.model().fails = Some(fails);
        first.take_over_pulls().await;
        let error = pull(&first).await.unwrap_err();
        assert_eq!(error.kind, CriErrorKind::Other);
        let text = error.to_string();
        assert!(text.contains("pulls of an earlier boot"), "{fails}: {text}");
        assert!(!fake.calls().contains(&"Pull".to_owned()), "{fails}");
        // Another agent may be the one that goes on.
        for next in [first, agent(&fake, &dir)] {
            fake.model().fails = None;
            assert_eq!(pull(&next).await.unwrap(), "big:1");
            let calls = fake.calls();
            let at = |call: &str| calls.iter().position(|c| c == call);
            let is_first = !calls.is_empty() && at("List") == Some(0);
            assert!(is_first, "{fails}: {calls:?}");
            if let Some(collected) = at(&format!("Collect {COLLECTION}")) {
                assert!(Some(collected) < at("Pull"), "{fails}: {calls:?}");
            }
            assert_eq!(fake.leases(), [""; 0], "{fails}");
        }
    }
}

#[tokio::test]
async fn what_an_earlier_boot_unpacked_is_collected_by_the_next_agent_if_the_first_dies() {
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::default().with_lease(&of_boot("b1", "other:1"), &PARTS, LATER);
    fake.model().fails = Some("Collect");
    // The lease is deleted, and nobody has heard that the garbage was collected.
    agent(&fake, &dir).take_over_pulls().await;
    let new = of_boot("b2", "other:1");
    assert_eq!(fake.leases(), [new.clone(), UNCOLLECTED.to_owned()]);
    fake.model().fails = None;
    fake.calls();
    pull(&agent(&fake, &dir)).await.unwrap();
    let calls = fake.calls();
    let at = |call: &str| calls.iter().position(|c| c == call);
    let collected = at(&format!("Collect {COLLECTION}"));
    assert!(collected.is_some() && collected < at("Pull"), "{calls:?}");
    assert_eq!(fake.leases(), std::slice::from_ref(&new));
    let kept = fake.model().leases[&new].1.clone();
    assert_eq!(kept.len(), 1, "what was unpacked is not kept: {kept:?}");
}

#[tokio::test]
async fn an_old_lease_gets_a_later_end_before_a_pull_with_all_of_its_parts() {
    let id = of_boot("b2", "big:1");
    let in_days = |days: i64| {
        let now = jiff::Timestamp::now().as_second();
        let at = jiff::Timestamp::from_second(now + days * 24 * 3600).unwrap();
        at.to_string()
    };
    for (days, is_renewed) in [(-1, true), (3, true), (7, false)] {
        let dir = tempfile::tempdir().unwrap();
        let expires = in_days(days);
        let fake = Fake::default().with_lease(&id, &PARTS, &expires);
        let agent = agent(&fake, &dir);
        let held = agent.lease_of("big:1").await.unwrap().unwrap();
        assert_eq!(fake.leases(), std::slice::from_ref(&id), "{days}");
        let (labels, parts) = fake.model().leases[&id].clone();
        assert_eq!(parts.len(), 2, "{days}: {parts:?}");
        let at = &labels[EXPIRES];
        assert_eq!(*at != expires, is_renewed, "{days}: {at}");
        let now = jiff::Timestamp::now().as_millisecond();
        assert!(!is_old(Some(at), now), "{days}: {at}");
        drop(held);
    }
    // Of two pulls at a time, none takes the lease from the other.
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::default().with_lease(&id, &PARTS, &in_days(7));
    let agent = agent(&fake, &dir);
    let first = agent.lease_of("big:1").await.unwrap();
    let lease = (
        HashMap::from([(EXPIRES.to_owned(), in_days(3))]),
        Vec::new(),
    );
    fake.model().leases.insert(id.clone(), lease);
    fake.calls();
    assert!(agent.lease_of("big:1").await.unwrap().is_some());
    let calls = fake.calls();
    assert!(!calls.contains(&format!("Delete {id}")), "{calls:?}");
    drop(first);
}

#[tokio::test]
async fn parts_of_other_pulls_stay_when_an_image_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let id = of_boot("b2", "big:1");
    let fake = Fake::default().with_lease(&id, &PARTS, LATER);
    let agent = agent(&fake, &dir);
    drop(agent.remove_image("other:1").await);
    assert_eq!(fake.leases(), [id]);
    agent.release_pulls().await;
    assert_eq!(fake.leases(), [""; 0]);
}

#[test]
fn failures_are_in_a_row_only_without_one_of_the_network_between_them() {
    let (doubt, network) = (
        Some("not found"),
        Some("dial tcp 10.0.0.1:443: i/o timeout"),
    );
    let drops = |errors: &[Option<&str>]| {
        let mut known = Known::default();
        let mut last = None;
        for error in errors {
            last = Some(known.drops("lease", *error));
        }
        last
    };
    assert_eq!(drops(&[doubt]), Some(false));
    assert_eq!(drops(&[doubt, doubt]), Some(true));
    assert_eq!(drops(&[doubt, network, doubt]), Some(false));
    assert_eq!(drops(&[doubt, network, doubt, doubt]), Some(true));
    assert_eq!(drops(&[None]), Some(true), "the image is complete");
}

#[test]
fn only_leases_of_pulls_of_other_boots_have_a_successor() {
    let new = |id: &str| successor(id, "b2");
    let of = |boot: &str| format!("{PULL_LEASES}{boot}-0a0b");
    assert_eq!(new(&of("b1")), Some(of("b2")));
    assert_eq!(new(&of("b2")), None);
    assert_eq!(new(&format!("{}{SPARE}", of("b1"))), Some(of("b2")));
    for other in [
        "1732690000-abc",
        "holdfast-pull-",
        "holdfast-pull-x",
        UNCOLLECTED,
        COLLECTION,
    ] {
        assert_eq!(new(other), None, "{other}");
        assert!(!is_of_pull(other), "{other}");
    }
}

#[test]
fn what_was_unpacked_stays_in_its_boot() {
    let of = |kind: &str| Resource {
        id: "x".to_owned(),
        r#type: kind.to_owned(),
    };
    assert!(outlives_the_boot(&of("content")) && outlives_the_boot(&of("ingests")));
    assert!(!outlives_the_boot(&of("snapshots/overlayfs")));
}

#[test]
fn a_failure_of_the_network_keeps_parts_and_a_damaged_part_drops_them() {
    for network in [
        "failed to do request: Get \"https://r/v2/x/blobs/sha256:ab\": dial tcp 10.0.0.1:443: connect: no route to host",
        "httpReadSeeker: failed open: unexpected status code https://r/: 503 Service Unavailable",
        "failed to copy: read tcp 10.0.0.2:4711->10.0.0.1:443: read: connection reset by peer",
        "failed to copy: unexpected EOF",
        "failed to do request: Head \"https://r/v2/x/manifests/1\": EOF",
        "failed to do request: Head \"https://r/v2/x/manifests/1\": net/http: TLS handshake timeout",
    ] {
        assert_eq!(judge(network), Parts::Keep, "{network}");
    }
    for damage in [
        "failed commit on ref \"layer-sha256:ab\": unexpected commit digest sha256:cd, expected sha256:ab: failed precondition",
        "failed to extract layer sha256:ab: wrong diff id calculated on extraction \"sha256:cd\"",
        "failed to copy: write /var/lib/containerd/data: no space left on device",
    ] {
        assert_eq!(judge(damage), Parts::Drop, "{damage}");
    }
    for unclear in [
        "failed to resolve reference \"r/x:1\": r/x:1: not found",
        "invalid character '\\x00' looking for beginning of value",
        "failed to read config: unexpected EOF",
        "failed to unpack image r/timeout/canceled:EOF: invalid character '\\x00' looking for beginning of value",
    ] {
        assert_eq!(judge(unclear), Parts::Doubt, "{unclear}");
    }
}
