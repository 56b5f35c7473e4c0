//! Access of pods to an image that is on the node already.

use super::*;
use crate::core::state::FactRecord;
use crate::kubeletconfig::ImageVerification;

pub(super) const IMAGE: &str = "r.io/team/app:1";

pub(super) fn secret(namespace: &str, name: &str, uid: &str, user: &str) -> PullSecrets {
    let mut secret = pull_secret(
        name,
        json!({"r.io": {"username": user, "password": "hunter2"}}),
    );
    let metadata = &mut Arc::get_mut(&mut secret).unwrap().metadata;
    metadata.namespace = Some(namespace.to_owned());
    metadata.uid = Some(uid.to_owned());
    PullSecrets {
        found: vec![secret],
        missing: Vec::new(),
    }
}

/// Only bob may pull.
fn private(policy: ImageVerification, allowlist: &[&str]) -> World {
    let mut world = world(ImageConfig::default());
    *world.service.0.only.lock().unwrap() = Some("bob".to_owned());
    world.manager = Arc::new(manager(&world, policy, allowlist));
    world
}

fn manager(world: &World, policy: ImageVerification, allowlist: &[&str]) -> ImageManager {
    ImageManager::new(
        ImageConfig::default(),
        world.clock.clone(),
        Metrics::default(),
    )
    .verifying(VerificationPolicy {
        policy,
        allowlist: allowlist.iter().map(|&p| p.to_owned()).collect(),
    })
}

fn default_policy() -> World {
    private(ImageVerification::NeverVerifyPreloadedImages, &[])
}

/// Reason of the error, number of pulls so far.
async fn outcome(
    world: &World,
    uid: &str,
    policy: &str,
    secrets: &PullSecrets,
) -> (Option<ImageErrorReason>, u32) {
    let result = world.ensure_with(&pod(uid, IMAGE, policy), secrets).await;
    (result.err().map(|e| e.reason), world.pulls())
}

fn preload(world: &World) {
    let mut present = world.service.0.present.lock().unwrap();
    present.insert(IMAGE.to_owned());
}

fn objects(world: &World) -> Vec<(String, String)> {
    let state = world.store.snapshot();
    let all = state.with_prefix::<FactRecord>("");
    all.map(|(key, r)| (key.to_string(), String::from_utf8(r.data.clone()).unwrap()))
        .collect()
}

// Invariant IMG-4.
#[tokio::test]
async fn an_image_pulled_with_a_secret_is_for_those_who_have_it() {
    use ImageErrorReason::{ErrImageNeverPull, ErrImagePull};
    let world = default_policy();
    let bob = secret("ns", "s", "s1", "bob");
    let none = PullSecrets::default();
    let may = "IfNotPresent";
    assert_eq!(outcome(&world, "a", may, &bob).await, (None, 1));
    assert_eq!(
        outcome(&world, "b", may, &bob).await,
        (None, 1),
        "the same secret needs no pull"
    );
    assert_eq!(
        outcome(&world, "c", may, &none).await,
        (Some(ErrImagePull), 2),
        "without it, the registry decides"
    );
    assert_eq!(
        outcome(&world, "d", "Never", &none).await,
        (Some(ErrImageNeverPull), 2)
    );
    assert_eq!(
        outcome(&world, "e", may, &secret("ns", "t", "t1", "eve")).await,
        (Some(ErrImagePull), 3),
        "another secret, other content"
    );
    assert_eq!(
        outcome(&world, "f", may, &secret("other", "copy", "s2", "bob")).await,
        (None, 3),
        "another secret, the same content"
    );
    assert_eq!(
        outcome(&world, "g", may, &secret("ns", "s", "s1", "robert")).await,
        (None, 3),
        "the same secret with new content"
    );
    assert_eq!(
        outcome(&world, "h", may, &secret("ns", "s", "s9", "eve")).await,
        (Some(ErrImagePull), 4),
        "a secret of the same name, made anew"
    );

    // A new agent on the same store.
    let restarted = World {
        manager: Arc::new(manager(
            &world,
            ImageVerification::NeverVerifyPreloadedImages,
            &[],
        )),
        ..world
    };
    assert_eq!(outcome(&restarted, "i", may, &bob).await, (None, 4));
    assert_eq!(
        outcome(&restarted, "j", may, &none).await,
        (Some(ErrImagePull), 5)
    );
    for (key, text) in objects(&restarted) {
        assert!(
            !text.contains("hunter2") && !text.contains("\"bob"),
            "{key}: {text}"
        );
        assert!(!key.starts_with("imagepullintents/"), "{key} is left");
    }
}

