//! Figures of the machine and of single processes, from `/proc`.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use super::cgroup::psi;
use super::model::{
    Cpu, Descriptors, DeviceNumber, Interface, Memory, Pressure, Swap, Traffic, Usage,
};

const KIB: u64 = 1024;

/// `/proc`, or what stands for it.
#[derive(Clone, Debug)]
pub struct Proc(pub PathBuf);

impl Default for Proc {
    fn default() -> Self {
        Self(PathBuf::from("/proc"))
    }
}

/// Facts that the machine reports about itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Machine {
    /// Boot time, in milliseconds since the Unix epoch.
    pub boot_ms: i64,
    /// CPU, memory, swap, pressure of all of it.
    pub usage: Usage,
    /// Memory in bytes.
    pub memory_capacity: u64,
    /// Swap in bytes.
    pub swap_capacity: u64,
    /// The most processes and threads there may be, and how many there are.
    pub processes: Option<(u64, u64)>,
}

/// One process.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Process {
    /// Start time, in milliseconds since the Unix epoch.
    pub start_ms: i64,
    /// Processor time in nanoseconds: user space, kernel.
    pub cpu_ns: (u64, u64),
    /// Resident memory in bytes.
    pub resident: u64,
    /// Address space in bytes.
    pub virtual_memory: u64,
    /// Page faults, and those that needed a disk.
    pub faults: (u64, u64),
}

impl Process {
    /// As the usage of a group of one.
    pub fn usage(&self, at_ms: i64) -> Usage {
        Usage {
            at_ms,
            cpu: Some(Cpu {
                total_ns: self.cpu_ns.0.saturating_add(self.cpu_ns.1),
                user_ns: Some(self.cpu_ns.0),
                system_ns: Some(self.cpu_ns.1),
                ..Cpu::default()
            }),
            memory: Some(Memory {
                usage: Some(self.resident),
                working_set: Some(self.resident),
                rss: Some(self.resident),
                page_faults: Some(self.faults.0),
                major_page_faults: Some(self.faults.1),
                ..Memory::default()
            }),
            ..Usage::default()
        }
    }
}

impl Proc {
    /// Programs, cgroups and interfaces have any bytes in their names; what else stands in the file counts all the same.
    fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let bytes = fs::read(self.0.join(path)).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The machine as a whole; `None` when `/proc` cannot be read. Blocking, for some system calls.
    pub fn machine(&self, at_ms: i64, full: bool) -> Option<Machine> {
        let memory = self.text("meminfo")?;
        let stat = self.text("stat")?;
        let kib = |key: &str| -> Option<u64> {
            let line = memory.lines().find_map(|l| l.strip_prefix(key))?;
            let number = line.strip_prefix(':')?.split_whitespace().next()?;
            number.parse::<u64>().ok()?.checked_mul(KIB)
        };
        let total = kib("MemTotal")?;
        let used = total.saturating_sub(kib("MemFree").unwrap_or(0));
        let swap_total = kib("SwapTotal").unwrap_or(0);
        let mut usage = Usage {
            at_ms,
            cpu: cpu_of_machine(&stat),
            memory: Some(Memory {
                usage: Some(used),
                working_set: Some(working_set(used, kib)),
                rss: kib("AnonPages"),
                cache: kib("Cached"),
                mapped_file: kib("Mapped"),
                ..Memory::default()
            }),
            swap: Some(Swap {
                usage: swap_total.saturating_sub(kib("SwapFree").unwrap_or(0)),
                limit: Some(swap_total),
            }),
            ..Usage::default()
        };
        let mut processes = None;
        if let (Some(memory), Some(vm)) = (&mut usage.memory, self.text("vmstat")) {
            let count = |key: &str| -> Option<u64> {
                let line = vm.lines().find_map(|l| l.strip_prefix(key))?;
                line.strip_prefix(' ')?.trim().parse().ok()
            };
            memory.page_faults = count("pgfault");
            memory.major_page_faults = count("pgmajfault");
            memory.oom_kills = count("oom_kill");
        }
        if full {
            usage.pressure = Pressure {
                cpu: self.text("pressure/cpu").and_then(|t| psi(&t)),
                memory: self.text("pressure/memory").and_then(|t| psi(&t)),
                io: self.text("pressure/io").and_then(|t| psi(&t)),
            };
            processes = self.processes();
            usage.threads = processes.map(|(_, now)| now);
        }
        Some(Machine {
            boot_ms: boot_ms(&stat)?,
            usage,
            memory_capacity: total,
            swap_capacity: swap_total,
            processes,
        })
    }

