//! Thread pool of the file I/O.
//!
//! Reads (lookups, loads, deletes) have priority, as requests wait for them; stores run in the background. One thread never
//! runs stores, so a disk that stalls writes still serves reads.
//!
//! The mutex guards the queue; no other lock is acquired inside.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_common::sync::{Condvar, Mutex};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};

use kvtier_l2::{ErrorKind, L2Error};

/// Capacity of the queue in jobs; callers with more of them wait.
const MAX_QUEUED: usize = 1024;

/// Consecutive reads that overtake a queued store.
const MAX_OVERTAKING_READS: u32 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IoClass {
    Read,
    Store,
}

struct FileJob {
    run: Box<dyn FnOnce() + Send>,
    /// Permit of the queue.
    _place: OwnedSemaphorePermit,
}

#[derive(Default)]
struct Queue {
    reads: VecDeque<FileJob>,
    stores: VecDeque<FileJob>,
    /// Stores in flight.
    storing: usize,
    /// Reads taken since the last store.
    passed: u32,
    closed: bool,
}

impl Queue {
    /// Returns the next job that a thread may run now.
    fn take(&mut self, most_storing: usize) -> Option<(FileJob, IoClass)> {
        let may_store = self.storing < most_storing;
        let is_store_due = may_store && self.passed >= MAX_OVERTAKING_READS;
        if (self.reads.is_empty() || is_store_due)
            && may_store
            && let Some(job) = self.stores.pop_front()
        {
            self.passed = 0;
            self.storing += 1;
            return Some((job, IoClass::Store));
        }
        let job = self.reads.pop_front()?;
        self.passed = if self.stores.is_empty() {
            0
        } else {
            self.passed.saturating_add(1)
        };
        Some((job, IoClass::Read))
    }
}

struct PoolShared {
    queue: Mutex<Queue>,
    work: Condvar,
    most_storing: usize,
    running: watch::Sender<usize>,
}

/// Threads and their queue. When it is dropped or closed, the threads finish the queue and end.
pub(crate) struct Pool {
    shared: Arc<PoolShared>,
    places: Arc<Semaphore>,
    threads: usize,
    /// Whether a check is queued or running.
    is_checking: Arc<AtomicBool>,
}

/// A check that is queued or running.
struct CheckGuard(Arc<AtomicBool>);

impl Drop for CheckGuard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Error of work that did not run to its end: the pool is closed, or the work panicked.
pub(crate) fn not_done() -> L2Error {
    L2Error::new(
        ErrorKind::Unavailable,
        "the adapter is closed, or failed at this object",
    )
}

impl Pool {
    /// Starts `threads` threads, and one more for reads only.
    pub(crate) fn start(name: &str, threads: usize) -> Result<Self, std::io::Error> {
        Self::start_with(name, threads + 1, threads)
    }

    fn start_with(name: &str, threads: usize, most_storing: usize) -> Result<Self, std::io::Error> {
        let pool = Self {
            shared: Arc::new(PoolShared {
                queue: Mutex::default(),
                work: Condvar::new(),
                most_storing,
                running: watch::Sender::new(0),
            }),
            places: Arc::new(Semaphore::new(MAX_QUEUED)),
            threads,
            is_checking: Arc::default(),
        };
        for number in 0..threads {
            let shared = Arc::clone(&pool.shared);
            shared.running.send_modify(|running| *running += 1);
            let running = ThreadGuard(Arc::clone(&shared));
            std::thread::Builder::new()
                .name(format!("{name}-{number}"))
                .spawn(move || serve(&running.0))?;
        }
        Ok(pool)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.shared.queue.lock().closed
    }

