//! ZMTP 3.x, the wire protocol of ZeroMQ, without I/O: the side of a ROUTER (RFC 23/ZMTP 3.0, RFC 37/ZMTP 3.1).
//!
//! A [`Session`] is one connection. The caller hands it the bytes that arrive and gets [`Event`]s; what the protocol itself
//! answers (greeting, READY, PONG) collects in [`Session::output`]. Messages of the caller's own are written with
//! [`write_frame_header`]. A routing identity that a peer claims is checked and ignored: connections are the caller's.
//!
//! | spoken | refused |
//! | --- | --- |
//! | versions 3.0 and later, mechanism NULL | versions 1.0 and 2.x, every other mechanism |
//! | peers of type DEALER, REQ, ROUTER | every other socket type |
//! | PING (context echoed, TTL kept), PONG; unknown commands are skipped | malformed commands, reserved flags |
//!
//! Bytes from a peer are hostile: every size has a bound in [`Limits`], and memory grows with the bytes that have arrived,
//! never with a length that was only claimed.
//!
//! This crate must never know a socket, a clock, a thread, or what a message means.
#![forbid(unsafe_code)]

mod command;
mod error;
mod frame;
mod greeting;
mod session;

pub use error::Error;
pub use frame::write_frame_header;
pub use session::{Event, Limits, Message, Session};
