//! Scratch memory: where transformed objects are between L1 and an adapter.
//!
//! Each piece has an arena of its own, so that a piece can be worked on in place once nothing else holds its arena. The
//! mutex guards the idle arenas; no other lock is acquired inside.

use std::sync::Arc;

use kvtier_common::sync::Mutex;
use kvtier_memory::{Arena, ArenaKind, Extent};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError};

use crate::error::{ErrorKind, L2Error};
use crate::object::Buffer;

/// Pieces in use at once.
const MAX_PIECES: u64 = 256;

/// Granularity of arenas: a page.
const PAGE: u64 = 4096;

/// Bounded scratch memory; calls that need more wait in order of arrival.
#[derive(Clone)]
pub(super) struct Scratch(Arc<ScratchMemory>);

struct ScratchMemory {
    /// Bytes per permit.
    unit: u64,
    /// All permits.
    units: u32,
    free: Arc<Semaphore>,
    /// Arenas without a piece, the most recently used last.
    idle: Mutex<Vec<Arena>>,
}

/// Memory for one transformed object. It goes back to the scratch memory when dropped.
pub(super) struct ScratchPiece {
    /// `None` only while it is dropped.
    arena: Option<Arc<Arena>>,
    scratch: Scratch,
    _permit: OwnedSemaphorePermit,
}

impl Scratch {
    /// Returns scratch memory of `bytes`, without allocating any.
    pub(super) fn new(bytes: u64) -> Self {
        let unit = (bytes / MAX_PIECES).max(PAGE);
        let units = u32::try_from((bytes / unit).max(1)).unwrap_or(u32::MAX);
        Self(Arc::new(ScratchMemory {
            unit,
            units,
            free: Arc::new(Semaphore::new(units as usize)),
            idle: Mutex::default(),
        }))
    }

    /// Number of permits of a piece. One that is larger than all scratch memory takes all permits, and memory beyond the
    /// bound: it is the only one then.
    fn permits(&self, len: u64) -> u32 {
        let units = class(len).div_ceil(self.0.unit).max(1);
        u32::try_from(units).map_or(self.0.units, |units| units.min(self.0.units))
    }

    /// Returns a piece of at least `len` bytes, whose contents are undefined. Waits until there is one: the caller holds
    /// none meanwhile.
    pub(super) async fn take(&self, len: u64) -> Result<ScratchPiece, L2Error> {
        let permits = self.permits(len);
        let free = Arc::clone(&self.0.free);
        let permit = free.acquire_many_owned(permits).await;
        let permit =
            permit.map_err(|_| L2Error::new(ErrorKind::Unavailable, "no scratch memory"))?;
        self.piece(len, permit)
    }

    /// [`Self::take`] without waiting; `None` if there is not enough free memory now.
    pub(super) fn try_take(&self, len: u64) -> Option<Result<ScratchPiece, L2Error>> {
        let permits = self.permits(len);
        match Arc::clone(&self.0.free).try_acquire_many_owned(permits) {
            Ok(permit) => Some(self.piece(len, permit)),
            Err(TryAcquireError::NoPermits) => None,
            Err(TryAcquireError::Closed) => Some(Err(L2Error::new(
                ErrorKind::Unavailable,
                "no scratch memory",
            ))),
        }
    }

    fn piece(&self, len: u64, permit: OwnedSemaphorePermit) -> Result<ScratchPiece, L2Error> {
        let class = class(len);
        let arena = {
            let mut idle = self.0.idle.lock();
            let at = idle.iter().rposition(|arena| arena.len() == class);
            at.map(|at| idle.remove(at))
        };
        let arena = match arena {
            Some(arena) => arena,
            None => {
                drop(self.shrink());
                Arena::create(ArenaKind::Anonymous, class).map_err(|error| {
                    let line = format!("no scratch memory for {len} bytes: {error}");
                    L2Error::new(ErrorKind::Memory, line)
                })?
            }
        };
        Ok(ScratchPiece {
            arena: Some(Arc::new(arena)),
            scratch: self.clone(),
            _permit: permit,
        })
    }

    /// Removes idle arenas until they fit next to the pieces in use.
    fn shrink(&self) -> Vec<Arena> {
        let free = self.0.free.available_permits() as u64 * self.0.unit;
        let mut idle = self.0.idle.lock();
        let mut kept: u64 = idle.iter().map(Arena::len).sum();
        let mut removed = Vec::new();
        while !idle.is_empty() && (kept > free || idle.len() as u64 >= MAX_PIECES) {
            let arena = idle.remove(0);
            kept -= arena.len();
            removed.push(arena);
        }
        removed
    }

    /// Bytes of all permits.
    pub(super) fn capacity(&self) -> u64 {
        u64::from(self.0.units) * self.0.unit
    }

    /// Bytes of the permits in use.
    pub(super) fn used(&self) -> u64 {
        self.capacity() - self.0.free.available_permits() as u64 * self.0.unit
    }
}

impl ScratchPiece {
    /// Returns the piece's bytes, `None` while anything else holds its arena.
    pub(super) fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        Arc::get_mut(self.arena.as_mut()?)?.bytes_mut()
    }
}

/// Returns the first `len` bytes of `piece` as a buffer.
pub(super) fn buffer(piece: &Arc<ScratchPiece>, len: u64) -> Option<Buffer> {
    let arena = Arc::clone(piece.arena.as_ref()?);
    let hold = Arc::clone(piece) as _;
    Some(Buffer::new(arena, Extent::new(0, len), hold))
}

impl Drop for ScratchPiece {
    fn drop(&mut self) {
        // An arena that an adapter still holds is not reused.
        let Some(arena) = self.arena.take().and_then(Arc::into_inner) else {
            return;
        };
        let shared = &self.scratch.0;
        // One that is larger than all scratch memory is not kept.
        if arena.len() <= u64::from(shared.units) * shared.unit {
            shared.idle.lock().push(arena);
        }
    }
}

/// Size of the arena of a piece: at most an eighth above `len`, so that few sizes serve objects of similar lengths.
fn class(len: u64) -> u64 {
    let step = (len.max(1).checked_next_power_of_two().unwrap_or(1 << 63) / 16).max(PAGE);
    len.max(1).checked_next_multiple_of(step).unwrap_or(len)
}
