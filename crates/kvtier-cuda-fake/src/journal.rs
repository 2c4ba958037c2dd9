//! Journal: counters and violations.

use std::collections::HashMap;

use parking_lot::Mutex;

#[derive(Default)]
pub(crate) struct Journal(Mutex<Lines>);

#[derive(Default)]
struct Lines {
    counts: HashMap<String, u64>,
    violations: Vec<String>,
}

impl Journal {
    pub(crate) fn add(&self, name: &str, n: u64) {
        let mut lines = self.0.lock();
        match lines.counts.get_mut(name) {
            Some(count) => *count += n,
            None => _ = lines.counts.insert(name.into(), n),
        }
    }

    pub(crate) fn count(&self, name: &str) -> u64 {
        let lines = self.0.lock();
        match name {
            "violations" => lines.violations.len() as u64,
            _ => lines.counts.get(name).copied().unwrap_or(0),
        }
    }

    pub(crate) fn violation(&self, text: String) {
        if std::env::var_os("KVTIER_CUDA_FAKE_LOUD").is_some() {
            eprintln!("cuda fake driver: {text}");
        }
        self.0.lock().violations.push(text);
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        self.0.lock().violations.clone()
    }

    pub(crate) fn clear(&self) {
        *self.0.lock() = Lines::default();
    }
}
