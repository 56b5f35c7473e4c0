//! Reasons why a container waits for its image.

use crate::kuberuntime::cri::CriError;
use crate::store::CommitError;
use crate::types::Stamp;

/// Reason why a container waits for its image; the values are upstream's waiting reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ImageErrorReason {
    /// The pull failed.
    ErrImagePull,
    /// A pull failed a short while ago.
    ImagePullBackOff,
    /// `imagePullPolicy: Never`, and it is not there.
    ErrImageNeverPull,
    /// The name is none.
    InvalidImageName,
    /// The runtime cannot say whether it is there.
    ImageInspectError,
    /// The runtime cannot reach the registry.
    RegistryUnavailable,
    /// The runtime does not trust its signature.
    SignatureValidationFailed,
}

impl ImageErrorReason {
    /// `state.waiting.reason`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ErrImagePull => "ErrImagePull",
            Self::ImagePullBackOff => "ImagePullBackOff",
            Self::ErrImageNeverPull => "ErrImageNeverPull",
            Self::InvalidImageName => "InvalidImageName",
            Self::ImageInspectError => "ImageInspectError",
            Self::RegistryUnavailable => "RegistryUnavailable",
            Self::SignatureValidationFailed => "SignatureValidationFailed",
        }
    }
}

/// A container has to wait for its image.
#[derive(Debug, thiserror::Error)]
#[error("{}: {message}", reason.as_str())]
pub struct ImageError {
    /// `state.waiting.reason`.
    pub reason: ImageErrorReason,
    /// `state.waiting.message`.
    pub message: String,
    /// End of the back-off, if there is one.
    pub retry_at: Option<Stamp>,
    /// The record of this could not be committed.
    #[source]
    pub store: Option<CommitError>,
}

impl ImageError {
    pub(super) fn new(reason: ImageErrorReason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
            retry_at: None,
            store: None,
        }
    }
}

/// Reason and message of a pull that failed; upstream's `evalCRIPullErr`.
pub(super) fn classify(image: &str, error: &CriError) -> (ImageErrorReason, String) {
    let text = error.message.as_str();
    let detail = |marker: &str| {
        text.split_once(marker)
            .map(|(_, rest)| rest.to_owned())
            .unwrap_or_default()
    };
    if text.contains("RegistryUnavailable") {
        let detail = detail("RegistryUnavailable");
        (
            ImageErrorReason::RegistryUnavailable,
            format!("image pull failed for {image} because the registry is unavailable{detail}"),
        )
    } else if text.contains("SignatureValidationFailed") {
        let detail = detail("SignatureValidationFailed");
        (
            ImageErrorReason::SignatureValidationFailed,
            format!(
                "image pull failed for {image} because the signature validation failed{detail}"
            ),
        )
    } else {
        (ImageErrorReason::ErrImagePull, text.to_owned())
    }
}