    /// The most processes and threads there may be, and how many there are.
    pub(super) fn processes(&self) -> Option<(u64, u64)> {
        let number = |path: &str| self.text(path)?.trim().parse::<u64>().ok();
        let pids = number("sys/kernel/pid_max")?;
        let threads = number("sys/kernel/threads-max").unwrap_or(pids);
        let load = self.text("loadavg")?;
        let (_, now) = load.split_whitespace().nth(3)?.split_once('/')?;
        Some((pids.min(threads), now.parse().ok()?))
    }

    /// The traffic of a process's network namespace, loopback and the node's ends of pods left out.
    pub fn network(&self, pid: u32) -> Option<Vec<Interface>> {
        self.text(format!("{pid}/net/dev")).map(|t| net_dev(&t))
    }

    /// The interface of the default route of a process's network namespace.
    pub fn default_interface(&self, pid: u32) -> Option<String> {
        let table = self.text(format!("{pid}/net/route"))?;
        table.lines().skip(1).find_map(|line| {
            let mut words = line.split_whitespace();
            let name = words.next()?;
            (words.next()? == "00000000").then(|| name.to_owned())
        })
    }

    /// The cgroup of a process in the hierarchy of `controller`, or the unified one.
    pub fn cgroup(&self, pid: u32, controller: Option<&str>) -> Option<String> {
        let table = self.text(format!("{pid}/cgroup"))?;
        table.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            let matches = match controller {
                Some(wanted) => controllers.split(',').any(|c| c == wanted),
                None => controllers.is_empty(),
            };
            matches.then(|| path.to_owned())
        })
    }

    /// A process; `None` when it is gone.
    pub fn process(&self, pid: u32) -> Option<Process> {
        let stat = self.text(format!("{pid}/stat"))?;
        let boot = boot_ms(&self.text("stat")?)?;
        // The name may hold anything, parentheses too.
        let (_, rest) = stat.rsplit_once(") ")?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        let started = i64::try_from(ticks_to_ns(field(22)?) / 1_000_000).ok()?;
        Some(Process {
            start_ms: boot.saturating_add(started),
            cpu_ns: (ticks_to_ns(field(14)?), ticks_to_ns(field(15)?)),
            resident: field(24)?.saturating_mul(procfs::page_size()),
            virtual_memory: field(23)?,
            faults: (field(10)?, field(12)?),
        })
    }

    /// Returns the names of block devices, without `/dev/`.
    pub fn block_devices(&self) -> BTreeMap<DeviceNumber, String> {
        let table = self.text("diskstats").unwrap_or_default();
        let device = |line: &str| {
            let mut words = line.split_whitespace();
            let number: DeviceNumber = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
            Some((number, words.next()?.to_owned()))
        };
        table.lines().filter_map(device).collect()
    }

    /// Counts the open files of a process; `None` when it is gone. Blocking, for a system call per file.
    pub fn descriptors(&self, pid: u32) -> Option<Descriptors> {
        let files = fs::read_dir(self.0.join(format!("{pid}/fd"))).ok()?;
        let mut counted = Descriptors::none();
        for file in files.flatten() {
            count_file(&mut counted, fs::read_link(file.path()));
        }
        Some(counted)
    }

    /// Open file descriptors of this process, and how many it may have.
    pub fn own_descriptors(&self) -> Option<(u64, Option<u64>)> {
        let open = fs::read_dir(self.0.join("self/fd")).ok()?.count();
        let limits = self.text("self/limits").unwrap_or_default();
        let most = limits
            .lines()
            .find_map(|line| line.strip_prefix("Max open files"))
            .and_then(|line| line.split_whitespace().next()?.parse().ok());
        Some((u64::try_from(open).ok()?, most))
    }
}

/// Returns the memory of the machine that cannot be given back at once: as cAdvisor counts that of the root cgroup,
/// with huge pages, which no other process can use. `used` is all that is not free.
fn working_set(used: u64, kib: impl Fn(&str) -> Option<u64>) -> u64 {
    let of = |key: &str| kib(key).unwrap_or(0);
    let (Some(anonymous), Some(cached)) = (kib("AnonPages"), kib("Cached")) else {
        return used.saturating_sub(of("Inactive(file)"));
    };
    // Caches that the kernel counts apart are files of the root cgroup all the same.
    let files = [cached, of("Buffers"), of("SwapCached")];
    let files = files.into_iter().fold(0, u64::saturating_add);
    let files = files.saturating_sub(of("Inactive(file)"));
    let sum = [anonymous, files, of("Hugetlb")];
    let sum = sum.into_iter().fold(0, u64::saturating_add);
    // In a container whose /proc lxcfs serves, some lines are those of the host.
    sum.min(used.saturating_sub(of("Inactive(file)")))
}

