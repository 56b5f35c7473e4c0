//! Reports this node's drivers to the API server; upstream's `nodeinfomanager`.
//!
//! In: the registered drivers, and removed ones that the API server still has. Out: CSINode `<node>` (owned by the
//! node; made with the first driver), the node's annotation `csi.volume.kubernetes.io/nodeid`, and the drivers'
//! topology as labels of the node, which stay after a driver is removed.
//!
//! Written only after a change, also across restarts; retried while the API server is unreachable. A node object that
//! was made anew gets everything again. What the API server has is compared at each start and every ten minutes: somebody may
//! have deleted a CSINode, or restored the server's data.
//!
//! **Invariant:** a refusal for one driver affects no other one: all are written at once, and each by itself if that is
//! refused.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver, CSINodeSpec, VolumeNodeResources};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use rand::Rng;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::registry::{Driver, Drivers};
use crate::apiserver::{ApiClient, Reachability};
use crate::node_object::NodeObject;
use crate::types::causes;

/// JSON: names of drivers, and what they call this node.
pub(super) const NODE_ID_ANNOTATION: &str = "csi.volume.kubernetes.io/nodeid";
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(60));
const REQUEST: Duration = Duration::from_secs(10);
/// Time between two comparisons with what the API server has.
const COMPARED: Duration = Duration::from_secs(600);

/// Reason why a report failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum TellError {
    /// The API server refused, or could not be reached.
    #[error("{verb} {object}")]
    Request {
        verb: &'static str,
        object: String,
        #[source]
        source: Box<kube::Error>,
    },
    /// There was no answer in time.
    #[error("{verb} {object}: no answer within {} s", REQUEST.as_secs())]
    Late { verb: &'static str, object: String },
    /// The node is not the one that is known.
    #[error("node {0} is not the one that was registered")]
    OtherNode(String),
    /// The report of one driver is refused.
    #[error("driver {driver}")]
    Driver {
        driver: String,
        #[source]
        source: Box<TellError>,
    },
    /// Two say different things of where the node is.
    #[error(
        "driver {driver} says that the node's {key} is {wanted:?}, but its label says {found:?}; remove the label, \
         or configure the driver for this node"
    )]
    Topology {
        driver: String,
        key: String,
        wanted: String,
        found: String,
    },
}

impl TellError {
    /// Returns whether the API server refuses the write for good.
    fn is_refusal(&self) -> bool {
        let Self::Request { verb, source, .. } = self else {
            return false;
        };
        let code = match &**source {
            kube::Error::Api(status) => status.code,
            _ => return false,
        };
        *verb != "get" && (400..500).contains(&code) && ![404, 408, 409, 429].contains(&code)
    }

    /// Says which driver it is about.
    fn of(self, driver: &str) -> Self {
        match self {
            Self::Topology { .. } => self,
            other => Self::Driver {
                driver: driver.to_owned(),
                source: Box::new(other),
            },
        }
    }
}

/// See the module.
pub(super) struct NodeInfo {
    api: ApiClient,
    name: String,
    node: NodeObject,
    drivers: Drivers,
    said: BTreeSet<String>,
    /// When each driver was compared with what the API server has.
    compared: BTreeMap<String, Instant>,
}

impl NodeInfo {
    pub(super) fn new(api: ApiClient, name: String, node: NodeObject, drivers: Drivers) -> Self {
        Self {
            api,
            name,
            node,
            drivers,
            said: BTreeSet::new(),
            compared: BTreeMap::new(),
        }
    }

