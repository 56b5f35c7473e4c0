//! What one hostile tenant costs the others: twenty ordinary pods beside it are served as they are without it.
//!
//! Each tenant is judged against the same node without it, measured before it came and after it has gone. When machine
//! and runtime take longer beside the tenant without the agent (`neighbours`), so may they with it: two processors do
//! not become more.
//!
//! `make figures` runs this with the release binary. `HOLDFAST_FAIRNESS` names the tenants: `all`, or `probes,log`. Each
//! takes four minutes, and time is what is measured, so it is no part of other runs (`.config/nextest.toml`).

use std::time::Duration;

use crate::neighbours::{Figures, Node, Times};
use crate::tenants::{ALL, Tenant};

/// A figure of the others beside a tenant may be so many times that without it.
const LIMIT: f64 = 1.5;
/// So much more memory may the agent have, in MiB.
const MEMORY: f64 = 32.0;
/// A probe may come so much ahead of its time, in seconds, to be made together with another one; the next one is then as
/// much further away. Lateness below that says nothing.
const AHEAD: f64 = 0.05;

/// The value that `share` of all are not above.
fn quantile(values: &[Duration], share: f64) -> Duration {
    let mut sorted = values.to_vec();
    sorted.sort();
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

/// One figure, without and with a tenant.
struct Pair {
    quiet: f64,
    beside: f64,
    /// What the same does beside the tenant when the agent has no part in it.
    machine: String,
    over: bool,
}

fn p99(values: &[Duration]) -> f64 {
    quantile(values, 0.99).as_secs_f64()
}

/// What was measured before and after a tenant.
fn both(quiet: [&Times; 2]) -> Times {
    let all = |of: fn(&Times) -> &Vec<Duration>| quiet.map(|times| of(times).clone()).concat();
    Times {
        with: all(|times| &times.with),
        without: all(|times| &times.without),
    }
}

impl Pair {
    /// Of calls that are late: what the machine adds to a call that is not the agent's is added to the limit.
    fn lateness(quiet: [&Times; 2], beside: &Times) -> Self {
        let before = both(quiet);
        let machine = p99(&beside.without) - p99(&before.without);
        let (quiet, beside) = (p99(&before.with), p99(&beside.with));
        Self {
            quiet,
            beside,
            machine: format!("{:+.0} ms", machine * 1e3),
            over: beside > LIMIT * quiet.max(AHEAD) + machine.max(0.0),
        }
    }

    /// Of what the runtime does: when it takes twice as long without the agent, so may it with the agent. It is asked too
    /// few times for more than a median. What takes less than `floor` seconds is taken for as much.
    fn runtime(quiet: [&Times; 2], beside: &Times, floor: f64) -> Self {
        let before = both(quiet);
        let median = |values: &[Duration]| quantile(values, 0.5).as_secs_f64();
        let machine = median(&beside.without) / median(&before.without);
        let (quiet, beside) = (p99(&before.with), p99(&beside.with));
        Self {
            quiet,
            beside,
            machine: format!("{machine:.2} ×"),
            over: beside > LIMIT * quiet.max(floor) * machine.max(1.0),
        }
    }

    fn memory(quiet: u64, beside: u64) -> Self {
        let mebibytes = |kibibytes: u64| kibibytes as f64 / 1024.0;
        let (quiet, beside) = (mebibytes(quiet), mebibytes(beside));
        Self {
            quiet,
            beside,
            machine: String::new(),
            over: beside > quiet + MEMORY,
        }
    }

    fn verdict(&self) -> &'static str {
        if self.over { " OVER" } else { "" }
    }

    /// Both figures, their ratio, and in brackets what becomes of the same without the agent.
    fn as_milliseconds(&self) -> String {
        format!(
            "{:.0} → {:.0} ms, {:.2} × ({}){}",
            self.quiet * 1e3,
            self.beside * 1e3,
            self.beside / self.quiet,
            self.machine,
            self.verdict()
        )
    }

    fn as_mebibytes(&self) -> String {
        format!(
            "{:.0} → {:.0} MiB, {:+.0}{}",
            self.quiet,
            self.beside,
            self.beside - self.quiet,
            self.verdict()
        )
    }
}

struct Row {
    tenant: &'static Tenant,
    did: String,
    lateness: Pair,
    commands: Pair,
    starts: Pair,
    deletions: Pair,
    memory: Pair,
}

