//! Arguments of `kvtier bench`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kvtier_common::error::{Error, Result};

use crate::cli::address::{REQUESTS, requests};
use crate::cli::units::{duration, split_unit};

/// Arguments of `kvtier bench`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: Option<BenchCommand>,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// Subcommands that generate no load on a server.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Start a server several times; measure the time to its first answer, and its idle memory.
    Start(StartArgs),
    /// Compare JSON reports of two servers: medians over the files of each, and their ratio.
    Compare(CompareArgs),
    /// Measure a second tier without a server; if it keeps files, compare it with plain files.
    L2(L2Args),
}

/// Arguments of `kvtier bench l2`.
#[derive(Debug, Clone, Args)]
pub(crate) struct L2Args {
    /// The tier, as for `kvtier server --l2-adapter`.
    #[arg(long, value_name = "JSON")]
    pub(crate) l2_adapter: String,
    /// Objects per round.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub(crate) num_keys: u32,
    /// KiB per object.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..=262_144))]
    pub(crate) data_size_kb: u32,
    /// Measured rounds, after one to warm up.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: u32,
    /// File that the report is also written to, as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// Error of a replay without a trace.
pub(crate) const NEEDS_TRACE: &str = "a replay needs a trace: --trace FILE";

/// Error of the memory scenario without a process.
pub(crate) const NEEDS_PID: &str = "the memory scenario needs the server's process: --pid PID";

/// Arguments of the load.
#[derive(Debug, Clone, Args)]
pub(crate) struct LoadArgs {
    /// Request socket of the server: host:port, tcp://host:port or ipc://path [default: tcp://127.0.0.1:5555].
    #[arg(value_name = "URL", value_parser = requests)]
    server: Option<String>,
    /// Address of the server, like the argument.
    #[arg(long, value_parser = requests, conflicts_with = "server")]
    url: Option<String>,
    /// Scenarios; default is all except replay, tenants and memory. May be repeated or separated by commas.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) scenario: Vec<Scenario>,
    /// Clients of the mixed and replay scenarios.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) clients: u32,
    /// Tokens per prompt in lookups and retrieves.
    #[arg(long, default_value_t = 32_768, value_parser = clap::value_parser!(u32).range(1..=4_194_304))]
    pub(crate) prompt_tokens: u32,
    /// Number of prompts that lookups use in turn.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) prompts: u32,
    /// Another server for the lookup-hit scenario: lookups go to both in turn, so other load of the machine affects both.
    /// Its row has the ratios.
    #[arg(long, value_name = "URL", value_parser = requests)]
    pub(crate) beside: Option<String>,
    /// Duration of each latency scenario, in seconds or as in 500ms, 30s, 2m, after a tenth of it to warm up.
    #[arg(long, default_value = "3s", value_parser = duration)]
    pub(crate) duration: Duration,
    /// Measure this number of requests per client instead of a duration.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) requests: Option<u64>,
    /// Requests per second and client, at fixed times; default is the next as soon as the last was answered.
    #[arg(long, value_parser = rate)]
    pub(crate) rate: Option<f64>,
    /// Stores per second of the writer in the mixed scenario; 0 for none.
    #[arg(long, default_value_t = 100.0, value_parser = rate_or_none)]
    pub(crate) writer_rate: f64,
    /// Seed of tokens and bytes.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Bytes per chunk in the transfer scenarios, such as 2MiB; a multiple of 4 bytes per token of the chunk.
    #[arg(long, default_value = "2MiB", value_parser = bytes)]
    pub(crate) chunk_bytes: u64,
    /// Chunks per transfer request.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) chunks_per_request: u32,
    /// Use consecutive blocks, like a fresh engine, instead of blocks in random order.
    #[arg(long)]
    pub(crate) ordered_blocks: bool,
    /// Total bytes stored by each transfer scenario; should fit into the server's memory.
    #[arg(long, default_value = "384MiB", value_parser = bytes)]
    pub(crate) volume: u64,
    /// Send chunks pickled, even if the server has a shared pool.
    #[arg(long)]
    pub(crate) pickle: bool,
    /// Timeout of each request, in seconds or as in 500ms, 30s, 2m. The first timeout ends the run.
    #[arg(long, default_value = "10s", value_parser = duration)]
    pub(crate) timeout: Duration,
    /// Drop unused chunks of the server before each scenario. For servers without other clients.
    #[arg(long)]
    pub(crate) clear: bool,
    /// Trace to replay: JSON lines with timestamp (ms), input_length, output_length, hash_ids (of 512 tokens each).
    #[arg(long)]
    pub(crate) trace: Option<PathBuf>,
    /// Number of requests to replay.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) limit: u64,
    /// Replay at the trace's own times, accelerated by this factor; default is as fast as possible.
    #[arg(long, value_parser = rate)]
    pub(crate) speed: Option<f64>,
    /// Number of tenants in the tenants scenario.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) tenants: u32,
    /// Bytes per chunk in all other scenarios.
    #[arg(long, default_value = "4KiB", value_parser = bytes)]
    pub(crate) small_chunk_bytes: u64,
    /// Objects stored by the memory scenario.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) objects: u64,
    /// Process id of the server, to read its memory.
    #[arg(long)]
    pub(crate) pid: Option<u32>,
    /// Name of the server in reports; default is its address.
    #[arg(long)]
    pub(crate) label: Option<String>,
    /// Write the report as JSON to a file, or with `-` to stdout instead of the table.
    #[arg(long, value_name = "FILE|-")]
    pub(crate) json: Option<PathBuf>,
}

impl LoadArgs {
    /// The server's address.
    pub(crate) fn url(&self) -> &str {
        let given = self.server.as_deref().or(self.url.as_deref());
        given.unwrap_or(REQUESTS)
    }

