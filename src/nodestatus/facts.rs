//! Reads the properties of the machine from the kernel, and those of the runtime through the CRI, a little at a time.
//!
//! The machine is polled every 10 s, the runtime every minute, its images every minute or after a change. A value that
//! cannot be read keeps its last content.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1;
use k8s_openapi::api::core::v1::{NodeFeatures, NodeRuntimeHandler, NodeRuntimeHandlerFeatures};
use procfs::Current;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::core::devices::Amounts;
use crate::core::node_status::{Facts, Image, Machine, NodeSettings, RuntimeFacts, image_list};
use crate::core::volumes::known::InUse;
use crate::kuberuntime::cri::{CriClient, CriError};
use crate::kuberuntime::node_context::MemorySize;
use crate::types::host_addresses::HostAddresses;
use crate::types::{Event, EventRecorder, EventType, boot};

/// Directory in which the kernel has a directory for each size of huge pages.
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages";
const MACHINE_PERIOD: Duration = Duration::from_secs(10);
const RUNTIME_PERIOD: Duration = Duration::from_secs(60);
/// While the runtime was never reached.
const RUNTIME_RETRY: Duration = Duration::from_secs(1);
/// A look that takes longer is given up; the last one counts.
const PATIENCE: Duration = Duration::from_secs(2);

/// Publishes [`Facts`]; the first once the machine was read and the runtime was asked.
pub(super) struct FactsTask {
    pub(super) settings: NodeSettings,
    pub(super) addresses: HostAddresses,
    pub(super) root_dir: PathBuf,
    pub(super) boot_id: String,
    pub(super) cri: CriClient,
    pub(super) recorder: Arc<dyn EventRecorder>,
    pub(super) images: Arc<Notify>,
    pub(super) volumes_in_use: watch::Receiver<Option<InUse>>,
    pub(super) devices: watch::Receiver<Amounts>,
    pub(super) facts: watch::Sender<Option<Facts>>,
}

impl FactsTask {
    pub(super) async fn run(mut self) {
        let mut facts = Facts::default();
        let mut runtime_due = Instant::now();
        let mut images_due = runtime_due;
        let mut address_error = String::new();
        let mut disk_checked = false;
        loop {
            self.machine(&mut facts).await;
            match self.addresses.find() {
                Ok(found) => {
                    facts.addresses = found;
                    address_error.clear();
                }
                Err(error) => {
                    if error != address_error {
                        warn!(
                            error,
                            "cannot read the node's addresses, keeping the last ones"
                        );
                    }
                    address_error = error;
                }
            }
            facts.volumes_in_use = self.volumes_in_use.borrow_and_update().clone();
            facts.devices = self.devices.borrow_and_update().clone();
            let now = Instant::now();
            if now >= runtime_due
                && let Some(runtime) = told("version", runtime(&self.cri)).await
            {
                facts.runtime = Some(runtime);
                runtime_due = now + RUNTIME_PERIOD;
            }
            if now >= images_due
                && let Some(images) = told("images", images(&self.cri)).await
            {
                let list = image_list(images, self.settings.max_images);
                if facts.images.as_deref() != Some(&list) {
                    facts.images = Some(Arc::new(list));
                }
                images_due = now + RUNTIME_PERIOD;
            }
            if !disk_checked && facts.runtime.is_some() {
                disk_checked = true;
                self.check_image_disk().await;
            }
            self.facts.send_if_modified(|known| {
                let changed = known.as_ref() != Some(&facts);
                *known = Some(facts.clone());
                changed
            });
            let pause = if facts.runtime.is_some() {
                MACHINE_PERIOD
            } else {
                RUNTIME_RETRY
            };
            tokio::select! {
                // All are cancel-safe.
                () = tokio::time::sleep(pause) => {}
                () = self.images.notified() => images_due = Instant::now(),
                changed = self.volumes_in_use.changed() => if changed.is_err() {
                    // Nobody tells any more.
                    tokio::time::sleep(pause).await;
                },
                changed = self.devices.changed() => if changed.is_err() {
                    tokio::time::sleep(pause).await;
                },
            }
        }
    }

