//! LUNs of iSCSI targets, by the system's `iscsiadm`; upstream's `pkg/volume/iscsi`.
//!
//! A LUN is logged in to through each of its portals, waited for, formatted if it is empty and mounted once at
//! its global path; pods get bind mounts. As a raw device it is linked. When the last of a target's LUNs is left,
//! its sessions are ended.
//!
//! **Invariant:** work on one target is done one step at a time: nobody logs out while somebody logs in.
//!
//! **Invariant:** a session is not ended while any disk of it is mounted, used for swapping, linked for a pod, or part of
//! another device; and neither it is, nor a disk of it forgotten, when it was there before the agent logged in.
//!
//! Names and passwords for CHAP reach `iscsiadm` as arguments, as it takes them in no other way: for that moment
//! they can be seen in the list of processes of the node. They are in no log and no error.

mod disk;
mod sysfs;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;

use self::disk::Disk;
use self::sysfs::{Machine, Session};
use super::attached::Attached;
use super::block;
use super::command::{Call, CommandError, Tools};
use super::disk::{self as filesystems, Wanted, begun, bind, failed, mounted_at, run, tool_failed};
use super::remote::{GroupBy, RemoteError, RemotePlugin, Target};
use super::turns::Turns;
use crate::core::volumes::{Remote, Source, VolumeMode};
use crate::kuberuntime::sources::Resolved;

/// `iscsiadm` itself tries a login for two minutes.
const PATIENCE: Duration = Duration::from_secs(130);
/// Paths that are enough of many; upstream's `minMultipathCount`.
const MIN_PATHS: usize = 2;
/// Rounds over all portals before as many do; upstream's `minAttachAttempts`.
const MIN_ROUNDS: usize = 2;
/// Rounds before a single path does; upstream's `maxAttachAttempts`.
const MAX_ROUNDS: usize = 5;
/// Time that a device has to appear after the login.
const APPEARING: Duration = Duration::from_secs(10);
/// Poll interval of the device.
const LOOK: Duration = Duration::from_millis(250);
/// Time that `udev` has to name the device, before the kernel's name is used.
const UDEV: Duration = Duration::from_secs(3);
/// Exit codes of `iscsiadm`: there is such a session, or interface; there is none.
const EXISTS: i32 = 15;
const NOTHING: i32 = 21;

/// Mounts LUNs.
#[derive(Clone, Debug)]
pub struct IscsiPlugin {
    tools: Tools,
    attached: Attached,
    machine: Machine,
    turns: Turns,
    appearing: Duration,
}

impl IscsiPlugin {
    /// Logs in by these tools; `attached` knows its sessions.
    pub fn new(tools: Tools, attached: Attached) -> Self {
        Self {
            tools: tools.patient(PATIENCE),
            attached,
            machine: Machine::default(),
            turns: Turns::default(),
            appearing: APPEARING,
        }
    }

    /// With `/sys` and `/dev` elsewhere, and so long for a device to appear.
    #[must_use]
    pub fn on(mut self, sys: &Path, dev: &Path, appearing: Duration) -> Self {
        self.machine = Machine::at(sys, dev);
        self.appearing = appearing;
        self
    }

    async fn stage_here(&self, volume: &Resolved, at: PathBuf) -> Result<(), RemoteError> {
        let remote = &volume.remote;
        let disk = Disk::with_secrets(remote, &volume.secrets)?;
        let source = match &remote.source {
            Source::Iscsi(source) => source,
            _ => return Ok(()),
        };
        let read_only = source.read_only.unwrap_or(false);
        let wanted = Wanted::new(source.fs_type.as_deref(), &remote.mount_options, read_only)?;
        let device = self.attach(&disk).await?;
        let done = match remote.mode {
            VolumeMode::Block => run(move || block::link(&device, &at)).await,
            VolumeMode::Filesystem => {
                filesystems::format_and_mount(&self.tools, &device, &at, &wanted).await
            }
        };
        // The session is there.
        done.map_err(begun)
    }

