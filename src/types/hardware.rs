//! Facts by which a machine is known that has no ID of its own on disk.
//!
//! **Invariant:** the numbers of the firmware come first and keep their form: they are stored.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::file_system::FileSystem;

/// Precedes the addresses of network devices.
const NETWORK: &str = "mac";
/// Beginning of the addresses that QEMU gives the devices of every machine for which none is named.
const QEMU: &str = "52:54:00:12:34:";
/// Precedes the UUID of the file system that the store is on.
const DISK: &str = "disk";

/// Returns what distinguishes the machine below `root` from others; `None` where nothing does. Blocking.
pub(super) fn of(root: &Path) -> Option<String> {
    firmware(root)
        .or_else(|| board(root))
        .or_else(|| network(root))
}

/// Returns true for two answers of [`of`] that are of one machine. Network devices come and go: one that stayed is enough.
pub(super) fn is_same(a: &str, b: &str) -> bool {
    let addresses = |text: &str| -> Option<BTreeSet<String>> {
        let rest = text.strip_prefix(NETWORK)?.strip_prefix(' ')?;
        Some(rest.split(' ').map(str::to_owned).collect())
    };
    match (addresses(a), addresses(b)) {
        (Some(a), Some(b)) => !a.is_disjoint(&b),
        _ => a == b,
    }
}

/// The numbers that the firmware gives this machine; `None` where none of them is its own.
fn firmware(root: &Path) -> Option<String> {
    let own = [
        "sys/class/dmi/id/product_uuid",
        "proc/device-tree/serial-number",
    ];
    let own = (own.into_iter())
        .filter_map(|path| read(&root.join(path)))
        .find(|number| is_own(number))?;
    let more = [
        "sys/class/dmi/id/product_serial",
        "sys/class/dmi/id/board_serial",
    ];
    let more = more.into_iter().filter_map(|path| read(&root.join(path)));
    let all: Vec<String> = std::iter::once(own).chain(more).collect();
    Some(all.join(" "))
}

/// The number of the processor's chip, or of memory that is soldered to the board, as on boards without DMI.
fn board(root: &Path) -> Option<String> {
    let soc = read(&root.join("sys/devices/soc0/serial_number"));
    if let Some(number) = soc.filter(|number| is_own(number)) {
        return Some(format!("soc {number}"));
    }
    let mut cards: Vec<String> = entries(&root.join("sys/block"))
        .filter(|name| name.starts_with("mmcblk"))
        .filter_map(|name| {
            let device = root.join("sys/block").join(name).join("device");
            // A card in a slot goes with its store to another machine.
            (read(&device.join("type"))? == "mmc").then_some(())?;
            read(&device.join("cid")).filter(|number| is_own(number))
        })
        .collect();
    cards.sort();
    (!cards.is_empty()).then(|| format!("emmc {}", cards.join(" ")))
}

/// The addresses that network devices of the machine have from their makers.
fn network(root: &Path) -> Option<String> {
    let class = root.join("sys/class/net");
    let addresses: BTreeSet<String> = entries(&class)
        .filter_map(|name| {
            let dir = class.join(name);
            // Virtual ones have no device below. An address that was drawn by lot is new at each boot.
            let is_permanent = read(&dir.join("addr_assign_type"))? == "0";
            let is_ethernet = read(&dir.join("type"))? == "1";
            let on_usb = fs::canonicalize(dir.join("device"))
                .ok()?
                .iter()
                .any(|part| part.to_string_lossy().starts_with("usb"));
            (is_permanent && is_ethernet && !on_usb).then_some(())?;
            let address = read(&dir.join("address"))?;
            (is_own(&address) && !address.starts_with(QEMU)).then_some(address)
        })
        .collect();
    let all: Vec<String> = addresses.into_iter().collect();
    (!all.is_empty()).then(|| format!("{NETWORK} {}", all.join(" ")))
}

/// Returns what the store's file system says, for a machine of which [`of`] says nothing. It does not distinguish
/// machines, but what is on them: it counts only where the machine's ID is in memory, and so says nothing at all.
pub(super) fn by_disk(machine_id: &FileSystem, store: &FileSystem) -> Option<String> {
    let in_memory = ["tmpfs", "ramfs", "rootfs"].contains(&machine_id.fstype.as_str());
    let uuid = store.uuid.as_ref().filter(|_| in_memory)?;
    Some(format!("{DISK} {uuid}"))
}

fn entries(dir: &Path) -> impl Iterator<Item = String> + use<> {
    let found = fs::read_dir(dir).into_iter().flatten().flatten();
    found.filter_map(|entry| entry.file_name().into_string().ok())
}

fn read(path: &Path) -> Option<String> {
    let bytes = fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let text = text.trim_matches(|c: char| c == '\0' || c.is_whitespace());
    (!text.is_empty()).then(|| text.to_lowercase())
}

