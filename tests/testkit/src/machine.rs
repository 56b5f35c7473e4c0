//! A machine of one's own: Debian 12 with systemd, logind, pure cgroup v2 and containerd under QEMU, which emulates the
//! processor and needs no help from the host. It reboots, loses power, and has its clock set.
//!
//! `hack/machine.sh` makes what it boots from. A machine that has booted once is kept as a snapshot in the cache; others
//! resume from it within a second or two. Commands run in the machine over a serial port, so it needs no network.
//!
//! Every write of a machine's disk can be recorded ([`Spec::record`]); [`write_log`] builds the disk as a power cut at any
//! moment could have left it.
//!
//! Calls block. One machine at a time: two on two processors are six times slower.

#![allow(clippy::disallowed_methods, reason = "machines live in real time")]

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::programs::{hack, run};

mod control;
mod disk;
mod qmp;
mod topology;
pub mod write_log;

pub use control::Output;
pub use disk::{Disk, payload};

use control::{Control, connect};
use qmp::Qmp;

/// Eight times what a command takes on a quiet machine.
const PATIENCE: Duration = Duration::from_secs(240);
/// How long a boot may take; nine seconds on a quiet machine.
const BOOT: Duration = Duration::from_secs(240);
/// A machine that has written nothing by then is stuck: it mounts its disk after three seconds.
const STUCK: Duration = Duration::from_secs(90);
const PAUSE: Duration = Duration::from_millis(100);
/// What is emulated. A fifth faster than `max`: programs find fewer vector instructions, which are slow to emulate.
const PROCESSOR: &str = "Nehalem";

/// What all machines boot from: kernel, initrd and the disk with Debian.
#[derive(Clone, Debug)]
pub struct Base {
    dir: PathBuf,
}

impl Base {
    /// Provides it by `hack/machine.sh`, which makes it once.
    ///
    /// # Errors
    /// With the script's words: not root, no QEMU, no space, no kernel.
    pub fn provide() -> io::Result<Self> {
        let output = run(&mut Command::new(hack("machine.sh")))?;
        let said = String::from_utf8_lossy(&output.stdout);
        let dir = said.lines().last().unwrap_or_default();
        Ok(Self {
            dir: PathBuf::from(dir),
        })
    }

    /// The disk as it was made. Never written to.
    pub fn disk(&self) -> Disk {
        Disk::raw(self.dir.join("base.raw"))
    }

    /// A machine of two processors and one GiB that has booted, from the cache. The first caller boots it.
    ///
    /// # Errors
    /// When the machine does not boot or cannot be saved.
    pub fn booted(&self) -> io::Result<Snapshot> {
        let dir = self.dir.join(format!("booted-{PROCESSOR}"));
        let lock = fs::File::create(self.dir.join("booted.lock"))?;
        lock.lock()?;
        if !dir.exists() {
            let new = self.dir.join("booted.new");
            match fs::remove_dir_all(&new) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => fs::create_dir(&new)?,
            }
            let disk = self.disk().overlay(&new.join("disk"))?;
            let mut machine = Machine::boot(self, &Spec::new(disk))?;
            machine.wait_until_up()?;
            machine.save(&new)?;
            fs::rename(&new, &dir)?;
        }
        Ok(Snapshot { dir })
    }
}

/// A machine that was stopped while it ran: its disk and all of its state.
#[derive(Clone, Debug)]
pub struct Snapshot {
    dir: PathBuf,
}

impl Snapshot {
    /// The snapshot that [`Machine::save`] put into `dir`.
    pub fn in_dir(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
        }
    }

    /// The disk at that moment. Never written to; make an overlay.
    pub fn disk(&self) -> Disk {
        Disk::qcow2(self.dir.join("disk"))
    }

    fn state(&self) -> PathBuf {
        self.dir.join("state")
    }
}

/// What a machine is made of.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The disk it boots from and writes to.
    pub disk: Disk,
    /// Processors. A snapshot has two.
    pub cpus: u32,
    /// NUMA nodes, each a socket with its share of processors and memory. A snapshot has one.
    pub numa_nodes: u32,
    /// Memory in MiB. A snapshot has 1024.
    pub memory_mib: u32,
    /// A tar archive that the machine can read: see [`payload`].
    pub payload: Option<PathBuf>,
    /// Where each write and flush of the disk is recorded.
    pub record: Option<PathBuf>,
    /// Further words of the kernel's command line.
    pub kernel: Vec<String>,
    /// Further arguments of QEMU. A snapshot has none.
    pub qemu: Vec<String>,
    /// The time of the machine's clock when it boots, as `-rtc base=` takes it; the host's without it.
    pub clock: Option<String>,
    /// Ports of the host's loopback that lead to ports of the machine.
    pub ports: Vec<(u16, u16)>,
}

