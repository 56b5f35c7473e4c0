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

/// Pause between two looks at the agent.
const LOOK: Duration = Duration::from_millis(250);
/// The end of a drain is on record this long after the time of its groups at the latest, unless the disk of the store hangs.
const LATE: Duration = Duration::from_secs(10);

pub(super) const LONG_HELP: &str = "\
Stops the pods of this node as a graceful shutdown does, and waits until they have ended and their last statuses are on \
disk, and with the API server where it answers. For machines without logind: called before the agent is stopped, by a unit's \
ExecStop, an init script, or whoever hears of a spot instance's end. The groups are those of shutdownGracePeriod or \
shutdownGracePeriodByPodPriority; a shorter --timeout gives each group its part. Without either the pods have 27 s, of which \
the critical ones have the last third.

From then on the node is not Ready and admits no pod until it was booted, or until `holdfast drain-local --cancel`. This \
command may be interrupted: the agent goes on.";

const EXAMPLES: &str = "\
Examples:
  holdfast drain-local                  as long as configured
  holdfast drain-local --timeout 25s    everything within 25 s
  holdfast drain-local --cancel         the machine stays up

Exit codes: 0 every pod has ended and its last status is on disk, 1 failed (no agent runs, it refused, it ended meanwhile),
2 wrong usage, 4 the time is over and pods are left, 5 cancelled meanwhile.";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct DrainLocalArgs {
    /// Time for everything, as `25s`, `2m` or a number of seconds
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    timeout: Option<Duration>,
    /// Order the drain and do not wait for its end
    #[arg(long)]
    no_wait: bool,
    /// Take a drain back: pods are admitted and started again; those that were stopped stay stopped
    #[arg(long, conflicts_with_all = ["timeout", "no_wait"])]
    cancel: bool,
    #[command(flatten)]
    state_dir: StateDir,
}

pub(super) async fn run(args: DrainLocalArgs) -> anyhow::Result<()> {
    let client = Client::connect(&args.state_dir.state_dir).await?;
    if args.cancel {
        client.cancel_drain().await?;
        note("pods are admitted and started again; those that were stopped stay stopped");
        return Ok(());
    }
    client.drain(args.timeout).await?;
    if args.no_wait {
        note("the agent stops the pods; `holdfast dump shutdown` shows how far it is");
        return Ok(());
    }
    wait(&client, &args.state_dir.state_dir).await
}

/// Waits until the shutdown has ended, and tells how.
async fn wait(client: &Client, dir: &Path) -> anyhow::Result<()> {
    let since = Instant::now();
    let mut left_before = None;
    loop {
        let row = look(client).await.with_context(|| {
            format!(
                "wait for the end of the drain; what the agent has recorded is in {}",
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
                    "the time is over and the agent has not recorded how the drain ended, {} pods are left; look at its log and \
                     at the disk of its store",
                    left.len()
                );
                return Err(CliError::Unfinished(message).into());
            }
            Some("Ended") => return ended(&left, &names(&row, "unreported")),
            _ => {
                let message = "the drain was cancelled; pods are admitted and started again";
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
    row.context("the agent says nothing about shutdowns; is it of another version?")
}

fn ended(left: &[String], unreported: &[String]) -> anyhow::Result<()> {
    if !left.is_empty() {
        let message = format!(
            "the time is over and {} pods have not ended: {}; how they end will not be known",
            left.len(),
            left.join(", ")
        );
        return Err(CliError::Unfinished(message).into());
    }
    match unreported.len() {
        0 => note("every pod has ended, and its last status is reported"),
        n => note(format_args!(
            "every pod has ended; the last statuses of {n} are on disk, the API server gets them when the agent starts again"
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
        _ => return Err("give a whole number with s, m or h, as 25s".to_owned()),
    };
    let seconds: u64 = number
        .parse()
        .map_err(|_| "give a whole number with s, m or h, as 25s".to_owned())?;
    match seconds.checked_mul(factor) {
        None | Some(0) => Err("give at least a second, and less than for ever".to_owned()),
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
