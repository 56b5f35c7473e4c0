//! Who is known, what they may, and how long answers of the API server count.

use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use base64::Engine;
use holdfast::kubeletconfig::AuthorizationMode;
use hyper::Request;

use crate::world::{Ca, Hand, SharedReviews, World, eventually, limits};

const OK: StatusCode = StatusCode::OK;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_is_known_by_certificate_or_token_and_reviewed_as_such() {
    let world = World::new().await;
    let identity = world.ca.user("system:apiserver", Some("system:masters"));
    world.allow("system:apiserver", "get", "healthz");
    assert_eq!(
        world.ask("GET", "/healthz", None, Some(&identity)).await,
        (OK, "ok".to_owned())
    );
    let spec = world.review(|reviews| reviews.access_reviews.pop().unwrap());
    assert_eq!(spec["user"], "system:apiserver");
    assert_eq!(
        spec["groups"],
        serde_json::json!(["system:masters", "system:authenticated"])
    );
    assert_eq!(spec["resourceAttributes"]["version"], "v1");

    world.token("secret", "prometheus");
    world.allow("prometheus", "get", "proxy");
    assert_eq!(
        world.get("/healthz", Some("secret")).await.0,
        OK,
        "falls back to proxy"
    );
    let asked: Vec<_> = world.review(|reviews| {
        let of = |spec: &serde_json::Value| spec["resourceAttributes"]["subresource"].clone();
        reviews.access_reviews.iter().map(of).collect()
    });
    assert_eq!(asked, ["healthz", "proxy"]);
    // A certificate of another CA does not stand in the way of a token.
    let stranger = Ca::new("other").user("x", None);
    let (status, text) = world
        .ask("GET", "/healthz", Some("secret"), Some(&stranger))
        .await;
    assert_eq!(status, OK, "{text}");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_may_get_nodes_proxy_runs_no_commands_where_that_needs_create() {
    let exec = "/exec/ns/pod/c?output=1&command=id";
    for (requires_create, expected) in [
        // Let in, as by the kubelet: the handler has no pods yet.
        (false, StatusCode::SERVICE_UNAVAILABLE),
        (true, StatusCode::FORBIDDEN),
    ] {
        let world = World::with(limits(), |config| {
            config.streaming_requires_create = requires_create;
        })
        .await;
        world.token("t", "reader");
        world.allow("reader", "get", "proxy");
        let (status, text) = world.get(exec, Some("t")).await;
        assert_eq!(status, expected, "{text}");
        let elsewhere = world.get("/containerLogs/ns/pod/c", Some("t")).await.0;
        assert_ne!(elsewhere, StatusCode::FORBIDDEN);
        if requires_create {
            assert!(text.contains("verb=create"), "{text}");
            world.clock.advance(Duration::from_secs(60));
            world.allow("reader", "create", "proxy");
            let status = world.get(exec, Some("t")).await.0;
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        }
        world.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_count_for_their_time_and_outlast_an_outage() {
    let world = World::new().await;
    world.token("t", "u");
    world.allow("u", "get", "healthz");
    for _ in 0..5 {
        assert_eq!(world.get("/healthz", Some("t")).await.0, OK);
    }
    let asked = || world.review(|reviews| (reviews.token_reviews, reviews.access_reviews.len()));
    assert_eq!(asked(), (1, 1));

    world.review(|reviews| {
        reviews.down = true;
        reviews.rights.clear();
        reviews.tokens.clear();
    });
    world.clock.advance(Duration::from_secs(119));
    assert_eq!(
        world.get("/healthz", Some("t")).await.0,
        OK,
        "both answers still count"
    );
    world.clock.advance(Duration::from_secs(2));
    let (status, text) = world.get("/healthz", Some("t")).await;
    assert_eq!(
        status,
        StatusCode::UNAUTHORIZED,
        "the token's is over: {text}"
    );

    let identity = world.ca.user("u", None);
    let (status, text) = world.ask("GET", "/healthz", None, Some(&identity)).await;
    assert_eq!(
        status,
        StatusCode::INTERNAL_SERVER_ERROR,
        "another user to the API server"
    );
    assert!(
        text.starts_with(
            "Authorization error (user=u, verb=get, resource=nodes, subresource=healthz)"
        ),
        "{text}"
    );

    // A no counts for half a minute, and errors not at all.
    world.review(|reviews| reviews.down = false);
    let forbidden = world.ask("GET", "/healthz", None, Some(&identity)).await.0;
    assert_eq!(forbidden, StatusCode::FORBIDDEN);
    world.allow("u", "get", "healthz");
    world.clock.advance(Duration::from_secs(29));
    let forbidden = world.ask("GET", "/healthz", None, Some(&identity)).await.0;
    assert_eq!(forbidden, StatusCode::FORBIDDEN);
    world.clock.advance(Duration::from_secs(2));
    assert_eq!(
        world.ask("GET", "/healthz", None, Some(&identity)).await.0,
        OK
    );
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn equal_questions_are_asked_once_at_a_time() {
    let world = World::new().await;
    world.token("t", "u");
    world.allow("u", "get", "healthz");
    world.review(|reviews| reviews.delay = Duration::from_millis(300));
    let mut clients = Vec::new();
    for _ in 0..10 {
        clients.push(world.connect().await);
    }
    let asks = clients
        .iter_mut()
        .map(|client| client.ask("GET", "/healthz", Some("t")));
    for (status, text) in futures::future::join_all(asks).await {
        assert_eq!(status, OK, "{text}");
    }
    let asked = world.review(|reviews| (reviews.token_reviews, reviews.access_reviews.len()));
    assert_eq!(asked, (1, 1));
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_tokens_of_one_address_do_not_flood_the_api_server() {
    let world = World::new().await;
    world.token("good", "u");
    world.allow("u", "get", "healthz");
    assert_eq!(world.get("/healthz", Some("good")).await.0, OK);
    let mut client = world.connect().await;
    let mut answers = Vec::new();
    for n in 0..200 {
        answers.push(
            client
                .ask("GET", "/healthz", Some(&format!("bad-{n}")))
                .await
                .0,
        );
    }
    let refused = |status| answers.iter().filter(|one| **one == status).count();
    assert_eq!(
        refused(StatusCode::UNAUTHORIZED) + refused(StatusCode::TOO_MANY_REQUESTS),
        200
    );
    let asked = world.review(|reviews| reviews.token_reviews);
    assert!(asked <= 25, "{asked} questions");
    assert_eq!(
        world.get("/healthz", Some("good")).await.0,
        OK,
        "known ones are not touched"
    );
    world.clock.advance(Duration::from_secs(5));
    assert_eq!(
        client.ask("GET", "/healthz", Some("bad")).await.0,
        StatusCode::UNAUTHORIZED
    );
    assert!(world.metric(&["holdfast_http_requests_refused", "too_many"]) > 100.0);

    // Nor when what was known of them is to be asked again.
    world.clock.advance(Duration::from_secs(121));
    let mut last = OK;
    for n in 0..30 {
        let token = format!("worse-{n}");
        last = client.ask("GET", "/healthz", Some(&token)).await.0;
    }
    assert_eq!(last, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(world.get("/healthz", Some("good")).await.0, OK);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn anonymous_is_a_user_like_others_where_it_is_let_in() {
    let world = World::with(limits(), |config| {
        config.kubelet.authentication.anonymous = true
    })
    .await;
    assert_eq!(world.get("/healthz", None).await.0, StatusCode::FORBIDDEN);
    let spec = world.review(|reviews| reviews.access_reviews[0].clone());
    assert_eq!(spec["user"], "system:anonymous");
    assert_eq!(
        spec["groups"],
        serde_json::json!(["system:unauthenticated"])
    );
    world.clock.advance(Duration::from_secs(60));
    world.allow("system:anonymous", "get", "healthz");
    assert_eq!(world.get("/healthz", None).await.0, OK);
    // What is shown and is not good is not forgiven.
    assert_eq!(
        world.get("/healthz", Some("bad")).await.0,
        StatusCode::UNAUTHORIZED
    );
    let stranger = Ca::new("other").user("x", None);
    let answer = world.ask("GET", "/healthz", None, Some(&stranger)).await.0;
    assert_eq!(answer, StatusCode::UNAUTHORIZED);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn always_allow_asks_nobody_and_still_wants_to_know_who_it_is() {
    let clock = Hand::new();
    let world = World::over(limits(), clock, SharedReviews::default(), None, |config| {
        config.kubelet.authorization.mode = AuthorizationMode::AlwaysAllow;
    })
    .await
    .unwrap();
    let identity = world.ca.user("me", None);
    assert_eq!(
        world.ask("GET", "/healthz", None, Some(&identity)).await.0,
        OK
    );
    assert_eq!(
        world.get("/healthz", None).await.0,
        StatusCode::UNAUTHORIZED
    );
    assert_eq!(
        world.get("/healthz", Some("t")).await.0,
        StatusCode::UNAUTHORIZED
    );
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_an_api_server_to_ask_nothing_is_served() {
    let world = World::over(
        limits(),
        Hand::new(),
        SharedReviews::default(),
        None,
        |_| {},
    )
    .await
    .unwrap();
    assert_eq!((world.address, world.read_only), (None, None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_end_and_cas_change_without_a_restart() {
    let world = World::new().await;
    world.allow("me", "get", "healthz");
    let identity = world.ca.user("me", None);
    assert_eq!(
        world.ask("GET", "/healthz", None, Some(&identity)).await.0,
        OK
    );
    let other = Ca::new("next");
    let next = other.user("me", None);
    let file = world.path("client-ca.crt");
    std::fs::write(&file, &other.pem).unwrap();
    eventually("the new CA counts", async || {
        world.ask("GET", "/healthz", None, Some(&next)).await.0 == OK
    })
    .await;
    let old = world.ask("GET", "/healthz", None, Some(&identity)).await.0;
    assert_eq!(old, StatusCode::UNAUTHORIZED, "the old one does not");
    // A file that cannot be used leaves the one before in force.
    std::fs::write(&file, "rubbish").unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(world.ask("GET", "/healthz", None, Some(&next)).await.0, OK);

    let mut params = rcgen::CertificateParams::default();
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, "me");
    params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    let (certificate, key) = other.sign(params);
    let ended = crate::world::Identity { certificate, key };
    let answer = world.ask("GET", "/healthz", None, Some(&ended)).await.0;
    assert_eq!(answer, StatusCode::UNAUTHORIZED);
    // A serving certificate is none of a user.
    let (certificate, key) = other.serving("me");
    let serving = crate::world::Identity { certificate, key };
    let answer = world.ask("GET", "/healthz", None, Some(&serving)).await.0;
    assert_eq!(answer, StatusCode::UNAUTHORIZED);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_websocket_may_carry_its_token_in_a_protocol() {
    let world = World::new().await;
    world.token("t/t", "u");
    world.allow("u", "get", "healthz");
    let token = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode("t/t");
    let mut client = world.connect().await;
    for (protocols, expected) in [
        (
            format!("v5.channel.k8s.io, base64url.bearer.authorization.k8s.io.{token}"),
            OK,
        ),
        (
            format!("base64url.bearer.authorization.k8s.io.{token}"),
            StatusCode::UNAUTHORIZED,
        ),
        (
            "v5.channel.k8s.io, base64url.bearer.authorization.k8s.io.%%".to_owned(),
            StatusCode::UNAUTHORIZED,
        ),
        ("v5.channel.k8s.io".to_owned(), StatusCode::UNAUTHORIZED),
    ] {
        let request = Request::get("/healthz")
            .header("host", "n")
            .header("sec-websocket-protocol", &protocols)
            .body(Body::empty())
            .unwrap();
        let (status, _) = client.send(request).await.unwrap();
        assert_eq!(status, expected, "{protocols}");
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_read_only_port_shows_some_things_to_everybody() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let world = World::with(limits(), |config| config.kubelet.read_only_port = port).await;
    let stream = tokio::net::TcpStream::connect(world.read_only.unwrap())
        .await
        .unwrap();
    let mut client = crate::world::Client::over(stream).await;
    assert_eq!(
        client.ask("GET", "/healthz", None).await,
        (OK, "ok".to_owned())
    );
    for path in [
        "/exec/a/b/c",
        "/run/a/b/c",
        "/logs/",
        "/containerLogs/a/b/c",
        "/configz",
        "/runningpods/",
        "/debug/pprof/",
        "/healthzz",
        "/checkpoint/a/b/c",
        "/",
    ] {
        assert_eq!(
            client.ask("GET", path, None).await.0,
            StatusCode::NOT_FOUND,
            "{path}"
        );
    }
    let answer = client.ask("POST", "/pods", None).await.0;
    assert_eq!(answer, StatusCode::METHOD_NOT_ALLOWED);
    assert!(world.metric(&["kubelet_http_requests_total", "readonly", "\"healthz\""]) >= 1.0);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_read_only_port_keeps_64_connections_and_lets_the_next_one_in() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let world = World::with(limits(), |config| config.kubelet.read_only_port = port).await;
    let address = world.read_only.unwrap();
    let from = async |last: u8| {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, last], 0).into()).unwrap();
        let stream = socket.connect(address).await.unwrap();
        crate::world::Client::over(stream).await
    };
    let open = || world.metric(&["holdfast_http_connections "]);
    let crowded = || world.metric(&["holdfast_http_connections_closed_total", "crowded"]);
    let mut lone = from(3).await;
    assert_eq!(lone.ask("GET", "/healthz", None).await.0, OK);
    let mut many = Vec::new();
    for n in 1..64 {
        let mut client = from(2).await;
        let answer = client.ask("GET", "/healthz", None).await;
        assert_eq!(answer, (OK, "ok".to_owned()), "connection {n}");
        many.push(client);
    }
    eventually("64 are open", async || (open() - 64.0).abs() < 0.1).await;
    assert!(crowded() < 0.1, "nobody had to go");
    assert!(!many.iter().any(crate::world::Client::is_closed));

    // One of the address that has most gives way, the one that was quiet for longest.
    let mut next = from(4).await;
    assert_eq!(next.ask("GET", "/healthz", None).await.0, OK);
    eventually("one was closed", async || many[0].is_closed()).await;
    assert!(!many[1..].iter().any(crate::world::Client::is_closed));
    assert!((crowded() - 1.0).abs() < 0.1 && open() < 64.1);
    assert_eq!(lone.ask("GET", "/healthz", None).await.0, OK);
    assert_eq!(many[62].ask("GET", "/healthz", None).await.0, OK);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_counted_by_upstreams_labels() {
    let world = World::new().await;
    world.token("t", "u");
    world.allow("u", "get", "healthz");
    world.get("/healthz", Some("t")).await;
    world.get("/somewhere/else", Some("t")).await;
    world.ask("BREW", "/exec/a/b/c", None, None).await;
    let count = |parts: &[&str]| world.metric(&[&["kubelet_http_requests_total"], parts].concat());
    assert!(
        (count(&[
            "method=\"GET\",path=\"healthz\",server_type=\"readwrite\",long_running=\"false\""
        ]) - 1.0)
            .abs()
            < 0.1
    );
    assert!((count(&["path=\"other\""]) - 1.0).abs() < 0.1);
    assert!(
        (count(&["method=\"other\",path=\"exec\"", "long_running=\"true\""]) - 1.0).abs() < 0.1
    );
    eventually("no request is in flight", async || {
        world.metric(&["kubelet_http_inflight_requests{"]).abs() < 0.1
    })
    .await;
    assert!(world.metric(&["kubelet_http_requests_duration_seconds_count"]) >= 3.0);
    world.end().await;
}
