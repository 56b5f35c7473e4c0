//! Network interfaces of this machine, and which of them are made for pods and containers.

use std::fs;
use std::net::IpAddr;
use std::path::Path;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sys::socket::SockaddrStorage;

/// Interfaces as the kernel shows them.
const SYSFS: &str = "/sys/class/net";
/// Kinds (`DEVTYPE`) of interfaces that carry the traffic of pods over that of the machine.
const OVERLAYS: [&str; 3] = ["vxlan", "geneve", "gretap"];
/// Beginnings of names that container runtimes and networks of pods give.
const INNER_NAMES: [&str; 18] = [
    "antrea-",
    "br-",
    "cali",
    "cbr",
    "cilium",
    "cni",
    "docker",
    "flannel",
    "kube-",
    "lxc",
    "lxdbr",
    "nodelocaldns",
    "ovn-k8s",
    "podman",
    "tunl",
    "veth",
    "virbr",
    "weave",
];

/// An address on an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) ip: IpAddr,
    /// Name of the interface.
    pub(super) interface: String,
    /// State of the interface.
    pub(super) is_up: bool,
}

/// Returns the addresses of the machine's interfaces. The kernel may let a program bind others too
/// (`net.ipv4.ip_nonlocal_bind`), at which nothing reaches this machine.
pub(super) fn addresses() -> Result<Vec<Address>, String> {
    let all = getifaddrs()
        .map_err(|error| format!("cannot list the addresses of the network interfaces: {error}"))?;
    let ip = |address: SockaddrStorage| -> Option<IpAddr> {
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
    };
    let of = |one: nix::ifaddrs::InterfaceAddress| {
        Some(Address {
            ip: ip(one.address?)?,
            is_up: one.flags.contains(InterfaceFlags::IFF_UP),
            interface: one.interface_name,
        })
    };
    Ok(all.filter_map(of).collect())
}

/// Returns true for an interface that is made for pods or containers: its addresses are none of the node. Reads sysfs.
pub(super) fn is_inner(interface: &str) -> bool {
    is_inner_in(Path::new(SYSFS), interface)
}

fn is_inner_in(sysfs: &Path, interface: &str) -> bool {
    let dir = sysfs.join(interface);
    let is_virtual = |dir: &Path| {
        fs::canonicalize(dir).is_ok_and(|path| path.iter().any(|part| part == "virtual"))
    };
    // A bridge that has a port of the machine's own carries the machine's address.
    let bridges_the_machine = || {
        let ports = fs::read_dir(dir.join("brif"));
        let mut ports = ports.into_iter().flatten().flatten();
        ports.any(|port| {
            let name = port.file_name();
            !is_virtual(&sysfs.join(&name)) || is_made_of_others(&sysfs.join(name))
        })
    };
    if dir.join("bridge").is_dir() {
        return !bridges_the_machine();
    }
    if !is_virtual(&dir) {
        return false;
    }
    let kind = devtype(&dir);
    match kind.as_deref() {
        Some(kind) if OVERLAYS.contains(&kind) => true,
        // VLANs, bonds, VPNs …: whoever made them gave them a purpose, unless the name says otherwise.
        Some(_) => has_inner_name(interface),
        None => is_veth(&dir) || has_inner_name(interface),
    }
}

/// Returns true for a VLAN or a bond, as of the machine's own interfaces.
fn is_made_of_others(dir: &Path) -> bool {
    matches!(devtype(dir).as_deref(), Some("vlan" | "bond" | "team"))
}

fn devtype(dir: &Path) -> Option<String> {
    let uevent = fs::read_to_string(dir.join("uevent")).ok()?;
    let kind = uevent.lines().find_map(|l| l.strip_prefix("DEVTYPE="))?;
    Some(kind.to_owned())
}

