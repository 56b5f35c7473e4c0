//! Selects the proxy for the API server: that of the kubeconfig, or that of the environment.
//!
//! In: `proxy-url`, the server's address, the environment. Out: [`Proxy`], or none. As upstream's clientcmd
//! (`parseProxyURL`) and the environment's rules of Go (`httpproxy`), which kubectl and the kubelet follow.
//!
//! **Invariant:** what is printed of a proxy, or of an address that is none, never has its user or password.

use std::fmt;
use std::net::IpAddr;

use hyper::http::Uri;

/// SOCKS has one byte for the length of a name or password.
const SOCKS_LONGEST: usize = 255;

/// Protocol of a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `CONNECT`.
    Http,
    /// `CONNECT` within TLS.
    Https,
    /// SOCKS version 5; the proxy looks names up.
    Socks5,
}

impl Kind {
    fn of(scheme: &str) -> Option<Self> {
        match scheme {
            "http" => Some(Self::Http),
            "https" => Some(Self::Https),
            "socks5" => Some(Self::Socks5),
            _ => None,
        }
    }

    fn scheme(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
            Self::Socks5 => "socks5",
        }
    }

    fn default_port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
            Self::Socks5 => 1080,
        }
    }
}

/// A proxy. Printed without user and password.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Proxy {
    pub(super) kind: Kind,
    /// Scheme, host and port, nothing else.
    pub(super) address: Uri,
    /// Name and password.
    pub(super) user: Option<(String, String)>,
}

impl fmt::Display for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let authority = self.address.authority().map_or("", |a| a.as_str());
        write!(f, "{}://{authority}", self.kind.scheme())
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Proxy({self})")
    }
}

impl Proxy {
    /// Reads `scheme://[user[:password]@]host[:port]`. The error does not repeat what was read.
    fn parse(url: &str) -> Result<Self, String> {
        let Some((scheme, _)) = url.split_once("://") else {
            return Err("it has no scheme; write http://host:port".to_owned());
        };
        let Some(kind) = Kind::of(&scheme.to_ascii_lowercase()) else {
            // Without the slashes it may be anything, a password too.
            let is_scheme = |c: char| c.is_ascii_alphanumeric() || "+.-".contains(c);
            let shown = match scheme.chars().all(is_scheme) {
                true => format!("the scheme {scheme:?}"),
                false => "what stands before ://".to_owned(),
            };
            return Err(format!(
                "{shown} is not supported; use http, https or socks5"
            ));
        };
        let uri: Uri = url
            .parse()
            .map_err(|error| format!("it is no URL: {error}; escape special characters as %40"))?;
        let Some(authority) = uri.authority() else {
            return Err("it has no host; write http://host:port".to_owned());
        };
        let user = authority.as_str().rsplit_once('@').map(|(user, _)| {
            let (name, password) = user.split_once(':').unwrap_or((user, ""));
            (unescaped(name), unescaped(password))
        });
        if kind == Kind::Socks5
            && user.as_ref().is_some_and(|(name, password)| {
                name.len() > SOCKS_LONGEST || password.len() > SOCKS_LONGEST
            })
        {
            return Err(format!(
                "its user or password is longer than {SOCKS_LONGEST} bytes, the most SOCKS allows"
            ));
        }
        let named = authority.as_str();
        let named = named.rsplit_once('@').map_or(named, |(_, host)| host);
        let port = match authority.port_u16() {
            Some(port) => port,
            None if matches!(named.strip_prefix(authority.host()), Some("" | ":")) => {
                kind.default_port()
            }
            None => {
                return Err(
                    "its port is no number up to 65535; escape special characters of user and password as %40".to_owned(),
                );
            }
        };
        let bare = format!("{}://{}:{port}/", kind.scheme(), authority.host());
        let address = bare.parse().map_err(|error| format!("{error}"))?;
        Ok(Self {
            kind,
            address,
            user,
        })
    }
}