    /// The defaults, with this server and seed.
    pub(crate) fn of(url: &str, seed: u64) -> Self {
        #[derive(Parser)]
        struct Defaults {
            #[command(flatten)]
            load: LoadArgs,
        }
        Defaults::parse_from(["", url, "--seed", &seed.to_string()]).load
    }

    /// Returns the load for another server.
    pub(crate) fn at(&self, url: &str) -> Self {
        Self {
            server: Some(url.to_owned()),
            url: None,
            beside: None,
            ..self.clone()
        }
    }

    /// The scenarios to run, in order. A trace without scenarios means the replay.
    pub(crate) fn scenarios(&self) -> Vec<Scenario> {
        match (self.scenario.is_empty(), &self.trace) {
            (false, _) => self.scenario.clone(),
            (true, Some(_)) => vec![Scenario::Replay],
            (true, None) => Scenario::TABLE.to_vec(),
        }
    }

    /// All missing arguments of the scenarios.
    pub(crate) fn missing(&self) -> Option<String> {
        let missing = |scenario| match scenario {
            Scenario::Replay if self.trace.is_none() => Some(NEEDS_TRACE),
            Scenario::Memory if self.pid.is_none() => Some(NEEDS_PID),
            _ => None,
        };
        let mut all: Vec<_> = self.scenarios().into_iter().filter_map(missing).collect();
        all.sort_unstable();
        all.dedup();
        (!all.is_empty()).then(|| all.join("; "))
    }
}

/// A scenario to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scenario {
    /// Round trip of the smallest request.
    Ping,
    /// Lookup of a cached prompt, until the result is known.
    LookupHit,
    /// Lookup of a new prompt.
    LookupMiss,
    /// prepare_retrieve and commit_retrieve of all chunks of a prompt, without reading them.
    RetrieveBookkeeping,
    /// prepare_store and commit_store of one chunk, without writing it.
    StoreBookkeeping,
    /// Store and retrieve of a worker that copies by itself.
    EngineDriven,
    /// Store and retrieve of a worker whose pages the server copies, compared with a plain memory copy.
    LmcacheDriven,
    /// Lookups of several clients, with a concurrent writer.
    Mixed,
    /// Replay of a recorded trace, with small objects. Needs --trace.
    Replay,
    /// Stores of many tenants in random order, with some retrieves; the salts are tenant-0, tenant-1 ...
    Tenants,
    /// The server's memory per object, with many tiny objects. Needs --pid.
    Memory,
}

