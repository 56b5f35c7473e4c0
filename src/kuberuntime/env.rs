//! Environment of containers and `$(VAR)` expansion.
//!
//! Comes in: a container spec, facts of its pod, and the objects it refers to. Goes out: ordered variables,
//! and strings with their references replaced. Pure. A reference to what is not known stays as it is
//! written; `$$` is one `$`.
//!
//! Values are bytes, as the kernel and the content of Secrets have them. Names are text.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use k8s_openapi::api::core::v1::{Container, EnvFromSource, EnvVarSource, FileKeySelector, Pod};

use super::downward;
use super::node_context::NodeContext;
use super::service_env::service_env;
use super::sources::{SourceError, Sources};
use crate::core::env_file;
use crate::types::PodExt;

/// A variable whose value cannot be found. The text begins with what upstream says.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvError {
    /// The object with its value is not available.
    #[error("{source} (for {variable} of container {container})")]
    Source {
        /// The container.
        container: String,
        /// The variable, or `envFrom`.
        variable: String,
        /// Why.
        source: Box<SourceError>,
    },
    /// Its field or resource does not exist.
    #[error("{what} (for variable {variable} of container {container})")]
    Field {
        /// The container.
        container: String,
        /// The variable.
        variable: String,
        /// Description of the error.
        what: String,
    },
    /// The file with its value cannot be read, or has no such key.
    #[error(
        "set variable {variable} of container {container} from key {key:?} of file {path:?} in volume {volume:?}: {why}"
    )]
    File {
        /// The container.
        container: String,
        /// The variable.
        variable: String,
        /// The key.
        key: Box<str>,
        /// The file's path in the volume.
        path: Box<str>,
        /// The volume.
        volume: Box<str>,
        /// Why.
        why: Box<str>,
    },
    /// It has no source, or one that a later version of the API has added.
    #[error(
        "set variable {name} of container {container}: valueFrom has no source that is supported; use a plain value, configMapKeyRef, secretKeyRef, fieldRef, fileKeyRef or resourceFieldRef"
    )]
    Unsupported {
        /// The container.
        container: String,
        /// The variable.
        name: String,
    },
    /// Its value has a byte that ends it.
    #[error(
        "set variable {variable} of container {container}: the value contains a NUL byte, which no environment variable can hold; use it through a volume instead"
    )]
    Nul {
        /// The container.
        container: String,
        /// The variable.
        variable: String,
    },
    /// The list of services is not known yet.
    #[error(
        "services have not yet been read at least once, cannot construct envvars of container {container}; they are read as soon as the API server answers"
    )]
    NoServices {
        /// The container.
        container: String,
    },
}

/// Text refers to variables whose values are not text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the value of variable {} is not UTF-8, and the runtime takes only that here; let the container read the variable itself",
    .0.join(", ")
)]
pub struct NotText(Vec<String>);

/// Inputs of an environment.
#[derive(Clone, Copy, Debug)]
pub struct EnvInputs<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// Its container.
    pub container: &'a Container,
    /// The pod's addresses.
    pub pod_ips: &'a [String],
    /// Objects that the container refers to.
    pub sources: &'a Sources,
}

/// The variables of a container.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Environment {
    /// Names and values in order; each name once.
    pub vars: Vec<(String, Vec<u8>)>,
}

impl std::fmt::Debug for Environment {
    // Values may be secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.vars.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("Environment")
            .field("names", &names)
            .finish()
    }
}

impl Environment {
    /// Returns the message of a failed create, with the variables that explain it when the runtime refused the request
    /// because it is not UTF-8. Runtimes built with a CRI older than 1.34 may do so.
    pub fn explained(&self, message: String) -> String {
        let binary: Vec<&str> = self
            .vars
            .iter()
            .filter(|(_, value)| std::str::from_utf8(value).is_err())
            .map(|(name, _)| name.as_str())
            .collect();
        let says_so = message.to_ascii_uppercase().contains("UTF-8");
        if binary.is_empty() || !says_so {
            return message;
        }
        format!(
            "{message}; the value of variable {} is not UTF-8, and this runtime takes only that: update it, or use the value through a volume instead",
            binary.join(", ")
        )
    }
}