impl Spec {
    /// A machine that can be resumed from a snapshot with this disk.
    pub fn new(disk: Disk) -> Self {
        Self {
            disk,
            cpus: 2,
            numa_nodes: 1,
            memory_mib: 1024,
            payload: None,
            record: None,
            kernel: Vec::new(),
            qemu: Vec::new(),
            clock: None,
            ports: Vec::new(),
        }
    }
}

/// A running machine. Dropped, it loses power.
#[derive(Debug)]
pub struct Machine {
    dir: PathBuf,
    process: Child,
    control: Control,
    qmp: Qmp,
}

impl Machine {
    /// Switches a machine on. It takes commands as soon as its first services run; see [`Self::wait_until_up`].
    ///
    /// # Errors
    /// When QEMU does not start, with its words, or the machine does not boot, with the end of its console.
    pub fn boot(base: &Base, spec: &Spec) -> io::Result<Self> {
        let mut machine = Self::start(base, spec, None)?;
        if machine.control.greeting(STUCK).is_ok() {
            return Ok(machine);
        }
        // Seen once in some hundred boots: QEMU emulates, and the kernel does not come as far as its disk. Nothing of what is
        // tested has run then.
        if machine.qmp.disk_operations()?.written == 0 {
            let stuck = machine.where_stuck();
            let said = machine.failure(&format!(
                "has not mounted its disk after {} s, and is switched on once more; {stuck}",
                STUCK.as_secs()
            ));
            eprintln!("{said}");
            drop(machine);
            machine = Self::start(base, spec, None)?;
        }
        machine.greeted()?;
        Ok(machine)
    }

    /// Resumes a machine from a snapshot, whose disk `spec.disk` has to be an overlay of, and sets its clock to the host's.
    ///
    /// # Errors
    /// As [`Self::boot`].
    pub fn resume(base: &Base, snapshot: &Snapshot, spec: &Spec) -> io::Result<Self> {
        let mut machine = Self::start(base, spec, Some(snapshot))?;
        let deadline = Instant::now() + BOOT;
        loop {
            match machine.qmp.status()?.as_str() {
                "inmigrate" if Instant::now() < deadline => std::thread::sleep(PAUSE / 5),
                "inmigrate" => return Err(machine.failure("does not resume")),
                _ => break,
            }
        }
        machine.qmp.execute("cont")?;
        machine.set_clock(SystemTime::now())?;
        Ok(machine)
    }

    fn start(base: &Base, spec: &Spec, snapshot: Option<&Snapshot>) -> io::Result<Self> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let dir =
            std::env::temp_dir().join(format!("hf-test-{}-machine-{serial}", std::process::id()));
        fs::create_dir_all(&dir)?;
        let empty = dir.join("payload");
        fs::File::create(&empty)?.set_len(disk::PAYLOAD_BYTES)?;

