//! The sequences of `api_random`, each under a schedule of its own: the store's writer, the runtime and the API server take
//! their time, hang, fail and lose answers, and the agent dies at any step of a commit.
//!
//! Each seed is tried by a process of its own, in which everything that differs from run to run is made the same (`replay.c`), so that a
//! seed that failed fails again, in the same way. `make sim` tries many; these variables say which: `HOLDFAST_SIM_SEEDS=n`
//! how many, or `HOLDFAST_SIM_MINUTES=m` for how long; `HOLDFAST_SIM_FROM=s` the first; `HOLDFAST_SIM_SCHEDULE=s` one alone, in this process.
//! A failure is made smaller: `HOLDFAST_SIM_WITHOUT` then says which steps and which faults it does without.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use holdfast::types::blocking;

use crate::api_random::{STEPS, WIDE, run_on};
use crate::schedule::{Part, Schedule};

/// Without a wish.
const SEEDS: u64 = 12;
/// Seeds that failed once, each for a defect of its own kind.
const FAILED_ONCE: [u64; 8] = [104, 108, 130, 1106, 1115, 1432, 1476, 1795642769085];
/// Of real time, which one schedule may take.
const LIMIT: Duration = Duration::from_secs(600);
/// For making a failure smaller, real time.
const SHRINKING: Duration = Duration::from_secs(120);
/// Names the seed that a process tries.
const SEED: &str = "HOLDFAST_SIM_SCHEDULE";
/// Names what is left out: numbers of steps, and parts of which nothing goes wrong.
const WITHOUT: &str = "HOLDFAST_SIM_WITHOUT";
const TEST: &str = "schedules::whatever_the_schedule_the_wanted_pods_run";

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

fn directory() -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("schedules");
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

/// The library that makes a process the same each time.
fn replay_library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/agent_sim/replay.c");
        let library = directory().join(format!("replay-{}.so", std::process::id()));
        let built = Command::new("cc")
            .args(["-O1", "-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .status()
            .unwrap();
        assert!(built.success(), "cc: {built}");
        library
    })
}

/// What a seed came to.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    /// Of the disk, calls and requests: the agent might have died before each.
    steps: u64,
    /// How often it came to an end.
    ends: u64,
    /// Of all steps.
    digest: String,
}

/// What a seed came to, or where its output is. `without` is what is left out.
fn try_alone(seed: u64, without: &str) -> Result<Told, PathBuf> {
    static TRY: AtomicU64 = AtomicU64::new(0);
    let (process, n) = (std::process::id(), TRY.fetch_add(1, Ordering::Relaxed));
    let output = directory().join(format!("{seed}-{process}-{n}.log"));
    let log = File::create(&output).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", TEST, "--nocapture", "--test-threads=1"])
        .env(SEED, seed.to_string())
        .env(WITHOUT, without)
        .env("HOLDFAST_REPLAY_SEED", seed.to_string())
        .env("LD_PRELOAD", replay_library())
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    let begun = now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > LIMIT {
            child.kill().unwrap();
            child.wait().unwrap();
            return Err(output);
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let text = std::fs::read_to_string(&output).unwrap_or_default();
    let told = text.lines().find_map(|line| {
        let (_, told) = line.split_once("schedule ended after ")?;
        let (steps, told) = told.split_once(" steps and ")?;
        let (ends, digest) = told.split_once(" ends of the agent, ")?;
        Some(Told {
            steps: steps.parse().ok()?,
            ends: ends.parse().ok()?,
            digest: digest.to_owned(),
        })
    });
    match told.filter(|_| status.success()) {
        Some(told) => {
            std::fs::remove_file(&output).unwrap();
            Ok(told)
        }
        None => Err(output),
    }
}

#[expect(clippy::disallowed_methods, reason = "how long to go on, in real time")]
fn now() -> Instant {
    Instant::now()
}

/// What can be left out of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    Step(usize),
    Faults(Part),
}

impl Piece {
    fn all() -> Vec<Self> {
        let faults = Part::ALL.into_iter().map(Self::Faults);
        faults.chain((0..STEPS).map(Self::Step)).collect()
    }

    fn name(self) -> String {
        match self {
            Self::Step(step) => step.to_string(),
            Self::Faults(part) => format!("{part:?}"),
        }
    }
}

fn names(pieces: &[Piece]) -> String {
    let names: Vec<String> = pieces.iter().map(|piece| piece.name()).collect();
    names.join(",")
}

