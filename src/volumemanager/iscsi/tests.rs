use std::os::unix::fs::symlink;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ISCSIPersistentVolumeSource, Secret, SecretReference};

use super::*;
use crate::volumemanager::attached::tests::nothing;
use crate::volumemanager::stand_in::{StandIns, Swept, can_mount, remote, resolved, target};

const IQN: &str = "iqn.2003-01.org.example:disk";

fn source() -> ISCSIPersistentVolumeSource {
    ISCSIPersistentVolumeSource {
        target_portal: "10.0.0.1".to_owned(),
        iqn: IQN.to_owned(),
        lun: 2,
        ..Default::default()
    }
}

fn volume(source: ISCSIPersistentVolumeSource) -> Remote {
    remote(Source::Iscsi(Box::new(source)))
}

/// A node with stand-ins for its tools, and `/sys` and `/dev` of its own.
struct Node {
    tools: StandIns,
    attached: Attached,
}

impl Node {
    /// Logging in to `portals` works; the LUN appears as `sdb`, `sdc` …
    fn new(portals: &[&str]) -> Self {
        let tools = StandIns::new(&["mount", "mkfs.ext4", "fsck", "multipath"]);
        tools.script("blkid", "exit 2");
        let this = Self {
            tools,
            attached: nothing(),
        };
        let mut login = String::new();
        for (index, portal) in portals.iter().enumerate() {
            let host = index + 3;
            this.session(host, portal, IQN, &[(2, ["sdb", "sdc", "sdd"][index])]);
            let hidden = this.tools.path(&format!("hidden{host}"));
            fs::rename(this.sys(&format!("class/iscsi_host/host{host}")), &hidden).unwrap();
            login.push_str(&format!(
                "*'-p {portal} '*--login) mv {} {} ;;\n",
                hidden.display(),
                this.sys(&format!("class/iscsi_host/host{host}")).display()
            ));
        }
        this.iscsiadm(&login);
        this
    }

    /// `iscsiadm` with cases of its own before the usual ones.
    fn iscsiadm(&self, cases: &str) {
        self.tools.script(
            "iscsiadm",
            &format!(
                "case \"$*\" in\n{cases}\n\
                 *'-m iface '*'-o show') printf 'iface.iscsi_ifacename = default\\niface.transport_name = tcp\\niface.hwaddress = <empty>\\niface.mtu = 0\\niface.initiatorname = <empty>\\n' ;;\n\
                 *--login) echo 'cannot reach it' >&2; exit 8 ;;\nesac"
            ),
        );
    }

    fn sys(&self, path: &str) -> PathBuf {
        self.tools.path("sys").join(path)
    }

    fn dev(&self, path: &str) -> PathBuf {
        self.tools.path("dev").join(path)
    }

