//! Configurations of the agent and of credential providers, and kubeconfigs.

use std::io::ErrorKind;
use std::path::Path;

use super::report::{Checked, Finding, Severity};
use crate::apiserver::{self, ApiError};
use crate::cli::offline;
use crate::config::manifest::Position;
use crate::images::{CredentialError, CredentialProviders};
use crate::kubeletconfig::flags::KubeletFlags;
use crate::kubeletconfig::{
    AgentConfig, ConfigError, KIND, Origin, Warning, resolve, resolve_content,
};
use crate::types::causes::causes;
use crate::types::text;

/// Checks the configuration that `flags` name, and returns it when it is good. Blocking.
pub(super) fn settings(flags: &KubeletFlags, checked: &mut Checked) -> Option<AgentConfig> {
    tell(resolve(flags), checked)
}

/// Checks the content of a configuration file, laid over the defaults.
pub(super) fn settings_in(content: Vec<u8>, flags: &KubeletFlags, checked: &mut Checked) {
    let resolved = resolve_content(Path::new(&checked.file), content, flags);
    tell(resolved, checked);
}

fn tell(
    resolved: Result<(AgentConfig, Vec<Warning>), ConfigError>,
    checked: &mut Checked,
) -> Option<AgentConfig> {
    match resolved {
        Ok((config, warnings)) => {
            for Warning {
                origin,
                field,
                message,
            } in warnings
            {
                let finding = finding(checked, Severity::Warning, &origin, (field, message));
                checked.findings.push(finding);
            }
            checked.objects.push(KIND.to_owned());
            Some(config)
        }
        Err(ConfigError::Invalid(problems)) => {
            for problem in problems {
                let said = (problem.field, problem.message);
                let finding = finding(checked, Severity::Error, &problem.origin, said);
                checked.findings.push(finding);
            }
            None
        }
        Err(error) => {
            if let ConfigError::Read { source, .. } = &error {
                checked.absent = source.kind() == ErrorKind::NotFound;
            }
            checked.error(KIND, causes(&error));
            None
        }
    }
}

/// A finding at `origin`. If it is no place in a file, the finding is about the file that is checked.
fn finding(
    checked: &Checked,
    severity: Severity,
    origin: &Origin,
    (field, message): (String, String),
) -> Finding {
    let (file, at) = match origin {
        Origin::File { path, line, column } => {
            let (line, column) = (*line, *column);
            let file = path.to_string_lossy().into_owned();
            (file, Position { line, column })
        }
        Origin::Flag(_) | Origin::Default => (checked.file.clone(), Position::default()),
    };
    let message = match field.as_str() {
        "" => message,
        field => format!("{field}: {message}"),
    };
    Finding {
        file,
        at,
        severity,
        object: KIND.to_owned(),
        message,
    }
}

/// Checks a `CredentialProviderConfig`, and its programs when their directory is known. Blocking.
pub(super) fn providers(
    path: &Path,
    content: &[u8],
    programs: Option<&Path>,
    checked: &mut Checked,
) {
    let object = "CredentialProviderConfig";
    let Ok(text) = text::of_file(content.to_vec()) else {
        return checked.error(
            object,
            "the file is not UTF-8 text; save it as UTF-8".to_owned(),
        );
    };
    match CredentialProviders::check(path, &text, programs) {
        Ok(()) => checked.objects.push(object.to_owned()),
        Err(CredentialError::Config { what, .. }) => checked.error(object, what),
        Err(error) => checked.error(object, causes(&error)),
    }
}

/// Checks the kubeconfig at `path`, or its `content`. Within an async runtime; blocking.
pub(super) fn kubeconfig(path: &Path, content: Option<&[u8]>, checked: &mut Checked) {
    let object = "kubeconfig";
    let text = content.map(String::from_utf8_lossy);
    let now = offline::now(None).wall_ms / 1000;
    match apiserver::check(path, text.as_deref(), now) {
        Ok(doubts) => {
            for doubt in doubts {
                checked.warning(object, doubt);
            }
            checked.objects.push(object.to_owned());
        }
        Err(error) => checked.error(object, without_path(&error)),
    }
}

/// Returns the message of an error without the file, which the output already names.
fn without_path(error: &ApiError) -> String {
    match error {
        ApiError::Unusable { problem, .. } => problem.clone(),
        ApiError::NoContext { known, .. } => {
            format!("has no current-context; name one of its contexts there: {known}")
        }
        ApiError::Missing {
            what, name, known, ..
        } => format!("refers to the {what} {name:?}, but {known}; correct the name or add it"),
        ApiError::Parse { source, .. } => causes(source.as_ref()),
        other => causes(other),
    }
}
