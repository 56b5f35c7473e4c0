//! `holdfast drain-local`: has the live agent stop the pods because the machine goes down, where no `logind` says so.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use serde_json::Value;
use tokio::time::Instant;

use super::output::{note, printable};
use super::{CliError, StateDir};
use crate::admin::client::Client;
use crate::admin::view::{Query, Row, Selector, View};

/// Poll interval of the agent.
const LOOK: Duration = Duration::from_millis(250);
/// Longest time between the end of the groups' periods and the record of the drain's end, unless the disk hangs.
const LATE: Duration = Duration::from_secs(10);

pub(super) const LONG_HELP: &str = "\
Stops the pods of this node like a graceful shutdown, and waits until they have ended and their last statuses are on \
disk, and at the API server if it answers. Use it on a machine without logind before the agent is stopped: in a unit's \
ExecStop, in an init script, or when a spot instance is about to be reclaimed. The groups of pods are those of \
shutdownGracePeriod or shutdownGracePeriodByPodPriority; a shorter --timeout shortens the period of each group in \
proportion. If neither is given, the pods have 27 s, and the last third is for the critical ones.

The node is then not Ready and admits no pod until the machine has rebooted, or until `holdfast drain-local --cancel`. If \
this command is interrupted, the agent continues the drain.";

const EXAMPLES: &str = "\
Examples:
  holdfast drain-local                  with the configured time
  holdfast drain-local --timeout 25s    within 25 s
  holdfast drain-local --cancel         because the machine stays up

Exit codes: 0 every pod has ended and its last status is on disk, 1 failure (no agent runs, it refused, or it
exited), 2 wrong usage, 4 timeout with pods left, 5 cancelled.";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct DrainLocalArgs {
    /// Total time, such as `25s`, `2m` or a number of seconds
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    timeout: Option<Duration>,
    /// Start the drain without waiting for its end
    #[arg(long)]
    no_wait: bool,
    /// Cancel a drain: the node admits and starts pods again; stopped pods stay stopped
    #[arg(long, conflicts_with_all = ["timeout", "no_wait"])]
    cancel: bool,
    #[command(flatten)]
    state_dir: StateDir,
}

pub(super) async fn run(args: DrainLocalArgs) -> anyhow::Result<()> {
    let client = Client::connect(&args.state_dir.state_dir).await?;
    if args.cancel {
        client.cancel_drain().await?;
        note(
            "the drain is cancelled: the node admits and starts pods again; stopped pods stay stopped",
        );
        return Ok(());
    }
    client.drain(args.timeout).await?;
    if args.no_wait {
        note("the agent stops the pods; `holdfast dump shutdown` shows the progress");
        return Ok(());
    }
    wait(&client, &args.state_dir.state_dir).await
}

/// Waits until the shutdown has ended, and prints its result.
async fn wait(client: &Client, dir: &Path) -> anyhow::Result<()> {
    let since = Instant::now();
    let mut left_before = None;
    loop {
        let row = look(client).await.with_context(|| {
            format!(
                "wait for the end of the drain; the records of the agent are in {}",
                dir.display()
            )
        })?;
        let left = names(&row, "podsLeft");
        if left_before.is_some_and(|before| before != left.len()) {
            note(format_args!("{} pods are left", left.len()));
        }
        left_before = Some(left.len());
        match row.get("state").and_then(Value::as_str) {
            Some("ShuttingDown") if since.elapsed() < time(&row).saturating_add(LATE) => {
                tokio::time::sleep(LOOK).await;
            }
            Some("ShuttingDown") => {
                let message = format!(
                    "the time is over and the agent has not recorded the end of the drain, {} pods are left; check its log and \
                     the disk of its store",
                    left.len()
                );
                return Err(CliError::Unfinished(message).into());
            }
            Some("Ended") => return ended(&left, &names(&row, "unreported")),
            _ => {
                let message = "the drain was cancelled; the node admits and starts pods again";
                return Err(CliError::Cancelled(message.to_owned()).into());
            }
        }
    }
}

