//! Session: the protocol state of one connection.

use std::time::Duration;

use crate::zmtp::Error;
use crate::zmtp::command;
use crate::zmtp::frame::{Body, Decoder, FrameKind, Header, ZmtpFrame};
use crate::zmtp::greeting::{self, GREETING_BYTES};
use crate::zmtp::role::{Role, Version};

/// Bounds of a session.
#[derive(Debug, Clone, Copy)]
pub struct ZmtpLimits {
    /// Maximum bytes of a message frame.
    pub frame_bytes: u64,
    /// Maximum frames kept per message. Further ones are discarded on arrival, and counted.
    pub message_frames: usize,
    /// Maximum bytes of a message's kept frames.
    pub message_bytes: u64,
    /// Maximum bytes of a command, READY included.
    pub command_bytes: u64,
}

/// A received event.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// The handshake is complete: messages may be sent.
    Ready,
    /// A message.
    Message(ZmtpMessage),
}

impl Event {
    fn into_message(self) -> Option<ZmtpMessage> {
        match self {
            Self::Ready => None,
            Self::Message(message) => Some(message),
        }
    }
}

/// A message of one or more frames.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ZmtpMessage {
    /// The frames, at most [`Limits::message_frames`].
    pub frames: Vec<Vec<u8>>,
    /// Number of discarded frames.
    pub discarded_frames: u64,
}

/// State of one connection.
#[derive(Debug)]
pub struct ZmtpSession {
    role: Role,
    limits: ZmtpLimits,
    stage: Stage,
    decoder: Decoder,
    message: ZmtpMessage,
    /// Bytes of the frames in `message`.
    message_bytes: u64,
    stray_frames: u64,
    output: Vec<u8>,
    knows_ping: bool,
    ttl: Option<Duration>,
}

#[derive(Debug)]
enum Stage {
    Greeting([u8; GREETING_BYTES], usize),
    Handshake,
    Traffic,
}

impl ZmtpSession {
    /// Creates a ROUTER's session for a new connection.
    pub fn router(limits: ZmtpLimits) -> Self {
        Self::new(Role::Router, Version::V3_1, limits)
    }

    /// Creates a DEALER's session for a new connection.
    pub fn dealer(version: Version, limits: ZmtpLimits) -> Self {
        Self::new(Role::Dealer, version, limits)
    }

    fn new(role: Role, version: Version, limits: ZmtpLimits) -> Self {
        Self {
            role,
            limits,
            stage: Stage::Greeting([0; GREETING_BYTES], 0),
            decoder: Decoder::default(),
            message: ZmtpMessage::default(),
            message_bytes: 0,
            stray_frames: 0,
            output: greeting::own(version).to_vec(),
            knows_ping: false,
            ttl: None,
        }
    }

