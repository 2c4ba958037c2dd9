//! What all services read: immutable, or with a lock of its own that is taken after the services' locks.
//!
//! The lock here guards which configuration is the current one; no other lock is acquired inside.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use kvtier_common::error::{Error, Result};
use kvtier_common::state::StateDir;
use kvtier_common::sync::RwLock;
use kvtier_config::ServerConfig;
use kvtier_core::GroupRow;
use kvtier_core::object_key::{KeyError, KeyScope};
use kvtier_observe::metrics::Metrics;
use kvtier_observe::trace::Tracer;
use kvtier_proto::key::CacheKey;
use kvtier_store::l1::{Clock, L1};
use kvtier_store::tenants::Salts;
use kvtier_store::tiers::L2;

use super::blend::Blend;
use super::client_warnings::ClientWarnings;
use super::devices::Devices;
use super::instances::{Instances, rows};
use super::kv_events::KvEventSource;
use super::sessions::table::AgentSessions;

/// Longest request id and model name, bytes. They are remembered for as long as a request or an object lives.
const MAX_NAME_BYTES: usize = 1024;

/// The configuration, the memory, and the workers of this server.
pub struct Context {
    /// The current one: a reload replaces it.
    pub config: RwLock<Arc<ServerConfig>>,
    /// Tokens per chunk of a client that asks for no other size.
    pub chunk_size: NonZeroUsize,
    pub l1: L1,
    /// The tiers below L1, if there are any.
    pub l2: Option<Arc<L2>>,
    pub salts: Salts,
    /// What outlives the process is there, or why it is nowhere.
    pub state: Result<StateDir>,
    /// Only [`super::workers`] inserts and removes them.
    pub instances: Instances,
    /// Transfers on a GPU keep them open to their end.
    pub devices: Devices,
    pub metrics: Arc<Metrics>,
    pub tracer: Tracer,
    pub clock: Arc<Clock>,
    pub client_warnings: ClientWarnings,
    pub kv_events: KvEventSource,
    pub sessions: AgentSessions,
    /// With `--engine-type blend`.
    pub blend: Option<Arc<Blend>>,
}

/// Tokens per chunk of a client that asks for `asked`, of a server with this chunk size.
pub fn chunk_size(asked: Option<u32>, own: NonZeroUsize) -> NonZeroUsize {
    let asked = asked.and_then(|tokens| usize::try_from(tokens).ok());
    asked.and_then(NonZeroUsize::new).unwrap_or(own)
}

impl Context {
    /// The configuration. Of what a reload may change, take it each time.
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config.read())
    }

    /// The time of all tables.
    pub fn now(&self) -> Duration {
        self.clock.now()
    }

    /// Tokens per chunk of a client that asks for `asked`.
    pub fn chunk_size(&self, asked: Option<u32>) -> NonZeroUsize {
        chunk_size(asked, self.chunk_size)
    }

    /// The objects that a key names.
    pub fn scope<T>(&self, key: &CacheKey<'_, T>) -> Result<KeyScope, KeyError> {
        self.salts.scope(key)
    }

    /// The rows of a lookup for all workers; none if they are unknown.
    pub fn rows(&self, scope: &KeyScope, chunk_size: NonZeroUsize) -> Arc<[GroupRow]> {
        let scope = scope.of_all_workers();
        let instances = self.instances.of_workers(
            scope.model_name(),
            scope.world_size(),
            scope.workers(),
            chunk_size,
        );
        rows(&scope, &instances.unwrap_or_default())
    }

    /// [`Context::scope`], for a request whose names are kept: long ones are refused.
    pub fn short_scope<T>(&self, key: &CacheKey<'_, T>) -> Result<KeyScope> {
        check_name("request_id", key.request_id)?;
        check_name("model_name", key.model_name)?;
        self.scope(key).map_err(Error::refused)
    }
}

/// Refuses a name that is too long to be kept.
pub fn check_name(field: &str, name: &str) -> Result<()> {
    match name.len() {
        0..=MAX_NAME_BYTES => Ok(()),
        bytes => Err(Error::refused(format!(
            "{field} has {bytes} bytes; allowed: at most {MAX_NAME_BYTES}"
        ))),
    }
}
