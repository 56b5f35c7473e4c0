//! The cluster that the store is kept for, see [`core::cluster`](crate::core::cluster).
//!
//! On disk: `<state-dir>/cluster` has the server and the hashes of the authorities' keys, the UID of the node's object, and
//! what the API server of another cluster showed, if that made the agent end; as JSON.
//!
//! **Invariant:** the record names another cluster only after the store of the previous one was moved to quarantine. So
//! a crash in between repeats the change, and loses nothing of the new store.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::root_dir;
use crate::apiserver::{ApiClient, ApiSettings, cluster_of, shown_node};
use crate::core::cluster::{Cluster, Recorded, Shown, Verdict, judge};
use crate::node_object::NodeObject;
use crate::store::former;
use crate::types::{Stamp, blocking};

/// The name of the task that runs [`watch`].
pub(super) const TASK: &str = "cluster of the store";

/// The record, below the state directory.
const RECORD: &str = "cluster";
/// Poll interval of the kubeconfig.
const LOOK: Duration = Duration::from_secs(30);
/// Time that the API server has to answer with the node, at the start and later.
const PATIENCE: Duration = Duration::from_secs(5);

/// Facts about the cluster at the start of the agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// The cluster that the kubeconfig names; `None` without one.
    pub(super) cluster: Option<Cluster>,
    /// Answer of its API server about the node. It is requested only if the files leave a doubt.
    pub(super) shown: Shown,
}

/// Outcome of claiming the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Claimed {
    /// Path of the previous cluster's store, if it was moved to quarantine.
    pub(super) former: Option<PathBuf>,
    /// True if the store may belong to another cluster.
    pub(super) doubted: bool,
}

/// Finds out which cluster the node is of. Asks the API server for a few seconds where the files leave a doubt.
pub(super) async fn find(
    settings: ApiSettings,
    state_dir: PathBuf,
    api: Option<&ApiClient>,
) -> Found {
    let node = settings.node_name.clone();
    let read = blocking::run(move || (cluster_of(&settings), read(&state_dir)));
    let Ok((Some(cluster), recorded)) = read.await else {
        return Found::default();
    };
    // What cannot be read is told by `claim`.
    let recorded = recorded.unwrap_or_default();
    let verdict = judge(recorded.as_ref(), &cluster, &Shown::Nothing);
    let shown = match (verdict, api) {
        (Verdict::Doubted | Verdict::Other, Some(api)) => shown_node(api, &node, PATIENCE).await,
        _ => Shown::Nothing,
    };
    Found {
        cluster: Some(cluster),
        shown,
    }
}

/// Sets the store aside if it was kept for another cluster, and claims the cluster for the store that is opened next.
/// `is_new`: that store is another one than the record's in any case. Blocking; the caller holds the lock of the state
/// directory.
///
/// Errors of reading and writing are logged. The store then stays in use, and the next start tries again.
pub(super) fn claim(found: &Found, state_dir: &Path, is_new: bool, now: Stamp) -> Claimed {
    let Some(cluster) = &found.cluster else {
        return Claimed::default();
    };
    let mut claimed = Claimed::default();
    if let Err(error) = try_claim(cluster, &found.shown, state_dir, is_new, now, &mut claimed) {
        warn!(
            state_dir = %state_dir.display(),
            server = cluster.server,
            %error,
            "cannot check whether the store belongs to the cluster"
        );
    }
    claimed
}

fn try_claim(
    cluster: &Cluster,
    shown: &Shown,
    state_dir: &Path,
    is_new: bool,
    now: Stamp,
    claimed: &mut Claimed,
) -> io::Result<()> {
    let recorded = read(state_dir)?.filter(|_| !is_new);
    let keep = |node: Option<String>| Recorded {
        cluster: cluster.clone(),
        node,
        shown: Shown::Nothing,
    };
    let record = match judge(recorded.as_ref(), cluster, shown) {
        Verdict::Claim => keep(None),
        // What is recorded of the node's object is renewed when the API server shows it.
        Verdict::Same => keep(recorded.as_ref().and_then(|recorded| recorded.node.clone())),
        Verdict::Doubted => {
            warn!(
                server = cluster.server,
                before = recorded
                    .as_ref()
                    .map(|recorded| recorded.cluster.server.clone()),
                "the store may belong to another cluster: starting no pod of the API server before it has returned the node"
            );
            claimed.doubted = true;
            return Ok(());
        }
        Verdict::Other => {
            claimed.former = former::set_aside(state_dir, now)?;
            info!(
                server = cluster.server,
                before = recorded
                    .as_ref()
                    .map(|recorded| recorded.cluster.server.clone()),
                former = claimed
                    .former
                    .as_deref()
                    .map(|path| path.display().to_string()),
                "the node has joined another cluster: moved the store to quarantine, beginning with an empty one"
            );
            keep(None)
        }
    };
    match recorded.as_ref() == Some(&record) {
        true => Ok(()),
        false => write(state_dir, &record),
    }
}

