//! Images that the runtime keeps and cannot read: a power loss has cut off or overwritten files of its content store.
//!
//! containerd does not show such an image after its start, and takes the damaged files for what an import brings. So an
//! archive that cannot be imported for that reason gets the names of the image removed first. Nothing can have used them.
//!
//! **Invariant:** only images that CRI does not show are removed, and only while an archive with them can be read to its end.

use std::collections::BTreeMap;
use std::path::Path;

use super::archive::images_in;
use super::import::Importer;
use super::{ImageManager, ImageService, Reporter, files, qualified};
use crate::core::images;
use crate::store::{CommitError, Store};
use crate::types::{blocking, causes};

impl ImageManager {
    /// Removes images of an archive that the runtime cannot read, and parts of pulls, if that is why its import failed. Returns
    /// whether another import may succeed.
    ///
    /// # Errors
    /// When it cannot be recorded.
    pub(super) async fn remove_unreadable<S: ImageService>(
        &self,
        (archive, images): (&Path, &[String]),
        why: &str,
        importer: &dyn Importer,
        service: &S,
        (store, report): (&Store, &Reporter<'_>),
    ) -> Result<bool, CommitError> {
        if !images::is_content_unreadable(why) {
            return Ok(false);
        }
        let path = archive.to_owned();
        let read = blocking::run(move || images_in(&path).is_ok()).await;
        if !read.unwrap_or(false) {
            return Ok(false);
        }
        let mut hidden = Vec::new();
        for image in images {
            if matches!(service.image_status(image).await, Ok(None)) {
                hidden.push(image.clone());
            }
        }
        for image in &hidden {
            let old = files::of(&store.snapshot(), image).map(|(files, _)| files);
            let id = old.map(|old| old.id).unwrap_or_default();
            let names = BTreeMap::from([(qualified(image), image.clone())]);
            self.record_removed(&names, &id, store).await?;
            self.tell_suspect(image, "the runtime cannot read its own files of it", report);
        }
        if hidden.is_empty() {
            return Ok(false);
        }
        // Pulls that were cut off keep the same files.
        service.release_pulls().await;
        match importer.remove_unreadable(&hidden).await {
            // Without a name it may have been the part of a pull.
            Ok(_) => Ok(true),
            Err(error) => {
                let error = causes(&error);
                tracing::warn!(archive = %archive.display(), error, "cannot remove images that the runtime cannot read");
                Ok(false)
            }
        }
    }
}
