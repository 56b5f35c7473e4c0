use serde_json::{Value, json};

use super::Table;

/// A mirror pod as a server has it, with its defaults.
fn mirror() -> Value {
    json!({
        "metadata": {
            "name": "web-n1", "namespace": "default",
            "annotations": {"kubernetes.io/config.mirror": "h", "kubernetes.io/config.source": "file"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u", "controller": true}],
        },
        "spec": {
            "nodeName": "n1", "restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "terminationGracePeriodSeconds": 30,
            "hostname": "web", "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a.example.com"]}],
            "tolerations": [{"operator": "Exists", "effect": "NoExecute"}],
            "volumes": [
                {"name": "dir", "emptyDir": {}},
                {"name": "host", "hostPath": {"path": "/var", "type": "Directory"}},
            ],
            "containers": [{
                "name": "main", "image": "busybox:1", "imagePullPolicy": "IfNotPresent",
                "terminationMessagePolicy": "File",
                "ports": [{"name": "http", "containerPort": 80, "hostPort": 8080, "protocol": "TCP"}],
                "env": [{"name": "A", "value": "b"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
                "volumeMounts": [{"name": "dir", "mountPath": "/a"}, {"name": "host", "mountPath": "/b", "subPath": "c/d"}],
                "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}},
                "readinessProbe": {"httpGet": {"port": 80}, "successThreshold": 2},
                "securityContext": {"runAsUser": 0},
            }],
            "initContainers": [{
                "name": "init", "image": "busybox:1", "imagePullPolicy": "IfNotPresent", "terminationMessagePolicy": "File",
            }],
        },
    })
}

fn table() -> Table {
    Table {
        path: "v1 pods",
        old: None,
        new: mirror(),
    }
}

