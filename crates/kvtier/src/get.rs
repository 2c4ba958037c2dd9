//! HTTP requests of the commands that ask a server or change it.

use std::time::Duration;

use anyhow::{Context as _, anyhow};

/// Largest body that is read, bytes; a status with thousands of workers is far smaller.
const BODY_LIMIT: u64 = 64 << 20;

/// Status code and body of `GET base + path`. Any status is an answer; no answer is an error of one line.
pub(crate) fn get(base: &str, path: &str, timeout: Duration) -> anyhow::Result<(u16, String)> {
    request("GET", base, path, None, timeout)
}

/// The same for any method, with a body of JSON if there is one.
pub(crate) fn request(
    method: &str,
    base: &str,
    path: &str,
    body: Option<String>,
    timeout: Duration,
) -> anyhow::Result<(u16, String)> {
    let url = format!("{}{path}", base.trim_end_matches('/'));
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_global(Some(timeout))
        .http_status_as_error(false)
        // A proxy would answer for the server.
        .proxy(None)
        .build()
        .into();
    let request = ureq::http::Request::builder().method(method).uri(&url);
    let sent = match body {
        None => request.body(()).map(|request| agent.run(request)),
        Some(body) => request
            .header("content-type", "application/json")
            .body(body)
            .map(|request| agent.run(request)),
    };
    let sent = sent.with_context(|| format!("{url} cannot be asked for"))?;
    let mut answer = sent.map_err(|error| match error {
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
