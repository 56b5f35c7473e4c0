//! Exec plugins that are shell scripts, and how often they are run.

use std::path::{Path, PathBuf};

use futures::{FutureExt, StreamExt};
use holdfast_testkit::envtest::{DAY, Identity};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, WatchParams};
use serde_json::{Value, json};

use crate::server::{Kept, Log, Server, client, eventually, let_in, list, within};

const V1: &str = "client.authentication.k8s.io/v1";

/// A plugin beside the kubeconfig: it notes that it runs, and gives what it finds.
struct Plugin(PathBuf);

impl Plugin {
    fn new(dir: &Path) -> Self {
        let dir = dir.join("plugin");
        std::fs::create_dir(&dir).unwrap();
        let plugin = Self(dir);
        let (runs, status) = (plugin.0.join("runs"), plugin.0.join("status"));
        let script = format!(
            "#!/bin/sh\necho run >> {}\ncat {} || exit 1\n",
            runs.display(),
            status.display()
        );
        let path = plugin.0.join("get-token");
        std::fs::write(&path, script).unwrap();
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        plugin
    }

    /// The user of a kubeconfig with it.
    fn user(&self) -> Value {
        json!({ "exec": {
            "apiVersion": V1, "command": "plugin/get-token", "interactiveMode": "Never",
            "provideClusterInfo": true,
        } })
    }

    fn gives(&self, status: Value) {
        let answer = json!({ "apiVersion": V1, "kind": "ExecCredential", "status": status });
        // In one go: the plugin may be running.
        let next = self.0.join("next");
        std::fs::write(&next, answer.to_string()).unwrap();
        std::fs::rename(next, self.0.join("status")).unwrap();
    }

    fn runs(&self) -> usize {
        let runs = std::fs::read_to_string(self.0.join("runs"));
        runs.unwrap_or_default().lines().count()
    }
}

fn certificate(identity: &Identity) -> Value {
    json!({ "clientCertificateData": identity.cert_pem, "clientKeyData": identity.key_pem })
}

/// Every file below `dir` but the plugin's own.
fn files(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("plugin") {
            found.extend(files(&path));
        } else if path.is_file() {
            found.push(String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned());
        }
    }
    found
}

#[tokio::test]
async fn a_refused_token_makes_the_plugin_run_once_more_however_many_are_refused() {
    let (log, _guard) = Log::begin();
    let server = Server::start().await;
    let dir = tempfile::tempdir().unwrap();
    let plugin = Plugin::new(dir.path());
    plugin.gives(json!({ "token": "t0k3n-one" }));
    server.lets_in(&["t0k3n-one"]);
    let (client, credentials) = client(dir.path(), &server.cluster(), &plugin.user()).await;
    assert_eq!(plugin.runs(), 0, "the start waits for nobody");
    let kept = Kept::new(credentials);
    let_in(&client).await;
    let pods: Api<Pod> = Api::all(client.kube());
    let params = WatchParams::default();
    let mut watch = pods.watch(&params, "1").await.unwrap().boxed();
    for _ in 0..50 {
        list(&client).await.unwrap();
    }
    assert_eq!(plugin.runs(), 1, "it is not run for a request");

    plugin.gives(json!({ "token": "t0k3n-two" }));
    server.lets_in(&["t0k3n-two"]);
    let refused = futures::future::join_all((0..50).map(|_| list(&client))).await;
    assert!(refused.iter().all(Result::is_err));
    let_in(&client).await;
    assert_eq!(server.newest(), "Bearer t0k3n-two");
    assert_eq!(plugin.runs(), 2, "it is not run for each that is refused");
    assert!(
        watch.next().now_or_never().is_none() && server.open_watches() == 1,
        "another token breaks off nothing"
    );
    drop(watch);
    kept.end().await;

    assert_eq!(log.lines("(401)").len(), 1);
    let text = log.text();
    let line = text.lines().find(|line| line.contains("t0k3n"));
    assert_eq!(line, None, "the token is not logged");
    let files = files(dir.path());
    assert!(
        !files.is_empty() && files.iter().all(|file| !file.contains("t0k3n")),
        "{files:?}"
    );
}

