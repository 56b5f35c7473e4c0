//! A real cluster of one's own, without nodes and controllers: etcd and kube-apiserver with TLS, Node and RBAC
//! authorization and NodeRestriction, on ports and in a directory of their own, so that instances do not meet.
//! What controllers would have made is here on demand: service accounts, `kube-root-ca.crt`, signed certificates.
//!
//! Methods block and panic with the words of what failed: they are called by tests. They may be called inside a
//! tokio runtime as well as outside.
//!
//! Servers from 1.20 on. Where the programs come from: [`EnvTest::start`].

mod cluster;
mod pki;
mod process;
mod programs;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use jiff::SignedDuration;
use kube::Client;
use nix::sys::signal::Signal;
use serde_json::json;

pub use crate::ports::free_port;
pub use cluster::CsrSigner;
pub use pki::{Authority, DAY, Identity};

use crate::fault_proxy::{FaultProxy, ProxyConfig};
use process::Process;

/// A running cluster. Dropped, it takes its processes and its directory along; they do not outlive the test
/// process either.
#[derive(Debug)]
pub struct EnvTest {
    dir: PathBuf,
    assets: PathBuf,
    minor: u32,
    etcd_port: u16,
    port: u16,
    authority: Authority,
    admin: Identity,
    verify_nodes: bool,
    servers: Mutex<Servers>,
    /// Other processes' tests use it too; it ends without us.
    shared: bool,
}

/// The user as which the API server comes to nodes. Bound to `system:kubelet-api-admin`, as `kubeadm` does it.
pub const KUBELET_CLIENT: &str = "kube-apiserver-kubelet-client";

#[derive(Debug, Default)]
struct Servers {
    etcd: Option<Process>,
    apiserver: Option<Process>,
}

/// A copy of the cluster's data, made by [`EnvTest::snapshot_etcd`].
#[derive(Clone, Debug)]
pub struct EtcdSnapshot(PathBuf);

/// How long a server may take to answer on a machine that does other work too.
const PATIENCE: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(25);
/// The environment variable that names the directory of the run's cluster.
const SHARED_DIR: &str = "HOLDFAST_TEST_CLUSTER";
/// In that directory, once the cluster is ready.
const PORT_FILE: &str = "port";

impl EnvTest {
    /// Starts a cluster and waits until it is ready: the four namespaces exist, `default` with its service
    /// account. The programs are those of the directory `$HOLDFAST_ENVTEST`, else `$KUBEBUILDER_ASSETS`, else the
    /// newest in the cache of `make envtest`.
    ///
    /// # Panics
    /// When there are no programs (`make envtest` provides them), or when they do not start.
    pub fn start() -> Self {
        Self::start_with(false)
    }

    /// The cluster that tests share which neither stop it nor turn it back: nodes and namespaces of such tests have
    /// names of their own ([`unique_name`]). It is the one of the test run where there is one
    /// (`HOLDFAST_TEST_CLUSTER` names its directory), else one for the tests of this process that run at the same
    /// time.
    ///
    /// # Panics
    /// As [`EnvTest::start`], and when the run's cluster does not become ready.
    pub fn shared() -> Arc<Self> {
        static SHARED: Mutex<Weak<EnvTest>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(env) = shared.upgrade() {
            return env;
        }
        let of_run = std::env::var_os(SHARED_DIR).filter(|dir| !dir.is_empty());
        let env = Arc::new(of_run.map_or_else(Self::start, |dir| Self::attach(Path::new(&dir))));
        *shared = Arc::downgrade(&env);
        env
    }

    /// Starts a cluster in a directory that [`EnvTest::shared`] of other processes is told. It is ready when this
    /// returns.
    ///
    /// # Panics
    /// As [`EnvTest::start`].
    pub fn start_to_be_shared(dir: &Path) -> Self {
        std::fs::create_dir_all(dir).expect("make a directory for the cluster");
        let env = Self::start_in(dir.to_owned(), false);
        let hidden = dir.join(".port");
        write(&hidden, &env.port.to_string());
        std::fs::rename(&hidden, dir.join(PORT_FILE)).expect("say that the cluster is ready");
        env
    }