    /// A session with LUNs and the disks they are.
    fn session(&self, host: usize, portal: &str, iqn: &str, disks: &[(u32, &str)]) {
        let (address, port) = portal.rsplit_once(':').unwrap();
        let session = format!("session{host}");
        let dir = self.sys(&format!("class/iscsi_host/host{host}/device/{session}"));
        let write = |path: PathBuf, text: &str| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        };
        write(
            dir.join("iscsi_session").join(&session).join("targetname"),
            iqn,
        );
        let connection = format!("connection{host}:0");
        let connection = dir
            .join(&connection)
            .join("iscsi_connection")
            .join(&connection);
        write(
            connection.join("persistent_address"),
            address.trim_matches(['[', ']']),
        );
        write(connection.join("persistent_port"), port);
        write(self.sys(&format!("class/scsi_host/host{host}/scan")), "");
        fs::create_dir_all(self.dev("disk/by-path")).unwrap();
        for (lun, name) in disks {
            let address = format!("{host}:0:0:{lun}");
            let block = dir
                .join(format!("target{host}:0:0"))
                .join(&address)
                .join("block");
            fs::create_dir_all(block.join(name)).unwrap();
            let own = self.sys("block").join(name);
            write(own.join("dev"), &format!("250:{lun}{host}"));
            write(own.join("device/delete"), "");
            fs::create_dir_all(own.join("holders")).unwrap();
            fs::write(self.dev(name), vec![0_u8; 8192]).unwrap();
            let link = self.dev(&format!("disk/by-path/ip-{portal}-iscsi-{iqn}-lun-{lun}"));
            symlink(self.dev(name), link).unwrap();
        }
    }

    fn holder(&self, disk: &str, holder: &str, uuid: &str) {
        fs::create_dir_all(self.sys("block").join(disk).join("holders").join(holder)).unwrap();
        let dm = self.sys("block").join(holder);
        fs::create_dir_all(dm.join("dm")).unwrap();
        fs::write(dm.join("dm/uuid"), uuid).unwrap();
        fs::write(dm.join("dev"), "252:7").unwrap();
        fs::write(self.dev(holder), vec![0_u8; 8192]).unwrap();
    }

    fn plugin(&self) -> IscsiPlugin {
        IscsiPlugin::new(self.tools.tools(), self.attached.clone()).on(
            &self.tools.path("sys"),
            &self.tools.path("dev"),
            Duration::from_millis(300),
        )
    }

    /// As if the agent had logged in.
    async fn logged_in(&self) {
        let disk = Disk::of(&volume(source())).unwrap();
        let name = name_of(&disk, &disk.portals[0]);
        self.attached.note(&name).await.unwrap();
    }

    fn at(&self) -> PathBuf {
        self.tools.path("mounts/hash")
    }

    async fn stage(&self, volume: Remote) -> Result<(), RemoteError> {
        self.plugin().stage(resolved(volume), self.at()).await
    }

    async fn unstage(&self, volume: Remote) -> Result<(), RemoteError> {
        self.plugin().unstage(Arc::new(volume), self.at()).await
    }

    /// Calls, with the node's own paths made short.
    fn calls(&self) -> Vec<String> {
        let own = self.tools.path("").display().to_string();
        let own = own.trim_end_matches('/').to_owned();
        self.tools
            .calls()
            .iter()
            .map(|c| c.replace(&own, ""))
            .collect()
    }

    fn told(&self, path: &str) -> String {
        fs::read_to_string(self.sys(path))
            .unwrap()
            .trim()
            .to_owned()
    }
}

#[tokio::test]
async fn the_module_for_tcp_is_loaded_by_systemd_where_it_is_missing() {
    let node = Node::new(&["10.0.0.1:3260"]);
    let load = "systemctl start modprobe@iscsi_tcp.service";
    // That it fails keeps nobody from trying.
    node.tools.script("systemctl", "exit 1");
    node.stage(volume(source())).await.unwrap();
    assert_eq!(node.calls().iter().filter(|call| *call == load).count(), 1);

    let node = Node::new(&["10.0.0.1:3260"]);
    node.tools.script("systemctl", "");
    fs::create_dir_all(node.sys("class/iscsi_transport/tcp")).unwrap();
    node.stage(volume(source())).await.unwrap();
    assert!(!node.calls().contains(&load.to_owned()));
}

#[tokio::test]
async fn a_lun_is_found_logged_in_to_and_mounted_by_these_very_commands() {
    let node = Node::new(&["10.0.0.1:3260"]);
    node.stage(volume(source())).await.unwrap();
    let db = "iscsiadm -m discoverydb -t sendtargets -p 10.0.0.1:3260 -I default";
    let path = "/dev/disk/by-path/ip-10.0.0.1:3260-iscsi-iqn.2003-01.org.example:disk-lun-2";
    assert_eq!(
        node.calls(),
        [
            "iscsiadm -m iface -I default -o show".to_owned(),
            format!("{db} -o new"),
            format!("{db} --discover"),
            format!(
                "iscsiadm -m node -p 10.0.0.1:3260 -T {IQN} -I default -o update -n node.session.scan -v manual"
            ),
            format!("iscsiadm -m node -p 10.0.0.1:3260 -T {IQN} -I default --login"),
            format!(
                "iscsiadm -m node -p 10.0.0.1:3260 -T {IQN} -o update -n node.startup -v manual"
            ),
            format!("blkid -p -o export -- {path}"),
            format!("mkfs.ext4 -F -m0 {path}"),
            format!("mount -t ext4 -o defaults -- {path} /mounts/hash"),
        ]
    );
    assert_eq!(
        node.told("class/scsi_host/host3/scan"),
        "0 0 2",
        "one LUN is looked for"
    );

    // Logged in already: again, as after a restart.
    node.tools.forget();
    node.stage(volume(source())).await.unwrap();
    assert!(
        !node.calls().iter().any(|c| c.contains("--login")),
        "{:?}",
        node.calls()
    );
}