    async fn machine(&self, facts: &mut Facts) {
        let (root_dir, boot_id) = (self.root_dir.clone(), self.boot_id.clone());
        let known = facts.machine.memory.map(|memory| MemorySize {
            memory,
            swap: facts.machine.swap.unwrap_or(0),
        });
        let look = crate::types::blocking::run(move || machine(&root_dir, &boot_id, known));
        match tokio::time::timeout(PATIENCE, look).await {
            Ok(Ok(machine)) => {
                let known = std::mem::replace(&mut facts.machine, machine);
                if facts.machine.ephemeral_storage.is_none() {
                    facts.machine.ephemeral_storage = known.ephemeral_storage;
                }
            }
            Ok(Err(error)) => warn!(%error, "cannot read the machine's properties"),
            Err(_) => warn!("reading the machine's properties takes too long: a disk hangs"),
        }
    }

    /// Upstream tells of an image file system without a size when its garbage collection starts.
    async fn check_image_disk(&self) {
        let Some(info) = told("image file system", self.cri.image_fs_info()).await else {
            return;
        };
        let named = info
            .image_filesystems
            .first()
            .and_then(|f| f.fs_id.as_ref());
        let Some(mount) = named.filter(|id| !id.mountpoint.is_empty()) else {
            let text = "the container runtime reports no file system of images: evictionHard and evictionSoft of imagefs.available and \
                        imagefs.inodesFree are not checked, and no image is removed for space";
            warn!("{text}");
            let reason = "InvalidDiskCapacity";
            self.recorder
                .record(Event::node(EventType::Warning, reason, text));
            return;
        };
        let mount = PathBuf::from(&mount.mountpoint);
        let size = crate::types::blocking::run(move || storage(&mount)).await;
        if matches!(size, Ok(Some(0))) {
            self.recorder.record(Event::node(
                EventType::Warning,
                "InvalidDiskCapacity",
                "invalid capacity 0 on image filesystem",
            ));
        }
    }
}

/// Returns the runtime's answer, if it came in time.
async fn told<T>(what: &str, call: impl Future<Output = Result<T, CriError>>) -> Option<T> {
    match tokio::time::timeout(PATIENCE, call).await {
        Ok(Ok(answer)) => Some(answer),
        Ok(Err(error)) => {
            debug!(what, %error, "the runtime answers with an error");
            None
        }
        Err(_) => {
            debug!(what, "the runtime does not answer in time");
            None
        }
    }
}

async fn runtime(cri: &CriClient) -> Result<RuntimeFacts, CriError> {
    let version = cri.version().await?;
    let status = cri.status(false).await?;
    let handler = |handler: v1::RuntimeHandler| NodeRuntimeHandler {
        name: Some(handler.name),
        features: handler.features.map(|f| NodeRuntimeHandlerFeatures {
            recursive_read_only_mounts: Some(f.recursive_read_only_mounts),
            user_namespaces: Some(f.user_namespaces),
        }),
    };
    let mut handlers: Vec<_> = status.runtime_handlers.into_iter().map(handler).collect();
    // A runtime tells them in any order.
    handlers.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(RuntimeFacts {
        version: format!("{}://{}", version.runtime_name, version.runtime_version),
        handlers,
        features: status.features.map(|f| NodeFeatures {
            supplemental_groups_policy: Some(f.supplemental_groups_policy),
        }),
    })
}

async fn images(cri: &CriClient) -> Result<Vec<Image>, CriError> {
    let listed = cri.list_images(None).await?;
    let image = |image: v1::Image| Image {
        digests: image.repo_digests,
        tags: image.repo_tags,
        size: image.size,
    };
    Ok(listed.into_iter().map(image).collect())
}

/// Identity of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// `/etc/machine-id`.
    pub machine_id: String,
    /// The firmware's.
    pub system_uuid: String,
    /// Release of the kernel.
    pub kernel_version: String,
    /// Name of the operating system.
    pub os_image: String,
}

/// Returns the identity of this machine. Blocking, for some small files.
pub fn identity() -> Identity {
    let machine_id = boot::machine_id();
    let kernel_version = nix::sys::utsname::uname()
        .map(|name| name.release().to_string_lossy().into_owned())
        .unwrap_or_default();
    Identity {
        system_uuid: system_uuid().unwrap_or_else(|| machine_id.clone()),
        machine_id,
        kernel_version,
        os_image: os_image(&os_release(Path::new("/"))),
    }
}

