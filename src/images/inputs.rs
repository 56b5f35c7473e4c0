//! Inputs of a pull other than the image.

use std::sync::Arc;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::Secret;

/// Inputs of a pull other than the image. All are optional.
#[derive(Clone, Copy, Debug, Default)]
pub struct PullInputs<'a> {
    /// The sandbox the image is for.
    pub sandbox: Option<&'a v1::PodSandboxConfig>,
    /// The pod's pull secrets, as far as they were found.
    pub secrets: &'a PullSecrets,
    /// Reference of the image that the previous attempt of the container ran with, see
    /// [`ran_with`](crate::core::pull_fallback::ran_with).
    pub ran_with: Option<&'a str>,
}

/// A pod's `imagePullSecrets`.
#[derive(Clone, Default)]
pub struct PullSecrets {
    /// Those that exist.
    pub found: Vec<Arc<Secret>>,
    /// Names of those that could not be had.
    pub missing: Vec<String>,
}

impl std::fmt::Debug for PullSecrets {
    // Their content is secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PullSecrets")
            .field("found", &self.found.len())
            .field("missing", &self.missing)
            .finish()
    }
}

static NO_SECRETS: PullSecrets = PullSecrets {
    found: Vec::new(),
    missing: Vec::new(),
};

impl Default for &PullSecrets {
    fn default() -> Self {
        &NO_SECRETS
    }
}
