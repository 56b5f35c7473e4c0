//! Environment of containers and `$(VAR)` expansion.
//!
//! Comes in: a container spec and facts of its pod. Goes out: ordered variables, and strings with their
//! references replaced. Pure. A reference to what is not known stays as it is written; `$$` is one `$`.

use k8s_openapi::api::core::v1::{Container, EnvVarSource, Pod};

use super::node_context::NodeContext;
use crate::types::PodExt;

/// A variable whose value cannot be found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvError {
    /// Its source is none that is supported.
    #[error(
        "set variable {name} of container {container}: valueFrom.{what} is not supported; give a plain value"
    )]
    Unsupported {
        /// The container.
        container: String,
        /// The variable.
        name: String,
        /// The source.
        what: String,
    },
    /// Variables are taken from an object of the API.
    #[error(
        "set variables of container {container}: envFrom is not supported; give each variable a plain value"
    )]
    EnvFrom {
        /// The container.
        container: String,
    },
}

/// Replaces `$(NAME)` by what `lookup` knows; upstream's `expansion.Expand`.
pub fn expand(input: &str, lookup: &dyn Fn(&str) -> Option<String>) -> String {
    let mut out = String::with_capacity(input.len());
    let mut rest = input;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        if let Some(escaped) = after.strip_prefix('$') {
            out.push('$');
            rest = escaped;
        } else if let Some(open) = after.strip_prefix('(') {
            if let Some(close) = open.find(')') {
                let name = &open[..close];
                match lookup(name) {
                    Some(value) => out.push_str(&value),
                    None => {
                        out.push_str("$(");
                        out.push_str(name);
                        out.push(')');
                    }
                }
                rest = &open[close + 1..];
            } else {
                out.push_str("$(");
                rest = open;
            }
        } else {
            out.push('$');
            rest = after;
        }
    }
    out.push_str(rest);
    out
}

/// A lookup over variables; the last one of a name wins.
pub fn lookup_in(env: &[(String, String)]) -> impl Fn(&str) -> Option<String> + '_ {
    move |name| {
        env.iter()
            .rev()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.clone())
    }
}

/// The environment of a container in the order of its spec, each variable seeing the earlier ones; a name
/// given twice keeps its first place and its last value. Upstream's `makeEnvironmentVariables`.
///
/// # Errors
/// See [`EnvError`].
pub fn make_env(
    pod: &Pod,
    container: &Container,
    pod_ips: &[String],
    ctx: &NodeContext,
) -> Result<Vec<(String, String)>, EnvError> {
    if container.env_from.as_ref().is_some_and(|e| !e.is_empty()) {
        return Err(EnvError::EnvFrom {
            container: container.name.clone(),
        });
    }
    let mut env: Vec<(String, String)> = Vec::new();
    for var in container.env.iter().flatten() {
        let value = match (&var.value, &var.value_from) {
            (_, Some(source)) => {
                from_source(pod, source, pod_ips, ctx).map_err(|what| EnvError::Unsupported {
                    container: container.name.clone(),
                    name: var.name.clone(),
                    what,
                })?
            }
            (Some(value), None) => expand(value, &lookup_in(&env)),
            (None, None) => String::new(),
        };
        match env.iter_mut().find(|(n, _)| *n == var.name) {
            Some(existing) => existing.1 = value,
            None => env.push((var.name.clone(), value)),
        }
    }
    Ok(env)
}