    fn attach(dir: &Path) -> Self {
        let port_file = dir.join(PORT_FILE);
        let begin = tokio::time::Instant::now();
        while !port_file.exists() {
            assert!(
                begin.elapsed() < PATIENCE,
                "{SHARED_DIR} is {}, where no cluster becomes ready; is there a cluster.log beside it?",
                dir.display()
            );
            std::thread::sleep(POLL);
        }
        let assets = programs::assets();
        let port = std::fs::read_to_string(&port_file).expect("read the cluster's port");
        let authority = Authority::read(dir);
        Self {
            minor: programs::minor_version(&assets.join("kube-apiserver")),
            dir: dir.to_owned(),
            assets,
            etcd_port: 0,
            port: port.trim().parse().expect("a port"),
            admin: authority.client("admin", "system:masters", DAY),
            authority,
            verify_nodes: false,
            servers: Mutex::default(),
            shared: true,
        }
    }

    /// As [`EnvTest::start`]; the API server talks only to nodes whose serving certificate is of the authority.
    ///
    /// # Panics
    /// As [`EnvTest::start`].
    pub fn start_verifying_nodes() -> Self {
        Self::start_with(true)
    }

    fn start_with(verify_nodes: bool) -> Self {
        let dir = process::directory().expect("make a directory for the cluster");
        Self::start_in(dir, verify_nodes)
    }

    fn start_in(dir: PathBuf, verify_nodes: bool) -> Self {
        let assets = programs::assets();
        let minor = programs::minor_version(&assets.join("kube-apiserver"));
        let authority = Authority::new("holdfast-envtest-ca");
        authority
            .server("kube-apiserver")
            .write(&dir, "kube-apiserver");
        authority.write(&dir);
        let kubelet_client = authority.client(KUBELET_CLIENT, "nobody", DAY);
        kubelet_client.write(&dir, "kubelet-client");
        let (private, public) = pki::service_account_key();
        write(&dir.join("service-account.key"), &private);
        write(&dir.join("service-account.pub"), &public);
        let admin = authority.client("admin", "system:masters", DAY);
        let mut env = Self {
            dir,
            assets,
            minor,
            etcd_port: 0,
            port: 0,
            authority,
            admin,
            verify_nodes,
            servers: Mutex::default(),
            shared: false,
        };
        // Somebody else may take a port between our look and the server's.
        for attempt in 1.. {
            env.etcd_port = crate::ports::free_port();
            env.port = crate::ports::free_port();
            let result = env.run_etcd().and_then(|()| env.run_apiserver());
            match result {
                Ok(()) => break,
                Err(said) if attempt < 5 && said.contains("address already in use") => {
                    *env.servers() = Servers::default();
                    drop(std::fs::remove_dir_all(env.dir.join("etcd")));
                }
                Err(said) => panic!("{said}"),
            }
        }
        env.admin_kubeconfig();
        env.create_what_controllers_would();
        env
    }

    /// `https://127.0.0.1:<port>`.
    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// The server's minor version: 20 for 1.20.
    pub fn minor(&self) -> u32 {
        self.minor
    }

    /// Its directory; servers log to `etcd.log` and `kube-apiserver.log` there.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The certificate authority, in PEM: of the server and of clients alike.
    pub fn ca_pem(&self) -> String {
        self.authority.pem()
    }

    /// The certificate authority, to sign more.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Runs kubectl as the administrator.
    ///
    /// # Panics
    /// When it cannot be run; not when it fails.
    pub fn kubectl(&self, arguments: &[&str]) -> Output {
        self.kubectl_as(&self.admin_kubeconfig(), arguments)
    }

    /// Runs kubectl with a kubeconfig.
    ///
    /// # Panics
    /// When it cannot be run; not when it fails.
    pub fn kubectl_as(&self, kubeconfig: &Path, arguments: &[&str]) -> Output {
        let mut command = self.kubectl_command(kubeconfig);
        command.args(arguments).stdin(Stdio::null());
        command.output().expect("run kubectl")
    }

