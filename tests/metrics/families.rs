//! Reading the text format, without the agent's code.

use std::collections::{BTreeMap, BTreeSet};

/// A family of the text format.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Family {
    pub kind: String,
    pub help: String,
    /// Names of labels, `le` of histograms left out.
    pub labels: BTreeSet<String>,
    /// Names of samples.
    pub samples: BTreeSet<String>,
    /// Bounds of a histogram's buckets, as they are written.
    pub buckets: Vec<String>,
}

pub fn families(text: &str) -> BTreeMap<String, Family> {
    let mut found: BTreeMap<String, Family> = BTreeMap::new();
    let mut current = String::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            let family = found.entry(name.to_owned()).or_default();
            family.help = help.trim_end_matches('.').to_owned();
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            current = name.to_owned();
            found.entry(current.clone()).or_default().kind = kind.to_owned();
        } else {
            let family = found
                .get_mut(&current)
                .expect("a sample stands below its head");
            let end = line.find(['{', ' ']).unwrap();
            let name = &line[..end];
            let base = ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|suffix| {
                    name.strip_suffix(suffix)
                        .filter(|_| family.kind == "histogram")
                })
                .unwrap_or(name);
            assert_eq!(base, current, "a sample of another family: {line}");
            family.samples.insert(name.to_owned());
            if let Some((_, rest)) = line.split_once("le=\"").filter(|_| base != name) {
                let bound = rest.split('"').next().unwrap_or_default().to_owned();
                if !family.buckets.contains(&bound) {
                    family.buckets.push(bound);
                }
            }
            if let Some(labels) = line[end..].strip_prefix('{') {
                let names = labels.split("=\"").map(|part| {
                    let word = part.rsplit(|c: char| !(c.is_alphanumeric() || c == '_'));
                    word.into_iter().next().unwrap_or_default().to_owned()
                });
                // The last part follows the last label.
                let count = labels.matches("=\"").count();
                family
                    .labels
                    .extend(names.take(count).filter(|name| name != "le"));
            }
        }
    }
    found.retain(|_, family| !family.samples.is_empty());
    found
}

/// All names of samples.
pub fn samples(texts: &[&str]) -> BTreeSet<String> {
    texts
        .iter()
        .flat_map(|text| families(text).into_values())
        .flat_map(|family| family.samples)
        .collect()
}

#[test]
fn families_are_read() {
    let text = "# HELP h A thing.\n# TYPE h histogram\nh_bucket{le=\"1\",verb=\"GET\"} 1\nh_sum{verb=\"GET\"} 1\n\
                # HELP e Empty\n# TYPE e gauge\n";
    let found = families(text);
    assert_eq!(found.len(), 1);
    assert_eq!(found["h"].labels, ["verb".to_owned()].into());
    assert_eq!(found["h"].help, "A thing");
    assert_eq!(found["h"].samples.len(), 2);
    assert_eq!(found["h"].buckets, ["1"]);
}