    /// For ever. Dropping it loses nothing that is not done again.
    pub(super) async fn run(mut self) {
        let mut changes = self.drivers.changes();
        let mut nodes = self.node.subscribe();
        let mut pause = PAUSES.0;
        loop {
            changes.mark_unchanged();
            nodes.mark_unchanged();
            let errors = match self.pass().await {
                Ok(errors) => errors,
                Err(error) => vec![error],
            };
            self.tell(&errors);
            let open = !errors.is_empty();
            if !open {
                pause = PAUSES.0;
            }
            let wait = pause.mul_f64(rand::rng().random_range(0.8..1.0));
            if open {
                pause = (pause * 2).min(PAUSES.1);
            }
            let connection = self.api.connection().clone();
            let came_up = async {
                if connection.now() == Reachability::Up {
                    return std::future::pending().await;
                }
                connection.up().await;
            };
            let oldest = self.compared.values().min().copied();
            let due = oldest.unwrap_or_else(Instant::now) + COMPARED;
            tokio::select! {
                Ok(()) = changes.changed() => {}
                Ok(()) = nodes.changed() => {}
                () = tokio::time::sleep(wait), if open => {}
                () = tokio::time::sleep_until(due), if !open && !self.compared.is_empty() => {}
                () = came_up, if open => {}
            }
        }
    }

    /// An outage is told by the connection; everything else once.
    fn tell(&mut self, errors: &[TellError]) {
        let up = self.api.connection().now() == Reachability::Up;
        let texts: BTreeSet<String> = errors.iter().map(|error| causes(error)).collect();
        for error in texts.difference(&self.said).filter(|_| up) {
            tracing::warn!(
                error,
                "the API server does not know all CSI drivers of this node"
            );
        }
        if up || errors.is_empty() {
            self.said = texts;
        }
    }

    /// One try for everything that is not told yet. Gives what is wrong with single drivers.
    async fn pass(&mut self) -> Result<Vec<TellError>, TellError> {
        let Some(uid) = self.node.get().and_then(|node| node.metadata.uid.clone()) else {
            return Ok(Vec::new());
        };
        let all = self.drivers.all();
        self.compared
            .retain(|name, at| all.iter().any(|d| d.name == *name) && at.elapsed() < COMPARED);
        let untold = |driver: &Driver| {
            driver.gone
                || driver.told.as_ref() != Some(&uid)
                || !self.compared.contains_key(&driver.name)
        };
        let open: Vec<Driver> = all.into_iter().filter(untold).collect();
        if open.is_empty() {
            return Ok(Vec::new());
        }
        let names: Vec<String> = open.iter().map(|driver| driver.name.clone()).collect();
        match (self.tell_of(&uid, open.clone()).await, &names[..]) {
            (Err(error), [name]) if error.is_refusal() => Ok(vec![error.of(name)]),
            (Err(error), _) if error.is_refusal() => self.tell_each(&uid, open).await,
            (told, _) => told,
        }
    }

    /// Tells of each driver by itself.
    async fn tell_each(
        &mut self,
        uid: &str,
        open: Vec<Driver>,
    ) -> Result<Vec<TellError>, TellError> {
        let mut refused = Vec::new();
        for driver in open {
            let name = driver.name.clone();
            match self.tell_of(uid, vec![driver]).await {
                Ok(more) => refused.extend(more),
                Err(error) if error.is_refusal() => refused.push(error.of(&name)),
                Err(error) => return Err(error),
            }
        }
        Ok(refused)
    }

    async fn tell_of(&mut self, uid: &str, open: Vec<Driver>) -> Result<Vec<TellError>, TellError> {
        let (accepted, refused) = self.tell_node(uid, open).await?;
        if !accepted.is_empty() {
            self.tell_csi_node(uid, &accepted).await?;
        }
        for driver in &accepted {
            self.drivers.told(driver, uid).await;
            self.compared.insert(driver.name.clone(), Instant::now());
        }
        Ok(refused)
    }

    /// Annotation and labels of the node. Gives the drivers that it agrees with, and why not with the others.
    async fn tell_node(
        &self,
        uid: &str,
        open: Vec<Driver>,
    ) -> Result<(Vec<Driver>, Vec<TellError>), TellError> {
        let nodes: Api<Node> = Api::all(self.api.kube());
        let object = format!("node {}", self.name);
        let node = request("get", &object, nodes.get(&self.name)).await?;
        if node.metadata.uid.as_deref() != Some(uid) {
            return Err(TellError::OtherNode(self.name.clone()));
        }
        let (change, accepted, refused) = node_change(&node, open);
        if let Some(mut patch) = change {
            patch["metadata"]["resourceVersion"] = json!(node.metadata.resource_version);
            let params = PatchParams::default();
            let patch = Patch::Merge(patch);
            request("patch", &object, nodes.patch(&self.name, &params, &patch)).await?;
        }
        Ok((accepted, refused))
    }

