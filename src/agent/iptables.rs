//! Chains of iptables that a node of Kubernetes has: a hint for other programs, a small firewall, and canaries that show when
//! somebody has flushed the rules. Upstream: `initNetworkUtil`, `syncIPTablesRules` and `Monitor`.
//!
//! Without the tools, or without the right to use them, the node has none of the chains.

use std::fs;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::types::causes;
use crate::volumemanager::command::{Call, CommandError, Tools};

/// The canary is looked for this often.
const PERIOD: Duration = Duration::from_secs(60);
/// A program that flushes rules takes one table after the other, for so many seconds at most.
const FLUSH_SECONDS: u32 = 5;
/// Longest run of a tool. It waits for others that change rules.
const PATIENCE: Duration = Duration::from_secs(20);
/// `CAP_NET_ADMIN` in the kernel's mask of capabilities.
const NET_ADMIN: u64 = 1 << 12;

/// The canary's table that is looked at.
const WATCHED: &str = "mangle";
const CANARY: &str = "KUBE-KUBELET-CANARY";
const TABLES: [&str; 3] = [WATCHED, "nat", "filter"];
/// Match for packets from elsewhere to this machine's loopback addresses that are no answers.
const FOREIGN: [&str; 16] = [
    "-m",
    "comment",
    "--comment",
    "block incoming localnet connections",
    "!",
    "-s",
    "127.0.0.0/8",
    "-d",
    "127.0.0.0/8",
    "-m",
    "conntrack",
    "!",
    "--ctstate",
    "RELATED,ESTABLISHED,DNAT",
    "-j",
    "DROP",
];

/// A tool, and whether it is for IPv4.
const FAMILIES: [(&str, bool); 2] = [("iptables", true), ("ip6tables", false)];

/// One thing that is to be there: arguments that fail while it is not, and those that make it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Step {
    check: Vec<&'static str>,
    make: Vec<&'static str>,
}

fn chain(table: &'static str, name: &'static str) -> Step {
    Step {
        check: vec!["-t", table, "-S", name],
        make: vec!["-t", table, "-N", name],
    }
}

/// Returns the chains and rules of one address family.
fn steps(is_ipv4: bool) -> Vec<Step> {
    let mut all = vec![chain("mangle", "KUBE-IPTABLES-HINT")];
    if is_ipv4 {
        all.push(chain("filter", "KUBE-FIREWALL"));
        let rule = |operation| {
            let mut args = vec!["-t", "filter", operation, "KUBE-FIREWALL"];
            args.extend(FOREIGN);
            args
        };
        all.push(Step {
            check: rule("-C"),
            make: rule("-A"),
        });
        all.extend(["OUTPUT", "INPUT"].map(|from| Step {
            check: vec!["-t", "filter", "-C", from, "-j", "KUBE-FIREWALL"],
            make: vec!["-t", "filter", "-I", from, "1", "-j", "KUBE-FIREWALL"],
        }));
    }
    // Last: it stands for all the others.
    all.extend(TABLES.iter().rev().map(|table| chain(table, CANARY)));
    all
}

/// One of the two programs.
struct Family {
    tools: Tools,
    tool: &'static str,
    is_ipv4: bool,
}

