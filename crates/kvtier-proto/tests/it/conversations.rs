//! Whole conversations of the real client and server, and what that server was probed with.

use std::collections::HashMap;

use crate::support::{files, frames, g6_row, list, load, slices, text};
use kvtier_proto::frames::{ClientMessage, ReplyFrames};
use kvtier_proto::generation::{Candidates, Generation};
use kvtier_proto::key::VecTokens;
use kvtier_proto::request::Request;
use kvtier_proto::response::Response;
use serde_json::Value;

/// Probes that no decoder should take, each for the reason in its name.
const REFUSED: [&str; 9] = [
    "unknown_id",
    "unknown_name",
    "too_few_payloads",
    "too_many_payloads",
    "malformed_payload",
    "wrong_type_payload",
    "trailing_bytes_in_payload",
    "one_frame",
    // The peer decodes these tokens and fails at hashing.
    "lookup_token_over_u32",
];

#[test]
fn captured_conversations() {
    for file in files("capture_") {
        let vectors = load(&file);
        let mut clients: HashMap<u64, Candidates> = HashMap::new();
        for frame in list(&vectors["frames"]) {
            let context = format!("{file}: {}", text(&frame["op"]));
            let message = whole_frames(&frame["frames"]);
            match text(&frame["dir"]) {
                "c2s" => {
                    let client = clients
                        .entry(frame["client"].as_u64().unwrap())
                        .or_default();
                    let operation = check_request(&message, client)
                        .unwrap_or_else(|error| panic!("{context}: {error}"));
                    assert_eq!(operation, text(&frame["op"]), "{context}");
                    // The first request decides.
                    assert_eq!(client.decided(), Some(Generation::G6), "{context}");
                }
                "s2c" => {
                    let operation = check_reply(&message);
                    assert_eq!(operation, text(&frame["op"]), "{context}");
                }
                other => panic!("{context}: unknown direction {other}"),
            }
        }
        assert!(clients.len() >= 2, "{file}");
    }
}

#[test]
fn probed_servers() {
    for file in files("server_") {
        let vectors = load(&file);
        let mut client = Candidates::only(Generation::G6);
        for row in list(&vectors["rows"]) {
            let name = text(&row["name"]);
            let context = format!("{file}: {name}");
            let result = check_request(&whole_frames(&row["request"]), &mut client);
            assert_eq!(
                result.is_err(),
                REFUSED.contains(&name),
                "{context}: {result:?}"
            );
            let replies = list(&row["replies"]);
            for reply in replies {
                check_reply(&whole_frames(reply));
            }
            assert!(replies.is_empty() || result.is_ok(), "{context}");
        }
    }
}

/// Decodes a message as a server does and encodes it again; returns the operation's name.
fn check_request(message: &[Vec<u8>], client: &mut Candidates) -> Result<String, String> {
    let message = slices(message);
    let request = match ClientMessage::parse(message.iter().copied()) {
        Ok(ClientMessage::Request(request)) => request,
        Ok(ClientMessage::Stream { .. }) => return Ok("(stream)".to_owned()),
        Err(error) => return Err(error.to_string()),
    };
    let spec = client
        .resolve(&request, &[])
        .map_err(|error| error.to_string())?
        .spec;
    let decoded = Request::decode(spec, &request.payloads, &mut VecTokens)
        .map_err(|error| error.to_string())?;
    assert_eq!(
        decoded.encode(spec).unwrap(),
        request.payloads,
        "{}",
        spec.operation
    );
    Ok(spec.operation.name().to_owned())
}

/// Decodes a reply as a client does and encodes it again; returns the operation's name.
fn check_reply(reply: &[Vec<u8>]) -> String {
    let parsed = ReplyFrames::parse(slices(reply)).unwrap();
    let spec = g6_row(parsed.op);
    let name = spec.operation.name().to_owned();
    // A recorded pickle that was cut ends before the map does.
    if parsed.payload.is_some_and(|payload| payload.ends_with(CUT)) {
        assert!(Response::decode(spec.response, parsed.payload).is_err());
        return name;
    }
    let response = Response::decode(spec.response, parsed.payload)
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(response.encode().as_deref(), parsed.payload, "{name}");
    name
}

/// Marks the end of a frame that the recording cut.
const CUT: &[u8] = b"(cut)";

/// The frames of a message. Long ones were recorded as `<hex>...(<n> bytes)`: bytes are padded to that
/// length, which suffices for data that is not read; anything else gets a mark.
fn whole_frames(recorded: &Value) -> Vec<Vec<u8>> {
    if list(recorded)
        .iter()
        .all(|frame| !text(frame).contains("..."))
    {
        return frames(recorded);
    }
    list(recorded)
        .iter()
        .map(|frame| {
            let Some((start, rest)) = text(frame).split_once("...(") else {
                return hex::decode(text(frame)).unwrap();
            };
            let len: usize = rest.strip_suffix(" bytes)").unwrap().parse().unwrap();
            let mut bytes = hex::decode(start).unwrap();
            assert!(bytes.len() < len);
            if matches!(bytes[0], 0xc4..=0xc6) {
                bytes.resize(len, 0);
            } else {
                bytes.extend_from_slice(CUT);
            }
            bytes
        })
        .collect()
}
