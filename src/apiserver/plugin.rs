//! Exec credential plugins: programs that say who the node is. Upstream's `plugin/pkg/client/auth/exec`.
//!
//! In: a kubeconfig's `exec`. Out: [`Given`], a token or a client certificate, and until when. The program is started
//! directly, without a shell and without a terminal, and has a minute.
//!
//! **Invariant:** what a plugin gives is kept in memory only and printed nowhere; of its output only standard error is
//! told, and only when it fails.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use base64::Engine as _;
use hyper::http::HeaderValue;
use kube::config::{Cluster, ExecConfig, ExecInteractiveMode};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{AccessFlags, Pid, access};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;

use super::kubeconfig::{Life, bearer};

/// Deadline of a plugin's run.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time for reading the rest of the plugin's standard error after its exit, if another process holds it open.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// Most that it may print.
const LONGEST_ANSWER: u64 = 1 << 20;
/// Most of its error output that is shown.
const TOLD: usize = 512;

const KIND: &str = "ExecCredential";
const V1: &str = "client.authentication.k8s.io/v1";
const V1BETA1: &str = "client.authentication.k8s.io/v1beta1";
/// The extension of a cluster that is handed to plugins.
const EXTENSION: &str = "client.authentication.k8s.io/exec";

/// A plugin that can be run.
#[derive(Clone)]
pub(super) struct Plugin {
    command: String,
    args: Vec<String>,
    env: Vec<(String, String)>,
    version: &'static str,
    hint: Option<String>,
    /// `KUBERNETES_EXEC_INFO`.
    info: String,
    timeout: Duration,
}

impl std::fmt::Debug for Plugin {
    // Arguments and environment may be secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plugin")
            .field("command", &self.command)
            .finish_non_exhaustive()
    }
}

/// A plugin's program is not there, in words.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Missing {
    /// At the path that is given.
    Program(String),
    /// In the search path of this process, which need not be that of the agent.
    InPath(String),
}

/// Credentials that a plugin returned. Their debug output has no secrets.
#[derive(Clone)]
pub(super) struct Given {
    /// The header with the token.
    pub(super) bearer: Option<HeaderValue>,
    pub(super) identity: Option<Identity>,
    /// End of its validity, in seconds since 1970.
    pub(super) until: Option<i64>,
}

/// A client certificate and its key in PEM.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) certificate: String,
    pub(super) key: String,
    pub(super) life: Life,
}

impl std::fmt::Debug for Given {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Given")
            .field("token", &self.bearer.is_some())
            .field("certificate", &self.identity.is_some())
            .field("until", &self.until)
            .finish()
    }
}

/// A plugin gave no credentials.
#[derive(Debug, thiserror::Error)]
#[error("run the exec plugin {command}: {what}{}", said(stderr))]
pub(super) struct PluginError {
    command: String,
    /// Description of the failure; the same text for the same cause.
    pub(super) what: String,
    stderr: String,
    #[source]
    source: Option<io::Error>,
}