/// Replaces `$(NAME)` by what `lookup` knows; upstream's `expansion.Expand`.
pub fn expand(input: &str, lookup: &dyn Fn(&str) -> Option<Vec<u8>>) -> Vec<u8> {
    let mut out = Vec::with_capacity(input.len());
    let mut rest = input;
    while let Some(at) = rest.find('$') {
        out.extend_from_slice(&rest.as_bytes()[..at]);
        let after = &rest[at + 1..];
        if let Some(escaped) = after.strip_prefix('$') {
            out.push(b'$');
            rest = escaped;
        } else if let Some(open) = after.strip_prefix('(') {
            if let Some(close) = open.find(')') {
                let name = &open[..close];
                match lookup(name) {
                    Some(value) => out.extend_from_slice(&value),
                    None => {
                        out.extend_from_slice(b"$(");
                        out.extend_from_slice(name.as_bytes());
                        out.push(b')');
                    }
                }
                rest = &open[close + 1..];
            } else {
                out.extend_from_slice(b"$(");
                rest = open;
            }
        } else {
            out.push(b'$');
            rest = after;
        }
    }
    out.extend_from_slice(rest.as_bytes());
    out
}

/// As [`expand`], for what the runtime takes as text: commands, arguments and paths.
///
/// # Errors
/// When the result is not UTF-8; names the variables.
pub fn expand_text(
    input: &str,
    lookup: &dyn Fn(&str) -> Option<Vec<u8>>,
) -> Result<String, NotText> {
    let binary = RefCell::new(BTreeSet::new());
    let expanded = expand(input, &|name| {
        let value = lookup(name)?;
        if std::str::from_utf8(&value).is_err() {
            binary.borrow_mut().insert(name.to_owned());
        }
        Some(value)
    });
    String::from_utf8(expanded).map_err(|_| NotText(binary.into_inner().into_iter().collect()))
}

/// A lookup over variables; the last one of a name wins.
pub fn lookup_in(env: &[(String, Vec<u8>)]) -> impl Fn(&str) -> Option<Vec<u8>> + '_ {
    move |name| {
        env.iter()
            .rev()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.clone())
    }
}

/// Variables while they are collected; a name given twice keeps its first place and its last value.
#[derive(Default)]
struct Vars {
    list: Vec<(String, Vec<u8>)>,
    at: HashMap<String, usize>,
}

impl Vars {
    fn set(&mut self, name: String, value: Vec<u8>) {
        match self.at.get(&name) {
            Some(at) => self.list[*at].1 = value,
            None => {
                self.at.insert(name.clone(), self.list.len());
                self.list.push((name, value));
            }
        }
    }

    fn get(&self, name: &str) -> Option<&Vec<u8>> {
        self.at.get(name).map(|at| &self.list[*at].1)
    }
}

/// The environment of a container: `envFrom` in its order, then `env`, each variable seeing the earlier ones
/// and the services; then the services that nothing has set. Upstream's `makeEnvironmentVariables`.
///
/// # Errors
/// See [`EnvError`].
pub fn make_env(inputs: &EnvInputs<'_>, ctx: &NodeContext) -> Result<Environment, EnvError> {
    let EnvInputs { pod, container, .. } = *inputs;
    let services = services(inputs)?;
    let mut vars = Vars::default();
    for from in container.env_from.iter().flatten() {
        all_of(inputs, from, &mut vars).map_err(|source| EnvError::Source {
            container: container.name.clone(),
            variable: "envFrom".to_owned(),
            source: Box::new(source),
        })?;
    }
    for var in container.env.iter().flatten() {
        let value = match (&var.value, &var.value_from) {
            (_, Some(source)) => from_source(inputs, &var.name, source, ctx)?,
            (Some(value), None) => Some(expand(value, &|name| {
                let service = || services.get(name).map(|value| value.clone().into_bytes());
                vars.get(name).cloned().or_else(service)
            })),
            (None, None) => Some(Vec::new()),
        };
        if let Some(value) = value {
            vars.set(var.name.clone(), value);
        }
    }
    for (name, value) in services {
        if vars.get(&name).is_none() {
            vars.set(name, value.into_bytes());
        }
    }
    if let Some((name, _)) = vars.list.iter().find(|(_, value)| value.contains(&0)) {
        return Err(EnvError::Nul {
            container: container.name.clone(),
            variable: name.clone(),
        });
    }
    tracing::trace!(pod = %pod.uid(), container = container.name, variables = vars.list.len(), "made environment");
    Ok(Environment { vars: vars.list })
}

