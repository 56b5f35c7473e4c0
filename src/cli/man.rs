//! `holdfast man`.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Command};

use super::output::{print, print_bytes};

#[derive(Clone, Debug, Args)]
pub(super) struct ManArgs {
    /// Write a page for every command into this directory instead of printing the first one
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub(super) fn run(args: &ManArgs, command: Command) -> anyhow::Result<()> {
    let Some(dir) = &args.dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command)
            .render(&mut page)
            .context("render the manual page")?;
        return print_bytes(&page);
    };
    std::fs::create_dir_all(dir).with_context(|| format!("create directory {}", dir.display()))?;
    clap_mangen::generate_to(command, dir)
        .with_context(|| format!("write manual pages to {}", dir.display()))?;
    print(&format!("manual pages are in {}\n", dir.display()))
}
