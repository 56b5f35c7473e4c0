//! Files of the credentials that are missing or broken when the agent starts on a node that was in use.

use super::*;
use crate::types::events::MemoryRecorder;

/// A server that knows nobody, and answers everybody.
async fn serve_pods() -> String {
    let answer = || async {
        json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": []}).to_string()
    };
    serve(Router::new().route("/api/v1/pods", get(answer))).await
}

fn config(server: &str, user: Value) -> String {
    let cluster = json!({"server": server, "certificate-authority": "ca.pem"});
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [{"name": "c", "cluster": cluster}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": user}],
    })
    .to_string()
}

#[tokio::test]
async fn a_node_that_was_in_use_waits_for_files_of_its_kubeconfig() {
    let now = today();
    let pem = identity(now - DAY, now + 99 * DAY);
    let server = serve_pods().await;
    let files =
        json!({"client-certificate": "own.pem", "client-key": "own.key", "tokenFile": "token"});
    let whole = config(&server, files);
    let all = [
        ("kubeconfig", whole.as_str()),
        ("ca.pem", pem.as_str()),
        ("own.pem", pem.as_str()),
        ("own.key", pem.as_str()),
        ("token", "t"),
    ];
    for (late, before, says) in [
        ("kubeconfig", None, "No such file"),
        ("kubeconfig", Some("{"), "parse kubeconfig"),
        ("kubeconfig", Some("{}"), "no current-context"),
        ("ca.pem", None, "ca.pem: No such file"),
        ("ca.pem", Some(""), "has no certificate in PEM"),
        ("own.pem", None, "own.pem: No such file"),
        ("own.pem", Some("x"), "not a certificate in PEM"),
        ("own.key", None, "own.key: No such file"),
        ("own.key", Some(""), "has no private key in PEM"),
        ("token", None, "token: No such file"),
        ("token", Some("\n"), "token is empty"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = settings(dir.path());
        for (name, content) in all.iter().filter(|(name, _)| *name != late) {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        if let Some(content) = before {
            std::fs::write(dir.path().join(late), content).unwrap();
        }
        // On a node that never ran, it is a mistake.
        let clock = Arc::new(hand(now));
        let refused = connect(&settings, clock.clone(), Metrics::default()).await;
        assert!(refused.is_err(), "{late} {before:?}");

        settings.waits_for_files = true;
        let connected = connect(&settings, clock, Metrics::default()).await;
        let (client, credentials) = connected.unwrap().unwrap();
        let recorder = MemoryRecorder::default();
        let mut credentials = credentials.recording(Arc::new(recorder.clone()));
        for _ in 0..3 {
            credentials.step().await;
            let trouble = client.standing().trouble().unwrap_or_default();
            for part in [says, late, "no restart is needed"] {
                assert!(trouble.contains(part), "{late} {before:?}: {trouble}");
            }
        }
        let events = recorder.events();
        assert_eq!(events.len(), 1, "{events:?}");
        let pods: Api<Pod> = Api::all(client.kube());
        let params = ListParams::default();
        pods.list(&params).await.unwrap_err();

        let (_, content) = all.iter().find(|(name, _)| *name == late).unwrap();
        std::fs::write(dir.path().join(late), content).unwrap();
        credentials.step().await;
        assert_eq!(client.standing().trouble(), None, "{late} {before:?}");
        pods.list(&params).await.unwrap();
    }
}

#[tokio::test]
async fn a_node_that_was_in_use_waits_for_its_bootstrap_kubeconfig() {
    let now = today();
    let signer = Signer::new((now - DAY, now + 99 * DAY));
    signer.say("approve");
    let server = signer.serve().await;
    let dir = tempfile::tempdir().unwrap();
    let mut settings = settings(dir.path());
    let bootstrap = dir.path().join("bootstrap");
    settings.bootstrap_kubeconfig = Some(bootstrap.clone());
    settings.waits_for_files = true;
    let connected = connect(&settings, Arc::new(hand(now)), Metrics::default()).await;
    let (client, mut credentials) = connected.unwrap().unwrap();
    credentials.step().await;
    let trouble = client.standing().trouble().unwrap_or_default();
    assert!(trouble.contains(bootstrap.to_str().unwrap()), "{trouble}");

    write_config(&bootstrap, &server, json!({"token": "t"}));
    credentials.step().await;
    assert_eq!(client.standing().trouble(), None);
    assert!(settings.kubeconfig.unwrap().exists());
}
