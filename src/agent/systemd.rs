//! Talking to the service manager (`sd_notify`): readiness, reloads, status and the watchdog.
//!
//! Without a service manager every call does nothing. A notification that cannot be delivered is logged and
//! otherwise without effect: pods do not depend on it.

use std::time::Duration;

use sd_notify::NotifyState;
use tracing::warn;

/// The service manager this process was started by, if any. Cheap to copy and to call.
#[derive(Clone, Copy, Debug, Default)]
pub struct Systemd {
    notify: bool,
    watchdog: Option<Duration>,
}

impl Systemd {
    /// Reads `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`.
    pub fn from_env() -> Self {
        let notify = std::env::var_os("NOTIFY_SOCKET").is_some_and(|socket| !socket.is_empty());
        Self {
            notify,
            watchdog: sd_notify::watchdog_enabled().filter(|limit| notify && !limit.is_zero()),
        }
    }

    /// Returns whether a service manager receives notifications.
    pub fn is_active(self) -> bool {
        self.notify
    }

    /// Returns the interval at which [`Systemd::watchdog`] must be called: half of the service manager's timeout.
    /// `None` without a watchdog.
    pub fn watchdog_interval(self) -> Option<Duration> {
        self.watchdog.map(|limit| limit / 2)
    }

    /// The agent has started, or is done with a reload.
    pub fn ready(self, status: &str) {
        self.send(&[NotifyState::Ready, NotifyState::Status(&one_line(status))]);
    }

    /// A reload began; [`Systemd::ready`] ends it.
    pub fn reloading(self, status: &str) {
        let status = one_line(status);
        let status = NotifyState::Status(&status);
        match NotifyState::monotonic_usec_now() {
            Ok(now) => self.send(&[NotifyState::Reloading, now, status]),
            // Without the time the service manager would wait for a reload that it cannot date.
            Err(error) => {
                warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot read the monotonic clock for a reload notification"
                );
                self.send(&[status]);
            }
        }
    }

    /// The agent began to stop.
    pub fn stopping(self, status: &str) {
        self.send(&[
            NotifyState::Stopping,
            NotifyState::Status(&one_line(status)),
        ]);
    }

    /// One line for `systemctl status`.
    pub fn status(self, status: &str) {
        self.send(&[NotifyState::Status(&one_line(status))]);
    }

    /// The agent is alive. Call it from the loop whose life is to be watched.
    pub fn watchdog(self) {
        self.send(&[NotifyState::Watchdog]);
    }

    /// Asks for more time before a start, reload or stop counts as failed.
    pub fn extend_timeout(self, by: Duration) {
        let usec = u32::try_from(by.as_micros()).unwrap_or(u32::MAX);
        self.send(&[NotifyState::ExtendTimeoutUsec(usec)]);
    }

    fn send(self, states: &[NotifyState<'_>]) {
        if !self.notify {
            return;
        }
        if let Err(error) = sd_notify::notify(states) {
            warn!(
                error = &error as &dyn std::error::Error,
                "cannot notify the service manager"
            );
        }
    }
}

/// A line break would begin a new assignment of the protocol.
fn one_line(status: &str) -> String {
    status.replace(['\r', '\n'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixDatagram;
    use std::process::Command;

    const CHILD: &str = "HOLDFAST_TEST_NOTIFY_CHILD";

    /// Runs itself again with the environment a service manager gives, since a process cannot safely
    /// change its own.
    #[test]
    fn service_manager_is_told_ready_reloading_watchdog_and_stopping() {
        if std::env::var_os(CHILD).is_some() {
            let systemd = Systemd::from_env();
            assert!(systemd.is_active());
            assert_eq!(systemd.watchdog_interval(), Some(Duration::from_secs(5)));
            systemd.ready("110 pods\nREADY=0");
            systemd.watchdog();
            systemd.reloading("reading manifests");
            systemd.stopping("draining");
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let name =
            "agent::systemd::tests::service_manager_is_told_ready_reloading_watchdog_and_stopping";
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(CHILD, "1")
            .env("NOTIFY_SOCKET", &path)
            .env("WATCHDOG_USEC", "10000000")
            .env_remove("WATCHDOG_PID")
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let receive = || {
            let mut buffer = [0; 512];
            let len = socket.recv(&mut buffer).unwrap();
            String::from_utf8_lossy(&buffer[..len]).into_owned()
        };
        assert_eq!(receive().trim_end(), "READY=1\nSTATUS=110 pods READY=0");
        assert_eq!(receive().trim_end(), "WATCHDOG=1");
        let reloading = receive();
        assert!(
            reloading.starts_with("RELOADING=1\nMONOTONIC_USEC="),
            "{reloading}"
        );
        assert!(
            reloading.contains("\nSTATUS=reading manifests"),
            "{reloading}"
        );
        assert_eq!(receive().trim_end(), "STOPPING=1\nSTATUS=draining");
    }

    #[test]
    fn without_a_service_manager_nothing_happens() {
        let systemd = Systemd::default();
        systemd.ready("ready");
        systemd.watchdog();
        assert!(!systemd.is_active());
        assert_eq!(systemd.watchdog_interval(), None);
    }
}