#[tokio::test]
async fn an_image_pulled_without_a_secret_is_for_everybody() {
    let world = world(ImageConfig::default());
    let none = PullSecrets::default();
    let one = secret("ns", "s", "s1", "bob");
    assert_eq!(outcome(&world, "a", "IfNotPresent", &none).await, (None, 1));
    assert_eq!(outcome(&world, "b", "Always", &one).await, (None, 2));
    assert_eq!(
        outcome(&world, "c", "IfNotPresent", &none).await,
        (None, 2),
        "a later pull with a secret takes nothing away"
    );
}

#[tokio::test]
async fn the_policy_says_which_images_are_verified() {
    use ImageVerification::{
        AlwaysVerify, NeverVerify, NeverVerifyAllowlistedImages, NeverVerifyPreloadedImages,
    };
    // Policy, allowlist, whether a pod without credentials gets a preloaded and a pulled image.
    for (policy, allowlist, preloaded, pulled) in [
        (NeverVerify, vec![], true, true),
        (NeverVerifyPreloadedImages, vec![], true, false),
        (AlwaysVerify, vec![], false, false),
        (NeverVerifyAllowlistedImages, vec![], false, false),
        (
            NeverVerifyAllowlistedImages,
            vec!["r.io/team/app"],
            true,
            true,
        ),
        (NeverVerifyAllowlistedImages, vec!["r.io/*"], true, true),
        (NeverVerifyAllowlistedImages, vec!["r.io/te"], false, false),
        (
            NeverVerifyAllowlistedImages,
            vec!["r.io/team/app/*"],
            false,
            false,
        ),
    ] {
        let none = PullSecrets::default();
        let world = private(policy, &allowlist);
        preload(&world);
        let got = outcome(&world, "a", "IfNotPresent", &none).await.0;
        assert_eq!(got.is_none(), preloaded, "{policy} {allowlist:?} preloaded");

        let world = private(policy, &allowlist);
        let bob = secret("ns", "s", "s1", "bob");
        assert_eq!(outcome(&world, "a", "Always", &bob).await, (None, 1));
        let got = outcome(&world, "b", "IfNotPresent", &none).await.0;
        assert_eq!(got.is_none(), pulled, "{policy} {allowlist:?} pulled");
    }
}

// Invariant IMG-4.
#[tokio::test]
async fn a_pull_that_fails_leaves_a_preloaded_image_to_everybody() {
    let world = default_policy();
    preload(&world);
    let none = PullSecrets::default();
    let failed = outcome(&world, "a", "Always", &none).await;
    assert_eq!(failed, (Some(ImageErrorReason::ErrImagePull), 1));
    assert_eq!(outcome(&world, "b", "IfNotPresent", &none).await, (None, 1));
}

#[tokio::test]
async fn the_dump_tells_who_may_use_an_image_and_who_does_not_get_it() {
    let world = default_policy();
    let (bob, none) = (secret("ns", "s", "s1", "bob"), PullSecrets::default());
    let shown = |image: &str| {
        let state = world.store.snapshot();
        let files = crate::core::images::files_of(&state, &qualified(IMAGE));
        let id = files.map(|(files, _)| files.id).unwrap_or_default();
        shown_access(&state, image, &id)
    };
    assert_eq!(shown(IMAGE), "preloaded");
    assert_eq!(outcome(&world, "a", "Always", &bob).await, (None, 1));
    assert_eq!(shown(IMAGE), "byCredentials");
    assert_eq!(shown("r.io/other/name:1"), "noPod", "it needs a pull");
    let refused = outcome(&world, "b", "IfNotPresent", &none).await;
    assert_eq!(refused, (Some(ImageErrorReason::ErrImagePull), 2));
    let refused = refusals(&world.store.snapshot(), IMAGE);
    assert_eq!(refused.len(), 1);
    assert_eq!(refused[0].0, PodUid::new("b"));
}

