//! Addresses of this machine, which change: DHCP renews them, a modem dials in again, a cable is plugged in late.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::interfaces::{self, Address};

/// Returns the node's addresses whenever they are needed. Asks the kernel each time, which sends nothing and takes some
/// microseconds. Cheap to clone; clones remember the same last addresses.
#[derive(Clone, Debug)]
pub struct HostAddresses(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    source: Source,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// The addresses found last: a node whose network is away keeps its name and its addresses.
    last: Vec<IpAddr>,
    /// The addresses that an earlier run of the agent reported.
    recorded: Vec<IpAddr>,
    /// Those that the node's name stands for; `None` until that was looked up.
    of_name: Option<Vec<IpAddr>>,
    /// Those that a cloud provider gave the node.
    provided: Vec<IpAddr>,
}

#[derive(Debug)]
enum Source {
    /// The kernel, and what `--node-ip` says.
    Machine(Vec<IpAddr>),
    Fixed,
}

impl HostAddresses {
    /// The addresses of this machine. `given` is `--node-ip`: addresses, or an unspecified one (`0.0.0.0`, `::`) that
    /// names the family to look in first.
    pub fn of_machine(given: Vec<IpAddr>) -> Self {
        Self::with(Source::Machine(given), Vec::new())
    }

    /// Addresses that never change: for a machine that is simulated.
    pub fn fixed(addresses: Vec<IpAddr>) -> Self {
        Self::with(Source::Fixed, addresses)
    }

    fn with(source: Source, last: Vec<IpAddr>) -> Self {
        let known = Known {
            last,
            recorded: Vec::new(),
            of_name: None,
            provided: Vec::new(),
        };
        Self(Arc::new(Inner {
            source,
            known: Mutex::new(known),
        }))
    }

    /// Remembers addresses that an earlier run of the agent reported, unless some have been found since.
    pub fn remember(&self, reported: Vec<IpAddr>) {
        let mut known = self.known();
        if known.last.is_empty() {
            known.recorded.clone_from(&reported);
            known.last = reported;
        }
    }

    /// Returns whether the node's name decides which address it has: none is given.
    pub fn go_by_name(&self) -> bool {
        matches!(self.0.source, Source::Machine(_)) && self.given().next().is_none()
    }

    /// Takes what the node's name stands for, as hosts file and DNS have it.
    pub fn set_of_name(&self, addresses: Vec<IpAddr>) {
        self.known().of_name = Some(addresses);
    }

    /// Takes what a cloud provider gave the node: the first address counts, and the first of the other family. They precede
    /// what the agent finds itself where no address is given. Upstream: `GetNodeHostIPs`.
    pub fn set_provided(&self, addresses: &[IpAddr]) {
        if !self.go_by_name() {
            return;
        }
        let first = addresses.first();
        let is_other = |ip: &&IpAddr| first.is_some_and(|first| first.is_ipv6() != ip.is_ipv6());
        let other = addresses.iter().find(is_other);
        self.known().provided = first.into_iter().chain(other).copied().collect();
    }