/// Returns whether a number is that of one machine: makers leave it empty, or give all boards the same one.
fn is_own(number: &str) -> bool {
    const SHARED: [&str; 3] = [
        "03000200-0400-0500-0006-000700080009",
        "00020003-0004-0005-0006-000700080009",
        "12345678-1234-5678-90ab-cddeefaabbcc",
    ];
    let digits: Vec<char> = number.chars().filter(char::is_ascii_alphanumeric).collect();
    digits.len() >= 8 && digits.iter().any(|digit| *digit != digits[0]) && !SHARED.contains(&number)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A machine with these files.
    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        dir
    }

    fn known_by(files: &[(&str, &str)]) -> Option<String> {
        let machine = machine(files);
        of(machine.path())
    }

    #[test]
    fn a_machine_is_known_by_the_first_number_that_is_its_own() {
        let dmi = ("sys/class/dmi/id/product_uuid", "4C4C4544-0051-3510\n");
        let serial = ("sys/class/dmi/id/product_serial", "S1");
        let tree = ("proc/device-tree/serial-number", "10000000a3b1c2d4\0");
        let none = ("proc/device-tree/serial-number", "0000000000000000\0");
        let soc = ("sys/devices/soc0/serial_number", "00000000deadbeef\n");
        let emmc = [
            ("sys/block/mmcblk1/device/type", "MMC\n"),
            ("sys/block/mmcblk1/device/cid", "150100424a54443452\n"),
        ];
        let card = [
            ("sys/block/mmcblk0/device/type", "SD\n"),
            ("sys/block/mmcblk0/device/cid", "1b534d4544303030\n"),
        ];
        for (files, known) in [
            (vec![dmi, serial, soc], Some("4c4c4544-0051-3510 s1")),
            (vec![tree, soc], Some("10000000a3b1c2d4")),
            (
                vec![none, soc, emmc[0], emmc[1]],
                Some("soc 00000000deadbeef"),
            ),
            (
                vec![none, emmc[0], emmc[1]],
                Some("emmc 150100424a54443452"),
            ),
            (vec![card[0], card[1]], None),
            (vec![], None),
        ] {
            assert_eq!(known_by(&files).as_deref(), known, "{files:?}");
        }
    }

    #[test]
    fn network_devices_of_the_machine_count_that_keep_their_address() {
        let dir = machine(&[]);
        let class = dir.path().join("sys/class/net");
        let add = |name: &str, device: Option<&str>, assigned: &str, address: &str| {
            let at = class.join(name);
            fs::create_dir_all(&at).unwrap();
            for (file, content) in [
                ("addr_assign_type", assigned),
                ("address", address),
                ("type", "1"),
            ] {
                fs::write(at.join(file), content).unwrap();
            }
            if let Some(device) = device {
                let device = dir.path().join("sys/devices").join(device);
                fs::create_dir_all(&device).unwrap();
                symlink(device, at.join("device")).unwrap();
            }
        };
        add("eth1", Some("platform/end1"), "0", "02:00:00:00:00:02\n");
        add("eth0", Some("platform/end0"), "0", "02:00:00:00:00:01\n");
        add("lot", Some("platform/end2"), "1", "02:00:00:00:00:03\n");
        add("stick", Some("pci0/usb1/1-1"), "0", "02:00:00:00:00:04\n");
        add("cni0", None, "0", "02:00:00:00:00:05\n");
        add(
            "qemu",
            Some("pci0/0000:00:03.0"),
            "0",
            "52:54:00:12:34:56\n",
        );
        let known = of(dir.path()).unwrap();
        assert_eq!(known, "mac 02:00:00:00:00:01 02:00:00:00:00:02");
        for (other, same) in [
            ("mac 02:00:00:00:00:01", true),
            ("mac 02:00:00:00:00:02 02:00:00:00:00:09", true),
            ("mac 02:00:00:00:00:09", false),
            ("emmc 150100424a54443452", false),
            ("mac", false),
        ] {
            assert_eq!(is_same(&known, other), same, "{other}");
        }
        assert!(is_same("uuid-1", "uuid-1") && !is_same("uuid-1", "uuid-2"));
    }

    #[test]
    fn the_disk_of_the_store_counts_where_the_machines_id_is_in_memory() {
        let on = |fstype: &str, uuid: Option<&str>| FileSystem {
            point: "/".to_owned(),
            fstype: fstype.to_owned(),
            source: "none".to_owned(),
            uuid: uuid.map(str::to_owned),
        };
        let disk = on("ext4", Some("6d1c"));
        for (machine_id, store, known) in [
            (on("tmpfs", None), &disk, Some("disk 6d1c")),
            (on("ext4", Some("6d1c")), &disk, None),
            (on("overlay", None), &disk, None),
            (on("tmpfs", None), &on("nfs4", None), None),
        ] {
            assert_eq!(
                by_disk(&machine_id, store).as_deref(),
                known,
                "{machine_id}"
            );
        }
    }

    #[test]
    fn numbers_that_many_machines_share_name_none() {
        for (number, own) in [
            ("4c4c4544-0051-3510-8057-b7c04f4c3333", true),
            ("10000000a3b1c2d4", true),
            ("00000000-0000-0000-0000-000000000000", false),
            ("ffffffff-ffff-ffff-ffff-ffffffffffff", false),
            ("03000200-0400-0500-0006-000700080009", false),
            ("none", false),
        ] {
            assert_eq!(is_own(number), own, "{number}");
        }
    }
}
