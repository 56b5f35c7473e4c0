//! Maps a request to verb and resource, in the terms of RBAC: upstream's `GetRequestAttributes`.

use axum::http::Method;

/// Paths that lead to processes of pods, also with GET: a WebSocket begins as one.
const STREAMS: [&str; 4] = ["/exec", "/attach", "/portForward", "/run"];

/// The verb of a request: by its method alone, as upstream. With `streams_create`, what reaches processes of pods is
/// `create` whatever its method, so that who may read what `proxy` opens may not run commands as well.
pub(super) fn verb(method: &Method, path: &str, streams_create: bool) -> &'static str {
    if streams_create && STREAMS.iter().any(|root| is_below(root, path)) {
        return "create";
    }
    match method.as_str() {
        "GET" => "get",
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => "",
    }
}

/// The subresources of `nodes` of which a user must have one. `proxy` opens everything that has no name of its own;
/// what it used to open before it had one, it opens still.
///
/// `path` is the one the router sees, undecoded: a path that is only the same after decoding is another one to both.
pub(super) fn subresources(path: &str) -> &'static [&'static str] {
    const TABLE: [(&str, &[&str]); 13] = [
        ("/stats", &["stats"]),
        ("/metrics", &["metrics"]),
        ("/logs", &["log"]),
        ("/spec", &["spec"]),
        ("/checkpoint", &["checkpoint"]),
        ("/statusz", &["statusz"]),
        ("/flagz", &["flagz"]),
        ("/pods", &["pods", "proxy"]),
        ("/runningpods", &["pods", "proxy"]),
        ("/allocatedPods", &["pods", "proxy"]),
        ("/healthz", &["healthz", "proxy"]),
        ("/configz", &["configz", "proxy"]),
        // This agent's own, beside healthz.
        ("/readyz", &["healthz", "proxy"]),
    ];
    if is_below("/livez", path) {
        return &["healthz", "proxy"];
    }
    let found = TABLE.iter().find(|(root, _)| is_below(root, path));
    found.map_or(&["proxy"], |(_, subresources)| subresources)
}

fn is_below(root: &str, path: &str) -> bool {
    path.strip_prefix(root)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}
