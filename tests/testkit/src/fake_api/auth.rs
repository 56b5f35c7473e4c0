//! Who asks, and whether he may: the Node authoriser and the admission plugins NodeRestriction and Priority.
//!
//! As strict as the newest servers: a node sees no node but itself and no pods but its own, which servers
//! before 1.32 did not enforce.

use serde_json::Value;

use super::defaults;
use super::failure::Failure;
use super::request::Request;
use super::resource::{self, RESOURCES, Resource};
use super::select::Selector;
use super::state::State;

/// Who a request comes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Identity {
    /// `system:masters`: may do everything.
    Admin,
    /// `system:node:<name>` of the group `system:nodes`.
    Node(String),
    /// Of the group `system:bootstrappers`: may ask for a certificate, and for nothing else.
    Bootstrap,
    /// Anybody else: may do nothing.
    User(String),
}

impl Identity {
    /// As in messages and in `spec.username` of a certificateSigningRequest.
    pub fn username(&self) -> String {
        match self {
            Self::Admin => "kubernetes-admin".to_owned(),
            Self::Node(name) => format!("system:node:{name}"),
            Self::Bootstrap => "system:bootstrap:token".to_owned(),
            Self::User(name) => name.clone(),
        }
    }

    /// As in `spec.groups` of a certificateSigningRequest.
    pub fn groups(&self) -> Vec<&'static str> {
        match self {
            Self::Admin => vec!["system:masters", "system:authenticated"],
            Self::Node(_) => vec!["system:nodes", "system:authenticated"],
            Self::Bootstrap => vec!["system:bootstrappers", "system:authenticated"],
            Self::User(_) => vec!["system:authenticated"],
        }
    }
}

/// Authorisation: whether the request is heard at all.
pub(super) fn authorize(
    state: &State,
    request: &Request,
    resource: &Resource,
    selector: &Selector,
) -> Result<(), Failure> {
    let node = match &request.identity {
        Identity::Admin => return Ok(()),
        Identity::Node(node) => node,
        Identity::Bootstrap
            if resource.is("certificatesigningrequests")
                && request.subresource.is_empty()
                && ["create", "get", "list", "watch"].contains(&request.verb.as_str()) =>
        {
            return Ok(());
        }
        _ => return Err(denied(request, resource, "")),
    };
    let verb = request.verb.as_str();
    let name = match request.name.as_str() {
        "" => selector.requires("metadata.name").unwrap_or_default(),
        name => name,
    };
    let reads = matches!(verb, "get" | "list" | "watch");
    let writes = matches!(verb, "create" | "update" | "patch");
    let refuse = |why: &str| Err(denied(request, resource, why));
    let unrelated = format!("no relationship found between node '{node}' and this object");
    match (resource.plural, request.subresource.as_str()) {
        ("nodes", "") if reads => {
            if name == node {
                return Ok(());
            }
            refuse("node can only read its own Node object")
        }
        ("nodes", "") if writes => Ok(()),
        ("nodes" | "pods", "status") if matches!(verb, "update" | "patch") => Ok(()),
        ("pods", "") if verb == "list" || verb == "watch" => {
            if selector.requires("spec.nodeName") == Some(node) {
                return Ok(());
            }
            refuse("can only list/watch pods with spec.nodeName field selector")
        }
        ("pods", "") if verb == "get" => {
            let key = (request.resource, request.namespace.clone(), name.to_owned());
            match state.get(&key) {
                Some(pod) if pod["spec"]["nodeName"] != *node => refuse(&unrelated),
                Some(_) => Ok(()),
                // The authoriser does not know it; saying so is what a kubelet relies on.
                None => Ok(()),
            }
        }
        ("pods", "") if verb == "create" || verb == "delete" => Ok(()),
        ("pods", "eviction") if verb == "create" => Ok(()),
        ("secrets" | "configmaps", "") if reads => {
            if name.is_empty() {
                return refuse("No Object name found");
            }
            let kind = resource.plural;
            if refers(state, node, &request.namespace, kind, name) {
                return Ok(());
            }
            refuse(&unrelated)
        }
        ("persistentvolumeclaims" | "resourceclaims", "") if verb == "get" => {
            if refers(state, node, &request.namespace, resource.plural, name) {
                return Ok(());
            }
            refuse(&unrelated)
        }
        ("serviceaccounts", "") if verb == "get" => {
            if refers(state, node, &request.namespace, "serviceaccounts", name) {
                return Ok(());
            }
            refuse(&unrelated)
        }
        ("podcertificaterequests", "") if verb == "create" => Ok(()),
        ("podcertificaterequests", "") if verb == "list" || verb == "watch" => {
            if selector.requires("spec.nodeName") == Some(node) {
                return Ok(());
            }
            refuse("can only list/watch podcertificaterequests with spec.nodeName field selector")
        }
        ("serviceaccounts", "token") if verb == "create" => {
            if refers(state, node, &request.namespace, "serviceaccounts", name) {
                return Ok(());
            }
            refuse(&unrelated)
        }
        ("services", "") | ("runtimeclasses", "") | ("csidrivers", "") if reads => Ok(()),
        ("endpoints" | "persistentvolumes", "") if verb == "get" => Ok(()),
        ("certificatesigningrequests", "") if reads || verb == "create" => Ok(()),
        ("events", "") if writes => Ok(()),
        ("leases", "") if verb == "create" || name == node => {
            if request.namespace == "kube-node-lease" {
                return Ok(());
            }
            refuse("can only access leases in the \"kube-node-lease\" system namespace")
        }
        ("leases", "") => {
            refuse("can only access node lease with the same name as the requesting node")
        }
        ("csinodes", "") if verb == "create" || name == node => Ok(()),
        _ => refuse(""),
    }
}

