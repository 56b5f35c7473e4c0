//! What kubeadm does with a node, by the files and calls that it makes: join, control plane, upgrade, reset, join again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use holdfast_testkit::envtest::EnvTest;
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::{Node as NodeObject, Pod};
use kube::Client;
use kube::api::{Api, DeleteParams, PostParams};
use serde_json::{Value, json};

use super::node::{IMAGE, Node, PATIENCE, SLEEP, pod};

/// What `kubeadm join` of 1.36 writes, zeros included.
const CONFIG: &str = "apiVersion: kubelet.config.k8s.io/v1beta1
authentication:
  anonymous:
    enabled: false
  webhook:
    cacheTTL: 0s
    enabled: true
  x509:
    clientCAFile: /etc/kubernetes/pki/ca.crt
authorization:
  mode: Webhook
  webhook:
    cacheAuthorizedTTL: 0s
    cacheUnauthorizedTTL: 0s
cgroupDriver: systemd
clusterDNS:
- 10.96.0.10
clusterDomain: cluster.local
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cpuManagerReconcilePeriod: 0s
crashLoopBackOff: {}
evictionPressureTransitionPeriod: 0s
fileCheckFrequency: 0s
healthzBindAddress: 127.0.0.1
healthzPort: 10248
httpCheckFrequency: 0s
imageMaximumGCAge: 0s
imageMinimumGCAge: 0s
kind: KubeletConfiguration
logging:
  flushFrequency: 0
  options:
    json:
      infoBufferSize: \"0\"
    text:
      infoBufferSize: \"0\"
  verbosity: 0
memorySwap: {}
nodeStatusReportFrequency: 0s
nodeStatusUpdateFrequency: 0s
rotateCertificates: true
runtimeRequestTimeout: 0s
shutdownGracePeriod: 0s
shutdownGracePeriodCriticalPods: 0s
staticPodPath: /etc/kubernetes/manifests
streamingConnectionIdleTimeout: 0s
syncFrequency: 0s
volumeStatsAggPeriod: 0s
";

/// A cluster on the host, and a machine to join it.
struct Site {
    node: Node,
    env: Arc<EnvTest>,
    client: Client,
    runtime: tokio::runtime::Runtime,
}

