//! Driver threads: a blocking executor for calls that may wait for a GPU's driver for seconds. It has threads only while there is
//! work, so that no request without need of the driver waits for it.
//!
//! The mutex guards the queue and the number of threads; work is only pushed and popped under it, and no other
//! lock is acquired inside.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use kvtier_common::sync::{Condvar, Mutex};

/// Threads at once: twice the GPUs of a host. Further work waits; the lane of a connection holds one piece of work.
const THREADS: usize = 16;

/// How long [`DriverThreads::finish`] waits for running work.
const FINISH_TIMEOUT: Duration = Duration::from_secs(10);

type DriverWork = Box<dyn FnOnce() + Send>;

/// The threads.
#[derive(Default)]
pub struct DriverThreads(Arc<DriverQueue>);

#[derive(Default)]
struct DriverQueue {
    state: Mutex<DriverQueueState>,
    /// Notified when the last thread has ended.
    idle: Condvar,
}

#[derive(Default)]
struct DriverQueueState {
    waiting: VecDeque<DriverWork>,
    threads: usize,
}

impl DriverThreads {
    /// Runs `work` on a thread, once one is free.
    pub fn run(&self, work: impl FnOnce() + Send + 'static) {
        let mut state = self.0.state.lock();
        state.waiting.push_back(Box::new(work));
        if state.threads == THREADS {
            return;
        }
        state.threads += 1;
        drop(state);
        let shared = Arc::clone(&self.0);
        let thread = std::thread::Builder::new().name("kvtier-register".into());
        if let Err(error) = thread.spawn(move || shared.serve()) {
            tracing::error!(%error, "no thread for the driver of a GPU: others wait for it");
            self.0.serve();
        }
    }

    /// Waits until nothing is left, for a while: a call to a driver that hangs ends with the process.
    pub fn finish(&self) {
        let mut state = self.0.state.lock();
        let busy = |state: &mut DriverQueueState| state.threads > 0;
        self.0.idle.wait_while_for(&mut state, busy, FINISH_TIMEOUT);
    }
}

impl DriverQueue {
    /// Runs waiting work until none is left.
    fn serve(&self) {
        loop {
            let mut state = self.state.lock();
            let Some(work) = state.waiting.pop_front() else {
                state.threads -= 1;
                if state.threads == 0 {
                    self.idle.notify_all();
                }
                return;
            };
            drop(state);
            // A panic has been printed, and a reply inside reports it to /healthcheck.
            let _ = catch_unwind(AssertUnwindSafe(work));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn work_runs_side_by_side_up_to_a_bound_and_a_panic_ends_no_thread() {
        let threads = DriverThreads::default();
        let (begun, begins) = mpsc::channel();
        let mut gates = Vec::new();
        let add = |number: usize| {
            let (open, gate) = mpsc::channel::<()>();
            let begun = begun.clone();
            threads.run(move || {
                begun.send(number).unwrap();
                let _ = gate.recv();
                panic!("as a test has it");
            });
            open
        };
        gates.extend((0..THREADS + 2).map(add));
        let mut first: Vec<_> = begins.iter().take(THREADS).collect();
        first.sort_unstable();
        assert_eq!(first, (0..THREADS).collect::<Vec<_>>());
        assert!(begins.try_recv().is_err());
        gates.remove(5);
        assert_eq!(begins.recv(), Ok(THREADS));
        drop(gates);
        assert_eq!(begins.recv(), Ok(THREADS + 1));
        threads.finish();
        assert_eq!(threads.0.state.lock().threads, 0);
    }
}
