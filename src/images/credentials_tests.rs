use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::types::BootId;

struct TestClock(Mutex<i64>);

impl Clock for TestClock {
    fn now(&self) -> Stamp {
        let ms = *self.0.lock().unwrap();
        Stamp {
            boot: BootId(1),
            boottime_ms: ms,
            wall_ms: ms,
        }
    }
}

struct World {
    dir: tempfile::TempDir,
    clock: Arc<TestClock>,
}

impl World {
    /// Installs a program that counts its runs in `runs`, keeps its request in `request`, and then does this.
    fn new(script: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().display();
        let text = format!("#!/bin/sh\necho x >> {at}/runs\ncat > {at}/request\n{script}\n");
        let program = dir.path().join("helper");
        std::fs::write(&program, text).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        Self {
            dir,
            clock: Arc::new(TestClock(Mutex::new(0))),
        }
    }

    fn settings(&self) -> CredentialSettings {
        CredentialSettings {
            config: self.dir.path().join("config.yaml"),
            bin_dir: self.dir.path().to_owned(),
        }
    }

    fn write(&self, providers: &str) {
        let config = self.dir.path().join("config.yaml");
        let text = format!(
            "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n{providers}\n"
        );
        std::fs::write(&config, text).unwrap();
    }

    fn load(&self, provider: &str) -> CredentialProviders {
        self.write(&format!("- {provider}"));
        CredentialProviders::load(&self.settings(), self.clock.clone())
    }

    fn providers(&self) -> CredentialProviders {
        self.load(&provider("ann"))
    }

    fn runs(&self) -> usize {
        let text = std::fs::read_to_string(self.dir.path().join("runs")).unwrap_or_default();
        text.lines().count()
    }
}

/// The entry of the program, for a user.
fn provider(who: &str) -> String {
    format!(
        "{{name: helper, apiVersion: credentialprovider.kubelet.k8s.io/v1, defaultCacheDuration: 10m, \
         matchImages: [\"*.registry.io\"], args: [get], env: [{{name: WHO, value: {who}}}]}}"
    )
}

fn answer(key: &str, more: &str) -> String {
    format!(
        "printf '{{\"kind\":\"CredentialProviderResponse\",\"apiVersion\":\"credentialprovider.kubelet.k8s.io/v1\",\
         \"cacheKeyType\":\"{key}\",{more}\"auth\":{{\"*.registry.io\":{{\"username\":\"%s\",\"password\":\"p-%s\"}}}}}}' \"$WHO\" \"$1\""
    )
}

#[test]
fn an_answer_in_yaml_or_with_nulls_is_taken_as_upstream_takes_it() {
    let version = "credentialprovider.kubelet.k8s.io/v1";
    let head = format!("apiVersion: {version}\nkind: CredentialProviderResponse\n");
    let json = format!(
        r#"{{"apiVersion": "{version}", "kind": "CredentialProviderResponse", "cacheKeyType": "Image",
             "cacheDuration": null, "auth": {{"r.io": {{"username": null, "password": "p"}}}}}}"#
    );
    let yaml = "cacheKeyType: Registry\ncacheDuration: 5m\nauth:\n  r.io:\n    password: p\n";
    for (answer, keep) in [
        (json, None),
        (format!("{head}{yaml}"), Some(Duration::from_secs(300))),
    ] {
        let answer = Answer::parse(answer.as_bytes(), version).unwrap();
        assert_eq!(answer.keep, keep);
        let found = answer.keyring.lookup("r.io/x");
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].username.as_str(), found[0].password.as_str()),
            ("", "p")
        );
    }
    let Err(error) = Answer::parse(b"hunter2: [", version) else {
        unreachable!("it is none");
    };
    assert!(
        error.contains("line 1") && !error.contains("hunter2"),
        "{error}"
    );
}

