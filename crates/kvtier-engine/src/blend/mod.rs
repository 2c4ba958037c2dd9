//! What a server with `--engine-type blend` has more than another: the segments that stand behind prefixes.

mod file;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvtier_common::error::Result;
use kvtier_common::state::StateDir;
use kvtier_core::GroupRow;
use kvtier_core::object_key::KeyScope;
use kvtier_core::segments::{SegmentMatch, SegmentScope, Segments};
use kvtier_observe::metrics::Metrics;

use file::SegmentFile;

/// Time for the segments of one lookup, beyond which its prefix stands alone.
const FIND_TIMEOUT: Duration = Duration::from_millis(20);

/// Objects that all requests together may lease for segments; each costs some 80 bytes here.
const MAX_LEASED: usize = 4 << 20;

/// The segments of this server.
pub struct Blend {
    pub segments: Segments,
    file: Option<SegmentFile>,
    /// Objects that are leased for segments.
    leased: Arc<AtomicUsize>,
}

impl Blend {
    /// For this many segments, and with those of the server before as far as the state directory has them.
    pub fn open(max_segments: usize, state: Option<&StateDir>) -> Result<Self> {
        let file = state.map(SegmentFile::open).transpose().unwrap_or_else(|error| {
            tracing::warn!(%error, "segments cannot be kept; after a restart only what is stored again is found behind prefixes");
            None
        });
        let secret = match &file {
            Some(file) => file.secret,
            None => file::random_secret()?,
        };
        let segments = Segments::new(secret, max_segments);
        if let Some(file) = &file {
            file.restore(&segments);
        }
        Ok(Self {
            segments,
            file,
            leased: Arc::default(),
        })
    }

    /// Writes a part of what has changed to the state directory; returns whether there may be more.
    pub fn keep(&self) -> bool {
        let file = self.file.as_ref();
        file.is_some_and(|file| file.keep(&self.segments))
    }

    /// What two prompts must share for a segment of one to be of use to the other: the objects of their first rank.
    pub fn scope(rows: &[GroupRow], scope: &KeyScope, chunk_size: NonZeroUsize) -> SegmentScope {
        let first = kvtier_core::kv_rank(scope.world_size(), 0);
        let namespaces = rows.iter().map(|row| &*row.namespace);
        let namespaces = namespaces.filter(|namespace| namespace.kv_rank() == first);
        SegmentScope::new(namespaces, chunk_size.get())
    }

    /// The segments of a prompt from token `from` on; none if that takes too long.
    pub fn find(
        &self,
        metrics: &Metrics,
        scope: &SegmentScope,
        chunk_size: NonZeroUsize,
        tokens: &[u32],
        from: usize,
    ) -> Vec<SegmentMatch> {
        let until = Instant::now() + FIND_TIMEOUT;
        let is_in_time = || Instant::now() < until;
        let found = self
            .segments
            .find(scope, chunk_size.get(), tokens, from, is_in_time);
        found.unwrap_or_else(|| {
            metrics.blend_late_lookups.inc();
            Vec::new()
        })
    }

    /// Counts objects as leased for segments; `None` if there are too many.
    pub fn count_leased(&self, objects: usize) -> Option<LeasedSegments> {
        let before = self.leased.fetch_add(objects, Ordering::Relaxed);
        let counted = LeasedSegments {
            all: Arc::clone(&self.leased),
            objects,
        };
        (before + objects <= MAX_LEASED).then_some(counted)
    }
}

/// Objects that are leased for segments, until it is dropped.
pub struct LeasedSegments {
    all: Arc<AtomicUsize>,
    objects: usize,
}

impl Drop for LeasedSegments {
    fn drop(&mut self) {
        self.all.fetch_sub(self.objects, Ordering::Relaxed);
    }
}