    /// Logs in to all portals and waits for the device; upstream's `AttachDisk`.
    async fn attach(&self, disk: &Disk) -> Result<PathBuf, RemoteError> {
        let transport = self.transport(disk).await?;
        self.load(&transport).await;
        if disk.initiator.is_some() {
            self.clone_iface(disk).await?;
        }
        let mut paths: BTreeMap<&str, PathBuf> = BTreeMap::new();
        let (mut last, mut logged_in) = (None, false);
        for round in 1..=MAX_ROUNDS {
            for portal in &disk.portals {
                if paths.contains_key(portal.as_str()) {
                    continue;
                }
                match self.reach(disk, portal, &transport).await {
                    Ok(path) => {
                        paths.insert(portal, path);
                    }
                    Err(error) => {
                        tracing::debug!(portal, iqn = disk.iqn, %error, "no path to a LUN");
                        logged_in |= matches!(error, RemoteError::Uncertain(_));
                        last = Some(error);
                    }
                }
            }
            if paths.is_empty() {
                let why = last.map(|e| e.to_string()).unwrap_or_default();
                let text = format!(
                    "failed to get any path for iscsi disk {} lun {}, last err seen: {why}",
                    disk.iqn, disk.lun
                );
                if logged_in {
                    // Leaving the LUN ends the session, through this interface.
                    return Err(RemoteError::Uncertain(text));
                }
                if disk.initiator.is_some() {
                    self.delete_iface(disk).await;
                }
                return Err(RemoteError::Failed(text));
            }
            let enough = paths.len() >= MIN_PATHS && round >= MIN_ROUNDS;
            if paths.len() == disk.portals.len() || enough {
                break;
            }
        }
        let patience = if disk.portals.len() > 1 {
            self.appearing
        } else {
            Duration::ZERO
        };
        let paths: Vec<PathBuf> = paths.into_values().collect();
        let multipath = self.multipath(&paths, patience).await;
        if let Some(multipath) = multipath.map_err(begun)? {
            return Ok(multipath);
        }
        paths.into_iter().next().ok_or_else(|| {
            RemoteError::Failed(format!("there is no path to iscsi disk {}", disk.iqn))
        })
    }

    /// The transport of the interface.
    async fn transport(&self, disk: &Disk) -> Result<String, RemoteError> {
        let what = format!("read iSCSI interface {}", disk.iface);
        let told = self
            .tools
            .succeed(iface(&disk.iface).flags(["-o", "show"]))
            .await
            .map_err(|e| tool_failed(&what, &e))?;
        let found = settings(&told.stdout).find(|(key, _)| *key == "iface.transport_name");
        match found {
            Some((_, "<empty>")) => Ok("tcp".to_owned()),
            Some((_, transport)) => Ok(transport.to_owned()),
            None => Err(RemoteError::Failed(format!(
                "Could not parse iface file for {}: iscsiadm tells no iface.transport_name",
                disk.iface
            ))),
        }
    }

    /// Has systemd load the kernel's module for TCP where it is missing. `iscsiadm` would do it by itself, but as a child of
    /// the agent's unit it may load no modules.
    async fn load(&self, transport: &str) {
        if transport != "tcp"
            || self.machine.has_transport(transport)
            || self.tools.find("systemctl").is_none()
        {
            return;
        }
        let load = Call::new("systemctl").flags(["start", "modprobe@iscsi_tcp.service"]);
        if let Err(error) = self.tools.succeed(load).await {
            tracing::warn!(%error, "systemd does not load the kernel's module iscsi_tcp");
        }
    }

    /// Makes an interface like the configured one, with an initiator name of its own; upstream's `cloneIface`.
    async fn clone_iface(&self, disk: &Disk) -> Result<(), RemoteError> {
        let new = disk.own_iface();
        let what = format!("clone iSCSI interface {} as {new}", disk.iface);
        let error = |e: CommandError| tool_failed(&what, &e);
        let told = self.tools.succeed(iface(&disk.iface).flags(["-o", "show"]));
        let told = told.await.map_err(error)?;
        let made = self.tools.succeed(iface(&new).flags(["-o", "new"])).await;
        match made {
            Ok(_)
            | Err(CommandError::Failed {
                code: Some(EXISTS), ..
            }) => {}
            Err(e) => return Err(error(e)),
        }
        let initiator = disk.initiator.as_deref().unwrap_or_default();
        let copied = settings(&told.stdout).filter(|(key, value)| {
            // Its own name is not to be changed.
            !matches!(*key, "iface.iscsi_ifacename" | "iface.initiatorname") && *value != "<empty>"
        });
        for (key, value) in copied.chain([("iface.initiatorname", initiator)]) {
            let call = iface(&new)
                .flags(["-o", "update", "-n"])
                .data("setting", key)
                .flags(["-v"])
                .data("value", value);
            if let Err(e) = self.tools.succeed(call).await {
                self.delete_iface(disk).await;
                return Err(error(e));
            }
        }
        Ok(())
    }

