//! gRPC probes: `Check` of `grpc.health.v1`. Upstream: `pkg/probe/grpc`.

use std::error::Error as _;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

use super::handlers::Raw;
use super::http::user_agent;
use crate::kuberuntime::pod_http::{dial_error, io_error, read_error, root_cause};

const CHECK: &str = "/grpc.health.v1.Health/Check";
const SERVING: i32 = 1;

/// `grpc.health.v1.HealthCheckRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct HealthCheckRequest {
    /// Requested service; empty = the server as a whole.
    #[prost(string, tag = "1")]
    pub(super) service: String,
}

/// `grpc.health.v1.HealthCheckResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct HealthCheckResponse {
    /// `ServingStatus`.
    #[prost(int32, tag = "1")]
    pub(super) status: i32,
}

/// Asks the server at `address` for the health of a service. Every answer but SERVING, and none, is a failure.
pub(super) async fn check(address: &str, service: &str, timeout: Duration) -> Raw {
    let within = humantime::format_duration(timeout)
        .to_string()
        .replace(' ', "");
    let deadline = Instant::now() + timeout;
    let channel = match timeout_at(deadline, connect(address)).await {
        Ok(Ok(channel)) => channel,
        Ok(Err(error)) => {
            let why = match io_error(&error) {
                Some(io) => dial_error(address, io),
                None => root_cause(&error),
            };
            return Raw::Failure(format!(
                "error: failed to connect service at {address:?}: {why}"
            ));
        }
        Err(_) => {
            return Raw::Failure(format!(
                "timeout: failed to connect service {address:?} within {within}: context deadline exceeded"
            ));
        }
    };
    match timeout_at(deadline, ask(channel, service)).await {
        Ok(Ok(SERVING)) => Raw::Success,
        Ok(Ok(other)) => Raw::Failure(format!(
            "service unhealthy (responded with {:?})",
            status_name(other)
        )),
        Ok(Err(status)) => Raw::Failure(refusal(&status, address, &within)),
        Err(_) => Raw::Failure(refusal(&Status::deadline_exceeded(""), address, &within)),
    }
}

async fn connect(address: &str) -> Result<Channel, tonic::transport::Error> {
    Endpoint::from_shared(format!("http://{address}"))?
        .user_agent(user_agent())?
        .connect()
        .await
}

/// Makes the call. Returns the status in the answer.
async fn ask(channel: Channel, service: &str) -> Result<i32, Status> {
    let mut client = tonic::client::Grpc::new(channel);
    client
        .ready()
        .await
        .map_err(|error| Status::from_error(error.into()))?;
    let request = Request::new(HealthCheckRequest {
        service: service.to_owned(),
    });
    let path = PathAndQuery::from_static(CHECK);
    let codec: ProstCodec<HealthCheckRequest, HealthCheckResponse> = ProstCodec::default();
    let answer = client.unary(request, path, codec).await?;
    Ok(answer.into_inner().status)
}

fn refusal(status: &Status, address: &str, within: &str) -> String {
    match status.code() {
        Code::Unimplemented => format!(
            "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {}",
            status.message()
        ),
        Code::DeadlineExceeded => {
            format!("timeout: health rpc did not complete within {within}")
        }
        code => {
            // What the server said has no source; what happened to the connection does.
            let why = match (status.source(), io_error(status)) {
                (None, _) => status.message().to_owned(),
                (Some(_), Some(io)) => read_error(address, io, "EOF"),
                (Some(source), None) => root_cause(source),
            };
            format!("error: health rpc probe failed: rpc error: code = {code:?} desc = {why}")
        }
    }
}

fn status_name(status: i32) -> &'static str {
    match status {
        0 => "UNKNOWN",
        1 => "SERVING",
        2 => "NOT_SERVING",
        3 => "SERVICE_UNKNOWN",
        _ => "an unknown status",
    }
}
