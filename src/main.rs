//! The `holdfast` binary: everything is in the library's `cli`.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Fail points are set by the environment variables FAILPOINTS and HOLDFAST_DIE_AT.
    #[cfg(feature = "failpoints")]
    let _scenario = fail::FailScenario::setup();
    #[cfg(feature = "failpoints")]
    die_where_told();
    holdfast::cli::main()
}

/// For crash tests: `HOLDFAST_DIE_AT=<fail point>` or `<fail point>:<n>` makes this process kill itself when
/// it comes to that fail point for the first, or n-th, time.
#[cfg(feature = "failpoints")]
fn die_where_told() {
    use std::sync::atomic::{AtomicUsize, Ordering};

    let Ok(text) = std::env::var("HOLDFAST_DIE_AT") else {
        return;
    };
    let numbered = text
        .rsplit_once(':')
        .and_then(|(point, number)| Some((point, number.parse().ok()?)));
    let (point, nth) = numbered.unwrap_or((&text, 1));
    let passed = AtomicUsize::new(0);
    let armed = fail::cfg_callback(point, move || {
        if passed.fetch_add(1, Ordering::Relaxed) + 1 == nth {
            // Nothing of this process runs after it.
            if nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL).is_err() {
                std::process::abort();
            }
        }
    });
    if let Err(error) = armed {
        eprintln!("holdfast: cannot set fail point {point}: {error}");
        std::process::exit(2);
    }
}
