//! A node whose first certificate is asked for with what an exec plugin gives.

use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;

use super::*;

#[tokio::test]
async fn a_plugin_may_introduce_the_node() {
    let now = today();
    let signer = Signer::new((now - DAY, now + 99 * DAY));
    signer.say("approve");
    let known = from_fn(|request: Request, next: Next| async move {
        let given = request.headers().get("authorization");
        if given.is_none_or(|given| given != "Bearer first") {
            return Response::new("who?".into());
        }
        next.run(request).await
    });
    let server = serve(signer.router().layer(known)).await;
    let dir = tempfile::tempdir().unwrap();
    let mut settings = settings(dir.path());
    let bootstrap = dir.path().join("bootstrap");
    settings.bootstrap_kubeconfig = Some(bootstrap.clone());
    let answer = json!({
        "kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1",
        "status": { "token": "first" },
    });
    let exec = json!({ "exec": {
        "apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never",
        "command": "/bin/sh", "args": ["-c", format!("echo '{answer}'")],
    } });
    write_config(&bootstrap, &server, exec);
    let clock = Arc::new(hand(now));
    let connected = connect(&settings, clock, Metrics::default()).await;
    let (_client, credentials) = connected.unwrap().unwrap();
    let token = CancellationToken::new();
    let running = tokio::spawn(credentials.run(token.clone()));
    let kubeconfig = settings.kubeconfig.clone().unwrap();
    eventually("the kubeconfig", || kubeconfig.exists()).await;
    token.cancel();
    running.await.unwrap();
    let written = std::fs::read_to_string(&kubeconfig).unwrap();
    assert!(
        !written.contains("first") && !written.contains("exec"),
        "{written}"
    );
}