fn said(stderr: &str) -> String {
    match stderr {
        "" => String::new(),
        stderr => format!("; its standard error: {stderr:?}"),
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    #[serde(default)]
    kind: String,
    #[serde(default)]
    api_version: String,
    status: Option<AnswerStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AnswerStatus {
    expiration_timestamp: Option<String>,
    token: Option<String>,
    client_certificate_data: Option<String>,
    client_key_data: Option<String>,
}

impl Plugin {
    /// The plugin of `exec`, which speaks for `cluster`. Reads its certificate authority.
    ///
    /// # Errors
    /// When it can never be run: what is wrong with it and what to write instead.
    pub(super) fn new(exec: ExecConfig, cluster: &Cluster) -> Result<Self, String> {
        let version = match exec.api_version.as_deref() {
            Some(V1) => V1,
            Some(V1BETA1) => V1BETA1,
            None | Some("") => return Err(format!("exec: apiVersion is missing; write {V1}")),
            Some(other) => {
                return Err(format!(
                    "exec: apiVersion {other:?} is not supported; use {V1}, or {V1BETA1}"
                ));
            }
        };
        let command = exec.command.filter(|command| !command.is_empty());
        let Some(command) = command else {
            return Err("exec: command is missing; name the plugin's program".to_owned());
        };
        match exec.interactive_mode {
            Some(ExecInteractiveMode::Always) => {
                return Err(
                    "exec: interactiveMode Always: nobody sits before a node; use a plugin that asks nobody, and Never"
                        .to_owned(),
                );
            }
            None if version == V1 => {
                return Err(format!(
                    "exec: interactiveMode is missing, which {V1} wants; write Never"
                ));
            }
            Some(ExecInteractiveMode::Never | ExecInteractiveMode::IfAvailable) | None => {}
        }
        let mut env = Vec::new();
        for mut entry in exec.env.unwrap_or_default() {
            match entry.remove("name").filter(|name| !name.is_empty()) {
                Some(name) => env.push((name, entry.remove("value").unwrap_or_default())),
                None => return Err("exec: an entry of env has no name".to_owned()),
            }
        }
        let mut spec = json!({ "interactive": false });
        if exec.provide_cluster_info {
            spec["cluster"] = cluster_info(cluster)?;
        }
        let info = json!({ "kind": KIND, "apiVersion": version, "spec": spec });
        Ok(Self {
            command,
            args: exec.args.unwrap_or_default(),
            env,
            version,
            hint: exec.install_hint.filter(|hint| !hint.is_empty()),
            info: info.to_string(),
            timeout: TIMEOUT,
        })
    }

    /// Tells whether its program is there. `path`: the directories in which programs are looked for.
    pub(super) fn missing(&self, path: Option<OsString>) -> Option<Missing> {
        let hint = self
            .hint
            .as_deref()
            .map_or_else(String::new, |hint| format!(" ({hint})"));
        let command = &self.command;
        let runs = |path: &Path| access(path, AccessFlags::X_OK).is_ok() && path.is_file();
        if command.contains('/') {
            let there = runs(Path::new(command));
            return (!there).then(|| {
                Missing::Program(format!(
                    "exec: {command} is no program that can be run{hint}; install it or correct command"
                ))
            });
        }
        let path = path.unwrap_or_default();
        let there = std::env::split_paths(&path).any(|dir| runs(&dir.join(command)));
        (!there).then(|| {
            Missing::InPath(format!(
                "exec: {command:?} is not in PATH{hint}; install it or write its path, the agent may have another PATH"
            ))
        })
    }

    /// Runs it. Dropping the future kills it, and what it has started.
    ///
    /// # Errors
    /// When it gives nothing that can be used.
    pub(super) async fn run(&self) -> Result<Given, PluginError> {
        let mut stderr = Vec::new();
        let result = match tokio::time::timeout(self.timeout, self.output(&mut stderr)).await {
            Ok(Ok(stdout)) => self.read(&stdout).map_err(|what| (what, None)),
            Ok(Err(failed)) => Err(failed),
            Err(_) => Err((format!("no answer within {:?}", self.timeout), None)),
        };
        result.map_err(|(what, source)| PluginError {
            command: self.command.clone(),
            what,
            stderr: end_of(&stderr),
            source,
        })
    }

    async fn output(&self, stderr: &mut Vec<u8>) -> Result<Vec<u8>, (String, Option<io::Error>)> {
        let mut child = Command::new(&self.command)
            .args(&self.args)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .env("KUBERNETES_EXEC_INFO", &self.info)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| {
                let hint = match &self.hint {
                    Some(hint) if error.kind() == io::ErrorKind::NotFound => format!(" ({hint})"),
                    _ => String::new(),
                };
                (format!("it cannot be started{hint}"), Some(error))
            })?;
        let mut group = Group(child.id().and_then(|id| i32::try_from(id).ok()));
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let mut stdout = Vec::new();
        let failed = |error| ("its output cannot be read".to_owned(), Some(error));
        let status = {
            let ended = async {
                let printed = all(out, &mut stdout).await?;
                let status = match printed > LONGEST_ANSWER {
                    true => None,
                    false => Some(child.wait().await?),
                };
                Ok(status)
            };
            let told = all(err, stderr);
            tokio::pin!(ended, told);
            // What it has left behind may keep its standard error open: its answer does not wait for that.
            let mut is_told = false;
            let status = loop {
                tokio::select! {
                    biased;
                    answer = &mut told, if !is_told => {
                        answer.map_err(failed)?;
                        is_told = true;
                    }
                    answer = &mut ended => break answer.map_err(failed)?,
                }
            };
            if !is_told {
                // Its last words are in the pipe already.
                drop(tokio::time::timeout(LAST_WORDS, told).await);
            }
            status
        };
        let Some(status) = status else {
            return Err((format!("it prints more than {LONGEST_ANSWER} bytes"), None));
        };
        group.0 = None;
        if status.success() {
            return Ok(stdout);
        }
        Err((format!("it ended with {status}"), None))
    }

    /// Parses the plugin's standard output.
    pub(super) fn read(&self, stdout: &[u8]) -> Result<Given, String> {
        let answer = parse(stdout)?;
        if answer.kind != KIND || answer.api_version != self.version {
            let (kind, version) = (shown(&answer.kind), shown(&answer.api_version));
            return Err(format!(
                "it answers with kind {kind} of apiVersion {version}, not with {KIND:?} of {:?}",
                self.version
            ));
        }
        let status = answer.status.ok_or("its answer has no status")?;
        let some = |text: Option<String>| text.filter(|text| !text.is_empty());
        let expires = match some(status.expiration_timestamp) {
            None => None,
            Some(text) => {
                let at: jiff::Timestamp = text.parse().map_err(|_| {
                    "its expirationTimestamp is no time as 2030-01-02T03:04:05Z".to_owned()
                })?;
                Some(at.as_second())
            }
        };
        let certificate = some(status.client_certificate_data);
        let identity = match (certificate, some(status.client_key_data)) {
            (None, None) => None,
            (Some(certificate), Some(key)) => {
                let life = Life::of_pem(certificate.as_bytes())
                    .ok_or("its clientCertificateData is not a certificate in PEM")?;
                Some(Identity {
                    certificate,
                    key,
                    life,
                })
            }
            (Some(_), None) => return Err("it gives a certificate without its key".to_owned()),
            (None, Some(_)) => return Err("it gives a key without its certificate".to_owned()),
        };
        let bearer = match some(status.token) {
            None => None,
            Some(token) => Some(bearer(&token).ok_or("its token has characters no token has")?),
        };
        if bearer.is_none() && identity.is_none() {
            return Err("it gives neither a token nor a certificate with its key".to_owned());
        }
        // A certificate ends whatever its plugin says.
        let ends = identity.as_ref().map(|identity| identity.life.until);
        let until = [expires, ends].into_iter().flatten().min();
        Ok(Given {
            bearer,
            identity,
            until,
        })
    }
}

/// An answer in JSON or, as upstream takes it, in YAML. The error has nothing of its content.
fn parse(stdout: &[u8]) -> Result<Answer, String> {
    let error = match serde_json::from_slice(stdout) {
        Ok(answer) => return Ok(answer),
        Err(error) => error,
    };
    let text = std::str::from_utf8(stdout).unwrap_or_default();
    if stdout.trim_ascii().is_empty() {
        return Err("it prints nothing".to_owned());
    }
    serde_saphyr::from_str(text).map_err(|_| {
        let (line, column) = (error.line(), error.column());
        format!("what it prints is no {KIND} (line {line} column {column})")
    })
}

/// A word of an answer, shortened so that it shows no misplaced secret.
fn shown(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '/');
    if word.len() <= 48 && word.chars().all(plain) {
        format!("{word:?}")
    } else {
        "(something else)".to_owned()
    }
}

