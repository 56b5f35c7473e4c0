//! Formats of values: names, labels, addresses, quantities. A function says what is wrong with a value, or nothing.

use std::net::{IpAddr, Ipv4Addr};

use serde_json::Value;

/// Most characters of a DNS subdomain.
const SUBDOMAIN: usize = 253;
/// Most characters of a DNS label, of the name of a qualified name and of a label's value.
const LABEL: usize = 63;

/// The items of a list; none when it is not one.
pub(super) fn items(list: &Value) -> &[Value] {
    list.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// The text of a field; empty when it has none, as Go decodes it.
pub(super) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The fields of a map; none when it is not one.
pub(super) fn entries(map: &Value) -> impl Iterator<Item = (&String, &Value)> {
    map.as_object().into_iter().flatten()
}

/// Whether a field is there and says something, where Go's zero value says nothing.
pub(super) fn is_set(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        Value::Number(number) => number.as_i64() != Some(0),
        Value::Bool(yes) => *yes,
    }
}

fn is_dns_part(part: &str) -> bool {
    let ends = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let bytes = part.as_bytes();
    matches!((bytes.first(), bytes.last()), (Some(first), Some(last)) if ends(*first) && ends(*last))
        && bytes.iter().all(|c| ends(*c) || *c == b'-')
}

fn is_name_part(part: &str) -> bool {
    let bytes = part.as_bytes();
    let ends = |c: Option<&u8>| c.is_some_and(u8::is_ascii_alphanumeric);
    ends(bytes.first())
        && ends(bytes.last())
        && (bytes.iter()).all(|c| c.is_ascii_alphanumeric() || b"-_.".contains(c))
}

/// `IsDNS1123Label`.
pub(super) fn dns_label(value: &str) -> Option<String> {
    if value.len() > LABEL {
        return Some(format!("must be no more than {LABEL} bytes"));
    }
    (!is_dns_part(value)).then(|| {
        "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-'"
            .to_owned()
    })
}

/// `IsDNS1123Subdomain`: names of nodes, pods, leases and of most objects.
pub(super) fn dns_subdomain(value: &str) -> Option<String> {
    if value.len() > SUBDOMAIN {
        return Some(format!("must be no more than {SUBDOMAIN} bytes"));
    }
    (!value.split('.').all(is_dns_part)).then(|| {
        "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.'".to_owned()
    })
}

/// `IsPathSegmentName`: what the name of any object has to be.
pub(super) fn path_segment(value: &str) -> Option<String> {
    if value == "." || value == ".." {
        return Some(format!("may not be '{value}'"));
    }
    let bad = ['/', '%'].into_iter().find(|bad| value.contains(*bad))?;
    Some(format!("may not contain '{bad}'"))
}

/// `IsQualifiedName`: keys of labels, types of conditions, names of resources.
pub(super) fn qualified_name(value: &str) -> Option<String> {
    let (prefix, name) = match value.split('/').collect::<Vec<_>>()[..] {
        [name] => (None, name),
        [prefix, name] => (Some(prefix), name),
        _ => return Some("a valid label key has at most one '/'".to_owned()),
    };
    match prefix {
        Some("") => return Some("prefix part must be non-empty".to_owned()),
        Some(prefix) => {
            if let Some(why) = dns_subdomain(prefix) {
                return Some(format!("prefix part {why}"));
            }
        }
        None => {}
    }
    if name.is_empty() {
        return Some("name part must be non-empty".to_owned());
    }
    if name.len() > LABEL {
        return Some(format!("name part must be no more than {LABEL} bytes"));
    }
    (!is_name_part(name)).then(|| {
        "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric \
         character"
            .to_owned()
    })
}

/// `IsValidLabelValue`.
pub(super) fn label_value(value: &str) -> Option<String> {
    if value.len() > LABEL {
        return Some(format!("must be no more than {LABEL} bytes"));
    }
    (!value.is_empty() && !is_name_part(value)).then(|| {
        "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and \
         end with an alphanumeric character"
            .to_owned()
    })
}

