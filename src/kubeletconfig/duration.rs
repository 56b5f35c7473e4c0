//! Durations as Go writes them: `300ms`, `1m30s`, `2h45m`.

use std::time::Duration;

/// Units from the longest to the shortest, with their nanoseconds. Both micro signs are accepted.
const UNITS: [(&str, u128); 8] = [
    ("h", 3_600_000_000_000),
    ("ms", 1_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ns", 1),
];

/// Reads a duration as Go's `time.ParseDuration` does, except that negative ones are refused: no
/// setting has a use for them.
///
/// # Errors
/// Text that says what is wrong, fit to follow the name of the field.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("{text:?} is not a duration; write it like \"20s\", \"1m30s\" or \"2h\"");
    let unsigned = text.strip_prefix('+').unwrap_or(text);
    if unsigned.starts_with('-') {
        return Err(format!("{text:?} is negative; durations start at 0s"));
    }
    if unsigned == "0" {
        return Ok(Duration::ZERO);
    }
    if unsigned.is_empty() {
        return Err(bad());
    }
    let mut rest = unsigned;
    let mut nanos: u128 = 0;
    while !rest.is_empty() {
        let end = rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .ok_or_else(|| {
                format!("{text:?} has no unit; write it like \"{text}s\" or \"{text}m\"")
            })?;
        let (number, tail) = rest.split_at(end);
        let (unit, scale) = UNITS
            .iter()
            .find(|(unit, _)| {
                tail.strip_prefix(unit)
                    .is_some_and(|after| after.is_empty() || after.starts_with(is_number))
            })
            .ok_or_else(bad)?;
        nanos = nanos
            .checked_add(scaled(number, *scale).ok_or_else(bad)?)
            .ok_or_else(bad)?;
        rest = &tail[unit.len()..];
    }
    // Go keeps an int64 of nanoseconds, about 292 years.
    let nanos = i64::try_from(nanos)
        .ok()
        .and_then(|nanos| u64::try_from(nanos).ok());
    nanos
        .map(Duration::from_nanos)
        .ok_or_else(|| format!("{text:?} is longer than 292 years"))
}

fn is_number(c: char) -> bool {
    c.is_ascii_digit() || c == '.'
}

/// `number` × `scale`, exact; digits below a nanosecond are cut off.
fn scaled(number: &str, scale: u128) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    let mut nanos = match whole {
        "" => 0,
        digits => digits.parse::<u128>().ok()?.checked_mul(scale)?,
    };
    let mut place = scale;
    for digit in fraction.bytes() {
        place /= 10;
        nanos = nanos.checked_add(u128::from(digit - b'0').checked_mul(place)?)?;
    }
    Some(nanos)
}

/// Writes a duration as Go's `Duration.String` does: `1m0s`, `2h0m0s`, `1.5s`, `100ms`.
pub fn format_duration(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    let below_a_second = [("ms", 1_000_000), ("µs", 1_000), ("ns", 1)];
    if nanos == 0 {
        return "0s".to_owned();
    }
    if nanos < 1_000_000_000 {
        for (unit, scale) in below_a_second {
            if nanos >= scale {
                return format!("{}{unit}", decimal(nanos, scale));
            }
        }
    }
    let (hours, minutes) = (duration.as_secs() / 3600, duration.as_secs() % 3600 / 60);
    let seconds = decimal(nanos % 60_000_000_000, 1_000_000_000);
    match (hours, minutes) {
        (0, 0) => format!("{seconds}s"),
        (0, _) => format!("{minutes}m{seconds}s"),
        _ => format!("{hours}h{minutes}m{seconds}s"),
    }
}

fn decimal(nanos: u128, scale: u128) -> String {
    let (whole, rest) = (nanos / scale, nanos % scale);
    if rest == 0 {
        return whole.to_string();
    }
    let width = scale.ilog10() as usize;
    let digits = format!("{rest:0width$}");
    format!("{whole}.{}", digits.trim_end_matches('0'))
}