#[tokio::test]
async fn a_program_is_asked_with_its_arguments_and_environment() {
    let world = World::new(&answer("Image", ""));
    let providers = world.providers();
    let (found, failures) = providers.lookup("a.registry.io/x").await;
    assert!(failures.is_empty());
    assert_eq!(
        (found[0].username.as_str(), found[0].password.as_str()),
        ("ann", "p-get")
    );
    let request: serde_json::Value =
        serde_json::from_slice(&std::fs::read(world.dir.path().join("request")).unwrap()).unwrap();
    assert_eq!(
        request,
        serde_json::json!({
            "kind": "CredentialProviderRequest",
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "image": "a.registry.io/x",
        })
    );
    assert!(providers.lookup("elsewhere.io/x").await.0.is_empty());
    assert_eq!(world.runs(), 1, "not asked for what it is not for");
}

#[tokio::test]
async fn answers_are_kept_by_image_registry_or_for_all_as_long_as_they_say() {
    for (key, runs) in [("Image", 3), ("Registry", 2), ("Global", 1)] {
        let world = World::new(&answer(key, ""));
        let providers = world.providers();
        for image in [
            "a.registry.io/x",
            "a.registry.io/x",
            "a.registry.io/y",
            "b.registry.io/x",
        ] {
            assert_eq!(providers.lookup(image).await.0.len(), 1, "{key} {image}");
        }
        assert_eq!(world.runs(), runs, "{key}");
        *world.clock.0.lock().unwrap() += 10 * 60 * 1000;
        providers.lookup("a.registry.io/x").await;
        assert_eq!(world.runs(), runs + 1, "{key}: the answer has grown old");
    }
    let world = World::new(&answer("Global", "\"cacheDuration\":\"0s\","));
    let providers = world.providers();
    providers.lookup("a.registry.io/x").await;
    providers.lookup("a.registry.io/x").await;
    assert_eq!(world.runs(), 2, "zero means not at all");
}

#[tokio::test]
async fn a_program_that_fails_gives_nothing_and_is_asked_again() {
    let given = Given::default();
    let metrics = Metrics::default();
    for script in [
        "echo hunter2; exit 3",
        "echo '{\"auth\": \"hunter2\"}'",
        "true",
    ] {
        let world = World::new(script);
        let providers = world.providers();
        let provider = Arc::clone(&providers.known().providers[0]);
        let error = provider
            .provide(
                "a.registry.io/x",
                &given,
                &*world.clock,
                (TIMEOUT, &metrics),
            )
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("helper") && !error.contains("hunter2"),
            "{error}"
        );
        let (found, failures) = providers.lookup("a.registry.io/x").await;
        assert!(found.is_empty());
        let named = "run credential provider helper for a.registry.io/x: ";
        assert!(failures[0].starts_with(named), "{failures:?}");
        assert_eq!(world.runs(), 2);
    }
}

#[tokio::test]
async fn a_program_that_hangs_is_given_up() {
    let world = World::new("exec sleep 600");
    let mut providers = world.providers();
    providers.timeout = Duration::from_millis(50);
    let (found, failures) = providers.lookup("a.registry.io/x").await;
    assert!(found.is_empty() && failures[0].contains("no answer"));
}

#[tokio::test]
async fn what_a_program_has_started_is_killed_with_it() {
    let world = World::new("exec 3>\"$ALIVE\"; echo up >&3; sleep 600 & sleep 600");
    let fifo = world.dir.path().join("alive");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let alive = format!("env: [{{name: ALIVE, value: {}}}, ", fifo.display());
    let providers = world.load(&provider("ann").replace("env: [", &alive));
    // All of them hold the pipe open; its end says that none is left.
    let (tell, mut heard) = tokio::sync::mpsc::unbounded_channel();
    std::thread::spawn(move || {
        let mut alive = BufReader::new(File::open(fifo).unwrap());
        let (mut first, mut rest) = (String::new(), String::new());
        alive.read_line(&mut first).unwrap();
        tell.send(first).unwrap();
        alive.read_to_string(&mut rest).unwrap();
        tell.send(rest).unwrap();
    });
    // As at the end of its time, the run is dropped.
    tokio::select! {
        _ = providers.lookup("a.registry.io/x") => panic!("it ended by itself"),
        up = heard.recv() => assert_eq!(up.as_deref(), Some("up\n")),
    }
    let end = tokio::time::timeout(Duration::from_secs(30), heard.recv()).await;
    assert_eq!(end.expect("one is left").as_deref(), Some(""));
}

