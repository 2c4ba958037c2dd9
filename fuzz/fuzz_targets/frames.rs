//! A client's message, read by every generation's tables.

#![no_main]

use kvtier_proto::frames::{ClientMessage, ReplyFrames, RequestFrames};
use kvtier_proto::generation::{Candidates, Generation, OperationSpec};
use kvtier_proto::key::{SkipTokens, VecTokens};
use kvtier_proto::request::Request;
use kvtier_proto::response::Response;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let frames = split(data);
    if let Ok(ClientMessage::Request(request)) = ClientMessage::parse(frames.iter().copied()) {
        let mut candidates = Candidates::all();
        // The second time the set is narrower; what was possible must stay readable.
        for _ in 0..2 {
            if let Ok(resolved) = candidates.resolve(&request, &[]) {
                assert!(candidates.contains(resolved.generation));
                exercise(resolved.spec, &request);
            }
        }
        for generation in Generation::ALL {
            if let Ok(resolved) = Candidates::only(generation).resolve(&request, &Generation::ALL) {
                assert_eq!(resolved.generation, generation);
                exercise(resolved.spec, &request);
            }
        }
    }
    if let Ok(reply) = ReplyFrames::parse(frames.iter().copied()) {
        let _ = reply.uid_number();
        for spec in Generation::G6.specs() {
            if let Ok(response) = Response::decode(spec.response, reply.payload) {
                let encoded = response.encode();
                let again =
                    Response::decode(spec.response, encoded.as_deref()).expect("our own bytes");
                assert_eq!(again.encode(), encoded);
            }
        }
    }
});

/// What decodes must encode and decode to the same bytes; counting tokens agrees with reading them.
fn exercise(spec: &OperationSpec, request: &RequestFrames<'_>) {
    let decoded = Request::decode(spec, &request.payloads, &mut VecTokens);
    let counted = Request::decode(spec, &request.payloads, &mut SkipTokens);
    assert_eq!(decoded.is_ok(), counted.is_ok());
    let Ok(decoded) = decoded else { return };
    assert_eq!(decoded.operation(), spec.operation);
    // Some readings say more than an older client's payloads can; that is an error, not a crash.
    let Ok(encoded) = decoded.encode(spec) else {
        return;
    };
    let payloads: Vec<&[u8]> = encoded.iter().map(Vec::as_slice).collect();
    let again = Request::decode(spec, &payloads, &mut VecTokens).expect("our own bytes");
    assert_eq!(again.encode(spec).expect("encoded before"), encoded);
}

fn split(mut data: &[u8]) -> Vec<&[u8]> {
    let mut frames = Vec::new();
    while let Some((length, rest)) = data.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
        let (frame, rest) = rest.split_at(length);
        frames.push(frame);
        data = rest;
    }
    frames
}
