//! `/run`: a command without streams, its output as the answer.

use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::error::StreamError;
use super::lookup::Target;
use super::{Streaming, parameters};

/// The longest form that is read.
const MAX_FORM: usize = 64 * 1024;

/// Runs `cmd`, split at spaces, from the query or from a form; upstream's `getRun`. Dropped, the call is cancelled;
/// the command may run on.
///
/// # Errors
/// When the command does not start, or ends with another code than 0.
pub(super) async fn run(
    node: &Streaming,
    target: &Target,
    request: Request,
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
    let kind = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
    Ok((kind, Body::from(output)).into_response())
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
