//! A store where we copy from a worker's pages into the arena, and what of it the tiers get.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use kvtier_core::cache::{Reservation, ReserveRequest, Staged};
use kvtier_core::object_key::KeyScope;
use kvtier_core::prompt::Prompt;
use kvtier_core::{ChunkHash, Namespace};
use kvtier_device::{BlockTable, ChunkCopy, ChunkRequest, DeviceError, Direction, Transfer};
use kvtier_proto::generation::Release;
use kvtier_proto::request::Store;
use kvtier_proto::response::Response;

use super::in_flight::InFlight;
use super::instances::{Copying, Instance};
use super::refusal::Refusal;
use super::staging::Charge;
use super::worker_range::WorkerRange;
use super::{Answer, Caller, Engine, Reply};
use kvtier_l1::L1Allocator;

/// The chunks of a range that one object group has data for.
struct GroupChunks {
    namespace: Arc<Namespace>,
    object_bytes: u64,
    /// Positions in the range.
    chunks: Vec<usize>,
    /// Of those chunks.
    hashes: Vec<ChunkHash>,
}

/// What a store brings, by object group.
struct Brought {
    scope: KeyScope,
    groups: Vec<GroupChunks>,
}

impl Brought {
    fn requests(&self) -> Vec<ReserveRequest<'_>> {
        self.groups
            .iter()
            .map(|group| ReserveRequest {
                namespace: &group.namespace,
                hashes: &group.hashes,
                len: group.object_bytes,
            })
            .collect()
    }

    /// Where in the range a staged object's chunk is.
    fn chunk(&self, staged: &Staged) -> usize {
        self.groups[staged.request as usize].chunks[staged.position as usize]
    }
}

/// A store whose bytes are being copied.
pub(super) struct InFlightStore {
    request_id: Box<str>,
    started: Duration,
    event: Vec<u8>,
    release: Release,
    /// Chunks of the range.
    chunks: usize,
    brought: Brought,
    reservation: Reservation<L1Allocator>,
    _charge: Charge,
    copying: Copying,
}

impl InFlight for InFlightStore {
    /// If the reservation is dropped, its objects never become readable.
    fn finish(self: Box<Self>, engine: &Engine, moved: Result<u64, DeviceError>) -> Answer {
        engine.finish_store(*self, moved)
    }
}

impl Engine {
    pub(super) fn store(self: &Arc<Self>, caller: Caller, store: &Store<'_, Prompt>, reply: Reply) {
        let Some(instance) = self.instances.get(store.instance) else {
            let answer = Answer::from(Response::transfer(&[][..], false));
            return reply.answer(answer.because("unknown_instance"));
        };
        let started = self.now();
        instance.seen(started);
        self.metrics.store(instance.device(), false);
        if let Some(unserved) = instance.unserved {
            self.metrics.store(instance.device(), true);
            let event = instance.answer_event(store.event_handle, caller.release);
            let answer = Answer::from(Response::transfer(event, false));
            return reply.answer(answer.because(unserved.name()));
        }
        match self.plan_store(caller.release, &instance, store, started) {
            Ok((transfer, in_flight)) => {
                let pages = in_flight.copying.pages();
                self.start_transfer(&*pages, transfer, Box::new(in_flight), reply);
            }
            Err(refusal) => {
                let event = instance.answer_event(store.event_handle, caller.release);
                let request_id = store.key.request_id;
                reply.answer(self.store_failed(&instance, request_id, event, &refusal));
            }
        }
    }

    fn store_failed(
        &self,
        instance: &Instance,
        request_id: &str,
        event: &[u8],
        error: &Refusal,
    ) -> Answer {
        // A budget that is full has a line of its own.
        if *error != Refusal::Staging {
            tracing::warn!(request = request_id, instance = instance.id.0, %error, "store failed");
        }
        self.metrics.store(instance.device(), true);
        Answer::from(Response::transfer(event, false)).because(error.reason("store_failed"))
    }

