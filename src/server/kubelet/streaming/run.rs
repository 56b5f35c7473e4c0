//! `/run`: a command without streams, its output as the answer.

use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{StreamExt, stream};

use super::error::StreamError;
use super::lookup::Target;
use super::slots::Slot;
use super::{Streaming, parameters};

/// The longest form that is read.
const MAX_FORM: usize = 64 * 1024;

/// Runs `cmd`, split at spaces, from the query or from a form; upstream's `getRun`. Dropped, the call is cancelled;
/// the command may run on. The slot is held until the client has taken the output.
///
/// # Errors
/// When the command does not start, or ends with another code than 0.
pub(super) async fn run(
    node: &Streaming,
    target: &Target,
    request: Request,
    slot: Slot,
) -> Result<Response, StreamError> {
    let command = command(request).await?;
    let container = target.running_container(&node.cri).await?;
    let words = command.split(' ').map(str::to_owned).collect();
    let call = node.cri.exec_sync(&container, words, Duration::ZERO);
    let done = tokio::select! {
        done = call => done?,
        () = node.stop.cancelled() => return Err(StreamError::Stopping),
    };
    if done.exit_code != 0 {
        return Err(StreamError::Exit {
            command,
            code: done.exit_code,
            stderr: String::from_utf8_lossy(&done.stderr).into_owned(),
        });
    }
    let mut output = done.stdout;
    output.extend(done.stderr);
    let head = [
        (header::CONTENT_TYPE, "text/plain; charset=utf-8".to_owned()),
        (header::CONTENT_LENGTH, output.len().to_string()),
    ];
    Ok((head, held(output.into(), slot)).into_response())
}

/// A body that keeps `slot` as long as it is there.
fn held(output: Bytes, slot: Slot) -> Body {
    let output = stream::iter([output]).map(move |bytes| {
        let _held = &slot;
        Ok::<_, std::convert::Infallible>(bytes)
    });
    Body::from_stream(output)
}

async fn command(request: Request) -> Result<String, StreamError> {
    let query = request.uri().query().unwrap_or_default();
    if let Some(command) = parameters::all(query, "cmd").into_iter().next() {
        return Ok(command);
    }
    let is_form = (request.headers())
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|kind| kind.starts_with("application/x-www-form-urlencoded"));
    let missing = || StreamError::BadRequest("parameter \"cmd\" is required".to_owned());
    if !is_form {
        return Err(missing());
    }
    let form = to_bytes(request.into_body(), MAX_FORM)
        .await
        .map_err(|error| StreamError::BadRequest(format!("unable to read the form: {error}")))?;
    let form = String::from_utf8_lossy(&form);
    parameters::all(&form, "cmd")
        .into_iter()
        .next()
        .ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::super::slots::Slots;
    use super::*;
    use crate::types::PodUid;

    #[tokio::test]
    async fn output_that_nobody_takes_keeps_its_place() {
        let (slots, pod) = (Slots::default(), PodUid::from("pod".to_owned()));
        let mut bodies = Vec::new();
        while let Ok(slot) = slots.take_run(&pod) {
            bodies.push(held(Bytes::from_static(b"out"), slot));
        }
        let body = bodies.pop().unwrap();
        assert!(slots.take_run(&pod).is_err());
        assert_eq!(to_bytes(body, 10).await.unwrap(), "out");
        assert!(slots.take_run(&pod).is_ok());
    }
}
