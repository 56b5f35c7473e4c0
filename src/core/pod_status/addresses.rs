//! The addresses of a pod; upstream's `sortPodIPs` and the rules for pods on the node's network.

use ::core::net::IpAddr;

use k8s_openapi::api::core::v1 as api;
use k8s_openapi::api::core::v1::Pod;

use crate::types::PodExt;

/// Returns at most one address of each family, that of the node's first address first. An IPv4 address in IPv6 form is
/// shown as the IPv4 address that it is: servers refuse a status with such a one. While the runtime reports none
/// (`ips`), the reported ones stay. A pod on the node's network keeps its reported address; only a second one is added.
pub(super) fn of_pod(
    pod: &Pod,
    ips: &[String],
    host_ips: &[String],
    previous: Option<&api::PodStatus>,
) -> Vec<String> {
    let found = sorted(ips, host_ips);
    if !found.is_empty() {
        return found;
    }
    let mut told: Vec<String> = previous
        .and_then(|p| p.pod_ips.as_ref())
        .map(|ips| ips.iter().map(|ip| ip.ip.clone()).collect())
        .unwrap_or_default();
    if pod.host_network() {
        let node = sorted(host_ips, host_ips);
        if told.is_empty() {
            return node;
        }
        if let ([only], [_, second]) = (told.as_slice(), node.as_slice())
            && is_v6(only) != is_v6(second)
        {
            told.push(second.clone());
        }
    }
    told
}

/// Returns at most two addresses of the node. While it has none, the reported ones stay.
pub(super) fn of_host(host_ips: &[String], previous: Option<&api::PodStatus>) -> Vec<String> {
    if host_ips.is_empty() {
        let told = previous.and_then(|p| p.host_ips.as_ref());
        return told.into_iter().flatten().map(|ip| ip.ip.clone()).collect();
    }
    host_ips.iter().take(2).cloned().collect()
}

/// Returns the address of a pod to connect to: that of the family which the status has first.
pub fn first_of<'a>(ips: &'a [String], host_ips: &[String]) -> Option<&'a String> {
    let v6_first = host_ips.first().and_then(|ip| is_v6(ip)).unwrap_or(false);
    let of_family = ips.iter().find(|ip| is_v6(ip) == Some(v6_first));
    of_family.or(ips.first())
}

/// Returns addresses as the runtime has them, in the order in which the status has them.
pub fn in_node_order(ips: Vec<String>, host_ips: &[String]) -> Vec<String> {
    let found = sorted(&ips, host_ips);
    if found.is_empty() { ips } else { found }
}

fn sorted(ips: &[String], host_ips: &[String]) -> Vec<String> {
    let v6_first = host_ips.first().and_then(|ip| is_v6(ip)).unwrap_or(false);
    let first_of = |v6: bool| {
        ips.iter()
            .filter_map(|ip| ip.parse::<IpAddr>().ok())
            .map(|ip| ip.to_canonical())
            .find(|ip| ip.is_ipv6() == v6)
    };
    [first_of(v6_first), first_of(!v6_first)]
        .into_iter()
        .flatten()
        .map(|ip| ip.to_string())
        .collect()
}

fn is_v6(ip: &str) -> Option<bool> {
    ip.parse::<IpAddr>().ok().map(|ip| ip.is_ipv6())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(ips: &[&str]) -> Vec<String> {
        ips.iter().map(|ip| (*ip).to_owned()).collect()
    }

    #[test]
    fn containers_and_probes_have_the_addresses_in_the_order_of_the_status() {
        let both = list(&["fd00::1", "10.0.0.7"]);
        for (ips, node, ordered, first) in [
            (&both, list(&["192.0.2.1"]), ["10.0.0.7", "fd00::1"], 1),
            (
                &both,
                list(&["fd00::9", "192.0.2.1"]),
                ["fd00::1", "10.0.0.7"],
                0,
            ),
        ] {
            assert_eq!(in_node_order(ips.clone(), &node), ordered);
            assert_eq!(first_of(ips, &node), Some(&ips[first]));
        }
        // What cannot be judged stays as it is.
        assert_eq!(in_node_order(list(&["?"]), &[]), ["?"]);
        assert_eq!(first_of(&both, &[]), Some(&both[1]));
        assert_eq!(in_node_order(both.clone(), &[])[0], both[1]);
        assert_eq!(
            first_of(&list(&["10.0.0.7"]), &list(&["fd00::9"])),
            Some(&"10.0.0.7".to_owned())
        );
    }
}
