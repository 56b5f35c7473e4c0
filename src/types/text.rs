//! Text for what the node names in bytes.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

/// Returns the text of a file's name or path, another one for each: bytes that are not UTF-8 become `\xe9`.
pub fn of_name(name: impl AsRef<OsStr>) -> String {
    let mut text = String::new();
    for chunk in name.as_ref().as_bytes().utf8_chunks() {
        text.push_str(chunk.valid());
        text.push_str(&chunk.invalid().escape_ascii().to_string());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_differ_in_a_byte_differ_as_text() {
        let of = |name: &[u8]| of_name(OsStr::from_bytes(name));
        assert_eq!(of("caf\u{e9}".as_bytes()), "caf\u{e9}");
        assert_eq!(of(b"caf\xe9.yaml"), "caf\\xe9.yaml");
        assert_eq!(of(b"caf\xea.yaml"), "caf\\xea.yaml");
    }
}
