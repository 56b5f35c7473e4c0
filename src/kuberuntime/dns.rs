//! DNS settings of pods; upstream's `dns.Configurer`.
//!
//! Comes in: the node's resolv.conf, `clusterDNS`, `clusterDomain` and a pod. Goes out: the CRI message,
//! within the limits of resolvers (3 nameservers, 32 search paths, 2048 characters), and an event for what
//! had to be left out. Pure but for [`DnsConfigurer::read_host`].

use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::{Pod, PodDNSConfig};

use super::node_file;
use crate::types::events::{Event, EventType};
use crate::types::{PodExt, Stamp};

/// Most nameservers a resolver reads.
pub const MAX_NAMESERVERS: usize = 3;
/// Most search paths.
pub const MAX_SEARCH_PATHS: usize = 32;
/// Longest search path, in bytes. Upstream: `DNS1123SubdomainMaxLength`.
const MAX_SEARCH_PATH: usize = 253;
/// Most characters of all search paths, joined by spaces.
pub const MAX_SEARCH_CHARS: usize = 2048;

/// Addresses of systemd-resolved, which answers on the node alone.
const STUBS: [&str; 2] = ["127.0.0.53", "127.0.0.54"];
/// Resolver configuration with the nameservers that systemd-resolved asks.
const BEHIND_STUB: &str = "/run/systemd/resolve/resolv.conf";

/// Time for which pods wait for a file that names no server.
const FILLING: Duration = Duration::from_secs(60);
/// Time after the boot in which a file that never named a server may still be filled. Later it is meant so, and also if the file
/// has not changed since before the boot.
const BOOTING: Duration = Duration::from_secs(120);
/// Made by the kernel when it boots, by the clock that it has then.
const EARLY_FILE: &str = "/dev/null";
/// Inaccuracy of the times of files and of the clock, in milliseconds.
const INACCURACY_MS: i64 = 2_000;

/// Reason why a pod has no DNS settings.
#[derive(Debug, thiserror::Error)]
pub enum DnsError {
    /// The node's file cannot be read.
    #[error("read resolver configuration {}: {source}; set resolvConf to a readable file, or to \"\" for none", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The node's file names no server yet.
    #[error(
        "resolver configuration {} names no nameserver, so the pod would have none either; the file is waited for, for {} s at \
         most, then the pod starts without. Is the network up?",
        path.display(),
        FILLING.as_secs()
    )]
    NoServer {
        /// The file.
        path: PathBuf,
        /// Time left to wait for it.
        left: Duration,
    },
    /// The pod names a policy that does not exist.
    #[error(
        "unknown dnsPolicy {policy:?}; use ClusterFirst, ClusterFirstWithHostNet, Default or None"
    )]
    Policy {
        /// As written.
        policy: String,
    },
}

/// Content of a resolv.conf.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvConf {
    /// `nameserver` lines.
    pub servers: Vec<String>,
    /// The last `search` line.
    pub searches: Vec<String>,
    /// Of all `options` lines; of several with one name the last one.
    pub options: Vec<String>,
    /// Time of the file; `None` when it was not read from one.
    pub changed: Option<Changed>,
    /// The configuration behind systemd-resolved, where the servers are that and nothing else.
    pub behind: Option<Box<ResolvConf>>,
}

/// Time at which a file was changed, with one of this boot to compare it with. Milliseconds of the wall clock, which somebody may
/// have set meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed {
    /// Last change of the file.
    pub file_ms: i64,
    /// Start of the boot by the clock of that moment, if it is known.
    pub boot_ms: Option<i64>,
}

impl Changed {
    /// Returns whether the file may have been changed in this boot. Whatever way the clock was set since its begin, one that was
    /// changed has at least one of the two times of the begin.
    fn is_of_boot(self, now: Stamp) -> bool {
        let begun = now.wall_ms.saturating_sub(now.boottime_ms);
        let begun = self.boot_ms.map_or(begun, |at| at.min(begun));
        self.file_ms.saturating_add(INACCURACY_MS) >= begun
    }
}

