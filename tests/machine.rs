//! The agent on a whole machine, which boots, reboots and loses power: Debian 12 with systemd and pure cgroup v2 under QEMU, with
//! the package of this tree. Each test is one story, told from outside: by the files that containers write, by those of
//! the kernel, and by what the API server is told.
//!
//! `make vmtest` runs them, one at a time; `make vmtest NAME=… KEEP=1` runs one and leaves a shell in its machine.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    unreachable_pub,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "machines live in real time")]

#[path = "machine/cgroups.rs"]
mod cgroups;
#[path = "machine/clock.rs"]
mod clock;
#[path = "machine/damage.rs"]
mod damage;
#[path = "machine/devices.rs"]
mod devices;
#[path = "machine/images.rs"]
mod images;
#[path = "machine/kubeadm.rs"]
mod kubeadm;
#[path = "machine/late.rs"]
mod late;
#[path = "machine/node.rs"]
mod node;
#[path = "machine/numa.rs"]
mod numa;
#[path = "machine/package.rs"]
mod package;
#[path = "machine/power.rs"]
mod power;
#[path = "machine/pressure.rs"]
mod pressure;
#[path = "machine/reboot.rs"]
mod reboot;
#[path = "machine/registry.rs"]
mod registry;
#[path = "machine/remote.rs"]
mod remote;
#[path = "machine/restart.rs"]
mod restart;
#[path = "machine/shutdown.rs"]
mod shutdown;
#[path = "machine/upgrade.rs"]
mod upgrade;
#[path = "machine/year_off.rs"]
mod year_off;
