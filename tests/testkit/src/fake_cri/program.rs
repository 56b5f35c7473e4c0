//! What a container does, told from its configuration.

use std::time::Duration;

use k8s_cri::v1;

/// What a container does once it is started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// Runs until it is told to stop, which it does at once with code 0.
    RunForever,
    /// Runs until it is killed: the stop signal does not impress it.
    IgnoreTerm,
    /// Runs until it is told to stop, and then takes this long.
    SlowTerm(Duration),
    /// Ends by itself.
    Exit {
        /// Exit code.
        code: i32,
        /// Run time.
        after: Duration,
    },
    /// Cannot be started.
    FailToStart(String),
    /// Its start takes this long, whether or not anybody waits for it; other starts are refused meanwhile. Then it runs
    /// for ever, or the start is undone as one that nobody waits for any more.
    SlowStart {
        /// How long.
        takes: Duration,
        /// It is undone.
        undone: bool,
    },
}

impl Behaviour {
    /// The default: `true`, `false`, `sleep N` and `sh -c` scripts of `echo`, `sleep N`, `exit N`, where
    /// `trap "" TERM` ignores the stop signal and a loop or `sleep` of an hour or more runs on forever.
    /// `no-such-command` cannot be started. Anything else runs forever.
    pub fn of_config(config: &v1::ContainerConfig) -> Self {
        of_config(config)
    }
}

/// How a command executed in a container ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecResult {
    /// Exit code.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Run time; beyond the call's timeout it becomes `DeadlineExceeded`.
    pub takes: Duration,
}

const FOREVER: u64 = 3600;

pub(super) fn of_config(config: &v1::ContainerConfig) -> Behaviour {
    let argv: Vec<&str> = config
        .command
        .iter()
        .chain(&config.args)
        .map(String::as_str)
        .collect();
    of_argv(&argv)
}

pub(super) fn exec(command: &[String]) -> ExecResult {
    let argv: Vec<&str> = command.iter().map(String::as_str).collect();
    let mut result = ExecResult {
        stdout: output(&argv),
        ..Default::default()
    };
    match of_argv(&argv) {
        Behaviour::Exit { code, after } => {
            result.code = code;
            result.takes = after;
        }
        Behaviour::FailToStart(_) => result.code = 127,
        _ => result.takes = Duration::from_secs(FOREVER),
    }
    result
}

/// What the program prints, line by line.
pub(super) fn output(argv: &[&str]) -> String {
    let Some(script) = script(argv) else {
        return String::new();
    };
    let mut text = String::new();
    for statement in script.split([';', '\n']) {
        if let Some(words) = statement.trim().strip_prefix("echo ") {
            text.push_str(words.trim().trim_matches(['"', '\'']));
            text.push('\n');
        }
    }
    text
}

fn of_argv(argv: &[&str]) -> Behaviour {
    if let Some(script) = script(argv) {
        return of_script(script);
    }
    match argv {
        ["no-such-command", ..] => Behaviour::FailToStart(
            "exec: \"no-such-command\": executable file not found in $PATH: unknown".to_owned(),
        ),
        ["true" | "/bin/true", ..] => exit(0, 0),
        ["false" | "/bin/false", ..] => exit(1, 0),
        ["sleep" | "/bin/sleep", seconds] => match seconds.parse() {
            Ok(seconds) if seconds < FOREVER => exit(0, seconds),
            _ => Behaviour::RunForever,
        },
        _ => Behaviour::RunForever,
    }
}

fn script<'a>(argv: &[&'a str]) -> Option<&'a str> {
    match argv {
        [shell, "-c", script, ..] if shell.ends_with("sh") => Some(script),
        ["busybox" | "/bin/busybox", "sh", "-c", script, ..] => Some(script),
        _ => None,
    }
}

fn of_script(script: &str) -> Behaviour {
    let ignores = script.contains("trap \"\" TERM") || script.contains("trap '' TERM");
    let mut seconds = 0;
    let mut code = 0;
    let mut forever = script.contains("while ");
    for statement in script.split([';', '\n']) {
        let words: Vec<&str> = statement.split_whitespace().collect();
        match words.as_slice() {
            ["sleep", length, ..] => match length.parse::<u64>() {
                Ok(length) if length < FOREVER => seconds += length,
                _ => forever = true,
            },
            ["exit", value] => {
                code = value.parse().unwrap_or(2);
                break;
            }
            _ => {}
        }
    }
    match (forever, ignores) {
        (true, true) => Behaviour::IgnoreTerm,
        (true, false) => Behaviour::RunForever,
        (false, _) => exit(code, seconds),
    }
}

fn exit(code: i32, seconds: u64) -> Behaviour {
    Behaviour::Exit {
        code,
        after: Duration::from_secs(seconds),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_do_what_a_shell_would() {
        let of = |script: &str| of_argv(&["sh", "-c", script]);
        assert_eq!(of("echo hi; exit 3"), exit(3, 0));
        assert_eq!(of("sleep 2; exit 1"), exit(1, 2));
        assert_eq!(of("echo hi"), exit(0, 0));
        assert_eq!(
            of("trap 'exit 0' TERM; while :; do sleep 1 & wait; done"),
            Behaviour::RunForever
        );
        assert_eq!(
            of("trap '' TERM; while :; do sleep 1; done"),
            Behaviour::IgnoreTerm
        );
        assert_eq!(output(&["sh", "-c", "echo a b; exit 1"]), "a b\n");
    }
}
