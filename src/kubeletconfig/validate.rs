//! The rules merged values must obey. Every broken rule names the field, its value and what is allowed.

use std::fmt::Display;
use std::path::{Component, Path};
use std::time::Duration;

use super::decode::Settings;
use super::duration::format_duration;
use super::fields::{self, Within};
use super::problem::Warning;
use super::types::ImageVerification;

/// The longest duration of most fields.
pub(super) const DAY: Duration = Duration::from_secs(86_400);

/// Checks the merged settings and adds what is wrong to their problems. Settings whose text could not be
/// read keep their defaults here, so that one mistake is reported once.
pub(super) fn validate(settings: &mut Settings) {
    // Upstream's default: pulls are serialised unless several at once were asked for.
    let config = &mut settings.config;
    if config
        .max_parallel_image_pulls
        .is_some_and(|pulls| pulls > 1)
        && !settings.origins.contains_key("serializeImagePulls")
    {
        config.serialize_image_pulls = false;
    }
    periods(settings);
    numbers(settings);
    image_verification(settings);
    paths(settings);
    names(settings);
    combinations(settings);
    traces(settings);
    super::pinning::validate(settings);
    super::cluster::validate(settings);
    super::eviction::validate(settings);
    super::reserves::validate(settings);
    super::shutdown::validate(settings);
    super::server::validate(settings);
}

/// Settings that another one takes the effect from.
fn combinations(settings: &mut Settings) {
    let config = &settings.config;
    if config.pod_pids_limit.is_some() && !config.cgroups_per_qos {
        settings.warnings.push(Warning {
            origin: settings.origin("podPidsLimit"),
            field: "podPidsLimit".to_owned(),
            message: "has no effect while cgroupsPerQOS is false: pods have no cgroup of their own"
                .to_owned(),
        });
    }
}

fn traces(settings: &mut Settings) {
    let Some(tracing) = settings.config.tracing.clone() else {
        return;
    };
    let rate = tracing.sampling_rate_per_million;
    if rate > 1_000_000 {
        let message = format!("is {rate}, allowed are 0 to 1000000");
        settings.reject("tracing.samplingRatePerMillion", message);
    }
    if !is_collector(&tracing.endpoint) {
        let message = format!(
            "{:?} is not the address of a collector; write it like \"localhost:4317\" or \
             \"unix:///run/otel.sock\"",
            tracing.endpoint
        );
        settings.reject("tracing.endpoint", message);
    }
}

/// `host:port`, `dns:///host:port` as gRPC has it, or an absolute `unix://` path.
fn is_collector(endpoint: &str) -> bool {
    if let Some(path) = endpoint.strip_prefix("unix://") {
        return path.starts_with('/');
    }
    let address = endpoint.strip_prefix("dns:///").unwrap_or(endpoint);
    let Some((host, port)) = address.rsplit_once(':') else {
        return false;
    };
    let bracketed = host.starts_with('[') && host.ends_with(']');
    port.parse::<u16>().is_ok_and(|port| port != 0)
        && !host.is_empty()
        && (bracketed || !host.contains(':'))
        && !host.contains(|c: char| c.is_whitespace() || "/?#@".contains(c))
}

/// Upstream's checks of image garbage collection.
fn image_collection(settings: &mut Settings) {
    let config = &settings.config;
    let (minimum, maximum) = (config.image_minimum_gc_age, config.image_maximum_gc_age);
    let (high, low) = (
        config.image_gc_high_threshold_percent,
        config.image_gc_low_threshold_percent,
    );
    if low > 100 || low >= high {
        let wrong = format!(
            "is {low}, expected a percentage from 0 to 100, less than imageGCHighThresholdPercent, which is {high}"
        );
        settings.reject("imageGCLowThresholdPercent", wrong);
    }
    if !maximum.is_zero() && maximum <= minimum {
        let wrong = format!(
            "is {maximum:?}, expected more than imageMinimumGCAge, which is {minimum:?}, or 0s for never"
        );
        settings.reject("imageMaximumGCAge", wrong);
    }
}

/// Durations that are too short or too long.
fn periods(settings: &mut Settings) {
    for setting in fields::settings() {
        let Some(Within { value, min, max }) = setting.within else {
            continue;
        };
        let value = value(&settings.config);
        if value < min || value > max {
            let message = format!(
                "is {}, allowed are {} to {}",
                format_duration(value),
                format_duration(min),
                format_duration(max)
            );
            settings.reject(setting.name, message);
        }
    }
}

/// Returns what is wrong with a value unless it is good.
pub(super) fn unless(good: bool, value: impl Display, expected: &str) -> Option<String> {
    (!good).then(|| format!("is {value}, expected {expected}"))
}

/// Returns what is wrong with a duration of more than a day.
pub(super) fn at_most_a_day(duration: Duration) -> Option<String> {
    (duration > DAY).then(|| {
        format!(
            "is {}, allowed is at most {}",
            format_duration(duration),
            format_duration(DAY)
        )
    })
}

