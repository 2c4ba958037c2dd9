//! A peer's bytes on the request port, from the greeting on, cut into pieces.

#![no_main]

use kvtier_proto::zmtp::{Version, ZmtpLimits, ZmtpSession};
use libfuzzer_sys::fuzz_target;

const LIMITS: ZmtpLimits = ZmtpLimits {
    frame_bytes: 1 << 16,
    message_frames: 19,
    message_bytes: 1 << 17,
    command_bytes: 512,
};

fuzz_target!(|data: &[u8]| {
    // The first byte: length of the pieces, whether bodies are read in place, and our role.
    let Some((&first, data)) = data.split_first() else {
        return;
    };
    let (piece, in_place) = (1 + usize::from(first >> 2), first & 1 == 1);
    let mut session = match first & 2 {
        0 => ZmtpSession::router(LIMITS),
        _ => ZmtpSession::dealer(Version::V3_1, LIMITS),
    };
    for mut here in data.chunks(piece) {
        if in_place && let Ok(Some(body)) = session.body(1) {
            let at = body.len();
            body.extend_from_slice(here);
            match session.body_received(at) {
                Ok((_, rest)) => here = &here[here.len() - rest.len()..],
                Err(_) => return,
            }
        }
        while !here.is_empty() {
            if session.receive(&mut here).is_err() {
                return;
            }
        }
        assert!(session.held_bytes() as u64 <= LIMITS.message_bytes + 2 * LIMITS.frame_bytes);
        assert!(session.output().len() <= 64 + 43 + 23 * data.len());
    }
});
