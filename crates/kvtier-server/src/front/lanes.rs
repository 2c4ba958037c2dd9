//! Per-connection queues and the pools of threads that serve them.
//!
//! A connection has one lane for transfers and one for everything else. A lane runs one job at a time, in order of
//! arrival; a pool serves its lanes by turns, one job each, so a busy connection does not starve the others. A turn may
//! outlast the call that serves its job: the holder of the turn blocks that lane, and no thread of the pool.
//!
//! The mutex of a lane guards its queue and whether the lane is in its pool's run queue. Nothing is done under it but
//! pushing and popping, and no other lock is acquired inside.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;

use kvtier_common::sync::Mutex;
use kvtier_common::sync::channel::{Receiver, Sender, unbounded};

/// Requests that may wait in one lane. A client has few requests in flight; a lane this long belongs to a client that
/// does not wait for answers.
pub const LANE_LIMIT: usize = 4096;

/// Jobs of one connection that must run one after the other.
pub struct LaneQueue<J> {
    state: Mutex<LaneState<J>>,
}

struct LaneState<J> {
    jobs: VecDeque<J>,
    /// In the pool's run queue or having its turn; only the thread that sets it queues the lane.
    scheduled: bool,
}

impl<J> Default for LaneQueue<J> {
    fn default() -> Self {
        Self {
            state: Mutex::new(LaneState {
                jobs: VecDeque::new(),
                scheduled: false,
            }),
        }
    }
}

impl<J> LaneQueue<J> {
    /// Whether nothing waits or runs.
    pub fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.jobs.is_empty() && !state.scheduled
    }
}

/// A lane with a job, in its pool's run queue.
struct ReadyLane<J> {
    lane: Arc<LaneQueue<J>>,
    /// Run queue of the pool, which ends when no lane can come back to it any more.
    queue: Sender<ReadyLane<J>>,
}

/// A lane's turn: until its last clone is dropped nothing else of the lane runs.
pub struct Turn<J>(Arc<TurnEnd<J>>);

impl<J> Clone for Turn<J> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

struct TurnEnd<J>(ReadyLane<J>);

impl<J> Drop for TurnEnd<J> {
    fn drop(&mut self) {
        let ReadyLane { lane, queue } = &self.0;
        let mut state = lane.state.lock();
        state.scheduled = !state.jobs.is_empty();
        let more = state.scheduled;
        drop(state);
        if more {
            // Cannot fail: the threads end when the last sender of the queue has.
            let _ = queue.send(ReadyLane {
                lane: Arc::clone(lane),
                queue: queue.clone(),
            });
        }
    }
}

/// Threads that serve lanes.
pub struct LanePool<J> {
    /// None once nothing is taken any more.
    queue: Option<Sender<ReadyLane<J>>>,
    threads: Vec<JoinHandle<()>>,
}

impl<J: Send + 'static> LanePool<J> {
    /// Starts `threads` threads named `name-<n>` that run every job with `run`, which is given the turn of its lane.
    ///
    /// # Errors
    /// The system's, when it gives no thread.
    pub fn start<F>(name: &str, threads: usize, run: F) -> std::io::Result<Self>
    where
        F: Fn(J, Turn<J>) + Send + Sync + 'static,
    {
        // Holds at most one entry a lane, so it is bounded by the number of connections.
        let (sender, queue) = unbounded();
        let run = Arc::new(run);
        let threads = (0..threads)
            .map(|index| {
                let (queue, run) = (Receiver::clone(&queue), Arc::clone(&run));
                std::thread::Builder::new()
                    .name(format!("{name}-{index}"))
                    .spawn(move || queue.into_iter().for_each(|ready| serve(ready, &*run)))
            })
            .collect::<std::io::Result<Vec<_>>>()?;
        Ok(Self {
            queue: Some(sender),
            threads,
        })
    }

    /// Queues a job; hands it back when the lane is full, or the pool has ended.
    ///
    /// # Errors
    /// The job itself.
    pub fn push(&self, lane: &Arc<LaneQueue<J>>, job: J) -> Result<(), J> {
        let Some(queue) = &self.queue else {
            return Err(job);
        };
        let mut state = lane.state.lock();
        if state.jobs.len() >= LANE_LIMIT {
            return Err(job);
        }
        state.jobs.push_back(job);
        let idle = !std::mem::replace(&mut state.scheduled, true);
        drop(state);
        if idle {
            // Cannot fail, as when a turn ends.
            let _ = queue.send(ReadyLane {
                lane: Arc::clone(lane),
                queue: queue.clone(),
            });
        }
        Ok(())
    }
}

impl<J> LanePool<J> {
    /// Takes no further jobs: the threads end when all that are queued have run and all turns have ended.
    pub fn close(&mut self) {
        self.queue = None;
    }

