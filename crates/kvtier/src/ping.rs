//! `kvtier ping`: round trips to a server.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use clap::Args;
use kvtier_client::{ClientError, Connection, Options};

use crate::address::{REQUESTS, expect_listener, requests_or_http};
use crate::out;
use crate::units::duration;
use crate::web::{AccessArgs, Client};

/// Arguments of `kvtier ping`.
#[derive(Debug, Args)]
pub struct PingArgs {
    /// The request socket (host:port or tcp://host:port, a ping of the protocol) or the HTTP API (http://host:port or
    /// https://host:port, its health) [default: tcp://127.0.0.1:5555]
    #[arg(value_name = "URL", value_parser = requests_or_http)]
    server: Option<String>,
    /// Address of the server, like the argument
    #[arg(long, value_parser = requests_or_http, conflicts_with = "server")]
    url: Option<String>,
    /// Number of pings
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    count: u32,
    /// Timeout of each ping, in seconds or as in 500ms, 30s, 2m
    #[arg(long, default_value = "3", value_parser = duration)]
    timeout: Duration,
    #[command(flatten)]
    access: AccessArgs,
}

/// Pings and prints the round trip time. Exit code 1, with one line, unless all pings are answered correctly.
pub fn run(args: &PingArgs) -> anyhow::Result<ExitCode> {
    let given = args.server.as_ref().or(args.url.as_ref());
    let url = given.map_or(REQUESTS, String::as_str);
    let trips = if url.starts_with("http") {
        over_http(url, args)
    } else {
        over_requests(url, args)
    };
    match trips {
        Ok(trips) => writeln!(out::stdout(), "{url} {}", summary(&trips))?,
        Err(error) => {
            out::complain("ping", format!("{error:#}"));
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn over_http(url: &str, args: &PingArgs) -> anyhow::Result<Vec<Duration>> {
    let client = Client::new(url, &args.access, args.timeout)?;
    (0..args.count)
        .map(|_| {
            let began = Instant::now();
            let (status, body) = client.get("/healthcheck")?;
            let took = began.elapsed();
            anyhow::ensure!(
                status == 200,
                "{url} answers, but is not healthy: status {status}, {}",
                body.trim()
            );
            Ok(took)
        })
        .collect()
}

fn over_requests(url: &str, args: &PingArgs) -> anyhow::Result<Vec<Duration>> {
    expect_listener(url, args.timeout)?;
    let options = Options {
        timeout: args.timeout,
        ..Options::default()
    };
    let mut connection = Connection::connect_with(url, options)?;
    (0..args.count)
        .map(|_| {
            let began = Instant::now();
            let alive = connection.ping(None).map_err(|error| match error {
                ClientError::Timeout { .. } => {
                    let web = url.replace("tcp://", "http://");
                    anyhow!("{error}; is that the HTTP port? Then ask {web}")
                }
                error => error.into(),
            })?;
            let took = began.elapsed();
            anyhow::ensure!(alive, "{url} answers a ping with no");
            Ok(took)
        })
        .collect()
}

/// Summary of the round trips. The first one includes connecting, so it is shown separately.
fn summary(trips: &[Duration]) -> String {
    let micros = |trip: &Duration| format!("{:.0} us", trip.as_secs_f64() * 1e6);
    let Some((first, rest)) = trips.split_first() else {
        return String::new();
    };
    let mut rest = rest.to_vec();
    rest.sort_unstable();
    match (rest.first(), rest.get(rest.len() / 2), rest.last()) {
        (Some(least), Some(median), Some(most)) => format!(
            "answers: round trip {} (best {}, worst {} of {}; first {})",
            micros(median),
            micros(least),
            micros(most),
            rest.len(),
            micros(first)
        ),
        _ => format!("answers: round trip {} with the connection", micros(first)),
    }
}
