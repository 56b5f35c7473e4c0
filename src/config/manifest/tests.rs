mod validation;

use std::fmt::Write as _;
use std::time::Duration;

use super::*;
use crate::types::PodExt;
use crate::types::pod::{CONFIG_HASH, CONFIG_SEEN, CONFIG_SOURCE};

const SEEN: &str = "2026-01-01T00:00:00Z";

const GOOD: &str = "\
apiVersion: v1
kind: Pod
metadata:
  name: web
spec:
  containers:
  - name: main
    image: holdfast.local/busybox:1
    command: [sh, -c, sleep 1000]
";

fn file() -> StaticOrigin<'static> {
    StaticOrigin {
        source: PodSource::File,
        location: "/etc/manifests/web.yaml",
        node_name: "Node-1",
    }
}

fn url() -> StaticOrigin<'static> {
    StaticOrigin {
        source: PodSource::Http,
        location: "http://example/pods",
        node_name: "node-1",
    }
}

fn one(text: &str) -> Pod {
    let mut pods = read(text.as_bytes(), &file(), SEEN).unwrap();
    assert_eq!(pods.len(), 1);
    pods.remove(0)
}

fn error(text: &str) -> String {
    read(text.as_bytes(), &file(), SEEN)
        .expect_err(text)
        .to_string()
}

/// `GOOD` with `extra` lines added to the container, at its indentation.
fn container(extra: &str) -> String {
    let mut text = GOOD.to_owned();
    for line in extra.lines() {
        writeln!(text, "    {line}").unwrap();
    }
    text
}

/// `GOOD` with `extra` lines added to the spec.
fn spec(extra: &str) -> String {
    let mut text = GOOD.to_owned();
    for line in extra.lines() {
        writeln!(text, "  {line}").unwrap();
    }
    text
}

#[track_caller]
fn assert_says(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{part:?} is missing in: {error}");
    }
}

#[test]
fn static_pod_gets_its_identity() {
    let pod = one(GOOD);
    assert_eq!(pod.name(), "web-node-1");
    assert_eq!(pod.namespace(), "default");
    assert_eq!(pod.source(), PodSource::File);
    assert_eq!(pod.annotation(CONFIG_SOURCE), Some("file"));
    assert_eq!(pod.annotation(CONFIG_SEEN), Some(SEEN));
    assert_eq!(pod.annotation(CONFIG_HASH), Some(pod.uid().as_str()));
    assert_eq!(pod.spec_ref().node_name.as_deref(), Some("Node-1"));
    let status = pod.status.as_ref().unwrap();
    assert_eq!(status.phase.as_deref(), Some("Pending"));
    let tolerations = pod.spec_ref().tolerations.as_ref().unwrap();
    assert_eq!(tolerations[0].effect.as_deref(), Some("NoExecute"));
    assert_eq!(tolerations[0].operator.as_deref(), Some("Exists"));
    let from_url = read(GOOD.as_bytes(), &url(), SEEN).unwrap().remove(0);
    assert_eq!(from_url.spec_ref().tolerations, None);
}

#[test]
fn a_wrong_number_is_refused_in_plain_words() {
    let range = "expected a whole number from -2147483648 to 2147483647";
    for value in ["99999999999", "1.5", "high"] {
        let text = spec(&format!("priority: {value}"));
        assert_says(&error(&text), &["spec.priority", range]);
    }
    let text = spec("hostNetwork: 1");
    assert_says(
        &error(&text),
        &["spec.hostNetwork", "expected true or false"],
    );
}

#[test]
fn uid_is_the_same_in_every_version() {
    assert_eq!(one(GOOD).uid().as_str(), "b3a7205d60b03f8a866861c28363ca57");
}

