//! Hash that shows whether a running container still matches its spec.

use k8s_openapi::api::core::v1::Container;

/// Hash of the fields that cannot change without a restart, name and image; upstream's
/// `kubecontainer.HashContainer`, as lower-case hex like the annotation
/// `io.kubernetes.container.hash`.
///
/// Upstream feeds FNV-32a with Go's dump of the JSON bytes: `([]uint8)[123 34 …]`.
pub fn container_hash(container: &Container) -> String {
    let image = container.image.as_deref().unwrap_or_default();
    let json = format!(
        "{{\"image\":{},\"name\":{}}}",
        go_json_string(image),
        go_json_string(&container.name)
    );
    let mut hash = Fnv32a::new();
    hash.write(b"([]uint8)[");
    for (i, byte) in json.bytes().enumerate() {
        if i > 0 {
            hash.write(b" ");
        }
        hash.write(byte.to_string().as_bytes());
    }
    hash.write(b"]");
    format!("{:x}", hash.0)
}

struct Fnv32a(u32);

impl Fnv32a {
    fn new() -> Self {
        Self(0x811c_9dc5)
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        }
    }
}

/// A string as Go's `json.Marshal` writes it: `<`, `>`, `&`, U+2028 and U+2029 are escaped too.
fn go_json_string(value: &str) -> String {
    let mut out = String::with_capacity(value.len() + 2);
    out.push('"');
    for c in value.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' | '\0'..='\u{1f}' => {
                out.push_str(&format!("\\u{:04x}", u32::from(c)));
            }
            _ => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_hash_is_upstreams() {
        // (name, image) as in upstream's own test.
        let mut container = Container {
            name: "test_container".into(),
            image: Some("foo/image:v1".into()),
            ..Container::default()
        };
        assert_eq!(container_hash(&container), "8e45cbd0");
        container.args = Some(vec!["other".into()]);
        assert_eq!(
            container_hash(&container),
            "8e45cbd0",
            "only name and image count"
        );
        container.image = Some("foo/image:v2".into());
        assert_ne!(container_hash(&container), "8e45cbd0");
    }

    #[test]
    fn json_strings_are_escaped_as_go_escapes_them() {
        assert_eq!(
            go_json_string("a\"<b>&\n\u{1}"),
            r#""a\"\u003cb\u003e\u0026\n\u0001""#
        );
        assert_eq!(
            go_json_string("\\\t\r\u{8}\u{c}\u{1f}\u{2028}\u{2029}ä"),
            r#""\\\t\r\b\f\u001f\u2028\u2029ä""#
        );
    }
}
