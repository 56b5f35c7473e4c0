//! Lifecycle hooks of containers: running them, and remembering which have run; upstream's `HandlerRunner`.
//!
//! In: a `LifecycleHandler`, the container it belongs to. Out: whether the hook succeeded, and the transaction
//! that says that it came to its end. Nothing here has a time limit of its own: whoever runs a hook drops the
//! future when the time is up.
//!
//! **Invariant:** a hook is recorded as done after its end, never before: one that was cut off runs again.

use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerPort, HTTPGetAction, LifecycleHandler};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use reqwest::header::{ACCEPT, HOST, HeaderMap, HeaderName, HeaderValue, USER_AGENT};

use super::cri::{CriClient, CriError};
use super::pod_http::{Client, GetError, Target};
use crate::core::state::{ContainerRecord, State, Transaction, child_key};
use crate::types::{ContainerId, PodUid};

/// Longest output of a hook in an error.
const MAX_OUTPUT: usize = 1024;

/// Kind of a lifecycle hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Right after the start.
    PostStart,
    /// Before the stop.
    PreStop,
}

impl Hook {
    /// `postStart` or `preStop`, as in specs and records.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PostStart => "postStart",
            Self::PreStop => "preStop",
        }
    }

    /// Returns the hook's entry in `ContainerRecord::hooks_done`.
    pub fn mark(self, container: &ContainerId) -> String {
        format!("{container}/{}", self.as_str())
    }

    /// Returns whether the hook of that container has ended.
    pub fn is_done(self, state: &State, pod: &PodUid, name: &str, container: &ContainerId) -> bool {
        let mark = self.mark(container);
        state
            .record::<ContainerRecord>(&child_key(pod, name))
            .is_some_and(|r| r.hooks_done.contains(&mark))
    }

    /// Records that the hook of a container came to its end, and how.
    pub fn done(
        self,
        seen: &State,
        pod: &PodUid,
        name: &str,
        container: &ContainerId,
        outcome: Result<(), &HookError>,
    ) -> Transaction {
        let key = child_key(pod, name);
        let mut record = seen
            .record::<ContainerRecord>(&key)
            .cloned()
            .unwrap_or_default();
        let mark = self.mark(container);
        if !record.hooks_done.contains(&mark) {
            record.hooks_done.push(mark);
        }
        let (what, why) = match outcome {
            Ok(()) => ("hook done", format!("{name}: {}", self.as_str())),
            Err(error) => (
                "hook failed",
                format!("{name}: {}: {}", self.as_str(), error.kind()),
            ),
        };
        Transaction::new()
            .expect::<ContainerRecord>(seen, &key)
            .put(&key, record)
            .journal(Some(pod), what, why)
    }
}

/// Container whose hook is run.
#[derive(Clone, Copy, Debug)]
pub struct HookTarget<'a> {
    /// `<name>_<namespace>(<uid>)` of the pod, for messages.
    pub pod: &'a str,
    /// Name of the container.
    pub name: &'a str,
    /// The container.
    pub id: &'a ContainerId,
    /// Its ports, which an HTTP hook may name.
    pub ports: &'a [ContainerPort],
    /// The pod's first address.
    pub ip: Option<&'a str>,
}

/// Reason why a hook failed.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// The command ended with another code than 0.
    #[error(
        "Exec lifecycle hook ([{command}]) for Container {container:?} in Pod {pod:?} failed - error: command '{command}' exited with {code}: {output}, message: {output:?}"
    )]
    Exec {
        /// The command.
        command: String,
        /// The container.
        container: String,
        /// The pod.
        pod: String,
        /// Its exit code.
        code: i32,
        /// Output of the command, shortened.
        output: String,
    },
    /// The command could not be run.
    #[error(
        "Exec lifecycle hook ([{command}]) for Container {container:?} in Pod {pod:?} failed - error: {source}"
    )]
    Runtime {
        /// The command.
        command: String,
        /// The container.
        container: String,
        /// The pod.
        pod: String,
        /// Why.
        #[source]
        source: CriError,
    },
    /// The request got no answer.
    #[error(
        "HTTP lifecycle hook ({path}) for Container {container:?} in Pod {pod:?} failed - error: {reason}"
    )]
    Http {
        /// Path of the request.
        path: String,
        /// The container.
        container: String,
        /// The pod.
        pod: String,
        /// Why.
        reason: String,
    },
    /// The handler asks for nothing that can be run.
    #[error(
        "Cannot run handler of Container {container:?} in Pod {pod:?}: use exec, httpGet or sleep"
    )]
    Handler {
        /// The container.
        container: String,
        /// The pod.
        pod: String,
    },
}

impl HookError {
    /// Returns the kind of failure, without any output of the hook or a server: that may be secret.
    pub fn kind(&self) -> String {
        match self {
            Self::Exec { code, .. } => format!("its command exited with {code}"),
            Self::Runtime { .. } => "its command could not be run".to_owned(),
            Self::Http { .. } => "its request got no answer".to_owned(),
            Self::Handler { .. } => "it has no handler that can be run".to_owned(),
        }
    }
}