    async fn delete_iface(&self, disk: &Disk) {
        let name = disk.own_iface();
        let deleted = self.tools.succeed(iface(&name).flags(["-o", "delete"]));
        if let Err(error) = deleted.await {
            tracing::warn!(iface = name, %error, "cannot delete an iSCSI interface");
        }
    }

    /// The device of a LUN through one portal. An error is `Uncertain` when there may be a session now.
    async fn reach(
        &self,
        disk: &Disk,
        portal: &str,
        transport: &str,
    ) -> Result<PathBuf, RemoteError> {
        if self.session(disk, portal).await?.is_none() {
            let name = name_of(disk, portal);
            self.attached.note(&name).await?;
            let done = self.login(disk, portal).await;
            // What may have taken effect stays on record.
            if matches!(done, Ok(false) | Err(RemoteError::Failed(_))) {
                self.attached.forget(&name).await?;
            }
            done?;
        }
        self.appear(disk, portal, transport).await.map_err(begun)
    }

    /// The device of a LUN through the session with one portal.
    async fn appear(
        &self,
        disk: &Disk,
        portal: &str,
        transport: &str,
    ) -> Result<PathBuf, RemoteError> {
        let Some(session) = self.session(disk, portal).await? else {
            return Err(RemoteError::Failed(format!(
                "there is no session with {} through {portal} after logging in",
                disk.iqn
            )));
        };
        let (machine, host, lun) = (self.machine.clone(), session.host, disk.lun);
        run(move || {
            let at = PathBuf::from(format!("SCSI host {host}"));
            machine
                .scan(host, lun)
                .map_err(failed(&format!("look for LUN {lun} on"), &at))
        })
        .await?;
        self.wait_for_device(disk, portal, transport, session).await
    }

    /// The session through a portal. One that is named by its host name is taken for the only one there is.
    async fn session(&self, disk: &Disk, portal: &str) -> Result<Option<Session>, RemoteError> {
        let (machine, iqn, portal) = (self.machine.clone(), disk.iqn.clone(), portal.to_owned());
        let only = disk.portals.len() == 1 && portal.chars().any(|c| c.is_ascii_alphabetic());
        run(move || {
            let sessions = machine
                .sessions(&iqn)
                .map_err(failed("list sessions of", Path::new(&iqn)))?;
            let through = sessions.iter().find(|s| s.portals.contains(&portal));
            let single = || sessions.first().filter(|_| only && !portal.contains('['));
            Ok(through.or_else(single).cloned())
        })
        .await
    }

