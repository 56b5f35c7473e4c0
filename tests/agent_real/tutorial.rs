//! The tutorial, command by command, on real containerd.
//!
//! Its output is compared with what the page shows: the same lines, in any order, with the same words, where a word with a digit
//! or an ellipsis stands for any. `HOLDFAST_UPDATE_DOCS=1` writes the real output into the page.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use holdfast_testkit::containerd::Version;

use crate::agent_process::free_port;
use crate::world::{FOREVER, World};

const PAGE: &str = "docs/tutorial.md";
/// Printed between the outputs of two blocks.
const BETWEEN: &str = "---- next block ----";

/// A fenced block of the page that is run, with the output that follows it.
struct Step {
    commands: String,
    /// Lines of the page's output block: its first, and the one behind its last. None: the page shows no output.
    shown: Option<(usize, usize)>,
}

/// Returns the blocks of commands in order, without those that are marked as not run.
fn steps(page: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let lines: Vec<&str> = page.lines().collect();
    let mut at = 0;
    while let Some(&line) = lines.get(at) {
        let Some(language) = line.strip_prefix("```") else {
            at += 1;
            continue;
        };
        let begin = at + 1;
        let length = lines[begin..]
            .iter()
            .position(|line| *line == "```")
            .expect("a block ends");
        let end = begin + length;
        let marked = at > 0 && lines[at - 1].starts_with("<!-- not run: ");
        match language {
            "sh" if !marked => steps.push(Step {
                commands: lines[begin..end].join("\n"),
                shown: None,
            }),
            "" => steps.last_mut().expect("commands before output").shown = Some((begin, end)),
            _ => assert!(marked, "line {at}: neither run nor marked: {language}"),
        }
        at = end + 1;
    }
    steps
}

/// What must be the same in two runs.
fn words(line: &str) -> String {
    let varies = |word: &str| word.contains('…') || word.chars().any(|c| c.is_ascii_digit());
    let words = line.split_whitespace();
    let words: Vec<&str> = words.map(|w| if varies(w) { "#" } else { w }).collect();
    words.join(" ")
}

#[test]
fn tutorial_runs_as_written() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join(PAGE)).unwrap();
    let steps = steps(&page);
    assert!(steps.len() >= 8, "{}", steps.len());

    // The directories, the cgroup and the port of this test for those of the page. Longer ones first.
    let world = World::new(Version::Installed);
    let port = free_port().to_string();
    let places = [
        (
            "/tmp/holdfast-tutorial/containerd",
            world.runtime.dir().display().to_string(),
        ),
        ("/tmp/holdfast-tutorial", world.dir().display().to_string()),
        ("/holdfast-tutorial", world.cgroup().to_owned()),
        ("20248", port),
    ];
    // Nothing runs on when a command fails.
    let mut script = "set -eu\ntrap 'kill -9 $(jobs -p) 2>/dev/null || true' EXIT\n".to_owned();
    for step in &steps {
        let mut commands = step.commands.clone();
        for (of_page, here) in &places {
            commands = commands.replace(of_page, here);
        }
        script.push_str(&format!("{commands}\necho '{BETWEEN}'\n"));
    }
    let programs = Path::new(env!("CARGO_BIN_EXE_holdfast")).parent().unwrap();
    let path = std::env::var("PATH").unwrap();
    let output = Command::new("timeout")
        .args(["--kill-after=5", "200", "bash", "-c", &script])
        .env("PATH", format!("{}:{path}", programs.display()))
        .env("HOLDFAST_KERNEL", "leave")
        .env_remove("COLUMNS")
        .current_dir(root)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let mut said = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let log = fs::read_to_string(world.dir().join("agent.log")).unwrap_or_default();
    assert!(output.status.success(), "{said}\n{errors}\n{log}");
    for (of_page, here) in &places {
        said = said.replace(here, of_page);
    }
    let outputs: Vec<&str> = said.split(&format!("{BETWEEN}\n")).collect();
    assert_eq!(outputs.len(), steps.len() + 1, "{said}");

    let lines: Vec<&str> = page.lines().collect();
    let mut written: Vec<String> = lines.iter().map(|&line| line.to_owned()).collect();
    let mut wrong = String::new();
    for (step, output) in steps.iter().zip(outputs).rev() {
        let real: Vec<&str> = output.lines().map(str::trim_end).collect();
        let (begin, end) = step.shown.unwrap_or_default();
        let shown = &lines[begin..end];
        // Rows come in the order of UIDs, which differ from run to run.
        let sorted = |lines: &[&str]| {
            let mut lines: Vec<String> = lines.iter().map(|line| words(line)).collect();
            lines.sort_unstable();
            lines
        };
        if sorted(shown) != sorted(&real) {
            wrong = format!(
                "{}\n  is shown as\n{}\n  but prints\n{}\n\n{wrong}",
                step.commands,
                shown.join("\n"),
                real.join("\n")
            );
        }
        if step.shown.is_some() {
            written.splice(begin..end, real.iter().map(|&line| line.to_owned()));
        }
    }
    if std::env::var_os("HOLDFAST_UPDATE_DOCS").is_some() {
        fs::write(root.join(PAGE), written.join("\n") + "\n").unwrap();
    } else {
        assert!(wrong.is_empty(), "{wrong}");
    }
}