impl Family {
    async fn run(&self, args: &[&'static str]) -> Result<(), CommandError> {
        let mut call = Call::new(self.tool).patient(PATIENCE).flags(["-w", "5"]);
        for arg in args {
            call = call.option(arg);
        }
        self.tools.succeed(call).await.map(drop)
    }

    /// Returns whether the chain or rule exists. A tool that cannot say so is an error.
    async fn has(&self, step: &Step) -> Result<bool, CommandError> {
        match self.run(&step.check).await {
            Ok(()) => Ok(true),
            Err(CommandError::Failed {
                code: Some(1),
                output,
                ..
            }) if is_missing(&output) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Makes what is missing; returns how much was.
    async fn ensure(&self) -> Result<usize, CommandError> {
        let mut made = 0;
        for step in steps(self.is_ipv4) {
            if !self.has(&step).await? {
                self.run(&step.make).await?;
                made += 1;
            }
        }
        Ok(made)
    }

    /// Looks for the canary, and makes all again when it is gone.
    async fn keep(&self) -> Result<(), CommandError> {
        if self.has(&chain(WATCHED, CANARY)).await? {
            return Ok(());
        }
        // Somebody flushes the tables right now, perhaps: what is made too early goes with the rest.
        for _ in 0..FLUSH_SECONDS {
            let mut is_left = false;
            for table in TABLES {
                is_left |= self.has(&chain(table, CANARY)).await?;
            }
            if !is_left {
                break;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let made = self.ensure().await?;
        info!(
            tool = self.tool,
            made, "iptables rules were flushed, making the chains again"
        );
        Ok(())
    }
}

/// Keeps the chains until `token` is cancelled.
pub(super) async fn keep(tools: Tools, token: CancellationToken) {
    let families: Vec<Family> = FAMILIES
        .iter()
        .filter(|(tool, _)| tools.find(tool).is_some())
        .map(|(tool, is_ipv4)| Family {
            tools: tools.clone(),
            tool,
            is_ipv4: *is_ipv4,
        })
        .collect();
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let missing = match (families.is_empty(), may_change_rules(&status)) {
        (true, _) => Some("iptables is not installed"),
        (_, false) => Some("the agent has no CAP_NET_ADMIN"),
        _ => None,
    };
    if let Some(why) = missing {
        info!(why, "the node has no iptables chains of Kubernetes");
        // A task that ends would end the agent.
        return token.cancelled().await;
    }
    let mut states: Vec<(bool, String)> = vec![(false, String::new()); families.len()];
    loop {
        for (family, (is_made, said)) in families.iter().zip(&mut states) {
            let done = match is_made {
                true => family.keep().await,
                false => family.ensure().await.map(drop),
            };
            match done {
                Ok(()) => {
                    *is_made = true;
                    said.clear();
                }
                Err(error) => {
                    let error = causes(&error);
                    if *said != error {
                        warn!(tool = family.tool, error, "cannot set up iptables chains");
                    }
                    *said = error;
                }
            }
        }
        tokio::select! {
            () = token.cancelled() => return,
            () = tokio::time::sleep(PERIOD) => {}
        }
    }
}

/// Returns whether a failed check says that the chain or rule does not exist. Its exit code 1 stands for other failures too,
/// such as a table of another tool.
fn is_missing(output: &str) -> bool {
    [
        "No chain/target/match by that name",
        "does a matching rule exist in that chain",
        "does not exist",
    ]
    .iter()
    .any(|text| output.contains(text))
}

/// Returns whether a process with this `/proc/<pid>/status` may change rules.
fn may_change_rules(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & NET_ADMIN != 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use super::*;

    #[test]
    fn the_packaged_unit_may_make_the_chains() {
        let unit = include_str!("../../contrib/systemd/holdfast.service");
        let set = unit
            .lines()
            .find_map(|line| line.strip_prefix("CapabilityBoundingSet="))
            .unwrap();
        for capability in ["CAP_NET_ADMIN", "CAP_NET_RAW"] {
            assert!(set.split(' ').any(|word| word == capability), "{set}");
        }
        let families = unit
            .lines()
            .find_map(|line| line.strip_prefix("RestrictAddressFamilies="))
            .unwrap();
        for family in ["AF_INET", "AF_INET6", "AF_NETLINK"] {
            assert!(families.split(' ').any(|word| word == family), "{families}");
        }
    }

    #[test]
    fn the_right_to_change_rules_is_a_capability() {
        for (status, may) in [
            ("Name:\tx\nCapEff:\t000001ffffffffff\n", true),
            ("CapEff:\t0000000000001000\n", true),
            ("CapEff:\t0000000000200405\n", false),
            ("", false),
        ] {
            assert_eq!(may_change_rules(status), may, "{status}");
        }
    }

    /// A stand-in that keeps the requested rules as lines of a file.
    fn stand_in(dir: &Path) -> Family {
        let script = r#"#!/bin/sh
rules="$(dirname "$0")/rules"
missing() { echo "iptables: $1" >&2; exit 1; }
touch "$rules"
shift 2
case "$3" in
    -S) grep -qxF -- "$1 $2 -N $4" "$rules" || missing "No chain/target/match by that name." ;;
    -C) chain="$4"; shift 4; grep -F -- "$chain" "$rules" | grep -qF -- "$*" ||
        missing "Bad rule (does a matching rule exist in that chain?)." ;;
    *) echo "$*" >> "$rules" ;;
esac
"#;
        let path = dir.join("iptables");
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Family {
            tools: Tools::in_dirs([dir.to_owned()]),
            tool: "iptables",
            is_ipv4: true,
        }
    }

    #[tokio::test]
    async fn a_check_that_fails_for_another_reason_makes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let family = stand_in(dir.path());
        let refusal =
            "iptables v1.8.9 (nf_tables): table `mangle' is incompatible, use 'nft' tool.";
        let script =
            format!("#!/bin/sh\necho \"$@\" >> \"$0.calls\"\necho \"{refusal}\" >&2\nexit 1\n");
        fs::write(dir.path().join("iptables"), script.replace('`', "'")).unwrap();
        let error = family.ensure().await.unwrap_err().to_string();
        assert!(error.contains("is incompatible"), "{error}");
        let calls = fs::read_to_string(dir.path().join("iptables.calls")).unwrap();
        assert!(!calls.contains("-N"), "{calls}");
    }

    #[tokio::test]
    async fn chains_are_made_once_and_again_after_a_flush() {
        let dir = tempfile::tempdir().unwrap();
        let family = stand_in(dir.path());
        assert_eq!(family.ensure().await.unwrap(), 8);
        assert_eq!(family.ensure().await.unwrap(), 0);
        let rules = dir.path().join("rules");
        let made = fs::read_to_string(&rules).unwrap();
        assert!(
            made.starts_with("-t mangle -N KUBE-IPTABLES-HINT\n"),
            "{made}"
        );
        assert!(
            made.contains("-t filter -I INPUT 1 -j KUBE-FIREWALL\n"),
            "{made}"
        );
        family.keep().await.unwrap();
        assert_eq!(fs::read_to_string(&rules).unwrap(), made);
        fs::write(&rules, "").unwrap();
        family.keep().await.unwrap();
        assert_eq!(fs::read_to_string(&rules).unwrap(), made);
    }
}