/// The proxy before `server`. `proxy_url` is the kubeconfig's, which wins; `env` reads a variable of the environment.
///
/// # Errors
/// When what is given is no proxy that can be used, in words without its user and password.
pub(super) fn choose(
    proxy_url: Option<&str>,
    server: &Uri,
    env: impl Fn(&str) -> Option<String>,
) -> Result<Option<Proxy>, String> {
    if let Some(url) = proxy_url.filter(|url| !url.is_empty()) {
        let proxy = Proxy::parse(url).map_err(|what| format!("proxy-url: {what}"))?;
        return Ok(Some(proxy));
    }
    let variable = |name: &'static str, lower: &'static str| {
        [name, lower].into_iter().find_map(|name| {
            let value = env(name).filter(|value| !value.is_empty())?;
            Some((name, value))
        })
    };
    let given = match server.scheme_str() {
        Some("http") => variable("HTTP_PROXY", "http_proxy"),
        _ => variable("HTTPS_PROXY", "https_proxy"),
    };
    let Some((name, url)) = given else {
        return Ok(None);
    };
    let exceptions = variable("NO_PROXY", "no_proxy").map(|(_, value)| value);
    if bypassed(exceptions.as_deref().unwrap_or_default(), server) {
        return Ok(None);
    }
    // Without a scheme a host is meant, as by other programs.
    let url = match url.split_once("://") {
        None => format!("http://{url}"),
        Some(("socks5h", rest)) => format!("socks5://{rest}"),
        Some(_) => url,
    };
    match Proxy::parse(&url) {
        Ok(proxy) => Ok(Some(proxy)),
        Err(what) => Err(format!("the environment's {name}: {what}")),
    }
}

/// Returns whether the environment's proxy is bypassed: the server is this machine, or matches one of `exceptions`
/// (`NO_PROXY`).
fn bypassed(exceptions: &str, server: &Uri) -> bool {
    let default_port = if server.scheme_str() == Some("http") {
        80
    } else {
        443
    };
    let port = server.port_u16().unwrap_or(default_port);
    let host = server.host().unwrap_or_default().to_ascii_lowercase();
    let host = unbracketed(&host).trim_end_matches('.');
    let ip: Option<IpAddr> = host.parse().ok();
    if host == "localhost" || ip.is_some_and(|ip| ip.is_loopback()) {
        return true;
    }
    exceptions
        .split(',')
        .map(|one| one.trim().to_ascii_lowercase())
        .any(|one| excepts(&one, host, ip, port))
}

/// Returns whether an entry of `NO_PROXY` matches this host. An entry is `*`, an address, a network, or a domain. A
/// domain includes its subdomains; with a dot or `*.` in front, it matches only those. All but networks may have a
/// port.
fn excepts(entry: &str, host: &str, ip: Option<IpAddr>, port: u16) -> bool {
    match entry {
        "" => return false,
        "*" => return true,
        _ => {}
    }
    if let Some((network, bits)) = network(entry) {
        return ip.is_some_and(|ip| within(ip, network, bits));
    }
    let (name, wanted) = match entry.rsplit_once(':') {
        // More colons are an address of IPv6 without brackets.
        Some((name, port)) if !name.contains(':') || name.ends_with(']') => (name, Some(port)),
        _ => (entry, None),
    };
    if wanted.is_some_and(|wanted| wanted.parse() != Ok(port)) {
        return false;
    }
    let name = unbracketed(name);
    if let Ok(address) = name.parse::<IpAddr>() {
        return ip == Some(address);
    }
    let below = name.strip_prefix("*.").or_else(|| name.strip_prefix('.'));
    match below {
        Some(below) => below_domain(host, below),
        None => host == name || below_domain(host, name),
    }
}

fn below_domain(host: &str, domain: &str) -> bool {
    !domain.is_empty()
        && host
            .strip_suffix(domain)
            .is_some_and(|rest| rest.ends_with('.'))
}

fn network(entry: &str) -> Option<(IpAddr, u32)> {
    let (address, bits) = entry.split_once('/')?;
    Some((address.parse().ok()?, bits.parse().ok()?))
}

fn within(ip: IpAddr, network: IpAddr, bits: u32) -> bool {
    match (ip, network) {
        (IpAddr::V4(ip), IpAddr::V4(network)) if bits <= 32 => {
            let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
            ip.to_bits() & mask == network.to_bits() & mask
        }
        (IpAddr::V6(ip), IpAddr::V6(network)) if bits <= 128 => {
            let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
            ip.to_bits() & mask == network.to_bits() & mask
        }
        _ => false,
    }
}

