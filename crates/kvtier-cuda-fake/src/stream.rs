//! Streams: threads that run work in order.

use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

pub(crate) type StreamWork = Box<dyn FnOnce() + Send>;

pub(crate) struct Stream {
    pub device: usize,
    /// The number of pieces of work so far, and where they go. Without a stream its thread ends behind them.
    queue: Mutex<(u64, Sender<StreamWork>)>,
    done: Arc<(Mutex<u64>, Condvar)>,
}

impl Stream {
    pub(crate) fn start(device: usize) -> Arc<Self> {
        let (sender, queue) = mpsc::channel::<StreamWork>();
        let done = Arc::new((Mutex::new(0), Condvar::new()));
        let ours = done.clone();
        std::thread::spawn(move || {
            for work in queue {
                work();
                *ours.0.lock() += 1;
                ours.1.notify_all();
            }
        });
        Arc::new(Self {
            device,
            queue: Mutex::new((0, sender)),
            done,
        })
    }

    /// Queues work; returns its position for [`Self::wait`].
    pub(crate) fn push(&self, work: StreamWork) -> u64 {
        let mut queue = self.queue.lock();
        queue.0 += u64::from(queue.1.send(work).is_ok());
        queue.0
    }

    pub(crate) fn last(&self) -> u64 {
        self.queue.lock().0
    }

    pub(crate) fn is_idle(&self) -> bool {
        *self.done.0.lock() >= self.last()
    }

    pub(crate) fn wait(&self, place: u64) {
        let mut done = self.done.0.lock();
        while *done < place {
            self.done.1.wait(&mut done);
        }
    }
}

/// Polls until `done`, which another process or thread brings about.
pub(crate) fn until(mut done: impl FnMut() -> bool) {
    let mut pause = 20;
    while !done() {
        std::thread::sleep(Duration::from_micros(pause));
        pause = (pause * 2).min(1000);
    }
}
