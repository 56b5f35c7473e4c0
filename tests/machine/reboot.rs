//! Reboots of every kind: what was on record is told afterwards, and pods come back without the API server.

use std::sync::Arc;
use std::time::{Duration, Instant};

use holdfast_testkit::envtest::EnvTest;
use holdfast_testkit::fault_proxy::FaultProxy;
use k8s_openapi::api::core::v1::{Node as NodeObject, Pod};
use kube::api::{Api, ListParams, PostParams};
use serde_json::json;

use super::node::{IMAGE, Node, PATIENCE, SLEEP, pod, rows};

/// A way to reboot, and the script that does it. Without one the machine is reset while it runs, as a watchdog does it: Debian's
/// kernel for such machines has no driver for QEMU's.
const WAYS: [(&str, Option<&str>); 4] = [
    ("in order", Some("systemctl reboot")),
    ("at once", Some("sync; reboot -f")),
    (
        "by a panic of the kernel",
        Some("sync; echo 1 >/proc/sys/kernel/panic; echo c >/proc/sysrq-trigger"),
    ),
    ("by a reset", None),
];

#[test]
fn what_ended_before_a_reboot_of_any_kind_is_told_after_it() {
    let mut node = Node::started();
    node.manifest(&pod("seven", "Never", "exit 7"));
    node.manifest(&pod("well", "Never", "exit 0"));
    node.manifest(&pod("long", "Never", SLEEP));
    node.manifest(&pod("always", "Always", SLEEP));
    node.manifest(&pod("again", "OnFailure", "sleep 1; exit 4"));
    for (pod, status) in [
        ("seven", "Error"),
        ("well", "Completed"),
        ("long", "Running"),
        ("always", "Running"),
    ] {
        wait_status(&mut node, pod, status);
    }
    wait_exit(&mut node, "again", 4);

    let mut restarts = 0;
    for (which, script) in WAYS {
        let count = container(&mut node, "again")["restartCount"]
            .as_u64()
            .unwrap();
        match script {
            Some(script) => node.machine.send(script).unwrap(),
            None => {
                node.sh("sync");
                node.machine.reset().unwrap();
            }
        }
        node.machine.rebooted().unwrap();
        node.eventually("the agent is ready", "systemctl is-active --quiet holdfast");
        // What had ended stays as it was; nothing of policy Never runs again.
        wait_status(&mut node, "seven", "Error");
        wait_status(&mut node, "well", "Completed");
        assert_eq!(
            container(&mut node, "seven")["lastExit"]["exitCode"],
            7,
            "{which}"
        );
        assert_eq!(container(&mut node, "seven")["restartCount"], 0, "{which}");
        assert_eq!(
            container(&mut node, "well")["lastExit"]["exitCode"],
            0,
            "{which}"
        );
        let long = container(&mut node, "long");
        assert_eq!(long["restartCount"], 0, "{which}: {long}");
        wait_ended(&mut node, "long");
        // What is to run runs again, and is counted.
        wait_status(&mut node, "always", "Running");
        let now = container(&mut node, "always")["restartCount"]
            .as_u64()
            .unwrap();
        assert!(now > restarts, "{which}: {now} restarts after {restarts}");
        restarts = now;
        let again = container(&mut node, "again")["restartCount"]
            .as_u64()
            .unwrap();
        assert!(again >= count, "{which}: {again} restarts after {count}");
    }
}

fn container(node: &mut Node, pod: &str) -> serde_json::Value {
    let full = format!("{pod}-vmnode");
    rows(&mut node.machine, "containers")
        .unwrap()
        .into_iter()
        .find(|row| row["name"] == full.as_str())
        .unwrap_or_default()
}

#[track_caller]
fn wait(node: &mut Node, what: &str, mut holds: impl FnMut(&mut Node) -> Result<(), String>) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match holds(node) {
            Ok(()) => return,
            Err(found) if Instant::now() > deadline => panic!("{what}: {found}"),
            Err(_) => std::thread::sleep(Duration::from_millis(300)),
        }
    }
}

#[track_caller]
fn wait_status(node: &mut Node, pod: &str, status: &str) {
    let full = format!("{pod}-vmnode");
    wait(node, &format!("{pod} is {status}"), |node| {
        let rows = rows(&mut node.machine, "overview").map_err(|e| e.to_string())?;
        let row = rows.iter().find(|row| row["name"] == full.as_str());
        let found = row
            .and_then(|row| row["status"].as_str())
            .unwrap_or("absent");
        (found == status)
            .then_some(())
            .ok_or_else(|| found.to_owned())
    });
}

/// Waits until the pod is Failed or Succeeded.
#[track_caller]
pub fn wait_ended(node: &mut Node, pod: &str) {
    let full = format!("{pod}-vmnode");
    wait(node, &format!("{pod} has ended"), |node| {
        let rows = rows(&mut node.machine, "overview").map_err(|e| e.to_string())?;
        let row = rows.iter().find(|row| row["name"] == full.as_str());
        let found = row
            .and_then(|row| row["phase"].as_str())
            .unwrap_or("absent");
        matches!(found, "Failed" | "Succeeded")
            .then_some(())
            .ok_or_else(|| found.to_owned())
    });
}

#[track_caller]
fn wait_exit(node: &mut Node, pod: &str, code: i64) {
    wait(node, &format!("{pod} has ended with {code}"), |node| {
        let found = container(node, pod);
        (found["lastExit"]["exitCode"] == code)
            .then_some(())
            .ok_or_else(|| found.to_string())
    });
}

