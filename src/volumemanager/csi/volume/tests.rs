//! The steps against a driver of a few lines in this process.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, Pod, Secret, SecretReference};
use prost::Message;
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::{Code, Request, Response, Status};
use tonic_prost::ProstCodec;

use super::*;
use crate::kuberuntime::sources::{PodToken, TokenRef};
use crate::types::metrics::Metrics;
use crate::volumemanager::csi::proto::{
    AccessType, Empty, Mode, NodeExpandVolumeResponse, NodeGetCapabilitiesResponse,
    NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, NodeRpc, NodeServiceCapability,
    NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest, TypeOnly, UsageUnit, VolumeCondition,
    VolumeUsage,
};

#[derive(Default)]
struct Seen {
    calls: Vec<String>,
    stage: Option<NodeStageVolumeRequest>,
    publish: Option<NodePublishVolumeRequest>,
    expand: Option<NodeExpandVolumeRequest>,
    stats: Option<NodeGetVolumeStatsRequest>,
}

#[derive(Clone)]
struct FakeDriver {
    seen: Arc<Mutex<Seen>>,
    can: Arc<Mutex<Vec<NodeRpc>>>,
    failing: Arc<Mutex<BTreeMap<String, Code>>>,
}

impl FakeDriver {
    fn answer<Req: Message, Res>(
        &self,
        call: &str,
        request: &Req,
        good: impl FnOnce(&Req, &mut Seen) -> Res,
    ) -> Result<Response<Res>, Status> {
        let mut seen = self.seen.lock().unwrap();
        seen.calls.push(call.to_owned());
        if let Some(code) = self.failing.lock().unwrap().get(call) {
            return Err(Status::new(*code, "injected"));
        }
        Ok(Response::new(good(request, &mut seen)))
    }
}

impl NamedService for FakeDriver {
    const NAME: &'static str = "csi.v1.Node";
}

struct Method<F>(F);

impl<Req, Res, F> UnaryService<Req> for Method<F>
where
    F: FnOnce(Req) -> Result<Response<Res>, Status> + Clone,
    Req: Message,
    Res: Message,
{
    type Response = Res;
    type Future = std::future::Ready<Result<Response<Res>, Status>>;

    fn call(&mut self, request: Request<Req>) -> Self::Future {
        std::future::ready((self.0.clone())(request.into_inner()))
    }
}

async fn unary<Req, Res, F>(request: http::Request<Body>, answer: F) -> http::Response<Body>
where
    Req: Message + Default + Send + 'static,
    Res: Message + Send + 'static,
    F: FnOnce(Req) -> Result<Response<Res>, Status> + Clone + Send,
{
    Grpc::new(ProstCodec::<Res, Req>::default())
        .unary(Method(answer), request)
        .await
}

