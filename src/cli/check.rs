//! `holdfast check`: what this node would reject of manifests, configurations and kubeconfigs, before it has them.
//!
//! In: paths. Out: findings with their places, and an exit code. What is wrong is said by the agent's own code, which
//! reads the files as the agent does. Changes nothing, and needs neither a store nor a runtime.
//!
//! **Invariant:** no value that may be a secret is printed: tokens, keys, passwords, variables.

mod configs;
mod pods;
mod report;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use super::offline;
use super::output::print;
use crate::config::manifest::{Manifest, ManifestError};
use crate::config::{candidates, cannot_be_read, content, content_of};
use crate::kubeletconfig::flags::KubeletFlags;
use crate::kubeletconfig::{API_VERSION, KIND};
use pods::Pods;
use report::{Checked, Report};

pub(super) const LONG_HELP: &str = "\
Checks manifests (a Pod, a PodList), KubeletConfiguration and CredentialProviderConfig files and kubeconfigs as the \
agent does, and prints what this node would reject and why. A directory is read as a directory of manifests \
(staticPodPath). Changes nothing and needs permission to read the files only.

Exit codes: 0 nothing would be rejected, 1 something would be, 2 wrong usage, 3 a file does not exist.";

/// The name of standard input.
const STDIN: &str = "-";

#[derive(Clone, Debug, Args)]
pub(super) struct CheckArgs {
    /// Files, directories of manifests, or - for standard input
    #[arg(value_name = "FILE", required_unless_present_any = ["config", "config_dir"])]
    files: Vec<PathBuf>,
    /// The node's KubeletConfiguration file: checked too, and pods are checked against it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Directory of drop-ins (*.conf), which win over --config
    #[arg(long, value_name = "DIR")]
    config_dir: Option<PathBuf>,
    /// Name of the node [default: the host name]
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    /// Directory with the programs of a CredentialProviderConfig; without it, they are not checked
    #[arg(long, value_name = "DIR")]
    image_credential_provider_bin_dir: Option<PathBuf>,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: Format,
    /// Print no lines for files that are good
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A line for each finding, and for each file that is good
    Text,
    /// An object with all files and findings
    Json,
}

pub(super) fn run(args: &CheckArgs) -> anyhow::Result<()> {
    let mut check = Check::new(args);
    for path in &args.files {
        check.path(path);
    }
    let Check {
        pods, mut report, ..
    } = check;
    pods.tell_duplicates(&mut report);
    match args.output {
        Format::Text => print(&report.text(args.quiet))?,
        Format::Json => print(&format!("{:#}\n", report.json()))?,
    }
    report.verdict()
}

/// Settings of the node.
struct Node {
    name: String,
    /// `allowedUnsafeSysctls`.
    unsafe_sysctls: Vec<String>,
    flags: KubeletFlags,
    provider_programs: Option<PathBuf>,
}

struct Check {
    node: Node,
    pods: Pods,
    report: Report,
    /// Files that were read: a file that is named twice is no duplicate of itself.
    seen: BTreeSet<PathBuf>,
}

impl Check {
    /// Checks the node's own configuration.
    fn new(args: &CheckArgs) -> Self {
        let name = args.node_name.as_deref().unwrap_or_default().trim();
        let name = match name {
            "" => offline::host_name(),
            name => name.to_lowercase(),
        };
        let flags = KubeletFlags {
            hostname_override: args.node_name.clone(),
            ..KubeletFlags::default()
        };
        let mut node = Node {
            name,
            unsafe_sysctls: Vec::new(),
            flags,
            provider_programs: args.image_credential_provider_bin_dir.clone(),
        };
        let mut report = Report::default();
        let own = (args.config.as_deref(), args.config_dir.as_deref());
        if let (Some(shown), _) | (None, Some(shown)) = own {
            let mut checked = Checked::of(shown);
            let flags = KubeletFlags {
                config: args.config.clone(),
                config_dir: args.config_dir.clone(),
                ..node.flags.clone()
            };
            if let Some(config) = configs::settings(&flags, &mut checked) {
                node.unsafe_sysctls = config.kubelet.allowed_unsafe_sysctls;
            }
            report.add(checked);
        }
        Self {
            node,
            pods: Pods::default(),
            report,
            seen: BTreeSet::new(),
        }
    }

    /// Checks what was named. Blocking.
    fn path(&mut self, path: &Path) {
        let Some(absolute) = self.unseen(path) else {
            return;
        };
        let mut checked = Checked::of(path);
        if path == Path::new(STDIN) {
            let read = content(io::stdin().lock(), 0);
            self.content(&absolute, read, &mut checked);
        } else {
            match std::fs::metadata(path) {
                Ok(metadata) if metadata.is_dir() => return self.directory(path, &absolute),
                Ok(metadata) => {
                    let read = File::open(path).and_then(|file| content(file, metadata.len()));
                    self.content(&absolute, read, &mut checked);
                }
                Err(error) => {
                    checked.absent = error.kind() == ErrorKind::NotFound;
                    checked.error("", format!("cannot be read: {error}"));
                }
            }
        }
        self.report.add(checked);
    }

    /// The absolute path as the agent would have it, unless it was looked at before.
    fn unseen(&mut self, path: &Path) -> Option<PathBuf> {
        let absolute = match path == Path::new(STDIN) {
            true => path.to_owned(),
            // Without the working directory, the path is as good as it can be.
            false => std::path::absolute(path).unwrap_or_else(|_| path.to_owned()),
        };
        let absolute: PathBuf = absolute.components().collect();
        self.seen.insert(absolute.clone()).then_some(absolute)
    }

