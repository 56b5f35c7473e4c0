//! `holdfast version`.

use clap::{Args, ValueEnum};
use serde_json::json;

use super::output::print;
use crate::admin::view::API_VERSION;
use crate::core::state::Table;

#[derive(Clone, Debug, Args)]
pub(super) struct VersionArgs {
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// One line
    Text,
    /// An object, with the record versions this binary writes
    Json,
}

pub(super) fn run(args: &VersionArgs) -> anyhow::Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    match args.output {
        Format::Text => print(&format!("holdfast {version}\n")),
        Format::Json => {
            let records: serde_json::Map<_, _> = Table::ALL
                .iter()
                .map(|t| (t.name().to_owned(), json!(t.record_version())))
                .collect();
            let object = json!({
                "apiVersion": API_VERSION,
                "kind": "Version",
                "version": version,
                "os": std::env::consts::OS,
                "arch": std::env::consts::ARCH,
                "schema": super::store::steps().newest(),
                "recordVersions": records,
            });
            print(&format!("{object:#}\n"))
        }
    }
}