    async fn tell_csi_node(&self, uid: &str, drivers: &[Driver]) -> Result<(), TellError> {
        let api: Api<CSINode> = Api::all(self.api.kube());
        let object = format!("csinode {}", self.name);
        let mut found = request("get", &object, api.get_opt(&self.name)).await?;
        if let Some(stale) = found.take_if(|found| !is_owned_by(found, uid)) {
            // It belongs to a node that is no more, and goes with it some day.
            let params = DeleteParams::default().preconditions(Preconditions {
                uid: stale.metadata.uid,
                resource_version: None,
            });
            request("delete", &object, api.delete(&self.name, &params)).await?;
        }
        let params = PostParams::default();
        let Some(found) = found else {
            let mut made = self.new_csi_node(uid);
            if let Some((_, all)) = merged(&[], drivers) {
                made.spec.drivers = all;
                request("create", &object, api.create(&params, &made)).await?;
            }
            return Ok(());
        };
        let Some((without, all)) = merged(&found.spec.drivers, drivers) else {
            return Ok(());
        };
        let mut wanted = found;
        if without.is_some() && only_counts(&wanted.spec.drivers, &all) {
            // Servers from 1.33 on allow for that; nobody sees the node without the driver.
            let mut counted = wanted.clone();
            counted.spec.drivers.clone_from(&all);
            let update = api.replace(&self.name, &params, &counted);
            match request("update", &object, update).await {
                Err(error) if error.is_refusal() => {}
                other => return other.map(drop),
            }
        }
        if let Some(without) = without {
            wanted.spec.drivers = without;
            wanted = request("update", &object, api.replace(&self.name, &params, &wanted)).await?;
        }
        if wanted.spec.drivers != all {
            wanted.spec.drivers = all;
            request("update", &object, api.replace(&self.name, &params, &wanted)).await?;
        }
        Ok(())
    }

    fn new_csi_node(&self, uid: &str) -> CSINode {
        CSINode {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                owner_references: Some(vec![OwnerReference {
                    api_version: "v1".to_owned(),
                    kind: "Node".to_owned(),
                    name: self.name.clone(),
                    uid: uid.to_owned(),
                    ..OwnerReference::default()
                }]),
                ..ObjectMeta::default()
            },
            spec: CSINodeSpec::default(),
        }
    }
}

fn is_owned_by(object: &CSINode, uid: &str) -> bool {
    let mut owners = object.metadata.owner_references.iter().flatten();
    object.metadata.owner_references.is_none() || owners.any(|owner| owner.uid == uid)
}

