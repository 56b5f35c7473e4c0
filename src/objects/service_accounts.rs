//! Service accounts of pods, for programs that give credentials for pulls.
//!
//! A node may get them one by one and watch none, so each is requested when it is needed. What was found is recorded under
//! `serviceaccounts/<namespace>/<name>`, for the time that the API server is away.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use serde::{Deserialize, Serialize};

use super::cache::Trouble;
use super::context::Context;
use super::{ObjectError, tokens};
use crate::apiserver::Reachability;
use crate::core::state::kinds;
use crate::types::PodExt as _;

/// Begin of the keys of records.
pub(super) const RECORDS: &str = kinds::SERVICE_ACCOUNTS.prefix;
/// Time that the API server has to answer.
const DEADLINE: Duration = Duration::from_secs(5);

/// Known facts of a service account.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceAccountFacts {
    /// UID.
    pub uid: String,
    /// `metadata.annotations`.
    pub annotations: BTreeMap<String, String>,
}

/// Returns the key of the record of the service account that a pod runs as.
pub(super) fn record_key(pod: &Pod) -> String {
    let (namespace, name) = (pod.namespace(), tokens::service_account(pod));
    format!("{RECORDS}{namespace}/{name}")
}

/// Requests the service account of a pod. The first part is true for what the API server has said now, and false for the
/// recorded copy.
///
/// # Errors
/// See [`ObjectError`].
pub(super) async fn find(
    ctx: &Context,
    pod: &Pod,
) -> Result<(bool, ServiceAccountFacts), ObjectError> {
    let kind = "ServiceAccount";
    let (namespace, name) = (pod.namespace(), tokens::service_account(pod));
    let key = format!("{namespace}/{name}");
    let Some(api) = &ctx.api else {
        return Err(ObjectError::Standalone { kind, key });
    };
    let accounts = kube::Api::<ServiceAccount>::namespaced(api.kube(), namespace);
    let why = match api.connection().now() {
        Reachability::Down(why) => why,
        _ => match tokio::time::timeout(DEADLINE, accounts.get(name)).await {
            Ok(Ok(found)) => {
                let facts = ServiceAccountFacts {
                    uid: found.metadata.uid.unwrap_or_default(),
                    annotations: found.metadata.annotations.unwrap_or_default(),
                };
                return Ok((true, facts));
            }
            Ok(Err(error)) => match Trouble::of(&error) {
                Trouble::Refused(why) => return Err(ObjectError::Refused { kind, key, why }),
                Trouble::Unanswered(why) => why,
            },
            Err(_) => format!("no answer within {} s", DEADLINE.as_secs()),
        },
    };
    match ctx.recorded::<ServiceAccountFacts>(&record_key(pod), false) {
        Some(facts) => Ok((false, facts)),
        None => Err(ObjectError::Unreachable { kind, key, why }),
    }
}
