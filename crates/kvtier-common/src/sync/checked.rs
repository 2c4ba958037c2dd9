//! parking_lot's locks, with each acquisition checked against the order.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

pub use parking_lot::WaitTimeoutResult;

use crate::sync::order::{Held, Lock};

/// A lock that guards a `T`.
pub struct Mutex<T: ?Sized> {
    lock: Lock,
    inner: parking_lot::Mutex<T>,
}

/// A locked [`Mutex`].
pub struct MutexGuard<'a, T: ?Sized> {
    inner: parking_lot::MutexGuard<'a, T>,
    held: Held,
}

/// A lock that guards a `T` for several readers or one writer.
pub struct RwLock<T: ?Sized> {
    lock: Lock,
    inner: parking_lot::RwLock<T>,
}

/// A [`RwLock`] locked for reading.
pub struct RwLockReadGuard<'a, T: ?Sized> {
    inner: parking_lot::RwLockReadGuard<'a, T>,
    _held: Held,
}

/// A [`RwLock`] locked for writing.
pub struct RwLockWriteGuard<'a, T: ?Sized> {
    inner: parking_lot::RwLockWriteGuard<'a, T>,
    _held: Held,
}

impl<T> Mutex<T> {
    /// Creates an unlocked mutex, whose place in the order is that of the file.
    #[track_caller]
    pub const fn new(value: T) -> Self {
        Self {
            lock: Lock::of::<T>(),
            inner: parking_lot::Mutex::new(value),
        }
    }

    /// Returns the value.
    pub fn into_inner(self) -> T {
        self.inner.into_inner()
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Locks it.
    ///
    /// # Panics
    /// If the thread holds a lock whose place is not before this one's.
    #[track_caller]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let held = Held::checked(self.lock);
        let inner = self.inner.lock();
        MutexGuard { inner, held }
    }

    /// Locks it, if that is possible at once.
    #[track_caller]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let inner = self.inner.try_lock()?;
        let held = Held::unchecked(self.lock);
        Some(MutexGuard { inner, held })
    }

    /// Returns the value, which no other thread can use.
    pub fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut()
    }
}

impl<T> RwLock<T> {
    /// Creates an unlocked lock, whose place in the order is that of the file.
    #[track_caller]
    pub const fn new(value: T) -> Self {
        Self {
            lock: Lock::of::<T>(),
            inner: parking_lot::RwLock::new(value),
        }
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Locks it for reading.
    ///
    /// # Panics
    /// As [`Mutex::lock`]; also for a lock that the thread reads already, since a waiting writer would stop it.
    #[track_caller]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        let _held = Held::checked(self.lock);
        let inner = self.inner.read();
        RwLockReadGuard { inner, _held }
    }

    /// Locks it for writing.
    ///
    /// # Panics
    /// As [`Mutex::lock`].
    #[track_caller]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        let _held = Held::checked(self.lock);
        let inner = self.inner.write();
        RwLockWriteGuard { inner, _held }
    }

    /// Locks it for writing, if that is possible within `timeout`.
    #[track_caller]
    pub fn try_write_for(&self, timeout: Duration) -> Option<RwLockWriteGuard<'_, T>> {
        let inner = self.inner.try_write_for(timeout)?;
        let _held = Held::unchecked(self.lock);
        Some(RwLockWriteGuard { inner, _held })
    }
}

/// A condition that threads wait for.
#[derive(Debug, Default)]
pub struct Condvar(parking_lot::Condvar);

impl Condvar {
    /// Creates one that no thread waits for.
    pub const fn new() -> Self {
        Self(parking_lot::Condvar::new())
    }

    /// Wakes one thread.
    pub fn notify_one(&self) -> bool {
        self.0.notify_one()
    }

    /// Wakes all threads.
    pub fn notify_all(&self) -> usize {
        self.0.notify_all()
    }

    /// Waits for a notification.
    pub fn wait<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>) {
        guard.held.check_innermost();
        self.0.wait(&mut guard.inner);
    }

    /// Waits for a notification until `timeout` has passed.
    pub fn wait_for<T: ?Sized>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        timeout: Duration,
    ) -> WaitTimeoutResult {
        guard.held.check_innermost();
        self.0.wait_for(&mut guard.inner, timeout)
    }

    /// Waits for a notification until `end`.
    pub fn wait_until<T: ?Sized>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        end: Instant,
    ) -> WaitTimeoutResult {
        guard.held.check_innermost();
        self.0.wait_until(&mut guard.inner, end)
    }

    /// Waits while the condition holds.
    pub fn wait_while<T: ?Sized, F>(&self, guard: &mut MutexGuard<'_, T>, condition: F)
    where
        F: FnMut(&mut T) -> bool,
    {
        guard.held.check_innermost();
        self.0.wait_while(&mut guard.inner, condition);
    }

    /// Waits while the condition holds and `timeout` has not passed.
    pub fn wait_while_for<T: ?Sized, F>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        condition: F,
        timeout: Duration,
    ) -> WaitTimeoutResult
    where
        F: FnMut(&mut T) -> bool,
    {
        guard.held.check_innermost();
        self.0.wait_while_for(&mut guard.inner, condition, timeout)
    }

    /// Waits while the condition holds, until `end`.
    pub fn wait_while_until<T: ?Sized, F>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        condition: F,
        end: Instant,
    ) -> WaitTimeoutResult
    where
        F: FnMut(&mut T) -> bool,
    {
        guard.held.check_innermost();
        self.0.wait_while_until(&mut guard.inner, condition, end)
    }
}

macro_rules! lock_traits {
    ($($lock:ident)*) => {$(
        impl<T: Default> Default for $lock<T> {
            #[track_caller]
            fn default() -> Self {
                Self::new(T::default())
            }
        }

        impl<T: ?Sized + fmt::Debug> fmt::Debug for $lock<T> {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.inner.fmt(out)
            }
        }
    )*};
}
lock_traits!(Mutex RwLock);

macro_rules! guard_traits {
    ($($guard:ident)*) => {$(
        impl<T: ?Sized> Deref for $guard<'_, T> {
            type Target = T;

            fn deref(&self) -> &T {
                &self.inner
            }
        }

        impl<T: ?Sized + fmt::Debug> fmt::Debug for $guard<'_, T> {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.inner.fmt(out)
            }
        }
    )*};
}
guard_traits!(MutexGuard RwLockReadGuard RwLockWriteGuard);

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: ?Sized> DerefMut for RwLockWriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}
