//! Names of images: `[domain/]path[:tag][@digest]`.

/// An image name that cannot be used; waiting reason `InvalidImageName`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("couldn't parse image name {image:?}: {reason}")]
pub struct InvalidImageName {
    /// As written.
    pub image: String,
    /// Reason for the refusal.
    pub reason: &'static str,
}

const MAX_NAME: usize = 255;
const MAX_TAG: usize = 128;

/// Checks a name and adds `:latest` where it has neither tag nor digest. The name is not qualified with a
/// registry: that is the runtime's business. Upstream's `applyDefaultImageTag`.
///
/// # Errors
/// When it is not an image name.
pub fn normalize(image: &str) -> Result<String, InvalidImageName> {
    let parts = parse(image)?;
    Ok(match (parts.tag, parts.digest) {
        (None, None) => format!("{image}:latest"),
        _ => image.to_owned(),
    })
}

/// The tag of a name that was normalised.
pub(super) fn tag_of(image: &str) -> Option<&str> {
    parse(image).ok().and_then(|p| p.tag)
}

struct Parts<'a> {
    tag: Option<&'a str>,
    digest: Option<&'a str>,
}

fn parse(image: &str) -> Result<Parts<'_>, InvalidImageName> {
    let error = |reason| InvalidImageName {
        image: image.to_owned(),
        reason,
    };
    if image.is_empty() {
        return Err(error("it is empty"));
    }
    if image.len() == 64
        && image
            .bytes()
            .all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    {
        return Err(error("it is an id; use a name"));
    }
    let (rest, digest) = match image.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest)),
        None => (image, None),
    };
    // A colon after the last slash begins the tag; one before it belongs to a port.
    let slash = rest.rfind('/').map_or(0, |at| at + 1);
    let (name, tag) = match rest[slash..].find(':') {
        Some(at) => (&rest[..slash + at], Some(&rest[slash + at + 1..])),
        None => (rest, None),
    };
    if name.is_empty() {
        return Err(error("it has no name"));
    }
    if name.len() > MAX_NAME {
        return Err(error("its name is longer than 255 characters"));
    }
    let (domain, path) = match name.split_once('/') {
        Some((first, path))
            if first.contains(['.', ':'])
                || first == "localhost"
                || first.bytes().any(|b| b.is_ascii_uppercase()) =>
        {
            (Some(first), path)
        }
        _ => (None, name),
    };
    if domain.is_some_and(|d| !is_domain(d)) {
        return Err(error(
            "its registry is not a host name with an optional port",
        ));
    }
    if path.bytes().any(|b| b.is_ascii_uppercase()) {
        return Err(error("the repository name must be lowercase"));
    }
    if !path.split('/').all(is_component) {
        return Err(error(
            "the repository name may hold lower-case letters, digits, and separators between them only",
        ));
    }
    if tag.is_some_and(|t| !is_tag(t)) {
        return Err(error(
            "its tag may hold letters, digits, _, . and -, at most 128, and begins with none of . and -",
        ));
    }
    if digest.is_some_and(|d| !is_digest(d)) {
        return Err(error(
            "its digest is not of the form sha256:<64 hexadecimal digits>",
        ));
    }
    Ok(Parts { tag, digest })
}

fn is_domain(domain: &str) -> bool {
    let (host, port) = match domain.rsplit_once(':') {
        Some((host, port)) if !host.ends_with(':') => (host, Some(port)),
        _ => (domain, None),
    };
    let port_ok = port.is_none_or(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()));
    let ipv6 = host
        .strip_prefix('[')
        .and_then(|h| h.strip_suffix(']'))
        .is_some_and(|h| h.bytes().all(|b| b.is_ascii_hexdigit() || b == b':'));
    let label = |l: &str| {
        !l.is_empty()
            && !l.starts_with('-')
            && !l.ends_with('-')
            && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    port_ok && (ipv6 || host.split('.').all(label))
}

/// Runs of lower-case letters and digits, separated by `.`, `_`, `__` or dashes.
fn is_component(component: &str) -> bool {
    let alnum = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = component.as_bytes();
    let (Some(first), Some(last)) = (bytes.first(), bytes.last()) else {
        return false;
    };
    alnum(*first)
        && alnum(*last)
        && bytes
            .split(|b| alnum(*b))
            .filter(|separator| !separator.is_empty())
            .all(|s| matches!(s, b"." | b"_" | b"__") || s.iter().all(|b| *b == b'-'))
}

fn is_tag(tag: &str) -> bool {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    tag.len() <= MAX_TAG
        && tag.bytes().next().is_some_and(word)
        && tag.bytes().all(|b| word(b) || b == b'.' || b == b'-')
}

fn is_digest(digest: &str) -> bool {
    let Some((algorithm, hex)) = digest.split_once(':') else {
        return false;
    };
    let length = match algorithm {
        "sha256" => 64,
        "sha384" => 96,
        "sha512" => 128,
        _ => return false,
    };
    hex.len() == length && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_get_a_tag_where_they_have_none() {
        let digest = format!("sha256:{}", "a".repeat(64));
        for (image, want) in [
            ("busybox", "busybox:latest".to_owned()),
            ("busybox:1.36", "busybox:1.36".to_owned()),
            ("localhost/x", "localhost/x:latest".to_owned()),
            ("localhost:5000/x", "localhost:5000/x:latest".to_owned()),
            ("localhost:5000/x/y:v1", "localhost:5000/x/y:v1".to_owned()),
            (
                "Registry.Example.com/x",
                "Registry.Example.com/x:latest".to_owned(),
            ),
            ("[::1]:5000/x", "[::1]:5000/x:latest".to_owned()),
            ("a/b__c/d-e---f.g_h", "a/b__c/d-e---f.g_h:latest".to_owned()),
            (&format!("busybox@{digest}"), format!("busybox@{digest}")),
            (
                &format!("busybox:1@{digest}"),
                format!("busybox:1@{digest}"),
            ),
        ] {
            assert_eq!(normalize(image), Ok(want), "{image}");
        }
    }

    #[test]
    fn names_that_are_none_are_refused() {
        for image in [
            "",
            ":latest",
            "Busybox",
            "busy box",
            "busybox:",
            "busybox:-x",
            "-busybox",
            "busybox-",
            "a//b",
            "a/",
            "/a",
            "a.._b",
            "a___b",
            "x@sha256:12",
            "x@md5:ab",
            "x:a:b",
            "../x",
            "host:port/x",
            &"a".repeat(64),
            &format!("{}x", "a/".repeat(200)),
            &format!("x:{}", "t".repeat(129)),
        ] {
            assert!(normalize(image).is_err(), "{image} is accepted");
        }
    }
}
