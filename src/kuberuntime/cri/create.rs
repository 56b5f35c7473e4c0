//! The request that makes a container.
//!
//! Values of variables are bytes in the CRI since 1.34. In older ones, and in the generated types, they are text. On the
//! wire both are the same. The path within an image that is mounted and the signal that stops a container came with 1.33, and
//! the generated types have no fields for them.

use std::fmt;

use k8s_cri::v1;
use prost::Message;
use tonic::client::Grpc;
use tonic::{Response, Status};

use super::operation::unary;
use super::trace::TracedChannel;
use crate::types::ContainerId;

/// A container to make.
#[derive(Clone, Default, PartialEq)]
pub struct ContainerConfig {
    /// Everything but its variables: `envs` is empty.
    pub message: v1::ContainerConfig,
    /// Names and values of its variables, in order.
    pub envs: Vec<(String, Vec<u8>)>,
    /// Mounts of images, beside those of `message`.
    pub images: Vec<ImageMount>,
    /// Signal that stops it, by the CRI's number; 0 for the image's, else the runtime's default.
    pub stop_signal: i32,
}

/// A mount of an image, or of a part of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImageMount {
    /// The mount.
    pub mount: v1::Mount,
    /// Path within the image; empty for all of it.
    pub sub_path: String,
}

impl fmt::Debug for ContainerConfig {
    // Values may be secrets, and words of the command line may have been made of them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.envs.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("ContainerConfig")
            .field("metadata", &self.message.metadata)
            .field("envs", &names)
            .finish_non_exhaustive()
    }
}

impl From<v1::ContainerConfig> for ContainerConfig {
    fn from(mut message: v1::ContainerConfig) -> Self {
        let envs = std::mem::take(&mut message.envs);
        let bytes = |var: v1::KeyValue| (var.key, var.value.into_bytes());
        Self {
            message,
            envs: envs.into_iter().map(bytes).collect(),
            images: Vec::new(),
            stop_signal: 0,
        }
    }
}

/// `runtime.v1.CreateContainerRequest`. Its config is encoded already: an encoded message and a field of it that is
/// encoded alone are, one after the other, the whole message.
#[derive(Clone, PartialEq, Message)]
pub(super) struct CreateContainerRequest {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(bytes = "vec", tag = "2")]
    config: Vec<u8>,
    #[prost(message, optional, tag = "3")]
    sandbox_config: Option<v1::PodSandboxConfig>,
}

/// Field 6 of `runtime.v1.ContainerConfig`.
#[derive(Clone, PartialEq, Message)]
struct Envs {
    #[prost(message, repeated, tag = "6")]
    envs: Vec<KeyValue>,
}

/// Field 7 of `runtime.v1.ContainerConfig`, encoded.
#[derive(Clone, PartialEq, Message)]
struct Mounts {
    #[prost(bytes = "vec", repeated, tag = "7")]
    mounts: Vec<Vec<u8>>,
}

/// Field 10 of `runtime.v1.Mount`.
#[derive(Clone, PartialEq, Message)]
struct ImageSubPath {
    #[prost(string, tag = "10")]
    image_sub_path: String,
}

/// Field 18 of `runtime.v1.ContainerConfig`, an enumeration.
#[derive(Clone, PartialEq, Message)]
struct StopSignal {
    #[prost(int32, tag = "18")]
    stop_signal: i32,
}

impl ImageMount {
    fn encoded(self) -> Vec<u8> {
        let sub_path = ImageSubPath {
            image_sub_path: self.sub_path,
        };
        let mut encoded = self.mount.encode_to_vec();
        encoded.extend(sub_path.encode_to_vec());
        encoded
    }
}

