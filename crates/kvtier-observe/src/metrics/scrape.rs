//! Scrape: gauges are set to what the engine reads, and all metrics become text.

use std::fmt;

use prometheus_client::encoding::text;
use prometheus_client::metrics::gauge::Gauge;

use crate::metrics::labels::L1GaugeLabels;
use crate::metrics::{Metrics, Readings};

const L1: L1GaugeLabels = L1GaugeLabels {
    backend: "dram",
    l1_tag: "_default",
};

impl Metrics {
    /// The text of `/metrics`.
    pub fn encode(&self, readings: &Readings) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = self.encode_to(readings, &mut out);
        out
    }

    /// Writes the text of `/metrics`.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn encode_to(&self, readings: &Readings, out: &mut impl fmt::Write) -> fmt::Result {
        let set = |gauge: &Gauge, value: u64| {
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        set(&self.l1_usage_bytes.get_or_create(&L1), readings.used_bytes);
        set(
            &self.l1_staging_bytes.get_or_create(&L1),
            readings.staged_bytes,
        );
        let ratio = readings.used_bytes as f64 / readings.capacity_bytes.max(1) as f64;
        self.l1_usage_ratio.get_or_create(&L1).set(ratio);
        set(&self.l1_staging_limit_bytes, readings.staging_limit_bytes);
        set(&self.l1_withheld_bytes, readings.withheld_bytes);
        set(&self.l1_largest_free_bytes, readings.largest_free_bytes);
        set(&self.l1_capacity_bytes, readings.capacity_bytes);
        set(&self.l1_objects, readings.objects);
        set(&self.l1_leased_objects, readings.leased_objects);
        set(&self.l1_pinned_object_bytes, readings.pinned_object_bytes);
        set(&self.l1_prefaulted_bytes, readings.prefaulted_bytes);
        set(&self.active_prefetch_jobs, readings.unread_lookups);
        set(&self.active_sessions, readings.sessions);
        set(&self.registered_instances, readings.instances);
        // The engine's own totals are the truth; the counters here only follow them.
        for (counter, total) in [
            (&self.evicted_chunks, readings.evicted_objects),
            (&self.evicted_bytes, readings.evicted_bytes),
            (&self.l1_pins_refused, readings.pins_refused),
            (&self.accounting_errors, readings.accounting_errors),
            (&self.prompt_chunks_known, readings.prompt_chunks_known),
            (&self.prompt_chunks_hashed, readings.prompt_chunks_hashed),
        ] {
            counter
                .inner()
                .fetch_max(total, std::sync::atomic::Ordering::Relaxed);
        }
        self.gpus.read(&readings.gpus, readings.pinned_bytes);
        self.l2.read(readings);
        for registry in &self.registries {
            text::encode_registry(out, registry)?;
        }
        text::encode_eof(out)
    }
}
