//! Setup of the sources of pods: manifests, the manifest URL and the API server.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::base::Base;
use super::{AgentError, Tasks, api};
use crate::config::{
    FileSettings, HttpSettings, PodConfig, RunningStatic, Seed, SourceSettings, Surroundings,
};
use crate::kubeletconfig::AgentConfig;
use crate::store::mounts::{Directory, Mount};
use crate::types::PodUpdate;

/// Time that the server of the manifest URL has for an answer.
const HTTP_SOURCE_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens the sources, with `seeds` as the pods that they named last. Returns the changes of pods, too.
///
/// # Errors
/// When a source cannot be used.
pub(super) fn open(
    config: &AgentConfig,
    base: &Base,
    running: Vec<RunningStatic>,
    seeds: Vec<Seed>,
    tasks: &mut Tasks,
    token: &CancellationToken,
) -> Result<(PodConfig, mpsc::Receiver<PodUpdate>), AgentError> {
    let mut settings = source_settings(config, running);
    if let Some(api) = base.api.clone() {
        let server = api::server_name(config);
        settings.api = Some(api::source(api, server, base.node.clone(), tasks, token));
    }
    let surroundings = Surroundings {
        store: base.store.clone(),
        recorder: Arc::clone(&base.recorder) as _,
        clock: Arc::clone(&base.clock),
    };
    Ok(PodConfig::start(settings, seeds, &surroundings, token)?)
}

fn source_settings(config: &AgentConfig, running: Vec<RunningStatic>) -> SourceSettings {
    let kubelet = &config.kubelet;
    SourceSettings {
        node_name: config.node_name.clone(),
        file: kubelet.static_pod_path.clone().map(|path| FileSettings {
            mount: Some(Arc::new(Mount::new(
                Directory::Manifests,
                &path,
                &config.state_dir,
            ))),
            path,
            check_frequency: kubelet.file_check_frequency,
        }),
        http: kubelet.static_pod_url.clone().map(|url| HttpSettings {
            url,
            headers: kubelet
                .static_pod_url_header
                .iter()
                .flat_map(|(name, values)| values.iter().map(|v| (name.clone(), v.clone())))
                .collect(),
            check_frequency: kubelet.http_check_frequency,
            timeout: HTTP_SOURCE_TIMEOUT,
        }),
        api: None,
        running,
    }
}