/// `runtime.v1.KeyValue`.
#[derive(Clone, PartialEq, Message)]
struct KeyValue {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

impl CreateContainerRequest {
    pub(super) fn new(
        sandbox_id: &ContainerId,
        config: ContainerConfig,
        sandbox_config: v1::PodSandboxConfig,
    ) -> Self {
        let envs = config.envs.into_iter();
        let envs = Envs {
            envs: envs.map(|(key, value)| KeyValue { key, value }).collect(),
        };
        let mounts = Mounts {
            mounts: config.images.into_iter().map(ImageMount::encoded).collect(),
        };
        let mut encoded = config.message.encode_to_vec();
        encoded.extend(envs.encode_to_vec());
        encoded.extend(mounts.encode_to_vec());
        let signal = StopSignal {
            stop_signal: config.stop_signal,
        };
        encoded.extend(signal.encode_to_vec());
        Self {
            pod_sandbox_id: sandbox_id.to_string(),
            config: encoded,
            sandbox_config: Some(sandbox_config),
        }
    }
}

/// Sends the request.
///
/// # Errors
/// The runtime's error, or that it is unreachable.
pub(super) async fn send(
    runtime: Grpc<TracedChannel>,
    request: CreateContainerRequest,
) -> Result<Response<v1::CreateContainerResponse>, Status> {
    let method = "/runtime.v1.RuntimeService/CreateContainer";
    unary(runtime, method, request).await
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests may panic")]
mod tests {
    use super::*;

    fn whole() -> v1::CreateContainerRequest {
        let var = |key: &str, value: &str| v1::KeyValue {
            key: key.to_owned(),
            value: value.to_owned(),
        };
        v1::CreateContainerRequest {
            pod_sandbox_id: "sandbox".to_owned(),
            config: Some(v1::ContainerConfig {
                metadata: Some(v1::ContainerMetadata {
                    name: "c".to_owned(),
                    attempt: 3,
                }),
                command: vec!["sh".to_owned()],
                envs: vec![var("A", "1"), var("EMPTY", ""), var("B", "ü")],
                log_path: "c/3.log".to_owned(),
                linux: Some(v1::LinuxContainerConfig::default()),
                ..Default::default()
            }),
            sandbox_config: Some(v1::PodSandboxConfig {
                hostname: "web".to_owned(),
                ..Default::default()
            }),
        }
    }

    fn request(config: ContainerConfig) -> CreateContainerRequest {
        let sandbox = whole().sandbox_config.unwrap();
        CreateContainerRequest::new(&ContainerId::from("sandbox"), config, sandbox)
    }

    #[test]
    fn the_request_is_what_every_runtime_reads() {
        let sent = request(whole().config.unwrap().into()).encode_to_vec();
        let read = v1::CreateContainerRequest::decode(sent.as_slice());
        assert_eq!(read.unwrap(), whole());
    }

    #[test]
    fn mounts_of_images_come_after_the_others_and_name_a_part_of_the_image() {
        let mount = |path: &str| v1::Mount {
            container_path: path.to_owned(),
            readonly: true,
            ..Default::default()
        };
        let config = ContainerConfig {
            message: v1::ContainerConfig {
                mounts: vec![mount("/first")],
                ..Default::default()
            },
            images: [("/whole", ""), ("/part", "etc/conf")]
                .map(|(path, sub_path)| ImageMount {
                    mount: mount(path),
                    sub_path: sub_path.to_owned(),
                })
                .into(),
            ..Default::default()
        };
        let sent = request(config).config;
        let read = v1::ContainerConfig::decode(sent.as_slice()).unwrap();
        assert_eq!(read.mounts, ["/first", "/whole", "/part"].map(mount));
        let parts: Vec<String> = (Mounts::decode(sent.as_slice()).unwrap().mounts.iter())
            .map(|mount| {
                ImageSubPath::decode(mount.as_slice())
                    .unwrap()
                    .image_sub_path
            })
            .collect();
        assert_eq!(parts, ["", "", "etc/conf"]);
    }

    #[test]
    fn the_stop_signal_is_a_field_that_older_runtimes_pass_over() {
        let config = |stop_signal| ContainerConfig {
            stop_signal,
            ..whole().config.unwrap().into()
        };
        let sent = request(config(29)).config;
        assert_eq!(StopSignal::decode(sent.as_slice()).unwrap().stop_signal, 29);
        let read = v1::ContainerConfig::decode(sent.as_slice());
        assert_eq!(read.unwrap(), whole().config.unwrap());
        let without = request(config(0)).config;
        assert_eq!(sent.len(), without.len() + 3, "none is sent as none");
    }

    #[test]
    fn values_arrive_byte_for_byte_and_are_not_printed() {
        let secret = b"hunter2\xe9\xff".to_vec();
        let config = ContainerConfig {
            envs: vec![("RAW".to_owned(), secret.clone())],
            ..Default::default()
        };
        let printed = format!("{config:?}");
        assert!(printed.contains("RAW") && !printed.contains("hunter2"));
        let envs = Envs::decode(request(config).config.as_slice())
            .unwrap()
            .envs;
        assert_eq!((envs[0].key.as_str(), &envs[0].value), ("RAW", &secret));
    }
}
