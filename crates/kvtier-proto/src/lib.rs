//! Bytes of the LMCache MP protocol: operation tables, requests and responses, client generations as data,
//! tensor descriptors and the restricted pickle reader.
//!
//! This crate turns frames into typed values and back. It must never know a socket, a clock, a task, or
//! anything about what is cached.
//!
//! # From frames to a request and back
//!
//! 1. [`frames::ClientMessage::parse`] sorts the frames of a message: `[uid, op, payload...]`.
//! 2. [`generation::Candidates::resolve`] finds the row of the operation tables that the request follows,
//!    and learns which releases the connection's client may be.
//! 3. [`request::Request::decode`] reads the payloads by that row. Token ids go through the caller's
//!    [`key::TokenReader`], which sees their bytes and may know them already.
//! 4. [`response::Response::encode`] returns the third frame of the reply `[uid, op, response]`, or none.
//!
//! A client goes the other way: [`generation::Generation::spec`], [`request::Request::encode`],
//! [`frames::ReplyFrames::parse`], [`response::Response::decode`].
//!
//! # Formats (LMCache 0.5.7, MessagePack)
//!
//! | declared as | on the wire | what decoding takes |
//! | --- | --- | --- |
//! | int or bool that is a whole payload or response | int, bool | also what Python's `int()` and `bool()` make one of: true is 1, 3.7 is 3, "12" is 12, any text but the empty one is true; nil is an error |
//! | int in a structure, int or nil | int, nil | ints of any width; no bool, no float |
//! | float | 8-byte float, or an int | both |
//! | str, bytes | str, bin | never one for the other; str is UTF-8 |
//! | structure | map by name, declared order, every field written | fields in any order, unknown ones skipped, missing ones defaulted or an error; no arrays |
//! | tensor descriptor | extension value of type 1 holding a map | unknown fields are an error too |
//! | chunks in messages | see [`inline`] | unknown fields are an error too |
//! | list, tuple | array | tuples of exactly their length |
//! | enumeration | its text | nothing else |
//! | layout hints | map with only the known keys | unknown keys are skipped, unknown layouts are an error |
//! | token id | int; from 0.5.7 four bytes of one `bin`, big-endian | 0 <= id < 2^32 (the peer takes any int here and fails later) |
//! | block ids | array of arrays of ints, flat before 0.4.7 | ints that fit `i64` |
//! | nothing | no third frame | no third frame, or nil |
//!
//! Writers use the shortest form of ints and lengths, as the peer does. Bytes behind a value are an error.
//!
//! # What comes from outside is hostile
//!
//! No function here panics on any input, recurses on nested input, or reserves memory for more values than
//! the bytes at hand can hold. Decoded values take at most a small multiple of the frame's size; lists whose
//! values are much larger than their bytes are limited in number ([`request::MAX_TENSORS`],
//! [`request::MAX_GROUPS`]). Limiting the size of frames is the front end's part.
#![forbid(unsafe_code)]

pub mod chunk;
pub mod deadline;
pub mod descriptor;
pub mod frames;
pub mod generation;
pub mod inline;
pub mod keep_seconds;

pub mod key;
pub mod key_settings;
mod lenient;
pub mod operation;
pub mod peer;
pub mod pickle;
pub mod request;
pub mod response;
pub mod session;
mod settings;
pub mod skip_load;
pub mod tensor;
pub mod traceparent;
pub mod wire;
pub mod zmtp;
