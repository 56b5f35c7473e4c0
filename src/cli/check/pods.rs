//! Manifests: each pod by itself, and all of them beside each other.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use super::Node;
use super::report::{Checked, Report, Severity};
use crate::config::location;
use crate::config::manifest::{Item, Manifest, ManifestError, Position, StaticOrigin, warnings};
use crate::core::pod_update::{Reading, SourcePods, SourceSet, SourcedPod, merge};
use crate::core::{admission, supported};
use crate::types::{BootId, PodExt, PodSource, Stamp};

/// Stands for the moment at which a pod was first seen, which nothing here depends on.
const SEEN: &str = "1970-01-01T00:00:00Z";

/// The pods of all files.
#[derive(Debug, Default)]
pub(super) struct Pods {
    found: Vec<SourcedPod>,
    /// Their places, by origin and UID.
    places: HashMap<(String, String), Place>,
}

/// Place of a pod.
#[derive(Debug)]
struct Place {
    /// The number of its file in the report.
    file: usize,
    /// Its name as it is written.
    subject: String,
    at: Position,
}

/// A file that is checked, and its number in the report.
pub(super) type Numbered = (Checked, usize);

impl Pods {
    /// Checks a manifest as the file source takes it, which is at `path`.
    pub(super) fn file(
        &mut self,
        manifest: &Manifest,
        path: &Path,
        node: &Node,
        file: Numbered,
    ) -> Checked {
        self.check(manifest, (path, PodSource::File), node, file)
    }

    /// Checks a manifest that was named: a `PodList` is meant for a URL.
    pub(super) fn named(
        &mut self,
        manifest: &Manifest,
        path: &Path,
        node: &Node,
        mut file: Numbered,
    ) -> Checked {
        let is_list = manifest.types().next().is_some_and(|t| t.kind == "PodList");
        if !is_list {
            return self.file(manifest, path, node, file);
        }
        file.0.warning(
            "PodList",
            "is accepted from staticPodURL only; in a directory of manifests put each pod into a file of its own"
                .to_owned(),
        );
        self.check(manifest, (path, PodSource::Http), node, file)
    }

    fn check(
        &mut self,
        manifest: &Manifest,
        (path, source): (&Path, PodSource),
        node: &Node,
        (mut checked, number): Numbered,
    ) -> Checked {
        let location = location(path);
        let count = manifest.types().len();
        if let Some(second) = manifest.types().nth(1) {
            for problem in (ManifestError::Documents { count }).problems() {
                checked.find(Severity::Error, second.at, "manifest", problem.message);
            }
        }
        let origin = StaticOrigin {
            source,
            location: &location,
            node_name: &node.name,
        };
        for item in manifest.items(&origin, SEEN) {
            match &item.result {
                Err(error) => checked.manifest(&item.subject, error),
                Ok(pod) => {
                    for (at, message) in refusals(pod, &item, node) {
                        checked.find(Severity::Error, at, &item.subject, message);
                    }
                    for (field, message) in warnings(pod) {
                        let message = format!("{field}: {message}");
                        let at = item.locate(&field);
                        checked.find(Severity::Warning, at, &item.subject, message);
                    }
                    checked.objects.push(item.subject.clone());
                    self.add(&location, pod, &item, number);
                }
            }
        }
        checked
    }

    fn add(&mut self, origin: &str, pod: &Pod, item: &Item<'_>, file: usize) {
        let key = (origin.to_owned(), pod.uid().to_string());
        let place = Place {
            file,
            subject: item.subject.clone(),
            at: item.locate("metadata.name"),
        };
        self.places.insert(key, place);
        self.found.push(SourcedPod {
            origin: origin.to_owned(),
            pod: Arc::new(pod.clone()),
        });
    }

    /// Tells of the pods that the agent would not take because of others, were they all of one source.
    pub(super) fn tell_duplicates(self, report: &mut Report) {
        let set = SourceSet {
            source: PodSource::File,
            location: String::new(),
            reading: Reading::Complete,
            broken: BTreeMap::new(),
            pods: self.found,
            set_back: false,
        };
        // Nothing is known from before, so the time does not matter.
        let now = Stamp {
            boot: BootId(0),
            boottime_ms: 0,
            wall_ms: 0,
        };
        for duplicate in merge(&SourcePods::default(), &set, &|_| false, now).duplicates {
            let key = (duplicate.origin, duplicate.pod.uid().to_string());
            if let Some(place) = self.places.get(&key)
                && let Some(file) = report.file(place.file)
            {
                let message = duplicate.message;
                file.find(Severity::Error, place.at, &place.subject, message);
            }
        }
    }
}

/// Returns the reasons for which the node does not admit the pod, whatever else it runs.
fn refusals(pod: &Pod, item: &Item<'_>, node: &Node) -> Vec<(Position, String)> {
    let mut found: Vec<_> = supported::refused(pod)
        .iter()
        .map(|refusal| (item.locate(&refusal.field), refusal.to_string()))
        .collect();
    if let Some((reason, why)) = admission::refused_by_itself(pod, &[], &node.unsafe_sysctls) {
        let (field, remedy) = match reason.as_str() {
            "SysctlForbidden" => (
                "spec.securityContext.sysctls",
                "remove it, or give with --config a configuration that has it in allowedUnsafeSysctls",
            ),
            "PodOSNotSupported" => ("spec.os", "remove it for a pod that is for Linux"),
            _ => ("metadata.labels", "correct or remove the label"),
        };
        found.push((item.locate(field), format!("{field}: {why}; {remedy}")));
    }
    found
}
