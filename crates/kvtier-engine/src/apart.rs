//! Work that may wait for a GPU's driver for seconds: a context, many handles, a driver that hangs. It has threads of its
//! own, as long as there is any, so that no request without need of the driver waits for it.
//!
//! The mutex guards the queue and the number of threads; nothing is done under it but pushing and popping.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use kvtier_sync::{Condvar, Mutex};

use super::{Answer, Engine, Reply};

/// Threads at once: twice the GPUs of a host. What comes beyond waits; the lane of a connection holds one piece of work.
const THREADS: usize = 16;

/// How long the end of the engine waits for running work.
const END: Duration = Duration::from_secs(10);

type Work = Box<dyn FnOnce() + Send>;

/// The threads.
#[derive(Default)]
pub struct Apart(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// There is no thread any more.
    idle: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Work>,
    threads: usize,
}

impl Apart {
    /// Has it done, soon.
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

    /// Waits until nothing is left, for a while: a driver that hangs is left to the end of the process.
    pub fn finish(&self) {
        let mut state = self.0.state.lock();
        let busy = |state: &mut State| state.threads > 0;
        self.0.idle.wait_while_for(&mut state, busy, END);
    }
}

impl Shared {
    /// Does what waits, until nothing does.
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
            // What is caught has been printed, and a reply inside notes it in the health.
            let _ = catch_unwind(AssertUnwindSafe(work));
        }
    }
}

impl Engine {
    /// Answers a request about a worker with the outcome of `work`, which runs apart if it needs the driver of a GPU. What
    /// its connection asks for behind it finds it done.
    pub(super) fn about_worker(
        self: &Arc<Self>,
        on_gpu: bool,
        reply: Reply,
        work: impl FnOnce(&Self) -> Answer + Send + 'static,
    ) {
        if !on_gpu {
            return reply.answer(work(self));
        }
        let Some(reply) = reply.later_in_turn() else {
            return;
        };
        let engine = Arc::clone(self);
        self.apart.run(move || reply.answer(work(&engine)));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn work_runs_side_by_side_up_to_a_bound_and_a_panic_ends_no_thread() {
        let apart = Apart::default();
        let (begun, begins) = mpsc::channel();
        let mut gates = Vec::new();
        let add = |number: usize| {
            let (open, gate) = mpsc::channel::<()>();
            let begun = begun.clone();
            apart.run(move || {
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
        apart.finish();
        assert_eq!(apart.0.state.lock().threads, 0);
    }
}