#[test]
fn the_spec_of_a_pod_that_is_made() {
    table().holds(&[
        (
            "a bad name",
            &[("/metadata/name", json!("web_n1"))],
            &["metadata.name Invalid"],
        ),
        (
            "a bad node",
            &[("/spec/nodeName", json!("N"))],
            &["spec.nodeName Invalid"],
        ),
        (
            "gates",
            &[("/spec/schedulingGates", json!([{"name": "a"}]))],
            &["spec.nodeName Forbidden"],
        ),
        (
            "ephemeral containers",
            &[("/spec/ephemeralContainers", json!([{"name": "debug"}]))],
            &["spec.ephemeralContainers Forbidden"],
        ),
        (
            "another policy",
            &[("/spec/restartPolicy", json!("Sometimes"))],
            &["spec.restartPolicy NotSupported"],
        ),
        (
            "no policy",
            &[("/spec/restartPolicy", json!(null))],
            &["spec.restartPolicy Required"],
        ),
        (
            "another DNS",
            &[("/spec/dnsPolicy", json!("Mine"))],
            &["spec.dnsPolicy NotSupported"],
        ),
        (
            "DNS of nobody",
            &[("/spec/dnsPolicy", json!("None"))],
            &["spec.dnsConfig.nameservers Required"],
        ),
        (
            "DNS of its own",
            &[
                ("/spec/dnsPolicy", json!("None")),
                ("/spec/dnsConfig", json!({"nameservers": ["10.0.0.10"]})),
            ],
            &[],
        ),
        (
            "search paths",
            &[(
                "/spec/dnsConfig",
                json!({"searches": ["a.example.com", "_a.b.", "."]}),
            )],
            &[],
        ),
        (
            "no search path",
            &[("/spec/dnsConfig", json!({"searches": ["a b"]}))],
            &["spec.dnsConfig.searches[0] Invalid"],
        ),
        (
            "no server's address",
            &[(
                "/spec/dnsConfig",
                json!({"nameservers": ["dns"], "options": [{"value": "1"}]}),
            )],
            &[
                "spec.dnsConfig.nameservers[0] Invalid",
                "spec.dnsConfig.options[0] Required",
            ],
        ),
        (
            "no grace",
            &[("/spec/terminationGracePeriodSeconds", json!(null))],
            &["spec.terminationGracePeriodSeconds Required"],
        ),
        (
            "a deadline of nothing",
            &[("/spec/activeDeadlineSeconds", json!(0))],
            &["spec.activeDeadlineSeconds Invalid"],
        ),
        (
            "a deadline",
            &[("/spec/activeDeadlineSeconds", json!(1))],
            &[],
        ),
        (
            "a bad host name",
            &[("/spec/hostname", json!("a.b"))],
            &["spec.hostname Invalid"],
        ),
        (
            "a bad alias",
            &[("/spec/hostAliases/0/ip", json!("::ffff:10.0.0.1"))],
            &["spec.hostAliases[0].ip Invalid"],
        ),
        (
            "a bad selector",
            &[("/spec/nodeSelector", json!({"a": "b c"}))],
            &["spec.nodeSelector Invalid"],
        ),
        (
            "a bad gate",
            &[("/spec/readinessGates", json!([{"conditionType": "a b"}]))],
            &["spec.readinessGates[0].conditionType Invalid"],
        ),
        (
            "a toleration of any key for a value",
            &[("/spec/tolerations/0/operator", json!("Equal"))],
            &["spec.tolerations[0].operator Invalid"],
        ),
        (
            "a toleration of any value with one",
            &[("/spec/tolerations/0/value", json!("b"))],
            &["spec.tolerations[0].operator Invalid"],
        ),
        (
            "a toleration for a while",
            &[
                ("/spec/tolerations/0/tolerationSeconds", json!(5)),
                ("/spec/tolerations/0/effect", json!("NoSchedule")),
            ],
            &["spec.tolerations[0].effect Invalid"],
        ),
        (
            "a toleration of another operator",
            &[(
                "/spec/tolerations/0",
                json!({"key": "a", "operator": "Like", "effect": "Never"}),
            )],
            &[
                "spec.tolerations[0].operator NotSupported",
                "spec.tolerations[0].effect NotSupported",
            ],
        ),
        (
            "a bad group",
            &[("/spec/securityContext", json!({"fsGroup": -1}))],
            &["spec.securityContext.fsGroup Invalid"],
        ),
        (
            "a bad further group",
            &[(
                "/spec/securityContext",
                json!({"supplementalGroups": [1, -1]}),
            )],
            &["spec.securityContext.supplementalGroups[1] Invalid"],
        ),
        (
            "processes of the host and of its own",
            &[
                ("/spec/hostPID", json!(true)),
                ("/spec/shareProcessNamespace", json!(true)),
            ],
            &["spec.shareProcessNamespace Invalid"],
        ),
        (
            "users of its own and processes of the host",
            &[
                ("/spec/hostPID", json!(true)),
                ("/spec/hostUsers", json!(false)),
            ],
            &["spec.HostPID Forbidden"],
        ),
        (
            "another system",
            &[("/spec/os", json!({"name": "plan9"}))],
            &["spec.os.name NotSupported"],
        ),
        (
            "for Linux, with options of Windows",
            &[
                ("/spec/os", json!({"name": "linux"})),
                ("/spec/securityContext", json!({"windowsOptions": {}})),
            ],
            &["spec.securityContext.windowsOptions Forbidden"],
        ),
        (
            "for no system, with options of Windows",
            &[("/spec/securityContext", json!({"windowsOptions": {}}))],
            &[],
        ),
    ]);
}