    /// A kubectl to be started with a kubeconfig: that of the assets, or the one that `HOLDFAST_KUBECTL` names.
    pub fn kubectl_command(&self, kubeconfig: &Path) -> Command {
        let named = std::env::var_os("HOLDFAST_KUBECTL").filter(|path| !path.is_empty());
        let program = named.map_or_else(|| self.assets.join("kubectl"), PathBuf::from);
        self.kubectl_command_of(&program, kubeconfig)
    }

    /// As [`EnvTest::kubectl_command`] with a kubectl of the caller's choice.
    pub fn kubectl_command_of(&self, program: &Path, kubeconfig: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("KUBECONFIG", kubeconfig).env("HOME", &self.dir);
        command
    }

    /// Like [`EnvTest::kubectl`] with the output as text.
    ///
    /// # Panics
    /// When kubectl fails, with what it said.
    pub fn kubectl_ok(&self, arguments: &[&str]) -> String {
        let output = self.kubectl(arguments);
        assert!(
            output.status.success(),
            "kubectl {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// `kubectl apply` of one object or several.
    ///
    /// # Panics
    /// When kubectl fails, with what it said.
    pub fn apply(&self, manifest: &str) -> String {
        let file = tempfile::NamedTempFile::new_in(&self.dir).expect("make a file");
        write(file.path(), manifest);
        self.kubectl_ok(&["apply", "-f", &file.path().to_string_lossy()])
    }

    /// The administrator's kubeconfig (`system:masters`).
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn admin_kubeconfig(&self) -> PathBuf {
        let path = self.dir.join("admin.kubeconfig");
        if !path.exists() {
            self.write_kubeconfig(&path, &self.url(), &self.admin);
        }
        path
    }

    /// A node's kubeconfig: `CN=system:node:<name>, O=system:nodes`, valid for a day. The same file at each call.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn node_kubeconfig(&self, node: &str) -> PathBuf {
        let path = self.dir.join(format!("node-{node}.kubeconfig"));
        if !path.exists() {
            self.write_kubeconfig(&path, &self.url(), &self.node_identity(node, DAY));
        }
        path
    }

    /// A new kubeconfig of a node for another URL (a proxy's) or with another end of validity: negative, the
    /// certificate has expired.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn node_kubeconfig_with(
        &self,
        node: &str,
        server: &str,
        expires_in: SignedDuration,
    ) -> PathBuf {
        let path = self.unique(&format!("node-{node}"), "kubeconfig");
        self.write_kubeconfig(&path, server, &self.node_identity(node, expires_in));
        path
    }

    /// A node's client certificate.
    pub fn node_identity(&self, node: &str, expires_in: SignedDuration) -> Identity {
        let user = format!("system:node:{node}");
        self.authority.client(&user, "system:nodes", expires_in)
    }