/// `IsValidIPForLegacyField` as servers from 1.36 on have it (`StrictIPCIDRValidation`): neither leading zeros nor an IPv4
/// address in IPv6 form.
pub(super) fn ip(value: &str) -> Option<String> {
    match value.parse::<IpAddr>() {
        Ok(IpAddr::V6(ip)) if ip.to_ipv4_mapped().is_some() => {
            Some("must not be an IPv4-mapped IPv6 address".to_owned())
        }
        Ok(_) => None,
        Err(_) if leading_zeros(value).is_some() => Some("must not have leading 0s".to_owned()),
        Err(_) => Some("must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)".to_owned()),
    }
}

/// An IPv4 address that has leading zeros.
fn leading_zeros(value: &str) -> Option<Ipv4Addr> {
    let parts: Option<Vec<u8>> = value.split('.').map(|part| part.parse().ok()).collect();
    <[u8; 4]>::try_from(parts?).ok().map(Ipv4Addr::from)
}

/// `IsValidCIDRForLegacyField` as servers from 1.36 on have it: no bits beyond the prefix either.
pub(super) fn cidr(value: &str) -> Option<String> {
    let bad = || Some("must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)".to_owned());
    let Some((address, length)) = value.split_once('/') else {
        return bad();
    };
    let Ok(length) = length.parse::<u32>() else {
        return bad();
    };
    if let Some(why) = ip(address) {
        return Some(why);
    }
    let (bits, width) = match address.parse::<IpAddr>() {
        Ok(IpAddr::V4(ip)) => (u128::from(u32::from(ip)), 32),
        Ok(IpAddr::V6(ip)) => (u128::from(ip), 128),
        Err(_) => return bad(),
    };
    if length > width {
        return bad();
    }
    let host = match width - length {
        128 => u128::MAX,
        host => (1_u128 << host) - 1,
    };
    (bits & host != 0).then(|| "must not have bits set beyond the prefix length".to_owned())
}

/// Whether two addresses or networks are at most one of each family.
pub(super) fn is_dual_stack<'a>(values: impl Iterator<Item = &'a str>) -> bool {
    let (mut v4, mut v6) = (0, 0);
    for value in values {
        match value.contains(':') {
            true => v6 += 1,
            false => v4 += 1,
        }
    }
    v4 <= 1 && v6 <= 1
}

/// A quantity in billionths, rounded up; `None` when it is none.
pub(super) fn quantity(value: &str) -> Option<i128> {
    const NANOS: i128 = 1_000_000_000;
    let digits = value
        .find(|c: char| !c.is_ascii_digit() && !matches!(c, '.' | '-' | '+'))
        .unwrap_or(value.len());
    let (number, suffix) = value.split_at(digits);
    let (negative, number) = match number.strip_prefix('-') {
        Some(number) => (true, number),
        None => (false, number.strip_prefix('+').unwrap_or(number)),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    let digits = format!("{whole}{fraction}");
    let mut mantissa: i128 = digits.parse().ok()?;
    let mut divisor = 10_i128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    const DECIMAL: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];
    if let Some(power) = BINARY.iter().position(|s| *s == suffix) {
        let power = u32::try_from(power).ok()? + 1;
        mantissa = mantissa.checked_mul(1024_i128.checked_pow(power)?)?;
    } else if let Some(power) = DECIMAL.iter().position(|s| *s == suffix) {
        let power = i32::try_from(power).ok()? - 3;
        let factor = 1000_i128.checked_pow(power.unsigned_abs())?;
        match power < 0 {
            true => divisor = divisor.checked_mul(factor)?,
            false => mantissa = mantissa.checked_mul(factor)?,
        }
    } else {
        let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
        let factor = 10_i128.checked_pow(exponent.unsigned_abs())?;
        match exponent < 0 {
            true => divisor = divisor.checked_mul(factor)?,
            false => mantissa = mantissa.checked_mul(factor)?,
        }
    }
    let scaled = mantissa.checked_mul(NANOS)?;
    let nanos = scaled / divisor + i128::from(scaled % divisor != 0);
    Some(if negative { -nanos } else { nanos })
}

/// Whether a quantity is a whole number.
pub(super) fn is_whole(nanos: i128) -> bool {
    nanos % 1_000_000_000 == 0
}
