//! Unit tests; users, rights and certificates over sockets are in `tests/kubelet_api`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::sync::atomic::{AtomicI64, Ordering};

use axum::http::Method;

use super::*;
use crate::types::{BootId, certificates};

#[derive(Clone, Default)]
struct Hand(Arc<AtomicI64>);

impl Hand {
    fn advance(&self, by: Duration) {
        let ms = i64::try_from(by.as_millis()).unwrap();
        self.0.fetch_add(ms, Ordering::SeqCst);
    }
}

impl Clock for Hand {
    fn now(&self) -> Stamp {
        let ms = self.0.load(Ordering::SeqCst);
        Stamp {
            boot: BootId(1),
            boottime_ms: ms,
            wall_ms: ms,
        }
    }
}

#[test]
fn each_path_has_its_subresources_and_each_method_its_verb() {
    for (path, expected) in [
        ("/", "proxy"),
        ("/exec/ns/pod/c", "proxy"),
        ("/run/ns/pod/c", "proxy"),
        ("/attach/ns/pod/c", "proxy"),
        ("/portForward/ns/pod", "proxy"),
        ("/containerLogs/ns/pod/c", "proxy"),
        ("/debug/pprof/heap", "proxy"),
        ("/debug/flags/v", "proxy"),
        ("/stats/summary", "stats"),
        ("/stats", "stats"),
        ("/metrics", "metrics"),
        ("/metrics/", "metrics"),
        ("/metrics/cadvisor", "metrics"),
        ("/metrics/slis", "metrics"),
        ("/metricsx", "proxy"),
        ("/Metrics", "proxy"),
        ("/%6detrics", "proxy"),
        ("//metrics", "proxy"),
        ("/logs", "log"),
        ("/logs/syslog", "log"),
        ("/spec/", "spec"),
        ("/checkpoint/ns/pod/c", "checkpoint"),
        ("/statusz", "statusz"),
        ("/flagz", "flagz"),
        ("/pods", "pods proxy"),
        ("/pods/", "pods proxy"),
        ("/runningpods/", "pods proxy"),
        ("/allocatedPods", "pods proxy"),
        ("/allocatedPods/u1", "pods proxy"),
        ("/healthz", "healthz proxy"),
        ("/healthz/syncloop", "healthz proxy"),
        ("/livez", "healthz proxy"),
        ("/readyz", "healthz proxy"),
        ("/configz", "configz proxy"),
    ] {
        assert_eq!(attributes::subresources(path).join(" "), expected, "{path}");
    }
    for (method, expected) in [
        (Method::GET, "get"),
        (Method::POST, "create"),
        (Method::PUT, "update"),
        (Method::PATCH, "patch"),
        (Method::DELETE, "delete"),
        (Method::HEAD, ""),
        (Method::OPTIONS, ""),
        (Method::CONNECT, ""),
    ] {
        assert_eq!(attributes::verb(&method, "/exec/a/b/c", false), expected);
        assert_eq!(attributes::verb(&method, "/pods", true), expected);
    }
}

#[test]
fn streams_can_need_create_whatever_their_method() {
    for path in [
        "/exec/ns/pod/c",
        "/exec/ns/pod/uid/c",
        "/attach/ns/pod/c",
        "/portForward/ns/pod",
        "/run/ns/pod/c",
    ] {
        for method in [Method::GET, Method::POST, Method::HEAD, Method::CONNECT] {
            assert_eq!(attributes::verb(&method, path, true), "create", "{path}");
        }
    }
    for path in [
        "/containerLogs/ns/pod/c",
        "/logs/",
        "/runningpods/",
        "/executor",
    ] {
        assert_eq!(attributes::verb(&Method::GET, path, true), "get", "{path}");
    }
}

#[test]
fn answers_count_for_their_time_and_the_oldest_go_first() {
    let clock = Hand::default();
    let cache = Cache::new(Arc::new(clock.clone()), 3);
    let keys = Keys::new();
    let key = |n: u32| keys.of([n.to_string().as_str()]);
    cache.put(key(1), "one", Duration::from_secs(10));
    clock.advance(Duration::from_millis(9_999));
    assert_eq!(cache.get(&key(1)), Some("one"));
    clock.advance(Duration::from_millis(1));
    assert_eq!(cache.get(&key(1)), None);

    for n in 1..=3 {
        cache.put(key(n), "x", Duration::from_secs(100));
    }
    cache.put(key(1), "again", Duration::from_secs(100));
    cache.put(key(4), "x", Duration::from_secs(100));
    assert_eq!(cache.get(&key(2)), None, "the oldest");
    assert_eq!(cache.get(&key(1)), Some("again"), "it was put again");
    for round in 0..10_000 {
        cache.put(key(round % 7), "x", Duration::from_secs(1000));
        assert!(cache.len() <= 4, "{}", cache.len());
    }
}

#[test]
fn keys_tell_parts_apart_and_mean_nothing_elsewhere() {
    let keys = Keys::new();
    assert_eq!(keys.of(["a", "b"]), keys.of(["a", "b"]));
    assert_ne!(keys.of(["a", "b"]), keys.of(["ab"]));
    assert_ne!(keys.of(["a", "b"]), keys.of(["", "ab"]));
    assert_ne!(keys.of(["a"]), Keys::new().of(["a"]));
}

#[test]
fn tokens_are_read_as_upstream_reads_them() {
    for (header, expected) in [
        ("Bearer abc", Some("abc")),
        ("bearer abc", Some("abc")),
        ("  BEARER abc  ", Some("abc")),
        ("Bearer abc def", Some("abc")),
        ("Bearer", None),
        ("Bearer ", None),
        ("Bearer  abc", None),
        ("Basic abc", None),
        ("abc", None),
        ("", None),
    ] {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, header.parse().unwrap());
        let token = take_token(&mut headers);
        assert_eq!(token.as_ref().map(|t| t.as_str()), expected, "{header:?}");
        assert!(headers.is_empty(), "handlers do not see it");
    }
}