impl Service<http::Request<Body>> for FakeDriver {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let of = self.clone();
        Box::pin(async move {
            let path = request.uri().path().to_owned();
            let call = path.rsplit('/').next().unwrap().to_owned();
            let name = call.clone();
            Ok(match call.as_str() {
                "NodeGetCapabilities" => {
                    unary(request, move |_: Empty| {
                        let can = of.can.lock().unwrap();
                        let capabilities = can.iter().map(|rpc| NodeServiceCapability {
                            rpc: Some(TypeOnly {
                                r#type: *rpc as i32,
                            }),
                        });
                        Ok(Response::new(NodeGetCapabilitiesResponse {
                            capabilities: capabilities.collect(),
                        }))
                    })
                    .await
                }
                "NodeStageVolume" => {
                    unary(request, move |r: NodeStageVolumeRequest| {
                        of.answer(&name, &r, |r, seen| {
                            seen.stage = Some(r.clone());
                            Empty {}
                        })
                    })
                    .await
                }
                "NodePublishVolume" => {
                    unary(request, move |r: NodePublishVolumeRequest| {
                        of.answer(&name, &r, |r, seen| {
                            let capability = r.volume_capability.clone().unwrap();
                            match capability.access_type.unwrap() {
                                AccessType::Block(_) => {
                                    fs::write(&r.target_path, "").unwrap();
                                }
                                AccessType::Mount(_) => {
                                    fs::create_dir_all(&r.target_path).unwrap();
                                }
                            }
                            seen.publish = Some(r.clone());
                            Empty {}
                        })
                    })
                    .await
                }
                "NodeUnpublishVolume" => {
                    unary(request, move |r: NodeUnpublishVolumeRequest| {
                        of.answer(&name, &r, |_, _| Empty {})
                    })
                    .await
                }
                "NodeUnstageVolume" => {
                    unary(request, move |r: NodeUnstageVolumeRequest| {
                        of.answer(&name, &r, |_, _| Empty {})
                    })
                    .await
                }
                "NodeExpandVolume" => {
                    unary(request, move |r: NodeExpandVolumeRequest| {
                        of.answer(&name, &r, |r, seen| {
                            seen.expand = Some(r.clone());
                            NodeExpandVolumeResponse { capacity_bytes: 0 }
                        })
                    })
                    .await
                }
                "NodeGetVolumeStats" => {
                    unary(request, move |r: NodeGetVolumeStatsRequest| {
                        of.answer(&name, &r, |r, seen| {
                            seen.stats = Some(r.clone());
                            NodeGetVolumeStatsResponse {
                                usage: vec![VolumeUsage {
                                    available: 1,
                                    total: 3,
                                    used: 2,
                                    unit: UsageUnit::Bytes as i32,
                                }],
                                volume_condition: Some(VolumeCondition {
                                    abnormal: true,
                                    message: "worn".to_owned(),
                                }),
                            }
                        })
                    })
                    .await
                }
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

struct World {
    dir: tempfile::TempDir,
    driver: FakeDriver,
    plugin: CsiPlugin,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn world(can: &[NodeRpc]) -> World {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("csi.sock");
    let driver = FakeDriver {
        seen: Arc::default(),
        can: Arc::new(Mutex::new(can.to_vec())),
        failing: Arc::default(),
    };
    let listener = UnixListener::bind(&socket).unwrap();
    let serving = tonic::transport::Server::builder()
        .add_service(driver.clone())
        .serve_with_incoming(UnixListenerStream::new(listener));
    let server = tokio::spawn(async move { serving.await.unwrap() });
    let client = CsiClient::new("d.example", &socket, Metrics::default());
    let drivers = Drivers::with_clients([client]);
    World {
        plugin: CsiPlugin::new(drivers, dir.path(), "node"),
        dir,
        driver,
        server,
    }
}

impl World {
    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.driver.seen.lock().unwrap().calls)
    }

    fn fail(&self, call: &str, code: Code) {
        let mut failing = self.driver.failing.lock().unwrap();
        failing.insert(call.to_owned(), code);
    }

    fn heal(&self) {
        self.driver.failing.lock().unwrap().clear();
    }

    fn staging(&self) -> PathBuf {
        CsiPlugin::staging_path(self.dir.path(), "d.example", "handle-1")
    }

    /// Returns the target at which the manager has a volume published; its parent exists.
    fn target(&self, staged: bool) -> Target {
        let path = self
            .dir
            .path()
            .join("pods/uid-1/volumes/kubernetes.io~csi/pv-1/mount");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        Target {
            pod: Arc::new(pod()),
            staged: staged.then(|| self.staging()),
            path,
        }
    }

    /// Returns the files and directories that are left below a directory.
    fn left(&self, below: &str) -> Vec<String> {
        let mut found = Vec::new();
        let mut open = vec![self.dir.path().join(below)];
        while let Some(dir) = open.pop() {
            for entry in fs::read_dir(&dir).into_iter().flatten() {
                let path = entry.unwrap().path();
                let shown = path.strip_prefix(self.dir.path()).unwrap();
                found.push(shown.display().to_string());
                if path.is_dir() && !path.is_symlink() {
                    open.push(path);
                }
            }
        }
        found.sort();
        found
    }
}

fn pod() -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "ns", "uid": "uid-1"},
        "spec": {"serviceAccountName": "robot", "securityContext": {"fsGroup": 77},
            "containers": []},
    }))
    .unwrap()
}

