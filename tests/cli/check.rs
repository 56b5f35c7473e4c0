//! `holdfast check`: manifests, configurations and kubeconfigs, good and bad.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use serde_json::{Value, json};

use crate::world::*;

const GOOD: &str = "apiVersion: v1
kind: Pod
metadata:
  name: web
spec:
  containers:
  - {name: main, image: busybox}
";
const HEAD: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";

/// A directory of files to check, which commands run in.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn put(&self, name: impl AsRef<Path>, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    fn check(&self, args: &[&str]) -> Output {
        let mut command = holdfast(&["check", "--node-name", "node-1"]);
        command.args(args).current_dir(self.0.path());
        command.output().unwrap()
    }

    /// What is said of the file `name` with this text, and the exit code.
    fn said_of(&self, name: &str, text: &str) -> (String, Option<i32>) {
        self.put(name, text);
        said(&self.check(&[name]))
    }
}

fn said(output: &Output) -> (String, Option<i32>) {
    (text(&output.stdout).to_owned(), output.status.code())
}

/// What is said of `input` on standard input.
fn said_of_input(args: &[&str], input: &str) -> (String, Option<i32>) {
    let mut command = holdfast(&["check", "--node-name", "node-1"]);
    command
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input.as_bytes()).unwrap();
    drop(stdin);
    said(&child.wait_with_output().unwrap())
}

fn named(name: &str) -> String {
    GOOD.replace("name: web", &format!("name: {name}"))
}

#[test]
fn good_files_are_named_with_what_they_hold() {
    let files = Files::new();
    let (out, code) = files.said_of("web.yaml", GOOD);
    assert_eq!(
        (out.as_str(), code),
        ("web.yaml: ok (Pod default/web)\n", Some(0))
    );
    let json = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"db","namespace":"prod"},
        "spec":{"containers":[{"name":"main","image":"busybox"}]}}"#;
    let (out, code) = files.said_of("db.json", json);
    assert_eq!(
        (out.as_str(), code),
        ("db.json: ok (Pod prod/db)\n", Some(0))
    );
    // Named twice, it is no duplicate of itself.
    let (out, code) = said(&files.check(&["-q", "web.yaml", "./web.yaml", "db.json"]));
    assert_eq!((out.as_str(), code), ("", Some(0)));
    let (out, code) = said_of_input(&["-"], GOOD);
    assert_eq!((out.as_str(), code), ("-: ok (Pod default/web)\n", Some(0)));
}

