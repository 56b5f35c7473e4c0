//! HTTP probes. Upstream: `pkg/probe/http`.

use std::fmt::Display;
use std::time::Duration;

use k8s_openapi::api::core::v1::HTTPGetAction;
use reqwest::header::{ACCEPT, HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use tokio::time::{Instant, timeout_at};

use super::handlers::{OUTPUT_LIMIT, Raw, text};
use crate::core::node_status::KUBELET_VERSION;
use crate::kuberuntime::pod_http::{Client, GetError, Target};

/// Upstream: `http.Client`, when its time is up before and after the headers have arrived.
const NO_HEADERS: &str =
    "context deadline exceeded (Client.Timeout exceeded while awaiting headers)";
const NO_BODY: &str =
    "context deadline exceeded (Client.Timeout or context cancellation while reading body)";

/// `kube-probe/<major>.<minor>`, by which servers know a probe.
pub(super) fn user_agent() -> String {
    let version = KUBELET_VERSION.trim_start_matches('v');
    let mut parts = version.splitn(3, '.');
    let major = parts.next().unwrap_or_default();
    let minor = parts.next().unwrap_or_default();
    format!("kube-probe/{major}.{minor}")
}

/// Makes one GET. An error is a request that cannot be made at all; what fails on the way is a failure.
pub(super) async fn get(
    client: &Client,
    action: &HTTPGetAction,
    host: &str,
    port: u16,
    timeout: Duration,
) -> Result<Raw, String> {
    let target = target(action, host, port)?;
    let headers = headers(action)?;
    let failure = |why: &dyn Display| Ok(Raw::Failure(format!("Get \"{target}\": {why}")));
    let deadline = Instant::now() + timeout;
    let answer = match timeout_at(deadline, client.get(&target, headers)).await {
        Err(_) => return failure(&NO_HEADERS),
        Ok(Err(GetError::Request(why))) => return Err(why),
        Ok(Err(error)) => return failure(&error),
        Ok(Ok(answer)) => answer,
    };
    let status = answer.status();
    let body = match timeout_at(deadline, answer.read(OUTPUT_LIMIT)).await {
        Err(_) => return failure(&NO_BODY),
        Ok(Err(error)) => return failure(&error),
        Ok(Ok(body)) => body,
    };
    Ok(if status.is_success() {
        Raw::Success
    } else if status.is_redirection() {
        Raw::Warning(format!(
            "Probe terminated redirects, Response body: {}",
            text(&body)
        ))
    } else {
        Raw::Failure(format!(
            "HTTP probe failed with statuscode: {}",
            status.as_u16()
        ))
    })
}

fn target(action: &HTTPGetAction, host: &str, port: u16) -> Result<Target, String> {
    let scheme = match action.scheme.as_deref().unwrap_or_default() {
        "" | "HTTP" | "http" => "http",
        "HTTPS" | "https" => "https",
        other => {
            return Err(format!(
                "scheme {other:?} is not supported, only HTTP and HTTPS"
            ));
        }
    };
    let path = action.path.as_deref().unwrap_or_default();
    Target::new(scheme, host, port, path).map_err(|error| error.to_string())
}

/// Upstream's defaults, unless the spec names them. An empty value leaves the header out.
fn headers(action: &HTTPGetAction) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    let mut given = HeaderMap::new();
    for header in action.http_headers.iter().flatten() {
        let bad = |why: String| format!("header {:?} of the probe: {why}", header.name);
        let name: HeaderName = header.name.parse().map_err(|e| bad(format!("{e}")))?;
        let value = HeaderValue::from_bytes(header.value.as_bytes());
        let value = value.map_err(|e| bad(format!("{e}")))?;
        given.append(name, value);
    }
    let agent: HeaderValue = user_agent().parse().map_err(|e| format!("{e}"))?;
    for (name, default) in [
        (ACCEPT, HeaderValue::from_static("*/*")),
        (USER_AGENT, agent),
    ] {
        match given.get(&name) {
            None => {
                headers.insert(name, default);
            }
            Some(value) if value.is_empty() => {
                given.remove(&name);
            }
            Some(_) => {}
        }
    }
    headers.extend(given);
    Ok(headers)
}
