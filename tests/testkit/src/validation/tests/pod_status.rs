use serde_json::{Value, json};

use super::Table;

fn pod() -> Value {
    json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {
            "nodeName": "n1", "restartPolicy": "Always", "resourceClaims": [{"name": "gpu"}],
            "containers": [
                {"name": "main", "resources": {"requests": {"example.com/gpu": "1"}, "claims": [{"name": "gpu", "request": "r"}]}},
            ],
            "initContainers": [{"name": "init"}],
            "ephemeralContainers": [{"name": "debug"}],
        },
        "status": {
            "phase": "Running", "qosClass": "BestEffort", "observedGeneration": 1,
            "conditions": [{"type": "Ready", "status": "True"}, {"type": "example.com/Own", "status": "True"}],
            "hostIP": "192.0.2.1", "hostIPs": [{"ip": "192.0.2.1"}, {"ip": "fd00::1"}],
            "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::2"}],
            "resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "web-gpu"}],
            "containerStatuses": [{
                "name": "main", "state": {"running": {}}, "restartCount": 0,
                "user": {"linux": {"uid": 0, "gid": 0, "supplementalGroups": [0]}},
                "resources": {"requests": {"cpu": "500m"}},
                "allocatedResourcesStatus": [
                    {"name": "example.com/gpu", "resources": [{"resourceID": "0", "health": "Healthy"}]},
                    {"name": "claim:gpu/r", "resources": []},
                ],
            }],
            "initContainerStatuses": [{"name": "init", "state": {"terminated": {"exitCode": 0}}}],
        },
    })
}

fn table() -> Table {
    Table {
        path: "v1 pods status",
        old: Some(pod()),
        new: pod(),
    }
}

#[test]
fn the_status_of_a_pod() {
    table().holds(&[
        (
            "another class",
            &[("/status/qosClass", json!("Burstable"))],
            &["status.qosClass Invalid"],
        ),
        (
            "no class",
            &[("/status/qosClass", json!(null))],
            &["status.qosClass Invalid"],
        ),
        (
            "a generation",
            &[("/status/observedGeneration", json!(2))],
            &[],
        ),
        (
            "a negative generation",
            &[("/status/observedGeneration", json!(-1))],
            &["status.observedGeneration Invalid"],
        ),
        (
            "a negative generation of a condition",
            &[("/status/conditions/0/observedGeneration", json!(-1))],
            &["status.conditions[0].observedGeneration Invalid"],
        ),
        (
            "a bad condition",
            &[("/status/conditions/1/type", json!("my own"))],
            &["status.conditions[1].Type Invalid"],
        ),
        (
            "a nominated node",
            &[("/status/nominatedNodeName", json!("n1"))],
            &["status.nominatedNodeName Forbidden"],
        ),
        (
            "its end",
            &[("old/status/nominatedNodeName", json!("n1"))],
            &[],
        ),
        (
            "one that was there",
            &[
                ("old/status/nominatedNodeName", json!("n1")),
                ("/status/nominatedNodeName", json!("n1")),
            ],
            &[],
        ),
        (
            "a claim that the pod does not have",
            &[("/status/resourceClaimStatuses/0/name", json!("cpu"))],
            &["status.resourceClaimStatuses[0].name Invalid"],
        ),
        (
            "a claim twice",
            &[("/status/resourceClaimStatuses/1", json!({"name": "gpu"}))],
            &["status.resourceClaimStatuses[1].name Duplicate"],
        ),
        (
            "no claim's name",
            &[(
                "/status/resourceClaimStatuses/0/resourceClaimName",
                json!("A"),
            )],
            &["status.resourceClaimStatuses[0].resourceClaimName Invalid"],
        ),
    ]);
}

#[test]
fn addresses_of_a_pod() {
    table().holds(&[
        (
            "none",
            &[
                ("/status/podIPs", json!([])),
                ("/status/hostIPs", json!([])),
            ],
            &[],
        ),
        (
            "another address",
            &[("/status/podIPs/0/ip", json!("10.0.0.2"))],
            &[],
        ),
        (
            "two of a family",
            &[("/status/podIPs/1/ip", json!("10.0.0.2"))],
            &["status.podIPs Invalid"],
        ),
        (
            "an address twice",
            &[("/status/podIPs/1/ip", json!("10.0.0.1"))],
            &["status.podIPs Invalid"],
        ),
        (
            "no address",
            &[("/status/podIPs/0/ip", json!("ten"))],
            &["status.podIPs[0] Invalid"],
        ),
        (
            "IPv4 in IPv6 form",
            &[("/status/podIPs/1/ip", json!("::ffff:10.0.0.1"))],
            &["status.podIPs[1] Invalid"],
        ),
        (
            "what was there already",
            &[
                ("old/status/podIPs/0/ip", json!("010.0.0.1")),
                ("/status/podIPs/0/ip", json!("010.0.0.1")),
            ],
            &[],
        ),
        (
            "another host",
            &[("/status/hostIP", json!("192.0.2.2"))],
            &["status.hostIPs[0].ip Invalid"],
        ),
        (
            "no host",
            &[("/status/hostIP", json!(null))],
            &["status.hostIPs[0].ip Invalid"],
        ),
        (
            "two hosts of a family",
            &[("/status/hostIPs/1/ip", json!("192.0.2.2"))],
            &["status.hostIPs Invalid"],
        ),
        (
            "leading zeros",
            &[("/status/hostIPs/1/ip", json!("192.0.2.01"))],
            &["status.hostIPs[1] Invalid", "status.hostIPs Invalid"],
        ),
    ]);
}