    /// Finds the target at a portal and logs in. Whether there was no session before.
    async fn login(&self, disk: &Disk, portal: &str) -> Result<bool, RemoteError> {
        let name = disk.own_iface();
        let at = || {
            Call::new("iscsiadm")
                .flags(["-m", "discoverydb", "-t", "sendtargets", "-p"])
                .data("targetPortal", portal)
                .flags(["-I"])
                .data("iscsiInterface", &name)
        };
        let node = || {
            node(portal, &disk.iqn)
                .flags(["-I"])
                .data("iscsiInterface", &name)
        };
        let failed = |what: &str| {
            let what = format!("iscsi: failed to {what} portal {portal} of {}", disk.iqn);
            move |e: CommandError| tool_failed(&what, &e)
        };
        // A record that is there already will do.
        if let Err(error) = self.tools.succeed(at().flags(["-o", "new"])).await {
            tracing::debug!(portal, %error, "no new discovery record");
        }
        if let Some(chap) = &disk.discovery_chap {
            self.set(at, "discovery.sendtargets.auth.authmethod", chap)
                .await
                .map_err(failed("update discoverydb with CHAP for"))?;
        }
        if let Err(error) = self.tools.succeed(at().flags(["--discover"])).await {
            self.tidy(at().flags(["-o", "delete"])).await;
            return Err(failed("sendtargets to")(error));
        }
        // Other LUNs of the target are not this volume's, and may be those of other nodes.
        self.tidy(node().flags(["-o", "update", "-n", "node.session.scan", "-v", "manual"]))
            .await;
        if let Some(chap) = &disk.session_chap {
            self.set(node, "node.session.auth.authmethod", chap)
                .await
                .map_err(failed("update node with CHAP for"))?;
        }
        match self.tools.succeed(node().flags(["--login"])).await {
            Ok(_) => {}
            Err(CommandError::Failed {
                code: Some(EXISTS), ..
            }) => return Ok(false),
            Err(error) => {
                self.tidy(node().flags(["-o", "delete"])).await;
                return Err(failed("log in to")(error));
            }
        }
        // After a boot the agent logs in; the system waiting for a dead target would hang.
        let manual = self::node(portal, &disk.iqn).flags([
            "-o",
            "update",
            "-n",
            "node.startup",
            "-v",
            "manual",
        ]);
        self.tidy(manual).await;
        tracing::info!(portal, iqn = disk.iqn, "logged in to an iSCSI target");
        Ok(true)
    }

