//! The screen, as lines of text.

use std::collections::VecDeque;

use indicatif::{HumanBytes, HumanCount, HumanDuration};
use kvtier_observe::api::{AgentSessionsStatus, Metrics, Rates, Status, TierStatus};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};

use super::sample::Sample;
use crate::status::health;

/// Characters of the bar that shows how full something is.
const BAR: usize = 24;

/// Hit rates that are kept, one per interval.
const HISTORY: usize = 60;

/// Tenants and operations that are shown.
const TENANTS: usize = 10;
const OPERATIONS: usize = 8;

/// What is shown.
pub(super) struct View {
    url: String,
    last: Option<Sample>,
    before: Option<Sample>,
    hit_rates: VecDeque<Option<f64>>,
    /// Why the last attempt failed.
    error: Option<String>,
    pub(super) is_paused: bool,
}

impl View {
    pub(super) fn new(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            last: None,
            before: None,
            hit_rates: VecDeque::new(),
            error: None,
            is_paused: false,
        }
    }

    /// Takes the outcome of an attempt. While paused, nothing changes.
    pub(super) fn update(&mut self, outcome: anyhow::Result<Sample>) {
        if self.is_paused {
            return;
        }
        match outcome {
            Ok(sample) => {
                self.error = None;
                self.before = self.last.replace(sample);
                if let Some(rates) = self.rates() {
                    let rate = rates.hit_rate();
                    self.hit_rates.push_back(rate);
                }
                if self.hit_rates.len() > HISTORY {
                    self.hit_rates.pop_front();
                }
            }
            Err(error) => self.error = Some(format!("{error:#}")),
        }
    }

    /// Whether there is anything to show, rates included.
    pub(super) fn is_complete(&self) -> bool {
        self.before.is_some()
    }

    /// Why the last attempt failed.
    pub(super) fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    fn rates(&self) -> Option<Rates<'_>> {
        Some(Rates::between(
            &self.before.as_ref()?.metrics,
            &self.last.as_ref()?.metrics,
        ))
    }

    /// The lines, the most important ones first.
    pub(super) fn lines(&self) -> Vec<Line<'static>> {
        let mut lines = vec![self.head()];
        if let Some(error) = &self.error {
            lines.push(Line::styled(format!("no answer: {error}"), bad()));
        }
        let Some(sample) = &self.last else {
            return lines;
        };
        lines.push(l1(&sample.status));
        let AgentSessionsStatus { sessions, chunks } = sample.status.agent_sessions;
        if sessions > 0 {
            let text = format!("sessions of agents {sessions}, chunks of their prompts {chunks}");
            lines.push(Line::raw(text));
        }
        let Some(rates) = self.rates() else {
            return lines;
        };
        lines.extend([Line::default(), self.traffic(&rates), transfers(&rates)]);
        lines.extend(operations(&rates));
        lines.extend(tiers(&sample.status, &rates));
        lines.extend(gpus(&sample.metrics, &rates));
        lines.extend(tenants(&sample.metrics, &rates));
        lines
    }

    fn head(&self) -> Line<'static> {
        let mut spans = vec![bold("kvtier"), Span::raw(format!("  {}", self.url))];
        if let Some(Sample { status, .. }) = &self.last {
            let health = health(status);
            let style = if health == "healthy" {
                Style::new().fg(Color::Green)
            } else {
                bad()
            };
            spans.push(Span::styled(format!("  {health}"), style));
            let version = status
                .version
                .as_deref()
                .map(|version| format!("  {version}"));
            let uptime = status.uptime_seconds.map(std::time::Duration::from_secs);
            let uptime = uptime.map(|uptime| format!("  up {}", HumanDuration(uptime)));
            spans.extend([version, uptime].into_iter().flatten().map(Span::raw));
            let (workers, sessions) = (workers(status), status.active_sessions.unwrap_or(0));
            spans.push(Span::raw(format!(
                "  workers {workers}, sessions {sessions}"
            )));
        }
        if self.is_paused {
            spans.push(Span::styled("  PAUSED", bad()));
        }
        Line::from(spans)
    }

    fn traffic(&self, rates: &Rates<'_>) -> Line<'static> {
        let asked = rates.per_second("lmcache_mp_lookup_requested_tokens_total", &[]);
        let rate = rates
            .hit_rate()
            .map_or("-".to_owned(), |rate| format!("{:.1} %", 100.0 * rate));
        Line::from(vec![
            bold("hit rate "),
            Span::raw(format!("{rate:>7} of {} tokens/s  ", count(asked))),
            Span::styled(sparkline(&self.hit_rates), Style::new().fg(Color::Cyan)),
        ])
    }
}

