//! `PUT /debug/flags/v`: klog's verbosity, for the rest of the agent's run. Upstream: `StringFlagPutHandler`.

use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{Method, StatusCode};
use tracing::info;

use super::super::Shared;

/// A verbosity is a small number.
const MAX_BODY: usize = 256;

pub(super) async fn verbosity(
    State(node): State<Shared>,
    method: Method,
    body: Body,
) -> (StatusCode, String) {
    if method != Method::PUT {
        let text = "unsupported http method\n".to_owned();
        return (StatusCode::NOT_ACCEPTABLE, text);
    }
    let failed = |given: &str, why: &str| {
        let text = format!("failed set klog.logging.verbosity {given}: {why}\n");
        (StatusCode::BAD_REQUEST, text)
    };
    let body = match to_bytes(body, MAX_BODY).await {
        Ok(body) => body,
        Err(error) => {
            let text = format!("error reading request body: {error}\n");
            return (StatusCode::BAD_REQUEST, text);
        }
    };
    let given = String::from_utf8_lossy(&body);
    let given = given.trim();
    let Ok(verbosity) = given.parse::<u32>() else {
        return failed(given, "it is not a number from 0");
    };
    let Some(set) = &node.debug.set_verbosity else {
        return failed(given, "this agent's logs are not its own");
    };
    match set(verbosity) {
        Ok(()) => {
            info!(verbosity, "verbosity of the logs changed");
            let text = format!("successfully set klog.logging.verbosity to {verbosity}\n");
            (StatusCode::OK, text)
        }
        Err(why) => failed(given, &why),
    }
}
