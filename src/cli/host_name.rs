//! Waits at boot until the host has a name, by which the node is called.
//!
//! The name may come late, from DHCP or cloud-init. A node that is called `localhost` meets others of that name in its
//! cluster, and its static pods change theirs.

use std::time::Duration;

use super::output::note;

/// Names of hosts that have none yet.
const NONE: [&str; 4] = ["", "(none)", "localhost", "localhost.localdomain"];
/// Longest wait of a node of a cluster; it exits then.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest wait of a node by itself, and of one whose name is recorded; it uses the name then.
const PATIENCE_ALONE: Duration = Duration::from_secs(10);
/// Interval between readings of the name.
const LOOK: Duration = Duration::from_secs(1);

/// Waits until `read` gives a name that is the host's own. Otherwise returns the name on record, `known`: a node whose network
/// is away after a power loss has pods to start. A node by itself without such a name takes another in the end.
///
/// # Errors
/// When a node `in_cluster` has no name of its own, and none is recorded.
pub(super) async fn wait(
    in_cluster: bool,
    known: Option<String>,
    read: impl Fn() -> String,
) -> anyhow::Result<Option<String>> {
    let known = known.filter(|known| !NONE.contains(&known.as_str()));
    let patience = if in_cluster && known.is_none() {
        PATIENCE
    } else {
        PATIENCE_ALONE
    };
    let end = tokio::time::Instant::now() + patience;
    let mut has_said = false;
    loop {
        let name = read();
        if !NONE.contains(&name.as_str()) {
            return Ok(None);
        }
        if tokio::time::Instant::now() >= end {
            let problem = format!(
                "the host is still called {name:?} after {} s",
                patience.as_secs()
            );
            if let Some(known) = known {
                note(format_args!("warning: {problem}, the node stays {known:?}"));
                return Ok(Some(known));
            }
            if in_cluster {
                anyhow::bail!(
                    "{problem}, as any host without a name; set one with hostnamectl set-hostname, or give --hostname-override"
                );
            }
            note(format_args!("warning: {problem}, the node takes that name"));
            return Ok(None);
        }
        if !has_said {
            has_said = true;
            note(format_args!(
                "the host is called {name:?}, waiting at most {} s for a name of its own (--hostname-override gives the node one)",
                patience.as_secs()
            ));
        }
        tokio::time::sleep(LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_node_waits_for_the_name_of_its_host() {
        for (name, in_cluster, waits, works) in [
            ("node-1", true, 0, true),
            ("localhost", true, 60, false),
            ("localhost.localdomain", false, 10, true),
            ("(none)", true, 60, false),
        ] {
            let begun = tokio::time::Instant::now();
            let result = wait(in_cluster, None, || name.to_owned()).await;
            assert_eq!(result.is_ok(), works, "{name}");
            assert_eq!(begun.elapsed().as_secs(), waits, "{name}");
        }
        let reads = Cell::new(0);
        let late = || {
            reads.set(reads.get() + 1);
            let name = if reads.get() > 5 {
                "node-1"
            } else {
                "localhost"
            };
            name.to_owned()
        };
        wait(true, None, late).await.unwrap();
        assert_eq!(reads.get(), 6);

        // The name on record stays, unless the host has one.
        for (name, known, taken) in [
            ("localhost", "node-1", Some("node-1")),
            ("node-2", "node-1", None),
        ] {
            let begun = tokio::time::Instant::now();
            let result = wait(true, Some(known.to_owned()), || name.to_owned()).await;
            assert_eq!(result.unwrap().as_deref(), taken, "{name}");
            assert!(begun.elapsed() <= PATIENCE_ALONE, "{name}");
        }
        let none = wait(true, Some("localhost".to_owned()), || "(none)".to_owned());
        assert!(none.await.is_err());
    }
}