/// Returns true for one end of a pair, among interfaces without a kind.
fn is_veth(dir: &Path) -> bool {
    let number = |name: &str| {
        let text = fs::read_to_string(dir.join(name)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    match (number("ifindex"), number("iflink")) {
        // A tunnel without a device below has the link 0.
        (Some(own), Some(other)) => other != 0 && own != other,
        _ => false,
    }
}

fn has_inner_name(interface: &str) -> bool {
    INNER_NAMES.iter().any(|name| interface.starts_with(name))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Adds an interface: where its device is, its kind, its own number and that of its link.
    fn add(root: &Path, name: &str, device: &str, kind: &str, (own, link): (u32, u32)) {
        let dir = root.join("devices").join(device).join("net").join(name);
        fs::create_dir_all(&dir).unwrap();
        let kind = match kind {
            "" => String::new(),
            kind => format!("DEVTYPE={kind}\n"),
        };
        fs::write(dir.join("uevent"), format!("{kind}INTERFACE={name}\n")).unwrap();
        fs::write(dir.join("ifindex"), format!("{own}\n")).unwrap();
        fs::write(dir.join("iflink"), format!("{link}\n")).unwrap();
        fs::create_dir_all(root.join("class")).unwrap();
        symlink(&dir, root.join("class").join(name)).unwrap();
    }

    #[test]
    fn interfaces_of_pods_and_containers_are_told_from_those_of_the_machine() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let own = [
            ("eth0", "pci0000:00/0000:00:03.0", "", (2, 2)),
            ("wlan0", "pci0000:00/0000:00:04.0", "wlan", (3, 3)),
            ("eth0.7", "virtual", "vlan", (4, 2)),
            ("bond0", "virtual", "bond", (5, 5)),
            ("wg0", "virtual", "wireguard", (6, 6)),
            ("macvlan0", "virtual", "macvlan", (7, 2)),
            ("dummy0", "virtual", "", (8, 8)),
            ("tun0", "virtual", "", (9, 9)),
            ("vmbr0", "virtual", "bridge", (10, 10)),
            ("vmbr1", "virtual", "bridge", (11, 11)),
        ];
        let inner = [
            ("cni0", "virtual", "bridge", (20, 20)),
            ("docker0", "virtual", "bridge", (21, 21)),
            ("virbr0", "virtual", "bridge", (22, 22)),
            ("mybridge", "virtual", "bridge", (23, 23)),
            ("veth1a2b", "virtual", "", (24, 3)),
            ("eni7", "virtual", "", (25, 3)),
            ("flannel.1", "virtual", "vxlan", (26, 26)),
            ("other-vxlan", "virtual", "vxlan", (27, 27)),
            ("kube-ipvs0", "virtual", "", (28, 28)),
            ("nodelocaldns", "virtual", "", (29, 29)),
            ("cilium_host", "virtual", "", (30, 31)),
            ("tunl0", "virtual", "", (32, 0)),
        ];
        for (name, device, kind, numbers) in own.iter().chain(&inner) {
            add(root, name, device, kind, *numbers);
            if *kind == "bridge" {
                fs::create_dir(root.join("class").join(name).join("bridge")).unwrap();
            }
        }
        for (bridge, port) in [("vmbr0", "eth0"), ("vmbr1", "bond0"), ("cni0", "veth1a2b")] {
            fs::create_dir_all(root.join("class").join(bridge).join("brif").join(port)).unwrap();
        }
        let sysfs = root.join("class");
        for (name, ..) in own {
            assert!(!is_inner_in(&sysfs, name), "{name}");
        }
        for (name, ..) in inner {
            assert!(is_inner_in(&sysfs, name), "{name}");
        }
        assert!(!is_inner_in(&sysfs, "gone"));
    }

    #[test]
    fn the_loopback_interface_has_its_address() {
        let found = addresses().unwrap();
        let loopback = found.iter().find(|one| one.ip.is_loopback());
        assert!(
            loopback.is_none_or(|one| !one.interface.is_empty()),
            "{found:?}"
        );
    }
}
