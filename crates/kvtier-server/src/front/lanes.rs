//! Per-connection queues and the pools of threads that serve them.
//!
//! A connection has one lane for transfers and one for everything else. A lane runs one job at a time, in order of
//! arrival; a pool serves its lanes by turns, one job each, so a busy connection does not starve the others.
//!
//! The mutex of a lane guards its queue and whether the lane is in its pool's run queue. Nothing is done under it but
//! pushing and popping.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;

/// Requests that may wait in one lane. A client has few requests under way; a lane this long belongs to a client that
/// does not wait for answers.
pub const LANE_LIMIT: usize = 4096;

/// Jobs of one connection that must run one after the other.
pub struct Lane<J> {
    state: Mutex<LaneState<J>>,
}

struct LaneState<J> {
    jobs: VecDeque<J>,
    /// In the pool's run queue or being run; whoever sets it is the only one who queues the lane.
    scheduled: bool,
}

impl<J> Default for Lane<J> {
    fn default() -> Self {
        Self {
            state: Mutex::new(LaneState {
                jobs: VecDeque::new(),
                scheduled: false,
            }),
        }
    }
}

impl<J> Lane<J> {
    /// Whether nothing waits or runs.
    pub fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.jobs.is_empty() && !state.scheduled
    }
}

/// Threads that serve lanes.
pub struct Pool<J> {
    ready: Sender<Arc<Lane<J>>>,
    queue: Receiver<Arc<Lane<J>>>,
    run: Arc<dyn Fn(J) + Send + Sync>,
    threads: Vec<JoinHandle<()>>,
}

impl<J: Send + 'static> Pool<J> {
    /// Starts `threads` threads named `name-<n>` that run every job with `run`.
    ///
    /// # Errors
    /// The system's, when it gives no thread.
    pub fn start<F>(name: &str, threads: usize, run: F) -> std::io::Result<Self>
    where
        F: Fn(J) + Send + Sync + 'static,
    {
        // Holds at most one entry a lane, so it is bounded by the number of connections.
        let (ready, queue) = unbounded();
        let run: Arc<dyn Fn(J) + Send + Sync> = Arc::new(run);
        let threads = (0..threads)
            .map(|index| {
                let (ready, queue, run) =
                    (ready.clone(), Receiver::clone(&queue), Arc::clone(&run));
                std::thread::Builder::new()
                    .name(format!("{name}-{index}"))
                    .spawn(move || serve(queue.iter(), &ready, run.as_ref()))
            })
            .collect::<std::io::Result<Vec<_>>>()?;
        Ok(Self {
            ready,
            queue,
            run,
            threads,
        })
    }

    /// Queues a job; hands it back when the lane is full.
    ///
    /// # Errors
    /// The job itself.
    pub fn push(&self, lane: &Arc<Lane<J>>, job: J) -> Result<(), J> {
        let mut state = lane.state.lock();
        if state.jobs.len() >= LANE_LIMIT {
            return Err(job);
        }
        state.jobs.push_back(job);
        let idle = !std::mem::replace(&mut state.scheduled, true);
        drop(state);
        if idle {
            // Cannot fail: the pool has a receiver itself.
            let _ = self.ready.send(Arc::clone(lane));
        }
        Ok(())
    }
}

impl<J> Pool<J> {
    /// Ends the threads; all jobs that are queued have run then. Nothing may be pushed afterwards.
    pub fn finish(&mut self) {
        // A lane without a job is the sign to stop, see `serve`.
        for _ in &self.threads {
            let _ = self.ready.send(Arc::new(Lane::default()));
        }
        for thread in self.threads.drain(..) {
            // A panic of a job is caught where it runs, so a thread that ended badly has nothing left to say.
            let _ = thread.join();
        }
        // A lane whose job was running queued itself again behind the signs, where no thread came.
        while !self.queue.is_empty() {
            serve(self.queue.try_iter(), &self.ready, self.run.as_ref());
        }
    }
}

impl<J> Drop for Pool<J> {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Runs a job of each lane by turns until a lane without one comes.
fn serve<J>(
    queue: impl Iterator<Item = Arc<Lane<J>>>,
    again: &Sender<Arc<Lane<J>>>,
    run: &(dyn Fn(J) + Send + Sync),
) {
    for lane in queue {
        let Some(job) = lane.state.lock().jobs.pop_front() else {
            return;
        };
        run(job);
        let mut state = lane.state.lock();
        state.scheduled = !state.jobs.is_empty();
        let more = state.scheduled;
        drop(state);
        if more {
            // Cannot fail: the pool has a receiver until its threads have ended.
            let _ = again.send(lane);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn jobs_of_one_lane_run_in_order_and_lanes_run_side_by_side() {
        let (sender, receiver) = unbounded();
        let (gate, blocked) = crossbeam_channel::bounded::<()>(0);
        let pool = Pool::start("test", 2, move |job: (usize, usize)| {
            if job.0 == 0 && job.1 == 0 {
                let _ = blocked.recv();
            }
            let _ = sender.send(job);
        })
        .unwrap();
        let lanes = [Arc::new(Lane::default()), Arc::new(Lane::default())];
        for index in 0..10 {
            for (id, lane) in lanes.iter().enumerate() {
                pool.push(lane, (id, index)).unwrap();
            }
        }
        // The first lane is held up at its first job; the second runs to its end meanwhile, in order.
        for index in 0..10 {
            assert_eq!(receiver.recv().unwrap(), (1, index));
        }
        gate.send(()).unwrap();
        for index in 0..10 {
            assert_eq!(receiver.recv().unwrap(), (0, index));
        }
    }

    #[test]
    fn what_waits_behind_a_running_job_runs_before_the_pool_ends() {
        let (gate, blocked) = crossbeam_channel::bounded::<()>(0);
        let ran = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&ran);
        let mut pool = Pool::start("test", 1, move |job: usize| {
            if job == 0 {
                let _ = blocked.recv();
            }
            count.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
        let lane = Arc::new(Lane::default());
        (0..3).for_each(|job| pool.push(&lane, job).unwrap());
        // The sign to stop comes while the first job runs, so the lane queues itself again behind it.
        pool.ready.send(Arc::default()).unwrap();
        gate.send(()).unwrap();
        pool.finish();
        assert_eq!(ran.load(Ordering::SeqCst), 3);
    }

    #[test]
    fn a_full_lane_hands_the_job_back() {
        let (gate, blocked) = crossbeam_channel::bounded::<()>(0);
        let ran = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&ran);
        let pool = Pool::start("test", 1, move |_: usize| {
            let _ = blocked.recv();
            count.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
        let lane = Arc::new(Lane::default());
        let refused = (0..LANE_LIMIT + 2)
            .filter(|&job| pool.push(&lane, job).is_err())
            .count();
        // One job may already be running and so not count against the limit.
        assert!((1..=2).contains(&refused), "{refused}");
        drop(gate);
        drop(pool);
        assert!(ran.load(Ordering::SeqCst) >= 1);
    }
}
