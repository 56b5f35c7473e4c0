//! Fuzz targets of volumes: the mount table, and the answers of CSI drivers.

pub(crate) use super::csi::fuzzing::csi_answers;
pub(crate) use super::mounts::fuzzing::mountinfo;
