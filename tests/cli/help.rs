//! What the binary says of itself.

use crate::world::*;

#[test]
fn help_lists_every_command_and_every_table() {
    let help = stdout_of(&["--help"]);
    for command in [
        "run",
        "dump",
        "backup",
        "restore",
        "store",
        "keys",
        "version",
        "completions",
        "man",
    ] {
        assert!(
            help.contains(&format!("\n  {command} ")),
            "{command} missing in\n{help}"
        );
    }
    let help = stdout_of(&["dump", "--help"]).replace('\n', " ");
    for table in holdfast::core::state::Table::ALL {
        assert!(
            help.contains(table.name()),
            "{} missing in\n{help}",
            table.name()
        );
    }
    let bare = run(&[]);
    assert_eq!(bare.status.code(), Some(2));
    assert!(text(&bare.stderr).contains("Usage: holdfast <COMMAND>"));
}

#[test]
fn version_completions_and_manual_pages_are_made() {
    assert_eq!(
        stdout_of(&["version"]),
        concat!("holdfast ", env!("CARGO_PKG_VERSION"), "\n")
    );
    let version = json_of(&["version", "-o", "json"]);
    assert_eq!(version["schema"], 1);
    assert_eq!(version["recordVersions"]["pods"], 1);
    for shell in ["bash", "zsh", "fish"] {
        assert!(
            stdout_of(&["completions", shell]).contains("dump"),
            "{shell}"
        );
    }
    assert!(stdout_of(&["man"]).contains(".TH holdfast"));
    let dir = tempfile::tempdir().unwrap();
    stdout_of(&["man", "--dir", dir.path().to_str().unwrap()]);
    for page in ["holdfast.1", "holdfast-dump.1", "holdfast-store-verify.1"] {
        assert!(dir.path().join(page).exists(), "{page}");
    }
}
