//! The arena, pinned: known to the driver, so that GPUs reach it by themselves and at full speed.
//!
//! Pinning takes seconds for a large arena (the driver touches every page), so it goes on in the background, piece by
//! piece, while the server serves. What is not pinned yet, or cannot be, is copied all the same; the driver then goes
//! through buffers of its own, and a copy keeps the thread that starts it.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvtier_memory::{Arena, Extent};
use parking_lot::{Mutex, RwLock, RwLockWriteGuard};

use super::super::device_copy::PinnedPieces;
use super::super::driver::{Context, RegisteredHost};
use super::executor::HostMemory;

/// Threads that pin, and later unpin. The work is the kernel's, page by page; more of them gain little (LMCache uses
/// one).
const THREADS: usize = 4;

/// How far pinning has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PinningStatus {
    /// Bytes that are pinned.
    pub bytes: u64,
    /// Bytes of the arena.
    pub total: u64,
    /// Whether it goes on.
    pub under_way: bool,
    /// Why some piece could not be pinned, the last time.
    pub error: Option<String>,
}

/// One arena and what of it is pinned.
pub(in super::super) struct Pinned {
    shared: Arc<Shared>,
    /// Without senders once the threads that pin have ended.
    pinning: Mutex<Receiver<()>>,
    /// How long the driver may take for a piece when somebody waits for it.
    patience: Duration,
    /// What came of [`Pinned::unpin`].
    unpinned: OnceLock<Result<(), u64>>,
}

struct Shared {
    // Before the arena, which must stay mapped while pieces are registered.
    registered: Mutex<Vec<(u64, RegisteredHost)>>,
    /// Bytes of a piece, the last one maybe fewer.
    piece_bytes: u64,
    pieces: Vec<AtomicBool>,
    next: AtomicUsize,
    bytes: AtomicU64,
    left: AtomicUsize,
    stop: AtomicBool,
    /// Every piece has one address for host and GPUs.
    same_address: AtomicBool,
    /// Held by who needs the driver for itself, and shared by who pins a piece.
    quiet: RwLock<()>,
    error: Mutex<Option<String>>,
    arena: Arc<Arena>,
}

impl Pinned {
    /// Begins to pin, so many bytes at a time, in whole pages. It is never waited any longer than `patience` for a
    /// driver that does nothing.
    pub fn start(
        context: &Arc<Context>,
        arena: Arc<Arena>,
        piece_bytes: u64,
        patience: Duration,
    ) -> Self {
        let page = arena.page_bytes();
        let piece_bytes = piece_bytes.clamp(page, arena.len()).next_multiple_of(page);
        let count = arena.len().div_ceil(piece_bytes) as usize;
        let shared = Arc::new(Shared {
            registered: Mutex::default(),
            piece_bytes,
            pieces: (0..count).map(|_| AtomicBool::new(false)).collect(),
            next: AtomicUsize::new(0),
            bytes: AtomicU64::new(0),
            left: AtomicUsize::new(count),
            stop: AtomicBool::new(false),
            same_address: AtomicBool::new(true),
            quiet: RwLock::new(()),
            error: Mutex::default(),
            arena,
        });
        let pinning = Shared::on_threads(&shared, "pin", count, {
            let context = Arc::clone(context);
            move |shared: &Shared, did: &_| shared.pin(&context, did)
        });
        let pinning = Mutex::new(pinning.unwrap_or_else(|error| {
            *shared.error.lock() = Some(format!("no thread: {error}"));
            shared.stop.store(true, Ordering::Relaxed);
            channel().1
        }));
        Self {
            shared,
            pinning,
            patience,
            unpinned: OnceLock::new(),
        }
    }

    /// Pins no more, and gives up what is pinned: no copy may need it any more. Done once; who asks again is told the same.
    ///
    /// # Errors
    /// The bytes that are still pinned, when the driver did nothing for as long as it is waited for. They are given up
    /// by what it has not answered yet, or at the end of the process.
    pub fn unpin(&self) -> Result<(), u64> {
        *self.unpinned.get_or_init(|| self.unpin_all())
    }

