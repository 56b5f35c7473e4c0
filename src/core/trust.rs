//! Trust anchors that pods mount: which ClusterTrustBundles a projection selects, and the one file that becomes of
//! them. Pure; upstream's `clustertrustbundle.Manager`.
//!
//! **Invariant:** the same bundles give the same bytes, whatever order they come in.

use std::collections::{BTreeMap, BTreeSet};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::core::v1::ClusterTrustBundleProjection;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::{Deserialize, Serialize};

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";
/// Characters of a line of PEM.
const LINE: usize = 64;

/// ClusterTrustBundle as pods see it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrustBundle {
    /// `spec.signerName`; empty for none.
    pub signer: String,
    /// `metadata.labels`.
    pub labels: BTreeMap<String, String>,
    /// `spec.trustBundle`.
    pub pem: String,
}

/// All of the cluster by name.
pub type TrustBundles = BTreeMap<String, TrustBundle>;

/// Reason for which a projection has no content.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrustError {
    /// There is none of this name.
    #[error("ClusterTrustBundle \"{name}\" not found; create it, or mark the source optional")]
    NotFound {
        /// The name.
        name: String,
    },
    /// None is selected.
    #[error(
        "no ClusterTrustBundle of signer \"{signer}\" matches the labelSelector; create one, or mark the source optional"
    )]
    NoMatch {
        /// The signer.
        signer: String,
    },
    /// The projection does not say which.
    #[error("clusterTrustBundle source: give either name or signerName")]
    Unspecific,
    /// An operator that there is not.
    #[error(
        "clusterTrustBundle source: labelSelector operator \"{operator}\" is not known; use In, NotIn, Exists or DoesNotExist"
    )]
    Operator {
        /// The operator.
        operator: String,
    },
    /// The content of a bundle is not certificates.
    #[error("ClusterTrustBundle \"{name}\" does not hold PEM certificates")]
    BadPem {
        /// The name.
        name: String,
    },
}

/// The file of a projection: the certificates of all selected bundles, each once. Empty when nothing is selected and
/// nothing has to be.
///
/// # Errors
/// See [`TrustError`].
pub fn anchors(
    projection: &ClusterTrustBundleProjection,
    bundles: &TrustBundles,
) -> Result<String, TrustError> {
    let optional = projection.optional.unwrap_or(false);
    let of = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let selected: Vec<(&String, &TrustBundle)> =
        match (of(&projection.name), of(&projection.signer_name)) {
            (Some(name), None) => match bundles.get_key_value(&name) {
                Some(bundle) => vec![bundle],
                None if optional => Vec::new(),
                None => return Err(TrustError::NotFound { name }),
            },
            (None, Some(signer)) => {
                let mut selected = Vec::new();
                for (name, bundle) in bundles.iter().filter(|(_, b)| b.signer == signer) {
                    if selects(projection.label_selector.as_ref(), &bundle.labels)? {
                        selected.push((name, bundle));
                    }
                }
                if selected.is_empty() && !optional {
                    return Err(TrustError::NoMatch { signer });
                }
                selected
            }
            _ => return Err(TrustError::Unspecific),
        };
    let mut certificates = BTreeSet::new();
    for (name, bundle) in selected {
        let found = certificates_in(&bundle.pem).filter(|found| !found.is_empty());
        let found = found.ok_or_else(|| TrustError::BadPem { name: name.clone() })?;
        certificates.extend(found);
    }
    Ok(certificates.iter().map(|der| pem(der)).collect())
}

/// No selector selects nothing, an empty one everything.
fn selects(
    selector: Option<&LabelSelector>,
    labels: &BTreeMap<String, String>,
) -> Result<bool, TrustError> {
    let Some(selector) = selector else {
        return Ok(false);
    };
    let wanted = selector.match_labels.iter().flatten();
    let mut matches = wanted
        .clone()
        .all(|(key, value)| labels.get(key) == Some(value));
    for requirement in selector.match_expressions.iter().flatten() {
        let value = labels.get(&requirement.key);
        let listed = |value: &String| requirement.values.iter().flatten().any(|v| v == value);
        matches &= match requirement.operator.as_str() {
            "In" => value.is_some_and(listed),
            "NotIn" => !value.is_some_and(listed),
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            operator => {
                let operator = operator.to_owned();
                return Err(TrustError::Operator { operator });
            }
        };
    }
    Ok(matches)
}

/// The certificates of a PEM text, without what is between and in the head of blocks; `None` when one is damaged.
pub(super) fn certificates_in(text: &str) -> Option<Vec<Vec<u8>>> {
    let mut found = Vec::new();
    let mut block: Option<String> = None;
    for line in text.lines().map(str::trim) {
        match &mut block {
            None if line == BEGIN => block = Some(String::new()),
            None => {}
            Some(_) if line == END => {
                let text = block.take()?;
                found.push(STANDARD.decode(text).ok().filter(|der| !der.is_empty())?);
            }
            // A header of the block.
            Some(_) if line.contains(':') => {}
            Some(block) => block.push_str(line),
        }
    }
    block.is_none().then_some(found)
}

