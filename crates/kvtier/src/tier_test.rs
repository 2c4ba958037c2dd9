//! `kvtier tier-test`: the conformance suite for a tier in a process of its own.

use std::hash::{BuildHasher as _, RandomState};
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use clap::Args;
use kvtier_l2::conformance::{self, Scoped, Subject};
use kvtier_l2::{Adapter, BoxFuture};
use kvtier_l2_process::{ProcessAdapter, ProcessOptions};
use kvtier_server::escape::escape;
use serde_json::json;

use crate::out;
use crate::units::duration;

/// Put before the model's name of each object that is stored.
const MODEL: &str = "kvtier-tier-test";

/// Arguments of `kvtier tier-test`.
#[derive(Debug, Args)]
pub(crate) struct TierTestArgs {
    /// Unix socket that the tier listens on [default: with --command, one in a new directory]
    #[arg(long, value_name = "PATH", required_unless_present = "command")]
    socket: Option<PathBuf>,
    /// Object that is passed to the tier at the hello, as "options" of an --l2-adapter
    #[arg(long, value_name = "JSON", default_value = "{}")]
    options: String,
    /// Shared memory of each connection, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    shared_memory_mb: u32,
    /// Cases whose names contain this text; all without it
    #[arg(long, value_name = "TEXT")]
    case: Option<String>,
    /// Time for the tier to start and to greet, in seconds or as in 500ms, 30s
    #[arg(long, default_value = "10", value_parser = duration)]
    timeout: Duration,
    /// Program and arguments of the tier, which is started for the test and ended with it; the last option
    #[arg(long, num_args = 1.., allow_hyphen_values = true, value_name = "WORDS")]
    command: Vec<String>,
}

impl TierTestArgs {
    fn adapter(&self, socket: &str, command: &[String]) -> anyhow::Result<ProcessOptions> {
        let options: serde_json::Value =
            serde_json::from_str(&self.options).context("--options is not JSON")?;
        let config = json!({
            "type": "process",
            "socket_path": socket,
            "command": command,
            "options": options,
            "shared_memory_mb": self.shared_memory_mb,
        });
        let config = kvtier_adapters::registry().parse(&config);
        Ok(ProcessOptions::of(
            &config.map_err(|error| anyhow!("{error}"))?,
        ))
    }
}

/// The tier, by connections of its own.
#[derive(Clone)]
struct Tier {
    options: ProcessOptions,
    timeout: Duration,
}

impl Tier {
    /// Connects; tries again until there is no time left.
    async fn connect(&self) -> anyhow::Result<ProcessAdapter> {
        let adapter = ProcessAdapter::open(&self.options);
        let started = Instant::now();
        loop {
            let Err(error) = adapter.connected().await else {
                return Ok(adapter);
            };
            if started.elapsed() > self.timeout || error.kind() == kvtier_l2::ErrorKind::Refused {
                adapter.close().await;
                return Err(anyhow!("{error}"));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Subject for Tier {
    fn open(&self) -> BoxFuture<'_, Arc<dyn Adapter>> {
        Box::pin(async {
            match self.connect().await {
                Ok(adapter) => Arc::new(adapter) as Arc<dyn Adapter>,
                // What the suite takes for the failure of the case.
                Err(error) => panic!("no connection: {error:#}"),
            }
        })
    }
}

/// A directory that is removed at the end.
struct Place(PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn run(args: &TierTestArgs) -> anyhow::Result<ExitCode> {
    let random = RandomState::new().hash_one(0);
    let mut place = None;
    let socket = match &args.socket {
        Some(path) => std::path::absolute(path)?,
        None => {
            let directory = std::env::temp_dir().join(format!("{MODEL}-{random:016x}"));
            std::fs::create_dir(&directory)
                .with_context(|| format!("directory {}", directory.display()))?;
            place.insert(Place(directory)).0.join("tier.sock")
        }
    };
    let socket = socket.to_str().context("--socket is not UTF-8")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    // A case fails by a panic, whose message is shown.
    std::panic::set_hook(Box::new(|_| {}));
    let outcome = runtime.block_on(test(args, socket, &format!("{MODEL}/{random:016x}")));
    let _ = std::panic::take_hook();
    outcome
}

async fn test(args: &TierTestArgs, socket: &str, prefix: &str) -> anyhow::Result<ExitCode> {
    let mut tier = Tier {
        options: args.adapter(socket, &args.command)?,
        timeout: args.timeout,
    };
    // Without metadata a tier is used only so; with it, objects without are misses.
    tier.options.trust_missing_layout = true;
    let first = tier.connect().await.context("the tier does not answer")?;
    tier.options.command.clear();
    tier.options.trust_missing_layout = first.keeps_metadata() == Some(false);
    let can = {
        let probe = tier.connect().await?;
        let can = probe.capabilities();
        probe.close().await;
        can
    };
    let mut out = out::stdout();
    let name = first.status()["tier"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let has = |can: bool, word: &'static str| can.then_some(word);
    let words = [
        has(can.delete, "delete"),
        has(can.list, "list"),
        has(can.shared, "shared"),
        has(can.verifies, "metadata"),
    ];
    let words: Vec<_> = words.into_iter().flatten().collect();
    writeln!(out, "tier {}: {}", escape(&name), words.join(", "))?;
    let chosen = |case: &&str| args.case.as_ref().is_none_or(|text| case.contains(text));
    let (mut passed, mut failed, mut skipped, mut left) = (0, 0, 0, 0);
    for (number, case) in conformance::names().filter(chosen).enumerate() {
        if let Some(why) = conformance::skipped(case, can) {
            skipped += 1;
            writeln!(out, "skipped {case}: {why}")?;
            continue;
        }
        let mut cleanup = None;
        let make = || {
            let subject = Scoped::new(tier.clone(), &format!("{prefix}/{number}/"));
            cleanup = Some(subject.cleanup());
            subject
        };
        let report = conformance::check_some(make, |name| name == case).await;
        match report.failed().next() {
            None => {
                passed += 1;
                writeln!(out, "ok      {case}")?;
            }
            Some((_, why)) => {
                failed += 1;
                let why: Vec<_> = why.split_whitespace().collect();
                writeln!(out, "FAILED  {case}: {}", escape(&why.join(" ")))?;
            }
        }
        out.flush()?;
        if let (Some(cleanup), Ok(adapter)) = (cleanup, tier.connect().await) {
            left += cleanup.run(&adapter).await;
            adapter.close().await;
        }
    }
    first.close().await;
    ensure!(
        passed + failed + skipped > 0,
        "no case has that in its name"
    );
    writeln!(out, "{passed} passed, {failed} failed, {skipped} skipped")?;
    if left > 0 {
        writeln!(
            out,
            "{left} objects of models {prefix} could not be deleted"
        )?;
    }
    Ok(match failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}
