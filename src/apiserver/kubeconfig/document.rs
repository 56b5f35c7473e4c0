//! The text of a kubeconfig, read as client-go reads it.

use std::path::Path;

use kube::config::Kubeconfig;

use super::{ApiError, without_content};
use crate::types::text;

/// Reads the kubeconfig at `path`, with the paths in it made absolute. Blocking.
///
/// # Errors
/// When the file cannot be read or is none. The error has nothing of its content.
pub(super) fn read(path: &Path) -> Result<Kubeconfig, ApiError> {
    let content = std::fs::read(path)
        .and_then(text::of_file)
        .map_err(|source| ApiError::Read {
            path: path.to_owned(),
            source,
        })?;
    let mut file = parse(path, &content)?;
    if let Some(dir) = path.parent() {
        resolve_paths(&mut file, dir);
    }
    Ok(file)
}

/// Reads the kubeconfig `content`; `path` is for messages.
///
/// # Errors
/// When it is none. The error has nothing of its content.
pub(super) fn parse(path: &Path, content: &str) -> Result<Kubeconfig, ApiError> {
    // Some editors begin a file with a byte order mark.
    let content = content.strip_prefix('\u{feff}').unwrap_or(content);
    Kubeconfig::from_yaml(content).or_else(|source| {
        // Upstream: `json.Serializer`, which decodes a kubeconfig without being strict.
        text::lenient(content).ok_or_else(|| ApiError::Parse {
            path: path.to_owned(),
            source: Box::new(without_content(source)),
        })
    })
}

/// Makes the paths of a kubeconfig in `dir` absolute. An empty one is none. Upstream: `ResolveLocalPaths`.
fn resolve_paths(file: &mut Kubeconfig, dir: &Path) {
    let resolve = |path: &mut Option<String>| {
        if let Some(path) = path.as_mut().filter(|path| !path.is_empty())
            && let Some(absolute) = dir.join(&*path).to_str()
        {
            *path = absolute.to_owned();
        }
    };
    for cluster in &mut file.clusters {
        if let Some(cluster) = &mut cluster.cluster {
            resolve(&mut cluster.certificate_authority);
        }
    }
    for user in &mut file.auth_infos {
        let Some(user) = &mut user.auth_info else {
            continue;
        };
        resolve(&mut user.client_certificate);
        resolve(&mut user.client_key);
        resolve(&mut user.token_file);
        // Others are looked for in PATH.
        if let Some(exec) = &mut user.exec
            && exec
                .command
                .as_deref()
                .is_some_and(|name| name.contains('/'))
        {
            resolve(&mut exec.command);
        }
    }
}

#[cfg(test)]
#[path = "document_tests.rs"]
mod tests;
