//! The LMCache MP protocol (0.5.3 to 0.5.6) from the client's side.
//!
//! * [`Connection`]: one DEALER socket; typed calls that block until the reply or a deadline, and pipelining.
//! * [`Client`]: the same for many threads, with futures, heartbeats and recovery after a restart; it keeps two threads.
//! * [`Prompt`] and [`Scope`]: what keys are made of. A prompt is encoded once, however often it is sent.
//! * [`EngineDrivenWorker`] and [`LmcacheDrivenWorker`]: the two kinds of engine worker, with real bytes in real
//!   shared memory, so that tests, the demo and the load generator do what an engine does.
//!
//! It speaks to any server of the protocol and must never know how one works inside: no hashes, no leases, no
//! layouts of objects beyond what the protocol promises to workers.
#![forbid(unsafe_code)]

mod answers;
mod calls;
mod client;
mod connection;
mod engine_driven;
mod error;
mod key;
mod lmcache_driven;
mod outgoing;

pub use client::{
    ChunkTerms, Client, Future, Health, HealthCallback, MAX_IN_FLIGHT, RecoverHook, Settings,
};
pub use connection::{Connection, Options, Reply, Ticket};
pub use engine_driven::{EngineDrivenSpec, EngineDrivenWorker, Retrieved, Stored, Transport};
pub use error::ClientError;
pub use key::{Key, Prompt, Scope};
pub use lmcache_driven::{LmcacheDrivenSpec, LmcacheDrivenWorker};

/// Chunks, blocks and answers are told in the types of the protocol.
pub use kvtier_proto as proto;
pub use kvtier_proto::request::InstanceId;
