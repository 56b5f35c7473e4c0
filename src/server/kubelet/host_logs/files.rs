//! Files below one directory, as Go's `http.FileServer` serves them.
//!
//! A path is resolved first, links and all, and must be below the directory then; it is opened part by part without
//! following links, so that nothing that is swapped in between leads out of it. The last part is looked at before it
//! is opened: devices, pipes and sockets are refused unopened.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream;
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::Mode;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::error;
use crate::types::blocking;

/// Bytes read and sent at a time.
const CHUNK: u64 = 64 * 1024;
/// Entries of a directory that are listed.
const MAX_ENTRIES: usize = 20_000;
/// Longest path.
const MAX_PATH: usize = 4096;

/// Reads at once; pods' own work has turns of its own.
static TURNS: Semaphore = Semaphore::const_new(2);

enum Found {
    File(File, fs::Metadata),
    /// Its entries, directories with a slash.
    Directory(Vec<OsString>),
}

/// Serves what the still encoded path names, relative to `root`.
pub(super) async fn serve(
    root: &Path,
    raw: &str,
    headers: &HeaderMap,
    stop: &CancellationToken,
) -> Response {
    match decode(raw) {
        Some(path) => serve_path(root, &path, true, headers, stop).await,
        None => not_found(),
    }
}

/// Serves the file of that name.
pub(super) async fn serve_named(
    root: &Path,
    name: &str,
    headers: &HeaderMap,
    stop: &CancellationToken,
) -> Response {
    let name = name.replace('\\', "/");
    serve_path(root, OsStr::new(&name), false, headers, stop).await
}

fn not_found() -> Response {
    error(StatusCode::NOT_FOUND, "404 page not found")
}

async fn serve_path(
    root: &Path,
    path: &OsStr,
    redirect: bool,
    headers: &HeaderMap,
    stop: &CancellationToken,
) -> Response {
    let Some(relative) = relative(path) else {
        return not_found();
    };
    let name = relative.file_name().map(OsStr::to_owned);
    let root = root.to_owned();
    let found = blocking::run_in(&TURNS, move || find(&root, &relative)).await;
    let found = match found {
        Ok(Ok(found)) => found,
        Ok(Err(problem)) => return refuse(&problem),
        Err(_) => return error(StatusCode::SERVICE_UNAVAILABLE, "the agent stops"),
    };
    let slash = path.is_empty() || path.as_bytes().ends_with(b"/");
    let name = name.unwrap_or_default();
    match found {
        Found::Directory(_) if redirect && !slash => redirect_to(&format!("{}/", encode(&name))),
        Found::File(..) if redirect && slash => redirect_to(&format!("../{}", encode(&name))),
        Found::Directory(entries) => listing(&entries),
        Found::File(file, metadata) => {
            let name = name.to_string_lossy();
            send(file, &metadata, &name, headers, stop).await
        }
    }
}

fn refuse(problem: &io::Error) -> Response {
    match problem.kind() {
        io::ErrorKind::PermissionDenied => error(StatusCode::FORBIDDEN, "403 Forbidden"),
        io::ErrorKind::Other => error(
            StatusCode::INTERNAL_SERVER_ERROR,
            "500 Internal Server Error",
        ),
        _ => not_found(),
    }
}

fn redirect_to(location: &str) -> Response {
    (
        StatusCode::MOVED_PERMANENTLY,
        [(header::LOCATION, location.to_owned())],
    )
        .into_response()
}

/// Percent-decodes a path; `None` when it is not encoded well. Names of files need not be UTF-8.
fn decode(raw: &str) -> Option<OsString> {
    let mut decoded = Vec::with_capacity(raw.len());
    let mut bytes = raw.bytes();
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => {
                let digit = |b: Option<u8>| char::from(b?).to_digit(16);
                let value = digit(bytes.next())? * 16 + digit(bytes.next())?;
                u8::try_from(value).ok()?
            }
            byte => byte,
        });
    }
    Some(OsString::from_vec(decoded))
}

/// Escapes a name for a link.
fn encode(name: &OsStr) -> String {
    let mut encoded = String::with_capacity(name.len());
    for &byte in name.as_bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            write!(encoded, "%{byte:02X}").ok();
        }
    }
    encoded
}

/// The path below the root; `None` when it goes up or is no path.
fn relative(path: &OsStr) -> Option<PathBuf> {
    if path.len() > MAX_PATH || path.as_bytes().contains(&0) {
        return None;
    }
    let mut relative = PathBuf::new();
    for component in Path::new(path).components() {
        match component {
            Component::Normal(part) => relative.push(part),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    Some(relative)
}

/// Opens what a path names; links are followed as long as they stay below `root`. Blocking.
fn find(root: &Path, path: &Path) -> io::Result<Found> {
    let root = root.canonicalize()?;
    let real = root.join(path).canonicalize()?;
    let below = real
        .strip_prefix(&root)
        .map_err(|_| io::Error::from(io::ErrorKind::NotFound))?;
    let opened = open_below(&root, below)?;
    // An O_PATH descriptor is opened anew through /proc: the same file, whatever its name means by now.
    let again = PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()));
    let metadata = File::from(opened.try_clone()?).metadata()?;
    if metadata.is_dir() {
        return Ok(Found::Directory(entries(&again)?));
    }
    if !metadata.is_file() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let file = File::open(&again)?;
    Ok(Found::File(file, metadata))
}

