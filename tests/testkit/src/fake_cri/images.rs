//! The image service.

use k8s_cri::v1;
use k8s_cri::v1::image_service_server::ImageService;
use tonic::{Request, Response, Status};

use super::{Pull, Service};

fn name(image: Option<v1::ImageSpec>) -> String {
    image.map_or_else(String::new, |spec| spec.image)
}

#[tonic::async_trait]
impl ImageService for Service {
    async fn list_images(
        &self,
        request: Request<v1::ListImagesRequest>,
    ) -> Result<Response<v1::ListImagesResponse>, Status> {
        let wanted = request.into_inner().filter.map(|f| name(f.image));
        self.call("list_images", "", async {
            let shared = &self.0;
            let mut images = shared.model().images();
            if let Some(wanted) = wanted.filter(|w| !w.is_empty()) {
                images.retain(|i| i.id == wanted || i.repo_tags.contains(&wanted));
            }
            Ok(v1::ListImagesResponse { images })
        })
        .await
    }

    async fn image_status(
        &self,
        request: Request<v1::ImageStatusRequest>,
    ) -> Result<Response<v1::ImageStatusResponse>, Status> {
        let image = name(request.into_inner().image);
        self.call("image_status", image.clone(), async {
            let shared = &self.0;
            Ok(v1::ImageStatusResponse {
                image: shared.model().image(&image).cloned(),
                ..Default::default()
            })
        })
        .await
    }

    async fn pull_image(
        &self,
        request: Request<v1::PullImageRequest>,
    ) -> Result<Response<v1::PullImageResponse>, Status> {
        let image = name(request.into_inner().image);
        self.call("pull_image", image.clone(), async {
            let shared = &self.0;
            let pull = shared.control().pulls.get(&image).cloned();
            match pull.unwrap_or(Pull::Succeeds) {
                Pull::Succeeds => {}
                Pull::Fails(code, message) => return Err(Status::new(code, message)),
                Pull::Hangs => return std::future::pending().await,
                Pull::Takes(time) => tokio::time::sleep(time).await,
            }
            let image_ref = shared.model().pull_image(&image);
            Ok(v1::PullImageResponse { image_ref })
        })
        .await
    }

    async fn remove_image(
        &self,
        request: Request<v1::RemoveImageRequest>,
    ) -> Result<Response<v1::RemoveImageResponse>, Status> {
        let image = name(request.into_inner().image);
        self.call("remove_image", image.clone(), async {
            let shared = &self.0;
            shared.model().remove_image(&image);
            Ok(v1::RemoveImageResponse {})
        })
        .await
    }

    async fn image_fs_info(
        &self,
        _: Request<v1::ImageFsInfoRequest>,
    ) -> Result<Response<v1::ImageFsInfoResponse>, Status> {
        self.call("image_fs_info", "", async {
            let shared = &self.0;
            let mut model = shared.model();
            let used: u64 = model.images().iter().map(|i| i.size).sum();
            let filesystem = v1::FilesystemUsage {
                timestamp: model.now_ns(),
                fs_id: Some(v1::FilesystemIdentifier {
                    mountpoint: model.image_directory(),
                }),
                used_bytes: Some(v1::UInt64Value { value: used }),
                inodes_used: Some(v1::UInt64Value { value: 1 }),
            };
            Ok(v1::ImageFsInfoResponse {
                image_filesystems: if model.image_directory().is_empty() {
                    Vec::new()
                } else {
                    vec![filesystem]
                },
                container_filesystems: Vec::new(),
            })
        })
        .await
    }
}