#[test]
fn uid_depends_on_content_and_place_but_not_on_spelling() {
    let reordered = "\
# a comment
kind: Pod
spec:
  containers:
  - command: ['sh', \"-c\", sleep 1000]
    image: holdfast.local/busybox:1
    name: main
metadata: {name: web}
apiVersion: v1
status: {phase: Running}
";
    assert_eq!(one(GOOD).uid(), one(reordered).uid());
    let json = serde_json::json!({
        "spec": {"containers": [{"image": "holdfast.local/busybox:1", "name": "main", "command": ["sh", "-c", "sleep 1000"]}]},
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"},
    });
    assert_eq!(one(GOOD).uid(), one(&json.to_string()).uid());
    assert_ne!(one(GOOD).uid(), one(&GOOD.replace("1000", "1001")).uid());
    let elsewhere = StaticOrigin {
        location: "/etc/manifests/other.yaml",
        ..file()
    };
    let moved = read(GOOD.as_bytes(), &elsewhere, SEEN).unwrap().remove(0);
    assert_ne!(one(GOOD).uid(), moved.uid());
    let other_node = StaticOrigin {
        node_name: "node-2",
        ..file()
    };
    let other = read(GOOD.as_bytes(), &other_node, SEEN).unwrap().remove(0);
    assert_ne!(one(GOOD).uid(), other.uid());
}

#[test]
fn uid_of_the_manifest_is_kept() {
    let pod = one(&GOOD.replace("name: web", "name: web\n  uid: abc-1"));
    assert_eq!(pod.uid().as_str(), "abc-1");
    let bad = error(&GOOD.replace("name: web", "name: web\n  uid: ../../etc"));
    assert_says(&bad, &["line 5", "metadata.uid"]);
}

#[test]
fn defaults_of_the_api_server_are_set() {
    let pod = one(&(container(
        "ports:\n- containerPort: 80\nresources:\n  limits: {cpu: 1, memory: 64Mi}",
    ) + "  volumes:\n  - name: v\n"));
    let spec = pod.spec_ref();
    assert_eq!(spec.restart_policy.as_deref(), Some("Always"));
    assert_eq!(spec.dns_policy.as_deref(), Some("ClusterFirst"));
    assert_eq!(spec.termination_grace_period_seconds, Some(30));
    assert_eq!(spec.scheduler_name.as_deref(), Some("default-scheduler"));
    assert_eq!(spec.enable_service_links, Some(true));
    let container = &spec.containers[0];
    assert_eq!(container.image_pull_policy.as_deref(), Some("IfNotPresent"));
    assert_eq!(
        container.termination_message_path.as_deref(),
        Some("/dev/termination-log")
    );
    assert_eq!(
        container.termination_message_policy.as_deref(),
        Some("File")
    );
    let port = &container.ports.as_ref().unwrap()[0];
    assert_eq!(port.protocol.as_deref(), Some("TCP"));
    let requests = container
        .resources
        .as_ref()
        .unwrap()
        .requests
        .as_ref()
        .unwrap();
    assert_eq!(requests["cpu"].0, "1");
    assert_eq!(requests["memory"].0, "64Mi");
    assert!(spec.volumes.as_ref().unwrap()[0].empty_dir.is_some());
    assert_eq!(crate::core::supported::refused(&pod), []);
}

#[test]
fn critical_class_gets_its_priority() {
    let pod = one(&spec("priorityClassName: system-node-critical"));
    assert_eq!(pod.spec_ref().priority, Some(2_000_001_000));
    let bad = error(&spec("priorityClassName: mine"));
    assert_says(&bad, &["spec.priorityClassName", "PriorityClass"]);
}

#[test]
fn empty_manifest() {
    for text in ["", "  \n\n", "# only a comment\n", "---\n", "null\n"] {
        assert_says(&error(text), &["empty", "v1 Pod"]);
    }
}

#[test]
fn too_large_manifest() {
    let mut text = GOOD.to_owned();
    text.push_str(&"# padding\n".repeat(1_150_000));
    assert!(text.len() > 11_000_000);
    assert_says(&error(&text), &["10 MB cap"]);
}

#[test]
fn yaml_bomb_is_refused_quickly() {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..12 {
        let before = level - 1;
        let refs = vec![format!("*a{before}"); 10].join(", ");
        writeln!(text, "a{level}: &a{level} [{refs}]").unwrap();
    }
    let started = tokio::time::Instant::now();
    assert_says(&error(&text), &["line ", "expands beyond"]);
    assert!(started.elapsed().as_secs() < 5);

    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    assert_says(&error(&deep), &["line 1", "expands beyond"]);
    let circle = "apiVersion: v1\nkind: Pod\nmetadata: &m {name: p, labels: *m}\n";
    assert_says(&error(circle), &["line 3", "expands beyond"]);
}

#[test]
fn duplicate_keys_are_errors_with_a_place() {
    let text = GOOD.replace("  name: web\n", "  name: web\n  name: other\n");
    assert_eq!(
        error(&text),
        "line 5, column 3: name: duplicate key; keep one of the two"
    );
    let json = r#"{"apiVersion":"v1","kind":"Pod","kind":"Pod"}"#;
    assert_says(&error(json), &["line 1", "duplicate", "kind"]);
    let escaped = r#"{"apiVersion":"v1","kind":"Pod","kind":"\ud83d\ude00"}"#;
    assert_says(&error(escaped), &["line 1"]);
}

#[test]
fn many_keys_are_read_in_linear_time() {
    use nix::time::{ClockId, clock_gettime};

    let seconds = |text: &str| {
        // Of this thread: whatever else the machine does counts for nothing.
        let now = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap();
        let begin = now();
        Tree::parse(text).unwrap();
        let took = now() - begin;
        Duration::from(took).as_secs_f64()
    };
    let (mut together, mut apart) = ("keys:\n".to_owned(), String::new());
    for key in 0..40_000 {
        if key % 100 == 0 {
            writeln!(apart, "map-{key}:").unwrap();
        }
        writeln!(apart, "  key-{key}: v").unwrap();
        writeln!(together, "  key-{key}: v").unwrap();
    }
    let (together, apart) = (seconds(&together), seconds(&apart));
    assert!(together < 4.0 * apart, "{together} s, {apart} s");
}

#[test]
fn only_problems_that_are_shown_are_looked_up_in_the_document() {
    let mut text = GOOD.replace("  name: web\n", "  name: web\n  labels:\n");
    let at = text.find("spec:").unwrap();
    // No label begins with a dash.
    let labels: String = (0..40).map(|key| format!("    -{key}: v\n")).collect();
    text.insert_str(at, &labels);
    assert_says(
        &error(&text),
        &["line 6", "metadata.labels[-0]", "and 32 more"],
    );
    let Err(ManifestError::Invalid(problems)) = read(text.as_bytes(), &file(), SEEN) else {
        panic!("labels are checked");
    };
    let located = problems.iter().filter(|problem| problem.at.line > 0);
    assert_eq!(located.count(), PROBLEMS_TOLD);
}

#[test]
fn json_with_surrogate_pairs_is_read() {
    let json = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p"},"spec":{"containers":[
        {"name":"c","image":"i:1","env":[{"name":"A","value":"\ud83d\ude00"}]}]}}"#;
    let pod = one(json);
    let env = pod.containers()[0].env.as_ref().unwrap();
    assert_eq!(env[0].value.as_deref(), Some("😀"));
}

