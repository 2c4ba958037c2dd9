//! Segments: chunks of other prompts that stand in the middle of one, leased with its lookup.

use std::sync::Arc;

use kvtier_core::cache::{Counted, Lookup};
use kvtier_core::segments::SegmentMatch;
use kvtier_core::window::ChunkBitmap;
use kvtier_store::l1::L1Allocator;
use kvtier_store::tiers::{L2, Located};

use super::super::context::Context;
use super::find::ObjectFind;
use super::held::FoundSegments;

/// The segments of a lookup, before it is known which of them are resident.
pub(super) struct SegmentFind {
    /// Their objects.
    pub find: ObjectFind,
    pub matches: Vec<SegmentMatch>,
    /// Serial of the lookup.
    pub serial: u64,
    /// Lives while the segments are looked for.
    pub alive: Arc<()>,
}

impl SegmentFind {
    /// Finds what L1 has. If it lacks some and there are tiers, they are asked in a task, and nothing is returned.
    pub(super) fn run(self) -> Option<Arc<FoundSegments>> {
        let (found, lookup) = self.find.in_l1(None);
        let l2 = self.find.context.l2.as_ref();
        let Some(l2) = l2
            .filter(|_| lookup.hit_chunks < self.matches.len())
            .cloned()
        else {
            let (context, gone) = (Arc::clone(&self.find.context), self.not_in_l1(&found));
            let found = self.finish(&found, lookup);
            remove(&context, &gone);
            return Some(found);
        };
        let handle = l2.handle().clone();
        handle.spawn(async move { self.in_tiers(&l2, lookup.counted).await });
        None
    }

    async fn in_tiers(self, l2: &Arc<L2>, counted: Counted) {
        let request = self.find.prefetch_request(counted);
        let (_, holds) = l2.fetch(&request).await;
        let (found, lookup) = self.find.in_l1(Some(counted));
        let (context, rows) = (Arc::clone(&self.find.context), Arc::clone(&self.find.rows));
        let mut gone = self.not_in_l1(&found);
        self.finish(&found, lookup);
        drop(holds);
        for at in (0..gone.len()).rev() {
            let (rows, hash) = (Arc::from(&rows[..1]), gone[at].hash);
            let located = Located::find(l2, &rows, &[hash], &[vec![false]]).await;
            if !located.failed.is_empty() || located.tiers[0][0].is_some() {
                gone.swap_remove(at);
            }
        }
        remove(&context, &gone);
    }

    /// Those that were not found and whose object of the first rank L1 lacks: other ranks may store theirs later.
    fn not_in_l1(&self, found: &ChunkBitmap) -> Vec<SegmentMatch> {
        let matches = self.matches.iter().enumerate();
        let missing = matches.filter(|(position, _)| !found.get(*position));
        let mut missing: Vec<_> = missing.map(|(_, segment)| segment.clone()).collect();
        let hashes: Vec<_> = missing.iter().map(|segment| segment.hash).collect();
        let first = &self.find.rows[0].namespace;
        let mut resident = self
            .find
            .context
            .l1
            .cache
            .contains(first, &hashes)
            .into_iter();
        missing.retain(|_| resident.next() == Some(false));
        missing
    }

    /// Keeps what was found for the lookup.
    fn finish(self, found: &ChunkBitmap, lookup: Lookup<L1Allocator>) -> Arc<FoundSegments> {
        let mut matches = Vec::with_capacity(lookup.hit_chunks);
        for (position, segment) in self.matches.into_iter().enumerate() {
            if found.get(position) {
                matches.push(segment);
            }
        }
        let tokens = (matches.len() * self.find.chunk_size) as u64;
        self.find
            .context
            .metrics
            .blend_matched_tokens
            .inc_by(tokens);
        let found = Arc::new(FoundSegments {
            matches,
            _lease: Some(lookup.lease),
        });
        let (held, request_id) = (&self.find.held, &self.find.request_id);
        held.set_segments(request_id, self.serial, Arc::clone(&found));
        drop(self.alive);
        found
    }
}

/// Removes segments whose objects are nowhere.
fn remove(context: &Context, gone: &[SegmentMatch]) {
    for segment in gone {
        if let Some(blend) = &context.blend {
            blend.segments.remove(segment);
        }
    }
}