fn unbracketed(host: &str) -> &str {
    host.strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host)
}

/// Without percent escapes.
fn unescaped(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let escaped = match rest {
            [b'%', high, low, ..] => hex(*high).zip(hex(*low)),
            _ => None,
        };
        match escaped {
            Some((high, low)) => {
                bytes.push(high << 4 | low);
                rest = &rest[3..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit)
        .to_digit(16)
        .and_then(|digit| u8::try_from(digit).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(
        proxy_url: Option<&str>,
        server: &str,
        env: &[(&str, &str)],
    ) -> Result<String, String> {
        let env = |name: &str| {
            let found = env.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let proxy = choose(proxy_url, &server.parse().unwrap(), env)?;
        Ok(proxy.map_or("direct".to_owned(), |proxy| proxy.to_string()))
    }

    #[test]
    fn the_kubeconfigs_proxy_wins_over_the_environments() {
        let https = "https://api.example.org:6443";
        let all = [("HTTPS_PROXY", "http://env:1"), ("NO_PROXY", "*")];
        for (proxy_url, server, env, expected) in [
            (None, https, &[][..], "direct"),
            (Some(""), https, &[], "direct"),
            (Some("http://file:3128"), https, &all, "http://file:3128"),
            (Some("http://file"), https, &[], "http://file:80"),
            (Some("HTTPS://file"), https, &[], "https://file:443"),
            (Some("socks5://file"), https, &[], "socks5://file:1080"),
            // It is asked for, so this machine is no exception.
            (
                Some("http://f:1"),
                "https://127.0.0.1:6443",
                &[],
                "http://f:1",
            ),
            (Some("http://[fd00::1]:8"), https, &[], "http://[fd00::1]:8"),
            (
                None,
                https,
                &[("HTTPS_PROXY", "http://env:1")],
                "http://env:1",
            ),
            (
                None,
                https,
                &[("https_proxy", "http://low:1")],
                "http://low:1",
            ),
            (
                None,
                https,
                &[
                    ("https_proxy", "http://low:1"),
                    ("HTTPS_PROXY", "http://up:1"),
                ],
                "http://up:1",
            ),
            (
                None,
                https,
                &[("HTTPS_PROXY", ""), ("https_proxy", "http://low:1")],
                "http://low:1",
            ),
            (
                None,
                https,
                &[("HTTPS_PROXY", "env:3128")],
                "http://env:3128",
            ),
            (
                None,
                https,
                &[("HTTPS_PROXY", "socks5h://env")],
                "socks5://env:1080",
            ),
            (None, https, &[("HTTP_PROXY", "http://env:1")], "direct"),
            (None, https, &[("ALL_PROXY", "http://env:1")], "direct"),
            (
                None,
                "http://api:80",
                &[("HTTP_PROXY", "http://env:1")],
                "http://env:1",
            ),
            (
                None,
                "http://api:80",
                &[("HTTPS_PROXY", "http://env:1")],
                "direct",
            ),
            (
                None,
                "https://localhost:1",
                &[("HTTPS_PROXY", "http://env:1")],
                "direct",
            ),
            (
                None,
                "https://127.8.0.1",
                &[("HTTPS_PROXY", "http://env:1")],
                "direct",
            ),
            (
                None,
                "https://[::1]:6443",
                &[("HTTPS_PROXY", "http://env:1")],
                "direct",
            ),
            (None, https, &all, "direct"),
        ] {
            let told = format!("{proxy_url:?} {server} {env:?}");
            assert_eq!(chosen(proxy_url, server, env).unwrap(), expected, "{told}");
        }
    }

    #[test]
    fn no_proxy_has_names_domains_addresses_networks_and_ports() {
        for (no_proxy, server, direct) in [
            ("example.org", "https://example.org", true),
            ("example.org", "https://api.example.org:6443", true),
            ("example.org", "https://notexample.org", false),
            ("EXAMPLE.org", "https://API.Example.ORG", true),
            (".example.org", "https://example.org", false),
            (".example.org", "https://api.example.org", true),
            ("*.example.org", "https://api.example.org", true),
            ("*.example.org", "https://example.org", false),
            ("example.org:6443", "https://api.example.org:6443", true),
            ("example.org:6443", "https://api.example.org", false),
            ("example.org:443", "https://api.example.org", true),
            ("10.0.0.1", "https://10.0.0.1:6443", true),
            ("10.0.0.1:6443", "https://10.0.0.1:6443", true),
            ("10.0.0.1:443", "https://10.0.0.1:6443", false),
            ("10.0.0.0/8", "https://10.200.3.4:6443", true),
            ("10.0.0.0/8", "https://11.0.0.1:6443", false),
            ("0.0.0.0/0", "https://11.0.0.1", true),
            ("10.0.0.0/33", "https://10.0.0.1", false),
            ("10.0.0.0/8", "https://ten.example.org", false),
            ("fd00::/8", "https://[fd12::1]:6443", true),
            ("fd00::1", "https://[fd00::1]:6443", true),
            ("[fd00::1]", "https://[fd00::1]:6443", true),
            ("[fd00::1]:6443", "https://[fd00::1]:6443", true),
            ("[fd00::1]:1", "https://[fd00::1]:6443", false),
            (
                "other.org, ,10.0.0.0/8 , example.org",
                "https://api.example.org",
                true,
            ),
            ("other.org,*", "https://api.example.org", true),
            (",", "https://api.example.org", false),
            (".", "https://api.example.org", false),
            ("*example.org", "https://example.org", false),
            ("", "https://api.example.org", false),
        ] {
            for name in ["NO_PROXY", "no_proxy"] {
                let env = [("HTTPS_PROXY", "http://env:1"), (name, no_proxy)];
                let expected = if direct { "direct" } else { "http://env:1" };
                let found = chosen(None, server, &env).unwrap();
                assert_eq!(found, expected, "{no_proxy:?} {server}");
            }
        }
    }

    #[test]
    fn what_is_no_proxy_is_told_without_its_password() {
        for (url, says) in [
            (
                "ftp://me:secret@proxy",
                "\"ftp\" is not supported; use http, https or socks5",
            ),
            ("socks4://me:secret@proxy", "not supported"),
            ("me:secret@proxy:3128", "no scheme"),
            ("me:secret@http://proxy:3128", "what stands before ://"),
            ("http://proxy:99999", "its port is no number"),
            ("http://me:secret#x@proxy:3128", "its port is no number"),
            ("http://me:secret/x@proxy:3128", "its port is no number"),
            ("http://me:sec ret@proxy", "it is no URL"),
            ("http:///secret", "it is no URL"),
            (
                &format!("socks5://me:{}@proxy", "secret".repeat(50)),
                "255 bytes",
            ),
        ] {
            let told = chosen(Some(url), "https://api", &[]).unwrap_err();
            assert!(
                told.starts_with("proxy-url: ") && told.contains(says),
                "{told}"
            );
            assert!(
                !told.contains("secret") && !told.contains("sec ret"),
                "{told}"
            );
        }
        let env = [("https_proxy", "ftp://me:secret@proxy")];
        let told = chosen(None, "https://api", &env).unwrap_err();
        assert!(
            told.contains("environment's https_proxy") && !told.contains("secret"),
            "{told}"
        );
    }

    #[test]
    fn names_and_passwords_are_read_and_not_printed() {
        for (user, expected) in [
            ("me:p%40ss", ("me", "p@ss")),
            ("me:a&b=c+d%2B", ("me", "a&b=c+d+")),
            ("me", ("me", "")),
            ("d%C3%B6:x%", ("dö", "x%")),
        ] {
            let proxy = Proxy::parse(&format!("http://{user}@proxy:1")).unwrap();
            let (name, password) = proxy.user.clone().unwrap();
            assert_eq!((name.as_str(), password.as_str()), expected);
            let printed = format!("{proxy} {proxy:?} {}", proxy.address);
            assert!(
                !printed.contains('@') && !printed.contains("me"),
                "{printed}"
            );
        }
        assert_eq!(Proxy::parse("http://proxy:1").unwrap().user, None);
    }
}