    /// Checks a directory of manifests, as the file source reads it.
    fn directory(&mut self, shown: &Path, absolute: &Path) {
        let mut paths = match candidates(shown) {
            Ok(paths) => paths,
            Err(error) => {
                let mut checked = Checked::of(shown);
                checked.error("", format!("cannot be read: {error}"));
                return self.report.add(checked);
            }
        };
        paths.sort();
        for path in paths {
            let origin = absolute.join(path.file_name().unwrap_or_default());
            let mut checked = Checked::of(&path);
            match content_of(&path) {
                Ok(None) if path.is_dir() => continue,
                Ok(None) => checked.warning(
                    "",
                    "is neither a file nor a directory; the agent ignores it, remove it".to_owned(),
                ),
                // Removed between listing and reading.
                Err(error)
                    if error.kind() == ErrorKind::NotFound
                        && std::fs::symlink_metadata(&path).is_err() =>
                {
                    continue;
                }
                Err(error) => checked.error("", cannot_be_read(&error)),
                Ok(Some(content)) => {
                    if !self.seen.insert(origin.clone()) {
                        continue;
                    }
                    match content.and_then(|bytes| Manifest::parse(&bytes)) {
                        Ok(manifest) => {
                            let named = (checked, self.report.len());
                            checked = self.pods.file(&manifest, &origin, &self.node, named);
                        }
                        Err(error) => checked.manifest("manifest", &error),
                    }
                }
            }
            self.report.add(checked);
        }
    }

    /// Checks the content of a file by what it says it is.
    fn content(
        &mut self,
        absolute: &Path,
        read: io::Result<Result<Vec<u8>, ManifestError>>,
        checked: &mut Checked,
    ) {
        let bytes = match read {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(error)) => return checked.manifest("file", &error),
            Err(error) => return checked.error("", format!("cannot be read: {error}")),
        };
        let manifest = match Manifest::parse(&bytes) {
            Ok(manifest) => manifest,
            Err(error) => {
                match said(&bytes).as_str() {
                    KIND => configs::settings_in(bytes, &self.node.flags, checked),
                    "" => checked.manifest("file", &error),
                    kind => checked.manifest(kind, &error),
                }
                return;
            }
        };
        let Some(first) = manifest.types().next() else {
            return checked.manifest("file", &ManifestError::Empty);
        };
        match Kind::of(first.api_version, first.kind) {
            Kind::Kubelet => configs::settings_in(bytes, &self.node.flags, checked),
            Kind::Providers => {
                let programs = self.node.provider_programs.as_deref();
                configs::providers(absolute, &bytes, programs, checked);
            }
            Kind::Kubeconfig => {
                // What is no regular file can be read only once.
                let is_file = absolute != Path::new(STDIN) && absolute.is_file();
                let content = (!is_file).then_some(bytes.as_slice());
                configs::kubeconfig(absolute, content, checked);
            }
            Kind::Pods => {
                let named = (std::mem::take(checked), self.report.len());
                *checked = self.pods.named(&manifest, absolute, &self.node, named);
            }
        }
    }
}

/// Type of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Kubelet,
    Providers,
    Kubeconfig,
    /// Everything else: the agent takes it for a manifest.
    Pods,
}

impl Kind {
    fn of(api_version: &str, kind: &str) -> Self {
        let group = API_VERSION.split_once('/').map(|(group, _)| group);
        let given = api_version.split_once('/').map(|(group, _)| group);
        match kind {
            KIND => Self::Kubelet,
            "CredentialProviderConfig" => Self::Providers,
            "Config" if matches!(api_version, "" | "v1") => Self::Kubeconfig,
            _ if given.is_some() && given == group => Self::Kubelet,
            _ => Self::Pods,
        }
    }
}

/// The `kind` of a text that does not parse, as far as it can be seen; empty when it cannot.
fn said(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let kind = text.lines().find_map(|line| line.strip_prefix("kind:"));
    let kind = kind.unwrap_or_default().trim().trim_matches(['"', '\'']);
    let plain = kind.chars().all(|c| c.is_ascii_alphanumeric());
    match plain {
        true => kind.to_owned(),
        false => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_as_what_it_says_it_is() {
        for (api_version, kind, read_as) in [
            ("v1", "Pod", Kind::Pods),
            ("v1", "PodList", Kind::Pods),
            ("v1", "Config", Kind::Kubeconfig),
            ("", "Config", Kind::Kubeconfig),
            ("example.com/v1", "Config", Kind::Pods),
            (API_VERSION, KIND, Kind::Kubelet),
            ("v1", KIND, Kind::Kubelet),
            (API_VERSION, "", Kind::Kubelet),
            (
                "kubelet.config.k8s.io/v1",
                "CredentialProviderConfig",
                Kind::Providers,
            ),
            ("", "", Kind::Pods),
        ] {
            assert_eq!(Kind::of(api_version, kind), read_as, "{api_version} {kind}");
        }
    }

    #[test]
    fn the_kind_of_a_text_that_does_not_parse_is_seen_in_its_line() {
        assert_eq!(said(b"a: [\nkind: \"KubeletConfiguration\" \n"), KIND);
        assert_eq!(said(b"spec:\n  kind: Pod\n"), "");
        assert_eq!(said(b"kind: {a: b}\n"), "");
    }
}
