//! Files that the disk failed to read. They may be whole, so they stay; whoever has the object writes it anew.

use std::collections::VecDeque;

use parking_lot::Mutex;
use rustix::fs::Stat;

/// Files that are remembered; beyond, the oldest are forgotten.
const MOST: usize = 1024;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Unreadable(Mutex<VecDeque<(u64, u64)>>);

impl Unreadable {
    pub(super) fn add(&self, seen: &Stat) {
        let file = (seen.st_dev, seen.st_ino);
        let mut files = self.0.lock();
        if !files.contains(&file) {
            if files.len() == MOST {
                files.pop_front();
            }
            files.push_back(file);
        }
    }

    /// Whether it is one of them; it is none any more then.
    pub(super) fn take(&self, seen: &Stat) -> bool {
        let mut files = self.0.lock();
        let before = files.len();
        files.retain(|file| *file != (seen.st_dev, seen.st_ino));
        files.len() < before
    }
}
