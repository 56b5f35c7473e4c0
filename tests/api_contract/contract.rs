//! The clauses.

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, Secret, ServiceAccount};
use kube::api::{
    Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions, WatchEvent,
    WatchParams,
};
use serde_json::{Value, json};

use crate::world::{World, object, pod, refusal};

/// How long a server may take to hear of what it has been told.
const SOON: std::time::Duration = std::time::Duration::from_secs(60);

/// Fails a test that would wait longer than [`SOON`].
async fn within<T>(what: &str, doing: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(SOON, doing).await;
    done.unwrap_or_else(|_| panic!("{what} within {SOON:?}"))
}

fn at_once() -> DeleteParams {
    DeleteParams::default().grace_period(0)
}

fn json_of(value: impl serde::Serialize) -> Value {
    serde_json::to_value(value).unwrap()
}

async fn patch_status(api: &Api<Pod>, name: &str, patch: Value) -> kube::Result<Value> {
    let pp = PatchParams::default();
    let patched = api.patch_status(name, &pp, &Patch::Strategic(patch)).await;
    patched.map(json_of)
}

pub(crate) async fn pod_gets_its_defaults(w: &World) {
    let mut given = pod("p", &w.node);
    given["spec"]["containers"][0]["image"] = "busybox".into();
    given["spec"]["containers"][0]["resources"] =
        json!({ "limits": { "cpu": "1000m", "memory": "1048576Ki" } });
    given["spec"]["volumes"] = json!([{ "name": "c", "configMap": { "name": "c" } }]);
    given["status"] = json!({ "phase": "Running" });
    let pod = json_of(w.create::<Pod>(given).await);
    let spec = &pod["spec"];
    assert_eq!(spec["restartPolicy"], "Always");
    assert_eq!(spec["dnsPolicy"], "ClusterFirst");
    assert_eq!(spec["terminationGracePeriodSeconds"], 30);
    assert_eq!(spec["schedulerName"], "default-scheduler");
    assert_eq!(spec["enableServiceLinks"], true);
    assert_eq!(spec["securityContext"], json!({}));
    assert_eq!(spec["priority"], 0);
    let container = &spec["containers"][0];
    assert_eq!(container["imagePullPolicy"], "Always");
    assert_eq!(container["terminationMessagePath"], "/dev/termination-log");
    assert_eq!(container["terminationMessagePolicy"], "File");
    let amounts = json!({ "cpu": "1", "memory": "1Gi" });
    assert_eq!(container["resources"]["limits"], amounts);
    assert_eq!(container["resources"]["requests"], amounts);
    assert_eq!(spec["volumes"][0]["configMap"]["defaultMode"], 0o644);
    assert_eq!(
        pod["status"],
        json!({ "phase": "Pending", "qosClass": "Guaranteed" })
    );
    assert!(pod["metadata"]["uid"].is_string() && pod["metadata"]["creationTimestamp"].is_string());
}

pub(crate) async fn names_are_unique_and_may_be_generated(w: &World) {
    let pods: Api<Pod> = w.api(&w.admin);
    let pp = PostParams::default();
    w.create::<Pod>(pod("p", &w.node)).await;
    assert_eq!(
        refusal(pods.create(&pp, &object(pod("p", &w.node))).await),
        409
    );
    let mut generated = pod("", &w.node);
    generated["metadata"] = json!({ "generateName": "p-" });
    let one: Pod = w.create(generated.clone()).await;
    let two: Pod = w.create(generated).await;
    assert_ne!(one.metadata.name, two.metadata.name);
    assert!(one.metadata.name.unwrap().starts_with("p-"));
    let elsewhere: Api<Pod> = Api::namespaced(w.admin.clone(), "no-such-namespace");
    assert_eq!(
        refusal(elsewhere.create(&pp, &object(pod("p", &w.node))).await),
        404
    );
}

