//! Ports for servers that are told theirs.

use std::fs::{self, File, OpenOptions};
use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// First port, and how many: below those that the kernel gives out by itself, so that no connection of anybody has one.
const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;

/// The ports of this process, by the locks on their files.
static HELD: Mutex<Vec<File>> = Mutex::new(Vec::new());
static SERIAL: AtomicU32 = AtomicU32::new(0);

/// A port of 127.0.0.1 that nobody listens on, and that no test is given while this process lives: it stays free while its
/// server is started, or stopped for a while.
///
/// # Panics
/// When the files in the temporary directory by which tests share the ports cannot be made.
pub fn free_port() -> u16 {
    // The same for all tests of the machine, whatever directory they have for themselves.
    let dir = Path::new("/tmp/hf-ports");
    fs::create_dir_all(dir).expect("make the directory of ports in use");
    let mut seed = u64::from(std::process::id()) << 20
        ^ u64::from(SERIAL.fetch_add(1, Ordering::Relaxed)) << 40
        ^ u64::from(jiff::Timestamp::now().subsec_nanosecond().unsigned_abs());
    loop {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let Ok(offset) = u16::try_from((seed >> 33) % u64::from(COUNT)) else {
            continue;
        };
        let port = FIRST + offset;
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(dir.join(port.to_string()))
            .expect("open the file of a port");
        if file.try_lock().is_err() || TcpListener::bind(("127.0.0.1", port)).is_err() {
            continue;
        }
        HELD.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(file);
        return port;
    }
}
