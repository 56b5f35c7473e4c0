//! Conversion of the bytes of a manifest into static pods.
//!
//! The input is the content of a file or URL. The output is pods that are complete (v1 defaults applied, static
//! identity set) and valid, or an error that names line, column, field and the next action.
//!
//! **Invariant:** no part of a manifest is skipped: an unknown field, a duplicate key and a second document are errors.
//! A valid field that is not supported yet passes here and is refused at admission (`core::supported`).

mod decode;
mod defaults;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod static_pod;
mod tree;
mod validate;
mod warnings;

#[cfg(test)]
mod tests;

use std::fmt::{self, Write as _};

use k8s_openapi::api::core::v1::Pod;

pub use static_pod::StaticOrigin;
pub use tree::Position;
pub use warnings::warnings;

use crate::types::PodSource;
use crate::types::text::of_utf16;
use tree::{Node, Tree};

/// Largest manifest that is read, in bytes.
pub const MAX_MANIFEST_BYTES: u64 = 10 * 1024 * 1024;

/// One thing that is wrong with a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Path of the field, like `spec.containers[0].image`; empty for the document as such.
    pub field: String,
    /// Position of the field; for a missing field, that of its nearest parent. Zero when so many problems came before
    /// that it is not shown.
    pub at: Position,
    /// Description of the problem and the next action.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.at.line > 0 {
            write!(f, "line {}, column {}: ", self.at.line, self.at.column)?;
        }
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.message)
    }
}

/// Reason for which a manifest is not used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ManifestError {
    /// Nothing in it.
    #[error("the manifest is empty; write one v1 Pod into it, or delete it")]
    Empty,
    /// Larger than [`MAX_MANIFEST_BYTES`].
    #[error(
        "the manifest is larger than the 10 MB cap ({size} bytes or more); it has to hold one v1 Pod and nothing else"
    )]
    TooLarge {
        /// Bytes seen, at least.
        size: u64,
    },
    /// Not text.
    #[error("line {line}: the manifest is not UTF-8 text; save it as UTF-8")]
    NotUtf8 {
        /// Line of the first bad byte.
        line: u64,
    },
    /// Aliases, nesting or size beyond the parser's budget.
    #[error("line {}, column {}: the YAML expands beyond what a Pod can need ({message}); write it without aliases or deep nesting", at.line, at.column)]
    Bomb {
        /// Position at which the budget ran out.
        at: Position,
        /// Message of the parser.
        message: String,
    },
    /// Neither YAML nor JSON.
    #[error("{0}")]
    Syntax(Problem),
    /// More than one document in a file.
    #[error(
        "the manifest holds {count} YAML documents; put one v1 Pod into each file and remove the `---` lines between them"
    )]
    Documents {
        /// Number of documents.
        count: usize,
    },
    /// Well-formed, but not a pod that can run.
    #[error("{}", list(.0))]
    Invalid(Vec<Problem>),
}

impl ManifestError {
    /// Returns the problems one by one, each with its place.
    pub fn problems(&self) -> Vec<Problem> {
        let whole = |at: Position, place: String| {
            let text = self.to_string();
            let message = text.strip_prefix(&place).unwrap_or(&text).to_owned();
            let field = String::new();
            vec![Problem { field, at, message }]
        };
        match self {
            Self::Invalid(problems) => problems.clone(),
            Self::Syntax(problem) => vec![problem.clone()],
            Self::Bomb { at, .. } => {
                whole(*at, format!("line {}, column {}: ", at.line, at.column))
            }
            Self::NotUtf8 { line } => {
                let at = Position {
                    line: *line,
                    column: 0,
                };
                whole(at, format!("line {line}: "))
            }
            Self::Empty | Self::TooLarge { .. } | Self::Documents { .. } => {
                whole(Position::default(), String::new())
            }
        }
    }
}

/// Reads the pods of one manifest. Files hold one `Pod`; a URL may serve a `PodList`. `seen` is the
/// RFC 3339 time for the annotation `kubernetes.io/config.seen`. Mirrors upstream's
/// `tryDecodeSinglePod`, `tryDecodePodList` and `applyDefaults`.
///
/// # Errors
/// See [`ManifestError`]; of a list, the first pod that is wrong spoils the whole.
pub fn read(
    bytes: &[u8],
    origin: &StaticOrigin<'_>,
    seen: &str,
) -> Result<Vec<Pod>, ManifestError> {
    let manifest = Manifest::parse(bytes)?;
    let [tree] = manifest.documents.as_slice() else {
        let count = manifest.documents.len();
        return Err(ManifestError::Documents { count });
    };
    pods_of(tree, origin.source)?
        .iter()
        .map(|(root, item)| read_pod(tree, item, root, origin, seen))
        .collect()
}

