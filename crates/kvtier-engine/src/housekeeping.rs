//! Periodic work: workers that ended or fell silent, segments that their clients have left, expired lookups and transfers, tenants
//! over quota, and the low watermark; and the counting of misses by reason, which reads more than a lookup may;
//! and the note of a client of another server, which waits for the disk.
//!
//! No request depends on it: `reserve` evicts by itself, and every release has its own request. It only limits how long
//! abandoned memory stays.

use std::time::Duration;

use super::Engine;

/// Interval between calls of [`Engine::housekeep`].
pub const INTERVAL: Duration = Duration::from_secs(1);

impl Engine {
    /// Runs one round of the periodic work.
    pub fn housekeep(&self) {
        let now = self.context.now();
        self.workers.expire(now);
        for segment in kvtier_memory::segment::remove_orphans() {
            tracing::info!(segment, "removed a segment that no process has mapped");
        }
        self.lookups.expire(now);
        self.transfers.expire(now);
        self.context.l1.expire();
        self.admin.evict();
        self.admin.count_misses();
        self.lookups.chunk_sizes.keep_foreign();
    }

    /// Considers every worker and scheduler alive: the process itself was stopped, and what they have sent is not read yet.
    pub fn forgive_silence(&self) {
        let now = self.context.now();
        self.context.instances.all_seen(now);
        self.lookups.forgive_silence(now);
    }

    /// Whether pages of the arena were lost: another process truncated the pool, or its file system is full.
    pub fn lost_memory(&self) -> bool {
        self.context.l1.arena.poisoned().is_some()
    }

    /// Why a GPU is unusable, if one is.
    pub fn broken_gpu(&self) -> Option<String> {
        self.context.devices.broken()
    }
}
