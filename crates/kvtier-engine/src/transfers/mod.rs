//! Transfers: stores and retrieves, copied by the server or by the worker itself.
//!
//! | state | guarded by |
//! | --- | --- |
//! | [`PreparedTransfers`]: memory granted by PREPARE until its COMMIT | its mutex; the budget's is taken inside |
//! | [`StagingBudget`]: bytes reserved for stores, and leased to retrieves between PREPARE and COMMIT | its mutex; the cache's lock is taken inside |
//! | [`RefusedRetrieves`]: connections whose next pings are refused | its mutex; nothing is taken inside |
//!
//! A transfer that the server copies is in no table: its [`InFlightCopy`](copy) owns the guard of the pages and the reservation or the
//! leases, and ends them when it is dropped.

mod copy;
mod deadline;
mod engine_driven;
mod inline;
mod place;
mod prepared;
mod refused_retrieves;
mod skipped;
mod staging;
mod store;
mod traced;
mod worker_copy;
mod worker_range;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvtier_common::error::{Error, ErrorKind};
use kvtier_core::cache::GrantOrigin;
use kvtier_core::prompt::Prompt;
use kvtier_device::Direction;
use kvtier_proto::key::CacheKey;
use kvtier_proto::request::{InstanceId, Retrieve, RetrieveMatched, Store};

use super::blend::Blend;
use super::context::Context;
use super::lookups::Lookups;
use super::{Caller, Reply};
use copy::CopyRequest;
use engine_driven::WorkerRequest;
use place::PlaceRequest;
pub use prepared::Grant;
use prepared::{GRANT_TTLS, PreparedTransfers};
use refused_retrieves::RefusedRetrieves;
pub use skipped::Skipped;
pub use staging::Charge;
use staging::StagingBudget;

/// The service of transfers.
pub struct Transfers {
    context: Arc<Context>,
    lookups: Arc<Lookups>,
    pub prepared: PreparedTransfers,
    pub staging: Arc<StagingBudget>,
    pub refused_retrieves: RefusedRetrieves,
    /// Whether the log says that much memory is withheld.
    is_much_withheld: AtomicBool,
}

impl Drop for Transfers {
    /// The end of the server frees nothing in the ledger: for the next one, clients may still copy.
    fn drop(&mut self) {
        self.context.l1.cache.detach_ledger();
    }
}

impl Transfers {
    pub fn new(context: &Arc<Context>, lookups: &Arc<Lookups>) -> Self {
        Self {
            prepared: PreparedTransfers::default(),
            staging: Arc::new(StagingBudget::new(context.l1.staging_limit())),
            refused_retrieves: RefusedRetrieves::default(),
            is_much_withheld: AtomicBool::new(false),
            lookups: Arc::clone(lookups),
            context: Arc::clone(context),
        }
    }

    /// Abandons the prepared transfers of an instance that has left, was replaced or fell silent; returns their number. Its
    /// process may only be stopped and wake up again, so memory that it may still write is quarantined for one more write TTL.
    pub fn abandon(&self, instance: InstanceId) -> usize {
        let until = self.context.now() + self.context.config().write_ttl;
        self.prepared.abandon(instance, until)
    }

    /// Abandons transfers that were not committed in time, and answers what is held for refused retrieves.
    pub fn expire(&self, now: Duration) {
        // Dropped, each is answered.
        drop(self.refused_retrieves.due(now));
        let abandoned = self.prepared.expire(self.context.config().write_ttl, now);
        if abandoned > 0 {
            let metrics = &self.context.metrics;
            metrics.expired_transfers.inc_by(abandoned as u64);
            tracing::warn!(
                transfers = abandoned,
                "transfers were prepared and not committed in time; abandoned"
            );
        }
        let arena = &self.context.l1.arena;
        let is_unreachable = self.prepared.has_inherited() && arena.is_alone();
        if self.prepared.expire_inherited(now, is_unreachable) {
            tracing::info!("memory that clients of the server before may have copied is free");
            arena.trim();
        }
        self.warn_of_withheld();
    }