#[test]
fn another_kind_is_explained() {
    let text = GOOD
        .replace("kind: Pod", "kind: Deployment")
        .replace("v1", "apps/v1");
    assert_says(
        &error(&text),
        &[
            "line 2",
            "kind Deployment is not a Pod: static manifests hold one v1 Pod",
        ],
    );
    assert_says(&error("metadata: {name: x}\n"), &["kind", "missing"]);
    assert_says(&error("- a\n"), &["a list", "expected a v1 Pod"]);
    assert_says(&error("just text\n"), &["a string", "expected a v1 Pod"]);
    let old = GOOD.replace("apiVersion: v1", "apiVersion: v1beta3");
    assert_says(&error(&old), &["line 1", "apiVersion", "v1beta3"]);
    let number = GOOD.replace("apiVersion: v1", "apiVersion: 1");
    assert_says(&error(&number), &["line 1", "apiVersion", "a number"]);
    let list = "apiVersion: v1\nkind: PodList\nitems: []\n";
    assert_says(&error(list), &["file of its own"]);
}

#[test]
fn two_documents_are_not_ignored() {
    let text = format!("{GOOD}---\n{GOOD}");
    assert_says(&error(&text), &["2 YAML documents"]);
    assert_eq!(one(&format!("---\n{GOOD}---\n")).name(), "web-node-1");
}

#[test]
fn broken_yaml_names_its_line() {
    let text = GOOD.replace("    image:", "   image:");
    assert_says(&error(&text), &["line 8"]);
    assert_says(&error("a: [1, 2\n"), &["line "]);
    let latin = [GOOD.as_bytes(), b"# caf\xe9\n"].concat();
    let bad = read(&latin, &file(), SEEN).unwrap_err().to_string();
    assert_says(&bad, &["line 10", "UTF-8"]);
}

