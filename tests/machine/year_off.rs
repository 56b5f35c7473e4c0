//! A machine that was off for 400 days: its certificates have expired, and the token that it joined with is gone.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use holdfast_testkit::envtest::{DAY, EnvTest, Identity};
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::{Node as NodeObject, Pod};
use kube::api::{Api, PostParams};
use serde_json::{Value, json};

use super::node::{IMAGE, Node, PATIENCE, SLEEP, pod};

const OFF: SignedDuration = SignedDuration::from_hours(400 * 24);
const PKI: &str = "/var/lib/kubelet/pki";

/// A node of a cluster on the host. Its clock is set back by 400 days before the reboot and to the present with it, and
/// its certificates are replaced by ones that have expired at the present.
struct Sleeper {
    node: Node,
    env: Arc<EnvTest>,
    client: kube::Client,
    runtime: tokio::runtime::Runtime,
    server: String,
}

impl Sleeper {
    fn installed() -> Self {
        let env = Arc::new(EnvTest::start());
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let client = runtime.block_on(async { env.admin_client() });
        let port = env.url().rsplit(':').next().unwrap().to_owned();
        let mut sleeper = Self {
            node: Node::installed(),
            env,
            client,
            runtime,
            server: format!("https://10.0.2.2:{port}"),
        };
        let ca = sleeper.env.ca_pem();
        sleeper.write("/etc/holdfast/ca.crt", &ca);
        sleeper
    }

    fn write(&mut self, path: &str, text: &str) {
        let parent = Path::new(path).parent().unwrap().display();
        self.node.sh(&format!(
            "mkdir -p {parent}; umask 077; cat >{path} <<'END_OF_FILE'\n{text}\nEND_OF_FILE"
        ));
    }

    fn kubeconfig(&self, user: &Value) -> String {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "host",
            "clusters": [{"name": "host", "cluster": {
                "server": self.server,
                "tls-server-name": "localhost",
                "certificate-authority": "/etc/holdfast/ca.crt",
            }}],
            "users": [{"name": "user", "user": user}],
            "contexts": [{"name": "host", "context": {"cluster": "host", "user": "user"}}],
        });
        config.to_string()
    }

    /// Writes a kubeconfig with this certificate, which stands beside it.
    fn write_kubeconfig(&mut self, path: &str, identity: &Identity) {
        let pem = format!("{}{}", identity.cert_pem, identity.key_pem);
        let file = format!("{path}.pem");
        self.write(&file, &pem);
        let text = self.kubeconfig(&json!({"client-certificate": file, "client-key": file}));
        self.write(path, &text);
    }

    fn configure(&mut self, flags: &str) {
        self.write(
            "/etc/default/holdfast",
            &format!("HOLDFAST_FLAGS=\"{flags}\""),
        );
        // The serving certificate is asked of the cluster, too.
        self.node
            .sh("grep -q serverTLSBootstrap /etc/holdfast/config.yaml || \
             echo 'serverTLSBootstrap: true' >>/etc/holdfast/config.yaml");
    }

    /// Waits until the cluster shows the node Ready, with a heartbeat of after `since`.
    #[track_caller]
    fn wait_ready(&self, since: jiff::Timestamp) {
        let nodes: Api<NodeObject> = Api::all(self.client.clone());
        let deadline = std::time::Instant::now() + PATIENCE;
        loop {
            let found = self.runtime.block_on(nodes.get_opt("vmnode")).unwrap();
            let conditions = found.and_then(|node| node.status?.conditions);
            let ready = conditions
                .unwrap_or_default()
                .into_iter()
                .find(|condition| {
                    let beat = condition.last_heartbeat_time.as_ref();
                    condition.type_ == "Ready"
                        && condition.status == "True"
                        && beat.is_some_and(|beat| beat.0.as_second() >= since.as_second())
                });
            if ready.is_some() {
                return;
            }
            assert!(
                std::time::Instant::now() < deadline,
                "the node is not Ready"
            );
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    /// Reboots with the right time, which the machine has from the moment that the agent starts.
    fn wake(&mut self) {
        let now = jiff::Timestamp::now().as_second();
        self.node.sh(&format!(
            "mkdir -p /etc/systemd/system/holdfast.service.d && \
             printf '[Service]\\nExecStartPre=+/bin/sh -c \"test -e /run/woken || {{ date -s @{now}; touch /run/woken; }}\"\\n' \
             >/etc/systemd/system/holdfast.service.d/clock.conf && systemctl daemon-reload"
        ));
        self.node.machine.send("sync; reboot -f").unwrap();
        self.node.machine.rebooted().unwrap();
    }

    /// Has certificates of the node, those that kubelets keep, that expired 35 days ago.
    fn expire(&mut self) {
        let ago = SignedDuration::from_hours(-35 * 24);
        let client = self.env.node_identity("vmnode", ago);
        self.write_kubeconfig("/etc/holdfast/kubeconfig", &client);
        self.node.sh(&format!(
            "rm -rf {PKI}/kubelet-client-* {PKI}/kubelet-server-*"
        ));
        let pem = format!("{}{}", client.cert_pem, client.key_pem);
        for purpose in ["client", "server"] {
            self.write(&format!("{PKI}/kubelet-{purpose}-old.pem"), &pem);
            self.node.sh(&format!(
                "ln -sf kubelet-{purpose}-old.pem {PKI}/kubelet-{purpose}-current.pem"
            ));
        }
    }

    /// Joins with a certificate that is good, and runs a pod of the API server and a static one. The last sign of life of
    /// the agent is 400 days old.
    fn live_and_sleep(&mut self, flags: &str) {
        let own = self.env.node_identity("vmnode", DAY);
        self.write_kubeconfig("/etc/holdfast/kubeconfig", &own);
        self.configure(flags);
        self.node.machine.set_clock(SystemTime::now()).unwrap();
        self.node.manifest(&pod("static", "Always", SLEEP));
        self.node.start();
        self.wait_ready(jiff::Timestamp::UNIX_EPOCH);
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), "default");
        let wanted = serde_json::from_value(json!({
            "metadata": {"name": "web"},
            "spec": {
                "nodeName": "vmnode",
                "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 1,
                "containers": [{"name": "main", "image": IMAGE, "command": ["sh", "-c", SLEEP]}],
            },
        }))
        .unwrap();
        self.runtime
            .block_on(pods.create(&PostParams::default(), &wanted))
            .unwrap();
        self.node.wait_running("static");
        self.wait_web();
        self.node.sh("systemctl stop holdfast");
        self.expire();
        let past = SystemTime::now() - OFF.unsigned_abs();
        self.node.machine.set_clock(past).unwrap();
        self.node.sh("systemctl start holdfast");
        self.node.wait_running("static");
    }

    #[track_caller]
    fn wait_web(&mut self) {
        self.node.eventually(
            "the pod of the API server runs",
            "test \"$(holdfast dump overview -o json 2>/dev/null | grep -c '\"status\": *\"Running\"')\" -ge 2",
        );
    }
}

