//! The health server over a real socket.

use std::sync::Mutex;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;
use crate::types::BootId;

struct FixedClock(Mutex<Stamp>);

impl Clock for FixedClock {
    fn now(&self) -> Stamp {
        *self.0.lock().unwrap()
    }
}

fn at(seconds: i64) -> Stamp {
    Stamp {
        boot: BootId(1),
        boottime_ms: seconds * 1000,
        wall_ms: seconds * 1000,
    }
}

fn checks(now: Stamp, sync_frequency: Duration, ready: Vec<(&'static str, Check)>) -> HealthChecks {
    HealthChecks {
        clock: Arc::new(FixedClock(Mutex::new(now))),
        sync_loop: sync_loop_check(|| Some(at(0)), sync_frequency),
        ready,
        notes: vec![("credentials", Arc::new(|| Some("they expired".to_owned())))],
    }
}

async fn start(
    now: Stamp,
    sync_frequency: Duration,
    ready: Vec<(&'static str, Check)>,
) -> (SocketAddr, CancellationToken, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let checks = checks(now, sync_frequency, ready);
    let metrics = Metrics::default();
    metrics.backups.inc();
    let task = tokio::spawn(serve(listener, checks, metrics, stop.clone()));
    (addr, stop, task)
}

async fn get_text(addr: SocketAddr, path: &str) -> (u16, String) {
    get_text_with(addr, path, "").await
}

async fn get_text_with(addr: SocketAddr, path: &str, headers: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n{headers}Connection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let status = text[9..12].parse().unwrap();
    (status, text)
}

#[tokio::test]
async fn healthz_fails_once_the_sync_loop_stood_still_for_five_minutes() {
    let (addr, _stop, _task) = start(at(300), Duration::from_secs(60), Vec::new()).await;
    let (status, text) = get_text(addr, "/healthz").await;
    assert_eq!(status, 200, "{text}");
    assert!(text.ends_with("\r\n\r\nok"), "{text}");

    let (addr, _stop, _task) = start(at(301), Duration::from_secs(60), Vec::new()).await;
    for path in ["/healthz", "/livez", "/healthz/syncloop"] {
        let (status, text) = get_text(addr, path).await;
        assert_eq!(status, 500, "{path}: {text}");
        assert!(text.contains("last moved 301 s ago"), "{path}: {text}");
    }
    assert_eq!(get_text(addr, "/healthz/ping").await.0, 200);
    assert_eq!(get_text(addr, "/healthz?exclude=syncloop").await.0, 200);
}

#[tokio::test]
async fn nothing_but_health_and_metrics_is_served_without_authentication() {
    let (addr, _stop, _task) = start(at(0), Duration::from_secs(60), Vec::new()).await;
    for path in [
        "/debug/pprof/",
        "/debug/pprof/profile?seconds=1",
        "/pods",
        "/configz",
        "/flagz",
        "/logs/",
        "/exec/a/b/c",
        "/",
    ] {
        assert_eq!(get_text(addr, path).await.0, 404, "{path}");
    }
}

#[tokio::test]
async fn patience_with_the_sync_loop_grows_with_its_frequency() {
    let (addr, _stop, _task) = start(at(1200), Duration::from_secs(600), Vec::new()).await;
    assert_eq!(get_text(addr, "/healthz").await.0, 200);
    let (addr, _stop, _task) = start(at(1201), Duration::from_secs(600), Vec::new()).await;
    assert_eq!(get_text(addr, "/healthz").await.0, 500);
}

#[tokio::test]
async fn readyz_names_what_is_missing() {
    let ready: Vec<(&'static str, Check)> = vec![
        ("restored", Arc::new(|| Ok(()))),
        ("runtime", Arc::new(|| Err("no socket".to_owned()))),
    ];
    let (addr, _stop, _task) = start(at(0), Duration::from_secs(60), ready).await;
    let (status, text) = get_text(addr, "/readyz").await;
    assert_eq!(status, 500, "{text}");
    let listed = "[+]restored ok\n[-]runtime failed: no socket\n\
                  [+]credentials ok, but they expired\nreadyz check failed";
    assert!(text.contains(listed), "{text}");
    let (status, text) = get_text(addr, "/readyz?verbose&exclude=runtime").await;
    assert_eq!(status, 200, "{text}");
    assert!(text.contains("[+]runtime excluded: ok"), "{text}");
    assert!(
        text.contains("[+]credentials ok, but they expired\n"),
        "{text}"
    );
    assert_eq!(get_text(addr, "/livez?verbose").await.0, 200);
}

#[tokio::test]
async fn metrics_come_in_the_format_that_is_asked_for() {
    let (addr, _stop, _task) = start(at(0), Duration::from_secs(60), Vec::new()).await;
    let (status, text) = get_text(addr, "/metrics").await;
    assert_eq!(status, 200);
    assert!(
        text.contains("content-type: text/plain; version=0.0.4"),
        "{text}"
    );
    assert!(text.contains("\nholdfast_backups_total 1\n"), "{text}");
    assert!(text.contains("\nprocess_resident_memory_bytes "), "{text}");
    assert!(!text.contains("# EOF"), "{text}");
    let accept = "Accept: application/openmetrics-text; version=1.0.0\r\n";
    let (status, text) = get_text_with(addr, "/metrics", accept).await;
    assert_eq!(status, 200);
    assert!(
        text.contains("content-type: application/openmetrics-text; version=1.0.0"),
        "{text}"
    );
    assert!(text.contains("# TYPE holdfast_backups counter\n"), "{text}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    let (status, text) = get_text_with(addr, "/metrics/probes", accept).await;
    assert_eq!(status, 200);
    assert!(text.ends_with("# EOF\n"), "{text}");
}

#[tokio::test]
async fn health_checks_are_counted_by_who_asks_and_what_they_said() {
    let (addr, _stop, _task) = start(at(301), Duration::from_secs(60), Vec::new()).await;
    let asked = async || get_text(addr, "/metrics/slis").await.1;
    assert!(!asked().await.contains("kubernetes_healthcheck{"));
    for path in [
        "/healthz",
        "/healthz?verbose",
        "/livez?exclude=syncloop",
        "/readyz",
    ] {
        get_text(addr, path).await;
    }
    // One check alone is nobody's health.
    get_text(addr, "/healthz/syncloop").await;
    let text = asked().await;
    let mut found: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("kubernetes_"))
        .collect();
    found.sort_unstable();
    assert_eq!(
        found,
        [
            "kubernetes_healthchecks_total{name=\"log\",status=\"success\",type=\"healthz\"} 2",
            "kubernetes_healthchecks_total{name=\"log\",status=\"success\",type=\"livez\"} 1",
            "kubernetes_healthchecks_total{name=\"ping\",status=\"success\",type=\"healthz\"} 2",
            "kubernetes_healthchecks_total{name=\"ping\",status=\"success\",type=\"livez\"} 1",
            "kubernetes_healthchecks_total{name=\"ping\",status=\"success\",type=\"readyz\"} 1",
            "kubernetes_healthchecks_total{name=\"syncloop\",status=\"error\",type=\"healthz\"} 2",
            "kubernetes_healthcheck{name=\"log\",type=\"healthz\"} 1",
            "kubernetes_healthcheck{name=\"log\",type=\"livez\"} 1",
            "kubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1",
            "kubernetes_healthcheck{name=\"ping\",type=\"livez\"} 1",
            "kubernetes_healthcheck{name=\"ping\",type=\"readyz\"} 1",
            "kubernetes_healthcheck{name=\"syncloop\",type=\"healthz\"} 0",
        ]
    );
}

#[tokio::test]
async fn shutdown_does_not_wait_for_an_idle_connection() {
    let (addr, stop, task) = start(at(0), Duration::from_secs(60), Vec::new()).await;
    let _idle = TcpStream::connect(addr).await.unwrap();
    assert_eq!(get_text(addr, "/healthz/ping").await.0, 200);
    stop.cancel();
    tokio::time::timeout(Duration::from_secs(5), task)
        .await
        .expect("serve returns although a connection is idle")
        .unwrap();
}

#[tokio::test]
async fn silent_readers_do_not_starve_healthz() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let checks = checks(at(0), Duration::from_secs(60), Vec::new());
    // More than the kernel keeps for a peer that does not read.
    let large = bytes::Bytes::from(vec![b'x'; 16 << 20]);
    let large = get(|| async move { large.clone() });
    let routes = routes(checks, Metrics::default()).route("/large", large);
    let patience = Duration::from_millis(200);
    tokio::spawn(accept(listener, routes, patience, CancellationToken::new()));
    let mut silent = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let request = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n";
        stream.write_all(request).await.unwrap();
        silent.push(stream);
    }
    let answered = tokio::time::timeout(Duration::from_secs(60), get_text(addr, "/healthz"));
    assert_eq!(answered.await.expect("no answer").0, 200);
    drop(silent);
}