#[test]
fn tokens_in_websocket_protocols_are_taken_out() {
    let take = |offered: &[&str]| {
        let mut headers = HeaderMap::new();
        for one in offered {
            headers.append(SEC_WEBSOCKET_PROTOCOL, one.parse().unwrap());
        }
        let token = take_token(&mut headers).map(|token| token.to_string());
        let rest = headers.get(SEC_WEBSOCKET_PROTOCOL);
        (token, rest.map(|rest| rest.to_str().unwrap().to_owned()))
    };
    let own = |text: &str| Some(text.to_owned());
    let token = "base64url.bearer.authorization.k8s.io.YWJj";
    assert_eq!(take(&[token, "v5"]), (own("abc"), own("v5")));
    assert_eq!(
        take(&[&format!("v5, {token}, v4")]),
        (own("abc"), own("v5, v4"))
    );
    assert_eq!(
        take(&[token]),
        (None, None),
        "an answer could only repeat it"
    );
    assert_eq!(take(&[token, token, "v5"]), (None, None), "twice");
    assert_eq!(take(&["v5, v4"]), (None, own("v5, v4")));
    assert_eq!(
        take(&["base64url.bearer.authorization.k8s.io.%, v5"]),
        (None, own("v5"))
    );
}

#[test]
fn an_address_may_show_so_many_bad_tokens() {
    let bad = BadTokens::default();
    let clock = Hand::default();
    let (one, two): (IpAddr, IpAddr) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
    for n in 0..BAD_TOKENS {
        assert!(!bad.exhausted(one, clock.now()), "{n}");
        bad.count(one, clock.now());
    }
    assert!(bad.exhausted(one, clock.now()));
    assert!(!bad.exhausted(two, clock.now()), "others are not");
    clock.advance(BAD_TOKEN_EVERY);
    assert!(!bad.exhausted(one, clock.now()));
    bad.count(one, clock.now());
    assert!(bad.exhausted(one, clock.now()));
    bad.forgive(one);
    assert!(!bad.exhausted(one, clock.now()), "it was good after all");
    for n in 0..10_000_u32 {
        bad.count(IpAddr::from(n.to_be_bytes()), clock.now());
        assert!(bad.0.lock().unwrap().len() <= ADDRESSES_KEPT);
    }
}

#[test]
fn groups_of_users_are_upstreams() {
    let user = |groups: &[&str]| User {
        name: "somebody".to_owned(),
        groups: groups.iter().map(|&group| group.to_owned()).collect(),
        ..User::anonymous()
    };
    let anonymous = User::anonymous();
    let anonymous = User {
        groups: vec!["a".to_owned()],
        ..anonymous
    };
    assert_eq!(anonymous.authenticated().groups, ["a"]);
    assert_eq!(
        user(&["a"]).authenticated().groups,
        ["a", "system:authenticated"]
    );
    let already = user(&["system:unauthenticated"]).authenticated();
    assert_eq!(already.groups, ["system:unauthenticated"]);
}

#[tokio::test]
async fn a_question_goes_on_while_somebody_waits_and_no_longer() {
    use std::sync::atomic::AtomicUsize;
    let once = Arc::new(Once::<u8, usize>::new());
    let asked = Arc::new(AtomicUsize::new(0));
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let question = || {
        let (asked, gate) = (Arc::clone(&asked), Arc::clone(&gate));
        async move {
            let n = asked.fetch_add(1, Ordering::SeqCst);
            drop(gate.acquire().await);
            n
        }
    };
    let spawn = |key| {
        let (once, question) = (Arc::clone(&once), question());
        tokio::spawn(async move { once.ask(key, question).await })
    };
    let (first, second) = (spawn(1), spawn(1));
    while asked.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    // Whoever asked first leaves.
    first.abort();
    assert!(first.await.is_err());
    gate.add_permits(1);
    assert_eq!(second.await.unwrap(), 0);
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    assert_eq!(spawn(1).await.unwrap(), 1, "later it is asked again");
}

#[test]
fn only_so_many_requests_of_an_address_wait_for_a_decision() {
    let waiting = Waiting::default();
    let (one, two): (IpAddr, IpAddr) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
    let mut inside: Vec<_> = (0..WAITING).map(|_| waiting.enter(one).unwrap()).collect();
    assert!(waiting.enter(one).is_none());
    assert!(waiting.enter(two).is_some());
    inside.pop();
    assert!(waiting.enter(one).is_some());
    drop(inside);
    assert!(waiting.0.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_client_certificate_of_version_1_names_its_user() {
    use rustls::pki_types::pem::PemObject as _;

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ca.crt");
    std::fs::write(&path, certificates::tests::CA).unwrap();
    let clock = Hand::default();
    let moment = i64::try_from(certificates::tests::MOMENT).unwrap() * 1000;
    clock.0.store(moment, Ordering::SeqCst);
    let cas = x509::ClientCas::open(path.clone(), &clock).await;
    let shown = |pem: &str| {
        let shown = rustls::pki_types::CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
        cas.user(&[shown], clock.now())
    };
    let user = shown(certificates::tests::OLD).unwrap().unwrap();
    assert_eq!(
        (&*user.name, &*user.groups),
        ("admin", &["system:masters".to_owned()][..])
    );
    // One of the same name that nobody has signed.
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    let subject = &mut params.distinguished_name;
    subject.push(rcgen::DnType::CommonName, "admin");
    let stranger = params.self_signed(&key).unwrap().pem();
    assert!(shown(&stranger).is_err());
}