    fn unpin_all(&self) -> Result<(), u64> {
        let shared = &self.shared;
        shared.stop.store(true, Ordering::Relaxed);
        let unpinned = self.ends(&self.pinning.lock()) && {
            for piece in &shared.pieces {
                piece.store(false, Ordering::Release);
            }
            let count = shared.registered.lock().len();
            let unpinning = Shared::on_threads(shared, "unpin", count, Shared::unpin);
            // Without a thread it is done here.
            let unpinning = unpinning.unwrap_or_else(|_| {
                let (did, unpinning) = channel();
                shared.unpin(&did);
                unpinning
            });
            self.ends(&unpinning)
        };
        match unpinned {
            true => Ok(()),
            false => Err(shared.bytes.load(Ordering::Relaxed)),
        }
    }

    /// Waits for threads to end as long as they get on.
    fn ends(&self, threads: &Receiver<()>) -> bool {
        loop {
            match threads.recv_timeout(self.patience) {
                Ok(()) => {}
                Err(error) => return error == RecvTimeoutError::Disconnected,
            }
        }
    }

    /// Nothing is pinned until the result is dropped. Waits for the pieces that are being pinned, but for no driver that
    /// does nothing.
    pub fn pause(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        self.shared.quiet.try_write_for(self.patience)
    }

    /// What an extent of an arena is.
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

    /// The borders that no copy may cross.
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
            under_way: shared.left.load(Ordering::Relaxed) > 0
                && !shared.stop.load(Ordering::Relaxed),
            error: shared.error.lock().clone(),
        }
    }
}

impl Shared {
    /// Runs something on a few threads; gives what they say that they did, and nothing any more when all have ended.
    fn on_threads(
        this: &Arc<Self>,
        name: &str,
        pieces: usize,
        run: impl Fn(&Self, &Sender<()>) + Clone + Send + 'static,
    ) -> std::io::Result<Receiver<()>> {
        let (did, receiver) = channel();
        for number in 0..THREADS.min(pieces) {
            let (this, did, run) = (Arc::clone(this), did.clone(), run.clone());
            let run = move || {
                run(&this, &did);
                // Whoever hears that it has ended finds nothing held by it.
                drop((run, this));
                drop(did);
            };
            let thread = std::thread::Builder::new().name(format!("kvtier-{name}-{number}"));
            match thread.spawn(run) {
                Ok(_) => {}
                Err(error) if number == 0 => return Err(error),
                // Fewer will do.
                Err(_) => break,
            }
        }
        Ok(receiver)
    }

    fn unpin(&self, did: &Sender<()>) {
        loop {
            // The lock is not held over the driver's call.
            let Some((bytes, piece)) = self.registered.lock().pop() else {
                return;
            };
            drop(piece);
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
            // Nobody may listen any more.
            let _ = did.send(());
        }
    }

    fn pin(&self, context: &Arc<Context>, did: &Sender<()>) {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.pieces.len() || self.stop.load(Ordering::Relaxed) {
                return;
            }
            let _quiet = self.quiet.read();
            let offset = number as u64 * self.piece_bytes;
            let bytes = self.piece_bytes.min(self.arena.len() - offset);
            if let Err(error) = self.pin_piece(context, number, offset, bytes) {
                *self.error.lock() = Some(format!("{bytes} bytes from {offset} on: {error}"));
            }
            self.left.fetch_sub(1, Ordering::Relaxed);
            let _ = did.send(());
        }
    }

    fn pin_piece(
        &self,
        context: &Arc<Context>,
        number: usize,
        offset: u64,
        bytes: u64,
    ) -> Result<(), String> {
        let all = Extent::new(0, self.arena.len());
        let start: NonNull<u8> = self
            .arena
            .address(all, offset, bytes)
            .map_err(|error| error.to_string())?;
        // SAFETY: the arena stays mapped until `registered` is empty, which is declared before it; who writes what of
        // it when is decided by who hands out extents.
        let registered = unsafe { context.register_host(start, bytes as usize) };
        let registered = registered.map_err(|error| error.to_string())?;
        // From here on copies may rely on it, whatever else is said.
        self.registered.lock().push((bytes, registered));
        if HostMemory::of_registered(context, start) != HostMemory::Mapped {
            self.same_address.store(false, Ordering::Release);
        }
        self.pieces[number].store(true, Ordering::Release);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // What is left is held by the threads that wait for the driver, the arena too.
        let _ = self.unpin();
    }
}

impl std::fmt::Debug for Pinned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.status().fmt(f)
    }
}