    /// Turns CHAP on for a record, with these settings.
    async fn set(
        &self,
        record: impl Fn() -> Call,
        method: &'static str,
        chap: &[(&'static str, String)],
    ) -> Result<(), CommandError> {
        let on = record()
            .flags(["-o", "update", "-n", method])
            .flags(["-v", "CHAP"]);
        self.tools.succeed(on).await?;
        for (key, value) in chap {
            let call = record()
                .flags(["-o", "update", "-n", key, "-v"])
                .secret("value", value);
            self.tools.succeed(call).await?;
        }
        Ok(())
    }

    /// Runs a command that may fail.
    async fn tidy(&self, call: Call) {
        if let Err(error) = self.tools.succeed(call).await {
            tracing::warn!(%error, "iscsiadm does not tidy up");
        }
    }

    async fn wait_for_device(
        &self,
        disk: &Disk,
        portal: &str,
        transport: &str,
        session: Session,
    ) -> Result<PathBuf, RemoteError> {
        let begun = tokio::time::Instant::now();
        loop {
            let passed = begun.elapsed();
            let (machine, session, of) = (self.machine.clone(), session.clone(), disk.clone());
            let (transport, portal) = (transport.to_owned(), portal.to_owned());
            let bare = passed >= UDEV.min(self.appearing);
            let found = run(move || {
                let look = || {
                    let named = machine.by_path(&transport, &portal, &of.iqn, of.lun)?;
                    if named.is_some() || !bare {
                        return Ok(named);
                    }
                    let mut disks = machine.disks(&session)?.into_iter();
                    let found = disks.find(|d| d.lun == of.lun);
                    let path = found.map(|d| machine.device(&d.name));
                    Ok(path.filter(|p| p.exists()))
                };
                look().map_err(failed("look for the device of", Path::new(&of.iqn)))
            })
            .await?;
            if let Some(found) = found {
                return Ok(found);
            }
            if passed >= self.appearing {
                return Err(RemoteError::Failed(format!(
                    "Could not attach disk: Timeout after {}s: {} has no LUN {} for this initiator",
                    self.appearing.as_secs(),
                    disk.iqn,
                    disk.lun
                )));
            }
            tokio::time::sleep(LOOK.min(self.appearing)).await;
        }
    }

    /// The multipath device made of any of these; upstream's `waitForMultiPathToExist`.
    async fn multipath(
        &self,
        paths: &[PathBuf],
        patience: Duration,
    ) -> Result<Option<PathBuf>, RemoteError> {
        let begun = tokio::time::Instant::now();
        loop {
            let (machine, paths) = (self.machine.clone(), paths.to_vec());
            let found = run(move || {
                for path in paths {
                    let look = || {
                        let device = fs::canonicalize(&path)?;
                        let name = device.file_name().unwrap_or_default().to_string_lossy();
                        machine.multipath_of(&name)
                    };
                    let found = look().map_err(failed("look for multipath device of", &path))?;
                    if let Some(name) = found {
                        return Ok(Some(machine.device(&name)));
                    }
                }
                Ok(None)
            })
            .await?;
            if found.is_some() || begun.elapsed() >= patience {
                return Ok(found);
            }
            tokio::time::sleep(LOOK.min(patience)).await;
        }
    }

    async fn unstage_here(&self, volume: &Remote, at: PathBuf) -> Result<(), RemoteError> {
        let disk = Disk::of(volume)?;
        let about = format!("iSCSI disk {} lun {}", disk.iqn, disk.lun);
        match volume.mode {
            VolumeMode::Filesystem => filesystems::unmount(&self.tools, &at, &about).await?,
            VolumeMode::Block => {
                let link = at.clone();
                run(move || block::unlink(&link)).await?;
            }
        }
        if self.leave_lun(&disk, &at).await? {
            self.logout(&disk).await?;
        }
        Ok(())
    }

    /// Numbers of the hosts of the sessions with a target that the agent has logged in to.
    async fn own_hosts(&self, disk: &Disk) -> Result<BTreeSet<u32>, RemoteError> {
        let mut hosts = BTreeSet::new();
        for portal in &disk.portals {
            if self.attached.is_ours(&name_of(disk, portal)) {
                hosts.extend(self.session(disk, portal).await?.map(|s| s.host));
            }
        }
        Ok(hosts)
    }

    /// Makes the kernel forget the disks of a LUN in the agent's own sessions, if nobody uses them. Whether nobody uses any
    /// other of the target.
    async fn leave_lun(&self, disk: &Disk, at: &Path) -> Result<bool, RemoteError> {
        let own = self.own_hosts(disk).await?;
        let (machine, iqn, lun) = (self.machine.clone(), disk.iqn.clone(), disk.lun);
        let dir = at.parent().map(Path::to_owned);
        let (ours, mapped, others) = run(move || {
            let look = || {
                let links = links_in(dir.as_deref())?;
                let (mut ours, mut mapped, mut others) = (Vec::new(), Vec::new(), false);
                for session in machine.sessions(&iqn)? {
                    for found in machine.disks(&session)? {
                        let used = machine.is_used(&found.name, &links)?;
                        if found.lun != lun || used {
                            others |= used;
                            continue;
                        }
                        if own.contains(&session.host) {
                            mapped.extend(machine.multipath_of(&found.name)?);
                            ours.push(found.name);
                        }
                    }
                }
                mapped.sort();
                mapped.dedup();
                // One that has paths of somebody else's is theirs too.
                let mut whole = Vec::new();
                for name in mapped {
                    let paths = machine.paths_of(&name)?;
                    if paths.iter().all(|path| ours.contains(path)) {
                        whole.push(name);
                    }
                }
                Ok((ours, whole, others))
            };
            look().map_err(failed("list disks of", Path::new(&iqn)))
        })
        .await?;
        for name in mapped {
            let call = Call::new("multipath")
                .flags(["-f"])
                .path(&self.machine.device(&name));
            self.tidy(call).await;
        }
        let machine = self.machine.clone();
        run(move || {
            for name in ours {
                if let Err(error) = machine.forget(&name) {
                    tracing::warn!(device = name, %error, "the kernel does not forget a disk");
                }
            }
            Ok(())
        })
        .await?;
        Ok(!others)
    }

    /// Ends the agent's own sessions with a target; upstream's `detachISCSIDisk`.
    async fn logout(&self, disk: &Disk) -> Result<(), RemoteError> {
        let name = disk.own_iface();
        let mut result = Ok(());
        for portal in &disk.portals {
            let session = name_of(disk, portal);
            if !self.attached.is_ours(&session) {
                self.attached.forget(&session).await?;
                continue;
            }
            let of = |call: Call| call.flags(["-I"]).data("iscsiInterface", &name);
            let ended = self
                .tools
                .succeed(of(node(portal, &disk.iqn).flags(["--logout"])))
                .await;
            match ended {
                Ok(_) => tracing::info!(portal, iqn = disk.iqn, "logged out of an iSCSI target"),
                Err(CommandError::Failed {
                    code: Some(NOTHING),
                    ..
                }) => {}
                Err(error) => {
                    let what = format!("log out of portal {portal} of {}", disk.iqn);
                    result = result.and(Err(tool_failed(&what, &error)));
                    continue;
                }
            }
            let deleted = self
                .tools
                .succeed(of(node(portal, &disk.iqn).flags(["-o", "delete"])))
                .await;
            match deleted {
                Ok(_)
                | Err(CommandError::Failed {
                    code: Some(NOTHING),
                    ..
                }) => {}
                Err(error) => tracing::warn!(portal, %error, "cannot delete an iSCSI node record"),
            }
            self.attached.forget(&session).await?;
        }
        result?;
        if disk.initiator.is_some() {
            self.delete_iface(disk).await;
        }
        Ok(())
    }
}

/// Returns the name of a session in [`Attached`].
fn name_of(disk: &Disk, portal: &str) -> String {
    format!("session with {} through {portal}", disk.iqn)
}

fn iface(name: &str) -> Call {
    Call::new("iscsiadm")
        .flags(["-m", "iface", "-I"])
        .data("iscsiInterface", name)
}

fn node(portal: &str, iqn: &str) -> Call {
    Call::new("iscsiadm")
        .flags(["-m", "node", "-p"])
        .data("targetPortal", portal)
        .flags(["-T"])
        .data("iqn", iqn)
}

/// `iface.name = value` lines.
fn settings(told: &str) -> impl Iterator<Item = (&str, &str)> {
    let line = |line| str::split_once(line, " = ");
    told.lines()
        .filter_map(line)
        .filter(|(key, _)| key.starts_with("iface."))
        .map(|(key, value)| (key, value.trim()))
}

/// Links in a directory: devices that are handed out raw.
fn links_in(dir: Option<&Path>) -> io::Result<Vec<PathBuf>> {
    let Some(dir) = dir else {
        return Ok(Vec::new());
    };
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut links = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_symlink() {
            links.push(entry.path());
        }
    }
    Ok(links)
}

impl RemotePlugin for IscsiPlugin {
    fn stage(
        &self,
        volume: Arc<Resolved>,
        at: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        let this = self.clone();
        async move {
            let target = Disk::of(&volume.remote)?.iqn;
            let work = this.clone();
            let work = async move { work.stage_here(&volume, at).await };
            this.turns.take(&target, work).await
        }
        .boxed()
    }