#[tokio::test]
async fn an_answer_without_end_is_refused_and_error_output_is_drained() {
    let given = Given::default();
    let metrics = Metrics::default();
    let world = World::new("yes");
    let providers = world.providers();
    let provider = Arc::clone(&providers.known().providers[0]);
    let asked = provider.provide(
        "a.registry.io/x",
        &given,
        &*world.clock,
        (TIMEOUT, &metrics),
    );
    let error = asked.await.unwrap_err().to_string();
    assert!(error.contains("more than 1048576 bytes"), "{error}");

    let world = World::new("echo cause >&2; yes | head -c 2000000 >&2; exit 3");
    let providers = world.providers();
    let provider = Arc::clone(&providers.known().providers[0]);
    let asked = provider.provide(
        "a.registry.io/x",
        &given,
        &*world.clock,
        (TIMEOUT, &metrics),
    );
    let error = asked.await.unwrap_err();
    let (told, logged) = (error.to_string(), causes(&error));
    assert!(told.ends_with("it ended with exit status: 3"), "{told}");
    assert!(logged.contains("exit status: 3: cause"), "{logged}");
    assert!(logged.len() < 1024, "{}", logged.len());

    let talks = format!("yes | head -c 2000000 >&2; {}", answer("Image", ""));
    let world = World::new(&talks);
    assert_eq!(world.providers().lookup("a.registry.io/x").await.0.len(), 1);
}

#[test]
fn a_program_inherits_the_network_of_the_agent_and_none_of_its_secrets() {
    let own = [
        ("PATH", "/bin"),
        ("HOME", "/root"),
        ("https_proxy", "http://proxy:3128"),
        ("NO_PROXY", "10.0.0.0/8"),
        ("CREDENTIALS_DIRECTORY", "/run/credentials/holdfast.service"),
        ("NOTIFY_SOCKET", "/run/systemd/notify"),
        ("LISTEN_FDS", "1"),
        ("TOKEN", "hunter2"),
        ("LD_PRELOAD", "/tmp/x.so"),
    ];
    let own = own.map(|(name, value)| (name.into(), value.into()));
    let names: Vec<_> = inherited(own.into_iter()).map(|(name, _)| name).collect();
    assert_eq!(names, ["PATH", "HOME", "https_proxy", "NO_PROXY"]);
}

#[tokio::test]
async fn a_program_runs_in_that_environment() {
    let script = format!("env > \"${{0%/*}}/env\"\n{}", answer("Image", ""));
    let world = World::new(&script);
    assert_eq!(world.providers().lookup("a.registry.io/x").await.0.len(), 1);
    let seen = std::fs::read_to_string(world.dir.path().join("env")).unwrap();
    assert!(seen.lines().any(|line| line == "WHO=ann"), "{seen}");
    // A shell has some of its own. Cargo's, which this process has, are gone.
    let shells = ["WHO", "PWD", "OLDPWD", "SHLVL", "_"];
    for name in seen
        .lines()
        .filter_map(|line| Some(line.split_once('=')?.0))
    {
        assert!(
            INHERITED.contains(&name) || shells.contains(&name),
            "{seen}"
        );
    }
}

