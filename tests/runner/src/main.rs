//! Runs the tests of holdfast on top of `cargo nextest`; `make test` and `make quick` call it.
//!
//! ```text
//! test-runner run [--no-cluster] [--scope EXPRESSION] [ARGUMENTS OF cargo nextest run]...
//!     all tests on clean ground, failed ones of real parts a second time, a table, one line that counts
//! test-runner sweep
//!     remove what killed runs left behind
//! test-runner guard PROGRAM [ARGUMENTS]...
//!     one test, in a directory of its own; nextest calls this
//! ```

mod ground;
mod guard;
mod records;
mod report;
mod results;
mod run;

use std::ffi::OsString;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let action = arguments.next().unwrap_or_default();
    let rest: Vec<OsString> = arguments.collect();
    let done = match action.to_str() {
        Some("run") => run::run(&rest),
        Some("guard") => guard::guard(&rest),
        Some("sweep") => {
            report::print_found("removed", &ground::sweep());
            Ok(ExitCode::SUCCESS)
        }
        _ => Err(anyhow::anyhow!(
            "usage: test-runner run [ARGUMENTS OF cargo nextest run]... | sweep | guard PROGRAM [ARGUMENTS]..."
        )),
    };
    done.unwrap_or_else(|error| {
        eprintln!("test-runner: {error:#}");
        ExitCode::from(2)
    })
}
