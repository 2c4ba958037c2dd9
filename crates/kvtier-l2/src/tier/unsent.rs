//! Bytes that the index counts already and the backend has not been asked to write: the store still waits for what has
//! to be deleted for it, which counts until then. Reports count each of these bytes once, so they never say more than
//! the backend may hold.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

#[derive(Debug, Default)]
struct Sums {
    by_salt: BTreeMap<Arc<str>, u64>,
    all: u64,
}

/// See the module. Locked inside of [`Condemned`](super::condemned::Condemned)'s lock.
#[derive(Debug, Default)]
pub(super) struct Unsent(Mutex<Sums>);

/// Bytes that are not sent as long as it lives.
#[derive(Debug)]
pub(super) struct Waiting<'a> {
    sums: &'a Mutex<Sums>,
    salt: Arc<str>,
    bytes: u64,
}

impl Unsent {
    /// To be called before the index counts the bytes.
    pub(super) fn add(&self, salt: &Arc<str>, bytes: u64) -> Waiting<'_> {
        let mut sums = self.0.lock();
        *sums.by_salt.entry(Arc::clone(salt)).or_default() += bytes;
        sums.all += bytes;
        Waiting {
            sums: &self.0,
            salt: Arc::clone(salt),
            bytes,
        }
    }

    /// Of all tenants, or of one.
    pub(super) fn bytes(&self, salt: Option<&str>) -> u64 {
        let sums = self.0.lock();
        match salt {
            Some(salt) => sums.by_salt.get(salt).copied().unwrap_or_default(),
            None => sums.all,
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut sums = self.sums.lock();
        sums.all -= self.bytes;
        if let Some(bytes) = sums.by_salt.get_mut(&self.salt) {
            *bytes -= self.bytes;
            if *bytes == 0 {
                sums.by_salt.remove(&self.salt);
            }
        }
    }
}
