//! The writes of a test that a current API server would refuse.

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Violation, Write, violations};

/// What fake API servers refused by the rules of [`super`]. Clones are the same list.
#[derive(Clone, Debug, Default)]
pub struct InvalidWrites(Arc<Mutex<Vec<String>>>);

impl InvalidWrites {
    /// Checks a write, which `request` names, and keeps what is wrong with it.
    pub fn check(&self, request: &str, write: &Write<'_>) -> Vec<Violation> {
        let violations = violations(write);
        let texts: Vec<String> = violations.iter().map(ToString::to_string).collect();
        self.record(request, &texts);
        violations
    }

    /// Keeps what is wrong with a write. Nothing is no invalid write.
    pub fn record(&self, request: &str, violations: &[String]) {
        if violations.is_empty() {
            return;
        }
        let mut line = format!("{request}:");
        for violation in violations {
            line.push_str(&format!("\n    {violation}"));
        }
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(line);
    }

    /// Returns the invalid writes so far: the request, and below it a line for each violation.
    pub fn list(&self) -> Vec<String> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.clone()
    }

    /// Returns [`InvalidWrites::list`] and forgets it: for a test that makes them on purpose.
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The same list, in the hands of a test: dropping it while there are invalid writes fails the test.
#[derive(Clone, Debug, Default)]
pub struct NoInvalidWrites(InvalidWrites);

impl NoInvalidWrites {
    /// Returns the list for those who add to it, which may be dropped at any time.
    pub fn writes(&self) -> InvalidWrites {
        self.0.clone()
    }
}

impl Deref for NoInvalidWrites {
    type Target = InvalidWrites;

    fn deref(&self) -> &InvalidWrites {
        &self.0
    }
}

impl Drop for NoInvalidWrites {
    fn drop(&mut self) {
        // Whatever fails the test already comes first.
        if std::thread::panicking() {
            return;
        }
        let all = self.0.list();
        assert!(
            all.is_empty(),
            "a current API server refuses {} writes of this test:\n{}",
            all.len(),
            all.join("\n")
        );
    }
}