    /// Whether all threads have ended.
    pub fn has_ended(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Ends the threads; all jobs that are queued have run then, and all turns have ended.
    pub fn finish(&mut self) {
        self.close();
        for thread in self.threads.drain(..) {
            // A panic of a job is caught where it runs, so a thread that ended badly has nothing left to say.
            let _ = thread.join();
        }
    }
}

impl<J> Drop for LanePool<J> {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Runs the next job of a lane.
fn serve<J>(ready: ReadyLane<J>, run: &impl Fn(J, Turn<J>)) {
    let job = ready.lane.state.lock().jobs.pop_front();
    let turn = Turn(Arc::new(TurnEnd(ready)));
    if let Some(job) = job {
        run(job, turn);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use crossbeam_channel::unbounded;

    use super::*;

    #[test]
    fn jobs_of_one_lane_run_in_order_and_lanes_run_side_by_side() {
        let (sender, receiver) = unbounded();
        let (gate, blocked) = crossbeam_channel::bounded::<()>(0);
        let pool = LanePool::start("test", 2, move |job: (usize, usize), _turn| {
            if job.0 == 0 && job.1 == 0 {
                let _ = blocked.recv();
            }
            let _ = sender.send(job);
        })
        .unwrap();
        let lanes = [
            Arc::new(LaneQueue::default()),
            Arc::new(LaneQueue::default()),
        ];
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
    fn a_turn_that_outlasts_its_job_holds_up_its_lane_alone_and_the_end_of_the_pool() {
        let (say, hear) = unbounded();
        let (keep, kept) = unbounded();
        let mut pool = LanePool::start("test", 1, move |job: (usize, usize), turn| {
            if job == (0, 0) {
                let _ = keep.send(turn);
            }
            let _ = say.send(job);
        })
        .unwrap();
        let lanes = [
            Arc::new(LaneQueue::default()),
            Arc::new(LaneQueue::default()),
        ];
        for job in 0..3 {
            for (id, lane) in lanes.iter().enumerate() {
                pool.push(lane, (id, job)).unwrap();
            }
        }
        let next = || hear.recv().unwrap();
        assert_eq!(
            [next(), next(), next(), next()],
            [(0, 0), (1, 0), (1, 1), (1, 2)]
        );
        assert!(!lanes[0].is_idle());
        let turn = kept.recv().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| pool.finish());
            assert!(hear.try_recv().is_err());
            drop(turn);
            assert_eq!([next(), next()], [(0, 1), (0, 2)]);
        });
        assert!(lanes[0].is_idle());
        assert!(pool.push(&lanes[0], (0, 3)).is_err());
    }

    #[test]
    fn what_waits_behind_a_running_job_runs_before_the_pool_ends() {
        let (gate, blocked) = crossbeam_channel::bounded::<()>(0);
        let ran = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&ran);
        let mut pool = LanePool::start("test", 1, move |job: usize, _turn| {
            if job == 0 {
                let _ = blocked.recv();
            }
            count.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
        let lane = Arc::new(LaneQueue::default());
        (0..3).for_each(|job| pool.push(&lane, job).unwrap());
        gate.send(()).unwrap();
        pool.finish();
        assert_eq!(ran.load(Ordering::SeqCst), 3);
    }

    // proves: docs/clients.md#one-client-is-slow-or-floods-the-server
    #[test]
    fn a_full_lane_hands_the_job_back() {
        let (gate, blocked) = crossbeam_channel::bounded::<()>(0);
        let ran = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&ran);
        let pool = LanePool::start("test", 1, move |_: usize, _turn| {
            let _ = blocked.recv();
            count.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
        let lane = Arc::new(LaneQueue::default());
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

/// See `tests/run interleavings`.
#[cfg(all(test, shuttle))]
mod interleavings {
    use kvtier_common::sync::atomic::{AtomicBool, Ordering};
    use kvtier_common::sync::shuttle::{self, thread};

    use super::*;

    const JOBS: usize = 3;

    /// Two lanes with one sender each, on two threads. The turn of each lane's first job outlasts its call.
    fn serve_lanes() {
        let (queue, ready) = unbounded();
        let (keep, kept) = unbounded::<(usize, Turn<(usize, usize)>)>();
        let ran = Arc::new(Mutex::new([Vec::new(), Vec::new()]));
        let runs = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
        let ends = Arc::clone(&runs);
        let mut threads = vec![thread::spawn(move || {
            for (lane, turn) in kept {
                ends[lane].store(false, Ordering::SeqCst);
                drop(turn);
            }
        })];
        threads.extend((0..2).map(|_| {
            let (ready, keep) = (Receiver::clone(&ready), keep.clone());
            let (ran, runs) = (Arc::clone(&ran), Arc::clone(&runs));
            let run = move |(lane, job): (usize, usize), turn| {
                let is_alone = !runs[lane].swap(true, Ordering::SeqCst);
                assert!(is_alone, "two jobs of a lane at once");
                ran.lock()[lane].push(job);
                if job == 0 {
                    let _ = keep.send((lane, turn));
                } else {
                    runs[lane].store(false, Ordering::SeqCst);
                }
            };
            thread::spawn(move || ready.into_iter().for_each(|ready| serve(ready, &run)))
        }));
        drop(keep);
        let queue = Some(queue);
        let mut pool = LanePool {
            queue,
            threads: Vec::new(),
        };
        let lanes = [
            Arc::new(LaneQueue::default()),
            Arc::new(LaneQueue::default()),
        ];
        thread::scope(|scope| {
            for (id, lane) in lanes.iter().enumerate() {
                let pool = &pool;
                scope.spawn(move || (0..JOBS).for_each(|job| pool.push(lane, (id, job)).unwrap()));
            }
        });
        pool.close();
        threads.into_iter().for_each(|it| it.join().unwrap());
        let all: Vec<_> = (0..JOBS).collect();
        assert_eq!(*ran.lock(), [all.clone(), all], "lost, or out of order");
        assert!(lanes.iter().all(|lane| lane.is_idle()));
    }

    #[test]
    fn interleavings_keep_the_order_of_lanes() {
        shuttle::check_pct(serve_lanes, 2000, 3);
        shuttle::check_random(serve_lanes, 2000);
    }
}
