//! What the fuzz programs have in common: the limits of memory and time, and how the slowest input is found.
//!
//! Needs `unsafe` nowhere of its own; `fuzz_target!` does.

use std::alloc::System;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use cap::Cap;
pub use libfuzzer_sys::fuzz_target;
use nix::time::{ClockId, clock_gettime};

/// Most memory that a target may hold at once, bytes. What libFuzzer and C libraries hold does not count.
const MEMORY: usize = 64 << 20;
/// Longest time that an input may take.
const TIME: Duration = Duration::from_millis(100);

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, MEMORY);

/// The longest that an input has taken, nanoseconds of processor time. Shorter times than this one are not worth a line.
static SLOWEST: AtomicU64 = AtomicU64::new(1_000_000);

/// Makes a program of the target `holdfast::fuzzing::$name`.
#[macro_export]
macro_rules! program {
    ($name:ident) => {
        $crate::fuzz_target!(|data: &[u8]| $crate::run(holdfast::fuzzing::$name, data));
    };
}

/// Hands `data` to `target`, and panics when that takes too long.
pub fn run(target: fn(&[u8]), data: &[u8]) {
    let took = timed(ClockId::CLOCK_MONOTONIC, target, data);
    if took.as_nanos() <= u128::from(SLOWEST.load(Relaxed)) {
        return;
    }
    // Once more, since the machine may have been busy with something else.
    let took = timed(ClockId::CLOCK_THREAD_CPUTIME_ID, target, data);
    let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
    if SLOWEST.fetch_max(nanos, Relaxed) < nanos {
        eprintln!("slowest input: {} us", took.as_micros());
    }
    assert!(took <= TIME, "the input takes {took:?}, more than {TIME:?}");
}

fn timed(clock: ClockId, target: fn(&[u8]), data: &[u8]) -> Duration {
    let now = || Duration::from(clock_gettime(clock).expect("this clock exists on every Linux"));
    let begun = now();
    target(data);
    now().saturating_sub(begun)
}
