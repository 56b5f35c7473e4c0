//! Targets of requests to pods: address, `Host` and path as the kubelet sends them.
//!
//! A path is not normalised: `..`, `%2e` and `%2F` reach the server as they were given. What Go's `net/url` changes is changed
//! here as well. Upstream: `formatURL` of `pkg/probe/http`.

use std::fmt;

use hyper::http::uri::{Authority, PathAndQuery};
use reqwest::Url;

use super::errors::GetError;

/// Target of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    scheme: String,
    /// Without brackets.
    host: String,
    port: u16,
    /// Value of `Host`: with the port, also where it is the one of the scheme.
    authority: String,
    /// Path and query.
    path: String,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", self.scheme, self.authority, self.path)
    }
}

impl Target {
    /// Returns the target with this `path` of a probe or hook, query included. `scheme` is `http` or `https`.
    ///
    /// # Errors
    /// The host cannot be part of a URL.
    pub fn new(scheme: &str, host: &str, port: u16, path: &str) -> Result<Self, GetError> {
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let host = bare.unwrap_or(host);
        // A name beyond ASCII is asked for in its coded form.
        let coded = (!host.is_ascii()).then(|| Url::parse(&format!("http://{host}/")).ok());
        let coded = coded.flatten();
        let coded = coded.as_ref().and_then(Url::host_str);
        let host = coded.unwrap_or(host).to_owned();
        let authority = match host.contains([':', '%']) {
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        };
        let target = Self {
            scheme: scheme.to_owned(),
            host,
            port,
            authority,
            path: path_of(path),
        };
        match Authority::try_from(target.authority.as_str()) {
            Ok(_) => Ok(target),
            Err(error) => Err(GetError::Request(format!(
                "\"{target}\" is no URL: {error}"
            ))),
        }
    }

    /// Returns the scheme.
    pub fn scheme(&self) -> &str {
        &self.scheme
    }

    /// Returns the host, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns host and port as in the header `Host`.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// Returns the path with the query.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the target of a redirect that was found here.
    pub fn join(&self, location: &str) -> Option<Self> {
        let base: Url = self.to_string().parse().ok()?;
        let url = base.join(location).ok()?;
        let is_same = url.origin() == base.origin();
        let host = match url.host_str() == base.host_str() {
            true => self.host.clone(),
            false => url.host_str()?.trim_matches(['[', ']']).to_owned(),
        };
        let authority = match (is_same, url.port()) {
            (true, _) => self.authority.clone(),
            (false, Some(port)) => format!("{}:{port}", url.host_str()?),
            (false, None) => url.host_str()?.to_owned(),
        };
        let path = match url.query() {
            Some(query) => format!("{}?{query}", url.path()),
            None => url.path().to_owned(),
        };
        Some(Self {
            scheme: url.scheme().to_owned(),
            host,
            port: url.port_or_known_default().unwrap_or_default(),
            authority,
            path,
        })
    }
}

/// Returns path and query of a request for a path as it is given. One that is no URL is taken whole, with `?` and `#` as part of
/// the path.
fn path_of(given: &str) -> String {
    let (path, query) = split(given).unwrap_or_else(|| (escaped(given.as_bytes()), None));
    let slash = if path.starts_with('/') { "" } else { "/" };
    let mut all = format!("{slash}{path}");
    if let Some(query) = query {
        all.push('?');
        all.push_str(&sendable(query));
    }
    all
}

/// Splits what is given into path and query; `None` where Go's `url.Parse` fails. Like there, a scheme and a host before the path
/// are left out.
fn split(given: &str) -> Option<(String, Option<&str>)> {
    if given.bytes().any(|byte| byte.is_ascii_control()) {
        return None;
    }
    let (rest, fragment) = given.split_once('#').unwrap_or((given, ""));
    unescaped(fragment)?;
    let scheme = scheme_of(rest)?;
    let is_absolute = !scheme.is_empty();
    let rest = match is_absolute {
        true => rest.strip_prefix(scheme)?.strip_prefix(':')?,
        false => rest,
    };
    let (path, query) = match rest.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (rest, None),
    };
    let first = path.split('/').next().unwrap_or_default();
    if !path.starts_with('/') && (is_absolute || first.contains(':')) {
        return None;
    }
    let path = match path.strip_prefix("//") {
        Some(after) if is_absolute || !after.starts_with('/') => {
            let end = after.find('/').unwrap_or(after.len());
            after.get(end..).unwrap_or_default()
        }
        _ => path,
    };
    let bytes = unescaped(path)?;
    let path = match is_escaped(path) {
        true => path.to_owned(),
        false => escaped(&bytes),
    };
    Some((path, query))
}

/// Returns the scheme that a URL begins with, empty without one; `None` where a name is missing before the colon.
fn scheme_of(text: &str) -> Option<&str> {
    let is_part = |(at, byte): &(usize, u8)| {
        let is_later = matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.') && *at > 0;
        byte.is_ascii_alphabetic() || is_later
    };
    let length = text.bytes().enumerate().take_while(is_part).count();
    match text.as_bytes().get(length) {
        Some(b':') if length == 0 => None,
        Some(b':') => text.get(..length),
        _ => Some(""),
    }
}

