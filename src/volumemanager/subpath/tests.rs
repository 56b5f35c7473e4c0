use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::mount::{MsFlags, mount};

use super::lookup::Lookup;
use super::places::prepare;
use super::*;
use crate::store::Store;
use crate::types::{BootId, Clock, Stamp};
use crate::volumemanager::mounts;

const BOTH: [Lookup; 2] = [Lookup::Kernel, Lookup::Hand];

struct TestClock;

impl Clock for TestClock {
    fn now(&self) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: 1,
            wall_ms: 1,
        }
    }
}

/// A volume, something outside of it, and a node's root. Whatever is mounted there goes with it.
struct World {
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let world = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        fs::create_dir_all(world.volume()).unwrap();
        fs::create_dir_all(world.outside()).unwrap();
        fs::write(world.outside().join("secret"), "secret").unwrap();
        world
    }

    fn volume(&self) -> PathBuf {
        self.dir.path().join("volume")
    }

    fn outside(&self) -> PathBuf {
        self.dir.path().join("outside")
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    fn target(&self, index: &str) -> PathBuf {
        dir_of(&self.root(), &uid()).join("v/c").join(index)
    }

    fn prepare(&self, path: &str, lookup: Lookup) -> Result<PathBuf, Trouble> {
        let target = self.target("0");
        prepare(&self.volume(), path, &target, lookup).map(|()| target)
    }

    fn mounts(&self) -> usize {
        mounts::below(self.dir.path()).unwrap().len()
    }

    fn manager(&self, store: &Store) -> VolumeManager {
        VolumeManager::new(self.root(), None, store.clone(), Arc::new(TestClock))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for mount in mounts::below(self.dir.path()).unwrap().iter().rev() {
            let flags = nix::mount::MntFlags::MNT_DETACH;
            if let Err(error) = nix::mount::umount2(&mount.point, flags) {
                eprintln!("unmount {}: {error}", mount.point.display());
            }
        }
    }
}

fn uid() -> PodUid {
    PodUid::new("u1")
}

fn part(world: &World, index: usize, path: &str) -> SubPath {
    SubPath {
        volume: "v".to_owned(),
        root: world.volume(),
        container: "c".to_owned(),
        index,
        path: path.to_owned(),
    }
}

fn permissions(path: &Path) -> (u32, u32) {
    let seen = fs::metadata(path).unwrap();
    (seen.mode() & 0o7777, seen.gid())
}

#[test]
fn directories_files_and_links_inside_are_bound() {
    for lookup in BOTH {
        let world = World::new();
        let volume = world.volume();
        fs::create_dir_all(volume.join("a/b")).unwrap();
        fs::write(volume.join("a/b/file"), "text").unwrap();
        // As the agent writes configMaps.
        fs::create_dir(volume.join("..2026")).unwrap();
        fs::write(volume.join("..2026/key"), "value").unwrap();
        symlink("..2026", volume.join("..data")).unwrap();
        symlink("..data/key", volume.join("key")).unwrap();
        symlink(volume.join("a"), volume.join("absolute")).unwrap();
        for (path, text) in [
            ("a/b/file", "text"),
            ("a//./b/file", "text"),
            ("key", "value"),
            ("absolute/b/file", "text"),
        ] {
            let at = world.prepare(path, lookup).unwrap();
            assert_eq!(fs::read_to_string(&at).unwrap(), text, "{path} {lookup:?}");
            assert_eq!(world.mounts(), 1, "what was there is replaced");
        }
        let at = world.prepare("a/b", lookup).unwrap();
        fs::write(at.join("new"), "from the container").unwrap();
        assert!(volume.join("a/b/new").exists());
        assert_eq!(clean(&world.root(), &uid()).unwrap(), 1);
        assert_eq!(world.mounts(), 0);
        assert!(!dir_of(&world.root(), &uid()).exists());
        assert!(volume.join("a/b/new").exists(), "content stays");
    }
}