#[test]
fn what_is_wrong_with_a_manifest_has_its_place_its_cause_and_its_remedy() {
    let files = Files::new();
    let cases = [
        (
            GOOD.replace("spec:\n", "spec:\n  restartPolcy: Never\n"),
            "bad.yaml:6:3: error: Pod default/web: spec.restartPolcy: unknown field; did you mean \"restartPolicy\"?\n",
        ),
        (
            named("Web_1"),
            "bad.yaml:4:3: error: Pod default/Web_1: metadata.name: \"Web_1\" ",
        ),
        (
            format!("{GOOD}    envFrom: [{{secretRef: {{name: s}}}}]\n").replace(
                "  - {name: main, image: busybox}",
                "  - name: main\n    image: busybox",
            ),
            "static pods cannot refer to API objects",
        ),
        (
            format!("{GOOD}  volumes:\n  - {{name: v, flexVolume: {{driver: d}}}}\n"),
            "bad.yaml:9:",
        ),
        (
            format!("{GOOD}  os: {{name: windows}}\n"),
            "bad.yaml:8:3: error: Pod default/web: spec.os: Failed to admit pod as the OS field doesn't match node OS; remove it",
        ),
        (
            GOOD.replace("kind: Pod", "kind: Deployment"),
            "bad.yaml:2:1: error: Deployment default/web: kind: kind Deployment is not a Pod",
        ),
        (
            String::new(),
            "bad.yaml: error: file: the manifest is empty",
        ),
    ];
    for (manifest, expected) in cases {
        let (out, code) = files.said_of("bad.yaml", &manifest);
        assert_eq!(code, Some(1), "{manifest}\n{out}");
        assert!(out.contains(expected), "{expected}\n{out}");
        assert!(!out.contains(": ok"), "{out}");
    }
    let (out, code) = files.said_of(
        "bad.yaml",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: [\n",
    );
    assert_eq!(code, Some(1), "{out}");
    let mut parts = out.split(':');
    assert_eq!(parts.next(), Some("bad.yaml"));
    for _ in 0..2 {
        assert!(parts.next().unwrap().parse::<u64>().unwrap() > 0, "{out}");
    }
    assert_eq!(parts.next(), Some(" error"));
}

#[test]
fn values_are_not_repeated() {
    let files = Files::new();
    let env = "  - name: main\n    image: busybox\n    env:\n    - {name: PASSWORD, value: 471147}";
    let manifest = GOOD.replace("  - {name: main, image: busybox}", env);
    let (out, code) = files.said_of("bad.yaml", &manifest);
    assert_eq!(code, Some(1));
    assert!(
        out.contains("bad.yaml:10:31: error: Pod default/web: spec.containers[0].env[0].value: found a number, expected a string; put the value in quotes"),
        "{out}"
    );
    assert!(!out.contains("471147"), "{out}");
}

#[test]
fn two_manifests_of_one_pod_are_told_apart() {
    let files = Files::new();
    files.put("a.yaml", GOOD);
    files.put("b.yaml", GOOD);
    files.put(
        "c.yaml",
        &GOOD.replace("  name: web\n", "  name: web\n  namespace: prod\n"),
    );
    let (out, code) = said(&files.check(&["b.yaml", "c.yaml", "a.yaml"]));
    assert_eq!(code, Some(1), "{out}");
    let lines: Vec<_> = out.lines().collect();
    assert!(
        lines[0].starts_with("b.yaml:4:3: error: Pod default/web: pod default/web-node-1 of ")
            && lines[0].contains("a.yaml; remove one of the two or rename it"),
        "{out}"
    );
    assert_eq!(lines[1], "c.yaml: ok (Pod prod/web)");
    assert_eq!(lines[2], "a.yaml: ok (Pod default/web)");
}

#[test]
fn each_pod_of_a_list_and_of_several_documents_is_checked() {
    let files = Files::new();
    let good = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"},
        "spec": {"containers": [{"name": "main", "image": "busybox"}]}});
    let mut bad = good.clone();
    bad["metadata"]["name"] = "two".into();
    bad["spec"]["containers"][0]["image"] = "".into();
    let list = json!({"apiVersion": "v1", "kind": "PodList", "items": [good, bad]}).to_string();
    let (out, code) = files.said_of("list.json", &list);
    assert_eq!(code, Some(1), "{out}");
    assert!(
        out.contains("warning: PodList: is accepted from staticPodURL only"),
        "{out}"
    );
    assert!(
        out.contains("error: Pod default/two: items[1].spec.containers[0].image: "),
        "{out}"
    );
    assert!(!out.contains("Pod default/one:"), "{out}");

    let bad = named("Two");
    let (out, code) = said_of_input(&["-"], &format!("{GOOD}---\n{bad}"));
    assert_eq!(code, Some(1), "{out}");
    assert!(
        out.contains("error: manifest: the manifest holds 2 YAML documents"),
        "{out}"
    );
    assert!(
        out.contains("-:12:3: error: Pod default/Two: metadata.name: "),
        "{out}"
    );
}

#[test]
fn a_directory_is_read_as_the_file_source_reads_it() {
    let files = Files::new();
    files.put("m/.hidden.yaml", "broken: [");
    files.put("m/sub/web.yaml", GOOD);
    files.put("m/web.yaml", GOOD);
    let list = "apiVersion: v1\nkind: PodList\nitems: []\n";
    let (out, code) = said(&files.check(&["m"]));
    assert_eq!(
        (out.as_str(), code),
        ("m/web.yaml: ok (Pod default/web)\n", Some(0))
    );
    files.put("m/list.yaml", list);
    files.put(
        Path::new("m").join(OsStr::from_bytes(b"no-\xff.yaml")),
        &named("other"),
    );
    let (out, code) = said(&files.check(&["m"]));
    assert_eq!(code, Some(1), "{out}");
    assert!(
        out.contains("m/list.yaml:2:1: error: PodList: kind: PodList is not a Pod"),
        "{out}"
    );
    assert!(
        out.contains("m/no-\u{fffd}.yaml: ok (Pod default/other)"),
        "{out}"
    );
    assert!(out.contains("m/web.yaml: ok"), "{out}");
}