#[test]
fn unknown_fields_are_named_with_a_suggestion() {
    assert_says(
        &error(&container("imagePullpolicy: Never")),
        &[
            "line 10, column 5",
            "spec.containers[0].imagePullpolicy",
            "did you mean \"imagePullPolicy\"?",
        ],
    );
    let both = spec("restartpolicy: Never\nsurprise: 1");
    assert_says(
        &error(&both),
        &["line 10", "spec.restartpolicy", "line 11", "spec.surprise"],
    );
}

#[test]
fn the_protocol_of_probes_is_refused_by_name() {
    let probe = "readinessProbe:\n  httpGet:\n    port: 80\n    protocol: HTTP2";
    assert_says(
        &error(&container(probe)),
        &[
            "spec.containers[0].readinessProbe.httpGet.protocol",
            "not supported; leave it out",
        ],
    );
}

#[test]
fn wrong_types_are_named() {
    assert_says(
        &error(&container("env:\n- name: A\n  value: 8080")),
        &["line 12", "spec.containers[0].env[0].value", "quotes"],
    );
    assert_says(
        &error(&spec("terminationGracePeriodSeconds: soon")),
        &["line 10", "spec.terminationGracePeriodSeconds"],
    );
    assert_says(
        &error(&spec("tolerations: {}")),
        &["line 10", "spec.tolerations"],
    );
    assert_says(
        &error(&GOOD.replace("metadata:\n  name: web", "metadata: web")),
        &["line 3", "metadata", "a mapping"],
    );
}

#[test]
fn invalid_names_are_explained() {
    for name in ["Web", "we_b", "-web", "web-", "a..b", "\"\""] {
        let text = GOOD.replace("name: web", &format!("name: {name}"));
        assert_says(&error(&text), &["line 4", "metadata.name"]);
    }
    let long = GOOD.replace("name: web", &format!("name: {}", "a".repeat(250)));
    assert_says(&error(&long), &["253"]);
    let namespace = GOOD.replace("name: web", "name: web\n  namespace: a.b");
    assert_says(
        &error(&namespace),
        &["line 5", "metadata.namespace", "DNS-1123 label"],
    );
    let main = GOOD.replace("name: main", "name: Main_1");
    assert_says(&error(&main), &["line 7", "spec.containers[0].name"]);
    let label = GOOD.replace("name: web", "name: web\n  labels: {\"a b\": c}");
    assert_says(&error(&label), &["line 5", "metadata.labels[a b]"]);
}

