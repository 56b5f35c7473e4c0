//! Certificates of pods (`podCertificate` in projected volumes): what is recorded of each, its next step, and the
//! meaning of an answer. Pure; upstream's `podcertificate.IssuingManager`.
//!
//! The key of a request and the request's name are recorded before the request is made. So an agent that starts again
//! waits for the request of its previous run, and makes no second one.
//!
//! **Invariant:** a private key is in no `Debug` output and in no error.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zeroize::Zeroize as _;

use super::state::kinds;
use super::trust;
use crate::types::{PodUid, Stamp};

/// Begin of the keys of [`CertificateRecord`]; `<namespace>/<pod UID>/<volume>/<index of the source>` follow.
pub const RECORDS: &str = kinds::POD_CERTIFICATES.prefix;
/// Time after the begin of refresh at which a certificate is overdue; upstream's `refreshOverdueDuration`.
const OVERDUE: Duration = Duration::from_secs(600);
/// Shortest use of a certificate: a clock that is ahead does not cause one request after the other.
const MIN_USE: Duration = Duration::from_secs(300);
/// Longest delay of a refresh by chance, in milliseconds; upstream's `jitterDuration`.
pub const JITTER_MS: i64 = 300_000;
/// First and longest poll interval of a request.
const POLL: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(15));
/// First and longest pause after a failed attempt.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));
/// Most characters of a signer's reason and message that are kept.
const MOST_TEXT: usize = 1024;

/// A `podCertificate` source of a pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CertificateRef {
    /// Name of the volume.
    pub volume: String,
    /// Place among the sources of the volume.
    pub index: usize,
}

/// Returns what the keys of a pod's records begin with.
pub fn record_prefix(namespace: &str, uid: &PodUid) -> String {
    format!("{RECORDS}{namespace}/{uid}/")
}

/// Returns the key of the record of one source.
pub fn record_key(namespace: &str, uid: &PodUid, of: &CertificateRef) -> String {
    let prefix = record_prefix(namespace, uid);
    format!("{prefix}{}/{}", of.volume, of.index)
}

/// A private key in PEM. Wiped when it is dropped.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PrivateKey(String);

impl PrivateKey {
    /// Wraps a key in PEM.
    pub fn new(pem: String) -> Self {
        Self(pem)
    }

    /// Returns the PEM.
    pub fn pem(&self) -> &str {
        &self.0
    }
}

impl Drop for PrivateKey {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey")
    }
}

/// Memory of one source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CertificateRecord {
    /// The certificate in use.
    pub issued: Option<Issued>,
    /// The request that has no answer yet. It may not exist: it is recorded before it is made.
    pub pending: Option<Pending>,
    /// The refusal of a signer, which is final for the pod.
    pub end: Option<End>,
}

/// A certificate with its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Issued {
    /// The key.
    pub key: PrivateKey,
    /// Certificates in PEM, the pod's own first.
    pub chain: String,
    /// Time at which the next request is made, in milliseconds since the Unix epoch.
    pub refresh_ms: i64,
    /// End of its validity, in milliseconds since the Unix epoch.
    pub not_after_ms: i64,
    /// Time at which it was received.
    pub received: Stamp,
    /// The newest event about its age.
    pub told: Option<Notice>,
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pending {
    /// Name of the PodCertificateRequest.
    pub name: String,
    /// The key that it is for.
    pub key: PrivateKey,
    /// PKCS#10 request in DER, in base64.
    pub request: String,
}

/// A request's answer that is no certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct End {
    /// Kind of the refusal.
    pub verdict: Verdict,
    /// Reason of the condition.
    pub reason: String,
    /// Message of the condition.
    pub message: String,
}

/// Kind of an [`End`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Verdict {
    /// The signer does not want to.
    Denied,
    /// The signer could not.
    Failed,
}

/// Event about a certificate's age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Notice {
    /// It should have been replaced ten minutes ago.
    Overdue,
    /// It is no longer valid.
    Expired,
}

impl Notice {
    /// Returns reason and message of the event, as upstream has them.
    pub fn event(self) -> (&'static str, &'static str) {
        match self {
            Self::Overdue => (
                "CertificateOverdueForRefresh",
                "PodCertificate refresh overdue",
            ),
            Self::Expired => ("CertificateExpired", "PodCertificate expired"),
        }
    }
}

impl End {
    /// Returns reason and message of the event about the request `name`.
    pub fn event(&self, name: &str) -> (&'static str, String) {
        let (reason, ended) = match self.verdict {
            Verdict::Denied => ("Denied", "was denied"),
            Verdict::Failed => ("Failed", "failed"),
        };
        let text = format!(
            "PodCertificateRequest {name} {ended}, reason={:?}, message={:?}",
            self.reason, self.message
        );
        (reason, text)
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ended = match self.verdict {
            Verdict::Denied => "denied",
            Verdict::Failed => "failed",
        };
        write!(
            f,
            "PodCertificateRequest was permanently {ended}: reason={:?} message={:?}; create the pod again to make another",
            self.reason, self.message
        )
    }
}