fn denied(request: &Request, resource: &Resource, why: &str) -> Failure {
    let sub = match request.subresource.as_str() {
        "" => String::new(),
        sub => format!("/{sub}"),
    };
    let place = match request.namespace.as_str() {
        "" => "at the cluster scope".to_owned(),
        namespace => format!("in the namespace \"{namespace}\""),
    };
    let mut message = format!(
        "User \"{}\" cannot {} resource \"{}{sub}\" in API group \"{}\" {place}",
        request.identity.username(),
        request.verb,
        resource.plural,
        resource.group,
    );
    if !why.is_empty() {
        message.push_str(": ");
        message.push_str(why);
    }
    Failure::forbidden(resource, &request.name, &message)
}

/// The Priority plugin: a pod that is made has the priority of its class, or says none.
pub(super) fn restrict_priority(
    state: &State,
    resource: &Resource,
    pod: &Value,
) -> Result<(), Failure> {
    let spec = &pod["spec"];
    let (value, policy) = defaults::priority_of(state, spec);
    let name = pod["metadata"]["name"].as_str().unwrap_or_default();
    for (field, computed) in [("priority", value), ("preemptionPolicy", policy)] {
        let given = &spec[field];
        if !given.is_null() && *given != computed {
            let why = format!(
                "the value of {field} ({given}) must not be provided in pod spec; priority admission controller computed \
                 {computed} from the given PriorityClass name"
            );
            return Err(Failure::forbidden(resource, name, &why));
        }
    }
    Ok(())
}

/// Whether one of the node's pods refers to the object. Mirror pods give no rights.
fn refers(state: &State, node: &str, namespace: &str, kind: &str, name: &str) -> bool {
    let Some(pods) = resource::find("", "v1", "pods") else {
        return false;
    };
    State::of(&state.objects, pods, namespace)
        .iter()
        .filter(|pod| pod["spec"]["nodeName"] == node)
        .filter(|pod| pod["metadata"]["annotations"][MIRROR].is_null())
        .any(|pod| {
            let spec = &pod["spec"];
            let account = spec["serviceAccountName"].as_str().unwrap_or("default");
            let mut claims = items(&pod["status"]["resourceClaimStatuses"]);
            (kind == "serviceaccounts" && account == name)
                || (kind == "resourceclaims" && claims.any(|c| c["resourceClaimName"] == name))
                || references(spec).contains(&(kind, name.to_owned()))
        })
}