/// Returns the time that the groups of a shutdown have together.
fn time(row: &Row) -> Duration {
    let ms = |field: &str| row.get(field)?.get("bootTimeMs")?.as_u64();
    let time = ms("deadline").zip(ms("begun"));
    time.map_or(Duration::ZERO, |(deadline, begun)| {
        Duration::from_millis(deadline.saturating_sub(begun))
    })
}

async fn look(client: &Client) -> anyhow::Result<Row> {
    let query = Query {
        views: vec![View::Shutdown],
        selector: Selector::default(),
    };
    let dump = client.dump(&query).await?;
    let row = dump.rows(View::Shutdown).next().cloned();
    row.context("the agent reports no shutdown; check that it has the version of this program")
}

fn ended(left: &[String], unreported: &[String]) -> anyhow::Result<()> {
    if !left.is_empty() {
        let message = format!(
            "the time is over and {} pods have not ended: {}; their ends will be unknown",
            left.len(),
            left.join(", ")
        );
        return Err(CliError::Unfinished(message).into());
    }
    match unreported.len() {
        0 => note("every pod has ended, and its last status is reported"),
        n => note(format_args!(
            "every pod has ended; the last statuses of {n} are on disk; the agent reports them at its next start"
        )),
    }
    Ok(())
}

/// `namespace/name` of the pods in a field.
fn names(row: &Row, field: &str) -> Vec<String> {
    let pods = row.get(field).and_then(Value::as_array);
    let name = |pod: &Value| {
        let text = |field: &str| pod.get(field).and_then(Value::as_str);
        let name = match (text("namespace"), text("name")) {
            (Some(namespace), Some(name)) => format!("{namespace}/{name}"),
            _ => text("uid").unwrap_or_default().to_owned(),
        };
        printable(&name)
    };
    pods.into_iter().flatten().map(name).collect()
}

/// Whole seconds, minutes or hours.
fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit());
    let (number, unit) = text.split_at(digits.unwrap_or(text.len()));
    let factor = match unit {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return Err("must be a whole number with s, m or h, such as 25s".to_owned()),
    };
    let seconds: u64 = number
        .parse()
        .map_err(|_| "must be a whole number with s, m or h, such as 25s".to_owned())?;
    match seconds.checked_mul(factor) {
        None | Some(0) => Err("must be at least 1s and less than 2^64 s".to_owned()),
        Some(seconds) => Ok(Duration::from_secs(seconds)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_timeout_is_read_as_people_write_one() {
        for (text, seconds) in [("25", 25), ("25s", 25), ("2m", 120), ("1h", 3600)] {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for bad in [
            "",
            "s",
            "0",
            "0s",
            "-1",
            "1.5s",
            "1d",
            "99999999999999999999s",
        ] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_exit_code_says_whether_pods_are_left() {
        assert!(ended(&[], &[]).is_ok());
        assert!(ended(&[], &["n/a".to_owned()]).is_ok(), "they are on disk");
        let error = ended(&["n/a".to_owned()], &[]).unwrap_err();
        assert_eq!(super::super::exit_code(&error), 4);
        assert!(error.to_string().contains("1 pods have not ended: n/a"));
    }

    #[test]
    fn the_wait_is_as_long_as_the_groups_have() {
        let row = |deadline: Value| -> Row {
            let begun = json!({"time": "x", "boot": "1", "bootTimeMs": 4_000});
            serde_json::from_value(json!({"begun": begun, "deadline": deadline})).unwrap()
        };
        let deadline = json!({"time": "x", "boot": "1", "bootTimeMs": 31_000});
        assert_eq!(time(&row(deadline)), Duration::from_secs(27));
        assert_eq!(time(&row(Value::Null)), Duration::ZERO);
    }

    #[test]
    fn a_pod_without_a_name_is_called_by_its_uid() {
        let row: Row = serde_json::from_value(json!({"podsLeft": [
            {"uid": "u1", "namespace": "n", "name": "a"},
            {"uid": "u2", "namespace": null, "name": null},
        ]}))
        .unwrap();
        assert_eq!(names(&row, "podsLeft"), ["n/a", "u2"]);
        assert_eq!(names(&row, "unreported"), [""; 0]);
    }
}