impl ResolvConf {
    /// Parses the file; unknown lines are skipped. Upstream's `parseResolvConf`. Comments need not be UTF-8. In other
    /// lines, words with other bytes are left out, since CRI has no place for them.
    pub fn parse(bytes: &[u8]) -> Self {
        let mut conf = Self::default();
        let text = String::from_utf8_lossy(bytes);
        for line in text.lines() {
            let line = line.trim();
            if line.starts_with(['#', ';']) {
                continue;
            }
            let words = line.split_whitespace();
            let mut words = words.filter(|word| !word.contains(char::REPLACEMENT_CHARACTER));
            match words.next() {
                Some("nameserver") => conf.servers.extend(words.next().map(str::to_owned)),
                Some("search") => {
                    // A single dot stands for the root and stays; a trailing dot goes.
                    conf.searches = words
                        .map(|w| if w == "." { w } else { w.trim_end_matches('.') })
                        .map(str::to_owned)
                        .collect();
                }
                Some("options") => words.for_each(|word| conf.set_option(word)),
                _ => {}
            }
        }
        conf
    }

    /// Adds an option; of several with one name the last one counts.
    fn set_option(&mut self, word: &str) {
        let name = |option: &str| option.split(':').next().unwrap_or_default().to_owned();
        self.options.retain(|option| name(option) != name(word));
        self.options.push(word.to_owned());
    }

    /// Returns the configuration whose search domains a pod of the cluster's policy gets: the one behind systemd-resolved if it
    /// has any.
    fn searched_by(&self, pod: &Pod) -> &Self {
        let behind = self.of(pod);
        match behind.searches.iter().any(|domain| domain != ".") {
            true => behind,
            false => self,
        }
    }

    /// Returns what a pod is given of it: on the node's network all, on another one what is behind systemd-resolved.
    fn of(&self, pod: &Pod) -> &Self {
        let behind = self.behind.as_deref();
        let behind = behind.filter(|conf| !pod.host_network() && !conf.servers.is_empty());
        behind.unwrap_or(self)
    }

    /// Returns whether a server is named that answers more than the node itself.
    fn has_server(&self) -> bool {
        let conf = self.behind.as_deref().unwrap_or(self);
        !conf.servers.is_empty()
    }
}

/// Reads `file`, in which systemd-resolved says whom it asks, if the servers of `conf` are that.
fn behind_stub(conf: &ResolvConf, file: &Path) -> Option<Box<ResolvConf>> {
    if conf.servers.is_empty() || !conf.servers.iter().all(|server| is_stub(server)) {
        return None;
    }
    let bytes = node_file::read(file).ok()?;
    Some(Box::new(ResolvConf::parse(&bytes)))
}

fn is_stub(server: &str) -> bool {
    STUBS.contains(&server)
}

/// Time since which the node's file names no server. At boot it may not be filled yet, and a DHCP client may write it anew; a
/// sandbox keeps what was there when it was made. Cheap to clone; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Unfilled(Arc<Mutex<Filling>>);

#[derive(Clone, Copy, Debug, Default)]
struct Filling {
    /// Start of the time in which the file names no server.
    since: Option<Stamp>,
    /// It has named one.
    was_filled: bool,
}

impl Unfilled {
    /// Notes whether the file names a server at `now`. Returns how long one that names none is to be waited for. `is_of_boot`: it
    /// may have been changed in this boot.
    fn observe(&self, has_server: bool, is_of_boot: bool, now: Stamp) -> Option<Duration> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if has_server {
            *known = Filling {
                since: None,
                was_filled: true,
            };
            return None;
        }
        let uptime = u64::try_from(now.boottime_ms).unwrap_or_default();
        let is_booting = is_of_boot && Duration::from_millis(uptime) < BOOTING;
        if known.since.is_none() && (known.was_filled || is_booting) {
            known.since = Some(now);
        }
        let left = FILLING.checked_sub(now.since(known.since?))?;
        (!left.is_zero()).then_some(left)
    }
}

