//! Refuses requests to the endpoints that the configuration turns off. Upstream: `InstallDebuggingDisabledHandlers` and
//! `getHandlerForDisabledEndpoint`.

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::super::Shared;
use crate::kubeletconfig::KubeletConfiguration;

/// Paths that answer 405 if `enableDebuggingHandlers` is false, as upstream.
const DEBUGGING: &[&str] = &[
    "/run/",
    "/exec/",
    "/attach/",
    "/portForward/",
    "/containerLogs/",
    "/runningpods/",
    "/debug/pprof/",
    "/logs/",
];
/// Paths that answer 404 in that case.
const ABSENT: &[&str] = &["/configz", "/debug/flags/v"];
const PROFILING: &str = "/debug/pprof/";
const FLAGS: &str = "/debug/flags/v";

#[derive(Clone, Copy, Debug)]
struct Switches {
    debugging: bool,
    profiling: bool,
    flags: bool,
}

impl Switches {
    fn of(config: &KubeletConfiguration) -> Self {
        Self {
            debugging: config.enable_debugging_handlers,
            profiling: config.enable_profiling_handler,
            flags: config.enable_debug_flags_handler,
        }
    }

    /// The refusal of a request to `path`, if it is refused.
    fn refusal(self, path: &str) -> Option<(StatusCode, &'static str)> {
        let below =
            |prefix: &str| path.starts_with(prefix) || prefix.strip_suffix('/') == Some(path);
        if !self.debugging {
            if DEBUGGING.iter().any(|prefix| below(prefix)) {
                return Some((
                    StatusCode::METHOD_NOT_ALLOWED,
                    "Debug endpoints are disabled.\n",
                ));
            }
            return ABSENT
                .contains(&path)
                .then_some((StatusCode::NOT_FOUND, "404: Page Not Found"));
        }
        if !self.profiling && below(PROFILING) {
            return Some((
                StatusCode::METHOD_NOT_ALLOWED,
                "profiling endpoint is disabled.\n",
            ));
        }
        (!self.flags && path == FLAGS).then_some((
            StatusCode::METHOD_NOT_ALLOWED,
            "flags endpoint is disabled.\n",
        ))
    }
}

/// A layer over every route: answers for those that are turned off.
pub(in super::super) async fn gate(
    State(node): State<Shared>,
    request: Request,
    next: Next,
) -> Response {
    let switches = Switches::of(&node.config.kubelet);
    match switches.refusal(request.uri().path()) {
        Some(refusal) => refusal.into_response(),
        None => next.run(request).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ON: Switches = Switches {
        debugging: true,
        profiling: true,
        flags: true,
    };

    #[test]
    fn everything_is_there_by_default() {
        for path in DEBUGGING.iter().chain(ABSENT) {
            assert_eq!(ON.refusal(path), None, "{path}");
        }
    }

    #[test]
    fn without_debugging_handlers_the_same_paths_as_upstream_are_refused() {
        let off = Switches {
            debugging: false,
            ..ON
        };
        for path in [
            "/run/ns/pod/c",
            "/exec/ns/pod/c",
            "/attach/ns/pod/c",
            "/portForward/ns/pod",
            "/containerLogs/ns/pod/c",
            "/runningpods/",
            "/runningpods",
            "/debug/pprof/profile",
            "/logs/syslog",
        ] {
            let (status, text) = off.refusal(path).expect(path);
            assert_eq!(
                (status.as_u16(), text),
                (405, "Debug endpoints are disabled.\n")
            );
        }
        for path in ["/configz", "/debug/flags/v"] {
            assert_eq!(off.refusal(path).map(|r| r.0.as_u16()), Some(404), "{path}");
        }
        for path in [
            "/pods",
            "/metrics",
            "/metrics/cadvisor",
            "/metrics/slis",
            "/stats/summary",
            "/healthz",
            "/statusz",
            "/flagz",
            "/checkpoint/ns/pod/c",
            "/logsx",
        ] {
            assert_eq!(off.refusal(path), None, "{path}");
        }
    }

    #[test]
    fn profiling_and_flags_have_switches_of_their_own() {
        let off = Switches {
            profiling: false,
            ..ON
        };
        assert_eq!(
            off.refusal("/debug/pprof/profile").map(|r| r.1),
            Some("profiling endpoint is disabled.\n")
        );
        assert_eq!(off.refusal("/debug/flags/v"), None);
        let off = Switches { flags: false, ..ON };
        assert_eq!(
            off.refusal("/debug/flags/v").map(|r| r.1),
            Some("flags endpoint is disabled.\n")
        );
        assert_eq!(off.refusal("/debug/pprof/"), None);
    }
}