#[test]
fn a_configuration_is_checked_as_the_agent_reads_it() {
    let files = Files::new();
    for (lines, code, expected) in [
        (
            "maxPods: 5\n",
            0,
            "config.yaml: ok (KubeletConfiguration)\n",
        ),
        (
            "syncFrequncy: 1m\n",
            1,
            "config.yaml:3:1: error: KubeletConfiguration: syncFrequncy: unknown field; did you mean \"syncFrequency\"?\n",
        ),
        (
            "syncFrequency: 1 minute\n",
            1,
            "config.yaml:3:16: error: KubeletConfiguration: syncFrequency: ",
        ),
        (
            "containerRuntimeEndpoint: tcp://x\n",
            1,
            "config.yaml:3:27: error: KubeletConfiguration: containerRuntimeEndpoint: ",
        ),
        (
            "somethingOfTomorrow: 1\n",
            0,
            "config.yaml:3:1: warning: KubeletConfiguration: somethingOfTomorrow: is not a field",
        ),
        ("maxPods: [\n", 1, "error: KubeletConfiguration: "),
    ] {
        let (out, ended) = files.said_of("config.yaml", &format!("{HEAD}{lines}"));
        assert_eq!(ended, Some(code), "{lines}{out}");
        assert!(out.contains(expected), "{expected}\n{out}");
        assert_eq!(out.contains(": ok"), code == 0, "{out}");
    }
}

#[test]
fn pods_are_checked_against_the_nodes_own_configuration() {
    let files = Files::new();
    let sysctl = "  securityContext:\n    sysctls: [{name: kernel.msgmax, value: '1'}]\n";
    files.put("pod.yaml", &format!("{GOOD}{sysctl}"));
    files.put("config.yaml", HEAD);
    let drop_in = files.put(
        "conf.d/10.conf",
        &format!("{HEAD}allowedUnsafeSysctls: [kernel.msg*]\n"),
    );
    let (out, code) = said(&files.check(&["pod.yaml", "--config", "config.yaml"]));
    assert_eq!(code, Some(1), "{out}");
    assert!(
        out.contains("pod.yaml:9:5: error: Pod default/web: spec.securityContext.sysctls: forbidden sysctl: \"kernel.msgmax\" not allowlisted; "),
        "{out}"
    );
    let args = [
        "pod.yaml",
        "--config",
        "config.yaml",
        "--config-dir",
        "conf.d",
    ];
    let (out, code) = said(&files.check(&args));
    let good = "config.yaml: ok (KubeletConfiguration)\npod.yaml: ok (Pod default/web)\n";
    assert_eq!((out.as_str(), code), (good, Some(0)));
    fs::write(drop_in, format!("{HEAD}maxPods: many\n")).unwrap();
    let (out, code) = said(&files.check(&args[1..]));
    assert_eq!(code, Some(1), "{out}");
    assert!(
        out.starts_with("conf.d/10.conf:3:10: error: KubeletConfiguration: maxPods: "),
        "{out}"
    );
}

#[test]
fn a_part_of_a_byte_is_a_warning() {
    let pod = GOOD.replace(
        "image: busybox",
        "image: busybox, resources: {limits: {memory: 128m}}",
    );
    let (out, code) = Files::new().said_of("pod.yaml", &pod);
    assert_eq!(code, Some(0), "{out}");
    assert!(
        out.starts_with("pod.yaml:7:") && out.contains("warning: Pod default/web: spec.containers[0].resources.limits[memory]: fractional byte value \"128m\""),
        "{out}"
    );
}