/// Replaces `%xx` by the bytes; `None` where it is no number.
fn unescaped(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
    let mut bytes = text.bytes();
    let mut all = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            all.push(byte);
            continue;
        }
        let value = digit(bytes.next())? * 16 + digit(bytes.next())?;
        all.push(u8::try_from(value).ok()?);
    }
    Some(all)
}

/// Returns whether a path can be sent as it is. Upstream: `validEncoded` of `net/url`.
fn is_escaped(path: &str) -> bool {
    path.bytes()
        .all(|byte| is_plain(byte) || b"!'()*[]%".contains(&byte))
}

/// Returns whether `escaped` leaves a byte as it is. Upstream: `shouldEscape` of `net/url`.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-_.~$&+,/:;=@".contains(&byte)
}

fn escaped(path: &[u8]) -> String {
    let mut all = String::with_capacity(path.len());
    for byte in path {
        match is_plain(*byte) {
            true => all.push(char::from(*byte)),
            false => all.push_str(&format!("%{byte:02X}")),
        }
    }
    all
}

/// Escapes what a request cannot have in its query, spaces for example. Go sends them as they are, and no server takes them.
fn sendable(query: &str) -> String {
    let is_fine = |text: &str| PathAndQuery::try_from(format!("/?{text}")).is_ok();
    if is_fine(query) {
        return query.to_owned();
    }
    let mut all = String::new();
    for c in query.chars() {
        let text = c.to_string();
        match is_fine(&text) {
            true => all.push(c),
            false => all.push_str(&escaped(text.as_bytes())),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_sent_as_it_is_given() {
        for (given, sent) in [
            ("", "/"),
            ("/", "/"),
            ("ok", "/ok"),
            ("/a/../b/./c", "/a/../b/./c"),
            ("/%2e%2E/a%2Fb", "/%2e%2E/a%2Fb"),
            ("/a//b/", "/a//b/"),
            ("/a\\b", "/a%5Cb"),
            ("/ok?a=b&c=../d", "/ok?a=b&c=../d"),
            ("/ok?", "/ok?"),
            ("/ok?a?b", "/ok?a?b"),
            ("/ok?a b", "/ok?a%20b"),
            ("/ok#part", "/ok"),
            ("/a:b;c=1,2/@x/~y/!*'()", "/a:b;c=1,2/@x/~y/!*'()"),
            ("/a b/%2e", "/a%20b/."),
            ("/\u{e4}", "/%C3%A4"),
            ("/{x}|y", "/%7Bx%7D%7Cy"),
            // No URLs.
            ("/100%?x#y", "/100%25%3Fx%23y"),
            ("/a\nb", "/a%0Ab"),
            ("1:2", "/1:2"),
            (":x", "/:x"),
            // A host of its own, which counts for nothing.
            ("//elsewhere/ok", "/ok"),
            ("http://elsewhere:1/ok?a", "/ok?a"),
            ("//ok", "/"),
            ("///ok", "///ok"),
        ] {
            assert_eq!(path_of(given), sent, "{given:?}");
            assert!(PathAndQuery::try_from(sent).is_ok(), "{sent:?}");
        }
    }

    #[test]
    fn the_port_is_part_of_the_host_also_where_the_scheme_has_it() {
        for (scheme, host, port, authority) in [
            ("http", "10.0.0.1", 80, "10.0.0.1:80"),
            ("https", "10.0.0.1", 443, "10.0.0.1:443"),
            ("http", "fd00::1", 8080, "[fd00::1]:8080"),
            ("http", "[fd00::1]", 80, "[fd00::1]:80"),
            ("http", "Shop.example", 80, "Shop.example:80"),
        ] {
            let target = Target::new(scheme, host, port, "a").unwrap();
            assert_eq!(target.authority(), authority);
            let text = format!("{scheme}://{authority}/a");
            assert_eq!(target.to_string(), text);
        }
        let coded = Target::new("http", "b\u{fc}cher.example", 80, "/").unwrap();
        assert_eq!(coded.authority(), "xn--bcher-kva.example:80");
        let error = Target::new("http", "a b", 80, "/").unwrap_err();
        assert!(error.to_string().contains("is no URL"), "{error}");
    }

    #[test]
    fn a_redirect_to_the_same_server_keeps_the_host() {
        let at = Target::new("http", "Shop.example", 80, "/a/b").unwrap();
        for (location, wanted) in [
            ("c", "http://Shop.example:80/a/c"),
            ("/c?d", "http://Shop.example:80/c?d"),
            ("http://shop.example/c", "http://Shop.example:80/c"),
            ("https://shop.example/c", "https://shop.example/c"),
            ("http://other.example:8080/", "http://other.example:8080/"),
        ] {
            let next = at.join(location).unwrap();
            assert_eq!(next.to_string(), wanted, "{location}");
            assert_eq!(next.host() == at.host(), !location.contains("other"));
        }
        assert_eq!(at.join("https://shop.example/c").unwrap().port(), 443);
    }
}
