//! Files that the disk failed to read. They may be intact, so they stay until a store replaces them.
//!
//! The mutex guards the list; no other lock is acquired inside.

use std::collections::VecDeque;

use kvtier_common::sync::Mutex;
use rustix::fs::Stat;

/// Capacity; beyond it the oldest are dropped.
const MAX_FILES: usize = 1024;

/// Device and inode of files with read errors.
#[derive(Debug, Default)]
pub(super) struct Unreadable(Mutex<VecDeque<(u64, u64)>>);

impl Unreadable {
    pub(super) fn add(&self, seen: &Stat) {
        let file = (seen.st_dev, seen.st_ino);
        let mut files = self.0.lock();
        if !files.contains(&file) {
            if files.len() == MAX_FILES {
                files.pop_front();
            }
            files.push_back(file);
        }
    }

    /// Removes a file; returns whether it was one of them.
    pub(super) fn remove(&self, seen: &Stat) -> bool {
        let mut files = self.0.lock();
        let before = files.len();
        files.retain(|file| *file != (seen.st_dev, seen.st_ino));
        files.len() < before
    }
}