pub(crate) async fn status_patch_merges_conditions_by_type(w: &World) {
    w.create::<Pod>(pod("p", &w.node)).await;
    let pods: Api<Pod> = w.api(&w.node_client);
    let status = json!({ "status": {
        "phase": "Running", "podIPs": [{ "ip": "10.0.0.1" }],
        "conditions": [
            { "type": "Ready", "status": "True", "reason": "R", "lastTransitionTime": "2026-01-01T00:00:00.5Z" },
            { "type": "Foreign", "status": "True" },
        ],
        "containerStatuses": [
            { "name": "main", "ready": true, "restartCount": 1, "image": "i", "imageID": "i" },
        ],
    }});
    let patched = patch_status(&pods, "p", status).await.unwrap();
    assert_eq!(
        patched["status"]["conditions"][0]["lastTransitionTime"], "2026-01-01T00:00:00Z",
        "times have seconds"
    );
    assert_eq!(
        patched["status"]["podIP"], "10.0.0.1",
        "the first of podIPs"
    );
    let status = json!({ "status": {
        "$setElementOrder/podIPs": [{ "ip": "10.0.0.2" }],
        "podIP": "10.0.0.2",
        "podIPs": [{ "ip": "10.0.0.2" }, { "ip": "10.0.0.1", "$patch": "delete" }],
        "conditions": [{ "type": "Ready", "status": "False", "reason": null }],
        "containerStatuses": [
            { "name": "other", "ready": true, "restartCount": 0, "image": "i", "imageID": "i" },
        ],
    }});
    let patched = patch_status(&pods, "p", status).await.unwrap();
    let status = &patched["status"];
    let conditions = status["conditions"].as_array().unwrap();
    let of = |kind: &str| conditions.iter().find(|c| c["type"] == kind).unwrap();
    assert_eq!(conditions.len(), 2);
    assert_eq!(of("Ready")["status"], "False");
    assert!(of("Ready")["reason"].is_null());
    assert_eq!(of("Foreign")["status"], "True", "it was not in the patch");
    assert_eq!(status["podIPs"], json!([{ "ip": "10.0.0.2" }]));
    assert_eq!(
        status["containerStatuses"].as_array().unwrap().len(),
        1,
        "replaced as a whole"
    );
    assert_eq!(status["containerStatuses"][0]["name"], "other");
    let old_client = json!({ "status": { "podIP": "10.0.0.3" } });
    let patched = patch_status(&pods, "p", old_client).await.unwrap();
    let ips = &patched["status"]["podIPs"];
    assert_eq!(*ips, json!([{ "ip": "10.0.0.3" }]), "podIP wins");
    let missing = patch_status(
        &pods,
        "p",
        json!({ "status": { "conditions": [{ "status": "x" }] } }),
    );
    assert_eq!(refusal(missing.await), 500, "without its merge key");
    assert_eq!(
        refusal(patch_status(&pods, "none", json!({ "status": {} })).await),
        404
    );
}

pub(crate) async fn order_of_a_merged_list_is_that_of_the_patch(w: &World) {
    w.create::<Pod>(pod("p", &w.node)).await;
    let pods: Api<Pod> = w.api(&w.node_client);
    let conditions = |kinds: &str| -> Vec<Value> {
        let one = |kind: char| json!({ "type": kind.to_string(), "status": "True" });
        kinds.chars().map(one).collect()
    };
    let order = |patched: &Value| -> String {
        let conditions = patched["status"]["conditions"].as_array().unwrap();
        conditions
            .iter()
            .map(|c| c["type"].as_str().unwrap())
            .collect()
    };
    let first = json!({ "status": { "conditions": conditions("ABCD") } });
    assert_eq!(
        order(&patch_status(&pods, "p", first).await.unwrap()),
        "ABCD"
    );
    let keys = json!([{ "type": "X" }, { "type": "C" }, { "type": "B" }]);
    let second =
        json!({ "status": { "$setElementOrder/conditions": keys, "conditions": conditions("X") } });
    assert_eq!(
        order(&patch_status(&pods, "p", second).await.unwrap()),
        "XACBD"
    );
    let third = json!({ "status": { "conditions": conditions("DY") } });
    assert_eq!(
        order(&patch_status(&pods, "p", third).await.unwrap()),
        "XACBDY"
    );
    let mut replaced = conditions("BA");
    replaced.insert(0, json!({ "$patch": "replace" }));
    let fourth = json!({ "status": { "conditions": replaced } });
    assert_eq!(
        order(&patch_status(&pods, "p", fourth).await.unwrap()),
        "BA"
    );
    let keys = json!([{ "type": "A" }, { "type": "B" }]);
    let wrong = json!({ "status": { "$setElementOrder/conditions": keys, "conditions": conditions("BA") } });
    assert_eq!(refusal(patch_status(&pods, "p", wrong).await), 500);
}