    /// A kubeconfig with a bearer token; `server` is [`EnvTest::url`] or a proxy's.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn token_kubeconfig(&self, server: &str, token: &str) -> PathBuf {
        let path = self.unique("token", "kubeconfig");
        self.write_user(&path, server, json!({ "token": token }));
        path
    }

    /// The administrator's client. Needs a tokio runtime around, in which it lives.
    pub fn admin_client(&self) -> Client {
        self.client(&self.admin)
    }

    /// A node's client. Needs a tokio runtime around, in which it lives.
    pub fn node_client(&self, node: &str) -> Client {
        self.client(&self.node_identity(node, DAY))
    }

    /// A client with any certificate. Needs a tokio runtime around, in which it lives.
    ///
    /// # Panics
    /// When the certificate is none.
    pub fn client(&self, identity: &Identity) -> Client {
        let (cert, key) = identity.write(&self.dir, &self.unique_stem("client"));
        let mut config = kube::Config::new(self.url().parse().expect("a URL"));
        config.root_cert = Some(vec![self.authority.der()]);
        config.auth_info = serde_json::from_value(json!({
            "client-certificate": cert,
            "client-key": key,
        }))
        .expect("credentials");
        Client::try_from(config).expect("make a client")
    }

    /// A proxy before the API server that speaks for a node: whoever connects to it is `system:node:<name>`.
    ///
    /// # Panics
    /// When it does not start.
    pub fn fault_proxy(&self, node: &str) -> FaultProxy {
        self.start_proxy(Some(self.node_identity(node, DAY)))
    }

    /// A proxy before the API server that adds no credentials, for clients with bearer tokens.
    ///
    /// # Panics
    /// When it does not start.
    pub fn fault_proxy_for_tokens(&self) -> FaultProxy {
        self.start_proxy(None)
    }

    fn start_proxy(&self, client: Option<Identity>) -> FaultProxy {
        FaultProxy::start(ProxyConfig {
            upstream: self.url(),
            ca_pem: Some(self.ca_pem()),
            client,
            serve: Some(self.authority.server("fault-proxy")),
        })
        .expect("start the proxy")
    }

    /// Kills the API server; connections break, new ones are refused.
    ///
    /// # Panics
    /// When other tests use it.
    pub fn stop_apiserver(&self) {
        self.assert_own();
        self.servers().apiserver = None;
    }

    /// Starts it again, on the same port and data, and waits until it is ready.
    ///
    /// # Panics
    /// When it does not start.
    pub fn start_apiserver(&self) {
        if self.servers().apiserver.is_none() {
            self.run_apiserver().unwrap_or_else(|said| panic!("{said}"));
        }
    }

    /// Stops the API server's process in its tracks (SIGSTOP): connections stay open and nothing comes.
    ///
    /// # Panics
    /// When it does not run.
    pub fn pause(&self) {
        self.signal_apiserver(Signal::SIGSTOP);
    }

    /// Lets it go on.
    ///
    /// # Panics
    /// When it does not run.
    pub fn resume(&self) {
        self.signal_apiserver(Signal::SIGCONT);
    }

    /// The pid of kube-apiserver, while it runs.
    pub fn apiserver_pid(&self) -> Option<u32> {
        if self.shared {
            let pid = std::fs::read_to_string(self.dir.join("kube-apiserver.pid")).ok()?;
            return pid.trim().parse().ok();
        }
        self.servers().apiserver.as_ref().map(Process::pid)
    }

    /// Copies the data of the cluster as it is now. etcd restarts for it; watches live on.
    ///
    /// # Panics
    /// When the copy or the restart fails.
    pub fn snapshot_etcd(&self) -> EtcdSnapshot {
        self.assert_own();
        let copy = self.unique("snapshot", "etcd");
        let running = self.servers().apiserver.is_some();
        if running {
            self.pause();
        }
        self.stop_etcd();
        copy_dir(&self.dir.join("etcd"), &copy);
        self.run_etcd().unwrap_or_else(|said| panic!("{said}"));
        if running {
            self.resume();
            self.wait_ready().unwrap_or_else(|said| panic!("{said}"));
        }
        EtcdSnapshot(copy)
    }

    /// Puts the data back as it was at the snapshot: later writes are lost and resource versions go back. The API
    /// server restarts, also when it was stopped. A snapshot can be restored more than once.
    ///
    /// # Panics
    /// When the copy or a restart fails.
    pub fn restore_etcd(&self, snapshot: &EtcdSnapshot) {
        self.stop_apiserver();
        self.stop_etcd();
        let data = self.dir.join("etcd");
        std::fs::remove_dir_all(&data).expect("delete the data of etcd");
        copy_dir(&snapshot.0, &data);
        self.run_etcd().unwrap_or_else(|said| panic!("{said}"));
        self.start_apiserver();
    }

    fn servers(&self) -> MutexGuard<'_, Servers> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn assert_own(&self) {
        assert!(!self.shared, "other tests use this API server: start one");
    }

    fn signal_apiserver(&self, signal: Signal) {
        self.assert_own();
        let servers = self.servers();
        let apiserver = servers.apiserver.as_ref().expect("the API server runs");
        apiserver.signal(signal).expect("signal the API server");
    }

    fn stop_etcd(&self) {
        if let Some(mut etcd) = self.servers().etcd.take() {
            etcd.signal(Signal::SIGTERM).expect("stop etcd");
            etcd.wait().expect("wait for etcd's end");
        }
    }

    fn run_etcd(&self) -> Result<(), String> {
        let client = format!("http://127.0.0.1:{}", self.etcd_port);
        let arguments = [
            format!("--data-dir={}", self.dir.join("etcd").display()),
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
            "--listen-peer-urls=http://127.0.0.1:0".to_owned(),
            // A test's data may go with its machine.
            "--unsafe-no-fsync".to_owned(),
            // Alone, it waits for one election timeout.
            "--heartbeat-interval=20".to_owned(),
            "--election-timeout=100".to_owned(),
        ];
        let process = Process::start(&self.assets.join("etcd"), &self.dir, "etcd", &arguments);
        self.servers().etcd = Some(process.map_err(|error| format!("start etcd: {error}"))?);
        // The API server looks for it itself, but with pauses of seconds.
        self.wait_for("etcd", || {
            std::net::TcpStream::connect(("127.0.0.1", self.etcd_port)).is_ok()
        })
    }

    fn run_apiserver(&self) -> Result<(), String> {
        let file = |name: &str| self.dir.join(name).display().to_string();
        let mut arguments = vec![
            format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_port),
            "--bind-address=127.0.0.1".to_owned(),
            "--advertise-address=127.0.0.1".to_owned(),
            format!("--secure-port={}", self.port),
            // A loopback address must not be an endpoint.
            "--endpoint-reconciler-type=none".to_owned(),
            format!("--tls-cert-file={}", file("kube-apiserver.crt")),
            format!("--tls-private-key-file={}", file("kube-apiserver.key")),
            format!("--client-ca-file={}", file("ca.crt")),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--enable-admission-plugins=NodeRestriction".to_owned(),
            "--enable-bootstrap-token-auth=true".to_owned(),
            "--allow-privileged=true".to_owned(),
            "--service-cluster-ip-range=10.0.0.0/24".to_owned(),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            format!("--service-account-key-file={}", file("service-account.pub")),
            format!(
                "--service-account-signing-key-file={}",
                file("service-account.key")
            ),
        ];
        arguments.extend([
            format!(
                "--kubelet-client-certificate={}",
                file("kubelet-client.crt")
            ),
            format!("--kubelet-client-key={}", file("kubelet-client.key")),
            "--kubelet-preferred-address-types=InternalIP".to_owned(),
        ]);
        if self.verify_nodes {
            arguments.push(format!(
                "--kubelet-certificate-authority={}",
                file("ca.crt")
            ));
        }
        let mut gates = Vec::new();
        if self.minor <= 20 {
            // Else pods need a secret that the token controller would make.
            gates.push("BoundServiceAccountTokenVolume=true");
            // Tokens for drivers, and claims that live as long as their pod.
            gates.push("CSIServiceAccountToken=true");
            gates.push("GenericEphemeralVolume=true");
        }
        if self.minor <= 22 {
            gates.push("EphemeralContainers=true");
        }
        if !gates.is_empty() {
            arguments.push(format!("--feature-gates={}", gates.join(",")));
        }
        let program = self.assets.join("kube-apiserver");
        let process = Process::start(&program, &self.dir, "kube-apiserver", &arguments);
        self.servers().apiserver =
            Some(process.map_err(|error| format!("start kube-apiserver: {error}"))?);
        self.wait_ready()
    }

    fn wait_ready(&self) -> Result<(), String> {
        cluster::block_on(async {
            let client = self.admin_client();
            let begin = tokio::time::Instant::now();
            loop {
                let request = axum::http::Request::get("/readyz")
                    .body(Vec::new())
                    .expect("a request");
                if let Ok(Ok(answer)) =
                    tokio::time::timeout(Duration::from_secs(5), client.request_text(request)).await
                    && answer == "ok"
                {
                    return Ok(());
                }
                self.check_alive("kube-apiserver", begin.elapsed())?;
                tokio::time::sleep(POLL).await;
            }
        })
    }

    fn wait_for(&self, name: &str, mut there: impl FnMut() -> bool) -> Result<(), String> {
        let begin = tokio::time::Instant::now();
        while !there() {
            self.check_alive(name, begin.elapsed())?;
            std::thread::sleep(POLL);
        }
        // What answered may be another's, and ours about to notice.
        self.check_alive(name, Duration::ZERO)
    }

    /// An error with the end of the log when a server has ended, or takes too long.
    fn check_alive(&self, name: &str, waited: Duration) -> Result<(), String> {
        let mut servers = self.servers();
        let process = match name {
            "etcd" => servers.etcd.as_mut(),
            _ => servers.apiserver.as_mut(),
        };
        let ended = process.is_none_or(Process::ended);
        if !ended && waited < PATIENCE {
            return Ok(());
        }
        let log = std::fs::read(self.dir.join(format!("{name}.log"))).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<_> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(15)..].join("\n");
        let how = if ended {
            "ended"
        } else {
            "does not become ready"
        };
        Err(format!("{name} {how}:\n{tail}"))
    }

    fn unique_stem(&self, stem: &str) -> String {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        if self.shared {
            // Other processes write into the same directory.
            return format!("{stem}-{}-{serial}", unique_name());
        }
        format!("{stem}-{serial}")
    }

    fn unique(&self, stem: &str, extension: &str) -> PathBuf {
        let stem = self.unique_stem(stem);
        self.dir.join(format!("{stem}.{extension}"))
    }

    fn write_kubeconfig(&self, path: &Path, server: &str, identity: &Identity) {
        let name = path.file_stem().expect("a name").to_string_lossy();
        let (cert, key) = identity.write(&self.dir, &name);
        let user = json!({ "client-certificate": cert, "client-key": key });
        self.write_user(path, server, user);
    }

    fn write_user(&self, path: &Path, server: &str, user: serde_json::Value) {
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "envtest", "cluster": {
                "server": server, "certificate-authority": self.dir.join("ca.crt") } }],
            "users": [{ "name": "user", "user": user }],
            "contexts": [{ "name": "envtest", "context": { "cluster": "envtest", "user": "user" } }],
            "current-context": "envtest",
        });
        write(path, &config.to_string());
    }
}