/// Opens a path without links, part by part, to look at.
fn open_below(root: &Path, below: &Path) -> io::Result<OwnedFd> {
    let look = OFlag::O_PATH | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
    let mut at = open(root, look | OFlag::O_DIRECTORY, Mode::empty())?;
    let mut parts = below.components().peekable();
    while let Some(part) = parts.next() {
        let flags = if parts.peek().is_some() {
            look | OFlag::O_DIRECTORY
        } else {
            look
        };
        at = openat(&at, part.as_os_str(), flags, Mode::empty())?;
    }
    // Opened with O_PATH and O_NOFOLLOW, a link that was put there is the link itself, which is no regular file.
    Ok(at)
}

fn entries(directory: &Path) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)?.take(MAX_ENTRIES) {
        let entry = entry?;
        let mut name = entry.file_name();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            name.push("/");
        }
        names.push(name);
    }
    names.sort();
    Ok(names)
}

fn listing(entries: &[OsString]) -> Response {
    let mut page =
        "<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n"
            .to_owned();
    for entry in entries {
        let (name, slash) = match entry.as_bytes().strip_suffix(b"/") {
            Some(name) => (OsStr::from_bytes(name), "/"),
            None => (entry.as_os_str(), ""),
        };
        let mut text = String::with_capacity(entry.len());
        for c in entry.to_string_lossy().chars() {
            match c {
                '<' => text.push_str("&lt;"),
                '>' => text.push_str("&gt;"),
                '&' => text.push_str("&amp;"),
                '"' => text.push_str("&#34;"),
                '\'' => text.push_str("&#39;"),
                c => text.push(c),
            }
        }
        writeln!(page, "<a href=\"{}{slash}\">{text}</a>", encode(name)).ok();
    }
    page.push_str("</pre>\n");
    ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], page).into_response()
}

/// Sends a file as long as it is now, or the part that was asked for.
async fn send(
    file: File,
    metadata: &fs::Metadata,
    name: &str,
    headers: &HeaderMap,
    stop: &CancellationToken,
) -> Response {
    let len = metadata.len();
    let modified = metadata.modified().ok();
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    if let (Some(since), Some(modified)) = (text(header::IF_MODIFIED_SINCE), modified)
        && !headers.contains_key(header::IF_NONE_MATCH)
        && httpdate::parse_http_date(since).is_ok_and(|since| seconds(modified) <= seconds(since))
    {
        return StatusCode::NOT_MODIFIED.into_response();
    }
    // Of a file that changed since the client has the rest, the whole is sent.
    let unchanged = match text(header::IF_RANGE) {
        None => true,
        Some(date) => httpdate::parse_http_date(date)
            .is_ok_and(|date| modified.is_some_and(|m| seconds(m) == seconds(date))),
    };
    let wanted = match text(header::RANGE) {
        Some(wanted) if unchanged => range(wanted, len),
        _ => Asked::Whole,
    };
    let (status, range) = match wanted {
        Asked::Whole => (StatusCode::OK, 0..len),
        Asked::Part(range) => (StatusCode::PARTIAL_CONTENT, range),
        Asked::Impossible => {
            let mut response = error(
                StatusCode::RANGE_NOT_SATISFIABLE,
                "invalid range: failed to overlap",
            );
            if let Ok(value) = format!("bytes */{len}").parse() {
                response.headers_mut().insert(header::CONTENT_RANGE, value);
            }
            return response;
        }
    };
    let mut response = Response::builder()
        .status(status)
        .header(header::CONTENT_TYPE, content_type(name))
        .header(header::X_CONTENT_TYPE_OPTIONS, "nosniff")
        .header(header::ACCEPT_RANGES, "bytes")
        .header(header::CONTENT_LENGTH, range.end - range.start);
    if let Some(date) = modified.and_then(http_date) {
        response = response.header(header::LAST_MODIFIED, date);
    }
    if status == StatusCode::PARTIAL_CONTENT {
        let content = format!("bytes {}-{}/{len}", range.start, range.end - 1);
        response = response.header(header::CONTENT_RANGE, content);
    }
    let body = Body::from_stream(stream::try_unfold(
        (file, range, stop.clone()),
        |(file, range, stop)| async move {
            if range.is_empty() {
                return Ok(None);
            }
            if stop.is_cancelled() {
                return Err(io::Error::other("the agent stops"));
            }
            let (file, piece) = piece(file, range.clone()).await?;
            let rest = range.start + piece.len() as u64..range.end;
            Ok(Some((piece, (file, rest, stop))))
        },
    ));
    response.body(body).unwrap_or_else(|_| {
        error(
            StatusCode::INTERNAL_SERVER_ERROR,
            "500 Internal Server Error",
        )
    })
}

