//! Metrics of the transformations between tiers and their adapters.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use super::labels::SerdeLabels;
use super::{Prefix, TierReadings};

/// Figures of the transformations of one type that a tier has, since start.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SerdeReadings {
    /// Type of the transformation.
    pub name: String,
    /// Bytes of stored objects before it.
    pub original_bytes: u64,
    /// Bytes of stored objects behind the transformation.
    pub stored_bytes: u64,
    /// Processor time of stores and loads.
    pub cpu_seconds: f64,
    /// Objects that it could not transform.
    pub store_failures: u64,
    /// Objects that it could not transform back.
    pub load_failures: u64,
}

figures! {
    /// What is counted, by name.
    COUNTERS: [SerdeReadings; 4] {
        l2_serde_original_bytes: "Bytes of stored objects before a transformation", |serde| serde.original_bytes;
        l2_serde_stored_bytes: "Bytes of those behind it", |serde| serde.stored_bytes;
        l2_serde_store_failures: "Objects that could not be transformed", |serde| serde.store_failures;
        l2_serde_load_failures: "Objects that could not be transformed back", |serde| serde.load_failures;
    }
}

/// The metrics of the transformations.
pub(super) struct SerdeMetrics {
    counters: [Family<SerdeLabels, Counter>; COUNTERS.len()],
    cpu_seconds: Family<SerdeLabels, Counter<f64, AtomicU64>>,
}

impl SerdeMetrics {
    pub(super) fn new(own: &mut Prefix) -> Self {
        Self {
            counters: COUNTERS.map(|(name, help, _)| own.add(name, help)),
            cpu_seconds: own.add(
                "l2_serde_cpu_seconds",
                "Processor time of transformations, of stores and loads",
            ),
        }
    }

    pub(super) fn read(&self, tier: &TierReadings) {
        for serde in &tier.serdes {
            let labels = SerdeLabels {
                l2_name: tier.name.as_str().into(),
                serde: Arc::from(&*serde.name),
            };
            for (family, (.., value)) in self.counters.iter().zip(COUNTERS) {
                let counter = family.get_or_create(&labels);
                counter.inner().fetch_max(value(serde), Ordering::Relaxed);
            }
            let counter = self.cpu_seconds.get_or_create(&labels);
            // Positive numbers are in the order of their bits.
            let bits = serde.cpu_seconds.max(0.0).to_bits();
            counter.inner().fetch_max(bits, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Metrics, Readings};

    #[test]
    fn ratio_and_time_of_a_transformation_are_in_the_text() {
        let serde = SerdeReadings {
            name: "compress".into(),
            original_bytes: 2000,
            stored_bytes: 1550,
            cpu_seconds: 0.25,
            store_failures: 1,
            load_failures: 2,
        };
        let tier = TierReadings {
            name: "fs-0".into(),
            serdes: vec![serde],
            ..TierReadings::default()
        };
        let readings = Readings {
            tiers: vec![tier],
            ..Readings::default()
        };
        let text = Metrics::new().encode(&readings);
        for line in [
            "original_bytes_total{l2_name=\"fs-0\",serde=\"compress\"} 2000",
            "stored_bytes_total{l2_name=\"fs-0\",serde=\"compress\"} 1550",
            "cpu_seconds_total{l2_name=\"fs-0\",serde=\"compress\"} 0.25",
            "store_failures_total{l2_name=\"fs-0\",serde=\"compress\"} 1",
            "load_failures_total{l2_name=\"fs-0\",serde=\"compress\"} 2",
        ] {
            let line = format!("kvtier_l2_serde_{line}\n");
            assert!(text.contains(&line), "{line}: {text}");
        }
    }
}
