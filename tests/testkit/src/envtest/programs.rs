//! Where etcd, kube-apiserver and kubectl are, and which version they have.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The directory of the programs.
pub(super) fn assets() -> PathBuf {
    const PROGRAMS: [&str; 3] = ["etcd", "kube-apiserver", "kubectl"];
    for variable in ["HOLDFAST_ENVTEST", "KUBEBUILDER_ASSETS"] {
        let Some(dir) = std::env::var_os(variable).filter(|dir| !dir.is_empty()) else {
            continue;
        };
        let dir = PathBuf::from(dir);
        for program in PROGRAMS {
            assert!(
                dir.join(program).exists(),
                "{variable} is {}, where there is no {program}: run `make envtest`",
                dir.display()
            );
        }
        return dir;
    }
    let cache = std::env::var_os("HOLDFAST_CACHE").map_or_else(
        || {
            let home = std::env::var_os("HOME").unwrap_or_else(|| "/root".into());
            std::env::var_os("XDG_CACHE_HOME")
                .map_or_else(|| Path::new(&home).join(".cache"), PathBuf::from)
                .join("holdfast")
        },
        PathBuf::from,
    );
    let cache = cache.join("envtest");
    let mut found: Vec<_> = std::fs::read_dir(&cache)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|dir| PROGRAMS.iter().all(|program| dir.join(program).exists()))
        .filter(|dir| {
            dir.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("kubernetes-"))
        })
        .collect();
    found.sort();
    found.pop().unwrap_or_else(|| {
        panic!(
            "there is no kube-apiserver in {}: run `make envtest`, or let KUBEBUILDER_ASSETS name a directory \
             with etcd, kube-apiserver and kubectl",
            cache.display()
        )
    })
}

/// 20 of "Kubernetes v1.20.2".
pub(super) fn minor_version(apiserver: &Path) -> u32 {
    let output = Command::new(apiserver).arg("--version").output();
    let output = output.unwrap_or_else(|error| panic!("run {}: {error}", apiserver.display()));
    let said = String::from_utf8_lossy(&output.stdout);
    said.split('.')
        .nth(1)
        .and_then(|minor| minor.trim_end_matches('+').parse().ok())
        .unwrap_or_else(|| panic!("{} --version said {said:?}", apiserver.display()))
}
