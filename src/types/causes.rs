//! Errors with all that caused them, for logs, events and records, whose readers see nothing but a text.

use std::error::Error;

/// Returns the text of an error, followed by those of its sources: `a: b: c`. Leaves out a source that the text already
/// ends with, since some errors have their source in their own text.
pub fn causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let more = error.to_string();
        if !text.ends_with(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("write the file")]
    struct Silent {
        source: io::Error,
    }

    #[derive(Debug, thiserror::Error)]
    #[error("start the pod: {source}")]
    struct Shown {
        source: Silent,
    }

    #[test]
    fn every_source_is_shown_once() {
        let silent = || Silent {
            source: io::Error::other("the disk is full"),
        };
        assert_eq!(causes(&silent()), "write the file: the disk is full");
        assert_eq!(
            causes(&Shown { source: silent() }),
            "start the pod: write the file: the disk is full"
        );
    }
}