#[test]
fn what_an_api_server_refuses_is_refused() {
    let cases = [
        (
            GOOD.replace("    image: holdfast.local/busybox:1\n", ""),
            "spec.containers[0].image: is missing",
        ),
        (spec("restartPolicy: Sometimes"), "spec.restartPolicy"),
        (
            spec("terminationGracePeriodSeconds: -1"),
            "spec.terminationGracePeriodSeconds",
        ),
        (spec("dnsPolicy: None"), "spec.dnsConfig.nameservers"),
        (spec("hostname: a.b"), "spec.hostname"),
        (spec("nodeName: other"), "spec.nodeName"),
        (
            spec("tolerations: [{operator: Exists, value: x}]"),
            "spec.tolerations[0].value",
        ),
        (
            spec("volumes: [{name: v}, {name: v}]"),
            "spec.volumes[1].name",
        ),
        (
            spec("volumes: [{name: v, emptyDir: {}, hostPath: {path: /x}}]"),
            "spec.volumes[0]: has 2 sources",
        ),
        (
            spec("volumes: [{name: v, hostPath: {path: x}}]"),
            "spec.volumes[0].hostPath.path",
        ),
        (
            spec("volumes: [{name: v, hostPath: {path: /x, type: Dir}}]"),
            "spec.volumes[0].hostPath.type",
        ),
        (
            spec("volumes: [{name: v, emptyDir: {sizeLimit: 1KB}}]"),
            "spec.volumes[0].emptyDir.sizeLimit",
        ),
        (
            container("imagePullPolicy: Maybe"),
            "spec.containers[0].imagePullPolicy",
        ),
        (
            container("ports: [{containerPort: 0}]"),
            "spec.containers[0].ports[0].containerPort",
        ),
        (
            container("ports: [{containerPort: 80, hostPort: 70000}]"),
            "spec.containers[0].ports[0].hostPort",
        ),
        (
            container(
                "ports: [{containerPort: 80, hostPort: 1}, {containerPort: 81, hostPort: 1}]",
            ),
            "spec.containers[0].ports[1].hostPort",
        ),
        (
            container("ports: [{containerPort: 80, protocol: tcp}]"),
            "spec.containers[0].ports[0].protocol",
        ),
        (
            container("ports: [{containerPort: 80, name: 8-0}]"),
            "spec.containers[0].ports[0].name",
        ),
        (
            container("volumeMounts: [{name: nope, mountPath: /x}]"),
            "spec.containers[0].volumeMounts[0].name",
        ),
        (
            container("env: [{name: 'A=B'}]"),
            "spec.containers[0].env[0].name",
        ),
        (
            container("resources: {limits: {cpu: much}}"),
            "spec.containers[0].resources.limits[cpu]",
        ),
        (
            container("resources: {limits: {cpu: 100m}, requests: {cpu: 0.2}}"),
            "spec.containers[0].resources.requests[cpu]: is larger",
        ),
        (
            container("resources: {requests: {memory: -1}}"),
            "spec.containers[0].resources.requests[memory]",
        ),
        (
            GOOD.to_owned() + "  - name: main\n    image: x\n",
            "spec.containers[1].name",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\n".to_owned(),
            "spec: is missing",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: []}\n".to_owned(),
            "spec.containers: is empty",
        ),
        (
            GOOD.replace("name: web", "generateName: web-"),
            "metadata.name",
        ),
        (
            GOOD.replace(
                "name: web",
                "name: web\n  deletionTimestamp: 2026-01-01T00:00:00Z",
            ),
            "metadata.deletionTimestamp",
        ),
        (
            GOOD.replace(
                "name: web",
                "name: web\n  annotations: {kubernetes.io/config.mirror: x}",
            ),
            "metadata.annotations[kubernetes.io/config.mirror]",
        ),
    ];
    for (text, part) in cases {
        assert_says(&error(&text), &["line ", part]);
    }
}

#[test]
fn annotations_leave_room_for_those_of_the_mirror_pod() {
    let with = |bytes: usize| {
        let long = "x".repeat(bytes - "long".len());
        GOOD.replace(
            "name: web",
            &format!("name: web\n  annotations: {{long: {long}}}"),
        )
    };
    let most = 256 * 1024 - 512;
    let pod = one(&with(most));
    let mirrors = (
        "kubernetes.io/config.mirror",
        pod.annotation(CONFIG_HASH).unwrap(),
    );
    let own = pod.annotations().iter().map(|(k, v)| k.len() + v.len());
    let size = own.sum::<usize>() + mirrors.0.len() + mirrors.1.len();
    assert!(size <= 256 * 1024, "{size}");
    assert_says(&error(&with(most + 1)), &["metadata.annotations"]);
}

#[test]
fn problems_are_told_together() {
    let text = GOOD
        .replace("name: web", "name: Web")
        .replace("name: main", "name: Main");
    assert_says(
        &error(&text),
        &[
            "line 4",
            "metadata.name",
            "; line 7",
            "spec.containers[0].name",
        ],
    );
}