#[test]
fn what_is_missing_is_made_with_all_mode_bits_and_the_group_of_the_volume() {
    for lookup in BOTH {
        let world = World::new();
        let volume = world.volume();
        // The last but one is an emptyDir in memory with an fsGroup.
        for (mode, group) in [
            (0o750, 0),
            (0o1777, 0),
            (0o2775, 4711),
            (0o3777, 4711),
            (0o4755, 0),
        ] {
            std::os::unix::fs::chown(&volume, None, Some(group)).unwrap();
            fs::set_permissions(&volume, fs::Permissions::from_mode(mode)).unwrap();
            let path = format!("for-{mode:o}/x/y");
            let at = world.prepare(&path, lookup).unwrap();
            let made = (mode, group);
            assert_eq!(permissions(&at), made, "{lookup:?}");
            assert_eq!(permissions(&volume.join(format!("for-{mode:o}"))), made);
        }
    }
}

#[test]
fn what_leads_out_of_the_volume_is_refused_and_nothing_is_made_or_mounted() {
    for lookup in BOTH {
        let world = World::new();
        let (volume, outside) = (world.volume(), world.outside());
        fs::write(volume.join("file"), "").unwrap();
        symlink(&outside, volume.join("absolute")).unwrap();
        // Whether the node has the target makes no difference.
        symlink(outside.join("none"), volume.join("absolute-none")).unwrap();
        symlink(outside.join("secret/x"), volume.join("absolute-file")).unwrap();
        symlink("../none/../volume", volume.join("around")).unwrap();
        symlink("../outside", volume.join("relative")).unwrap();
        symlink("/", volume.join("root")).unwrap();
        symlink("nowhere", volume.join("dangling")).unwrap();
        symlink("../outside/made", volume.join("dangling-out")).unwrap();
        symlink("loop", volume.join("loop")).unwrap();
        for (path, word) in [
            ("absolute", "leads out"),
            ("absolute/secret", "leads out"),
            ("absolute/new", "leads out"),
            ("absolute-none", "leads out"),
            ("absolute-none/x", "leads out"),
            ("absolute-file", "leads out"),
            ("around", "leads out"),
            ("relative/secret", "leads out"),
            ("relative/new/er", "leads out"),
            ("root/etc", "leads out"),
            ("dangling", "leads nowhere"),
            ("dangling/x", "leads nowhere"),
            ("dangling-out", "leads out"),
            ("dangling-out/x", "leads out"),
            ("loop", "leads nowhere"),
            ("file/x", "a part of it is a file"),
        ] {
            let error = world.prepare(path, lookup).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(word), "{path} {lookup:?}: {text}");
            let place = world.dir.path().to_string_lossy().into_owned();
            assert!(!text.contains(&place), "names a path of the node: {text}");
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
        assert_eq!(world.mounts(), 0);
    }
}

#[test]
fn what_is_bound_already_is_kept_and_what_has_become_another_file_is_replaced() {
    let world = World::new();
    let file = world.volume().join("file");
    fs::write(&file, "one").unwrap();
    let at = world.prepare("file", Lookup::Kernel).unwrap();
    world.prepare("file", Lookup::Kernel).unwrap();
    assert_eq!(world.mounts(), 1);
    fs::write(world.volume().join("next"), "two").unwrap();
    fs::rename(world.volume().join("next"), &file).unwrap();
    assert_eq!(
        fs::read_to_string(&at).unwrap(),
        "one",
        "a container keeps what it has"
    );
    world.prepare("file", Lookup::Kernel).unwrap();
    assert_eq!(fs::read_to_string(&at).unwrap(), "two");
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    world.prepare("file", Lookup::Kernel).unwrap();
    assert!(at.is_dir());
    assert_eq!(world.mounts(), 1);
}