/// Returns the change of the node's metadata, if any; the drivers that it covers; and the errors of the others.
pub(super) fn node_change(
    node: &Node,
    open: Vec<Driver>,
) -> (Option<Value>, Vec<Driver>, Vec<TellError>) {
    let labels = node.metadata.labels.clone().unwrap_or_default();
    let annotations = node.metadata.annotations.as_ref();
    let before = annotations.and_then(|all| all.get(NODE_ID_ANNOTATION));
    let mut ids: BTreeMap<String, String> = before
        .and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default();
    let known = ids.clone();
    let mut new_labels: BTreeMap<String, String> = BTreeMap::new();
    let (mut accepted, mut refused) = (Vec::new(), Vec::new());
    for driver in open {
        if driver.gone {
            ids.remove(&driver.name);
            accepted.push(driver);
            continue;
        }
        let clash = driver.topology.iter().find_map(|(key, wanted)| {
            let found = labels.get(key).or_else(|| new_labels.get(key))?;
            (found != wanted).then(|| TellError::Topology {
                driver: driver.name.clone(),
                key: key.clone(),
                wanted: wanted.clone(),
                found: found.clone(),
            })
        });
        if let Some(clash) = clash {
            refused.push(clash);
            continue;
        }
        for (key, value) in &driver.topology {
            if !labels.contains_key(key) {
                new_labels.insert(key.clone(), value.clone());
            }
        }
        ids.insert(driver.name.clone(), driver.node_id.clone());
        accepted.push(driver);
    }
    let mut metadata = json!({});
    if ids != known || (before.is_some() && known.is_empty()) {
        // An object of strings can always be written.
        let text = serde_json::to_string(&ids).unwrap_or_default();
        let value = (!ids.is_empty()).then_some(text);
        metadata["annotations"] = json!({ NODE_ID_ANNOTATION: value });
    }
    if !new_labels.is_empty() {
        metadata["labels"] = json!(new_labels);
    }
    let changed = metadata.as_object().is_some_and(|m| !m.is_empty());
    (
        changed.then(|| json!({ "metadata": metadata })),
        accepted,
        refused,
    )
}

pub(super) type DriverList = Vec<CSINodeDriver>;

/// `spec.drivers` as it is to be; `None` when it is so already. An entry cannot be changed: before that list comes the
/// one without it.
pub(super) fn merged(
    before: &[CSINodeDriver],
    drivers: &[Driver],
) -> Option<(Option<DriverList>, DriverList)> {
    let mut all = before.to_vec();
    let mut replaced = false;
    for driver in drivers {
        let place = all.iter().position(|entry| entry.name == driver.name);
        if driver.gone {
            place.map(|at| all.remove(at));
            continue;
        }
        let wanted = entry(driver);
        match place {
            Some(at) if is_same(&all[at], &wanted) => {}
            Some(at) => {
                replaced = true;
                all[at] = wanted;
            }
            None => all.push(wanted),
        }
    }
    if all == before {
        return None;
    }
    let without = replaced.then(|| {
        let stays = |e: &&CSINodeDriver| before.contains(e);
        all.iter().filter(stays).cloned().collect()
    });
    Some((without, all))
}

/// Returns whether entries differ only in the number of volumes that they allow.
fn only_counts(before: &[CSINodeDriver], after: &[CSINodeDriver]) -> bool {
    let uncounted = |of: &[CSINodeDriver]| -> DriverList {
        let uncounted = of.iter().cloned().map(|mut entry| {
            entry.allocatable = None;
            entry
        });
        uncounted.collect()
    };
    uncounted(before) == uncounted(after)
}

fn is_same(one: &CSINodeDriver, other: &CSINodeDriver) -> bool {
    let keys = |of: &CSINodeDriver| -> BTreeSet<String> {
        of.topology_keys.iter().flatten().cloned().collect()
    };
    let count = |of: &CSINodeDriver| of.allocatable.as_ref().and_then(|a| a.count);
    one.node_id == other.node_id && count(one) == count(other) && keys(one) == keys(other)
}

fn entry(driver: &Driver) -> CSINodeDriver {
    let count = i32::try_from(driver.max_volumes).unwrap_or(i32::MAX);
    let keys: Vec<String> = driver.topology.keys().cloned().collect();
    CSINodeDriver {
        name: driver.name.clone(),
        node_id: driver.node_id.clone(),
        topology_keys: (!keys.is_empty()).then_some(keys),
        allocatable: (count > 0).then_some(VolumeNodeResources { count: Some(count) }),
    }
}

async fn request<T>(
    verb: &'static str,
    object: &str,
    call: impl Future<Output = kube::Result<T>>,
) -> Result<T, TellError> {
    match tokio::time::timeout(REQUEST, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(TellError::Request {
            verb,
            object: object.to_owned(),
            source: Box::new(source),
        }),
        Err(_) => Err(TellError::Late {
            verb,
            object: object.to_owned(),
        }),
    }
}