/// Returns the cluster as a plugin gets it.
fn cluster_info(cluster: &Cluster) -> Result<Value, String> {
    let mut info = Map::new();
    let mut put = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            info.insert(key.to_owned(), value);
        }
    };
    let text = |text: &Option<String>| {
        let text = text.as_ref().filter(|text| !text.is_empty());
        text.map(|text| Value::from(text.as_str()))
    };
    put("server", text(&cluster.server));
    put("tls-server-name", text(&cluster.tls_server_name));
    let insecure = cluster.insecure_skip_tls_verify == Some(true);
    put(
        "insecure-skip-tls-verify",
        insecure.then_some(Value::Bool(true)),
    );
    let authority = match (
        &cluster.certificate_authority_data,
        &cluster.certificate_authority,
    ) {
        (Some(data), _) => Some(Value::from(data.trim())),
        (None, Some(path)) => {
            let pem = std::fs::read(path)
                .map_err(|error| format!("certificate-authority {path}: {error}"))?;
            Some(base64::engine::general_purpose::STANDARD.encode(pem).into())
        }
        (None, None) => None,
    };
    put("certificate-authority-data", authority);
    put("proxy-url", text(&cluster.proxy_url));
    let extensions = cluster.extensions.iter().flatten();
    let config = extensions
        .filter(|extension| extension.name == EXTENSION)
        .map(|extension| extension.extension.clone())
        .next();
    put("config", config);
    Ok(Value::Object(info))
}

/// Reads to the end, but not more than what is allowed and a byte.
async fn all(from: Option<impl AsyncRead + Unpin>, into: &mut Vec<u8>) -> io::Result<u64> {
    match from {
        Some(from) => {
            let mut limited = from.take(LONGEST_ANSWER + 1);
            Ok(limited.read_to_end(into).await? as u64)
        }
        None => Ok(0),
    }
}

/// The last of what was printed, in which the cause usually is.
fn end_of(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let text = text.trim();
    let skipped = text.chars().count().saturating_sub(TOLD);
    text.chars().skip(skipped).collect()
}

/// The processes of a plugin that is given up: a shell's sleep must not outlive the shell.
struct Group(Option<i32>);

impl Drop for Group {
    fn drop(&mut self) {
        // The plugin was not waited for yet, so its number is still its own.
        if let Some(leader) = self.0.take()
            && let Err(error) = killpg(Pid::from_raw(leader), Signal::SIGKILL)
        {
            tracing::debug!(%error, "an abandoned exec plugin has exited already");
        }
    }
}

#[cfg(test)]
#[path = "plugin_tests.rs"]
mod tests;
