//! Tenants that take what they can get of a node.
//!
//! Each has limits as a cluster would set them: half a core for whatever it computes itself. What is left is what the
//! agent and the runtime do for it, and whether they do it at the cost of others. What the tenant asks for outside of
//! its pods (attach, logs) goes to the agent's own port.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::body::Body;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, PostParams};
use serde_json::{Value, json};

use crate::agent_process::eventually;
use crate::direct::Socket;
use crate::neighbours::Node;
use crate::setup::{condition, container};
use crate::world::FOREVER;

/// A tenant: its name for `HOLDFAST_FAIRNESS`, and what it does.
pub struct Tenant {
    pub name: &'static str,
    pub what: &'static str,
    begin: fn(&Node) -> Load,
}

pub const ALL: &[Tenant] = &[
    Tenant {
        name: "probes",
        what: "200 probes that hang",
        begin: probes,
    },
    Tenant {
        name: "attach",
        what: "100 attach clients that do not read",
        begin: attach,
    },
    Tenant {
        name: "annotations",
        what: "256 KiB of annotations on 60 pods",
        begin: annotations,
    },
    Tenant {
        name: "log",
        what: "a log of 100 MB/s without newlines",
        begin: log,
    },
    Tenant {
        name: "files",
        what: "10,000 files deep in an emptyDir, made and deleted",
        begin: files,
    },
    Tenant {
        name: "ignores",
        what: "20 containers that ignore their end for an hour",
        begin: ignores,
    },
    Tenant {
        name: "restarts",
        what: "5 restarts a second",
        begin: restarts,
    },
];

impl Tenant {
    /// Lets the tenant begin; returns when it is at full strength.
    pub fn begin(&self, node: &Node) -> Load {
        (self.begin)(node)
    }
}

/// Says what a tenant did in so long.
type Did = dyn Fn(&Node, Duration) -> String;

/// What a tenant has under way.
pub struct Load {
    begun: Instant,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    did: Box<Did>,
}

impl Load {
    fn new(did: impl Fn(&Node, Duration) -> String + 'static) -> Self {
        Self {
            begun: Instant::now(),
            tasks: Vec::new(),
            did: Box::new(did),
        }
    }

    /// Ends it, pods and all. Returns what it did.
    pub fn end(self, node: &Node) -> String {
        let did = (self.did)(node, self.begun.elapsed());
        for task in self.tasks {
            task.abort();
            // Either it has ended by itself, or it was aborted.
            drop(node.cluster.run(task));
        }
        node.evict_tenant();
        did
    }
}

/// Limits a container to so many thousandths of a core.
fn limited(mut container: Value, milli: u32) -> Value {
    let cpu = format!("{milli}m");
    container["resources"] = json!({
        "requests": {"cpu": "1m", "memory": "16Mi"}, "limits": {"cpu": cpu, "memory": "256Mi"},
    });
    container
}

fn pod(containers: &[Value]) -> Value {
    json!({
        "restartPolicy": "Always", "terminationGracePeriodSeconds": 1, "containers": containers,
    })
}

fn labels() -> Value {
    json!({"labels": {"tenant": "hostile"}})
}

fn create(node: &Node, name: &str, spec: Value) {
    node.cluster.create_pod_with(name, labels(), spec);
}

/// Waits until so many containers of the tenant's pods run.
fn wait_running(node: &Node, prefix: &str, count: usize) {
    eventually(&format!("{count} containers of {prefix}… run"), || {
        let running = node.cluster.running();
        let of = running.iter().filter(|c| c.pod.starts_with(prefix)).count();
        if of >= count {
            Ok(())
        } else {
            Err(format!("{of} run"))
        }
    });
}

