//! `/logs/` over a directory of its own and a stand-in for `journalctl`.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request};
use tower::ServiceExt;

use super::*;

struct Answer {
    status: u16,
    headers: HeaderMap,
    text: String,
}

struct Fixture {
    host: HostLogs,
    dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("log");
        fs::create_dir_all(root.join("pods/a")).unwrap();
        fs::create_dir_all(root.join("containers")).unwrap();
        fs::write(root.join("syslog"), "0123456789").unwrap();
        fs::write(root.join("pods/a/0.log"), "of a").unwrap();
        fs::write(root.join("a <b>&c.log"), "odd").unwrap();
        fs::write(dir.path().join("secret"), "secret").unwrap();
        Self {
            host: HostLogs {
                root: Arc::new(root),
                enabled: true,
                handler: true,
                query: false,
                journalctl: Arc::new(dir.path().join("journalctl")),
                stop: CancellationToken::new(),
            },
            dir,
        }
    }

    fn root(&self) -> &Path {
        &self.host.root
    }

    /// A `journalctl` that prints its arguments, and knows one unit.
    fn journal(&mut self) {
        self.host.query = true;
        let script = "#!/bin/sh\nif [ \"$1\" = --field ]; then echo ssh.service; exit; fi\n\
                      for a in \"$@\"; do echo \"<$a>\"; done\n";
        let path = &*self.host.journalctl;
        fs::write(path, script).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    async fn send(&self, request: Request<Body>) -> Answer {
        let routes = routes_over::<HostLogs>().with_state(self.host.clone());
        let response = routes.oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        let headers = response.headers().clone();
        let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
        Answer {
            status,
            headers,
            text: String::from_utf8(body.to_vec()).unwrap(),
        }
    }

    async fn get(&self, path: &str) -> Answer {
        self.send(Request::get(path).body(Body::empty()).unwrap())
            .await
    }

    async fn get_with(&self, path: &str, header: header::HeaderName, value: &str) -> Answer {
        let request = Request::get(path).header(header, value);
        self.send(request.body(Body::empty()).unwrap()).await
    }
}

#[tokio::test]
async fn files_and_directories_are_served_as_go_does() {
    let host = Fixture::new();
    let file = host.get("/logs/syslog").await;
    assert_eq!((file.status, file.text.as_str()), (200, "0123456789"));
    assert_eq!(file.headers[header::CONTENT_LENGTH], "10");
    assert_eq!(
        file.headers[header::CONTENT_TYPE],
        "text/plain; charset=utf-8"
    );
    let list = host.get("/logs/").await;
    assert_eq!(
        list.headers[header::CONTENT_TYPE],
        "text/html; charset=utf-8"
    );
    assert_eq!(
        list.text,
        "<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n\
         <a href=\"a%20%3Cb%3E%26c.log\">a &lt;b&gt;&amp;c.log</a>\n\
         <a href=\"containers/\">containers/</a>\n<a href=\"pods/\">pods/</a>\n\
         <a href=\"syslog\">syslog</a>\n</pre>\n"
    );
    assert_eq!(host.get("/logs/a%20%3Cb%3E%26c.log").await.text, "odd");
    for (path, location) in [("/logs/pods", "pods/"), ("/logs/syslog/", "../syslog")] {
        let answer = host.get(path).await;
        assert_eq!(answer.status, 301, "{path}");
        assert_eq!(answer.headers[header::LOCATION], location);
    }
    let missing = host.get("/logs/nothing").await;
    assert_eq!(
        (missing.status, missing.text.as_str()),
        (404, "404 page not found\n")
    );
}

#[tokio::test]
async fn files_are_served_whatever_bytes_are_in_their_names() {
    use std::os::unix::ffi::OsStrExt as _;
    let host = Fixture::new();
    let name = std::ffi::OsStr::from_bytes(b"caf\xe9.log");
    fs::write(host.root().join("pods").join(name), "of a caf").unwrap();
    let list = host.get("/logs/pods/").await.text;
    assert!(
        list.contains("<a href=\"caf%E9.log\">caf\u{fffd}.log</a>"),
        "{list}"
    );
    assert_eq!(host.get("/logs/pods/caf%E9.log").await.text, "of a caf");
}

