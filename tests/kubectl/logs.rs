//! `kubectl logs`.

use std::time::Duration;

use serde_json::json;

use crate::agent_process::eventually;
use crate::node::{Node, shared};
use crate::setup::{FOREVER, container, script};

/// Waits until a pod has written a word.
fn wait_written(node: &Node, pod: &str, word: &str) -> String {
    eventually(&format!("{pod} has written {word:?}"), || {
        let outcome = node.run_kubectl(&["logs", pod]);
        let text = outcome.stdout();
        if text.contains(word) {
            Ok(text)
        } else {
            Err(format!("{outcome:?}"))
        }
    })
}

#[test]
fn following_shows_each_line_once_and_ends_with_the_container() {
    followed(&shared());
}

pub fn followed(node: &Node) {
    let counts =
        "i=1; while [ $i -le 6 ]; do echo line $i; sleep 0.7; i=$((i+1)); done; echo done >&2";
    node.create_pod("counts", script("Never", counts));
    node.wait_started("counts");
    let outcome = node.run_kubectl(&["logs", "-f", "counts"]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    let expected = "line 1\nline 2\nline 3\nline 4\nline 5\nline 6\ndone\n";
    assert_eq!(outcome.stdout(), expected);
    // And the same once more of a container that is at its end.
    assert_eq!(node.ok(&["logs", "counts"]), expected);
    assert_eq!(node.ok(&["logs", "-f", "counts"]), expected);
}

#[test]
fn the_logs_of_the_run_before_are_kept() {
    run_before(&shared());
}

pub fn run_before(node: &Node) {
    let mut spec = script(
        "OnFailure",
        &format!(
            "if [ -e /once/x ]; then echo second; {FOREVER}; fi; touch /once/x; echo first; exit 3"
        ),
    );
    spec["volumes"] = json!([{"name": "once", "emptyDir": {}}]);
    spec["containers"][0]["volumeMounts"] = json!([{"name": "once", "mountPath": "/once"}]);
    node.create_pod("again", spec);
    node.create_pod("once", script("Always", FOREVER));
    wait_written(node, "again", "second");
    assert_eq!(node.ok(&["logs", "again"]), "second\n");
    assert_eq!(node.ok(&["logs", "-p", "again"]), "first\n");
    node.wait_running("once");
    let outcome = node.run_kubectl(&["logs", "-p", "once"]);
    assert_ne!(outcome.code, Some(0), "{outcome:?}");
    let said = "previous terminated container \"main\" in pod \"once\" not found";
    assert!(outcome.stderr().contains(said), "{outcome:?}");
}

#[test]
fn lines_are_chosen_by_time_count_and_size() {
    let node = shared();
    let lines = |what: &str| format!("for i in 1 2 3 4 5; do echo {what} $i; done");
    let writes = format!("{}; sleep 8; {}; {FOREVER}", lines("old"), lines("new"));
    node.create_pod("times", script("Always", &writes));
    let all = wait_written(&node, "times", "new 5");
    let expected =
        |what: &str, from: u32| -> String { (from..=5).map(|i| format!("{what} {i}\n")).collect() };
    assert_eq!(all, expected("old", 1) + &expected("new", 1));

    let stamped = node.ok(&["logs", "--timestamps", "times"]);
    let stamped: Vec<(jiff::Timestamp, &str)> = stamped
        .lines()
        .map(|line| {
            let (time, text) = line.split_once(' ').expect("a time before each line");
            (time.parse().expect("a time"), text)
        })
        .collect();
    let texts: String = stamped
        .iter()
        .map(|(_, text)| format!("{text}\n"))
        .collect();
    assert_eq!(texts, all);
    assert!(stamped.is_sorted_by_key(|(time, _)| *time), "{stamped:?}");
    let new = stamped[5].0;
    assert!(
        new.duration_since(stamped[4].0).as_secs() > 6,
        "{stamped:?}"
    );

    // Both count in seconds; between old and new lie more than seven.
    let since = jiff::Timestamp::from_second(new.as_second()).unwrap();
    let since = format!("--since-time={since}");
    assert_eq!(node.ok(&["logs", &since, "times"]), expected("new", 1));
    let ago = jiff::Timestamp::now().duration_since(new).as_secs_f64() + 6.0;
    let ago = format!("--since={ago:.0}s");
    assert_eq!(node.ok(&["logs", &ago, "times"]), expected("new", 1));
    assert_eq!(node.ok(&["logs", "--since=1h", "times"]), all);

    assert_eq!(node.ok(&["logs", "--tail=3", "times"]), expected("new", 3));
    assert_eq!(node.ok(&["logs", "--tail=0", "times"]), "");
    assert_eq!(node.ok(&["logs", "--tail=1000", "times"]), all);
    assert_eq!(node.ok(&["logs", "--limit-bytes=9", "times"]), all[..9]);
    assert_eq!(
        node.ok(&["logs", "--tail=2", "--limit-bytes=9", "times"]),
        "new 4\nnew"
    );
    let both = node.ok(&["logs", "--tail=1", "--timestamps", "times"]);
    assert!(
        both.ends_with("Z new 5\n") && both.lines().count() == 1,
        "{both}"
    );
}

#[test]
fn each_container_has_its_own_logs() {
    let node = shared();
    let mut spec = json!({
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 2,
        "initContainers": [container("before", "echo from before")],
        "containers": [
            container("one", &format!("echo from one; {FOREVER}")),
            container("two", &format!("echo from two; {FOREVER}")),
        ],
    });
    node.create_pod("several", spec.clone());
    spec["initContainers"][0] = container("before", FOREVER);
    node.create_pod("not-yet", spec);
    node.wait_running("several");
    for (container, text) in [
        ("before", "from before\n"),
        ("one", "from one\n"),
        ("two", "from two\n"),
    ] {
        assert_eq!(node.ok(&["logs", "several", "-c", container]), text);
    }
    let all = node.ok(&["logs", "several", "--all-containers", "--prefix"]);
    for line in [
        "[pod/several/before] from before\n",
        "[pod/several/one] from one\n",
        "[pod/several/two] from two\n",
    ] {
        assert!(all.contains(line), "{all}");
    }
    eventually("the reason to wait is told", || {
        let outcome = node.run_kubectl(&["logs", "not-yet", "-c", "one"]);
        let said = "container \"one\" in pod \"not-yet\" is waiting to start: PodInitializing";
        if outcome.code != Some(0) && outcome.stderr().contains(said) {
            Ok(())
        } else {
            Err(format!("{outcome:?}"))
        }
    });
}

#[test]
fn bytes_come_out_as_they_went_in() {
    let node = shared();
    let odd = "printf '\\377\\376\\001binary\\n'; head -c 50000 /dev/zero | tr '\\0' x; echo; \
               printf 'without an end'; exit 0";
    node.create_pod("odd", script("Never", odd));
    node.wait_pod_phase("odd", "Succeeded");
    let outcome = node.run_kubectl(&["logs", "odd"]);
    let mut expected = b"\xff\xfe\x01binary\n".to_vec();
    expected.extend([b'x'; 50_000]);
    expected.extend(b"\nwithout an end");
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert_eq!(outcome.out.len(), expected.len(), "{outcome:?}");
    assert!(outcome.out == expected, "{outcome:?}");
}

#[test]
fn a_static_pod_has_logs_under_its_mirrors_name() {
    let node = shared();
    let name = node.add_static(
        "fixed",
        script("Always", &format!("echo from a file; {FOREVER}")),
    );
    eventually("the mirror pod is there", || {
        node.try_pod(&name).ok_or("not yet".to_owned())
    });
    wait_written(&node, &name, "from a file");
    assert_eq!(node.ok(&["exec", &name, "--", "echo", "hello"]), "hello\n");
}

#[test]
fn following_goes_on_over_rotated_files() {
    over_rotations(&shared());
}

pub fn over_rotations(node: &Node) {
    // 3000 lines of 120 bytes in more than ten seconds: several files of 100 KiB.
    let padding = "x".repeat(100);
    let writes = format!(
        "i=0; while [ $i -lt 3000 ]; do echo line $i {padding}; i=$((i+1)); \
         [ $((i % 100)) -ne 0 ] || sleep 0.4; done; {FOREVER}"
    );
    let uid = node.create_pod("much", script("Always", &writes));
    node.wait_started("much");
    let mut kubectl = node.start_kubectl(&["logs", "-f", "much"]);
    kubectl.wait_stdout("line 2999 ");
    let text = kubectl.stdout();
    let numbers: Vec<u32> = text
        .lines()
        .map(|line| {
            line.split(' ')
                .nth(1)
                .expect("a number")
                .parse()
                .expect("a number")
        })
        .collect();
    let expected: Vec<u32> = (0..3000).collect();
    if numbers != expected {
        let first = numbers.iter().zip(&expected).position(|(a, b)| a != b);
        panic!("{} lines, the first wrong one at {first:?}", numbers.len());
    }
    let files = || -> Vec<(String, u64)> {
        let dirs = std::fs::read_dir(node.pod_logs()).unwrap().flatten();
        let mut pods = dirs.filter(|d| d.file_name().to_string_lossy().ends_with(&uid));
        let pod = pods.next().expect("a directory of the pod's logs").path();
        let files = std::fs::read_dir(pod.join("main")).unwrap().flatten();
        files
            .map(|f| {
                let size = f.metadata().map_or(0, |m| m.len());
                (f.file_name().to_string_lossy().into_owned(), size)
            })
            .collect()
    };
    eventually(
        "logs are rotated and the old ones packed, three files in all",
        || {
            let files = files();
            let packed = files.iter().any(|(name, _)| name.ends_with(".gz"));
            if packed && files.len() == 3 {
                Ok(())
            } else {
                Err(format!("{files:?}"))
            }
        },
    );
    // What is left is continuous, up to the newest, across the files and the packed one.
    let tail = node.ok(&["logs", "--tail=5", "much"]);
    assert_eq!(tail.lines().count(), 5, "{tail}");
    assert!(
        tail.lines().last().unwrap().starts_with("line 2999 "),
        "{tail}"
    );
    // Nobody writes any more: who follows now is shown the end and waits.
    let mut late = node.start_kubectl(&["logs", "-f", "--tail=2", "much"]);
    late.wait_stdout("line 2999 ");
    node.delete_pod("much", 1);
    let outcome = late.wait_within(Duration::from_secs(60));
    assert_eq!(outcome.stdout().lines().count(), 2, "{outcome:?}");
    kubectl.wait_within(Duration::from_secs(60));
}
