//! Fuzz targets of the sources of pods.

pub(crate) use super::api::fuzzing::api_answers;
pub(crate) use super::manifest::fuzzing::manifest;
