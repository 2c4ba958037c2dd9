//! ZMTP 3.x, the wire protocol of ZeroMQ, without I/O: the side of a ROUTER (RFC 23/ZMTP 3.0, RFC 37/ZMTP 3.1).
//!
//! A [`Session`] is one connection. The caller passes it received bytes and gets [`Event`]s; the protocol's own answers
//! (greeting, READY, PONG) collect in [`Session::output`]. The caller writes messages with [`write_frame_header`]. A
//! peer's routing identity is checked and ignored: the caller identifies connections.
//!
//! | supported | refused |
//! | --- | --- |
//! | versions 3.0 and later, mechanism NULL | versions 1.0 and 2.x, every other mechanism |
//! | peers of type DEALER, REQ, ROUTER | every other socket type |
//! | PING (context echoed, TTL kept), PONG; unknown commands are skipped | malformed commands, reserved flags |
//!
//! Bytes from a peer are hostile: every size is bounded by [`Limits`], and memory grows with the bytes that have arrived,
//! never with a claimed length.
//!
//! This crate never knows a socket, a clock, a thread, or the meaning of a message.
#![forbid(unsafe_code)]

mod command;
mod error;
mod frame;
mod greeting;
mod session;

pub use error::Error;
pub use frame::write_frame_header;
pub use session::{Event, Limits, Message, Session};