    /// Runs `work` on the pool. It is skipped if the receiver of its result was dropped before it starts.
    pub(crate) async fn run<R: Send + 'static>(
        &self,
        class: IoClass,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> oneshot::Receiver<R> {
        let (done, result) = oneshot::channel();
        let Ok(place) = Arc::clone(&self.places).acquire_owned().await else {
            return result;
        };
        let run = Box::new(move || {
            if !done.is_closed() {
                let _ = done.send(work());
            }
        });
        let job = FileJob { run, _place: place };
        let mut queue = self.shared.queue.lock();
        if queue.closed {
            return result;
        }
        match class {
            IoClass::Read => queue.reads.push_back(job),
            IoClass::Store => queue.stores.push_back(job),
        }
        drop(queue);
        self.shared.work.notify_one();
        result
    }

    /// Runs a check, unless the last one is still queued or running: one that hangs is not repeated. A closed pool checks
    /// nothing.
    pub(crate) async fn check(&self, work: impl FnOnce() + Send + 'static) {
        if self.is_checking.swap(true, Ordering::Relaxed) {
            return;
        }
        // Dropped with the work, whether it ran or not.
        let checking = CheckGuard(Arc::clone(&self.is_checking));
        let checked = self.run(IoClass::Read, move || {
            let _checking = checking;
            work();
        });
        let _ = checked.await.await;
    }

    /// Runs `work` for all `items` on the pool, in jobs of `least` to `most` items; one result per item, in order. Items of a job
    /// that panicked or was not started fail alone.
    pub(crate) async fn map<T, R>(
        &self,
        class: IoClass,
        items: Vec<T>,
        (least, most): (usize, usize),
        work: impl Fn(Vec<T>) -> Vec<Result<R, L2Error>> + Send + Sync + 'static,
    ) -> Vec<Result<R, L2Error>>
    where
        T: Send + 'static,
        R: Send + 'static,
    {
        let work = Arc::new(work);
        let piece = items.len().div_ceil(self.threads).clamp(least, most);
        let mut waiting = Vec::with_capacity(items.len().div_ceil(piece));
        let mut results = Vec::with_capacity(items.len());
        let mut items = items.into_iter();
        while items.len() > 0 {
            let some: Vec<_> = items.by_ref().take(piece).collect();
            let (count, work) = (some.len(), Arc::clone(&work));
            waiting.push((count, self.run(class, move || work(some)).await));
        }
        for (count, result) in waiting {
            match result.await {
                Ok(done) => results.extend(done),
                Err(_) => results.extend((0..count).map(|_| Err(not_done()))),
            }
        }
        results
    }

    /// Refuses new work and waits until all threads have finished.
    pub(crate) async fn close(&self) {
        self.stop();
        let mut running = self.shared.running.subscribe();
        // Cannot fail: the pool has the sender.
        let _ = running.wait_for(|running| *running == 0).await;
    }

    fn stop(&self) {
        self.shared.queue.lock().closed = true;
        self.shared.work.notify_all();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.stop();
    }
}

struct ThreadGuard(Arc<PoolShared>);

impl Drop for ThreadGuard {
    fn drop(&mut self) {
        self.0.running.send_modify(|running| *running -= 1);
    }
}

