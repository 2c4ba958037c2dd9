//! ZMTP 3.x, the wire protocol of ZeroMQ, without I/O: the sides of a ROUTER and of a DEALER (RFC 23/ZMTP 3.0,
//! RFC 37/ZMTP 3.1).
//!
//! A [`Session`] is one connection. The caller passes it received bytes and gets [`Event`]s; the protocol's own answers
//! (greeting, READY, PONG) collect in [`Session::output`]. Messages to the peer go through an [`Output`]. A
//! peer's routing identity is checked and ignored: the caller identifies connections.
//!
//! | supported | refused |
//! | --- | --- |
//! | versions 3.0 and later, mechanism NULL | versions 1.0 and 2.x, every other mechanism |
//! | of a ROUTER: peers of type DEALER, REQ, ROUTER; of a DEALER: DEALER, REP, ROUTER | every other socket type |
//! | PING (context echoed, TTL kept), PONG; unknown commands are skipped | malformed commands, reserved flags |
//!
//! Bytes from a peer are hostile: every size is bounded by [`Limits`], and memory grows with the bytes that have arrived,
//! never with a claimed length.
//!
//! This module never knows a socket, a clock, a thread, or the meaning of a message.
mod command;
mod error;
mod frame;
mod greeting;
mod output;
mod role;
mod session;

pub use error::Error;
pub use frame::write_frame_header;
pub use output::{Output, OutputPiece, Slice};
pub use role::Version;
pub use session::{Event, ZmtpLimits, ZmtpMessage, ZmtpSession};
