//! Env files: the format in which `fileKeyRef` finds the value of an environment variable.
//!
//! Receives the bytes of a file, returns the value of one key. A file is a list of `KEY='value'`; a value may span
//! lines, and nothing in it is escaped or expanded. Blank lines and comments (`#`, also behind a value) do not count.

/// A line that is not in the format. Shows its number only: the text may be a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid environment variable format at line {line}: {what}")]
pub struct FormatError {
    /// Number of the line, from 1.
    pub line: usize,
    /// Description of the mistake.
    pub what: &'static str,
}

/// Returns the first value of `key` in a file, `None` without the key. A key without a value counts as missing. Lines
/// after the key are not read. Upstream's `env.ParseEnv`.
///
/// # Errors
/// A line before the key, or its own, breaks the format.
pub fn value(file: &[u8], key: &str) -> Result<Option<Vec<u8>>, FormatError> {
    let mut lines = lines(file).zip(1..);
    while let Some((text, line)) = lines.next() {
        let wrong = |what| FormatError { line, what };
        let text = without_indent(text);
        if text.is_empty() || text.starts_with(b"#") {
            continue;
        }
        let at = text.iter().position(|byte| *byte == b'=');
        let (name, value) = text.split_at(at.ok_or_else(|| wrong("missing '='"))?);
        if name.is_empty() {
            return Err(wrong("empty variable name"));
        }
        if name.last().is_some_and(|byte| is_space(*byte)) {
            return Err(wrong("whitespace before '=' is not allowed"));
        }
        let found = name == key.as_bytes();
        let value = &value[1..];
        if value.first().is_some_and(|byte| is_space(*byte)) {
            // A shell, too, takes this for an empty value.
            if found {
                return Ok(None);
            }
            continue;
        }
        let value = value
            .strip_prefix(b"'")
            .ok_or_else(|| wrong("value must be enclosed in single quotes"))?;
        let mut whole = Vec::new();
        let (mut rest, mut at) = (value, line);
        let behind = loop {
            if let Some(end) = rest.iter().position(|byte| *byte == b'\'') {
                whole.extend_from_slice(&rest[..end]);
                break without_indent(&rest[end + 1..]);
            }
            whole.extend_from_slice(rest);
            whole.push(b'\n');
            (rest, at) = lines.next().ok_or_else(|| wrong("unclosed single quote"))?;
        };
        if !behind.is_empty() && !behind.starts_with(b"#") {
            return Err(FormatError {
                line: at,
                what: "unexpected content after closing quote",
            });
        }
        if found {
            return Ok(Some(whole).filter(|value| !value.is_empty()));
        }
    }
    Ok(None)
}

/// Splits a file into lines, each without its end.
fn lines(file: &[u8]) -> impl Iterator<Item = &[u8]> {
    file.split(|byte| *byte == b'\n')
        .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
}

fn without_indent(text: &[u8]) -> &[u8] {
    let spaces = text.iter().take_while(|byte| is_space(**byte)).count();
    &text[spaces..]
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_quoted_and_taken_literally() {
        let file = b"# comment\n\n \t \r\n  A='1'\nB='a b' # comment\nC='$A \\n \"x\"'\r\n\
            D='one\r\n# two\n three'\nE=''\nF= 'x'\nA='2'\nG='caf\xe9'\nH='last'";
        for (key, want) in [
            ("A", Some(b"1".as_slice())),
            ("B", Some(b"a b")),
            ("C", Some(b"$A \\n \"x\"")),
            ("D", Some(b"one\n# two\n three")),
            ("E", None),
            ("F", None),
            ("G", Some(b"caf\xe9")),
            ("H", Some(b"last")),
            ("a", None),
            ("two", None),
        ] {
            assert_eq!(value(file, key), Ok(want.map(<[u8]>::to_vec)), "{key}");
        }
        assert_eq!(value(b"", "A"), Ok(None));
    }

    #[test]
    fn a_line_that_breaks_the_format_is_named_unless_the_key_comes_first() {
        for (text, line, what) in [
            ("A='1'\nB", 2, "missing '='"),
            ("='1'", 1, "empty variable name"),
            ("\nB ='1'", 2, "whitespace before '=' is not allowed"),
            ("B=1", 1, "value must be enclosed in single quotes"),
            ("B=\"1\"", 1, "value must be enclosed in single quotes"),
            ("B=", 1, "value must be enclosed in single quotes"),
            ("\nB='1\n2\n", 2, "unclosed single quote"),
            ("B='1\n2'3", 2, "unexpected content after closing quote"),
        ] {
            let want = FormatError { line, what };
            assert_eq!(value(text.as_bytes(), "B"), Err(want), "{text:?}");
            let before = format!("B='0'\n{text}");
            assert_eq!(value(before.as_bytes(), "B"), Ok(Some(b"0".to_vec())));
        }
    }
}