    /// Reserves memory for the chunks that are not resident, and plans what is to be copied into it.
    pub(super) fn plan_store(
        &self,
        release: Release,
        instance: &Arc<Instance>,
        store: &Store<'_, Prompt>,
        started: Duration,
    ) -> Result<(Transfer, InFlightStore), Refusal> {
        let (copying, deadline, range) = self.copying(instance, &store.key)?;
        let pages = copying.pages();
        let blocks = BlockTable::check(pages.layout(), &store.block_ids, range.chunks.len())
            .map_err(|error| error.to_string())?;
        let brought = self.brought(instance, store, &range, &blocks, pages.layout());
        let requests = brought.requests();
        let near = self.l1.part_near(pages.numa_node());
        let (reservation, charge) = self.stage(instance, &store.key, &range, &requests, near)?;
        drop(requests);
        let copies = reservation.staged().iter().map(|staged| ChunkCopy {
            request: ChunkRequest {
                object_group: staged.request as usize,
                chunk: brought.chunk(staged),
                skip_tokens: 0,
            },
            extent: staged.extent,
        });
        let transfer = Transfer {
            arena: Arc::clone(&self.l1.arena),
            blocks,
            chunks: copies.collect(),
            direction: Direction::Store,
            deadline,
            event: store.event_handle.to_vec(),
        };
        let in_flight = InFlightStore {
            request_id: store.key.request_id.into(),
            started,
            event: store.event_handle.to_vec(),
            release,
            chunks: range.chunks.len(),
            brought,
            reservation,
            _charge: charge,
            copying,
        };
        Ok((transfer, in_flight))
    }

    /// Which chunks of the range each object group has data for, and their hashes.
    fn brought(
        &self,
        instance: &Instance,
        store: &Store<'_, Prompt>,
        range: &WorkerRange,
        blocks: &BlockTable,
        layout: &kvtier_device::KvLayout,
    ) -> Brought {
        let groups = instance.layout.groups.iter().map(|group| {
            let has_data = |chunk: &usize| {
                blocks.has_data(layout, group.id as usize, *chunk, self.config.null_block_id)
            };
            let chunks: Vec<_> = (0..range.chunks.len()).filter(has_data).collect();
            let hashes = &store.key.tokens.hashes[range.chunks.clone()];
            GroupChunks {
                namespace: range.scope.namespace(
                    range.kv_rank,
                    group.id,
                    instance.layout.fingerprint,
                ),
                object_bytes: group.object_bytes,
                hashes: chunks.iter().map(|chunk| hashes[*chunk]).collect(),
                chunks,
            }
        });
        Brought {
            scope: range.scope.clone(),
            groups: groups.collect(),
        }
    }

    /// Finishes a store whose bytes are in place, or never will be. If the reservation is dropped, its objects never
    /// become readable.
    fn finish_store(&self, store: InFlightStore, moved: Result<u64, DeviceError>) -> Answer {
        let instance = store.copying.instance();
        let event = instance.answer_event(&store.event, store.release);
        if let Err(error) = moved {
            let error = Refusal::from(error.to_string());
            return self.store_failed(instance, &store.request_id, event, &error);
        }
        // A chunk counts once, however many groups it has.
        let mut stored = vec![false; store.chunks];
        for staged in store.reservation.staged() {
            stored[store.brought.chunk(staged)] = true;
        }
        let tokens = stored.into_iter().filter(|stored| *stored).count() * self.chunk_size.get();
        let staged = self.to_write_behind(&store.reservation);
        let committed = store.reservation.commit(self.now());
        let scope = &store.brought.scope;
        self.metrics
            .admitted(scope.cache_salt(), committed.inserted as u64);
        self.write_behind(&store.brought.requests(), &staged);
        self.metrics.store(instance.device(), true);
        let seconds = (self.now() - store.started).as_secs_f64();
        tracing::info!(
            request = &*store.request_id,
            "Stored {tokens} tokens in {seconds:.6} seconds"
        );
        Answer::from(Response::transfer(event, true))
    }

    /// The objects of a reservation that the tiers will want; none without a tier.
    pub(super) fn to_write_behind(&self, reservation: &Reservation<L1Allocator>) -> Vec<Staged> {
        match self.l2() {
            Some(_) => reservation.staged().to_vec(),
            None => Vec::new(),
        }
    }

    /// What was committed of these requests is stored in the tiers too.
    pub(super) fn write_behind(&self, requests: &[ReserveRequest<'_>], committed: &[Staged]) {
        let Some(l2) = self.l2() else { return };
        for (request, number) in requests.iter().zip(0..) {
            let of_request = committed.iter().filter(|staged| staged.request == number);
            let hashes: Vec<_> = of_request
                .map(|staged| request.hashes[staged.position as usize])
                .collect();
            l2.store(request.namespace, &hashes, request.len);
        }
    }
}