/// Returns the size of the machine's memory and swap: as `/proc/meminfo` shows it, else the `known` one, else as sysinfo(2)
/// does, which knows no limits of a container. Blocking, shortly.
pub fn memory_size(known: Option<MemorySize>) -> Option<MemorySize> {
    let by_call = || {
        let info = nix::sys::sysinfo::sysinfo().ok()?;
        Some(MemorySize {
            memory: info.ram_total(),
            swap: info.swap_total(),
        })
    };
    first_size([&|| read_memory().ok(), &|| known, &by_call])
}

/// Reads the size of the machine's memory and swap in `/proc/meminfo`. Blocking, shortly.
///
/// # Errors
/// When the file cannot be read, as that of a container whose lxcfs is gone, or lacks a size.
pub fn read_memory() -> Result<MemorySize, procfs::ProcError> {
    let info = procfs::Meminfo::current()?;
    Ok(MemorySize {
        memory: info.mem_total,
        swap: info.swap_total,
    })
}

/// Returns the first size that is one: no machine has 0 bytes.
fn first_size(sources: [&dyn Fn() -> Option<MemorySize>; 3]) -> Option<MemorySize> {
    let mut sizes = sources.into_iter().filter_map(|source| source());
    sizes.find(|size| size.memory > 0)
}

/// Reads what the kernel knows. `known` is the size of the memory as it was last read. Blocking.
pub(super) fn machine(root_dir: &Path, boot_id: &str, known: Option<MemorySize>) -> Machine {
    let size = memory_size(known);
    let identity = identity();
    Machine {
        cpus: cpus(),
        memory: size.map(|size| size.memory),
        swap: size.map(|size| size.swap),
        hugepages: huge_pages(),
        ephemeral_storage: storage(root_dir),
        system_uuid: identity.system_uuid,
        machine_id: identity.machine_id,
        boot_id: boot_id.to_owned(),
        kernel_version: identity.kernel_version,
        os_image: identity.os_image,
    }
}

/// Cores of the machine.
pub fn cpus() -> u64 {
    let counted = std::fs::read("/proc/cpuinfo").map(|text| cpus_in(&text));
    let counted = counted.ok().filter(|n| *n > 0);
    let count = counted.or_else(|| {
        let count = std::thread::available_parallelism();
        count.ok().map(std::num::NonZero::get)
    });
    count.and_then(|n| u64::try_from(n).ok()).unwrap_or(1)
}

/// Counts the processors that `/proc/cpuinfo` lists. Its form depends on the architecture: `processor : 0` on most,
/// `processor 0: version = …` on s390x.
fn cpus_in(cpuinfo: &[u8]) -> usize {
    let text = String::from_utf8_lossy(cpuinfo);
    let keys = text.lines().filter_map(|line| line.split_once(':'));
    let is_processor = |key: &str| {
        let number = key.trim().strip_prefix("processor").map(str::trim);
        number.is_some_and(|n| n.is_empty() || n.bytes().all(|b| b.is_ascii_digit()))
    };
    keys.filter(|(key, _)| is_processor(key)).count()
}

/// Total size in bytes of the file system of `path`.
fn storage(path: &Path) -> Option<u64> {
    match nix::sys::statvfs::statvfs(path) {
        Ok(found) => Some(found.blocks().saturating_mul(found.fragment_size())),
        Err(error) => {
            warn!(path = %path.display(), %error, "cannot read the size of a file system");
            None
        }
    }
}

/// Returns the bytes in huge pages by the size of a page. Blocking, shortly.
pub fn huge_pages() -> BTreeMap<u64, u64> {
    hugepages(Path::new(HUGE_PAGES))
}

/// `hugepages-2048kB/nr_hugepages` and the like.
fn hugepages(dir: &Path) -> BTreeMap<u64, u64> {
    let Ok(entries) = fs::read_dir(dir) else {
        return BTreeMap::new();
    };
    let size = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let kib: u64 = (name.strip_prefix("hugepages-")?.strip_suffix("kB")?)
            .parse()
            .ok()?;
        let count = fs::read_to_string(entry.path().join("nr_hugepages")).ok()?;
        let count: u64 = count.trim().parse().ok()?;
        let bytes = kib.checked_mul(1024)?;
        Some((bytes, bytes.checked_mul(count)?))
    };
    entries.flatten().filter_map(size).collect()
}