#[test]
fn programs_of_credential_providers_are_looked_for_where_they_are_said_to_be() {
    let files = Files::new();
    let provider = "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n- name: helper\n  apiVersion: credentialprovider.kubelet.k8s.io/v1\n  defaultCacheDuration: 1m\n  matchImages: [x.io]\n";
    let (out, code) = files.said_of("p.yaml", provider);
    assert_eq!(
        (out.as_str(), code),
        ("p.yaml: ok (CredentialProviderConfig)\n", Some(0))
    );
    let (out, code) =
        said(&files.check(&["p.yaml", "--image-credential-provider-bin-dir", "/none"]));
    assert_eq!(code, Some(1));
    assert!(
        out.contains("/none/helper is not a file; install the program there"),
        "{out}"
    );
    let secret = format!("{provider}  env: [{{name: TOKEN, value: hunter2, extra: 1}}]\n");
    let (out, code) = files.said_of("p.yaml", &secret);
    assert_eq!(code, Some(1));
    assert!(out.contains("extra") && !out.contains("hunter2"), "{out}");
}

/// A kubeconfig for the files `ca.crt`, `node.crt`, `node.key`, with `user` in place of the last two if it is not empty.
fn kubeconfig(user: &str) -> String {
    let user = match user {
        "" => "{client-certificate: node.crt, client-key: node.key}",
        user => user,
    };
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
         clusters: [{{name: k, cluster: {{server: 'https://192.0.2.1:6443', certificate-authority: ca.crt}}}}]\n\
         contexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
         users: [{{name: u, user: {user}}}]\n"
    )
}

/// Puts a certificate and the keys of two of them.
fn put_certificates(files: &Files) {
    let pair = || rcgen::generate_simple_self_signed(["node".to_owned()]).unwrap();
    let (one, other) = (pair(), pair());
    files.put("ca.crt", &one.cert.pem());
    files.put("node.crt", &one.cert.pem());
    files.put("node.key", &one.signing_key.serialize_pem());
    files.put("other.key", &other.signing_key.serialize_pem());
}

#[test]
fn what_a_kubeconfig_names_has_to_be_there_and_to_fit() {
    let files = Files::new();
    put_certificates(&files);
    let good = kubeconfig("");
    let (out, code) = files.said_of("kubeconfig", &good);
    assert_eq!(
        (out.as_str(), code),
        ("kubeconfig: ok (kubeconfig)\n", Some(0))
    );
    let plugin = |command: &str| {
        kubeconfig(&format!(
            "{{exec: {{apiVersion: client.authentication.k8s.io/v1, command: {command}, interactiveMode: Never}}}}"
        ))
    };
    for (text, expected) in [
        (good.replace("ca.crt", "none.crt"), "none.crt"),
        (good.replace("node.crt", "none.crt"), "none.crt"),
        (good.replace("node.key", "none.key"), "none.key"),
        (
            good.replace("node.key", "other.key"),
            "make a client of kubeconfig",
        ),
        (kubeconfig("{tokenFile: none}"), "tokenFile "),
        (
            good.replace("current-context: c\n", ""),
            "has no current-context",
        ),
        (
            good.replace("current-context: c", "current-context: d"),
            "refers to the context \"d\"",
        ),
        (
            good.replace("cluster: k", "cluster: l"),
            "refers to the cluster \"l\"",
        ),
        (good.replace("user: u", "user: v"), "it has no user \"v\""),
        (plugin("./none"), "none is no program that can be run"),
    ] {
        let (out, code) = files.said_of("kubeconfig", &text);
        assert_eq!(code, Some(1), "{expected}\n{out}");
        assert!(
            out.starts_with("kubeconfig: error: kubeconfig: ") && out.contains(expected),
            "{expected}\n{out}"
        );
    }
    let (out, code) = files.said_of("kubeconfig", &plugin("no-such-plugin-anywhere"));
    assert_eq!(code, Some(0), "{out}");
    assert!(
        out.contains("warning: kubeconfig: exec: \"no-such-plugin-anywhere\" is not in PATH"),
        "{out}"
    );
    let token = kubeconfig("{token: hunter2, client-certificate: none.crt}");
    let (out, code) = files.said_of("kubeconfig", &token);
    assert_eq!(code, Some(1));
    assert!(!out.contains("hunter2"), "{out}");
}

