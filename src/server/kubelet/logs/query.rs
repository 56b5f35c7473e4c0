//! `PodLogOptions` as a query. Upstream: its conversion from `url.Values`, and `ValidatePodLogOptions`.

use std::time::Duration;

use axum::http::StatusCode;

use super::Refusal;
use crate::container_logs::{LogOptions, Streams};
use crate::types::Stamp;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Query {
    pub(super) options: LogOptions,
    /// Of the container that ended before the present one.
    pub(super) previous: bool,
}

/// Reads the query; the first of several values counts.
pub(super) fn parse(query: &str, now: Stamp) -> Result<Query, Refusal> {
    let pairs: Vec<_> = form_urlencoded::parse(query.as_bytes()).collect();
    let value = |name: &str| pairs.iter().find(|(n, _)| n == name).map(|(_, v)| &**v);
    let undecodable = || {
        let text = r#"{"message": "Unable to decode query."}"#;
        Refusal::new(StatusCode::BAD_REQUEST, text)
    };
    let invalid = || {
        let text = r#"{"message": "Invalid request."}"#;
        Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, text)
    };
    // Absent, "false" and "0" are false, the empty value is true.
    let flag = |name| {
        value(name).is_some_and(|value| !value.eq_ignore_ascii_case("false") && value != "0")
    };
    let number = |name| match value(name) {
        None => Ok(None),
        Some(value) => value.parse::<i64>().map(Some).map_err(|_| undecodable()),
    };
    let since_time = match value("sinceTime") {
        None | Some("" | "null") => None,
        Some(time) => Some(time.parse::<jiff::Timestamp>().map_err(|_| undecodable())?),
    };
    let since_seconds = number("sinceSeconds")?;
    let limit = number("limitBytes")?;
    // "tail" is the name of old clients.
    let tail = match value("tail") {
        Some("all") => None,
        None | Some("") => number("tailLines")?,
        Some(_) => number("tail")?,
    };
    let stream = value("stream");
    let streams = match stream {
        None | Some("All") => Streams::All,
        Some("Stdout") => Streams::Stdout,
        Some("Stderr") => Streams::Stderr,
        Some(_) => return Err(invalid()),
    };
    if tail.is_some_and(|tail| tail < 0)
        || limit.is_some_and(|limit| limit < 1)
        || since_seconds.is_some_and(|seconds| seconds < 1)
        || (since_seconds.is_some() && since_time.is_some())
        || (tail.is_some() && streams != Streams::All)
    {
        return Err(invalid());
    }
    let unsigned = |number: Option<i64>| number.and_then(|number| u64::try_from(number).ok());
    let ago = unsigned(since_seconds).map(Duration::from_secs);
    let since = ago.map(|ago| {
        let at = now.minus(ago).wall_ms;
        jiff::Timestamp::from_millisecond(at).unwrap_or(jiff::Timestamp::MIN)
    });
    Ok(Query {
        previous: flag("previous"),
        options: LogOptions {
            follow: flag("follow"),
            tail: unsigned(tail),
            since: since.or(since_time),
            limit: unsigned(limit),
            timestamps: flag("timestamps"),
            streams,
        },
    })
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
    fn names_and_values_are_upstreams() {
        let read = |query| parse(query, at(1000)).unwrap();
        assert_eq!(read(""), Query::default());
        let all = read("follow=true&previous=1&timestamps=&tailLines=7&limitBytes=9&stream=All");
        assert!(all.options.follow && all.previous && all.options.timestamps);
        assert_eq!((all.options.tail, all.options.limit), (Some(7), Some(9)));
        let none = read("follow=False&previous=0&tail=all&tailLines=7&container=x");
        assert_eq!(none, Query::default());
        assert_eq!(read("tail=5").options.tail, Some(5));
        assert_eq!(read("stream=Stderr").options.streams, Streams::Stderr);
        let since = |query| read(query).options.since.map(|at| at.as_second());
        assert_eq!(since("sinceSeconds=60"), Some(940));
        assert_eq!(
            since("sinceTime=1970-01-01T01%3A00%3A10%2B01%3A00"),
            Some(10)
        );
        assert_eq!(
            since("sinceSeconds=9223372036854775807"),
            Some(-377_705_023_201)
        );
    }

    #[test]
    fn what_cannot_be_read_is_a_bad_request_and_what_makes_no_sense_is_unprocessable() {
        for query in [
            "tailLines=x",
            "tailLines=",
            "limitBytes=1.5",
            "sinceTime=yesterday",
        ] {
            let refusal = parse(query, at(0)).unwrap_err();
            assert_eq!(refusal.status, StatusCode::BAD_REQUEST, "{query}");
            assert_eq!(refusal.text, r#"{"message": "Unable to decode query."}"#);
        }
        for query in [
            "tailLines=-1",
            "limitBytes=0",
            "sinceSeconds=0",
            "sinceSeconds=5&sinceTime=2026-01-01T00:00:00Z",
            "stream=stdout",
            "stream=Stdout&tailLines=1",
        ] {
            let refusal = parse(query, at(0)).unwrap_err();
            assert_eq!(refusal.status, StatusCode::UNPROCESSABLE_ENTITY, "{query}");
            assert_eq!(refusal.text, r#"{"message": "Invalid request."}"#);
        }
    }
}
