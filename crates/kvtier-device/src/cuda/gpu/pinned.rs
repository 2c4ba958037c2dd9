//! Pinning of the arena: memory registered with the driver, which GPUs access directly and at full speed.
//!
//! Pinning takes seconds for a large arena, so it runs in the background, piece by piece, while the server serves. Pieces that
//! are not pinned are copied too, through the driver's buffers, and such a copy blocks the thread that starts it.
//!
//! While the driver registers memory, its other calls wait, also those of transfers and of registrations of workers
//! (`benches/pinning.py`). So one thread registers, only memory that is touched before, and rests after each piece.
//!
//! `pause_lock` guards pinning: it is shared while a piece is pinned and exclusive while pinning is paused; the others may be acquired
//! inside. `registered` (the pinned pieces), `error` (of the last one that failed) and `pinning` (progress) have no lock inside.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvtier_common::error::{Error, ErrorKind};
use kvtier_common::sync::{Mutex, RwLock, RwLockWriteGuard};
use kvtier_memory::{Arena, Extent};

use super::super::device_copy::PinnedPieces;
use super::super::driver::{Context, RegisteredHost};
use super::executor::HostMemory;

/// Threads that pin: on an H200 four were slower than one (21.9 and 33.0 GB/s), and no other call of the driver returned before they
/// had ended.
const PIN_THREADS: usize = 1;

/// Threads that unpin. Then no transfer is left to wait for them.
const UNPIN_THREADS: usize = 4;

/// Progress of pinning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PinningStatus {
    /// Pinned bytes.
    pub bytes: u64,
    /// Bytes of the arena.
    pub total: u64,
    /// Whether pinning is running.
    pub is_running: bool,
    /// Error of the last piece that could not be pinned.
    pub error: Option<String>,
}

/// An arena and its pinned pieces.
pub(in super::super) struct PinnedArena {
    shared: Arc<PinningShared>,
    /// Progress of the pinning threads; disconnected once they have ended.
    pinning: Mutex<Receiver<()>>,
    /// Timeout of a driver call per piece, when a caller waits for it.
    timeout: Duration,
    /// Result of [`PinnedArena::unpin`].
    unpinned: OnceLock<Result<(), u64>>,
}

struct PinningShared {
    // Before the arena, which must stay mapped while pieces are registered.
    registered: Mutex<Vec<(u64, RegisteredHost)>>,
    /// Bytes of a piece; the last one may be shorter.
    piece_bytes: u64,
    pieces: Vec<AtomicBool>,
    next: AtomicUsize,
    bytes: AtomicU64,
    left: AtomicUsize,
    stop: AtomicBool,
    /// Whether every piece has one address for host and GPUs.
    same_address: AtomicBool,
    /// Locked exclusively to pause pinning, shared while a piece is pinned.
    pause_lock: RwLock<()>,
    error: Mutex<Option<String>>,
    arena: Arc<Arena>,
}

impl PinnedArena {
    /// Starts to pin the arena, `piece_bytes` at a time, in whole pages. Waits of other functions end after `timeout`
    /// without progress.
    pub fn start(
        context: &Arc<Context>,
        arena: Arc<Arena>,
        piece_bytes: u64,
        timeout: Duration,
    ) -> Self {
        let page = arena.page_bytes();
        let piece_bytes = piece_bytes.clamp(page, arena.len()).next_multiple_of(page);
        let count = arena.len().div_ceil(piece_bytes) as usize;
        let shared = Arc::new(PinningShared {
            registered: Mutex::default(),
            piece_bytes,
            pieces: (0..count).map(|_| AtomicBool::new(false)).collect(),
            next: AtomicUsize::new(0),
            bytes: AtomicU64::new(0),
            left: AtomicUsize::new(count),
            stop: AtomicBool::new(false),
            same_address: AtomicBool::new(true),
            pause_lock: RwLock::new(()),
            error: Mutex::default(),
            arena,
        });
        let pinning = PinningShared::run_on_threads(&shared, "pin", PIN_THREADS.min(count), {
            let context = Arc::clone(context);
            move |shared: &PinningShared, progress: &_| shared.pin(&context, progress)
        });
        let pinning = Mutex::new(pinning.unwrap_or_else(|error| {
            *shared.error.lock() = Some(format!("no thread: {error}"));
            shared.stop.store(true, Ordering::Relaxed);
            channel().1
        }));
        Self {
            shared,
            pinning,
            timeout,
            unpinned: OnceLock::new(),
        }
    }

    /// Stops pinning and unpins all pieces; no copy may use them any more. Later calls return the same result.
    ///
    /// # Errors
    /// The bytes still pinned after a timeout without progress. They are unpinned by the call that hangs, or when the
    /// process ends.
    pub fn unpin(&self) -> Result<(), u64> {
        *self.unpinned.get_or_init(|| self.unpin_all())
    }

    fn unpin_all(&self) -> Result<(), u64> {
        let shared = &self.shared;
        shared.stop.store(true, Ordering::Relaxed);
        let unpinned = self.join_threads(&self.pinning.lock()) && {
            for piece in &shared.pieces {
                piece.store(false, Ordering::Release);
            }
            let count = shared.registered.lock().len();
            let threads = UNPIN_THREADS.min(count);
            let unpinning =
                PinningShared::run_on_threads(shared, "unpin", threads, PinningShared::unpin);
            // Without a thread, unpin here.
            let unpinning = unpinning.unwrap_or_else(|_| {
                let (progress, unpinning) = channel();
                shared.unpin(&progress);
                unpinning
            });
            self.join_threads(&unpinning)
        };
        if unpinned {
            Ok(())
        } else {
            Err(shared.bytes.load(Ordering::Relaxed))
        }
    }

