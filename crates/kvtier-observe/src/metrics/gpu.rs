//! Metrics of the GPUs. The GPU's own thread counts everything; a scrape reads it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_device::Direction;
use kvtier_device::cuda::{GpuReadings, RUN_BUCKETS};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::Prefix;

/// One GPU that there is, in use or not.
#[derive(Debug, Clone)]
pub struct GpuFigures {
    /// Ordinal of the GPU.
    pub gpu: Arc<str>,
    /// Whether it is of any use.
    pub healthy: bool,
    /// What it does, if it is in use.
    pub readings: Option<GpuReadings>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct MovedLabels {
    gpu: Arc<str>,
    direction: &'static str,
    executor: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RunLabels {
    gpu: Arc<str>,
    direction: &'static str,
    /// Longest run of the class, bytes.
    up_to: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct DirectionLabels {
    gpu: Arc<str>,
    direction: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct GpuLabels {
    gpu: Arc<str>,
}

/// Names of the classes of runs.
const RUN_NAMES: [&str; RUN_BUCKETS.len() + 1] =
    ["256", "1024", "4096", "16384", "65536", "262144", "more"];

metrics! {
    /// The metrics of the GPUs.
    pub struct GpuMetrics(own) {} with {
        bytes: Family<MovedLabels, Counter> = own.gpu_copied_bytes, "Bytes copied between a GPU and L1";
        pieces: Family<MovedLabels, Counter> = own.gpu_copied_pieces, "Pieces handed to a GPU and done";
        seconds: Family<MovedLabels, Counter<f64, AtomicU64>> = own.gpu_copy_seconds,
            "Time from handing pieces to a GPU to seeing that they are done; pieces overlap";
        runs: Family<RunLabels, Counter> = own.gpu_copied_runs,
            "Contiguous runs copied, by the mean length of their piece in bytes";
        in_flight: Family<DirectionLabels, Gauge> = own.gpu_transfers_under_way,
            "Stores and retrieves of workers on a GPU that have not ended";
        event_timeouts: Family<GpuLabels, Counter> = own.gpu_event_timeouts,
            "Transfers that failed because the engine's event did not complete";
        healthy: Family<GpuLabels, Gauge> = own.gpu_healthy,
            "0 when a GPU is of no use: after an error until the next start, or as long as its driver hangs while it is taken into use";
        open_allocations: Family<GpuLabels, Gauge> = own.gpu_open_allocations, "Allocations of workers that are open";
        pinned_bytes: Gauge = own.l1_pinned_bytes, "Bytes of L1 that GPUs reach directly";
    }
}

impl GpuMetrics {
    pub(super) fn read(&self, gpus: &[GpuFigures], pinned_bytes: u64) {
        let set = |counter: &Counter, value: u64| counter.inner().store(value, Ordering::Relaxed);
        self.pinned_bytes
            .set(i64::try_from(pinned_bytes).unwrap_or(i64::MAX));
        for GpuFigures {
            gpu,
            healthy,
            readings,
        } in gpus
        {
            let labels = GpuLabels {
                gpu: Arc::clone(gpu),
            };
            self.healthy.get_or_create(&labels).set(i64::from(*healthy));
            let Some(readings) = readings else {
                continue;
            };
            for (direction, executor, moved) in &readings.moved {
                let labels = MovedLabels {
                    gpu: Arc::clone(gpu),
                    direction: direction.name(),
                    executor: executor.name(),
                };
                set(&self.bytes.get_or_create(&labels), moved.bytes);
                set(&self.pieces.get_or_create(&labels), moved.pieces);
                let seconds = moved.nanos as f64 / 1e9;
                let counter = self.seconds.get_or_create(&labels);
                counter.inner().store(seconds.to_bits(), Ordering::Relaxed);
            }
            for direction in [Direction::Store, Direction::Retrieve] {
                let name = direction.name();
                let counts = readings.runs[direction as usize];
                for (up_to, count) in RUN_NAMES.into_iter().zip(counts) {
                    let labels = RunLabels {
                        gpu: Arc::clone(gpu),
                        direction: name,
                        up_to,
                    };
                    set(&self.runs.get_or_create(&labels), count);
                }
                let labels = DirectionLabels {
                    gpu: Arc::clone(gpu),
                    direction: name,
                };
                let in_flight = readings.in_flight[direction as usize];
                self.in_flight
                    .get_or_create(&labels)
                    .set(i64::try_from(in_flight).unwrap_or(i64::MAX));
            }
            set(
                &self.event_timeouts.get_or_create(&labels),
                readings.event_timeouts,
            );
            self.open_allocations
                .get_or_create(&labels)
                .set(readings.open_allocations as i64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::GpuFigures;
    use crate::metrics::{Metrics, Readings};

    #[test]
    fn unusable_gpu_is_not_healthy() {
        let gpu = GpuFigures {
            gpu: "3".into(),
            healthy: false,
            readings: None,
        };
        let readings = Readings {
            gpus: vec![gpu],
            ..Readings::default()
        };
        let text = Metrics::new().encode(&readings);
        assert!(text.contains("kvtier_gpu_healthy{gpu=\"3\"} 0\n"), "{text}");
    }
}