#[tokio::test]
async fn an_image_that_came_by_an_interrupted_pull_is_nobodys() {
    let world = default_policy();
    let gate = Arc::new(Semaphore::new(0));
    *world.service.0.gate.lock().unwrap() = Some(gate.clone());
    let bob = secret("ns", "s", "s1", "bob");
    let none = PullSecrets::default();
    let asking = pod("a", IMAGE, "IfNotPresent");
    {
        let pull = world.ensure_with(&asking, &bob);
        let begun = world.service.0.begun.notified();
        tokio::select! {
            _ = pull => panic!("the gate is shut"),
            () = begun => {}
        }
    }
    let mut intents = objects(&world);
    intents.retain(|(key, _)| !key.starts_with("imagefiles//"));
    assert_eq!(intents.len(), 1, "{intents:?}");
    assert!(intents[0].0.starts_with("imagepullintents//"));
    // The runtime had it all the same.
    preload(&world);
    *world.service.0.gate.lock().unwrap() = None;

    for restarted in [false, true] {
        let world = World {
            manager: if restarted {
                Arc::new(manager(
                    &world,
                    ImageVerification::NeverVerifyPreloadedImages,
                    &[],
                ))
            } else {
                Arc::clone(&world.manager)
            },
            clock: world.clock.clone(),
            store: world.store.clone(),
            recorder: MemoryRecorder::default(),
            service: world.service.clone(),
            ran_with: None,
        };
        for (uid, policy) in [
            ("x", "Always"),
            ("y", "IfNotPresent"),
            ("z", "IfNotPresent"),
        ] {
            let uid = format!("{uid}{restarted}");
            let got = outcome(&world, &uid, policy, &none).await.0;
            assert_eq!(got, Some(ImageErrorReason::ErrImagePull), "{uid}");
        }
    }
    let pulls = world.pulls();
    assert_eq!(
        outcome(&world, "b", "IfNotPresent", &bob).await,
        (None, pulls + 1)
    );
    assert_eq!(
        outcome(&world, "c", "IfNotPresent", &bob).await,
        (None, pulls + 1)
    );
}

#[tokio::test]
async fn an_image_that_landed_before_its_record_is_not_handed_out_meanwhile() {
    let mut world = default_policy();
    world.manager = Arc::new(ImageManager::new(
        ImageConfig {
            serialize_pulls: false,
            max_parallel: None,
        },
        world.clock.clone(),
        Metrics::default(),
    ));
    let gate = Arc::new(Semaphore::new(0));
    *world.service.0.gate.lock().unwrap() = Some(gate.clone());
    let bob = secret("ns", "s", "s1", "bob");
    let none = PullSecrets::default();
    let (one, two) = (
        pod("a", IMAGE, "IfNotPresent"),
        pod("b", IMAGE, "IfNotPresent"),
    );
    let first = world.ensure_with(&one, &bob);
    let second = async {
        world.service.0.begun.notified().await;
        preload(&world);
        let second = world.ensure_with(&two, &none);
        let open = async {
            world.service.0.begun.notified().await;
            gate.add_permits(2);
        };
        tokio::join!(second, open).0
    };
    let (first, second) = tokio::join!(first, second);
    first.unwrap();
    assert_eq!(second.unwrap_err().reason, ImageErrorReason::ErrImagePull);
}