fn from_source(
    pod: &Pod,
    source: &EnvVarSource,
    pod_ips: &[String],
    ctx: &NodeContext,
) -> Result<String, String> {
    let Some(field) = &source.field_ref else {
        return Err(if source.config_map_key_ref.is_some() {
            "configMapKeyRef"
        } else if source.secret_key_ref.is_some() {
            "secretKeyRef"
        } else if source.resource_field_ref.is_some() {
            "resourceFieldRef"
        } else {
            "(none)"
        }
        .to_owned());
    };
    let path = field.field_path.as_str();
    let of_map = |prefix: &str| {
        path.strip_prefix(prefix)
            .and_then(|p| p.strip_prefix("['"))
            .and_then(|p| p.strip_suffix("']"))
    };
    let host_ips = || ctx.host_ips.join(",");
    let ips: &[String] = if pod.host_network() && pod_ips.is_empty() {
        &ctx.host_ips
    } else {
        pod_ips
    };
    let first = |list: &[String]| list.first().cloned().unwrap_or_default();
    Ok(match path {
        "metadata.name" => pod.name().to_owned(),
        "metadata.namespace" => pod.namespace().to_owned(),
        "metadata.uid" => pod.uid().to_string(),
        "spec.nodeName" => ctx.node_name.clone(),
        "spec.serviceAccountName" => pod
            .spec_ref()
            .service_account_name
            .clone()
            .unwrap_or_default(),
        "status.hostIP" => first(&ctx.host_ips),
        "status.hostIPs" => host_ips(),
        "status.podIP" => first(ips),
        "status.podIPs" => ips.join(","),
        _ => {
            if let Some(key) = of_map("metadata.labels") {
                pod.labels().get(key).cloned().unwrap_or_default()
            } else if let Some(key) = of_map("metadata.annotations") {
                pod.annotation(key).unwrap_or_default().to_owned()
            } else {
                return Err(format!("fieldRef {path}"));
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn references_expand_and_escapes_do_not() {
        let env = vec![
            ("A".to_owned(), "1".to_owned()),
            ("B".to_owned(), "$(A)".to_owned()),
            ("EMPTY".to_owned(), String::new()),
        ];
        let lookup = lookup_in(&env);
        for (input, output) in [
            ("plain", "plain"),
            ("$(A)", "1"),
            ("x$(A)y$(A)", "x1y1"),
            ("$(B)", "$(A)"),
            ("$(MISSING)", "$(MISSING)"),
            ("$(EMPTY)|", "|"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$1"),
            ("$$$$(A)", "$$(A)"),
            ("$A ${A}", "$A ${A}"),
            ("$(A", "$(A"),
            ("$((A))", "$((A))"),
            ("$()", "$()"),
            ("ends with $", "ends with $"),
            ("ends with $$", "ends with $"),
            ("ü$(A)ß", "ü1ß"),
        ] {
            assert_eq!(expand(input, &lookup), output, "{input}");
        }
    }

    #[test]
    fn variables_see_earlier_ones_only() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u1", "labels": {"app": "x"}},
            "spec": {"containers": [{"name": "c", "env": [
                {"name": "LATE", "value": "$(HOST)"},
                {"name": "HOST", "value": "h"},
                {"name": "URL", "value": "http://$(HOST)/$(POD)"},
                {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
                {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                {"name": "HOST", "value": "again"},
                {"name": "NOTHING"},
            ]}]},
        }))
        .unwrap();
        let ctx = NodeContext::new("node-1", "/r");
        let env = make_env(&pod, &pod.containers()[0], &["10.0.0.2".to_owned()], &ctx).unwrap();
        let pairs: Vec<(&str, &str)> = env.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        assert_eq!(
            pairs,
            [
                ("LATE", "$(HOST)"),
                ("HOST", "again"),
                ("URL", "http://h/$(POD)"),
                ("POD", "web"),
                ("APP", "x"),
                ("IP", "10.0.0.2"),
                ("NODE", "node-1"),
                ("NOTHING", ""),
            ]
        );
    }

    #[test]
    fn a_source_that_is_not_supported_is_named() {
        let secret = json!({"name": "s", "key": "k"});
        let resource = json!({"resource": "limits.cpu"});
        for (container, word) in [
            (
                json!({"env": [{"name": "S", "valueFrom": {"secretKeyRef": secret}}]}),
                "valueFrom.secretKeyRef",
            ),
            (
                json!({"env": [{"name": "S", "valueFrom": {"resourceFieldRef": resource}}]}),
                "valueFrom.resourceFieldRef",
            ),
            (
                json!({"env": [{"name": "S", "valueFrom": {"fieldRef": {"fieldPath": "spec.x"}}}]}),
                "fieldRef spec.x",
            ),
            (
                json!({"envFrom": [{"secretRef": {"name": "s"}}]}),
                "envFrom",
            ),
        ] {
            let mut container = container;
            container["name"] = json!("c");
            let pod: Pod = serde_json::from_value(json!({
                "metadata": {"name": "p", "uid": "u"}, "spec": {"containers": [container]},
            }))
            .unwrap();
            let ctx = NodeContext::new("n", "/r");
            let error = make_env(&pod, &pod.containers()[0], &[], &ctx).unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
