//! Reads iSCSI sessions and their disks from the kernel, and changes a few settings of them. Blocking.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::volumemanager::disk;

/// Paths of `/sys` and `/dev`.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    sys: PathBuf,
    dev: PathBuf,
    pub(super) swaps: PathBuf,
}

impl Default for Machine {
    fn default() -> Self {
        Self::at("/sys", "/dev")
    }
}

/// A session with a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Session {
    /// Number of the SCSI host.
    pub(super) host: u32,
    /// `address:port` of its connections, as logged in to and as redirected.
    pub(super) portals: BTreeSet<String>,
    dir: PathBuf,
}

/// A disk of a session.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ScsiDisk {
    pub(super) lun: u32,
    /// `sdb`.
    pub(super) name: String,
}

impl Machine {
    pub(super) fn at(sys: impl Into<PathBuf>, dev: impl Into<PathBuf>) -> Self {
        Self {
            sys: sys.into(),
            dev: dev.into(),
            swaps: PathBuf::from("/proc/swaps"),
        }
    }

    /// The path of a device by its name.
    pub(super) fn device(&self, name: &str) -> PathBuf {
        self.dev.join(name)
    }

    /// Returns whether the kernel has the module for a transport.
    pub(super) fn has_transport(&self, transport: &str) -> bool {
        let transports = self.sys.join("class/iscsi_transport");
        transports.join(transport).exists()
    }

    /// Sessions with a target; upstream's `GetISCSIPortalHostMapForTarget`.
    pub(super) fn sessions(&self, iqn: &str) -> io::Result<Vec<Session>> {
        let hosts = self.sys.join("class/iscsi_host");
        let mut found = Vec::new();
        for name in names(&hosts)? {
            let Some(host) = name.strip_prefix("host").and_then(|n| n.parse().ok()) else {
                continue;
            };
            let device = hosts.join(&name).join("device");
            for session in names(&device)? {
                if !session.starts_with("session") {
                    continue;
                }
                let dir = device.join(&session);
                let told = dir.join("iscsi_session").join(&session).join("targetname");
                if read(&told)?.as_deref() == Some(iqn) {
                    let portals = portals(&dir)?;
                    found.push(Session { host, portals, dir });
                }
            }
        }
        Ok(found)
    }

    /// Disks of a session that the kernel has found; upstream's `FindDevicesForISCSILun`.
    pub(super) fn disks(&self, session: &Session) -> io::Result<Vec<ScsiDisk>> {
        let mut found = Vec::new();
        for target in names(&session.dir)? {
            if !target.starts_with("target") {
                continue;
            }
            let target = session.dir.join(target);
            for address in names(&target)? {
                let lun = address.rsplit(':').next().and_then(|n| n.parse().ok());
                let (Some(lun), 4) = (lun, address.split(':').count()) else {
                    continue;
                };
                for name in names(&target.join(&address).join("block"))? {
                    found.push(ScsiDisk { lun, name });
                }
            }
        }
        found.sort();
        Ok(found)
    }

    /// Makes the kernel look for a LUN; upstream's `scanOneLun`.
    pub(super) fn scan(&self, host: u32, lun: u32) -> io::Result<()> {
        let path = self.sys.join(format!("class/scsi_host/host{host}/scan"));
        fs::OpenOptions::new()
            .write(true)
            .open(path)
            .and_then(|mut file| io::Write::write_all(&mut file, format!("0 0 {lun}").as_bytes()))
    }