/// A static pod does not wait for the API server's services.
fn services(inputs: &EnvInputs<'_>) -> Result<BTreeMap<String, String>, EnvError> {
    let EnvInputs { pod, container, .. } = *inputs;
    match &inputs.sources.services {
        Some(services) => {
            let links = pod.spec_ref().enable_service_links.unwrap_or(true);
            Ok(service_env(services, pod.namespace(), links))
        }
        None if pod.is_static() => Ok(BTreeMap::new()),
        None => Err(EnvError::NoServices {
            container: container.name.clone(),
        }),
    }
}

/// Sets a variable for each key of an object. API servers admit no key or prefix that cannot name one.
fn all_of(
    inputs: &EnvInputs<'_>,
    from: &EnvFromSource,
    vars: &mut Vars,
) -> Result<(), SourceError> {
    let namespace = inputs.pod.namespace();
    let prefix = from.prefix.as_deref().unwrap_or_default();
    let mut set = |key: &str, value: Vec<u8>| vars.set(format!("{prefix}{key}"), value);
    if let Some(reference) = &from.config_map_ref {
        let optional = reference.optional.unwrap_or(false);
        let found = inputs
            .sources
            .config_map(namespace, &reference.name, optional)?;
        for (key, value) in found.and_then(|c| c.data.as_ref()).into_iter().flatten() {
            set(key, value.clone().into_bytes());
        }
    } else if let Some(reference) = &from.secret_ref {
        let optional = reference.optional.unwrap_or(false);
        let found = inputs
            .sources
            .secret(namespace, &reference.name, optional)?;
        for (key, value) in found.and_then(|s| s.data.as_ref()).into_iter().flatten() {
            set(key, value.0.clone());
        }
    }
    Ok(())
}

/// The value of one variable; `None` = its source does not exist and need not.
fn from_source(
    inputs: &EnvInputs<'_>,
    name: &str,
    source: &EnvVarSource,
    ctx: &NodeContext,
) -> Result<Option<Vec<u8>>, EnvError> {
    let EnvInputs { pod, container, .. } = *inputs;
    let source_error = |source| EnvError::Source {
        container: container.name.clone(),
        variable: format!("variable {name}"),
        source: Box::new(source),
    };
    let field_error = |what| EnvError::Field {
        container: container.name.clone(),
        variable: name.to_owned(),
        what,
    };
    if let Some(field) = &source.field_ref {
        let path = field.field_path.as_str();
        return from_field(inputs, path, ctx)
            .map(|value| Some(value.into_bytes()))
            .map_err(field_error);
    }
    if let Some(resource) = &source.resource_field_ref {
        return downward::resource_field(
            pod,
            Some(container),
            resource,
            &inputs.sources.allocatable,
        )
        .map(|value| Some(value.into_bytes()))
        .map_err(field_error);
    }
    if source.config_map_key_ref.is_some() || source.secret_key_ref.is_some() {
        return from_object(inputs, source).map_err(source_error);
    }
    if let Some(reference) = &source.file_key_ref {
        return from_file(inputs.sources, reference).map_err(|why| EnvError::File {
            container: container.name.clone(),
            variable: name.to_owned(),
            key: reference.key.as_str().into(),
            path: reference.path.as_str().into(),
            volume: reference.volume_name.as_str().into(),
            why: why.into(),
        });
    }
    Err(EnvError::Unsupported {
        container: container.name.clone(),
        name: name.to_owned(),
    })
}

