//! Log lines about the server's answers, and their frequency.

use std::io::Write;

use super::*;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Captures the log of this thread until the guard is dropped.
    fn begin(&self) -> tracing::subscriber::DefaultGuard {
        let writer = self.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::set_default(subscriber)
    }

    /// The lines with `words`.
    fn lines(&self, words: &str) -> Vec<String> {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        let lines = text.lines().filter(|line| line.contains(words));
        lines.map(str::to_owned).collect()
    }
}

/// A client of a server that answers everything with the code of the moment.
async fn client<C: Clock + Clone + 'static>(
    dir: &Path,
    clock: &C,
) -> (ApiClient, Arc<AtomicUsize>) {
    let code = Arc::new(AtomicUsize::new(200));
    let served = code.clone();
    let answer = move || {
        let code = u16::try_from(served.load(Ordering::SeqCst)).unwrap();
        let list = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": []});
        async move { (StatusCode::from_u16(code).unwrap(), list.to_string()) }
    };
    let server = serve(Router::new().fallback(answer)).await;
    let settings = settings(dir);
    let kubeconfig = settings.kubeconfig.as_deref().unwrap();
    write_config(kubeconfig, &server, json!({"token": "t"}));
    let connected = connect(&settings, Arc::new(clock.clone()), Metrics::default()).await;
    (connected.unwrap().unwrap().0, code)
}

#[tokio::test]
async fn clocks_that_differ_are_told_with_both_times_once_until_they_agree() {
    let log = Log::default();
    let _guard = log.begin();
    let dir = tempfile::tempdir().unwrap();
    let clock = hand(today());
    let (client, _code) = client(dir.path(), &clock).await;
    let pods: Api<Pod> = Api::all(client.kube());
    let mut told = Vec::new();
    for late in [0, 100, 3600, 3600, 0, -3600] {
        clock.0.store(today() + late, Ordering::SeqCst);
        pods.list(&ListParams::default()).await.unwrap();
        told.push(log.lines("clocks").len());
    }
    assert_eq!(told, [0, 0, 1, 1, 1, 2]);
    let line = &log.lines("clocks")[0];
    let own = kubeconfig::date(today() + 3600);
    // The hour is enough: a second may pass meanwhile.
    for part in ["WARN", &kubeconfig::date(today())[..13], &own[..13]] {
        assert!(line.contains(part), "{part}: {line}");
    }
}

#[tokio::test]
async fn each_request_that_is_refused_is_told_once_with_what_to_do() {
    let log = Log::default();
    let _guard = log.begin();
    let dir = tempfile::tempdir().unwrap();
    let (client, code) = client(dir.path(), &hand(today())).await;
    let pods: Api<Pod> = Api::all(client.kube());
    let services: Api<k8s_openapi::api::core::v1::Service> = Api::all(client.kube());
    code.store(403, Ordering::SeqCst);
    for _ in 0..5 {
        pods.list(&ListParams::default()).await.unwrap_err();
        services.list(&ListParams::default()).await.unwrap_err();
    }
    let told = log.lines("(403)");
    assert_eq!(told.len(), 2, "{told:?}");
    for (line, request) in told.iter().zip(["GET pods", "GET services"]) {
        for part in ["ERROR", "system:node:", "system:nodes", request] {
            assert!(line.contains(part), "{part}: {line}");
        }
    }
    code.store(401, Ordering::SeqCst);
    for _ in 0..5 {
        pods.list(&ListParams::default()).await.unwrap_err();
    }
    assert_eq!(log.lines("(401)").len(), 1);
}

/// A clock whose boot-time clock the test sets, in seconds.
#[derive(Clone, Default)]
struct Passing(Arc<AtomicI64>);

impl Clock for Passing {
    fn now(&self) -> Stamp {
        let seconds = self.0.load(Ordering::SeqCst);
        Stamp {
            boot: BootId(1),
            boottime_ms: seconds * 1000,
            wall_ms: (today() + seconds) * 1000,
        }
    }
}

#[tokio::test]
async fn an_object_that_the_server_withholds_for_a_moment_is_no_error() {
    let log = Log::default();
    let _guard = log.begin();
    let dir = tempfile::tempdir().unwrap();
    let clock = Passing::default();
    let (client, code) = client(dir.path(), &clock).await;
    let maps: Api<k8s_openapi::api::core::v1::ConfigMap> =
        Api::namespaced(client.kube(), "kube-system");
    let named = ListParams::default().fields("metadata.name=kube-proxy");
    let told = || {
        let early = log.lines("refuses access to this object for now");
        (early.len(), log.lines("ERROR").len())
    };

    // The node has joined, and the authoriser has not seen its pods yet.
    code.store(403, Ordering::SeqCst);
    for second in 0..9 {
        clock.0.store(second, Ordering::SeqCst);
        maps.list(&named).await.unwrap_err();
    }
    assert_eq!(told(), (1, 0), "once, and not as an error");
    code.store(200, Ordering::SeqCst);
    maps.list(&named).await.unwrap();

    // Much later it is refused for good.
    code.store(403, Ordering::SeqCst);
    for second in [100, 105, 110, 120] {
        clock.0.store(second, Ordering::SeqCst);
        maps.list(&named).await.unwrap_err();
    }
    let errors = log.lines("ERROR");
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(errors[0].contains("GET configmaps"), "{errors:?}");
}