impl Site {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let env = Arc::new(EnvTest::start());
        let client = runtime.block_on(async { env.admin_client() });
        let mut node = Node::installed();
        // As docs/install.md says for a node of kubeadm.
        node.sh(
            "systemctl disable --now holdfast 2>/dev/null; rm -f /etc/holdfast/config.yaml; \
             install -D -m 0644 /usr/share/doc/holdfast/examples/systemd/kubeadm.conf \
             /etc/systemd/system/holdfast.service.d/kubeadm.conf && systemctl daemon-reload && systemctl enable holdfast",
        );
        Self {
            node,
            env,
            client,
            runtime,
        }
    }

    fn write(&mut self, file: &str, text: &str) {
        self.node.sh(&format!(
            "install -D -m 0600 /dev/stdin {file} <<'END_OF_FILE'\n{text}\nEND_OF_FILE"
        ));
    }

    /// The files of `kubeadm join`, the start of the kubelet, and the wait for its certificate.
    fn join(&mut self) {
        let path = self.env.bootstrap_kubeconfig(&self.env.url());
        let mut kubeconfig: Value =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let port = self.env.url().rsplit(':').next().unwrap().to_owned();
        kubeconfig["clusters"][0]["cluster"] = json!({
            "server": format!("https://10.0.2.2:{port}"),
            "tls-server-name": "localhost",
            "certificate-authority": "/etc/kubernetes/pki/ca.crt",
        });
        self.node.sh("systemctl stop holdfast");
        let ca = self.env.ca_pem();
        self.write("/etc/kubernetes/pki/ca.crt", &ca);
        self.write(
            "/etc/kubernetes/bootstrap-kubelet.conf",
            &kubeconfig.to_string(),
        );
        self.write("/var/lib/kubelet/config.yaml", CONFIG);
        self.write(
            "/var/lib/kubelet/kubeadm-flags.env",
            "KUBELET_KUBEADM_ARGS=\"--node-ip=10.0.2.15\"",
        );
        self.node
            .sh("mkdir -p /etc/kubernetes/manifests; systemctl --no-block start holdfast");
        self.node.eventually(
            "there is a kubelet.conf",
            "test -s /etc/kubernetes/kubelet.conf",
        );
        self.node.is_healthy();
        // kubeadm takes the token away.
        self.node.sh("rm /etc/kubernetes/bootstrap-kubelet.conf");
        self.wait("the node is Ready", |site| {
            let nodes: Api<NodeObject> = Api::all(site.client.clone());
            let node = site.runtime.block_on(nodes.get_opt("vmnode")).unwrap();
            let conditions = node.and_then(|node| node.status?.conditions);
            conditions
                .unwrap_or_default()
                .iter()
                .any(|c| c.type_ == "Ready" && c.status == "True")
        });
    }

    /// What `kubeadm reset` does: the kubelet is stopped, containers go, and so do the files.
    fn reset(&mut self) {
        self.node.sh(
            "systemctl stop holdfast
             for task in $(ctr -n k8s.io tasks list -q); do ctr -n k8s.io tasks delete -f $task >/dev/null; done
             for container in $(ctr -n k8s.io containers list -q); do ctr -n k8s.io containers delete $container; done
             # containerd notices at its next start.
             systemctl restart containerd
             awk '$2 ~ \"^/var/lib/kubelet/\" { print $2 }' /proc/mounts | sort -r | xargs -r umount -l
             rm -rf /etc/kubernetes/manifests /etc/kubernetes/pki /etc/kubernetes/*.conf
             # Hidden files, too.
             find /var/lib/kubelet -mindepth 1 -delete
             test \"$(ctr -n k8s.io containers list -q)\" = ''",
        );
    }

    #[track_caller]
    fn wait(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(self) {
            assert!(Instant::now() < deadline, "in vain: {what}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// The hash of the manifest that the mirror pod stands for: what `kubeadm upgrade` waits for.
    fn mirror_hash(&self, pod: &str) -> Option<String> {
        let name = format!("{pod}-vmnode");
        let found = self
            .runtime
            .block_on(self.pods("kube-system").get_opt(&name));
        let annotations = found.unwrap()?.metadata.annotations?;
        annotations.get("kubernetes.io/config.hash").cloned()
    }
}

/// A static pod such as those of a control plane.
fn static_pod(name: &str, argument: &str) -> Value {
    let mut pod = pod(name, "Always", &format!(": {argument}; {SLEEP}"));
    pod["metadata"]["namespace"] = json!("kube-system");
    pod["spec"]["hostNetwork"] = json!(true);
    pod["spec"]["priorityClassName"] = json!("system-node-critical");
    pod
}

/// IDs of the containers of a pod that run, without its sandbox.
fn running(node: &mut Node, pod: &str) -> String {
    node.sh(&format!(
        "running=$(ctr -n k8s.io tasks list | awk '$3 == \"RUNNING\" {{ print $1 }}'); \
         for id in $(ctr -n k8s.io containers list -q 'labels.\"io.kubernetes.pod.name\"=={pod},labels.\"io.cri-containerd.kind\"==container'); \
         do case $running in *$id*) echo $id ;; esac; done"
    ))
}

#[test]
fn a_node_of_kubeadm_joins_is_upgraded_is_reset_and_joins_again() {
    let mut site = Site::new();
    let signer = site.env.csr_signer(SignedDuration::from_hours(24));
    site.join();

    // The kubeconfig names the pair that is renewed, as kubeadm and other tools expect, and a restart needs no token.
    site.node.sh(
        "grep -q /var/lib/kubelet/pki/kubelet-client-current.pem /etc/kubernetes/kubelet.conf && \
         test -L /var/lib/kubelet/pki/kubelet-client-current.pem && systemctl restart holdfast",
    );
    site.node.is_healthy();
    // Zeros and defaults that kubeadm always writes are nothing to warn of.
    let warnings = site.node.sh(
        "journalctl -u holdfast -o cat | grep -E 'WARN|level=warn' | grep -c 'config.yaml' || true",
    );
    assert_eq!(warnings, "0");

    // A pod of the control plane, and one of the API server.
    site.node.manifest(&static_pod("etcd", "one"));
    site.wait("there is a mirror pod", |site| {
        site.mirror_hash("etcd").is_some()
    });
    site.node.wait_running("etcd");
    let own = json!({
        "metadata": {"name": "own"},
        "spec": {
            "nodeName": "vmnode",
            "automountServiceAccountToken": false,
            "containers": [{"name": "main", "image": IMAGE, "command": ["sh", "-c", SLEEP]}],
        },
    });
    let own: Pod = serde_json::from_value(own).unwrap();
    let pods = site.pods("default");
    site.runtime
        .block_on(pods.create(&PostParams::default(), &own))
        .unwrap();
    site.wait("its container runs", |site| {
        !running(&mut site.node, "own").is_empty()
    });

    // An upgrade replaces the manifest and waits for another hash.
    let before = site.mirror_hash("etcd");
    let first = running(&mut site.node, "etcd-vmnode");
    site.node.manifest(&static_pod("etcd", "two"));
    site.wait("the mirror pod has another hash", |site| {
        site.mirror_hash("etcd")
            .is_some_and(|hash| Some(hash) != before)
    });
    site.wait("the new pod runs, alone", |site| {
        let now = running(&mut site.node, "etcd-vmnode");
        !now.is_empty() && !now.contains(&first) && now.lines().count() == 1
    });

    // It restarts etcd by moving its manifest away and back: at once, and 150 ms apart.
    for pause in ["", "sleep 0.15;"] {
        let former = running(&mut site.node, "etcd-vmnode");
        site.node.sh(&format!(
            "cd /etc/kubernetes && mv manifests/etcd.json . && {pause} mv etcd.json manifests/"
        ));
        site.wait("the pod has restarted", |site| {
            let now = running(&mut site.node, "etcd-vmnode");
            !now.is_empty() && !now.contains(&former)
        });
    }

    // Reset, and a pod that is deleted meanwhile: nothing of the former life starts after the next join.
    site.reset();
    site.runtime
        .block_on(pods.delete("own", &DeleteParams::default().grace_period(0)))
        .unwrap();
    site.join();
    site.node
        .sh("journalctl -u holdfast -o cat | grep -q 'moved the store to quarantine'");
    site.node.manifest(&static_pod("scheduler", "three"));
    site.node.wait_running("scheduler");
    site.wait("there is a mirror pod", |site| {
        site.mirror_hash("scheduler").is_some()
    });
    let made = site.node.sh(
        "for id in $(ctr -n k8s.io containers list -q); do ctr -n k8s.io containers info $id; done | \
         sed -n 's/.*\"io.kubernetes.pod.name\": \"\\(.*\\)\".*/\\1/p' | sort -u",
    );
    assert_eq!(made, "scheduler-vmnode");
    // Nor is anybody told of it: the mirror pod of the former life goes.
    site.wait("the former mirror pod is gone", |site| {
        site.mirror_hash("etcd").is_none()
    });
    drop(signer);
}