#[tokio::test]
async fn records_of_images_that_are_gone_are_dropped() {
    let world = default_policy();
    let bob = secret("ns", "s", "s1", "bob");
    outcome(&world, "a", "IfNotPresent", &bob).await;
    let there = v1::Image {
        id: format!("id-of-{IMAGE}"),
        ..Default::default()
    };
    let record = |world: &World| {
        let all = objects(world);
        all.iter().any(|(key, _)| key.starts_with("imagepulls//"))
    };
    let before = world.clock.now();
    let pruned = async |images: &[v1::Image], at| {
        prune(&world.store, images, at).await.unwrap();
    };
    pruned(&[], before).await;
    assert!(
        record(&world),
        "it was written after the list was asked for"
    );
    world.clock.advance(Duration::from_secs(1));
    pruned(&[there], world.clock.now()).await;
    assert!(record(&world), "it is there");
    pruned(&[], world.clock.now()).await;
    assert!(!record(&world), "it is gone");
}

#[tokio::test]
async fn names_of_images_that_are_gone_are_dropped_once_nobody_used_them_for_an_hour() {
    let world = world(ImageConfig::default());
    let none = PullSecrets::default();
    outcome(&world, "a", "IfNotPresent", &none).await;
    *world.service.0.fail.lock().unwrap() = Some("no such image".to_owned());
    let failing = pod("b", "r.io/team/none:1", "Always");
    world.ensure_with(&failing, &none).await.unwrap_err();
    let names = |world: &World| -> Vec<String> {
        let state = world.store.snapshot();
        let all = state.with_prefix::<ImageRecord>("");
        all.map(|(name, _)| name.to_string()).collect()
    };
    let both = [IMAGE, "r.io/team/none:1"];
    assert_eq!(names(&world), both);
    let pruned = async |tags: &[&str]| {
        let image = v1::Image {
            id: "another".to_owned(),
            repo_tags: tags.iter().map(|&t| t.to_owned()).collect(),
            ..Default::default()
        };
        prune(&world.store, &[image], world.clock.now())
            .await
            .unwrap();
        names(&world)
    };
    assert_eq!(pruned(&[]).await, both, "it was used just now");
    world.clock.advance(Duration::from_secs(3600));
    assert_eq!(pruned(&[IMAGE]).await, both, "it is there");
    assert_eq!(
        pruned(&[]).await,
        ["r.io/team/none:1"],
        "a pod waits for that one"
    );
    let uid = PodUid::new("b");
    world.manager.forget_pod(&world.store, &uid).await.unwrap();
    assert_eq!(pruned(&[]).await, [""; 0]);
}

#[tokio::test]
async fn a_record_that_cannot_be_read_grants_nothing() {
    let world = default_policy();
    let bob = secret("ns", "s", "s1", "bob");
    outcome(&world, "a", "IfNotPresent", &bob).await;
    let state = world.store.snapshot();
    let (key, record) = state
        .with_prefix::<FactRecord>("imagepulls//")
        .next()
        .unwrap();
    let broken = FactRecord {
        data: b"{".to_vec(),
        ..record.clone()
    };
    world
        .store
        .commit(Transaction::new().put(key, broken))
        .await
        .unwrap();
    let none = PullSecrets::default();
    assert_eq!(
        outcome(&world, "b", "IfNotPresent", &none).await,
        (Some(ImageErrorReason::ErrImagePull), 2)
    );
    assert_eq!(
        outcome(&world, "c", "IfNotPresent", &bob).await,
        (None, 3),
        "who pulls, mends it"
    );
    assert_eq!(outcome(&world, "d", "IfNotPresent", &bob).await, (None, 3));
}

/// Accounts whose token is their name.
struct Accounts;

impl ServiceAccounts for Accounts {
    fn facts<'a>(
        &'a self,
        pod: &'a Pod,
    ) -> futures::future::BoxFuture<'a, Result<crate::objects::ServiceAccountFacts, String>> {
        let name = pod.spec_ref().service_account_name.clone();
        let facts = crate::objects::ServiceAccountFacts {
            uid: format!("uid-of-{}", name.unwrap_or_default()),
            ..Default::default()
        };
        Box::pin(async move { Ok(facts) })
    }

    fn token<'a>(
        &'a self,
        pod: &'a Pod,
        _: &'a str,
    ) -> futures::future::BoxFuture<'a, Result<zeroize::Zeroizing<String>, String>> {
        let name = pod.spec_ref().service_account_name.clone();
        Box::pin(async move { Ok(zeroize::Zeroizing::new(name.unwrap_or_default())) })
    }
}

