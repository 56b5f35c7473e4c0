use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::types::host_addresses::HostAddresses;

#[test]
fn references_expand_and_escapes_do_not() {
    let env = vec![
        ("A".to_owned(), b"1".to_vec()),
        ("B".to_owned(), b"$(A)".to_vec()),
        ("EMPTY".to_owned(), Vec::new()),
    ];
    let lookup = lookup_in(&env);
    for (input, output) in [
        ("plain", "plain"),
        ("$(A)", "1"),
        ("x$(A)y$(A)", "x1y1"),
        ("$(B)", "$(A)"),
        ("$(MISSING)", "$(MISSING)"),
        ("$(EMPTY)|", "|"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$$$$(A)", "$$(A)"),
        ("$A ${A}", "$A ${A}"),
        ("$(A", "$(A"),
        ("$((A))", "$((A))"),
        ("$()", "$()"),
        ("ends with $", "ends with $"),
        ("ends with $$", "ends with $"),
        ("ü$(A)ß", "ü1ß"),
    ] {
        assert_eq!(expand(input, &lookup), output.as_bytes(), "{input}");
        assert_eq!(
            expand_text(input, &lookup).as_deref(),
            Ok(output),
            "{input}"
        );
    }
}

#[test]
fn text_that_refers_to_bytes_names_the_variable() {
    let env = vec![
        ("A".to_owned(), b"1".to_vec()),
        ("RAW".to_owned(), b"caf\xe9".to_vec()),
    ];
    let lookup = lookup_in(&env);
    assert_eq!(expand("ü$(A)$(RAW)", &lookup), b"\xc3\xbc1caf\xe9");
    let error = expand_text("$(A) $(RAW)", &lookup).unwrap_err().to_string();
    assert!(
        error.starts_with("the value of variable RAW is not UTF-8"),
        "{error}"
    );
}

fn pod(container: serde_json::Value) -> Pod {
    let mut container = container;
    container["name"] = json!("c");
    serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "shop", "uid": "u1", "labels": {"app": "x"}},
        "spec": {"serviceAccountName": "clerk", "containers": [container]},
    }))
    .unwrap()
}

fn sources() -> Sources {
    let object = |value| serde_json::from_value(value).unwrap();
    let mut sources = Sources {
        services: Some(vec![Arc::new(
            serde_json::from_value(json!({
                "metadata": {"namespace": "shop", "name": "db"},
                "spec": {"clusterIP": "10.96.0.5", "ports": [{"port": 5432}]},
            }))
            .unwrap(),
        )]),
        ..Default::default()
    };
    sources.config_maps.insert(
        "settings".to_owned(),
        Ok(Some(Arc::new(object(json!({
            "data": {"MODE": "fast", "1st": "x", "LEVEL": "$(MODE)"},
            "binaryData": {"BIN": "aGk="},
        }))))),
    );
    sources.config_maps.insert("none".to_owned(), Ok(None));
    sources.config_maps.insert(
        "away".to_owned(),
        Err("get ConfigMap shop/away: down".to_owned()),
    );
    sources.secrets.insert(
        "keys".to_owned(),
        Ok(Some(Arc::new(
            serde_json::from_value(json!({"data": {"password": "aHVudGVyMg=="}})).unwrap(),
        ))),
    );
    sources.secrets.insert("none".to_owned(), Ok(None));
    sources.allocatable.insert(
        "cpu".to_owned(),
        k8s_openapi::apimachinery::pkg::api::resource::Quantity("2".to_owned()),
    );
    sources
}

fn make(pod: &Pod, sources: &Sources) -> Result<Environment, EnvError> {
    let mut ctx = NodeContext::new("node-1", "/r");
    ctx.addresses = HostAddresses::fixed(vec![
        "192.0.2.1".parse().unwrap(),
        "2001:db8::1".parse().unwrap(),
    ]);
    make_env(
        &EnvInputs {
            pod,
            container: &pod.containers()[0],
            pod_ips: &["10.0.0.2".to_owned(), "fd00::2".to_owned()],
            sources,
        },
        &ctx,
    )
}

fn env(container: serde_json::Value) -> Vec<String> {
    make(&pod(container), &sources())
        .unwrap()
        .vars
        .into_iter()
        .filter(|(name, _)| !name.starts_with("DB_"))
        .map(|(name, value)| format!("{name}={}", String::from_utf8(value).unwrap()))
        .collect()
}

fn field(name: &str, path: &str) -> serde_json::Value {
    json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
}

