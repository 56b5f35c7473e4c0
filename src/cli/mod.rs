//! Layer 7: the command line.
//!
//! Owns the command tree, the exit codes and the output of errors. Results go to stdout, everything about
//! the command itself to stderr. The input is the arguments. The output is an exit code: 0 success, 1 failure,
//! 2 wrong usage, 3 not found, 4 and 5 as documented by `holdfast drain-local`.
//!
//! Under the name `kubelet`, of a link for example, the program is `holdfast run`: whoever starts the kubelet needs no
//! wrapper.
//!
//! **Invariant:** a reader that closes stdout early ends a command quietly.
//!
//! **Invariant:** core files of this process are ruled out before any file is read.

mod backup;
mod check;
mod completions;
mod core_files;
mod drain_local;
mod dump;
mod host_name;
mod keys;
pub mod logging;
mod man;
mod offline;
mod output;
mod restore;
pub mod run;
mod store;
mod traces;
mod version;

use std::ffi::{OsStr, OsString};
use std::future::Future;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, CommandFactory, Parser, Subcommand};

use output::StdoutClosed;

/// Most worker threads of the agent, however large the machine is.
const AGENT_THREADS: usize = 4;
/// The name under which the program is the kubelet.
const KUBELET: &str = "kubelet";
/// Exit code of a failure.
const FAILED: u8 = 1;
/// Exit code of a wrong usage; clap's own.
const USAGE: u8 = 2;
/// Exit code when the named object does not exist.
const NOT_FOUND: u8 = 3;
/// Exit code when the time of a drain was over before all pods had ended.
const UNFINISHED: u8 = 4;
/// Exit code when a drain was cancelled.
const CANCELLED: u8 = 5;

#[derive(Debug, Parser)]
#[command(
    name = "holdfast",
    version,
    about = "A Kubernetes node agent that checkpoints every decision to disk and resumes from it",
    after_help = "Exit codes: 0 success, 1 failure, 2 wrong usage, 3 not found.",
    arg_required_else_help = true,
    max_term_width = 100
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the agent
    Run(Box<run::RunArgs>),
    /// Check manifests, configurations and kubeconfigs before this node gets them
    #[command(long_about = check::LONG_HELP)]
    Check(check::CheckArgs),
    /// Show the state that the agent stores, whether it runs or not
    #[command(long_about = dump::LONG_HELP)]
    Dump(dump::DumpArgs),
    /// Stop the pods before the machine shuts down, and wait until they have ended
    #[command(long_about = drain_local::LONG_HELP)]
    DrainLocal(drain_local::DrainLocalArgs),
    /// Write a backup of the store to a file
    Backup(backup::BackupArgs),
    /// Replace the store of a stopped agent with a backup
    #[command(long_about = restore::LONG_HELP)]
    Restore(restore::RestoreArgs),
    /// Verify, repair or convert the store of a stopped agent
    Store(store::StoreArgs),
    /// List, rotate or remove the keys that encrypt secrets on disk
    #[command(long_about = keys::LONG_HELP)]
    Keys(keys::KeysArgs),
    /// Print the version
    Version(version::VersionArgs),
    /// Print a completion script for a shell
    Completions(completions::CompletionsArgs),
    /// Print or write the manual pages
    Man(man::ManArgs),
}

/// The command line of the program under the name `kubelet`.
#[derive(Debug, Parser)]
#[command(
    name = KUBELET,
    about = "Run holdfast as the kubelet; the same as `holdfast run`",
    max_term_width = 100
)]
struct Kubelet {
    #[command(flatten)]
    run: run::RunArgs,
}

/// `--state-dir`
#[derive(Clone, Debug, Args)]
struct StateDir {
    /// Directory of the agent's stored state
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/var/lib/holdfast",
        env = "HOLDFAST_STATE_DIR"
    )]
    state_dir: PathBuf,
}

/// An error that has an exit code of its own.
#[derive(Debug, thiserror::Error)]
enum CliError {
    /// The arguments contradict each other.
    #[error("{0}")]
    Usage(String),
    /// The named object does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The time was over before all pods had ended.
    #[error("{0}")]
    Unfinished(String),
    /// It was cancelled.
    #[error("{0}")]
    Cancelled(String),
}

/// Runs the command of this process' arguments.
pub fn main() -> ExitCode {
    let args = with_dashes(std::env::args_os());
    let command = if is_kubelet(args.first().cloned()) {
        Command::Run(Box::new(Kubelet::parse_from(args).run))
    } else {
        Cli::parse_from(args).command
    };
    match execute(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.downcast_ref::<StdoutClosed>().is_some() => ExitCode::SUCCESS,
        Err(error) => {
            output::note(format_args!("{error:#}"));
            ExitCode::from(exit_code(&error))
        }
    }
}