/// A program that gives bob's credentials for a token of `robot`, and eve's for any other.
fn program(dir: &std::path::Path) -> CredentialSettings {
    use std::os::unix::fs::PermissionsExt;
    let settings = CredentialSettings {
        config: dir.join("config.yaml"),
        bin_dir: dir.to_owned(),
    };
    std::fs::write(
        &settings.config,
        "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n\
         - {name: helper, apiVersion: credentialprovider.kubelet.k8s.io/v1, defaultCacheDuration: 0s, matchImages: [r.io],\n\
         \x20  tokenAttributes: {serviceAccountTokenAudience: a, cacheType: Token, requireServiceAccount: true}}\n",
    )
    .unwrap();
    let program = dir.join("helper");
    let text = r#"#!/bin/sh
user=eve
grep -q '"serviceAccountToken":"robot"' && user=bob
printf '{"kind":"CredentialProviderResponse","apiVersion":"credentialprovider.kubelet.k8s.io/v1","cacheKeyType":"Image","auth":{"r.io":{"username":"%s","password":"hunter2"}}}' "$user"
"#;
    std::fs::write(&program, text).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    settings
}

#[tokio::test]
async fn an_image_pulled_for_a_service_account_is_for_its_pods_alone() {
    use ImageErrorReason::ErrImagePull;
    let mut world = default_policy();
    let dir = tempfile::tempdir().unwrap();
    let settings = program(dir.path());
    let providers = CredentialProviders::load(&settings, world.clock.clone());
    let providers = Arc::new(providers.with_accounts(Arc::new(Accounts)));
    let policy = ImageVerification::NeverVerifyPreloadedImages;
    world.manager =
        Arc::new(manager(&world, policy, &[]).with_credential_providers(Arc::clone(&providers)));
    let none = PullSecrets::default();
    let ensure = async |world: &World, uid: &str, account: Option<&str>| {
        let mut pod = pod(uid, IMAGE, "IfNotPresent");
        pod.spec.as_mut().unwrap().service_account_name = account.map(str::to_owned);
        let result = world.ensure_with(&pod, &none).await;
        (result.err().map(|e| e.reason), world.pulls())
    };
    assert_eq!(ensure(&world, "a", Some("robot")).await, (None, 1));
    assert_eq!(ensure(&world, "b", Some("robot")).await, (None, 1));
    assert_eq!(
        ensure(&world, "c", Some("other")).await,
        (Some(ErrImagePull), 2),
        "another account must show that it may have it"
    );
    assert_eq!(ensure(&world, "d", None).await, (Some(ErrImagePull), 3));
    let records = objects(&world);
    let record = records
        .iter()
        .find(|(key, _)| key.starts_with("imagepulls//"));
    let (key, text) = record.unwrap();
    assert!(text.contains("uid-of-robot"), "{text}");
    assert!(!text.contains("\"nodePodsAccessible\":true"), "{text}");

    // A new agent, whose program is gone: nothing but the account decides.
    std::fs::remove_file(dir.path().join("helper")).unwrap();
    let restarted = Arc::new(manager(&world, policy, &[]).with_credential_providers(providers));
    world.manager = restarted;
    assert_eq!(ensure(&world, "e", Some("robot")).await, (None, 3));

    // The record as an older agent leaves it: nobody gets the image without a pull.
    let mut older: serde_json::Value = serde_json::from_str(text).unwrap();
    let access = &mut older["credentialMapping"]["r.io/team/app"];
    let accounts = access.as_object_mut().unwrap();
    assert!(accounts.shift_remove("serviceAccounts").is_some());
    let older = FactRecord::of(&older, world.clock.now());
    let transaction = Transaction::new().put(key, older);
    world.store.commit(transaction).await.unwrap();
    assert_eq!(
        ensure(&world, "f", Some("robot")).await,
        (Some(ErrImagePull), 4)
    );
}
