//! One document laid over the settings so far: the schema is checked first, then the typed fields are
//! taken over. A `null` puts a field back to its default, lists replace, maps merge.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::duration::parse_duration;
use super::fields::{FIELDS, Field, Kind, RELEASE, Support, misspelt};
use super::given::{self, is_unset};
use super::problem::{Origin, Problem, Warning};
use super::quantity::parse_log_size;
use super::types::{KubeletConfiguration, Tracing};
use super::yaml::{Entry, Node, Place, Value};
use super::{API_VERSION, KIND};
use crate::types::quantity::nanos;

/// The configuration under construction, and where each of its fields was set last.
#[derive(Debug, Default)]
pub(super) struct Settings {
    pub(super) config: KubeletConfiguration,
    /// By dotted field name; a field that is not here has its default.
    pub(super) origins: BTreeMap<&'static str, Origin>,
    pub(super) problems: Vec<Problem>,
    pub(super) warnings: Vec<Warning>,
}

impl Settings {
    /// Where `field` was set.
    pub(super) fn origin(&self, field: &str) -> Origin {
        self.origins.get(field).cloned().unwrap_or(Origin::Default)
    }

    /// Reports that the value of `field` cannot be used.
    pub(super) fn reject(&mut self, field: &str, message: impl Into<String>) {
        self.problems
            .push(Problem::new(self.origin(field), field, message));
    }

    /// Reports that the value of `flag` cannot be used.
    pub(super) fn reject_flag(&mut self, flag: &str, message: impl Into<String>) {
        self.problems
            .push(Problem::new(Origin::Flag(flag.to_owned()), flag, message));
    }
}

/// Lays the document `root` of `file` over `settings`, adding what is wrong with it to the problems.
pub(super) fn overlay(settings: &mut Settings, file: &Path, root: &Node) {
    let Value::Map(entries) = &root.value else {
        let message = match root.value {
            Value::Null => format!(
                "the file is empty; it needs at least \"apiVersion: {API_VERSION}\" and \"kind: {KIND}\""
            ),
            ref other => format!("expected a {KIND} object, found {}", other.describe()),
        };
        settings
            .problems
            .push(Problem::new(at(file, root.place), "", message));
        return;
    };
    if !check_type(settings, file, root.place, entries) {
        return;
    }
    let body: Vec<&Entry> = entries
        .iter()
        .filter(|entry| entry.key != "apiVersion" && entry.key != "kind")
        .collect();
    let mut checker = Checker {
        file,
        settings: &mut *settings,
    };
    checker.object("", FIELDS, body.iter().copied());
    given::record(
        &mut settings.config.without_effect,
        FIELDS,
        body.iter().copied(),
    );
    let defaults = KubeletConfiguration::default();
    for entry in body {
        match (&*entry.key, &entry.node.value) {
            ("logging", Value::Map(inner)) => {
                for entry in inner {
                    let path = match &*entry.key {
                        "format" => "logging.format",
                        "verbosity" => "logging.verbosity",
                        _ => continue,
                    };
                    take(settings, &defaults, file, path, &entry.node);
                }
            }
            ("logging", Value::Null) => {
                settings.config.logging = defaults.logging.clone();
                settings.origins.remove("logging.format");
                settings.origins.remove("logging.verbosity");
            }
            ("memorySwap", Value::Map(inner)) => {
                for entry in inner.iter().filter(|e| e.key == "swapBehavior") {
                    let path = "memorySwap.swapBehavior";
                    take(settings, &defaults, file, path, &entry.node);
                }
            }
            ("memorySwap", Value::Null) => {
                settings.config.reserves.swap = defaults.reserves.swap;
                settings.origins.remove("memorySwap.swapBehavior");
            }
            ("tracing", value) => {
                let inner: &[Entry] = match value {
                    Value::Map(inner) => inner,
                    _ => &[],
                };
                if matches!(value, Value::Null) {
                    settings.config.tracing = None;
                } else {
                    settings.config.tracing.get_or_insert_default();
                }
                for entry in inner {
                    let path = match &*entry.key {
                        "endpoint" => "tracing.endpoint",
                        "samplingRatePerMillion" => "tracing.samplingRatePerMillion",
                        _ => continue,
                    };
                    take(settings, &defaults, file, path, &entry.node);
                }
            }
            ("crashLoopBackOff", Value::Map(inner)) => {
                for entry in inner {
                    if entry.key == "maxContainerRestartPeriod" {
                        let path = "crashLoopBackOff.maxContainerRestartPeriod";
                        take(settings, &defaults, file, path, &entry.node);
                    }
                }
            }
            ("crashLoopBackOff", Value::Null) => {
                settings.config.max_container_restart_period =
                    defaults.max_container_restart_period;
                settings
                    .origins
                    .remove("crashLoopBackOff.maxContainerRestartPeriod");
            }
            ("authentication" | "authorization", _) => {
                for (path, node) in super::server::nested(entry) {
                    take(settings, &defaults, file, path, node);
                }
            }
            (key, _) => {
                if let Some(field) = FIELDS.iter().find(|field| field.name == key) {
                    take(settings, &defaults, file, field.name, &entry.node);
                }
            }
        }
    }
}

