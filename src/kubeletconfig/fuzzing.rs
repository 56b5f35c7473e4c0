//! Fuzz targets of configuration files.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a fuzz target fails by panicking"
)]

use std::path::Path;

use super::decode::Settings;
use super::duration::{format_duration, parse_duration};
use super::load::{check, overlay_bytes};
use super::quantity::{parse_bytes, parse_log_size};
use super::{ConfigError, KubeletConfiguration, encode};

/// Reads a configuration file.
///
/// Asserts that a configuration that is accepted is written such that it reads back, and that each problem has its
/// message.
pub(crate) fn kubelet_config(data: &[u8]) {
    let mut config = match read(data.to_vec()) {
        Ok(config) => config,
        Err(ConfigError::Invalid(problems)) => {
            assert!(!problems.is_empty());
            assert!(
                problems
                    .iter()
                    .all(|problem| !problem.to_string().is_empty())
            );
            return;
        }
        Err(error) => panic!("{error}"),
    };
    // Secrets are not written.
    config.static_pod_url = None;
    config.static_pod_url_header.clear();
    let written = encode(&config).to_string();
    match read(written.clone().into_bytes()) {
        Ok(again) => assert_eq!(again, config, "{written}"),
        Err(error) => panic!("{error}: {written}"),
    }
}

fn read(bytes: Vec<u8>) -> Result<KubeletConfiguration, ConfigError> {
    let mut settings = Settings::default();
    overlay_bytes(&mut settings, Path::new("/config.yaml"), bytes);
    check(settings).map(|loaded| loaded.config)
}

/// Reads a duration and sizes.
///
/// Asserts that a duration reads back.
pub(crate) fn config_values(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Ok(duration) = parse_duration(text) {
        assert_eq!(parse_duration(&format_duration(duration)), Ok(duration));
    }
    if let (Ok(size), Ok(bytes)) = (parse_log_size(text), parse_bytes(text)) {
        assert_eq!(size, bytes);
    }
}
