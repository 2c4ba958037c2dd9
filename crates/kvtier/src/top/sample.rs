//! What a server shows at one moment: `/status` and `/metrics`.

use std::time::Instant;

use anyhow::bail;
use kvtier_observe::api::{Metrics, Status};
use kvtier_server::escape::escape;

use crate::web::{Client, refusal, typed};

/// Answers of `/status` and `/metrics`.
pub(super) struct Sample {
    pub(super) status: Status,
    pub(super) metrics: Metrics,
}

impl Sample {
    /// Asks a server.
    pub(super) fn take(client: &Client) -> anyhow::Result<Self> {
        let (at, status) = (Instant::now(), client.json("GET", "/status", None)?);
        let metrics = match client.get("/metrics")? {
            (200, text) => shown(at, &text),
            (code, text) => bail!("/metrics returned {}", refusal(code, &text)),
        };
        Ok(Self {
            status: typed(&client.base, &status)?,
            metrics,
        })
    }
}

/// The metrics, with names chosen by clients escaped for a terminal.
fn shown(at: Instant, text: &str) -> Metrics {
    let metrics = Metrics::parse(at, text, &["kvtier_", "lmcache_mp_"]);
    metrics.with_labels(|value| escape(value).into_owned())
}

#[cfg(test)]
pub(super) fn sample(status: serde_json::Value, metrics: &str) -> Sample {
    Sample {
        status: kvtier_observe::api::from_value(status).unwrap(),
        metrics: shown(Instant::now(), metrics),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_clients_are_escaped() {
        let text = "kvtier_a{x=\"q\\\"\\n\"} 3\nother 1\n";
        let sample = sample(serde_json::json!({}), text);
        assert_eq!(sample.metrics.values("kvtier_a", "x"), ["q\"\\n"]);
        assert!(sample.metrics.series("other").is_empty());
    }
}