#[test]
fn the_exit_code_says_what_is_the_matter() {
    let files = Files::new();
    files.put("good.yaml", GOOD);
    files.put("bad.yaml", &named("Bad"));
    let code = |args: &[&str]| files.check(args).status.code();
    assert_eq!(code(&["good.yaml"]), Some(0));
    assert_eq!(code(&["good.yaml", "bad.yaml"]), Some(1));
    assert_eq!(code(&[]), Some(2));
    assert_eq!(code(&["-o", "xml", "good.yaml"]), Some(2));
    assert_eq!(code(&["good.yaml", "none.yaml"]), Some(3));
    assert_eq!(code(&["--config", "none.yaml"]), Some(3));
    assert_eq!(code(&["bad.yaml", "none.yaml"]), Some(1));
}

#[test]
fn json_has_every_file_and_every_finding() {
    let files = Files::new();
    files.put("good.yaml", GOOD);
    files.put("bad.yaml", &named("Bad"));
    let output = files.check(&["-o", "json", "good.yaml", "bad.yaml", "none.yaml"]);
    assert_eq!(output.status.code(), Some(1));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["apiVersion"], "holdfast.io/v1");
    assert_eq!(json["kind"], "CheckResult");
    assert_eq!(
        json["files"],
        json!([
            {"file": "good.yaml", "ok": true, "objects": ["Pod default/web"]},
            {"file": "bad.yaml", "ok": false, "objects": []},
            {"file": "none.yaml", "ok": false, "objects": []},
        ])
    );
    let findings = json["findings"].as_array().unwrap();
    assert_eq!(findings.len(), 2, "{json:#}");
    let place = [
        &findings[0]["file"],
        &findings[0]["line"],
        &findings[0]["column"],
    ];
    assert_eq!(place, [&json!("bad.yaml"), &json!(4), &json!(3)]);
    assert_eq!(findings[0]["severity"], "error");
    assert_eq!(findings[0]["object"], "Pod default/Bad");
    assert!(findings[1]["line"].is_null());
}

#[test]
fn every_example_is_good() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let examples = |dir: &str| {
        let entries = fs::read_dir(root.join(dir)).unwrap();
        entries
            .map(|entry| entry.unwrap().path())
            .collect::<Vec<_>>()
    };
    let mut command = holdfast(&["check", "-q", "--node-name", "node-1"]);
    command.args(examples("examples/config"));
    command.arg(root.join("examples/manifests"));
    let (out, code) = said(&command.output().unwrap());
    assert_eq!(code, Some(0), "{out}");

    let files = Files::new();
    put_certificates(&files);
    let kubeconfigs: Vec<_> = examples("contrib/cluster")
        .into_iter()
        .filter(|path| path.extension().is_some_and(|e| e == "kubeconfig"))
        .collect();
    assert_eq!(kubeconfigs.len(), 2);
    for path in kubeconfigs {
        let text = fs::read_to_string(path)
            .unwrap()
            .replace("/etc/kubernetes/pki/", "")
            .replace("/etc/holdfast/", "");
        let (out, code) = files.said_of("kubeconfig", &text);
        assert_eq!(code, Some(0), "{out}");
    }

    // Parts of configurations in the documents.
    let mut parts = 0;
    let is_page = |path: &std::path::PathBuf| path.extension().is_some_and(|e| e == "md");
    for page in examples("docs").into_iter().filter(is_page) {
        let text = fs::read_to_string(page).unwrap();
        let blocks = text.split("```yaml\n").skip(1);
        let blocks = blocks.filter_map(|rest| rest.split("```").next());
        for part in blocks.filter(|block| !block.starts_with("users:")) {
            parts += 1;
            let (out, code) = said_of_input(&["-q", "-"], &format!("{HEAD}{part}"));
            assert_eq!((out.as_str(), code), ("", Some(0)), "{part}");
        }
    }
    assert!(parts >= 2, "{parts}");
}