#[test]
fn a_node_that_was_off_for_400_days_comes_back_by_its_lifeline() {
    let mut sleeper = Sleeper::installed();
    let manifest = include_str!("../../contrib/cluster/lifeline.yaml").replace("<name>", "vmnode");
    sleeper.env.apply(&manifest);
    let lifeline = sleeper.env.authority().client(
        "system:node:vmnode",
        "holdfast:lifeline:vmnode",
        DAY * 3650,
    );
    sleeper.write_kubeconfig("/etc/holdfast/lifeline", &lifeline);
    sleeper.live_and_sleep(
        "--kubeconfig=/etc/holdfast/kubeconfig --rotate-certificates \
         --lifeline-kubeconfig=/etc/holdfast/lifeline --cert-dir=/var/lib/kubelet/pki",
    );
    let _signer = sleeper.env.csr_signer(DAY);
    let woken = jiff::Timestamp::now();
    sleeper.wake();
    sleeper.node.wait_running("static");
    sleeper.wait_web();
    sleeper.wait_ready(woken);
    let seconds = sleeper.node.eventually(
        "both certificates are others",
        &format!(
            "test \"$(readlink {PKI}/kubelet-client-current.pem)\" != kubelet-client-old.pem || exit 1\n\
             test \"$(readlink {PKI}/kubelet-server-current.pem)\" != kubelet-server-old.pem || exit 1\n\
             started=$(systemctl show -P ExecMainStartTimestampMonotonic holdfast)\n\
             awk -v started=$started '{{ print $1 - started / 1e6 }}' /proc/uptime"
        ),
    );
    let seconds: f64 = seconds.parse().unwrap();
    println!("the node had its certificates {seconds:.1} s after the agent started");
    assert!(seconds <= 60.0, "{seconds} s");
}

#[test]
fn a_node_that_was_off_for_400_days_says_which_commands_bring_it_back() {
    let mut sleeper = Sleeper::installed();
    sleeper.live_and_sleep(
        "--kubeconfig=/etc/holdfast/kubeconfig --rotate-certificates \
         --bootstrap-kubeconfig=/etc/holdfast/bootstrap.kubeconfig --cert-dir=/var/lib/kubelet/pki",
    );
    // The token that it joined with.
    let gone = sleeper.kubeconfig(&json!({"token": "abcdef.0123456789abcdef"}));
    sleeper.write("/etc/holdfast/bootstrap.kubeconfig", &gone);
    let _signer = sleeper.env.csr_signer(DAY);
    let woken = jiff::Timestamp::now();
    sleeper.wake();
    sleeper.node.wait_running("static");
    sleeper.wait_web();
    for script in [
        "bash -c 'exec 3<>/dev/tcp/127.0.0.1/10248; \
         printf \"GET /readyz?verbose HTTP/1.0\\r\\n\\r\\n\" >&3; cat <&3'",
        "holdfast dump 2>&1 >/dev/null",
        "holdfast dump events -o json",
        "journalctl -u holdfast -o cat",
    ] {
        sleeper.node.eventually(
            "it says what to do",
            &format!("{script} | grep -q 'kubeadm token create --print-join-command'"),
        );
    }
    // As it says, and no more: no restart.
    let url = sleeper.env.url();
    let made = std::fs::read_to_string(sleeper.env.bootstrap_kubeconfig(&url)).unwrap();
    let made: Value = serde_json::from_str(&made).unwrap();
    let text = sleeper.kubeconfig(&made["users"][0]["user"]);
    let pid = sleeper.node.sh("systemctl show -P MainPID holdfast");
    sleeper.write("/etc/holdfast/bootstrap.kubeconfig", &text);
    sleeper.wait_ready(woken);
    assert_eq!(sleeper.node.sh("systemctl show -P MainPID holdfast"), pid);
}
