//! What a server with `--engine-type blend` has more than another: the segments that stand behind prefixes, and how the keys of
//! each worker are rotated to other positions.
//!
//! `ropes` guards the rotations by worker; no other lock is acquired inside. A worker that registers again has none until its client
//! registers them again.

mod file;

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvtier_common::error::Result;
use kvtier_common::state::StateDir;
use kvtier_common::sync::Mutex;
use kvtier_core::cache::{ChunkTokens, Rows};
use kvtier_core::object_key::KeyScope;
use kvtier_core::segments::{SegmentMatch, SegmentScope, Segments};
use kvtier_core::{ChunkHash, GroupRow};
use kvtier_device::Rope;
use kvtier_observe::metrics::Metrics;
use kvtier_proto::request::InstanceId;

use super::instances::Instance;
use file::SegmentFile;

/// Time for the segments of one lookup, beyond which its prefix stands alone.
const FIND_TIMEOUT: Duration = Duration::from_millis(20);

/// Segments, and rotations of keys.
pub struct Blend {
    pub segments: Segments,
    file: Option<SegmentFile>,
    ropes: Mutex<HashMap<InstanceId, WorkerRope>>,
}

/// How the keys of a worker are rotated.
struct WorkerRope {
    /// The registration that it was checked against.
    instance: Weak<Instance>,
    rope: Arc<Rope>,
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
            ropes: Mutex::default(),
        })
    }

    /// Writes a part of what has changed to the state directory; returns whether there may be more.
    pub fn keep(&self) -> bool {
        let file = self.file.as_ref();
        file.is_some_and(|file| file.keep(&self.segments))
    }

    /// What two prompts must share for a segment of one to be of use to the other: the objects of their first rank.
    pub fn scope(
        &self,
        rows: &[GroupRow],
        scope: &KeyScope,
        chunk_size: NonZeroUsize,
    ) -> SegmentScope {
        let first = kvtier_core::kv_rank(scope.world_size(), 0);
        let namespaces = rows.iter().map(|row| &*row.namespace);
        let namespaces = namespaces.filter(|namespace| namespace.kv_rank() == first);
        SegmentScope::new(namespaces, chunk_size.get())
    }

    /// Registers chunks of a store of the first rank.
    pub fn register(
        &self,
        rows: &Rows,
        scope: &KeyScope,
        chunk_size: NonZeroUsize,
        first: usize,
        hashes: &[ChunkHash],
        known: &ChunkTokens,
    ) {
        let scope = self.scope(rows, scope, chunk_size);
        self.segments
            .register(&scope, chunk_size.get(), first, hashes, &known.tokens);
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

    /// Keeps how the keys of a worker are rotated.
    pub fn insert_rope(&self, instance: &Arc<Instance>, rope: Rope) {
        let mut ropes = self.ropes.lock();
        ropes.retain(|_, known| known.instance.strong_count() > 0);
        let rope = WorkerRope {
            instance: Arc::downgrade(instance),
            rope: Arc::new(rope),
        };
        ropes.insert(instance.id, rope);
    }

    /// Forgets it.
    pub fn remove_rope(&self, id: InstanceId) {
        let removed = self.ropes.lock().remove(&id);
        drop(removed);
    }

    /// How the keys of a worker are rotated.
    pub fn rope(&self, instance: &Arc<Instance>) -> Option<Arc<Rope>> {
        let ropes = self.ropes.lock();
        let known = ropes.get(&instance.id)?;
        let is_same = known.instance.as_ptr() == Arc::as_ptr(instance);
        is_same.then(|| Arc::clone(&known.rope))
    }
}