#[tokio::test]
async fn chap_secrets_reach_iscsiadm_and_nobody_else() {
    let chap = || ISCSIPersistentVolumeSource {
        chap_auth_discovery: Some(true),
        chap_auth_session: Some(true),
        secret_ref: Some(SecretReference {
            namespace: Some("ns".to_owned()),
            name: Some("chap".to_owned()),
        }),
        ..source()
    };
    let node = Node::new(&["10.0.0.1:3260"]);
    let missing = node.stage(volume(chap())).await.unwrap_err().to_string();
    assert!(
        missing.starts_with("couldn't get secret ns/chap"),
        "{missing}"
    );
    let mut none = chap();
    none.secret_ref = None;
    let none = node.stage(volume(none)).await.unwrap_err().to_string();
    assert!(none.contains("has no secretRef"), "{none}");

    let data = [
        ("discovery.sendtargets.auth.username", "du"),
        ("discovery.sendtargets.auth.password", "-dpw"),
        ("node.session.auth.username", "su"),
        ("node.session.auth.password", "spw"),
        ("node.session.auth.username_in", "iu"),
        ("other", "x"),
    ];
    let data = data.map(|(k, v)| (k.to_owned(), ByteString(v.as_bytes().to_vec())));
    let secret = Secret {
        data: Some(data.into()),
        ..Default::default()
    };
    let mut with = (*resolved(volume(chap()))).clone();
    with.secrets
        .insert(("ns".to_owned(), "chap".to_owned()), Arc::new(secret));
    let with = Arc::new(with);
    node.tools.forget();
    node.plugin()
        .stage(Arc::clone(&with), node.at())
        .await
        .unwrap();
    let updates: Vec<_> = node
        .calls()
        .into_iter()
        .filter_map(|c| Some(c.split_once(" -o update -n ")?.1.to_owned()))
        .collect();
    assert_eq!(
        updates,
        [
            "discovery.sendtargets.auth.authmethod -v CHAP",
            "discovery.sendtargets.auth.username -v du",
            "discovery.sendtargets.auth.password -v -dpw",
            "node.session.scan -v manual",
            "node.session.auth.authmethod -v CHAP",
            "node.session.auth.username -v su",
            "node.session.auth.password -v spw",
            "node.session.auth.username_in -v iu",
            "node.startup -v manual",
        ]
    );
    // One that fails tells neither what it was given nor what it says of it.
    let node = Node::new(&["10.0.0.1:3260"]);
    node.iscsiadm("*auth.password*) echo \"bad value ${12} ${10}\" $* >&2; exit 7 ;;");
    let error = node.plugin().stage(with, node.at()).await.unwrap_err();
    assert!(error.to_string().contains("-v ***"), "{error}");
    assert!(!error.to_string().contains("dpw"), "{error}");
}

