//! gRPC probes: `Check` of `grpc.health.v1`. Upstream: `pkg/probe/grpc`.

use std::time::Duration;

use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

use super::handlers::{Raw, dial_error, io_error, root_cause};
use super::http::user_agent;

const CHECK: &str = "/grpc.health.v1.Health/Check";
const SERVING: i32 = 1;

/// `grpc.health.v1.HealthCheckRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct HealthCheckRequest {
    /// The service asked for; empty = the server as a whole.
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
    let within = humantime::format_duration(timeout);
    let exchange = async {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .and_then(|endpoint| endpoint.user_agent(user_agent()));
        let connected = match endpoint {
            Ok(endpoint) => endpoint.connect().await,
            Err(error) => Err(error),
        };
        let channel = connected.map_err(|error| {
            let why = match io_error(&error) {
                Some(io) => dial_error(address, io),
                None => root_cause(&error),
            };
            format!("error: failed to connect service at {address:?}: {why}")
        })?;
        let mut client = tonic::client::Grpc::new(channel);
        client
            .ready()
            .await
            .map_err(|error| format!("error: health rpc probe failed: {}", root_cause(&error)))?;
        let request = Request::new(HealthCheckRequest {
            service: service.to_owned(),
        });
        let path = PathAndQuery::from_static(CHECK);
        let codec: ProstCodec<HealthCheckRequest, HealthCheckResponse> = ProstCodec::default();
        let answer = client.unary(request, path, codec).await;
        let answer = answer.map_err(|status| refusal(&status, &format!("{within}")))?;
        match answer.into_inner().status {
            SERVING => Ok(()),
            other => Err(format!(
                "service unhealthy (responded with {:?})",
                status_name(other)
            )),
        }
    };
    match tokio::time::timeout(timeout, exchange).await {
        Ok(Ok(())) => Raw::Success,
        Ok(Err(why)) => Raw::Failure(why),
        Err(_) => Raw::Failure(format!(
            "timeout: failed to connect service {address:?} within {within}: context deadline exceeded"
        )),
    }
}

fn refusal(status: &Status, within: &str) -> String {
    match status.code() {
        Code::Unimplemented => format!(
            "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {}",
            status.message()
        ),
        Code::DeadlineExceeded => {
            format!("timeout: health rpc did not complete within {within}")
        }
        code => format!(
            "error: health rpc probe failed: rpc error: code = {code:?} desc = {}",
            status.message()
        ),
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
