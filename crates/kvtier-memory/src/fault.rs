//! The fault guard: a lost page must not kill the process.
//!
//! Touching a page of a shared mapping whose file no longer has it (the peer truncated its
//! segment, the file system is full, the memory failed) raises `SIGBUS`. For addresses inside a
//! registered mapping the handler here marks the page as lost and puts an empty private page in
//! its place, so that the copy in flight runs to its end and then finds the mark. All other
//! faults go to the handler that was installed before.
//!
//! The handler only reads a fixed table of atomics and makes one system call: it takes no lock,
//! allocates nothing and leaves `errno` alone.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// Mappings that can be registered at a time.
pub const MAX_MAPPINGS: usize = 4096;

/// Every place of the guard's table is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{MAX_MAPPINGS} mappings are in use, which is the most there can be")]
pub struct TableFull;

/// One registered range. `state` is a sequence lock: the low two bits say FREE, CHANGING or
/// ACTIVE, the rest counts changes, so the handler notices a slot that changes under its eyes
/// (which is then not the slot of the mapping that faulted: that one is in use).
struct FaultSlot {
    state: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    page: AtomicUsize,
    /// Lost pages: lowest start and highest end; `low >= high` means none.
    low: AtomicUsize,
    high: AtomicUsize,
}

const FREE: usize = 0;
const CHANGING: usize = 1;
const ACTIVE: usize = 2;
const STATE_MASK: usize = 3;

static TABLE: [FaultSlot; MAX_MAPPINGS] = [const {
    FaultSlot {
        state: AtomicUsize::new(FREE),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        page: AtomicUsize::new(0),
        low: AtomicUsize::new(0),
        high: AtomicUsize::new(0),
    }
}; MAX_MAPPINGS];

/// How many slots, from the first, were ever used: the handler looks no further.
static HIGH_WATER: AtomicUsize = AtomicUsize::new(0);

/// What was installed before us; set before our handler is, never changed after.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(null_mut());

static INSTALL: Once = Once::new();

/// Installs the handler, once a process; every mapping of this crate does so by itself.
///
/// Handlers installed later replace ours and must chain to it, as ours chains to the earlier one.
pub fn install() {
    INSTALL.call_once(|| {
        let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: asks for the present action only; `previous` is large enough for it.
        let asked = unsafe { libc::sigaction(libc::SIGBUS, null(), previous.as_mut_ptr()) };
        if asked == 0 {
            // SAFETY: filled by the call above (and all zeroes is a valid value as well).
            let previous = Box::new(unsafe { previous.assume_init() });
            // Leaked on purpose: the handler may need it until the process ends.
            PREVIOUS.store(Box::into_raw(previous), Ordering::Release);
        }
        // SAFETY: an all-zero `sigaction` is valid; the fields that matter are set below.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_bus_error as *const () as usize;
        // On the alternate stack where a thread has one; the handler itself needs little.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `action` is complete and its handler is async-signal-safe: it takes no lock and allocates nothing.
        // It cannot fail: the signal number and both pointers are valid.
        unsafe {
            libc::sigemptyset(&mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, &action, null_mut());
        }
    });
}

/// A range in the guard's table, removed on drop.
#[derive(Debug)]
pub(crate) struct Registration {
    slot: usize,
}

impl Registration {
    /// Registers `len` bytes from `start`; both are multiples of `page`, the size of the pages
    /// behind them.
    pub(crate) fn new(start: usize, len: usize, page: usize) -> Result<Self, TableFull> {
        install();
        for (index, slot) in TABLE.iter().enumerate() {
            let state = slot.state.load(Ordering::Relaxed);
            if state & STATE_MASK != FREE {
                continue;
            }
            let changing = (state & !STATE_MASK) | CHANGING;
            if slot
                .state
                .compare_exchange(state, changing, Ordering::Acquire, Ordering::Relaxed)
                .is_err()
            {
                continue;
            }
            // Readers that see any of the values below also see CHANGING.
            fence(Ordering::Release);
            slot.start.store(start, Ordering::Relaxed);
            slot.end.store(start + len, Ordering::Relaxed);
            slot.page.store(page, Ordering::Relaxed);
            slot.low.store(usize::MAX, Ordering::Relaxed);
            slot.high.store(0, Ordering::Relaxed);
            HIGH_WATER.fetch_max(index + 1, Ordering::Relaxed);
            let active = (changing & !STATE_MASK).wrapping_add(4) | ACTIVE;
            slot.state.store(active, Ordering::Release);
            return Ok(Self { slot: index });
        }
        Err(TableFull)
    }

