//! Prepare and commit: transfers where the worker copies, in the pool or inside messages.

use std::time::Duration;

use kvtier_common::error::Error;
use kvtier_core::cache::ReadLease;
use kvtier_core::prompt::Prompt;
use kvtier_device::Direction;
use kvtier_proto::key::CacheKey;
use kvtier_proto::request::{ABORT_STORE, InstanceId};
use kvtier_proto::response::{PrepareRetrieve, PrepareStore, Response, SlotGroups, StoreTarget};

use super::super::instances::Mode;
use super::super::{Caller, EngineAnswer};
use super::prepared::{Finish, Grant};
use super::skipped::Skipped;
use super::store::{GroupChunks, StagedStore};
use super::traced::{TransferVolume, trace_refused};
use super::worker_copy::{DEVICE, WorkerCopy};
use super::worker_range::WorkerRange;
use super::{Transfers, inline};

/// A request of a worker that copies by itself.
pub struct WorkerRequest<'a> {
    pub(super) transfers: &'a Transfers,
    pub(super) key: &'a CacheKey<'a, Prompt>,
    pub(super) instance: InstanceId,
    pub(super) started: Duration,
}

impl<'a> WorkerRequest<'a> {
    /// The transfer that a worker asks for; if there is none, the reason, for the metrics.
    fn copy(&self, operation: &'static str) -> Result<WorkerCopy<'a>, &'static str> {
        let (transfers, key, id, now) = (self.transfers, self.key, self.instance, self.started);
        let context = &*transfers.context;
        let instance = context.instances.get(id);
        let instance = instance.filter(|instance| instance.patience(now).is_ok());
        let instance = instance.ok_or("unknown_instance")?;
        instance.seen(now);
        let range = match &instance.mode {
            Mode::EngineDriven { .. } => WorkerRange::of_worker(context, &instance, key),
            Mode::LmcacheDriven { .. } => Err(Error::refused(
                "the instance is registered for lmcache-driven transfers; allowed: store and retrieve",
            )),
        };
        let range = range.map_err(|error| {
            let request = key.request_id;
            tracing::debug!(request, instance = id.0, %error, "{operation} refused");
            "bad_key"
        })?;
        Ok(WorkerCopy {
            transfers,
            instance,
            key,
            range,
            started: now,
        })
    }

    /// Reserves slots for the chunks that are not resident and not skipped; none at all for a worker that will send its data.
    pub fn prepare_store(&self, skipped: &[Vec<i64>]) -> EngineAnswer {
        // Empty lists are the one "no" a worker understands here: it sends nothing and commits nothing.
        let prepared = self.try_prepare_store(skipped);
        prepared.unwrap_or_else(|reason| {
            self.trace_refused(Direction::Store, reason);
            let instance = self.transfers.context.instances.get(self.instance);
            let is_grouped = instance.is_some_and(|instance| instance.layout.groups.len() > 1);
            store_target(Some(no_slots(is_grouped))).because(reason)
        })
    }