impl Scenario {
    /// The default scenarios.
    const TABLE: [Self; 8] = [
        Self::Ping,
        Self::LookupHit,
        Self::LookupMiss,
        Self::RetrieveBookkeeping,
        Self::StoreBookkeeping,
        Self::EngineDriven,
        Self::LmcacheDriven,
        Self::Mixed,
    ];

    /// The name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Arguments of `kvtier bench start`.
#[derive(Debug, Args)]
pub(crate) struct StartArgs {
    /// Request socket of the server to start: host:port, tcp://host:port or ipc://path.
    #[arg(value_name = "URL", required_unless_present = "url", value_parser = requests)]
    server: Option<String>,
    /// Address of the server, like the argument.
    #[arg(long, value_parser = requests, conflicts_with = "server")]
    url: Option<String>,
    /// Number of starts.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: u32,
    /// Timeout of each start, in seconds or as in 500ms, 30s, 2m.
    #[arg(long, default_value = "120s", value_parser = duration)]
    pub(crate) timeout: Duration,
    /// Idle time before its memory is read, in seconds or as in 500ms, 30s, 2m.
    #[arg(long, default_value = "1s", value_parser = duration)]
    pub(crate) settle: Duration,
    /// Name of the server in reports; default is its program.
    #[arg(long)]
    pub(crate) label: Option<String>,
    /// File for the server's output; default is none.
    #[arg(long)]
    pub(crate) log: Option<PathBuf>,
    /// Write the report as JSON to a file, or with `-` to stdout instead of the table.
    #[arg(long, value_name = "FILE|-")]
    pub(crate) json: Option<PathBuf>,
    /// The server's command.
    #[arg(last = true, required = true)]
    pub(crate) command: Vec<String>,
}

impl StartArgs {
    /// The server's address.
    pub(crate) fn url(&self) -> Option<&str> {
        self.server.as_deref().or(self.url.as_deref())
    }
}

/// Arguments of `kvtier bench compare`.
#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    /// Reports of the base server.
    #[arg(long, required = true, num_args = 1..)]
    pub(crate) base: Vec<PathBuf>,
    /// Reports of the compared server.
    #[arg(long, required = true, num_args = 1..)]
    pub(crate) ours: Vec<PathBuf>,
}

/// Parses a size: bytes, or a number with the unit KiB, MiB or GiB.
fn bytes(text: &str) -> Result<u64> {
    let units = [
        ("KiB", 1024.0),
        ("MiB", 1_048_576.0),
        ("GiB", 1_073_741_824.0),
        ("", 1.0),
    ];
    let (number, scale) = split_unit(text, &units)
        .ok_or_else(|| Error::refused("expected a size such as 4096, 64KiB, 2MiB or 1GiB"))?;
    let size = number * scale;
    if !(1.0..=1e15).contains(&size) || size.fract() != 0.0 {
        let what = format!("{text} is not a positive whole number of bytes");
        return Err(Error::refused(what));
    }
    Ok(size as u64)
}

fn rate(text: &str) -> Result<f64> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err(Error::refused("expected a positive number")),
    }
}

fn rate_or_none(text: &str) -> Result<f64> {
    match text.parse::<f64>() {
        Ok(0.0) => Ok(0.0),
        _ => rate(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(bytes("2MiB"), Ok(2 << 20));
        assert_eq!(bytes("4096"), Ok(4096));
        for bad in ["", "0", "1.5", "2MB", "-4KiB", "nan"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
        assert_eq!(rate_or_none("0"), Ok(0.0));
        assert!(rate("0").is_err());
    }
}
