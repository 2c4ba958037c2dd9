//! Segments that a lookup found behind its prefix, written into a worker's pages at the positions that they have in its prompt.

use std::sync::Arc;
use std::time::Instant;

use kvtier_common::error::{Error, ErrorKind, Result};
use kvtier_core::cache::ReadLease;
use kvtier_core::prompt::Prompt;
use kvtier_core::segments::SegmentMatch;
use kvtier_device::{DeviceError, Direction, Placement, PromptBlocks, SegmentCopy};
use kvtier_proto::request::{MatchedSegment, RetrieveMatched};
use kvtier_proto::response::Response;

use super::super::blend::Blend;
use super::super::instances::{CopyGuard, Instance};
use super::super::lookups::FoundSegments;
use super::super::{Caller, EngineAnswer, Reply};
use super::copy::{count_end, failed, not_held};
use super::{Transfers, deadline};
use kvtier_store::l1::L1Allocator;

/// A request for segments.
pub(super) struct PlaceRequest<'a> {
    pub transfers: &'a Arc<Transfers>,
    pub blend: &'a Blend,
    pub caller: Caller,
    pub retrieve: &'a RetrieveMatched<'a, Prompt>,
}

/// A placement whose bytes are being copied: it keeps them and the pages.
struct InFlightPlacement {
    _leases: Vec<ReadLease<L1Allocator>>,
    _retrieving: Arc<()>,
    transfers: Arc<Transfers>,
    guard: CopyGuard,
    event: Vec<u8>,
    caller: Caller,
    request_id: Box<str>,
    tokens: u64,
}