fn bold(text: &'static str) -> Span<'static> {
    Span::styled(text, Style::new().add_modifier(Modifier::BOLD))
}

fn bad() -> Style {
    Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)
}

fn title(text: String) -> [Line<'static>; 2] {
    let style = Style::new().add_modifier(Modifier::BOLD);
    [Line::default(), Line::styled(text, style)]
}

fn count(value: f64) -> String {
    match value {
        value if value < 10.0 => format!("{value:.1}"),
        value => HumanCount(value.round() as u64).to_string(),
    }
}

fn bytes(value: f64) -> String {
    HumanBytes(value.max(0.0).round() as u64).to_string()
}

/// A span of time, of a bound of a histogram.
fn time(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".to_owned(),
        Some(seconds) if seconds.is_infinite() => "> 10 s".to_owned(),
        Some(seconds) if seconds < 0.001 => format!("{:.0} us", 1e6 * seconds),
        Some(seconds) if seconds < 1.0 => format!("{:.1} ms", 1e3 * seconds),
        Some(seconds) => format!("{seconds:.1} s"),
    }
}

fn bar(part: f64) -> String {
    let full = (part.clamp(0.0, 1.0) * BAR as f64).round() as usize;
    format!("[{}{}]", "#".repeat(full), "-".repeat(BAR - full))
}

/// One character per interval; a space where nothing was asked.
fn sparkline(values: &VecDeque<Option<f64>>) -> String {
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let level = |value: &Option<f64>| match value {
        None => ' ',
        Some(value) => LEVELS[((value * 7.0).round() as usize).min(7)],
    };
    values.iter().map(level).collect()
}

fn workers(status: &Status) -> usize {
    status.registered_gpu_ids.len() + status.registered_non_cuda_instance_ids.len()
}

fn l1(status: &Status) -> Line<'static> {
    let l1 = &status.storage_manager.l1_manager;
    let (used, size) = (l1.memory_used_bytes as f64, l1.memory_total_bytes as f64);
    let part = if size > 0.0 { used / size } else { 0.0 };
    Line::from(vec![
        bold("L1 "),
        Span::raw(format!(
            "{} {} of {} ({:.0} %), {} objects, {} leased, {} being written",
            bar(part),
            bytes(used),
            bytes(size),
            100.0 * part,
            HumanCount(l1.total_object_count),
            HumanCount(l1.read_locked_count),
            HumanCount(l1.write_locked_count),
        )),
    ])
}

