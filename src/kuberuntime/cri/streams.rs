//! Calls that open a stream: the runtime answers with the URL of its streaming server, good for one
//! connection within the next minute.

use k8s_cri::v1;

use super::client::CriClient;
use super::error::CriError;
use crate::types::ContainerId;

/// Streams of a process that a client wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Standard input.
    pub stdin: bool,
    /// Standard output.
    pub stdout: bool,
    /// Standard error; not together with `tty`.
    pub stderr: bool,
    /// The process has, or gets, a terminal.
    pub tty: bool,
}

impl CriClient {
    /// A URL at which `command` is run in a running container.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn exec(
        &self,
        id: &ContainerId,
        command: Vec<String>,
        streams: Streams,
    ) -> Result<String, CriError> {
        let request = v1::ExecRequest {
            container_id: id.to_string(),
            cmd: command,
            tty: streams.tty,
            stdin: streams.stdin,
            stdout: streams.stdout,
            stderr: streams.stderr,
        };
        let mut client = self.runtime();
        let call = self.operation("exec", id.as_str());
        Ok(call.once(client.exec(request)).await?.url)
    }

    /// A URL at which the first process of a running container is attached to.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn attach(&self, id: &ContainerId, streams: Streams) -> Result<String, CriError> {
        let request = v1::AttachRequest {
            container_id: id.to_string(),
            stdin: streams.stdin,
            tty: streams.tty,
            stdout: streams.stdout,
            stderr: streams.stderr,
        };
        let mut client = self.runtime();
        let call = self.operation("attach", id.as_str());
        Ok(call.once(client.attach(request)).await?.url)
    }

    /// A URL at which ports of a sandbox are reached; `ports` may be empty: SPDY names them per connection.
    ///
    /// # Errors
    /// See [`super::CriErrorKind`].
    pub async fn port_forward(
        &self,
        sandbox_id: &ContainerId,
        ports: &[u16],
    ) -> Result<String, CriError> {
        let request = v1::PortForwardRequest {
            pod_sandbox_id: sandbox_id.to_string(),
            port: ports.iter().map(|port| i32::from(*port)).collect(),
        };
        let mut client = self.runtime();
        let call = self.operation("port_forward", sandbox_id.as_str());
        Ok(call.once(client.port_forward(request)).await?.url)
    }
}
