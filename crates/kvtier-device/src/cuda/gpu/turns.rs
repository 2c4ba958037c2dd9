//! Who is next: each worker has a queue, and workers take turns.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// Queues of things, one for each key; keys that have something take turns.
#[derive(Debug)]
pub(super) struct Turns<K, T> {
    /// Keys with something in their queue, each once; the front one is next.
    order: VecDeque<K>,
    queues: HashMap<K, VecDeque<T>>,
}

impl<K, T> Default for Turns<K, T> {
    fn default() -> Self {
        Self {
            order: VecDeque::new(),
            queues: HashMap::new(),
        }
    }
}

impl<K: Copy + Eq + Hash, T: PartialEq> Turns<K, T> {
    /// Appends to the queue of a key.
    pub fn push(&mut self, key: K, item: T) {
        let queue = self.queues.entry(key).or_default();
        if queue.is_empty() {
            self.order.push_back(key);
        }
        queue.push_back(item);
    }

    /// How many keys have something.
    pub fn keys(&self) -> usize {
        self.order.len()
    }

    /// The head of the queue whose turn it is.
    pub fn head(&self) -> Option<&T> {
        self.queues.get(self.order.front()?)?.front()
    }

    /// The next key's turn; the queue stays as it is.
    pub fn pass(&mut self) {
        if let Some(key) = self.order.pop_front() {
            self.order.push_back(key);
        }
    }

    /// Takes the head of the queue whose turn it is; it is the next key's turn then.
    pub fn pop(&mut self) -> Option<T> {
        let key = self.order.pop_front()?;
        let queue = self.queues.get_mut(&key)?;
        let item = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(&key);
        } else {
            self.order.push_back(key);
        }
        item
    }

    /// Takes something out of the queue of a key, wherever it is there; turns stay as they are.
    pub fn remove(&mut self, key: K, item: &T) {
        let Some(queue) = self.queues.get_mut(&key) else {
            return;
        };
        queue.retain(|other| other != item);
        if queue.is_empty() {
            self.queues.remove(&key);
            self.order.retain(|other| *other != key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_take_turns_and_each_keeps_its_order() {
        let mut turns = Turns::default();
        for item in ["a1", "a2", "a3", "b1", "b2", "c1"] {
            turns.push(item.as_bytes()[0], item);
        }
        assert_eq!((turns.keys(), turns.head()), (3, Some(&"a1")));
        let all: Vec<_> = std::iter::from_fn(|| turns.pop()).collect();
        assert_eq!(all, ["a1", "b1", "c1", "a2", "b2", "a3"]);
        assert_eq!((turns.keys(), turns.head()), (0, None));
    }

    #[test]
    fn what_is_removed_has_no_turn() {
        let mut turns = Turns::default();
        for item in ["a1", "a2", "a3", "b1", "c1"] {
            turns.push(item.as_bytes()[0], item);
        }
        for gone in ["a2", "b1", "b2", "d1"] {
            turns.remove(gone.as_bytes()[0], &gone);
        }
        assert_eq!(turns.keys(), 2);
        let all: Vec<_> = std::iter::from_fn(|| turns.pop()).collect();
        assert_eq!(all, ["a1", "c1", "a3"]);
    }

    #[test]
    fn who_passes_is_last() {
        let mut turns = Turns::default();
        turns.push(1, "one");
        turns.push(2, "two");
        turns.pass();
        assert_eq!(turns.pop(), Some("two"));
        assert_eq!(turns.pop(), Some("one"));
        turns.pass();
        assert_eq!(turns.pop(), None);
    }
}
