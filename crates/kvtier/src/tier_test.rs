//! `kvtier tier-test`: the conformance suite for a tier in a process of its own, or for a configured one with its store.

use std::hash::{BuildHasher as _, RandomState};
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use clap::Args;
use kvtier_l2::conformance::{self, Scoped, Subject};
use kvtier_l2::{Adapter, AdapterConfig, BoxFuture, Capabilities};
use kvtier_l2_process::{ProcessAdapter, ProcessOptions};
use kvtier_server::escape::escape;
use serde_json::json;
use tracing::Level;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::out;
use crate::units::duration;

/// Put before the model's name of each object that is stored.
const MODEL: &str = "kvtier-tier-test";

/// Least deadline of a lookup in a configured tier.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(60);

/// Arguments of `kvtier tier-test`.
#[derive(Debug, Args)]
pub(crate) struct TierTestArgs {
    /// A configured tier instead, as for `kvtier server --l2-adapter`
    #[arg(long, value_name = "JSON", conflicts_with_all = ["socket", "options", "shared_memory_mb", "command"])]
    l2_adapter: Option<String>,
    /// Unix socket that the tier listens on [default: with --command, one in a new directory]
    #[arg(long, value_name = "PATH", required_unless_present_any = ["command", "l2_adapter"])]
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
        let config = kvtier_config::adapters::registry().parse(&config);
        Ok(ProcessOptions::of(
            &config.map_err(|error| anyhow!("{error}"))?,
        ))
    }
}

/// The tier, opened again for each case.
#[derive(Clone)]
enum Tier {
    /// A program that runs, and the time to connect to it.
    Process(ProcessOptions, Duration),
    Configured(AdapterConfig),
}

impl Tier {
    async fn open(&self) -> anyhow::Result<Arc<dyn Adapter>> {
        match self {
            Self::Process(options, timeout) => Ok(Arc::new(connect(options, *timeout).await?)),
            Self::Configured(config) => Ok(kvtier_config::adapters::registry().open(config)?),
        }
    }
}

impl Subject for Tier {
    fn open(&self) -> BoxFuture<'_, Arc<dyn Adapter>> {
        Box::pin(async {
            match Self::open(self).await {
                Ok(adapter) => adapter,
                // What the suite takes for the failure of the case.
                Err(error) => panic!("it cannot be opened: {error:#}"),
            }
        })
    }

    /// Any backend may: Redis does it while its table of keys grows.
    fn may_list_twice(&self) -> bool {
        true
    }
}

