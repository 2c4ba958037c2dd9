//! Bytes on their way to one client.
//!
//! Small replies are gathered; the payload of a large one is written from where it is, with its charge and its leases, which
//! end when the system has taken its last byte.

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use kvtier_common::sync::budget::Charge;
use kvtier_engine::{Payload, PayloadPart};
use kvtier_memory::socket::{self, SocketError, send_slices};
use kvtier_proto::zmtp::Slice;

use super::outbox::Outgoing;

/// Bytes written for one client before others get their turn.
const TURN_BYTES: usize = 1 << 20;

/// Slices handed to the system at once.
const MAX_SLICES: usize = 16;

/// A part of a large payload.
pub struct PayloadPiece {
    sent: Arc<LargePayload>,
    part: PayloadPart,
}

struct LargePayload {
    payload: Payload,
    queued: Instant,
    _charge: Option<Charge>,
}

/// When the oldest large payload was queued that waits.
pub fn oldest(output: &Output) -> Option<Instant> {
    output.first_piece().map(|piece| piece.sent.queued)
}

impl kvtier_proto::zmtp::OutputPiece for PayloadPiece {
    fn len(&self) -> usize {
        self.part.byte_len()
    }
}

/// A queue of bytes.
pub type Output = kvtier_proto::zmtp::Output<PayloadPiece>;

/// Appends a reply.
pub fn push_reply(output: &mut Output, reply: Outgoing, now: Instant) {
    let Outgoing {
        uid,
        op,
        payload,
        charge,
        ..
    } = reply;
    output.push_frame(&uid, true);
    output.push_frame(&op, payload.is_some());
    let Some(payload) = payload else {
        return;
    };
    match payload.without_chunks() {
        Some(bytes) if charge.is_none() => output.push_frame(bytes, false),
        _ => {
            let (len, parts) = (payload.byte_len(), payload.parts());
            let sent = Arc::new(LargePayload {
                payload,
                queued: now,
                _charge: charge,
            });
            let piece = |part| PayloadPiece {
                sent: Arc::clone(&sent),
                part,
            };
            output.push_pieces(len, parts.into_iter().map(piece), false);
        }
    }
}

/// Writes as much as the socket takes, up to a turn's worth. Returns the number of bytes.
///
/// # Errors
/// The system's, but for a socket that is full, and lost memory of L1.
pub fn write_to(output: &mut Output, socket: impl AsFd) -> Result<usize, SocketError> {
    output.write_with(TURN_BYTES, |waiting| {
        let mut slices = [socket::Slice::Bytes(&[]); MAX_SLICES];
        let (mut used, mut has_chunk) = (0, false);
        for (slice, next) in slices.iter_mut().zip(waiting) {
            *slice = match next {
                Slice::Small(bytes) => socket::Slice::Bytes(bytes),
                Slice::Piece(piece, from) => piece.sent.payload.slice(&piece.part, from),
            };
            // Whether a chunk's pages were lost is known when it was sent: before that no frame may be complete.
            let is_chunk = matches!(slice, socket::Slice::Extent(..));
            if has_chunk && !is_chunk {
                break;
            }
            has_chunk = is_chunk;
            used += 1;
        }
        match send_slices(socket.as_fd(), &slices[..used]) {
            Ok(written) => Ok(Some(written)),
            Err(SocketError::System(error)) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use kvtier_proto::zmtp::write_frame_header;

    use super::*;

    fn reply(byte: u8, payload: usize, charge: Option<Charge>) -> Outgoing {
        Outgoing {
            connection: 0,
            uid: vec![byte],
            op: vec![byte],
            payload: Some(vec![byte; payload].into()),
            charge,
        }
    }

    #[test]
    fn replies_arrive_in_order_and_charges_end_with_the_last_byte() {
        let (socket, mut peer) = UnixStream::pair().unwrap();
        socket.set_nonblocking(true).unwrap();
        let budget = kvtier_common::sync::budget::Budget::new(1 << 30);
        let mut output = Output::default();
        let mut expected = Vec::new();
        for byte in 0..100_u8 {
            let large = byte % 3 == 0;
            let len = if large { 100_000 } else { 100 };
            let charge = large.then(|| budget.take_anyway(len as u64));
            push_reply(&mut output, reply(byte, len, charge), Instant::now());
            for (frame, more) in [(1, true), (1, true), (len, false)] {
                write_frame_header(&mut expected, frame, more);
                expected.resize(expected.len() + frame, byte);
            }
        }
        let mut got = vec![0; expected.len()];
        let mut at = 0;
        let mut empty_before = 0;
        while at < got.len() {
            write_to(&mut output, &socket).unwrap();
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
            push_reply(&mut output, reply(1, 1000, None), Instant::now());
            write_to(&mut output, &socket).unwrap();
        }
        drop(peer);
        assert!(write_to(&mut output, &socket).is_err());
    }
}
