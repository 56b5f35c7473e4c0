//! SPDY/3.1 as the streaming servers of container runtimes and their clients speak it.
//!
//! Owns the frames on the wire and their reading and writing over a byte stream. Those peers do without flow
//! control windows: what a reader does not take stays in the connection, and so stops the writer.
//!
//! **Invariant:** memory is bounded whatever arrives: data comes out in pieces as it comes in, a control frame is at
//! most [`MAX_CONTROL`] long, a header block expands to at most 64 KiB.

mod frame;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod header;
mod io;
mod openings;

pub use frame::{Decoder, Encoder, Frame, MAX_CONTROL, MAX_DATA, StreamId};
pub use header::Headers;
pub use io::{Reader, Writer};
pub use openings::{Opening, Openings};

/// Error of a connection.
#[derive(Debug, thiserror::Error)]
pub enum SpdyError {
    /// The connection broke.
    #[error("read or write a SPDY connection: {0}")]
    Io(#[from] std::io::Error),
    /// The connection ended in the middle of a frame.
    #[error("the SPDY connection ended in the middle of a frame")]
    Truncated,
    /// The peer speaks another version.
    #[error("SPDY version {0} is not spoken here, only 3")]
    Version(u16),
    /// A frame that is longer or shorter than its kind allows.
    #[error("SPDY frame of type {kind} with a length of {length} bytes")]
    Length {
        /// The type of the control frame.
        kind: u16,
        /// Its length, bytes.
        length: usize,
    },
    /// A header block.
    #[error("bad SPDY headers: {0}")]
    Headers(&'static str),
}

#[cfg(test)]
mod tests;