/// Connects to a program; tries again until there is no time left.
async fn connect(options: &ProcessOptions, timeout: Duration) -> anyhow::Result<ProcessAdapter> {
    let adapter = ProcessAdapter::open(options);
    let started = Instant::now();
    loop {
        let Err(error) = adapter.connected().await else {
            return Ok(adapter);
        };
        if started.elapsed() > timeout || error.kind() == kvtier_l2::ErrorKind::Refused {
            adapter.close().await;
            return Err(anyhow!("{error}"));
        }
        let restarts = adapter.status()["command_restarts"].as_u64();
        if restarts >= Some(MAX_RESTARTS) {
            adapter.close().await;
            bail!(
                "the program has ended {MAX_RESTARTS} times without an answer; its output is above"
            );
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A program that has ended this often never answers.
const MAX_RESTARTS: u64 = 3;

/// A tier to be tested.
struct Tested {
    tier: Tier,
    name: String,
    can: Capabilities,
    /// What keeps its program running.
    program: Option<ProcessAdapter>,
}

impl Tested {
    /// A program, which is started if there is a command.
    async fn process(args: &TierTestArgs, socket: &str) -> anyhow::Result<Self> {
        let mut options = args.adapter(socket, &args.command)?;
        // Without metadata a tier is used only so; with it, objects without are misses.
        options.trust_missing_layout = true;
        let program = connect(&options, args.timeout).await;
        let program = program.context("the tier does not answer")?;
        options.command.clear();
        options.trust_missing_layout = program.keeps_metadata() == Some(false);
        let probe = connect(&options, args.timeout).await?;
        let can = probe.capabilities();
        probe.close().await;
        let name = program.status()["tier"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        Ok(Self {
            tier: Tier::Process(options, args.timeout),
            name,
            can,
            program: Some(program),
        })
    }

    /// A configured tier that works.
    async fn configured(json: &str) -> anyhow::Result<Self> {
        let config = kvtier_config::adapters::registry().parse_json(json);
        let mut config = config.map_err(|error| anyhow!("--l2-adapter: {error}"))?;
        // Cases ask for more objects at once than a server does.
        let guards = &mut config.guards;
        guards.lookup_timeout = guards.lookup_timeout.max(LOOKUP_TIMEOUT);
        let (name, tier) = (config.kind.to_owned(), Tier::Configured(config));
        let adapter = tier.open().await?;
        let can = adapter.capabilities();
        let probed = kvtier_l2::probe(&*adapter).await;
        adapter.close().await;
        let probed = probed.context("the tier does not work")?;
        if let Some(error) = probed.missing_peers {
            bail!("the tier does not work: {error}");
        }
        ensure!(
            !can.read_only,
            "the tier answers, but is read-only; the suite has to store"
        );
        let program = None;
        Ok(Self {
            tier,
            name,
            can,
            program,
        })
    }
}

/// A directory that is removed at the end.
struct SocketFolder(PathBuf);

impl Drop for SocketFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The socket of the program, in a directory of its own if none is given.
fn socket(args: &TierTestArgs, random: u64) -> anyhow::Result<(PathBuf, Option<SocketFolder>)> {
    if let Some(path) = &args.socket {
        return Ok((std::path::absolute(path)?, None));
    }
    let directory = std::env::temp_dir().join(format!("{MODEL}-{random:016x}"));
    std::fs::create_dir(&directory)
        .with_context(|| format!("directory {}", directory.display()))?;
    Ok((directory.join("tier.sock"), Some(SocketFolder(directory))))
}

pub(crate) fn run(args: &TierTestArgs) -> anyhow::Result<ExitCode> {
    let random = RandomState::new().hash_one(0);
    // What a program prints, and how it ends.
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time();
    // Its connections are no news: most cases make one.
    let filter = Targets::new()
        .with_target("kvtier_l2_process", Level::INFO)
        .with_target("kvtier_l2_process::link", Level::WARN);
    tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .init();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let (socket, _place) = match args.l2_adapter {
        Some(_) => Default::default(),
        None => socket(args, random)?,
    };
    let tested = runtime.block_on(async {
        match &args.l2_adapter {
            Some(json) => Tested::configured(json).await,
            None => {
                let socket = socket.to_str().context("--socket is not UTF-8")?;
                Tested::process(args, socket).await
            }
        }
    })?;
    // A case fails by a panic, whose message is shown.
    std::panic::set_hook(Box::new(|_| {}));
    let prefix = format!("{MODEL}/{random:016x}");
    let outcome = runtime.block_on(test(tested, args.case.as_deref(), &prefix));
    let _ = std::panic::take_hook();
    outcome
}

async fn test(tested: Tested, case: Option<&str>, prefix: &str) -> anyhow::Result<ExitCode> {
    let Tested {
        tier,
        name,
        can,
        program,
    } = tested;
    let mut out = out::stdout();
    let has = |can: bool, word: &'static str| can.then_some(word);
    let words = [
        has(can.delete, "delete"),
        has(can.list, "list"),
        has(can.shared, "shared"),
        has(can.verifies, "metadata"),
    ];
    let words: Vec<_> = words.into_iter().flatten().collect();
    writeln!(out, "tier {}: {}", escape(&name), words.join(", "))?;
    let chosen = |name: &&str| case.is_none_or(|text| name.contains(text));
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
        if let (Some(cleanup), Ok(adapter)) = (cleanup, tier.open().await) {
            left += cleanup.run(&*adapter).await;
            adapter.close().await;
        }
    }
    if let Some(program) = program {
        program.close().await;
    }
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