impl Row {
    fn new(tenant: &'static Tenant, did: String, quiet: [&Figures; 2], beside: &Figures) -> Self {
        let runtime =
            |of: fn(&Figures) -> &Times, floor| Pair::runtime(quiet.map(of), of(beside), floor);
        Self {
            tenant,
            did,
            lateness: Pair::lateness(quiet.map(|f| &f.lateness), &beside.lateness),
            commands: runtime(|f| &f.commands, AHEAD),
            starts: runtime(|f| &f.starts, 0.0),
            deletions: runtime(|f| &f.deletions, 0.0),
            // The agent before the tenant came is the same process.
            memory: Pair::memory(quiet[0].memory, beside.memory),
        }
    }

    fn is_over(&self) -> bool {
        let all = [
            &self.lateness,
            &self.commands,
            &self.starts,
            &self.deletions,
            &self.memory,
        ];
        all.iter().any(|pair| pair.over)
    }

    fn print(&self) {
        let did = match self.did.as_str() {
            "" => String::new(),
            did => format!(" ({did})"),
        };
        println!(
            "| `{}`: {}{did} | {} | {} | {} | {} | {} |",
            self.tenant.name,
            self.tenant.what,
            self.lateness.as_milliseconds(),
            self.commands.as_milliseconds(),
            self.starts.as_milliseconds(),
            self.deletions.as_milliseconds(),
            self.memory.as_mebibytes(),
        );
    }
}

/// What a phase was like, for those who want to know where a p99 comes from.
fn print_phase(name: &str, figures: &Figures) {
    let spread = |values: &[Duration]| {
        let of = |share| quantile(values, share).as_secs_f64() * 1e3;
        format!(
            "{:.0}/{:.0}/{:.0}/{:.0} of {}",
            of(0.5),
            of(0.9),
            of(0.99),
            of(1.0),
            values.len()
        )
    };
    println!(
        "{name}, p50/p90/p99/most in ms, with and without the agent: lateness {}, {}, of commands {}; start {}, {}; deletion {}, {}; 4 KiB to the disk {}; {:.1} MiB, {:.1} % of a core while still",
        spread(&figures.lateness.with),
        spread(&figures.lateness.without),
        spread(&figures.commands.with),
        spread(&figures.starts.with),
        spread(&figures.starts.without),
        spread(&figures.deletions.with),
        spread(&figures.deletions.without),
        spread(&figures.disk),
        figures.memory as f64 / 1024.0,
        figures.share * 100.0,
    );
}

/// The tenants that are asked for.
fn chosen(names: &str) -> Vec<&'static Tenant> {
    if names == "all" {
        return ALL.iter().collect();
    }
    let named = |name: &str| {
        let found = ALL.iter().find(|tenant| tenant.name == name);
        let known: Vec<_> = ALL.iter().map(|tenant| tenant.name).collect();
        found.unwrap_or_else(|| panic!("no tenant {name:?}; there are {}", known.join(", ")))
    };
    names.split(',').map(|name| named(name.trim())).collect()
}

#[test]
fn figures_of_ordinary_pods_beside_a_hostile_tenant() {
    let Ok(names) = std::env::var("HOLDFAST_FAIRNESS") else {
        println!("not asked for: HOLDFAST_FAIRNESS names no tenants");
        return;
    };
    let tenants = chosen(&names);
    let mut node = Node::new();
    let containers = node.containers();
    node.renew();
    let mut quiet = node.measure(node.watch_memory());
    print_phase("quiet", &quiet);
    let mut rows = Vec::new();
    for tenant in tenants {
        let memory = node.watch_memory();
        let load = tenant.begin(&node);
        let beside = node.measure(memory);
        print_phase(tenant.name, &beside);
        let did = load.end(&node);
        node.renew();
        let after = node.measure(node.watch_memory());
        print_phase("quiet", &after);
        rows.push(Row::new(tenant, did, [&quiet, &after], &beside));
        assert_eq!(node.containers(), containers, "an ordinary pod was touched");
        quiet = after;
    }
    println!(
        "\n| beside 20 ordinary pods | lateness of their probes by HTTP | by a command | start | deletion | memory of the agent |\n|---|---|---|---|---|---|"
    );
    rows.iter().for_each(Row::print);
    let over: Vec<_> = rows.iter().filter(|row| row.is_over()).collect();
    let over: Vec<_> = over.iter().map(|row| row.tenant.name).collect();
    assert!(
        over.is_empty(),
        "more than {LIMIT} × without the tenant, beyond what the machine makes of it, or {MEMORY} MiB more: {}",
        over.join(", ")
    );
}
