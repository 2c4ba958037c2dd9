//! Bytes that are being written, of which a backend's free bytes may know or not.

use parking_lot::Mutex;

/// Sums since the start.
#[derive(Debug, Default)]
struct Sums {
    begun: u64,
    ended: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Writing(Mutex<Sums>);

/// Bytes that are written as long as it lives.
#[derive(Debug)]
pub(super) struct Begun<'a> {
    sums: &'a Mutex<Sums>,
    bytes: u64,
}

impl Writing {
    /// What had been written when this was asked, to be given to [`begin`](Self::begin).
    pub(super) fn ended(&self) -> u64 {
        self.0.lock().ended
    }

    /// Begins to write if there is room beside all that was not written yet when `ended` was told; the room there is
    /// otherwise. `free` was told after `ended`.
    pub(super) fn begin(&self, bytes: u64, free: u64, ended: u64) -> Result<Begun<'_>, u64> {
        let mut sums = self.0.lock();
        let left = free.saturating_sub(sums.begun - ended);
        if bytes > left {
            return Err(left);
        }
        sums.begun += bytes;
        Ok(Begun {
            sums: &self.0,
            bytes,
        })
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.sums.lock().ended += self.bytes;
    }
}
