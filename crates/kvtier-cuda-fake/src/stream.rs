//! Streams: queues, each run in order by its thread; and the engines shared by all streams of a device.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::world::world;

pub(crate) type Work = Box<dyn FnOnce() + Send>;

pub(crate) struct Stream {
    pub device: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Work>,
    enqueued: u64,
    done: u64,
    closed: bool,
}

impl Stream {
    pub(crate) fn start(device: usize) -> Arc<Self> {
        let stream = Arc::new(Self {
            device,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let run = stream.clone();
        std::thread::spawn(move || run.run());
        stream
    }

    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(work) = state.queue.pop_front() {
                drop(state);
                work();
                state = self.state.lock();
                state.done += 1;
                self.changed.notify_all();
            } else if state.closed {
                return;
            } else {
                self.changed.wait(&mut state);
            }
        }
    }

    /// Queues work; returns its position for [`Self::wait`].
    pub(crate) fn push(&self, work: Work) -> u64 {
        let mut state = self.state.lock();
        state.queue.push_back(work);
        state.enqueued += 1;
        self.changed.notify_all();
        state.enqueued
    }

    pub(crate) fn last(&self) -> u64 {
        self.state.lock().enqueued
    }

    pub(crate) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.done == state.enqueued
    }

    pub(crate) fn wait(&self, place: u64) {
        let mut state = self.state.lock();
        while state.done < place {
            self.changed.wait(&mut state);
        }
    }

    /// Closes the stream; queued work still runs.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    HostToDevice = 0,
    DeviceToHost = 1,
    /// Copies inside a device, and kernels.
    Kernel = 2,
}

/// A device's engines: each runs one piece of work at a time, concurrently with the others.
#[derive(Default)]
pub(crate) struct Engines {
    engines: [Mutex<()>; 3],
    /// Number of busy engines.
    busy: AtomicUsize,
    /// Set by a failing kernel; every later call of the device returns it.
    pub poison: AtomicI32,
}

impl Engines {
    /// Runs `work` on an engine, at the scripted rate.
    pub(crate) fn run(&self, direction: Direction, bytes: u64, work: impl FnOnce()) {
        let number = direction as usize;
        let name = crate::script::DIRECTIONS[number];
        world().journal.add(&format!("queued.{name}"), 1);
        let _alone = self.engines[number].lock();
        let others = self.busy.fetch_add(1, Ordering::SeqCst);
        world().journal.add(&format!("started.{name}"), 1);
        if others > 0 {
            world().journal.add("overlaps", 1);
        }
        until(|| !world().script.lock().holds[number]);
        let rate = world().script.lock().rates[number];
        if rate > 0 {
            std::thread::sleep(Duration::from_secs_f64(bytes as f64 / rate as f64));
        }
        work();
        world().journal.add(&format!("bytes.{name}"), bytes);
        self.busy.fetch_sub(1, Ordering::SeqCst);
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
