//! What a container finds around it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::agent_process::NODE;
use crate::seen::{Feature, condition, container, event, logs, marks, phase, said, soon, status};
use crate::world::World;

pub const FEATURES: &[Feature] = &[
    ("env", env),
    ("env-file", env_file),
    ("downward", downward),
    ("dns", dns),
    ("identity", identity),
    ("fqdn", fqdn),
    ("message", message),
    ("empty-dir", empty_dir),
    ("host-path", host_path),
    ("host-network", host_network),
    ("host-port", host_port),
    ("share-pid", share_pid),
    ("qos", qos),
    ("refused", refused),
    ("gate", gate),
];

fn env(world: &World) {
    let parts = [
        "WHO=holdfast",
        "GREETING=hello holdfast, $(WHO), $(NOBODY)",
        "args=zero holdfast",
    ];
    said(world, "env", "main", &parts);
    let ended = phase(world, "env", "Succeeded");
    assert_eq!(
        container(&ended, "main")["state"]["terminated"]["exitCode"],
        0,
        "{ended}"
    );
}

fn env_file(world: &World) {
    let parts = ["COLOR=dark blue", "SHAPE=none", "SIZE=none"];
    said(world, "env-file", "main", &parts);
}

fn downward(world: &World) {
    let name = format!("NAME=downward-{NODE}");
    let node = format!("NODE={NODE}");
    let parts = [
        &name,
        "NAMESPACE=default",
        &node,
        "MEMORY=64",
        "color=\"blue\"",
    ];
    said(world, "downward", "main", &parts);
}

fn dns(world: &World) {
    phase(world, "dns", "Succeeded");
    let mut lines = logs(world, "dns", "main");
    lines.sort();
    let want = [
        "nameserver 192.0.2.7",
        "options ndots:3",
        "search one.example two.example",
    ];
    assert_eq!(lines, want);
}

fn identity(world: &World) {
    said(world, "identity", "main", &["hostname=alpha"]);
    phase(world, "identity", "Succeeded");
    let lines = logs(world, "identity", "main");
    let words: Vec<Vec<&str>> = lines
        .iter()
        .map(|l| l.split_whitespace().collect())
        .collect();
    assert!(
        words.contains(&vec!["192.0.2.9", "nine.example", "neuf.example"]),
        "{lines:?}"
    );
    let whole = "alpha.greek.default.svc.cluster.local";
    let own = words
        .iter()
        .any(|w| w.len() == 3 && w[1..] == [whole, "alpha"]);
    assert!(own, "{lines:?}");
}

fn fqdn(world: &World) {
    said(
        world,
        "fqdn",
        "main",
        &["hostname=alpha.greek.default.svc.cluster.local"],
    );
}

fn message(world: &World) {
    let ended = phase(world, "message", "Failed");
    for (name, code, told) in [("file", 3, "told by file"), ("logs", 4, "told by log")] {
        let end = &container(&ended, name)["state"]["terminated"];
        assert_eq!(end["exitCode"], code, "{ended}");
        assert_eq!(end["reason"], "Error", "{ended}");
        assert_eq!(
            end["message"].as_str().map(str::trim),
            Some(told),
            "{ended}"
        );
    }
}

fn empty_dir(world: &World) {
    said(
        world,
        "empty-dir",
        "reader",
        &["disk=shared", "memory=tmpfs"],
    );
}

fn host_path(world: &World) {
    marks(world, "host-path", &["from the pod"]);
}

fn host_network(world: &World) {
    let here = nix::unistd::gethostname().expect("a hostname");
    let hostname = format!("hostname={}", here.to_string_lossy());
    said(world, "host-network", "main", &[&hostname, "lo"]);
    let status = world.status("host-network").expect("a status");
    assert_eq!(status["podIP"], status["hostIP"], "{status}");
}

fn host_port(world: &World) {
    let node = phase(world, "host-port", "Running")["hostIP"].clone();
    let node = node.as_str().expect("an address").to_owned();
    soon("the port answers", || {
        let ask = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect((node.as_str(), 18782))?;
            stream.set_read_timeout(Some(Duration::from_secs(5)))?;
            stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        match ask() {
            Ok(answer) if answer.contains("from the pod") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
}

fn share_pid(world: &World) {
    said(world, "share-pid", "main", &["seen"]);
}

fn qos(world: &World) {
    said(world, "qos", "main", &["score=1000"]);
    let class = |pod: &str| world.status(pod).expect("a status")["qosClass"].clone();
    assert_eq!(class("qos"), "BestEffort");
    soon("a limit makes a class", || match class("downward") {
        class if class == "Burstable" => Ok(()),
        class => Err(class.to_string()),
    });
}

fn refused(world: &World) {
    let failed = phase(world, "refused", "Failed");
    assert_eq!(failed["reason"], "UnsupportedField", "{failed}");
    let field = "spec.volumes[0].flexVolume";
    assert!(failed["message"].to_string().contains(field), "{failed}");
    event(world, "refused", "UnsupportedField", field);
}

fn gate(world: &World) {
    let closed = status(world, "gate", "runs behind its gate", |s| {
        container(s, "main")["ready"] == true && condition(s, "ContainersReady") == "True"
    });
    assert_eq!(condition(&closed, "Ready"), "False", "{closed}");
    assert!(
        closed["conditions"]
            .to_string()
            .contains("ReadinessGatesNotReady"),
        "{closed}"
    );
}