fn at(file: &Path, place: Place) -> Origin {
    Origin::File {
        path: file.to_owned(),
        line: place.line,
        column: place.column,
    }
}

/// Checks `apiVersion` and `kind`; a document of another type is not read any further.
fn check_type(settings: &mut Settings, file: &Path, root: Place, entries: &[Entry]) -> bool {
    let mut good = true;
    for (key, want) in [("apiVersion", API_VERSION), ("kind", KIND)] {
        let found = entries.iter().find(|entry| entry.key == key);
        let (place, message) = match found.map(|entry| &entry.node) {
            None => (root, format!("is missing; add \"{key}: {want}\"")),
            Some(node) => match &node.value {
                Value::String(text) if text == want => continue,
                other => (
                    node.place,
                    format!("is {}, expected {want:?}", other.describe()),
                ),
            },
        };
        good = false;
        settings
            .problems
            .push(Problem::new(at(file, place), key, message));
    }
    good
}

/// Checks names and types of everything in a document.
struct Checker<'a> {
    file: &'a Path,
    settings: &'a mut Settings,
}

impl Checker<'_> {
    fn object<'e>(
        &mut self,
        prefix: &str,
        fields: &'static [Field],
        entries: impl Iterator<Item = &'e Entry>,
    ) {
        for entry in entries {
            let path = format!("{prefix}{}", entry.key);
            match fields.iter().find(|field| field.name == entry.key) {
                Some(field) => self.field(&path, field, entry),
                None => self.unknown(&path, fields, entry),
            }
        }
    }

    /// Refuses a misspelt field and warns of one that only a newer release can know.
    fn unknown(&mut self, path: &str, fields: &'static [Field], entry: &Entry) {
        let origin = at(self.file, entry.place);
        match misspelt(&entry.key, fields.iter().map(|field| field.name)) {
            Some(name) => {
                let message = format!("unknown field; did you mean {name:?}?");
                self.settings
                    .problems
                    .push(Problem::new(origin, path, message));
            }
            None => self.settings.warnings.push(Warning {
                origin,
                field: path.to_owned(),
                message: format!(
                    "is not a field of Kubernetes {RELEASE}, which this version knows, and has no effect"
                ),
            }),
        }
    }

    fn field(&mut self, path: &str, field: &Field, entry: &Entry) {
        let node = &entry.node;
        if let (Kind::Object(fields), Value::Map(entries)) = (&field.kind, &node.value) {
            self.object(&format!("{path}."), fields, entries.iter());
            return;
        }
        if field.support == Support::NotYet && !is_unset(field, &node.value) {
            self.settings.warnings.push(Warning {
                origin: at(self.file, entry.place),
                field: path.to_owned(),
                message: "is not supported in this version and has no effect".to_owned(),
            });
        }
        self.value(path, field.kind, node);
    }

    /// Checks the type of a value and of what is in it. `null` fits everywhere.
    fn value(&mut self, path: &str, kind: Kind, node: &Node) {
        match (items_of(kind), &node.value) {
            (Some(inner), Value::List(items)) if is_list(kind) => {
                for (index, item) in items.iter().enumerate() {
                    self.value(&format!("{path}[{index}]"), inner, item);
                }
            }
            (Some(inner), Value::Map(entries)) if !is_list(kind) => {
                for entry in entries {
                    self.value(&format!("{path}.{}", entry.key), inner, &entry.node);
                }
            }
            (_, Value::Map(entries)) if matches!(kind, Kind::Object(_)) => {
                // In a list of objects; the list was warned about.
                let Kind::Object(fields) = kind else { return };
                for entry in entries {
                    let path = format!("{path}.{}", entry.key);
                    match fields.iter().find(|field| field.name == entry.key) {
                        Some(field) => self.value(&path, field.kind, &entry.node),
                        None => self.unknown(&path, fields, entry),
                    }
                }
            }
            (_, value) => {
                if let Err(message) = check_kind(kind, value) {
                    let origin = at(self.file, node.place);
                    self.settings
                        .problems
                        .push(Problem::new(origin, path, message));
                }
            }
        }
    }
}

