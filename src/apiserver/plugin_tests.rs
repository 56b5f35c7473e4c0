//! Plugins that are shell scripts: what they are told, what they may answer, and what is said of those that fail.

use super::*;

const SECRET: &str = "s3cr3t-t0k3n";

fn cluster(value: Value) -> Cluster {
    serde_json::from_value(value).unwrap()
}

fn exec(value: Value) -> ExecConfig {
    serde_json::from_value(value).unwrap()
}

/// A plugin that runs `script`.
fn script(script: &str) -> Plugin {
    let exec = exec(json!({
        "apiVersion": V1, "interactiveMode": "Never", "command": "/bin/sh", "args": ["-c", script],
    }));
    Plugin::new(exec, &Cluster::default()).unwrap()
}

/// A plugin that prints `answer`.
fn printing(answer: &str) -> Plugin {
    let mut plugin = script("printf %s \"$ANSWER\"");
    plugin.env.push(("ANSWER".to_owned(), answer.to_owned()));
    plugin
}

fn answer(status: Value) -> String {
    json!({ "kind": KIND, "apiVersion": V1, "status": status }).to_string()
}

/// A certificate with its key, and when it ends.
fn identity() -> (String, String, i64) {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.not_after = rcgen::date_time_ymd(2031, 1, 1);
    let certificate = params.self_signed(&key).unwrap();
    let until = Life::of_pem(certificate.pem().as_bytes()).unwrap().until;
    (certificate.pem(), key.serialize_pem(), until)
}

/// Everything that could be logged of an error.
fn told(error: &PluginError) -> String {
    let text = crate::apiserver::transport::explain(error, "", 0);
    format!("{text} {error:?}")
}

#[test]
fn plugins_that_can_never_be_run_are_refused_with_the_way_out() {
    for (given, says) in [
        (json!({ "command": "x" }), "apiVersion is missing"),
        (
            json!({ "apiVersion": "", "command": "x" }),
            "apiVersion is missing",
        ),
        (
            json!({ "apiVersion": "client.authentication.k8s.io/v1alpha1", "command": "x" }),
            "v1alpha1\" is not supported; use client.authentication.k8s.io/v1, or",
        ),
        (json!({ "apiVersion": V1BETA1 }), "command is missing"),
        (
            json!({ "apiVersion": V1BETA1, "command": "" }),
            "command is missing",
        ),
        (
            json!({ "apiVersion": V1, "command": "x" }),
            "interactiveMode is missing",
        ),
        (
            json!({ "apiVersion": V1, "command": "x", "interactiveMode": "Always" }),
            "interactiveMode Always: nobody sits before a node",
        ),
        (
            json!({ "apiVersion": V1BETA1, "command": "x", "env": [{ "value": SECRET }] }),
            "an entry of env has no name",
        ),
    ] {
        let error = Plugin::new(exec(given.clone()), &Cluster::default()).unwrap_err();
        assert!(error.contains(says), "{given}: {error}");
        assert!(
            error.starts_with("exec: ") && !error.contains(SECRET),
            "{error}"
        );
    }
    for given in [
        json!({ "apiVersion": V1BETA1, "command": "x" }),
        json!({ "apiVersion": V1BETA1, "command": "x", "interactiveMode": "IfAvailable" }),
        json!({ "apiVersion": V1, "command": "x", "interactiveMode": "Never" }),
    ] {
        Plugin::new(exec(given), &Cluster::default()).unwrap();
    }
}

