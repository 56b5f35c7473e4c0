//! Setup of the sources of pods: manifests, the manifest URL and the API server.

use std::sync::Arc;
use std::time::Duration;

use crate::config::{FileSettings, HttpSettings, RunningStatic, SourceSettings};
use crate::kubeletconfig::AgentConfig;
use crate::store::mounts::{Directory, Mount};

/// Time that the server of the manifest URL has for an answer.
const HTTP_SOURCE_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) fn source_settings(config: &AgentConfig, running: Vec<RunningStatic>) -> SourceSettings {
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