/// The kind of what is in a list or map of this kind.
const fn items_of(kind: Kind) -> Option<Kind> {
    match kind {
        Kind::Strings | Kind::StringMap => Some(Kind::String),
        Kind::Ints => Some(Kind::Int32),
        Kind::StringsMap => Some(Kind::Strings),
        Kind::BoolMap => Some(Kind::Bool),
        Kind::QuantityMap => Some(Kind::Quantity),
        Kind::Objects(fields) => Some(Kind::Object(fields)),
        _ => None,
    }
}

const fn is_list(kind: Kind) -> bool {
    matches!(kind, Kind::Strings | Kind::Ints | Kind::Objects(_))
}

/// Checks a value that is not one of the kind's own collections.
fn check_kind(kind: Kind, value: &Value) -> Result<(), String> {
    let whole = |min: i128, max: i128| match value {
        Value::Int(number) if (min..=max).contains(number) => Ok(()),
        Value::Int(number) => Err(format!(
            "is {number}, expected a whole number from {min} to {max}"
        )),
        _ => Err(format!(
            "expected a whole number, found {}",
            value.describe()
        )),
    };
    let (good, expected) = match (kind, value) {
        (_, Value::Null) => return Ok(()),
        (Kind::Duration | Kind::DurationOrNanos, Value::String(text)) => {
            return parse_duration(text).map(|_| ());
        }
        (Kind::Int32, _) => return whole(i32::MIN.into(), i32::MAX.into()),
        (Kind::Uint32, _) => return whole(0, u32::MAX.into()),
        (Kind::Int64, _) => return whole(i64::MIN.into(), i64::MAX.into()),
        (Kind::DurationOrNanos, Value::Int(_)) => return whole(0, i64::MAX.into()),
        (Kind::Duration, _) => (false, "a duration, like \"20s\""),
        (Kind::DurationOrNanos, _) => (false, "a duration, like \"5s\", or nanoseconds"),
        (Kind::Quantity, Value::String(text)) if nanos(text).is_err() => {
            return Err(format!(
                "{text:?} is not a quantity; write it like \"1Gi\", \"500M\" or \"1048576\""
            ));
        }
        (Kind::Quantity, value) => (
            matches!(value, Value::String(_) | Value::Int(_) | Value::Float(_)),
            "a quantity, like \"1Gi\"",
        ),
        (Kind::Bool, value) => (matches!(value, Value::Bool(_)), "true or false"),
        (Kind::Number, value) => (matches!(value, Value::Int(_) | Value::Float(_)), "a number"),
        (Kind::String, value) => (matches!(value, Value::String(_)), "a string"),
        (Kind::Strings, _) => (false, "a list of strings"),
        (Kind::Ints, _) => (false, "a list of whole numbers"),
        (Kind::StringMap, _) => (false, "a map of strings"),
        (Kind::StringsMap, _) => (false, "a map of lists of strings"),
        (Kind::BoolMap, _) => (false, "a map of booleans"),
        (Kind::QuantityMap, _) => (false, "a map of quantities"),
        (Kind::Objects(_), _) => (false, "a list of objects"),
        (Kind::Object(_), _) => (false, "an object"),
    };
    if good {
        Ok(())
    } else {
        Err(format!("expected {expected}, found {}", value.describe()))
    }
}

/// Reads one value of an already checked kind. `None`: unset (null, or upstream's zero value that
/// means the default), so the default applies.
pub(super) struct Reader<'a> {
    file: &'a Path,
    pub(super) node: &'a Node,
    /// Where the problem is.
    place: Place,
    problem: Option<String>,
}