#[test]
fn the_volumes_of_a_pod_that_is_made() {
    table().holds(&[
        (
            "a bad name",
            &[
                ("/spec/volumes/1/name", json!("a.b")),
                ("/spec/containers/0/volumeMounts/1/name", json!("a.b")),
            ],
            &["spec.volumes[1].name Invalid"],
        ),
        (
            "a name twice",
            &[("/spec/volumes/2", json!({"name": "dir", "emptyDir": {}}))],
            &["spec.volumes[2].name Duplicate"],
        ),
        (
            "no source",
            &[("/spec/volumes/0/emptyDir", json!(null))],
            &["spec.volumes[0] Required"],
        ),
        (
            "two sources",
            &[("/spec/volumes/1/emptyDir", json!({}))],
            &["spec.volumes[1] Forbidden"],
        ),
        (
            "no path",
            &[("/spec/volumes/1/hostPath/path", json!(""))],
            &["spec.volumes[1].hostPath.path Required"],
        ),
        (
            "a path upwards",
            &[("/spec/volumes/1/hostPath/path", json!("/a/.."))],
            &["spec.volumes[1].hostPath.path Invalid"],
        ),
        (
            "another type",
            &[("/spec/volumes/1/hostPath/type", json!("Door"))],
            &["spec.volumes[1].hostPath.type NotSupported"],
        ),
        (
            "no image",
            &[("/spec/volumes/2", json!({"name": "image", "image": {}}))],
            &["spec.volumes[2].image.reference Required"],
        ),
    ]);
}

