//! Checked parameters of a volume's LUN, with the secrets for a login.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ISCSIPersistentVolumeSource, Secret};

use crate::core::volumes::{Remote, Source};
use crate::volumemanager::remote::RemoteError;

const DEFAULT_PORT: &str = "3260";
const DEFAULT_IFACE: &str = "default";

/// Keys of a secret for finding targets, which are names of settings.
const DISCOVERY: [&str; 4] = [
    "discovery.sendtargets.auth.username",
    "discovery.sendtargets.auth.password",
    "discovery.sendtargets.auth.username_in",
    "discovery.sendtargets.auth.password_in",
];
/// The same for logging in.
const SESSION: [&str; 4] = [
    "node.session.auth.username",
    "node.session.auth.password",
    "node.session.auth.username_in",
    "node.session.auth.password_in",
];

/// A LUN and the ways to it.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Disk {
    /// `address:port`, each once; the first is the one that names things.
    pub(super) portals: Vec<String>,
    pub(super) iqn: String,
    pub(super) lun: u32,
    /// The interface as configured on the node.
    pub(super) iface: String,
    /// A name of its own for this initiator, by an interface that is made for it.
    pub(super) initiator: Option<String>,
    /// Name of the volume.
    pub(super) name: String,
    /// Settings and values for CHAP; `None` = without.
    pub(super) discovery_chap: Option<Vec<(&'static str, String)>>,
    pub(super) session_chap: Option<Vec<(&'static str, String)>>,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk")
            .field("portals", &self.portals)
            .field("iqn", &self.iqn)
            .field("lun", &self.lun)
            .finish_non_exhaustive()
    }
}

impl Disk {
    /// The LUN of a volume, without secrets: enough to leave it.
    ///
    /// # Errors
    /// A field that cannot be handed to `iscsiadm`.
    pub(super) fn of(volume: &Remote) -> Result<Self, RemoteError> {
        let source = source_of(volume)?;
        let mut portals: Vec<String> = Vec::new();
        let all = std::iter::once(&source.target_portal).chain(source.portals.iter().flatten());
        for portal in all {
            let portal = portal_of(portal)?;
            if !portals.contains(&portal) {
                portals.push(portal);
            }
        }
        let iqn = source.iqn.as_str();
        let begins = ["iqn.", "eui.", "naa."].iter().any(|p| iqn.starts_with(p));
        if !begins || !iqn.chars().all(of_names) {
            return Err(wrong(
                "iqn",
                iqn,
                "a name like iqn.2003-01.org.example:disk",
            ));
        }
        let lun = u32::try_from(source.lun).ok().filter(|lun| *lun < 16384);
        let Some(lun) = lun else {
            let lun = source.lun.to_string();
            return Err(wrong("lun", &lun, "a number from 0 to 16383"));
        };
        let named = |what, value: Option<&String>| match value.filter(|v| !v.is_empty()) {
            None => Ok(None),
            Some(v) if !v.starts_with('-') && v.chars().all(of_names) => Ok(Some(v.clone())),
            Some(v) => Err(wrong(what, v, "a plain name")),
        };
        let iface = named("iscsiInterface", source.iscsi_interface.as_ref())?;
        Ok(Self {
            portals,
            iqn: iqn.to_owned(),
            lun,
            iface: iface.unwrap_or_else(|| DEFAULT_IFACE.to_owned()),
            initiator: named("initiatorName", source.initiator_name.as_ref())?,
            name: volume.name.clone(),
            discovery_chap: None,
            session_chap: None,
        })
    }

    /// As [`Disk::of`], with what its login takes.
    ///
    /// # Errors
    /// As there, and a secret that is not to be had.
    pub(super) fn with_secrets(
        volume: &Remote,
        secrets: &BTreeMap<(String, String), Arc<Secret>>,
    ) -> Result<Self, RemoteError> {
        let source = source_of(volume)?;
        let mut disk = Self::of(volume)?;
        let discovery = source.chap_auth_discovery.unwrap_or(false);
        let session = source.chap_auth_session.unwrap_or(false);
        if !discovery && !session {
            return Ok(disk);
        }
        let Some(reference) = &source.secret_ref else {
            return Err(RemoteError::Failed(format!(
                "volume {} asks for CHAP, but has no secretRef",
                volume.name
            )));
        };
        let (namespace, name) = (
            reference.namespace.clone().unwrap_or_default(),
            reference.name.clone().unwrap_or_default(),
        );
        let Some(secret) = secrets.get(&(namespace.clone(), name.clone())) else {
            return Err(RemoteError::Failed(format!(
                "couldn't get secret {namespace}/{name} for the CHAP login of volume {}",
                volume.name
            )));
        };
        let values = |keys: [&'static str; 4]| -> Result<Vec<(&'static str, String)>, RemoteError> {
            let mut found = Vec::new();
            for key in keys {
                let Some(value) = secret.data.as_ref().and_then(|d| d.get(key)) else {
                    continue;
                };
                let text = String::from_utf8(value.0.clone()).map_err(|_| {
                    RemoteError::Failed(format!(
                        "key {key} of secret {namespace}/{name} is not text"
                    ))
                })?;
                if !text.is_empty() {
                    found.push((key, text));
                }
            }
            Ok(found)
        };
        if discovery {
            disk.discovery_chap = Some(values(DISCOVERY)?);
        }
        if session {
            disk.session_chap = Some(values(SESSION)?);
        }
        Ok(disk)
    }

    /// The interface to go by: with an initiator of its own, one that is made for it.
    pub(super) fn own_iface(&self) -> String {
        match (&self.initiator, self.portals.first()) {
            (Some(_), Some(portal)) => format!("{portal}:{}", self.name),
            _ => self.iface.clone(),
        }
    }
}

fn source_of(volume: &Remote) -> Result<&ISCSIPersistentVolumeSource, RemoteError> {
    match &volume.source {
        Source::Iscsi(source) => Ok(source),
        _ => Err(RemoteError::Failed(format!(
            "volume {} is not of iSCSI",
            volume.name
        ))),
    }
}

fn of_names(c: char) -> bool {
    c.is_ascii_alphanumeric() || ".:-_".contains(c)
}

/// With its port; upstream's `portalMounter`.
fn portal_of(portal: &str) -> Result<String, RemoteError> {
    let fits = |c: char| of_names(c) || "[]%".contains(c);
    if portal.is_empty() || portal.starts_with('-') || !portal.chars().all(fits) {
        return Err(wrong("targetPortal", portal, "address:port"));
    }
    let has_port = match portal.rsplit_once(']') {
        Some((_, rest)) => rest.starts_with(':'),
        None => portal.contains(':'),
    };
    Ok(if has_port {
        portal.to_owned()
    } else {
        format!("{portal}:{DEFAULT_PORT}")
    })
}

fn wrong(what: &str, value: &str, should_be: &str) -> RemoteError {
    RemoteError::Failed(format!("iSCSI {what} {value:?} is not {should_be}"))
}