impl Reader<'_> {
    fn fail<T>(&mut self, message: String) -> Option<T> {
        self.fail_at(self.node.place, message);
        None
    }

    /// Reports what is wrong at a place within the value; the first report counts.
    pub(super) fn fail_at(&mut self, place: Place, message: String) {
        if self.problem.is_none() {
            self.place = place;
            self.problem = Some(message);
        }
    }

    pub(super) fn bool(&self) -> Option<bool> {
        match self.node.value {
            Value::Bool(value) => Some(value),
            _ => None,
        }
    }

    pub(super) fn int<T: TryFrom<i128>>(&mut self, range: &str) -> Option<T> {
        match self.node.value {
            Value::Int(value) => match T::try_from(value) {
                Ok(value) => Some(value),
                Err(_) => self.fail(format!("is {value}, expected {range}")),
            },
            _ => None,
        }
    }

    pub(super) fn string(&self) -> Option<&str> {
        match &self.node.value {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn filled(&self) -> Option<&str> {
        self.string().filter(|text| !text.is_empty())
    }

    pub(super) fn parsed<T>(&mut self, parse: impl Fn(&str) -> Result<T, String>) -> Option<T> {
        match self.filled().map(parse)? {
            Ok(value) => Some(value),
            Err(message) => self.fail(message),
        }
    }

    /// A duration, of which zero means the default.
    pub(super) fn period(&self) -> Option<Duration> {
        let duration = self.string().and_then(|text| parse_duration(text).ok())?;
        (!duration.is_zero()).then_some(duration)
    }

    /// A path; a relative one is relative to the directory of the file it stands in.
    pub(super) fn path(&self) -> Option<PathBuf> {
        let text = self.filled()?;
        Some(match self.file.parent() {
            Some(directory) => directory.join(text),
            None => PathBuf::from(text),
        })
    }

    /// As [`Self::path`], and a relative one is made absolute and cleaned as Go's `filepath.Join` does. An
    /// absolute one stays as it was written.
    fn absolute_path(&mut self) -> Option<PathBuf> {
        let path = self.path()?;
        if self.filled().is_some_and(|text| text.starts_with('/')) {
            return Some(path);
        }
        match std::path::absolute(&path) {
            Ok(path) => Some(cleaned(&path)),
            Err(error) => self.fail(format!("cannot be made an absolute path: {error}")),
        }
    }

    /// Those of a list that are whole numbers of 32 bits; the others were told about.
    pub(super) fn ints(&self) -> Option<Vec<i32>> {
        match &self.node.value {
            Value::List(nodes) => {
                let numbers = nodes.iter().filter_map(|node| match node.value {
                    Value::Int(value) => i32::try_from(value).ok(),
                    _ => None,
                });
                Some(numbers.collect())
            }
            _ => None,
        }
    }

    pub(super) fn strings(&self) -> Option<Vec<(Place, &str)>> {
        match &self.node.value {
            Value::List(nodes) => Some(strings_of(nodes)),
            _ => None,
        }
    }
}

/// `path` without `.` and with each `..` taken off its predecessor.
fn cleaned(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                clean.pop();
            }
            part => clean.push(part),
        }
    }
    clean
}

fn strings_of(nodes: &[Node]) -> Vec<(Place, &str)> {
    nodes
        .iter()
        .filter_map(|node| match &node.value {
            Value::String(text) => Some((node.place, text.as_str())),
            _ => None,
        })
        .collect()
}

/// The process limit of a pod in `limit`. Upstream takes every number below 1 for no limit of its own.
pub(super) fn pids_limit(limit: i64) -> Option<u64> {
    u64::try_from(limit).ok().filter(|limit| *limit != 0)
}

/// The burst of events in `burst`: 0 is the default.
pub(super) fn event_burst(burst: u32) -> u32 {
    match burst {
        0 => KubeletConfiguration::default().event_burst,
        burst => burst,
    }
}

/// Reads an IP address.
pub(super) fn parse_ip(text: &str) -> Result<IpAddr, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is not an IP address"))
}

