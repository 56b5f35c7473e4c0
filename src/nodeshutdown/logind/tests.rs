//! Against a `logind` and a systemd that speak D-Bus over a socket.

use std::os::fd::OwnedFd as StdOwnedFd;
use std::sync::{Arc, Mutex};

use tokio::io::AsyncReadExt as _;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use zbus::connection::Builder;
use zbus::fdo;
use zbus::names::BusName;

use super::super::{Link, link};
use super::*;

impl Bus {
    /// A connection to one peer without names.
    pub(super) async fn at(socket: &Path) -> Result<Self, LogindError> {
        let stream = UnixStream::connect(socket).await;
        let stream = stream.map_err(|error| LogindError::Unreachable(error.into()))?;
        let connection = Builder::unix_stream(stream).p2p().build().await;
        Ok(Self(connection.map_err(LogindError::Unreachable)?))
    }
}

/// State of the machine.
#[derive(Debug, Default)]
struct Machine {
    delay: Duration,
    goes_down: bool,
    system_state: String,
    /// The other ends of the locks, in the order in which they were given.
    locks: Vec<UnixStream>,
    signals: Vec<(String, String, i32)>,
    connections: Vec<Connection>,
}

#[derive(Clone)]
struct Shared {
    machine: Arc<Mutex<Machine>>,
    /// Number of locks that were requested.
    asked: watch::Sender<usize>,
    drop_in: PathBuf,
    obeys: bool,
}

struct FakeLogind(Shared);

#[zbus::interface(name = "org.freedesktop.login1.Manager")]
impl FakeLogind {
    fn inhibit(
        &self,
        what: String,
        who: String,
        why: String,
        mode: String,
    ) -> fdo::Result<OwnedFd> {
        assert_eq!((&*what, &*who, &*mode), ("shutdown", "holdfast", "delay"));
        assert!(!why.is_empty());
        let mut machine = self.0.machine.lock().unwrap();
        self.0.asked.send_modify(|n| *n += 1);
        if machine.goes_down {
            return Err(fdo::Error::Failed("already running".to_owned()));
        }
        let (kept, given) = std::os::unix::net::UnixStream::pair().unwrap();
        kept.set_nonblocking(true).unwrap();
        machine.locks.push(UnixStream::from_std(kept).unwrap());
        Ok(StdOwnedFd::from(given).into())
    }

    #[zbus(property, name = "InhibitDelayMaxUSec")]
    fn inhibit_delay(&self) -> u64 {
        let delay = self.0.machine.lock().unwrap().delay;
        u64::try_from(delay.as_micros()).unwrap()
    }

    #[zbus(property)]
    fn preparing_for_shutdown(&self) -> bool {
        self.0.machine.lock().unwrap().goes_down
    }
}

struct FakeSystemd(Shared);

#[zbus::interface(name = "org.freedesktop.systemd1.Manager")]
impl FakeSystemd {
    fn kill_unit(&self, name: String, whom: String, signal: i32) {
        let mut machine = self.0.machine.lock().unwrap();
        machine.signals.push((name, whom, signal));
        if !self.0.obeys {
            return;
        }
        let text = std::fs::read_to_string(&self.0.drop_in).unwrap();
        let seconds = text
            .lines()
            .find_map(|line| line.strip_prefix("InhibitDelayMaxSec="));
        machine.delay = Duration::from_secs(seconds.unwrap().parse().unwrap());
    }

    #[zbus(property)]
    fn system_state(&self) -> String {
        self.0.machine.lock().unwrap().system_state.clone()
    }
}

struct World {
    dir: tempfile::TempDir,
    shared: Shared,
    server: JoinHandle<()>,
    link: Link,
    life: (CancellationToken, JoinHandle<()>),
}

fn serve(socket: &Path, shared: &Shared) -> JoinHandle<()> {
    let listener = UnixListener::bind(socket).unwrap();
    let shared = shared.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let connection = Builder::unix_stream(stream)
                .server(zbus::Guid::generate())
                .unwrap()
                .p2p()
                .serve_at(LOGIND_PATH, FakeLogind(shared.clone()))
                .unwrap()
                .serve_at(SYSTEMD_PATH, FakeSystemd(shared.clone()))
                .unwrap()
                .build()
                .await
                .unwrap();
            shared.machine.lock().unwrap().connections.push(connection);
        }
    })
}

