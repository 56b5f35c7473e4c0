//! Pods that run, and an agent that has nothing to do about it.

use nix::sys::signal::Signal;

use super::agent_process::within;
use super::*;

const PODS: usize = 100;
const SYNCS: &str = "kubelet_pod_worker_duration_seconds_count{operation_type=\"sync\"}";
const TABLES: [&str; 5] = ["pods", "admissions", "workers", "containers", "statuses"];

#[test]
fn restart_keeps_100_running_pods_without_a_call_a_status_change_or_a_decision() {
    let node = Node::new(|_| Behaviour::RunForever);
    for n in 0..PODS {
        node.manifest(&format!("p{n:03}"), "Always");
    }
    let agent = node.site.start();
    let running = node.wait_running(PODS);
    eventually("all are reported Running", || {
        let dump = node.site.try_dump(&["statuses"])?;
        let rows = dump["tables"]["statuses"].as_array().ok_or("no table")?;
        let told = rows.iter().filter(|r| r["status"]["phase"] == "Running");
        let told = told.count();
        (told == PODS)
            .then_some(())
            .ok_or_else(|| format!("{told} are"))
    });
    wait_relists(&agent, 2.0);
    node.site.recorded();
    agent.kill9();
    // With the version of each status, and the moments at which things were decided.
    let records = || node.site.dump(&TABLES)["tables"].clone();
    let before = records();
    for table in TABLES {
        let rows = before[table].as_array().unwrap();
        assert_eq!(rows.len(), PODS, "{table}");
    }

    for life in 1..=2 {
        let line = newest_line(&node.site);
        node.fake.clear_calls();
        let agent = node.site.start();
        let resumed = agent.metric("holdfast_restore_pods{outcome=\"resumed\"}");
        assert_eq!(resumed, PODS as f64, "{}", agent.log());
        wait_relists(&agent, 3.0);
        // The sources are read once more.
        agent.signal(Signal::SIGHUP);
        wait_relists(&agent, 4.0);
        if life == 2 {
            // Every pod is synced when it was due, after 60 to 90 s, however often the agent died meanwhile.
            within(Duration::from_secs(150), "all are synced", || {
                let syncs = agent.metric(SYNCS);
                (syncs >= PODS as f64)
                    .then_some(())
                    .ok_or_else(|| format!("{syncs} syncs"))
            });
        }
        agent.kill9();
        assert_eq!(node.effects(), [], "life {life}");
        assert_eq!(node.running(), running);
        let after = records();
        for table in TABLES {
            assert!(
                after[table] == before[table],
                "life {life}: {}",
                first_difference(&before[table], &after[table])
            );
        }
        let told = lines_after(&node.site, line);
        assert_eq!(told, ["agent started"], "life {life}");
    }
}

/// What the journal says after a line of it.
fn lines_after(site: &Site, line: u64) -> Vec<String> {
    let dump = site.dump(&["journal"]);
    let rows = dump["tables"]["journal"].as_array().unwrap();
    rows.iter()
        .filter(|row| row["sequence"].as_u64() > Some(line))
        .map(|row| row["what"].as_str().unwrap().to_owned())
        .collect()
}

fn first_difference(before: &Value, after: &Value) -> String {
    let (before, after) = (before.as_array().unwrap(), after.as_array().unwrap());
    let pair = before.iter().zip(after).find(|(b, a)| b != a);
    match pair {
        Some((b, a)) => format!("{b}\nbecame\n{a}"),
        None => format!("{} rows became {}", before.len(), after.len()),
    }
}