pub(crate) async fn status_and_spec_are_written_apart(w: &World) {
    w.create::<Pod>(pod("p", &w.node)).await;
    let pods: Api<Pod> = w.api(&w.admin);
    let both = json!({
        "metadata": { "annotations": { "a": "b" } },
        "spec": { "activeDeadlineSeconds": 5 },
        "status": { "phase": "Running" },
    });
    let patched = patch_status(&pods, "p", both.clone()).await.unwrap();
    assert_eq!(patched["status"]["phase"], "Running");
    assert!(patched["spec"]["activeDeadlineSeconds"].is_null());
    assert_eq!(patched["metadata"]["annotations"]["a"], "b");
    let mut main = both;
    main["status"]["phase"] = "Failed".into();
    let patched = pods
        .patch("p", &PatchParams::default(), &Patch::Merge(main))
        .await;
    let patched = json_of(patched.unwrap());
    assert_eq!(patched["status"]["phase"], "Running");
    assert_eq!(patched["spec"]["activeDeadlineSeconds"], 5);
    let moved = json!({ "spec": { "nodeName": w.other } });
    let refused = pods
        .patch("p", &PatchParams::default(), &Patch::Merge(moved))
        .await;
    assert_eq!(refusal(refused), 422, "a pod does not move");
}

pub(crate) async fn write_that_changes_nothing_is_none(w: &World) {
    w.create::<Pod>(pod("p", &w.node)).await;
    let pods: Api<Pod> = w.api(&w.node_client);
    let status = json!({ "status": { "phase": "Running", "message": "" } });
    let first = patch_status(&pods, "p", status.clone()).await.unwrap();
    let second = patch_status(&pods, "p", status).await.unwrap();
    assert_eq!(first, second);
}

/// What of a pod that ran may run again is what the server has by the restart policies.
pub(crate) async fn end_that_is_final_is_not_taken_back(w: &World) {
    let pods: Api<Pod> = w.api(&w.node_client);
    let cases = [
        ("init", "Always", json!({}), 0, true),
        ("init", "OnFailure", json!({}), 0, false),
        ("init", "OnFailure", json!({}), 1, true),
        ("init", "Never", json!({}), 1, false),
        (
            "init",
            "Never",
            json!({ "restartPolicy": "Always" }),
            0,
            true,
        ),
        (
            "init",
            "Always",
            json!({ "restartPolicy": "Never" }),
            1,
            false,
        ),
        (
            "init",
            "Always",
            json!({ "restartPolicy": "OnFailure" }),
            0,
            false,
        ),
        ("main", "Always", json!({}), 0, true),
        ("main", "OnFailure", json!({}), 0, false),
        (
            "main",
            "Never",
            json!({ "restartPolicy": "OnFailure" }),
            1,
            true,
        ),
    ];
    for (number, (kind, policy, own, code, allowed)) in cases.into_iter().enumerate() {
        let name = format!("p{number}");
        let mut given = pod(&name, &w.node);
        given["spec"]["restartPolicy"] = policy.into();
        given["spec"]["initContainers"] = json!([{ "name": "init", "image": "busybox:1" }]);
        let (list, statuses) = match kind {
            "init" => ("initContainers", "initContainerStatuses"),
            _ => ("containers", "containerStatuses"),
        };
        for (key, value) in own.as_object().unwrap() {
            given["spec"][list][0][key] = value.clone();
        }
        let admin: Api<Pod> = w.api(&w.admin);
        let created = admin.create(&PostParams::default(), &object(given)).await;
        let is_own = !own["restartPolicy"].is_null();
        let created = match created {
            // Servers that know this of sidecars alone refuse it, older ones do not know it at all.
            Err(kube::Error::Api(status)) if is_own && status.code == 422 => continue,
            created => json_of(created.unwrap()),
        };
        if own["restartPolicy"] != created["spec"][list][0]["restartPolicy"] {
            continue;
        }
        let told = |state: Value| {
            patch_status(
                &pods,
                &name,
                json!({ "status": { statuses: [{
                    "name": kind, "image": "i", "imageID": "i", "ready": false, "restartCount": 0, "state": state,
                }]}}),
            )
        };
        told(json!({ "terminated": { "exitCode": code } }))
            .await
            .unwrap();
        let back = told(json!({ "waiting": { "reason": "PodInitializing" } })).await;
        if allowed {
            back.unwrap();
        } else {
            assert_eq!(refusal(back), 422, "{kind} {policy} {own} {code}");
        }
    }
}