fn system_uuid() -> Option<String> {
    const FILES: [&str; 4] = [
        "/sys/class/dmi/id/product_uuid",
        "/proc/device-tree/system-id",
        "/proc/device-tree/vm,uuid",
        "/etc/machine-id",
    ];
    FILES.iter().find_map(|path| {
        let text = fs::read_to_string(path).ok()?;
        let text = text.trim_matches(['\0', '\n', ' ']);
        (!text.is_empty()).then(|| text.to_owned())
    })
}

/// The content of os-release. A system that keeps `/etc` for changes of its own has it below `/usr`.
fn os_release(root: &Path) -> String {
    ["etc/os-release", "usr/lib/os-release"]
        .iter()
        .find_map(|file| fs::read(root.join(file)).ok())
        .map(|text| String::from_utf8_lossy(&text).into_owned())
        .unwrap_or_default()
}

/// `PRETTY_NAME` of os-release.
fn os_image(os_release: &str) -> String {
    let name = |line: &str| {
        let name = line.strip_prefix("PRETTY_NAME=")?.trim();
        Some(name.trim_matches(['"', '\'']).to_owned())
    };
    let found = os_release.lines().find_map(name);
    found.unwrap_or_else(|| "Linux".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_this_runs_on_has_a_size_and_a_name() {
        let machine = machine(Path::new("/"), "boot", None);
        assert!(machine.cpus > 0 && machine.memory.is_some_and(|bytes| bytes > 1 << 20));
        assert!(machine.ephemeral_storage.is_some_and(|bytes| bytes > 0));
        assert!(!machine.kernel_version.is_empty() && !machine.os_image.is_empty());
        assert_eq!(machine.boot_id, "boot");
    }

    #[test]
    fn processors_are_counted_as_each_architecture_lists_them() {
        let x86 =
            "processor\t: 0\nmodel name\t: X processor: 9\n\nprocessor\t: 1\ncore id\t\t: 1\n";
        let arm = "processor\t: 0\nBogoMIPS\t: 108.00\n\nprocessor\t: 1\n\nHardware\t: BCM2835\nModel\t\t: Pi\n";
        let s390x = "vendor_id       : IBM/S390\n# processors    : 2\n\
                     processor 0: version = FF,  machine = 8561\nprocessor 1: version = FF\n\n\
                     cpu number      : 0\ncpu number      : 1\n";
        let loongarch =
            "system type\t\t: generic\n\nprocessor\t\t: 0\npackage\t: 0\n\nprocessor\t\t: 1\n";
        for text in [x86, arm, s390x, loongarch] {
            assert_eq!(cpus_in(text.as_bytes()), 2, "{text}");
        }
        assert_eq!(cpus_in(b"Processor\t: ARMv7 \xff\n"), 0);
    }

    #[test]
    fn a_size_that_cannot_be_read_or_is_0_stays_the_last_one() {
        let of = |memory: u64| Some(MemorySize { memory, swap: 1 });
        for (read, known, called, wanted) in [
            (of(4), of(2), of(8), of(4)),
            (None, of(2), of(8), of(2)),
            (of(0), of(2), of(8), of(2)),
            (None, None, of(8), of(8)),
            (None, of(0), of(0), None),
        ] {
            assert_eq!(first_size([&|| read, &|| known, &|| called]), wanted);
        }
        assert!(memory_size(None).is_some());
    }

    #[test]
    fn huge_pages_are_counted_in_bytes() {
        let dir = tempfile::tempdir().unwrap();
        for (name, count) in [("hugepages-2048kB", "3\n"), ("hugepages-1048576kB", "0")] {
            let dir = dir.path().join(name);
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("nr_hugepages"), count).unwrap();
        }
        let found = hugepages(dir.path());
        assert_eq!(found, BTreeMap::from([(2 << 20, 6 << 20), (1 << 30, 0)]));
    }

    #[test]
    fn the_name_of_the_distribution_is_read_without_its_quotes() {
        let name = os_image("NAME=x\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n");
        assert_eq!(name, "Debian GNU/Linux 12 (bookworm)");
        assert_eq!(os_image(""), "Linux");
    }

    #[test]
    fn os_release_is_found_below_usr_where_etc_has_none() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(os_release(root.path()), "");
        for dir in ["usr/lib", "etc"] {
            fs::create_dir_all(root.path().join(dir)).unwrap();
            fs::write(root.path().join(dir).join("os-release"), format!("# {dir}")).unwrap();
            assert_eq!(os_release(root.path()), format!("# {dir}"));
        }
    }
}