fn secret(name: &str) -> Arc<Secret> {
    let data = BTreeMap::from([("k".to_owned(), ByteString(format!("of-{name}").into()))]);
    Arc::new(Secret {
        data: Some(data),
        ..Secret::default()
    })
}

fn reference(name: &str) -> Option<SecretReference> {
    Some(SecretReference {
        name: Some(name.to_owned()),
        namespace: Some("vault".to_owned()),
    })
}

fn csi() -> Csi {
    Csi {
        source: CSIPersistentVolumeSource {
            driver: "d.example".to_owned(),
            volume_handle: "handle-1".to_owned(),
            fs_type: Some("ext4".to_owned()),
            volume_attributes: Some(BTreeMap::from([("tier".to_owned(), "fast".to_owned())])),
            node_stage_secret_ref: reference("stage"),
            node_publish_secret_ref: reference("publish"),
            node_expand_secret_ref: reference("expand"),
            ..CSIPersistentVolumeSource::default()
        },
        publish_context: BTreeMap::from([("disk".to_owned(), "sdb".to_owned())]),
        access_modes: vec!["ReadWriteOnce".to_owned()],
        fs_group_policy: "ReadWriteOnceWithFSType".to_owned(),
        fs_group: Some(77),
        ..Csi::default()
    }
}

fn remote(csi: Csi) -> Remote {
    Remote {
        name: "pv-1".to_owned(),
        claim: Some("ns/data".to_owned()),
        mode: VolumeMode::Filesystem,
        read_only: false,
        mount_options: vec!["noatime".to_owned()],
        unique_name: None,
        terms: crate::core::volumes::Terms::default(),
        source: Source::Csi(Box::new(csi)),
    }
}

fn resolved(remote: Remote) -> Arc<Resolved> {
    let secrets = ["stage", "publish", "expand"];
    let secrets = secrets.map(|n| (("vault".to_owned(), n.to_owned()), secret(n)));
    Arc::new(Resolved {
        remote,
        secrets: secrets.into_iter().collect(),
        tokens: BTreeMap::new(),
        capacity: None,
        missing: None,
    })
}

fn data(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join("vol_data.json")).unwrap()).unwrap()
}

fn pairs(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    let owned = pairs
        .iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    owned.collect()
}

fn mount(
    capability: Option<&crate::volumemanager::csi::proto::VolumeCapability>,
) -> (Mode, super::super::proto::MountVolume) {
    let capability = capability.unwrap();
    let Some(AccessType::Mount(mount)) = &capability.access_type else {
        panic!("not files: {capability:?}");
    };
    (capability.access_mode.unwrap().mode(), mount.clone())
}

