use proptest::prelude::*;

use super::*;

fn payload(paths: &[&str]) -> Payload {
    let mut payload = Payload::default();
    for path in paths {
        payload.put(path, path.as_bytes().to_vec(), 0o644).unwrap();
    }
    payload
}

#[test]
fn of_two_sources_of_one_file_the_later_wins() {
    let mut payload = payload(&["a"]);
    payload.put(".//a", b"later".to_vec(), 0o400).unwrap();
    assert_eq!(payload.files.len(), 1);
    assert_eq!(payload.files["a"].data, b"later");
}

#[test]
fn a_file_cannot_be_below_a_file() {
    for (paths, collides) in [
        (&["a/b", "a/c", "ab"][..], false),
        (&["a", "a.b/c", "a0/b"][..], false),
        (&["a", "a.b", "a/b"][..], true),
        (&["a/b/c/d", "a/b"][..], true),
    ] {
        let result = payload(paths).check_collisions();
        assert_eq!(result.is_err(), collides, "{paths:?} {result:?}");
    }
}

#[test]
fn modes_are_those_of_files() {
    for (own, want) in [
        (None, Some(0o644)),
        (Some(0), Some(0)),
        (Some(0o777), Some(0o777)),
        (Some(0o1000), None),
        (Some(-1), None),
        (Some(i32::MAX), None),
        (Some(i32::MIN), None),
    ] {
        assert_eq!(mode(own, 0o644, "f").ok(), want, "{own:?}");
    }
}

#[test]
fn contents_that_differ_in_anything_have_other_digests() {
    let base = payload(&["a", "b"]);
    let mut others = vec![payload(&["a"]), payload(&["ab"]), Payload::default()];
    for change in 0..3 {
        let mut other = base.clone();
        let file = other.files.get_mut("a").unwrap();
        match change {
            0 => file.mode = 0o600,
            1 => file.owner = Some(7),
            _ => file.data.push(b'x'),
        }
        others.push(other);
    }
    others.push(base);
    let digests: std::collections::BTreeSet<_> = others.iter().map(Payload::digest).collect();
    assert_eq!(digests.len(), others.len());
}

proptest! {
    /// A path that is let through stays in the volume, and is the same when it is cleaned again.
    #[test]
    fn no_path_leads_out(path in "[./a-c\u{0}]{0,12}|(\\.{1,3}/){0,4}[a-z.]{0,4}") {
        if let Ok(cleaned) = clean(&path) {
            let parts: Vec<&str> = cleaned.split('/').collect();
            prop_assert!(parts.iter().all(|p| !p.is_empty() && *p != "." && *p != ".."));
            prop_assert!(!cleaned.starts_with("..") && !cleaned.contains('\0'));
            prop_assert_eq!(clean(&cleaned).unwrap(), cleaned.clone());
            // The same file as what was written.
            let plain = |p: &str| -> Vec<String> {
                let parts = p.split('/').filter(|p| !p.is_empty() && *p != ".");
                parts.map(str::to_owned).collect()
            };
            prop_assert_eq!(plain(&path), plain(&cleaned));
        } else {
            let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty() && *p != ".").collect();
            prop_assert!(
                path.starts_with('/') || path.contains('\0') || parts.contains(&"..")
                    || parts.first().is_none_or(|p| p.starts_with(".."))
            );
        }
    }
}

#[test]
fn a_certificate_is_shown_as_bundle_key_and_chain_to_its_pod_alone() {
    let of = |security: serde_json::Value| -> Pod {
        serde_json::from_value(serde_json::json!({"spec": {"containers": [{"name": "c"}], "securityContext": security}}))
            .unwrap()
    };
    let volume: Volume = serde_json::from_value(serde_json::json!({"name": "v", "projected": {
        "defaultMode": 0o444, "sources": [
            {"downwardAPI": {}},
            {"podCertificate": {"signerName": "a.b/c", "keyType": "ED25519", "credentialBundlePath": "all/bundle",
                "keyPath": "key", "certificateChainPath": "chain"}},
            {"podCertificate": {"signerName": "a.b/c", "keyType": "ED25519", "keyPath": "other"}},
    ]}}))
    .unwrap();
    let mut sources = Sources::default();
    for (index, name) in [(1, "one"), (2, "two")] {
        let volume = "v".to_owned();
        let found = PodKeyPair {
            key: crate::core::pod_certificates::PrivateKey::new(format!("key {name};")),
            chain: format!("chain {name};"),
        };
        let of = CertificateRef { volume, index };
        sources.certificates.insert(of, Ok(found));
    }
    let files = |pod: &Pod| collect(pod, &volume, &sources).unwrap().files;
    let shown = files(&of(serde_json::json!({})));
    let shown: Vec<_> = shown
        .iter()
        .map(|(path, file)| {
            (
                path.as_str(),
                String::from_utf8(file.data.clone()).unwrap(),
                file.mode,
            )
        })
        .collect();
    assert_eq!(
        shown,
        [
            ("all/bundle", "key one;chain one;".to_owned(), 0o444),
            ("chain", "chain one;".to_owned(), 0o444),
            ("key", "key one;".to_owned(), 0o444),
            ("other", "key two;".to_owned(), 0o444),
        ]
    );
    for file in files(&of(serde_json::json!({"runAsUser": 7}))).values() {
        assert_eq!((file.mode, file.owner), (0o600, Some(7)));
    }
    for file in files(&of(serde_json::json!({"fsGroup": 8}))).values() {
        assert_eq!((file.mode, file.owner), (0o640, None));
    }
    let waits = CertificateRef {
        volume: "v".to_owned(),
        index: 2,
    };
    sources
        .certificates
        .insert(waits, Err("not yet".to_owned()));
    let error = collect(&of(serde_json::json!({})), &volume, &sources).unwrap_err();
    assert_eq!(
        error.to_string(),
        "failed to get the pod certificate: not yet"
    );
}