pub(super) const MIRROR: &str = "kubernetes.io/config.mirror";

/// Secrets, configMaps and claims that a pod's spec names.
fn references(spec: &Value) -> Vec<(&'static str, String)> {
    let mut found = Vec::new();
    let mut add = |kind: &'static str, name: &Value| {
        if let Some(name) = name.as_str() {
            found.push((kind, name.to_owned()));
        }
    };
    for secret in items(&spec["imagePullSecrets"]) {
        add("secrets", &secret["name"]);
    }
    for volume in items(&spec["volumes"]) {
        add("secrets", &volume["secret"]["secretName"]);
        add("secrets", &volume["csi"]["nodePublishSecretRef"]["name"]);
        add("configmaps", &volume["configMap"]["name"]);
        add(
            "persistentvolumeclaims",
            &volume["persistentVolumeClaim"]["claimName"],
        );
        for source in items(&volume["projected"]["sources"]) {
            add("secrets", &source["secret"]["name"]);
            add("configmaps", &source["configMap"]["name"]);
        }
    }
    for claim in items(&spec["resourceClaims"]) {
        add("resourceclaims", &claim["resourceClaimName"]);
    }
    for list in ["containers", "initContainers", "ephemeralContainers"] {
        for container in items(&spec[list]) {
            for env in items(&container["env"]) {
                add("secrets", &env["valueFrom"]["secretKeyRef"]["name"]);
                add("configmaps", &env["valueFrom"]["configMapKeyRef"]["name"]);
            }
            for from in items(&container["envFrom"]) {
                add("secrets", &from["secretRef"]["name"]);
                add("configmaps", &from["configMapRef"]["name"]);
            }
        }
    }
    found
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

/// Admission of a write by a node. `new` is `None` for a deletion.
pub(super) fn restrict(
    state: &State,
    request: &Request,
    resource: &Resource,
    old: Option<&Value>,
    new: Option<&Value>,
) -> Result<(), Failure> {
    let Identity::Node(node) = &request.identity else {
        return Ok(());
    };
    let name = new.or(old).map_or("", |object| {
        object["metadata"]["name"].as_str().unwrap_or_default()
    });
    let refuse = |why: String| Err(Failure::forbidden(resource, name, &why));
    match resource.plural {
        "pods" => pod(state, request, resource, node, old, new),
        "nodes" => {
            if name != node {
                return refuse(format!(
                    "node \"{node}\" is not allowed to modify node \"{name}\""
                ));
            }
            let Some(new) = new else { return Ok(()) };
            let labels = |object: Option<&Value>| {
                let labels = object.map(|object| object["metadata"]["labels"].clone());
                labels
                    .and_then(|l| l.as_object().cloned())
                    .unwrap_or_default()
            };
            let (was, is) = (labels(old), labels(Some(new)));
            let mut changed: Vec<&String> = is
                .keys()
                .chain(was.keys())
                .filter(|label| was.get(*label) != is.get(*label) && restricted(label))
                .collect();
            changed.sort();
            changed.dedup();
            if let Some(label) = changed.first() {
                return refuse(format!("is not allowed to modify labels: {label}"));
            }
            if let Some(old) = old {
                if old["spec"]["taints"] != new["spec"]["taints"] {
                    return refuse(format!("node \"{node}\" is not allowed to modify taints"));
                }
                if old["metadata"]["ownerReferences"] != new["metadata"]["ownerReferences"] {
                    let why = format!("node \"{node}\" is not allowed to modify ownerReferences");
                    return refuse(why);
                }
            }
            Ok(())
        }
        "podcertificaterequests" => pod_certificate(state, resource, node, new),
        "leases" if name != node => refuse(
            "can only access node lease with the same name as the requesting node".to_owned(),
        ),
        "csinodes" if name != node => {
            refuse("can only access CSINode with the same name as the requesting node".to_owned())
        }
        _ => Ok(()),
    }
}

