//! Makes the node in the API server, or takes over the one that is there.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, NodeSystemInfo};
use kube::Api;
use kube::api::PostParams;
use tracing::{info, warn};

use super::error::{NodeError, request};
use super::known::Origin;
use super::lease::{CONFLICT_PERIOD, is_alive};
use super::status::StatusTask;
use crate::types::{Event, EventType};

impl StatusTask {
    /// One try. A node that is recorded is read, any other is made; what is there already is taken over. Upstream:
    /// `tryRegisterWithAPIServer`.
    pub(super) async fn register(&mut self) -> Result<(), NodeError> {
        let name = self.settings.name.clone();
        let recorded = self.known.get();
        if recorded.is_none() && self.settings.register && self.create().await? {
            return Ok(());
        }
        let object = format!("node {name}");
        let read = request("get", &object, self.known.api().get_opt(&name)).await?;
        match read {
            Some(node) => {
                info!(node = name, "the node is registered already");
                self.reconciled = false;
                self.registered = true;
                self.check_taken(&node).await;
                self.known.observe(node, Origin::Read);
                Ok(())
            }
            None if self.settings.register => {
                self.recorder.record(Event::node(
                    EventType::Warning,
                    "NodeDeleted",
                    format!("Node {name} was deleted from the API server, registering it again"),
                ));
                self.forget();
                self.create().await.map(drop)
            }
            None => Err(NodeError::Absent { name }),
        }
    }

    /// Creates the node. Returns false if it exists already.
    async fn create(&mut self) -> Result<bool, NodeError> {
        let name = &self.settings.name;
        let first = self.first();
        let params = PostParams::default();
        let call = self.known.api().create(&params, &first.node);
        let answer = match request("create", &format!("node {name}"), call).await {
            Ok(answer) => answer,
            Err(error) if error.is_conflict() => return Ok(false),
            Err(error) => return Err(error),
        };
        info!(node = name, "the node is registered");
        self.registered = true;
        self.reconciled = true;
        self.take(&first);
        let now = self.clock.now();
        self.confirmed(&answer, &first.node, now);
        self.known.observe(answer, Origin::Read);
        Ok(true)
    }

    /// Tells when the node that is taken over belongs to another machine that is alive.
    async fn check_taken(&mut self, node: &Node) {
        let Some(other) = self.other_machine(node) else {
            return;
        };
        self.was_other_machine = true;
        let name = self.settings.name.clone();
        let leases: Api<Lease> = Api::namespaced(self.api.kube(), "kube-node-lease");
        let object = format!("lease kube-node-lease/{name}");
        let alive = match request("get", &object, leases.get_opt(&name)).await {
            Ok(lease) => lease.is_some_and(|lease| is_alive(&lease, self.clock.now())),
            // Nothing is known of it; what it writes later is noticed.
            Err(_) => false,
        };
        if alive {
            self.tell_conflict(&other, "and the node's lease is being renewed");
        } else {
            warn!(
                node = name,
                before = other,
                now = self.own_machine(),
                "the node belonged to another machine before"
            );
        }
    }

    /// Tells when somebody else wrote the node after this agent did.
    pub(super) fn check_overwritten(&mut self, node: &Node) {
        if self.reconciled
            && let Some(other) = self.other_machine(node)
        {
            self.tell_conflict(&other, "which has just written the node's status");
        }
    }

    fn tell_conflict(&mut self, other: &str, why: &str) {
        let now = self.clock.now();
        if (self.conflict_told).is_some_and(|told| now.since(told) < CONFLICT_PERIOD) {
            return;
        }
        self.conflict_told = Some(now);
        let own = self.own_machine();
        let name = &self.settings.name;
        self.recorder.record(Event::node(
            EventType::Warning,
            "NodeNameConflict",
            format!(
                "The node name {name} is also used by {other}, {why}; this is {own}. Give one of them another name \
                 (--hostname-override); until then both write the same node"
            ),
        ));
    }

    fn own_machine(&self) -> String {
        let facts = self.facts.borrow();
        facts.as_ref().map_or_else(String::new, |facts| {
            describe(&facts.machine.machine_id, &facts.machine.system_uuid)
        })
    }

    /// The machine a node says it is, if that is not this one.
    fn other_machine(&self, node: &Node) -> Option<String> {
        let info: &NodeSystemInfo = node.status.as_ref()?.node_info.as_ref()?;
        let facts = self.facts.borrow();
        let own = &facts.as_ref()?.machine;
        let differs = |known: &str, own: &str| !known.is_empty() && !own.is_empty() && known != own;
        let other = differs(&info.machine_id, &own.machine_id)
            || differs(&info.system_uuid, &own.system_uuid);
        other.then(|| describe(&info.machine_id, &info.system_uuid))
    }
}

fn describe(machine_id: &str, system_uuid: &str) -> String {
    format!("the machine {machine_id} (system UUID {system_uuid})")
}