#[tokio::test]
async fn a_volume_is_staged_published_and_undone() {
    let world = world(&[NodeRpc::StageUnstageVolume]);
    let volume = resolved(remote(csi()));
    let (plugin, at) = (&world.plugin, world.staging());
    RemotePlugin::stage(plugin, Arc::clone(&volume), at.clone())
        .await
        .unwrap();
    let staged = world.driver.seen.lock().unwrap().stage.take().unwrap();
    assert_eq!(staged.volume_id, "handle-1");
    assert_eq!(staged.staging_target_path, at.to_str().unwrap());
    assert!(at.is_dir(), "the driver finds the directory");
    assert_eq!(staged.publish_context, pairs(&[("disk", "sdb")]));
    assert_eq!(staged.secrets, pairs(&[("k", "of-stage")]));
    assert_eq!(staged.volume_context, pairs(&[("tier", "fast")]));
    let (mode, files) = mount(staged.volume_capability.as_ref());
    assert_eq!(mode, Mode::SingleNodeWriter);
    assert_eq!(files.fs_type, "ext4");
    assert_eq!(files.mount_flags, ["noatime"]);
    assert_eq!(files.volume_mount_group, "", "the driver cannot");
    assert_eq!(
        data(at.parent().unwrap()),
        json!({"driverName": "d.example", "volumeHandle": "handle-1"})
    );

    let target = world.target(true);
    let by = RemotePlugin::publish(plugin, Arc::clone(&volume), target.clone())
        .await
        .unwrap();
    assert_eq!(by, GroupBy::Agent);
    let published = world.driver.seen.lock().unwrap().publish.take().unwrap();
    assert_eq!(published.staging_target_path, at.to_str().unwrap());
    assert_eq!(published.target_path, target.path.to_str().unwrap());
    assert_eq!(published.secrets, pairs(&[("k", "of-publish")]));
    assert_eq!(
        published.volume_context,
        pairs(&[("tier", "fast")]),
        "nothing of the pod"
    );
    assert!(!published.readonly);
    assert_eq!(
        data(target.path.parent().unwrap()),
        json!({
            "attachmentID": crate::objects::volumes::attachment_name("handle-1", "d.example", "node"),
            "driverName": "d.example", "nodeName": "node", "specVolID": "pv-1",
            "volumeHandle": "handle-1", "volumeLifecycleMode": "Persistent",
        })
    );

    let record = Arc::new(volume.remote.clone());
    RemotePlugin::unpublish(plugin, Arc::clone(&record), target.path.clone())
        .await
        .unwrap();
    RemotePlugin::unstage(plugin, Arc::clone(&record), at.clone())
        .await
        .unwrap();
    let calls = world.calls();
    assert_eq!(
        calls,
        [
            "NodeStageVolume",
            "NodePublishVolume",
            "NodeUnpublishVolume",
            "NodeUnstageVolume"
        ]
    );
    assert_eq!(
        world.left("pods"),
        [
            "pods/uid-1",
            "pods/uid-1/volumes",
            "pods/uid-1/volumes/kubernetes.io~csi"
        ]
    );
    assert_eq!(
        world.left("plugins"),
        [
            "plugins/kubernetes.io",
            "plugins/kubernetes.io/csi",
            "plugins/kubernetes.io/csi/d.example"
        ]
    );
    // Once more: there is nothing, and nobody is asked.
    RemotePlugin::unpublish(plugin, Arc::clone(&record), target.path)
        .await
        .unwrap();
    RemotePlugin::unstage(plugin, record, at).await.unwrap();
    assert_eq!(world.calls(), Vec::<String>::new());
}

