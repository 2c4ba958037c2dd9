//! Frames: a byte of flags, a length of one or eight bytes, a body.

use crate::zmtp::Error;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Maximum bytes of a header.
const MAX_HEADER_BYTES: usize = 9;

/// Minimum growth of a body that is read in place.
const MIN_GROWTH_BYTES: usize = 16 << 10;

/// Appends the header of a message's frame; `more` frames of the message follow it.
pub fn write_frame_header(out: &mut Vec<u8>, len: usize, more: bool) {
    write_header(out, more_flag(more), len);
}

fn more_flag(more: bool) -> u8 {
    if more { MORE } else { 0 }
}

pub(crate) fn write_command_header(out: &mut Vec<u8>, len: usize) {
    write_header(out, COMMAND, len);
}

fn write_header(out: &mut Vec<u8>, flags: u8, len: usize) {
    write_header_of(out, flags, len as u64);
}

fn write_header_of(out: &mut Vec<u8>, flags: u8, len: u64) {
    match u8::try_from(len) {
        Ok(len) => out.extend_from_slice(&[flags, len]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend_from_slice(&len.to_be_bytes());
        }
    }
}

/// FrameKind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FrameKind {
    Command,
    Message { more: bool },
}

/// A frame's header.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Header {
    pub kind: FrameKind,
    pub len: u64,
}

/// Whether a frame's body is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Body {
    Keep,
    Discard,
}

/// A complete frame; the body is empty if it was discarded.
#[derive(Debug)]
pub(crate) struct ZmtpFrame {
    pub kind: FrameKind,
    pub disposition: Body,
    pub body: Vec<u8>,
}

/// Reserves `more` bytes: a peer that sends much must not end the process.
fn grow(body: &mut Vec<u8>, more: usize) -> Result<(), Error> {
    let bytes = body.len() + more;
    body.try_reserve_exact(more)
        .map_err(|_| Error::OutOfMemory { bytes })
}

/// Decodes frames from a stream of bytes.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    header: [u8; MAX_HEADER_BYTES],
    header_len: usize,
    partial: Option<Partial>,
}

#[derive(Debug)]
struct Partial {
    frame: ZmtpFrame,
    /// Bytes of the body still to come.
    missing: u64,
}

impl Partial {
    /// `missing` as a `usize`, saturating.
    fn missing(&self) -> usize {
        usize::try_from(self.missing).unwrap_or(usize::MAX)
    }
}

impl Decoder {
    /// Consumes `input` up to the end of a frame, or all of it. `admit` checks each header.
    pub fn receive(
        &mut self,
        input: &mut &[u8],
        admit: impl FnOnce(Header) -> Result<Body, Error>,
    ) -> Result<Option<ZmtpFrame>, Error> {
        if self.partial.is_none() {
            let Some(header) = self.header(input)? else {
                return Ok(None);
            };
            self.partial = Some(Partial {
                frame: ZmtpFrame {
                    kind: header.kind,
                    disposition: admit(header)?,
                    body: Vec::new(),
                },
                missing: header.len,
            });
        }
        let Some(partial) = &mut self.partial else {
            return Ok(None);
        };
        let (here, rest) = input.split_at(partial.missing().min(input.len()));
        *input = rest;
        partial.missing -= here.len() as u64;
        let (missing, body) = (partial.missing(), &mut partial.frame.body);
        if partial.frame.disposition == Body::Keep {
            if body.capacity() - body.len() < here.len() {
                // At most doubled, so that it grows with what has arrived, and never beyond the frame.
                grow(body, here.len() + body.len().min(missing))?;
            }
            body.extend_from_slice(here);
        }
        Ok(self.take_complete())
    }

    /// A kept body that misses at least `min_missing` bytes, with spare capacity for some of them, to be filled in
    /// place and reported by [`Decoder::body_received`].
    pub fn body(&mut self, min_missing: usize) -> Result<Option<&mut Vec<u8>>, Error> {
        let Some(partial) = &mut self.partial else {
            return Ok(None);
        };
        let missing = partial.missing();
        if partial.frame.disposition == Body::Discard || missing < min_missing.max(1) {
            return Ok(None);
        }
        let body = &mut partial.frame.body;
        if body.capacity() == body.len() {
            grow(body, missing.min(body.len().max(MIN_GROWTH_BYTES)))?;
        }
        Ok(Some(body))
    }

    /// Reports that [`Decoder::body`] had `len` bytes and has grown. Returns the frame if it is complete, and the bytes
    /// appended beyond its end.
    pub fn body_received(&mut self, len: usize) -> (Option<ZmtpFrame>, Vec<u8>) {
        let Some(partial) = &mut self.partial else {
            return (None, Vec::new());
        };
        let end = len.saturating_add(partial.missing());
        let body = &mut partial.frame.body;
        let rest = if body.len() > end {
            body.split_off(end)
        } else {
            Vec::new()
        };
        partial.missing -= (body.len() - len) as u64;
        (self.take_complete(), rest)
    }

    /// Whether a frame is partly received.
    pub fn is_amid_frame(&self) -> bool {
        self.header_len > 0 || self.partial.is_some()
    }