/// Keeps the record of the cluster and of the node's object. Returns when the store turns out to be that of another
/// cluster, or may be because the kubeconfig has changed: the agent has to start anew then.
pub(super) async fn watch(
    settings: ApiSettings,
    state_dir: PathBuf,
    at_start: Option<Cluster>,
    api: ApiClient,
    node_object: NodeObject,
    token: CancellationToken,
) {
    let mut node = node_object.subscribe();
    loop {
        let replaced = api.standing().replaced();
        let uid = (node.borrow_and_update().as_ref()).and_then(|node| node.metadata.uid.clone());
        let look = look(&settings, &state_dir, at_start.as_ref(), &api, uid);
        let is_over = tokio::select! {
            () = token.cancelled() => return,
            // Cancel-safe: the record is written whole or not at all.
            is_over = look => is_over,
        };
        if is_over {
            return;
        }
        tokio::select! {
            () = token.cancelled() => return,
            // Cancel-safe, all of them.
            () = tokio::time::sleep(LOOK) => {}
            // Those that were waited for may be of another cluster.
            () = replaced => {}
            changed = node.changed() => if changed.is_err() {
                return token.cancelled().await;
            },
        }
    }
}

/// Looks once. Returns whether the agent has to start anew.
async fn look(
    settings: &ApiSettings,
    state_dir: &Path,
    at_start: Option<&Cluster>,
    api: &ApiClient,
    uid: Option<String>,
) -> bool {
    let (files, directory) = (settings.clone(), state_dir.to_owned());
    let found = blocking::run(move || (cluster_of(&files), read(&directory))).await;
    let Ok((Some(cluster), Ok(recorded))) = found else {
        // A file that cannot be read says nothing.
        return false;
    };
    let judged = |shown: &Shown| judge(recorded.as_ref(), &cluster, shown);
    let mut record = Recorded {
        cluster: cluster.clone(),
        node: uid.or_else(|| recorded.as_ref()?.node.clone()),
        shown: Shown::Nothing,
    };
    let mut is_over = false;
    if matches!(judged(&Shown::Nothing), Verdict::Doubted | Verdict::Other) {
        if at_start != Some(&cluster) {
            // The client may not have followed the kubeconfig yet: the next start asks.
            info!(
                server = cluster.server,
                "the kubeconfig names another cluster, restarting"
            );
            return true;
        }
        let shown = shown_node(api, &settings.node_name, PATIENCE).await;
        match judged(&shown) {
            // The node is the one on record, or there is none to compare with.
            Verdict::Same | Verdict::Claim => {
                if let Shown::Node(uid) = shown {
                    record.node = Some(uid);
                }
            }
            Verdict::Doubted => return false,
            Verdict::Other => {
                let Some(before) = recorded.clone() else {
                    return false;
                };
                info!(
                    server = cluster.server,
                    ?shown,
                    "the API server belongs to another cluster than the store, restarting with an empty store"
                );
                record = Recorded { shown, ..before };
                is_over = true;
            }
        }
    }
    if recorded.as_ref() == Some(&record) {
        return is_over;
    }
    let directory = state_dir.to_owned();
    match blocking::run(move || write(&directory, &record)).await {
        Ok(Ok(())) => is_over,
        Ok(Err(error)) => {
            warn!(state_dir = %state_dir.display(), %error, "cannot store the record of the cluster");
            false
        }
        Err(_) => false,
    }
}

/// Returns the API server of the cluster that the store is kept for, if it is recorded. Blocking.
pub(super) fn recorded_server(state_dir: &Path) -> Option<String> {
    let recorded = read(state_dir).ok()??;
    Some(recorded.cluster.server)
}

