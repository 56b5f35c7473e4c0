//! One document laid over the settings so far: the schema is checked first, then the typed fields are
//! taken over. A `null` puts a field back to its default, lists replace, maps merge.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::duration::parse_duration;
use super::fields::{FIELDS, Field, Kind, Support, closest};
use super::problem::{Origin, Problem, Warning};
use super::quantity::parse_bytes;
use super::types::KubeletConfiguration;
use super::yaml::{Entry, Node, Place, Value};
use super::{API_VERSION, KIND};

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

    fn unknown(&mut self, path: &str, fields: &'static [Field], entry: &Entry) {
        let mut message = "unknown field".to_owned();
        if let Some(name) = closest(&entry.key, fields.iter().map(|field| field.name)) {
            message.push_str(&format!("; did you mean {name:?}?"));
        }
        let origin = at(self.file, entry.place);
        self.settings
            .problems
            .push(Problem::new(origin, path, message));
    }

    fn field(&mut self, path: &str, field: &Field, entry: &Entry) {
        let node = &entry.node;
        if let (Kind::Object(fields), Value::Map(entries)) = (&field.kind, &node.value) {
            self.object(&format!("{path}."), fields, entries.iter());
            return;
        }
        if field.support == Support::NotYet && !matches!(node.value, Value::Null) {
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
        let inner = match kind {
            Kind::Strings | Kind::StringMap => Kind::String,
            Kind::StringsMap => Kind::Strings,
            Kind::BoolMap => Kind::Bool,
            Kind::Objects => Kind::AnyMap,
            _ => kind,
        };
        match (kind, &node.value) {
            (Kind::Strings | Kind::Objects, Value::List(items)) => {
                for (index, item) in items.iter().enumerate() {
                    self.value(&format!("{path}[{index}]"), inner, item);
                }
            }
            (Kind::StringMap | Kind::StringsMap | Kind::BoolMap, Value::Map(entries)) => {
                for entry in entries {
                    self.value(&format!("{path}.{}", entry.key), inner, &entry.node);
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

/// Checks a value that is not one of the kind's own collections.
fn check_kind(kind: Kind, value: &Value) -> Result<(), String> {
    let (good, expected) = match (kind, value) {
        (_, Value::Null) => return Ok(()),
        (Kind::Duration, Value::String(text)) => return parse_duration(text).map(|_| ()),
        (Kind::Duration, _) => (false, "a duration, like \"20s\""),
        (Kind::Bool, value) => (matches!(value, Value::Bool(_)), "true or false"),
        (Kind::Int, value) => (matches!(value, Value::Int(_)), "a whole number"),
        (Kind::Number, value) => (matches!(value, Value::Int(_) | Value::Float(_)), "a number"),
        (Kind::String, value) => (matches!(value, Value::String(_)), "a string"),
        (Kind::Strings, _) => (false, "a list of strings"),
        (Kind::StringMap, _) => (false, "a map of strings"),
        (Kind::StringsMap, _) => (false, "a map of lists of strings"),
        (Kind::BoolMap, _) => (false, "a map of booleans"),
        (Kind::Objects, _) => (false, "a list of objects"),
        (Kind::AnyMap | Kind::Object(_), value) => (matches!(value, Value::Map(_)), "an object"),
    };
    if good {
        Ok(())
    } else {
        Err(format!("expected {expected}, found {}", value.describe()))
    }
}

/// Reads one value of an already checked kind. `None`: unset (null, or upstream's zero value that
/// means the default), so the default applies.
struct Reader<'a> {
    file: &'a Path,
    node: &'a Node,
    problem: Option<String>,
}

impl Reader<'_> {
    fn fail<T>(&mut self, message: String) -> Option<T> {
        self.problem = Some(message);
        None
    }

    fn bool(&self) -> Option<bool> {
        match self.node.value {
            Value::Bool(value) => Some(value),
            _ => None,
        }
    }

    fn int<T: TryFrom<i128>>(&mut self, range: &str) -> Option<T> {
        match self.node.value {
            Value::Int(value) => match T::try_from(value) {
                Ok(value) => Some(value),
                Err(_) => self.fail(format!("is {value}, expected {range}")),
            },
            _ => None,
        }
    }

    fn string(&self) -> Option<&str> {
        match &self.node.value {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    fn filled(&self) -> Option<&str> {
        self.string().filter(|text| !text.is_empty())
    }

    fn parsed<T>(&mut self, parse: impl Fn(&str) -> Result<T, String>) -> Option<T> {
        match self.filled().map(parse)? {
            Ok(value) => Some(value),
            Err(message) => self.fail(message),
        }
    }

    /// A duration, of which zero means the default.
    fn period(&self) -> Option<Duration> {
        let duration = self.string().and_then(|text| parse_duration(text).ok())?;
        (!duration.is_zero()).then_some(duration)
    }

    /// A path; a relative one is relative to the directory of the file it stands in.
    fn path(&self) -> Option<PathBuf> {
        let text = self.filled()?;
        Some(match self.file.parent() {
            Some(directory) => directory.join(text),
            None => PathBuf::from(text),
        })
    }

    fn strings(&self) -> Option<Vec<(Place, &str)>> {
        match &self.node.value {
            Value::List(nodes) => Some(strings_of(nodes)),
            _ => None,
        }
    }
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
        problem: None,
    };
    let c = &mut settings.config;
    let d = defaults.clone();
    match path {
        "staticPodPath" => c.static_pod_path = r.path(),
        "podLogsDir" => c.pod_logs_dir = r.filled().map_or(d.pod_logs_dir, PathBuf::from),
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
            c.container_log_max_size = r.parsed(parse_bytes).unwrap_or(d.container_log_max_size);
        }
        "containerLogMaxFiles" => {
            c.container_log_max_files = r
                .int("a number of files, at least 2")
                .unwrap_or(d.container_log_max_files);
        }
        "serializeImagePulls" => {
            c.serialize_image_pulls = r.bool().unwrap_or(d.serialize_image_pulls);
        }
        "maxParallelImagePulls" => c.max_parallel_image_pulls = r.int("a number from 1"),
        "maxPods" => {
            let pods: Option<u32> = r.int("a number from 0 (which means 110)");
            c.max_pods = pods.filter(|pods| *pods != 0).unwrap_or(d.max_pods);
        }
        "podPidsLimit" => {
            let limit: Option<i64> = r.int("a number from 1, or -1 for no limit");
            c.pod_pids_limit = match limit {
                None | Some(-1) => None,
                Some(limit) => match u64::try_from(limit).ok().filter(|limit| *limit != 0) {
                    Some(limit) => Some(limit),
                    None => r.fail(format!(
                        "is {limit}, expected a number from 1, or -1 for no limit"
                    )),
                },
            };
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
        "logging.format" => c.logging.format = r.parsed(str::parse).unwrap_or(d.logging.format),
        "logging.verbosity" => {
            c.logging.verbosity = r.int("a number from 0").unwrap_or(d.logging.verbosity);
        }
        "eventRecordQPS" => {
            c.event_record_qps = r
                .int("a number from 0 (no limit)")
                .unwrap_or(d.event_record_qps);
        }
        "eventBurst" => c.event_burst = r.int("a number from 0").unwrap_or(d.event_burst),
        "crashLoopBackOff.maxContainerRestartPeriod" => {
            // Not a `period`: zero is outside of the allowed range, not the default.
            c.max_container_restart_period = r
                .string()
                .and_then(|text| parse_duration(text).ok())
                .unwrap_or(d.max_container_restart_period);
        }
        // Known, checked, and without effect: the warning is out already.
        _ => return,
    }
    if let Some(message) = r.problem {
        let origin = at(file, node.place);
        settings.problems.push(Problem::new(origin, path, message));
    }
    if matches!(node.value, Value::Null) {
        settings.origins.remove(path);
    } else {
        settings.origins.insert(path, at(file, node.place));
    }
}
