//! The image service.

use std::collections::HashMap;
use std::time::Duration;

use k8s_cri::v1;

use super::client::CriClient;
use super::error::{CriError, CriErrorKind};

/// Number of consecutive checks without an answer after which a pull is given up.
const PULL_MISSES: u32 = 2;

/// Message of a pull that does not begin.
const NOT_TAKEN_OVER: &str = "waiting for the runtime to remove what pulls of an earlier boot have unpacked; the agent's log has the cause";

impl CriClient {
    /// Lists images; `None` = all.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn list_images(
        &self,
        filter: Option<v1::ImageFilter>,
    ) -> Result<Vec<v1::Image>, CriError> {
        let call = self.operation("list_images", "").on(&self.image_endpoint);
        let answer = call
            .read(|| {
                let mut client = self.images.clone();
                let request = v1::ListImagesRequest {
                    filter: filter.clone(),
                };
                async move { client.list_images(request).await }
            })
            .await?;
        Ok(answer.images)
    }

    /// An image by name or id; `None` when the runtime does not have it.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn image_status(&self, image: &str) -> Result<Option<v1::Image>, CriError> {
        let call = self
            .operation("image_status", image)
            .on(&self.image_endpoint);
        let answer = call
            .read(|| {
                let mut client = self.images.clone();
                let request = v1::ImageStatusRequest {
                    image: Some(image_spec(image)),
                    verbose: false,
                };
                async move { client.image_status(request).await }
            })
            .await;
        match answer {
            Err(error) if error.is_not_found() => Ok(None),
            answer => Ok(answer?.image),
        }
    }

    /// Digests of the layers of an image, the lowest first, from what the runtime shows of its configuration. Empty when the
    /// runtime does not have the image or does not show it.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn image_layers(&self, image: &str) -> Result<Vec<String>, CriError> {
        let call = self
            .operation("image_status", image)
            .on(&self.image_endpoint);
        let answer = call
            .read(|| {
                let mut client = self.images.clone();
                let request = v1::ImageStatusRequest {
                    image: Some(image_spec(image)),
                    verbose: true,
                };
                async move { client.image_status(request).await }
            })
            .await;
        match answer {
            Err(error) if error.is_not_found() => Ok(Vec::new()),
            answer => Ok(layers_of(&answer?.info)),
        }
    }

    /// Pulls an image and returns the reference under which the runtime keeps it. A pull takes as long as
    /// it takes: it has no deadline of its own, but is given up when the runtime stops answering (see
    /// [`super::CriTimeouts::pull_check`]). Dropping the future cancels the pull; the next one of the same image continues
    /// it on runtimes that can do this (see [`Self::resuming_pulls`]).
    ///
    /// # Errors
    /// See [`super::CriErrorKind`]; `DeadlineExceeded` when the runtime stopped answering.
    pub async fn pull_image(
        &self,
        image: v1::ImageSpec,
        auth: Option<v1::AuthConfig>,
        sandbox_config: Option<v1::PodSandboxConfig>,
    ) -> Result<String, CriError> {
        let name = image.image.clone();
        let request = v1::PullImageRequest {
            image: Some(image),
            auth,
            sandbox_config,
        };
        let mut request = tonic::Request::new(request);
        let lease = Box::pin(self.lease_of(&name)).await;
        let lease = lease.map_err(|status| self.not_taken_over(&name, status))?;
        if let Some(lease) = &lease {
            lease.name_in(&mut request);
        }
        let mut client = self.images.clone();
        let call = self
            .operation("pull_image", &name)
            .on(&self.image_endpoint)
            .within(None);
        // Both arms only borrow; the one that loses is dropped, which cancels its call.
        let answer = tokio::select! {
            answer = call.once(client.pull_image(request)) => answer,
            silence = self.until_silent(&name) => Err(call.hung(silence)),
        };
        if let Some(lease) = lease {
            let error = answer.as_ref().err().map(ToString::to_string);
            self.end_lease(lease, error.as_deref()).await;
        }
        let answer = answer?;
        if answer.image_ref.is_empty() {
            return Err(call.incomplete("the runtime names no reference for the pulled image"));
        }
        Ok(answer.image_ref)
    }

    /// Returns the error of a pull that does not begin, since it would use what a pull of an earlier boot has unpacked. The next
    /// one tries again. A containerd that does nothing about leases pulls nothing either: it needs one for each pull.
    fn not_taken_over(&self, image: &str, status: tonic::Status) -> CriError {
        let mut error = CriError::from_status("pull_image", image, &self.image_endpoint, status);
        if !error.is_unavailable() {
            tracing::warn!(image, cause = %error.message, "cannot take over the pulls of an earlier boot, images wait for it");
            error.kind = CriErrorKind::Other;
            // Without the cause: it says nothing about a registry, nor about the files of an image.
            NOT_TAKEN_OVER.clone_into(&mut error.message);
        }
        error
    }

    /// Waits until an image, or an archive of images, may be pulled or imported: until the runtime has removed what pulls of earlier boots have
    /// unpacked.
    ///
    /// # Errors
    /// When it has not. The next call tries again.
    pub async fn before_pulls(&self, image: &str) -> Result<(), CriError> {
        let ready = Box::pin(self.has_leases()).await;
        ready
            .map(drop)
            .map_err(|status| self.not_taken_over(image, status))
    }

    /// Removes an image by name or id. One that is gone counts as removed. Parts of pulls that are not under way stay, of this
    /// image as well: see [`Self::release_pulls`].
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn remove_image(&self, image: &str) -> Result<(), CriError> {
        let request = v1::RemoveImageRequest {
            image: Some(image_spec(image)),
        };
        let mut client = self.images.clone();
        let answer = self
            .operation("remove_image", image)
            .on(&self.image_endpoint)
            .once(client.remove_image(request))
            .await;
        match answer {
            Err(error) if error.is_not_found() => Ok(()),
            answer => answer.map(drop),
        }
    }

    /// Space that the images (and, if reported, the containers) use.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn image_fs_info(&self) -> Result<v1::ImageFsInfoResponse, CriError> {
        let call = self.operation("image_fs_info", "").on(&self.image_endpoint);
        call.read(|| {
            let mut client = self.images.clone();
            async move { client.image_fs_info(v1::ImageFsInfoRequest {}).await }
        })
        .await
    }

    /// Returns once the image service has been silent, with the time it was given to answer.
    async fn until_silent(&self, image: &str) -> Duration {
        let mut misses = 0;
        loop {
            tokio::time::sleep(self.timeouts.pull_check).await;
            match self.image_status(image).await {
                Err(error) if error.kind == CriErrorKind::DeadlineExceeded => misses += 1,
                // Any other answer, an error as well, shows that somebody is there; a broken connection
                // ends the pull by itself.
                _ => misses = 0,
            }
            if misses >= PULL_MISSES {
                return self.timeouts.request;
            }
        }
    }
}

