//! The listening socket of the kubelet's API as systemd hands it over (`sd_listen_fds(3)`): the kernel keeps it open, and
//! connections wait in it while the agent is replaced. Upstream has no counterpart.

use std::net::{SocketAddr, TcpListener};

/// The name that the socket's unit gives it (`FileDescriptorName=`).
const NAME: &str = "kubelet";

/// Takes the socket of that name, if this process was given one. To be called once, before threads are started: it changes
/// the environment, so that no child takes the sockets for its own.
///
/// # Errors
/// When what was given under the name is no listening TCP socket.
pub fn take() -> std::io::Result<Option<TcpListener>> {
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let Some(index) = position(&names) else {
        return Ok(None);
    };
    let Some(listener) = listenfd::ListenFd::from_env().take_tcp_listener(index)? else {
        return Ok(None);
    };
    listener.set_nonblocking(true)?;
    Ok(Some(listener))
}

/// Returns where the name is among all, which colons separate.
fn position(names: &str) -> Option<usize> {
    names.split(':').position(|name| name == NAME)
}

/// Returns whether a socket that listens at `given` does what the configuration asks for: the same port, and no more
/// addresses than configured.
pub(super) fn serves(given: SocketAddr, configured: SocketAddr) -> bool {
    given.port() == configured.port()
        && (configured.ip().is_unspecified()
            || configured.ip().to_canonical() == given.ip().to_canonical())
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::process::{Command, Stdio};

    use super::*;

    const CHILD: &str = "HOLDFAST_TEST_INHERITED_CHILD";

    /// Runs itself again as the service manager would start it: with the sockets as descriptors from 3 on.
    #[test]
    fn the_socket_of_that_name_is_taken_from_the_service_manager() {
        if let Ok(address) = std::env::var(CHILD) {
            let listener = take().unwrap().expect("it was handed over");
            assert_eq!(listener.local_addr().unwrap().to_string(), address);
            return;
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let script = "exec env LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=other:kubelet \"$0\" \"$@\" 3</dev/null 4<&0";
        let name = "server::kubelet::inherited::tests::the_socket_of_that_name_is_taken_from_the_service_manager";
        let output = Command::new("sh")
            .args(["-c", script])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(CHILD, address)
            .stdin(Stdio::from(OwnedFd::from(listener)))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && said.contains("1 passed"),
            "{said}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }

    #[test]
    fn the_socket_is_found_by_its_name() {
        assert_eq!(position("kubelet"), Some(0));
        assert_eq!(position("holdfast.socket:kubelet:x"), Some(1));
        assert_eq!(position("kubelet2"), None);
        assert_eq!(position(""), None);
    }

    #[test]
    fn a_socket_serves_no_more_than_was_configured() {
        for (given, configured, wanted) in [
            ("[::]:10250", "0.0.0.0:10250", true),
            ("0.0.0.0:10250", "0.0.0.0:10250", true),
            ("10.0.0.1:10250", "0.0.0.0:10250", true),
            ("10.0.0.1:10250", "10.0.0.1:10250", true),
            ("[::ffff:10.0.0.1]:10250", "10.0.0.1:10250", true),
            ("[::]:10250", "10.0.0.1:10250", false),
            ("[::]:10250", "127.0.0.1:10250", false),
            ("[::]:10251", "0.0.0.0:10250", false),
        ] {
            let (given, configured) = (given.parse().unwrap(), configured.parse().unwrap());
            assert_eq!(serves(given, configured), wanted, "{given} {configured}");
        }
    }
}