/// Half of them by HTTP, half by a command; each container has one of both.
fn probes(node: &Node) -> Load {
    const PODS: usize = 10;
    const CONTAINERS: usize = 10;
    let probe = |mut handler: Value| {
        handler["periodSeconds"] = json!(1);
        handler["timeoutSeconds"] = json!(10);
        handler["failureThreshold"] = json!(1000);
        handler
    };
    let port = node.pages.port;
    for n in 0..PODS {
        let containers: Vec<Value> = (0..CONTAINERS)
            .map(|n| {
                let mut container = limited(container(&format!("c-{n}"), FOREVER), 50);
                container["readinessProbe"] =
                    probe(json!({"httpGet": {"host": "127.0.0.1", "port": port, "path": "/hang"}}));
                container["livenessProbe"] =
                    probe(json!({"exec": {"command": ["sleep", "100000"]}}));
                container
            })
            .collect();
        create(node, &format!("hangs-{n}"), pod(&containers));
    }
    wait_running(node, "hangs-", PODS * CONTAINERS);
    Load::new(|_, _| String::new())
}

/// They are attached to a container that writes more than a MB/s.
fn attach(node: &Node) -> Load {
    const CLIENTS: usize = 100;
    let writes = "head -c 48000 /dev/urandom | base64 > /tmp/lines; while :; do cat /tmp/lines; usleep 50000; done";
    create(
        node,
        "writer",
        pod(&[limited(container("main", writes), 500)]),
    );
    node.cluster.wait_running("writer");
    let path = format!(
        "/attach/{}/writer/main?output=1&error=1",
        node.cluster.namespace
    );
    let sockets: Vec<Result<Socket, u16>> = node.cluster.run(async {
        let mut sockets = Vec::new();
        for _ in 0..CLIENTS {
            sockets.push(node.direct.websocket(&path, "v4.channel.k8s.io").await);
        }
        sockets
    });
    let open = sockets.iter().filter(|socket| socket.is_ok()).count();
    let mut load = Load::new(move |_, _| format!("{open} clients were let in"));
    // They are held, and nobody reads.
    load.tasks.push(node.cluster.spawn(async move {
        std::future::pending::<()>().await;
        drop(sockets);
    }));
    load
}

fn annotations(node: &Node) -> Load {
    const PODS: usize = 60;
    /// All that a pod may have of keys and values together.
    const LIMIT: usize = 256 * 1024;
    for n in 0..PODS {
        let mut metadata = labels();
        metadata["annotations"] = json!({"padding": "x".repeat(LIMIT - "padding".len())});
        let spec = pod(&[limited(container("main", FOREVER), 50)]);
        node.cluster
            .create_pod_with(&format!("annotated-{n}"), metadata, spec);
    }
    wait_running(node, "annotated-", PODS);
    Load::new(|_, _| String::new())
}

/// And somebody follows it, at one MB/s.
fn log(node: &Node) -> Load {
    const ROUND: f64 = 10.0;
    let writes = "head -c 7500000 /dev/urandom | base64 | tr -d '\\n' > /tmp/text; \
        while :; do cat /tmp/text; echo >> /starts/rounds; usleep 80000; done";
    let spec = pod(&[limited(container("main", writes), 500)]);
    create(node, "chatty", node.cluster.marked(spec));
    node.cluster.wait_running("chatty");
    eventually("the log is written", || {
        match node.cluster.lines("rounds").len() {
            0 => Err("nothing yet".to_owned()),
            _ => Ok(()),
        }
    });
    let before = node.cluster.lines("rounds").len();
    let mut load = Load::new(move |node, time| {
        let rounds = u32::try_from(node.cluster.lines("rounds").len() - before).expect("few");
        let rate = f64::from(rounds) * ROUND / time.as_secs_f64();
        format!("{rate:.0} MB/s were written")
    });
    let direct = node.direct.clone();
    let path = format!(
        "/containerLogs/{}/chatty/main?follow=true",
        node.cluster.namespace
    );
    load.tasks.push(node.cluster.spawn(async move {
        let answer = direct.send("GET", &path).await.expect("follow a log");
        let mut body = Body::new(answer.into_body()).into_data_stream();
        let (begun, mut read) = (Instant::now(), 0.0);
        while let Some(Ok(chunk)) = body.next().await {
            read += f64::from(u32::try_from(chunk.len()).expect("a chunk"));
            let due = begun + Duration::from_secs_f64(read / 1e6);
            tokio::time::sleep_until(due.into()).await;
        }
    }));
    load
}