/// `admitPCRCreate`: a node requests certificates for its own pods alone, as what they are.
fn pod_certificate(
    state: &State,
    resource: &Resource,
    node: &str,
    new: Option<&Value>,
) -> Result<(), Failure> {
    let Some(new) = new else { return Ok(()) };
    let (spec, metadata) = (&new["spec"], &new["metadata"]);
    let name = metadata["name"].as_str().unwrap_or_default();
    let find = |plural: &str, namespace: &Value, name: &Value| {
        let index = resource::find("", "v1", plural)?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        state.get(&(index, text(namespace), text(name)))
    };
    let namespace = &metadata["namespace"];
    let is_own = |object: Option<std::sync::Arc<Value>>, uid: &Value| {
        object.filter(|object| object["metadata"]["uid"] == *uid)
    };
    let own = is_own(
        find("nodes", &Value::Null, &spec["nodeName"]),
        &spec["nodeUID"],
    );
    let pod = is_own(find("pods", namespace, &spec["podName"]), &spec["podUID"]);
    let account = find("serviceaccounts", namespace, &spec["serviceAccountName"]);
    let account = is_own(account, &spec["serviceAccountUID"]);
    let why = match (own, pod, account) {
        _ if spec["nodeName"] != node => "PodCertificateRequest.Spec.NodeName is another node",
        (None, ..) => "PodCertificateRequest.Spec.NodeUID is another node's",
        (_, Some(pod), Some(_))
            if pod["spec"]["nodeName"] == node
                && pod["spec"]["serviceAccountName"] == spec["serviceAccountName"] =>
        {
            return Ok(());
        }
        (_, _, None) => "PodCertificateRequest.Spec.ServiceAccountUID is another account's",
        _ => "PodCertificateRequest.Spec names another pod, or one of another node",
    };
    Err(Failure::forbidden(resource, name, why))
}

/// `getModifiedLabels` and the labels that a node may set on itself.
fn restricted(label: &str) -> bool {
    const OWN: [&str; 11] = [
        "kubernetes.io/hostname",
        "kubernetes.io/os",
        "kubernetes.io/arch",
        "beta.kubernetes.io/os",
        "beta.kubernetes.io/arch",
        "beta.kubernetes.io/instance-type",
        "node.kubernetes.io/instance-type",
        "failure-domain.beta.kubernetes.io/zone",
        "failure-domain.beta.kubernetes.io/region",
        "topology.kubernetes.io/zone",
        "topology.kubernetes.io/region",
    ];
    let Some((domain, _)) = label.split_once('/') else {
        return false;
    };
    let under = |of: &str| domain == of || domain.ends_with(&format!(".{of}"));
    if under("node-restriction.kubernetes.io") {
        return true;
    }
    (under("kubernetes.io") || under("k8s.io"))
        && !OWN.contains(&label)
        && !under("kubelet.kubernetes.io")
        && !under("node.kubernetes.io")
}

fn pod(
    state: &State,
    request: &Request,
    resource: &Resource,
    node: &str,
    old: Option<&Value>,
    new: Option<&Value>,
) -> Result<(), Failure> {
    let about = new.or(old);
    let name = about
        .and_then(|pod| pod["metadata"]["name"].as_str())
        .unwrap_or_default();
    let refuse = |why: String| Err(Failure::forbidden(resource, name, &why));
    match (request.subresource.as_str(), old, new) {
        ("", Some(old), None) if old["spec"]["nodeName"] != node => refuse(format!(
            "node \"{node}\" can only delete pods with spec.nodeName set to itself"
        )),
        ("eviction", Some(old), _) if old["spec"]["nodeName"] != node => refuse(format!(
            "node {node} can only evict pods with spec.nodeName set to itself"
        )),
        ("status", Some(old), Some(new)) => {
            if old["spec"]["nodeName"] != node {
                return refuse(format!(
                    "node \"{node}\" can only update pod status for pods with spec.nodeName set to itself"
                ));
            }
            if old["metadata"]["labels"] != new["metadata"]["labels"] {
                return refuse(format!(
                    "node \"{node}\" cannot update labels through pod status"
                ));
            }
            Ok(())
        }
        ("", None, Some(new)) => mirror_pod(state, resource, node, new),
        _ => Ok(()),
    }
}

