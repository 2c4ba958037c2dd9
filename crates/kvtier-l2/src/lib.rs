//! Second tiers: where objects are kept beyond host memory.
//!
//! An [`Adapter`] moves whole objects between L1 and one backend; everything that backends have in common is outside of
//! it, in wrappers. This crate must never know of requests, sessions, leases of L1 or the protocol: it is given keys and
//! memory, and who asked for them is not its business.

mod adapter;
pub mod config;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod error;
pub mod fs;
pub mod mock;
mod object;
mod rate_limited;
pub mod redact;
pub mod registry;
pub mod tier;
pub mod wrap;

pub use adapter::{Adapter, BoxFuture, Capabilities, ListPage, Listed, Loaded, Recovered, Stored};
pub use config::{AdapterConfig, ConfigError};
pub use error::{ErrorKind, L2Error};
pub use object::{Buffer, LoadItem, ObjectSpec, PAGE_BOUND, StoreItem};
pub use rate_limited::RateLimited;
pub use registry::{AdapterType, Registry};