#[tokio::test]
async fn nothing_outside_is_read() {
    let host = Fixture::new();
    let secret = host.dir.path().join("secret");
    symlink(&secret, host.root().join("absolute")).unwrap();
    symlink("../secret", host.root().join("relative")).unwrap();
    symlink("..", host.root().join("up")).unwrap();
    symlink("/", host.root().join("everything")).unwrap();
    symlink("loop", host.root().join("loop")).unwrap();
    for path in [
        "absolute",
        "relative",
        "up/secret",
        "everything/etc/hostname",
        "everything/",
        "up/",
        "loop",
        "../secret",
        "pods/../../secret",
        "%2e%2e/secret",
        "..%2fsecret",
        "pods%2f..%2f..%2fsecret",
        "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "..%5csecret",
        "%00",
        "%ff",
        "%",
    ] {
        let answer = host.get(&format!("/logs/{path}")).await;
        assert_eq!(answer.status, 404, "{path}: {}", answer.text);
        assert!(!answer.text.contains("secret"), "{path}");
    }
    // An absolute path is one below the directory.
    assert_eq!(host.get("/logs//etc/passwd").await.status, 404);
    assert_eq!(host.get("/logs//syslog").await.text, "0123456789");
}

#[tokio::test]
async fn links_that_stay_inside_are_followed() {
    let host = Fixture::new();
    let target = host.root().join("pods/a/0.log");
    symlink(&target, host.root().join("containers/a.log")).unwrap();
    symlink("../pods", host.root().join("containers/pods")).unwrap();
    assert_eq!(host.get("/logs/containers/a.log").await.text, "of a");
    assert_eq!(host.get("/logs/containers/pods/a/0.log").await.text, "of a");
}

#[tokio::test]
async fn devices_and_pipes_are_refused_unopened() {
    let host = Fixture::new();
    let pipe = host.root().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(host.root().join("socket")).unwrap();
    for path in ["pipe", "socket"] {
        let answer = host.get(&format!("/logs/{path}")).await;
        assert_eq!(
            (answer.status, answer.text.as_str()),
            (403, "403 Forbidden\n"),
            "{path}"
        );
    }
}

#[tokio::test]
async fn parts_and_unchanged_files() {
    let host = Fixture::new();
    let part = host
        .get_with("/logs/syslog", header::RANGE, "bytes=2-4")
        .await;
    assert_eq!((part.status, part.text.as_str()), (206, "234"));
    assert_eq!(part.headers[header::CONTENT_RANGE], "bytes 2-4/10");
    let modified = part.headers[header::LAST_MODIFIED].to_str().unwrap();
    let none = host
        .get_with("/logs/syslog", header::RANGE, "bytes=10-")
        .await;
    assert_eq!(none.status, 416);
    assert_eq!(none.headers[header::CONTENT_RANGE], "bytes */10");
    let same = host.get_with("/logs/syslog", header::IF_MODIFIED_SINCE, modified);
    assert_eq!(same.await.status, 304);
}

#[tokio::test]
async fn a_file_from_before_1970_has_no_date() {
    let host = Fixture::new();
    let file = fs::File::options()
        .write(true)
        .open(host.root().join("syslog"))
        .unwrap();
    let old = std::time::SystemTime::UNIX_EPOCH - std::time::Duration::from_secs(86_400);
    file.set_modified(old).unwrap();
    let answer = host.get("/logs/syslog").await;
    assert_eq!((answer.status, answer.text.as_str()), (200, "0123456789"));
    assert!(!answer.headers.contains_key(header::LAST_MODIFIED));
}