fn try_here(seed: u64) {
    blocking::run_in_place_on_this_thread();
    let without = std::env::var(WITHOUT).unwrap_or_default();
    let mut pieces = Piece::all();
    pieces.retain(|piece| without.split(',').any(|name| name == piece.name()));
    let mut parts = BTreeSet::new();
    let mut steps = BTreeSet::new();
    for piece in pieces {
        match piece {
            Piece::Step(step) => drop(steps.insert(step)),
            Piece::Faults(part) => drop(parts.insert(part)),
        }
    }
    let schedule = Schedule::sparing(seed, parts);
    run_on(seed, Some(schedule.clone()), &steps);
    let (steps, digest) = schedule.trace();
    let ends = schedule.ends();
    println!("schedule ended after {steps} steps and {ends} ends of the agent, {digest}");
}

/// Leaves out of a failure what it does not need: halves of what is left first, then ever smaller parts. Returns what was left out, and
/// the output of the last failure.
fn shrink(seed: u64, mut output: PathBuf) -> (String, PathBuf) {
    let all = Piece::all();
    let without = |needed: &[Piece]| {
        let mut rest = all.clone();
        rest.retain(|piece| !needed.contains(piece));
        names(&rest)
    };
    let mut needed = all.clone();
    let begun = now();
    let mut size = needed.len() / 2;
    while size > 0 {
        let mut at = 0;
        while at < needed.len() && begun.elapsed() < SHRINKING {
            let mut fewer = needed.clone();
            fewer.drain(at..(at + size).min(needed.len()));
            match try_alone(seed, &without(&fewer)) {
                Ok(_) => at += size,
                Err(smaller) => {
                    std::fs::remove_file(&output).unwrap();
                    (needed, output) = (fewer, smaller);
                }
            }
        }
        size /= 2;
    }
    (without(&needed), output)
}

#[test]
fn whatever_the_schedule_the_wanted_pods_run() {
    if let Some(seed) = number(SEED) {
        try_here(seed);
        return;
    }
    let minutes = number("HOLDFAST_SIM_MINUTES");
    let most = if minutes.is_some() { u64::MAX } else { SEEDS };
    let most = number("HOLDFAST_SIM_SEEDS").unwrap_or(most);
    let first = number("HOLDFAST_SIM_FROM").unwrap_or(WIDE);
    let limit = minutes.map(|minutes| Duration::from_secs(60 * minutes));
    let begun = now();
    let (next, tried) = (AtomicU64::new(0), AtomicU64::new(0));
    let (steps, ends) = (AtomicU64::new(0), AtomicU64::new(0));
    let failed = Mutex::new(Vec::new());
    let work = || {
        while limit.is_none_or(|limit| begun.elapsed() < limit) {
            let n = next.fetch_add(1, Ordering::Relaxed);
            if n >= most {
                return;
            }
            let seed = first + n;
            match try_alone(seed, "") {
                Ok(told) => {
                    steps.fetch_add(told.steps, Ordering::Relaxed);
                    ends.fetch_add(told.ends, Ordering::Relaxed);
                }
                Err(output) => {
                    println!("{SEED}={seed} fails: {}", output.display());
                    let (without, output) = shrink(seed, output);
                    println!(
                        "{SEED}={seed} {WITHOUT}={without} fails: {}",
                        output.display()
                    );
                    failed.lock().unwrap().push(seed);
                }
            }
            tried.fetch_add(1, Ordering::Relaxed);
        }
    };
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(work);
        }
    });
    let failed = failed.into_inner().unwrap();
    println!(
        "{} schedules from seed {first} on, {} steps, {} ends of the agent, in {:.0?}; {} failed",
        tried.into_inner(),
        steps.into_inner(),
        ends.into_inner(),
        begun.elapsed(),
        failed.len()
    );
    assert!(failed.is_empty(), "seeds {failed:?}");
}

#[test]
fn seeds_that_failed_once_do_so_no_more() {
    let failed: Vec<u64> = FAILED_ONCE
        .into_iter()
        .filter(|seed| try_alone(*seed, "").is_err())
        .collect();
    assert!(failed.is_empty(), "{SEED}={failed:?}");
}

#[test]
fn a_seed_takes_the_same_steps_each_time() {
    for seed in [7, WIDE + 7, WIDE + 8] {
        let first = try_alone(seed, "").unwrap();
        assert!(first.steps > 500 && first.ends > 0, "{first:?}");
        assert_eq!(try_alone(seed, "").unwrap(), first);
    }
}
