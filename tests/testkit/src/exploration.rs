//! How much of an exploration a run tries: tests that go through every point at which something may fail, or through many
//! random cases.

/// Names how many points stand for one that is tried: `make quick` sets it, whole runs do not.
const STRIDE: &str = "HOLDFAST_TEST_STRIDE";

/// The distance from one point that is tried to the next. 1 where nobody asks for less than everything.
///
/// # Panics
/// When the variable is set to something that is not a number of at least 1.
#[must_use]
pub fn stride() -> usize {
    match std::env::var(STRIDE) {
        Err(_) => 1,
        Ok(text) => match text.parse() {
            Ok(stride) if stride > 0 => stride,
            _ => panic!("{STRIDE}={text} is not a number of at least 1"),
        },
    }
}

/// Tries the points 1, 2, … until one was not reached. Returns how many were; with a [`stride`], of how many
/// that is known.
pub fn every_point(mut reached: impl FnMut(usize) -> bool) -> usize {
    let mut last = 0;
    for point in (1..).step_by(stride()) {
        if !reached(point) {
            break;
        }
        last = point;
    }
    last
}

/// Whether everything is tried, so that what is found can be counted.
#[must_use]
pub fn is_whole() -> bool {
    stride() == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_point_is_tried_until_one_is_not_reached() {
        let mut tried = Vec::new();
        let found = every_point(|point| {
            tried.push(point);
            point <= 20
        });
        let step = stride();
        assert!(found <= 20 && found + step > 20, "{found}");
        assert!(!is_whole() || found == 20);
        assert_eq!(tried, (1..=found + step).step_by(step).collect::<Vec<_>>());
        assert_eq!(every_point(|_| false), 0);
    }
}