    /// Logs once that more than an eighth of L1 is withheld: half of what may be staged.
    fn warn_of_withheld(&self) {
        let (_, transfers, bytes) = self.prepared.counts();
        let is_much = bytes > self.staging.limit() / 2;
        if is_much && !self.is_much_withheld.load(Ordering::Relaxed) {
            tracing::warn!(
                transfers,
                bytes,
                limit_bytes = self.staging.limit(),
                "clients did not commit what they were granted of L1; withholding more than an eighth of it, and stores have the \
                 rest of the limit, until the clients commit or end, or --l1-write-ttl-seconds passes twice"
            );
        }
        self.is_much_withheld.store(is_much, Ordering::Relaxed);
    }

    /// Whether more than an eighth of L1 was withheld when it was last counted.
    pub fn is_much_withheld(&self) -> bool {
        self.is_much_withheld.load(Ordering::Relaxed)
    }

    /// Quarantines what clients of the earlier process may still copy, as grants of instances that have left.
    pub fn inherit(&self) {
        let Some((memory, objects)) = self.context.l1.heritage.take() else {
            return;
        };
        let cache = &self.context.l1.cache;
        let until =
            |origin: &GrantOrigin| origin.granted_at + self.context.config().write_ttl * GRANT_TTLS;
        let charge = |origin: &GrantOrigin, direction, bytes| {
            self.staging.inherit(&origin.namespace, direction, bytes)
        };
        let stores = memory.by_grant().into_iter().map(|(origin, memory)| {
            let bytes = cache.footprint(memory.extents().map(|extent| extent.len));
            let charge = charge(&origin, Direction::Store, bytes);
            (
                until(&origin),
                Grant::Store(memory, charge, Skipped::default()),
            )
        });
        let retrieves = objects.by_grant().into_iter().map(|(origin, lease)| {
            let bytes = cache.footprint(lease.extents().iter().map(|extent| extent.len));
            let charge = charge(&origin, Direction::Retrieve, bytes);
            (until(&origin), Grant::Retrieve(vec![lease], vec![charge]))
        });
        self.prepared.inherit(stores.chain(retrieves));
    }

    /// Serves a store.
    pub fn store(self: &Arc<Self>, caller: Caller, store: &Store<'_, Prompt>, reply: Reply) {
        let request = CopyRequest {
            transfers: self,
            direction: Direction::Store,
            caller,
            instance: store.instance,
            key: &store.key,
            block_ids: &store.block_ids,
            event: store.event_handle,
            skip_tokens: 0,
            started: self.context.now(),
        };
        request.serve(reply);
    }

    /// Serves a retrieve.
    pub fn retrieve(
        self: &Arc<Self>,
        caller: Caller,
        retrieve: &Retrieve<'_, Prompt>,
        reply: Reply,
    ) {
        let request = CopyRequest {
            transfers: self,
            direction: Direction::Retrieve,
            caller,
            instance: retrieve.instance,
            key: &retrieve.key,
            block_ids: &retrieve.block_ids,
            event: retrieve.event_handle,
            skip_tokens: retrieve.skip_first_n_tokens,
            started: self.context.now(),
        };
        request.serve(reply);
    }

    /// Writes segments into the pages of a worker.
    pub fn place(
        self: &Arc<Self>,
        blend: &Blend,
        caller: Caller,
        retrieve: &RetrieveMatched<'_, Prompt>,
        reply: Reply,
    ) {
        let request = PlaceRequest {
            transfers: self,
            blend,
            caller,
            retrieve,
        };
        request.serve(reply);
    }

    /// A request of a worker that copies by itself, to be served by one of its methods.
    pub fn engine_driven<'a>(
        &'a self,
        key: &'a CacheKey<'a, Prompt>,
        instance: InstanceId,
    ) -> WorkerRequest<'a> {
        WorkerRequest {
            transfers: self,
            key,
            instance,
            started: self.context.now(),
        }
    }
}

/// The metric label of a transfer that is answered with "no".
fn reason(error: &Error, direction: Direction) -> &'static str {
    error.kind().label(match direction {
        Direction::Store => "store_failed",
        Direction::Retrieve => "retrieve_failed",
    })
}

/// Whether each such error is logged. A miss is no trouble; a full budget has a log line of its own.
fn is_trouble(error: &Error) -> bool {
    !matches!(error.kind(), ErrorKind::StagingFull | ErrorKind::NotHeld)
}
