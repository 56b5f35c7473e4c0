//! `holdfast completions`.

use clap::{Args, Command};
use clap_complete::Shell;

use super::output::print_bytes;

#[derive(Clone, Debug, Args)]
pub(super) struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

pub(super) fn run(args: &CompletionsArgs, command: &mut Command) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, "holdfast", &mut script);
    print_bytes(&script)
}