#[test]
fn references_to_api_objects_are_rejected() {
    let cases = [
        (
            spec("serviceAccountName: robot"),
            "spec.serviceAccountName",
            "ServiceAccount",
        ),
        (
            spec("imagePullSecrets: [{name: s}]"),
            "spec.imagePullSecrets",
            "Secret",
        ),
        (
            spec("volumes: [{name: v, secret: {secretName: s}}]"),
            "spec.volumes[0].secret",
            "Secret",
        ),
        (
            spec("volumes: [{name: v, configMap: {name: c}}]"),
            "spec.volumes[0].configMap",
            "ConfigMap",
        ),
        (
            spec("volumes: [{name: v, persistentVolumeClaim: {claimName: c}}]"),
            "spec.volumes[0].persistentVolumeClaim",
            "PersistentVolumeClaim",
        ),
        (
            spec("volumes: [{name: v, csi: {driver: d}}]"),
            "spec.volumes[0].csi",
            "CSIDriver",
        ),
        (
            spec("volumes: [{name: v, projected: {sources: [{serviceAccountToken: {path: t}}]}}]"),
            "spec.volumes[0].projected.sources[0].serviceAccountToken",
            "ServiceAccount",
        ),
        (
            spec(
                "volumes: [{name: v, projected: {sources: [{podCertificate: {signerName: a.b/c, keyType: ED25519, keyPath: k}}]}}]",
            ),
            "spec.volumes[0].projected.sources[0].podCertificate",
            "PodCertificateRequest",
        ),
        (
            spec("volumes: [{name: v, cephfs: {monitors: [m], secretRef: {name: s}}}]"),
            "spec.volumes[0].cephfs.secretRef",
            "Secret",
        ),
        (
            spec("resourceClaims: [{name: r}]"),
            "spec.resourceClaims",
            "ResourceClaim",
        ),
        (
            container("env: [{name: A, valueFrom: {secretKeyRef: {name: s, key: k}}}]"),
            "spec.containers[0].env[0].valueFrom.secretKeyRef",
            "Secret",
        ),
        (
            container("envFrom: [{configMapRef: {name: c}}]"),
            "spec.containers[0].envFrom[0].configMapRef",
            "ConfigMap",
        ),
    ];
    for (text, field, kind) in cases {
        assert_says(
            &error(&text),
            &["line 10", field, kind, "cannot refer to API objects"],
        );
    }
    let harmless = one(&spec("nodeSelector: {secret: x}"));
    assert_eq!(harmless.name(), "web-node-1");
}

#[test]
fn octal_and_numbers_of_quantities_are_read() {
    let pod = one(&container(
        "resources: {limits: {cpu: 0.5, memory: 1073741824}}",
    ));
    let limits = pod.containers()[0]
        .resources
        .as_ref()
        .unwrap()
        .limits
        .as_ref()
        .unwrap();
    assert_eq!(limits["cpu"].0, "0.5");
    assert_eq!(limits["memory"].0, "1073741824");
    // Written with leading zero, as file modes are.
    let text = container("livenessProbe: {exec: {command: [x]}, initialDelaySeconds: 010}");
    let probe = one(&text).containers()[0].liveness_probe.clone().unwrap();
    assert_eq!(probe.initial_delay_seconds, Some(8));
}

#[test]
fn null_whole_floats_and_relative_mounts_are_read_as_go_reads_them() {
    let labelled = GOOD.replace("name: web", "name: web\n  labels: {a: }");
    assert_eq!(one(&labelled).metadata.labels.unwrap()["a"], "");
    let text = container("args: [~]")
        + "    resources: {limits: {cpu: null}}\n"
        + "    volumeMounts: [{name: v, mountPath: a/b}]\n"
        + "  terminationGracePeriodSeconds: 1e2\n"
        + "  volumes: [{name: v}]\n";
    let pod = one(&text);
    let container = pod.containers()[0].clone();
    assert_eq!(container.args.unwrap(), [""]);
    assert_eq!(container.resources.unwrap().limits.unwrap()["cpu"].0, "0");
    assert_eq!(container.volume_mounts.unwrap()[0].mount_path, "a/b");
    let spec = pod.spec.unwrap();
    assert_eq!(spec.termination_grace_period_seconds, Some(100));
}

#[test]
fn a_url_may_serve_a_list() {
    let list = serde_json::json!({
        "apiVersion": "v1", "kind": "PodList", "metadata": {},
        "items": [
            {"metadata": {"name": "a"}, "spec": {"containers": [{"name": "c", "image": "i"}]}},
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "b"}, "spec": {"containers": [{"name": "c", "image": "i"}]}},
        ],
    });
    let pods = read(list.to_string().as_bytes(), &url(), SEEN).unwrap();
    let names: Vec<&str> = pods.iter().map(PodExt::name).collect();
    assert_eq!(names, ["a-node-1", "b-node-1"]);
    assert_ne!(pods[0].uid(), pods[1].uid());

    let bad = "apiVersion: v1\nkind: PodList\nitems:\n- metadata: {name: A}\n  spec: {containers: [{name: c, image: i}]}\n";
    let bad = read(bad.as_bytes(), &url(), SEEN).unwrap_err().to_string();
    assert_says(&bad, &["line 4", "items[0].metadata.name"]);
    let empty = read(b"apiVersion: v1\nkind: PodList\nitems: []\n", &url(), SEEN).unwrap();
    assert!(empty.is_empty());
}