/// A manifest that is text and parses, whatever its documents are.
#[derive(Debug)]
pub struct Manifest {
    documents: Vec<Tree>,
}

/// Type that a document states; empty where it states none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DocumentType<'m> {
    /// `apiVersion`.
    pub api_version: &'m str,
    /// `kind`.
    pub kind: &'m str,
    /// Position at which the document begins.
    pub at: Position,
}

/// A pod of a manifest by itself, or why it is none.
#[derive(Debug)]
pub struct Item<'m> {
    /// Kind, namespace and name as they are written, like `Pod default/web`; the kind alone without a name.
    pub subject: String,
    /// The pod, as [`read`] gives it.
    pub result: Result<Pod, ManifestError>,
    document: &'m Tree,
    root: String,
}

impl Manifest {
    /// Parses the documents of `bytes`.
    ///
    /// # Errors
    /// Those of [`ManifestError`] that do not concern a pod.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        let size = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        if size > MAX_MANIFEST_BYTES {
            return Err(ManifestError::TooLarge { size });
        }
        let documents = match of_utf16(bytes) {
            Some(decoded) => Tree::parse(content(&decoded)?)?,
            None => Tree::parse(content(text(bytes)?)?)?,
        };
        Ok(Self { documents })
    }

    /// Returns the types that the documents state; there is at least one.
    pub fn types(&self) -> impl ExactSizeIterator<Item = DocumentType<'_>> {
        self.documents.iter().map(|tree| DocumentType {
            api_version: tree.text("apiVersion"),
            kind: tree.text("kind"),
            at: tree.at,
        })
    }

    /// Reads every pod of every document, each for itself, where [`read`] stops at the first thing that is wrong. Arguments
    /// as there.
    pub fn items(&self, origin: &StaticOrigin<'_>, seen: &str) -> Vec<Item<'_>> {
        let mut items = Vec::new();
        for document in &self.documents {
            let item = |root: String, tree: &Tree, result| Item {
                subject: subject(tree, document),
                result,
                document,
                root,
            };
            match pods_of(document, origin.source) {
                Ok(pods) => items.extend(pods.into_iter().map(|(root, tree)| {
                    let result = read_pod(document, tree, &root, origin, seen);
                    item(root, tree, result)
                })),
                Err(error) => items.push(item(String::new(), document, Err(error))),
            }
        }
        items
    }
}

impl Item<'_> {
    /// Returns the position of a field of the pod, or of its nearest parent that exists.
    pub fn locate(&self, field: &str) -> Position {
        self.document.locate(&below(&self.root, field))
    }
}

/// See [`Item::subject`].
fn subject(tree: &Tree, document: &Tree) -> String {
    let kind = match (tree.text("kind"), document.text("kind")) {
        ("", "PodList") => "Pod",
        ("", _) => "manifest",
        (kind, _) => kind,
    };
    let text = |key| {
        tree.get("metadata")
            .map_or("", |metadata| metadata.text(key))
    };
    match (text("namespace"), text("name")) {
        (_, "") => kind.to_owned(),
        ("", name) => format!("{kind} default/{name}"),
        (namespace, name) => format!("{kind} {namespace}/{name}"),
    }
}

/// The path of `field` below `root`.
fn below(root: &str, field: &str) -> String {
    match root {
        "" => field.to_owned(),
        root => format!("{root}.{field}"),
    }
}

/// Collects what is wrong with a pod, with the places looked up in its document.
struct Problems<'t> {
    document: &'t Tree,
    root: &'t str,
    found: Vec<Problem>,
}

impl Problems<'_> {
    fn add(&mut self, field: impl AsRef<str>, message: impl Into<String>) {
        let field = below(self.root, field.as_ref());
        let shown = self.found.len() < PROBLEMS_TOLD;
        let at = shown.then(|| self.document.locate(&field));
        self.found.push(Problem {
            at: at.unwrap_or_default(),
            field,
            message: message.into(),
        });
    }
}