#[tokio::test]
async fn an_initiator_name_has_an_interface_of_its_own() {
    let own = || ISCSIPersistentVolumeSource {
        initiator_name: Some("iqn.1993-08.org.debian:pod".to_owned()),
        iscsi_interface: Some("eth1".to_owned()),
        ..source()
    };
    let node = Node::new(&["10.0.0.1:3260"]);
    node.stage(volume(own())).await.unwrap();
    let iface = "iscsiadm -m iface -I 10.0.0.1:3260:pv";
    assert_eq!(
        node.calls()[..6],
        [
            "iscsiadm -m iface -I eth1 -o show".to_owned(),
            "iscsiadm -m iface -I eth1 -o show".to_owned(),
            format!("{iface} -o new"),
            format!("{iface} -o update -n iface.transport_name -v tcp"),
            format!("{iface} -o update -n iface.mtu -v 0"),
            format!("{iface} -o update -n iface.initiatorname -v iqn.1993-08.org.debian:pod"),
        ]
    );
    assert!(
        node.calls()[9].ends_with("-I 10.0.0.1:3260:pv --login"),
        "{:?}",
        node.calls()
    );
    node.tools.forget();
    node.unstage(volume(own())).await.unwrap();
    assert_eq!(
        node.calls(),
        [
            format!("iscsiadm -m node -p 10.0.0.1:3260 -T {IQN} --logout -I 10.0.0.1:3260:pv"),
            format!("iscsiadm -m node -p 10.0.0.1:3260 -T {IQN} -o delete -I 10.0.0.1:3260:pv"),
            format!("{iface} -o delete"),
        ]
    );
    assert_eq!(
        node.told("block/sdb/device/delete"),
        "1",
        "the kernel forgets the disk"
    );
}

#[tokio::test]
async fn a_portal_that_is_dead_leaves_no_record_and_names_itself() {
    let node = Node::new(&[]);
    let error = node.stage(volume(source())).await.unwrap_err();
    assert!(matches!(error, RemoteError::Failed(_)));
    let text = error.to_string();
    assert!(
        text.starts_with(&format!(
            "failed to get any path for iscsi disk {IQN} lun 2"
        )) && text.contains("10.0.0.1:3260")
            && text.contains("cannot reach it"),
        "{text}"
    );
    let last = node.calls().pop().unwrap();
    assert_eq!(
        last,
        format!("iscsiadm -m node -p 10.0.0.1:3260 -T {IQN} -I default -o delete")
    );
}

#[tokio::test]
async fn one_path_of_two_does_and_several_make_a_multipath_device() {
    let both = || ISCSIPersistentVolumeSource {
        portals: Some(vec!["10.0.0.2:3261".to_owned(), "10.0.0.1".to_owned()]),
        ..source()
    };
    let node = Node::new(&["10.0.0.1:3260"]);
    node.stage(volume(both())).await.unwrap();
    let tries = node
        .calls()
        .iter()
        .filter(|c| c.contains("10.0.0.2:3261") && c.ends_with("--login"))
        .count();
    assert_eq!(
        tries, MAX_ROUNDS,
        "the other is tried as often as upstream does"
    );
    assert!(node.calls().last().unwrap().contains("ip-10.0.0.1:3260"));

    let node = Node::new(&["10.0.0.1:3260", "10.0.0.2:3261"]);
    node.holder("sdb", "dm-0", "mpath-36001405");
    node.holder("sdc", "dm-0", "mpath-36001405");
    node.stage(volume(both())).await.unwrap();
    assert_eq!(
        node.calls().last().unwrap(),
        "mount -t ext4 -o defaults -- /dev/dm-0 /mounts/hash"
    );
    node.tools.forget();
    node.unstage(volume(both())).await.unwrap();
    assert_eq!(node.calls()[0], "multipath -f /dev/dm-0");
    let logouts = node
        .calls()
        .iter()
        .filter(|c| c.contains("--logout"))
        .count();
    assert_eq!(logouts, 2, "each portal once: {:?}", node.calls());
}

