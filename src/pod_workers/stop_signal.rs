//! Stop signals of containers (`lifecycle.stopSignal`): only a runtime that knows them is given one, since an older one
//! ignores the field and stops the container with another signal than its spec says.

use k8s_openapi::api::core::v1::Container;

use super::WorkerContext;
use super::image_volumes::release_of;

/// Runtimes with their first releases that know stop signals.
const FIRST: [(&str, (u32, u32)); 2] = [("containerd", (2, 3)), ("cri-o", (1, 33))];

/// Checks that the runtime can stop a container with the signal that its spec asks for.
///
/// # Errors
/// The reason why the container cannot be created, and the remedy.
pub(super) async fn check(context: &WorkerContext, container: &Container) -> Result<(), String> {
    let lifecycle = container.lifecycle.as_ref();
    let Some(signal) = lifecycle.and_then(|l| l.stop_signal.as_deref()) else {
        return Ok(());
    };
    let version = context.cri.version().await.map_err(|e| e.to_string())?;
    let (runtime, version) = (version.runtime_name, version.runtime_version);
    if knows_stop_signals(&runtime, &version) {
        return Ok(());
    }
    let needed = FIRST.map(|(name, (major, minor))| format!("{name} {major}.{minor}"));
    Err(format!(
        "stop signal {signal:?} of container {}: {runtime} {version} ignores it; leave it out and set STOPSIGNAL in the \
         image, or use {} or later",
        container.name,
        needed.join(", ")
    ))
}

fn knows_stop_signals(runtime: &str, version: &str) -> bool {
    let mut known = FIRST.iter().filter(|(name, _)| *name == runtime);
    let release = release_of(version);
    known.any(|(_, first)| release.is_some_and(|release| release >= *first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_runtimes_that_are_known_to_obey_get_a_stop_signal() {
        for (runtime, version, knows) in [
            ("containerd", "1.7.24", false),
            ("containerd", "v2.2.1", false),
            ("containerd", "v2.3.0-rc.1", true),
            ("containerd", "2.10", true),
            ("containerd", "3.0.0", true),
            ("containerd", "main", false),
            ("cri-o", "1.32.9", false),
            ("cri-o", "1.33.0", true),
            ("another", "9.9", false),
        ] {
            let got = knows_stop_signals(runtime, version);
            assert_eq!(got, knows, "{runtime} {version}");
        }
    }
}
