//! The shapes of names and values.

use std::net::IpAddr;

use super::super::Problems;

pub(super) const LABEL: &str = "has to be a DNS-1123 label: lower-case letters, digits and '-', at most 63, beginning and ending with a letter or digit";
pub(super) const SUBDOMAIN: &str = "has to be a DNS-1123 subdomain: lower-case letters, digits, '-' and '.', each part beginning and ending with a letter or digit";

pub(super) fn one_of(
    field: &str,
    value: Option<&str>,
    allowed: &[&str],
    problems: &mut Problems<'_>,
) {
    let value = value.unwrap_or_default();
    if !allowed.contains(&value) {
        let names: Vec<&str> = allowed.iter().filter(|a| !a.is_empty()).copied().collect();
        problems.add(
            field,
            format!("{value:?} is not one of {}", names.join(", ")),
        );
    }
}

pub(super) fn is_label(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    text.len() <= 63 && text.bytes().all(inner) && has_alphanumeric_ends(text)
}

pub(super) fn is_subdomain(text: &str) -> bool {
    text.len() <= 253
        && text.split('.').all(|part| {
            part.bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
                && has_alphanumeric_ends(part)
        })
}

pub(super) fn is_label_value(text: &str) -> bool {
    text.is_empty() || is_name_part(text)
}

/// Returns whether an API server accepts the address: an IPv4 address may not be written as an IPv6 address.
pub(super) fn is_ip(text: &str) -> bool {
    text.parse::<IpAddr>()
        .is_ok_and(|ip| ip == ip.to_canonical())
}

pub(super) fn is_uid(text: &str) -> bool {
    text.len() <= 63
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        && has_alphanumeric_ends(text)
}

/// `[prefix/]name`
pub(super) fn is_qualified_name(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_subdomain(prefix) && is_name_part(name),
        None => is_name_part(text),
    }
}

pub(super) fn is_name_part(text: &str) -> bool {
    text.len() <= 63
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && has_alphanumeric_ends(text)
}

pub(super) fn is_port_name(text: &str) -> bool {
    is_label(text)
        && text.len() <= 15
        && text.bytes().any(|b| b.is_ascii_lowercase())
        && !text.contains("--")
}

fn has_alphanumeric_ends(text: &str) -> bool {
    let end = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    end(text.as_bytes().first()) && end(text.as_bytes().last())
}
