//! Content negotiation of `/statusz` and `/flagz`: text for people, or a versioned object for programs, by `Accept`.
//! Upstream: `zpages`, with `NegotiateOutputMediaType`.

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

const GROUP: &str = "config.k8s.io";
/// Versions that are spoken; they say the same.
const VERSIONS: [&str; 2] = ["v1alpha1", "v1beta1"];

/// Format that a client accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// `text/plain`, or anything.
    Text,
    /// An object of this version.
    Object(&'static str),
}

/// The first of the media types in `Accept` that `kind` can be given as; `None` when there is none.
pub(super) fn wanted(headers: &HeaderMap, kind: &str) -> Option<Wanted> {
    let mut accepted = headers.get_all(header::ACCEPT).iter().peekable();
    if accepted.peek().is_none() {
        return Some(Wanted::Text);
    }
    accepted
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .find_map(|media| one(media, kind))
}

fn one(media: &str, kind: &str) -> Option<Wanted> {
    let mut parts = media.split(';').map(str::trim);
    let kind_of_media = parts.next()?;
    let parameters: Vec<(&str, &str)> = parts.filter_map(|p| p.split_once('=')).collect();
    let parameter = |name: &str| {
        let found = parameters.iter().find(|(key, _)| *key == name);
        found.map(|(_, value)| *value)
    };
    match kind_of_media {
        "text/plain" | "text/*" | "*/*" => Some(Wanted::Text),
        "application/json" => {
            let version = parameter("v")?;
            let known = VERSIONS.iter().find(|v| **v == version)?;
            (parameter("g") == Some(GROUP) && parameter("as") == Some(kind))
                .then_some(Wanted::Object(known))
        }
        _ => None,
    }
}

/// Answers with `text` below the usual warning, or with `fields` as an object of `kind`.
pub(super) fn answer(
    headers: &HeaderMap,
    kind: &'static str,
    text: impl FnOnce() -> String,
    fields: impl FnOnce() -> Value,
) -> Response {
    match wanted(headers, kind) {
        Some(Wanted::Text) => {
            let page = kind.to_ascii_lowercase();
            let body = format!(
                "\nkubelet {page}\n\
                 Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility \
                 guarantees and is for debugging purposes only.\n\n{}",
                text()
            );
            ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], body).into_response()
        }
        Some(Wanted::Object(version)) => {
            let mut object = json!({
                "kind": kind,
                "apiVersion": format!("{GROUP}/{version}"),
                "metadata": {"name": "kubelet"},
            });
            if let (Value::Object(object), Value::Object(fields)) = (&mut object, fields()) {
                object.extend(fields);
            }
            let content = format!("application/json;v={version};g={GROUP};as={kind}");
            ([(header::CONTENT_TYPE, content)], format!("{object}\n")).into_response()
        }
        None => {
            let body = format!(
                "only the following media types are accepted: text/plain, \
                 application/json;v={};g={GROUP};as={kind}\n",
                VERSIONS[0]
            );
            (StatusCode::NOT_ACCEPTABLE, body).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accept(text: &str) -> Option<Wanted> {
        let headers = [(header::ACCEPT, text.parse().unwrap())]
            .into_iter()
            .collect();
        wanted(&headers, "Statusz")
    }

    #[test]
    fn programs_get_an_object_when_they_name_it_and_people_text() {
        assert_eq!(wanted(&HeaderMap::new(), "Statusz"), Some(Wanted::Text));
        assert_eq!(accept("*/*"), Some(Wanted::Text));
        assert_eq!(accept("text/html, text/plain;q=0.5"), Some(Wanted::Text));
        let object = "application/json;v=v1alpha1;g=config.k8s.io;as=Statusz";
        assert_eq!(accept(object), Some(Wanted::Object("v1alpha1")));
        assert_eq!(
            accept("application/json; as=Statusz; v=v1beta1; g=config.k8s.io, */*"),
            Some(Wanted::Object("v1beta1"))
        );
        for refused in [
            "application/json",
            "application/json;v=v1alpha1;g=config.k8s.io;as=Flagz",
            "application/json;v=v9;g=config.k8s.io;as=Statusz",
            "application/yaml",
        ] {
            assert_eq!(accept(refused), None, "{refused}");
        }
    }
}