pub(crate) async fn other_uid_is_refused(w: &World) {
    let created: Pod = w.create(pod("p", &w.node)).await;
    let pods: Api<Pod> = w.api(&w.node_client);
    let patch = |uid: &str| json!({ "metadata": { "uid": uid }, "status": { "phase": "Running" } });
    assert_eq!(refusal(patch_status(&pods, "p", patch("other")).await), 422);
    let own = created.metadata.uid.clone().unwrap();
    patch_status(&pods, "p", patch(&own)).await.unwrap();
    let with_uid = |uid: &str| {
        at_once().preconditions(Preconditions {
            uid: Some(uid.to_owned()),
            ..Default::default()
        })
    };
    assert_eq!(refusal(pods.delete("p", &with_uid("other")).await), 409);
    pods.delete("p", &with_uid(&own)).await.unwrap();
    let admin: Api<Pod> = w.api(&w.admin);
    let mut renamed: Pod = w.create(pod("p", &w.node)).await;
    renamed.metadata.resource_version = None;
    renamed.metadata.uid = Some("other".to_owned());
    let refused = admin.replace("p", &PostParams::default(), &renamed).await;
    assert_eq!(refusal(refused), 409);
}

pub(crate) async fn update_needs_the_newest_version(w: &World) {
    let mut map: ConfigMap = w
        .create(json!({ "metadata": { "name": "c" }, "data": { "a": "1" } }))
        .await;
    let maps: Api<ConfigMap> = w.api(&w.admin);
    let stale = map.clone();
    map.data
        .as_mut()
        .unwrap()
        .insert("a".to_owned(), "2".to_owned());
    maps.replace("c", &PostParams::default(), &map)
        .await
        .unwrap();
    assert_eq!(
        refusal(maps.replace("c", &PostParams::default(), &stale).await),
        409
    );
    let version = stale.metadata.resource_version;
    let patch = json!({ "metadata": { "resourceVersion": version }, "data": { "a": "3" } });
    let refused = maps
        .patch("c", &PatchParams::default(), &Patch::Merge(patch))
        .await;
    assert_eq!(refusal(refused), 409);
}

async fn events(w: &World, params: &WatchParams, version: &str, count: usize) -> Vec<String> {
    let pods: Api<Pod> = w.api(&w.admin);
    let stream = pods.watch(params, version).await.unwrap();
    let seen = stream
        .take(count)
        .map_ok(|event| match event {
            WatchEvent::Added(pod) => line("ADDED", &pod),
            WatchEvent::Modified(pod) => line("MODIFIED", &pod),
            WatchEvent::Deleted(pod) => line("DELETED", &pod),
            WatchEvent::Bookmark(_) => "BOOKMARK".to_owned(),
            WatchEvent::Error(status) => format!("ERROR {}", status.code),
        })
        .try_collect();
    within("what a watch shows", seen).await.unwrap()
}

fn line(kind: &str, pod: &Pod) -> String {
    let name = pod.metadata.name.as_deref().unwrap();
    match pod.metadata.deletion_grace_period_seconds {
        Some(grace) => format!("{kind} {name} {grace}"),
        None => format!("{kind} {name}"),
    }
}

pub(crate) async fn pod_on_a_node_is_deleted_gracefully(w: &World) {
    let created: Pod = w.create(pod("p", &w.node)).await;
    let version = created.metadata.resource_version.unwrap();
    let pods: Api<Pod> = w.api(&w.admin);
    let grace_of = |deleted: Pod| deleted.metadata.deletion_grace_period_seconds;
    let delete = |grace: Option<u32>| {
        let dp = DeleteParams {
            grace_period_seconds: grace,
            ..DeleteParams::default()
        };
        let pods = pods.clone();
        async move { pods.delete("p", &dp).await.unwrap().left().unwrap() }
    };
    assert_eq!(grace_of(delete(None).await), Some(30), "that of its spec");
    assert_eq!(grace_of(delete(Some(50)).await), Some(30), "never later");
    let shorter = delete(Some(5)).await;
    assert_eq!(shorter.metadata.deletion_grace_period_seconds, Some(5));
    assert!(shorter.metadata.deletion_timestamp > shorter.metadata.creation_timestamp);
    let node: Api<Pod> = w.api(&w.node_client);
    patch_status(&node, "p", json!({ "status": { "phase": "Failed" } }))
        .await
        .unwrap();
    node.delete("p", &at_once()).await.unwrap();
    assert!(pods.get_opt("p").await.unwrap().is_none());
    assert_eq!(refusal(node.delete("p", &at_once()).await), 404);
    let seen = events(w, &WatchParams::default(), &version, 5).await;
    assert_eq!(
        seen,
        [
            "MODIFIED p 30",
            "MODIFIED p 5",
            "MODIFIED p 5",
            "MODIFIED p 0",
            "DELETED p 0"
        ]
    );
}

