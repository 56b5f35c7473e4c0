//! Clients that mean harm: bounded, told about, and no matter to the others.

use std::net::IpAddr;
use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use futures::FutureExt;
use holdfast::server::kubelet::Limits;
use hyper::Request;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::Instant;

use crate::world::{Client, World, eventually, http2, limits, resident_mib, tls_from};

/// Another address than that of well-behaved clients.
const HARM: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 2));

async fn friendly(world: &World) -> Client {
    world.token("t", "u");
    world.allow("u", "get", "healthz");
    let mut client = world.connect().await;
    fine(&mut client).await;
    client
}

/// The time a request of a well-behaved client takes.
async fn fine(client: &mut Client) -> Duration {
    let started = Instant::now();
    let (status, text) = client.ask("GET", "/healthz", Some("t")).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    started.elapsed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_idle_connections_keep_nobody_out() {
    let world = World::with(limits(), |_| {}).await;
    let mut client = friendly(&world).await;
    let (files, _) =
        nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
    // Both ends of those that the server keeps are in this process.
    let wanted = 10_000.min(usize::try_from(files).unwrap().saturating_sub(1500));
    let before = resident_mib();
    let mut idle = Vec::with_capacity(wanted);
    let mut worst = Duration::ZERO;
    for n in 0..wanted {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((HARM, 0).into()).unwrap();
        idle.push(socket.connect(world.address.unwrap()).await.unwrap());
        if n % 500 == 0 {
            worst = worst.max(fine(&mut client).await);
        }
    }
    let after = resident_mib();
    // Somebody new, and somebody new from where the flood comes from.
    assert_eq!(world.get("/healthz", Some("t")).await.0, StatusCode::OK);
    let stream = tls_from(HARM, world.address.unwrap(), None, &[b"http/1.1"])
        .await
        .unwrap();
    fine(&mut Client::over(stream).await).await;
    worst = worst.max(fine(&mut client).await);
    let open = world.metric(&["holdfast_http_connections "]);
    println!(
        "{wanted} idle connections: {open} kept, worst request {worst:?}, {before} -> {after} MiB"
    );
    assert!(open <= 1024.0, "{open} connections are open");
    assert!(world.metric(&["holdfast_http_connections_closed_total", "crowded"]) > 1000.0);
    assert!(worst < Duration::from_secs(5), "{worst:?}");
    assert!(after - before < 200, "{before} -> {after} MiB");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_after_a_handshake_give_way_too() {
    let few = Limits {
        connections: 32,
        ..limits()
    };
    let world = World::with(few, |_| {}).await;
    let mut client = friendly(&world).await;
    let mut idle = Vec::new();
    for _ in 0..100 {
        idle.push(
            tls_from(HARM, world.address.unwrap(), None, &[b"http/1.1"])
                .await
                .unwrap(),
        );
    }
    fine(&mut client).await;
    assert!(
        !client.is_closed(),
        "the one that another address has is kept"
    );
    let mut newest = Client::over(idle.pop().unwrap()).await;
    fine(&mut newest).await;
    let mut oldest = idle.remove(0);
    let mut byte = [0];
    let ended = tokio::time::timeout(Duration::from_secs(10), oldest.read(&mut byte)).await;
    assert!(matches!(ended.expect("it was closed"), Ok(0) | Err(_)));
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_heads_and_handshakes_are_cut_off() {
    let quick = Limits {
        handshake: Duration::from_millis(500),
        header: Duration::from_millis(500),
        idle: Duration::from_millis(1500),
        ..limits()
    };
    let world = World::with(quick, |_| {}).await;
    friendly(&world).await;
    let mut silent = TcpStream::connect(world.address.unwrap()).await.unwrap();
    let mut slow = world.tls(None, &[b"http/1.1"]).await.unwrap();
    let mut quiet = world.tls(None, &[b"h2"]).await.unwrap();
    slow.write_all(b"GET /healthz HTTP/1.1\r\nhost: n\r\n")
        .await
        .unwrap();
    let started = Instant::now();
    let dripping = async {
        // One header line each 100 ms, for ever.
        loop {
            tokio::time::sleep(Duration::from_millis(100)).await;
            if slow.write_all(b"x-more: and more\r\n").await.is_err() {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(15), dripping)
        .await
        .expect("slowloris is cut off");
    let mut byte = [0];
    for (what, read) in [
        (
            "a handshake that does not begin",
            silent.read(&mut byte).boxed(),
        ),
        (
            "HTTP/2 that does not begin",
            async { quiet.read_to_end(&mut Vec::new()).await }.boxed(),
        ),
    ] {
        tokio::time::timeout(Duration::from_secs(15), read)
            .await
            .expect(what)
            .ok();
    }
    println!("all were cut off after {:?}", started.elapsed());
    let mut client = world.connect().await;
    fine(&mut client).await;
    eventually("an idle connection is closed", async || client.is_closed()).await;
    assert!(world.metric(&["holdfast_http_connections_closed_total", "idle"]) >= 2.0);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_are_bounded() {
    let world = World::new().await;
    let mut client = friendly(&world).await;
    let before = resident_mib();
    for (what, head) in [
        (
            "one long header",
            format!("x-long: {}\r\n", "x".repeat(4 << 20)),
        ),
        ("many headers", "x-more: y\r\n".repeat(100_000)),
        ("a long path", String::new()),
    ] {
        let path = if head.is_empty() {
            format!("/{}", "x".repeat(4 << 20))
        } else {
            "/healthz".to_owned()
        };
        let mut stream = world.tls(None, &[b"http/1.1"]).await.unwrap();
        let text = format!("GET {path} HTTP/1.1\r\nhost: n\r\n{head}\r\n");
        let (mut read, mut write) = tokio::io::split(&mut stream);
        let sent = async {
            // It need not take all of it.
            write.write_all(text.as_bytes()).await.ok();
            std::future::pending::<()>().await;
        };
        let mut answer = vec![0; 12];
        let answered = tokio::time::timeout(Duration::from_secs(20), async {
            tokio::select! {
                () = sent => {}
                result = read.read_exact(&mut answer) => { result.ok(); }
            }
        });
        answered.await.expect(what);
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let refused = answer.starts_with("HTTP/1.1 431")
            || answer.starts_with("HTTP/1.1 414")
            || answer.starts_with('\0');
        assert!(refused, "{what}: {answer:?}");
    }
    let mut sender = http2(world.tls(None, &[b"h2"]).await.unwrap()).await;
    let mut request = Request::get(format!("https://{}/healthz", crate::world::NODE));
    for n in 0..40 {
        request = request.header(format!("x-{n}"), "x".repeat(8 << 10));
    }
    let answer = sender
        .send_request(request.body(Body::empty()).unwrap())
        .await;
    let status = answer.map(|answer| answer.status());
    assert!(
        !matches!(&status, Ok(status) if *status != 431),
        "HTTP/2: {status:?}"
    );
    fine(&mut client).await;
    let after = resident_mib();
    println!("{before} -> {after} MiB");
    assert!(
        after.saturating_sub(before) < 100,
        "{before} -> {after} MiB"
    );
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rapid_resets_harm_nobody_else() {
    let world = World::new().await;
    let mut client = friendly(&world).await;
    let before = resident_mib();
    let (mut sent, mut connections) = (0, 0);
    let mut worst = Duration::ZERO;
    let until = Instant::now() + Duration::from_secs(60);
    while sent < 20_000 && Instant::now() < until {
        connections += 1;
        let stream = tls_from(HARM, world.address.unwrap(), None, &[b"h2"])
            .await
            .unwrap();
        let mut sender = http2(stream).await;
        for n in 0..5_000 {
            if sender.ready().await.is_err() {
                break;
            }
            let request = Request::get(format!("https://{}/healthz", crate::world::NODE))
                .header("authorization", "Bearer bad")
                .body(Body::empty())
                .unwrap();
            let mut answer = Box::pin(sender.send_request(request));
            // Sent, and taken back at once.
            let _sent: std::task::Poll<_> = futures::poll!(&mut answer);
            drop(answer);
            sent += 1;
            if n % 20 == 0 {
                tokio::task::yield_now().await;
            }
            if sent % 2_000 == 0 {
                worst = worst.max(fine(&mut client).await);
            }
        }
    }
    worst = worst.max(fine(&mut client).await);
    let after = resident_mib();
    println!(
        "{sent} streams reset on {connections} connections, worst request {worst:?}, {before} -> {after} MiB"
    );
    assert!(worst < Duration::from_secs(5), "{worst:?}");
    assert!(
        after.saturating_sub(before) < 100,
        "{before} -> {after} MiB"
    );
    let asked = world.review(|reviews| reviews.token_reviews);
    assert!(asked < 200, "{asked} questions to the API server");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_of_a_connection_are_bounded() {
    let world = World::new().await;
    world.token("t", "u");
    world.allow("u", "get", "healthz");
    // Nothing is answered: the streams stay open.
    world.review(|reviews| reviews.delay = Duration::from_secs(5));
    let mut sender = http2(world.tls(None, &[b"h2"]).await.unwrap()).await;
    let mut answers = Vec::new();
    for _ in 0..300 {
        let request = Request::get(format!("https://{}/healthz", crate::world::NODE))
            .header("authorization", "Bearer t")
            .body(Body::empty())
            .unwrap();
        answers.push(Box::pin(sender.send_request(request)));
    }
    for answer in &mut answers {
        let _pending: std::task::Poll<_> = futures::poll!(answer);
    }
    eventually("a hundred requests are in flight", async || {
        world.metric(&["kubelet_http_inflight_requests{"]) >= 99.5
    })
    .await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let most = world.metric(&["kubelet_http_inflight_requests{"]);
    assert!(most <= 100.5, "{most} at once");
    world.review(|reviews| reviews.delay = Duration::ZERO);
    for answer in answers {
        assert_eq!(
            answer.await.unwrap().status(),
            StatusCode::OK,
            "the others have their turn"
        );
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_ends_with_the_agent_whatever_is_open() {
    let world = World::new().await;
    let mut client = friendly(&world).await;
    let _half = world.tls(None, &[b"http/1.1"]).await.unwrap();
    let _raw = TcpStream::connect(world.address.unwrap()).await.unwrap();
    fine(&mut client).await;
    let started = Instant::now();
    world.end().await;
    println!("ended after {:?}", started.elapsed());
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_wait_for_the_api_server_do_not_pile_up() {
    let world = World::new().await;
    let mut client = friendly(&world).await;
    world.review(|reviews| reviews.delay = Duration::from_secs(2));
    let before = resident_mib();
    let mut answers = Vec::new();
    for connection in 0..10 {
        let stream = tls_from(HARM, world.address.unwrap(), None, &[b"h2"])
            .await
            .unwrap();
        let mut sender = http2(stream).await;
        for n in 0..90 {
            let request = Request::get(format!("https://{}/healthz", crate::world::NODE))
                .header("authorization", format!("Bearer bad-{connection}-{n}"))
                .header("x-ballast", "x".repeat(32 << 10))
                .body(Body::empty())
                .unwrap();
            answers.push(tokio::spawn(sender.send_request(request)));
        }
    }
    let mut worst = Duration::ZERO;
    for _ in 0..10 {
        worst = worst.max(fine(&mut client).await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let during = resident_mib();
    let mut sent_away = 0;
    for answer in answers {
        let status = answer.await.unwrap().map(|answer| answer.status());
        sent_away += usize::from(matches!(status, Ok(StatusCode::TOO_MANY_REQUESTS)));
    }
    let asked = world.review(|reviews| reviews.token_reviews);
    println!(
        "{sent_away} of 900 sent away, {asked} questions, worst request {worst:?}, {before} -> {during} MiB"
    );
    assert!(sent_away > 700, "{sent_away}");
    assert!(asked < 40, "{asked} questions");
    assert!(worst < Duration::from_secs(2), "{worst:?}");
    world.end().await;
}