#[test]
fn an_end_that_is_final_stays() {
    let ended = |code: i64| json!({"terminated": {"exitCode": code}});
    let main = "old/status/containerStatuses/0/state";
    let back = [(
        "/status/initContainerStatuses/0/state",
        json!({"waiting": {}}),
    )];
    table().holds(&[
        ("always", &[(main, ended(0))], &[]),
        (
            "never",
            &[(main, ended(1)), ("old/spec/restartPolicy", json!("Never"))],
            &["status.containerStatuses[0].state Forbidden"],
        ),
        (
            "on failure, failed",
            &[
                (main, ended(1)),
                ("old/spec/restartPolicy", json!("OnFailure")),
            ],
            &[],
        ),
        (
            "on failure, well",
            &[
                (main, ended(0)),
                ("old/spec/restartPolicy", json!("OnFailure")),
            ],
            &["status.containerStatuses[0].state Forbidden"],
        ),
        (
            "never, but it has its own policy",
            &[
                (main, ended(0)),
                ("old/spec/restartPolicy", json!("Never")),
                ("old/spec/containers/0/restartPolicy", json!("Always")),
            ],
            &[],
        ),
        (
            "its own policy is never",
            &[
                (main, ended(1)),
                ("old/spec/containers/0/restartPolicy", json!("Never")),
            ],
            &["status.containerStatuses[0].state Forbidden"],
        ),
        (
            "its own rule",
            &[
                (main, ended(3)),
                ("old/spec/containers/0/restartPolicy", json!("Never")),
                (
                    "old/spec/containers/0/restartPolicyRules",
                    json!([{"action": "Restart", "exitCodes": {"operator": "In", "values": [3]}}]),
                ),
            ],
            &[],
        ),
        (
            "another's rule for all",
            &[
                (main, ended(0)),
                ("old/spec/restartPolicy", json!("Never")),
                (
                    "old/spec/initContainers/0/restartPolicyRules",
                    json!([{"action": "RestartAllContainers"}]),
                ),
            ],
            &[],
        ),
        ("an init container", &back, &[]),
        (
            "an init container that may not",
            &[back[0].clone(), ("old/spec/restartPolicy", json!("Never"))],
            &["status.initContainerStatuses[0].state Forbidden"],
        ),
        (
            "an ephemeral one never may",
            &[
                (
                    "old/status/ephemeralContainerStatuses",
                    json!([{"name": "debug", "state": ended(1)}]),
                ),
                (
                    "/status/ephemeralContainerStatuses",
                    json!([{"name": "debug", "state": {"running": {}}}]),
                ),
            ],
            &["status.ephemeralContainerStatuses[0].state Forbidden"],
        ),
        (
            "a status that is left out",
            &[
                (main, ended(1)),
                ("old/spec/restartPolicy", json!("Never")),
                ("/status/containerStatuses", json!([])),
            ],
            &[],
        ),
    ]);
}

#[test]
fn the_status_of_a_container() {
    let health = |name: &str, units: Value| json!([{"name": name, "resources": units}]);
    const HEALTH: &str = "/status/containerStatuses/0/allocatedResourcesStatus";
    let one = |health: &str| json!([{"resourceID": "0", "health": health}]);
    table().holds(&[
        (
            "a user beyond the last",
            &[("/status/containerStatuses/0/user/linux/uid", json!(1_i64 << 31))],
            &["status.containerStatuses[0].user.linux.uid Invalid"],
        ),
        (
            "a negative group",
            &[("/status/containerStatuses/0/user/linux/gid", json!(-1))],
            &["status.containerStatuses[0].user.linux.gid Invalid"],
        ),
        (
            "a negative further group",
            &[("/status/containerStatuses/0/user/linux/supplementalGroups/0", json!(-1))],
            &["status.containerStatuses[0].user.linux.supplementalGroups[0] Invalid"],
        ),
        (
            "no quantity",
            &[("/status/containerStatuses/0/resources/requests/cpu", json!("half"))],
            &["status.containerStatuses[0].resources[cpu] Invalid"],
        ),
        (
            "devices that nobody asked for",
            &[(HEALTH, health("example.com/fpga", one("Healthy")))],
            &["status.containerStatuses[0].allocatedResourcesStatus[0].name Invalid"],
        ),
        (
            "a claim that nobody asked for",
            &[(HEALTH, health("claim:gpu", one("Unknown")))],
            &["status.containerStatuses[0].allocatedResourcesStatus[0].name Invalid"],
        ),
        (
            "another health",
            &[(HEALTH, health("example.com/gpu", one("Ill")))],
            &["status.containerStatuses[0].allocatedResourcesStatus[0].resources[0].health NotSupported"],
        ),
        (
            "a device twice",
            &[(
                HEALTH,
                health(
                    "example.com/gpu",
                    json!([{"resourceID": "0", "health": "Healthy"}, {"resourceID": "0", "health": "Healthy"}]),
                ),
            )],
            &["status.containerStatuses[0].allocatedResourcesStatus[0].resources[1].resourceID Duplicate"],
        ),
        (
            "an empty message",
            &[(HEALTH, health("example.com/gpu", json!([{"resourceID": "0", "health": "Healthy", "message": ""}])))],
            &["status.containerStatuses[0].allocatedResourcesStatus[0].resources[0].message Required"],
        ),
        (
            "devices of an ephemeral container",
            &[(
                "/status/ephemeralContainerStatuses",
                json!([{"name": "debug", "allocatedResourcesStatus": [{"name": "x"}]}]),
            )],
            &["status.ephemeralContainerStatuses[0].allocatedResourcesStatus Forbidden"],
        ),
    ]);
}
