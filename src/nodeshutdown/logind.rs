//! `logind` over D-Bus: a delay inhibitor, and what it announces. Upstream: `nodeshutdown/systemd`.
//!
//! In: how long the pods need, whether the machine may go down. Out: [`Announced`], the lock that delays a shutdown as long as
//! the agent holds it, and a drop-in for `logind.conf` where the machine allows less delay than the pods need.
//!
//! A bus or a `logind` that is lost is looked for every second, and the lock is taken again before the old one goes. The
//! state is also asked for, so that an announcement in between is not missed.
//!
//! Only the owner of `logind`'s name on the bus is listened to: any user may send signals there.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use futures::StreamExt as _;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};
use zbus::zvariant::{DynamicType, OwnedFd, OwnedValue};
use zbus::{Connection, MatchRule, Message, MessageStream, message};

use super::{Announced, Announcer};
use crate::core::shutdown::{self, Inhibitor, Lock, Periods};

/// Deadline of a call.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time that systemd has to answer whether the machine shuts down. The agent is exiting meanwhile.
const LAST_QUESTION: Duration = Duration::from_secs(2);
/// Pause before the bus is looked for again; upstream's `dbusReconnectPeriod`.
const RECONNECT: Duration = Duration::from_secs(1);
/// First pause before `logind` is asked whether it has read its configuration again; it doubles.
const FIRST_LOOK: Duration = Duration::from_millis(100);
/// Number of polls.
const LOOKS: u32 = 5;
/// Queue of signals that are not handled yet.
const QUEUE: usize = 16;

const LOGIND: &str = "org.freedesktop.login1";
const LOGIND_PATH: &str = "/org/freedesktop/login1";
const LOGIND_MANAGER: &str = "org.freedesktop.login1.Manager";
const LOGIND_UNIT: &str = "systemd-logind.service";
const SYSTEMD: &str = "org.freedesktop.systemd1";
const SYSTEMD_PATH: &str = "/org/freedesktop/systemd1";
const SYSTEMD_MANAGER: &str = "org.freedesktop.systemd1.Manager";
const BUS: &str = "org.freedesktop.DBus";
const BUS_PATH: &str = "/org/freedesktop/DBus";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
/// Asks systemd at its own socket, where it answers root although the bus is down.
const SYSTEMCTL: &str = "systemctl";
/// File that configures a longer delay. The last name of all directories wins, and unattended-upgrades has one of its own.
const DROP_IN: &str = "/etc/systemd/logind.conf.d/zz-holdfast.conf";
/// Former name of that file.
const FORMER_DROP_IN: &str = "99-holdfast.conf";
const SIGHUP: i32 = 1;

/// `logind` or systemd did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum LogindError {
    /// There is no bus.
    #[error("reach the system bus: {0}")]
    Unreachable(#[source] zbus::Error),
    /// It refused, or the answer makes no sense.
    #[error("{what} over D-Bus: {source}")]
    Refused {
        /// Request that was sent.
        what: &'static str,
        /// Why.
        #[source]
        source: zbus::Error,
    },
    /// It did not answer.
    #[error("{what} over D-Bus: no answer within {} s", PATIENCE.as_secs())]
    Silent {
        /// Request that was sent.
        what: &'static str,
    },
    /// The drop-in cannot be written.
    #[error("write {}: {source}", path.display())]
    DropIn {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// `logind` allows less delay than it was asked for.
    #[error(
        "logind allows a delay of {} s, {} s are needed; is InhibitDelayMaxSec set in a logind.conf.d with a later name? `systemd-analyze cat-config systemd/logind.conf` shows that",
        allowed.as_secs(), wanted.as_secs()
    )]
    TooShort {
        /// Delay that it allows.
        allowed: Duration,
        /// Delay that the pods need.
        wanted: Duration,
    },
    /// The bus or `logind` went away.
    #[error("logind or the bus went away")]
    Lost,
}

/// Address of `logind`.
enum Place {
    /// On the system bus.
    Machine,
    /// At a socket of a test, without a bus.
    #[cfg(test)]
    Socket(PathBuf),
}

/// The client of `logind`.
pub struct Logind {
    place: Place,
    drop_in: PathBuf,
    periods: Periods,
    announcer: Announcer,
    /// The problem of a delay that may be too short.
    short: Option<String>,
}

impl Logind {
    /// A client for the `logind` of this machine. `None` when another program than systemd is its PID 1: then nothing
    /// announces shutdowns.
    pub fn of_this_machine(periods: Periods, announcer: Announcer) -> Option<Self> {
        is_systemd().then(|| Self {
            place: Place::Machine,
            drop_in: PathBuf::from(DROP_IN),
            periods,
            announcer,
            short: None,
        })
    }