#[tokio::test]
async fn a_token_that_is_about_to_expire_is_replaced_before_anybody_refuses_it() {
    let server = Server::start().await;
    let dir = tempfile::tempdir().unwrap();
    let plugin = Plugin::new(dir.path());
    let soon = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(12);
    plugin.gives(json!({ "token": "one", "expirationTimestamp": soon.to_string() }));
    server.lets_in(&["one", "two"]);
    let (client, credentials) = client(dir.path(), &server.cluster(), &plugin.user()).await;
    let kept = Kept::new(credentials);
    let_in(&client).await;
    assert_eq!(server.newest(), "Bearer one");
    let later = jiff::Timestamp::now() + DAY;
    plugin.gives(json!({ "token": "two", "expirationTimestamp": later.to_string() }));
    let replaced = async {
        while server.newest() != "Bearer two" {
            list(&client).await.unwrap();
        }
    };
    within("the other token is used", replaced).await;
    assert_eq!(plugin.runs(), 2);
    kept.end().await;
}

#[tokio::test]
async fn another_certificate_of_the_plugin_makes_other_connections() {
    let (log, _guard) = Log::begin();
    let server = Server::start().await;
    let dir = tempfile::tempdir().unwrap();
    let plugin = Plugin::new(dir.path());
    let [one, two] = ["one", "two"].map(|name| server.authority.client(name, "system:nodes", DAY));
    plugin.gives(certificate(&one));
    server.lets_in_name("one");
    let (client, credentials) = client(dir.path(), &server.cluster(), &plugin.user()).await;
    let kept = Kept::new(credentials);
    let_in(&client).await;
    let pods: Api<Pod> = Api::all(client.kube());
    let params = WatchParams::default();
    let mut watch = pods.watch(&params, "1").await.unwrap().boxed();

    // Refused, and given the same: nothing is broken off for that.
    server.lets_in_name("two");
    list(&client).await.unwrap_err();
    eventually("the plugin runs", || plugin.runs() == 2).await;
    assert!(watch.next().now_or_never().is_none() && server.open_watches() == 1);

    plugin.gives(certificate(&two));
    let_in(&client).await;
    let ended = within("the watch ends", watch.next()).await;
    assert!(ended.is_none_or(|event| event.is_err()));
    kept.end().await;

    let key: Vec<_> = two.key_pem.lines().collect();
    for text in files(dir.path()).iter().chain([&log.text()]) {
        assert!(!text.contains(key[1]), "the key is kept nowhere");
    }
}

#[tokio::test]
async fn a_plugin_that_is_not_there_yet_is_told_of_and_tried_again() {
    let (log, _guard) = Log::begin();
    let server = Server::start().await;
    server.lets_in(&["t"]);
    let dir = tempfile::tempdir().unwrap();
    let user = json!({ "exec": {
        "apiVersion": V1, "command": "plugin/get-token", "interactiveMode": "Never",
        "installHint": "apt install get-token",
    } });
    let (client, credentials) = client(dir.path(), &server.cluster(), &user).await;
    let kept = Kept::new(credentials);
    eventually("it is told", || {
        !log.lines("its exec plugin fails").is_empty()
    })
    .await;
    let error = list(&client).await.unwrap_err().to_string();
    assert!(error.contains("no credentials yet"), "{error}");
    let plugin = Plugin::new(dir.path());
    plugin.gives(json!({ "token": "t" }));
    let_in(&client).await;
    kept.end().await;
    let told = log.lines("its exec plugin fails");
    assert_eq!(told.len(), 1, "{told:?}");
    for part in [
        "ERROR",
        "plugin/get-token",
        "No such file",
        "apt install get-token",
    ] {
        assert!(told[0].contains(part), "{part}: {told:?}");
    }
}

#[tokio::test]
async fn a_token_in_the_kubeconfig_needs_no_plugin() {
    let server = Server::start().await;
    server.lets_in(&["own"]);
    let dir = tempfile::tempdir().unwrap();
    let plugin = Plugin::new(dir.path());
    let mut user = plugin.user();
    user["token"] = "own".into();
    let (client, credentials) = client(dir.path(), &server.cluster(), &user).await;
    let kept = Kept::new(credentials);
    list(&client).await.unwrap();
    kept.end().await;
    assert_eq!(plugin.runs(), 0);
}
