//! Resource quantities as Kubernetes writes them: `250m`, `1.5`, `64Mi`, `1e3`.

/// A quantity that does not parse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "parse quantity {value:?}: {reason}; write a number with an optional suffix, such as 250m, 1.5 or 64Mi"
)]
pub struct QuantityError {
    /// As written.
    pub value: String,
    /// Description of the error.
    pub reason: &'static str,
}

/// Writes a number of bytes as a quantity, in the largest unit that needs no fraction.
pub fn of_bytes(amount: u64) -> String {
    let units = [("Gi", 30), ("Mi", 20), ("Ki", 10)];
    let fits = |shift: u32| amount != 0 && amount.trailing_zeros() >= shift;
    match units.into_iter().find(|(_, shift)| fits(*shift)) {
        Some((unit, shift)) => format!("{}{unit}", amount >> shift),
        None => amount.to_string(),
    }
}

/// The amount in billionths, rounded up; upstream's `resource.ParseQuantity`.
///
/// # Errors
/// When it is not a quantity.
pub fn nanos(text: &str) -> Result<i128, QuantityError> {
    let error = |reason| QuantityError {
        value: text.to_owned(),
        reason,
    };
    let (negative, unsigned) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let end = unsigned
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return Err(error("it has no digits"));
    }
    if fraction.contains('.') {
        return Err(error("it has two decimal points"));
    }
    if whole.len() + fraction.len() > 20 {
        return Err(error("it has too many digits"));
    }
    // multiplier * 10^exponent
    let (multiplier, exponent): (i128, i32) = match suffix {
        "" => (1, 0),
        "n" => (1, -9),
        "u" => (1, -6),
        "m" => (1, -3),
        "k" => (1, 3),
        "M" => (1, 6),
        "G" => (1, 9),
        "T" => (1, 12),
        "P" => (1, 15),
        "E" => (1, 18),
        "Ki" => (1 << 10, 0),
        "Mi" => (1 << 20, 0),
        "Gi" => (1 << 30, 0),
        "Ti" => (1 << 40, 0),
        "Pi" => (1 << 50, 0),
        "Ei" => (1 << 60, 0),
        _ => match suffix.strip_prefix(['e', 'E']).map(str::parse::<i32>) {
            Some(Ok(exponent)) if (-18..=18).contains(&exponent) => (1, exponent),
            Some(Ok(_)) => return Err(error("its exponent is out of range")),
            _ => return Err(error("its suffix is not known")),
        },
    };
    let digits: i128 = format!("{whole}{fraction}")
        .parse()
        .map_err(|_| error("it is not a number"))?;
    let fraction_len =
        i32::try_from(fraction.len()).map_err(|_| error("it has too many digits"))?;
    let power = exponent + 9 - fraction_len;
    let scaled = digits
        .checked_mul(multiplier)
        .ok_or_else(|| error("it is too large"))?;
    let ten = |by: i32| 10_i128.checked_pow(by.unsigned_abs());
    let nano = if power >= 0 {
        ten(power).and_then(|p| scaled.checked_mul(p))
    } else {
        // Round up, as upstream does with what is finer than it can hold.
        ten(power).map(|p| scaled.div_euclid(p) + i128::from(scaled.rem_euclid(p) != 0))
    }
    .ok_or_else(|| error("it is too large"))?;
    Ok(if negative { -nano } else { nano })
}

#[cfg(test)]
mod tests {
    use super::nanos;

    #[test]
    fn quantities_compare_across_suffixes() {
        let n = |s: &str| nanos(s).unwrap();
        assert_eq!(n("100m"), n("0.1"));
        assert_eq!(n("1Ki"), n("1024"));
        assert_eq!(n("1e3"), n("1k"));
        assert_eq!(n("1.5Gi"), n("1536Mi"));
        assert_eq!(n("-1"), -1_000_000_000);
        assert_eq!(n(".5"), n("500m"));
        assert!(n("128Mi") < n("1G"));
    }

    #[test]
    fn what_is_not_a_quantity_is_refused() {
        for text in ["", "m", "1x", "1 Gi", "1.2.3", "--1", "1KB", "e3", "."] {
            assert!(nanos(text).is_err(), "{text:?}");
        }
    }
}