pub(crate) async fn pod_that_runs_nowhere_is_deleted_at_once(w: &World) {
    let pods: Api<Pod> = w.api(&w.admin);
    w.create::<Pod>(pod("unscheduled", "")).await;
    w.create::<Pod>(pod("ended", &w.node)).await;
    let node: Api<Pod> = w.api(&w.node_client);
    patch_status(
        &node,
        "ended",
        json!({ "status": { "phase": "Succeeded" } }),
    )
    .await
    .unwrap();
    for name in ["unscheduled", "ended"] {
        pods.delete(name, &DeleteParams::default()).await.unwrap();
        assert!(pods.get_opt(name).await.unwrap().is_none(), "{name}");
    }
}

pub(crate) async fn finalizer_holds_a_deleted_pod(w: &World) {
    let mut given = pod("p", &w.node);
    given["metadata"]["finalizers"] = json!(["example.com/hold"]);
    w.create::<Pod>(given).await;
    let pods: Api<Pod> = w.api(&w.admin);
    pods.delete("p", &at_once()).await.unwrap();
    let held = pods.get("p").await.unwrap();
    assert_eq!(held.metadata.deletion_grace_period_seconds, Some(0));
    let patch = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
    pods.patch("p", &PatchParams::default(), &patch)
        .await
        .unwrap();
    assert!(pods.get_opt("p").await.unwrap().is_none());
}

pub(crate) async fn watch_tells_what_enters_and_leaves_its_selection(w: &World) {
    let pods: Api<Pod> = w.api(&w.admin);
    w.create::<Pod>(pod("before", &w.node)).await;
    let list = pods.list(&ListParams::default()).await.unwrap();
    let version = list.metadata.resource_version.unwrap();
    w.create::<Pod>(pod("p", &w.node)).await;
    w.create::<Pod>(pod("elsewhere", &w.other)).await;
    for label in ["yes", "no", "yes"] {
        let patch = Patch::Merge(json!({ "metadata": { "labels": { "l": label } } }));
        pods.patch("p", &PatchParams::default(), &patch)
            .await
            .unwrap();
    }
    let node = format!("spec.nodeName={}", w.node);
    let params = WatchParams::default().fields(&node);
    let seen = events(w, &params, &version, 4).await;
    assert_eq!(seen, ["ADDED p", "MODIFIED p", "MODIFIED p", "MODIFIED p"]);
    let seen = events(w, &params.labels("l=yes"), &version, 3).await;
    assert_eq!(seen, ["ADDED p", "DELETED p", "ADDED p"]);
    let mut all = events(w, &WatchParams::default().fields(&node), "0", 2).await;
    all.sort();
    assert_eq!(
        all,
        ["ADDED before", "ADDED p"],
        "without a version: what is there"
    );
}

pub(crate) async fn watch_ends_after_its_timeout_with_a_bookmark(w: &World) {
    let pods: Api<Pod> = w.api(&w.admin);
    w.create::<Pod>(pod("p", &w.node)).await;
    // The server looks once a second whether a bookmark is due, which is so two seconds before the end.
    let params = WatchParams::default().timeout(8);
    let seen = events(w, &params, "0", usize::MAX).await;
    assert_eq!(seen.first().unwrap(), "ADDED p");
    assert_eq!(seen.last().unwrap(), "BOOKMARK");
    let bad = pods
        .list(&ListParams::default().fields("spec.nonsense=x"))
        .await;
    assert_eq!(refusal(bad), 400);
}

pub(crate) async fn list_in_pages_is_of_one_moment(w: &World) {
    let pods: Api<Pod> = w.api(&w.admin);
    for name in ["a", "b", "c"] {
        w.create::<Pod>(pod(name, &w.node)).await;
    }
    let first = pods.list(&ListParams::default().limit(2)).await.unwrap();
    let token = first.metadata.continue_.unwrap();
    pods.delete("c", &at_once()).await.unwrap();
    let params = ListParams::default().limit(2).continue_token(&token);
    let second = pods.list(&params).await.unwrap();
    assert_eq!(first.items.len(), 2);
    assert_eq!(second.items[0].metadata.name.as_deref(), Some("c"));
    assert_eq!(second.metadata.continue_.as_deref().unwrap_or_default(), "");
    assert_eq!(
        first.metadata.resource_version,
        second.metadata.resource_version
    );
}

