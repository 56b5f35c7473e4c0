//! What the builders make of a pod, seen from inside a container of a real containerd.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test may fail loudly"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast::cm::{CgroupConfig, CgroupManager};
use holdfast::core::state::{ContainerRecord, Transaction, child_key};
use holdfast::images::{ImageConfig, ImageManager, PullInputs};
use holdfast::kuberuntime::attempt_files::{self, Owner};
use holdfast::kuberuntime::container_config::{self, ContainerInputs};
use holdfast::kuberuntime::cri::{CriClient, CriTimeouts};
use holdfast::kuberuntime::dns::{DnsConfigurer, ResolvConf, Unfilled};
use holdfast::kuberuntime::env::{self, EnvInputs};
use holdfast::kuberuntime::gc::{GcPolicy, Remover};
use holdfast::kuberuntime::kill::{Condemned, Killer};
use holdfast::kuberuntime::node_context::{MachineFacts, MemorySize, NodeContext};
use holdfast::kuberuntime::security::Isolation;
use holdfast::kuberuntime::sources::Sources;
use holdfast::kuberuntime::{logs, sandbox_config};
use holdfast::store::{StartIntent, StopDecision, Store};
use holdfast::types::events::MemoryRecorder;
use holdfast::types::metrics::Metrics;
use holdfast::types::runtime::{ContainerState, PodStatus};
use holdfast::types::{BootId, Clock, Pace, PodExt, SystemClock};
use holdfast::volumemanager::VolumeManager;
use holdfast_testkit::containerd::{BUSYBOX, PrivateContainerd, Version};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

struct PrivateRoot {
    name: String,
    mounts: Vec<PathBuf>,
}

impl Drop for PrivateRoot {
    fn drop(&mut self) {
        for mount in &self.mounts {
            remove(&mount.join(&self.name));
        }
    }
}

fn remove(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            remove(&entry.path());
        }
    }
    fs::remove_dir(dir).ok();
}

struct World {
    cri: CriClient,
    store: Store,
    clock: Arc<dyn Clock>,
    ctx: NodeContext,
    recorder: MemoryRecorder,
    cgroups: CgroupManager,
    volumes: VolumeManager,
    images: ImageManager,
    dir: tempfile::TempDir,
    // Dropped in this order: containers go before their cgroups.
    _containerd: PrivateContainerd,
    _cgroup_root: PrivateRoot,
}

fn world(test: &str) -> World {
    let containerd = PrivateContainerd::start(Version::Installed).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new(BootId(1)));
    let store = Store::in_memory(clock.clone());
    let name = format!("holdfast-test-{}-{test}", std::process::id());
    let cgroups = CgroupManager::detect(CgroupConfig {
        root: format!("/{name}"),
        ..CgroupConfig::default()
    })
    .unwrap();
    cgroups.setup().unwrap();
    let mut ctx = NodeContext::new("node-1", dir.path().join("root"));
    ctx.pod_log_root = dir.path().join("pods");
    ctx.container_log_root = dir.path().join("containers");
    ctx.machine.set(MachineFacts {
        size: Some(MemorySize {
            memory: 1 << 30,
            swap: 0,
        }),
        ..MachineFacts::default()
    });
    ctx.dns = DnsConfigurer {
        cluster_dns: vec!["10.96.0.10".to_owned()],
        cluster_domain: "cluster.local".to_owned(),
        resolv_conf: None,
        unfilled: Unfilled::default(),
    };
    World {
        cri: CriClient::new(
            &containerd.endpoint(),
            None,
            CriTimeouts::default(),
            Metrics::default(),
        )
        .unwrap(),
        volumes: VolumeManager::new(&ctx.root_dir, None, store.clone(), clock.clone()),
        images: ImageManager::new(ImageConfig::default(), clock.clone(), Metrics::default()),
        _cgroup_root: PrivateRoot {
            name,
            mounts: cgroups.describe().into_keys().collect(),
        },
        cgroups,
        store,
        clock,
        ctx,
        recorder: MemoryRecorder::default(),
        dir,
        _containerd: containerd,
    }
}

