use serde_json::{Value, json};

use super::*;
use crate::kuberuntime::node_context::MachineFacts;

fn pod(pod_context: &Value, container: &Value, more: &Value) -> Pod {
    let mut container = container.clone();
    container["name"] = json!("c");
    let mut spec = json!({"containers": [container], "securityContext": pod_context});
    for (key, value) in more.as_object().unwrap() {
        spec[key] = value.clone();
    }
    serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "shop", "uid": "u1"}, "spec": spec,
    }))
    .unwrap()
}

fn node() -> NodeContext {
    let mut ctx = NodeContext::new("n", "/r");
    ctx.apparmor = true;
    ctx
}

fn with(
    pod: &Pod,
    isolation: &Isolation<'_>,
    ctx: &NodeContext,
) -> Result<v1::LinuxContainerSecurityContext, String> {
    container_context(pod, &pod.containers()[0], isolation, ctx).map_err(|e| e.to_string())
}

/// The context of a container whose securityContext, and whose pod's, is this.
fn context(pod_context: Value, own: Value) -> Result<v1::LinuxContainerSecurityContext, String> {
    let pod = pod(&pod_context, &json!({"securityContext": own}), &json!({}));
    with(&pod, &Isolation::default(), &node())
}

fn profile_of(found: Option<v1::SecurityProfile>) -> String {
    found.map_or_else(String::new, |p| {
        format!("{:?} {}", p.profile_type(), p.localhost_ref)
            .trim_end()
            .to_owned()
    })
}