#[tokio::test]
async fn a_plugin_is_told_who_asks_and_has_no_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let ca = dir.path().join("ca.pem");
    std::fs::write(&ca, "the authority").unwrap();
    let all = cluster(json!({
        "server": "https://api:6443", "tls-server-name": "kube", "certificate-authority": ca,
        "proxy-url": "http://proxy:3128",
        "extensions": [
            { "name": "other", "extension": { "not": "this" } },
            { "name": EXTENSION, "extension": { "audience": "a" } },
        ],
    }));
    let data = cluster(json!({
        "server": "https://api", "certificate-authority-data": "eA==\n", "insecure-skip-tls-verify": true,
    }));
    let told_all = json!({
        "server": "https://api:6443", "tls-server-name": "kube",
        "certificate-authority-data": "dGhlIGF1dGhvcml0eQ==", "proxy-url": "http://proxy:3128",
        "config": { "audience": "a" },
    });
    let told_data = json!({
        "server": "https://api", "insecure-skip-tls-verify": true, "certificate-authority-data": "eA==",
    });
    for (cluster, provide, version, expected) in [
        (&all, true, V1, Some(told_all)),
        (&data, true, V1BETA1, Some(told_data)),
        (&all, false, V1, None),
    ] {
        let kept = dir.path().join("kept");
        let script = r#"
            printf '%s\n%s\n%s\n' "$KUBERNETES_EXEC_INFO" "$OWN" "$*" > "$KEPT"
            # Nothing to read, and no terminal.
            cat >> "$KEPT"; test -t 0 && echo terminal >> "$KEPT"
            printf '{"kind":"ExecCredential","apiVersion":"%s","status":{"token":"t"}}' "$1""#;
        let exec = exec(json!({
            "apiVersion": version, "interactiveMode": "IfAvailable", "provideClusterInfo": provide,
            "command": "/bin/sh", "args": ["-c", script, "plugin", version, "a b"],
            "env": [{ "name": "OWN", "value": "mine" }, { "name": "KEPT", "value": kept }],
        }));
        let plugin = Plugin::new(exec, cluster).unwrap();
        let given = plugin.run().await.unwrap();
        assert_eq!(given.bearer.unwrap(), "Bearer t");
        let text = std::fs::read_to_string(&kept).unwrap();
        let (info, rest) = text.split_once('\n').unwrap();
        assert_eq!(rest, format!("mine\n{version} a b\n"));
        let mut spec = json!({ "interactive": false });
        if let Some(cluster) = expected {
            spec["cluster"] = cluster;
        }
        let info: Value = serde_json::from_str(info).unwrap();
        assert_eq!(
            info,
            json!({ "kind": KIND, "apiVersion": version, "spec": spec })
        );
    }
    let missing = cluster(json!({ "server": "https://api", "certificate-authority": "/nowhere" }));
    let exec = exec(json!({ "apiVersion": V1BETA1, "command": "x", "provideClusterInfo": true }));
    let error = Plugin::new(exec, &missing).unwrap_err();
    assert!(error.contains("certificate-authority /nowhere"), "{error}");
}

#[tokio::test]
async fn tokens_and_certificates_are_taken_until_the_earlier_end() {
    let (certificate, key, ends) = identity();
    let pair = json!({ "clientCertificateData": certificate, "clientKeyData": key });
    let with = |mut status: Value, key: &str, value: &str| {
        status[key] = value.into();
        status
    };
    let early = "2030-01-01T00:00:00Z";
    let at = |text: &str| text.parse::<jiff::Timestamp>().unwrap().as_second();
    let token = json!({ "token": SECRET });
    for (status, bearer, identity, until) in [
        (token.clone(), true, false, None),
        (
            with(token.clone(), "expirationTimestamp", early),
            true,
            false,
            Some(at(early)),
        ),
        (
            with(
                token.clone(),
                "expirationTimestamp",
                "2030-01-01T01:00:00.5+01:00",
            ),
            true,
            false,
            Some(at(early)),
        ),
        (with(token.clone(), "clientKeyData", ""), true, false, None),
        (pair.clone(), false, true, Some(ends)),
        (
            with(pair.clone(), "expirationTimestamp", early),
            false,
            true,
            Some(at(early)),
        ),
        (
            with(pair.clone(), "expirationTimestamp", "2040-01-01T00:00:00Z"),
            false,
            true,
            Some(ends),
        ),
        (with(pair.clone(), "token", SECRET), true, true, Some(ends)),
    ] {
        let given = printing(&answer(status.clone())).run().await.unwrap();
        let found = (
            given.bearer.is_some(),
            given.identity.is_some(),
            given.until,
        );
        assert_eq!(found, (bearer, identity, until), "{status}");
        let printed = format!("{given:?} {:?}", given.bearer);
        assert!(
            !printed.contains(SECRET) && !printed.contains("BEGIN"),
            "{printed}"
        );
    }
    let yaml = format!("kind: ExecCredential\napiVersion: {V1}\nstatus:\n  token: {SECRET}\n");
    let given = printing(&yaml).run().await.unwrap();
    assert_eq!(given.bearer.unwrap(), format!("Bearer {SECRET}").as_str());
}

#[tokio::test]
async fn answers_that_are_none_are_told_without_what_they_contain() {
    let (certificate, key, _) = identity();
    let of = |kind: &str, version: &str| {
        json!({ "kind": kind, "apiVersion": version, "status": { "token": SECRET } }).to_string()
    };
    for (printed, says) in [
        (String::new(), "it prints nothing"),
        (" \n".to_owned(), "it prints nothing"),
        (SECRET.to_owned(), "is no ExecCredential (line 1"),
        (
            format!("{{\"status\": {{\"token\": \"{SECRET}\""),
            "is no ExecCredential",
        ),
        (
            format!("status: {{token: [{SECRET}]}}"),
            "is no ExecCredential",
        ),
        (
            of(KIND, V1BETA1),
            "\"client.authentication.k8s.io/v1beta1\", not with",
        ),
        (of("Secret", V1), "kind \"Secret\""),
        (of("", ""), "kind \"\""),
        (of(SECRET, V1), "kind (something else)"),
        (
            json!({ "kind": KIND, "apiVersion": V1 }).to_string(),
            "has no status",
        ),
        (answer(json!({})), "neither a token nor a certificate"),
        (
            answer(json!({ "token": "" })),
            "neither a token nor a certificate",
        ),
        (
            answer(json!({ "clientCertificateData": certificate })),
            "without its key",
        ),
        (
            answer(json!({ "clientKeyData": key })),
            "without its certificate",
        ),
        (
            answer(json!({ "clientCertificateData": SECRET, "clientKeyData": key })),
            "not a certificate in PEM",
        ),
        (
            answer(json!({ "token": format!("{SECRET}\n") })),
            "characters no token has",
        ),
        (
            answer(json!({ "token": SECRET, "expirationTimestamp": "tomorrow" })),
            "is no time as",
        ),
    ] {
        let error = printing(&printed).run().await.unwrap_err();
        let told = told(&error);
        assert!(
            told.contains(says) && told.contains("/bin/sh"),
            "{printed:?}: {told}"
        );
        assert!(
            !told.contains(SECRET) && !told.contains("PRIVATE"),
            "{told}"
        );
    }
}