#[test]
fn a_volume_that_cannot_be_written_gives_what_it_has() {
    let world = World::new();
    let volume = world.volume();
    fs::create_dir(volume.join("there")).unwrap();
    let none = None::<&str>;
    mount(Some(&volume), &volume, none, MsFlags::MS_BIND, none).unwrap();
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(none, &volume, none, flags, none).unwrap();
    let at = world.prepare("there", Lookup::Kernel).unwrap();
    assert!(fs::write(at.join("x"), "").is_err(), "still read-only");
    let error = world.prepare("new", Lookup::Kernel).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("cannot be made"), "{text}");
    let gone = prepare(
        &world.dir.path().join("none"),
        "x",
        &world.target("0"),
        Lookup::Kernel,
    );
    assert!(
        gone.unwrap_err()
            .to_string()
            .contains("the volume cannot be opened")
    );
}

// Invariant VOL-10.
/// A thread exchanges a directory and a link to outside as fast as it can: whatever is bound is of the volume.
#[test]
fn a_directory_that_becomes_a_link_again_and_again_never_leads_outside() {
    let rounds = 10_000 / holdfast_testkit::exploration::stride();
    let world = World::new();
    let volume = world.volume();
    fs::create_dir_all(volume.join("a/b")).unwrap();
    fs::write(volume.join("a/b/mark"), "inside").unwrap();
    fs::create_dir(world.outside().join("b")).unwrap();
    symlink(world.outside(), volume.join("link")).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let swapper = {
        let (volume, stop) = (volume.clone(), Arc::clone(&stop));
        std::thread::spawn(move || {
            let dir = fs::File::open(&volume).unwrap();
            let exchange = nix::fcntl::RenameFlags::RENAME_EXCHANGE;
            let mut swaps = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                nix::fcntl::renameat2(&dir, "a", &dir, "link", exchange).unwrap();
                swaps += 1;
                // A link is looked at far more often than it is there: a directory stays for a while.
                if swaps.is_multiple_of(2) {
                    (0..20_000).for_each(|_| std::hint::spin_loop());
                }
            }
            swaps
        })
    };
    let outside = fs::metadata(world.outside().join("b")).unwrap().ino();
    let (mut bound, mut refused) = (0, 0);
    for round in 0..rounds {
        let lookup = BOTH[round % 2];
        // One that is there, and one that has to be made.
        let path = if round % 10 == 9 {
            format!("a/b/new-{round}")
        } else {
            "a/b".to_owned()
        };
        match world.prepare(&path, lookup) {
            Ok(at) => {
                bound += 1;
                assert_ne!(fs::metadata(&at).unwrap().ino(), outside, "round {round}");
                if path == "a/b" {
                    assert_eq!(fs::read_to_string(at.join("mark")).unwrap(), "inside");
                }
                assert_eq!(clean(&world.root(), &uid()).unwrap(), 1);
            }
            Err(_) => refused += 1,
        }
    }
    stop.store(true, Ordering::Relaxed);
    let swaps = swapper.join().unwrap();
    println!("{bound} bound, {refused} refused, {swaps} swaps");
    assert!(
        bound > 0 && refused > 0 && swaps > 0,
        "{bound} {refused} {swaps}"
    );
    let left = fs::read_dir(world.outside().join("b")).unwrap().count();
    assert_eq!(left, 0, "something was made outside");
    assert_eq!(clean(&world.root(), &uid()).unwrap(), 0);
    assert_eq!(world.mounts(), 0);
}

/// A mount that appears inside of a bound part by propagation is taken along; where it came from it stays.
#[test]
fn what_is_mounted_elsewhere_stays_mounted_there() {
    let world = World::new();
    let volume = world.volume();
    let none = None::<&str>;
    mount(Some(&volume), &volume, none, MsFlags::MS_BIND, none).unwrap();
    mount(none, &volume, none, MsFlags::MS_SHARED, none).unwrap();
    fs::create_dir_all(volume.join("part/disk")).unwrap();
    let at = world.prepare("part", Lookup::Kernel).unwrap();
    let disk = volume.join("part/disk");
    mount(Some("tmpfs"), &disk, Some("tmpfs"), MsFlags::empty(), none).unwrap();
    fs::write(disk.join("user"), "data").unwrap();
    assert!(at.join("disk/user").exists(), "it was propagated");
    clean(&world.root(), &uid()).unwrap();
    assert_eq!(fs::read_to_string(disk.join("user")).unwrap(), "data");
    assert!(!dir_of(&world.root(), &uid()).exists());
}

