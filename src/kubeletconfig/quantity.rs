//! Byte quantities as Kubernetes writes them: `10Mi`, `500M`, `1.5Gi`, `1048576`.

use super::types::NEVER_ROTATE;
use crate::types::quantity::nanos;

/// Reads a quantity of whole bytes; a negative one means that logs are never rotated.
///
/// # Errors
/// As [`parse_bytes`].
pub(super) fn parse_log_size(text: &str) -> Result<u64, String> {
    match text.strip_prefix('-') {
        Some(size) if parse_bytes(size).is_ok_and(|bytes| bytes > 0) => Ok(NEVER_ROTATE),
        _ => parse_bytes(text),
    }
}

/// Reads a quantity of whole bytes.
///
/// # Errors
/// Text that says what is wrong, fit to follow the name of the field.
pub(super) fn parse_bytes(text: &str) -> Result<u64, String> {
    let bad = || {
        format!(
            "{text:?} is not a number of bytes; write it like \"10Mi\", \"500M\" or \"1048576\""
        )
    };
    // Parts of a byte and exponents are quantities, but nobody means them here.
    if !text.starts_with(|c: char| c.is_ascii_digit() || c == '.')
        || text.contains(['n', 'u', 'm', 'e'])
    {
        return Err(bad());
    }
    // A part of a byte counts as a whole one, as resource.Quantity rounds up.
    let bytes = u128::try_from(nanos(text).map_err(|_| bad())?)
        .map_err(|_| bad())?
        .div_ceil(1_000_000_000);
    u64::try_from(bytes)
        .ok()
        .filter(|bytes| i64::try_from(*bytes).is_ok())
        .ok_or_else(|| format!("{text:?} is more than 8Ei"))
}