/// The mark of blocks whose lines are run here, in any document.
const HERE: &str = "<!-- run by: agent_real tutorial::documented_commands_run_on_a_node -->";

#[test]
fn documented_commands_run_on_a_node() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut documents = vec![root.join("README.md")];
    let pages = fs::read_dir(root.join("docs")).unwrap();
    documents.extend(
        pages
            .map(|page| page.unwrap().path())
            .filter(|path| path.extension().is_some_and(|e| e == "md")),
    );
    let mut commands = Vec::new();
    for document in documents {
        let text = fs::read_to_string(&document).unwrap();
        for block in text.split(HERE).skip(1) {
            let block = block
                .strip_prefix("\n```sh\n")
                .expect("a block after its mark");
            let (lines, _) = block.split_once("\n```").expect("a block ends");
            commands.extend(
                lines
                    .lines()
                    .map(|line| (document.clone(), line.to_owned())),
            );
        }
    }
    assert!(commands.len() > 15, "{}", commands.len());

    let world = World::new(Version::Installed);
    let agent = world.start();
    world.add(&world.pod("web", "Always", &[("main", FOREVER)]));
    world.wait_running("web", "main");
    let dir = world.dir().display();
    let places = [
        ("localhost:10248", format!("localhost:{}", agent.port())),
        ("default/web", "default/web-node1".to_owned()),
        ("/mnt/elsewhere", dir.to_string()),
        ("FILE...", world.manifests().display().to_string()),
        // It would go on for ever.
        (
            "holdfast dump journal --watch",
            "! timeout 2 holdfast dump journal --watch".to_owned(),
        ),
    ];
    let programs = Path::new(env!("CARGO_BIN_EXE_holdfast")).parent().unwrap();
    let path = std::env::var("PATH").unwrap();
    for (number, (document, line)) in commands.into_iter().enumerate() {
        let mut command = line.clone();
        for (written, here) in &places {
            command = command.replace(written, here);
        }
        // A backup replaces no file.
        command = command.replace("FILE", &format!("{dir}/documented-{number}.backup"));
        let output = Command::new("timeout")
            .args(["60", "bash", "-euo", "pipefail", "-c", &command])
            .env("PATH", format!("{}:{path}", programs.display()))
            .env("HOLDFAST_STATE_DIR", world.state_dir())
            .current_dir(world.dir())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(
            output.status.success(),
            "{}: {line}\n{said}",
            document.display()
        );
        assert!(!said.is_empty(), "{}: {line}", document.display());
    }
}
