//! The LMCache MP protocol (0.5.3 to 0.5.6) from the client's side.
//!
//! * [`Connection`]: one DEALER socket; typed calls that block until the reply or a deadline, and pipelining.
//! * [`Prompt`] and [`Scope`]: what keys are made of. A prompt is encoded once, however often it is sent.
//! * [`EngineDrivenWorker`] and [`LmcacheDrivenWorker`]: the two kinds of engine worker, with real bytes in real
//!   shared memory, so that tests, the demo and the load generator do what an engine does.
//!
//! It speaks to any server of the protocol and must never know how one works inside: no hashes, no leases, no
//! layouts of objects beyond what the protocol promises to workers. It keeps no threads of its own.
#![forbid(unsafe_code)]

mod calls;
mod connection;
mod engine_driven;
mod error;
mod key;
mod lmcache_driven;

pub use connection::{Connection, Options, Reply, Ticket};
pub use engine_driven::{EngineDrivenSpec, EngineDrivenWorker, Retrieved, Stored, Transport};
pub use error::ClientError;
pub use key::{Key, Prompt, Scope};
pub use lmcache_driven::{LmcacheDrivenSpec, LmcacheDrivenWorker};

/// Chunks, blocks and answers are told in the types of the protocol.
pub use kvtier_proto as proto;
pub use kvtier_proto::request::InstanceId;