#[tokio::test]
async fn a_query_whose_client_does_not_read_ends_with_the_agent() {
    let mut host = Fixture::new();
    host.host.query = true;
    let alive = host.dir.path().join("alive");
    let script = format!(
        "#!/bin/sh\nif [ \"$1\" = --field ]; then echo ssh.service; exit; fi\necho $$ > {}\n\
         while :; do echo more; done\n",
        alive.display()
    );
    fs::write(&*host.host.journalctl, script).unwrap();
    fs::set_permissions(&*host.host.journalctl, fs::Permissions::from_mode(0o755)).unwrap();
    let routes = routes_over::<HostLogs>().with_state(host.host.clone());
    let request = Request::get("/logs/?query=ssh").body(Body::empty());
    let unread = routes.oneshot(request.unwrap()).await.unwrap();
    let child = loop {
        match fs::read_to_string(&alive).map(|pid| pid.trim().to_owned()) {
            Ok(pid) if !pid.is_empty() => break Path::new("/proc").join(pid),
            _ => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
        }
    };
    assert!(child.join("cmdline").exists());
    host.host.stop.cancel();
    let gone = async {
        while fs::read(child.join("cmdline")).is_ok_and(|line| !line.is_empty()) {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    let gone = tokio::time::timeout(std::time::Duration::from_secs(20), gone).await;
    assert!(gone.is_ok(), "nobody polls the body, and the child is gone");
    drop(unread);
}

#[tokio::test]
async fn a_handler_that_is_off_says_so() {
    let mut host = Fixture::new();
    host.host.handler = false;
    for path in ["/logs/", "/logs/syslog", "/logs/?query=ssh"] {
        let answer = host.get(path).await;
        let want = (405, "logs endpoint is disabled.\n");
        assert_eq!((answer.status, answer.text.as_str()), want, "{path}");
    }
}

#[tokio::test]
async fn without_debugging_handlers_there_is_nothing() {
    let mut host = Fixture::new();
    host.host.enabled = false;
    let answer = host.get("/logs/syslog").await;
    let want = (405, "Debug endpoints are disabled.\n");
    assert_eq!((answer.status, answer.text.as_str()), want);
}

#[tokio::test]
async fn a_query_is_nothing_to_a_handler_without_it() {
    let host = Fixture::new();
    let answer = host.get("/logs/?query=ssh").await;
    assert_eq!(answer.status, 200);
    assert!(answer.text.contains("<pre>"));
}

#[tokio::test]
async fn services_are_looked_for_in_the_journal_and_then_in_files() {
    let mut host = Fixture::new();
    host.journal();
    let query = "/logs/?query=ssh&query=syslog&query=nobody";
    let answer = host.get(query).await;
    assert_eq!(
        answer.headers[header::CONTENT_TYPE],
        "text/plain;charset=UTF-8"
    );
    assert_eq!(
        answer.text,
        "<--utc>\n<--no-pager>\n<--output=short-precise>\n<--unit=ssh>\n0123456789\n\
         error: log not found for nobody\n"
    );
    let answer = host
        .get("/logs/?query=ssh&pattern=$(id)%3B&tailLines=2&boot=0")
        .await;
    let arguments = "<--pager-end>\n<--lines=2>\n<--unit=ssh>\n<--grep=$(id);>\n\
                     <--case-sensitive=false>\n<--boot=0>\n";
    assert!(answer.text.ends_with(arguments), "{}", answer.text);
    assert_eq!(host.get("/logs/?query=/syslog").await.text, "0123456789");
    assert_eq!(host.get("/logs/?query=/../secret").await.status, 404);
    assert_eq!(host.get("/logs/syslog").await.text, "0123456789");
}

#[tokio::test]
async fn queries_that_make_no_sense_are_refused() {
    let mut host = Fixture::new();
    host.journal();
    for (path, status, says) in [
        (
            "/logs/?query=",
            400,
            "query: Invalid value: [\"\"]: query cannot be empty\n",
        ),
        (
            "/logs/syslog?query=ssh",
            406,
            "path not allowed in query mode\n",
        ),
        (
            "/logs/?boot=0",
            406,
            "query: Required value: cannot be empty with options\n",
        ),
        (
            "/logs/?query=a%20b",
            406,
            "query: Invalid value: \"a b\": input contains unsupported characters\n",
        ),
    ] {
        let answer = host.get(path).await;
        assert_eq!(
            (answer.status, answer.text.as_str()),
            (status, says),
            "{path}"
        );
    }
}
