//! Unit tests of parsing; behaviour across files and flags is in `tests/kubeletconfig.rs`.

use std::time::Duration;

use super::quantity::{parse_bytes, parse_log_size};
use super::yaml::{Value, parse};
use super::*;

#[test]
fn go_durations_read_and_written() {
    for (text, nanos, written) in [
        ("0", 0, "0s"),
        ("20s", 20_000_000_000, "20s"),
        ("1m0s", 60_000_000_000, "1m0s"),
        ("2h45m", 9_900_000_000_000, "2h45m0s"),
        ("300ms", 300_000_000, "300ms"),
        ("1.5s", 1_500_000_000, "1.5s"),
        (".5m", 30_000_000_000, "30s"),
        ("1us", 1_000, "1µs"),
        ("1µs", 1_000, "1µs"),
        ("1h1ms", 3_600_001_000_000, "1h0m0.001s"),
        ("+7ns", 7, "7ns"),
    ] {
        let duration = parse_duration(text).unwrap();
        assert_eq!(duration, Duration::from_nanos(nanos), "{text}");
        assert_eq!(format_duration(duration), written, "{text}");
        assert_eq!(parse_duration(written), Ok(duration), "{text}");
    }
}

#[test]
fn bad_durations_say_what_to_write() {
    for (text, says) in [
        ("", "not a duration"),
        ("20", "has no unit; write it like \"20s\""),
        ("-5s", "is negative"),
        ("5d", "not a duration"),
        ("5 s", "not a duration"),
        ("1..5s", "not a duration"),
        (".s", "not a duration"),
        ("1m2x", "not a duration"),
        ("9999999h", "longer than 292 years"),
        (
            "99999999999999999999999999999999999999999s",
            "not a duration",
        ),
    ] {
        let message = parse_duration(text).unwrap_err();
        assert!(message.contains(says), "{text:?}: {message}");
    }
}

#[test]
fn byte_quantities() {
    for (text, bytes) in [
        ("10Mi", 10 << 20),
        ("1.5Ki", 1536),
        ("500M", 500_000_000),
        ("7", 7),
        ("0.3", 1),
        ("1k", 1000),
    ] {
        assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
    }
    for text in ["", "Mi", "10MB", "-1", "1e3x", "8Ei", "1.2.3"] {
        assert!(parse_bytes(text).is_err(), "{text}");
    }
}

#[test]
fn a_negative_log_size_means_never() {
    assert_eq!(parse_log_size("-1"), Ok(NEVER_ROTATE));
    assert_eq!(parse_log_size("-10Mi"), Ok(NEVER_ROTATE));
    assert_eq!(parse_log_size("10Mi"), Ok(10 << 20));
    for text in ["-", "-0", "--1", "-x"] {
        assert!(parse_log_size(text).is_err(), "{text}");
    }
}

#[test]
fn yaml_tree_knows_the_place_of_keys_and_values() {
    let root = parse("a: 1\nb:\n  - x\n  - {c: true}\n").unwrap();
    let Value::Map(entries) = root.value else {
        panic!("not a map");
    };
    let places: Vec<_> = entries
        .iter()
        .map(|e| {
            (
                e.key.as_str(),
                e.place.line,
                e.place.column,
                e.node.place.line,
            )
        })
        .collect();
    assert_eq!(places, [("a", 1, 1, 1), ("b", 2, 1, 3)]);
    let Value::List(items) = &entries[1].node.value else {
        panic!("not a list");
    };
    assert_eq!((items[0].place.line, items[0].place.column), (3, 5));
}

