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

// Invariant STORE-7.
#[test]
fn a_second_agent_with_a_state_directory_of_its_own_leaves_the_runtime_to_the_first() {
    let (node, agent, running) = three_running();
    let socket = node.fake.socket().unwrap();
    let site = Site::new(&format!("unix://{}", socket.display()));
    site.configure("cgroupsPerQOS: false\n");
    node.fake.clear_calls();
    let mut second = site.spawn(&[]);
    let status = second.wait_exit(PATIENCE);
    assert_eq!(status.code(), Some(1), "{}", second.log());
    let (said, pid) = (second.log(), format!("pid {}", agent.pid()));
    assert!(said.contains(&pid), "{said}");
    assert!(said.contains("--container-runtime-endpoint"), "{said}");
    assert_eq!(node.effects(), []);
    assert_eq!(node.running(), running);
    // The lock ends with its holder, however that ends.
    agent.kill9();
    let _second = site.start();
}

// Invariant BOOT-3.
/// A runtime that was started with another root directory answers, and knows nothing. What shows that its answer is wrong is that
/// processes of the pods are in their cgroups.
#[test]
fn a_runtime_that_lists_nothing_is_not_believed_while_processes_of_the_pods_run() {
    let node = Node::new(|_| Behaviour::RunForever);
    node.site.configure("");
    node.manifest("once", "Never");
    node.manifest("web", "Always");
    let agent = node.site.start();
    node.wait_running(2);
    let mut processes: Vec<Process> = ["once", "web"]
        .map(|pod| {
            node.site.wait_phase(pod, "Running");
            Process::in_cgroup_of(&node.site, pod)
        })
        .into();
    let wipe = || {
        let _guard = node.runtime.enter();
        node.fake.restart(Restart::Wipe).unwrap();
        node.fake.clear_calls();
    };
    let phase = |pod: &str| node.site.status(pod).unwrap()["phase"].clone();
    let assert_left_alone = |agent: &Agent| {
        wait_relists(agent, 4.0);
        assert_eq!(node.effects(), [], "{}", agent.log());
        assert_eq!([phase("once"), phase("web")], ["Running", "Running"]);
    };

    wipe();
    eventually("somebody is told", || {
        let told = agent.log().contains("lists nothing of the pod");
        told.then_some(()).ok_or_else(|| agent.log())
    });
    assert_left_alone(&agent);
    agent.kill9();
    let agent = node.site.start();
    assert_left_alone(&agent);

    // Once they have ended, the runtime is right.
    processes.clear();
    node.site.wait_phase("once", "Failed");
    node.wait_running(1);
    let starts = node.starts();
    assert_eq!(starts.len(), 1, "{starts:?}");
}

/// A process in the cgroup of a pod, until it is dropped.
struct Process(std::process::Child);

impl Process {
    fn in_cgroup_of(site: &Site, pod: &str) -> Self {
        let child = Command::new("sleep").arg("3600").spawn().unwrap();
        let process = Self(child);
        let uid = site.row("pods", pod).unwrap()["uid"].clone();
        let uid = uid.as_str().unwrap();
        let cgroup = format!("{}/kubepods/besteffort/pod{uid}", site.cgroup());
        // Where the agent has made one: the others are left to the runtime.
        let dirs = agent_process::cgroup_dirs(&cgroup);
        let dir = dirs.iter().find(|dir| dir.is_dir()).unwrap();
        fs::write(dir.join("cgroup.procs"), process.0.id().to_string()).unwrap();
        process
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// The runtime cannot stop what it does not know. It has the pod's grace period to know it again.
#[test]
fn a_pod_that_the_runtime_does_not_list_ends_with_its_grace_period() {
    let node = Node::new(|_| Behaviour::RunForever);
    node.site.configure("");
    let manifest = Node::manifest_text("web", "Always").replace(
        r#""restartPolicy""#,
        r#""terminationGracePeriodSeconds":3,"restartPolicy""#,
    );
    node.site.write_manifest("web.json", &manifest);
    let _agent = node.site.start();
    node.wait_running(1);
    node.site.wait_phase("web", "Running");
    let mut process = Process::in_cgroup_of(&node.site, "web");
    {
        let _guard = node.runtime.enter();
        node.fake.restart(Restart::Wipe).unwrap();
    }
    node.site.remove_manifest("web.json");
    eventually("its process has ended", || {
        let ended = process.0.try_wait().unwrap();
        ended.map(|_| ()).ok_or_else(|| "it runs".to_owned())
    });
    eventually("the pod is gone", || match node.site.row("pods", "web") {
        Ok(row) => Err(row.to_string()),
        Err(_) => Ok(()),
    });
}
