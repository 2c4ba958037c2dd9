//! HTTP GET for `status` and `ping`.

use std::time::Duration;

use anyhow::{Context as _, anyhow};

/// Largest body that is read, bytes; a status with thousands of workers is far smaller.
const BODY_LIMIT: u64 = 64 << 20;

/// Status code and body of `GET base + path`. Any status is an answer; no answer is an error of one line.
pub(crate) fn get(base: &str, path: &str, timeout: Duration) -> anyhow::Result<(u16, String)> {
    let url = format!("{}{path}", base.trim_end_matches('/'));
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_global(Some(timeout))
        .http_status_as_error(false)
        // A proxy would answer for the server.
        .proxy(None)
        .build()
        .into();
    let mut answer = agent.get(&url).call().map_err(|error| match error {
        ureq::Error::Protocol(_) => {
            anyhow!("what answers at {url} is not HTTP: {error}; is that the request port?")
        }
        error => anyhow!(error).context(format!("nothing answers at {url}")),
    })?;
    let body = answer
        .body_mut()
        .with_config()
        .limit(BODY_LIMIT)
        .read_to_string()
        .with_context(|| format!("the answer of {url} cannot be read"))?;
    Ok((answer.status().as_u16(), body))
}