pub(crate) async fn node_object_is_patched_by_its_node(w: &World) {
    let nodes: Api<Node> = Api::all(w.node_client.clone());
    let pp = PatchParams::default();
    let status = |patch: Value| {
        let (nodes, pp, name) = (nodes.clone(), pp.clone(), w.node.clone());
        async move {
            nodes
                .patch_status(&name, &pp, &Patch::Strategic(patch))
                .await
                .map(json_of)
        }
    };
    let first = json!({ "metadata": { "annotations": { "a": "b" } }, "status": {
        "capacity": { "cpu": "2000m", "memory": "1048576Ki" },
        "conditions": [{ "type": "Ready", "status": "True" }, { "type": "Foreign", "status": "True" }],
        "addresses": [{ "type": "InternalIP", "address": "10.0.0.1" }, { "type": "Hostname", "address": "n" }],
        "images": [{ "names": ["a"], "sizeBytes": 1 }, { "names": ["b"], "sizeBytes": 1 }],
        "volumesInUse": ["a", "b"],
    }});
    let patched = status(first).await.unwrap();
    assert_eq!(patched["metadata"]["annotations"]["a"], "b");
    assert_eq!(
        patched["status"]["capacity"],
        json!({ "cpu": "2", "memory": "1Gi" })
    );
    let second = json!({ "status": {
        "conditions": [{ "type": "Ready", "status": "False" }],
        "addresses": [{ "type": "InternalIP", "address": "10.0.0.2" }],
        "images": [{ "names": ["c"], "sizeBytes": 1 }], "volumesInUse": ["c"],
    }});
    let patched = status(second).await.unwrap();
    let status_now = &patched["status"];
    assert_eq!(status_now["conditions"].as_array().unwrap().len(), 2);
    assert_eq!(status_now["addresses"].as_array().unwrap().len(), 2);
    assert_eq!(
        status_now["images"],
        json!([{ "names": ["c"], "sizeBytes": 1 }])
    );
    assert_eq!(status_now["volumesInUse"], json!(["c"]));
    let tainted = json!({ "spec": { "taints": [{ "key": "k", "effect": "NoSchedule" }] } });
    assert_eq!(refusal(status(tainted.clone()).await), 403);
    let refused = nodes
        .patch(&w.node, &pp, &Patch::Strategic(tainted.clone()))
        .await;
    assert_eq!(refusal(refused), 403, "a node may not change its taints");
    let label = json!({ "metadata": { "labels": { "node-restriction.kubernetes.io/x": "y" } } });
    let refused = nodes.patch(&w.node, &pp, &Patch::Strategic(label)).await;
    assert_eq!(refusal(refused), 403);
    let label = json!({ "metadata": { "labels": { "kubernetes.io/os": "linux" } } });
    nodes
        .patch(&w.node, &pp, &Patch::Strategic(label))
        .await
        .unwrap();
    let admin: Api<Node> = Api::all(w.admin.clone());
    let patched = admin
        .patch(&w.node, &pp, &Patch::Strategic(tainted))
        .await
        .unwrap();
    let taints = json_of(patched)["spec"]["taints"].clone();
    let one = json!([{ "key": "k", "effect": "NoSchedule" }]);
    assert_eq!(taints, one, "taints are replaced as a whole");
}

/// Older servers do not know the field, current ones refuse the node, or what is written to it later.
pub(crate) async fn node_with_a_swap_of_nothing_is_not_kept(w: &World) {
    let nodes: Api<Node> = Api::all(w.admin.clone());
    let swap = json!({ "nodeInfo": {
        "architecture": "", "bootID": "", "containerRuntimeVersion": "", "kernelVersion": "", "kubeProxyVersion": "",
        "kubeletVersion": "", "machineID": "", "operatingSystem": "", "osImage": "", "systemUUID": "",
        "swap": { "capacity": 0 },
    }});
    let name = format!("{}-swap", w.node);
    let node = json!({ "metadata": { "name": name }, "status": swap });
    let created = nodes.create(&PostParams::default(), &object(node)).await;
    let pp = PatchParams::default();
    let label = Patch::Strategic(json!({ "metadata": { "labels": { "a": "b" } } }));
    match created {
        Ok(node) => assert_eq!(json_of(node)["status"]["nodeInfo"]["swap"], Value::Null),
        Err(_) => {
            assert_eq!(refusal(created), 422);
            let status = Patch::Strategic(json!({ "status": swap }));
            nodes.patch_status(&w.node, &pp, &status).await.unwrap();
            let labelled = nodes.patch(&w.node, &pp, &label).await;
            assert_eq!(refusal(labelled), 422, "it keeps everybody from the node");
            let healed = json!({ "status": { "nodeInfo": { "swap": null } } });
            let healed = Patch::Strategic(healed);
            nodes.patch_status(&w.node, &pp, &healed).await.unwrap();
        }
    }
    nodes.patch(&w.node, &pp, &label).await.unwrap();
}