/// Reads the record; one that is damaged says nothing.
fn read(state_dir: &Path) -> io::Result<Option<Recorded>> {
    match fs::read(state_dir.join(RECORD)) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes)
            .ok()
            .and_then(|value| parse(&value))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn parse(value: &Value) -> Option<Recorded> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let authorities = value.get("authorities")?.as_array()?;
    Some(Recorded {
        cluster: Cluster {
            server: value.get("server").and_then(text)?,
            authorities: authorities.iter().map(text).collect::<Option<_>>()?,
        },
        node: value.get("node").and_then(text),
        shown: match value.get("shown") {
            Some(Value::String(uid)) => Shown::Node(uid.clone()),
            Some(Value::Bool(false)) => Shown::Absent,
            _ => Shown::Nothing,
        },
    })
}

fn write(state_dir: &Path, record: &Recorded) -> io::Result<()> {
    let shown = match &record.shown {
        Shown::Nothing => Value::Null,
        Shown::Absent => Value::Bool(false),
        Shown::Node(uid) => Value::String(uid.clone()),
    };
    let text = json!({
        "server": record.cluster.server,
        "authorities": record.cluster.authorities,
        "node": record.node,
        "shown": shown,
    });
    root_dir::write(state_dir, RECORD, &format!("{text}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apiserver::testkit::FakeApi;
    use crate::types::BootId;

    const NOW: Stamp = Stamp {
        boot: BootId(1),
        boottime_ms: 1_000,
        wall_ms: 1_700_000_000_000,
    };

    fn cluster(server: &str, authority: &str) -> Cluster {
        Cluster {
            server: server.to_owned(),
            authorities: [authority.to_owned()].into(),
        }
    }

    fn found(server: &str, authority: &str, shown: Shown) -> Found {
        Found {
            cluster: Some(cluster(server, authority)),
            shown,
        }
    }

    /// A state directory with a store of this cluster, whose node has the UID `u1`.
    fn state() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let first = claim(
            &found("https://a", "1", Shown::Nothing),
            dir.path(),
            false,
            NOW,
        );
        assert_eq!(first, Claimed::default());
        let mut record = read(dir.path()).unwrap().unwrap();
        record.node = Some("u1".to_owned());
        write(dir.path(), &record).unwrap();
        fs::create_dir(dir.path().join("db")).unwrap();
        fs::write(dir.path().join("db/db"), "pods").unwrap();
        dir
    }

    fn is_kept(dir: &tempfile::TempDir) -> bool {
        dir.path().join("db/db").exists()
    }

    #[test]
    fn a_store_of_another_cluster_is_set_aside_once() {
        let dir = state();
        let other = found("https://b", "2", Shown::Nothing);
        let claimed = claim(&other, dir.path(), false, NOW);
        let former = claimed.former.unwrap();
        assert!(former.starts_with(dir.path().join("quarantine")));
        assert!(former.join("db/db").exists() && !is_kept(&dir));
        // The new store is that of the new cluster, whose node is not known yet.
        fs::create_dir(dir.path().join("db")).unwrap();
        fs::write(dir.path().join("db/db"), "others").unwrap();
        assert_eq!(claim(&other, dir.path(), false, NOW), Claimed::default());
        assert!(is_kept(&dir));
        let record = read(dir.path()).unwrap().unwrap();
        assert_eq!(
            (record.node, record.cluster),
            (None, cluster("https://b", "2"))
        );
    }

    #[test]
    fn a_change_of_clusters_that_was_cut_off_is_completed_once() {
        let dir = state();
        former::set_aside(dir.path(), NOW).unwrap().unwrap();
        let other = found("https://b", "2", Shown::Absent);
        assert_eq!(claim(&other, dir.path(), false, NOW), Claimed::default());
        let record = read(dir.path()).unwrap().unwrap();
        assert_eq!(record.cluster, cluster("https://b", "2"));
    }

    #[test]
    fn a_store_stays_when_its_cluster_changes_or_is_in_doubt() {
        let node = |uid: &str| Shown::Node(uid.to_owned());
        for (found, doubted) in [
            (found("https://a", "1", node("u2")), false),
            (found("https://b", "1", Shown::Nothing), false),
            (found("https://b", "2", node("u1")), false),
            (found("https://a", "2", Shown::Nothing), true),
            (Found::default(), false),
        ] {
            let dir = state();
            let before = read(dir.path()).unwrap().unwrap();
            let claimed = claim(&found, dir.path(), false, NOW);
            assert_eq!(
                (claimed.former, claimed.doubted),
                (None, doubted),
                "{found:?}"
            );
            assert!(is_kept(&dir), "{found:?}");
            let after = read(dir.path()).unwrap().unwrap();
            assert_eq!(after.node, before.node, "{found:?}");
            if doubted {
                assert_eq!(after, before, "judged again");
            }
        }
    }

    #[test]
    fn a_record_that_is_lost_or_damaged_takes_no_store_away() {
        for damage in ["", "{", "{\"server\": 1}", "null"] {
            let dir = state();
            fs::write(dir.path().join(RECORD), damage).unwrap();
            let other = found("https://b", "2", Shown::Absent);
            assert_eq!(claim(&other, dir.path(), false, NOW), Claimed::default());
            assert!(is_kept(&dir), "{damage}");
        }
        // It cannot be read: that says nothing.
        let dir = state();
        fs::remove_file(dir.path().join(RECORD)).unwrap();
        fs::create_dir(dir.path().join(RECORD)).unwrap();
        let other = found("https://b", "2", Shown::Absent);
        assert_eq!(claim(&other, dir.path(), false, NOW), Claimed::default());
        assert!(is_kept(&dir));
    }

    #[test]
    fn what_made_the_last_agent_end_decides_without_the_server() {
        let dir = state();
        let mut record = read(dir.path()).unwrap().unwrap();
        for shown in [Shown::Absent, Shown::Node("u2".to_owned())] {
            record.shown = shown;
            write(dir.path(), &record).unwrap();
            assert_eq!(read(dir.path()).unwrap(), Some(record.clone()));
        }
        let other = found("https://a", "2", Shown::Nothing);
        assert!(claim(&other, dir.path(), false, NOW).former.is_some());
    }

    /// A node's kubeconfig, and its state directory.
    struct Files {
        dir: tempfile::TempDir,
        settings: ApiSettings,
    }

    impl Files {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let settings = ApiSettings {
                kubeconfig: Some(dir.path().join("kubeconfig")),
                bootstrap_kubeconfig: None,
                lifeline: None,
                cert_dir: dir.path().join("pki"),
                node_name: "n1".to_owned(),
                rotate_certificates: false,
                waits_for_files: false,
                qps: 1000,
                burst: 1000,
            };
            Self { dir, settings }
        }

        /// Names a server, and has its authorities in a file.
        fn name(&self, server: &str, authorities: &str) -> Cluster {
            let authority = self.dir.path().join("ca.crt");
            fs::write(&authority, authorities).unwrap();
            let config = json!({
                "apiVersion": "v1", "kind": "Config", "current-context": "here",
                "clusters": [{"name": "c", "cluster": {
                    "server": server, "certificate-authority": authority,
                }}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
            });
            let path = self.settings.kubeconfig.as_deref().unwrap();
            fs::write(path, config.to_string()).unwrap();
            cluster_of(&self.settings).unwrap()
        }

        async fn find(&self, api: &FakeApi) -> Found {
            let state = self.dir.path().to_owned();
            find(self.settings.clone(), state, Some(&api.client)).await
        }

        fn claim(&self, found: &Found) -> Claimed {
            claim(found, self.dir.path(), false, NOW)
        }

        async fn look(&self, at_start: &Cluster, api: &FakeApi, uid: Option<&str>) -> bool {
            let uid = uid.map(str::to_owned);
            let (dir, client) = (self.dir.path(), &api.client);
            look(&self.settings, dir, Some(at_start), client, uid).await
        }

        fn record(&self) -> Recorded {
            read(self.dir.path()).unwrap().unwrap()
        }
    }

    /// A certificate of an authority with this key, in PEM.
    fn certificate(key: &rcgen::KeyPair, name: &str) -> String {
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.distinguished_name = rcgen::DistinguishedName::new();
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, name);
        params.self_signed(key).unwrap().pem()
    }

    fn show(api: &FakeApi, uid: &str) {
        let node =
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "uid": uid}});
        api.with(|model| {
            model.down = false;
            model.objects.insert("/api/v1/nodes/n1".to_owned(), node)
        });
    }

    #[tokio::test(start_paused = true)]
    async fn a_kubeconfig_that_comes_late_is_judged_at_once() {
        let keys = [0, 1].map(|_| rcgen::KeyPair::generate().unwrap());
        let (files, api) = (Files::new(), FakeApi::new());
        files.name("https://a:6443", &certificate(&keys[0], "first"));
        let found = files.find(&api).await;
        assert_eq!(files.claim(&found), Claimed::default());
        fs::remove_file(files.settings.kubeconfig.as_deref().unwrap()).unwrap();
        let token = CancellationToken::new();
        let watching = tokio::spawn(watch(
            files.settings.clone(),
            files.dir.path().to_owned(),
            None,
            api.client.clone(),
            NodeObject::default(),
            token.clone(),
        ));
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!watching.is_finished());
        // It is of another cluster.
        files.name("https://b:6443", &certificate(&keys[1], "second"));
        let before = tokio::time::Instant::now();
        api.client.standing().taken();
        watching.await.unwrap();
        assert!(before.elapsed() < Duration::from_secs(1));
    }

    #[tokio::test]
    async fn the_server_decides_where_the_kubeconfig_leaves_a_doubt() {
        let keys = [0, 1].map(|_| rcgen::KeyPair::generate().unwrap());
        let (files, api) = (Files::new(), FakeApi::new());
        let first = files.name("https://a:6443/", &certificate(&keys[0], "first"));
        assert_eq!(first.server, "https://a:6443");
        let found = files.find(&api).await;
        assert_eq!(files.claim(&found), Claimed::default());
        assert!(!files.look(&first, &api, Some("u1")).await);
        assert_eq!(files.record().node.as_deref(), Some("u1"));
        // The certificate of the authority is renewed, and its key is the same; so is the cluster of another node object.
        let renewed = files.name("https://a:6443", &certificate(&keys[0], "renewed"));
        assert_eq!(renewed, first);
        assert!(!files.look(&first, &api, Some("u2")).await);
        assert_eq!(files.record().node.as_deref(), Some("u2"));
        assert_eq!(api.with(|model| model.log.len()), 0, "nobody was asked");

        // Another authority under a running agent: it starts anew, and nothing is concluded yet.
        let known = files.record();
        let second = files.name("https://a:6443", &certificate(&keys[1], "second"));
        assert!(files.look(&first, &api, Some("u2")).await);
        assert_eq!(files.record(), known);

        // The server is away at the start and later, and then it shows the same node.
        api.with(|model| model.down = true);
        let found = files.find(&api).await;
        assert!(files.claim(&found).doubted);
        assert!(!files.look(&second, &api, Some("u2")).await);
        assert_eq!(files.record(), known);
        show(&api, "u2");
        assert!(!files.look(&second, &api, Some("u2")).await);
        assert_eq!(files.record().cluster, second);
        assert_eq!(files.record().node.as_deref(), Some("u2"));

        // It is another authority again, and the node is another one: that is on record before the agent ends, and
        // decides at the next start, whether the server answers or not.
        let third = files.name("https://a:6443", &certificate(&keys[0], "third"));
        show(&api, "u3");
        assert!(files.look(&third, &api, Some("u2")).await);
        assert_eq!(files.record().cluster, second);
        api.with(|model| model.down = true);
        fs::create_dir(files.dir.path().join("db")).unwrap();
        let found = files.find(&api).await;
        assert_eq!(found.shown, Shown::Nothing);
        assert!(files.claim(&found).former.is_some());
        assert_eq!(files.record().cluster, third);
        assert_eq!(files.record().node, None);
        assert!(!files.look(&third, &api, None).await);
    }

    #[tokio::test]
    async fn the_server_is_asked_at_the_start_before_a_store_goes() {
        let keys = [0, 1].map(|_| rcgen::KeyPair::generate().unwrap());
        for (shown, is_other) in [("u1", false), ("u2", true)] {
            let (files, api) = (Files::new(), FakeApi::new());
            let first = files.name("https://a:6443", &certificate(&keys[0], "first"));
            let found = files.find(&api).await;
            assert_eq!(files.claim(&found), Claimed::default());
            assert!(!files.look(&first, &api, Some("u1")).await);
            fs::create_dir(files.dir.path().join("db")).unwrap();
            files.name("https://b:6443", &certificate(&keys[1], "second"));
            show(&api, shown);
            let found = files.find(&api).await;
            assert_eq!(found.shown, Shown::Node(shown.to_owned()));
            assert_eq!(files.claim(&found).former.is_some(), is_other);
        }
    }

    #[test]
    fn the_record_of_a_former_store_says_nothing_about_a_new_one() {
        let dir = state();
        let other = found("https://b", "2", Shown::Nothing);
        assert_eq!(claim(&other, dir.path(), true, NOW), Claimed::default());
        assert!(is_kept(&dir));
        assert_eq!(read(dir.path()).unwrap().unwrap().node, None);
    }
}