/// The node of a machine in a cluster on the host.
pub struct Cluster {
    pub node: Node,
    pub proxy: FaultProxy,
    pub client: kube::Client,
    pub runtime: tokio::runtime::Runtime,
    _env: Arc<EnvTest>,
}

impl Cluster {
    /// Joins, and waits until the node is Ready.
    pub fn join() -> Self {
        Self::join_with(|_| ())
    }

    /// The same; `prepare` changes the machine before the agent starts.
    pub fn join_with(prepare: impl FnOnce(&mut Node)) -> Self {
        Self::join_as(Node::installed(), prepare)
    }

    /// The same with a machine whose agent has no cluster yet.
    pub fn join_as(mut node: Node, prepare: impl FnOnce(&mut Node)) -> Self {
        let env = Arc::new(EnvTest::start());
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let proxy = env.fault_proxy("vmnode");
        let client = runtime.block_on(async { env.admin_client() });
        let port = proxy.url().rsplit(':').next().unwrap().to_owned();
        let kubeconfig = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "host", "cluster": {
                "server": format!("https://10.0.2.2:{port}"),
                "tls-server-name": "localhost",
                "certificate-authority": "/etc/holdfast/ca.crt",
            }}],
            "users": [{"name": "node", "user": {}}],
            "contexts": [{"name": "host", "context": {"cluster": "host", "user": "node"}}],
            "current-context": "host",
        });
        let ca = env.ca_pem();
        node.sh(&format!(
            "cat >/etc/holdfast/ca.crt <<'END_OF_FILE'\n{ca}\nEND_OF_FILE\n\
             cat >/etc/holdfast/kubeconfig <<'END_OF_FILE'\n{kubeconfig}\nEND_OF_FILE\n\
             echo HOLDFAST_FLAGS=--kubeconfig=/etc/holdfast/kubeconfig >/etc/default/holdfast"
        ));
        prepare(&mut node);
        // One that has booted with the machine has no kubeconfig.
        node.sh("systemctl restart holdfast");
        let mut cluster = Self {
            node,
            proxy,
            client,
            runtime,
            _env: env,
        };
        cluster.wait_ready();
        cluster
    }

    #[track_caller]
    pub fn wait_ready(&mut self) {
        let nodes: Api<NodeObject> = Api::all(self.client.clone());
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = self.runtime.block_on(nodes.get_opt("vmnode")).unwrap();
            let conditions = found
                .and_then(|node| node.status?.conditions)
                .unwrap_or_default();
            if conditions
                .iter()
                .any(|c| c.type_ == "Ready" && c.status == "True")
            {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "the node is not Ready: {conditions:?}"
            );
            std::thread::sleep(Duration::from_millis(300));
        }
    }
}

#[test]
fn twenty_pods_run_30_s_after_the_agent_started_without_the_api_server() {
    const PODS: usize = 20;
    const SECONDS: f64 = 30.0;
    let mut cluster = Cluster::join();
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "default");
    let begun = Instant::now();
    cluster.runtime.block_on(async {
        for n in 0..PODS {
            let pod = serde_json::from_value(json!({
                "metadata": {"name": format!("p{n}")},
                "spec": {
                    "nodeName": "vmnode",
                    "automountServiceAccountToken": false,
                    "terminationGracePeriodSeconds": 1,
                    "containers": [{"name": "main", "image": IMAGE, "command": ["sh", "-c", SLEEP]}],
                },
            }))
            .unwrap();
            pods.create(&PostParams::default(), &pod).await.unwrap();
        }
    });
    let are_ready = |list: &[Pod]| {
        let is_ready = |pod: &&Pod| {
            let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_ref());
            conditions
                .is_some_and(|all| all.iter().any(|c| c.type_ == "Ready" && c.status == "True"))
        };
        list.iter().filter(is_ready).count()
    };
    let deadline = Instant::now() + 4 * PATIENCE;
    loop {
        let list = cluster
            .runtime
            .block_on(pods.list(&ListParams::default()))
            .unwrap();
        let ready = are_ready(&list.items);
        if ready == PODS {
            break;
        }
        assert!(
            Instant::now() < deadline,
            "{ready} pods are Ready before the reboot"
        );
        std::thread::sleep(Duration::from_millis(500));
    }
    let before = begun.elapsed().as_secs_f64();

    cluster.proxy.cut();
    cluster.node.machine.send("sync; reboot -f").unwrap();
    cluster.node.machine.rebooted().unwrap();
    // In the machine's own time, from the start of the process to the last container that runs. Looking costs what an
    // emulated machine has little of.
    let seconds = cluster.node.eventually(
        "all pods run",
        &format!(
            "sleep 1; test \"$(ctr -n k8s.io tasks list | grep -c RUNNING)\" -eq $((2 * {PODS})) || exit 1\n\
             started=$(systemctl show -P ExecMainStartTimestampMonotonic holdfast)\n\
             awk -v started=$started '{{ print $1 - started / 1e6 }}' /proc/uptime"
        ),
    );
    let seconds: f64 = seconds.parse().unwrap();
    println!(
        "{PODS} pods ran {seconds:.1} s after the agent started; before, with the API server, in {before:.1} s"
    );
    // On a host that emulates slowly: half as long again as the same pods took when they were new.
    let limit = SECONDS.max(1.5 * before);
    assert!(seconds <= limit, "{seconds} s, more than {limit} s");
}