pub(crate) async fn node_touches_nothing_of_other_nodes(w: &World) {
    w.create::<Pod>(pod("theirs", &w.other)).await;
    let pods: Api<Pod> = w.api(&w.node_client);
    let status = json!({ "status": { "phase": "Failed" } });
    assert_eq!(refusal(patch_status(&pods, "theirs", status).await), 403);
    assert_eq!(refusal(pods.delete("theirs", &at_once()).await), 403);
    let nodes: Api<Node> = Api::all(w.node_client.clone());
    let label = Patch::Strategic(json!({ "metadata": { "labels": { "a": "b" } } }));
    assert_eq!(
        refusal(nodes.patch(&w.other, &PatchParams::default(), &label).await),
        403
    );
    w.create::<Pod>(pod("mine", &w.node)).await;
    let labels = json!({ "metadata": { "labels": { "a": "b" } } });
    assert_eq!(
        refusal(patch_status(&pods, "mine", labels).await),
        403,
        "no labels by status"
    );
    let label = Patch::Strategic(json!({ "metadata": { "labels": { "a": "b" } } }));
    let refused = pods.patch("mine", &PatchParams::default(), &label).await;
    assert_eq!(
        refusal(refused),
        403,
        "only the status of a pod is the node's"
    );
}

pub(crate) async fn node_reads_only_what_its_pods_refer_to(w: &World) {
    w.create::<Secret>(json!({ "metadata": { "name": "used" }, "stringData": { "a": "b" } }))
        .await;
    w.create::<Secret>(json!({ "metadata": { "name": "unused" } }))
        .await;
    let mut given = pod("p", &w.node);
    given["spec"]["volumes"] = json!([
        { "name": "s", "secret": { "secretName": "used" } },
        { "name": "c", "configMap": { "name": "missing" } },
    ]);
    w.create::<Pod>(given).await;
    let secrets: Api<Secret> = w.api(&w.node_client);
    // A real authoriser hears of a pod a moment later.
    let reading = async {
        loop {
            match secrets.get("used").await {
                Ok(used) => break used,
                Err(kube::Error::Api(status)) if status.code == 403 => {
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
                Err(error) => panic!("{error}"),
            }
        }
    };
    let used = within("the node may read its pod's secret", reading).await;
    assert_eq!(used.data.unwrap()["a"].0, b"b");
    assert_eq!(refusal(secrets.get("unused").await), 403);
    assert_eq!(refusal(secrets.list(&ListParams::default()).await), 403);
    let one = ListParams::default().fields("metadata.name=used");
    assert_eq!(secrets.list(&one).await.unwrap().items.len(), 1);
    let maps: Api<ConfigMap> = w.api(&w.node_client);
    assert_eq!(
        refusal(maps.get("missing").await),
        404,
        "its pod refers to it"
    );
    let theirs: Api<Secret> = w.api(&w.other_client);
    assert_eq!(refusal(theirs.get("used").await), 403);
}

pub(crate) async fn node_creates_only_mirror_pods_of_its_own(w: &World) {
    let nodes: Api<Node> = Api::all(w.admin.clone());
    let uid = nodes.get(&w.node).await.unwrap().metadata.uid;
    let pods: Api<Pod> = w.api(&w.node_client);
    let mut mirror = pod("m", &w.node);
    let create = |value: &Value| {
        let (pods, pod) = (pods.clone(), object::<Pod>(value.clone()));
        async move { pods.create(&PostParams::default(), &pod).await }
    };
    assert_eq!(refusal(create(&mirror).await), 403, "no mirror pod");
    mirror["metadata"]["annotations"] = json!({ "kubernetes.io/config.mirror": "h" });
    assert_eq!(refusal(create(&mirror).await), 403, "not owned by the node");
    let owner = |uid: &str| json!([{ "apiVersion": "v1", "kind": "Node", "name": w.node, "uid": uid, "controller": true }]);
    mirror["metadata"]["ownerReferences"] = owner("other");
    assert_eq!(
        refusal(create(&mirror).await),
        403,
        "of another life of the node"
    );
    mirror["metadata"]["ownerReferences"] = owner(&uid.unwrap());
    let mut with_secret = mirror.clone();
    with_secret["spec"]["volumes"] = json!([{ "name": "s", "secret": { "secretName": "s" } }]);
    assert_eq!(
        refusal(create(&with_secret).await),
        403,
        "gives itself rights"
    );
    for (field, value) in [
        ("priority", json!(1000)),
        ("preemptionPolicy", json!("Never")),
    ] {
        let mut important = mirror.clone();
        important["spec"][field] = value;
        let refused = refusal(create(&important).await);
        assert_eq!(refused, 403, "a {field} of its own");
    }
    let mut theirs = mirror.clone();
    theirs["spec"]["nodeName"] = w.other.clone().into();
    assert_eq!(refusal(create(&theirs).await), 403, "of another node");
    create(&mirror).await.unwrap();
    pods.delete("m", &at_once()).await.unwrap();
}

pub(crate) async fn lease_is_updated_with_its_version(w: &World) {
    let leases: Api<Lease> = Api::namespaced(w.node_client.clone(), "kube-node-lease");
    let lease = |name: &str| -> Lease {
        object(json!({ "metadata": { "name": name }, "spec": {
            "holderIdentity": name, "leaseDurationSeconds": 40,
            "renewTime": "2026-01-01T00:00:00.123456Z",
        }}))
    };
    let pp = PostParams::default();
    let created = leases.create(&pp, &lease(&w.node)).await.unwrap();
    let renewed = json_of(&created)["spec"]["renewTime"].clone();
    assert_eq!(renewed, "2026-01-01T00:00:00.123456Z", "has microseconds");
    let refused = leases.replace(&w.node, &pp, &lease(&w.node)).await;
    assert_eq!(refusal(refused), 422, "without its version");
    leases.replace(&w.node, &pp, &created).await.unwrap();
    assert_eq!(refusal(leases.create(&pp, &lease(&w.node)).await), 409);
    assert_eq!(refusal(leases.create(&pp, &lease(&w.other)).await), 403);
    assert_eq!(refusal(leases.get(&w.other).await), 403);
}

pub(crate) async fn token_is_bound_to_a_pod_of_the_node(w: &World) {
    w.create::<ServiceAccount>(json!({ "metadata": { "name": "app" } }))
        .await;
    let mut given = pod("p", &w.node);
    given["spec"]["serviceAccountName"] = "app".into();
    // A newer server gives a node tokens for those audiences only that the pod names.
    let token = json!({ "serviceAccountToken": { "audience": "a", "expirationSeconds": 600, "path": "token" } });
    given["spec"]["volumes"] = json!([{ "name": "token", "projected": { "sources": [token] } }]);
    let created: Pod = w.create(given).await;
    let accounts: Api<ServiceAccount> = w.api(&w.node_client);
    let request = |seconds: i64, bound: Value| -> TokenRequest {
        object(json!({ "metadata": {}, "spec": {
            "audiences": ["a"], "expirationSeconds": seconds, "boundObjectRef": bound,
        }}))
    };
    let bound = |uid: &str| json!({ "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": uid });
    let own = bound(&created.metadata.uid.unwrap());
    let pp = PostParams::default();
    let ask = |request: TokenRequest| {
        let (accounts, pp) = (accounts.clone(), pp.clone());
        async move { accounts.create_token_request("app", &pp, &request).await }
    };
    let asking = async {
        loop {
            match ask(request(600, own.clone())).await {
                Ok(given) => break given,
                // A real authoriser hears of a pod a moment later.
                Err(kube::Error::Api(status)) if status.code == 403 => {
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
                Err(error) => panic!("{error}"),
            }
        }
    };
    let given = within("the node gets a token for its pod", asking).await;
    assert!(!given.status.unwrap().token.unwrap().is_empty());
    assert_eq!(refusal(ask(request(5, own)).await), 422);
    assert_eq!(
        refusal(ask(request(600, Value::Null)).await),
        403,
        "bound to nothing"
    );
    assert_eq!(refusal(ask(request(600, bound("other"))).await), 403);
}
