//! Whom the client trusts, and what it says when it is not trusted itself.

use std::net::SocketAddr;
use std::sync::Arc;

use futures::StreamExt;
use holdfast_testkit::envtest::{Authority, DAY};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, WatchParams};
use serde_json::json;

use crate::server::{
    Kept, Log, Server, base64, client, client_of, clients_of, let_in, list, serving, why_down,
    within, write_kubeconfig,
};

/// A server that wants a good client certificate; says in an alert what it thinks of each.
fn strict_server(authority: &Authority) -> SocketAddr {
    let own = authority.server("kube-apiserver");
    let config = serving(&own, clients_of(authority).build().unwrap());
    let config = Arc::new(config);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // Ends with the test's process.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut tls = rustls::ServerConnection::new(config.clone()).unwrap();
            // The alert is written before the error is returned.
            drop(tls.complete_io(&mut stream));
            drop(stream.shutdown(std::net::Shutdown::Write));
            // Unread bytes would make a reset of the end, which can overtake the alert.
            drop(std::io::copy(&mut stream, &mut std::io::sink()));
        }
    });
    address
}

#[tokio::test]
async fn a_server_of_another_authority_is_not_trusted_and_the_way_out_told() {
    let server = Server::start().await;
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = server.cluster();
    let stranger = Authority::new("stranger").pem();
    cluster["certificate-authority-data"] = base64(stranger).into();
    let (client, _credentials) = client(dir.path(), &cluster, &json!({ "token": "t" })).await;
    list(&client).await.unwrap_err();
    let why = why_down(&client);
    for part in ["UnknownIssuer", "certificate-authority", "kubeconfig"] {
        assert!(why.contains(part), "{part}: {why}");
    }
    assert_eq!(server.requests(), 0, "the token stays here");
}

#[tokio::test]
async fn the_servers_alert_about_a_client_certificate_is_told() {
    let authority = Authority::new("here");
    let address = strict_server(&authority);
    let cluster = json!({
        "server": format!("https://{address}"),
        "certificate-authority-data": base64(authority.pem()),
    });
    let expired = authority.client("system:node:n1", "system:nodes", -DAY);
    let foreign = Authority::new("stranger").client("system:node:n1", "system:nodes", DAY);
    for (identity, alert) in [(expired, "Expired"), (foreign, "alert")] {
        let dir = tempfile::tempdir().unwrap();
        let user = json!({
            "client-certificate-data": base64(&identity.cert_pem),
            "client-key-data": base64(&identity.key_pem),
        });
        let (client, _credentials) = client(dir.path(), &cluster, &user).await;
        list(&client).await.unwrap_err();
        let why = why_down(&client);
        assert!(why.contains(alert), "{alert}: {why}");
        assert!(why.contains("; now 20"), "a hint: {why}");
    }
}