    fn try_prepare_store(&self, skipped: &[Vec<i64>]) -> Result<EngineAnswer, &'static str> {
        let copy = self.copy("prepare_store")?;
        if !copy.has_pool() {
            return Ok(store_target(None));
        }
        let transfer_id = copy.id(Direction::Store);
        if self.transfers.prepared.is_granted(&transfer_id) {
            return Err("under_way");
        }
        let (groups, count) = (copy.layout().groups.len(), copy.range.chunks.len());
        let skipped = Skipped::new(skipped, groups, count).ok_or("bad_data")?;
        // The worker copies, and commits once.
        let store = copy.stage("prepare_store", copy.unskipped(&skipped), 0)?;
        let mut target = no_slots(copy.layout().is_grouped());
        if store.reservation.is_empty() {
            // No commit follows.
            let requests: Vec<_> = store.plan.groups.iter().map(GroupChunks::request).collect();
            copy.range.pin(&self.transfers.context, &requests);
            store.plan.announce(&self.transfers.context, &copy.range);
            copy.trace(Direction::Store, copy.started, Ok(store.moved()));
            return Ok(store_target(Some(target)));
        }
        self.transfers.context.metrics.store(DEVICE, false);
        for staged in store.reservation.staged() {
            target.slots.push(copy.slot(staged.request, staged.extent));
            target.chunk_indices.push(store.chunk(staged) as u64);
            if let Some(group_ids) = &mut target.group_ids {
                group_ids.push(staged.request.into());
            }
        }
        let answer = store_target(Some(target));
        let StagedStore {
            reservation,
            charge,
            ..
        } = store;
        reservation.grant(copy.started);
        let grant = Grant::Store(reservation, charge, skipped);
        copy.grant(&transfer_id, grant)?;
        Ok(answer)
    }

    /// Commits a store: without data the slots that the worker has written, else the chunks that it sends.
    pub fn commit_store(&self, data: &[u8]) -> EngineAnswer {
        let committed = match self.copy("commit_store") {
            Err(reason) => {
                self.trace_refused(Direction::Store, reason);
                Err(reason)
            }
            Ok(copy) => {
                let granted = self.transfers.prepared.finish(&copy.id(Direction::Store));
                let started = match &granted {
                    Finish::Last(_, since) => *since,
                    _ => copy.started,
                };
                let committed = match data {
                    [] => commit_slots(&copy, granted),
                    // The slots stay unwritten.
                    ABORT_STORE => Err("aborted"),
                    data => {
                        drop(granted);
                        inline::commit(&copy, data)
                    }
                };
                copy.trace(Direction::Store, started, committed);
                committed
            }
        };
        match committed {
            Ok(_) => EngineAnswer::from(Response::Bool(true)),
            Err(reason) => EngineAnswer::from(Response::Bool(false)).because(reason),
        }
    }

    /// Leases the chunks of a range, and answers with their slots or their bytes.
    pub fn prepare_retrieve(&self, caller: Caller) -> EngineAnswer {
        let refused = &self.transfers.refused_retrieves;
        let prepared = if refused.is_refusing(caller.connection) {
            Err("not_held")
        } else {
            self.try_prepare_retrieve()
        };
        prepared.unwrap_or_else(|reason| {
            self.trace_refused(Direction::Retrieve, reason);
            EngineAnswer::from(Response::PrepareRetrieve(PrepareRetrieve::miss())).because(reason)
        })
    }

    fn try_prepare_retrieve(&self) -> Result<EngineAnswer, &'static str> {
        let (transfers, key) = (self.transfers, self.key);
        let copy = self
            .copy("prepare_retrieve")
            .inspect_err(|_| WorkerRange::release_refused(transfers, self.instance, key))?;
        let metrics = &transfers.context.metrics;
        metrics.retrieve(DEVICE, false);
        let range = &copy.range;
        let leases = range
            .lease(transfers, &copy.instance, key)
            .filter(|leases| leases.iter().any(|group| !group.chunks.is_empty()));
        // From here on the transfer has leases of its own, or will not happen.
        range.release(&transfers.lookups, self.instance, key);
        let transfer_id = copy.id(Direction::Retrieve);
        let missed = |reason| {
            transfers.prepared.missed(&transfer_id);
            reason
        };
        let leases = leases.ok_or_else(|| {
            metrics.not_found("l1_retrieve", key.model_name, range.chunks.len() as u64);
            missed("not_held")
        })?;
        let charge = copy.charge(&leases);
        let charge = charge.ok_or_else(|| missed("staging_full"))?;
        range.count_loaded(metrics);
        if !copy.has_pool() {
            return inline::answer(&copy, leases, charge);
        }
        let mut groups = SlotGroups::default();
        let mut slots = Vec::new();
        for group in &leases {
            let chunks = group.chunks.clone();
            for (extent, chunk) in group.lease.extents().iter().zip(chunks) {
                slots.push(copy.slot(group.object_group, *extent));
                groups.group_ids.push(group.object_group.into());
                let chunk = chunk - range.chunks.start;
                groups.chunk_indices.push(chunk as u64);
            }
        }
        let answer = EngineAnswer::from(Response::PrepareRetrieve(PrepareRetrieve {
            success: true,
            data: (&[][..]).into(),
            slots: Some(slots),
            groups: copy.layout().is_grouped().then_some(groups),
        }));
        let leases: Vec<_> = leases.into_iter().map(|group| group.lease).collect();
        leases.iter().for_each(ReadLease::grant);
        let grant = Grant::Retrieve(leases, vec![charge]);
        copy.grant(&transfer_id, grant).map_err(missed)?;
        Ok(answer)
    }

    /// Ends a retrieve. The answer is whether no other request had the memory until now. LMCache's server always answers yes, and
    /// its worker ignores the answer.
    pub fn commit_retrieve(&self) -> EngineAnswer {
        let metrics = &self.transfers.context.metrics;
        let copy = match self.copy("commit_retrieve") {
            Ok(copy) => copy,
            Err(reason) => {
                self.trace_refused(Direction::Retrieve, reason);
                return EngineAnswer::from(Response::Bool(false)).because(reason);
            }
        };
        let was_held = match self
            .transfers
            .prepared
            .finish(&copy.id(Direction::Retrieve))
        {
            Finish::Last(_, since) => {
                metrics.retrieve(DEVICE, true);
                copy.trace(Direction::Retrieve, since, Ok(copy.retrieved()));
                true
            }
            Finish::Earlier => {
                metrics.retrieve(DEVICE, true);
                true
            }
            Finish::Abandoned => true,
            // Data that was sent needs no commit. A worker commits after a miss too, which is no failure, but no yes either.
            Finish::Unknown => !copy.has_pool(),
        };
        EngineAnswer::from(Response::Bool(was_held))
    }

    fn trace_refused(&self, direction: Direction, reason: &'static str) {
        let context = &self.transfers.context;
        trace_refused(
            context,
            direction,
            self.key,
            self.instance,
            self.started,
            reason,
        );
    }
}

/// The worker has written its slots.
fn commit_slots(copy: &WorkerCopy<'_>, granted: Finish) -> Result<TransferVolume, &'static str> {
    let Finish::Last(Grant::Store(reservation, charge, skipped), _) = granted else {
        return Err("not_prepared");
    };
    let store = StagedStore {
        plan: copy.plan(copy.unskipped(&skipped), 0),
        reservation,
        charge,
        has_remainder: false,
    };
    // Its worker is registering again with another layout, and the grant is not abandoned yet.
    if !store.is_of_its_groups() {
        return Err("not_prepared");
    }
    let moved = store.moved();
    store.commit(&copy.transfers.context, &copy.range, |_| true);
    copy.stored(moved);
    Ok(moved)
}

fn store_target(target: Option<StoreTarget<'_>>) -> EngineAnswer {
    EngineAnswer::from(Response::PrepareStore(PrepareStore { target }))
}

/// The answer that nothing is to be written.
fn no_slots(is_grouped: bool) -> StoreTarget<'static> {
    StoreTarget {
        group_ids: is_grouped.then(Vec::new),
        ..StoreTarget::default()
    }
}
