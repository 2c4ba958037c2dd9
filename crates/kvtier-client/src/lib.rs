//! Client of the LMCache MP protocol (the generation of 0.5.3 to 0.5.6).
//!
//! * [`Connection`]: for one thread; typed calls that block until the reply or a deadline, and pipelining.
//! * [`Client`]: for many threads, with futures, heartbeats and recovery after a restart; it has two threads.
//! * [`Prompt`] and [`Scope`]: the parts of keys. A prompt is encoded once, however often it is sent.
//! * [`EngineDrivenWorker`] and [`LmcacheDrivenWorker`]: the two kinds of engine worker, with real bytes in real
//!   shared memory, for tests, the demo and the load generator.
//! * [`EngineDrivenTransfer`]: one store or retrieve of a worker that copies by itself, given its pages and its requests.
//!
//! It works with any server of the protocol and must never know how one works inside: no hashes, no leases, no
//! layouts of objects beyond what the protocol promises to workers.
#![forbid(unsafe_code)]

mod answers;
mod backoff;
mod calls;
mod client;
mod connection;
mod engine_driven;
mod error;
mod key;
mod lmcache_driven;
mod message;
mod wire;
mod worker;

pub use client::{
    ChunkTerms, Client, Future, Health, HealthCallback, KvEventCallback, KvEventUpdate,
    MAX_IN_FLIGHT, RecoverHook, Settings,
};
pub use connection::{Connection, Options};
pub use engine_driven::{
    ChunkFormat, ChunkSink, ChunkSource, EngineDrivenSpec, EngineDrivenTransfer,
    EngineDrivenWorker, Retrieval, Retrieved, SharedPool, Stored, TransferServer, Transport,
    whole_chunks,
};
pub use error::ClientError;
pub use key::{Key, Prompt, Scope};
pub use lmcache_driven::{LmcacheDrivenSpec, LmcacheDrivenWorker};
pub use message::{ClientReply, Ticket};
pub use worker::{Worker, WorkerSpec};

/// The types of chunks, blocks and answers.
pub use kvtier_proto as proto;
pub use kvtier_proto::request::InstanceId;