impl World {
    /// A machine that allows a delay, and pods that need 30 s.
    fn new(delay: u64, obeys: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let drop_in = dir.path().join("logind.conf.d/zz-holdfast.conf");
        Self::within(dir, delay, obeys, drop_in)
    }

    fn with_drop_in(delay: u64, obeys: bool, drop_in: PathBuf) -> Self {
        Self::within(tempfile::tempdir().unwrap(), delay, obeys, drop_in)
    }

    fn within(dir: tempfile::TempDir, delay: u64, obeys: bool, drop_in: PathBuf) -> Self {
        let shared = Shared {
            machine: Arc::new(Mutex::new(Machine {
                delay: Duration::from_secs(delay),
                system_state: "running".to_owned(),
                ..Machine::default()
            })),
            asked: watch::Sender::new(0),
            drop_in,
            obeys,
        };
        let socket = dir.path().join("bus");
        let server = serve(&socket, &shared);
        let (announcer, link) = link();
        let periods = Periods::new(Duration::from_secs(30), Duration::from_secs(10), &[]);
        let logind = Logind {
            place: Place::Socket(socket),
            drop_in: shared.drop_in.clone(),
            periods: periods.unwrap(),
            announcer,
            short: None,
        };
        let token = CancellationToken::new();
        let task = tokio::spawn(logind.run(token.clone()));
        Self {
            dir,
            shared,
            server,
            link,
            life: (token, task),
        }
    }

    fn machine(&self) -> std::sync::MutexGuard<'_, Machine> {
        self.shared.machine.lock().unwrap()
    }

    /// Waits until a lock was asked for so often.
    async fn asked(&self, times: usize) {
        let mut asked = self.shared.asked.subscribe();
        let enough = asked.wait_for(|n| *n >= times);
        tokio::time::timeout(Duration::from_secs(30), enough)
            .await
            .unwrap()
            .unwrap();
    }

    async fn announced(&mut self, wanted: Announced) {
        let heard = self.link.announced.wait_for(|now| *now == wanted);
        tokio::time::timeout(Duration::from_secs(30), heard)
            .await
            .unwrap()
            .unwrap();
    }

    async fn shown(&mut self, state: Inhibitor) -> Option<String> {
        let shown = self.link.lock.wait_for(|lock| lock.state == state);
        let shown = tokio::time::timeout(Duration::from_secs(30), shown).await;
        shown.unwrap().unwrap().problem.clone()
    }

    async fn signal(&self, goes_down: bool) {
        self.machine().goes_down = goes_down;
        let connection = self.machine().connections.last().cloned().unwrap();
        connection
            .emit_signal(
                None::<BusName<'_>>,
                LOGIND_PATH,
                LOGIND_MANAGER,
                "PrepareForShutdown",
                &(goes_down,),
            )
            .await
            .unwrap();
    }

    /// The service is gone, with all connections.
    async fn cut(&mut self, socket: &Path) {
        self.server.abort();
        drop((&mut self.server).await);
        std::fs::remove_file(socket).unwrap();
        let connections = std::mem::take(&mut self.machine().connections);
        for connection in connections {
            // The other end may have gone first.
            drop(connection.close().await);
        }
    }

    /// Waits until the lock that was given as number `n` is closed.
    async fn closed(&self, n: usize) {
        let mut lock =
            std::mem::replace(&mut self.machine().locks[n], UnixStream::pair().unwrap().0);
        let end = tokio::time::timeout(Duration::from_secs(30), lock.read_u8()).await;
        let error = end.unwrap().unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
    }

    fn is_held(&self, n: usize) -> bool {
        let answer = self.machine().locks[n].try_read(&mut [0]);
        answer.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    }
}

#[tokio::test]
async fn the_lock_is_held_until_the_machine_may_go_down_and_taken_again_when_it_stays_up() {
    let mut w = World::new(60, true);
    w.announced(Announced::Up).await;
    assert!(w.is_held(0));
    assert!(!w.shared.drop_in.exists(), "the delay is long enough");
    w.signal(true).await;
    w.announced(Announced::GoesDown).await;
    assert!(w.is_held(0));
    assert_eq!(w.shown(Inhibitor::Held).await, None);
    w.link.released.send_replace(true);
    w.closed(0).await;
    assert_eq!(w.shown(Inhibitor::Released).await, None);
    w.link.released.send_replace(false);
    // During a shutdown none is given.
    w.asked(2).await;
    w.signal(false).await;
    w.announced(Announced::Up).await;
    w.asked(3).await;
    w.life.0.cancel();
    (&mut w.life.1).await.unwrap();
    w.closed(1).await;
    w.server.abort();
}