#[tokio::test]
async fn a_target_is_not_left_while_another_lun_of_it_is_used() {
    let used_by_device = |node: &Node| node.holder("sdx", "dm-3", "LVM-abc");
    let linked = |node: &Node| {
        fs::create_dir_all(node.at().parent().unwrap()).unwrap();
        symlink(node.dev("sdx"), node.tools.path("mounts/other")).unwrap();
    };
    let ways: [&dyn Fn(&Node); 2] = [&used_by_device, &linked];
    for way in ways {
        let node = Node::new(&[]);
        node.session(3, "10.0.0.1:3260", IQN, &[(2, "sdb"), (5, "sdx")]);
        node.logged_in().await;
        way(&node);
        node.unstage(volume(source())).await.unwrap();
        assert_eq!(node.calls(), [""; 0]);
        assert_eq!(node.told("block/sdb/device/delete"), "1");
        assert_eq!(
            node.told("block/sdx/device/delete"),
            "",
            "it is somebody else's"
        );
    }
    let node = Node::new(&[]);
    node.session(3, "10.0.0.1:3260", IQN, &[(2, "sdb"), (5, "sdx")]);
    node.logged_in().await;
    node.unstage(volume(source())).await.unwrap();
    assert!(
        node.calls()[0].contains("--logout"),
        "nobody uses the other"
    );
}

#[tokio::test]
async fn a_mounted_lun_keeps_its_session() {
    let node = Node::new(&[]);
    node.session(3, "10.0.0.1:3260", IQN, &[(2, "sdb"), (5, "sdx")]);
    node.logged_in().await;
    // The number of a file system that is mounted for sure.
    let root = filesystems::table().unwrap().remove(0).device;
    fs::write(node.sys("block/sdx/dev"), root).unwrap();
    node.unstage(volume(source())).await.unwrap();
    assert_eq!(node.calls(), [""; 0]);
}

#[tokio::test]
async fn what_is_used_without_the_number_of_a_disk_keeps_the_session_too() {
    let swapped = |node: &Node| {
        let swaps = node.tools.path("swaps");
        let disk = node.dev("sdx");
        let mut table = b"Filename Type\n/caf\xe9 file 1 0 -3\n".to_vec();
        table.extend(format!("{} partition 1 0 -2\n", disk.display()).into_bytes());
        fs::write(&swaps, table).unwrap();
        swaps
    };
    let in_btrfs = |node: &Node| {
        fs::create_dir_all(node.sys("fs/btrfs/uuid/devices/sdx")).unwrap();
        node.tools.path("none")
    };
    let ways: [&dyn Fn(&Node) -> PathBuf; 2] = [&swapped, &in_btrfs];
    for way in ways {
        let node = Node::new(&[]);
        node.session(3, "10.0.0.1:3260", IQN, &[(2, "sdb"), (5, "sdx")]);
        node.logged_in().await;
        let mut plugin = node.plugin();
        plugin.machine.swaps = way(&node);
        let done = plugin.unstage(Arc::new(volume(source())), node.at());
        done.await.unwrap();
        assert_eq!(node.calls(), [""; 0]);
        assert_eq!(node.told("block/sdx/device/delete"), "");
    }
}

