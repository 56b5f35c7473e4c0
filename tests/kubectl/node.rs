//! A node whose kubelet API the API server reaches.

use std::ops::Deref;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use holdfast_testkit::containerd::Version;
use holdfast_testkit::envtest::{self, DAY, EnvTest};
use holdfast_testkit::programs::newest_kubectl;

use crate::agent_process::{Agent, eventually};
use crate::client::{Kubectl, Outcome, Terminal};
use crate::direct::{Direct, User};
use crate::setup::Cluster;

/// Fields are dropped in this order: the agent goes before what it runs on.
pub struct Node {
    agent: Mutex<Option<Agent>>,
    pub cluster: Cluster,
    /// Where the API server finds the node.
    pub address: String,
    pub port: u16,
    /// Another kubectl than that of the cluster.
    kubectl: Option<PathBuf>,
}

impl Deref for Node {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.cluster
    }
}

const EARLY_ROTATION: &str =
    "containerLogMaxSize: 100Ki\ncontainerLogMaxFiles: 3\ncontainerLogMonitorInterval: 3s\n";

impl Direct {
    /// For a member of `system:masters`.
    pub fn admin(node: &Node) -> Self {
        let identity = node.env.authority().client("admin", "system:masters", DAY);
        Self::of(node, User::Certificate(identity))
    }

    pub fn of(node: &Node, user: User) -> Self {
        Self::to(format!("{}:{}", node.address, node.port), user)
    }
}

/// One node for all tests that run at the same time and only look.
pub fn shared() -> Arc<Node> {
    static SHARED: Mutex<Weak<Node>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(node) = shared.upgrade() {
        return node;
    }
    let node = Arc::new(Node::new());
    *shared = Arc::downgrade(&node);
    node
}

impl Node {
    /// With an agent that has joined, certificates of its own making, and logs that are rotated early.
    pub fn new() -> Self {
        Self::on(Cluster::new(), EARLY_ROTATION)
    }

    /// As [`Self::new`] with the newest runtime there is for tests, whose users have the newest kubectl.
    pub fn newest() -> Self {
        let kubectl = newest_kubectl().expect("fetch the newest kubectl");
        Self {
            kubectl: Some(kubectl),
            ..Self::on(Cluster::on_runtime(Version::V2), EARLY_ROTATION)
        }
    }

    /// As [`Self::new`] with the logs of a node as it is installed.
    pub fn with_usual_logs() -> Self {
        Self::on(Cluster::new(), "")
    }

    /// On an API server that asks for a certificate of the cluster's authority, which the agent asks for.
    pub fn with_signed_certificate() -> Self {
        let env = Arc::new(EnvTest::start_verifying_nodes());
        Self::on(Cluster::with(env), "serverTLSBootstrap: true\n")
    }

    fn on(cluster: Cluster, more: &str) -> Self {
        let port = envtest::free_port();
        let authority = cluster.env.dir().join("ca.crt");
        cluster.site.serve_api(port);
        cluster.site.configure(&format!(
            "authentication:\n  \
               anonymous: {{enabled: false}}\n  \
               webhook: {{enabled: true, cacheTTL: 2s}}\n  \
               x509: {{clientCAFile: {}}}\n\
             authorization:\n  \
               mode: Webhook\n  \
               webhook: {{cacheAuthorizedTTL: 2s, cacheUnauthorizedTTL: 2s}}\n\
             {more}",
            authority.display()
        ));
        let agent = Mutex::new(Some(cluster.join()));
        let shown = cluster.get_node().expect("a node");
        let addresses = shown["status"]["addresses"].as_array();
        let mut addresses = addresses.into_iter().flatten();
        let internal = addresses.find(|a| a["type"] == "InternalIP");
        let address = internal.and_then(|a| a["address"].as_str());
        assert_eq!(
            shown["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"], port,
            "the port that the API server is told"
        );
        Self {
            agent,
            address: address.expect("an InternalIP").to_owned(),
            cluster,
            port,
            kubectl: None,
        }
    }

    /// The agent, to look at.
    pub fn agent(&self) -> MutexGuard<'_, Option<Agent>> {
        self.agent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs kubectl as administrator in the test's namespace, to its end.
    #[track_caller]
    pub fn run_kubectl(&self, arguments: &[&str]) -> Outcome {
        self.run_kubectl_with(arguments, Vec::new())
    }

    /// As [`Self::run_kubectl`] with something to read, then the end.
    #[track_caller]
    pub fn run_kubectl_with(&self, arguments: &[&str], stdin: Vec<u8>) -> Outcome {
        let mut kubectl = self.start_kubectl(arguments);
        kubectl.write_and_close(stdin);
        kubectl.wait()
    }

    /// What kubectl prints; panics when it fails.
    #[track_caller]
    pub fn ok(&self, arguments: &[&str]) -> String {
        let outcome = self.run_kubectl(arguments);
        assert_eq!(outcome.code, Some(0), "kubectl {arguments:?}: {outcome:?}");
        outcome.stdout()
    }

    /// Starts kubectl beside the test.
    pub fn start_kubectl(&self, arguments: &[&str]) -> Kubectl {
        Kubectl::start(self.kubectl_command(arguments))
    }

    /// Starts kubectl in a terminal of that many rows and columns.
    pub fn start_in_terminal(&self, arguments: &[&str], rows: u16, columns: u16) -> Terminal {
        Terminal::start(&self.kubectl_command(arguments), rows, columns)
    }

    fn kubectl_command(&self, arguments: &[&str]) -> Command {
        let admin = self.env.admin_kubeconfig();
        let mut command = match &self.kubectl {
            Some(program) => self.env.kubectl_command_of(program, &admin),
            None => self.env.kubectl_command(&admin),
        };
        command.args(["-n", &self.namespace]).args(arguments);
        command
    }

    /// `kubectl get --raw` below the node's proxy: `/api/v1/nodes/<node>/proxy/<path>`.
    #[track_caller]
    pub fn raw(&self, path: &str) -> String {
        let path = format!("/api/v1/nodes/{}/proxy/{path}", self.node);
        self.ok(&["get", "--raw", &path])
    }

    /// Waits until a pod's only container runs and nothing more.
    #[track_caller]
    pub fn wait_started(&self, pod: &str) {
        eventually(&format!("pod {pod} has started"), || {
            let pod = self.try_pod(pod).ok_or("it is gone")?;
            let state = &pod["status"]["containerStatuses"][0]["state"];
            if state["running"].is_object() {
                Ok(())
            } else {
                Err(state.to_string())
            }
        });
    }
}