/// DNS settings of the node.
#[derive(Clone, Debug, Default)]
pub struct DnsConfigurer {
    /// `clusterDNS`.
    pub cluster_dns: Vec<String>,
    /// `clusterDomain`.
    pub cluster_domain: String,
    /// `resolvConf`: the node's resolver configuration; `None` = the node's resolver is not for pods.
    pub resolv_conf: Option<PathBuf>,
    /// Time since which that names no server.
    pub unfilled: Unfilled,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Policy {
    Cluster,
    Host,
    None,
}

impl DnsConfigurer {
    /// Reads the node's resolver configuration as it is now; empty where there is none for pods. Blocking.
    ///
    /// # Errors
    /// When the file cannot be read. It may come later: whatever needs it tries again.
    pub fn read_host(&self) -> Result<ResolvConf, DnsError> {
        let Some(path) = &self.resolv_conf else {
            return Ok(ResolvConf::default());
        };
        let read = node_file::read_with_change(path);
        let (bytes, file_ms) = read.map_err(|source| DnsError::Read {
            path: path.clone(),
            source,
        })?;
        let boot_ms = std::fs::metadata(EARLY_FILE).ok();
        let boot_ms = boot_ms.map(|early| early.mtime() * 1000 + early.mtime_nsec() / 1_000_000);
        let mut conf = ResolvConf::parse(&bytes);
        conf.changed = Some(Changed { file_ms, boot_ms });
        conf.behind = behind_stub(&conf, Path::new(BEHIND_STUB));
        Ok(conf)
    }

    /// Returns whether the settings of a pod depend on the node's resolver configuration.
    pub fn needs_host(pod: &Pod) -> bool {
        pod.spec_ref().dns_policy.as_deref() != Some("None")
    }

    /// Settings of one pod, and events about what does not fit; upstream's `GetPodDNS`.
    ///
    /// # Errors
    /// When the policy is none that exists.
    pub fn pod_dns(
        &self,
        pod: &Pod,
        host: &ResolvConf,
    ) -> Result<(v1::DnsConfig, Vec<Event>), DnsError> {
        let mut events = Vec::new();
        let mut dns = match self.policy(pod, &mut events)? {
            Policy::None => v1::DnsConfig::default(),
            Policy::Cluster => v1::DnsConfig {
                servers: self.cluster_dns.clone(),
                searches: self.cluster_searches(pod, host.searched_by(pod)),
                options: vec!["ndots:5".to_owned()],
            },
            Policy::Host if self.resolv_conf.is_none() => v1::DnsConfig {
                servers: vec!["127.0.0.1".to_owned()],
                searches: vec![".".to_owned()],
                options: Vec::new(),
            },
            Policy::Host => {
                let host = host.of(pod);
                v1::DnsConfig {
                    servers: reachable(pod, &host.servers, &mut events),
                    searches: host.searches.clone(),
                    options: host.options.clone(),
                }
            }
        };
        if let Some(own) = &pod.spec_ref().dns_config {
            append(&mut dns, own);
        }
        fit(pod, &mut dns, &mut events);
        Ok((dns, events))
    }

    /// Settings of a sandbox that is made at `now`, as [`Self::pod_dns`] has them. A pod that would have no server, because the
    /// node's file names none yet or no longer, waits for a minute; then it starts as upstream starts it.
    ///
    /// # Errors
    /// When the policy is none that exists, or the pod waits.
    pub fn sandbox_dns(
        &self,
        pod: &Pod,
        host: &ResolvConf,
        now: Stamp,
    ) -> Result<(v1::DnsConfig, Vec<Event>), DnsError> {
        let (dns, events) = self.pod_dns(pod, host)?;
        if let Some(path) = self.resolv_conf.as_ref().filter(|_| Self::needs_host(pod)) {
            // What is behind systemd-resolved is in `/run`: of this boot, whatever names it.
            let is_of_boot =
                host.behind.is_some() || host.changed.is_none_or(|changed| changed.is_of_boot(now));
            let left = self.unfilled.observe(host.has_server(), is_of_boot, now);
            let is_of_node =
                |server: &String| host.behind.is_some() && !pod.host_network() && is_stub(server);
            if let Some(left) = left.filter(|_| dns.servers.iter().all(is_of_node)) {
                return Err(DnsError::NoServer {
                    path: path.clone(),
                    left,
                });
            }
        }
        Ok((dns, events))
    }

    /// Returns the events for a resolver configuration of the node that exceeds the limits; upstream's
    /// `CheckLimitsForResolvConf`. The cluster's three search paths count.
    pub fn check_limits(&self, host: &ResolvConf) -> Vec<Event> {
        let Some(file) = self.resolv_conf.as_deref().map(Path::display) else {
            return Vec::new();
        };
        let mut most = MAX_SEARCH_PATHS;
        let mut chars = MAX_SEARCH_CHARS;
        if !self.cluster_domain.is_empty() {
            most -= 3;
            chars = chars.saturating_sub(self.cluster_domain.len() * 3 + "svc.".len() + 3);
        }
        let warning =
            |text: String| Event::node(EventType::Warning, "CheckLimitsForResolvConf", text);
        if host.searches.len() > most {
            return vec![warning(format!(
                "Resolv.conf file '{file}' contains search line consisting of more than {most} domains!"
            ))];
        }
        if host.searches.join(" ").len() > chars {
            return vec![warning(format!(
                "Resolv.conf file '{file}' contains search line which length is more than allowed {chars} chars!"
            ))];
        }
        Vec::new()
    }