#[tokio::test]
async fn a_session_that_was_there_before_is_used_and_left_as_it_was() {
    let node = Node::new(&[]);
    node.session(3, "10.0.0.1:3260", IQN, &[(2, "sdb")]);
    node.holder("sdb", "dm-0", "mpath-36001405");
    node.stage(volume(source())).await.unwrap();
    node.tools.forget();
    node.unstage(volume(source())).await.unwrap();
    assert_eq!(node.calls(), [""; 0], "neither logged out nor taken apart");
    assert_eq!(node.told("block/sdb/device/delete"), "");

    // By somebody else, at the very moment of the login.
    let node = Node::new(&[]);
    node.session(3, "10.0.0.1:3260", IQN, &[(2, "sdb")]);
    let (dir, hidden) = (
        node.sys("class/iscsi_host/host3"),
        node.tools.path("hidden"),
    );
    fs::rename(&dir, &hidden).unwrap();
    node.iscsiadm(&format!(
        "*--login) mv {} {}; exit 15 ;;",
        hidden.display(),
        dir.display()
    ));
    node.stage(volume(source())).await.unwrap();
    node.tools.forget();
    node.unstage(volume(source())).await.unwrap();
    assert_eq!(node.calls(), [""; 0]);

    // The agent's own path beside one of somebody else's: that keeps the device of both.
    let both = || ISCSIPersistentVolumeSource {
        portals: Some(vec!["10.0.0.2".to_owned()]),
        ..source()
    };
    let node = Node::new(&["10.0.0.1:3260"]);
    node.session(7, "10.0.0.2:3260", IQN, &[(2, "sdc")]);
    for disk in ["sdb", "sdc"] {
        node.holder(disk, "dm-0", "mpath-36001405");
        fs::create_dir_all(node.sys("block/dm-0/slaves").join(disk)).unwrap();
    }
    node.stage(volume(both())).await.unwrap();
    node.tools.forget();
    node.unstage(volume(both())).await.unwrap();
    let calls = node.calls().join("\n");
    assert!(
        !calls.contains("multipath") && !calls.contains("10.0.0.2"),
        "{calls}"
    );
    assert!(
        calls.contains("-p 10.0.0.1:3260") && calls.contains("--logout"),
        "{calls}"
    );
    assert_eq!(node.told("block/sdb/device/delete"), "1");
    assert_eq!(node.told("block/sdc/device/delete"), "");
}

#[tokio::test]
async fn a_logout_that_fails_is_made_again() {
    let node = Node::new(&[]);
    node.session(3, "10.0.0.1:3260", IQN, &[(2, "sdb")]);
    node.logged_in().await;
    node.iscsiadm("*--logout*) echo 'iscsid is not running' >&2; exit 20 ;;");
    let error = node.unstage(volume(source())).await.unwrap_err();
    assert!(
        error.to_string().contains("iscsid is not running"),
        "{error}"
    );
    node.iscsiadm("*--logout*) exit 21 ;;");
    node.unstage(volume(source())).await.unwrap();
}

#[tokio::test]
async fn a_device_that_does_not_appear_is_told() {
    let node = Node::new(&["10.0.0.1:3260"]);
    let mut other = source();
    other.lun = 9;
    let error = node.stage(volume(other)).await.unwrap_err();
    assert!(
        matches!(error, RemoteError::Uncertain(_)),
        "the session is to be ended: {error}"
    );
    let error = error.to_string();
    assert!(
        error.contains("Could not attach disk: Timeout after") && error.contains("has no LUN 9"),
        "{error}"
    );
}

#[tokio::test]
async fn a_node_without_udev_finds_the_device_all_the_same() {
    let node = Node::new(&["10.0.0.1:3260"]);
    fs::remove_dir_all(node.dev("disk")).unwrap();
    node.stage(volume(source())).await.unwrap();
    assert_eq!(
        node.calls().last().unwrap(),
        "mount -t ext4 -o defaults -- /dev/sdb /mounts/hash"
    );
}

#[tokio::test]
async fn fields_that_iscsiadm_must_not_see_are_refused() {
    let with = |change: &dyn Fn(&mut ISCSIPersistentVolumeSource)| {
        let mut source = source();
        change(&mut source);
        volume(source)
    };
    let node = Node::new(&["10.0.0.1:3260"]);
    for (volume, what) in [
        (with(&|s| s.target_portal = String::new()), "targetPortal"),
        (with(&|s| s.target_portal = "-p".to_owned()), "targetPortal"),
        (
            with(&|s| s.portals = Some(vec!["a b".to_owned()])),
            "targetPortal",
        ),
        (with(&|s| s.iqn = "disk".to_owned()), "iqn"),
        (with(&|s| s.iqn = "iqn.x/../y".to_owned()), "iqn"),
        (with(&|s| s.lun = -1), "lun"),
        (
            with(&|s| s.iscsi_interface = Some("--x".to_owned())),
            "iscsiInterface",
        ),
        (
            with(&|s| s.initiator_name = Some("a b".to_owned())),
            "initiatorName",
        ),
        (with(&|s| s.fs_type = Some("../sh".to_owned())), "fsType"),
    ] {
        let error = node.stage(volume).await.unwrap_err().to_string();
        assert!(error.contains(what), "{what}: {error}");
    }
    assert_eq!(node.calls(), [""; 0]);
}