#[tokio::test]
async fn the_driver_is_told_what_its_object_asks_for() {
    let world = world(&[NodeRpc::VolumeMountGroup, NodeRpc::SingleNodeMultiWriter]);
    let mut csi = csi();
    csi.pod_info = true;
    csi.ephemeral = true;
    let token = PodToken {
        token: "jwt".to_owned(),
        stale: false,
        expires_ms: 1_700_000_000_000,
    };
    let wanted = TokenRef {
        audience: "bank".to_owned(),
        expiration_seconds: 600,
    };
    let mut volume = (*resolved(remote(csi.clone()))).clone();
    volume.tokens.insert(wanted, token);
    volume.remote.read_only = true;
    let target = world.target(false);
    let by = RemotePlugin::publish(&world.plugin, Arc::new(volume.clone()), target.clone())
        .await
        .unwrap();
    assert_eq!(by, GroupBy::Nobody, "the driver does it");
    let published = world.driver.seen.lock().unwrap().publish.take().unwrap();
    assert_eq!(published.staging_target_path, "", "it does not stage");
    assert!(published.readonly);
    let (mode, files) = mount(published.volume_capability.as_ref());
    assert_eq!(mode, Mode::SingleNodeMultiWriter);
    assert_eq!(files.volume_mount_group, "77");
    let tokens = r#"{"bank":{"token":"jwt","expirationTimestamp":"2023-11-14T22:13:20Z"}}"#;
    let key = "csi.storage.k8s.io/serviceAccount.tokens";
    assert_eq!(
        published.volume_context,
        pairs(&[
            ("csi.storage.k8s.io/ephemeral", "true"),
            ("csi.storage.k8s.io/pod.name", "web"),
            ("csi.storage.k8s.io/pod.namespace", "ns"),
            ("csi.storage.k8s.io/pod.uid", "uid-1"),
            ("csi.storage.k8s.io/serviceAccount.name", "robot"),
            (key, tokens),
            ("tier", "fast"),
        ])
    );
    assert_eq!(
        data(target.path.parent().unwrap())["volumeLifecycleMode"],
        "Ephemeral"
    );

    csi.tokens_in_secrets = true;
    volume.remote.source = Source::Csi(Box::new(csi));
    RemotePlugin::publish(&world.plugin, Arc::new(volume), target)
        .await
        .unwrap();
    let published = world.driver.seen.lock().unwrap().publish.take().unwrap();
    assert_eq!(
        published.secrets,
        pairs(&[("k", "of-publish"), (key, tokens)])
    );
    assert!(!published.volume_context.contains_key(key));
}

#[tokio::test]
async fn a_device_is_a_link_that_goes_with_the_last_pod() {
    let world = world(&[NodeRpc::StageUnstageVolume]);
    let mut of = remote(csi());
    of.mode = VolumeMode::Block;
    let volume = resolved(of.clone());
    // As upstream has it.
    let below = "plugins/kubernetes.io/csi/volumeDevices";
    let staging = CsiPlugin::device_staging_path(world.dir.path(), "pv-1");
    assert_eq!(staging, world.dir.path().join(below).join("staging/pv-1"));
    let target = |uid: &str| {
        let dir = world
            .dir
            .path()
            .join(format!("pods/{uid}/volumeDevices/kubernetes.io~csi"));
        fs::create_dir_all(&dir).unwrap();
        Target {
            pod: Arc::new(pod()),
            staged: Some(staging.clone()),
            path: dir.join("pv-1"),
        }
    };
    RemotePlugin::stage(&world.plugin, Arc::clone(&volume), staging.clone())
        .await
        .unwrap();
    for uid in ["uid-1", "uid-2"] {
        let by = RemotePlugin::publish(&world.plugin, Arc::clone(&volume), target(uid))
            .await
            .unwrap();
        assert_eq!(by, GroupBy::Nobody, "nobody owns a device's files");
        let device = fs::read_link(target(uid).path).unwrap();
        let published = format!("{below}/publish/pv-1/{uid}");
        assert_eq!(device, world.dir.path().join(published));
        assert!(device.is_file());
    }
    let made = |path: &str| world.dir.path().join(below).join(path);
    assert!(made("pv-1/data/vol_data.json").is_file());
    assert!(made("pv-1/dev").is_dir());
    // What a kubelet leaves there when its mounts are gone.
    fs::write(made("pv-1/dev/uid-1"), "").unwrap();
    let of = Arc::new(of);
    RemotePlugin::unpublish(&world.plugin, Arc::clone(&of), target("uid-1").path)
        .await
        .unwrap();
    assert!(
        target("uid-2").path.is_file(),
        "the other pod's is untouched"
    );
    assert!(!target("uid-1").path.is_symlink());
    assert!(!made("pv-1/dev/uid-1").exists());
    RemotePlugin::unpublish(&world.plugin, Arc::clone(&of), target("uid-2").path)
        .await
        .unwrap();
    // Another one's lies beside it.
    fs::create_dir(made("staging/pv-2")).unwrap();
    RemotePlugin::unstage(&world.plugin, Arc::clone(&of), staging)
        .await
        .unwrap();
    let mut left = world.left(below);
    left.sort();
    let wanted = ["publish", "staging", "staging/pv-2"].map(|dir| format!("{below}/{dir}"));
    assert_eq!(left, wanted);
}