#[tokio::test]
async fn an_entry_that_cannot_be_used_is_told_to_pods_that_need_it_and_the_others_work() {
    let world = World::new(&answer("Image", ""));
    let version = "apiVersion: credentialprovider.kubelet.k8s.io/v1";
    let rest = "defaultCacheDuration: 1m, matchImages: [x.io]";
    for (bad, word) in [
        (
            format!("{{name: ../helper, {version}, {rest}}}"),
            "without path",
        ),
        (format!("{{name: odd, apiVersion: v9, {rest}}}"), "v9"),
        (
            format!("{{name: odd, {version}, defaultCacheDuration: soon, matchImages: [x.io]}}"),
            "defaultCacheDuration",
        ),
        (
            format!("{{name: odd, {version}, {rest}, tokenAttributes: {{}}}}"),
            "tokenAttributes",
        ),
        (
            format!("{{name: odd, {version}, {rest}, unknown: 1}}"),
            "unknown",
        ),
    ] {
        let text = format!("- {}\n- {bad}", provider("ann"));
        world.write(&text);
        let settings = world.settings();
        let file = std::fs::read_to_string(&settings.config).unwrap();
        let checked = CredentialProviders::check(&settings.config, &file, None).unwrap_err();
        assert!(checked.to_string().contains(word), "{checked}");
        let providers = CredentialProviders::load(&settings, world.clock.clone());
        let (found, failures) = providers.lookup("a.registry.io/x").await;
        assert_eq!((found.len(), failures.len()), (1, 0), "{failures:?}");
        let (found, failures) = providers.lookup("x.io/x").await;
        assert!(found.is_empty());
        assert_eq!(failures.len(), 1);
        let path = settings.config.to_str().unwrap();
        assert!(
            failures[0].contains(word) && failures[0].contains(path),
            "{failures:?}"
        );
    }
}

#[tokio::test]
async fn a_configuration_that_changes_is_read_again() {
    let world = World::new(&answer("Image", ""));
    let providers = world.providers();
    let user = async || {
        let (found, failures) = providers.lookup("a.registry.io/x").await;
        let user = found.first().map(|one| one.username.clone());
        (user.unwrap_or_default(), failures)
    };
    assert_eq!(user().await, ("ann".to_owned(), vec![]));
    world.write(&format!("- {}", provider("barbara")));
    assert_eq!(user().await, ("barbara".to_owned(), vec![]));
    assert_eq!(world.runs(), 2);

    // What did not change keeps its answers.
    let more = provider("carl").replace("helper", "other");
    world.write(&format!("- {}\n- {more}", provider("barbara")));
    let (found, failures) = providers.lookup("a.registry.io/x").await;
    assert_eq!((found.len(), failures.len(), world.runs()), (1, 1, 2));

    // A file that cannot be used changes nothing, and is told to pods.
    world.write("{");
    let (name, failures) = user().await;
    assert_eq!(name, "barbara");
    assert!(failures[0].contains("config.yaml"), "{failures:?}");
    std::fs::remove_file(world.settings().config).unwrap();
    let (name, failures) = user().await;
    assert_eq!(name, "barbara");
    assert!(failures[0].contains("No such file"), "{failures:?}");
    world.write(&format!("- {}", provider("barbara")));
    assert_eq!(user().await, ("barbara".to_owned(), vec![]));
    assert_eq!(world.runs(), 2);
}

#[test]
fn without_their_directory_programs_are_not_looked_for_and_no_variable_is_told() {
    let check = |provider: &str, dir: Option<&str>| {
        let text = format!(
            "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n- {provider}\n"
        );
        CredentialProviders::check(Path::new("p.yaml"), &text, dir.map(Path::new))
    };
    let provider = "name: none, apiVersion: credentialprovider.kubelet.k8s.io/v1, \
                    defaultCacheDuration: 1m, matchImages: [x.io]";
    check(&format!("{{{provider}}}"), None).unwrap();
    let error = check(&format!("{{{provider}}}"), Some("/none")).unwrap_err();
    assert!(
        error.to_string().contains("/none/none is not a file"),
        "{error}"
    );
    let env = format!("{{{provider}, env: [{{name: TOKEN, value: hunter2, extra: 1}}]}}");
    let error = check(&env, None).unwrap_err().to_string();
    assert!(
        error.contains("extra") && !error.contains("hunter2"),
        "{error}"
    );
}