/// A chain of directories that is longer than a path may be, again and again.
fn files(node: &Node) -> Load {
    let makes = format!(
        "cd /deep; name=a-name-of-twenty-byt; i=0; while [ $i -lt 250 ]; do mkdir $name; cd -P $name; \
         for f in $(seq 40); do : > $f; done; i=$((i+1)); done; touch /tmp/done; {FOREVER}"
    );
    let mut deep = limited(container("main", &makes), 500);
    deep["volumeMounts"] = json!([{"name": "deep", "mountPath": "/deep"}]);
    deep["readinessProbe"] =
        json!({"exec": {"command": ["test", "-e", "/tmp/done"]}, "periodSeconds": 1});
    let mut spec = pod(&[deep]);
    // With a limit it is measured again and again.
    spec["volumes"] = json!([{"name": "deep", "emptyDir": {"sizeLimit": "1Gi"}}]);
    spec["nodeName"] = json!(node.cluster.node);
    let rounds = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&rounds);
    let mut load = Load::new(move |_, time| {
        let rounds = rounds.load(Ordering::Relaxed);
        format!("{rounds} times in {:.0} s", time.as_secs_f64())
    });
    let pods: Api<Pod> = node.cluster.api();
    load.tasks.push(node.cluster.spawn(async move {
        for n in 0.. {
            let name = format!("deep-{n}");
            let mut metadata = labels();
            metadata["name"] = json!(name);
            let object = json!({"metadata": metadata, "spec": spec});
            let object: Pod = serde_json::from_value(object).expect("a pod");
            let created = pods.create(&PostParams::default(), &object).await;
            created.expect("create a pod");
            let gone = async |ready: bool| loop {
                let pod = pods.get_opt(&name).await.expect("get a pod");
                let pod = pod.map(|pod| serde_json::to_value(pod).expect("JSON"));
                let is_ready = |pod: &Value| condition(pod, "Ready")["status"] == "True";
                if pod.as_ref().is_none_or(|pod| ready && is_ready(pod)) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            };
            gone(true).await;
            let deleted = pods.delete(&name, &DeleteParams::default()).await;
            deleted.expect("delete a pod");
            gone(false).await;
            counted.fetch_add(1, Ordering::Relaxed);
        }
    }));
    load
}

/// Half of them have a hook before their end that hangs as well.
fn ignores(node: &Node) -> Load {
    const PODS: usize = 20;
    for n in 0..PODS {
        let mut deaf = limited(container("main", "trap '' TERM; exec sleep 100000"), 50);
        if n % 2 == 0 {
            deaf["lifecycle"] = json!({"preStop": {"exec": {"command": ["sleep", "100000"]}}});
        }
        let mut spec = pod(&[deaf]);
        spec["terminationGracePeriodSeconds"] = json!(3600);
        create(node, &format!("deaf-{n}"), spec);
    }
    for n in 0..PODS {
        node.cluster.wait_running(&format!("deaf-{n}"));
    }
    for n in 0..PODS {
        node.cluster.delete_pod(&format!("deaf-{n}"), 3600);
    }
    Load::new(|node, _| {
        let running = node.cluster.running();
        let deaf = running.iter().filter(|c| c.pod.starts_with("deaf-"));
        format!("{} run still", deaf.count())
    })
}

/// Containers that end as soon as they run, on a node whose longest back-off is a second.
fn restarts(node: &Node) -> Load {
    const PODS: usize = 7;
    let count = |node: &Node| -> u64 {
        let pods = node.cluster.pods().into_iter();
        let crashing = pods.filter(|pod| pod["metadata"]["labels"]["tenant"] == "hostile");
        let counts =
            crashing.map(|pod| pod["status"]["containerStatuses"][0]["restartCount"].clone());
        counts.filter_map(|count| count.as_u64()).sum()
    };
    for n in 0..PODS {
        let spec = pod(&[limited(container("main", "exit 1"), 70)]);
        create(node, &format!("crashes-{n}"), spec);
    }
    eventually("they restart", || match count(node) {
        0..20 => Err("not yet".to_owned()),
        _ => Ok(()),
    });
    let before = count(node);
    Load::new(move |node, time| {
        let restarts = u32::try_from(count(node) - before).expect("few");
        let rate = f64::from(restarts) / time.as_secs_f64();
        format!("{rate:.1} restarts a second")
    })
}
