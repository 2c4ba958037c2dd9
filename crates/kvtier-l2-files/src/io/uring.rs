//! Several transfers in flight per thread, by io_uring.
//!
//! The mutex guards the rings that no thread uses; no other lock is acquired inside.

use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_common::sync::Mutex;
use kvtier_memory::uring::Ring;

use super::{Engine, FileWork, HeldBuffer, Posix, done, transfer};

/// Transfers in flight per thread.
const MAX_IN_FLIGHT: usize = 16;

/// I/O engine of io_uring. Operations that rings do not have are POSIX calls.
pub(crate) struct Uring {
    /// Rings that no thread uses now.
    rings: Mutex<Vec<Ring<HeldBuffer>>>,
    has_failed: AtomicBool,
}

impl Uring {
    /// # Errors
    /// If io_uring is not available.
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            rings: Mutex::new(vec![Ring::new(MAX_IN_FLIGHT)?]),
            has_failed: AtomicBool::new(false),
        })
    }

    fn take(&self) -> Option<Ring<HeldBuffer>> {
        if self.has_failed.load(Ordering::Relaxed) {
            return None;
        }
        let kept = self.rings.lock().pop();
        kept.or_else(|| {
            Ring::new(MAX_IN_FLIGHT)
                .inspect_err(|error| self.fail(error))
                .ok()
        })
    }

    fn fail(&self, error: &dyn std::fmt::Display) {
        if !self.has_failed.swap(true, Ordering::Relaxed) {
            tracing::warn!(%error, "io_uring failed; files are moved with plain system calls from now on");
        }
    }
}

impl Engine for Uring {
    fn name(&self) -> &'static str {
        if self.has_failed.load(Ordering::Relaxed) {
            "posix"
        } else {
            "io_uring"
        }
    }

    fn run(&self, work: &mut dyn FileWork) {
        if let Some(mut ring) = self.take() {
            let mut in_flight = Vec::new();
            loop {
                while !ring.is_full()
                    && !ring.is_broken()
                    && let Some(one) = work.next()
                {
                    let number = one.number;
                    match ring.begin(transfer(one)) {
                        Ok(()) => in_flight.push(number),
                        Err(mut refused) => {
                            let moved = refused.finish(0);
                            done(work, refused, moved);
                        }
                    }
                }
                let Some((ended, moved)) = ring.wait() else {
                    break;
                };
                in_flight.retain(|number| *number != ended.hold.number);
                done(work, ended, moved);
            }
            for number in in_flight {
                work.lost(number);
            }
            if ring.is_broken() {
                self.fail(&"the system takes no more transfers")
            } else {
                self.rings.lock().push(ring)
            }
        }
        // The rest, if a ring failed.
        Posix.run(work);
    }
}
