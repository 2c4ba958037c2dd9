//! The four figures, and tables.

use serde_json::{Value, json};

use crate::Measured;
use crate::link::Link;
use crate::pages::Ids;

/// Pages from which on the link should be full.
const LARGE: u64 = 64 << 10;
/// Pages of a model of 70 billion parameters on eight GPUs.
const SMALL: u64 = 8 << 10;

/// One figure, and what it should be.
pub struct Figure {
    /// What it is.
    pub what: &'static str,
    /// Measured value.
    pub value: f64,
    /// Behind it.
    pub unit: &'static str,
    /// What it should reach.
    pub goal: f64,
    /// Whether less is better.
    pub at_most: bool,
    /// Circumstances of the measurement.
    pub at: String,
}

impl Figure {
    /// Whether it is as it should be.
    pub fn is_reached(&self) -> bool {
        if self.at_most {
            self.value < self.goal
        } else {
            self.value >= self.goal
        }
    }

    /// For programs.
    pub fn json(&self) -> Value {
        json!({
            "what": self.what, "value": self.value, "unit": self.unit, "goal": self.goal, "at": self.at,
            "reached": self.is_reached(),
        })
    }

    /// For people.
    pub fn line(&self) -> String {
        let sign = if self.at_most { "<" } else { ">=" };
        format!(
            "{:52} {:8.2} {:5} goal {sign} {:<6} {:12} ({})",
            self.what,
            self.value,
            self.unit,
            self.goal,
            if self.is_reached() {
                "reached"
            } else {
                "NOT REACHED"
            },
            self.at,
        )
    }
}

/// The figures, each the worst case of what was measured with the executors chosen by themselves.
pub fn figures(measured: &[Measured], link: &Link, delay: f64) -> Vec<Figure> {
    let auto = || measured.iter().filter(|each| each.executor == "auto");
    let name = |each: &Measured, what: &str| {
        format!("{what}, {} KiB, {} ids", each.page >> 10, each.ids.name())
    };
    let one_way = |least: u64, most: u64, ids: &dyn Fn(Ids) -> bool| {
        let measured = auto().filter(|each| (least..=most).contains(&each.page) && ids(each.ids));
        let ways = measured.flat_map(|each| {
            [
                (each.store / link.store, name(each, "store")),
                (each.retrieve / link.retrieve, name(each, "retrieve")),
            ]
        });
        ways.min_by(|a, b| a.0.total_cmp(&b.0))
    };
    let both = auto()
        .filter(|each| each.page >= LARGE)
        .map(|each| {
            let one_way = each.store.max(each.retrieve);
            (each.both / one_way, name(each, "both"))
        })
        .min_by(|a, b| a.0.total_cmp(&b.0));
    let figure = |what, found: Option<(f64, String)>, scale, unit, goal| {
        let (value, at) = found.unwrap_or((f64::NAN, "not measured".into()));
        let value = value * scale;
        Figure {
            what,
            value,
            unit,
            goal,
            at_most: false,
            at,
        }
    };
    vec![
        figure(
            "pages >= 64 KiB, one way, of a plain pinned copy",
            one_way(LARGE, u64::MAX, &|_| true),
            100.0,
            "%",
            95.0,
        ),
        figure(
            "8 KiB pages, one way, of a plain pinned copy",
            one_way(SMALL, SMALL, &|ids| ids == Ids::Random),
            100.0,
            "%",
            80.0,
        ),
        figure("both directions at once, of one way", both, 1.0, "x", 1.5),
        Figure {
            what: "from the last byte to the end, at most",
            value: delay * 1e6,
            unit: "us",
            goal: 100.0,
            at_most: true,
            at: "median of short transfers, the copy's own time taken off".into(),
        },
    ]
}

/// GB/s by pages and executors, for each way.
pub fn table(measured: &[Measured], executors: &[String]) -> String {
    let mut text = String::new();
    type Value = fn(&Measured) -> f64;
    let values: [(&str, Value); 4] = [
        ("store, GB/s", |each| each.store / 1e9),
        ("retrieve, GB/s", |each| each.retrieve / 1e9),
        ("both at once, GB/s", |each| each.both / 1e9),
        ("CPU, us a chunk", |each| each.cpu * 1e6),
    ];
    for (title, value) in values {
        text += &format!("\n{title:26}");
        for executor in executors {
            text += &format!("{executor:>10}");
        }
        let mut rows: Vec<(u64, Ids)> = Vec::new();
        for each in measured {
            if !rows.contains(&(each.page, each.ids)) {
                rows.push((each.page, each.ids));
            }
        }
        for (page, ids) in rows {
            text += &format!("\n{:>8} KiB {:13}", page >> 10, ids.name());
            for executor in executors {
                let found = measured.iter().find(|each| {
                    each.executor == *executor && each.page == page && each.ids == ids
                });
                text += &match found {
                    Some(each) => format!("{:>10.2}", value(each)),
                    None => format!("{:>10}", "-"),
                };
            }
        }
        text.push('\n');
    }
    text
}