#[test]
fn portals_get_their_port() {
    for (portal, with_port) in [
        ("10.0.0.1", "10.0.0.1:3260"),
        ("10.0.0.1:1", "10.0.0.1:1"),
        ("[fd00::1]", "[fd00::1]:3260"),
        ("[fd00::1]:1", "[fd00::1]:1"),
        ("san.example", "san.example:3260"),
    ] {
        let mut source = source();
        source.target_portal = portal.to_owned();
        assert_eq!(Disk::of(&volume(source)).unwrap().portals, [with_port]);
    }
}

#[tokio::test]
async fn the_sessions_of_ipv6_and_named_portals_are_recognised() {
    let node = Node::new(&[]);
    node.session(3, "[fd00::1]:3260", IQN, &[]);
    for portal in ["[fd00::1]", "san.example"] {
        let mut source = source();
        source.target_portal = portal.to_owned();
        let disk = Disk::of(&volume(source)).unwrap();
        let found = node
            .plugin()
            .session(&disk, &disk.portals[0])
            .await
            .unwrap();
        assert_eq!(found.map(|s| s.host), Some(3), "{portal}");
    }
    let disk = Disk::of(&volume(source())).unwrap();
    let found = node
        .plugin()
        .session(&disk, &disk.portals[0])
        .await
        .unwrap();
    assert_eq!(found, None, "another address is another way");
}

#[tokio::test]
async fn a_raw_lun_is_linked() {
    let disk = Path::new("/dev/loop0");
    if !disk.exists() {
        return;
    }
    let node = Node::new(&["10.0.0.1:3260"]);
    let link = node.dev(&format!("disk/by-path/ip-10.0.0.1:3260-iscsi-{IQN}-lun-2"));
    fs::remove_file(&link).unwrap();
    symlink(disk, &link).unwrap();
    let mut raw = volume(source());
    raw.mode = VolumeMode::Block;
    node.stage(raw.clone()).await.unwrap();
    let at = node.tools.path("volumeDevices/pv");
    let done = node
        .plugin()
        .publish(resolved(raw.clone()), target(&at, Some(node.at())));
    assert_eq!(done.await, Ok(GroupBy::Nobody));
    assert_eq!(fs::canonicalize(&at).unwrap(), disk);
    assert_eq!(
        fs::read_link(&at).unwrap(),
        link,
        "by the name that outlives a boot"
    );
    let raw = Arc::new(raw);
    node.plugin()
        .unpublish(Arc::clone(&raw), at.clone())
        .await
        .unwrap();
    node.plugin().unstage(raw, node.at()).await.unwrap();
    assert!(!at.is_symlink() && !node.at().is_symlink());
}

#[tokio::test]
async fn pods_get_bind_mounts_of_what_is_staged() {
    if !can_mount() {
        return;
    }
    let node = Node::new(&[]);
    node.tools.real("umount");
    let _swept = Swept(node.tools.path(""));
    fs::create_dir_all(node.at()).unwrap();
    let at = node.tools.path("pod");
    let mut of = volume(source());
    let publish = |of: &Remote| {
        node.plugin()
            .publish(resolved(of.clone()), target(&at, Some(node.at())))
    };
    let early = publish(&of).await.unwrap_err().to_string();
    assert!(early.contains("has to be staged first"), "{early}");
    let none: Option<&str> = None;
    nix::mount::mount(
        Some("x"),
        &node.at(),
        Some("tmpfs"),
        nix::mount::MsFlags::empty(),
        none,
    )
    .unwrap();
    of.read_only = true;
    assert_eq!(publish(&of).await, Ok(GroupBy::Nobody));
    assert!(fs::write(at.join("x"), "").is_err());
    node.plugin()
        .unpublish(Arc::new(of), at.clone())
        .await
        .unwrap();
    assert!(!at.exists());
}
