//! The lifeline: credentials that outlast every certificate of the node and have one right, to ask for the next one.
//!
//! It is a kubeconfig with a client certificate of long life for the user `system:node:<name>`, in the group
//! `holdfast:lifeline:<name>` instead of `system:nodes`: the Node authorizer gives it nothing, and the certificates
//! controller approves what it asks for only if that is a certificate of the very same user.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::ApiError;
use super::kubeconfig::{Loaded, certificate, load};

/// Name of the systemd credential.
const CREDENTIAL: &str = "holdfast.lifeline";

/// Location of the lifeline's kubeconfig.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lifeline {
    path: PathBuf,
    /// It is a credential of systemd's, which guards it.
    credential: bool,
}

impl Lifeline {
    /// The kubeconfig at `path`, which nobody but its owner may read.
    pub fn file(path: PathBuf) -> Self {
        Self {
            path,
            credential: false,
        }
    }

    /// The systemd credential `holdfast.lifeline` below `credentials` (`$CREDENTIALS_DIRECTORY`), if there is one.
    pub fn credential(credentials: Option<&Path>) -> Option<Self> {
        let path = credentials?.join(CREDENTIAL);
        path.exists().then_some(Self {
            path,
            credential: true,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the lifeline of `node`. Blocking.
    ///
    /// # Errors
    /// When it cannot be used, when its client certificate is not that of a lifeline of this node, or when others may
    /// read it or the key that it names.
    pub(super) fn load(&self, node: &str) -> Result<Loaded, ApiError> {
        let loaded = load(&self.path, None)?;
        let unusable = |problem: String| ApiError::Unusable {
            names: loaded.names.clone(),
            problem,
        };
        let certificate = certificate(&loaded.config.auth_info);
        check_subject(certificate.as_deref(), node).map_err(unusable)?;
        let keys = loaded.config.auth_info.client_key.as_ref().map(Path::new);
        // systemd guards its credentials itself, and may grant them by an ACL that shows in the mode.
        let own = Some(&*self.path).filter(|_| !self.credential);
        for path in own.into_iter().chain(keys) {
            check_access(path).map_err(unusable)?;
        }
        Ok(loaded)
    }
}

/// Checks that the certificate, in PEM, is for the user of `node`, and in the group of its lifeline and no other: whoever has
/// the disk has the rights of the groups, for years.
fn check_subject(certificate: Option<&[u8]>, node: &str) -> Result<(), String> {
    let first = certificate.and_then(|pem| {
        x509_parser::pem::Pem::iter_from_buffer(pem)
            .filter_map(Result::ok)
            .find(|block| block.label == "CERTIFICATE")
    });
    let Some(first) = first else {
        return Err("it has no client certificate, and a lifeline is bound to a key".to_owned());
    };
    let parsed = first.parse_x509().map_err(|error| error.to_string())?;
    let subject = parsed.subject();
    let wanted = format!("system:node:{node}");
    let names = subject.iter_common_name();
    let names: Vec<_> = names.filter_map(|name| name.as_str().ok()).collect();
    if names != [wanted.as_str()] {
        return Err(format!(
            "its certificate is for {names:?}, and only {wanted:?} may ask for the certificate of this node"
        ));
    }
    let group = format!("holdfast:lifeline:{node}");
    let groups = subject.iter_organization();
    let groups: Vec<_> = groups
        .map(|group| group.as_str().unwrap_or("one that cannot be read"))
        .collect();
    if groups != [group.as_str()] {
        return Err(format!(
            "its certificate is in the groups {groups:?} and has all rights of those; make one that is in the group {group:?} and no other"
        ));
    }
    Ok(())
}

/// Checks that nobody but root or the agent's user has a right to `path`.
fn check_access(path: &Path) -> Result<(), String> {
    let shown = path.display();
    let found = fs::metadata(path).map_err(|error| format!("{shown}: {error}"))?;
    let mode = found.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(format!(
            "others may read {shown} (mode {mode:04o}): chmod 0600 {shown}"
        ));
    }
    let user = nix::unistd::geteuid().as_raw();
    if found.uid() != user && found.uid() != 0 {
        let owner = found.uid();
        return Err(format!(
            "{shown} belongs to user {owner}: chown root {shown}"
        ));
    }
    Ok(())
}
