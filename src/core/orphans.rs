//! Choice of the pods to stop that run without a record.
//!
//! The input is a pod that the runtime shows and no record names, as after the loss of the store, and the pods of the
//! sources so far. The output is whether it is certain that no source wants it. Upstream knows no records: it stops
//! such pods when every source has synced.

use k8s_openapi::api::core::v1::Pod;

use crate::types::{FullName, PodExt, PodSource, PodUid};

/// Returns whether a pod that no source wants may be stopped. `named` is the source that its sandbox names, as far as that is
/// known: if it is one of static pods and was read completely, it decides alone. Otherwise every source has to be complete.
pub fn may_stop(
    named: Option<PodSource>,
    is_complete: impl Fn(PodSource) -> bool,
    all_complete: bool,
) -> bool {
    all_complete || named.is_some_and(|source| source.is_static() && is_complete(source))
}

/// Returns whether a wanted pod takes the place of the static pod `uid` that runs without a record: it has its name and source and
/// another UID, so its manifest has changed. Nothing else that the source may say can bring the old one back.
pub fn is_replaced(uid: &PodUid, name: &FullName, source: PodSource, wanted: &Pod) -> bool {
    wanted.source() == source && wanted.full_name() == *name && wanted.uid() != *uid
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::pod::CONFIG_SOURCE;

    #[test]
    fn a_source_of_static_pods_decides_alone_once_it_is_complete() {
        use PodSource::{Api, File, Http};
        let file_only = |source: PodSource| source == File;
        for (named, stops) in [
            (Some(File), true),
            (Some(Http), false),
            (Some(Api), false),
            (None, false),
        ] {
            assert_eq!(may_stop(named, file_only, false), stops, "{named:?}");
            assert!(may_stop(named, file_only, true), "{named:?}");
        }
        assert!(!may_stop(Some(Api), |_| true, false));
    }

    #[test]
    fn another_uid_of_the_name_and_source_replaces() {
        let (old, name) = (PodUid::new("old"), FullName::of("web-n", "ns"));
        let wanted = |uid: &str, name: &str, source: &str| -> Pod {
            serde_json::from_value(serde_json::json!({"metadata": {
                "uid": uid, "name": name, "namespace": "ns", "annotations": {CONFIG_SOURCE: source},
            }}))
            .unwrap()
        };
        for (uid, pod_name, source, replaced) in [
            ("new", "web-n", "file", true),
            ("old", "web-n", "file", false),
            ("new", "api-n", "file", false),
            ("new", "web-n", "http", false),
            ("new", "web-n", "api", false),
        ] {
            let pod = wanted(uid, pod_name, source);
            let found = is_replaced(&old, &name, PodSource::File, &pod);
            assert_eq!(found, replaced, "{uid} {pod_name} {source}");
        }
    }
}