#[tokio::test]
async fn what_is_missing_at_the_start_is_used_once_it_exists() {
    let world = World::new(&answer("Image", ""));
    let (program, away) = (
        world.dir.path().join("helper"),
        world.dir.path().join("away"),
    );
    std::fs::rename(&program, &away).unwrap();
    let providers = world.providers();
    let (found, failures) = providers.lookup("a.registry.io/x").await;
    assert!(found.is_empty());
    let cause = format!("start {}: No such file", program.display());
    assert!(failures[0].contains(&cause), "{failures:?}");
    std::fs::rename(&away, &program).unwrap();
    assert_eq!(providers.lookup("a.registry.io/x").await.0.len(), 1);

    // So it is with the configuration.
    let config = world.dir.path().join("config.yaml");
    let later = std::fs::read_to_string(&config).unwrap();
    std::fs::remove_file(&config).unwrap();
    let settings = CredentialSettings {
        config: config.clone(),
        bin_dir: world.dir.path().to_owned(),
    };
    let providers = CredentialProviders::load(&settings, world.clock.clone());
    let (_, failures) = providers.lookup("a.registry.io/x").await;
    assert!(
        failures[0].contains("config.yaml: No such file"),
        "{failures:?}"
    );
    std::fs::write(&config, later).unwrap();
    assert_eq!(providers.lookup("a.registry.io/x").await.0.len(), 1);
}

/// A service account, and a token per pod.
struct Accounts;

impl ServiceAccounts for Accounts {
    fn facts<'a>(
        &'a self,
        pod: &'a Pod,
    ) -> futures::future::BoxFuture<'a, Result<crate::objects::ServiceAccountFacts, String>> {
        let facts = crate::objects::ServiceAccountFacts {
            uid: "s1".to_owned(),
            annotations: BTreeMap::from([
                ("tenant".to_owned(), "blue".to_owned()),
                ("other".to_owned(), "x".to_owned()),
            ]),
        };
        let absent = pod.metadata.name.as_deref() == Some("orphan");
        Box::pin(async move {
            match absent {
                true => Err("serviceaccounts \"robot\" not found".to_owned()),
                false => Ok(facts),
            }
        })
    }

    fn token<'a>(
        &'a self,
        pod: &'a Pod,
        audience: &'a str,
    ) -> futures::future::BoxFuture<'a, Result<Zeroizing<String>, String>> {
        let name = pod.metadata.name.clone().unwrap_or_default();
        let token = format!("token-of-{name}-for-{audience}");
        Box::pin(async move { Ok(Zeroizing::new(token)) })
    }
}

fn robot(name: &str) -> Pod {
    serde_json::from_value(serde_json::json!({
        "metadata": {"namespace": "ns", "name": name, "uid": name},
        "spec": {"containers": [], "serviceAccountName": "robot"},
    }))
    .unwrap()
}

/// The entry of the program, with a token.
fn with_token(cache: &str) -> String {
    let attributes = format!(
        "tokenAttributes: {{serviceAccountTokenAudience: registry, cacheType: {cache}, requireServiceAccount: true, \
         requiredServiceAccountAnnotationKeys: [tenant]}}"
    );
    provider("ann").replace("args:", &format!("{attributes}, args:"))
}

