//! What L1 has of the server before: its objects, and memory that its clients may still copy.
//!
//! A client that maps the pool copies by itself, and does not stop when the server does. Memory that it was granted, to write
//! or to read, is withheld here until the server [takes](Heritage::take) it as that of an instance that has left.
//!
//! The mutex guards what is withheld; nothing is acquired inside, and it is dropped outside.

use std::path::PathBuf;
use std::time::Duration;

use kvtier_common::sync::Mutex;
use kvtier_core::cache::{Cache, ReadLease, Reservation, Restored};
use kvtier_core::ledger::Rejected;
use kvtier_memory::Arena;

use super::allocator::L1Allocator;

/// Memory of the server before that its clients may still copy.
struct Withheld {
    /// Cache of `memory` and `objects`.
    cache: Cache<L1Allocator>,
    memory: Reservation<L1Allocator>,
    objects: ReadLease<L1Allocator>,
}

/// What L1 has of the server before.
#[derive(Default)]
pub struct EarlierMemory {
    /// Age of L1 at the start.
    pub age: Duration,
    /// Readable objects at the start.
    pub objects: u64,
    /// Bytes of the readable objects at the start.
    pub bytes: u64,
    /// Objects that were left out.
    pub rejected: Rejected,
    withheld: Mutex<Option<Withheld>>,
}

impl EarlierMemory {
    pub(super) fn new(
        restored: Option<(Restored<L1Allocator>, Duration)>,
        cache: &Cache<L1Allocator>,
        file: Option<PathBuf>,
    ) -> Self {
        let Some((restored, age)) = restored else {
            return Self::default();
        };
        let rejected = restored.rejected;
        let left_out = rejected.reasons();
        let left_out: Vec<_> = left_out
            .map(|(fault, count)| format!("{count} {}", fault.name()))
            .collect();
        let withheld = restored.withheld.len() + restored.read.len();
        tracing::info!(
            objects = restored.objects,
            bytes = restored.bytes,
            left_out = (!left_out.is_empty()).then(|| left_out.join(", ")),
            withheld,
            file = file
                .as_ref()
                .map(|file| tracing::field::display(file.display())),
            "restored L1"
        );
        let held = Withheld {
            cache: cache.clone(),
            memory: restored.withheld,
            objects: restored.read,
        };
        Self {
            age,
            objects: restored.objects,
            bytes: restored.bytes,
            rejected,
            withheld: Mutex::new((withheld > 0).then_some(held)),
        }
    }

    /// Frees what no client can reach, and memory of an arena that was larger.
    pub(super) fn release_unreachable(&self, arena: &Arena) {
        if self.age > Duration::ZERO && arena.is_alone() {
            let held = self.withheld.lock().take();
            drop(held);
            arena.trim();
        }
    }

    /// Takes what is withheld: memory that may still be written, and leases on objects that may still be read.
    pub fn take(&self) -> Option<(Reservation<L1Allocator>, ReadLease<L1Allocator>)> {
        let held = self.withheld.lock().take()?;
        Some((held.memory, held.objects))
    }
}

impl Drop for EarlierMemory {
    /// A start that fails frees nothing in the ledger: for the next one, clients may still copy.
    fn drop(&mut self) {
        let held = self.withheld.lock();
        let cache = held.as_ref().map(|held| held.cache.clone());
        drop(held);
        if let Some(cache) = cache {
            cache.detach_ledger();
        }
    }
}