#[tokio::test]
async fn a_longer_delay_is_asked_for_when_the_pods_need_it() {
    let mut w = World::new(5, true);
    w.announced(Announced::Up).await;
    let text = std::fs::read_to_string(&w.shared.drop_in).unwrap();
    assert!(text.contains("InhibitDelayMaxSec=32"), "{text}");
    assert_eq!(
        w.machine().signals,
        [(LOGIND_UNIT.to_owned(), "all".to_owned(), 1)]
    );
    assert_eq!(w.machine().delay, Duration::from_secs(32));
    let files = std::fs::read_dir(w.shared.drop_in.parent().unwrap()).unwrap();
    assert_eq!(files.count(), 1, "nothing is left beside it");
    assert!(w.is_held(0));
}

#[tokio::test]
async fn a_logind_that_allows_less_still_gives_a_lock() {
    let mut w = World::new(5, false);
    w.announced(Announced::Up).await;
    assert!(w.is_held(0));
    assert_eq!(w.machine().signals.len(), 1, "asked once on a connection");
    let problem = w.shown(Inhibitor::Held).await.unwrap();
    assert!(problem.starts_with("logind allows a delay of 5 s, 32 s"));
    assert_eq!(*w.link.delay.borrow(), Some(Duration::from_secs(5)));
}

#[tokio::test]
async fn pods_get_what_logind_allows_where_that_cannot_be_changed() {
    let dir = tempfile::tempdir().unwrap();
    // A file where the directory should be.
    let file = dir.path().join("logind.conf.d");
    std::fs::write(&file, "").unwrap();
    let mut w = World::with_drop_in(5, true, file.join("zz-holdfast.conf"));
    w.announced(Announced::Up).await;
    assert!(w.shown(Inhibitor::Held).await.is_some());
    assert_eq!(*w.link.delay.borrow(), Some(Duration::from_secs(5)));
    assert!(w.machine().signals.is_empty());
}

#[tokio::test]
async fn after_a_restart_of_logind_a_new_lock_is_there_before_the_old_one_goes() {
    let mut w = World::new(60, true);
    w.announced(Announced::Up).await;
    let socket = w.dir.path().join("bus");
    w.cut(&socket).await;
    assert!(w.is_held(0), "while logind is away");
    w.server = serve(&socket, &w.shared);
    w.asked(2).await;
    w.closed(0).await;
    assert!(w.is_held(1));

    // What was announced while nobody listened is asked for, and the lock stays.
    w.cut(&socket).await;
    w.machine().goes_down = true;
    w.server = serve(&socket, &w.shared);
    w.announced(Announced::GoesDown).await;
    assert!(w.is_held(1));
}

#[tokio::test]
async fn systemd_tells_whether_the_machine_goes_down() {
    let mut w = World::new(60, true);
    w.announced(Announced::Up).await;
    let bus = Bus::at(&w.dir.path().join("bus")).await.unwrap();
    assert!(!shutdown::is_going_down(&state_of(&bus).await.unwrap()));
    w.machine().system_state = "stopping".to_owned();
    assert!(shutdown::is_going_down(&state_of(&bus).await.unwrap()));
}

#[tokio::test]
async fn systemctl_tells_whether_the_machine_goes_down() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("systemctl");
    for (state, status, expected) in [
        ("running", 0, false),
        ("degraded", 1, false),
        ("stopping", 1, true),
    ] {
        let script =
            format!("#!/bin/sh\n[ \"$*\" = is-system-running ] && echo {state}\nexit {status}\n");
        std::fs::write(&program, script).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&program, mode).unwrap();
        let told = state_by(program.to_str().unwrap()).await.unwrap();
        assert_eq!(shutdown::is_going_down(&told), expected, "{state}");
    }
    assert!(state_by("/no/systemctl").await.is_err());
}