#[tokio::test]
async fn a_program_with_token_attributes_gets_the_token_of_the_pods_service_account() {
    let world = World::new(&answer("Registry", ""));
    let providers = world.load(&with_token("ServiceAccount"));
    let providers = providers.with_accounts(Arc::new(Accounts));
    let (found, failures) = providers.find("a.registry.io/x", Some(&robot("a"))).await;
    assert_eq!(failures, [""; 0]);
    let request: serde_json::Value =
        serde_json::from_slice(&std::fs::read(world.dir.path().join("request")).unwrap()).unwrap();
    assert_eq!(
        request,
        serde_json::json!({
            "kind": "CredentialProviderRequest",
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "image": "a.registry.io/x",
            "serviceAccountToken": "token-of-a-for-registry",
            "serviceAccountAnnotations": {"tenant": "blue"},
        })
    );
    let owner = ServiceAccountSource {
        namespace: "ns".to_owned(),
        name: "robot".to_owned(),
        uid: "s1".to_owned(),
    };
    let source = crate::images::keyring::CredentialSource::ServiceAccount(Arc::new(owner));
    assert_eq!(found[0].source.as_ref(), Some(&source));

    // Another pod of the account; one without account; the node.
    let (found, _) = providers.find("a.registry.io/y", Some(&robot("b"))).await;
    assert_eq!((found.len(), world.runs()), (1, 1));
    let mut bare = robot("c");
    bare.spec.as_mut().unwrap().service_account_name = None;
    for pod in [Some(&bare), None] {
        let (found, failures) = providers.find("a.registry.io/y", pod).await;
        assert_eq!((found.len(), failures.len()), (0, 0), "{pod:?}");
    }
    let (found, failures) = providers
        .find("a.registry.io/x", Some(&robot("orphan")))
        .await;
    assert!(found.is_empty());
    assert!(failures[0].contains("\"robot\" not found"), "{failures:?}");
    assert_eq!(world.runs(), 1);
}

#[tokio::test]
async fn answers_for_a_token_serve_no_other_token() {
    let world = World::new(&answer("Global", ""));
    let providers = world.load(&with_token("Token"));
    let providers = providers.with_accounts(Arc::new(Accounts));
    for (pod, runs) in [("a", 1), ("a", 1), ("b", 2), ("a", 2)] {
        let (found, _) = providers.find("a.registry.io/x", Some(&robot(pod))).await;
        assert_eq!((found.len(), world.runs()), (1, runs), "{pod}");
    }
}

#[tokio::test]
async fn a_token_that_comes_back_as_password_must_not_be_kept_for_the_account() {
    let echo = r#"token=$(sed 's/.*"serviceAccountToken":"\([^"]*\)".*/\1/' "$(dirname "$0")/request")
printf '{"kind":"CredentialProviderResponse","apiVersion":"credentialprovider.kubelet.k8s.io/v1","cacheKeyType":"Image","auth":{"*.registry.io":{"username":"t","password":"%s"}}}' "$token""#;
    for (cache, allowed) in [("Token", true), ("ServiceAccount", false)] {
        let world = World::new(echo);
        let providers = world.load(&with_token(cache));
        let providers = providers.with_accounts(Arc::new(Accounts));
        let (found, failures) = providers.find("a.registry.io/x", Some(&robot("a"))).await;
        let passwords: Vec<_> = found.iter().map(|one| one.password.as_str()).collect();
        match allowed {
            true => assert_eq!(passwords, ["token-of-a-for-registry"], "{failures:?}"),
            false => {
                assert!(passwords.is_empty());
                assert!(
                    failures[0].contains("set tokenAttributes.cacheType to Token"),
                    "{failures:?}"
                );
                assert!(!failures[0].contains("token-of-a"), "{failures:?}");
            }
        }
    }
}

#[tokio::test]
async fn a_program_that_hangs_for_one_account_holds_up_no_other() {
    let hang = "if mkdir \"$(dirname \"$0\")/first\" 2>/dev/null; then sleep 90; fi";
    let world = World::new(&format!("{hang}\n{}", answer("Image", "")));
    let providers = world.load(&with_token("Token"));
    let providers = providers.with_accounts(Arc::new(Accounts));
    let (hanging, other) = (robot("a"), robot("b"));
    let meanwhile = async {
        while !world.dir.path().join("first").exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        providers.find("a.registry.io/x", Some(&other)).await
    };
    let (found, failures) = tokio::select! {
        _ = providers.find("a.registry.io/x", Some(&hanging)) => panic!("it waits for the other"),
        answered = meanwhile => answered,
    };
    assert_eq!((found.len(), failures.len()), (1, 0), "{failures:?}");
}