/// Returns whether the program was started as the kubelet. `program` is its name as it was started, the first argument.
fn is_kubelet(program: Option<OsString>) -> bool {
    program.is_some_and(|program| Path::new(&program).file_name() == Some(OsStr::new(KUBELET)))
}

/// Writes names of flags with dashes where they have underscores: `--node_ip` is `--node-ip`. Values stay as they are. Upstream:
/// `WordSepNormalizeFunc`.
fn with_dashes(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut is_flag = true;
    args.map(|arg| {
        is_flag &= arg != "--";
        let bytes = arg.as_bytes();
        if !is_flag || !bytes.starts_with(b"--") {
            return arg;
        }
        let mut bytes = arg.into_vec();
        let name = bytes.iter_mut().take_while(|byte| **byte != b'=');
        name.filter(|byte| **byte == b'_')
            .for_each(|byte| *byte = b'-');
        OsString::from_vec(bytes)
    })
    .collect()
}

fn exit_code(error: &anyhow::Error) -> u8 {
    match error.downcast_ref::<CliError>() {
        Some(CliError::Usage(_)) => USAGE,
        Some(CliError::NotFound(_)) => NOT_FOUND,
        Some(CliError::Unfinished(_)) => UNFINISHED,
        Some(CliError::Cancelled(_)) => CANCELLED,
        None => FAILED,
    }
}

fn execute(command: Command) -> anyhow::Result<()> {
    core_files::forbid().context("disable core files of this process")?;
    match command {
        Command::Run(args) => {
            // Before there are threads.
            let listener = crate::server::kubelet::inherited::take()
                .context("take the socket passed by systemd")?;
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(agent_threads())
                .enable_all()
                .build()
                .context("start the async runtime")?;
            let result = runtime.block_on(run::run(*args, listener));
            // A name server or a file system that does not answer must not keep the agent from ending: it is made for crashes.
            runtime.shutdown_timeout(LAST_WORK);
            result
        }
        // A client of the API server is made within a runtime.
        Command::Check(args) => block_on(async { check::run(&args) }),
        Command::Dump(args) => block_on(dump::run(args)),
        Command::DrainLocal(args) => block_on(drain_local::run(args)),
        Command::Backup(args) => block_on(backup::run(args)),
        Command::Restore(args) => block_on(restore::run(args)),
        Command::Store(args) => block_on(store::run(args)),
        Command::Keys(args) => block_on(keys::run(args)),
        Command::Version(args) => version::run(&args),
        Command::Completions(args) => completions::run(&args, &mut Cli::command()),
        Command::Man(args) => man::run(&args, Cli::command()),
    }
}

/// Blocking work gets this long to end after the agent has.
const LAST_WORK: Duration = Duration::from_secs(5);

/// Threads of the agent: it waits nearly all of its life, and every thread costs memory.
fn agent_threads() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| cores.get().min(AGENT_THREADS))
}

/// Short commands need one thread only.
fn block_on(command: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the async runtime")?
        .block_on(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_tree_is_consistent() {
        Cli::command().debug_assert();
        Kubelet::command().debug_assert();
    }

    #[test]
    fn only_the_name_of_the_kubelet_makes_one() {
        for (program, kubelet) in [
            ("kubelet", true),
            ("/usr/bin/kubelet", true),
            ("./kubelet", true),
            ("holdfast", false),
            ("/opt/kubelet/holdfast", false),
            ("kubelet-1.36", false),
            ("", false),
        ] {
            assert_eq!(is_kubelet(Some(program.into())), kubelet, "{program}");
        }
        assert!(!is_kubelet(None));
    }

    #[test]
    fn names_of_flags_may_have_underscores() {
        let given = [
            "kubelet",
            "run_it",
            "--node_ip=a_b",
            "--hostname_override",
            "my_node",
            "-v_",
            "--cpu-manager_policy",
            "--",
            "--x_y",
        ];
        let wanted = [
            "kubelet",
            "run_it",
            "--node-ip=a_b",
            "--hostname-override",
            "my_node",
            "-v_",
            "--cpu-manager-policy",
            "--",
            "--x_y",
        ];
        let got = with_dashes(given.iter().map(OsString::from));
        assert_eq!(got, wanted);
        let bytes = OsString::from_vec(b"--log_file=\xff_".to_vec());
        let got = with_dashes([bytes].into_iter());
        assert_eq!(got, [OsString::from_vec(b"--log-file=\xff_".to_vec())]);
        let args = with_dashes(
            ["kubelet", "--node_ip", "192.0.2.1"]
                .map(OsString::from)
                .into_iter(),
        );
        assert!(Kubelet::try_parse_from(args).is_ok());
    }

    #[test]
    fn an_error_keeps_its_exit_code_below_context() {
        let error = anyhow::Error::new(CliError::NotFound("x".into())).context("y");
        assert_eq!(exit_code(&error), NOT_FOUND);
        assert_eq!(exit_code(&anyhow::anyhow!("z")), FAILED);
    }
}