/// Takes one typed field over. Kinds were checked; a value that failed that check is not taken.
fn take(
    settings: &mut Settings,
    defaults: &KubeletConfiguration,
    file: &Path,
    path: &'static str,
    node: &Node,
) {
    let mut r = Reader {
        file,
        node,
        place: node.place,
        problem: None,
    };
    let c = &mut settings.config;
    let d = defaults.clone();
    match path {
        "staticPodPath" => c.static_pod_path = r.path(),
        "podLogsDir" => c.pod_logs_dir = r.absolute_path().unwrap_or(d.pod_logs_dir),
        "syncFrequency" => c.sync_frequency = r.period().unwrap_or(d.sync_frequency),
        "fileCheckFrequency" => {
            c.file_check_frequency = r.period().unwrap_or(d.file_check_frequency);
        }
        "httpCheckFrequency" => {
            c.http_check_frequency = r.period().unwrap_or(d.http_check_frequency);
        }
        "staticPodURL" => c.static_pod_url = r.filled().map(str::to_owned),
        "staticPodURLHeader" => match &node.value {
            Value::Map(entries) => {
                for entry in entries {
                    if let Value::List(nodes) = &entry.node.value {
                        let values = strings_of(nodes);
                        let values = values.into_iter().map(|(_, text)| text.to_owned());
                        c.static_pod_url_header
                            .insert(entry.key.clone(), values.collect());
                    } else {
                        c.static_pod_url_header.remove(&entry.key);
                    }
                }
            }
            _ => c.static_pod_url_header.clear(),
        },
        "healthzPort" => {
            c.healthz_port = r
                .int("a port from 1 to 65535, or 0 to turn it off")
                .unwrap_or(d.healthz_port);
        }
        "healthzBindAddress" => {
            c.healthz_bind_address = r.parsed(parse_ip).unwrap_or(d.healthz_bind_address);
        }
        "cgroupsPerQOS" => c.cgroups_per_qos = r.bool().unwrap_or(d.cgroups_per_qos),
        "cgroupRoot" => c.cgroup_root = r.string().unwrap_or_default().to_owned(),
        "cgroupDriver" => {
            c.cgroup_driver = r.parsed(str::parse).unwrap_or(d.cgroup_driver);
        }
        "containerLogMaxSize" => {
            c.container_log_max_size = r.parsed(parse_log_size).unwrap_or(d.container_log_max_size);
        }
        "containerLogMaxFiles" => {
            c.container_log_max_files = r
                .int("a number of files, at least 2")
                .unwrap_or(d.container_log_max_files);
        }
        "containerLogMaxWorkers" => {
            c.container_log_max_workers = r
                .int("a number of rotations at once, at least 1")
                .unwrap_or(d.container_log_max_workers);
        }
        "containerLogMonitorInterval" => {
            c.container_log_monitor_interval =
                r.period().unwrap_or(d.container_log_monitor_interval);
        }
        "imageMinimumGCAge" => {
            c.image_minimum_gc_age = r.period().unwrap_or(d.image_minimum_gc_age);
        }
        "imageMaximumGCAge" => {
            c.image_maximum_gc_age = r.period().unwrap_or(d.image_maximum_gc_age);
        }
        "imageGCHighThresholdPercent" => {
            c.image_gc_high_threshold_percent = r
                .int("a percentage from 0 to 100; 100 turns it off")
                .unwrap_or(d.image_gc_high_threshold_percent);
        }
        "imageGCLowThresholdPercent" => {
            c.image_gc_low_threshold_percent = r
                .int("a percentage from 0 to 100, less than imageGCHighThresholdPercent")
                .unwrap_or(d.image_gc_low_threshold_percent);
        }
        "serializeImagePulls" => {
            c.serialize_image_pulls = r.bool().unwrap_or(d.serialize_image_pulls);
        }
        "maxParallelImagePulls" => c.max_parallel_image_pulls = r.int("a number from 1"),
        "imagePullCredentialsVerificationPolicy" => {
            c.image_pull_credentials_verification_policy = r
                .parsed(str::parse)
                .unwrap_or(d.image_pull_credentials_verification_policy);
        }
        "preloadedImagesVerificationAllowlist" => {
            let patterns = r.strings().unwrap_or_default().into_iter();
            c.preloaded_images_verification_allowlist =
                patterns.map(|(_, text)| text.to_owned()).collect();
        }
        "maxPods" => {
            let pods: Option<u32> = r.int("a number from 0 (which means 110)");
            c.max_pods = pods.filter(|pods| *pods != 0).unwrap_or(d.max_pods);
        }
        "podsPerCore" => {
            c.pods_per_core = r
                .int("a number from 0 (which means no limit)")
                .unwrap_or(d.pods_per_core);
        }
        "singleProcessOOMKill" => c.single_process_oom_kill = r.bool(),
        "oomScoreAdj" => {
            c.oom_score_adj = r
                .int("a number from -1000 to 1000")
                .unwrap_or(d.oom_score_adj);
        }
        "podPidsLimit" => {
            let limit: Option<i64> = r.int("a number, below 1 for no limit");
            c.pod_pids_limit = limit.and_then(pids_limit);
        }
        "cpuCFSQuota" => c.cpu_cfs_quota = r.bool().unwrap_or(d.cpu_cfs_quota),
        "cpuCFSQuotaPeriod" => {
            c.cpu_cfs_quota_period = r.period().unwrap_or(d.cpu_cfs_quota_period);
        }
        "resolvConf" => {
            c.resolv_conf = match r.string() {
                None => d.resolv_conf,
                Some(_) => r.path(),
            };
        }
        "clusterDNS" => {
            let mut addresses = Vec::new();
            for (place, text) in r.strings().unwrap_or_default() {
                match parse_ip(text) {
                    Ok(address) => addresses.push(address),
                    Err(message) => {
                        let origin = at(file, place);
                        settings.problems.push(Problem::new(origin, path, message));
                    }
                }
            }
            c.cluster_dns = addresses;
        }
        "clusterDomain" => c.cluster_domain = r.string().unwrap_or_default().to_owned(),
        "containerRuntimeEndpoint" => {
            c.container_runtime_endpoint = r
                .filled()
                .map_or(d.container_runtime_endpoint, str::to_owned);
        }
        "imageServiceEndpoint" => {
            c.image_service_endpoint = r.string().unwrap_or_default().to_owned();
        }
        "runtimeRequestTimeout" => {
            c.runtime_request_timeout = r.period().unwrap_or(d.runtime_request_timeout);
        }
        "failCgroupV1" => c.fail_cgroup_v1 = r.bool().unwrap_or(d.fail_cgroup_v1),
        "seccompDefault" => c.seccomp_default = r.bool().unwrap_or(d.seccomp_default),
        "logging.format" => c.logging.format = r.parsed(str::parse).unwrap_or(d.logging.format),
        "logging.verbosity" => {
            c.logging.verbosity = r.int("a number from 0").unwrap_or(d.logging.verbosity);
        }
        "tracing.endpoint" => {
            let tracing = c.tracing.get_or_insert_default();
            tracing.endpoint = match r.filled() {
                Some(endpoint) => endpoint.to_owned(),
                None => Tracing::default().endpoint,
            };
        }
        "tracing.samplingRatePerMillion" => {
            let rate = r.int("a number from 0 to 1000000").unwrap_or_default();
            c.tracing.get_or_insert_default().sampling_rate_per_million = rate;
        }
        "eventRecordQPS" => {
            c.event_record_qps = r
                .int("a number from 0 (no limit)")
                .unwrap_or(d.event_record_qps);
        }
        "eventBurst" => {
            let burst: Option<u32> = r.int("a number from 0 (which means 100)");
            c.event_burst = burst.map_or(d.event_burst, event_burst);
        }
        "crashLoopBackOff.maxContainerRestartPeriod" => {
            // Not a `period`: zero is outside of the allowed range, not the default.
            c.max_container_restart_period = r
                .string()
                .and_then(|text| parse_duration(text).ok())
                .unwrap_or(d.max_container_restart_period);
        }
        _ => {
            let again = settings.origins.contains_key(path);
            if !super::cluster::take(&mut r, c, defaults, path, again)
                && !super::server::take(&mut r, c, defaults, path)
                && !super::eviction::take(&mut r, c, defaults, path, again)
                && !super::reserves::take(&mut r, c, path)
                && !super::pinning::take(&mut r, c, defaults, path, again)
                && !super::shutdown::take(&mut r, c, path)
            {
                // Known, checked, and without effect: the warning is out already.
                return;
            }
        }
    }
    if let Some(message) = r.problem {
        let problem = Problem::new(at(file, r.place), path, message);
        let told = |other: &Problem| other.origin == problem.origin && other.field == problem.field;
        // A number out of its type's range was told about with its type.
        if !settings.problems.iter().any(told) {
            settings.problems.push(problem);
        }
    }
    if matches!(node.value, Value::Null) {
        settings.origins.remove(path);
    } else {
        settings.origins.insert(path, at(file, node.place));
    }
}