impl PlaceRequest<'_> {
    /// Serves it.
    pub(super) fn serve(&self, mut reply: Reply) {
        let context = &*self.transfers.context;
        let refused = |event: &[u8], reason| {
            EngineAnswer::from(Response::transfer(event, false)).because(reason)
        };
        let Some(instance) = context.instances.get(self.retrieve.instance) else {
            return reply.answer(refused(&[], "unknown_instance"));
        };
        instance.seen(context.now());
        let metrics = &context.metrics;
        metrics.retrieve(instance.device(), false);
        let event = instance.answer_event(self.retrieve.event_handle, self.caller.release);
        match self.plan(&instance) {
            Ok(Some((placement, in_flight))) => {
                if !reply.later_in_turn() {
                    return drop((placement, in_flight));
                }
                let pages = Arc::clone(in_flight.guard.pages());
                let done = move |moved| reply.answer(in_flight.finish(moved));
                pages.place(placement, Box::new(done));
            }
            Ok(None) => {
                count_end(metrics, Direction::Retrieve, &instance);
                reply.answer(EngineAnswer::from(Response::transfer(event, true)));
            }
            Err(error) => {
                let id = self.retrieve.key.request_id;
                let reason = failed(metrics, Direction::Retrieve, &instance, id, &error);
                reply.answer(refused(event, reason));
            }
        }
    }

    /// The segments that the request names, each once, if a lookup of its prompt has found all of them.
    fn named<'f>(&self, found: &'f FoundSegments) -> Option<Vec<&'f SegmentMatch>> {
        let (tokens, asked) = (&self.retrieve.key.tokens, &self.retrieve.matches);
        let (size, scope) = (tokens.chunk_size.get(), found.scope.as_ref()?);
        if asked.len() > found.matches.len() {
            return None;
        }
        let named = asked.iter().map(|asked| {
            let start = usize::try_from(asked.start).ok()?;
            let at = found.matches.binary_search_by_key(&start, |it| it.start);
            let segment = &found.matches[at.ok()?];
            is_same(asked, segment, size).then_some(segment)
        });
        let mut named = named.collect::<Option<Vec<_>>>()?;
        named.sort_unstable_by_key(|segment| segment.start);
        named.dedup_by_key(|segment| segment.start);
        let is_theirs = named.len() == asked.len()
            && self
                .blend
                .segments
                .stand_in(scope, size, &tokens.tokens, named.iter().copied());
        is_theirs.then_some(named)
    }

    /// Leases the segments and plans their copies; nothing if there are none to be written yet.
    fn plan(&self, instance: &Arc<Instance>) -> Result<Option<(Placement, InFlightPlacement)>> {
        let (transfers, retrieve) = (self.transfers, self.retrieve);
        let (context, key) = (&*transfers.context, &retrieve.key);
        let retrieving = instance.retrieving();
        if transfers
            .refused_retrieves
            .is_refusing(self.caller.connection)
        {
            return Err(not_held());
        }
        let guard = instance.copying()?;
        let layout = Arc::clone(guard.pages().layout());
        let rope = instance.rope().ok_or_else(|| {
            let message = "the instance has no rotation; allowed: one after cb_register_rope";
            Error::new(ErrorKind::NotHeld, message)
        })?;
        let worker = key
            .worker_id
            .ok_or_else(|| Error::refused("worker_id is nil; allowed: the number of a worker"))?;
        let scope = context.short_scope(key)?;
        let size = key.tokens.chunk_size.get();
        if size as u64 != layout.chunk_tokens() {
            return Err(Error::refused(format!(
                "the key is in chunks of {size} tokens; allowed: {}, as the worker registered",
                layout.chunk_tokens()
            )));
        }
        if retrieve.matches.is_empty() {
            return Ok(None);
        }
        let found = transfers.lookups.held.segments_of(key.request_id, &scope);
        let segments = found.iter().find_map(|found| self.named(found));
        let segments = segments.ok_or_else(|| {
            let (count, model) = (retrieve.matches.len() as u64, key.model_name);
            context.metrics.not_found("l1_retrieve", model, count);
            not_held()
        })?;
        let lists = layout.kernel_groups().iter().map(|group| {
            let list = usize::try_from(group.engine_group_id).ok();
            let list = list.and_then(|list| retrieve.block_ids.get(list));
            list.ok_or_else(|| {
                Error::refused(format!(
                    "block_ids has {} lists; allowed: one for each engine group up to {}",
                    retrieve.block_ids.len(),
                    group.engine_group_id
                ))
            })
        });
        let lists = lists.collect::<Result<Vec<_>>>()?;
        let blocks = PromptBlocks::check(&layout, &lists).map_err(Error::refused)?;
        let allocated = blocks.tokens();
        let covered = |segment: &&&SegmentMatch| (segment.start + size) as u64 <= allocated;
        match segments.iter().filter(covered).count() {
            count if count == segments.len() => {}
            // The engine asks again when it has allocated more.
            0 if segments.iter().all(|it| it.start as u64 >= allocated) => return Ok(None),
            count => {
                let of = segments.len();
                let message = format!(
                    "the blocks of {allocated} tokens cover {count} of {of} segments; allowed: all or none"
                );
                return Err(Error::new(ErrorKind::NotHeld, message));
            }
        }
        let hashes: Vec<_> = segments.iter().map(|segment| segment.hash).collect();
        let kv_rank = kvtier_core::kv_rank(key.world_size, worker);
        let mut copies = Vec::new();
        let mut leases = Vec::new();
        for group in &instance.layout.groups {
            let namespace = scope.namespace(kv_rank, group.id, instance.layout.fingerprint);
            let lease = context.l1.cache.lease(context.now(), &namespace, &hashes);
            let lease = lease.ok_or_else(not_held)?;
            let placed = segments.iter().zip(lease.extents());
            copies.extend(placed.map(|(segment, extent)| SegmentCopy {
                object_group: group.id as usize,
                extent: *extent,
                old_start: segment.old_start as u64,
                start: segment.start as u64,
                tokens: size as u64,
            }));
            leases.push(lease);
        }
        let now = context.now();
        let patience = instance.patience(now)?;
        let patience = patience.and_then(|left| Instant::now().checked_add(left));
        let placement = Placement {
            arena: Arc::clone(&context.l1.arena),
            blocks,
            segments: copies,
            rope,
            deadline: deadline::of(key)?.into_iter().chain(patience).min(),
            event: retrieve.event_handle.to_vec(),
        };
        let in_flight = InFlightPlacement {
            _leases: leases,
            _retrieving: retrieving,
            transfers: Arc::clone(transfers),
            guard,
            event: retrieve.event_handle.to_vec(),
            caller: self.caller,
            request_id: key.request_id.into(),
            tokens: (segments.len() * size) as u64,
        };
        Ok(Some((placement, in_flight)))
    }
}

impl InFlightPlacement {
    fn finish(self, moved: Result<u64, DeviceError>) -> EngineAnswer {
        let metrics = &self.transfers.context.metrics;
        let instance = self.guard.instance();
        let event = instance.answer_event(&self.event, self.caller.release);
        match moved {
            Ok(_) => {
                count_end(metrics, Direction::Retrieve, instance);
                metrics.blend_placed_tokens.inc_by(self.tokens);
                tracing::info!(
                    request = &*self.request_id,
                    "Placed {} tokens of segments",
                    self.tokens
                );
                EngineAnswer::from(Response::transfer(event, true))
            }
            Err(error) => {
                let error = Error::refused(error.to_string());
                let (id, direction) = (&self.request_id, Direction::Retrieve);
                let reason = failed(metrics, direction, instance, id, &error);
                EngineAnswer::from(Response::transfer(event, false)).because(reason)
            }
        }
    }
}

/// Whether a client names this segment.
fn is_same(asked: &MatchedSegment<'_>, segment: &SegmentMatch, size: usize) -> bool {
    let is = |asked: i64, found: usize| usize::try_from(asked) == Ok(found);
    is(asked.old_start, segment.old_start)
        && is(asked.old_end, segment.old_start + size)
        && is(asked.start, segment.start)
        && is(asked.end, segment.start + size)
        && *asked.hash == *segment.hash.as_bytes()
}
