//! What the binary says of itself.

use crate::world::*;

#[test]
fn help_lists_every_command_and_every_table() {
    let help = stdout_of(&["--help"]);
    for command in [
        "run",
        "check",
        "dump",
        "drain-local",
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
    let shown = holdfast::core::state::Table::ALL.iter();
    for table in shown.filter(|table| **table != holdfast::core::state::Table::Facts) {
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
    assert_eq!(version["schema"], holdfast::store::migrate::SCHEMA);
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
    for page in [
        "holdfast.1",
        "holdfast-dump.1",
        "holdfast-drain-local.1",
        "holdfast-store-verify.1",
    ] {
        assert!(dir.path().join(page).exists(), "{page}");
    }
}

/// The binary under another name.
fn linked(name: &str, args: &[&str]) -> std::process::Output {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join(name);
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_holdfast"), &link).unwrap();
    std::process::Command::new(link)
        .args(args)
        .output()
        .unwrap()
}

/// The release in what `kubelet --version` says, as kubeadm reads it: one line, `Kubernetes v` and a semantic version
/// without leading zeros, then anything of `-0-9a-zA-Z_.+`.
fn release(said: &str) -> Option<Vec<u32>> {
    let version = said.trim().strip_prefix("Kubernetes v")?;
    let end = version.find(|c: char| !c.is_ascii_digit() && c != '.');
    let (release, rest) = version.split_at(end.unwrap_or(version.len()));
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.+".contains(c);
    let parts: Option<Vec<u32>> = release.split('.').map(|part| part.parse().ok()).collect();
    parts.filter(|parts| parts.len() == 3 && rest.chars().all(allowed))
}

#[test]
fn under_the_name_kubelet_it_takes_the_kubelets_command_line() {
    let version = linked("kubelet", &["--version"]);
    assert!(version.status.success(), "{}", text(&version.stderr));
    let said = text(&version.stdout);
    assert_eq!(release(said), Some(vec![1, 36, 0]), "{said}");
    assert_eq!(stdout_of(&["run", "--version"]), said, "the same program");
    assert_eq!(
        text(&linked("holdfast", &["version"]).stdout),
        stdout_of(&["version"])
    );

    // As the unit of kubeadm starts it, with a configuration of its own.
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.yaml");
    std::fs::write(
        &config,
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\ncgroupDriver: systemd\n",
    )
    .unwrap();
    let config = format!("--config={}", config.display());
    let given = [
        "--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf",
        "--kubeconfig=/etc/kubernetes/kubelet.conf",
        &config,
        "--container-runtime-endpoint=unix:///var/run/containerd/containerd.sock",
        "--node-ip=192.0.2.1",
        "--validate",
    ];
    let checked = linked("kubelet", &given);
    assert!(checked.status.success(), "{}", text(&checked.stderr));
    assert_eq!(text(&checked.stdout), "the configuration is valid\n");

    let wrong = linked("kubelet", &["--max-pod=1"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(
        text(&wrong.stderr).contains("--max-pods"),
        "{}",
        text(&wrong.stderr)
    );
    let help = linked("kubelet", &["--help"]);
    assert!(text(&help.stdout).contains("Usage: kubelet [OPTIONS]"));
}

/// `holdfast …` in the documents: the line without its comment and what follows the command.
fn documented_commands() -> Vec<String> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pages = vec![root.join("README.md")];
    let entries = std::fs::read_dir(root.join("docs")).unwrap();
    pages.extend(entries.map(|entry| entry.unwrap().path()));
    let mut commands = Vec::new();
    for page in pages {
        if page.extension().is_none_or(|e| e != "md") {
            continue;
        }
        let text = std::fs::read_to_string(page).unwrap();
        for block in text.split("```sh\n").skip(1) {
            let block = block.split("```").next().unwrap_or_default();
            let lines = block.replace("\\\n", " ");
            let lines = lines.lines().map(str::trim_start);
            commands.extend(
                lines
                    .filter(|line| line.starts_with("holdfast "))
                    .map(|line| line.split(['#', '|', '>', ';']).next().unwrap().to_owned()),
            );
        }
    }
    commands
}

#[test]
fn documented_commands_and_flags_exist() {
    let commands = documented_commands();
    assert!(commands.len() > 30, "{}", commands.len());
    for command in commands {
        let words: Vec<&str> = command.split_whitespace().skip(1).collect();
        let depth = if ["store", "keys"].contains(&words[0]) {
            2
        } else {
            1
        };
        let mut asked = words[..depth].to_vec();
        asked.push("--help");
        let help = stdout_of(&asked);
        for word in &words[depth..] {
            let flag = word.split('=').next().unwrap();
            let is_flag = flag.starts_with('-') && flag != "-";
            let ends = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '-');
            let known = help
                .match_indices(flag)
                .any(|(at, _)| ends(&help[at + flag.len()..]));
            assert!(!is_flag || known, "`{command}`: {flag} is not in\n{help}");
        }
    }
}

#[test]
fn flags_may_have_underscores() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.yaml");
    let text = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
    std::fs::write(&config, text).unwrap();
    let config = format!("--config={}", config.display());
    let root = format!("--root_dir={}", dir.path().join("root_dir").display());
    let run_with = |node_ip: &str| run(&["run", "--validate", &config, &root, node_ip]);
    let fine = run_with("--node_ip=192.0.2.1");
    assert!(fine.status.success(), "{}", text_of(&fine));
    let wrong = run_with("--node_ip=192.0.2.1,192.0.2.2");
    assert!(!wrong.status.success());
    let told = text_of(&wrong);
    assert!(
        told.contains("--node-ip") && told.contains("one IPv4 and one IPv6 address"),
        "{told}"
    );
    let unknown = run_with("--node_ipp=192.0.2.1");
    assert_eq!(unknown.status.code(), Some(2), "{}", text_of(&unknown));
}

fn text_of(output: &std::process::Output) -> String {
    format!("{}{}", text(&output.stdout), text(&output.stderr))
}
