use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;
use serde::de::value::{Error, StrDeserializer};
use serde::de::{DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::forward_to_deserialize_any;
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
            "volumeMounts": [{"name": "v", "mountPath": "/v", "readOnly": true, "mountPropagation": "HostToContainer"}],
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
        "volumes": [
            {"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {"name": "w", "emptyDir": {}},
            {"name": "x", "hostPath": {"path": "/x", "type": "DirectoryOrCreate"}}
        ]
    });
    assert_eq!(refused(&pod(spec)), []);
}

/// What a pod looks like that was created with little more than an image, once an API server and its
/// admission plugins have filled it in.
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
                {"name": "D", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "0"}}}
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
                {"secret": {"name": "s"}}
            ]}},
            {"name": "m", "configMap": {"name": "m", "defaultMode": 420, "optional": true}},
            {"name": "s", "secret": {"secretName": "s", "items": [{"key": "k", "path": "p", "mode": 256}]}},
            {"name": "d", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}}
        ]
    });
    assert_eq!(refused(&pod(spec)), []);
}

#[test]
fn unsupported_fields_are_named() {
    let container_cases = [
        (
            json!({"livenessProbe": {"exec": {"command": ["x"]}}}),
            "livenessProbe",
        ),
        (
            json!({"readinessProbe": {"tcpSocket": {"port": 1}}}),
            "readinessProbe",
        ),
        (
            json!({"startupProbe": {"periodSeconds": 1}}),
            "startupProbe",
        ),
        (
            json!({"lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}),
            "lifecycle",
        ),
        (
            json!({"env": [{"name": "A", "valueFrom": {"fileKeyRef": {"key": "k", "path": "p", "volumeName": "v"}}}]}),
            "env[0].valueFrom.fileKeyRef",
        ),
        (
            json!({"resources": {"limits": {"nvidia.com/gpu": "1"}}}),
            "resources.limits.nvidia.com/gpu",
        ),
        (
            json!({"resources": {"requests": {"ephemeral-storage": "1Gi"}}}),
            "resources.requests.ephemeral-storage",
        ),
        (
            json!({"resources": {"claims": [{"name": "c"}]}}),
            "resources.claims",
        ),
        (
            json!({"volumeMounts": [{"name": "v", "mountPath": "/v", "subPath": "s"}]}),
            "volumeMounts[0].subPath",
        ),
        (
            json!({"volumeMounts": [{"name": "v", "mountPath": "/v", "recursiveReadOnly": "Enabled"}]}),
            "volumeMounts[0].recursiveReadOnly",
        ),
        (
            json!({"securityContext": {"runAsUser": 0}}),
            "securityContext.runAsUser",
        ),
        (
            json!({"securityContext": {"allowPrivilegeEscalation": false}}),
            "securityContext.allowPrivilegeEscalation",
        ),
        (
            json!({"securityContext": {"readOnlyRootFilesystem": true}}),
            "securityContext.readOnlyRootFilesystem",
        ),
        (
            json!({"securityContext": {"capabilities": {"add": ["NET_ADMIN"]}}}),
            "securityContext.capabilities",
        ),
        (json!({"restartPolicy": "Always"}), "restartPolicy"),
        (
            json!({"resizePolicy": [{"resourceName": "cpu", "restartPolicy": "NotRequired"}]}),
            "resizePolicy",
        ),
        (
            json!({"volumeDevices": [{"name": "v", "devicePath": "/d"}]}),
            "volumeDevices",
        ),
    ];
    for (extra, field) in container_cases {
        assert_eq!(
            fields(container(extra)),
            [format!("spec.containers[0].{field}")]
        );
    }
    let spec_cases = [
        (
            json!({"initContainers": [{"name": "i"}]}),
            "spec.initContainers",
        ),
        (
            json!({"ephemeralContainers": [{"name": "e"}]}),
            "spec.ephemeralContainers",
        ),
        (
            json!({"activeDeadlineSeconds": 5}),
            "spec.activeDeadlineSeconds",
        ),
        (
            json!({"shareProcessNamespace": true}),
            "spec.shareProcessNamespace",
        ),
        (
            json!({"resourceClaims": [{"name": "r"}]}),
            "spec.resourceClaims",
        ),
        (
            json!({"resources": {"limits": {"cpu": "1"}}}),
            "spec.resources",
        ),
        (json!({"setHostnameAsFQDN": true}), "spec.setHostnameAsFQDN"),
        (json!({"subdomain": "s"}), "spec.subdomain"),
        (
            json!({"hostAliases": [{"ip": "1.1.1.1"}]}),
            "spec.hostAliases",
        ),
        (json!({"hostUsers": false}), "spec.hostUsers"),
        (json!({"os": {"name": "windows"}}), "spec.os.name"),
        (
            json!({"readinessGates": [{"conditionType": "x"}]}),
            "spec.readinessGates",
        ),
        (
            json!({"securityContext": {"fsGroup": 0}}),
            "spec.securityContext.fsGroup",
        ),
        (
            json!({"volumes": [{"name": "v", "projected": {"sources": [
                {"configMap": {"name": "c"}}, {"clusterTrustBundle": {"path": "p"}}]}}]}),
            "spec.volumes[0].projected.sources[1].clusterTrustBundle",
        ),
        (
            json!({"volumes": [{"name": "v", "nfs": {"server": "s", "path": "/"}}]}),
            "spec.volumes[0].nfs",
        ),
        (
            json!({"volumes": [{"name": "v", "emptyDir": {"medium": "HugePages"}}]}),
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
fn every_field_of_the_api_is_either_listed_or_refused() {
    let everything = Pod::deserialize(Everything).unwrap();
    let refusals = refused(&everything);
    let mut leaves = Vec::new();
    collect(&serde_json::to_value(&everything).unwrap(), "", &mut leaves);
    assert!(leaves.len() > 500, "only {} leaves", leaves.len());
    for leaf in &leaves {
        let pattern = leaf.replace("[0]", "[]");
        let listed = RULES.iter().any(|(path, rule)| match rule {
            Any => {
                pattern == *path
                    || pattern.starts_with(&format!("{path}."))
                    || pattern.starts_with(&format!("{path}["))
            }
            Flag(allowed) => pattern == *path && *allowed,
            Text(_) | Inside => false,
        });
        let refused = refusals.iter().any(|r| {
            leaf == &r.field
                || leaf.starts_with(&format!("{}.", r.field))
                || leaf.starts_with(&format!("{}[", r.field))
        });
        assert!(
            listed != refused,
            "{leaf}: listed {listed}, refused {refused}"
        );
    }
}

#[test]
fn every_rule_names_a_field_of_the_api() {
    let everything = serde_json::to_value(Pod::deserialize(Everything).unwrap()).unwrap();
    let mut known = BTreeSet::new();
    nodes(&everything, "", &mut known);
    for (path, _) in RULES {
        if path.contains(".limits.") || path.contains(".requests.") {
            continue;
        }
        assert!(known.contains(*path), "{path} is not a field of Pod");
    }
}

#[test]
fn summary_names_fields() {
    let refusals = refused(&pod(container(
        json!({"lifecycle": {"stopSignal": "SIGTERM"}}),
    )));
    assert_eq!(
        summary(&refusals),
        "not supported by this version: spec.containers[0].lifecycle: is not supported"
    );
}

fn collect(value: &Value, path: &str, leaves: &mut Vec<String>) {
    match value {
        Value::Object(members) => members
            .iter()
            .for_each(|(k, v)| collect(v, &join(path, k), leaves)),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .for_each(|(i, v)| collect(v, &format!("{path}[{i}]"), leaves)),
        _ => leaves.push(path.to_owned()),
    }
}

fn nodes(value: &Value, path: &str, known: &mut BTreeSet<String>) {
    known.insert(path.to_owned());
    match value {
        Value::Object(members) => members
            .iter()
            .for_each(|(k, v)| nodes(v, &join(path, k), known)),
        Value::Array(items) => items
            .iter()
            .for_each(|v| nodes(v, &format!("{path}[]"), known)),
        _ => {}
    }
}

/// Answers every question of a deserialiser, so that the value it makes has every field set.
#[derive(Clone, Copy)]
struct Everything;

impl<'de> Deserializer<'de> for Everything {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_str("1")
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_bool(true)
    }

    fn deserialize_i32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_i32(1)
    }

    fn deserialize_i64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_i64(1)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        if name == "Time" || name == "MicroTime" {
            return visitor.visit_newtype_struct(StrDeserializer::new("2026-01-01T00:00:00Z"));
        }
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_seq(One(true))
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_map(All(["key"].iter(), "Map"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_map(All(fields.iter(), name))
    }

    forward_to_deserialize_any! {
        i8 i16 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        tuple tuple_struct enum identifier ignored_any
    }
}

struct One(bool);

impl<'de> SeqAccess<'de> for One {
    type Error = Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Error> {
        if std::mem::take(&mut self.0) {
            seed.deserialize(Everything).map(Some)
        } else {
            Ok(None)
        }
    }
}

struct All(std::slice::Iter<'static, &'static str>, &'static str);

impl<'de> MapAccess<'de> for All {
    type Error = Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Error> {
        let skipped = ["apiVersion", "kind"];
        let next = self.0.find(|f| self.1 != "Pod" || !skipped.contains(f));
        match next {
            Some(field) => {
                let field: StrDeserializer<'_, Error> = (*field).into_deserializer();
                seed.deserialize(field).map(Some)
            }
            None => Ok(None),
        }
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Error> {
        seed.deserialize(Everything)
    }
}

#[test]
fn a_size_limit_is_taken_on_disk_and_in_memory() {
    for medium in ["", "Memory"] {
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