pub(super) fn pem(der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let mut all = String::with_capacity(text.len() + text.len() / LINE + 64);
    all.push_str(BEGIN);
    for (at, c) in text.chars().enumerate() {
        if at % LINE == 0 {
            all.push('\n');
        }
        all.push(c);
    }
    all.push('\n');
    all.push_str(END);
    all.push('\n');
    all
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn bundle(signer: &str, label: &str, of: &[&[u8]]) -> TrustBundle {
        TrustBundle {
            signer: signer.to_owned(),
            labels: BTreeMap::from([("set".to_owned(), label.to_owned())]),
            pem: of
                .iter()
                .map(|der| pem(der))
                .collect::<Vec<_>>()
                .join("between\n"),
        }
    }

    fn bundles() -> TrustBundles {
        let of = |name: &str, bundle| (name.to_owned(), bundle);
        TrustBundles::from([
            of("a", bundle("s/one", "live", &[b"two", b"one"])),
            of("b", bundle("s/one", "canary", &[b"three", b"one"])),
            of("c", bundle("s/two", "live", &[&[7; 100]])),
            of("d", bundle("", "live", &[b"none"])),
        ])
    }

    fn projected(projection: serde_json::Value) -> Result<Vec<Vec<u8>>, TrustError> {
        let mut projection = projection;
        projection["path"] = "ca.pem".into();
        let projection = serde_json::from_value(projection).unwrap();
        let text = anchors(&projection, &bundles())?;
        assert!(text.lines().all(|line| line.len() <= LINE));
        Ok(certificates_in(&text).unwrap())
    }

    #[test]
    fn a_name_selects_one_and_a_signer_what_its_selector_matches() {
        let one = |text: &[u8]| text.to_vec();
        let cases = [
            (json!({"name": "a"}), vec![one(b"one"), one(b"two")]),
            (json!({"name": "c"}), vec![vec![7; 100]]),
            (
                json!({"signerName": "s/one", "labelSelector": {}}),
                vec![one(b"one"), one(b"three"), one(b"two")],
            ),
            (
                json!({"signerName": "s/one", "labelSelector": {"matchLabels": {"set": "canary"}}}),
                vec![one(b"one"), one(b"three")],
            ),
            (
                json!({"signerName": "s/one", "labelSelector": {"matchExpressions": [
                    {"key": "set", "operator": "NotIn", "values": ["canary"]},
                    {"key": "set", "operator": "Exists"},
                    {"key": "other", "operator": "DoesNotExist"}]}}),
                vec![one(b"one"), one(b"two")],
            ),
            (json!({"name": "none", "optional": true}), vec![]),
            (json!({"signerName": "s/one", "optional": true}), vec![]),
        ];
        for (projection, want) in cases {
            assert_eq!(projected(projection.clone()).unwrap(), want, "{projection}");
        }
    }

    #[test]
    fn what_selects_nothing_is_told() {
        for (projection, word) in [
            (json!({"name": "none"}), "\"none\" not found"),
            (json!({"signerName": "s/one"}), "signer \"s/one\" matches"),
            (
                json!({"signerName": "s/x", "labelSelector": {}}),
                "signer \"s/x\"",
            ),
            (json!({}), "either name or signerName"),
            (
                json!({"name": "a", "signerName": "s/one"}),
                "either name or signerName",
            ),
            (
                json!({"signerName": "s/one", "labelSelector": {"matchExpressions": [
                    {"key": "set", "operator": "Like", "values": ["x"]}]}}),
                "operator \"Like\"",
            ),
        ] {
            let error = projected(projection.clone()).unwrap_err().to_string();
            assert!(error.contains(word), "{projection}: {error}");
        }
    }

    #[test]
    fn headers_are_dropped_and_damage_is_told() {
        let text = pem(b"one").replace(BEGIN, &format!("# of ours\n{BEGIN}\nProc-Type: 4"));
        assert_eq!(certificates_in(&text).unwrap(), [b"one".to_vec()]);
        for bad in [
            "",
            "no pem",
            &text.replace(END, ""),
            &text.replace("b25l", "b25l!"),
        ] {
            let bundle = TrustBundle {
                pem: bad.to_owned(),
                ..TrustBundle::default()
            };
            let projection = ClusterTrustBundleProjection {
                name: Some("x".to_owned()),
                ..Default::default()
            };
            let error = anchors(&projection, &TrustBundles::from([("x".to_owned(), bundle)]));
            assert!(matches!(error, Err(TrustError::BadPem { .. })), "{bad}");
        }
    }
}
