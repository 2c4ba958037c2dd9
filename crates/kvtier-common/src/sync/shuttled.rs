//! shuttle's locks with parking_lot's interface, and channels made of them. Only for the tests named `interleavings`.
//!
//! Time does not pass: what waits with a timeout waits for a notification.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

pub use shuttle::sync::{RwLockReadGuard, RwLockWriteGuard, atomic};

/// What is expected of a lock whose holder has not panicked: shuttle stops at a panic.
const NOT_POISONED: &str = "no thread has panicked";

/// A lock that guards a `T`.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(shuttle::sync::Mutex<T>);

/// A locked [`Mutex`]; empty only while a [`Condvar`] waits.
#[derive(Debug)]
pub struct MutexGuard<'a, T: ?Sized>(Option<shuttle::sync::MutexGuard<'a, T>>);

impl<T> Mutex<T> {
    /// Creates an unlocked mutex.
    pub const fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    /// Returns the value.
    pub fn into_inner(self) -> T {
        self.0.into_inner().expect(NOT_POISONED)
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Locks it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().expect(NOT_POISONED)))
    }

    /// Locks it, if that is possible at once.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok().map(|guard| MutexGuard(Some(guard)))
    }

    /// Returns the value, which no other thread can use.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().expect(NOT_POISONED)
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("the thread does not wait")
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("the thread does not wait")
    }
}

/// A lock that guards a `T` for several readers or one writer.
#[derive(Debug, Default)]
pub struct RwLock<T: ?Sized>(shuttle::sync::RwLock<T>);

impl<T> RwLock<T> {
    /// Creates an unlocked lock.
    pub const fn new(value: T) -> Self {
        Self(shuttle::sync::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Locks it for reading.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().expect(NOT_POISONED)
    }

    /// Locks it for writing.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().expect(NOT_POISONED)
    }

    /// Locks it for writing, if that is possible at once.
    pub fn try_write_for(&self, _timeout: Duration) -> Option<RwLockWriteGuard<'_, T>> {
        self.0.try_write().ok()
    }
}

/// Whether a wait has timed out.
#[derive(Clone, Copy, Debug)]
pub struct WaitTimeoutResult(());

impl WaitTimeoutResult {
    /// Never, since time does not pass.
    pub fn timed_out(self) -> bool {
        false
    }
}

/// A condition that threads wait for.
#[derive(Debug, Default)]
pub struct Condvar(shuttle::sync::Condvar);

impl Condvar {
    /// Creates one that no thread waits for.
    pub const fn new() -> Self {
        Self(shuttle::sync::Condvar::new())
    }

    /// Wakes one thread.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all threads.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Waits for a notification.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let locked = guard.0.take().expect("the thread does not wait");
        guard.0 = Some(self.0.wait(locked).expect(NOT_POISONED));
    }

    /// Waits for a notification.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _: Duration) -> WaitTimeoutResult {
        self.wait(guard);
        WaitTimeoutResult(())
    }

    /// Waits for a notification.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, _: Instant) -> WaitTimeoutResult {
        self.wait(guard);
        WaitTimeoutResult(())
    }

    /// Waits while the condition holds.
    pub fn wait_while<T, F>(&self, guard: &mut MutexGuard<'_, T>, mut condition: F)
    where
        F: FnMut(&mut T) -> bool,
    {
        while condition(guard) {
            self.wait(guard);
        }
    }

    /// Waits while the condition holds.
    pub fn wait_while_for<T, F>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        condition: F,
        _: Duration,
    ) -> WaitTimeoutResult
    where
        F: FnMut(&mut T) -> bool,
    {
        self.wait_while(guard, condition);
        WaitTimeoutResult(())
    }

    /// Waits while the condition holds.
    pub fn wait_while_until<T, F>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        condition: F,
        _: Instant,
    ) -> WaitTimeoutResult
    where
        F: FnMut(&mut T) -> bool,
    {
        self.wait_while(guard, condition);
        WaitTimeoutResult(())
    }
}

/// Unbounded channels with crossbeam's interface.
pub mod channel {
    use std::collections::VecDeque;
    use std::sync::Arc;

    use super::{Condvar, Mutex, fmt};

    struct Queue<T> {
        messages: VecDeque<T>,
        senders: usize,
    }

    struct Channel<T> {
        queue: Mutex<Queue<T>>,
        changed: Condvar,
    }

    /// The end that messages are sent to.
    pub struct Sender<T>(Arc<Channel<T>>);

    /// The end that messages are received from.
    pub struct Receiver<T>(Arc<Channel<T>>);

    /// Creates a channel.
    pub fn unbounded<T>() -> (Sender<T>, Receiver<T>) {
        let queue = Queue {
            messages: VecDeque::new(),
            senders: 1,
        };
        let channel = Arc::new(Channel {
            queue: Mutex::new(queue),
            changed: Condvar::new(),
        });
        (Sender(Arc::clone(&channel)), Receiver(channel))
    }

    impl<T> Sender<T> {
        /// Sends a message.
        ///
        /// # Errors
        /// Never; receivers are not counted.
        pub fn send(&self, message: T) -> Result<(), T> {
            self.0.queue.lock().messages.push_back(message);
            self.0.changed.notify_one();
            Ok(())
        }
    }

    impl<T> Clone for Sender<T> {
        fn clone(&self) -> Self {
            self.0.queue.lock().senders += 1;
            Self(Arc::clone(&self.0))
        }
    }

    impl<T> Drop for Sender<T> {
        fn drop(&mut self) {
            self.0.queue.lock().senders -= 1;
            self.0.changed.notify_all();
        }
    }

    impl<T> fmt::Debug for Sender<T> {
        fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            out.write_str("Sender")
        }
    }

    impl<T> Receiver<T> {
        /// Iterates over the messages that are there.
        pub fn try_iter(&self) -> impl Iterator<Item = T> {
            std::iter::from_fn(|| self.0.queue.lock().messages.pop_front())
        }
    }

    impl<T> Clone for Receiver<T> {
        fn clone(&self) -> Self {
            Self(Arc::clone(&self.0))
        }
    }

    impl<T> Iterator for Receiver<T> {
        type Item = T;

        /// Waits for the next message; none if the last sender was dropped.
        fn next(&mut self) -> Option<T> {
            let mut queue = self.0.queue.lock();
            let is_waiting = |queue: &mut Queue<T>| queue.messages.is_empty() && queue.senders > 0;
            self.0.changed.wait_while(&mut queue, is_waiting);
            queue.messages.pop_front()
        }
    }
}