    /// Makes the kernel forget a disk; `Ok` when it has. Upstream's `deleteDevice`.
    pub(super) fn forget(&self, name: &str) -> io::Result<()> {
        let path = self.sys.join("block").join(name).join("device/delete");
        let told = fs::OpenOptions::new()
            .write(true)
            .open(path)
            .and_then(|mut file| io::Write::write_all(&mut file, b"1"));
        match told {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// The multipath device that a disk is a path of, `dm-0`; upstream's `FindMultipathDeviceForDevice`.
    pub(super) fn multipath_of(&self, disk: &str) -> io::Result<Option<String>> {
        let block = self.sys.join("block");
        for holder in names(&block.join(disk).join("holders"))? {
            let uuid = read(&block.join(&holder).join("dm/uuid"))?;
            if uuid.is_some_and(|u| u.starts_with("mpath-")) {
                return Ok(Some(holder));
            }
        }
        Ok(None)
    }

    /// The disks that a multipath device has for paths.
    pub(super) fn paths_of(&self, multipath: &str) -> io::Result<Vec<String>> {
        names(&self.sys.join("block").join(multipath).join("slaves"))
    }

    /// Returns whether a file system over several devices has any of these.
    fn is_in_btrfs(&self, devices: &BTreeSet<String>) -> io::Result<bool> {
        let all = self.sys.join("fs/btrfs");
        for id in names(&all)? {
            let members = names(&all.join(id).join("devices"))?;
            if members.iter().any(|name| devices.contains(name)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The device of a LUN behind a portal as `udev` names it; `None` as long as there is none. Through
    /// other transports than TCP there is the address of a card in the name.
    pub(super) fn by_path(
        &self,
        transport: &str,
        portal: &str,
        iqn: &str,
        lun: u32,
    ) -> io::Result<Option<PathBuf>> {
        let dir = self.dev.join("disk/by-path");
        let name = format!("ip-{portal}-iscsi-{iqn}-lun-{lun}");
        if transport == "tcp" {
            let path = dir.join(name);
            return Ok(fs::exists(&path)?.then_some(path));
        }
        let end = format!("-{name}");
        let mut all = names(&dir)?;
        all.sort();
        let found = all
            .into_iter()
            .find(|n| n.starts_with("pci-") && n.ends_with(&end));
        Ok(found.map(|n| dir.join(n)))
    }

    /// Returns whether a disk is in use: it or a partition of it is mounted or used for swap, a device other than a
    /// multipath device is built on it, or one of `links` leads to it.
    pub(super) fn is_used(&self, name: &str, links: &[PathBuf]) -> io::Result<bool> {
        let block = self.sys.join("block");
        let mut numbers = BTreeSet::new();
        let mut left = vec![name.to_owned()];
        let mut all = BTreeSet::new();
        while let Some(name) = left.pop() {
            let dir = block.join(&name);
            numbers.extend(read(&dir.join("dev"))?);
            for part in names(&dir)? {
                if part.starts_with(&name) {
                    numbers.extend(read(&dir.join(&part).join("dev"))?);
                    all.insert(part.clone());
                    if !names(&dir.join(&part).join("holders"))?.is_empty() {
                        return Ok(true);
                    }
                }
            }
            let multipath = self.multipath_of(&name)?;
            for holder in names(&dir.join("holders"))? {
                if multipath.as_ref() != Some(&holder) {
                    return Ok(true);
                }
                left.push(holder);
            }
            all.insert(name);
        }
        let devices: BTreeSet<PathBuf> = all.iter().map(|name| self.device(name)).collect();
        let leads_here =
            |link: &PathBuf| fs::canonicalize(link).is_ok_and(|t| devices.contains(&t));
        if links.iter().any(leads_here) {
            return Ok(true);
        }
        if self.is_in_btrfs(&all)? {
            return Ok(true);
        }
        // A swap file may have any name, and hides no other swap.
        let swaps = fs::read(&self.swaps).unwrap_or_default();
        let swaps = String::from_utf8_lossy(&swaps);
        let table = disk::table()?;
        // Some file systems have numbers of their own.
        let sources = table.iter().map(|m| m.source.as_str());
        let mut named = sources.chain(swaps.lines().filter_map(|l| l.split_whitespace().next()));
        let is_named = named.any(|name| {
            name.starts_with('/') && (devices.contains(Path::new(name)) || leads_here(&name.into()))
        });
        Ok(is_named || table.iter().any(|m| numbers.contains(&m.device)))
    }
}

fn portals(session: &Path) -> io::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for name in names(session)? {
        if !name.starts_with("connection") {
            continue;
        }
        let dir = session.join(&name).join("iscsi_connection").join(&name);
        for (address, port) in [
            ("persistent_address", "persistent_port"),
            ("address", "port"),
        ] {
            if let (Some(address), Some(port)) = (read(&dir.join(address))?, read(&dir.join(port))?)
            {
                found.insert(if address.contains(':') {
                    format!("[{address}]:{port}")
                } else {
                    format!("{address}:{port}")
                });
            }
        }
    }
    Ok(found)
}

/// Names in a directory; none when it is not there.
fn names(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry?.file_name().into_string());
    }
    Ok(names)
}

/// A line the kernel tells; `None` when it does not.
fn read(path: &Path) -> io::Result<Option<String>> {
    match fs::read(path) {
        Ok(text) => Ok(Some(String::from_utf8_lossy(&text).trim().to_owned())),
        // A session or disk that goes meanwhile, or a connection that is down.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::NotConnected
                    | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