        let mut command = Command::new("qemu-system-x86_64");
        command
            .args([
                "-M",
                "q35",
                "-accel",
                "tcg,thread=multi,tb-size=512",
                "-cpu",
                PROCESSOR,
            ])
            .args(topology::arguments(spec))
            .args(["-display", "none", "-no-user-config", "-nodefaults"])
            .arg("-serial")
            .arg(format!("file:{}", dir.join("console").display()))
            .arg("-kernel")
            .arg(base.dir.join("vmlinuz"))
            .arg("-initrd")
            .arg(base.dir.join("initrd.gz"))
            .arg("-append")
            .arg(kernel_line(&spec.kernel))
            .args(disk::arguments(spec, &empty))
            .args(["-device", "virtio-serial-pci", "-chardev"])
            .arg(format!(
                "socket,id=control,path={},server=on,wait=off",
                dir.join("control").display()
            ))
            .args(["-device", "virtserialport,chardev=control,name=control"])
            .args(["-device", "virtio-rng-pci", "-device", "i6300esb", "-qmp"])
            .arg(format!(
                "unix:{},server=on,wait=off",
                dir.join("qmp").display()
            ))
            .args(["-netdev", &network(&spec.ports)])
            .args(["-device", "virtio-net-pci,netdev=net"])
            .args([
                "-rtc",
                &format!("base={}", spec.clock.as_deref().unwrap_or("utc")),
            ])
            .args(&spec.qemu)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(dir.join("stderr"))?);
        if let Some(snapshot) = snapshot {
            command
                .arg("-incoming")
                .arg(format!("exec:cat {}", snapshot.state().display()));
        }
        let mut process = command.spawn().map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("start qemu-system-x86_64: {error}; hack/deps.sh machine installs it"),
            )
        })?;
        let connected = connect(&dir.join("control"), &mut process, BOOT).and_then(|stream| {
            let qmp = connect(&dir.join("qmp"), &mut process, BOOT)?;
            Ok((Control::new(stream), Qmp::new(qmp)?))
        });
        match connected {
            Ok((control, qmp)) => Ok(Self {
                dir,
                process,
                control,
                qmp,
            }),
            Err(error) => {
                let _ = process.kill();
                let _ = process.wait();
                let said = fs::read_to_string(dir.join("stderr")).unwrap_or_default();
                Err(io::Error::other(format!(
                    "qemu-system-x86_64 does not start: {error}: {}",
                    said.trim()
                )))
            }
        }
    }

    /// The directory of this machine on the host: `console` has what its kernel said.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Runs a script in bash, as root, and returns its end.
    ///
    /// # Errors
    /// When the machine does not answer in time, with the end of its console.
    pub fn run(&mut self, script: &str) -> io::Result<Output> {
        self.run_within(script, PATIENCE)
    }

    /// [`Self::run`] with a limit of its own.
    ///
    /// # Errors
    /// As there.
    pub fn run_within(&mut self, script: &str, limit: Duration) -> io::Result<Output> {
        self.control.run(script, limit).map_err(|error| {
            let first = script.trim().lines().next().unwrap_or_default().to_owned();
            self.failure(&format!("does not answer to `{first}`: {error}"))
        })
    }

    /// Runs a script that has to succeed, and returns what it printed, without the space around it.
    ///
    /// # Errors
    /// When it fails, with what it printed, or the machine does not answer.
    pub fn sh(&mut self, script: &str) -> io::Result<String> {
        let output = self.run(script)?;
        if output.code == 0 {
            return Ok(output.text.trim().to_owned());
        }
        Err(io::Error::other(format!(
            "in the machine, exit code {} of:\n{script}\n{}",
            output.code, output.text
        )))
    }

    /// Starts a script and does not wait for it: for what ends the machine.
    ///
    /// # Errors
    /// When the machine is gone.
    pub fn send(&mut self, script: &str) -> io::Result<()> {
        self.control.send(script)
    }

    /// Repeats a script until it succeeds, and returns what it printed then.
    ///
    /// # Errors
    /// When it has not after `limit`; says `what` was waited for and what the script printed last.
    pub fn wait_until(&mut self, what: &str, limit: Duration, script: &str) -> io::Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            let output = self.run(script)?;
            if output.code == 0 {
                return Ok(output.text.trim().to_owned());
            }
            if Instant::now() >= deadline {
                return Err(io::Error::other(format!(
                    "waited {} s in vain until {what}; last:\n{}",
                    limit.as_secs(),
                    output.text
                )));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Waits until systemd has started everything and containerd answers.
    ///
    /// # Errors
    /// When it does not come to that.
    pub fn wait_until_up(&mut self) -> io::Result<()> {
        self.wait_until(
            "the machine is up",
            BOOT,
            "systemctl is-active --quiet containerd multi-user.target && case $(systemctl is-system-running) in running|degraded) ;; *) exit 1; esac",
        )
        .map(drop)
    }

    /// Waits for the first sign of a machine that boots.
    fn greeted(&mut self) -> io::Result<()> {
        self.control.greeting(BOOT).map_err(|error| {
            let stuck = self.where_stuck();
            self.failure(&format!("does not boot: {error}; {stuck}"))
        })
    }

    /// What QEMU says of a machine that does nothing: whether it runs, how often it has read its disk, and, three times, where its
    /// processors are.
    fn where_stuck(&mut self) -> String {
        let status = self.qmp.status().unwrap_or_else(|error| error.to_string());
        let disks = self.qmp.disk_operations().map_or_else(
            |error| error.to_string(),
            |done| {
                format!(
                    "{} reads and {} writes of its disks",
                    done.read, done.written
                )
            },
        );
        let mut text = format!("QEMU: {status}, {disks}");
        for _ in 0..3 {
            let at = self
                .qmp
                .instructions()
                .unwrap_or_else(|error| error.to_string());
            let _ = write!(text, ", processors at {at}");
            std::thread::sleep(PAUSE);
        }
        text
    }

    /// Waits until a machine that reboots takes commands. Unlike [`Self::rebooted`] it does not wait for services: some of them
    /// may be meant not to start.
    ///
    /// # Errors
    /// When it does not boot.
    pub fn switched_on(&mut self) -> io::Result<()> {
        self.greeted()
    }

    /// Waits until a machine that reboots (told by [`Self::send`] or [`Self::reset`]) takes commands again.
    ///
    /// # Errors
    /// When it does not boot.
    pub fn rebooted(&mut self) -> io::Result<()> {
        self.greeted()?;
        self.wait_until_up()
    }

    /// Presses the reset button: nothing is told to the machine.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn reset(&mut self) -> io::Result<()> {
        self.qmp.execute("system_reset")
    }

    /// Sets the machine's clock, and the one in its hardware.
    ///
    /// # Errors
    /// When the machine refuses.
    pub fn set_clock(&mut self, now: SystemTime) -> io::Result<()> {
        let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        self.sh(&format!(
            "date -s @{}.{:03} >/dev/null; hwclock -w 2>/dev/null || true",
            since.as_secs(),
            since.subsec_millis()
        ))
        .map(drop)
    }

    /// Stops the machine's processors; its clocks stand still. [`Self::cont`] goes on.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn stop(&mut self) -> io::Result<()> {
        self.qmp.execute("stop")
    }

    /// Goes on after [`Self::stop`].
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn cont(&mut self) -> io::Result<()> {
        self.qmp.execute("cont")
    }

    /// Plugs the network cable in or pulls it.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn set_link(&mut self, up: bool) -> io::Result<()> {
        self.qmp
            .execute_with("set_link", serde_json::json!({"name": "net", "up": up}))
    }

    /// Unpacks the payload (see [`payload`]) into a directory of the machine.
    ///
    /// # Errors
    /// When the machine cannot.
    pub fn unpack_payload(&mut self, into: &str) -> io::Result<()> {
        // The machine may have read the first blocks before there was anything on them.
        self.sh(&format!(
            "blockdev --flushbufs /dev/vdb && mkdir -p {into} && tar -x -C {into} -f /dev/vdb"
        ))
        .map(drop)
    }

    /// Waits until the machine has switched itself off.
    ///
    /// # Errors
    /// When it does not.
    pub fn powered_off(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + BOOT;
        while self.process.try_wait()?.is_none() {
            if Instant::now() >= deadline {
                return Err(self.failure("does not switch itself off"));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Pulls the plug. What the machine had not flushed is as lost as the host's QEMU makes it: for what a disk may lose,
    /// record the writes and replay them.
    ///
    /// # Errors
    /// When the process cannot be waited for.
    pub fn pull_the_plug(mut self) -> io::Result<()> {
        self.process.kill()?;
        self.process.wait().map(drop)
    }

    /// Saves the machine into `dir`, beside its disk, which has to be `dir/disk`, and ends it.
    ///
    /// # Errors
    /// When QEMU cannot save.
    pub fn save(mut self, dir: &Path) -> io::Result<Snapshot> {
        self.sh("sync; echo 1 >/proc/sys/vm/drop_caches")?;
        self.qmp.execute("stop")?;
        let state = dir.join("state");
        self.qmp.execute_with(
            "migrate",
            serde_json::json!({"uri": format!("exec:cat > {}", state.display())}),
        )?;
        let deadline = Instant::now() + BOOT;
        loop {
            match self.qmp.migration()?.as_str() {
                "completed" => break,
                "failed" => return Err(self.failure("cannot be saved")),
                _ if Instant::now() >= deadline => {
                    return Err(self.failure("takes too long to save"));
                }
                _ => std::thread::sleep(PAUSE / 2),
            }
        }
        self.qmp.execute("quit")?;
        self.process.wait()?;
        Ok(Snapshot::in_dir(dir))
    }

    /// Runs the lines of the standard input in the machine until it ends: what `make vmtest KEEP=1` leaves.
    pub fn shell(&mut self) {
        println!(
            "the machine is up; its console is {}; an empty input (^D) ends it",
            self.dir.join("console").display()
        );
        for line in io::stdin().lines() {
            match line.and_then(|line| self.run(&line)) {
                Ok(output) if output.code == 0 => print!("{}", output.text),
                Ok(output) => println!("{}[exit code {}]", output.text, output.code),
                Err(error) => {
                    println!("{error}");
                    return;
                }
            }
        }
    }

    fn failure(&self, what: &str) -> io::Error {
        let console = fs::read(self.dir.join("console")).unwrap_or_default();
        let console = String::from_utf8_lossy(&console);
        let mut last: Vec<&str> = console.lines().rev().take(15).collect();
        last.reverse();
        let mut text = format!("the machine {what}\nits console ends:\n");
        for line in last {
            let _ = writeln!(text, "  {}", line.trim_end());
        }
        io::Error::other(text)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn kernel_line(further: &[String]) -> String {
    let mut line =
        "console=ttyS0 panic=-1 random.trust_cpu=on mitigations=off systemd.show_status=0 systemd.unified_cgroup_hierarchy=1"
            .to_owned();
    for word in further {
        line.push(' ');
        line.push_str(word);
    }
    line
}

/// The machine reaches the host's loopback at 10.0.2.2, and nothing beyond it that the host does not.
fn network(ports: &[(u16, u16)]) -> String {
    let mut net = "user,id=net".to_owned();
    for (host, guest) in ports {
        let _ = write!(net, ",hostfwd=tcp:127.0.0.1:{host}-10.0.2.15:{guest}");
    }
    net
}
