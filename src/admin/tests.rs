//! The socket's safety; what it answers is tested with the command line in `tests/cli`.

use super::client::{Client, ClientError};
use super::*;
use crate::types::Clock;
use crate::types::{BootId, SystemClock};

struct Hooks;

impl AdminHooks for Hooks {
    fn quarantined(&self) -> Vec<Quarantined> {
        Vec::new()
    }

    fn write_backup(&self, to: &mut dyn Write) -> Result<(), BoxError> {
        to.write_all(&[7; 200_000])?;
        Err("the disk is on fire".into())
    }

    fn save_backup(&self) -> Result<PathBuf, BoxError> {
        Err("no space".into())
    }
}

fn start(dir: &Path) -> (CancellationToken, tokio::task::JoinHandle<()>) {
    let clock = SystemClock::new(BootId(1));
    let credentials = Standing::default();
    credentials.set_trouble(Some("they expired".to_owned()));
    let info = AdminInfo {
        credentials: Some(credentials),
        version: "1.2.3".into(),
        started: clock.now(),
        drain: Default::default(),
        hooks: Arc::new(Hooks),
    };
    let stop = CancellationToken::new();
    let store = Store::in_memory(Arc::new(clock));
    let task = tokio::spawn(serve(bind(dir).unwrap(), store, info, stop.clone()));
    (stop, task)
}

#[test]
fn only_root_and_the_agents_own_user_may_ask() {
    assert!(may_ask(0, 1000));
    assert!(may_ask(1000, 1000));
    assert!(!may_ask(1001, 1000));
    assert!(!may_ask(1000, 0));
}

#[tokio::test]
async fn the_socket_is_private_and_replaces_a_dead_agents_one() {
    let dir = tempfile::tempdir().unwrap();
    let state_dir = dir.path().join("state");
    drop(bind(&state_dir).unwrap());
    assert!(matches!(
        Client::connect(&state_dir).await,
        Err(ClientError::NotRunning { .. })
    ));
    let (_stop, _task) = start(&state_dir);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&state_dir), 0o700);
    assert_eq!(mode(&socket_path(&state_dir)), 0o600);
    let info = Client::connect(&state_dir)
        .await
        .unwrap()
        .info()
        .await
        .unwrap();
    assert_eq!(
        (info.version.as_str(), info.store.as_str()),
        ("1.2.3", "ok")
    );
    assert_eq!(info.credentials.as_deref(), Some("they expired"));
}

#[tokio::test]
async fn a_path_too_long_for_a_socket_says_so() {
    let error = bind(Path::new(&format!("/tmp/{}", "x".repeat(120)))).unwrap_err();
    assert!(error.to_string().contains("shorter --state-dir"), "{error}");
}

#[tokio::test]
async fn a_failed_backup_cannot_be_taken_for_a_whole_one() {
    let dir = tempfile::tempdir().unwrap();
    let (_stop, _task) = start(dir.path());
    let client = Client::connect(dir.path()).await.unwrap();
    let mut pieces = client.backup().await.unwrap().pieces();
    let mut failed = false;
    while let Some(piece) = futures::StreamExt::next(&mut pieces).await {
        failed |= piece.is_err();
    }
    assert!(failed, "the stream must not end as if it were complete");
    let error = client.save_backup().await.unwrap_err().to_string();
    assert_eq!(error, "the agent answers 500: no space");
}

#[tokio::test]
async fn shutdown_ends_a_watch() {
    let dir = tempfile::tempdir().unwrap();
    let (stop, task) = start(dir.path());
    let client = Client::connect(dir.path()).await.unwrap();
    let query = Query::from_query_string("tables=pods").unwrap();
    let mut pieces = client.watch(&query).await.unwrap().pieces();
    let first = futures::StreamExt::next(&mut pieces)
        .await
        .unwrap()
        .unwrap();
    assert!(first.ends_with(b"\n") && first.starts_with(b"{\"type\":\"BOOKMARK\""));
    stop.cancel();
    tokio::time::timeout(Duration::from_secs(5), task)
        .await
        .expect("serve returns although somebody watches")
        .unwrap();
    assert!(
        !socket_path(dir.path()).exists(),
        "the socket goes with its agent"
    );
}