async fn piece(file: File, range: Range<u64>) -> io::Result<(File, Bytes)> {
    let read = move || {
        let len = (range.end - range.start).min(CHUNK);
        let mut chunk = vec![0; usize::try_from(len).unwrap_or_default()];
        let read = file.read_at(&mut chunk, range.start)?;
        if read == 0 {
            return Err(io::Error::other("the file became shorter"));
        }
        chunk.truncate(read);
        Ok((file, Bytes::from(chunk)))
    };
    blocking::run_in(&TURNS, read)
        .await
        .map_err(io::Error::other)?
}

fn seconds(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Logs are text, whatever is in them; nothing of them is ever run by a browser.
fn content_type(name: &str) -> &'static str {
    match Path::new(name).extension().and_then(|e| e.to_str()) {
        Some("gz") => "application/gzip",
        Some("xz" | "zst" | "bz2" | "journal" | "1~") => "application/octet-stream",
        _ => "text/plain; charset=utf-8",
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Asked {
    Whole,
    Part(Range<u64>),
    Impossible,
}

/// Returns the part of `len` bytes that a `Range` header requests. Several ranges at once are answered with the whole
/// file.
pub(super) fn range(header: &str, len: u64) -> Asked {
    let Some(spec) = header.trim().strip_prefix("bytes=") else {
        return Asked::Whole;
    };
    let Some((first, last)) = spec.split_once('-') else {
        return Asked::Whole;
    };
    let number = |text: &str| text.trim().parse::<u64>().ok();
    match (number(first), number(last)) {
        _ if spec.contains(',') => Asked::Whole,
        (None, Some(0)) => Asked::Impossible,
        (None, Some(_)) if len == 0 => Asked::Impossible,
        (None, Some(suffix)) if first.trim().is_empty() => {
            Asked::Part(len.saturating_sub(suffix)..len)
        }
        (Some(first), _) if first >= len => Asked::Impossible,
        (Some(first), None) if last.trim().is_empty() => Asked::Part(first..len),
        (Some(first), Some(last)) if first <= last => {
            Asked::Part(first..last.saturating_add(1).min(len))
        }
        _ => Asked::Whole,
    }
}

/// `None` for what HTTP has no date for: httpdate panics on it.
fn http_date(time: SystemTime) -> Option<String> {
    const YEAR_10000: u64 = 253_402_300_800;
    let since = time.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    (since.as_secs() < YEAR_10000).then(|| httpdate::fmt_http_date(time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        for (header, want) in [
            ("bytes=0-4", Asked::Part(0..5)),
            ("bytes=5-", Asked::Part(5..10)),
            ("bytes=-3", Asked::Part(7..10)),
            ("bytes=-30", Asked::Part(0..10)),
            ("bytes=8-99", Asked::Part(8..10)),
            ("bytes=10-", Asked::Impossible),
            ("bytes=-0", Asked::Impossible),
            ("bytes=4-2", Asked::Whole),
            ("bytes=0-1,3-4", Asked::Whole),
            ("bytes=x-1", Asked::Whole),
            ("lines=0-1", Asked::Whole),
            (
                "bytes=18446744073709551615-18446744073709551615",
                Asked::Impossible,
            ),
            ("bytes=0-18446744073709551615", Asked::Part(0..10)),
        ] {
            assert_eq!(range(header, 10), want, "{header}");
        }
        assert_eq!(range("bytes=-1", 0), Asked::Impossible);
    }

    #[test]
    fn paths_never_go_up() {
        for bad in ["..", "a/../b", "../etc/passwd", "a/..", "x\0y"] {
            assert_eq!(relative(OsStr::new(bad)), None, "{bad:?}");
        }
        let relative = |path: &str| relative(OsStr::new(path));
        assert_eq!(relative("/etc//./x/"), Some(PathBuf::from("etc/x")));
        assert_eq!(relative("..."), Some(PathBuf::from("...")));
        assert_eq!(decode("a%2f..%2F%2e%2e"), Some("a/../..".into()));
        for bad in ["%", "%2", "%zz", "%-1"] {
            assert_eq!(decode(bad), None, "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn what_is_encoded_is_decoded(name in "\\PC{0,30}") {
            let name = OsString::from(name);
            let encoded = encode(&name);
            proptest::prop_assert!(!encoded.contains(['/', '"', '<', ' ']));
            proptest::prop_assert_eq!(decode(&encoded), Some(name));
        }
    }
}
