//! Messages of the WebSocket channel protocols: the first byte names the channel, the rest is its data.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use tokio_tungstenite::tungstenite::Message;

/// In place of a channel: the byte after it names a channel that ends.
pub(super) const CLOSE: u8 = 255;

/// How messages are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    /// Binary messages; the channel is a byte.
    Binary,
    /// Text messages; the channel is a digit, the data base64.
    Base64,
}

/// What a client sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    /// Data of a channel.
    Data(u8, Bytes),
    /// A channel ends.
    Ended(u8),
    /// Nothing that means anything; upstream skips it as well.
    Nothing,
}

impl Encoding {
    /// Takes a message apart. `half_close`: whether [`CLOSE`] is part of the protocol.
    pub(super) fn decode(self, message: &Bytes, half_close: bool) -> Incoming {
        let Some((&first, _)) = message.split_first() else {
            return Incoming::Nothing;
        };
        let data = message.slice(1..);
        match self {
            Self::Binary if half_close && first == CLOSE => match data.first() {
                Some(channel) => Incoming::Ended(*channel),
                None => Incoming::Nothing,
            },
            Self::Binary if data.is_empty() => Incoming::Nothing,
            Self::Binary => Incoming::Data(first, data),
            Self::Base64 => {
                let channel = first.checked_sub(b'0');
                match (channel, STANDARD.decode(&data)) {
                    (Some(channel), Ok(data)) if !data.is_empty() => {
                        Incoming::Data(channel, data.into())
                    }
                    _ => Incoming::Nothing,
                }
            }
        }
    }

    /// A message with data of a channel.
    pub(super) fn encode(self, channel: u8, data: &[u8]) -> Message {
        match self {
            Self::Binary => {
                let mut message = Vec::with_capacity(1 + data.len());
                message.push(channel);
                message.extend_from_slice(data);
                Message::Binary(message.into())
            }
            Self::Base64 => {
                let mut message = String::with_capacity(1 + data.len().div_ceil(3) * 4);
                message.push(char::from(channel.saturating_add(b'0')));
                STANDARD.encode_string(data, &mut message);
                Message::Text(message.into())
            }
        }
    }
}