fn read_pod(
    document: &Tree,
    item: &Tree,
    root: &str,
    origin: &StaticOrigin<'_>,
    seen: &str,
) -> Result<Pod, ManifestError> {
    let mut pod: Pod = decode::decode(item, root)?;
    let mut problems = Problems {
        document,
        root,
        found: Vec::new(),
    };
    static_pod::check(&pod, origin, &mut problems);
    validate::metadata(&pod, origin, &mut problems);
    let uid = static_pod::uid(&pod, origin);
    defaults::apply(&mut pod);
    validate::spec(&pod, &mut problems);
    if !problems.found.is_empty() {
        return Err(ManifestError::Invalid(problems.found));
    }
    static_pod::convert(&mut pod, uid, origin, seen);
    Ok(pod)
}

fn text(bytes: &[u8]) -> Result<&str, ManifestError> {
    std::str::from_utf8(bytes).map_err(|e| {
        let before = bytes.get(..e.valid_up_to()).unwrap_or_default();
        let lines = before.iter().filter(|b| **b == b'\n').count();
        ManifestError::NotUtf8 {
            line: u64::try_from(lines).unwrap_or(u64::MAX).saturating_add(1),
        }
    })
}

/// The text without a byte order mark.
fn content(text: &str) -> Result<&str, ManifestError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.trim().is_empty() {
        return Err(ManifestError::Empty);
    }
    Ok(text)
}

/// The pods of a document, each with its path there. Checks `kind` and `apiVersion` before the types do, for messages that
/// say what to do.
fn pods_of(tree: &Tree, source: PodSource) -> Result<Vec<(String, &Tree)>, ManifestError> {
    let invalid = |field: &str, message: String| {
        Err(ManifestError::Invalid(vec![Problem {
            field: field.to_owned(),
            at: tree.locate(field),
            message,
        }]))
    };
    let Node::Map(_) = tree.node else {
        return invalid("", format!("found {}, expected a v1 Pod", tree.describe()));
    };
    let mut texts = ["kind", "apiVersion"].map(|key| (key, ""));
    for (key, text) in &mut texts {
        match tree.get(key).map(|t| (&t.node, t.describe())) {
            Some((Node::Str(value), _)) => *text = value,
            Some((Node::Null, _)) | None => {}
            Some((_, found)) => return invalid(key, format!("found {found}, expected a string")),
        }
    }
    let [(_, kind), (_, version)] = texts;
    let lists = source == PodSource::Http;
    match kind {
        "Pod" => {}
        "PodList" if lists => {}
        "" => {
            return invalid(
                "kind",
                "is missing; a manifest begins with `apiVersion: v1` and `kind: Pod`".into(),
            );
        }
        "PodList" | "List" if !lists => {
            return invalid(
                "kind",
                format!("{kind} is not a Pod: put each pod into a file of its own"),
            );
        }
        other => {
            return invalid(
                "kind",
                format!(
                    "kind {other} is not a Pod: static manifests hold one v1 Pod; \
                     use the pod template of the {other} with `kind: Pod`, or hand the {other} to an API server"
                ),
            );
        }
    }
    match version {
        "v1" => {}
        "" => return invalid("apiVersion", "is missing; write `apiVersion: v1`".into()),
        other => {
            return invalid(
                "apiVersion",
                format!("{other:?} is not known for a {kind}; write `apiVersion: v1`"),
            );
        }
    }
    if kind == "Pod" {
        return Ok(vec![(String::new(), tree)]);
    }
    let items: &[Tree] = match tree.get("items").map(|t| &t.node) {
        Some(Node::Seq(items)) => items,
        None | Some(Node::Null) => &[],
        Some(_) => return invalid("items", "expected a list of Pods".into()),
    };
    if let Node::Map(entries) = &tree.node
        && let Some(unknown) = entries
            .iter()
            .find(|e| !["apiVersion", "kind", "metadata", "items"].contains(&e.key.as_str()))
    {
        return invalid(&unknown.key, "unknown field of a PodList".into());
    }
    Ok(items
        .iter()
        .enumerate()
        .map(|(index, item)| (format!("items[{index}]"), item))
        .collect())
}

/// Most problems that are reported at once.
const PROBLEMS_TOLD: usize = 8;

fn list(problems: &[Problem]) -> String {
    let mut text = String::new();
    for (index, problem) in problems.iter().take(PROBLEMS_TOLD).enumerate() {
        if index > 0 {
            text.push_str("; ");
        }
        text.push_str(&problem.to_string());
    }
    if let Some(more) = problems.len().checked_sub(PROBLEMS_TOLD)
        && more > 0
        && write!(text, "; and {more} more").is_err()
    {
        text.push_str("; …");
    }
    text
}
