//! Through proxies of the kubeconfig and of the environment.

use std::path::PathBuf;
use std::sync::Arc;

use futures::StreamExt;
use holdfast::apiserver::Reachability;
use holdfast_testkit::envtest::Authority;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, WatchParams};
use serde_json::json;

use crate::proxy::{Kind, Proxy};
use crate::server::{
    Log, PATIENCE, Server, client, client_of, list, why_down, within, write_kubeconfig,
};

/// A name that only a proxy can look up.
const NAME: &str = "kubernetes.default.svc:6443";

fn kinds(authority: &Arc<Authority>) -> [Kind; 3] {
    [Kind::Connect, Kind::Tls(authority.clone()), Kind::Socks5]
}

#[tokio::test]
async fn proxies_of_the_kubeconfig_are_used_with_and_without_their_passwords() {
    let (log, _guard) = Log::begin();
    let server = Server::start().await;
    for kind in kinds(&server.authority) {
        let proxy = Proxy::start(kind, server.address()).await;
        for user in ["user:p%40ss@", ""] {
            let dir = tempfile::tempdir().unwrap();
            let mut cluster = server.cluster_at(NAME);
            cluster["proxy-url"] = proxy.url(user).into();
            let (client, _credentials) =
                client(dir.path(), &cluster, &json!({ "token": "t0k3n" })).await;
            assert_eq!(list(&client).await.unwrap(), 0, "{}", proxy.url(user));
        }
        assert_eq!(proxy.targets(), [NAME, NAME]);
    }
    let text = log.text();
    for secret in ["p@ss", "p%40ss", "dXNlcjpwQHNz", "t0k3n"] {
        let line = text.lines().find(|line| line.contains(secret));
        assert_eq!(line, None, "{secret}");
    }
}

#[tokio::test]
async fn a_proxy_is_verified_under_its_own_name_before_it_is_told_anything() {
    let server = Server::start().await;
    let stranger = Arc::new(Authority::new("stranger"));
    // The server's other name is not the proxy's, whose certificate has both.
    for (authority, tls_server_name, works) in [
        (server.authority.clone(), "kubernetes", true),
        (stranger, "kubernetes", false),
    ] {
        let proxy = Proxy::start(Kind::Tls(authority), server.address()).await;
        let dir = tempfile::tempdir().unwrap();
        let mut cluster = server.cluster_at("192.0.2.1:6443");
        cluster["tls-server-name"] = tls_server_name.into();
        cluster["proxy-url"] = proxy.url("user:p%40ss@").into();
        let (client, _credentials) = client(dir.path(), &cluster, &json!({ "token": "t" })).await;
        let listed = list(&client).await;
        assert_eq!(listed.is_ok(), works, "{listed:?}");
        assert_eq!(
            proxy.users().len(),
            usize::from(works),
            "the password stays here"
        );
        if !works {
            let why = why_down(&client);
            for part in ["UnknownIssuer", "reach the proxy https://127.0.0.1:"] {
                assert!(why.contains(part), "{why}");
            }
        }
    }
}

#[tokio::test]
async fn a_proxy_that_lets_nobody_through_is_told_without_the_password() {
    let server = Server::start().await;
    for kind in kinds(&server.authority) {
        let socks = matches!(kind, Kind::Socks5);
        let proxy = Proxy::start(kind, server.address()).await;
        for (user, refusal, says) in [
            (
                "user:wr%40ng@",
                None,
                if socks {
                    "credentials not accepted"
                } else {
                    "(407)"
                },
            ),
            (
                "user:p%40ss@",
                Some("502 Bad Gateway"),
                if socks {
                    "credentials not accepted"
                } else {
                    "\"HTTP/1.1 502 Bad Gateway\""
                },
            ),
            (
                "",
                Some("403 Forbidden"),
                if socks { "SOCKS" } else { "403 Forbidden" },
            ),
        ] {
            if let Some(refusal) = refusal {
                proxy.refuse(refusal);
            }
            let dir = tempfile::tempdir().unwrap();
            let mut cluster = server.cluster();
            cluster["proxy-url"] = proxy.url(user).into();
            let (client, _credentials) =
                client(dir.path(), &cluster, &json!({ "token": "t" })).await;
            let error = list(&client).await.unwrap_err();
            let why = why_down(&client);
            assert!(
                why.to_lowercase().contains(&says.to_lowercase()),
                "{says}: {why}"
            );
            assert!(why.contains(&proxy.url("")), "{why}");
            for secret in ["wr@ng", "wr%40ng", "p@ss", "p%40ss"] {
                let told = format!("{why} {error:?}");
                assert!(!told.contains(secret), "{told}");
            }
        }
        assert_eq!(proxy.targets().len(), 0);
    }
    assert_eq!(server.requests(), 0);
}

