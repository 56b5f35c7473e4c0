//! Features that depend on the runtime: user namespaces, stop signals.

use holdfast::store::recover::Integrity;
use holdfast_testkit::fake_cri::Behaviour;

use crate::node::Disk;
use crate::restart::{assert_nothing_wrong, node};
use crate::world::{IMAGE, World, spec};

/// First user and length of the range that the newest sandbox of a pod has for its own.
fn users(w: &World, pod: &str) -> (u32, u32) {
    let sandbox_id = &w.of_pod(pod)[0].pod_sandbox_id;
    let config = w.fake.sandbox_config(sandbox_id).unwrap();
    let options = config.linux.unwrap().security_context.unwrap();
    let options = options.namespace_options.unwrap().userns_options.unwrap();
    (options.uids[0].host_id, options.uids[0].length)
}

#[tokio::test(start_paused = true)]
async fn pods_keep_their_users_when_their_number_is_set_anew() {
    let own_users = spec("Always", r#","hostUsers":false"#);
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.fake.offer_user_namespaces(true);
    w.manifest("old", &own_users);
    w.start().await;
    w.until("the old pod runs", 60, |w| w.running("old").len() == 1)
        .await;
    assert_eq!(users(&w, "old"), (65_536, 65_536));
    // Its users own the files of all mounts.
    let container = w.fake.config(&w.running("old")[0]).unwrap();
    assert!(!container.mounts.is_empty());
    for mount in container.mounts {
        for mappings in [&mount.uid_mappings, &mount.gid_mappings] {
            let mapping = (mappings[0].host_id, mappings[0].length);
            assert_eq!(mapping, (65_536, 65_536), "{}", mount.container_path);
        }
    }
    w.crash().await;
    w.config.kubelet.user_ids_per_pod = 2 * 65_536;
    w.manifest("new", &own_users);
    w.start().await;
    w.until("the new pod runs", 60, |w| w.running("new").len() == 1)
        .await;
    assert_eq!(users(&w, "new"), (131_072, 131_072));
    // Another sandbox of the old pod has the same users.
    let sandbox = w.of_pod("old")[0].pod_sandbox_id.clone();
    assert!(w.fake.kill_sandbox(&sandbox));
    w.until("the old pod runs again", 60, |w| {
        let starts = w.starts("old").len();
        starts == 2 && w.running("old").len() == 1
    })
    .await;
    let newest = w.running("old");
    let all = w.of_pod("old");
    let again = all.iter().find(|c| newest.contains(&c.id)).unwrap();
    let config = w.fake.sandbox_config(&again.pod_sandbox_id).unwrap();
    let security = config.linux.unwrap().security_context.unwrap();
    let options = security.namespace_options.unwrap().userns_options.unwrap();
    assert_eq!(
        (options.uids[0].host_id, options.uids[0].length),
        (65_536, 65_536)
    );
    assert_nothing_wrong(&w);
}

#[tokio::test(start_paused = true)]
async fn running_pods_keep_their_users_when_the_store_is_lost() {
    let own_users = spec("Always", r#","hostUsers":false"#);
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.fake.offer_user_namespaces(true);
    w.start().await;
    for pod in ["a", "b"] {
        w.manifest(pod, &own_users);
        w.until("the pod runs", 60, |w| w.running(pod).len() == 1)
            .await;
    }
    let before = [users(&w, "a"), users(&w, "b")];
    assert_ne!(before[0], before[1]);
    w.crash().await;
    w.disk = Disk::default();
    w.integrity = Integrity::Lost;
    w.start().await;
    w.manifest("c", &own_users);
    w.until("the new pod runs", 60, |w| w.running("c").len() == 1)
        .await;
    assert!(!before.contains(&users(&w, "c")));
    for (pod, had) in ["a", "b"].into_iter().zip(before) {
        let old = w.running(pod)[0].clone();
        w.fake.exit(&old, 1);
        w.until("it runs again", 60, |w| {
            w.running(pod).len() == 1 && w.running(pod)[0] != old
        })
        .await;
        let container = w.fake.config(&w.running(pod)[0]).unwrap();
        let mapping = container.mounts[0].uid_mappings[0];
        assert_eq!((mapping.host_id, mapping.length), had, "{pod}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stop_signal_is_given_only_to_a_runtime_that_is_known_to_obey_it() {
    let mut w = node(|_, _| Behaviour::RunForever).await;
    w.fake.set_release("containerd", "v2.2.0");
    w.manifest(
        "web",
        &format!(
            r#"{{"os":{{"name":"linux"}},"containers":[{{"name":"main","image":"{IMAGE}","command":["sh"],"lifecycle":{{"stopSignal":"SIGUSR1"}}}}]}}"#
        ),
    );
    w.start().await;
    w.until("it is refused", 60, |w| {
        w.waiting("web") == "CreateContainerConfigError"
    })
    .await;
    let status = w.status("web").unwrap().status;
    let shown = serde_json::to_string(&*status).unwrap();
    for part in ["SIGUSR1", "containerd v2.2.0 ignores it", "containerd 2.3"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert_eq!(w.starts("web").len(), 0);
    w.fake.set_release("containerd", "v2.3.0");
    w.until("it runs", 120, |w| w.running("web").len() == 1)
        .await;
    let status = w.status("web").unwrap().status;
    let container = &status.container_statuses.as_ref().unwrap()[0];
    assert_eq!(container.stop_signal.as_deref(), Some("SIGUSR1"));
    assert_nothing_wrong(&w);
}