/// The layers in the verbose status of an image, as containerd and CRI-O write it.
fn layers_of(info: &HashMap<String, String>) -> Vec<String> {
    let info = info.get("info").map_or("", String::as_str);
    let info: serde_json::Value = serde_json::from_str(info).unwrap_or_default();
    let layers = info["imageSpec"]["rootfs"]["diff_ids"].as_array();
    let layers = layers.into_iter().flatten();
    layers
        .filter_map(|layer| Some(layer.as_str()?.to_owned()))
        .collect()
}

/// An image by its name alone.
fn image_spec(image: &str) -> v1::ImageSpec {
    v1::ImageSpec {
        image: image.to_owned(),
        annotations: HashMap::new(),
        user_specified_image: String::new(),
        runtime_handler: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layers_of_an_image_are_in_its_verbose_status() {
        let shown = r#"{"chainID":"sha256:c","imageSpec":{"architecture":"amd64","rootfs":{"type":"layers","diff_ids":["sha256:a","sha256:b"]}}}"#;
        for (info, want) in [
            (Some(shown), vec!["sha256:a", "sha256:b"]),
            (Some("{}"), vec![]),
            (Some("no JSON"), vec![]),
            (None, vec![]),
        ] {
            let info = info.map(|info| ("info".to_owned(), info.to_owned()));
            assert_eq!(layers_of(&info.into_iter().collect()), want);
        }
    }
}
