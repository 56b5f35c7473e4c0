//! The serving certificate.
