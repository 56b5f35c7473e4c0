//! The `CredentialProviderConfig` file: read as strictly as upstream reads it, or entry by entry where that fails.
//!
//! **Invariant:** an entry that cannot be used disables itself alone.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::credentials::CredentialError;

const KIND: &str = "CredentialProviderConfig";
const VERSIONS: [&str; 3] = [
    "kubelet.config.k8s.io/v1",
    "kubelet.config.k8s.io/v1beta1",
    "kubelet.config.k8s.io/v1alpha1",
];

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ConfigFile {
    api_version: String,
    kind: String,
    providers: Vec<ProviderConfig>,
}

/// An entry of `providers`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct ProviderConfig {
    pub(super) name: String,
    pub(super) match_images: Vec<String>,
    pub(super) default_cache_duration: String,
    pub(super) api_version: String,
    #[serde(default)]
    pub(super) args: Option<Vec<String>>,
    #[serde(default)]
    pub(super) env: Option<Vec<EnvVar>>,
    #[serde(default)]
    pub(super) token_attributes: Option<TokenAttributes>,
}

/// `tokenAttributes`: the program gets a token of the pod's service account.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct TokenAttributes {
    pub(super) service_account_token_audience: String,
    pub(super) cache_type: String,
    pub(super) require_service_account: Option<bool>,
    pub(super) required_service_account_annotation_keys: Vec<String>,
    pub(super) optional_service_account_annotation_keys: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EnvVar {
    pub(super) name: String,
    pub(super) value: String,
}

/// An entry that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    /// Images that it is for, as far as it says so.
    pub(super) match_images: Vec<String>,
    /// Why, with its name.
    pub(super) why: String,
}

/// Content of a file.
#[derive(Debug)]
pub(super) struct Parsed<P> {
    pub(super) providers: Vec<P>,
    pub(super) refused: Vec<Refused>,
    /// Fields beside the entries that are not known.
    pub(super) ignored: Vec<String>,
}

/// Reads the configuration `text` of the file at `path`; `new` makes a provider of an entry, and returns its name.
///
/// # Errors
/// The first thing that is wrong.
pub(super) fn parse<P>(
    path: &Path,
    text: &str,
    new: impl Fn(ProviderConfig) -> Result<P, String>,
) -> Result<Vec<P>, CredentialError> {
    let bad = |what| bad(path, what);
    // Without the lines around it: variables of the programs may be passwords.
    let file: ConfigFile =
        serde_saphyr::from_str(text).map_err(|error| bad(error.without_snippet().to_string()))?;
    check_kind(&file.api_version, &file.kind).map_err(bad)?;
    if file.providers.is_empty() {
        return Err(bad(NONE.to_owned()));
    }
    let mut names: Vec<String> = Vec::new();
    let mut providers = Vec::new();
    for one in file.providers {
        check_twice(&mut names, &one.name).map_err(bad)?;
        providers.push(new(one).map_err(bad)?);
    }
    Ok(providers)
}

/// Reads as [`parse`] does, and takes every entry that can be used.
///
/// # Errors
/// The reason why the file has no entries at all.
pub(super) fn parse_each<P>(
    path: &Path,
    text: &str,
    new: impl Fn(ProviderConfig) -> Result<P, String>,
) -> Result<Parsed<P>, CredentialError> {
    let mut parsed = Parsed {
        providers: Vec::new(),
        refused: Vec::new(),
        ignored: Vec::new(),
    };
    if let Ok(providers) = parse(path, text, &new) {
        parsed.providers = providers;
        return Ok(parsed);
    }
    let bad = |what| bad(path, what);
    let file: serde_json::Map<String, Value> =
        serde_saphyr::from_str(text).map_err(|error| bad(error.without_snippet().to_string()))?;
    let word = |field: &str| file.get(field).and_then(Value::as_str).unwrap_or_default();
    check_kind(word("apiVersion"), word("kind")).map_err(bad)?;
    let entries = file.get("providers").and_then(Value::as_array);
    let entries = entries.filter(|entries| !entries.is_empty());
    let entries = entries.ok_or_else(|| bad(NONE.to_owned()))?;
    let known = ["apiVersion", "kind", "providers"];
    let others = file.keys().filter(|field| !known.contains(&field.as_str()));
    parsed.ignored = others.cloned().collect();
    let mut names: Vec<String> = Vec::new();
    for entry in entries {
        let provider = decode(entry)
            .and_then(|one| check_twice(&mut names, &one.name).map(|()| one))
            .and_then(&new);
        match provider {
            Ok(provider) => parsed.providers.push(provider),
            Err(why) => parsed.refused.push(Refused {
                match_images: images_of(entry),
                why,
            }),
        }
    }
    Ok(parsed)
}