proptest::proptest! {
    /// Whatever a file holds, reading it ends in pods or in an error that says something.
    #[test]
    fn damaged_manifests_never_panic(
        at in 0..GOOD.len(),
        cut in 0..40_usize,
        noise in proptest::collection::vec(proptest::num::u8::ANY, 0..12),
    ) {
        let mut bytes = GOOD.as_bytes().to_vec();
        let end = (at + cut).min(bytes.len());
        bytes.splice(at..end, noise);
        if let Err(error) = read(&bytes, &file(), SEEN) {
            proptest::prop_assert!(!error.to_string().is_empty());
        }
    }
}

#[test]
fn every_pod_of_every_document_is_read_by_itself() {
    let bad = GOOD.replace("name: web", "name: Web");
    let text = format!("{GOOD}---\n{bad}---\nkind: Secret\nmetadata: {{name: s, namespace: ns}}\n");
    let manifest = Manifest::parse(text.as_bytes()).unwrap();
    let kinds: Vec<_> = manifest.types().map(|t| (t.api_version, t.kind)).collect();
    assert_eq!(kinds, [("v1", "Pod"), ("v1", "Pod"), ("", "Secret")]);
    let items = manifest.items(&file(), SEEN);
    let subjects: Vec<_> = items.iter().map(|item| item.subject.as_str()).collect();
    assert_eq!(
        subjects,
        ["Pod default/web", "Pod default/Web", "Secret ns/s"]
    );
    let good: Vec<_> = items.iter().map(|item| item.result.is_ok()).collect();
    assert_eq!(good, [true, false, false]);
    // As much as `read` gives of the first one alone.
    assert_eq!(items[0].result.as_ref().unwrap(), &one(GOOD));
    assert_eq!(items[1].locate("metadata.name").line, 14);
    assert!(matches!(
        read(text.as_bytes(), &file(), SEEN),
        Err(ManifestError::Documents { count: 3 })
    ));
}

#[test]
fn every_problem_has_its_place_beside_its_text() {
    let problems = |bytes: &[u8]| read(bytes, &file(), SEEN).unwrap_err().problems();
    let binary = problems(b"a: b\n\xff");
    assert_eq!(binary[0].at, Position { line: 2, column: 0 });
    assert!(binary[0].message.starts_with("the manifest is not UTF-8"));
    let nested = problems("[".repeat(100).as_bytes());
    assert!(
        nested[0].at.line == 1 && !nested[0].message.is_empty(),
        "{nested:?}"
    );
    assert_eq!(problems(b"")[0].at, Position::default());
    let both = GOOD.replace("name: web", "name: Web\n  namespace: Bad_One");
    assert_eq!(problems(both.as_bytes()).len(), 2);
}

#[test]
fn a_value_of_the_wrong_type_is_not_repeated() {
    let text = error(&container("env: [{name: PIN, value: 4711}]"));
    assert_says(
        &text,
        &["env[0].value: found a number, expected a string; put the value in quotes"],
    );
    assert!(!text.contains("4711"), "{text}");
}

#[test]
fn a_manifest_of_utf_16_is_read_as_yaml_readers_do() {
    let plain = one(GOOD);
    let units = format!("\u{feff}{GOOD}").encode_utf16().collect::<Vec<_>>();
    let of = |bytes: fn(u16) -> [u8; 2]| units.iter().flat_map(move |unit| bytes(*unit));
    let (little, big): (Vec<u8>, Vec<u8>) = (
        of(u16::to_le_bytes).collect(),
        of(u16::to_be_bytes).collect(),
    );
    for bytes in [&little, &big] {
        let mut pods = read(bytes, &file(), SEEN).unwrap();
        assert_eq!(pods.remove(0).spec, plain.spec);
    }
    let half = read(&little[..little.len() - 1], &file(), SEEN).unwrap_err();
    assert!(matches!(half, ManifestError::NotUtf8 { line: 1 }), "{half}");
}
