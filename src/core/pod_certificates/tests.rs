use serde_json::json;

use super::*;
use crate::types::BootId;

fn at(wall_seconds: i64) -> Stamp {
    Stamp {
        boot: BootId(1),
        boottime_ms: wall_seconds * 1000,
        wall_ms: wall_seconds * 1000,
    }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Received at 0, to be replaced from 3,000 s on, valid for 7,200 s.
fn certificate(jitter_ms: i64) -> Issued {
    let certificate = Certificate {
        chain: "chain".to_owned(),
        begin_refresh_ms: 3_000_000,
        not_after_ms: 7_200_000,
    };
    Issued::new(
        PrivateKey::new("key".to_owned()),
        certificate,
        at(0),
        jitter_ms,
    )
}

fn of(issued: Issued) -> CertificateRecord {
    CertificateRecord {
        issued: Some(issued),
        ..CertificateRecord::default()
    }
}

fn pending() -> Pending {
    Pending {
        name: "req-1".to_owned(),
        key: PrivateKey::new("key".to_owned()),
        request: String::new(),
    }
}

fn denied() -> End {
    End {
        verdict: Verdict::Denied,
        reason: "UnsupportedKeyType".to_owned(),
        message: "use \"ED25519\"".to_owned(),
    }
}

#[test]
fn the_next_request_is_made_at_the_begin_of_refresh_with_jitter() {
    for (jitter_ms, now, step) in [
        (0, 0, Step::Rest(seconds(3000))),
        (0, 2999, Step::Rest(seconds(1))),
        (0, 3000, Step::Request),
        (120_000, 3000, Step::Rest(seconds(120))),
        (120_000, 3120, Step::Request),
        // Never after its end.
        (9_000_000, 7199, Step::Rest(seconds(1))),
        (9_000_000, 7200, Step::Request),
    ] {
        let record = of(certificate(jitter_ms));
        assert_eq!(record.next_step(at(now)), step, "{jitter_ms} {now}");
    }
}

#[test]
fn a_clock_that_is_ahead_makes_one_request_in_five_minutes() {
    let mut ahead = at(90_000);
    ahead.boottime_ms = 0;
    let mut issued = certificate(0);
    issued.received = ahead;
    assert_eq!(
        of(issued.clone()).next_step(ahead),
        Step::Rest(seconds(300))
    );
    let later = ahead.plus(seconds(300));
    assert_eq!(of(issued).next_step(later), Step::Request);
}

#[test]
fn a_request_goes_on_and_a_refusal_is_final() {
    let mut record = CertificateRecord::default();
    assert_eq!(record.next_step(at(0)), Step::Request);
    record = of(certificate(0));
    record.pending = Some(pending());
    assert_eq!(record.next_step(at(0)), Step::Request);
    record.end = Some(denied());
    assert_eq!(record.next_step(at(9000)), Step::End);
    assert!(record.usable(at(7199)).is_some(), "it is valid to its end");
    assert!(record.usable(at(7200)).is_none());
}

#[test]
fn an_old_certificate_is_told_once_as_overdue_and_once_as_expired() {
    let mut issued = certificate(0);
    for (now, told) in [
        (3000, None),
        (3600, None),
        (3601, Some(Notice::Overdue)),
        (5000, None),
        (7200, None),
        (7201, Some(Notice::Expired)),
        (9000, None),
    ] {
        let due = issued.notice(at(now));
        assert_eq!(due, told, "{now}");
        issued.told = due.or(issued.told);
    }
}

#[test]
fn pauses_double_up_to_their_longest() {
    let all = |pause: fn(u32) -> Duration| [1, 2, 3, 7, 20, u32::MAX].map(|n| pause(n).as_millis());
    assert_eq!(all(poll_pause), [200, 400, 800, 12_800, 15_000, 15_000]);
    assert_eq!(
        all(retry_pause),
        [1000, 2000, 4000, 64_000, 300_000, 300_000]
    );
}

const PEM: &str = "-----BEGIN CERTIFICATE-----\nb25l\n-----END CERTIFICATE-----\n";

fn status(condition: &str) -> Value {
    json!({
        "conditions": [{"type": condition, "status": "True", "reason": "R", "message": "M"}],
        "certificateChain": format!("text\n{PEM}more text\n{PEM}"),
        "notBefore": "2026-01-01T00:00:00Z",
        "beginRefreshAt": "2026-01-01T00:10:00Z",
        "notAfter": "2026-01-01T01:00:00Z",
    })
}

#[test]
fn an_answer_is_read_from_its_condition() {
    for waiting in [
        Value::Null,
        json!({}),
        json!({"conditions": []}),
        json!({"conditions": [{"type": "Denied", "status": "False"}]}),
        status("Other"),
    ] {
        assert_eq!(read_answer(&waiting), Ok(Answer::Pending), "{waiting}");
    }
    for (condition, verdict) in [("Denied", Verdict::Denied), ("Failed", Verdict::Failed)] {
        let end = End {
            verdict,
            reason: "R".to_owned(),
            message: "M".to_owned(),
        };
        assert_eq!(read_answer(&status(condition)), Ok(Answer::Ended(end)));
    }
    let certificate = Certificate {
        chain: PEM.repeat(2),
        begin_refresh_ms: 1_767_226_200_000,
        not_after_ms: 1_767_229_200_000,
    };
    assert_eq!(
        read_answer(&status("Issued")),
        Ok(Answer::Issued(certificate))
    );
}

#[test]
fn an_issued_request_that_lacks_something_names_it() {
    for field in ["certificateChain", "beginRefreshAt", "notAfter"] {
        for wrong in [Value::Null, json!("x"), json!(7)] {
            let mut status = status("Issued");
            status[field] = wrong.clone();
            assert_eq!(read_answer(&status), Err(field), "{wrong}");
        }
    }
}

#[test]
fn a_record_reads_back_and_shows_no_key() {
    let record = CertificateRecord {
        issued: Some(Issued {
            told: Some(Notice::Overdue),
            ..certificate(0)
        }),
        pending: Some(pending()),
        end: Some(denied()),
    };
    let text = serde_json::to_string(&record).unwrap();
    assert_eq!(
        serde_json::from_str::<CertificateRecord>(&text).unwrap(),
        record
    );
    assert!(!format!("{record:?}").contains("\"key\""));
    let empty: CertificateRecord = serde_json::from_str("{}").unwrap();
    assert_eq!(empty, CertificateRecord::default());
    let (reason, text) = denied().event("ns/req-1");
    assert_eq!(reason, "Denied");
    assert_eq!(
        text,
        r#"PodCertificateRequest ns/req-1 was denied, reason="UnsupportedKeyType", message="use \"ED25519\"""#
    );
}
