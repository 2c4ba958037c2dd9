//! What each thread holds, and whether that is in order.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::panic::Location;

use crate::sync::ORDER;

/// A lock in the source.
#[derive(Clone, Copy)]
pub(crate) struct Lock {
    created: &'static Location<'static>,
    guarded: fn() -> &'static str,
}

#[derive(Clone, Copy)]
struct Acquisition {
    lock: Lock,
    at: &'static Location<'static>,
}

thread_local! {
    static HELD: RefCell<Vec<Acquisition>> = const { RefCell::new(Vec::new()) };
}

impl Lock {
    #[track_caller]
    pub(crate) const fn of<T>() -> Self {
        Self {
            created: Location::caller(),
            guarded: std::any::type_name::<T>,
        }
    }

    fn place(self) -> Option<usize> {
        let (file, guarded) = (self.created.file(), (self.guarded)());
        ORDER
            .iter()
            .position(|(known, part)| *known == file && guarded.ends_with(part))
    }

    /// Locks of tests may be outside all others.
    fn is_of_tests(self) -> bool {
        self.created.file().contains("test")
    }
}

/// A lock that this thread holds.
pub(crate) struct Held {
    created: &'static Location<'static>,
    /// A guard is not sent: another thread does not hold its lock.
    _thread: PhantomData<*const ()>,
}

impl Held {
    /// Held lock that the thread is going to wait for.
    ///
    /// # Panics
    /// If the thread holds one that is not outside it.
    #[track_caller]
    pub(crate) fn checked(lock: Lock) -> Self {
        let at = Location::caller();
        let inner = Acquisition { lock, at };
        // A panic during another would end the process without a message.
        if !std::thread::panicking() {
            let _ = HELD.try_with(|held| {
                held.borrow().iter().for_each(|outer| check(*outer, inner));
            });
        }
        Self::unchecked(lock)
    }

    /// Held lock that was acquired without waiting.
    #[track_caller]
    pub(crate) fn unchecked(lock: Lock) -> Self {
        let acquired = Acquisition {
            lock,
            at: Location::caller(),
        };
        // Not while the thread ends.
        let _ = HELD.try_with(|held| held.borrow_mut().push(acquired));
        Self {
            created: lock.created,
            _thread: PhantomData,
        }
    }

    /// Waiting for a condition releases this lock and acquires it again, inside all others that the thread holds.
    #[track_caller]
    pub(crate) fn check_innermost(&self) {
        let _ = HELD.try_with(|held| {
            let last = held.borrow().last().map(|last| last.lock.created);
            assert_eq!(last, Some(self.created), "a wait with a lock inside");
        });
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = HELD.try_with(|held| {
            let mut held = held.borrow_mut();
            let mine = |held: &Acquisition| held.lock.created == self.created;
            held.iter().rposition(mine).map(|at| held.remove(at))
        });
    }
}

fn check(outer: Acquisition, inner: Acquisition) {
    let in_order = is_in_order(outer.lock.place(), inner.lock.place());
    assert!(
        in_order || outer.lock.is_of_tests(),
        "lock order (ORDER in kvtier-common): the lock of {} is acquired at {} inside that of {}, acquired at {}",
        inner.lock.created,
        inner.at,
        outer.lock.created,
        outer.at
    );
}

/// A lock without a place may be inside any other that has one, and has none inside.
fn is_in_order(outer: Option<usize>, inner: Option<usize>) -> bool {
    outer.is_some_and(|outer| inner.is_none_or(|inner| outer < inner))
}

#[cfg(test)]
mod tests {
    use crate::sync::{Condvar, Mutex, RwLock};

    #[test]
    fn places_grow_inwards_and_the_innermost_have_none() {
        let pairs = [
            (Some(0), Some(1)),
            (Some(1), Some(0)),
            (Some(1), Some(1)),
            (Some(1), None),
            (None, Some(1)),
            (None, None),
        ];
        let allowed = pairs.map(|(outer, inner)| super::is_in_order(outer, inner));
        assert_eq!(allowed, [true, false, false, true, false, false]);
    }

    #[test]
    #[should_panic(expected = "lock order")]
    fn lock_inside_an_innermost_one_is_found() {
        let (outer, inner) = (Mutex::new(()), RwLock::new(()));
        let _outer = outer.lock();
        let _inner = inner.read();
    }

    #[test]
    #[should_panic(expected = "lock order")]
    fn second_read_by_one_thread_is_found() {
        let lock = RwLock::new(());
        let _first = lock.read();
        let _second = lock.read();
    }

    #[test]
    #[should_panic(expected = "a wait with a lock inside")]
    fn wait_with_a_lock_inside_is_found() {
        let (outer, inner) = (Mutex::new(()), Mutex::new(()));
        let mut outer = outer.lock();
        let _inner = inner.try_lock().unwrap();
        Condvar::new().wait(&mut outer);
    }

    #[test]
    fn released_lock_is_not_held() {
        let locks = [Mutex::new(1), Mutex::new(2)];
        assert_eq!(*locks[0].lock(), 1);
        assert_eq!(*locks[1].lock(), 2);
        let first = locks[0].lock();
        let second = locks[1].try_lock().unwrap();
        drop(first);
        drop(second);
        assert_eq!(*locks[0].lock(), 1);
    }
}