#[test]
fn variables_see_earlier_ones_only() {
    assert_eq!(
        env(json!({"env": [
            {"name": "LATE", "value": "$(HOST)"},
            {"name": "HOST", "value": "h"},
            field("POD", "metadata.name"),
            {"name": "URL", "value": "http://$(HOST)/$(POD)/$(DB_SERVICE_HOST)"},
            {"name": "HOST", "value": "again"},
            {"name": "NOTHING"},
        ]})),
        [
            "LATE=$(HOST)",
            "HOST=again",
            "POD=web",
            "URL=http://h/web/10.96.0.5",
            "NOTHING=",
        ]
    );
}

#[test]
fn fields_of_the_pod_become_variables() {
    for (path, want) in [
        ("metadata.name", "web"),
        ("metadata.namespace", "shop"),
        ("metadata.uid", "u1"),
        ("metadata.labels['app']", "x"),
        ("metadata.annotations['none']", ""),
        ("spec.nodeName", "node-1"),
        ("spec.serviceAccountName", "clerk"),
        ("status.hostIP", "192.0.2.1"),
        ("status.hostIPs", "192.0.2.1,2001:db8::1"),
        ("status.podIP", "10.0.0.2"),
        ("status.podIPs", "10.0.0.2,fd00::2"),
    ] {
        assert_eq!(
            env(json!({"env": [field("F", path)]})),
            [format!("F={want}")]
        );
    }
}

#[test]
fn objects_become_variables_and_env_goes_before_env_from() {
    let container = json!({
        "envFrom": [
            {"configMapRef": {"name": "settings"}},
            {"prefix": "P_", "configMapRef": {"name": "settings"}},
            {"configMapRef": {"name": "none", "optional": true}},
        ],
        "env": [
            {"name": "MODE", "value": "slow"},
            {"name": "SEEN", "value": "$(P_MODE) $(LEVEL)"},
            {"name": "ONE", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "MODE"}}},
            {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "password"}}},
            {"name": "NO_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "x", "optional": true}}},
            {"name": "NO_MAP", "valueFrom": {"configMapKeyRef": {"name": "none", "key": "x", "optional": true}}},
            {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}}},
        ],
    });
    assert_eq!(
        env(container.clone()),
        [
            "1st=x",
            "LEVEL=$(MODE)",
            "MODE=slow",
            "P_1st=x",
            "P_LEVEL=$(MODE)",
            "P_MODE=fast",
            "SEEN=fast $(MODE)",
            "ONE=fast",
            "PASSWORD=hunter2",
            "CPU=2000",
        ]
    );
    let made = make(&pod(container), &sources()).unwrap();
    assert!(!format!("{made:?} {:?}", sources()).contains("hunter2"));
}

#[test]
fn what_cannot_be_found_is_named_with_its_container_and_variable() {
    let key = |kind: &str, name: &str, key: &str| json!({"env": [{"name": "V", "valueFrom": {kind: {"name": name, "key": key}}}]});
    for (container, begin, word) in [
        (
            key("configMapKeyRef", "none", "k"),
            "configmap \"none\" not found",
            "variable V of container c",
        ),
        (
            key("configMapKeyRef", "settings", "k"),
            "couldn't find key k in ConfigMap shop/settings",
            "variable V of container c",
        ),
        // Binary data is no variable.
        (
            key("configMapKeyRef", "settings", "BIN"),
            "couldn't find key BIN",
            "variable V",
        ),
        (
            key("configMapKeyRef", "away", "k"),
            "get ConfigMap shop/away: down",
            "variable V",
        ),
        (
            key("secretKeyRef", "none", "k"),
            "secret \"none\" not found",
            "optional",
        ),
        (
            key("secretKeyRef", "keys", "k"),
            "couldn't find key k in Secret shop/keys",
            "variable V",
        ),
        (
            json!({"envFrom": [{"secretRef": {"name": "none"}}]}),
            "secret \"none\" not found",
            "envFrom of container c",
        ),
        (
            json!({"env": [field("V", "spec.x")]}),
            "unsupported fieldPath: spec.x",
            "variable V of container c",
        ),
        (
            json!({"env": [{"name": "V", "valueFrom": {"resourceFieldRef": {"resource": "limits.x"}}}]}),
            "unsupported container resource",
            "variable V",
        ),
        (
            json!({"env": [{"name": "V", "valueFrom": {}}]}),
            "set variable V",
            "no source that is supported",
        ),
    ] {
        let text = make(&pod(container), &sources()).unwrap_err().to_string();
        assert!(text.starts_with(begin) && text.contains(word), "{text}");
    }
}

