use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::*;

fn pod(spec: Value) -> Pod {
    serde_json::from_value(json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec,
    }))
    .unwrap()
}

fn fields(spec: Value) -> Vec<String> {
    refused(&pod(spec)).into_iter().map(|r| r.field).collect()
}

/// A pod with one container that has these extra fields.
fn container(extra: Value) -> Value {
    let mut container = json!({"name": "c", "image": "i"});
    for (key, value) in extra.as_object().unwrap() {
        container[key] = value.clone();
    }
    json!({"containers": [container]})
}

#[test]
fn everything_that_is_supported_passes() {
    let spec = json!({
        "containers": [{
            "name": "c", "image": "i:1", "imagePullPolicy": "IfNotPresent",
            "command": ["sh"], "args": ["-c", "true"], "workingDir": "/",
            "env": [{"name": "A", "value": "b"}, {"name": "EMPTY"}],
            "ports": [{"containerPort": 80, "hostPort": 8080, "hostIP": "127.0.0.1", "name": "web", "protocol": "TCP"}],
            "resources": {"limits": {"cpu": "1", "memory": "64Mi"}, "requests": {"cpu": "100m"}},
            "volumeMounts": [
                {"name": "v", "mountPath": "/v", "readOnly": true, "mountPropagation": "HostToContainer"},
                {"name": "v", "mountPath": "/w", "readOnly": true, "subPath": "a/b", "recursiveReadOnly": "IfPossible"},
                {"name": "v", "mountPath": "/x", "readOnly": true, "subPathExpr": "$(A)", "recursiveReadOnly": "Enabled"},
            ],
            "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
            "securityContext": {"privileged": true, "readOnlyRootFilesystem": false, "capabilities": {"drop": []}},
            "stdin": true, "stdinOnce": true, "tty": true
        }],
        "restartPolicy": "Always", "terminationGracePeriodSeconds": 30,
        "hostNetwork": true, "hostPID": true, "hostIPC": true, "hostname": "h", "nodeName": "n",
        "tolerations": [{"operator": "Exists", "effect": "NoExecute"}],
        "priority": 2000001000, "priorityClassName": "system-node-critical",
        "schedulerName": "default-scheduler", "enableServiceLinks": true,
        "automountServiceAccountToken": false, "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["1.1.1.1"], "searches": ["x"], "options": [{"name": "ndots", "value": "2"}]},
        "securityContext": {}, "shareProcessNamespace": false, "hostUsers": true,
        "initContainers": [], "os": {"name": "linux"},
        "schedulingGroup": {"podGroupName": "g"},
        "volumes": [
            {"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {"name": "w", "emptyDir": {}},
            {"name": "x", "hostPath": {"path": "/x", "type": "DirectoryOrCreate"}}
        ]
    });
    assert_eq!(refused(&pod(spec)), []);
}

/// Example of a pod that was created with little more than an image, after an API server and its admission plugins have
/// filled it in.
#[test]
fn what_an_api_server_adds_passes() {
    let spec = json!({
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}]}}},
        "containers": [{
            "name": "c", "image": "i", "imagePullPolicy": "Always", "resources": {},
            "env": [
                {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k", "optional": true}}},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                {"name": "C", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}},
                {"name": "D", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "0"}}},
                {"name": "E", "valueFrom": {"fileKeyRef": {"volumeName": "e", "path": "env", "key": "E", "optional": true}}}
            ],
            "envFrom": [{"prefix": "P", "configMapRef": {"name": "m"}}, {"secretRef": {"name": "s", "optional": true}}],
            "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
            "volumeMounts": [{"name": "kube-api-access-x", "readOnly": true,
                "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}]
        }],
        "dnsPolicy": "ClusterFirstWithHostNet", "enableServiceLinks": true, "nodeName": "n",
        "nodeSelector": {"disk": "fast"}, "imagePullSecrets": [{"name": "s"}],
        "preemptionPolicy": "PreemptLowerPriority", "priority": 0, "priorityClassName": "mine",
        "restartPolicy": "Always", "runtimeClassName": "gvisor", "overhead": {"cpu": "250m"},
        "schedulerName": "default-scheduler",
        "securityContext": {"sysctls": [{"name": "net.ipv4.tcp_syncookies", "value": "1"}]},
        "serviceAccount": "default", "serviceAccountName": "default", "automountServiceAccountToken": true,
        "terminationGracePeriodSeconds": 30,
        "tolerations": [
            {"effect": "NoExecute", "key": "node.kubernetes.io/not-ready", "operator": "Exists", "tolerationSeconds": 300}
        ],
        "volumes": [
            {"name": "kube-api-access-x", "projected": {"defaultMode": 420, "sources": [
                {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
                {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                {"downwardAPI": {"items": [{"path": "namespace",
                    "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}]}},
                {"secret": {"name": "s"}},
                {"podCertificate": {"signerName": "a.b/c", "keyType": "ED25519", "maxExpirationSeconds": 3600,
                    "credentialBundlePath": "bundle", "keyPath": "key", "certificateChainPath": "chain",
                    "userAnnotations": {"a.b/c": "d"}}}
            ]}},
            {"name": "m", "configMap": {"name": "m", "defaultMode": 420, "optional": true}},
            {"name": "s", "secret": {"secretName": "s", "items": [{"key": "k", "path": "p", "mode": 256}]}},
            {"name": "d", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
            {"name": "claim", "persistentVolumeClaim": {"claimName": "c", "readOnly": true}},
            {"name": "inline", "csi": {"driver": "d", "volumeAttributes": {"a": "b"}, "nodePublishSecretRef": {"name": "s"}}},
            {"name": "own", "ephemeral": {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}}},
            {"name": "nfs", "nfs": {"server": "s", "path": "/", "readOnly": true}},
            {"name": "iscsi", "iscsi": {"targetPortal": "t", "iqn": "i", "lun": 1, "secretRef": {"name": "s"}}}
        ]
    });
    assert_eq!(refused(&pod(spec)), []);
}

#[test]
fn unsupported_fields_are_named() {
    let container_cases = [
        (
            json!({"resources": {"limits": {"gpus": "1"}}}),
            "resources.limits.gpus",
        ),
        (
            json!({"resources": {"requests": {"hugepages-": "1Gi"}}}),
            "resources.requests.hugepages-",
        ),
        (
            json!({"volumeMounts": [{"name": "v", "mountPath": "/v", "recursiveReadOnly": "Always"}]}),
            "volumeMounts[0].recursiveReadOnly",
        ),
        (
            json!({"lifecycle": {"preStop": {"tcpSocket": {"port": 1}}}}),
            "lifecycle.preStop.tcpSocket",
        ),
        (
            json!({"restartPolicyRules": [{"action": "Explode"}]}),
            "restartPolicyRules[0].action",
        ),
    ];
    for (extra, field) in container_cases {
        let mut spec = container(extra);
        assert_eq!(
            fields(spec.clone()),
            [format!("spec.containers[0].{field}")]
        );
        spec["initContainers"] = spec["containers"].take();
        spec["containers"] = json!([{"name": "m", "image": "i"}]);
        assert_eq!(fields(spec), [format!("spec.initContainers[0].{field}")]);
    }
    let spec_cases = [
        (
            json!({"ephemeralContainers": [{"name": "e", "resources": {"limits": {"cpu": "1"}}}]}),
            "spec.ephemeralContainers[0].resources",
        ),
        (
            json!({"ephemeralContainers": [{"name": "e", "livenessProbe": {"grpc": {"port": 1}}}]}),
            "spec.ephemeralContainers[0].livenessProbe",
        ),
        (
            json!({"resources": {"claims": [{"name": "r"}]}}),
            "spec.resources.claims",
        ),
        (
            json!({"resources": {"limits": {"ephemeral-storage": "1"}}}),
            "spec.resources.limits.ephemeral-storage",
        ),
        (
            json!({"volumes": [{"name": "v", "fc": {"lun": 1}}]}),
            "spec.volumes[0].fc",
        ),
        (
            json!({"volumes": [{"name": "v", "flexVolume": {"driver": "d"}}]}),
            "spec.volumes[0].flexVolume",
        ),
        (
            json!({"volumes": [{"name": "v", "projected": {"sources": [
                {"configMap": {"name": "c"}},
                {"podCertificate": {"signerName": "s/x", "keyType": "RSA2048", "keyPath": "k"}}]}}]}),
            "spec.volumes[0].projected.sources[1].podCertificate.keyType",
        ),
        (
            json!({"volumes": [{"name": "v", "emptyDir": {"medium": "Tape"}}]}),
            "spec.volumes[0].emptyDir.medium",
        ),
    ];
    for (extra, field) in spec_cases {
        let mut spec = container(json!({}));
        for (key, value) in extra.as_object().unwrap() {
            spec[key] = value.clone();
        }
        assert_eq!(fields(spec), [field]);
    }
}

#[test]
fn what_concerns_windows_alone_is_no_reason_to_refuse_a_pod() {
    let options = json!({"windowsOptions": {
        "gmsaCredentialSpec": "{}", "gmsaCredentialSpecName": "g", "hostProcess": true, "runAsUserName": "u",
    }});
    let mut spec = container(json!({"securityContext": options}));
    spec["initContainers"] = json!([{"name": "i", "image": "i", "securityContext": options}]);
    spec["ephemeralContainers"] = json!([{"name": "e", "image": "i", "securityContext": options}]);
    spec["securityContext"] = options;
    // Admission refuses it, by a reason of its own.
    spec["os"] = json!({"name": "windows"});
    assert_eq!(fields(spec), Vec::<String>::new());
}

#[test]
fn summary_names_fields() {
    let mounts = json!([{"name": "v", "mountPath": "/v", "recursiveReadOnly": "Always"}]);
    let refusals = refused(&pod(container(json!({"volumeMounts": mounts}))));
    assert_eq!(
        summary(&refusals),
        "not supported by this version: spec.containers[0].volumeMounts[0].recursiveReadOnly: \
         \"Always\" is not supported, only Disabled, IfPossible, Enabled"
    );
    let tape = json!([{"name": "v", "emptyDir": {"medium": "Tape"}}]);
    let mut spec = container(json!({}));
    spec["volumes"] = tape;
    assert_eq!(
        refused(&pod(spec))[0].why,
        "\"Tape\" is not supported, only Memory, HugePages, HugePages-<size>"
    );
}

#[test]
fn the_whole_life_of_a_pod_passes() {
    let probe = |handler: Value| {
        let mut probe = handler;
        probe["periodSeconds"] = json!(1);
        probe["terminationGracePeriodSeconds"] = json!(1);
        probe
    };
    let container = json!({
        "name": "c", "image": "i",
        "livenessProbe": probe(json!({"exec": {"command": ["true"]}})),
        "readinessProbe": probe(json!({"httpGet": {"port": "web", "path": "/", "scheme": "HTTPS",
            "httpHeaders": [{"name": "a", "value": "b"}]}})),
        "startupProbe": probe(json!({"grpc": {"port": 1, "service": "s"}})),
        "lifecycle": {"postStart": {"sleep": {"seconds": 1}}, "preStop": {"exec": {"command": ["x"]}}},
        "restartPolicy": "Never",
        "restartPolicyRules": [{"action": "Restart", "exitCodes": {"operator": "In", "values": [1]}}],
        "resizePolicy": [{"resourceName": "cpu", "restartPolicy": "NotRequired"}],
        "resources": {"limits": {"cpu": "1", "hugepages-2Mi": "2Mi", "ephemeral-storage": "1Gi",
            "example.com/gpu": "1", "deviceclass.resource.kubernetes.io/gpu": "1"}},
        "securityContext": {"runAsUser": 1, "runAsGroup": 1, "runAsNonRoot": true,
            "readOnlyRootFilesystem": true, "allowPrivilegeEscalation": false, "procMount": "Unmasked",
            "capabilities": {"add": ["NET_ADMIN"], "drop": ["ALL"]},
            "seccompProfile": {"type": "Localhost", "localhostProfile": "p"},
            "appArmorProfile": {"type": "RuntimeDefault"}, "seLinuxOptions": {"level": "s0"}},
    });
    let spec = json!({
        "containers": [container], "initContainers": [container],
        "ephemeralContainers": [{"name": "e", "image": "i", "targetContainerName": "c",
            "securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}],
        "activeDeadlineSeconds": 5, "shareProcessNamespace": true, "hostUsers": false,
        "setHostnameAsFQDN": true, "subdomain": "s", "hostnameOverride": "h",
        "hostAliases": [{"ip": "1.1.1.1", "hostnames": ["a"]}],
        "readinessGates": [{"conditionType": "x"}], "os": {"name": "linux"},
        "resources": {"limits": {"cpu": "1", "memory": "1Gi", "hugepages-1Gi": "1Gi"}},
        "securityContext": {"fsGroup": 0, "fsGroupChangePolicy": "OnRootMismatch", "runAsUser": 1,
            "supplementalGroups": [1], "supplementalGroupsPolicy": "Strict",
            "sysctls": [{"name": "a", "value": "b"}], "seLinuxChangePolicy": "Recursive"},
        "volumes": [{"name": "v", "image": {"reference": "r", "pullPolicy": "Always"}}],
    });
    assert_eq!(refused(&pod(spec)), []);
}

#[test]
fn a_size_limit_is_taken_on_disk_and_in_memory() {
    for medium in ["", "Memory", "HugePages", "HugePages-2Mi"] {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "a"},
            "spec": {
                "containers": [{"name": "c", "image": "i"}],
                "volumes": [{"name": "v", "emptyDir": {"medium": medium, "sizeLimit": "1Mi"}}],
            },
        }))
        .unwrap();
        assert_eq!(refused(&pod), [], "{medium}");
    }
}

#[test]
fn an_empty_wish_counts_where_being_there_is_the_wish() {
    for source in ["flocker", "flexVolume"] {
        let spec = json!({"containers": [], "volumes": [{"name": "v", source: {}}]});
        assert_eq!(fields(spec), [format!("spec.volumes[0].{source}")]);
    }
    assert_eq!(
        fields(json!({"containers": [], "resourceClaims": []})),
        [""; 0],
        "nothing is asked for"
    );
}

#[test]
fn fields_that_this_version_does_not_know_are_found_in_the_json() {
    let of = |spec: Value| {
        unknown(&json!({"metadata": {"newer": 1}, "spec": spec, "status": {"newer": 1}}))
    };
    let cases = [
        (json!({"newer": "x"}), vec!["spec.newer"]),
        (
            json!({"newer": "", "newest": [], "most": {"a": null}}),
            vec![],
        ),
        (
            json!({"containers": [{"name": "a"}, {"name": "b", "newer": {"deep": true}}]}),
            vec!["spec.containers[1].newer"],
        ),
        (
            json!({"containers": [{"securityContext": {"newer": false}}]}),
            vec!["spec.containers[0].securityContext.newer"],
        ),
        (
            json!({"volumes": [{"name": "v", "newer": {}}]}),
            vec!["spec.volumes[0].newer"],
        ),
        // Zero values, as a newer server may add them to every pod.
        (
            json!({"newer": false, "newest": 0, "most": {"enabled": false, "seconds": 0, "more": [], "name": ""}}),
            vec![],
        ),
        (
            json!({"containers": [{"name": "a", "newer": 0}], "most": {"enabled": false, "seconds": 1}}),
            vec!["spec.most"],
        ),
        (json!({"newer": [false]}), vec!["spec.newer"]),
        // Those that may be meant to restrict the pod.
        (
            json!({"hostThings": false, "most": {"maxProcesses": 0}, "automountNewer": false}),
            vec!["spec.hostThings", "spec.most", "spec.automountNewer"],
        ),
        (
            json!({"volumes": [{"name": "v", "newer": false}]}),
            vec!["spec.volumes[0].newer"],
        ),
        // Of other releases, and none of the node's business.
        (
            json!({"workloadRef": {"name": "w", "podGroup": "g"}}),
            vec![],
        ),
        // What is not acted on is not looked into, and names that users choose are no fields.
        (
            json!({"affinity": {"newer": 1}, "nodeSelector": {"newer": "1"}}),
            vec![],
        ),
        (
            json!({"containers": [{"resources": {"limits": {"newer.example/x": 1}}}]}),
            vec![],
        ),
    ];
    for (spec, expected) in cases {
        assert_eq!(of(spec.clone()), expected, "{spec}");
    }
}

#[test]
fn a_pod_of_the_api_server_is_refused_for_the_unknown_fields_that_are_kept_with_it() {
    let mut with = pod(json!({"containers": [{"name": "c", "image": "i"}]}));
    let kept = shown_unknown(&[
        "spec.newer".to_owned(),
        "spec.containers[0].newer".to_owned(),
    ]);
    let annotations = with.metadata.annotations.get_or_insert_default();
    annotations.insert(UNKNOWN_FIELDS.to_owned(), kept);
    let found: Vec<String> = refused(&with)
        .into_iter()
        .map(|refusal| refusal.field)
        .collect();
    assert_eq!(found, ["spec.newer", "spec.containers[0].newer"]);
    // A manifest with an unknown field is refused as a whole.
    let annotations = with.metadata.annotations.get_or_insert_default();
    annotations.insert("kubernetes.io/config.source".to_owned(), "file".to_owned());
    assert_eq!(refused(&with), []);
}
