//! What stores that we copy have set aside of L1, and whether there may be more of it: nothing of it is readable before
//! its GPU has copied it, and it took the place of something that was.
//!
//! A worker may have all that is allowed while the others need none of it. Only when that is not enough has each of those
//! that have anything an equal part.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::begin::Refusal;

/// What all workers have.
#[derive(Default)]
pub struct SetAside {
    bytes: AtomicU64,
    /// Those that have anything.
    workers: AtomicU64,
}

/// What one worker has.
#[derive(Default)]
pub struct OfWorker(AtomicU64);

impl SetAside {
    /// Whether a store of this worker may have memory, when all may have `limit` bytes: the last one may go beyond.
    ///
    /// # Errors
    /// All together have more, and this worker has more than an equal part.
    pub(super) fn allows(&self, worker: &OfWorker, limit: u64) -> Result<(), Refusal> {
        // Relaxed, as these numbers guard no other memory; stores that come together may all be the last one.
        let (all, own) = (
            self.bytes.load(Ordering::Relaxed),
            worker.0.load(Ordering::Relaxed),
        );
        let workers = self.workers.load(Ordering::Relaxed).max(1);
        let share = limit / workers;
        if all <= limit || own <= share {
            return Ok(());
        }
        Err(Refusal::Busy(format!(
            "stores of this worker that are under way have {own} bytes of L1 set aside, those of all {workers} workers \
             {all}; allowed before the next: {share}, or {limit} for all"
        )))
    }

    /// A store of this worker has had so many bytes set aside.
    pub fn take(self: &Arc<Self>, worker: &Arc<OfWorker>, bytes: u64) -> Option<Charge> {
        if bytes == 0 {
            return None;
        }
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        // Acquire and release, here and in the drop: a worker is counted before it is counted out.
        if worker.0.fetch_add(bytes, Ordering::AcqRel) == 0 {
            self.workers.fetch_add(1, Ordering::Relaxed);
        }
        Some(Charge {
            all: Arc::clone(self),
            worker: Arc::clone(worker),
            bytes,
        })
    }
}

/// What one store has, until it has ended.
pub struct Charge {
    all: Arc<SetAside>,
    worker: Arc<OfWorker>,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.all.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        if self.worker.0.fetch_sub(self.bytes, Ordering::AcqRel) == self.bytes {
            self.all.workers.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(all: &SetAside) -> [u64; 2] {
        [&all.bytes, &all.workers].map(|count| count.load(Ordering::Relaxed))
    }

    #[test]
    fn a_worker_counts_while_it_has_anything() {
        let all = Arc::new(SetAside::default());
        let [one, two] = [0, 1].map(|_| Arc::new(OfWorker::default()));
        let (first, second) = (all.take(&one, 5), all.take(&one, 7));
        assert!(all.take(&two, 0).is_none());
        assert_eq!(counts(&all), [12, 1]);
        let third = all.take(&two, 1);
        assert_eq!(counts(&all), [13, 2]);
        drop(first);
        assert_eq!(counts(&all), [8, 2]);
        drop((second, third));
        assert_eq!(counts(&all), [0, 0]);
        assert_eq!(one.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn only_who_has_more_than_its_part_waits_when_all_have_too_much() {
        let all = Arc::new(SetAside::default());
        let [hog, other] = [0, 1].map(|_| Arc::new(OfWorker::default()));
        let allowed = |worker: &OfWorker| all.allows(worker, 100).is_ok();
        let _all = all.take(&hog, 100);
        assert!(allowed(&hog) && allowed(&other));
        let beyond = all.take(&hog, 1);
        assert!(!allowed(&hog) && allowed(&other));
        let half = all.take(&other, 50);
        assert!(allowed(&other));
        let more = all.take(&other, 1);
        assert!(!allowed(&hog) && !allowed(&other));
        drop((half, more, beyond));
        assert!(allowed(&hog));
    }

    /// However they come and go, nothing is left.
    #[test]
    fn the_counts_of_threads_that_meet_add_up() {
        let all = Arc::new(SetAside::default());
        let worker = Arc::new(OfWorker::default());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|bytes| drop(all.take(&worker, bytes))));
            }
        });
        assert_eq!(counts(&all), [0, 0]);
    }
}