#[test]
fn endpoints() {
    for (text, path) in [
        ("unix:///run/c.sock", "/run/c.sock"),
        ("/run/c.sock", "/run/c.sock"),
        ("unix:/run/c.sock", "/run/c.sock"),
        ("/run/a:b.sock", "/run/a:b.sock"),
    ] {
        let endpoint = Endpoint::parse(text).unwrap();
        assert_eq!(endpoint.path(), std::path::Path::new(path));
        assert_eq!(endpoint.to_string(), format!("unix://{path}"));
    }
    let long = format!("/{}", "x".repeat(107));
    for (text, says) in [
        ("", "not an absolute path"),
        ("run/c.sock", "not an absolute path"),
        ("unix://run/c.sock", "not an absolute path"),
        ("tcp://1.2.3.4:5", "\"tcp\" endpoints are not supported"),
        (
            "npipe:////./pipe/x",
            "\"npipe\" endpoints are not supported",
        ),
        (long.as_str(), "has at most 107"),
    ] {
        let message = Endpoint::parse(text).unwrap_err();
        assert!(message.contains(says), "{text:?}: {message}");
    }
}

#[test]
fn a_slip_is_a_misspelling_and_another_word_is_not() {
    let known = || fields::FIELDS.iter().map(|field| field.name);
    for (given, meant) in [
        ("staticpodpath", Some("staticPodPath")),
        ("CLUSTERDNS", Some("clusterDNS")),
        ("clusterDns", Some("clusterDNS")),
        ("maxPod", Some("maxPods")),
        ("sycnFrequency", Some("syncFrequency")),
        ("syncFrequncy", Some("syncFrequency")),
        ("sycnFrequncy", Some("syncFrequency")),
        ("imageMinimunGCAge", Some("imageMinimumGCAge")),
        ("tlsCiperSuits", Some("tlsCipherSuites")),
        ("nothingLikeIt", None),
        ("x", None),
        ("", None),
        // Words that a newer release may well have beside those there are.
        ("imageMedianGCAge", None),
        ("maxNodes", None),
        ("evictionHardV2", None),
        ("topologyManagerScopes2", None),
        ("podLogsQPS", None),
    ] {
        assert_eq!(fields::misspelt(given, known()), meant, "{given}");
    }
    // The release that brought the one knew the other: they are two fields and not one misspelt.
    assert_eq!(
        fields::misspelt("imageMaximumGCAge", ["imageMinimumGCAge"]),
        None
    );
}

/// Each field of upstream's would be known as newer by an agent that knew all fields but this one.
#[test]
fn no_field_of_upstreams_is_taken_for_another_misspelt() {
    for field in fields::FIELDS {
        let others = fields::FIELDS.iter().map(|other| other.name);
        let others = others.filter(|other| *other != field.name);
        assert_eq!(fields::misspelt(field.name, others), None, "{}", field.name);
    }
}

#[test]
fn field_and_flag_names_are_given_once() {
    let mut names: Vec<_> = fields::FIELDS.iter().map(|field| field.name).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
    let flags: Vec<_> = unsupported::UNSUPPORTED_FLAGS
        .iter()
        .map(|f| f.name)
        .collect();
    let mut sorted = flags.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted.len(), flags.len());
}

proptest::proptest! {
    #[test]
    fn written_durations_are_read_back(nanos in 0..=i64::MAX.unsigned_abs()) {
        let duration = Duration::from_nanos(nanos);
        proptest::prop_assert_eq!(parse_duration(&format_duration(duration)), Ok(duration));
    }

    #[test]
    fn no_text_makes_a_parser_panic(text in "[-+.0-9a-zµ\u{20ac} :{}\\[\\]&*\n]{0,40}") {
        let parsed = (parse_duration(&text).is_ok(), parse_bytes(&text).is_ok());
        proptest::prop_assert!(!(parsed.0 && text.contains('-')));
        proptest::prop_assert!(!(parsed.1 && text.contains('-')));
        if let Err(error) = parse(&text) {
            proptest::prop_assert!(!error.message.contains('\n'));
        }
        if let Ok(endpoint) = Endpoint::parse(&text) {
            proptest::prop_assert!(endpoint.path().is_absolute());
        }
    }
}
