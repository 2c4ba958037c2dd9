//! The last hour of the series that the dashboard draws, in bounded memory.

use std::collections::{BTreeMap, VecDeque};

use kvtier_observe::api::DashboardHistory;

use super::INTERVAL;

/// Names of the series.
pub(super) const SERIES: [&str; 17] = [
    "hit_rate",
    "requested_tokens",
    "lookups",
    "lookup_p50",
    "lookup_p99",
    "stores",
    "store_p50",
    "store_p99",
    "retrieves",
    "retrieve_p50",
    "retrieve_p99",
    "l1_used_bytes",
    "l1_evicted_bytes",
    "l2_stored_bytes",
    "l2_loaded_bytes",
    "l2_queued_bytes",
    "refused",
];

/// Points: an hour of them.
const POINTS: usize = 3600 / INTERVAL.as_secs() as usize;

/// A value per series; not a number where there is none.
pub(super) type Point = [f32; SERIES.len()];

/// The points, the oldest first.
#[derive(Clone, Default)]
pub(super) struct History {
    points: VecDeque<Point>,
    sequence: u64,
}

impl History {
    /// Adds one; the oldest is forgotten for it.
    pub(super) fn push(&mut self, point: Point) {
        if self.points.len() == POINTS {
            self.points.pop_front();
        }
        self.points.push_back(point);
        self.sequence += 1;
    }

    /// Points so far, those included that are forgotten.
    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The latest point by name.
    pub(super) fn latest(&self) -> BTreeMap<String, Option<f32>> {
        let latest = self.points.back().into_iter().flatten();
        let named = SERIES.iter().zip(latest);
        named
            .map(|(name, value)| ((*name).to_owned(), shown(*value)))
            .collect()
    }

    /// All points by series.
    pub(super) fn all(&self) -> DashboardHistory {
        let values = |series: usize| {
            let points = self.points.iter();
            points.map(|point| shown(point[series])).collect()
        };
        let series = SERIES.iter().enumerate();
        DashboardHistory {
            interval_seconds: INTERVAL.as_secs_f64(),
            capacity: POINTS,
            sequence: self.sequence,
            series: series
                .map(|(at, name)| ((*name).to_owned(), values(at)))
                .collect(),
            ..DashboardHistory::default()
        }
    }
}

/// With four digits, which is more than a chart shows.
fn shown(value: f32) -> Option<f32> {
    if !value.is_finite() {
        return None;
    }
    let digits = 3 - value.abs().log10().floor().clamp(-20.0, 20.0) as i32;
    let scale = 10_f64.powi(digits);
    Some(((f64::from(value) * scale).round() / scale) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: docs/operate.md#dashboard
    #[test]
    fn an_hour_is_kept_and_the_oldest_points_are_forgotten() {
        let mut history = History::default();
        assert!(history.latest().is_empty());
        for number in 0..POINTS + 3 {
            let mut point = [f32::NAN; SERIES.len()];
            point[0] = number as f32;
            history.push(point);
        }
        let all = history.all();
        assert_eq!(all.sequence, POINTS as u64 + 3);
        assert_eq!(all.capacity, POINTS);
        let first = &all.series[SERIES[0]];
        assert_eq!(first.len(), POINTS);
        assert_eq!((first[0], first[1]), (Some(3.0), Some(4.0)));
        assert_eq!(history.latest()[SERIES[0]], first[POINTS - 1]);
        assert!(all.series[SERIES[1]].iter().all(Option::is_none));
        // What it holds at most.
        assert!(history.points.capacity() * size_of::<Point>() < 256 << 10);
    }

    #[test]
    fn values_have_four_digits() {
        for (value, expected) in [
            (0.0, Some(0.0)),
            (0.123_456, Some(0.1235)),
            (123_456.0, Some(123_500.0)),
            (1e-5, Some(1e-5)),
            (f32::INFINITY, None),
        ] {
            assert_eq!(shown(value), expected, "{value}");
        }
    }
}
