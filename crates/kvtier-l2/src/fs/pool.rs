//! The threads that wait for the disk.
//!
//! Reads (lookups, loads, deletes) go first, for somebody waits for them; stores are done behind somebody's back. One
//! thread at least, of several, is never taken by stores, so a disk that stalls its writers still answers.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};

/// Pieces of work that wait at most; who has more waits with it.
const WAITING: usize = 1024;

/// Reads in a row that a waiting store lets pass.
const PATIENCE: u32 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    Read,
    Store,
}

struct Job {
    run: Box<dyn FnOnce() + Send>,
    /// Its place in the queue.
    _place: OwnedSemaphorePermit,
}

#[derive(Default)]
struct Queue {
    reads: VecDeque<Job>,
    stores: VecDeque<Job>,
    /// Stores under way.
    storing: usize,
    /// Reads taken since the last store.
    passed: u32,
    closed: bool,
}

impl Queue {
    /// The next piece of work, if a thread may take it now.
    fn take(&mut self, most_storing: usize) -> Option<(Job, Lane)> {
        let may_store = self.storing < most_storing;
        let is_store_due = may_store && self.passed >= PATIENCE;
        if (self.reads.is_empty() || is_store_due)
            && may_store
            && let Some(job) = self.stores.pop_front()
        {
            self.passed = 0;
            self.storing += 1;
            return Some((job, Lane::Store));
        }
        let job = self.reads.pop_front()?;
        self.passed = match self.stores.is_empty() {
            true => 0,
            false => self.passed.saturating_add(1),
        };
        Some((job, Lane::Read))
    }
}

struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
    most_storing: usize,
    running: watch::Sender<usize>,
}

/// Threads and what they are to do. Dropped or closed, they end what is there and then themselves.
pub(super) struct Pool {
    shared: Arc<Shared>,
    places: Arc<Semaphore>,
    threads: usize,
}

/// The work was not done: the pool is closed, or the work panicked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NotDone;

impl Pool {
    pub(super) fn start(name: &str, threads: usize) -> Result<Self, std::io::Error> {
        let pool = Self {
            shared: Arc::new(Shared {
                queue: Mutex::default(),
                work: Condvar::new(),
                most_storing: threads.saturating_sub(1).max(1),
                running: watch::Sender::new(0),
            }),
            places: Arc::new(Semaphore::new(WAITING)),
            threads,
        };
        for number in 0..threads {
            let shared = Arc::clone(&pool.shared);
            shared.running.send_modify(|running| *running += 1);
            let running = Running(Arc::clone(&shared));
            std::thread::Builder::new()
                .name(format!("{name}-{number}"))
                .spawn(move || serve(&running.0))?;
        }
        Ok(pool)
    }

    /// Threads it was started with.
    pub(super) fn threads(&self) -> usize {
        self.threads
    }

    pub(super) fn is_closed(&self) -> bool {
        self.shared.queue.lock().closed
    }

    /// Has a thread do `work`. It is left out if nobody waits for its result any more when its turn comes.
    pub(super) async fn run<R: Send + 'static>(
        &self,
        lane: Lane,
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
        let job = Job { run, _place: place };
        let mut queue = self.shared.queue.lock();
        if queue.closed {
            return result;
        }
        match lane {
            Lane::Read => queue.reads.push_back(job),
            Lane::Store => queue.stores.push_back(job),
        }
        drop(queue);
        self.shared.work.notify_one();
        result
    }

    /// Has the threads do `work` for all `items`, in pieces of at most `most` and at least `least` of them; one result
    /// each, in order.
    pub(super) async fn map<T, R>(
        &self,
        lane: Lane,
        items: Vec<T>,
        (least, most): (usize, usize),
        work: impl Fn(Vec<T>) -> Vec<R> + Send + Sync + 'static,
    ) -> Vec<Result<R, NotDone>>
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
            waiting.push((count, self.run(lane, move || work(some)).await));
        }
        for (count, result) in waiting {
            match result.await {
                Ok(done) => results.extend(done.into_iter().map(Ok)),
                Err(_) => results.extend((0..count).map(|_| Err(NotDone))),
            }
        }
        results
    }

    /// Takes no more work; answers when all threads have ended what they had.
    pub(super) async fn close(&self) {
        self.stop();
        let mut running = self.shared.running.subscribe();
        // The sender is a part of this pool.
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

struct Running(Arc<Shared>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.send_modify(|running| *running -= 1);
    }
}

fn serve(shared: &Shared) {
    let mut queue = shared.queue.lock();
    loop {
        match queue.take(shared.most_storing) {
            Some((job, lane)) => {
                drop(queue);
                let Job { run, _place } = job;
                drop(_place);
                // Its result is lost with it, which tells who waits.
                if catch_unwind(AssertUnwindSafe(run)).is_err() {
                    tracing::error!(
                        "work on files panicked; its objects are answered with an error"
                    );
                }
                queue = shared.queue.lock();
                if lane == Lane::Store {
                    queue.storing -= 1;
                }
            }
            None if queue.closed && queue.stores.is_empty() => {
                // Others may wait for the last store to be taken.
                shared.work.notify_all();
                return;
            }
            None => shared.work.wait(&mut queue),
        }
    }
}
