//! Text for what the node names in bytes, and of files that people write.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;

use serde::de::DeserializeOwned;
use serde_json::Value;

/// Returns the text of a file's name or path, another one for each: bytes that are not UTF-8 become `\xe9`.
pub fn of_name(name: impl AsRef<OsStr>) -> String {
    let mut text = String::new();
    for chunk in name.as_ref().as_bytes().utf8_chunks() {
        text.push_str(chunk.valid());
        text.push_str(&chunk.invalid().escape_ascii().to_string());
    }
    text
}

/// Returns the text of a file in UTF-16 with a byte order mark, as editors and shells of Windows write; YAML readers take that.
/// `None` for any other file, and for one that is cut off within a character.
pub fn of_utf16(bytes: &[u8]) -> Option<String> {
    let (rest, is_little) = match bytes {
        [0xff, 0xfe, rest @ ..] => (rest, true),
        [0xfe, 0xff, rest @ ..] => (rest, false),
        _ => return None,
    };
    let (pairs, []) = rest.as_chunks::<2>() else {
        return None;
    };
    let unit = |pair: &[u8; 2]| match is_little {
        true => u16::from_le_bytes(*pair),
        false => u16::from_be_bytes(*pair),
    };
    let units: Vec<u16> = pairs.iter().map(unit).collect();
    String::from_utf16(&units).ok()
}

/// Returns the text of a file: UTF-8, or what [`of_utf16`] takes.
///
/// # Errors
/// `InvalidData` for any other bytes.
pub fn of_file(bytes: Vec<u8>) -> io::Result<String> {
    match of_utf16(&bytes) {
        Some(text) => Ok(text),
        None => String::from_utf8(bytes)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error())),
    }
}

/// Reads YAML or JSON as Go's decoders do that are not strict: of a key that is given twice the last one counts, and null is
/// not given. `None` if it is of another form.
pub fn lenient<T: DeserializeOwned>(text: &str) -> Option<T> {
    let options = serde_saphyr::options! {
        with_snippet: false,
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::LastWins,
    };
    let mut tree: Value = serde_saphyr::from_str_with_options(text, options).ok()?;
    remove_nulls(&mut tree);
    serde_json::from_value(tree).ok()
}

/// The parser bounds how deep this goes.
fn remove_nulls(tree: &mut Value) {
    match tree {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(remove_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(remove_nulls),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_utf_8_or_utf_16_with_a_byte_order_mark() {
        let text = "kind: caf\u{e9} \u{1f600}\r\n";
        let units: Vec<u16> = text.encode_utf16().collect();
        let of = |mark: [u8; 2], bytes: fn(u16) -> [u8; 2]| {
            let rest = units.iter().flat_map(|unit| bytes(*unit));
            let all: Vec<u8> = mark.into_iter().chain(rest).collect();
            all
        };
        let little = of([0xff, 0xfe], u16::to_le_bytes);
        let big = of([0xfe, 0xff], u16::to_be_bytes);
        for file in [little.clone(), big, text.as_bytes().to_vec()] {
            assert_eq!(of_file(file).unwrap(), text);
        }
        let half = little[..little.len() - 1].to_vec();
        // Half a pair of surrogates.
        let surrogate = vec![0xff, 0xfe, 0x3d, 0xd8];
        for file in [half, surrogate, b"caf\xe9".to_vec()] {
            let error = of_file(file).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        assert_eq!(of_utf16(b"\xff\xfe").as_deref(), Some(""));
        assert_eq!(of_utf16(b""), None);
    }

    #[test]
    fn names_that_differ_in_a_byte_differ_as_text() {
        let of = |name: &[u8]| of_name(OsStr::from_bytes(name));
        assert_eq!(of("caf\u{e9}".as_bytes()), "caf\u{e9}");
        assert_eq!(of(b"caf\xe9.yaml"), "caf\\xe9.yaml");
        assert_eq!(of(b"caf\xea.yaml"), "caf\\xea.yaml");
    }
}
