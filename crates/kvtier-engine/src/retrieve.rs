//! A retrieve where we copy from the arena into a worker's pages.

use std::sync::Arc;
use std::time::Duration;

use kvtier_core::prompt::Prompt;
use kvtier_device::{BlockTable, ChunkCopy, ChunkRequest, DeviceError, Direction, Transfer};
use kvtier_proto::generation::Release;
use kvtier_proto::request::Retrieve;
use kvtier_proto::response::Response;

use super::in_flight::InFlight;
use super::instances::{Copying, Instance};
use super::refusal::Refusal;
use super::worker_range::{Held, WorkerRange};
use super::{Answer, Caller, Engine, Reply};

/// A retrieve whose bytes are being copied.
pub(super) struct InFlightRetrieve {
    request_id: Box<str>,
    model_name: Box<str>,
    started: Duration,
    event: Vec<u8>,
    release: Release,
    range: WorkerRange,
    copying: Copying,
    /// Keeps the bytes from eviction until they are copied.
    _held: Vec<Held>,
    /// Counts it.
    _retrieving: Arc<()>,
}

impl InFlight for InFlightRetrieve {
    fn finish(self: Box<Self>, engine: &Engine, moved: Result<u64, DeviceError>) -> Answer {
        engine.finish_retrieve(*self, moved)
    }
}

impl Engine {
    pub(super) fn retrieve(
        self: &Arc<Self>,
        caller: Caller,
        retrieve: &Retrieve<'_, Prompt>,
        reply: Reply,
    ) {
        let key = &retrieve.key;
        let Some(instance) = self.instances.get(retrieve.instance) else {
            self.settle_refused(retrieve.instance, key);
            let answer = Answer::from(Response::transfer(&[][..], false));
            return reply.answer(answer.because("unknown_instance"));
        };
        let started = self.now();
        instance.seen(started);
        self.metrics.retrieve(instance.device(), false);
        match self.plan_retrieve(caller, &instance, retrieve, started) {
            Ok((transfer, in_flight)) => {
                let pages = in_flight.copying.pages();
                self.start_transfer(&*pages, transfer, Box::new(in_flight), reply);
            }
            Err(refusal) => {
                self.settle_refused(retrieve.instance, key);
                let event = instance.answer_event(retrieve.event_handle, caller.release);
                reply.answer(self.retrieve_failed(&instance, key.request_id, event, &refusal));
            }
        }
    }

    fn retrieve_failed(
        &self,
        instance: &Instance,
        request_id: &str,
        event: &[u8],
        error: &Refusal,
    ) -> Answer {
        // A miss is no trouble.
        if *error != Refusal::NotHeld {
            tracing::warn!(request = request_id, instance = instance.id.0, %error, "retrieve failed");
        }
        self.metrics.retrieve(instance.device(), true);
        Answer::from(Response::transfer(event, false)).because(error.reason("retrieve_failed"))
    }

    /// Takes leases on what the range needs, and says what is to be copied.
    fn plan_retrieve(
        &self,
        caller: Caller,
        instance: &Arc<Instance>,
        retrieve: &Retrieve<'_, Prompt>,
        started: Duration,
    ) -> Result<(Transfer, InFlightRetrieve), Refusal> {
        let key = &retrieve.key;
        // Counted first: a ping is only refused while none is counted.
        let retrieving = instance.retrieving();
        if self.refusals.is_refusing(caller.connection) {
            return Err(Refusal::NotHeld);
        }
        let (copying, deadline, range) = self.copying(instance, key)?;
        let blocks = BlockTable::check(
            copying.pages().layout(),
            &retrieve.block_ids,
            range.chunks.len(),
        )
        .map_err(|error| error.to_string())?;
        let skip_tokens = u64::try_from(retrieve.skip_first_n_tokens).map_err(|_| {
            format!(
                "skip_first_n_tokens is {}; allowed: at least 0",
                retrieve.skip_first_n_tokens
            )
        })?;
        let held = match range.chunks.is_empty() {
            true => Vec::new(),
            false => self.hold(instance, key, &range).ok_or_else(|| {
                self.metrics
                    .not_found("l1_retrieve", key.model_name, range.chunks.len() as u64);
                Refusal::NotHeld
            })?,
        };
        // From here on the transfer has leases of its own, and is not refused.
        self.settle(instance.id, key, &range);
        let chunks = held.iter().flat_map(|held| {
            let extents = held.lease.extents().iter().zip(held.chunks.clone());
            extents.map(|(extent, chunk)| ChunkCopy {
                request: ChunkRequest {
                    object_group: held.object_group as usize,
                    chunk: chunk - range.chunks.start,
                    skip_tokens,
                },
                extent: *extent,
            })
        });
        let transfer = Transfer {
            arena: Arc::clone(&self.l1.arena),
            blocks,
            chunks: chunks.collect(),
            direction: Direction::Retrieve,
            deadline,
            event: retrieve.event_handle.to_vec(),
        };
        let in_flight = InFlightRetrieve {
            request_id: key.request_id.into(),
            model_name: key.model_name.into(),
            started,
            event: retrieve.event_handle.to_vec(),
            release: caller.release,
            range,
            copying,
            _held: held,
            _retrieving: retrieving,
        };
        Ok((transfer, in_flight))
    }

    /// The bytes of a retrieve are in place, or will never be.
    fn finish_retrieve(
        &self,
        retrieve: InFlightRetrieve,
        moved: Result<u64, DeviceError>,
    ) -> Answer {
        let instance = retrieve.copying.instance();
        let event = instance.answer_event(&retrieve.event, retrieve.release);
        if let Err(error) = moved {
            let error = Refusal::from(error.to_string());
            return self.retrieve_failed(instance, &retrieve.request_id, event, &error);
        }
        let chunks = retrieve.range.chunks.len();
        self.metrics.loaded(
            &retrieve.model_name,
            retrieve.range.scope.cache_salt(),
            retrieve.range.worker,
            chunks as u64,
        );
        self.metrics.retrieve(instance.device(), true);
        let tokens = chunks * self.chunk_size.get();
        let seconds = (self.now() - retrieve.started).as_secs_f64();
        tracing::info!(
            request = &*retrieve.request_id,
            "Retrieved {tokens} tokens in {seconds:.6} seconds"
        );
        Answer::from(Response::transfer(event, true))
    }
}
