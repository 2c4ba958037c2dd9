//! Frame level: what a ZMQ message of the protocol consists of.
//!
//! Client to server: `[uid, op, payload...]`, without an empty delimiter (LMCache 0.5.6 wire protocol).
//! Server to client: `[uid, op]` or `[uid, op, response]`. `uid` and `op` are echoed byte by byte; the
//! server never needs to understand `uid`. An empty `op` frame marks a stream control message.

use crate::wire::{DecodeError, Reader, name_shown, unexpected};

/// A message from a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientMessage<'a> {
    /// A request.
    Request(RequestFrames<'a>),
    /// A word about a stream that an earlier request opened.
    Stream {
        /// The uid of that request.
        uid: &'a [u8],
        /// What the client wants.
        control: StreamControl,
    },
}

/// A word about an open stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamControl {
    /// One more batch may be sent.
    Ack,
    /// No more batches.
    Cancel,
}

/// The frames of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestFrames<'a> {
    /// Chosen by the client, echoed in the reply.
    pub uid: &'a [u8],
    /// The operation, echoed in the reply; see [`OperationId`].
    pub op: &'a [u8],
    /// One frame for each payload.
    pub payloads: Vec<&'a [u8]>,
}

/// Most payload frames a request may have; no operation of any release has more than eight.
pub const MAX_PAYLOADS: usize = 16;

impl<'a> ClientMessage<'a> {
    /// Sorts the frames of one message, without the routing frame that a ROUTER socket puts in front.
    ///
    /// Fails for fewer than two frames, more than [`MAX_PAYLOADS`] payloads, or an unknown stream word:
    /// such messages get no reply.
    pub fn parse(frames: impl IntoIterator<Item = &'a [u8]>) -> Result<Self, DecodeError> {
        let mut frames = frames.into_iter();
        let (Some(uid), Some(op)) = (frames.next(), frames.next()) else {
            return Err(DecodeError::new(
                "a message has at least two frames, uid and op",
            ));
        };
        let payloads: Vec<_> = frames.by_ref().take(MAX_PAYLOADS).collect();
        if frames.next().is_some() {
            return Err(DecodeError::new(format!(
                "a message has at most {MAX_PAYLOADS} payload frames"
            )));
        }
        if !op.is_empty() {
            return Ok(Self::Request(RequestFrames { uid, op, payloads }));
        }
        // The words are raw bytes, not MessagePack.
        let control = match payloads.as_slice() {
            [b"ack"] => StreamControl::Ack,
            [b"cancel"] => StreamControl::Cancel,
            _ => {
                return Err(DecodeError::at(
                    "op",
                    "an empty op frame is followed by `ack` or `cancel` alone",
                ));
            }
        };
        Ok(Self::Stream { uid, control })
    }
}

/// What an op frame says: a number, whose meaning depends on the client's generation, or a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OperationId<'a> {
    /// A number. Any width on the wire; `true` counts as 1, as the 0.5.6 server takes it.
    Number(i64),
    /// A name.
    Name(&'a str),
}

impl<'a> OperationId<'a> {
    /// Decodes an op frame.
    pub fn decode(frame: &'a [u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(frame);
        let id = match reader.peek()? {
            0xc2 | 0xc3 => Self::Number(i64::from(reader.bool()?)),
            0xa0..=0xbf | 0xd9..=0xdb => Self::Name(reader.str()?),
            marker if crate::wire::is_int(marker) => Self::Number(reader.int()?),
            marker => return Err(unexpected("an operation's number or name", marker).inside("op")),
        };
        reader.finish()?;
        Ok(id)
    }

    /// Encodes an op frame in its shortest form.
    #[must_use]
    pub fn encode(self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Number(number) => crate::wire::write_int(&mut out, number),
            Self::Name(name) => crate::wire::write_str(&mut out, name),
        }
        out
    }
}

impl std::fmt::Display for OperationId<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Name(name) => write!(f, "{:?}", name_shown(name)),
        }
    }
}

/// The frames of one reply, as a client receives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplyFrames<'a> {
    /// The request's uid. A number from clients of this protocol; any encoding of it may come back.
    pub uid: &'a [u8],
    /// The request's op frame; another text instead is an error message for the operator.
    pub op: &'a [u8],
    /// The response; absent for "nothing".
    pub payload: Option<&'a [u8]>,
}

impl<'a> ReplyFrames<'a> {
    /// Sorts the frames of one reply. Frames behind the third are ignored.
    pub fn parse(frames: impl IntoIterator<Item = &'a [u8]>) -> Result<Self, DecodeError> {
        let mut frames = frames.into_iter();
        let (Some(uid), Some(op)) = (frames.next(), frames.next()) else {
            return Err(DecodeError::new(
                "a reply has at least two frames, uid and op",
            ));
        };
        Ok(Self {
            uid,
            op,
            payload: frames.next(),
        })
    }

    /// The uid as a number.
    pub fn uid_number(&self) -> Result<u64, DecodeError> {
        let mut reader = Reader::new(self.uid);
        let uid = reader.int().map_err(|error| error.inside("uid"))?;
        reader.finish()?;
        Ok(uid)
    }
}