/// Counts an open file by what it leads to.
fn count_file(counted: &mut Descriptors, target: io::Result<PathBuf>) {
    counted.open += 1;
    match target {
        Ok(to) if to.as_os_str().as_bytes().starts_with(b"socket:") => {
            counted.sockets = counted.sockets.map(|sockets| sockets + 1);
        }
        // Without CAP_SYS_PTRACE, what files of others lead to is not shown.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => counted.sockets = None,
        _ => {}
    }
}

/// Converts clock ticks of the kernel into nanoseconds.
pub(super) fn ticks_to_ns(ticks: u64) -> u64 {
    let per_second = procfs::ticks_per_second().max(1);
    ticks.saturating_mul(1_000_000_000 / per_second)
}

fn boot_ms(stat: &str) -> Option<i64> {
    let line = stat.lines().find_map(|l| l.strip_prefix("btime "))?;
    line.trim().parse::<i64>().ok()?.checked_mul(1000)
}

/// All but idling, waiting for disks and what the host took. Time of guests is in that of users already.
fn cpu_of_machine(stat: &str) -> Option<Cpu> {
    let line = stat.lines().find_map(|l| l.strip_prefix("cpu "))?;
    let ticks: Vec<u64> = line
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    let at = |index: usize| ticks.get(index).copied().unwrap_or(0);
    let user = at(0).saturating_add(at(1));
    let system = at(2).saturating_add(at(5)).saturating_add(at(6));
    Some(Cpu {
        total_ns: ticks_to_ns(user.saturating_add(system)),
        user_ns: Some(ticks_to_ns(user)),
        system_ns: Some(ticks_to_ns(system)),
        ..Cpu::default()
    })
}

/// Interfaces of `/proc/<pid>/net/dev`.
pub(super) fn net_dev(text: &str) -> Vec<Interface> {
    const IGNORED: [&str; 4] = ["lo", "veth", "docker", "nerdctl"];
    let traffic = |words: &[u64]| Traffic {
        bytes: words.first().copied().unwrap_or(0),
        packets: words.get(1).copied().unwrap_or(0),
        errors: words.get(2).copied().unwrap_or(0),
        dropped: words.get(3).copied().unwrap_or(0),
    };
    let interface = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        let name = name.trim();
        let words: Vec<u64> = rest
            .split_whitespace()
            .map(|word| word.parse().unwrap_or(0))
            .collect();
        if words.len() < 16 || IGNORED.iter().any(|prefix| name.starts_with(prefix)) {
            return None;
        }
        Some(Interface {
            name: name.to_owned(),
            rx: traffic(&words[..8]),
            tx: traffic(&words[8..]),
        })
    };
    text.lines().filter_map(interface).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_that_may_not_be_seen_are_not_counted_as_none() {
        let of = |targets: &[Result<&str, io::ErrorKind>]| {
            let mut counted = Descriptors::none();
            for target in targets {
                let target = target.map(PathBuf::from).map_err(io::Error::from);
                count_file(&mut counted, target);
            }
            (counted.open, counted.sockets)
        };
        let (gone, refused) = (io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied);
        assert_eq!(of(&[Ok("socket:[1]"), Ok("/x"), Err(gone)]), (3, Some(1)));
        assert_eq!(
            of(&[Ok("socket:[1]"), Err(refused), Ok("socket:[2]")]),
            (3, None)
        );
    }

    #[test]
    fn memory_of_the_host_is_not_that_of_a_container() {
        const GIB: u64 = 1 << 30;
        // As lxcfs shows it in a container of 8 GiB on a host with huge pages for other machines.
        let of = |anonymous: u64, huge: u64| {
            working_set(2 * GIB, |key: &str| match key {
                "AnonPages" => Some(anonymous),
                "Cached" => Some(GIB),
                "Inactive(file)" => Some(GIB / 2),
                "Hugetlb" => Some(huge),
                _ => None,
            })
        };
        assert_eq!(of(GIB / 2, 0), GIB);
        assert_eq!(of(GIB, 64 * GIB), 3 * GIB / 2);
        assert_eq!(of(18_014_398_509_000_000 << 10, 0), 3 * GIB / 2);
    }
}
