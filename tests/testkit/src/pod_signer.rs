//! A signer of PodCertificateRequests, for tests over the fake API server.
//!
//! In: requests that a node has made, by name. Out: their status, as a signer of the cluster writes it: issued with a
//! certificate of the request's own key, denied, or failed. It answers when a test says so, and at no other time.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, IsCa, Issuer, KeyPair,
};
use serde_json::{Value, json};

use crate::fake_api::FakeApi;

const PLURAL: &str = "podcertificaterequests";

/// A signer with an authority of its own.
pub struct PodSigner {
    authority: Issuer<'static, KeyPair>,
}

impl std::fmt::Debug for PodSigner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PodSigner").finish_non_exhaustive()
    }
}

impl Default for PodSigner {
    fn default() -> Self {
        Self::new()
    }
}

impl PodSigner {
    /// Makes an authority.
    ///
    /// # Panics
    /// There are no random numbers.
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("random numbers");
        Self {
            authority: Issuer::new(params, key),
        }
    }

    /// Requests without an answer, oldest first by their name's order in the server.
    pub fn waiting(api: &FakeApi) -> Vec<Value> {
        let mut requests = api.list_json(PLURAL, "");
        requests.retain(|request| request["status"]["conditions"].is_null());
        requests
    }

    /// Issues a certificate for a request; times in milliseconds since the Unix epoch. Returns it. In
    /// the status there is text before it, which a node has to drop.
    ///
    /// # Panics
    /// The request has no key that can be signed for.
    #[track_caller]
    pub fn issue(
        &self,
        api: &FakeApi,
        request: &Value,
        (begin_refresh_ms, not_after_ms): (i64, i64),
    ) -> String {
        let stub = request["spec"]["stubPKCS10Request"].as_str();
        let der = STANDARD.decode(stub.unwrap_or_default()).expect("base64");
        let stub = CertificateSigningRequestParams::from_der(&der.into()).expect("a request");
        let signed = stub.signed_by(&self.authority).expect("a certificate");
        let chain = signed.pem();
        let shown = format!("issued by a test\n{chain}");
        self.issue_chain(api, request, &shown, (begin_refresh_ms, not_after_ms));
        chain
    }

    /// Issues this chain, whatever it is.
    #[track_caller]
    pub fn issue_chain(
        &self,
        api: &FakeApi,
        request: &Value,
        chain: &str,
        (begin_refresh_ms, not_after_ms): (i64, i64),
    ) {
        let time = |ms: i64| {
            let at = Timestamp::from_millisecond(ms).unwrap_or_default();
            at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
        };
        let mut request = request.clone();
        request["status"] = json!({
            "conditions": [condition("Issued", "Issued", "by a test")],
            "certificateChain": chain,
            "notBefore": time(begin_refresh_ms - 600_000),
            "beginRefreshAt": time(begin_refresh_ms),
            "notAfter": time(not_after_ms),
        });
        api.update_json(request);
    }

    /// Refuses a request: `verdict` is `Denied` or `Failed`.
    #[track_caller]
    pub fn refuse(api: &FakeApi, request: &Value, verdict: &str, reason: &str) {
        let mut request = request.clone();
        request["status"] = json!({"conditions": [condition(verdict, reason, "by a test")]});
        api.update_json(request);
    }
}

fn condition(kind: &str, reason: &str, message: &str) -> Value {
    json!({
        "type": kind, "status": "True", "reason": reason, "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    })
}