    fn publish(
        &self,
        volume: Arc<Resolved>,
        target: Target,
    ) -> BoxFuture<'static, Result<GroupBy, RemoteError>> {
        async move {
            let remote = &volume.remote;
            let Some(staged) = target.staged else {
                return Err(RemoteError::Failed(format!(
                    "volume {} has not been staged",
                    remote.name
                )));
            };
            let (mode, read_only, path) = (remote.mode, remote.read_only, target.path);
            run(move || match mode {
                VolumeMode::Block => {
                    let device = fs::read_link(&staged).map_err(failed("follow", &staged))?;
                    block::link(&device, &path)
                }
                VolumeMode::Filesystem => {
                    let found =
                        mounted_at(&staged).map_err(failed("look for mount at", &staged))?;
                    if found.is_none() {
                        return Err(RemoteError::Failed(format!(
                            "nothing is mounted at {}; it has to be staged first",
                            staged.display()
                        )));
                    }
                    bind(&staged, &path, read_only)
                }
            })
            .await?;
            Ok(if read_only || mode == VolumeMode::Block {
                GroupBy::Nobody
            } else {
                GroupBy::Agent
            })
        }
        .boxed()
    }

    fn unpublish(
        &self,
        volume: Arc<Remote>,
        path: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        let tools = self.tools.clone();
        async move {
            if volume.mode == VolumeMode::Block {
                return run(move || block::unlink(&path)).await;
            }
            filesystems::unmount(&tools, &path, &format!("iSCSI volume {}", volume.name)).await
        }
        .boxed()
    }

    fn unstage(
        &self,
        volume: Arc<Remote>,
        at: PathBuf,
    ) -> BoxFuture<'static, Result<(), RemoteError>> {
        let this = self.clone();
        async move {
            let target = Disk::of(&volume)?.iqn;
            let work = this.clone();
            let work = async move { work.unstage_here(&volume, at).await };
            this.turns.take(&target, work).await
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests;