    fn policy(&self, pod: &Pod, events: &mut Vec<Event>) -> Result<Policy, DnsError> {
        let named = pod
            .spec_ref()
            .dns_policy
            .as_deref()
            .filter(|p| !p.is_empty())
            .unwrap_or("ClusterFirst");
        match named {
            "None" => return Ok(Policy::None),
            "Default" => return Ok(Policy::Host),
            "ClusterFirst" if pod.host_network() => return Ok(Policy::Host),
            "ClusterFirst" | "ClusterFirstWithHostNet" => {}
            other => {
                return Err(DnsError::Policy {
                    policy: other.to_owned(),
                });
            }
        }
        if self.cluster_dns.is_empty() {
            events.push(Event::pod(
                EventType::Warning,
                pod,
                "MissingClusterDNS",
                format!(
                    "pod: \"{}\". kubelet does not have ClusterDNS IP configured and cannot create Pod using \"{named}\" policy. Falling back to \"Default\" policy.",
                    pod.full_name()
                ),
            ));
            return Ok(Policy::Host);
        }
        Ok(Policy::Cluster)
    }

    fn cluster_searches(&self, pod: &Pod, host: &ResolvConf) -> Vec<String> {
        let domain = &self.cluster_domain;
        let mut searches = Vec::new();
        if !domain.is_empty() {
            searches.push(format!("{}.svc.{domain}", pod.namespace()));
            searches.push(format!("svc.{domain}"));
            searches.push(domain.clone());
        }
        searches.extend(host.searches.iter().cloned());
        without_duplicates(searches)
    }
}

/// Returns the node's nameservers that a pod can reach. Those on a loopback address answer on the node alone. Link-local ones
/// (`fe80::1%3`, as routers announce) are on an interface of the node that the network of a pod does not have. Where there are
/// no others they stay, as upstream leaves them.
fn reachable(pod: &Pod, servers: &[String], events: &mut Vec<Event>) -> Vec<String> {
    let is_of_node = |server: &String| {
        let address = server.split('%').next().unwrap_or_default();
        let address = address.parse::<IpAddr>();
        address.is_ok_and(|address| match address {
            IpAddr::V4(address) => address.is_loopback(),
            IpAddr::V6(address) => address.is_loopback() || address.is_unicast_link_local(),
        })
    };
    let (local, others): (Vec<String>, Vec<String>) = servers.iter().cloned().partition(is_of_node);
    if pod.host_network() || local.is_empty() {
        return servers.to_vec();
    }
    let outcome = match others.is_empty() {
        true => "the node has no others",
        false => "they have been omitted",
    };
    let text = format!(
        "Nameservers {} of the node are loopback or link-local and cannot be reached from the pod's network, {outcome}; give the node another nameserver, or set resolvConf to a file with one",
        local.join(" ")
    );
    events.push(Event::pod(
        EventType::Warning,
        pod,
        "DNSConfigForming",
        text,
    ));
    match others.is_empty() {
        true => local,
        false => others,
    }
}

fn without_duplicates(list: Vec<String>) -> Vec<String> {
    let mut seen = std::collections::BTreeSet::new();
    list.into_iter()
        .filter(|item| seen.insert(item.clone()))
        .collect()
}

fn append(dns: &mut v1::DnsConfig, own: &PodDNSConfig) {
    let joined = |base: &[String], own: &Option<Vec<String>>| {
        without_duplicates(base.iter().chain(own.iter().flatten()).cloned().collect())
    };
    dns.servers = joined(&dns.servers, &own.nameservers);
    dns.searches = joined(&dns.searches, &own.searches);
    for option in own.options.iter().flatten() {
        let Some(name) = option.name.as_deref().filter(|n| !n.is_empty()) else {
            continue;
        };
        let text = match option.value.as_deref().filter(|v| !v.is_empty()) {
            Some(value) => format!("{name}:{value}"),
            None => name.to_owned(),
        };
        let same = |o: &String| o.split(':').next() == Some(name);
        match dns.options.iter_mut().find(|o| same(o)) {
            Some(existing) => *existing = text,
            None => dns.options.push(text),
        }
    }
}

fn fit(pod: &Pod, dns: &mut v1::DnsConfig, events: &mut Vec<Event>) {
    let warning = |text: String| Event::pod(EventType::Warning, pod, "DNSConfigForming", text);
    if dns.servers.len() > MAX_NAMESERVERS {
        dns.servers.truncate(MAX_NAMESERVERS);
        events.push(warning(format!(
            "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: {}",
            dns.servers.join(" ")
        )));
    }
    let before = dns.searches.len();
    // glibc 2.28 ends a process that looks a name up with a longer one.
    dns.searches.retain(|path| path.len() <= MAX_SEARCH_PATH);
    dns.searches.truncate(MAX_SEARCH_PATHS);
    while dns.searches.join(" ").len() > MAX_SEARCH_CHARS {
        dns.searches.pop();
    }
    if dns.searches.len() < before {
        events.push(warning(format!(
            "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: {}",
            dns.searches.join(" ")
        )));
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::types::BootId;
    use serde_json::json;

    fn pod(spec: serde_json::Value) -> Pod {
        let mut spec = spec;
        spec["containers"] = json!([]);
        serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": spec,
        }))
        .unwrap()
    }

    fn configurer() -> DnsConfigurer {
        DnsConfigurer {
            cluster_dns: vec!["10.96.0.10".to_owned()],
            cluster_domain: "cluster.local".to_owned(),
            resolv_conf: Some("/etc/resolv.conf".into()),
            unfilled: Unfilled::default(),
        }
    }

    fn at(seconds: i64) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: seconds * 1000,
            wall_ms: 0,
        }
    }

    #[test]
    fn nameservers_of_an_interface_of_the_node_are_none_for_pods() {
        let own = json!({"dnsPolicy": "Default"});
        let of_node = json!({"dnsPolicy": "Default", "hostNetwork": true});
        let mixed = "nameserver fe80::1%3\nnameserver 192.0.2.1\nnameserver fe80::2%eth0\n";
        let only = "nameserver fe80::1%3\n";
        for (spec, file, servers, event) in [
            (&own, mixed, vec!["192.0.2.1"], true),
            (
                &of_node,
                mixed,
                vec!["fe80::1%3", "192.0.2.1", "fe80::2%eth0"],
                false,
            ),
            (&own, only, vec!["fe80::1%3"], true),
            (
                &own,
                "nameserver 127.0.0.1\nnameserver ::1\nnameserver 192.0.2.1\n",
                vec!["192.0.2.1"],
                true,
            ),
            (&own, "nameserver 127.0.0.53\n", vec!["127.0.0.53"], true),
            (
                &of_node,
                "nameserver 127.0.0.53\n",
                vec!["127.0.0.53"],
                false,
            ),
            (
                &own,
                "nameserver 2001:db8::1\nnameserver 169.254.1.1\n",
                vec!["2001:db8::1", "169.254.1.1"],
                false,
            ),
        ] {
            let host = ResolvConf::parse(file.as_bytes());
            let (dns, events) = configurer().pod_dns(&pod(spec.clone()), &host).unwrap();
            assert_eq!(dns.servers, servers, "{spec} {file}");
            let told = events.iter().any(|e| e.reason == "DNSConfigForming");
            assert_eq!(told, event, "{spec} {file}");
        }
    }

    #[test]
    fn pods_ask_the_servers_behind_systemd_resolved() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("resolv.conf");
        let host = |text: &str| {
            let mut conf = ResolvConf::parse(text.as_bytes());
            // Written by hand before this boot.
            conf.changed = Some(Changed {
                file_ms: -1_000_000,
                boot_ms: Some(0),
            });
            conf.behind = behind_stub(&conf, &file);
            conf
        };
        let stub = "nameserver 127.0.0.53\noptions edns0 trust-ad\nsearch lan\n";
        let mixed = "nameserver 127.0.0.53\nnameserver 192.0.2.1\n";
        assert_eq!(host(stub).behind, None, "there is no such file");
        let own = pod(json!({"dnsPolicy": "Default"}));
        let of_node = pod(json!({"hostNetwork": true}));
        let servers = |pod: &Pod, host: &ResolvConf, at: Stamp, dns: &DnsConfigurer| {
            dns.sandbox_dns(pod, host, at).map(|(dns, _)| dns.servers)
        };

        // At boot it knows none yet.
        fs::write(&file, "# No DNS servers known.\nsearch .\n").unwrap();
        let dns = configurer();
        let unfilled = host(stub);
        let early = servers(&own, &unfilled, at(5), &dns);
        assert!(matches!(early, Err(DnsError::NoServer { .. })), "{early:?}");
        let early = servers(&of_node, &unfilled, at(6), &dns).unwrap();
        assert_eq!(early, ["127.0.0.53"], "who is on the node asks it");
        let late = servers(&own, &unfilled, at(66), &dns).unwrap();
        assert_eq!(late, ["127.0.0.53"], "as upstream");

        fs::write(&file, "nameserver 192.0.2.7\nsearch lan example.org\n").unwrap();
        let filled = host(stub);
        let (given, events) = dns.pod_dns(&own, &filled).unwrap();
        assert_eq!(given.servers, ["192.0.2.7"]);
        assert_eq!(given.searches, ["lan", "example.org"]);
        assert!(given.options.is_empty() && events.is_empty());
        let of_cluster = pod(json!({"dnsPolicy": "ClusterFirst"}));
        let (given, _) = dns.pod_dns(&of_cluster, &filled).unwrap();
        assert_eq!(given.servers, ["10.96.0.10"]);
        let own = ["ns.svc.cluster.local", "svc.cluster.local", "cluster.local"];
        let wanted = [&own[..], &["lan", "example.org"]].concat();
        assert_eq!(
            given.searches, wanted,
            "those of the servers that are asked"
        );
        let given = servers(&of_node, &filled, at(67), &dns).unwrap();
        assert_eq!(given, ["127.0.0.53"]);
        fs::write(&file, "nameserver 192.0.2.7\nsearch .\n").unwrap();
        let (given, _) = dns.pod_dns(&of_cluster, &host(stub)).unwrap();
        let wanted = [&own[..], &["lan"]].concat();
        assert_eq!(given.searches, wanted, "systemd-resolved has none");
        assert_eq!(host(mixed).behind, None, "the node has chosen another");
    }

    #[test]
    fn a_file_without_a_server_is_waited_for_a_minute_by_pods_that_need_it() {
        let cluster = json!({});
        let host = json!({"dnsPolicy": "Default"});
        let own = json!({"dnsPolicy": "Default", "dnsConfig": {"nameservers": ["9.9.9.9"]}});
        let none = json!({"dnsPolicy": "None"});
        let dns = configurer();
        let empty = ResolvConf::parse(b"# nothing yet\nsearch lan\n");
        let waits = |spec: &serde_json::Value, file: &ResolvConf, second| match dns.sandbox_dns(
            &pod(spec.clone()),
            file,
            at(second),
        ) {
            Ok(_) => None,
            Err(DnsError::NoServer { left, .. }) => Some(left.as_secs()),
            Err(other) => panic!("{other}"),
        };
        for spec in [&cluster, &own, &none] {
            assert_eq!(waits(spec, &empty, 100), None, "{spec}");
        }
        assert_eq!(waits(&host, &empty, 110), Some(50));
        assert_eq!(waits(&host, &empty, 159), Some(1));
        assert_eq!(
            waits(&host, &empty, 160),
            None,
            "as upstream, without a server"
        );
        assert_eq!(waits(&host, &empty, 900), None);
        // A file that was filled and is empty again is being written.
        assert_eq!(waits(&host, &of_node(), 901), None);
        assert_eq!(waits(&host, &empty, 902), Some(60));
        assert_eq!(waits(&host, &of_node(), 903), None);
        // Long after the boot, a file that never named one is meant so.
        let late = configurer();
        let made = late.sandbox_dns(&pod(host.clone()), &empty, at(130));
        assert!(made.is_ok(), "{:?}", made.err());
        let mut without = configurer();
        without.resolv_conf = None;
        let made = without.sandbox_dns(&pod(host), &ResolvConf::default(), at(0));
        assert_eq!(made.unwrap().0.servers, ["127.0.0.1"]);
    }

    #[test]
    fn a_file_that_is_empty_since_before_the_boot_is_not_waited_for() {
        // The machine has booted at 1000 s of the wall clock.
        let now = Stamp {
            wall_ms: 1_030_000,
            ..at(30)
        };
        for (what, file_s, boot_s, is_waited_for) in [
            ("before the boot", 500, Some(1000), false),
            (
                "before the boot, whose begin is not known",
                500,
                None,
                false,
            ),
            ("in this boot", 1010, Some(1000), true),
            ("at the very begin", 999, Some(1000), true),
            (
                "in this boot, before the clock was set forward",
                500,
                Some(10),
                true,
            ),
            (
                "in this boot, before the clock was set back",
                2000,
                Some(1990),
                true,
            ),
        ] {
            let file = ResolvConf {
                changed: Some(Changed {
                    file_ms: file_s * 1000,
                    boot_ms: boot_s.map(|s: i64| s * 1000),
                }),
                ..ResolvConf::parse(b"# on purpose\n")
            };
            let dns = configurer();
            let pod = pod(json!({"dnsPolicy": "Default"}));
            let made = dns.sandbox_dns(&pod, &file, now);
            assert_eq!(made.is_err(), is_waited_for, "{what}");
            // One that named a server in this run is waited for in any case.
            dns.sandbox_dns(&pod, &of_node(), now).unwrap();
            assert!(dns.sandbox_dns(&pod, &file, now).is_err(), "{what}");
        }
    }

    #[test]
    fn a_file_that_was_just_written_is_of_this_boot() {
        let dir = tempfile::tempdir().unwrap();
        let mut configurer = configurer();
        configurer.resolv_conf = Some(dir.path().join("resolv.conf"));
        fs::write(dir.path().join("resolv.conf"), b"").unwrap();
        let host = configurer.read_host().unwrap();
        let clock = crate::types::SystemClock::new(BootId(1));
        let now = crate::types::Clock::now(&clock);
        assert!(host.changed.unwrap().is_of_boot(now), "{host:?} at {now:?}");
    }

    fn of_node() -> ResolvConf {
        ResolvConf::parse(
            b"# caf\xe9\nnameserver 1.1.1.1\nnameserver 8.8.8.8\nsearch old.\nsearch corp.example. \xe9.example lan\noptions edns0\n",
        )
    }

    #[test]
    fn the_nodes_file_is_read_when_it_is_needed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("resolv.conf");
        let mut configurer = configurer();
        configurer.resolv_conf = Some(file.clone());
        let missing = configurer.read_host().unwrap_err().to_string();
        assert!(missing.contains("No such file"), "{missing}");
        fs::write(&file, b"nameserver 1.1.1.1 # caf\xe9\n").unwrap();
        assert_eq!(configurer.read_host().unwrap().servers, ["1.1.1.1"]);
        fs::write(&file, b"nameserver 8.8.8.8\n").unwrap();
        assert_eq!(configurer.read_host().unwrap().servers, ["8.8.8.8"]);
        configurer.resolv_conf = None;
        assert_eq!(configurer.read_host().unwrap(), ResolvConf::default());
    }

    #[test]
    fn each_policy_gives_its_servers_searches_and_options() {
        let cluster: (&[&str], &[&str], &[&str]) = (
            &["10.96.0.10"],
            &[
                "ns.svc.cluster.local",
                "svc.cluster.local",
                "cluster.local",
                "corp.example",
                "lan",
            ],
            &["ndots:5"],
        );
        let host: (&[&str], &[&str], &[&str]) = (
            &["1.1.1.1", "8.8.8.8"],
            &["corp.example", "lan"],
            &["edns0"],
        );
        for (spec, want) in [
            (json!({}), cluster),
            (json!({"dnsPolicy": "ClusterFirst"}), cluster),
            (json!({"hostNetwork": true}), host),
            (
                json!({"hostNetwork": true, "dnsPolicy": "ClusterFirstWithHostNet"}),
                cluster,
            ),
            (json!({"dnsPolicy": "Default"}), host),
            (
                json!({"dnsPolicy": "None", "dnsConfig": {"nameservers": ["9.9.9.9"], "searches": ["s"], "options": [{"name": "ndots", "value": "2"}, {"name": "rotate"}]}}),
                (
                    &["9.9.9.9"] as &[_],
                    &["s"] as &[_],
                    &["ndots:2", "rotate"] as &[_],
                ),
            ),
            (
                json!({"dnsConfig": {"nameservers": ["10.96.0.10", "9.9.9.9"], "searches": ["lan", "x"], "options": [{"name": "ndots", "value": "2"}]}}),
                (
                    &["10.96.0.10", "9.9.9.9"] as &[_],
                    &[
                        "ns.svc.cluster.local",
                        "svc.cluster.local",
                        "cluster.local",
                        "corp.example",
                        "lan",
                        "x",
                    ] as &[_],
                    &["ndots:2"] as &[_],
                ),
            ),
        ] {
            let (dns, events) = configurer()
                .pod_dns(&pod(spec.clone()), &of_node())
                .unwrap();
            assert_eq!(
                (dns.servers, dns.searches, dns.options),
                (
                    want.0.iter().map(ToString::to_string).collect(),
                    want.1.iter().map(ToString::to_string).collect(),
                    want.2.iter().map(ToString::to_string).collect(),
                ),
                "{spec}"
            );
            assert!(events.is_empty(), "{spec}: {events:?}");
        }
    }

    #[test]
    fn without_cluster_dns_the_hosts_resolver_serves_and_an_event_says_so() {
        let mut configurer = configurer();
        configurer.cluster_dns.clear();
        let (dns, events) = configurer.pod_dns(&pod(json!({})), &of_node()).unwrap();
        assert_eq!(dns.servers, ["1.1.1.1", "8.8.8.8"]);
        assert_eq!(events[0].reason, "MissingClusterDNS");
        configurer.resolv_conf = None;
        let none = ResolvConf::default();
        let (dns, _) = configurer.pod_dns(&pod(json!({})), &none).unwrap();
        assert_eq!(
            (dns.servers, dns.searches),
            (vec!["127.0.0.1".to_owned()], vec![".".to_owned()])
        );
    }

    #[test]
    fn what_does_not_fit_is_cut_with_an_event() {
        let many: Vec<String> = (0..5).map(|i| format!("9.9.9.{i}")).collect();
        let searches: Vec<String> = (0..40).map(|i| format!("d{i}")).collect();
        let spec =
            json!({"dnsPolicy": "None", "dnsConfig": {"nameservers": many, "searches": searches}});
        let (dns, events) = configurer().pod_dns(&pod(spec), &of_node()).unwrap();
        assert_eq!((dns.servers.len(), dns.searches.len()), (3, 32));
        assert_eq!(events.len(), 2);
        assert!(events.iter().all(|e| e.reason == "DNSConfigForming"));
        let long: Vec<String> = (0..20).map(|i| format!("{i:0>200}")).collect();
        let spec = json!({"dnsPolicy": "None", "dnsConfig": {"searches": long}});
        let (dns, events) = configurer().pod_dns(&pod(spec), &of_node()).unwrap();
        assert_eq!(
            dns.searches.len(),
            10,
            "ten of 200 and nine spaces fit into 2048"
        );
        assert_eq!(events.len(), 1);
    }

    #[test]
    fn a_resolv_conf_over_the_limits_is_reported_for_the_node() {
        let configurer = configurer();
        let mut host = of_node();
        assert!(configurer.check_limits(&host).is_empty());
        host.searches = (0..30).map(|i| format!("d{i}")).collect();
        assert_eq!(
            configurer.check_limits(&host)[0].reason,
            "CheckLimitsForResolvConf"
        );
        host.searches = vec!["x".repeat(2040)];
        assert!(configurer.check_limits(&host)[0].message.contains("length"));
    }

    #[test]
    fn options_of_several_lines_add_up_and_the_last_of_a_name_counts() {
        let text = b"options timeout:1 rotate\noptions attempts:3 timeout:2\n";
        let conf = ResolvConf::parse(text);
        assert_eq!(conf.options, ["rotate", "attempts:3", "timeout:2"]);
    }

    #[test]
    fn a_search_path_that_is_too_long_for_a_resolver_is_left_out() {
        let long = "x".repeat(254);
        let own =
            json!({"dnsPolicy": "None", "dnsConfig": {"searches": [long, "a", "y".repeat(253)]}});
        let (dns, events) = configurer().pod_dns(&pod(own), &of_node()).unwrap();
        assert_eq!(dns.searches, ["a".to_owned(), "y".repeat(253)]);
        assert_eq!(events.len(), 1);
    }

    #[test]
    fn an_unknown_policy_is_refused_by_name() {
        let error = configurer()
            .pod_dns(&pod(json!({"dnsPolicy": "Clusterfirst"})), &of_node())
            .unwrap_err();
        assert!(error.to_string().contains("Clusterfirst"));
    }
}
