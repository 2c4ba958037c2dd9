//! Bytes on their way to one client.
//!
//! Small replies are gathered; the payload of a large one is written from where it is, with its charge, which ends when
//! the system has taken its last byte.

use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::outbox::Outgoing;
use kvtier_sync::budget::Charge;

/// Bytes written for one client before others get their turn.
const TURN_BYTES: usize = 1 << 20;

/// A queue of bytes.
pub type Output = kvtier_zmtp::Output<Charge>;

/// Appends a reply.
pub fn push_reply(output: &mut Output, reply: Outgoing) {
    let Outgoing {
        uid,
        op,
        payload,
        charge,
        ..
    } = reply;
    output.push_frame(&uid, true);
    output.push_frame(&op, payload.is_some());
    match (payload, charge) {
        (Some(payload), Some(charge)) => output.push_large_frame(payload, false, charge),
        (Some(payload), None) => output.push_frame(&payload, false),
        (None, _) => {}
    }
}

/// Writes as much as the socket takes, up to a turn's worth. Returns the number of bytes.
///
/// # Errors
/// The system's, but for a socket that is full.
pub fn write_to(output: &mut Output, socket: impl AsFd) -> Result<usize, Errno> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let mut no_control: [MaybeUninit<u8>; 0] = [];
    let mut no_control = SendAncillaryBuffer::new(&mut no_control);
    let written = output.write_with(TURN_BYTES, |slices| {
        retry_on_intr(|| sendmsg(&socket, slices, &mut no_control, flags))
    });
    match written {
        Err(Errno::AGAIN) => Ok(0),
        written => written,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use kvtier_zmtp::write_frame_header;

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
        let budget = kvtier_sync::budget::Budget::new(1 << 30);
        let mut output = Output::default();
        let mut expected = Vec::new();
        for byte in 0..100_u8 {
            let large = byte % 3 == 0;
            let len = if large { 100_000 } else { 100 };
            let charge = large.then(|| budget.take_anyway(len as u64));
            push_reply(&mut output, reply(byte, len, charge));
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
            push_reply(&mut output, reply(1, 1000, None));
            write_to(&mut output, &socket).unwrap();
        }
        drop(peer);
        assert!(write_to(&mut output, &socket).is_err());
    }
}