impl Issued {
    /// Makes the record of a certificate that was received `now`. `jitter_ms` delays its refresh, up to its end.
    pub fn new(key: PrivateKey, certificate: Certificate, now: Stamp, jitter_ms: i64) -> Self {
        let refresh_ms = certificate.begin_refresh_ms.saturating_add(jitter_ms);
        Self {
            key,
            chain: certificate.chain,
            refresh_ms: refresh_ms.min(certificate.not_after_ms),
            not_after_ms: certificate.not_after_ms,
            received: now,
            told: None,
        }
    }

    /// Returns whether it has expired, by this machine's clock.
    pub fn is_expired(&self, now: Stamp) -> bool {
        now.wall_ms >= self.not_after_ms
    }

    /// Returns the time until the next request is made.
    fn until_refresh(&self, now: Stamp) -> Duration {
        let left = self.refresh_ms.saturating_sub(now.wall_ms);
        let left = Duration::from_millis(u64::try_from(left).unwrap_or(0));
        left.max(MIN_USE.saturating_sub(now.since(self.received)))
    }

    /// Returns the event that is due, unless it was emitted.
    pub fn notice(&self, now: Stamp) -> Option<Notice> {
        let overdue = i64::try_from(OVERDUE.as_millis()).unwrap_or(i64::MAX);
        let due = if now.wall_ms > self.not_after_ms {
            Notice::Expired
        } else if now.wall_ms > self.refresh_ms.saturating_add(overdue) {
            Notice::Overdue
        } else {
            return None;
        };
        (self.told < Some(due)).then_some(due)
    }
}

/// Next step of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A signer has refused: nothing is requested any more.
    End,
    /// Nothing is due for so long.
    Rest(Duration),
    /// A request is due, or waits for its answer.
    Request,
}

impl CertificateRecord {
    /// Returns the next step.
    pub fn next_step(&self, now: Stamp) -> Step {
        match (&self.end, &self.pending, &self.issued) {
            (Some(_), ..) => Step::End,
            (None, Some(_), _) | (None, None, None) => Step::Request,
            (None, None, Some(issued)) => match issued.until_refresh(now) {
                Duration::ZERO => Step::Request,
                left => Step::Rest(left),
            },
        }
    }

    /// Returns the certificate that a pod may get.
    pub fn usable(&self, now: Stamp) -> Option<&Issued> {
        self.issued
            .as_ref()
            .filter(|issued| !issued.is_expired(now))
    }
}

/// Returns the pause before look number `looks` (1 = the second look) at a request, without jitter.
pub fn poll_pause(looks: u32) -> Duration {
    doubled(looks, POLL)
}

/// Returns the pause after failure number `failures` (1 = the first), without jitter.
pub fn retry_pause(failures: u32) -> Duration {
    doubled(failures, RETRY)
}

fn doubled(times: u32, (first, longest): (Duration, Duration)) -> Duration {
    let factor = 2_u32.saturating_pow(times.saturating_sub(1).min(16));
    first.saturating_mul(factor).min(longest)
}

/// A certificate as a signer has issued it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// Certificates in PEM, and nothing beside them.
    pub chain: String,
    /// `beginRefreshAt`, in milliseconds since the Unix epoch.
    pub begin_refresh_ms: i64,
    /// `notAfter`, in milliseconds since the Unix epoch.
    pub not_after_ms: i64,
}

/// Meaning of a request's status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// No signer has answered.
    Pending,
    /// It was issued.
    Issued(Certificate),
    /// It was refused for good.
    Ended(End),
}

/// Reads `status` of a PodCertificateRequest.
///
/// # Errors
/// The field that an issued request lacks, or that cannot be read.
pub fn read_answer(status: &Value) -> Result<Answer, &'static str> {
    let conditions = status["conditions"].as_array();
    for condition in conditions.into_iter().flatten() {
        if condition["status"] != "True" {
            continue;
        }
        let verdict = match condition["type"].as_str() {
            Some("Denied") => Verdict::Denied,
            Some("Failed") => Verdict::Failed,
            Some("Issued") => return issued(status).map(Answer::Issued),
            _ => continue,
        };
        let text = |field: &str| -> String {
            let text = condition[field].as_str().unwrap_or_default();
            text.chars().take(MOST_TEXT).collect()
        };
        return Ok(Answer::Ended(End {
            verdict,
            reason: text("reason"),
            message: text("message"),
        }));
    }
    Ok(Answer::Pending)
}

fn issued(status: &Value) -> Result<Certificate, &'static str> {
    let time = |field: &'static str| -> Result<i64, &'static str> {
        let at = status[field].as_str().unwrap_or_default();
        let at = at.parse::<jiff::Timestamp>().map_err(|_| field)?;
        Ok(at.as_millisecond())
    };
    let chain = status["certificateChain"].as_str().unwrap_or_default();
    Ok(Certificate {
        chain: clean_chain(chain).ok_or("certificateChain")?,
        begin_refresh_ms: time("beginRefreshAt")?,
        not_after_ms: time("notAfter")?,
    })
}

/// Returns the certificates of a chain without headers and other text; `None` when there are none. Upstream's
/// `cleanCertificateChain`.
fn clean_chain(chain: &str) -> Option<String> {
    let found = trust::certificates_in(chain)?;
    (!found.is_empty()).then(|| found.iter().map(|der| trust::pem(der)).collect())
}

#[cfg(test)]
mod tests;