    /// Stops waiting for the first answer about the node's name. An address that was reported before stays, as long as the
    /// machine has it: a name server that is away is no reason to move.
    pub fn do_without_name(&self) {
        let mut known = self.known();
        if known.of_name.is_none() {
            known.of_name = Some(known.recorded.clone());
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the node has a route to other networks, or the addresses that were given. An address of the node's name
    /// stays while the network is away, and says nothing.
    pub fn has_network(&self) -> bool {
        match &self.0.source {
            Source::Machine(given) if self.given().next().is_none() => {
                outgoing_address(given).is_some()
            }
            Source::Fixed | Source::Machine(_) => self.find().is_ok(),
        }
    }

    /// Returns the addresses that this machine has now, primary first: those given, else those of a cloud provider, else one
    /// that the node's name stands for, else the one that packets to other networks leave from, else the only one that is
    /// on an interface of its own. An address of a bridge or another interface of pods counts only where there is nothing
    /// else. Until the name was looked up, the address found last stays, as long as the machine has it. Upstream:
    /// `NodeAddress`, `validateNodeIP`.
    ///
    /// # Errors
    /// No address stands out, or this machine does not have a given address.
    pub fn find(&self) -> Result<Vec<IpAddr>, String> {
        let mut known = self.known();
        match &self.0.source {
            Source::Fixed => Ok(known.last.clone()),
            Source::Machine(given) => {
                let provided = usable(&known.provided);
                let found = if provided.is_empty() {
                    let likely = known.of_name.as_ref().unwrap_or(&known.last);
                    addresses(given, likely)?
                } else {
                    provided
                };
                known.last.clone_from(&found);
                Ok(found)
            }
        }
    }

    /// Returns the addresses to report, as `status.hostIPs` has them: those of a cloud provider, else those of now, else the
    /// last ones. Empty on a node that never had any.
    pub fn reported(&self) -> Vec<String> {
        let provided = self.known().provided.clone();
        let found = if provided.is_empty() {
            self.find().unwrap_or_else(|_| {
                let named: Vec<IpAddr> = self.given().collect();
                if named.is_empty() { self.last() } else { named }
            })
        } else {
            provided
        };
        found.iter().map(ToString::to_string).collect()
    }

    /// Returns the address at which pods on the node's network answer the agent: that of now, else the first of those
    /// given or found last that the machine still has, as when it has lost its default route only. While it has none of
    /// them, that is the loopback's: what listens on every address answers there.
    pub fn reachable(&self) -> IpAddr {
        let last = self.last();
        if let Some(first) = self.find().ok().and_then(|found| found.first().copied()) {
            return first;
        }
        // A machine that cannot list its interfaces has no address that is known to be there.
        let there = interfaces::addresses().unwrap_or_default();
        let mut known = self.given().chain(last);
        let there = known.find(|ip| ip.is_loopback() || has(&there, *ip));
        there.unwrap_or(Ipv4Addr::LOCALHOST.into())
    }

    fn last(&self) -> Vec<IpAddr> {
        self.known().last.clone()
    }

    fn given(&self) -> impl Iterator<Item = IpAddr> {
        let given = match &self.0.source {
            Source::Machine(given) => given.as_slice(),
            Source::Fixed => &[],
        };
        named(given)
    }
}

fn named(given: &[IpAddr]) -> impl Iterator<Item = IpAddr> {
    given.iter().copied().filter(|ip| !ip.is_unspecified())
}

/// Returns those of `ips` that others can reach this machine by.
fn usable(ips: &[IpAddr]) -> Vec<IpAddr> {
    if ips.is_empty() {
        return Vec::new();
    }
    let there = interfaces::addresses().unwrap_or_default();
    let usable = ips.iter().filter(|ip| check_address(**ip, &there).is_ok());
    usable.copied().collect()
}

fn has(there: &[Address], ip: IpAddr) -> bool {
    there.iter().any(|one| one.ip == ip)
}

fn addresses(given: &[IpAddr], likely: &[IpAddr]) -> Result<Vec<IpAddr>, String> {
    let named: Vec<IpAddr> = named(given).collect();
    let there = interfaces::addresses()?;
    if named.is_empty() {
        let chosen = choose(
            given,
            likely,
            &there,
            outgoing_address(given),
            interfaces::is_inner,
        );
        return chosen.map(|ip| vec![ip]).ok_or_else(|| {
            "the machine has no route to other networks, and not exactly one address on an interface of its own; name its \
             address with --node-ip"
                .to_owned()
        });
    }
    for ip in &named {
        check_address(*ip, &there)?;
    }
    Ok(named)
}

/// Chooses the node's address among the `likely` ones, the `outgoing` one, and those that are `there`. IPv4 before IPv6 unless
/// an IPv6 address was given.
fn choose(
    given: &[IpAddr],
    likely: &[IpAddr],
    there: &[Address],
    outgoing: Option<IpAddr>,
    is_inner: impl Fn(&str) -> bool,
) -> Option<IpAddr> {
    let is_of_pods = |ip: IpAddr| {
        let mut on = there.iter().filter(|one| one.ip == ip);
        on.any(|one| is_inner(&one.interface))
    };
    let usable = |ip: &IpAddr| !ip.is_unspecified() && check_address(*ip, there).is_ok();
    let likely: Vec<IpAddr> = likely.iter().copied().filter(usable).collect();
    let own: Vec<IpAddr> = (likely.iter().copied())
        .filter(|ip| !is_of_pods(*ip))
        .collect();
    // Where the name stands for several, as nss-myhostname has it for an unlisted name, an address that moves between
    // machines may be the first.
    let first = preferred(given, &own);
    let is_of_family = |ip: &IpAddr| first.is_some_and(|first| first.is_ipv6() == ip.is_ipv6());
    outgoing
        .filter(|ip| own.contains(ip) && is_of_family(ip))
        .or(first)
        .or(outgoing)
        .or_else(|| {
            let up = there.iter().filter(|one| one.is_up);
            let usable = up.map(|one| one.ip).filter(usable);
            only(
                given,
                &usable.filter(|ip| !is_of_pods(*ip)).collect::<Vec<_>>(),
            )
        })
        .or_else(|| preferred(given, &likely))
}

fn wants_v6(given: &[IpAddr]) -> bool {
    given.first().is_some_and(IpAddr::is_ipv6)
}

/// Returns the first of these addresses, of the wanted family if there is one.
fn preferred(given: &[IpAddr], ips: &[IpAddr]) -> Option<IpAddr> {
    let of_family = ips.iter().find(|ip| ip.is_ipv6() == wants_v6(given));
    of_family.or_else(|| ips.first()).copied()
}

/// Returns the only address of the wanted family, or of the other one where that has none.
fn only(given: &[IpAddr], ips: &[IpAddr]) -> Option<IpAddr> {
    let of_family = |v6: bool| {
        let of = ips.iter().copied().filter(|ip| ip.is_ipv6() == v6);
        of.collect::<BTreeSet<IpAddr>>()
    };
    let mut of = of_family(wants_v6(given));
    if of.is_empty() {
        of = of_family(!wants_v6(given));
    }
    of.first().copied().filter(|_| of.len() == 1)
}

/// Returns the address that packets to other networks leave from, IPv4 before IPv6 unless an IPv6 address was given.
fn outgoing_address(given: &[IpAddr]) -> Option<IpAddr> {
    // Documentation networks: never assigned to a host.
    let v4 = SocketAddr::from((Ipv4Addr::new(192, 0, 2, 1), 9));
    let v6 = SocketAddr::from((Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9));
    let order = match given.first() {
        Some(IpAddr::V6(_)) => [v6, v4],
        _ => [v4, v6],
    };
    order.into_iter().find_map(leaves_from)
}

fn leaves_from(elsewhere: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = match elsewhere {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(elsewhere).ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

fn check_address(ip: IpAddr, there: &[Address]) -> Result<(), String> {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    let wrong = if ip.is_loopback() {
        "is a loopback address"
    } else if ip.is_multicast() {
        "is a multicast address"
    } else if link_local {
        "is a link-local address"
    } else if !has(there, ip) {
        "is on no network interface of this machine"
    } else {
        return Ok(());
    };
    Err(format!("node IP {ip} (--node-ip) {wrong}"))
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;

    fn of(texts: &[&str]) -> HostAddresses {
        HostAddresses::of_machine(texts.iter().map(|text| text.parse().unwrap()).collect())
    }

    fn address(ip: &str, interface: &str) -> Address {
        Address {
            ip: ip.parse().unwrap(),
            interface: interface.to_owned(),
            is_up: !interface.starts_with("down"),
        }
    }

    #[test]
    fn the_nodes_address_is_one_that_stands_out() {
        let (own, other, v6) = ("192.0.2.1", "198.51.100.1", "2001:db8::1");
        let (bridge, local, gone) = ("10.88.0.1", "127.0.1.1", "192.0.2.9");
        let there = [
            ("127.0.0.1", "lo"),
            (own, "eth0"),
            ("fe80::1", "eth0"),
            (bridge, "cni0"),
        ];
        let two = [&there[..], &[(other, "eth1")]].concat();
        let dual = [&there[..], &[(v6, "eth0")]].concat();
        let only_v6 = [("127.0.0.1", "lo"), (v6, "eth0")];
        let only_bridge = [("127.0.0.1", "lo"), (bridge, "cni0")];
        let down = [(own, "down0"), (other, "eth1")];
        let moving = [&there[..], &[(gone, "eth0")]].concat();
        type Case<'a> = (
            &'a [(&'a str, &'a str)],
            &'a [&'a str],
            Option<&'a str>,
            Option<&'a str>,
        );
        let cases: &[Case<'_>] = &[
            // What the name stands for, then the default route, then the only address.
            (&two, &[other], Some(own), Some(other)),
            (&there, &[local], Some(own), Some(own)),
            (&there, &[local], None, Some(own)),
            (&there, &[], None, Some(own)),
            (&two, &[], None, None),
            (&two, &[own], None, Some(own)),
            // As nss-myhostname names them: all that there are.
            (&there, &[bridge, own], None, Some(own)),
            (&there, &[bridge], Some(own), Some(own)),
            (&there, &[bridge], None, Some(own)),
            (&two, &[bridge], None, Some(bridge)),
            (&only_bridge, &[], None, None),
            (&only_bridge, &[bridge], None, Some(bridge)),
            (&dual, &[v6, own], None, Some(own)),
            (&dual, &[], None, Some(own)),
            (&only_v6, &[], None, Some(v6)),
            (&down, &[], None, Some(other)),
            // An address that moves between machines is here at the moment, and named first.
            (&moving, &[gone, own], Some(own), Some(own)),
            (&moving, &[gone, own], None, Some(gone)),
            (&moving, &[gone], Some(own), Some(gone)),
            // An address on record that is gone.
            (&two, &[gone], Some(other), Some(other)),
            (&[], &[own], None, None),
        ];
        for (there, likely, outgoing, want) in cases {
            let parse = |ip: &&str| ip.parse::<IpAddr>().unwrap();
            let on: Vec<Address> = there.iter().map(|(ip, on)| address(ip, on)).collect();
            let names: Vec<IpAddr> = likely.iter().map(parse).collect();
            let chosen = choose(&[], &names, &on, outgoing.as_ref().map(parse), |on| {
                on == "cni0"
            });
            assert_eq!(
                chosen,
                want.as_ref().map(parse),
                "{there:?} {likely:?} {outgoing:?}"
            );
        }
    }

    #[test]
    fn an_address_on_record_stays_while_the_name_cannot_be_looked_up() {
        // Of this machine, and not the one of the default route.
        let Some(here) = interfaces::addresses().unwrap().into_iter().find(|one| {
            let there = std::slice::from_ref(one);
            check_address(one.ip, there).is_ok()
        }) else {
            return; // A machine without a network.
        };
        let node = of(&[]);
        node.remember(vec![here.ip]);
        node.do_without_name();
        assert_eq!(node.known().of_name.as_deref(), Some(&[here.ip][..]));
        // An answer counts for more.
        node.set_of_name(Vec::new());
        node.do_without_name();
        assert_eq!(node.known().of_name.as_deref(), Some(&[][..]));
        // What this run has found itself is no record.
        let fresh = of(&[]);
        drop(fresh.find());
        fresh.do_without_name();
        assert_eq!(fresh.known().of_name.as_deref(), Some(&[][..]));
    }

    #[test]
    fn a_node_ip_must_be_one_of_this_machine_that_others_can_reach() {
        for (ip, why) in [
            ("127.0.0.1", "loopback"),
            ("224.0.0.1", "multicast"),
            ("169.254.1.1", "link-local"),
            ("fe80::1", "link-local"),
            ("192.0.2.77", "no network interface"),
        ] {
            let error = of(&[ip]).find().unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn an_address_that_may_only_be_bound_is_none_of_this_machine() {
        let elsewhere: IpAddr = "192.0.2.77".parse().unwrap();
        let here: IpAddr = "192.0.2.78".parse().unwrap();
        let there = [address("192.0.2.78", "eth0")];
        let chosen = choose(&[], &[elsewhere, here], &there, None, |_| false);
        assert_eq!(chosen, Some(here));
        // A network namespace of a thread's own, as root.
        let in_own_network = std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).ok()?;
            std::fs::write("/proc/sys/net/ipv4/ip_nonlocal_bind", "1").ok()?;
            assert!(UdpSocket::bind((elsewhere, 0)).is_ok());
            Some(of(&["192.0.2.77"]).find())
        });
        if let Some(found) = in_own_network.join().unwrap() {
            assert!(found.unwrap_err().contains("no network interface"));
        }
    }

    #[test]
    fn a_given_address_is_reported_and_not_probed_while_the_machine_lacks_it() {
        let late = of(&["192.0.2.77", "2001:db8::77"]);
        assert_eq!(late.reported(), ["192.0.2.77", "2001:db8::77"]);
        assert_eq!(late.reachable(), Ipv4Addr::LOCALHOST);
        // One of two is late, or it is no address to report.
        for (given, probed) in [
            (["192.0.2.77", "127.0.0.9"], "127.0.0.9"),
            (["127.0.0.8", "192.0.2.77"], "127.0.0.8"),
        ] {
            assert_eq!(of(&given).reachable().to_string(), probed);
        }
    }

    #[test]
    fn a_cloud_providers_addresses_are_reported_where_none_is_given() {
        let parse = |ips: &[&str]| ips.iter().map(|ip| ip.parse().unwrap()).collect::<Vec<_>>();
        let provided = parse(&["192.0.2.7", "192.0.2.8", "2001:db8::7", "203.0.113.9"]);
        let node = of(&[]);
        node.set_provided(&provided);
        assert_eq!(node.reported(), ["192.0.2.7", "2001:db8::7"]);
        // They are none of this machine, so nothing is asked there.
        assert_ne!(node.reachable().to_string(), "192.0.2.7");
        let given = of(&["192.0.2.77"]);
        given.set_provided(&provided);
        assert_eq!(given.reported(), ["192.0.2.77"]);
        let here = interfaces::addresses().unwrap();
        let here = here.iter().find(|one| check_address(one.ip, &here).is_ok());
        if let Some(here) = here {
            node.set_provided(&[here.ip]);
            assert_eq!(node.find().unwrap(), [here.ip]);
            assert_eq!(node.reachable(), here.ip);
        }
        node.set_provided(&[]);
        assert_ne!(node.reported(), ["192.0.2.7", "2001:db8::7"]);
    }

    #[test]
    fn an_unspecified_address_is_no_address_of_the_node() {
        for none in [&["::"][..], &["0.0.0.0"], &[]] {
            let found = of(none).find().unwrap_or_default();
            assert!(
                found.iter().all(|ip| !ip.is_unspecified()),
                "{none:?} gives {found:?}"
            );
        }
    }

    #[test]
    fn the_address_of_the_nodes_name_comes_before_the_default_routes() {
        let node = of(&[]);
        assert!(node.go_by_name() && !of(&["192.0.2.77"]).go_by_name());
        let route = node.find().ok();
        assert_eq!(node.has_network(), route.is_some());
        let Some(route) = route else {
            return; // A machine without a network.
        };
        // What this machine does not have, or others cannot reach, is passed over.
        let unusable = ["127.0.1.1", "0.0.0.0", "192.0.2.77"].map(|ip| ip.parse().unwrap());
        node.set_of_name(unusable.to_vec());
        assert_eq!(node.find().unwrap(), route);
        let mut both = unusable.to_vec();
        both.extend(&route);
        let there = interfaces::addresses().unwrap();
        let chosen = choose(&[], &both, &there, None, |_| false);
        assert_eq!(chosen, route.first().copied());
        // Before the first answer, the address that was reported before stays.
        let again = of(&[]);
        again.remember(route.clone());
        assert_eq!(again.find().unwrap(), route);
        again.do_without_name();
        assert_eq!(again.find().unwrap(), route);
    }

    #[test]
    fn what_was_reported_before_counts_until_something_is_found() {
        let node = HostAddresses::fixed(Vec::new());
        assert_eq!(node.reported(), [""; 0]);
        assert_eq!(node.reachable(), Ipv4Addr::LOCALHOST);
        node.remember(vec!["10.0.0.1".parse().unwrap()]);
        node.remember(vec!["10.0.0.2".parse().unwrap()]);
        assert_eq!(node.reported(), ["10.0.0.1"]);
    }
}
