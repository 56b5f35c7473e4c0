//! Rate limit for reports of a persistent error: the first is immediate, later ones come at growing intervals.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::Stamp;

/// Time before the second report.
const FIRST: Duration = Duration::from_secs(60);
/// Longest time between two reports.
const LAST: Duration = Duration::from_secs(3600);

#[derive(Clone, Copy, Debug)]
struct Told {
    wait: Duration,
    again: Stamp,
}

/// Errors that were reported, by their subject. Cheap to clone; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Pace(Arc<Mutex<HashMap<String, HashMap<String, Told>>>>);

impl Pace {
    /// Returns for each of the `reasons` why `of` is in an error state whether it is to be reported now. That applies
    /// to new reasons, and to those first reported 1 min, 3 min, 7 min … ago. Numbers that are words of their own, such
    /// as seconds, do not make a reason new. Reasons that are absent are forgotten, so they are reported at once when
    /// they return.
    pub fn due(&self, of: &str, reasons: &[&str], now: Stamp) -> Vec<bool> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = all.remove(of).unwrap_or_default();
        let mut after = HashMap::with_capacity(reasons.len());
        let due = (reasons.iter())
            .map(|reason| {
                let reason = without_numbers(reason);
                if after.contains_key(&reason) {
                    return false;
                }
                let told = before.get(&reason).copied();
                let (is_due, told) = match told {
                    Some(told) if !told.again.reached(now) => (false, told),
                    told => {
                        let wait = told.map_or(FIRST, |t| t.wait.saturating_mul(2).min(LAST));
                        let again = now.plus(wait);
                        (true, Told { wait, again })
                    }
                };
                after.insert(reason, told);
                is_due
            })
            .collect::<Vec<bool>>();
        if !after.is_empty() {
            all.insert(of.to_owned(), after);
        }
        due
    }

    /// As [`Pace::due`], of the only reason there is.
    pub fn is_due(&self, of: &str, reason: &str, now: Stamp) -> bool {
        self.due(of, &[reason], now) == [true]
    }

    /// Nothing is wrong any more.
    pub fn over(&self, of: &str) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.remove(of);
    }
}

fn without_numbers(text: &str) -> String {
    let is_number = |word: &&str| {
        let bare = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
        let bare = bare.strip_suffix('s').unwrap_or(bare);
        !bare.is_empty() && bare.bytes().all(|b| b.is_ascii_digit())
    };
    let words: Vec<&str> = text
        .split_whitespace()
        .filter(|word| !is_number(word))
        .collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::BootId;

    fn at(seconds: i64) -> Stamp {
        Stamp {
            boot: BootId(1),
            boottime_ms: seconds * 1000,
            wall_ms: seconds * 1000,
        }
    }

    #[test]
    fn what_stays_wrong_is_told_ever_more_seldom() {
        let pace = Pace::default();
        let told: Vec<i64> = (0..4 * 3600)
            .step_by(10)
            .filter(|second| {
                let reason = format!("m (unmount for {second}s) did not end within {second} s");
                pace.is_due("pod", &reason, at(*second))
            })
            .collect();
        assert_eq!(
            told,
            [0, 60, 180, 420, 900, 1860, 3780, 7380, 10980],
            "then every hour"
        );
    }

    #[test]
    fn each_new_reason_is_told_once_and_so_is_one_that_comes_back() {
        let pace = Pace::default();
        let due = |reasons: &[&str], second| pace.due("pod", reasons, at(second));
        assert_eq!(due(&["/v1 is busy", "/v2 is busy"], 0), [true, true]);
        assert_eq!(due(&["/v2 is busy", "/v1 is busy"], 10), [false, false]);
        assert_eq!(due(&["/v1 is busy", "/v3 is busy"], 20), [false, true]);
        assert_eq!(due(&["/v2 is busy"], 30), [true]);
        assert_eq!(due(&["/v2 is busy", "/v2 is busy"], 95), [true, false]);
        assert!(pace.is_due("another", "/v2 is busy", at(95)));
        pace.over("pod");
        assert_eq!(due(&["/v2 is busy"], 96), [true]);
    }
}