/// A foreign mount inside, over or beside a place, and nowhere else, stays and is reported.
#[tokio::test]
async fn what_somebody_mounted_at_a_place_stays_and_keeps_it() {
    let none = None::<&str>;
    let tmpfs = |at: &Path| {
        mount(Some("theirs"), at, Some("tmpfs"), MsFlags::empty(), none).unwrap();
        fs::write(at.join("user"), "data").unwrap();
    };
    for (at, said) in [
        ("v/c/0/inside", "v/c/0/inside is mounted; unmount it first"),
        ("v/c/0", "theirs (tmpfs) is mounted over it"),
        ("v/other", "v/other is mounted; unmount it first"),
    ] {
        let world = World::new();
        // Nothing is propagated, whatever this machine does.
        let dir = world.dir.path();
        mount(Some(dir), dir, none, MsFlags::MS_BIND, none).unwrap();
        mount(none, dir, none, MsFlags::MS_PRIVATE, none).unwrap();
        fs::create_dir_all(world.volume().join("part/inside")).unwrap();
        let store = Store::in_memory(Arc::new(TestClock));
        let manager = world.manager(&store);
        manager
            .sub_path(&uid(), part(&world, 0, "part"))
            .await
            .unwrap();
        manager
            .sub_path(&uid(), part(&world, 1, "part"))
            .await
            .unwrap();
        let stranger = dir_of(&world.root(), &uid()).join(at);
        fs::create_dir_all(&stranger).unwrap();
        tmpfs(&stranger);
        for _ in 0..2 {
            let error = manager.unmount(&uid()).await.unwrap_err();
            let text = crate::volumemanager::chain(&error);
            assert!(text.contains(said), "{text}");
            assert_eq!(fs::read_to_string(stranger.join("user")).unwrap(), "data");
        }
        let place = world.target("1");
        assert_eq!(mounts::at(&place).unwrap(), None, "the others go");
        nix::mount::umount(&stranger).unwrap();
        manager.unmount(&uid()).await.unwrap();
        assert!(!dir_of(&world.root(), &uid()).exists());
        nix::mount::umount2(dir, nix::mount::MntFlags::MNT_DETACH).unwrap();
    }
}

#[test]
fn content_in_place_of_a_place_is_never_removed() {
    let world = World::new();
    let stray = world.target("1");
    fs::create_dir_all(&stray).unwrap();
    fs::write(stray.join("keep"), "user").unwrap();
    assert!(clean(&world.root(), &uid()).is_err());
    assert!(stray.join("keep").exists());
    fs::remove_dir_all(dir_of(&world.root(), &uid())).unwrap();
    symlink(world.outside(), dir_of(&world.root(), &uid())).unwrap();
    assert!(
        clean(&world.root(), &uid()).is_err(),
        "a link in place of the directory"
    );
    assert!(world.outside().join("secret").exists());
}

#[test]
fn paths_are_checked_and_tell_what_is_wrong_with_them() {
    let world = World::new();
    for (path, want) in [
        ("/etc", "error SubPath `/etc` must not be an absolute path"),
        (
            "a/../../b",
            "unable to provision SubPath `a/../../b`: must not contain '..'",
        ),
        (
            "..",
            "unable to provision SubPath `..`: must not contain '..'",
        ),
    ] {
        let error = validate(&part(&world, 0, path)).unwrap_err().to_string();
        assert!(error.starts_with(want), "{error}");
        assert!(
            error.contains("\"v\"") && error.contains("\"c\""),
            "{error}"
        );
    }
    for path in ["a", "..data/key", "a/..b", "a..", "."] {
        validate(&part(&world, 0, path)).unwrap();
    }
}

