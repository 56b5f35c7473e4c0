//! Messages of the WebSocket channel protocols: the first byte names the channel, the rest is its data.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf, Bytes};
use tokio_tungstenite::tungstenite::protocol::frame::Frame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{Data as DataKind, OpCode};

use super::frames::Data;

/// In place of a channel: the byte after it names a channel that ends.
pub(super) const CLOSE: u8 = 255;

/// Encoding of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    /// Binary messages; the channel is a byte.
    Binary,
    /// Text messages; the channel is a digit, the data base64.
    Base64,
}

/// Parsed piece of a message from the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    /// Data of a channel.
    Data(u8, Bytes),
    /// A channel ends.
    Ended(u8),
    /// Nothing that means anything; upstream skips it as well.
    Nothing,
    /// A message of which something was carried already cannot be read on.
    Broken,
}

/// Takes messages apart, piece by piece.
#[derive(Debug)]
pub(super) struct Messages {
    encoding: Encoding,
    /// True if [`CLOSE`] is part of the protocol.
    half_close: bool,
    at: At,
}

/// Position in a message.
#[derive(Debug)]
enum At {
    /// Before the channel.
    Channel,
    /// Before the channel that ends.
    Ending,
    /// In the data of a channel.
    Data(u8),
    /// In the data of a channel, in base64.
    Base64(u8, Base64),
    /// In what is skipped.
    Skipped,
}

/// Base64 that comes in pieces.
#[derive(Debug, Default)]
struct Base64 {
    /// Characters that do not form a group of four yet.
    rest: Vec<u8>,
    /// It had its padding.
    ended: bool,
    /// Some of it was carried.
    begun: bool,
}

impl Messages {
    /// `half_close`: whether [`CLOSE`] is part of the protocol.
    pub(super) fn new(encoding: Encoding, half_close: bool) -> Self {
        Self {
            encoding,
            half_close,
            at: At::Channel,
        }
    }

    /// Takes the next piece.
    pub(super) fn take(&mut self, piece: Data) -> Incoming {
        let mut data = piece.bytes;
        if piece.first {
            self.at = At::Channel;
        }
        if let At::Channel = self.at
            && data.has_remaining()
        {
            self.at = self.named(data.get_u8());
        }
        match &mut self.at {
            At::Ending if data.has_remaining() => {
                self.at = At::Skipped;
                Incoming::Ended(data.get_u8())
            }
            At::Data(channel) if !data.is_empty() => Incoming::Data(*channel, data),
            At::Base64(channel, base64) => match base64.decode(&data, piece.last) {
                Ok(data) if data.is_empty() => Incoming::Nothing,
                Ok(data) => Incoming::Data(*channel, data.into()),
                Err(()) if base64.begun => Incoming::Broken,
                Err(()) => {
                    self.at = At::Skipped;
                    Incoming::Nothing
                }
            },
            At::Channel | At::Ending | At::Data(_) | At::Skipped => Incoming::Nothing,
        }
    }

    /// Returns the position after the first byte.
    fn named(&self, first: u8) -> At {
        match self.encoding {
            Encoding::Binary if self.half_close && first == CLOSE => At::Ending,
            Encoding::Binary => At::Data(first),
            Encoding::Base64 => match first.checked_sub(b'0') {
                Some(channel) => At::Base64(channel, Base64::default()),
                None => At::Skipped,
            },
        }
    }
}

impl Base64 {
    /// Decodes what makes whole groups; fails when it is not base64.
    fn decode(&mut self, data: &[u8], last: bool) -> Result<Vec<u8>, ()> {
        if self.ended && !data.is_empty() {
            return Err(());
        }
        self.rest.extend_from_slice(data);
        let whole = self.rest.len() - self.rest.len() % 4;
        if last && whole < self.rest.len() {
            return Err(());
        }
        let rest = self.rest.split_off(whole);
        let groups = std::mem::replace(&mut self.rest, rest);
        self.ended |= groups.ends_with(b"=");
        let decoded = STANDARD.decode(groups).map_err(|_| ())?;
        self.begun |= !decoded.is_empty();
        Ok(decoded)
    }
}

impl Encoding {
    /// A message with data of a channel.
    pub(super) fn encode(self, channel: u8, data: &[u8]) -> Frame {
        match self {
            Self::Binary => {
                let mut message = Vec::with_capacity(1 + data.len());
                message.push(channel);
                message.extend_from_slice(data);
                Frame::message(message, OpCode::Data(DataKind::Binary), true)
            }
            Self::Base64 => {
                let mut message = String::with_capacity(1 + data.len().div_ceil(3) * 4);
                message.push(char::from(channel.saturating_add(b'0')));
                STANDARD.encode_string(data, &mut message);
                Frame::message(message, OpCode::Data(DataKind::Text), true)
            }
        }
    }
}