#[test]
fn each_field_reaches_the_runtime_and_the_container_goes_before_the_pod() {
    type Look = fn(&v1::LinuxContainerSecurityContext) -> Value;
    let user: Look = |c| json!(c.run_as_user.map(|v| v.value));
    let group: Look = |c| json!(c.run_as_group.map(|v| v.value));
    let groups: Look = |c| json!(c.supplemental_groups);
    let policy: Look = |c| json!(c.supplemental_groups_policy().as_str_name());
    let added: Look = |c| json!(c.capabilities.as_ref().map(|c| &c.add_capabilities));
    let dropped: Look = |c| json!(c.capabilities.as_ref().map(|c| &c.drop_capabilities));
    let privileged: Look = |c| json!(c.privileged);
    let read_only: Look = |c| json!(c.readonly_rootfs);
    let no_new: Look = |c| json!(c.no_new_privs);
    let masked: Look = |c| json!(c.masked_paths.len());
    let read_only_paths: Look = |c| json!(c.readonly_paths.len());
    let seccomp: Look = |c| json!(profile_of(c.seccomp.clone()));
    let apparmor: Look = |c| json!(profile_of(c.apparmor.clone()));
    let selinux: Look = |c| {
        json!(
            c.selinux_options
                .as_ref()
                .map(|o| format!("{}:{}:{}:{}", o.user, o.role, o.r#type, o.level))
        )
    };
    let localhost = |file: &str| json!({"type": "Localhost", "localhostProfile": file});
    let cases: Vec<(Look, Value, Value, Value)> = vec![
        (user, json!({}), json!({}), json!(null)),
        (user, json!({"runAsUser": 5}), json!({}), json!(5)),
        (user, json!({}), json!({"runAsUser": 6}), json!(6)),
        (
            user,
            json!({"runAsUser": 5}),
            json!({"runAsUser": 6}),
            json!(6),
        ),
        (
            user,
            json!({"runAsUser": 5}),
            json!({"runAsUser": 0}),
            json!(0),
        ),
        (group, json!({}), json!({}), json!(null)),
        (group, json!({"runAsGroup": 7}), json!({}), json!(7)),
        (
            group,
            json!({"runAsGroup": 7}),
            json!({"runAsGroup": 8}),
            json!(8),
        ),
        (groups, json!({}), json!({}), json!([])),
        (groups, json!({"fsGroup": 9}), json!({}), json!([9])),
        (
            groups,
            json!({"supplementalGroups": [1, 2]}),
            json!({}),
            json!([1, 2]),
        ),
        (
            groups,
            json!({"supplementalGroups": [1, 2], "fsGroup": 9}),
            json!({}),
            json!([9, 1, 2]),
        ),
        (policy, json!({}), json!({}), json!("Merge")),
        (
            policy,
            json!({"supplementalGroupsPolicy": "Merge"}),
            json!({}),
            json!("Merge"),
        ),
        (
            policy,
            json!({"supplementalGroupsPolicy": "Strict"}),
            json!({}),
            json!("Strict"),
        ),
        (added, json!({}), json!({}), json!(null)),
        (
            added,
            json!({}),
            json!({"capabilities": {"add": ["NET_ADMIN"]}}),
            json!(["NET_ADMIN"]),
        ),
        (
            added,
            json!({}),
            json!({"capabilities": {"add": ["CAP_CHOWN", "cap_kill"]}}),
            json!(["CHOWN", "kill"]),
        ),
        (
            added,
            json!({}),
            json!({"capabilities": {"drop": ["ALL"]}}),
            json!([]),
        ),
        (
            dropped,
            json!({}),
            json!({"capabilities": {"drop": ["ALL"]}}),
            json!(["ALL"]),
        ),
        (
            dropped,
            json!({}),
            json!({"capabilities": {"drop": ["CAP_MKNOD"]}}),
            json!(["MKNOD"]),
        ),
        (privileged, json!({}), json!({}), json!(false)),
        (
            privileged,
            json!({}),
            json!({"privileged": true}),
            json!(true),
        ),
        (read_only, json!({}), json!({}), json!(false)),
        (
            read_only,
            json!({}),
            json!({"readOnlyRootFilesystem": true}),
            json!(true),
        ),
        (
            read_only,
            json!({}),
            json!({"readOnlyRootFilesystem": false}),
            json!(false),
        ),
        (no_new, json!({}), json!({}), json!(false)),
        (
            no_new,
            json!({}),
            json!({"allowPrivilegeEscalation": true}),
            json!(false),
        ),
        (
            no_new,
            json!({}),
            json!({"allowPrivilegeEscalation": false}),
            json!(true),
        ),
        (masked, json!({}), json!({}), json!(12)),
        (
            masked,
            json!({}),
            json!({"procMount": "Default"}),
            json!(12),
        ),
        (masked, json!({}), json!({"privileged": true}), json!(0)),
        (read_only_paths, json!({}), json!({}), json!(5)),
        (
            read_only_paths,
            json!({}),
            json!({"privileged": true}),
            json!(0),
        ),
        (seccomp, json!({}), json!({}), json!("Unconfined")),
        (
            seccomp,
            json!({"seccompProfile": {"type": "RuntimeDefault"}}),
            json!({}),
            json!("RuntimeDefault"),
        ),
        (
            seccomp,
            json!({}),
            json!({"seccompProfile": {"type": "RuntimeDefault"}}),
            json!("RuntimeDefault"),
        ),
        (
            seccomp,
            json!({"seccompProfile": {"type": "RuntimeDefault"}}),
            json!({"seccompProfile": {"type": "Unconfined"}}),
            json!("Unconfined"),
        ),
        (
            seccomp,
            json!({"seccompProfile": localhost("audit.json")}),
            json!({}),
            json!("Localhost /r/seccomp/audit.json"),
        ),
        (
            seccomp,
            json!({}),
            json!({"seccompProfile": localhost("p/./audit.json")}),
            json!("Localhost /r/seccomp/p/./audit.json"),
        ),
        (apparmor, json!({}), json!({}), json!("")),
        (
            apparmor,
            json!({"appArmorProfile": {"type": "RuntimeDefault"}}),
            json!({}),
            json!("RuntimeDefault"),
        ),
        (
            apparmor,
            json!({"appArmorProfile": {"type": "RuntimeDefault"}}),
            json!({"appArmorProfile": {"type": "Unconfined"}}),
            json!("Unconfined"),
        ),
        (
            apparmor,
            json!({}),
            json!({"appArmorProfile": localhost("k8s-nginx")}),
            json!("Localhost k8s-nginx"),
        ),
        (selinux, json!({}), json!({}), json!(null)),
        (
            selinux,
            json!({"seLinuxOptions": {"level": "s0:c1,c2"}}),
            json!({}),
            json!(":::s0:c1,c2"),
        ),
        (
            selinux,
            json!({"seLinuxOptions": {"level": "s0"}}),
            json!({"seLinuxOptions": {"user": "u", "role": "r", "type": "t"}}),
            json!("u:r:t:"),
        ),
    ];
    assert!(cases.len() >= 45);
    for (look, of_pod, own, want) in cases {
        let got = context(of_pod.clone(), own.clone()).map(|c| look(&c));
        assert_eq!(got, Ok(want), "pod {of_pod}, container {own}");
    }
}

#[test]
fn what_cannot_be_enforced_is_an_error_that_says_why() {
    let localhost =
        |file: &str| json!({"seccompProfile": {"type": "Localhost", "localhostProfile": file}});
    for (of_pod, own, want) in [
        (
            json!({}),
            json!({"runAsUser": -1}),
            "invalid runAsUser -1: must be between 0 and 2147483647",
        ),
        (
            json!({"runAsUser": 2_147_483_648_i64}),
            json!({}),
            "invalid runAsUser 2147483648",
        ),
        (
            json!({"runAsGroup": -2}),
            json!({}),
            "invalid runAsGroup -2",
        ),
        (json!({"fsGroup": -2}), json!({}), "invalid fsGroup -2"),
        (
            json!({"supplementalGroups": [1, -3]}),
            json!({}),
            "invalid supplementalGroups -3",
        ),
        (
            json!({"supplementalGroupsPolicy": "Odd"}),
            json!({}),
            "use Merge or Strict",
        ),
        (
            json!({}),
            json!({"procMount": "Unmasked"}),
            "`hostUsers` must be false to use `Unmasked`",
        ),
        (
            json!({}),
            json!({"procMount": "Odd"}),
            "use Default or Unmasked",
        ),
        (
            json!({}),
            json!({"privileged": true, "allowPrivilegeEscalation": false}),
            "cannot set `allowPrivilegeEscalation` to false and `privileged` to true",
        ),
        (
            json!({}),
            json!({"seccompProfile": {"type": "Localhost"}}),
            "localhostProfile must be set if seccompProfile type is Localhost.",
        ),
        (
            json!({}),
            localhost(""),
            "localhostProfile must be set if seccompProfile type is Localhost.",
        ),
        (
            json!({}),
            localhost("../../etc/passwd"),
            "must be a relative path",
        ),
        (json!({}), localhost("a/../../b"), "below /r/seccomp"),
        (
            json!({}),
            localhost("/etc/passwd"),
            "must be a relative path",
        ),
        (
            json!({}),
            json!({"seccompProfile": {"type": "Odd"}}),
            "unknown seccompProfile type \"Odd\"",
        ),
        (
            json!({}),
            json!({"appArmorProfile": {"type": "Odd"}}),
            "unknown appArmorProfile type \"Odd\"",
        ),
        (
            json!({}),
            json!({"appArmorProfile": {"type": "Localhost"}}),
            "localhostProfile must be set",
        ),
    ] {
        let error = context(of_pod.clone(), own.clone()).unwrap_err();
        assert!(
            error.contains(want),
            "pod {of_pod}, container {own}: {error}"
        );
    }
}

#[test]
fn apparmor_annotations_hold_where_the_container_has_no_field() {
    let key = "container.apparmor.security.beta.kubernetes.io/c";
    for (value, of_pod, own, want) in [
        (
            "runtime/default",
            json!({}),
            json!({}),
            Ok("RuntimeDefault"),
        ),
        ("unconfined", json!({}), json!({}), Ok("Unconfined")),
        ("localhost/mine", json!({}), json!({}), Ok("Localhost mine")),
        ("", json!({}), json!({}), Ok("")),
        (
            "mine",
            json!({}),
            json!({}),
            Err("invalid AppArmor profile name: \"mine\""),
        ),
        (
            "unconfined",
            json!({"appArmorProfile": {"type": "RuntimeDefault"}}),
            json!({}),
            Ok("Unconfined"),
        ),
        (
            "mine",
            json!({}),
            json!({"appArmorProfile": {"type": "RuntimeDefault"}}),
            Ok("RuntimeDefault"),
        ),
    ] {
        let mut pod = pod(&of_pod, &json!({"securityContext": own}), &json!({}));
        pod.metadata.annotations = Some([(key.to_owned(), value.to_owned())].into());
        let got = with(&pod, &Isolation::default(), &node()).map(|c| profile_of(c.apparmor));
        match want {
            Ok(want) => assert_eq!(got.as_deref(), Ok(want), "{value:?}"),
            Err(want) => assert!(
                got.clone().unwrap_err().contains(want),
                "{value:?}: {got:?}"
            ),
        }
    }
}

#[test]
fn a_node_without_apparmor_refuses_what_it_cannot_enforce() {
    let mut ctx = node();
    ctx.apparmor = false;
    for (profile, refused) in [
        (json!({"type": "Unconfined"}), false),
        (json!({"type": "RuntimeDefault"}), true),
        (json!({"type": "Localhost", "localhostProfile": "x"}), true),
    ] {
        let pod = pod(&json!({"appArmorProfile": profile}), &json!({}), &json!({}));
        let got = with(&pod, &Isolation::default(), &ctx);
        let text = "AppArmor is not enabled on the host";
        assert_eq!(
            got.clone().is_err_and(|e| e.contains(text)),
            refused,
            "{profile}: {got:?}"
        );
    }
}

#[test]
fn paths_of_this_machine_are_masked_where_others_are() {
    let ctx = node();
    let counters = "/sys/devices/system/cpu/cpu0/thermal_throttle";
    ctx.machine.set(MachineFacts {
        masked_paths: vec![counters.to_owned()],
        ..MachineFacts::default()
    });
    let masked = |own: &Value, more: &Value| {
        let pod = pod(&json!({}), &json!({"securityContext": own}), more);
        with(&pod, &Isolation::default(), &ctx)
            .unwrap()
            .masked_paths
    };
    let plain = masked(&json!({}), &json!({}));
    assert_eq!(plain.len(), MASKED_PATHS.len() + 1);
    assert_eq!(plain.last().map(String::as_str), Some(counters));
    assert_eq!(masked(&json!({"privileged": true}), &json!({})), [""; 0]);
    let unmasked = json!({"procMount": "Unmasked"});
    assert_eq!(masked(&unmasked, &json!({"hostUsers": false})), [""; 0]);
}

#[test]
fn seccomp_default_holds_where_nobody_says_anything() {
    let mut ctx = node();
    ctx.seccomp_default = true;
    for (own, want) in [
        (json!({}), "RuntimeDefault"),
        (json!({"privileged": true}), "Unconfined"),
        (
            json!({"seccompProfile": {"type": "Unconfined"}}),
            "Unconfined",
        ),
    ] {
        let pod = pod(&json!({}), &json!({"securityContext": own}), &json!({}));
        let got = with(&pod, &Isolation::default(), &ctx).map(|c| profile_of(c.seccomp));
        assert_eq!(got.as_deref(), Ok(want), "{own}");
    }
}

#[test]
fn the_image_says_who_runs_where_the_spec_does_not() {
    let named = |uid: Option<i64>, username: &str| {
        ImageUser::of(&v1::Image {
            uid: uid.map(int64),
            username: username.to_owned(),
            ..Default::default()
        })
    };
    for (spec, image, want) in [
        (json!({}), named(Some(1000), ""), (Some(1000), "")),
        (json!({}), named(Some(0), ""), (Some(0), "")),
        (json!({}), named(None, ""), (Some(0), "")),
        (json!({}), named(None, "nginx"), (None, "nginx")),
        (json!({"runAsUser": 7}), named(None, "nginx"), (Some(7), "")),
        (
            json!({"runAsUser": 7}),
            named(Some(1000), ""),
            (Some(7), ""),
        ),
    ] {
        let pod = pod(&spec, &json!({}), &json!({}));
        let isolation = Isolation {
            image_user: Some(&image),
            ..Default::default()
        };
        let got = with(&pod, &isolation, &node()).unwrap();
        let user = got.run_as_user.map(|v| v.value);
        assert_eq!(
            (user, got.run_as_username.as_str()),
            want,
            "{spec} {image:?}"
        );
    }
}

#[test]
fn non_root_is_verified_with_upstreams_words() {
    let numeric = |uid| ImageUser {
        uid: Some(uid),
        username: String::new(),
    };
    let name = ImageUser {
        uid: None,
        username: "nginx".to_owned(),
    };
    let whose = "(pod: \"web_shop(u1)\", container: c)";
    let breaks = "container's runAsUser breaks non-root policy";
    let root = "container has runAsNonRoot and image will run as root";
    let unknown = "container has runAsNonRoot and image has non-numeric user (nginx), cannot verify user is non-root";
    for (of_pod, own, image, want) in [
        (json!({}), json!({}), numeric(0), ""),
        (json!({"runAsNonRoot": false}), json!({}), numeric(0), ""),
        (json!({"runAsNonRoot": true}), json!({}), numeric(0), root),
        (json!({"runAsNonRoot": true}), json!({}), numeric(1), ""),
        (
            json!({"runAsNonRoot": true}),
            json!({}),
            name.clone(),
            unknown,
        ),
        (
            json!({"runAsNonRoot": true}),
            json!({"runAsNonRoot": false}),
            numeric(0),
            "",
        ),
        (
            json!({"runAsNonRoot": false}),
            json!({"runAsNonRoot": true}),
            numeric(0),
            root,
        ),
        (
            json!({"runAsUser": 0}),
            json!({"runAsNonRoot": true}),
            numeric(1),
            breaks,
        ),
        (
            json!({"runAsUser": 0}),
            json!({"runAsNonRoot": true, "runAsUser": 1}),
            numeric(0),
            "",
        ),
        (
            json!({"runAsNonRoot": true}),
            json!({"runAsUser": 5}),
            name,
            "",
        ),
    ] {
        let pod = pod(&of_pod, &json!({"securityContext": own}), &json!({}));
        let isolation = Isolation {
            image_user: Some(&image),
            ..Default::default()
        };
        let got = with(&pod, &isolation, &node()).map(drop);
        let want = if want.is_empty() {
            Ok(())
        } else {
            Err(format!("{want} {whose}"))
        };
        assert_eq!(got, want, "pod {of_pod}, container {own}, {image:?}");
    }
}

#[test]
fn namespaces_follow_the_spec() {
    use v1::NamespaceMode::{Container, Node, Pod, Target};
    for (spec, target, network, pid, ipc) in [
        (json!({}), None, Pod, Container, Pod),
        (json!({"hostNetwork": true}), None, Node, Container, Pod),
        (
            json!({"hostPID": true, "hostIPC": true}),
            None,
            Pod,
            Node,
            Node,
        ),
        (json!({"shareProcessNamespace": true}), None, Pod, Pod, Pod),
        (
            json!({"hostPID": true, "shareProcessNamespace": true}),
            None,
            Pod,
            Node,
            Pod,
        ),
        (json!({}), Some("id"), Pod, Target, Pod),
        (
            json!({"shareProcessNamespace": true}),
            Some("id"),
            Pod,
            Pod,
            Pod,
        ),
        (json!({"hostPID": true}), Some("id"), Pod, Node, Pod),
    ] {
        let pod = pod(&json!({}), &json!({}), &spec);
        let isolation = Isolation {
            target,
            ..Default::default()
        };
        let options = with(&pod, &isolation, &node())
            .unwrap()
            .namespace_options
            .unwrap();
        let got = (options.network(), options.pid(), options.ipc());
        assert_eq!(got, (network, pid, ipc), "{spec}");
        let id = if pid == Target { "id" } else { "" };
        assert_eq!(options.target_id, id, "{spec}");
        let of_sandbox = sandbox_context(&pod).unwrap().namespace_options.unwrap();
        assert_eq!(of_sandbox, pod_namespaces(&pod), "{spec}");
        assert_ne!(of_sandbox.pid(), Target);
    }
}

#[test]
fn a_pod_with_users_of_its_own_shares_nothing_with_the_node() {
    let users = crate::kuberuntime::userns::allocate(
        [],
        65_536,
        crate::kuberuntime::userns::Pool::default(),
    )
    .unwrap()
    .to_cri();
    let spec = json!({"hostUsers": false});
    let unmasked = pod(
        &json!({}),
        &json!({"securityContext": {"procMount": "Unmasked"}}),
        &spec,
    );
    let isolation = Isolation {
        user_namespace: Some(&users),
        ..Default::default()
    };
    let got = with(&unmasked, &isolation, &node()).unwrap();
    assert_eq!(got.namespace_options.unwrap().userns_options, Some(users));
    assert!(got.masked_paths.is_empty() && got.readonly_paths.is_empty());
    assert!(sandbox_context(&unmasked).is_ok());
    for field in ["hostNetwork", "hostPID", "hostIPC"] {
        let pod = pod(
            &json!({}),
            &json!({}),
            &json!({"hostUsers": false, field: true}),
        );
        let error = sandbox_context(&pod).unwrap_err().to_string();
        assert!(
            error.contains(&format!("{field} may not be set when `hostUsers` is false")),
            "{error}"
        );
    }
}

#[test]
fn the_sandbox_runs_as_the_pod_says_and_is_always_confined() {
    let of_pod = json!({
        "runAsUser": 1, "runAsGroup": 2, "fsGroup": 3, "supplementalGroups": [4],
        "supplementalGroupsPolicy": "Strict", "seLinuxOptions": {"level": "s0"},
        "seccompProfile": {"type": "Unconfined"},
    });
    let own = json!({"securityContext": {"runAsUser": 9, "privileged": true}});
    let got = sandbox_context(&pod(&of_pod, &own, &json!({}))).unwrap();
    assert_eq!(got.run_as_user, Some(int64(1)));
    assert_eq!(got.run_as_group, Some(int64(2)));
    assert_eq!(got.supplemental_groups, [3, 4]);
    assert_eq!(
        got.supplemental_groups_policy(),
        v1::SupplementalGroupsPolicy::Strict
    );
    assert_eq!(got.selinux_options.unwrap().level, "s0");
    assert_eq!(profile_of(got.seccomp), "RuntimeDefault");
    assert!(got.privileged);
    // No runtime takes a group without a user.
    let group = pod(&json!({"runAsGroup": 2}), &json!({}), &json!({}));
    assert_eq!(sandbox_context(&group).unwrap().run_as_group, None);
    let init = json!({"initContainers": [{"name": "i", "securityContext": {"privileged": true}}]});
    assert!(
        sandbox_context(&pod(&json!({}), &json!({}), &init))
            .unwrap()
            .privileged
    );
    assert!(
        !sandbox_context(&pod(&json!({}), &json!({}), &json!({})))
            .unwrap()
            .privileged
    );
}

#[test]
fn tokens_belong_to_the_user_all_containers_run_as() {
    for (of_pod, own, init, want) in [
        (json!({}), json!({}), json!({}), None),
        (json!({"runAsUser": 5}), json!({}), json!({}), Some(5)),
        (
            json!({}),
            json!({"runAsUser": 6}),
            json!({"runAsUser": 6}),
            Some(6),
        ),
        (json!({}), json!({"runAsUser": 6}), json!({}), None),
        (
            json!({"runAsUser": 5}),
            json!({"runAsUser": 6}),
            json!({}),
            None,
        ),
    ] {
        let init = json!({"initContainers": [{"name": "i", "securityContext": init}]});
        let pod = pod(&of_pod, &json!({"securityContext": own}), &init);
        assert_eq!(fs_user(&pod), want, "{of_pod} {own} {init}");
    }
    assert_eq!(
        fs_group(&pod(&json!({"fsGroup": 7}), &json!({}), &json!({}))),
        Some(7)
    );
    assert_eq!(
        fs_group(&pod(&json!({"fsGroup": -7}), &json!({}), &json!({}))),
        None
    );
}

#[test]
fn the_message_of_a_fully_specified_container() {
    let of_pod = json!({
        "fsGroup": 2000, "supplementalGroups": [3000], "runAsGroup": 1001, "runAsNonRoot": true,
        "seLinuxOptions": {"level": "s0:c1"},
    });
    let own = json!({
        "runAsUser": 1000, "privileged": false, "readOnlyRootFilesystem": true,
        "allowPrivilegeEscalation": false, "capabilities": {"add": ["NET_BIND_SERVICE"], "drop": ["ALL"]},
        "seccompProfile": {"type": "Localhost", "localhostProfile": "a.json"},
        "appArmorProfile": {"type": "RuntimeDefault"}, "procMount": "Default",
    });
    let strings = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
    use v1::security_profile::ProfileType::{Localhost, RuntimeDefault};
    assert_eq!(
        context(of_pod, own).unwrap(),
        v1::LinuxContainerSecurityContext {
            capabilities: Some(v1::Capability {
                add_capabilities: strings(&["NET_BIND_SERVICE"]),
                drop_capabilities: strings(&["ALL"]),
                add_ambient_capabilities: Vec::new(),
            }),
            namespace_options: Some(v1::NamespaceOption {
                pid: v1::NamespaceMode::Container.into(),
                ..Default::default()
            }),
            selinux_options: Some(v1::SeLinuxOption {
                level: "s0:c1".to_owned(),
                ..Default::default()
            }),
            run_as_user: Some(int64(1000)),
            run_as_group: Some(int64(1001)),
            readonly_rootfs: true,
            supplemental_groups: vec![2000, 3000],
            no_new_privs: true,
            masked_paths: strings(MASKED_PATHS),
            readonly_paths: strings(READONLY_PATHS),
            seccomp: Some(profile(Localhost, "/r/seccomp/a.json".to_owned())),
            apparmor: Some(profile(RuntimeDefault, String::new())),
            ..Default::default()
        }
    );
}