fn serve(shared: &PoolShared) {
    let mut queue = shared.queue.lock();
    loop {
        match queue.take(shared.most_storing) {
            Some((job, class)) => {
                drop(queue);
                let FileJob { run, _place } = job;
                drop(_place);
                // Its result is dropped with it, which its receiver notices.
                if catch_unwind(AssertUnwindSafe(run)).is_err() {
                    tracing::error!(
                        "work on files panicked; its objects are answered with an error"
                    );
                }
                queue = shared.queue.lock();
                if class == IoClass::Store {
                    queue.storing -= 1;
                }
            }
            None if queue.closed && queue.stores.is_empty() => {
                // Other threads may wait for the last store to be started.
                shared.work.notify_all();
                return;
            }
            None => shared.work.wait(&mut queue),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Work that signals its start and ends on a signal.
    struct Held {
        begun: mpsc::Receiver<()>,
        end: mpsc::Sender<()>,
        result: oneshot::Receiver<()>,
    }

    async fn hold(pool: &Pool, class: IoClass) -> Held {
        let ((begin, begun), (end, ended)) = (mpsc::channel(), mpsc::channel());
        let work = move || {
            let _ = begin.send(());
            let _ = ended.recv();
        };
        let result = pool.run(class, work).await;
        Held { begun, end, result }
    }

    #[tokio::test]
    async fn stores_leave_a_thread_to_reads() {
        let pool = Pool::start("test", 2).unwrap();
        let mut stores = Vec::new();
        for _ in 0..6 {
            stores.push(hold(&pool, IoClass::Store).await);
        }
        stores[0].begun.recv().unwrap();
        stores[1].begun.recv().unwrap();
        // All stores hang, and reads are done.
        let doubled = pool.map(
            IoClass::Read,
            (0..100).collect(),
            (1, 8),
            |numbers: Vec<i32>| numbers.iter().map(|number| Ok(number * 2)).collect(),
        );
        let expected: Vec<_> = (0..100).map(|number| Ok(number * 2)).collect();
        assert_eq!(doubled.await, expected);
        assert!(stores[2].begun.try_recv().is_err());
        for store in stores {
            store.end.send(()).unwrap();
            store.result.await.unwrap();
        }
        pool.close().await;
    }

    #[tokio::test]
    async fn reads_have_priority_but_stores_progress() {
        let pool = Pool::start_with("test", 1, 1).unwrap();
        let first = hold(&pool, IoClass::Read).await;
        first.begun.recv().unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut results = Vec::new();
        for (class, count) in [(IoClass::Store, 2), (IoClass::Read, 200)] {
            for _ in 0..count {
                let order = Arc::clone(&order);
                results.push(pool.run(class, move || order.lock().push(class)).await);
            }
        }
        first.end.send(()).unwrap();
        for result in results {
            result.await.unwrap();
        }
        let order = order.lock();
        let stores: Vec<_> = (0..order.len())
            .filter(|at| order[*at] == IoClass::Store)
            .collect();
        let reads = MAX_OVERTAKING_READS as usize;
        assert!(stores.len() == 2 && stores[0] >= reads / 2 && stores[1] <= 3 * reads);
    }

    #[tokio::test]
    async fn work_with_dropped_receiver_is_skipped() {
        let pool = Pool::start_with("test", 1, 1).unwrap();
        let first = hold(&pool, IoClass::Read).await;
        first.begun.recv().unwrap();
        let forgotten = hold(&pool, IoClass::Read).await;
        drop(forgotten.result);
        first.end.send(()).unwrap();
        pool.run(IoClass::Read, || ()).await.await.unwrap();
        assert_eq!(forgotten.begun.recv(), Err(mpsc::RecvError));
    }

    #[tokio::test]
    async fn closed_pool_finishes_queue_and_refuses_work() {
        let pool = Pool::start("test", 1).unwrap();
        let mut stores = Vec::new();
        for _ in 0..4 {
            stores.push(hold(&pool, IoClass::Store).await);
        }
        for store in &stores {
            store.end.send(()).unwrap();
        }
        pool.close().await;
        for store in stores {
            assert_eq!(store.result.await, Ok(()));
        }
        assert!(pool.run(IoClass::Read, || ()).await.await.is_err());
        let nothing = pool.map(IoClass::Read, vec![1], (1, 1), |numbers: Vec<i32>| {
            numbers.into_iter().map(Ok).collect()
        });
        assert_eq!(nothing.await, [Err(not_done())]);
        pool.close().await;
    }

    #[tokio::test]
    async fn panic_fails_its_job_only() {
        let pool = Pool::start_with("test", 1, 1).unwrap();
        let work = |numbers: Vec<i32>| {
            assert!(!numbers.contains(&3), "as the test wants it");
            numbers.into_iter().map(Ok).collect()
        };
        let done = pool
            .map(IoClass::Store, (0..6).collect(), (2, 2), work)
            .await;
        assert_eq!(
            done,
            [Ok(0), Ok(1), Err(not_done()), Err(not_done()), Ok(4), Ok(5)]
        );
        assert_eq!(pool.run(IoClass::Store, || 7).await.await, Ok(7));
    }
}