#[test]
fn the_containers_of_a_pod_that_is_made() {
    let main = mirror()["spec"]["containers"][0].clone();
    let mut second = main.clone();
    second["name"] = json!("second");
    table().holds(&[
        ("no containers", &[("/spec/containers", json!([]))], &["spec.containers Required"]),
        ("no name", &[("/spec/containers/0/name", json!(null))], &["spec.containers[0].name Required"]),
        ("a bad name", &[("/spec/containers/0/name", json!("a.b"))], &["spec.containers[0].name Invalid"]),
        ("a name twice", &[("/spec/initContainers/0/name", json!("main"))], &["spec.initContainers[0].name Duplicate"]),
        ("a port of the host twice", &[("/spec/containers/1", second)], &["spec.containers[1].ports[0].hostPort Duplicate"]),
        ("no image", &[("/spec/containers/0/image", json!(""))], &["spec.containers[0].image Required"]),
        ("an image with a space", &[("/spec/containers/0/image", json!("a "))], &["spec.containers[0].image Invalid"]),
        ("another pull policy", &[("/spec/containers/0/imagePullPolicy", json!("Ever"))], &["spec.containers[0].imagePullPolicy NotSupported"]),
        (
            "no message policy",
            &[("/spec/containers/0/terminationMessagePolicy", json!(null))],
            &["spec.containers[0].terminationMessagePolicy Required"],
        ),
        ("a bad port name", &[("/spec/containers/0/ports/0/name", json!("a--b"))], &["spec.containers[0].ports[0].name Invalid"]),
        (
            "a port name twice",
            &[("/spec/containers/0/ports/1", json!({"name": "http", "containerPort": 81, "protocol": "TCP"}))],
            &["spec.containers[0].ports[1].name Duplicate"],
        ),
        ("no port", &[("/spec/containers/0/ports/0/containerPort", json!(0))], &["spec.containers[0].ports[0].containerPort Required"]),
        ("no port of a host", &[("/spec/containers/0/ports/0/hostPort", json!(65536))], &["spec.containers[0].ports[0].hostPort Invalid"]),
        ("another protocol", &[("/spec/containers/0/ports/0/protocol", json!("IPX"))], &["spec.containers[0].ports[0].protocol NotSupported"]),
        (
            "another port of the host's network",
            &[("/spec/hostNetwork", json!(true))],
            &["spec.containers[0].ports[0].containerPort Invalid"],
        ),
        ("no variable's name", &[("/spec/containers/0/env/0/name", json!("a=b"))], &["spec.containers[0].env[0].name Invalid"]),
        ("a variable's name", &[("/spec/containers/0/env/0/name", json!("1 a"))], &[]),
        ("a value beside a source", &[("/spec/containers/0/env/1/value", json!("x"))], &["spec.containers[0].env[1].valueFrom Invalid"]),
        (
            "no source of a value",
            &[("/spec/containers/0/env/1/valueFrom", json!({}))],
            &["spec.containers[0].env[1].valueFrom Invalid"],
        ),
        ("no such volume", &[("/spec/containers/0/volumeMounts/0/name", json!("x"))], &["spec.containers[0].volumeMounts[0].name Invalid"]),
        ("no mount's path", &[("/spec/containers/0/volumeMounts/0/mountPath", json!(""))], &["spec.containers[0].volumeMounts[0].mountPath Required"]),
        ("a path twice", &[("/spec/containers/0/volumeMounts/1/mountPath", json!("/a"))], &["spec.containers[0].volumeMounts[1].mountPath Invalid"]),
        ("a path upwards", &[("/spec/containers/0/volumeMounts/1/subPath", json!("../a"))], &["spec.containers[0].volumeMounts[1].subPath Invalid"]),
        (
            "two paths below",
            &[("/spec/containers/0/volumeMounts/1/subPathExpr", json!("a"))],
            &["spec.containers[0].volumeMounts[1].subPathExpr Invalid"],
        ),
        ("more than its limit", &[("/spec/containers/0/resources/requests/cpu", json!("2"))], &["spec.containers[0].resources.requests Invalid"]),
        ("no quantity", &[("/spec/containers/0/resources/limits/cpu", json!("x"))], &["spec.containers[0].resources.limits[cpu] Invalid"]),
        (
            "a device without a limit",
            &[("/spec/containers/0/resources/requests/example.com~1gpu", json!("1"))],
            &["spec.containers[0].resources.limits Required"],
        ),
        ("no probe", &[("/spec/containers/0/livenessProbe", json!({}))], &["spec.containers[0].livenessProbe Required"]),
        (
            "two probes",
            &[("/spec/containers/0/readinessProbe/exec", json!({"command": ["true"]}))],
            &["spec.containers[0].readinessProbe Forbidden"],
        ),
        (
            "two successes of a liveness probe",
            &[("/spec/containers/0/livenessProbe", json!({"tcpSocket": {"port": 1}, "successThreshold": 2}))],
            &["spec.containers[0].livenessProbe.successThreshold Invalid"],
        ),
        (
            "a grace of readiness",
            &[("/spec/containers/0/readinessProbe/terminationGracePeriodSeconds", json!(5))],
            &["spec.containers[0].readinessProbe.terminationGracePeriodSeconds Invalid"],
        ),
        (
            "a negative period",
            &[("/spec/containers/0/readinessProbe/periodSeconds", json!(-1))],
            &["spec.containers[0].readinessProbe.periodSeconds Invalid"],
        ),
        ("a bad user", &[("/spec/containers/0/securityContext/runAsUser", json!(-1))], &["spec.containers[0].securityContext.runAsUser Invalid"]),
        (
            "privileged without privileges",
            &[("/spec/containers/0/securityContext", json!({"privileged": true, "allowPrivilegeEscalation": false}))],
            &["spec.containers[0].securityContext Invalid"],
        ),
        (
            "a probe of an init container",
            &[("/spec/initContainers/0/livenessProbe", json!({"tcpSocket": {"port": 1}}))],
            &["spec.initContainers[0].livenessProbe Forbidden"],
        ),
        (
            "a probe of a sidecar",
            &[
                ("/spec/initContainers/0/livenessProbe", json!({"tcpSocket": {"port": 1}})),
                ("/spec/initContainers/0/restartPolicy", json!("Always")),
            ],
            &[],
        ),
        (
            "rules without a policy",
            &[("/spec/containers/0/restartPolicyRules", json!([{"action": "Restart", "exitCodes": {"operator": "In"}}]))],
            &["spec.containers[0].restartPolicy Required"],
        ),
        (
            "rules that say nothing",
            &[
                ("/spec/containers/0/restartPolicy", json!("Never")),
                ("/spec/containers/0/restartPolicyRules", json!([{"action": "Stop"}, {"action": "Restart", "exitCodes": {"operator": "Is"}}])),
            ],
            &[
                "spec.containers[0].restartPolicyRules[0].action NotSupported",
                "spec.containers[0].restartPolicyRules[0].exitCodes Required",
                "spec.containers[0].restartPolicyRules[1].exitCodes.operator NotSupported",
            ],
        ),
        ("another policy", &[("/spec/containers/0/restartPolicy", json!("Ever"))], &["spec.containers[0].restartPolicy NotSupported"]),
    ]);
}