#[tokio::test]
async fn what_a_kubelet_bound_for_a_pod_is_undone_with_the_device() {
    let world = world(&[NodeRpc::StageUnstageVolume]);
    let mut of = remote(csi());
    of.mode = VolumeMode::Block;
    let below = "plugins/kubernetes.io/csi/volumeDevices/pv-1/dev";
    let bound = world.dir.path().join(below).join("uid-1");
    let dir = world
        .dir
        .path()
        .join("pods/uid-1/volumeDevices/kubernetes.io~csi");
    fs::create_dir_all(&dir).unwrap();
    let target = Target {
        pod: Arc::new(pod()),
        staged: None,
        path: dir.join("pv-1"),
    };
    let volume = resolved(of.clone());
    RemotePlugin::publish(&world.plugin, volume, target.clone())
        .await
        .unwrap();
    fs::write(&bound, "").unwrap();
    let device = world.dir.path().join("device");
    fs::write(&device, "of the node").unwrap();
    let flags = nix::mount::MsFlags::MS_BIND;
    if nix::mount::mount(Some(&device), &bound, None::<&str>, flags, None::<&str>).is_err() {
        return;
    }
    let of = Arc::new(of);
    RemotePlugin::unpublish(&world.plugin, of, target.path)
        .await
        .unwrap();
    assert!(!world.dir.path().join(below).exists());
    assert_eq!(fs::read_to_string(&device).unwrap(), "of the node");
}

#[tokio::test]
async fn a_published_device_whose_link_failed_counts_as_begun() {
    let world = world(&[]);
    let mut of = remote(csi());
    of.mode = VolumeMode::Block;
    let dir = world
        .dir
        .path()
        .join("pods/uid-1/volumeDevices/kubernetes.io~csi");
    fs::create_dir_all(&dir).unwrap();
    let target = Target {
        pod: Arc::new(pod()),
        staged: None,
        path: dir.join("pv-1"),
    };
    fs::write(&target.path, "in the place of the link").unwrap();
    let failed = RemotePlugin::publish(&world.plugin, resolved(of), target).await;
    assert!(
        matches!(failed, Err(RemoteError::Uncertain(_))),
        "{failed:?}"
    );
    assert_eq!(world.calls(), ["NodePublishVolume"]);
}