/// Returns the value of a key in a file of a volume. `None` stands for a missing file or key that is optional; upstream
/// fails without the file all the same, against the API's word.
fn from_file(sources: &Sources, reference: &FileKeySelector) -> Result<Option<Vec<u8>>, String> {
    let at = (reference.volume_name.clone(), reference.path.clone());
    let (value, missing) = match sources.files.get(&at) {
        Some(Ok(Some(file))) => {
            let value = env_file::value(file, &reference.key).map_err(|error| error.to_string())?;
            (value, "the file has no such key, or no value for it")
        }
        Some(Ok(None)) => (None, "the file does not exist"),
        Some(Err(why)) => return Err(why.clone()),
        None => return Err("the file was not read".to_owned()),
    };
    if value.is_none() && !reference.optional.unwrap_or(false) {
        return Err(format!(
            "{missing}; write it, or mark the reference optional"
        ));
    }
    Ok(value)
}

fn from_object(
    inputs: &EnvInputs<'_>,
    source: &EnvVarSource,
) -> Result<Option<Vec<u8>>, SourceError> {
    let namespace = inputs.pod.namespace();
    let missing = |kind, name: &str, key: &str, optional| {
        if optional {
            return Ok(None);
        }
        Err(SourceError::NoKey {
            kind,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            key: key.to_owned(),
        })
    };
    if let Some(r) = &source.config_map_key_ref {
        let optional = r.optional.unwrap_or(false);
        let Some(found) = inputs.sources.config_map(namespace, &r.name, optional)? else {
            return Ok(None);
        };
        return match found.data.as_ref().and_then(|d| d.get(&r.key)) {
            Some(value) => Ok(Some(value.clone().into_bytes())),
            None => missing("ConfigMap", &r.name, &r.key, optional),
        };
    }
    let Some(r) = &source.secret_key_ref else {
        return Ok(None);
    };
    let optional = r.optional.unwrap_or(false);
    let Some(found) = inputs.sources.secret(namespace, &r.name, optional)? else {
        return Ok(None);
    };
    match found.data.as_ref().and_then(|d| d.get(&r.key)) {
        Some(value) => Ok(Some(value.0.clone())),
        None => missing("Secret", &r.name, &r.key, optional),
    }
}

/// Upstream's `podFieldSelectorRuntimeValue`.
///
/// # Errors
/// An unknown path, and the address of a node that has none: the container starts when it has one.
fn from_field(inputs: &EnvInputs<'_>, path: &str, ctx: &NodeContext) -> Result<String, String> {
    let pod = inputs.pod;
    let of_node = if path.starts_with("status.") {
        ctx.addresses.reported()
    } else {
        Vec::new()
    };
    let ips: &[String] = if pod.host_network() && inputs.pod_ips.is_empty() {
        &of_node
    } else {
        inputs.pod_ips
    };
    let first = |list: &[String]| list.first().cloned().unwrap_or_default();
    if path.starts_with("status.hostIP") && of_node.is_empty() {
        return Err(format!(
            "{path} needs an address of the node, which has none yet; it is taken from the route to other networks, or from --node-ip"
        ));
    }
    Ok(match path {
        "spec.nodeName" => ctx.node_name.clone(),
        "spec.serviceAccountName" => pod
            .spec_ref()
            .service_account_name
            .clone()
            .unwrap_or_default(),
        "status.hostIP" => first(&of_node),
        "status.hostIPs" => of_node.join(","),
        "status.podIP" => first(ips),
        "status.podIPs" => ips.join(","),
        _ => {
            return downward::metadata_field(pod, path)
                .ok_or_else(|| format!("unsupported fieldPath: {path}"));
        }
    })
}

#[cfg(test)]
#[path = "env_tests.rs"]
mod tests;
