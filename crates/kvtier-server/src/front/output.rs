//! Bytes on their way to one client.
//!
//! Small replies are gathered in one buffer; the payload of a large one is written from where it is, with its charge,
//! which ends when the system has taken its last byte.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use kvtier_zmtp::write_frame_header;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::outbox::Outgoing;
use crate::budget::Charge;

/// Buffers handed to the system at once.
const MAX_SLICES: usize = 16;

/// Bytes written for one client before others get their turn.
const TURN_BYTES: usize = 1 << 20;

/// Bytes of a buffer of small replies after which the next one begins: a buffer is freed when all of it is written.
const MAX_BUFFER_BYTES: usize = 64 << 10;

/// Largest buffer that is kept for the next reply.
const KEPT_BUFFER_BYTES: usize = 4 << 10;

#[derive(Default)]
struct Segment {
    bytes: Vec<u8>,
    charge: Option<Charge>,
}

/// A queue of bytes.
#[derive(Default)]
pub struct Output {
    segments: VecDeque<Segment>,
    /// Bytes of the first segment that are written.
    written: usize,
    /// Bytes of the segments without a charge.
    small_bytes: usize,
    spare: Vec<u8>,
}

impl Output {
    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Bytes that wait and are charged to no budget.
    pub fn small_bytes(&self) -> usize {
        self.small_bytes
    }

    /// Appends what the protocol says, and empties it.
    pub fn push_bytes(&mut self, bytes: &mut Vec<u8>) {
        self.small(|buffer| buffer.append(bytes));
    }

    /// Appends a message.
    pub fn push_reply(&mut self, reply: Outgoing) {
        let Outgoing {
            uid,
            op,
            payload,
            charge,
            ..
        } = reply;
        self.small(|buffer| {
            write_frame(buffer, &uid, true);
            write_frame(buffer, &op, payload.is_some());
            if let Some(payload) = &payload {
                write_frame_header(buffer, payload.len(), false);
                if charge.is_none() {
                    buffer.extend_from_slice(payload);
                }
            }
        });
        if let (Some(bytes), Some(charge)) = (payload, charge) {
            let charge = Some(charge);
            self.segments.push_back(Segment { bytes, charge });
        }
    }

    /// Writes as much as the socket takes, up to a turn's worth. Returns the number of bytes.
    ///
    /// # Errors
    /// The system's, but for a socket that is full.
    pub fn write_to(&mut self, socket: impl AsFd) -> Result<usize, Errno> {
        let mut total = 0;
        while !self.is_empty() && total < TURN_BYTES {
            let mut slices = [IoSlice::new(&[]); MAX_SLICES];
            let mut from = self.written;
            let mut used = 0;
            for (slice, segment) in slices.iter_mut().zip(&self.segments) {
                *slice = IoSlice::new(&segment.bytes[std::mem::take(&mut from)..]);
                used += 1;
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let mut no_control: [MaybeUninit<u8>; 0] = [];
            let mut no_control = SendAncillaryBuffer::new(&mut no_control);
            match sendmsg(&socket, &slices[..used], &mut no_control, flags) {
                Ok(sent) => {
                    total += sent;
                    self.advance(sent);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(total)
    }

    fn small(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let fits =
            |segment: &Segment| segment.charge.is_none() && segment.bytes.len() < MAX_BUFFER_BYTES;
        if !self.segments.back().is_some_and(fits) {
            self.segments.push_back(Segment {
                bytes: std::mem::take(&mut self.spare),
                charge: None,
            });
        }
        if let Some(Segment { bytes, .. }) = self.segments.back_mut() {
            let before = bytes.len();
            write(bytes);
            self.small_bytes += bytes.len() - before;
        }
    }

    /// Notes that `sent` more bytes are written, and frees what is.
    fn advance(&mut self, sent: usize) {
        self.written += sent;
        while let Some(first) = self.segments.front()
            && self.written >= first.bytes.len()
        {
            self.written -= first.bytes.len();
            let Some(Segment { mut bytes, charge }) = self.segments.pop_front() else {
                return;
            };
            if charge.is_none() {
                self.small_bytes -= bytes.len();
                if bytes.capacity() <= KEPT_BUFFER_BYTES {
                    bytes.clear();
                    self.spare = bytes;
                }
            }
        }
    }
}

fn write_frame(buffer: &mut Vec<u8>, frame: &[u8], more: bool) {
    write_frame_header(buffer, frame.len(), more);
    buffer.extend_from_slice(frame);
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use super::*;

    fn reply(byte: u8, payload: usize, charge: Option<Charge>) -> Outgoing {
        Outgoing {
            connection: 0,
            uid: vec![byte],
            op: vec![byte],
            payload: Some(vec![byte; payload]),
            charge,
        }
    }

    #[test]
    fn replies_arrive_in_order_and_charges_end_with_the_last_byte() {
        let (socket, mut peer) = UnixStream::pair().unwrap();
        socket.set_nonblocking(true).unwrap();
        let budget = crate::budget::Budget::new(1 << 30);
        let mut output = Output::default();
        let mut expected = Vec::new();
        for byte in 0..100_u8 {
            let large = byte % 3 == 0;
            let len = if large { 100_000 } else { 100 };
            let charge = large.then(|| budget.take_anyway(len as u64));
            output.push_reply(reply(byte, len, charge));
            write_frame(&mut expected, &[byte], true);
            write_frame(&mut expected, &[byte], true);
            write_frame(&mut expected, &vec![byte; len], false);
        }
        let mut got = vec![0; expected.len()];
        let mut at = 0;
        let mut empty_before = 0;
        while at < got.len() {
            output.write_to(&socket).unwrap();
            empty_before += usize::from(output.is_empty());
            let end = (at + 50_000).min(got.len());
            at += peer.read(&mut got[at..end]).unwrap();
        }
        assert!(got == expected && output.is_empty() && empty_before > 0);
        assert_eq!(output.small_bytes(), 0);
        // All of it is free again.
        assert!(Arc::clone(&budget).take(1 << 30).is_some());
    }

    #[test]
    fn peer_that_does_not_read_is_counted_and_its_end_is_an_error() {
        let (socket, peer) = UnixStream::pair().unwrap();
        socket.set_nonblocking(true).unwrap();
        let mut output = Output::default();
        while output.small_bytes() < 1 << 20 {
            output.push_reply(reply(1, 1000, None));
            output.write_to(&socket).unwrap();
        }
        drop(peer);
        assert!(output.write_to(&socket).is_err());
    }
}
