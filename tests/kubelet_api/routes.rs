//! Every route there is, against everybody who may not use it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use axum::http::StatusCode;

use crate::world::{Ca, Client, World};

/// Which of the subresources of `nodes` open what is below a path, as upstream's documentation has it. Everything
/// else is opened by `proxy` alone.
const OPENS: [(&str, &[&str]); 14] = [
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
    ("/livez", &["healthz", "proxy"]),
    ("/readyz", &["healthz", "proxy"]),
    ("/configz", &["configz", "proxy"]),
];

const SUBRESOURCES: [&str; 11] = [
    "stats",
    "metrics",
    "log",
    "spec",
    "checkpoint",
    "statusz",
    "flagz",
    "pods",
    "healthz",
    "configz",
    "proxy",
];

fn opens(path: &str) -> &'static [&'static str] {
    let below = |root: &str| {
        path.strip_prefix(root)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let found = OPENS.iter().find(|(root, _)| below(root));
    found.map_or(&["proxy"], |(_, names)| names)
}

/// The routes in the sources: the router itself does not tell them.
fn routes() -> BTreeSet<String> {
    fn read(path: &Path, found: &mut BTreeSet<String>) {
        if path.is_dir() {
            for entry in fs::read_dir(path).unwrap() {
                read(&entry.unwrap().path(), found);
            }
            return;
        }
        if path.ends_with("tests.rs") || path.extension().is_none_or(|end| end != "rs") {
            return;
        }
        let text = fs::read_to_string(path).unwrap();
        // What stands in test modules is not served.
        let text = text.split("#[cfg(test)]\nmod ").next().unwrap();
        for other in [".route_service(", ".nest(", ".nest_service(", ".fallback("] {
            assert!(
                !text.contains(other),
                "{}: this test does not know {other}",
                path.display()
            );
        }
        for call in text.split(".route(").skip(1) {
            let literal = call
                .trim_start()
                .strip_prefix('"')
                .and_then(|rest| rest.split_once('"'));
            let Some((route, _)) = literal else {
                panic!(
                    "{}: write the path of a route as a literal, so that this test finds it: {}",
                    path.display(),
                    &call[..call.len().min(40)]
                );
            };
            found.insert(route.to_owned());
        }
    }
    let mut found = BTreeSet::new();
    read(Path::new("src/server"), &mut found);
    found
}

/// A path that the route matches.
fn example(route: &str) -> String {
    let parts: Vec<_> = route
        .split('/')
        .map(|part| match part.strip_prefix('{') {
            Some(name) if name.starts_with('*') => "x/y",
            Some(_) => "x",
            None => part,
        })
        .collect();
    parts.join("/")
}

#[test]
fn the_routes_of_the_sources_are_found() {
    let routes = routes();
    assert!(
        routes.contains("/healthz") && routes.contains("/metrics"),
        "{routes:?}"
    );
    assert_eq!(example("/exec/{ns}/{pod}/{*rest}"), "/exec/x/x/x/y");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_route_is_open_to_whoever_may_not_use_it() {
    let world = World::new().await;
    let stranger = Ca::new("somebody else").user("admin", Some("system:masters"));
    world.token("nothing", "nobody");
    world.token("masters", "someone");
    for subresource in SUBRESOURCES {
        let user = format!("only-{subresource}");
        world.token(&user, &user);
        for verb in ["get", "create"] {
            world.allow(&user, verb, subresource);
        }
    }
    // What no route matches is not told to strangers either.
    let mut paths: BTreeSet<String> = routes().iter().map(|route| example(route)).collect();
    paths.extend([
        "/".to_owned(),
        "/nothing/here".to_owned(),
        "//pods".to_owned(),
    ]);
    let mut looked = 0;
    for path in &paths {
        for method in ["GET", "POST"] {
            let what = format!("{method} {path}");
            // Anew: handlers take seconds, and an idle connection is ended after some.
            let mut plain = world.connect().await;
            let mut strange = world.connect_as(Some(&stranger)).await;
            let refused = async |client: &mut Client, token: Option<&str>, expected| {
                let (status, text) = client.ask(method, path, token).await;
                assert_eq!(status, expected, "{what}: {text}");
                text
            };
            let text = refused(&mut plain, None, StatusCode::UNAUTHORIZED).await;
            assert_eq!(text, "Unauthorized", "{what}");
            refused(&mut plain, Some("made-up"), StatusCode::UNAUTHORIZED).await;
            refused(&mut strange, None, StatusCode::UNAUTHORIZED).await;
            let verb = if method == "GET" { "get" } else { "create" };
            let text = refused(&mut plain, Some("nothing"), StatusCode::FORBIDDEN).await;
            assert_eq!(
                text,
                format!(
                    "Forbidden (user=nobody, verb={verb}, resource=nodes, subresource(s)=[{}])",
                    opens(path).join(" ")
                ),
                "{what}"
            );
            for subresource in SUBRESOURCES {
                let token = format!("only-{subresource}");
                if !opens(path).contains(&subresource) {
                    refused(&mut plain, Some(&token), StatusCode::FORBIDDEN).await;
                    continue;
                }
                // Whatever the handler makes of it: it was reached. A connection of its own, it may be upgraded
                // or go on for ever.
                let asked = world.ask(method, path, Some(&token), None);
                let answer = tokio::time::timeout(Duration::from_secs(3), asked).await;
                // No answer yet: a handler works on it.
                if let Ok((status, text)) = answer {
                    let refused = [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN];
                    assert!(
                        !refused.contains(&status),
                        "{what} as {token}: {status} {text}"
                    );
                }
                looked += 1;
            }
            // The address is not held responsible for the bad tokens of this test.
            world.clock.advance(Duration::from_secs(2));
        }
    }
    println!(
        "{} paths, {looked} of them looked at with rights",
        paths.len()
    );
    assert!(looked >= 2 * paths.len());
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_right_for_one_path_does_not_lead_to_another() {
    let world = World::new().await;
    for subresource in ["metrics", "log", "stats", "pods", "healthz"] {
        world.token(subresource, subresource);
        world.allow(subresource, "get", subresource);
        world.allow(subresource, "create", subresource);
    }
    for (token, path) in [
        ("metrics", "/metricsx"),
        ("metrics", "/%6detrics"),
        ("metrics", "/./metrics"),
        ("metrics", "//metrics"),
        ("log", "/logs%2f..%2fexec"),
        ("log", "/Logs/"),
        ("stats", "/exec/x/x/x/../../stats"),
        ("pods", "/containerLogs/pods/x/x"),
        ("healthz", "/healthz;/exec"),
        ("healthz", "/run/healthz/x/x"),
    ] {
        let (status, text) = world.get(path, Some(token)).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{path}: {text}");
    }
    // What is below a path that is open is never taken for something outside of it.
    for (token, path) in [
        ("metrics", "/metrics/../exec/x/x/x?command=id"),
        ("metrics", "/metrics/%2e%2e/run/x/x/x?cmd=id"),
        ("metrics", "/metrics/..%2frunningpods/"),
        ("healthz", "/healthz/../configz"),
        ("pods", "/pods/../metrics"),
        ("stats", "/stats/../../../etc/passwd"),
    ] {
        let (status, text) = world.get(path, Some(token)).await;
        assert_eq!(status, StatusCode::NOT_FOUND, "{path}: {text}");
    }
    world.end().await;
}

/// Where a part of a path is taken from the request, it never names a file outside of where it belongs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wildcard_leads_out_of_its_directory() {
    let world = World::new().await;
    world.token("all", "all");
    for subresource in SUBRESOURCES {
        world.allow("all", "get", subresource);
    }
    const MARK: &str = "root:x:0:0";
    assert!(fs::read_to_string("/etc/passwd").unwrap().contains(MARK));
    let ways = [
        "../../../../../../etc/passwd",
        "..%2f..%2f..%2f..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "%2fetc%2fpasswd",
        "/etc/passwd",
        "x/../../../../../etc/passwd",
        "..\\..\\etc\\passwd",
        "etc/passwd%00.log",
        "....//....//....//etc/passwd",
        "..%252f..%252fetc%252fpasswd",
    ];
    for route in routes().iter().filter(|route| route.contains('{')) {
        for way in ways {
            let path: Vec<_> = route
                .split('/')
                .map(|part| if part.starts_with('{') { way } else { part })
                .collect();
            let path = path.join("/");
            let asked = world.get(&path, Some("all"));
            if let Ok((status, text)) = tokio::time::timeout(Duration::from_secs(3), asked).await {
                assert!(!text.contains(MARK), "{path}: {status} {text}");
            }
        }
    }
    world.end().await;
}