#[tokio::test]
async fn a_part_is_on_record_until_its_pod_is_unmounted() {
    let world = World::new();
    let store = Store::in_memory(Arc::new(TestClock));
    let manager = world.manager(&store);
    let keys = || {
        let seen = store.snapshot();
        let keys = seen.with_prefix::<crate::core::state::FactRecord>(kinds::SUB_PATHS.prefix);
        keys.map(|(key, _)| key.to_string()).collect::<Vec<_>>()
    };
    let at = manager
        .sub_path(&uid(), part(&world, 0, "a"))
        .await
        .unwrap();
    assert_eq!(at, world.target("0"));
    manager
        .sub_path(&uid(), part(&world, 3, "b"))
        .await
        .unwrap();
    assert_eq!(keys(), ["subpaths/u1/v/c/0", "subpaths/u1/v/c/3"]);
    assert_eq!(world.mounts(), 2);
    // A restarted agent finds them as they are.
    let manager = world.manager(&store);
    manager
        .sub_path(&uid(), part(&world, 0, "a"))
        .await
        .unwrap();
    assert_eq!(world.mounts(), 2);
    let other = PodUid::new("u2");
    manager
        .sub_path(&other, part(&world, 0, "a"))
        .await
        .unwrap();

    symlink(world.outside(), world.volume().join("out")).unwrap();
    let error = manager
        .sub_path(&uid(), part(&world, 4, "out"))
        .await
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "failed to prepare subPath for volumeMount \"v\" of container \"c\": it leads out of the volume, which a link in it may not"
    );
    manager.unmount(&uid()).await.unwrap();
    assert_eq!(keys(), ["subpaths/u2/v/c/0"], "another pod's stays");
    assert_eq!(world.mounts(), 1);
    // On a store that has lost everything, what is mounted is found all the same.
    let empty = Store::in_memory(Arc::new(TestClock));
    world.manager(&empty).unmount(&other).await.unwrap();
    assert_eq!(world.mounts(), 0);
    let left: Vec<_> = fs::read_dir(world.volume()).unwrap().collect();
    assert_eq!(left.len(), 3, "a, b and out: {left:?}");
}

#[test]
fn only_errors_of_storage_that_is_gone_have_a_part_bound_anew() {
    use nix::errno::Errno;
    for gone in [
        Errno::ESTALE,
        Errno::ENOTCONN,
        Errno::ENOENT,
        Errno::EIO,
        Errno::EHOSTDOWN,
    ] {
        assert!(super::places::is_gone(gone), "{gone}");
    }
    for other in [Errno::ELOOP, Errno::EINTR, Errno::EMFILE, Errno::ENOMEM] {
        assert!(!super::places::is_gone(other), "{other}");
    }
}

#[test]
fn a_part_whose_storage_is_gone_is_unmounted_while_it_is_used_and_nothing_else_is() {
    use nix::mount::{MsFlags, mount};
    let dir = tempfile::tempdir().unwrap();
    let (place, none): (PathBuf, Option<&str>) = (dir.path().join("place"), None);
    fs::create_dir(&place).unwrap();
    let tmpfs = || mount(Some("x"), &place, Some("tmpfs"), MsFlags::empty(), none);
    if tmpfs().is_err() {
        return; // Only root may mount.
    }
    let used = fs::File::create(place.join("file")).unwrap();
    super::places::unmount_gone(&place).unwrap();
    assert!(!place.join("file").exists());
    drop(used);
    // Something that somebody mounted over it stays.
    tmpfs().unwrap();
    tmpfs().unwrap();
    assert!(super::places::unmount_gone(&place).is_err());
    for _ in 0..2 {
        nix::mount::umount(&place).unwrap();
    }
}
