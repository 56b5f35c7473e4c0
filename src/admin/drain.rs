//! Orders to stop the pods of the node, and to take that back.

use std::time::Duration;

use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::json;

use super::{Shared, error_response, json_response};
use crate::core::shutdown::ShutdownRecord;
use crate::core::state::State as Records;

/// Time that recording an order may take.
const PATIENCE: Duration = Duration::from_secs(8);
/// The only parameter.
const SECONDS: &str = "seconds";

/// `POST /v1/drain`. An order that is not recorded in time stays: it is carried out once the agent can.
pub(super) async fn order(State(shared): State<Shared>, RawQuery(query): RawQuery) -> Response {
    let timeout = match timeout_of(query.as_deref().unwrap_or_default()) {
        Ok(timeout) => timeout,
        Err(error) => return error_response(StatusCode::BAD_REQUEST, error),
    };
    tracing::info!(
        ?timeout,
        "local drain requested: stopping the pods as for a shutdown"
    );
    shared.info.drain.drain(timeout);
    let is_begun = |state: &Records| in_force(state).is_some_and(|record| record.local);
    match on_record(&shared, is_begun).await {
        true => json_response(&json!({})),
        false => error_response(
            StatusCode::SERVICE_UNAVAILABLE,
            "the agent cannot stop the pods yet, it waits for the container runtime or for its disk; the order is kept \
             until it can, or until `holdfast drain-local --cancel`",
        ),
    }
}

/// `DELETE /v1/drain`
pub(super) async fn take_back(State(shared): State<Shared>) -> Response {
    let of_machine = |state: &Records| in_force(state).is_some_and(|record| !record.local);
    let refused = || {
        error_response(
            StatusCode::CONFLICT,
            "the machine itself shuts down: cancel that where it was ordered, for example with `shutdown -c`",
        )
    };
    if of_machine(&shared.store.snapshot()) {
        return refused();
    }
    tracing::info!("local drain cancelled");
    shared.info.drain.cancel();
    match on_record(&shared, |state| {
        in_force(state).is_none_or(|record| !record.local)
    })
    .await
    {
        // It was announced as well.
        true if of_machine(&shared.store.snapshot()) => refused(),
        true => json_response(&json!({})),
        false => error_response(
            StatusCode::SERVICE_UNAVAILABLE,
            "the agent has not taken it back yet, it waits for the container runtime or for its disk",
        ),
    }
}

fn timeout_of(query: &str) -> Result<Option<Duration>, String> {
    let mut timeout = None;
    for (key, value) in form_urlencoded::parse(query.as_bytes()) {
        if key != SECONDS {
            return Err(format!("there is no parameter {key:?}"));
        }
        let seconds = value.parse();
        let seconds = seconds.map_err(|_| format!("{SECONDS}={value}: not a number of seconds"))?;
        timeout = Some(Duration::from_secs(seconds));
    }
    Ok(timeout)
}

/// The shutdown of this boot that was not cancelled.
fn in_force(state: &Records) -> Option<ShutdownRecord> {
    let boot = state.meta()?.boot.id();
    let record = ShutdownRecord::of(state)?;
    (record.begun.boot == boot && record.cancelled.is_none()).then_some(record)
}

/// Waits until it is recorded. Returns false when that takes too long.
async fn on_record(shared: &Shared, holds: impl Fn(&Records) -> bool) -> bool {
    let mut published = shared.store.published();
    let wait = async {
        loop {
            drop(published.borrow_and_update());
            if holds(&shared.store.snapshot()) {
                return true;
            }
            if published.changed().await.is_err() {
                return false;
            }
        }
    };
    let waited = tokio::time::timeout(PATIENCE, wait).await;
    waited.unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_drain_is_a_number_of_seconds() {
        assert_eq!(timeout_of(""), Ok(None));
        let seconds = Duration::from_secs(25);
        assert_eq!(timeout_of("seconds=25"), Ok(Some(seconds)));
        for bad in ["seconds=25s", "seconds=-1", "seconds=", "minutes=1"] {
            assert!(timeout_of(bad).is_err(), "{bad}");
        }
    }
}