fn image_verification(settings: &mut Settings) {
    let field = "preloadedImagesVerificationAllowlist";
    let policy = settings.config.image_pull_credentials_verification_policy;
    let patterns = settings
        .config
        .preloaded_images_verification_allowlist
        .clone();
    if !patterns.is_empty() && policy != ImageVerification::NeverVerifyAllowlistedImages {
        settings.reject(
            field,
            format!(
                "is set, but imagePullCredentialsVerificationPolicy is {policy}; set that to \
                 NeverVerifyAllowlistedImages"
            ),
        );
    }
    for pattern in patterns.iter().filter(|p| !is_image_pattern(p)) {
        settings.reject(
            field,
            format!(
                "{pattern:?} is not an image with its registry and without tag and digest, like \
                 \"registry.example.com/team/app\" or \"registry.example.com/team/*\""
            ),
        );
    }
}

/// A repository with its registry and without tag and digest, or the beginning of some, ending in `/*`.
fn is_image_pattern(pattern: &str) -> bool {
    let (name, wildcard) = match pattern.strip_suffix("/*") {
        Some(name) => (name, true),
        None => (pattern, false),
    };
    let clean = |part: &str| {
        !part.is_empty() && !part.contains(['*', '@']) && !part.contains(char::is_whitespace)
    };
    match name.split_once('/') {
        None => wildcard && clean(name),
        Some((registry, path)) => {
            let registry_ok = clean(registry)
                && (registry.contains(['.', ':']) || registry == "localhost" || wildcard);
            let path_ok = path.split('/').all(|part| {
                clean(part) && !part.contains(':') && part == part.to_ascii_lowercase()
            });
            registry_ok && path_ok
        }
    }
}

fn numbers(settings: &mut Settings) {
    let config = &settings.config;
    let (pulls, serialized) = (
        config.max_parallel_image_pulls,
        config.serialize_image_pulls,
    );
    let verbosity = config.logging.verbosity;
    if let Some(pulls) = pulls.filter(|pulls| *pulls > 1 && serialized) {
        settings.reject(
            "maxParallelImagePulls",
            format!(
                "is {pulls}, but serializeImagePulls is true, which allows only 1; set it to false"
            ),
        );
    }
    image_collection(settings);
    for setting in fields::settings() {
        if let Some(message) = setting.check.and_then(|check| check(&settings.config)) {
            settings.reject(setting.name, message);
        }
    }
    if i32::try_from(verbosity).is_err() {
        settings.reject(
            "logging.verbosity",
            format!("is {verbosity}, allowed are 0 to {}", i32::MAX),
        );
    }
}

fn paths(settings: &mut Settings) {
    let logs = settings.config.pod_logs_dir.clone();
    if !clean_absolute(&logs) {
        settings.reject(
            "podLogsDir",
            format!(
                "is {:?}, expected an absolute path without \".\", \"..\" or double slashes",
                logs.display().to_string()
            ),
        );
    } else if !logs.to_str().is_some_and(str::is_ascii) {
        settings.reject(
            "podLogsDir",
            format!(
                "is {:?}, expected ASCII characters only",
                logs.display().to_string()
            ),
        );
    }
    let root = settings.config.cgroup_root.clone();
    if !root.is_empty() && !clean_absolute(Path::new(&root)) {
        settings.reject(
            "cgroupRoot",
            format!("is {root:?}, expected an absolute cgroup name like \"/\" or \"/pods\""),
        );
    }
}

/// Returns whether `path` is absolute and normalized.
fn clean_absolute(path: &Path) -> bool {
    path.is_absolute()
        && path
            .components()
            .all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
        && path
            .components()
            .collect::<std::path::PathBuf>()
            .as_os_str()
            == path.as_os_str()
}

fn names(settings: &mut Settings) {
    if let Some(url) = settings.config.static_pod_url.clone() {
        let rest = url
            .strip_prefix("http://")
            .or_else(|| url.strip_prefix("https://"));
        let has_host = rest.is_some_and(|rest| !rest.is_empty() && !rest.starts_with('/'));
        if !has_host || url.contains(char::is_whitespace) {
            settings.reject(
                "staticPodURL",
                format!(
                    "is {url:?}, expected a URL like \"http://host:port/path\" or \"https://…\""
                ),
            );
        }
    }
    let headers: Vec<String> = settings
        .config
        .static_pod_url_header
        .iter()
        .filter(|(name, values)| {
            !is_header_name(name)
                || values
                    .iter()
                    .any(|value| value.contains(['\r', '\n', '\0']))
        })
        .map(|(name, _)| name.clone())
        .collect();
    for name in headers {
        // The value is not repeated: it may be a password.
        settings.reject(
            "staticPodURLHeader",
            format!("{name:?} is not a header name, or its value has line breaks"),
        );
    }
    let domain = settings.config.cluster_domain.clone();
    if !domain.is_empty() && !is_dns_subdomain(domain.trim_end_matches('.')) {
        settings.reject(
            "clusterDomain",
            format!("is {domain:?}, expected a DNS name like \"cluster.local\""),
        );
    }
}

fn is_header_name(name: &str) -> bool {
    !name.is_empty()
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b))
}

/// Returns whether `name` is a lowercase RFC 1123 subdomain, as node names and domains must be.
pub(super) fn is_dns_subdomain(name: &str) -> bool {
    let label = |label: &str| {
        let alphanumeric = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
        let bytes = label.as_bytes();
        bytes.len() <= 63
            && alphanumeric(bytes.first())
            && alphanumeric(bytes.last())
            && bytes
                .iter()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-')
    };
    name.len() <= 253 && name.split('.').all(label)
}