/// Runs one hook to its end. Upstream: `handlerRunner.Run`. Dropping the future abandons it.
///
/// # Errors
/// See [`HookError`]; an HTTP answer is a success whatever its code.
pub async fn run(
    handler: &LifecycleHandler,
    target: HookTarget<'_>,
    cri: &CriClient,
) -> Result<(), HookError> {
    if let Some(exec) = &handler.exec {
        let command = exec.command.clone().unwrap_or_default();
        return run_exec(command, target, cri).await;
    }
    if let Some(get) = &handler.http_get {
        return run_http(get, target).await.map_err(|reason| {
            let path = get.path.clone().unwrap_or_default();
            HookError::Http {
                path: bounded(&path),
                container: target.name.to_owned(),
                pod: target.pod.to_owned(),
                reason: bounded(&reason),
            }
        });
    }
    if let Some(sleep) = &handler.sleep {
        tokio::time::sleep(Duration::from_secs(
            u64::try_from(sleep.seconds).unwrap_or(0),
        ))
        .await;
        return Ok(());
    }
    Err(HookError::Handler {
        container: target.name.to_owned(),
        pod: target.pod.to_owned(),
    })
}

async fn run_exec(
    command: Vec<String>,
    target: HookTarget<'_>,
    cri: &CriClient,
) -> Result<(), HookError> {
    let line = bounded(&command.join(" "));
    let (container, pod) = (target.name.to_owned(), target.pod.to_owned());
    match cri.exec_sync(target.id, command, Duration::ZERO).await {
        Ok(answer) if answer.exit_code == 0 => Ok(()),
        Ok(answer) => {
            let mut output = answer.stdout;
            output.extend_from_slice(&answer.stderr);
            output.truncate(MAX_OUTPUT);
            Err(HookError::Exec {
                command: line,
                container,
                pod,
                code: answer.exit_code,
                output: String::from_utf8_lossy(&output).into_owned(),
            })
        }
        Err(source) => Err(HookError::Runtime {
            command: line,
            container,
            pod,
            source,
        }),
    }
}

async fn run_http(get: &HTTPGetAction, target: HookTarget<'_>) -> Result<(), String> {
    let port = port_of(&get.port, target.ports)?;
    let host = match get.host.as_deref().filter(|h| !h.is_empty()) {
        Some(host) => host,
        None => target.ip.ok_or("the pod has no address yet")?,
    };
    let https = get
        .scheme
        .as_deref()
        .is_some_and(|s| s.eq_ignore_ascii_case("https"));
    let mut headers = headers_of(get)?;
    let client = Client::new().map_err(|error| error.to_string())?;
    let scheme = if https { "https" } else { "http" };
    let at = target_of(get, scheme, host, port)?;
    let failed = |at: &Target, error: GetError| format!("Get \"{at}\": {error}");
    match client.get(&at, headers.clone()).await {
        // The answer's body is of no interest.
        Ok(_) => Ok(()),
        Err(GetError::NotTls) if https => {
            tracing::info!(
                container = target.name,
                "an HTTPS hook is answered in plain HTTP, retrying with HTTP"
            );
            headers.remove(reqwest::header::AUTHORIZATION);
            let at = target_of(get, "http", host, port)?;
            let answer = client.get(&at, headers).await;
            answer.map(drop).map_err(|error| failed(&at, error))
        }
        Err(error) => Err(failed(&at, error)),
    }
}

fn port_of(port: &IntOrString, ports: &[ContainerPort]) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(number) => i64::from(*number),
        IntOrString::String(name) if name.is_empty() => 80,
        IntOrString::String(name) => match name.parse::<i64>() {
            Ok(number) => number,
            Err(_) => ports
                .iter()
                .find(|p| p.name.as_deref() == Some(name))
                .map(|p| i64::from(p.container_port))
                .ok_or_else(|| {
                    format!("the container has no port named {name:?}; add it to its ports")
                })?,
        },
    };
    u16::try_from(number)
        .ok()
        .filter(|p| *p > 0)
        .ok_or_else(|| format!("invalid port number {number}; use 1 to 65535"))
}

fn target_of(get: &HTTPGetAction, scheme: &str, host: &str, port: u16) -> Result<Target, String> {
    let path = get.path.as_deref().unwrap_or_default();
    Target::new(scheme, host, port, path).map_err(|error| error.to_string())
}

fn headers_of(get: &HTTPGetAction) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for header in get.http_headers.iter().flatten() {
        let name = HeaderName::try_from(header.name.as_str())
            .map_err(|_| format!("{:?} is no name of a header", header.name))?;
        let value = HeaderValue::from_bytes(header.value.as_bytes())
            .map_err(|_| format!("header {name} has a value that cannot be sent"))?;
        if name == HOST {
            headers.insert(name, value);
        } else {
            headers.append(name, value);
        }
    }
    if !headers.contains_key(USER_AGENT) {
        headers.insert(USER_AGENT, HeaderValue::from_static("kube-lifecycle/1.36"));
    }
    if !headers.contains_key(ACCEPT) {
        headers.insert(ACCEPT, HeaderValue::from_static("*/*"));
    }
    Ok(headers)
}

fn bounded(text: &str) -> String {
    let mut end = text.len().min(MAX_OUTPUT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

#[cfg(test)]
#[path = "hooks_tests.rs"]
mod tests;