#[tokio::test]
async fn a_proxy_that_restarts_costs_what_was_in_flight_and_no_more() {
    let server = Server::start().await;
    for kind in kinds(&server.authority) {
        let mut proxy = Proxy::start(kind, server.address()).await;
        let dir = tempfile::tempdir().unwrap();
        let mut cluster = server.cluster_at(NAME);
        cluster["proxy-url"] = proxy.url("user:p%40ss@").into();
        let (client, _credentials) = client(dir.path(), &cluster, &json!({ "token": "t" })).await;
        let pods: Api<Pod> = Api::all(client.kube());
        let params = WatchParams::default();
        let mut watch = pods.watch(&params, "1").await.unwrap().boxed();
        list(&client).await.unwrap();
        proxy.stop().await;
        let ended = within("the watch ends", watch.next()).await;
        assert!(ended.is_none_or(|event| event.is_err()));
        list(&client).await.unwrap_err();
        assert!(matches!(client.connection().now(), Reachability::Down(_)));
        proxy.begin().await;
        list(&client).await.unwrap();
        let again = pods.watch(&params, "1").await;
        drop(again.unwrap());
        assert_eq!(client.connection().now(), Reachability::Up);
    }
}

#[tokio::test]
async fn hundreds_of_watches_share_few_connections_and_hold_up_nothing() {
    const WATCHES: usize = 200;
    let server = Server::start().await;
    // It counts connections.
    let proxy = Proxy::start(Kind::Socks5, server.address()).await;
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = server.cluster();
    cluster["proxy-url"] = proxy.url("user:p%40ss@").into();
    let (client, _credentials) = client(dir.path(), &cluster, &json!({ "token": "t" })).await;
    let pods: Api<Pod> = Api::all(client.kube());
    let (mut open, params) = (Vec::new(), WatchParams::default());
    for _ in 0..WATCHES {
        let watch = pods.watch(&params, "1");
        let watch = tokio::time::timeout(PATIENCE, watch).await;
        open.push(watch.expect("a watch begins").unwrap().boxed());
    }
    assert_eq!(server.open_watches(), WATCHES);
    let listed = tokio::time::timeout(PATIENCE, list(&client)).await;
    assert_eq!(listed.expect("a list beside the watches").unwrap(), 0);
    let connections = proxy.targets().len();
    assert!(connections <= 4, "{connections} connections");
}

/// Where this test finds its kubeconfig when it runs itself.
const DIRECTORY: &str = "HOLDFAST_TEST_KUBECONFIG_DIR";

#[tokio::test]
async fn the_environments_proxy_is_used_where_the_kubeconfig_has_none() {
    if let Some(dir) = std::env::var_os(DIRECTORY) {
        let (client, _credentials) = client_of(&PathBuf::from(dir)).await.unwrap();
        list(&client).await.unwrap();
        return;
    }
    // An address of this machine that is not one of those that are never asked for through a proxy.
    let server = Server::at("0.0.0.0", Arc::new(Authority::new("here"))).await;
    let proxy = Proxy::start(Kind::Connect, server.address()).await;
    let own = Proxy::start(Kind::Socks5, server.address()).await;
    let (url, dead) = (proxy.url("user:p%40ss@"), "http://127.0.0.1:1");
    // Whom of them a client goes through.
    for (env, proxy_url, through) in [
        (vec![("HTTPS_PROXY", url.as_str())], None, Some(&proxy)),
        (vec![("https_proxy", url.as_str())], None, Some(&proxy)),
        (
            vec![("HTTPS_PROXY", url.as_str()), ("NO_PROXY", "127.0.0.1,")],
            None,
            Some(&proxy),
        ),
        (
            vec![
                ("HTTPS_PROXY", dead),
                ("NO_PROXY", "example.org, 0.0.0.0/8"),
            ],
            None,
            None,
        ),
        (vec![("HTTPS_PROXY", dead), ("no_proxy", "*")], None, None),
        (vec![("HTTP_PROXY", dead), ("ALL_PROXY", dead)], None, None),
        (
            vec![("HTTPS_PROXY", dead), ("NO_PROXY", "*")],
            Some(own.url("")),
            Some(&own),
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut cluster = server.cluster();
        cluster["tls-server-name"] = "kubernetes".into();
        if let Some(proxy_url) = proxy_url {
            cluster["proxy-url"] = proxy_url.into();
        }
        write_kubeconfig(dir.path(), &cluster, &json!({ "token": "t" }));
        let tunnels = || proxy.targets().len() + own.targets().len();
        let (before, all) = (through.map(|proxy| proxy.targets().len()), tunnels());
        let mut child = tokio::process::Command::new(std::env::current_exe().unwrap());
        child
            .args([
                "--exact",
                "proxies::the_environments_proxy_is_used_where_the_kubeconfig_has_none",
            ])
            .env(DIRECTORY, dir.path());
        for name in ["HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"] {
            child.env_remove(name).env_remove(name.to_lowercase());
        }
        child.envs(env.iter().copied());
        let output = within("the child ends", child.output()).await.unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{env:?}: {text}"
        );
        let after = through.map(|proxy| proxy.targets().len());
        assert_eq!(after, before.map(|before| before + 1), "{env:?}");
        assert_eq!(tunnels(), all + usize::from(through.is_some()), "{env:?}");
    }
}
