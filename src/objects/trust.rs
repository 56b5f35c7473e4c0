//! The ClusterTrustBundles of the cluster, watched as long as a registered pod mounts any.
//!
//! In: the list-watch of whichever version of `certificates.k8s.io` the API server has. Out: the bundles by name; each
//! is recorded under `clustertrustbundles//<name>`.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::core::{ApiResource, DynamicObject};
use kube::runtime::watcher;

use super::cache::{Cell, Known, Pause, Trouble, WATCH_SECONDS};
use super::context::Context;
use super::{ObjectChange, Task};
use crate::apiserver::ApiClient;
use crate::core::trust::{TrustBundle, TrustBundles};
use crate::types::PodExt as _;

pub(super) const KIND: &str = "ClusterTrustBundle";
const PLURAL: &str = "clustertrustbundles";
const GROUP: &str = "certificates.k8s.io";
/// Newest first.
const VERSIONS: [&str; 3] = ["v1", "v1beta1", "v1alpha1"];
/// Start of the keys of records.
pub(super) const RECORDS: &str = "clustertrustbundles//";
/// Pause before the next check whether the API server supports them.
const LOOK_AGAIN: Duration = Duration::from_secs(300);

/// Value that readers get.
pub(super) type Bundles = Arc<TrustBundles>;

pub(super) struct TrustWatch {
    pub(super) cell: Arc<Cell<Bundles>>,
    pub(super) task: Task,
}

/// Returns whether a pod mounts trust anchors.
pub(super) fn is_used_by(pod: &Pod) -> bool {
    let volumes = pod.spec_ref().volumes.iter().flatten();
    let mut sources = volumes
        .filter_map(|v| v.projected.as_ref()?.sources.as_ref())
        .flatten();
    sources.any(|source| source.cluster_trust_bundle.is_some())
}

pub(super) fn record_key(name: &str) -> String {
    format!("{RECORDS}{name}")
}

/// A slot with the recorded bundles.
pub(super) fn cell(ctx: &Context) -> Arc<Cell<Bundles>> {
    let keys = ctx.recorded_keys(RECORDS).into_iter();
    let recorded: TrustBundles = keys
        .filter_map(|key| {
            let bundle = ctx.recorded::<TrustBundle>(&key, false)?;
            Some((key[RECORDS.len()..].to_owned(), bundle))
        })
        .collect();
    let recorded = Some(recorded).filter(|all| !all.is_empty()).map(Arc::new);
    Arc::new(Cell::new(KIND, "of the cluster".to_owned(), recorded))
}

/// Watches all of them until it is dropped, in the version that the API server has at the time.
pub(super) async fn follow(ctx: Arc<Context>, cell: Arc<Cell<Bundles>>, remember: bool) {
    let Some(api) = ctx.api.clone() else {
        return;
    };
    let mut pause = Pause::default();
    loop {
        match served(&api).await {
            Ok(Some(resource)) => {
                pause.reset();
                watch(&ctx, &api, &cell, resource, remember).await;
            }
            Ok(None) => {
                cell.trouble(Trouble::Refused(format!(
                    "the API server does not serve {PLURAL} ({GROUP}/{}); enable the API, or remove the projection",
                    VERSIONS.join(", ")
                )));
                tokio::time::sleep(LOOK_AGAIN).await;
            }
            Err(error) => {
                cell.trouble(Trouble::of(&error));
                pause.wait(&api).await;
            }
        }
    }
}

/// The newest version that the API server has; `None` when it has none. Asked of discovery, as a list that nobody
/// serves may be refused before it is not found.
async fn served(api: &ApiClient) -> Result<Option<ApiResource>, kube::Error> {
    for version in VERSIONS {
        let group_version = format!("{GROUP}/{version}");
        let client = api.kube();
        let found = match client.list_api_group_resources(&group_version).await {
            Err(kube::Error::Api(status)) if status.code == 404 => continue,
            other => other?,
        };
        if found.resources.iter().any(|r| r.name == PLURAL) {
            return Ok(Some(ApiResource {
                group: GROUP.to_owned(),
                version: version.to_owned(),
                api_version: group_version,
                kind: KIND.to_owned(),
                plural: PLURAL.to_owned(),
            }));
        }
    }
    Ok(None)
}

/// Watches until the version is served no more.
async fn watch(
    ctx: &Context,
    api: &ApiClient,
    cell: &Cell<Bundles>,
    resource: ApiResource,
    remember: bool,
) {
    let events = || {
        let bundles = kube::Api::<DynamicObject>::all_with(api.kube(), &resource);
        let config = watcher::Config::default().timeout(rand::random_range(WATCH_SECONDS));
        Box::pin(watcher::watcher(bundles, config))
    };
    let mut stream = events();
    let mut set_back = api.connection().set_back();
    let mut pause = Pause::default();
    let mut listed = TrustBundles::new();
    loop {
        // Both are cancel-safe.
        let event = tokio::select! {
            event = stream.next() => event,
            _ = set_back.changed() => {
                stream = events();
                continue;
            }
        };
        let Some(event) = event else {
            return;
        };
        let mut marked = Vec::new();
        let map = match event {
            Err(error) if is_gone(&error) => return,
            Err(error) => {
                cell.trouble(Trouble::of_watch(&error));
                pause.wait(api).await;
                continue;
            }
            Ok(watcher::Event::Init) => {
                listed.clear();
                continue;
            }
            Ok(watcher::Event::InitApply(object)) => {
                listed.extend(bundle(object));
                continue;
            }
            Ok(watcher::Event::InitDone) => {
                marked.extend(ctx.recorded_keys(RECORDS));
                marked.extend(listed.keys().map(|name| record_key(name)));
                std::mem::take(&mut listed)
            }
            Ok(watcher::Event::Apply(object)) => {
                let mut map = known(cell);
                if let Some((name, bundle)) = bundle(object) {
                    marked.push(record_key(&name));
                    map.insert(name, bundle);
                }
                map
            }
            Ok(watcher::Event::Delete(object)) => {
                let mut map = known(cell);
                let name = object.metadata.name.unwrap_or_default();
                marked.push(record_key(&name));
                map.remove(&name);
                map
            }
        };
        pause.reset();
        let tell = cell.answer(Arc::new(map), |before, now| match before {
            Known::Nothing => false,
            Known::Recorded(before) | Known::Live(before) => before != now,
        });
        if remember {
            ctx.mark_all(marked);
        }
        if tell {
            ctx.tell(ObjectChange {
                kind: KIND,
                namespace: String::new(),
                name: String::new(),
            });
        }
    }
}

fn is_gone(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status)) => status.code == 404,
        _ => false,
    }
}

fn known(cell: &Cell<Bundles>) -> TrustBundles {
    match cell.known() {
        Known::Live(map) | Known::Recorded(map) => (*map).clone(),
        Known::Nothing => TrustBundles::new(),
    }
}

fn bundle(object: DynamicObject) -> Option<(String, TrustBundle)> {
    let text = |name: &str| object.data["spec"][name].as_str().unwrap_or_default();
    let bundle = TrustBundle {
        signer: text("signerName").to_owned(),
        pem: text("trustBundle").to_owned(),
        labels: object.metadata.labels.clone().unwrap_or_default(),
    };
    Some((object.metadata.name?, bundle))
}
