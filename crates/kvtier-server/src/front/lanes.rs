//! Per-connection queues and the pools of threads that serve them.
//!
//! A connection has one lane for transfers and one for everything else. A lane runs one job at a time, in order of
//! arrival; a pool serves its lanes by turns, one job each, so a busy connection does not starve the others.
//!
//! The mutex of a lane guards its queue and whether the lane is in its pool's run queue. Nothing is done under it but
//! pushing and popping.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

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
    ready: Option<Sender<Arc<Lane<J>>>>,
    threads: Vec<JoinHandle<()>>,
    /// Jobs queued or running.
    waiting: Arc<AtomicUsize>,
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
        let (ready, queue) = unbounded::<Arc<Lane<J>>>();
        let waiting = Arc::new(AtomicUsize::new(0));
        let done = Arc::clone(&waiting);
        let run = Arc::new(move |job| {
            // Also when the job panics: nobody may wait for it for ever.
            let _done = Done(&done);
            run(job);
        });
        let threads = (0..threads)
            .map(|index| {
                let (run, queue, again) = (Arc::clone(&run), queue.clone(), ready.clone());
                std::thread::Builder::new()
                    .name(format!("{name}-{index}"))
                    .spawn(move || serve(&queue, again, run.as_ref()))
            })
            .collect::<std::io::Result<Vec<_>>>()?;
        Ok(Self {
            ready: Some(ready),
            threads,
            waiting,
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
        self.waiting.fetch_add(1, Ordering::AcqRel);
        state.jobs.push_back(job);
        let idle = !std::mem::replace(&mut state.scheduled, true);
        drop(state);
        if idle && let Some(ready) = &self.ready {
            // Only fails after every thread of the pool has ended, which is at shutdown.
            let _ = ready.send(Arc::clone(lane));
        }
        Ok(())
    }
}

impl<J> Pool<J> {
    /// Lets the jobs that are queued run and ends the threads. Later jobs are never run.
    pub fn finish(&mut self) {
        // A lane with more jobs queues itself again, so it could come behind the signs to stop and never be served.
        while self.waiting.load(Ordering::Acquire) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Behind all lanes that wait by now; a lane without a job ends the thread that takes it, see `serve`.
        if let Some(ready) = self.ready.take() {
            for _ in &self.threads {
                let _ = ready.send(Arc::new(Lane::default()));
            }
        }
        for thread in self.threads.drain(..) {
            // A panic of a job is caught where it runs, so a thread that ended badly has nothing left to say.
            let _ = thread.join();
        }
    }
}

/// Counts a job out.
struct Done<'w>(&'w AtomicUsize);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl<J> Drop for Pool<J> {
    fn drop(&mut self) {
        self.finish();
    }
}

fn serve<J>(
    queue: &Receiver<Arc<Lane<J>>>,
    again: Sender<Arc<Lane<J>>>,
    run: &(dyn Fn(J) + Send + Sync),
) {
    while let Ok(lane) = queue.recv() {
        let Some(job) = lane.state.lock().jobs.pop_front() else {
            // A lane without a job is in the run queue only as the sign to stop.
            return;
        };
        run(job);
        let mut state = lane.state.lock();
        state.scheduled = !state.jobs.is_empty();
        let more = state.scheduled;
        drop(state);
        if more && again.send(lane).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
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
        let opener = std::thread::spawn(move || gate.send(()));
        pool.finish();
        opener.join().unwrap().unwrap();
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