impl World {
    /// Runs the pod's only container to its end.
    async fn run(&self, pod: &Pod) -> PodStatus {
        let container = &pod.containers()[0];
        self.cgroups.ensure(pod).unwrap();
        logs::create_pod_log_dir(&self.ctx, pod).unwrap();
        let volumes = self
            .volumes
            .mount(pod, &Sources::default(), &self.recorder)
            .await
            .unwrap();
        let (dns, _) = self.ctx.dns.pod_dns(pod, &ResolvConf::default()).unwrap();
        let parent = self.cgroups.pod_cgroup_parent(pod).unwrap();
        let sandbox_config = sandbox_config::build(pod, 0, &parent, dns, &self.ctx).unwrap();
        let sandbox = Box::pin(self.cri.run_pod_sandbox(sandbox_config.clone(), ""))
            .await
            .unwrap();
        let image = Box::pin(self.images.ensure(
            pod,
            container,
            PullInputs {
                sandbox: Some(&sandbox_config),
                ..Default::default()
            },
            &self.cri,
            &self.store,
            &self.recorder,
        ))
        .await
        .unwrap();
        let ips = Box::pin(self.cri.pod_status(&pod.uid(), pod.name(), pod.namespace()))
            .await
            .unwrap()
            .ips;
        let files = container_config::prepare_files(pod, container, &ips, &self.ctx).unwrap();
        let env = env::make_env(
            &EnvInputs {
                pod,
                container,
                pod_ips: &ips,
                sources: &Sources {
                    services: Some(Vec::new()),
                    ..Default::default()
                },
            },
            &self.ctx,
        )
        .unwrap();
        let config = container_config::build(
            &ContainerInputs {
                pod,
                container,
                attempt: 0,
                hash: "1",
                image_ref: &image.reference,
                env: &env,
                volumes: &volumes,
                remotes: &BTreeMap::new(),
                sub_paths: &BTreeMap::new(),
                without_labels: &std::collections::BTreeSet::new(),
                recursive_read_only: false,
                files: &files,
                isolation: Isolation::default(),
            },
            &self.ctx,
        )
        .unwrap();
        let id = Box::pin(self.cri.create_container(&sandbox, config, sandbox_config))
            .await
            .unwrap();
        let intent = StartIntent {
            pod: pod.uid(),
            container: container.name.clone(),
            container_id: id.clone(),
            attempt: 0,
            hash: "1".to_owned(),
            why: "test".to_owned(),
            at: self.clock.now(),
        };
        let receipt = self
            .store
            .commit_intent(intent, Transaction::new())
            .await
            .unwrap();
        Box::pin(self.cri.start_container(&receipt)).await.unwrap();
        let owner = Owner {
            uid: pod.uid(),
            namespace: pod.namespace().to_owned(),
            name: pod.name().to_owned(),
        };
        attempt_files::link(&self.ctx, &owner, &container.name, &id, 0).unwrap();
        tokio::time::timeout(Duration::from_secs(30), async {
            loop {
                let status = Box::pin(self.cri.pod_status(&pod.uid(), pod.name(), pod.namespace()))
                    .await
                    .unwrap();
                if status.containers[0].state == ContainerState::Exited {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await
        .unwrap()
    }

    async fn clean(&self, pod: &Pod, status: &PodStatus) {
        let permit = self
            .store
            .commit_stop(StopDecision::unrecorded_leftovers())
            .await
            .unwrap();
        let grace = Duration::from_secs(2);
        let killer = Killer {
            cri: &self.cri,
            store: &self.store,
            recorder: &self.recorder,
            permit: &permit,
            clock: &*self.clock,
            pace: &Pace::default(),
            ends: None,
        };
        let condemned = Condemned {
            status,
            pod: Some(pod),
            host_ips: &[],
        };
        Box::pin(killer.pod(condemned, grace)).await.unwrap();
        let remover = Remover {
            cri: &self.cri,
            store: &self.store,
            clock: &*self.clock,
            ctx: &self.ctx,
        };
        let pods: Vec<_> = self.cri.list_pods().await.unwrap().into_values().collect();
        let gone = BTreeSet::from([pod.uid()]);
        let report = Box::pin(remover.collect(&pods, GcPolicy::default(), &gone, &permit)).await;
        assert!(report.errors.is_empty(), "{:?}", report.errors);
        assert_eq!((report.containers, report.sandboxes), (1, 1));
        self.volumes.unmount(&pod.uid()).await.unwrap();
        self.volumes.remove_pod_dirs(&pod.uid()).await.unwrap();
        self.cgroups.destroy(&pod.uid()).unwrap();
        assert!(self.cgroups.list_pods().unwrap().is_empty());
        logs::remove_pod_logs(&self.ctx, pod.namespace(), pod.name(), &pod.uid()).unwrap();
        assert_eq!(
            fs::read_dir(&self.ctx.container_log_root).unwrap().count(),
            0,
            "the link went with the log"
        );
        assert!(self.cri.list_pods().await.unwrap().is_empty());
    }
}

fn facts(out: &Path) -> BTreeMap<String, String> {
    fs::read_dir(out)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|e| {
            (
                e.file_name().into_string().unwrap(),
                fs::read_to_string(e.path()).unwrap().trim().to_owned(),
            )
        })
        .collect()
}

const LOOK: &str = "pwd > /out/pwd; cd /out; cat /etc/hosts > hosts; cat /etc/resolv.conf > resolv; \
    hostname > hostname; echo $GREETING > env; cat /proc/self/oom_score_adj > oom; \
    cat /proc/self/cgroup > cgroup; wc -c < /proc/interrupts > interrupts; \
    (echo 1 > /proc/sys/vm/drop_caches) 2> sysctl; grep ' /mem ' /proc/mounts > mem; \
    echo scratch > /empty/x; echo \"$0\" > arg; printf 'last words' > /dev/termination-log; exit 3";

#[tokio::test(flavor = "multi_thread")]
async fn a_container_finds_what_its_pod_promises() {
    let world = world("promises");
    let out = world.dir.path().join("out");
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "shop", "uid": "u1-2", "labels": {"app": "web"}},
        "spec": {
            "hostAliases": [{"ip": "1.2.3.4", "hostnames": ["alias"]}],
            "volumes": [
                {"name": "out", "hostPath": {"path": out, "type": "DirectoryOrCreate"}},
                {"name": "empty", "emptyDir": {}},
                {"name": "mem", "emptyDir": {"medium": "Memory", "sizeLimit": "2Mi"}},
            ],
            "containers": [{
                "name": "c", "image": BUSYBOX, "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-c", LOOK, "$(GREETING) $$(GREETING) $(NOBODY)"],
                "env": [{"name": "WHO", "value": "world"}, {"name": "GREETING", "value": "hello $(WHO)"}],
                "workingDir": "/tmp",
                "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "768Mi"}},
                "volumeMounts": [
                    {"name": "out", "mountPath": "/out"}, {"name": "empty", "mountPath": "/empty"},
                    {"name": "mem", "mountPath": "/mem"},
                ],
            }],
        },
    }))
    .unwrap();
    let status = Box::pin(world.run(&pod)).await;
    let seen = facts(&out);
    assert_eq!(seen["pwd"], "/tmp");
    let container = &status.containers[0];
    assert_eq!(
        (container.exit_code, container.message.as_str()),
        (3, "last words")
    );
    assert!(
        seen["hosts"].contains(&format!("{}\tweb", status.ips[0])),
        "{seen:?}"
    );
    assert!(seen["hosts"].contains("1.2.3.4\talias"), "{seen:?}");
    assert!(seen["resolv"].contains("nameserver 10.96.0.10"), "{seen:?}");
    assert!(
        seen["resolv"].contains("search shop.svc.cluster.local svc.cluster.local cluster.local"),
        "{seen:?}"
    );
    assert_eq!(
        (seen["hostname"].as_str(), seen["env"].as_str()),
        ("web", "hello world")
    );
    assert_eq!(seen["arg"], "hello world $(GREETING) $(NOBODY)");
    assert_eq!(seen["oom"], "500");
    assert!(
        seen["cgroup"].contains("/kubepods/burstable/podu1-2/"),
        "{seen:?}"
    );
    assert_eq!(seen["interrupts"], "0", "masked");
    assert!(seen["sysctl"].contains("Read-only"), "{seen:?}");
    assert!(
        seen["mem"].contains("tmpfs") && seen["mem"].contains("size=2048k"),
        "{seen:?}"
    );
    let empty = world
        .ctx
        .pod_dir(&pod.uid())
        .join("volumes/kubernetes.io~empty-dir/empty/x");
    assert_eq!(fs::read_to_string(empty).unwrap(), "scratch\n");

    Box::pin(world.clean(&pod, &status)).await;
    assert!(out.join("hosts").exists(), "a hostPath is left as it is");
    let seen = world.store.snapshot();
    let record = seen
        .record::<ContainerRecord>(&child_key(&pod.uid(), "c"))
        .unwrap();
    assert_eq!(record.last_exit.as_ref().map(|e| e.exit_code), Some(3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_privileged_container_on_the_host_network_is_the_nodes() {
    let world = world("host");
    let out = world.dir.path().join("out");
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "agent", "namespace": "kube-system", "uid": "u2"},
        "spec": {
            "hostNetwork": true, "hostPID": true, "hostIPC": true,
            "volumes": [{"name": "out", "hostPath": {"path": out, "type": "DirectoryOrCreate"}}],
            "containers": [{
                "name": "c", "image": BUSYBOX, "imagePullPolicy": "Never",
                "command": ["sh", "-c", "cd /out; readlink /proc/self/ns/net > net; readlink /proc/self/ns/pid > pid; readlink /proc/self/ns/ipc > ipc; cat /etc/hosts > hosts; ls /dev | wc -l > dev; touch /proc/sys/vm/swappiness && echo yes > writable"],
                "securityContext": {"privileged": true},
                "volumeMounts": [{"name": "out", "mountPath": "/out"}],
            }],
        },
    }))
    .unwrap();
    let status = Box::pin(world.run(&pod)).await;
    let seen = facts(&out);
    assert_eq!(status.containers[0].exit_code, 0, "{seen:?}");
    for namespace in ["net", "pid", "ipc"] {
        let own = fs::read_link(format!("/proc/self/ns/{namespace}")).unwrap();
        assert_eq!(Path::new(&seen[namespace]), own);
    }
    assert!(
        seen["hosts"].starts_with("# Kubernetes-managed hosts file (host network)."),
        "{seen:?}"
    );
    assert_eq!(seen["writable"], "yes");
    Box::pin(world.clean(&pod, &status)).await;
}