fn transfers(rates: &Rates<'_>) -> Line<'static> {
    let per_second = |name: &str| count(rates.per_second(name, &[]));
    Line::raw(format!(
        "stores {}/s, retrieves {}/s, evicted from L1 {}/s, refused requests {}/s",
        per_second("lmcache_mp_num_finished_stores_total"),
        per_second("lmcache_mp_num_finished_retrieves_total"),
        bytes(rates.per_second("kvtier_l1_evicted_bytes_total", &[])),
        per_second("kvtier_refused_requests_total"),
    ))
}

fn operations(rates: &Rates<'_>) -> Vec<Line<'static>> {
    let operations = rates.operations();
    let head = format!(
        "{:<34}{:>12}{:>12}{:>12}",
        "requests", "per second", "p50 below", "p99 below"
    );
    let rows = operations.into_iter().take(OPERATIONS).map(|operation| {
        let (per_second, p50, p99) = (
            count(operation.per_second),
            time(operation.p50),
            time(operation.p99),
        );
        Line::raw(format!(
            "{:<34}{per_second:>12}{p50:>12}{p99:>12}",
            operation.name
        ))
    });
    title(head).into_iter().chain(rows).collect()
}

fn tiers(status: &Status, rates: &Rates<'_>) -> Vec<Line<'static>> {
    let tiers = &status.storage_manager.l2_adapters;
    if tiers.is_empty() {
        return Vec::new();
    }
    let queued = status.storage_manager.store_controller.pending_keys_count;
    let head = format!(
        "{:<20}{:>24}{:>14}{:>14}{:>12}   {} queued",
        "second tiers",
        "used",
        "stored/s",
        "loaded/s",
        "failures/s",
        HumanCount(queued)
    );
    let rows = tiers.iter().flat_map(|tier| {
        let cause = tier.cause().map(|cause| format!("  {cause}"));
        let cause = cause.map(|cause| Line::styled(cause, bad()));
        std::iter::once(one_tier(tier, rates)).chain(cause)
    });
    title(head).into_iter().chain(rows).collect()
}

fn one_tier(tier: &TierStatus, rates: &Rates<'_>) -> Line<'static> {
    let name = tier.name.clone().unwrap_or_else(|| tier.r#type.clone());
    let labels = [("l2_name", name.as_str())];
    let used = tier.current_size_bytes.unwrap_or(0) as f64;
    let used = match tier.max_capacity_bytes {
        0 => bytes(used),
        capacity => format!("{} of {}", bytes(used), bytes(capacity as f64)),
    };
    let per_second = |name: &str| rates.per_second(name, &labels);
    let failures =
        per_second("kvtier_l2_store_failures_total") + per_second("kvtier_l2_load_failures_total");
    let row = format!(
        "{name:<20}{used:>24}{:>14}{:>14}{:>12}",
        bytes(per_second("kvtier_l2_stored_bytes_total")),
        bytes(per_second("kvtier_l2_loaded_bytes_total")),
        count(failures),
    );
    let breakers = tier.breaker.iter();
    let open = breakers.filter(|(_, breaker)| breaker.state != "closed");
    let mut troubles: Vec<_> = open
        .map(|(call, breaker)| format!("{call} {}", breaker.state))
        .collect();
    if !tier.is_healthy {
        troubles.push("NOT HEALTHY".to_owned());
    }
    if tier.is_full {
        troubles.push("full".to_owned());
    }
    Line::from(vec![
        Span::raw(row),
        Span::styled(format!("   {}", troubles.join(", ")), bad()),
    ])
}

fn gpus(metrics: &Metrics, rates: &Rates<'_>) -> Vec<Line<'static>> {
    let name = "kvtier_gpu_copied_bytes_total";
    let gpus = metrics.values(name, "gpu");
    let rows: Vec<_> = gpus
        .into_iter()
        .map(|gpu| {
            let rate = |direction| {
                let labels = [("gpu", gpu.as_str()), ("direction", direction)];
                bytes(rates.per_second(name, &labels))
            };
            Line::raw(format!(
                "{gpu:<20}{:>24}{:>14}",
                rate("store"),
                rate("retrieve")
            ))
        })
        .collect();
    if rows.is_empty() {
        return rows;
    }
    let head = format!("{:<20}{:>24}{:>14}", "GPUs", "stored/s", "retrieved/s");
    title(head).into_iter().chain(rows).collect()
}

fn tenants(metrics: &Metrics, rates: &Rates<'_>) -> Vec<Line<'static>> {
    let name = "kvtier_tenant_bytes";
    let mut tenants: Vec<_> = metrics
        .values(name, "cache_salt")
        .into_iter()
        .map(|salt| {
            let used = metrics.sum(name, &[("cache_salt", &salt), ("tier", "l1")]);
            (salt, used)
        })
        .collect();
    tenants.sort_by(|a, b| b.1.total_cmp(&a.1));
    if tenants.is_empty() {
        return Vec::new();
    }
    let head = format!(
        "{:<20}{:>24}{:>14}{:>14}",
        "tenants", "in L1", "chunks/s", "hit rate"
    );
    let rows = tenants.into_iter().take(TENANTS).map(|(salt, used)| {
        let labels = [("cache_salt", salt.as_str())];
        let (asked, hit) = (
            "kvtier_tenant_requested_chunks_total",
            "kvtier_tenant_hit_chunks_total",
        );
        let rate = rates.part(hit, asked, &labels);
        let rate = rate.map_or("-".to_owned(), |rate| format!("{:.1} %", 100.0 * rate));
        let per_second = count(rates.per_second(asked, &labels));
        Line::raw(format!(
            "{salt:<20}{:>24}{per_second:>14}{rate:>14}",
            bytes(used)
        ))
    });
    title(head).into_iter().chain(rows).collect()
}

#[cfg(test)]
mod tests {
    use super::super::sample::sample;
    use super::*;
    use serde_json::json;

    fn text(view: &View) -> String {
        let lines = view.lines();
        lines.iter().map(|line| format!("{line}\n")).collect()
    }

    fn status() -> serde_json::Value {
        json!({
            "is_healthy": true, "version": "0.1.0", "uptime_seconds": 7200, "active_sessions": 3,
            "agent_sessions": {"sessions": 2, "chunks": 20},
            "registered_gpu_ids": [7], "registered_non_cuda_instance_ids": [8, 9],
            "storage_manager": {
                "l1_manager": {"memory_used_bytes": 1 << 30, "memory_total_bytes": 4_u64 << 30, "total_object_count": 1234},
                "store_controller": {"pending_keys_count": 5},
                "l2_adapters": [{
                    "type": "fs", "name": "fs-0", "is_healthy": false, "is_full": true, "current_size_bytes": 1 << 20,
                    "max_capacity_bytes": 1 << 30, "breaker": {"load": {"state": "open"}}, "error": "disk: away",
                }],
            },
        })
    }

    fn metrics(n: u64) -> String {
        format!(
            "lmcache_mp_lookup_requested_tokens_total{{cache_salt=\"a\"}} {}\nlmcache_mp_lookup_hit_tokens_total {}\n\
             kvtier_request_duration_seconds_count{{operation=\"lookup\"}} {n}\n\
             kvtier_request_duration_seconds_bucket{{operation=\"lookup\",le=\"0.0001\"}} {n}\n\
             kvtier_request_duration_seconds_bucket{{operation=\"lookup\",le=\"+Inf\"}} {n}\n\
             kvtier_gpu_copied_bytes_total{{gpu=\"0\",direction=\"store\"}} {n}\n\
             kvtier_tenant_bytes{{cache_salt=\"a\",tier=\"l1\"}} 1048576\nkvtier_tenant_bytes{{cache_salt=\"_default\",tier=\"l1\"}} 5\n\
             kvtier_tenant_requested_chunks_total{{cache_salt=\"a\",tier=\"l1\"}} {n}\n",
            1000 * n,
            750 * n
        )
    }

    #[test]
    fn screen_has_every_section() {
        let mut view = View::new("http://h");
        view.update(Ok(sample(status(), &metrics(1))));
        assert!(!view.is_complete());
        view.update(Ok(sample(status(), &metrics(101))));
        let shown = text(&view);
        for part in [
            "kvtier  http://h  healthy, 1 of 1 second tiers failed  0.1.0  up 2 hours  workers 3, sessions 3",
            "sessions of agents 2, chunks of their prompts 20\n",
            "L1 [######------------------] 1.00 GiB of 4.00 GiB (25 %), 1,234 objects",
            "hit rate  75.0 % of",
            "lookup",
            "100 us",
            "fs-0                    1.00 MiB of 1.00 GiB",
            "load open, NOT HEALTHY, full\n  disk: away\n",
            "5 queued",
            "GPUs",
            "a                                   1.00 MiB",
            "_default",
        ] {
            assert!(shown.contains(part), "{part:?} is not in\n{shown}");
        }
    }

    #[test]
    fn failed_attempt_keeps_the_screen_and_names_the_cause() {
        let mut view = View::new("http://h");
        view.update(Err(anyhow::anyhow!("nothing answers")));
        assert_eq!(
            text(&view),
            "kvtier  http://h\nno answer: nothing answers\n"
        );
        view.update(Ok(sample(status(), &metrics(1))));
        view.update(Err(anyhow::anyhow!("nothing answers")));
        assert!(text(&view).contains("no answer: nothing answers\nL1 [###"));
        view.is_paused = true;
        view.update(Ok(sample(json!({}), "")));
        assert!(text(&view).contains("PAUSED\nno answer"), "{}", text(&view));
    }
}