// Invariant VOL-3.
#[tokio::test]
async fn what_failed_for_good_leaves_nothing_and_what_may_have_been_done_is_undone() {
    let world = world(&[NodeRpc::StageUnstageVolume]);
    let volume = resolved(remote(csi()));
    let (plugin, at, target) = (&world.plugin, world.staging(), world.target(true));
    let record = Arc::new(volume.remote.clone());

    world.fail("NodeStageVolume", Code::InvalidArgument);
    world.fail("NodePublishVolume", Code::InvalidArgument);
    let failed = RemotePlugin::stage(plugin, Arc::clone(&volume), at.clone()).await;
    let text = "CSI driver d.example: NodeStageVolume: InvalidArgument: injected";
    assert_eq!(failed, Err(RemoteError::Failed(text.to_owned())));
    let failed = RemotePlugin::publish(plugin, Arc::clone(&volume), target.clone()).await;
    assert!(matches!(failed, Err(RemoteError::Failed(_))), "{failed:?}");
    assert!(
        !at.parent().unwrap().exists(),
        "{:?}",
        world.left("plugins")
    );
    assert!(
        !target.path.parent().unwrap().exists(),
        "{:?}",
        world.left("pods")
    );

    world.calls();
    world.fail("NodeStageVolume", Code::DeadlineExceeded);
    world.fail("NodePublishVolume", Code::Unavailable);
    let failed = RemotePlugin::stage(plugin, Arc::clone(&volume), at.clone()).await;
    assert!(
        matches!(failed, Err(RemoteError::Uncertain(_))),
        "{failed:?}"
    );
    let failed = RemotePlugin::publish(plugin, Arc::clone(&volume), target.clone()).await;
    assert!(
        matches!(failed, Err(RemoteError::Uncertain(_))),
        "{failed:?}"
    );
    // A refusal now says nothing of the calls before.
    world.fail("NodeStageVolume", Code::InvalidArgument);
    world.fail("NodePublishVolume", Code::InvalidArgument);
    assert!(
        RemotePlugin::stage(plugin, Arc::clone(&volume), at.clone())
            .await
            .is_err()
    );
    assert!(
        RemotePlugin::publish(plugin, Arc::clone(&volume), target.clone())
            .await
            .is_err()
    );
    world.calls();
    world.heal();
    RemotePlugin::unpublish(plugin, Arc::clone(&record), target.path.clone())
        .await
        .unwrap();
    RemotePlugin::unstage(plugin, record, at.clone())
        .await
        .unwrap();
    assert_eq!(world.calls(), ["NodeUnpublishVolume", "NodeUnstageVolume"]);
    assert!(!at.parent().unwrap().exists());
    assert!(!target.path.parent().unwrap().exists());
}

#[tokio::test]
async fn nothing_that_is_not_empty_is_removed() {
    let world = world(&[NodeRpc::StageUnstageVolume]);
    let volume = resolved(remote(csi()));
    let target = world.target(true);
    RemotePlugin::publish(&world.plugin, Arc::clone(&volume), target.clone())
        .await
        .unwrap();
    let precious = target.path.join("precious");
    fs::write(&precious, "x").unwrap();
    let record = Arc::new(volume.remote.clone());
    let failed =
        RemotePlugin::unpublish(&world.plugin, Arc::clone(&record), target.path.clone()).await;
    assert!(matches!(failed, Err(RemoteError::Failed(_))), "{failed:?}");
    assert_eq!(fs::read(&precious).unwrap(), b"x");

    fs::remove_file(&precious).unwrap();
    // The driver forgot the volume, which is mounted nowhere.
    world.fail("NodeUnpublishVolume", Code::NotFound);
    RemotePlugin::unpublish(&world.plugin, record, target.path.clone())
        .await
        .unwrap();
    assert!(!target.path.exists());
}

#[tokio::test]
async fn a_driver_that_is_not_there_is_waited_for() {
    let world = world(&[]);
    let mut other = csi();
    other.source.driver = "other".to_owned();
    let volume = resolved(remote(other));
    let target = world.target(false);
    let failed = RemotePlugin::publish(&world.plugin, Arc::clone(&volume), target.clone()).await;
    let text = "driver name other not found in the list of registered CSI drivers";
    assert_eq!(failed, Err(RemoteError::Waiting(text.to_owned())));
    let record = Arc::new(volume.remote.clone());
    // Nothing was begun, so there is nothing to wait for.
    RemotePlugin::unpublish(&world.plugin, Arc::clone(&record), target.path.clone())
        .await
        .unwrap();
    assert!(
        !target.path.parent().unwrap().exists(),
        "nothing is left behind"
    );
    fs::create_dir_all(&target.path).unwrap();
    let failed = RemotePlugin::unpublish(&world.plugin, record, target.path).await;
    assert!(matches!(failed, Err(RemoteError::Waiting(_))), "{failed:?}");
}