#[tokio::test]
async fn plugins_that_fail_are_told_with_their_standard_error_and_without_their_output() {
    let mut missing = script("");
    missing.command = "/nowhere/plugin".to_owned();
    missing.hint = Some("apt install plugin".to_owned());
    let chatter =
        format!("echo {SECRET}; yes 0123456789 | head -n 1000 >&2; echo the cause >&2; exit 3");
    for (plugin, says) in [
        (
            missing,
            &["/nowhere/plugin", "No such file", "apt install plugin"][..],
        ),
        (script("echo oops >&2; exit 7"), &["exit status: 7", "oops"]),
        (script("kill -9 $$"), &["signal: 9"]),
        (script(&chatter), &["exit status: 3", "the cause"]),
        (script("echo why >&2"), &["it prints nothing", "why"]),
        (
            script("yes | head -c 2000000"),
            &["more than 1048576 bytes"],
        ),
    ] {
        let error = plugin.run().await.unwrap_err();
        let told = told(&error);
        for part in says {
            assert!(told.contains(part), "{part}: {told}");
        }
        assert!(
            !told.contains(SECRET) && error.stderr.len() <= TOLD,
            "{told}"
        );
    }
}

#[tokio::test]
async fn a_plugin_that_hangs_is_ended_with_what_it_has_started() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("alive");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    // Both hold the pipe open; its end says that neither is left.
    let mut plugin =
        script("exec 3> \"$ALIVE\"; echo up >&3; sleep 1000 & echo waiting >&2; sleep 1000");
    plugin
        .env
        .push(("ALIVE".to_owned(), fifo.display().to_string()));
    plugin.timeout = Duration::from_secs(8);
    let reading = std::thread::spawn(move || std::fs::read_to_string(fifo).unwrap());
    let error = plugin.run().await.unwrap_err();
    assert_eq!(error.what, "no answer within 8s");
    assert!(told(&error).contains("waiting"), "{error}");
    assert_eq!(reading.join().unwrap(), "up\n");
}

#[tokio::test]
async fn what_a_plugin_leaves_running_does_not_hold_up_its_answer() {
    let mut plugin = printing(&answer(json!({ "token": SECRET })));
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    plugin.args = vec![
        "-c".to_owned(),
        "sleep 1000 >/dev/null & echo $! >\"$PID\"; printf %s \"$ANSWER\"".to_owned(),
    ];
    plugin
        .env
        .push(("PID".to_owned(), pid.to_str().unwrap().to_owned()));
    plugin.run().await.unwrap();
    // It still runs: nobody has waited for it.
    let pid = std::fs::read_to_string(pid).unwrap();
    let pid = nix::unistd::Pid::from_raw(pid.trim().parse().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
}

#[test]
fn arguments_and_environment_are_not_printed() {
    let mut plugin = script(SECRET);
    plugin.env.push(("PASSWORD".to_owned(), SECRET.to_owned()));
    let printed = format!("{plugin:?}");
    assert!(
        printed.contains("/bin/sh") && !printed.contains(SECRET),
        "{printed}"
    );
}

#[test]
fn a_program_is_looked_for_at_its_path_or_in_the_search_path() {
    let missing = |command: &str, path: Option<&str>| {
        let exec = exec(json!({
            "apiVersion": V1, "interactiveMode": "Never", "command": command, "installHint": "get it",
        }));
        let plugin = Plugin::new(exec, &Cluster::default()).unwrap();
        plugin.missing(path.map(OsString::from))
    };
    assert_eq!(missing("/bin/sh", None), None);
    assert_eq!(missing("sh", Some("/none:/bin")), None);
    for (command, path) in [
        ("/bin/no-such-program", "/bin"),
        ("/bin/", "/bin"),
        ("/etc/passwd", ""),
    ] {
        let found = missing(command, Some(path));
        assert!(
            matches!(&found, Some(Missing::Program(why)) if why.contains("(get it)")),
            "{command}: {found:?}"
        );
    }
    for path in [None, Some("/none"), Some("/etc")] {
        let found = missing("sh", path);
        assert!(matches!(found, Some(Missing::InPath(_))), "{path:?}");
    }
}