    /// Runs until `token` is cancelled; the machine may then go down.
    pub async fn run(mut self, token: CancellationToken) {
        let mut lock = None;
        let mut said = String::new();
        loop {
            let error = tokio::select! {
                () = token.cancelled() => return,
                error = self.session(&mut lock) => error,
            };
            let text = error.to_string();
            self.show(lock.is_some(), Some(text.clone()));
            if text == said {
                debug!(
                    error = text,
                    "still cannot watch for shutdowns of the machine"
                );
            } else {
                warn!(
                    error = text,
                    "cannot watch for shutdowns of the machine for now"
                );
                said = text;
            }
            tokio::select! {
                () = token.cancelled() => return,
                () = tokio::time::sleep(RECONNECT) => {}
            }
        }
    }

    /// Everything on one connection; returns why it ended.
    async fn session(&mut self, lock: &mut Option<OwnedFd>) -> LogindError {
        match self.listen(lock).await {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    async fn listen(
        &mut self,
        lock: &mut Option<OwnedFd>,
    ) -> Result<std::convert::Infallible, LogindError> {
        let bus = self.connect().await?;
        let mut owners = bus.owners(LOGIND).await?;
        let owner = bus.owner_of(LOGIND).await?;
        let mut signals = bus.signals(owner).await?;
        self.keep_lock(&bus, lock).await;
        let mut found = None;
        let allowed = self.allow_delay(&bus, &mut found).await;
        self.announcer
            .delay
            .send_replace(found.filter(|_| allowed.is_err()));
        self.short = allowed.err().map(|error| {
            warn!(%error, "pods may get less time than configured when the machine shuts down");
            error.to_string()
        });
        self.show(lock.is_some(), None);
        let goes_down = bus.property(LOGIND_OBJECT, "PreparingForShutdown").await?;
        self.announce(goes_down);
        loop {
            tokio::select! {
                signal = signals.next() => {
                    let signal = signal.and_then(Result::ok).ok_or(LogindError::Lost)?;
                    let (goes_down,) = signal.body().deserialize::<(bool,)>().map_err(|source| {
                        LogindError::Refused { what: "read PrepareForShutdown", source }
                    })?;
                    self.announce(goes_down);
                    if !goes_down {
                        self.keep_lock(&bus, lock).await;
                    }
                }
                () = changed(&mut owners) => return Err(LogindError::Lost),
                released = self.announcer.released.changed() => {
                    if released.is_err() {
                        // The manager has ended, and so does the agent.
                        return std::future::pending().await;
                    }
                    self.keep_lock(&bus, lock).await;
                }
            }
        }
    }

    fn announce(&self, goes_down: bool) {
        let announced = if goes_down {
            Announced::GoesDown
        } else {
            Announced::Up
        };
        debug!(?announced, "announcement of logind");
        self.announcer.announced.send_replace(announced);
    }

    /// Takes the lock, anew if there is one already, or closes it when the machine may go down.
    async fn keep_lock(&mut self, bus: &Bus, lock: &mut Option<OwnedFd>) {
        if *self.announcer.released.borrow_and_update() {
            *lock = None;
            self.show(false, None);
            return;
        }
        let body = (
            "shutdown",
            "holdfast",
            "Pods are stopped, and their ends recorded",
            "delay",
        );
        match bus
            .call::<_, OwnedFd>(LOGIND_OBJECT, "Inhibit", &body)
            .await
        {
            // The old one goes after the new one is there.
            Ok(new) => {
                *lock = Some(new);
                self.show(true, None);
            }
            // During a shutdown logind gives none; the old one, if any, still counts.
            Err(error) => {
                warn!(%error, "cannot take the lock that delays shutdowns");
                self.show(lock.is_some(), Some(error.to_string()));
            }
        }
    }

    /// Tells the manager of the lock.
    fn show(&self, is_held: bool, problem: Option<String>) {
        let state = match (is_held, *self.announcer.released.borrow()) {
            (true, _) => Inhibitor::Held,
            (false, true) => Inhibitor::Released,
            (false, false) => Inhibitor::Missing,
        };
        let problem = problem.or_else(|| self.short.clone());
        let lock = Lock { state, problem };
        self.announcer.lock.send_if_modified(|known| {
            let is_changed = *known != lock;
            *known = lock;
            is_changed
        });
    }

    /// Has `logind` allow as long a delay as the pods need. `seen` is the delay that it allows, as soon as that is known. Upstream:
    /// `OverrideInhibitDelay`, `ReloadLogindConf`.
    async fn allow_delay(&self, bus: &Bus, seen: &mut Option<Duration>) -> Result<(), LogindError> {
        let allowed = || async {
            let micros: u64 = bus.property(LOGIND_OBJECT, "InhibitDelayMaxUSec").await?;
            Ok::<_, LogindError>(Duration::from_micros(micros))
        };
        let mut found = *seen.insert(allowed().await?);
        let Some(wanted) = shutdown::delay_to_ask_for(&self.periods, found) else {
            return Ok(());
        };
        info!(
            allowed_s = found.as_secs(),
            wanted_s = wanted.as_secs(),
            file = %self.drop_in.display(),
            "requesting a longer delay from logind"
        );
        write_file(&self.drop_in, shutdown::delay_drop_in(wanted))
            .await
            .map_err(|source| LogindError::DropIn {
                path: self.drop_in.clone(),
                source,
            })?;
        let former = self.drop_in.with_file_name(FORMER_DROP_IN);
        if let Err(error) = tokio::fs::remove_file(&former).await
            && error.kind() != std::io::ErrorKind::NotFound
        {
            warn!(file = %former.display(), %error, "cannot remove a file that is not used any more");
        }
        let body = (LOGIND_UNIT, "all", SIGHUP);
        bus.call::<_, ()>(SYSTEMD_OBJECT, "KillUnit", &body).await?;
        let mut pause = FIRST_LOOK;
        for _ in 0..LOOKS {
            tokio::time::sleep(pause).await;
            pause *= 2;
            found = *seen.insert(allowed().await?);
            if found >= wanted {
                return Ok(());
            }
        }
        Err(LogindError::TooShort {
            allowed: found,
            wanted,
        })
    }

    async fn connect(&self) -> Result<Bus, LogindError> {
        match &self.place {
            Place::Machine => {
                let connection = tokio::time::timeout(PATIENCE, Connection::system()).await;
                let connection = connection.map_err(|_| LogindError::Silent { what: "connect" })?;
                Ok(Bus(connection.map_err(LogindError::Unreachable)?))
            }
            #[cfg(test)]
            Place::Socket(path) => Bus::at(path).await,
        }
    }
}

/// Returns whether systemd takes the machine down now. `false` without systemd, and when it does not answer within two
/// seconds.
pub async fn is_machine_going_down() -> bool {
    if !is_systemd() {
        return false;
    }
    let asked = async {
        match tokio::time::timeout(LAST_QUESTION / 2, state_on_the_bus()).await {
            Ok(Ok(state)) => Ok(state),
            // The bus may end before the agent. What systemd sends at its own socket names it as the sender, which zbus
            // panics at.
            Ok(Err(_)) | Err(_) => state_by(SYSTEMCTL).await,
        }
    };
    match tokio::time::timeout(LAST_QUESTION, asked).await {
        Ok(Ok(state)) => shutdown::is_going_down(&state),
        Ok(Err(error)) => {
            warn!(%error, "cannot find out whether the machine shuts down: neither the bus nor {SYSTEMCTL} answers");
            false
        }
        Err(_) => {
            warn!("cannot find out whether the machine shuts down: no answer from systemd");
            false
        }
    }
}

async fn state_on_the_bus() -> Result<String, LogindError> {
    let connection = Connection::system().await;
    let bus = Bus(connection.map_err(LogindError::Unreachable)?);
    state_of(&bus).await
}

async fn state_of(bus: &Bus) -> Result<String, LogindError> {
    bus.property(SYSTEMD_OBJECT, "SystemState").await
}

/// Returns the state of the system as the program `systemctl` prints it. Its exit status is 0 for `running` alone.
async fn state_by(systemctl: &str) -> std::io::Result<String> {
    let mut command = Command::new(systemctl);
    command.arg("is-system-running").stdin(Stdio::null());
    let output = command.kill_on_drop(true).output().await?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Returns whether systemd runs, as sd_booted(3) does.
fn is_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// An object with a manager's interface.
#[derive(Clone, Copy)]
struct Object {
    service: &'static str,
    path: &'static str,
    interface: &'static str,
}

const LOGIND_OBJECT: Object = Object {
    service: LOGIND,
    path: LOGIND_PATH,
    interface: LOGIND_MANAGER,
};
const SYSTEMD_OBJECT: Object = Object {
    service: SYSTEMD,
    path: SYSTEMD_PATH,
    interface: SYSTEMD_MANAGER,
};

/// A connection to the bus, or to one peer without names.
struct Bus(Connection);

impl Bus {
    async fn ask<B>(
        &self,
        object: Object,
        interface: &str,
        method: &'static str,
        body: &B,
    ) -> Result<Message, LogindError>
    where
        B: serde::Serialize + DynamicType + Sync,
    {
        let service = self.0.is_bus().then_some(object.service);
        let answer = self
            .0
            .call_method(service, object.path, Some(interface), method, body);
        tokio::time::timeout(PATIENCE, answer)
            .await
            .map_err(|_| LogindError::Silent { what: method })?
            .map_err(|source| LogindError::Refused {
                what: method,
                source,
            })
    }

    async fn call<B, T>(
        &self,
        object: Object,
        method: &'static str,
        body: &B,
    ) -> Result<T, LogindError>
    where
        B: serde::Serialize + DynamicType + Sync,
        T: for<'d> zbus::zvariant::DynamicDeserialize<'d>,
    {
        let answer = self.ask(object, object.interface, method, body).await?;
        let body = answer.body();
        body.deserialize().map_err(refused(method))
    }

    async fn property<T>(&self, object: Object, name: &'static str) -> Result<T, LogindError>
    where
        T: TryFrom<OwnedValue, Error = zbus::zvariant::Error>,
    {
        let body = (object.interface, name);
        let answer = self.ask(object, PROPERTIES, "Get", &body).await?;
        let body = answer.body();
        let value: OwnedValue = body.deserialize().map_err(refused(name))?;
        T::try_from(value).map_err(|error| refused(name)(error.into()))
    }

    /// The unique name of a service; `None` without a bus.
    async fn owner_of(&self, service: &str) -> Result<Option<String>, LogindError> {
        if !self.0.is_bus() {
            return Ok(None);
        }
        let bus = Object {
            service: BUS,
            path: BUS_PATH,
            interface: BUS,
        };
        // An answer that it is not there yet has it started; the first call does the same.
        let started: Result<u32, _> = self
            .call(bus, "StartServiceByName", &(service, 0_u32))
            .await;
        drop(started);
        self.call(bus, "GetNameOwner", &(service,)).await.map(Some)
    }

    /// The announcements of `owner`, of the peer without a bus.
    async fn signals(&self, owner: Option<String>) -> Result<MessageStream, LogindError> {
        let what = "subscribe to PrepareForShutdown";
        let rule = announcements_of(owner).map_err(refused(what))?;
        self.subscribe(rule, what).await
    }

    /// Changes of the owner of `service`; `None` without a bus.
    async fn owners(&self, service: &'static str) -> Result<Option<MessageStream>, LogindError> {
        if !self.0.is_bus() {
            return Ok(None);
        }
        let what = "subscribe to NameOwnerChanged";
        let rule = owners_of(service).map_err(refused(what))?;
        Ok(Some(self.subscribe(rule, what).await?))
    }

    async fn subscribe(
        &self,
        rule: MatchRule<'static>,
        what: &'static str,
    ) -> Result<MessageStream, LogindError> {
        let stream = MessageStream::for_match_rule(rule, &self.0, Some(QUEUE));
        tokio::time::timeout(PATIENCE, stream)
            .await
            .map_err(|_| LogindError::Silent { what })?
            .map_err(refused(what))
    }
}

fn announcements_of(owner: Option<String>) -> zbus::Result<MatchRule<'static>> {
    let mut rule = MatchRule::builder()
        .msg_type(message::Type::Signal)
        .path(LOGIND_PATH)?
        .interface(LOGIND_MANAGER)?
        .member("PrepareForShutdown")?;
    if let Some(owner) = owner {
        rule = rule.sender(owner)?;
    }
    Ok(rule.build())
}

fn owners_of(service: &'static str) -> zbus::Result<MatchRule<'static>> {
    let rule = MatchRule::builder()
        .msg_type(message::Type::Signal)
        .sender(BUS)?
        .interface(BUS)?
        .member("NameOwnerChanged")?
        .arg(0, service)?;
    Ok(rule.build())
}

fn refused(what: &'static str) -> impl Fn(zbus::Error) -> LogindError {
    move |source| LogindError::Refused { what, source }
}

/// Returns when a stream has something, or has ended; never without one.
async fn changed(stream: &mut Option<MessageStream>) {
    match stream {
        Some(stream) => drop(stream.next().await),
        None => std::future::pending().await,
    }
}

/// Replaces a file as a whole, and makes its directory.
async fn write_file(path: &Path, text: String) -> std::io::Result<()> {
    if let Some(dir) = path.parent() {
        tokio::fs::create_dir_all(dir).await?;
    }
    // logind reads files that end in .conf.
    let beside = path.with_extension("new");
    tokio::fs::write(&beside, text).await?;
    tokio::fs::rename(&beside, path).await
}

#[cfg(test)]
mod tests;
