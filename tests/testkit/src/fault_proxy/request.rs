//! What a request to an API server is about, read off its path.

use axum::http::Method;

/// A request as the proxy saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiRequest {
    /// `GET` (one object, or what is no resource), `LIST`, `WATCH`, else the method: `POST`, `PUT`, `PATCH`,
    /// `DELETE`.
    pub verb: String,
    /// `pods`, `pods/status`; the path itself when it is no resource's: `/readyz`.
    pub resource: String,
    /// Empty when there is none.
    pub namespace: String,
    /// Empty when there is none.
    pub name: String,
    /// The path.
    pub path: String,
    /// The query, without `?`; may be empty.
    pub query: String,
}

impl ApiRequest {
    /// Of a method, a path and a query.
    pub fn new(method: &Method, path: &str, query: &str) -> Self {
        let mut request = Self {
            verb: method.to_string(),
            resource: path.to_owned(),
            namespace: String::new(),
            name: String::new(),
            path: path.to_owned(),
            query: query.to_owned(),
        };
        let segments: Vec<&str> = path.split('/').filter(|s| !s.is_empty()).collect();
        let rest = match segments.as_slice() {
            ["api", _, rest @ ..] | ["apis", _, _, rest @ ..] if !rest.is_empty() => rest,
            _ => return request,
        };
        let rest = match rest {
            // A namespace's own subresources have the place of resources inside it.
            ["namespaces", _, "status" | "finalize"] => rest,
            ["namespaces", namespace, inside @ ..] if !inside.is_empty() => {
                request.namespace = (*namespace).to_owned();
                inside
            }
            _ => rest,
        };
        let subresource = rest.get(2..).unwrap_or_default().join("/");
        request.resource = if subresource.is_empty() {
            rest[0].to_owned()
        } else {
            format!("{}/{subresource}", rest[0])
        };
        request.name = rest
            .get(1)
            .map(|name| (*name).to_owned())
            .unwrap_or_default();
        if method == Method::GET {
            let watches = query
                .split('&')
                .any(|p| p == "watch=true" || p == "watch=1");
            request.verb = match (watches, request.name.is_empty()) {
                (true, _) => "WATCH",
                (false, true) => "LIST",
                (false, false) => "GET",
            }
            .to_owned();
        }
        request
    }

    /// Whether it is this verb on this resource.
    pub fn is(&self, verb: &str, resource: &str) -> bool {
        self.verb == verb && self.resource == resource
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbs_and_resources_are_read_off_the_path() {
        for (method, path, query, expected) in [
            ("GET", "/api/v1/pods", "fieldSelector=x", "LIST pods  "),
            (
                "GET",
                "/api/v1/pods",
                "watch=true&resourceVersion=1",
                "WATCH pods  ",
            ),
            ("GET", "/api/v1/namespaces/a/pods/b", "", "GET pods a b"),
            (
                "PATCH",
                "/api/v1/namespaces/a/pods/b/status",
                "",
                "PATCH pods/status a b",
            ),
            (
                "POST",
                "/api/v1/namespaces/a/serviceaccounts/default/token",
                "",
                "POST serviceaccounts/token a default",
            ),
            (
                "PUT",
                "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n",
                "",
                "PUT leases kube-node-lease n",
            ),
            ("GET", "/api/v1/namespaces/a", "", "GET namespaces  a"),
            (
                "PUT",
                "/api/v1/namespaces/a/status",
                "",
                "PUT namespaces/status  a",
            ),
            ("GET", "/api/v1/namespaces", "", "LIST namespaces  "),
            ("GET", "/api/v1/nodes/n", "", "GET nodes  n"),
            ("GET", "/readyz", "", "GET /readyz  "),
            ("GET", "/api/v1", "", "GET /api/v1  "),
            ("GET", "/apis/apps/v1", "", "GET /apis/apps/v1  "),
        ] {
            let method = method.parse().expect("a method");
            let r = ApiRequest::new(&method, path, query);
            let seen = format!("{} {} {} {}", r.verb, r.resource, r.namespace, r.name);
            assert_eq!(seen, expected, "{path}?{query}");
        }
    }
}