    /// Waits for the threads to end; `false` after a timeout without progress.
    fn join_threads(&self, threads: &Receiver<()>) -> bool {
        loop {
            match threads.recv_timeout(self.timeout) {
                Ok(()) => {}
                Err(error) => return error == RecvTimeoutError::Disconnected,
            }
        }
    }

    /// Pauses pinning until the result is dropped. Waits for the pieces being pinned; `None` on a timeout.
    pub fn pause(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        self.shared.pause_lock.try_write_for(self.timeout)
    }

    /// Level of the host memory of an extent.
    pub(super) fn memory_of(&self, arena: &Arc<Arena>, extent: Extent) -> HostMemory {
        let shared = &self.shared;
        let end = extent.offset.checked_add(extent.len);
        let Some(last) = end.and_then(|end| end.checked_sub(1)) else {
            return HostMemory::Pageable;
        };
        let piece = |at: u64| usize::try_from(at / shared.piece_bytes).unwrap_or(usize::MAX);
        let (first, last) = (piece(extent.offset), piece(last));
        let pinned = |piece: &AtomicBool| piece.load(Ordering::Acquire);
        let pieces = shared.pieces.get(first..=last);
        if !Arc::ptr_eq(arena, &shared.arena)
            || !pieces.is_some_and(|pieces| pieces.iter().all(pinned))
        {
            HostMemory::Pageable
        } else if first == last && shared.same_address.load(Ordering::Acquire) {
            HostMemory::Mapped
        } else {
            HostMemory::Pinned
        }
    }

    /// The pieces, whose borders no copy may cross.
    pub fn pieces(&self) -> PinnedPieces {
        PinnedPieces {
            start: self.shared.arena.base().as_ptr() as u64,
            bytes: self.shared.piece_bytes,
        }
    }

    pub fn status(&self) -> PinningStatus {
        let shared = &self.shared;
        PinningStatus {
            bytes: shared.bytes.load(Ordering::Relaxed),
            total: shared.arena.len(),
            is_running: shared.left.load(Ordering::Relaxed) > 0
                && !shared.stop.load(Ordering::Relaxed),
            error: shared.error.lock().clone(),
        }
    }
}

impl PinningShared {
    /// Runs `run` on a few threads. The receiver gets their progress and is disconnected when all have ended.
    fn run_on_threads(
        this: &Arc<Self>,
        name: &str,
        threads: usize,
        run: impl Fn(&Self, &Sender<()>) + Clone + Send + 'static,
    ) -> std::io::Result<Receiver<()>> {
        let (progress, receiver) = channel();
        for number in 0..threads {
            let (this, progress, run) = (Arc::clone(this), progress.clone(), run.clone());
            let run = move || {
                run(&this, &progress);
                // Dropped first, so that nothing is held once the receiver is disconnected.
                drop((run, this));
                drop(progress);
            };
            let thread = std::thread::Builder::new().name(format!("kvtier-{name}-{number}"));
            match thread.spawn(run) {
                Ok(_) => {}
                Err(error) if number == 0 => return Err(error),
                // Fewer threads suffice.
                Err(_) => break,
            }
        }
        Ok(receiver)
    }

    fn unpin(&self, progress: &Sender<()>) {
        loop {
            // The lock is not held during the driver call.
            let Some((bytes, piece)) = self.registered.lock().pop() else {
                return;
            };
            drop(piece);
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
            // The receiver may have timed out.
            let _ = progress.send(());
        }
    }

    fn pin(&self, context: &Arc<Context>, progress: &Sender<()>) {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.pieces.len() || self.stop.load(Ordering::Relaxed) {
                return;
            }
            let offset = number as u64 * self.piece_bytes;
            let bytes = self.piece_bytes.min(self.arena.len() - offset);
            // Without memory for it, the driver says so below.
            let _ = self
                .arena
                .prefault(Extent::new(offset, bytes), &self.stop, |_| {});
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let running = self.pause_lock.read();
            let began = Instant::now();
            if let Err(error) = self.pin_piece(context, number, offset, bytes) {
                let error = error.context(format_args!("{bytes} bytes from {offset} on"));
                *self.error.lock() = Some(error.to_string());
            }
            drop(running);
            self.left.fetch_sub(1, Ordering::Relaxed);
            let _ = progress.send(());
            // Half of the time is for other calls of the driver: a lock of it favours the thread that has just released it.
            if !self.stop.load(Ordering::Relaxed) {
                std::thread::sleep(began.elapsed());
            }
        }
    }

    fn pin_piece(
        &self,
        context: &Arc<Context>,
        number: usize,
        offset: u64,
        bytes: u64,
    ) -> Result<(), Error> {
        let failed = |error: &dyn std::fmt::Display| Error::new(ErrorKind::Unavailable, error);
        let start: NonNull<u8> = self
            .arena
            .address(self.arena.whole(), offset, bytes)
            .map_err(|error| failed(&error))?;
        // SAFETY: the arena stays mapped until `registered`, which is declared before it, is empty; the owners of extents
        // coordinate writes.
        let registered = unsafe { RegisteredHost::new(context, start, bytes as usize) };
        let registered = registered.map_err(|error| failed(&error))?;
        // Stored first: from here on copies may rely on it.
        self.registered.lock().push((bytes, registered));
        if HostMemory::of_registered(context, start) != HostMemory::Mapped {
            self.same_address.store(false, Ordering::Release);
        }
        self.pieces[number].store(true, Ordering::Release);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for PinnedArena {
    fn drop(&mut self) {
        // After a timeout the waiting threads keep the rest, with the arena.
        let _ = self.unpin();
    }
}

impl std::fmt::Debug for PinnedArena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.status().fmt(f)
    }
}
