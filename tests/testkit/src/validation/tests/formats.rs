use super::super::formats::{
    cidr, dns_label, dns_subdomain, ip, is_dual_stack, label_value, path_segment, qualified_name,
    quantity,
};

type Format = fn(&str) -> Option<String>;

#[test]
fn formats_take_what_a_server_takes() {
    let long = "a".repeat(64);
    let longest = vec!["a".repeat(63); 4].join(".")[..253].to_owned();
    let longer = format!("{longest}.a");
    let rows: [(&str, Format, &[&str], &[&str]); 7] = [
        (
            "label",
            dns_label,
            &["a", "a-1"],
            &["", "A", "-a", "a.b", &long],
        ),
        (
            "subdomain",
            dns_subdomain,
            &["a", "a.b-c.1", &longest],
            &["", "a..b", "a.", "a_b", &longer],
        ),
        (
            "segment",
            path_segment,
            &["A b", "..."],
            &[".", "..", "a/b", "a%b"],
        ),
        (
            "qualified name",
            qualified_name,
            &["a", "A_b.c", "example.com/Ab"],
            &["", "/a", "a/", "a/b/c", "Example.com/a", "-a", &long],
        ),
        (
            "label value",
            label_value,
            &["", "a", "A.b_c-d"],
            &["-a", "a b", &long],
        ),
        (
            "address",
            ip,
            &["10.0.0.1", "fd00::1", "FD00:0::1"],
            &["", "10.0.0", "010.0.0.1", "::ffff:10.0.0.1", "10.0.0.1/8"],
        ),
        (
            "network",
            cidr,
            &["10.0.0.0/8", "fd00::/64", "0.0.0.0/0", "::/0"],
            &[
                "10.0.0.0",
                "10.0.0.1/8",
                "10.0.0.0/33",
                "::ffff:10.0.0.0/104",
            ],
        ),
    ];
    for (what, format, good, bad) in rows {
        for value in good {
            assert_eq!(format(value), None, "{what} {value:?}");
        }
        for value in bad {
            assert!(format(value).is_some(), "{what} {value:?}");
        }
    }
}

#[test]
fn two_addresses_are_of_two_families() {
    assert!(is_dual_stack(["10.0.0.1", "fd00::1"].into_iter()));
    assert!(is_dual_stack(["fd00::1"].into_iter()));
    assert!(!is_dual_stack(["10.0.0.1", "10.0.0.2"].into_iter()));
    assert!(!is_dual_stack(
        ["fd00::1", "10.0.0.1", "fd00::2"].into_iter()
    ));
}

#[test]
fn quantities_are_read_as_a_server_reads_them() {
    for (value, nanos) in [
        ("1", Some(1_000_000_000)),
        ("500m", Some(500_000_000)),
        (".5", Some(500_000_000)),
        ("1Ki", Some(1024 * 1_000_000_000)),
        ("1e3", Some(1000 * 1_000_000_000)),
        ("2E", Some(2_000_000_000_000_000_000 * 1_000_000_000)),
        ("-1", Some(-1_000_000_000)),
        ("1n", Some(1)),
        ("", None),
        ("1x", None),
        ("1.2.3", None),
        ("k", None),
    ] {
        assert_eq!(quantity(value), nanos, "{value:?}");
    }
}