    /// Consumes `input` up to the next event, or all of it.
    ///
    /// # Errors
    /// The peer's violation or [`Error::OutOfMemory`]; both end the session.
    pub fn receive(&mut self, input: &mut &[u8]) -> Result<Option<Event>, Error> {
        if let Stage::Greeting(greeting, len) = &mut self.stage {
            let (here, rest) = input.split_at((GREETING_BYTES - *len).min(input.len()));
            *input = rest;
            greeting[*len..][..here.len()].copy_from_slice(here);
            *len += here.len();
            greeting::check(&greeting[..*len])?;
            if *len < GREETING_BYTES {
                return Ok(None);
            }
            self.knows_ping = greeting::knows_ping(greeting);
            self.stage = Stage::Handshake;
            command::write_ready(&mut self.output, self.role);
        }
        while !input.is_empty() {
            let admit = |header| {
                admit(
                    header,
                    &self.stage,
                    &self.limits,
                    &self.message,
                    self.message_bytes,
                )
            };
            if let Some(frame) = self.decoder.receive(input, admit)?
                && let Some(event) = self.frame(frame)?
            {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    /// Consumes all of `input` and appends its messages.
    ///
    /// # Errors
    /// As [`Session::receive`]; the messages before the violation are appended all the same.
    pub fn receive_messages(
        &mut self,
        mut input: &[u8],
        messages: &mut Vec<ZmtpMessage>,
    ) -> Result<(), Error> {
        while !input.is_empty() {
            messages.extend(self.receive(&mut input)?.and_then(Event::into_message));
        }
        Ok(())
    }

    /// [`Session::body_received`] and [`Session::receive_messages`] for what is behind the frame.
    ///
    /// # Errors
    /// As [`Session::receive_messages`].
    pub fn body_messages(
        &mut self,
        len: usize,
        messages: &mut Vec<ZmtpMessage>,
    ) -> Result<(), Error> {
        let (event, rest) = self.body_received(len)?;
        messages.extend(event.and_then(Event::into_message));
        self.receive_messages(&rest, messages)
    }

    /// The body of a partly received frame that misses at least `min_missing` bytes. The caller may read into its spare
    /// capacity, which avoids a copy, and then calls [`Session::body_received`].
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn body(&mut self, min_missing: usize) -> Result<Option<&mut Vec<u8>>, Error> {
        self.decoder.body(min_missing)
    }

    /// Reports that the vector of [`Session::body`] had `len` bytes and has grown. Also returns the bytes beyond the end of
    /// the frame, for [`Session::receive`]; usually there are none.
    ///
    /// # Errors
    /// As [`Session::receive`].
    pub fn body_received(&mut self, len: usize) -> Result<(Option<Event>, Vec<u8>), Error> {
        let (frame, rest) = self.decoder.body_received(len);
        let event = frame.map(|frame| self.frame(frame)).transpose()?;
        Ok((event.flatten(), rest))
    }

    /// The protocol's own output, for the caller to take and send.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// Appends a PING to the output, if the handshake is complete and the peer supports PING. Returns whether it did; the
    /// peer then answers with a PONG.
    pub fn ping(&mut self) -> bool {
        let pings = self.knows_ping && self.is_ready();
        if pings {
            command::write_ping(&mut self.output);
        }
        pings
    }

    /// Whether the handshake is complete.
    pub fn is_ready(&self) -> bool {
        matches!(self.stage, Stage::Traffic)
    }

    /// Maximum silence of the peer from now on, if its last frame was a PING with a TTL.
    pub fn ttl(&self) -> Option<Duration> {
        self.ttl
    }

    /// Whether a message or a frame is partly received.
    pub fn is_amid_message(&self) -> bool {
        !self.message.frames.is_empty() || self.decoder.is_amid_frame()
    }

    /// Bytes of the incomplete message that have arrived.
    pub fn held_bytes(&self) -> usize {
        usize::try_from(self.message_bytes).unwrap_or(usize::MAX) + self.decoder.held_bytes()
    }

    /// Number of received frames that are part of no message: commands, and discarded frames.
    pub fn stray_frames(&self) -> u64 {
        self.stray_frames
    }

    fn frame(&mut self, frame: ZmtpFrame) -> Result<Option<Event>, Error> {
        self.ttl = None;
        let more = match frame.kind {
            FrameKind::Command => {
                self.stray_frames += 1;
                return self.command(&frame.body);
            }
            FrameKind::Message { more } => more,
        };
        match frame.disposition {
            Body::Discard => {
                self.stray_frames += 1;
                self.message.discarded_frames += 1;
            }
            Body::Keep => {
                self.message_bytes += frame.body.len() as u64;
                self.message.frames.push(frame.body);
            }
        }
        if more {
            return Ok(None);
        }
        self.message_bytes = 0;
        Ok(Some(Event::Message(std::mem::take(&mut self.message))))
    }

    fn command(&mut self, body: &[u8]) -> Result<Option<Event>, Error> {
        let (name, data) = command::split(body)?;
        match (&self.stage, name) {
            (Stage::Traffic, b"PING") => {
                let ttl = command::answer_ping(&mut self.output, data)?;
                self.ttl = (ttl > 0).then(|| Duration::from_millis(100 * u64::from(ttl)));
                Ok(None)
            }
            (Stage::Traffic, _) => Ok(None),
            (_, b"READY") => {
                command::check_ready(data, self.role)?;
                self.stage = Stage::Traffic;
                Ok(Some(Event::Ready))
            }
            (_, b"ERROR") => Err(Error::Refused(command::error_reason(data))),
            _ => Err(Error::Handshake("another command")),
        }
    }
}

/// Checks a frame's header against the session's stage and bounds.
fn admit(
    header: Header,
    stage: &Stage,
    limits: &ZmtpLimits,
    message: &ZmtpMessage,
    message_bytes: u64,
) -> Result<Body, Error> {
    let bounded = |what, bytes, limit| {
        if bytes <= limit {
            Ok(())
        } else {
            Err(Error::TooLarge { what, bytes, limit })
        }
    };
    if header.kind == FrameKind::Command {
        bounded("a command", header.len, limits.command_bytes)?;
        return Ok(Body::Keep);
    }
    if !matches!(stage, Stage::Traffic) {
        return Err(Error::Handshake("a message"));
    }
    bounded("a frame", header.len, limits.frame_bytes)?;
    if message.frames.len() >= limits.message_frames {
        return Ok(Body::Discard);
    }
    let bytes = message_bytes.saturating_add(header.len);
    bounded("a message", bytes, limits.message_bytes)?;
    Ok(Body::Keep)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zmtp::greeting::GREETING;

    const LIMITS: ZmtpLimits = ZmtpLimits {
        frame_bytes: 100,
        message_frames: 3,
        message_bytes: 150,
        command_bytes: 512,
    };

    const READY: &[u8] = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER";

    fn receive(session: &mut ZmtpSession, mut input: &[u8]) -> Result<Vec<Event>, Error> {
        let mut events = Vec::new();
        while !input.is_empty() {
            events.extend(session.receive(&mut input)?);
        }
        Ok(events)
    }

    fn ready() -> ZmtpSession {
        let mut session = ZmtpSession::router(LIMITS);
        let hello = [&GREETING[..], READY].concat();
        assert_eq!(receive(&mut session, &hello), Ok(vec![Event::Ready]));
        session.output().clear();
        session
    }

    fn message(frames: &[&[u8]], discarded_frames: u64) -> Event {
        let frames = frames.iter().map(|frame| frame.to_vec()).collect();
        Event::Message(ZmtpMessage {
            frames,
            discarded_frames,
        })
    }

    #[test]
    fn handshake_answers_greeting_and_ready() {
        let mut session = ZmtpSession::router(LIMITS);
        assert_eq!(*session.output(), GREETING);
        session.output().clear();
        assert_eq!(receive(&mut session, &GREETING), Ok(vec![]));
        assert!(session.output().starts_with(b"\x04\x29\x05READY") && !session.is_ready());
        assert!(!session.ping());
        assert_eq!(receive(&mut session, READY), Ok(vec![Event::Ready]));
        assert!(session.is_ready());
    }

    #[test]
    fn nothing_but_ready_ends_the_handshake() {
        for (sent, error) in [
            (&b"\x00\x01x"[..], Error::Handshake("a message")),
            (b"\x04\x05\x04PING", Error::Handshake("another command")),
            (b"\x04\x09\x05ERROR\x02no", Error::Refused("no".into())),
            (
                b"\x04\x01\x05",
                Error::Command("its name is longer than the command"),
            ),
            (
                b"\x06\x00\x00\x00\x00\x00\x00\x02\x01",
                Error::TooLarge {
                    what: "a command",
                    bytes: 513,
                    limit: 512,
                },
            ),
        ] {
            let mut session = ZmtpSession::router(LIMITS);
            receive(&mut session, &GREETING).unwrap();
            assert_eq!(receive(&mut session, sent), Err(error));
        }
    }

    #[test]
    fn messages_are_bounded_by_frame_message_and_number() {
        let mut session = ready();
        let sent = b"\x01\x01a\x01\x00\x01\x01b\x01\x01c\x00\x01d\x00\x01e";
        let events = receive(&mut session, sent).unwrap();
        assert_eq!(
            events,
            [message(&[b"a", b"", b"b"], 2), message(&[b"e"], 0)]
        );
        assert!(!session.is_amid_message());

        let large = receive(&mut session, b"\x00\x65");
        let error = Error::TooLarge {
            what: "a frame",
            bytes: 101,
            limit: 100,
        };
        assert_eq!(large, Err(error));

        let mut session = ready();
        let two = [&b"\x01\x64"[..], &[0; 100], b"\x00\x33"].concat();
        let error = Error::TooLarge {
            what: "a message",
            bytes: 151,
            limit: 150,
        };
        assert_eq!(receive(&mut session, &two), Err(error));
        assert_eq!(session.held_bytes(), 100);
    }

    #[test]
    fn ping_ttl_lasts_until_next_frame() {
        let mut session = ready();
        assert_eq!(
            receive(&mut session, b"\x04\x09\x04PING\x00\x05hi"),
            Ok(vec![])
        );
        assert_eq!(*session.output(), b"\x04\x07\x04PONGhi");
        assert_eq!(session.ttl(), Some(Duration::from_millis(500)));
        // An unknown command is skipped, also within a message.
        assert_eq!(
            receive(&mut session, b"\x01\x01a\x04\x04\x03FOO\x00\x01b"),
            Ok(vec![message(&[b"a", b"b"], 0)])
        );
        assert_eq!(session.ttl(), None);
        session.output().clear();
        assert!(session.ping());
        assert_eq!(*session.output(), b"\x04\x07\x04PING\x00\x00");
    }

    #[test]
    fn peer_of_version_3_0_is_not_pinged() {
        let mut session = ZmtpSession::router(LIMITS);
        let mut greeting = GREETING;
        greeting[11] = 0;
        receive(&mut session, &[&greeting[..], READY].concat()).unwrap();
        assert!(session.is_ready() && !session.ping());
    }

    #[test]
    fn dealer_and_router_shake_hands_in_either_version() {
        for (version, is_pinged) in [(Version::V3_0, false), (Version::V3_1, true)] {
            let mut dealer = ZmtpSession::dealer(version, LIMITS);
            let mut router = ZmtpSession::router(LIMITS);
            for _ in 0..2 {
                let sent = std::mem::take(dealer.output());
                receive(&mut router, &sent).unwrap();
                let sent = std::mem::take(router.output());
                receive(&mut dealer, &sent).unwrap();
            }
            assert!(dealer.is_ready() && router.is_ready());
            assert_eq!(router.ping(), is_pinged);
            assert_eq!(
                receive(&mut dealer, b"\x01\x01a\x00\x01b"),
                Ok(vec![message(&[b"a", b"b"], 0)])
            );
        }
    }
}