#[test]
fn variables_come_from_files_in_volumes() {
    let mut sources = sources();
    let mut file = |path: &str, content| {
        (sources.files).insert(("v".to_owned(), path.to_owned()), content);
    };
    file("env", Ok(Some(b"A='caf\xe9'\nE=''\nB=1".to_vec())));
    file("none", Ok(None));
    file("away", Err("it is not a regular file".to_owned()));
    let value = |path: &str, key: &str, optional: bool| {
        let source = json!({"volumeName": "v", "path": path, "key": key, "optional": optional});
        let pod = pod(json!({"env": [{"name": "V", "valueFrom": {"fileKeyRef": source}}]}));
        let made = make(&pod, &sources).map_err(|error| error.to_string())?;
        Ok(lookup_in(&made.vars)("V"))
    };
    for optional in [false, true] {
        assert_eq!(value("env", "A", optional), Ok(Some(b"caf\xe9".to_vec())));
    }
    for (path, key, why) in [
        ("none", "A", "the file does not exist"),
        ("env", "E", "the file has no such key"),
    ] {
        assert_eq!(value(path, key, true), Ok(None), "{path} {key}");
        let error: String = value(path, key, false).unwrap_err();
        let begin = format!(
            "set variable V of container c from key \"{key}\" of file \"{path}\" in volume \"v\": {why}"
        );
        assert!(error.starts_with(&begin), "{error}");
    }
    for (path, why) in [
        ("env", "at line 3: value must be enclosed in single quotes"),
        ("away", "it is not a regular file"),
        ("other", "the file was not read"),
    ] {
        let error: String = value(path, "N", true).unwrap_err();
        assert!(error.ends_with(why), "{error}");
    }
}

#[test]
fn an_optional_reference_still_waits_while_nobody_can_say_whether_it_exists() {
    let container = json!({"env": [{"name": "V", "valueFrom": {
        "configMapKeyRef": {"name": "away", "key": "k", "optional": true}}}]});
    assert!(make(&pod(container), &sources()).is_err());
}

#[test]
fn a_pod_waits_for_the_list_of_services_unless_it_is_static() {
    let mut pod = pod(json!({}));
    let mut sources = sources();
    assert_eq!(make(&pod, &sources).unwrap().vars.len(), 7);
    sources.services = None;
    let error = make(&pod, &sources).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("services have not yet been read at least once")
    );
    pod.metadata.annotations = Some(BTreeMap::from([(
        "kubernetes.io/config.source".to_owned(),
        "file".to_owned(),
    )]));
    assert_eq!(make(&pod, &sources).unwrap().vars, []);
}

#[test]
fn a_variable_of_the_pod_goes_before_that_of_a_service() {
    let pod = pod(json!({"env": [{"name": "DB_SERVICE_HOST", "value": "mine"}]}));
    let made = make(&pod, &sources()).unwrap().vars;
    let hosts: Vec<_> = made
        .iter()
        .filter(|(n, _)| n == "DB_SERVICE_HOST")
        .collect();
    assert_eq!(hosts, [&("DB_SERVICE_HOST".to_owned(), b"mine".to_vec())]);
}

#[test]
fn secrets_that_are_not_text_become_variables_byte_for_byte() {
    let container = json!({
        "envFrom": [{"prefix": "ALL_", "secretRef": {"name": "latin"}}],
        "env": [
            {"name": "ONE", "valueFrom": {"secretKeyRef": {"name": "latin", "key": "word"}}},
            {"name": "MADE", "value": "le $(ONE)!"},
        ],
    });
    let mut sources = sources();
    sources.services = Some(Vec::new());
    let secret = json!({"data": {"word": "Y2Fm6Q=="}});
    let secret = serde_json::from_value(secret).unwrap();
    sources
        .secrets
        .insert("latin".to_owned(), Ok(Some(Arc::new(secret))));
    let made = make(&pod(container), &sources).unwrap();
    let want: [(&str, &[u8]); 3] = [
        ("ALL_word", b"caf\xe9"),
        ("ONE", b"caf\xe9"),
        ("MADE", b"le caf\xe9!"),
    ];
    let vars = made.vars.iter();
    let vars: Vec<_> = vars.map(|(n, v)| (n.as_str(), v.as_slice())).collect();
    assert_eq!(vars, want);
    for (message, cause) in [
        ("string field contains invalid UTF-8", true),
        ("down", false),
    ] {
        let told = made.explained(message.to_owned());
        assert!(told.starts_with(message) && told.contains("ALL_word, ONE, MADE") == cause);
    }
    let secret = json!({"data": {"word": "YQBi"}});
    let secret = serde_json::from_value(secret).unwrap();
    sources
        .secrets
        .insert("nul".to_owned(), Ok(Some(Arc::new(secret))));
    let container = json!({"envFrom": [{"secretRef": {"name": "nul"}}]});
    let error = make(&pod(container), &sources).unwrap_err().to_string();
    assert!(
        error.starts_with("set variable word of container c: the value contains a NUL byte"),
        "{error}"
    );
}
