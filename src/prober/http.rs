//! HTTP probes: GET without a kept connection, certificates not verified. Upstream: `pkg/probe/http`.

use std::time::Duration;

use k8s_openapi::api::core::v1::HTTPGetAction;
use reqwest::header::{ACCEPT, CONNECTION, HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use reqwest::redirect::Policy;
use tracing::debug;

use super::handlers::{OUTPUT_LIMIT, Raw, dial_error, host_port, io_error, root_cause, text};
use crate::core::node_status::KUBELET_VERSION;

const REDIRECTS: usize = 10;

/// The client of all HTTP probes: it keeps no connection and follows redirects to the same host only.
pub(super) fn client() -> Result<reqwest::Client, String> {
    // An error means that a provider is installed already, which serves as well.
    if rustls::crypto::ring::default_provider()
        .install_default()
        .is_err()
    {
        debug!("a TLS provider is installed already");
    }
    let redirects = Policy::custom(|attempt| {
        let before = attempt.previous();
        let first = before.first().and_then(|url| url.host_str());
        if attempt.url().host_str() != first {
            attempt.stop()
        } else if before.len() >= REDIRECTS {
            attempt.error("stopped after 10 redirects")
        } else {
            attempt.follow()
        }
    });
    reqwest::Client::builder()
        .no_proxy()
        .no_gzip()
        .referer(false)
        .pool_max_idle_per_host(0)
        .tls_danger_accept_invalid_certs(true)
        .redirect(redirects)
        .build()
        .map_err(|error| format!("no HTTP client for probes: {}", root_cause(&error)))
}

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
    client: &reqwest::Client,
    action: &HTTPGetAction,
    host: &str,
    port: u16,
    timeout: Duration,
) -> Result<Raw, String> {
    let url = url(action, host, port)?;
    let request = client
        .get(url.clone())
        .headers(headers(action)?)
        .build()
        .map_err(|error| root_cause(&error))?;
    let exchange = async {
        let mut response = client.execute(request).await?;
        let status = response.status();
        let mut body = Vec::new();
        while body.len() < OUTPUT_LIMIT
            && let Some(chunk) = response.chunk().await?
        {
            body.extend_from_slice(&chunk);
        }
        Ok::<_, reqwest::Error>((status, body))
    };
    Ok(match tokio::time::timeout(timeout, exchange).await {
        Err(_) => Raw::Failure(format!(
            "Get \"{url}\": context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
        )),
        Ok(Err(error)) => {
            let why = match io_error(&error) {
                Some(io) if error.is_connect() => dial_error(&host_port(host, port), io),
                _ => root_cause(&error),
            };
            Raw::Failure(format!("Get \"{url}\": {why}"))
        }
        Ok(Ok((status, _))) if status.is_success() => Raw::Success,
        Ok(Ok((status, body))) if status.is_redirection() => Raw::Warning(format!(
            "Probe terminated redirects, Response body: {}",
            text(&body)
        )),
        Ok(Ok((status, _))) => Raw::Failure(format!(
            "HTTP probe failed with statuscode: {}",
            status.as_u16()
        )),
    })
}

fn url(action: &HTTPGetAction, host: &str, port: u16) -> Result<reqwest::Url, String> {
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
    let path = path.strip_prefix('/').unwrap_or(path);
    let text = format!("{scheme}://{}/{path}", host_port(host, port));
    text.parse()
        .map_err(|error| format!("{text:?} is no URL: {error}"))
}

/// Upstream's defaults, unless the spec names them. An empty value leaves the user agent out; an empty Accept is
/// sent as such, since the client puts in its own where there is none.
fn headers(action: &HTTPGetAction) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    let mut given = HeaderMap::new();
    for header in action.http_headers.iter().flatten() {
        let bad = |why: String| format!("header {:?} of the probe: {why}", header.name);
        let name: HeaderName = header.name.parse().map_err(|e| bad(format!("{e}")))?;
        let value: HeaderValue = header.value.parse().map_err(|e| bad(format!("{e}")))?;
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
            Some(value) if value.is_empty() && name == USER_AGENT => {
                given.remove(&name);
            }
            Some(_) => {}
        }
    }
    headers.extend(given);
    Ok(headers)
}