    /// Addresses from the first lost page to behind the last lost one.
    pub(crate) fn poisoned(&self) -> Option<(usize, usize)> {
        let slot = &TABLE[self.slot];
        let low = slot.low.load(Ordering::SeqCst);
        let high = slot.high.load(Ordering::SeqCst);
        // `low` is written first: between the two writes all from `low` on counts as lost.
        match (low, high) {
            (usize::MAX, _) => None,
            (low, high) if high <= low => Some((low, slot.end.load(Ordering::Relaxed))),
            lost => Some(lost),
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let slot = &TABLE[self.slot];
        let state = slot.state.load(Ordering::Relaxed);
        let free = (state & !STATE_MASK).wrapping_add(4) | FREE;
        slot.state.store(free, Ordering::Release);
    }
}

/// Marks the page of `address` as lost if a registered mapping has it: its start and size.
fn mark_lost(address: usize) -> Option<(usize, usize)> {
    let used = HIGH_WATER.load(Ordering::Relaxed).min(MAX_MAPPINGS);
    for slot in &TABLE[..used] {
        let before = slot.state.load(Ordering::Acquire);
        if before & STATE_MASK != ACTIVE {
            continue;
        }
        let start = slot.start.load(Ordering::Relaxed);
        let end = slot.end.load(Ordering::Relaxed);
        let page = slot.page.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        if slot.state.load(Ordering::Relaxed) != before {
            continue;
        }
        if (start..end).contains(&address) {
            let first = address & !(page - 1);
            slot.low.fetch_min(first, Ordering::SeqCst);
            slot.high.fetch_max(first + page, Ordering::SeqCst);
            return Some((first, page));
        }
    }
    None
}

extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo to a SA_SIGINFO handler; for a fault it holds
    // the address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    // Codes above zero are the kernel's own; a `kill(pid, SIGBUS)` is no lost page.
    if code > 0
        && let Some((first, page)) = mark_lost(address)
    {
        // Of ordinary pages also in place of a huge one: there may be no other, or none that this process may have.
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        // SAFETY: replaces one page of a mapping this crate owns and which is in use right now
        // (it faulted); the lost page held nothing. The call is a bare system call.
        let replaced = unsafe {
            mmap_anonymous(
                std::ptr::without_provenance_mut(first),
                page,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )
        };
        if replaced.is_ok() {
            return;
        }
    }
    chain(signal, info, context);
}

/// Does what would have been done without us.
fn chain(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.load(Ordering::Acquire);
    // SAFETY: null or a leaked box that is never changed.
    let previous = unsafe { previous.as_ref() };
    match previous {
        Some(action)
            if action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN =>
        {
            if action.sa_flags & libc::SA_SIGINFO != 0 {
                type Full = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
                // SAFETY: with SA_SIGINFO the stored address is a function of this type.
                let handler = unsafe { std::mem::transmute::<usize, Full>(action.sa_sigaction) };
                handler(signal, info, context);
            } else {
                type Short = extern "C" fn(c_int);
                // SAFETY: without SA_SIGINFO the stored address is a function of this type.
                let handler = unsafe { std::mem::transmute::<usize, Short>(action.sa_sigaction) };
                handler(signal);
            }
        }
        // SAFETY: as in the handler: a valid siginfo.
        Some(action) if action.sa_sigaction == libc::SIG_IGN && unsafe { (*info).si_code } <= 0 => {
        }
        // Default (ignoring a fault is not possible either): let it happen again, unhandled.
        _ => {
            // SAFETY: both calls are async-signal-safe; SIG_DFL is a valid handler.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                // A signal that was sent by a process does not happen again by itself.
                if (*info).si_code <= 0 {
                    libc::raise(signal);
                }
            }
        }
    }
}
