//! Answers to those who read metrics: the format and the compression they ask for.

use std::io::Write as _;

use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use flate2::Compression;
use flate2::write::GzEncoder;
use tokio::sync::Semaphore;

use crate::stats::exposition::Format;
use crate::types::blocking;

/// Shorter answers are not worth compressing.
const MIN_GZIP: usize = 1024;
/// Answers made at once; the others wait. Pods' own work must not wait behind them.
static TURNS: Semaphore = Semaphore::const_new(2);

/// Gives what `encode` writes in OpenMetrics as the request's headers ask for it. `encode` may block.
pub(super) async fn answer<E: std::fmt::Display + Send + 'static>(
    headers: &HeaderMap,
    encode: impl FnOnce() -> Result<String, E> + Send + 'static,
) -> Response {
    let format = Format::negotiate(joined(headers, header::ACCEPT).as_deref());
    let gzip = accepts_gzip(joined(headers, header::ACCEPT_ENCODING).as_deref());
    let Ok(turn) = TURNS.acquire().await else {
        return failed("no more answers are made".to_owned());
    };
    let work = move || -> Result<(Vec<u8>, bool), String> {
        // Given back when the work ends, also when nobody waits for it any more.
        let _turn = turn;
        let text = format.of(encode().map_err(|error| error.to_string())?);
        if !gzip || text.len() < MIN_GZIP {
            return Ok((text.into_bytes(), false));
        }
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        let packed = encoder
            .write_all(text.as_bytes())
            .and_then(|()| encoder.finish());
        packed
            .map(|bytes| (bytes, true))
            .map_err(|error| error.to_string())
    };
    let (body, packed) = match blocking::run(work).await {
        Ok(Ok(done)) => done,
        Ok(Err(error)) => return failed(error),
        Err(error) => return failed(error.to_string()),
    };
    let content_type = HeaderValue::from_static(format.content_type());
    let mut response = ([(header::CONTENT_TYPE, content_type)], body).into_response();
    let answer = response.headers_mut();
    answer.insert(
        header::VARY,
        HeaderValue::from_static("Accept, Accept-Encoding"),
    );
    if packed {
        let gzip = HeaderValue::from_static("gzip");
        answer.insert(header::CONTENT_ENCODING, gzip);
    }
    response
}

fn failed(error: String) -> Response {
    (StatusCode::INTERNAL_SERVER_ERROR, error).into_response()
}

/// All values of a header as one list.
fn joined(headers: &HeaderMap, name: header::HeaderName) -> Option<String> {
    let values: Vec<&str> = headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .collect();
    (!values.is_empty()).then(|| values.join(","))
}

fn accepts_gzip(accept: Option<&str>) -> bool {
    let accepted = |coding: &str| {
        let mut parts = coding.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default();
        let refused = parts.any(|p| {
            let quality = p
                .strip_prefix("q=")
                .and_then(|q| q.trim().parse::<f32>().ok());
            quality == Some(0.0)
        });
        name.eq_ignore_ascii_case("gzip") && !refused
    };
    accept.unwrap_or_default().split(',').any(accepted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_for_those_who_accept_it() {
        for (accept, gzip) in [
            (None, false),
            (Some("identity"), false),
            (Some("gzip"), true),
            (Some("deflate, GZIP;q=0.5"), true),
            (Some("gzip;q=0"), false),
        ] {
            assert_eq!(accepts_gzip(accept), gzip, "{accept:?}");
        }
    }
}
