//! Journal: counters and violations.

use std::collections::HashMap;

use parking_lot::Mutex;

#[derive(Default)]
pub(crate) struct Journal(Mutex<(HashMap<String, u64>, Vec<String>)>);

impl Journal {
    pub(crate) fn add(&self, name: &str, n: u64) {
        *self.0.lock().0.entry(name.into()).or_default() += n;
    }

    pub(crate) fn count(&self, name: &str) -> u64 {
        self.0.lock().0.get(name).copied().unwrap_or(0)
    }

    pub(crate) fn violation(&self, text: String) {
        if std::env::var_os("KVTIER_CUDA_FAKE_LOUD").is_some() {
            eprintln!("cuda fake driver: {text}");
        }
        self.0.lock().1.push(text);
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        self.0.lock().1.clone()
    }

    pub(crate) fn clear(&self) {
        *self.0.lock() = Default::default();
    }
}
