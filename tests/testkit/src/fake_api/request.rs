//! A request as the server understands it.

use serde_json::Value;

use super::auth::Identity;
use super::failure::Failure;
use super::resource;

/// One request, as it is in the log.
#[derive(Clone, Debug)]
pub struct Request {
    /// Order of arrival, from 1.
    pub number: u64,
    /// Who asks.
    pub identity: Identity,
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`; in lower case the HTTP method for
    /// paths that are no resource.
    pub verb: String,
    /// Plural name: `pods`, `leases`; the path for what is no resource (`/version`).
    pub kind: String,
    /// `status`, `token`, …; empty for none.
    pub subresource: String,
    /// Empty for cluster-wide resources, and for lists over all namespaces.
    pub namespace: String,
    /// Empty for lists, watches and creations.
    pub name: String,
    /// Query parameters, decoded.
    pub query: Vec<(String, String)>,
    /// Media type of the body, without its parameters.
    pub content_type: String,
    /// The body; null for none.
    pub body: Value,
    /// HTTP status of the answer; 0 until there is one, and when there is none.
    pub status: u16,
    pub(super) resource: usize,
}

/// What a path is, when it is no resource.
pub(super) const NO_RESOURCE: usize = usize::MAX;

impl Request {
    /// Value of a query parameter.
    pub fn param(&self, name: &str) -> Option<&str> {
        self.query
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    /// `patch pods/status default/web`: short, for messages and for matching.
    pub fn line(&self) -> String {
        let mut line = format!("{} {}", self.verb, self.kind);
        if !self.subresource.is_empty() {
            line.push('/');
            line.push_str(&self.subresource);
        }
        if !self.namespace.is_empty() || !self.name.is_empty() {
            line.push(' ');
            line.push_str(&self.namespace);
            line.push('/');
            line.push_str(&self.name);
        }
        line
    }

    /// Whether it may change something.
    pub fn writes(&self) -> bool {
        matches!(self.verb.as_str(), "create" | "update" | "patch" | "delete")
    }

    pub(super) fn parse(
        parts: &http::request::Parts,
        body: &[u8],
        identity: Identity,
    ) -> Result<Self, Failure> {
        let query: Vec<(String, String)> =
            form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes())
                .into_owned()
                .collect();
        let content_type = parts
            .headers
            .get(http::header::CONTENT_TYPE)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.split(';').next())
            .unwrap_or_default()
            .trim()
            .to_owned();
        let method = parts.method.as_str();
        let mut request = Self {
            number: 0,
            identity,
            verb: method.to_ascii_lowercase(),
            kind: parts.uri.path().to_owned(),
            subresource: String::new(),
            namespace: String::new(),
            name: String::new(),
            query,
            content_type,
            body: Value::Null,
            status: 0,
            resource: NO_RESOURCE,
        };
        if !body.is_empty() {
            request.body = serde_json::from_slice(body).map_err(|error| {
                Failure::bad_request(format!("the body cannot be handled: {error}"))
            })?;
        }
        request.route(parts.uri.path(), method)?;
        Ok(request)
    }

    fn route(&mut self, path: &str, method: &str) -> Result<(), Failure> {
        let steps: Vec<&str> = path.split('/').filter(|step| !step.is_empty()).collect();
        let (group, version, rest) = match steps[..] {
            ["api", version, ref rest @ ..] => ("", version, rest),
            ["apis", group, version, ref rest @ ..] => (group, version, rest),
            _ => return Ok(()),
        };
        let (namespace, rest) = match rest {
            [] => return Ok(()),
            // A namespace itself, or a subresource of it.
            ["namespaces"] | ["namespaces", _] | ["namespaces", _, "status" | "finalize"] => {
                ("", rest)
            }
            ["namespaces", namespace, rest @ ..] => (*namespace, rest),
            rest => ("", rest),
        };
        let [plural, rest @ ..] = rest else {
            return Ok(());
        };
        self.kind = (*plural).to_owned();
        namespace.clone_into(&mut self.namespace);
        let (name, subresource) = match rest {
            [] => ("", ""),
            [name] => (*name, ""),
            [name, subresource] => (*name, *subresource),
            _ => return Err(Failure::unknown_path()),
        };
        name.clone_into(&mut self.name);
        subresource.clone_into(&mut self.subresource);
        let watch = self
            .param("watch")
            .is_some_and(|watch| watch == "1" || watch == "true");
        let verb = match (method, name.is_empty()) {
            ("GET", true) if watch => "watch",
            ("GET", true) => "list",
            ("GET", false) => "get",
            ("POST", _) => "create",
            ("PUT", false) => "update",
            ("PATCH", false) => "patch",
            ("DELETE", false) => "delete",
            _ => {
                let message = "the server does not allow this method on the requested resource";
                return Err(Failure::new(405, "MethodNotAllowed", message));
            }
        };
        verb.clone_into(&mut self.verb);
        // Reviews are answered, not stored.
        if group == "authentication.k8s.io" || group == "authorization.k8s.io" {
            return Ok(());
        }
        self.resource = resource::find(group, version, plural).ok_or_else(Failure::unknown_path)?;
        Ok(())
    }
}
