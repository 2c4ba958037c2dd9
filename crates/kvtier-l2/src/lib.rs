//! Second tiers: storage of objects beyond host memory.
//!
//! An [`Adapter`] moves whole objects between L1 and one backend; what all backends have in common is in wrappers around
//! it. This crate must never know of requests, sessions, leases of L1 or the protocol: its input is keys and memory.

#![cfg_attr(not(test), forbid(unsafe_code))]

mod adapter;
pub mod backoff;
pub mod config;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod error;
mod key_set;
pub mod metadata;
pub mod mock;
pub mod net;
mod object;
mod probe;
pub mod redact;
pub mod registry;
pub mod sample;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tier;
pub mod tls;
pub mod trailer;
pub mod transform;
pub mod wrap;

pub use adapter::{
    Adapter, BoxFuture, Capabilities, ListPage, Listed, Loaded, Recovered, Stored, recover_pages,
};
pub use config::{AdapterConfig, ConfigError};
pub use error::{ErrorKind, L2Error};
pub use key_set::KeySet;
pub use object::{Buffer, Element, LoadItem, ObjectSpec, PAGE_BOUND, StoreItem, key_digest};
pub use probe::{Probed, probe};
pub use registry::{AdapterType, Registry};
