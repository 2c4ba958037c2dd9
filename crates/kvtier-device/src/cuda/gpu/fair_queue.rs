//! Round-robin queue: one FIFO per worker, workers take turns.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// One FIFO per key; keys with items take turns.
#[derive(Debug)]
pub(super) struct FairQueue<K, T> {
    /// Keys with items, each once; the front one is next.
    order: VecDeque<K>,
    queues: HashMap<K, VecDeque<T>>,
}

impl<K, T> Default for FairQueue<K, T> {
    fn default() -> Self {
        Self {
            order: VecDeque::new(),
            queues: HashMap::new(),
        }
    }
}

impl<K: Copy + Eq + Hash, T: PartialEq> FairQueue<K, T> {
    /// Appends to the queue of a key.
    pub fn push(&mut self, key: K, item: T) {
        let queue = self.queues.entry(key).or_default();
        if queue.is_empty() {
            self.order.push_back(key);
        }
        queue.push_back(item);
    }

    /// Number of keys with items.
    pub fn keys(&self) -> usize {
        self.order.len()
    }

    /// First item of the key whose turn it is.
    pub fn head(&self) -> Option<&T> {
        self.queues.get(self.order.front()?)?.front()
    }

    /// Passes the turn to the next key.
    pub fn pass(&mut self) {
        if let Some(key) = self.order.pop_front() {
            self.order.push_back(key);
        }
    }

    /// Takes the first item of the key whose turn it is, and passes the turn on.
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

    /// Removes an item from the queue of a key without changing the turns.
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
    fn keys_take_turns_and_keep_their_order() {
        let mut queue = FairQueue::default();
        for item in ["a1", "a2", "a3", "b1", "b2", "c1"] {
            queue.push(item.as_bytes()[0], item);
        }
        assert_eq!((queue.keys(), queue.head()), (3, Some(&"a1")));
        let all: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(all, ["a1", "b1", "c1", "a2", "b2", "a3"]);
        assert_eq!((queue.keys(), queue.head()), (0, None));
    }

    #[test]
    fn removed_items_have_no_turn() {
        let mut queue = FairQueue::default();
        for item in ["a1", "a2", "a3", "b1", "c1"] {
            queue.push(item.as_bytes()[0], item);
        }
        for removed in ["a2", "b1", "b2", "d1"] {
            queue.remove(removed.as_bytes()[0], &removed);
        }
        assert_eq!(queue.keys(), 2);
        let all: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(all, ["a1", "c1", "a3"]);
    }

    #[test]
    fn passed_key_is_last() {
        let mut queue = FairQueue::default();
        queue.push(1, "one");
        queue.push(2, "two");
        queue.pass();
        assert_eq!(queue.pop(), Some("two"));
        assert_eq!(queue.pop(), Some("one"));
        queue.pass();
        assert_eq!(queue.pop(), None);
    }
}