fn mirror_pod(state: &State, resource: &Resource, node: &str, pod: &Value) -> Result<(), Failure> {
    let name = pod["metadata"]["name"].as_str().unwrap_or_default();
    let refuse = |why: String| Err(Failure::forbidden(resource, name, &why));
    if pod["metadata"]["annotations"][MIRROR].is_null() {
        return refuse(format!(
            "pod does not have \"{MIRROR}\" annotation, node \"{node}\" can only create mirror pods"
        ));
    }
    if pod["spec"]["nodeName"] != node {
        return refuse(format!(
            "node \"{node}\" can only create pods with spec.nodeName set to itself"
        ));
    }
    let owners: Vec<&Value> = items(&pod["metadata"]["ownerReferences"]).collect();
    let [owner] = owners[..] else {
        return refuse(format!(
            "node \"{node}\" can only create pods with an owner reference set to itself"
        ));
    };
    if owner["kind"] != "Node" || owner["apiVersion"] != "v1" || owner["name"] != node {
        return refuse(format!(
            "node \"{node}\" can only create pods with an owner reference set to itself"
        ));
    }
    if owner["controller"] != true || owner["blockOwnerDeletion"] == true {
        return refuse(format!(
            "node \"{node}\" can only create pods with a controller owner reference set to itself, which does not block its deletion"
        ));
    }
    let own = resource::find("", "v1", "nodes")
        .and_then(|nodes| state.get(&(nodes, String::new(), node.to_owned())));
    let Some(own) = own else {
        return refuse(format!(
            "looking up node {node} to validate owner reference: node \"{node}\" not found"
        ));
    };
    if own["metadata"]["uid"] != owner["uid"] {
        return refuse(format!(
            "node {node} UID mismatch: expected {} got {}",
            owner["uid"].as_str().unwrap_or_default(),
            own["metadata"]["uid"].as_str().unwrap_or_default()
        ));
    }
    if pod["spec"]["serviceAccountName"].is_string() {
        return refuse(format!(
            "node \"{node}\" can not create pods that reference a service account"
        ));
    }
    if let Some((kind, _)) = references(&pod["spec"]).first() {
        return refuse(format!(
            "node \"{node}\" can not create pods that reference {kind}"
        ));
    }
    let projects = items(&pod["spec"]["volumes"])
        .flat_map(|volume| items(&volume["projected"]["sources"]))
        .any(|source| source["serviceAccountToken"].is_object());
    if projects {
        return refuse(format!(
            "node \"{node}\" can not create pods that reference serviceaccounts"
        ));
    }
    Ok(())
}

/// A token for a node's pod has to be bound to that pod.
pub(super) fn restrict_token(
    state: &State,
    request: &Request,
    asked: &Value,
) -> Result<(), Failure> {
    let Identity::Node(node) = &request.identity else {
        return Ok(());
    };
    let resource = &RESOURCES[request.resource];
    let refuse = |why: String| Err(Failure::forbidden(resource, &request.name, &why));
    let bound = &asked["spec"]["boundObjectRef"];
    if bound["kind"] != "Pod" || bound["apiVersion"] != "v1" || bound["name"].is_null() {
        return refuse("node requested token not bound to a pod".to_owned());
    }
    if bound["uid"].as_str().unwrap_or_default().is_empty() {
        return refuse("node requested token with a pod binding without a uid".to_owned());
    }
    let name = bound["name"].as_str().unwrap_or_default().to_owned();
    let pod = resource::find("", "v1", "pods")
        .and_then(|pods| state.get(&(pods, request.namespace.clone(), name)));
    match pod {
        None => Err(Failure::not_found(
            &RESOURCES[0],
            bound["name"].as_str().unwrap_or_default(),
        )),
        Some(pod) if pod["metadata"]["uid"] != bound["uid"] => refuse(
            "the UID in the bound object reference does not match the UID in record. The object might have been deleted and then recreated"
                .to_owned(),
        ),
        Some(pod) if pod["spec"]["nodeName"] != *node => {
            refuse("node requested token bound to a pod scheduled on a different node".to_owned())
        }
        Some(_) => Ok(()),
    }
}