    /// Bytes of the incomplete frame that have arrived: its spare capacity has no pages yet.
    pub fn held_bytes(&self) -> usize {
        let partial = self.partial.as_ref();
        partial.map_or(0, |partial| partial.frame.body.len())
    }

    fn take_complete(&mut self) -> Option<ZmtpFrame> {
        let partial = self.partial.take_if(|partial| partial.missing == 0)?;
        Some(partial.frame)
    }

    /// The next header, once it is complete.
    fn header(&mut self, input: &mut &[u8]) -> Result<Option<Header>, Error> {
        loop {
            let needed = match self.header_len {
                0 => 1,
                _ if self.header[0] & LONG != 0 => MAX_HEADER_BYTES,
                _ => 2,
            };
            let (here, rest) = input.split_at((needed - self.header_len).min(input.len()));
            *input = rest;
            self.header[self.header_len..][..here.len()].copy_from_slice(here);
            self.header_len += here.len();
            if self.header_len < needed {
                return Ok(None);
            }
            let flags = self.header[0];
            let kind = match flags & !LONG {
                0 => FrameKind::Message { more: false },
                MORE => FrameKind::Message { more: true },
                COMMAND => FrameKind::Command,
                _ => return Err(Error::Flags(flags)),
            };
            if needed == 1 {
                continue;
            }
            self.header_len = 0;
            let [_, short, ..] = self.header;
            let [_, long @ ..] = self.header;
            let len = match needed {
                2 => u64::from(short),
                _ => u64::from_be_bytes(long),
            };
            return Ok(Some(Header { kind, len }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keep(_: Header) -> Result<Body, Error> {
        Ok(Body::Keep)
    }

    #[test]
    fn header_is_short_up_to_255_bytes() {
        for (len, header) in [
            (0, &[1, 0][..]),
            (255, &[1, 255]),
            (256, &[3, 0, 0, 0, 0, 0, 0, 1, 0]),
        ] {
            let mut out = Vec::new();
            write_frame_header(&mut out, len, true);
            assert_eq!(out, header);
        }
    }

    #[test]
    fn claimed_length_reserves_nothing() {
        let mut decoder = Decoder::default();
        let mut input = &[2, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, b'x'][..];
        assert!(decoder.receive(&mut input, keep).unwrap().is_none());
        assert_eq!(decoder.held_bytes(), 1);
        let body = decoder.body(1).unwrap().unwrap();
        assert!(body.capacity() <= 1 + MIN_GROWTH_BYTES);
    }

    #[test]
    fn memory_at_most_doubles_what_has_arrived() {
        let mut decoder = Decoder::default();
        let mut header = Vec::new();
        write_frame_header(&mut header, 1 << 20, false);
        decoder.receive(&mut &header[..], keep).unwrap();
        let mut arrived = 0;
        while arrived < 1 << 20 {
            let frame = decoder.receive(&mut &[7; 1000][..(1000).min((1 << 20) - arrived)], keep);
            arrived += 1000.min((1 << 20) - arrived);
            match frame.unwrap() {
                None => {
                    assert_eq!(decoder.held_bytes(), arrived);
                    let body = &decoder.partial.as_ref().unwrap().frame.body;
                    assert!(body.capacity() <= (2 * arrived).min(1 << 20));
                }
                Some(frame) => assert_eq!(
                    (frame.body.len(), frame.body.capacity()),
                    (1 << 20, 1 << 20)
                ),
            }
        }
        assert!(!decoder.is_amid_frame());
    }

    #[test]
    fn body_read_in_place_ends_where_its_frame_does() {
        let mut decoder = Decoder::default();
        let mut input = &[0, 5, b'a'][..];
        decoder.receive(&mut input, keep).unwrap();
        assert!(decoder.body(5).unwrap().is_none());
        let body = decoder.body(4).unwrap().unwrap();
        body.extend_from_slice(b"bcde\x00\x01z");
        let (frame, rest) = decoder.body_received(1);
        assert_eq!(frame.unwrap().body, b"abcde");
        assert_eq!(rest, b"\x00\x01z");
        assert!(decoder.body(1).unwrap().is_none());
    }

    #[test]
    fn discarded_body_is_not_held() {
        let mut decoder = Decoder::default();
        let mut input = &[1, 3, b'a', b'b'][..];
        let discard = |_: Header| Ok(Body::Discard);
        assert!(decoder.receive(&mut input, discard).unwrap().is_none());
        assert_eq!(decoder.held_bytes(), 0);
        assert!(decoder.body(1).unwrap().is_none());
        let frame = decoder.receive(&mut &b"c"[..], keep).unwrap().unwrap();
        assert_eq!(
            (frame.kind, frame.body.len()),
            (FrameKind::Message { more: true }, 0)
        );
    }

    #[test]
    fn reserved_flags_are_refused() {
        for flags in 0..=255_u8 {
            let mut decoder = Decoder::default();
            let result = decoder.receive(&mut &[flags][..], keep);
            assert_eq!(
                result.is_ok(),
                [0, 1, 2, 3, 4, 6].contains(&flags),
                "{flags}"
            );
        }
    }
}
