//! Pods that may be on the node, for a runtime that cannot list all of them in one answer.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::path::Path;

use tracing::warn;

use crate::core::state::State;
use crate::kubeletconfig::AgentConfig;
use crate::store::Store;
use crate::types::PodUid;

/// Names every pod that is recorded or has a directory of its own. The directories tell of those that a lost store or
/// another agent left behind: each sandbox has one for logs. Blocks.
pub(super) fn known_pods(
    config: &AgentConfig,
    store: Store,
) -> impl Fn() -> BTreeSet<PodUid> + Send + Sync + use<> {
    let dirs = config.root_dir.join("pods");
    let logs = config.pod_logs_dir().to_owned();
    move || {
        let mut uids = on_record(&store.snapshot());
        uids.extend(names(&dirs).filter_map(|name| name.into_string().ok().map(PodUid::from)));
        uids.extend(names(&logs).filter_map(|name| of_log_dir(name.to_str()?)));
        uids
    }
}

fn on_record(state: &State) -> BTreeSet<PodUid> {
    let keys = (state.pods.keys())
        .chain(state.workers.keys())
        .chain(state.statuses.keys())
        .chain(state.pleg.keys());
    // Their keys go on with the name of the container.
    let containers = state
        .containers
        .keys()
        .filter_map(|key| key.split('/').next());
    keys.map(|key| &**key)
        .chain(containers)
        .map(PodUid::new)
        .collect()
}

/// `<namespace>_<name>_<uid>`; neither namespaces nor names hold a `_`.
fn of_log_dir(name: &str) -> Option<PodUid> {
    let uid = name.splitn(3, '_').nth(2)?;
    (!uid.is_empty()).then(|| PodUid::new(uid))
}

fn names(dir: &Path) -> impl Iterator<Item = OsString> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => Some(entries),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            warn!(dir = %dir.display(), %error, "cannot list the directories of pods, unrecorded pods may be missed");
            None
        }
    };
    let entries = entries.into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_directories_tell_the_uid() {
        let uid = |name| of_log_dir(name).map(|uid| uid.to_string());
        assert_eq!(uid("kube-system_dns-x_0f3-a").as_deref(), Some("0f3-a"));
        assert_eq!(uid("default_web_a_b").as_deref(), Some("a_b"));
        for other in ["lost+found", "default_web", "default_web_"] {
            assert_eq!(uid(other), None, "{other}");
        }
    }
}
