//! One call: sent once or, for reads, a second time; with its deadline and its metrics.

use std::future::Future;
use std::time::Duration;

use prost::Message;
use tokio::time::Instant;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use tracing::Instrument;

use super::client::CriClient;
use super::error::{CriError, CriErrorKind};
use super::trace::{self, TracedChannel};
use crate::types::metrics::{Metrics, OperationLabel};

/// One operation: its names, its deadline, its metrics.
pub(super) struct Operation<'a> {
    client: &'a CriClient,
    operation: &'static str,
    object: &'a str,
    socket: &'a str,
    deadline: Option<Duration>,
}

impl<'a> Operation<'a> {
    pub(super) fn new(client: &'a CriClient, operation: &'static str, object: &'a str) -> Self {
        Self {
            client,
            operation,
            object,
            socket: &client.runtime_endpoint,
            deadline: Some(client.timeouts.request),
        }
    }

    /// Another deadline than `runtimeRequestTimeout`; `None` = none.
    pub(super) fn within(mut self, deadline: Option<Duration>) -> Self {
        self.deadline = deadline;
        self
    }

    /// Another socket than the runtime's, for errors.
    pub(super) fn on(mut self, socket: &'a str) -> Self {
        self.socket = socket;
        self
    }

    /// Sends the call once. A call is kilobytes of state: it is boxed, so that the tasks which wait for one
    /// now and then stay small.
    pub(super) fn once<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> impl Future<Output = Result<T, CriError>> {
        self.run(Box::pin(call))
    }

    async fn run<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, CriError> {
        let span = trace::call_span(self.operation, self.object);
        let answer = self.timed(call.instrument(span.clone())).await;
        if let Err(error) = &answer {
            trace::failed(&span, error);
        }
        answer
    }

    async fn timed<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, CriError> {
        let metrics = &self.client.metrics;
        count_call(metrics, self.operation);
        let start = Instant::now();
        let answer = match self.deadline {
            None => call.await,
            Some(deadline) => match tokio::time::timeout(deadline, call).await {
                Ok(answer) => answer,
                Err(_) => {
                    self.observe(start, true);
                    return Err(CriError::deadline(
                        self.operation,
                        self.object,
                        self.socket,
                        deadline,
                        self.client.timeouts.request,
                    ));
                }
            },
        };
        self.observe(start, answer.is_err());
        answer.map(Response::into_inner).map_err(|status| {
            CriError::from_status(self.operation, self.object, self.socket, status)
        })
    }

    /// Sends a call that changes nothing; a second time when the connection broke under the first.
    pub(super) async fn read<T, F, Fut>(&self, mut call: F) -> Result<T, CriError>
    where
        F: FnMut() -> Fut,
        Fut: Future<Output = Result<Response<T>, Status>>,
    {
        match self.once(call()).await {
            Err(error) if error.is_unavailable() => {
                tracing::debug!(
                    operation = self.operation,
                    error = %error,
                    "repeating a read after the connection to the runtime broke"
                );
                self.once(call()).await
            }
            answer => answer,
        }
    }

    /// The runtime answered with less than the protocol promises.
    pub(super) fn incomplete(&self, message: &str) -> CriError {
        CriError::new(self.operation, self.object, CriErrorKind::Other, message)
    }

    /// The runtime fell silent.
    pub(super) fn hung(&self, after: Duration) -> CriError {
        CriError::deadline(
            self.operation,
            self.object,
            self.socket,
            after,
            self.client.timeouts.request,
        )
    }

    fn observe(&self, start: Instant, failed: bool) {
        let label = label(self.operation);
        let metrics = &self.client.metrics;
        metrics
            .runtime_operations_duration
            .get_or_create(&label)
            .observe(start.elapsed().as_secs_f64());
        if failed {
            metrics
                .runtime_operations_errors
                .get_or_create(&label)
                .inc();
        }
    }
}

fn label(operation: &'static str) -> OperationLabel {
    OperationLabel {
        operation_type: operation.to_owned(),
    }
}

pub(super) fn count_call(metrics: &Metrics, operation: &'static str) {
    metrics
        .runtime_operations
        .get_or_create(&label(operation))
        .inc();
}

/// Sends a request of the runtime service whose messages are not the generated ones. `method` is its path.
///
/// # Errors
/// The runtime's error, or that it is unreachable.
pub(super) async fn unary<Q, A>(
    mut runtime: Grpc<TracedChannel>,
    method: &'static str,
    request: Q,
) -> Result<Response<A>, Status>
where
    Q: Message + 'static,
    A: Message + Default + 'static,
{
    // As the generated client says it.
    let unready = |error| Status::unknown(format!("Service was not ready: {error}"));
    runtime.ready().await.map_err(unready)?;
    let path = PathAndQuery::from_static(method);
    let codec = ProstCodec::default();
    runtime.unary(Request::new(request), path, codec).await
}