#[tokio::test]
async fn the_server_may_have_another_name_than_its_address() {
    let server = Server::at("127.0.0.2", Arc::new(Authority::new("here"))).await;
    for (name, works) in [
        (None, false),
        (Some("kubernetes"), true),
        (Some("other"), false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut cluster = server.cluster();
        if let Some(name) = name {
            cluster["tls-server-name"] = name.into();
        }
        let (client, _credentials) = client(dir.path(), &cluster, &json!({ "token": "t" })).await;
        let listed = list(&client).await;
        assert_eq!(listed.is_ok(), works, "{name:?}");
        if !works {
            let why = why_down(&client);
            assert!(why.contains("give tls-server-name"), "{name:?}: {why}");
        }
    }
    assert_eq!(server.requests(), 1, "the token stays here");
    // The one that was let in; the others broke off.
    assert_eq!(server.asked_for(), ["kubernetes"]);
}

#[tokio::test]
async fn a_server_that_is_not_verified_is_told_of_loudly_and_once() {
    let (log, _guard) = Log::begin();
    let server = Server::at("127.0.0.2", Arc::new(Authority::new("here"))).await;
    let dir = tempfile::tempdir().unwrap();
    let cluster = json!({
        "server": format!("https://{}", server.address()), "insecure-skip-tls-verify": true,
    });
    let (client, _credentials) = client(dir.path(), &cluster, &json!({ "token": "t" })).await;
    for _ in 0..5 {
        list(&client).await.unwrap();
    }
    let told = log.lines("insecure-skip-tls-verify");
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(
        told[0].contains("WARN") && told[0].contains("kubeconfig"),
        "{told:?}"
    );
}

#[tokio::test]
async fn files_beside_the_kubeconfig_are_found_and_a_token_is_exchanged_under_what_runs() {
    let server = Server::start().await;
    let dir = tempfile::tempdir().unwrap();
    let in_dir = |name: &str| dir.path().join(name);
    std::fs::create_dir(in_dir("pki")).unwrap();
    std::fs::write(in_dir("pki/ca.pem"), server.authority.pem()).unwrap();
    std::fs::write(in_dir("token"), "one\n").unwrap();
    server.lets_in(&["one"]);
    let cluster = json!({
        "server": format!("https://{}", server.address()), "certificate-authority": "pki/ca.pem",
    });
    // The file's token is the one that counts.
    let user = json!({ "tokenFile": "token", "token": "old" });
    let (client, credentials) = client(dir.path(), &cluster, &user).await;
    assert_eq!(list(&client).await.unwrap(), 0);
    let kept = Kept::new(credentials);
    let pods: Api<Pod> = Api::all(client.kube());
    let params = WatchParams::default();
    let mut watch = pods.watch(&params, "1").await.unwrap().boxed();
    let next = in_dir("token.next");
    std::fs::write(&next, "two\n").unwrap();
    std::fs::rename(&next, in_dir("token")).unwrap();
    server.lets_in(&["two"]);
    let_in(&client).await;
    assert_eq!(server.newest(), "Bearer two");
    assert_eq!(server.open_watches(), 1, "it goes on");

    // Another authority makes other connections, and what runs over the old ones ends.
    std::fs::write(in_dir("pki/ca.pem"), Authority::new("stranger").pem()).unwrap();
    server.lets_in(&["three"]);
    list(&client).await.unwrap_err();
    let ended = within("the watch ends", watch.next()).await;
    assert!(ended.is_none_or(|event| event.is_err()));
    list(&client).await.unwrap_err();
    assert!(why_down(&client).contains("UnknownIssuer"));
    kept.end().await;
}

#[tokio::test]
async fn a_token_file_that_cannot_be_read_leaves_the_kubeconfigs_token() {
    let server = Server::start().await;
    server.lets_in(&["spare"]);
    let dir = tempfile::tempdir().unwrap();
    let user = json!({ "tokenFile": "missing", "token": "spare" });
    let (client, _credentials) = client(dir.path(), &server.cluster(), &user).await;
    assert_eq!(list(&client).await.unwrap(), 0);
}

#[tokio::test]
async fn what_is_wrong_with_a_kubeconfig_is_told_without_its_secrets() {
    const SECRET: &str = "s3cr3t";
    let good = json!({ "server": "https://127.0.0.1:1" });
    let with = |key: &str, value: &str| {
        let mut cluster = good.clone();
        cluster[key] = value.into();
        cluster
    };
    let token = json!({ "token": SECRET });
    let password = format!("ftp://me:{SECRET}@proxy");
    let exec = json!({ "exec": {
        "apiVersion": "client.authentication.k8s.io/v1", "command": "x", "interactiveMode": "Always",
        "env": [{ "name": "X", "value": SECRET }], "args": [SECRET],
    } });
    let provider = json!({ "auth-provider": { "name": "oidc", "config": { "id-token": SECRET } } });
    for (cluster, user, says) in [
        (
            with("proxy-url", &password),
            &token,
            "proxy-url: the scheme \"ftp\"",
        ),
        (
            with("server", "ftp://api"),
            &token,
            "write https://host:port",
        ),
        (
            with("certificate-authority", "nowhere"),
            &token,
            "nowhere: No such file",
        ),
        (
            with("certificate-authority-data", "!"),
            &token,
            "certificate-authority-data is not base64",
        ),
        (
            with("certificate-authority-data", "eA=="),
            &token,
            "no certificate in PEM",
        ),
        (good.clone(), &exec, "interactiveMode Always"),
        (
            good.clone(),
            &provider,
            "auth-provider is not supported; use an exec plugin",
        ),
        (
            good.clone(),
            &json!({ "tokenFile": "nowhere" }),
            "nowhere: No such file",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        write_kubeconfig(dir.path(), &cluster, user);
        let told = client_of(dir.path()).await.unwrap_err();
        assert!(told.contains(says), "{says}: {told}");
        assert!(!told.contains(SECRET), "{told}");
    }
    // Where it cannot be read at all, not even the lines around the error are told.
    let dir = tempfile::tempdir().unwrap();
    let text = format!("users:\n- name: u\n  user:\n    token: {SECRET}\n   x: [\n");
    std::fs::write(dir.path().join("kubeconfig"), text).unwrap();
    let told = client_of(dir.path()).await.unwrap_err();
    assert!(
        told.contains("parse kubeconfig") && !told.contains(SECRET),
        "{told}"
    );
}