impl Drop for EnvTest {
    fn drop(&mut self) {
        if self.shared {
            return;
        }
        if std::thread::panicking() {
            eprintln!("the cluster's logs are deleted with {}", self.dir.display());
        }
        // The API server first: it would complain of etcd's absence.
        self.servers().apiserver = None;
        self.servers().etcd = None;
        drop(std::fs::remove_dir_all(&self.dir));
    }
}

/// A part of a name that no other test uses on a shared cluster, in this process or another: letters, digits and `-`.
pub fn unique_name() -> String {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    // Process ids come again within a run.
    let time = jiff::Timestamp::now().as_microsecond() & 0xff_ffff;
    format!("{}-{time:x}-{serial}", std::process::id())
}

/// The client of a kubeconfig, for the current tokio runtime.
///
/// # Panics
/// When the kubeconfig cannot be used.
pub async fn client_of(kubeconfig: &Path) -> Client {
    let kubeconfig = kube::config::Kubeconfig::read_from(kubeconfig).expect("read the kubeconfig");
    let options = kube::config::KubeConfigOptions::default();
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).await;
    Client::try_from(config.expect("use the kubeconfig")).expect("make a client")
}

fn write(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap_or_else(|error| panic!("write {}: {error}", path.display()));
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("make a directory");
    for entry in std::fs::read_dir(from).expect("read a directory") {
        let entry = entry.expect("read a directory");
        let target = to.join(entry.file_name());
        if entry.file_type().expect("a file's type").is_dir() {
            copy_dir(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), &target).expect("copy a file");
        }
    }
}