const NONE: &str = "at least 1 item in plugins is required: providers is empty";

fn check_kind(api_version: &str, kind: &str) -> Result<(), String> {
    if kind == KIND && VERSIONS.contains(&api_version) {
        return Ok(());
    }
    let version = VERSIONS[0];
    Err(format!(
        "it is a {api_version} {kind}; write kind {KIND} with apiVersion {version}"
    ))
}

/// Notes a name, unless it was there before.
fn check_twice(names: &mut Vec<String>, name: &str) -> Result<(), String> {
    if names.iter().any(|other| other == name) {
        return Err(format!("provider {name} is there twice"));
    }
    names.push(name.to_owned());
    Ok(())
}

/// Reads one entry as the whole file is read: a number counts as text where text is expected.
fn decode(entry: &Value) -> Result<ProviderConfig, String> {
    serde_saphyr::from_str(&entry.to_string()).map_err(|error| {
        let name = entry.get("name").and_then(Value::as_str);
        let name = name.unwrap_or_default();
        // Places are those of a copy in one line, and say nothing.
        let what = error.without_snippet().to_string();
        format!("provider {name:?}: {what}")
    })
}

fn images_of(entry: &Value) -> Vec<String> {
    let images = entry.get("matchImages").and_then(Value::as_array);
    let images = images.into_iter().flatten().filter_map(Value::as_str);
    images.map(str::to_owned).collect()
}

/// An error in the file at `path`.
pub(super) fn bad(path: &Path, what: String) -> CredentialError {
    CredentialError::Config {
        path: path.to_owned(),
        what,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\n";

    fn entry(name: &str, more: &str) -> String {
        format!(
            "- {{name: {name}, apiVersion: v, defaultCacheDuration: 1m, matchImages: [{name}.io]{more}}}\n"
        )
    }

    fn read(text: &str) -> Result<Parsed<String>, CredentialError> {
        parse_each(Path::new("p.yaml"), text, |one| match one.name.as_str() {
            "wrong" => Err("provider \"wrong\": for this test".to_owned()),
            _ => Ok(one.name),
        })
    }

    #[test]
    fn a_bad_entry_disables_itself_alone() {
        let (good, last) = (
            entry("good", ""),
            entry("last", ", env: [{name: A, value: '1'}]"),
        );
        for (bad, images, says) in [
            (entry("odd", ", unknown: 1"), vec!["odd.io"], "unknown"),
            (entry("odd", ", env: [{name: A}]"), vec!["odd.io"], "value"),
            (
                entry("odd", ", args: 1"),
                vec!["odd.io"],
                "provider \"odd\"",
            ),
            (entry("wrong", ""), vec!["wrong.io"], "for this test"),
            (entry("good", ""), vec!["good.io"], "good is there twice"),
            ("- {name: odd}\n".to_owned(), vec![], "missing"),
            ("- text\n".to_owned(), vec![], "provider \"\""),
            ("- \n".to_owned(), vec![], "provider \"\""),
        ] {
            let parsed = read(&format!("{HEAD}providers:\n{good}{bad}{last}")).unwrap();
            assert_eq!(parsed.providers, ["good", "last"], "{bad}");
            let [refused] = parsed.refused.as_slice() else {
                panic!("{bad}: {:?}", parsed.refused);
            };
            assert!(refused.why.contains(says), "{bad}: {}", refused.why);
            assert_eq!(refused.match_images, images, "{bad}");
        }
        let parsed = read(&format!("{HEAD}more: 1\nproviders:\n{good}")).unwrap();
        assert_eq!(
            (parsed.providers, parsed.ignored),
            (vec!["good".to_owned()], vec!["more".to_owned()])
        );
    }

    #[test]
    fn a_file_without_entries_is_refused() {
        for (text, says) in [
            ("{", "p.yaml"),
            ("text", "p.yaml"),
            ("kind: Pod\n", "write kind CredentialProviderConfig"),
            (HEAD, "at least 1 item"),
            (format!("{HEAD}providers: []\n").as_str(), "at least 1 item"),
            (format!("{HEAD}providers: x\n").as_str(), "at least 1 item"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