#[tokio::test]
async fn secrets_are_told_whole_or_not_at_all() {
    let world = world(&[NodeRpc::StageUnstageVolume]);
    let mut volume = (*resolved(remote(csi()))).clone();
    let place = ("vault".to_owned(), "stage".to_owned());
    let binary = Secret {
        data: Some(BTreeMap::from([("key".to_owned(), ByteString(vec![0xff]))])),
        ..Secret::default()
    };
    volume.secrets.insert(place.clone(), Arc::new(binary));
    let failed =
        RemotePlugin::stage(&world.plugin, Arc::new(volume.clone()), world.staging()).await;
    let Err(RemoteError::Failed(text)) = failed else {
        panic!("{failed:?}");
    };
    assert!(
        text.starts_with("key key of secret vault/stage is not UTF-8"),
        "{text}"
    );
    volume.secrets.remove(&place);
    let failed = RemotePlugin::stage(&world.plugin, Arc::new(volume), world.staging()).await;
    assert!(matches!(failed, Err(RemoteError::Waiting(_))), "{failed:?}");
    assert_eq!(world.calls(), Vec::<String>::new());
}

#[tokio::test]
async fn a_size_that_a_driver_never_has_is_told_from_one_it_does_not_have_now() {
    let world = world(&[NodeRpc::ExpandVolume]);
    let (volume, target) = (resolved(remote(csi())), world.target(false));
    let fails = async |code| {
        world.fail("NodeExpandVolume", code);
        let (volume, path) = (Arc::clone(&volume), target.path.clone());
        RemotePlugin::expand(&world.plugin, volume, None, path, 5).await
    };
    for code in [Code::OutOfRange, Code::InvalidArgument, Code::NotFound] {
        let failed = fails(code).await;
        assert!(
            matches!(failed, Err(RemoteError::Infeasible(_))),
            "{failed:?}"
        );
    }
    for code in [Code::Internal, Code::FailedPrecondition] {
        let failed = fails(code).await;
        assert!(matches!(failed, Err(RemoteError::Failed(_))), "{failed:?}");
    }
    for code in [Code::Aborted, Code::DeadlineExceeded] {
        let failed = fails(code).await;
        assert!(
            matches!(failed, Err(RemoteError::Uncertain(_))),
            "{failed:?}"
        );
    }
}

#[tokio::test]
async fn volumes_grow_and_are_measured_by_drivers_that_can() {
    let world = world(&[]);
    let volume = resolved(remote(csi()));
    let target = world.target(true);
    let grow = |bytes| {
        RemotePlugin::expand(
            &world.plugin,
            Arc::clone(&volume),
            target.staged.clone(),
            target.path.clone(),
            bytes,
        )
    };
    let usage = || {
        let remote = Arc::new(volume.remote.clone());
        RemotePlugin::usage(&world.plugin, remote, target.path.clone())
    };
    assert_eq!(grow(5).await, Ok(None));
    assert_eq!(usage().await, Ok(None));
    *world.driver.can.lock().unwrap() = vec![
        NodeRpc::StageUnstageVolume,
        NodeRpc::ExpandVolume,
        NodeRpc::GetVolumeStats,
    ];
    assert_eq!(grow(5).await, Ok(Some(5)));
    let grown = world.driver.seen.lock().unwrap().expand.take().unwrap();
    assert_eq!(grown.volume_path, target.path.to_str().unwrap());
    assert_eq!(grown.staging_target_path, world.staging().to_str().unwrap());
    assert_eq!(grown.capacity_range.unwrap().required_bytes, 5);
    assert_eq!(grown.secrets, pairs(&[("k", "of-expand")]));
    let usage = usage().await.unwrap().unwrap();
    assert_eq!(
        (usage.capacity, usage.used, usage.available),
        (Some(3), Some(2), Some(1))
    );
    assert!(usage.abnormal);
    let stats = world.driver.seen.lock().unwrap().stats.take().unwrap();
    assert_eq!(stats.staging_target_path, world.staging().to_str().unwrap());
    world.fail("NodeExpandVolume", Code::FailedPrecondition);
    let failed = grow(6).await;
    assert!(matches!(failed, Err(RemoteError::Failed(_))), "{failed:?}");
}
