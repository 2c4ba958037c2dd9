//! `kvtier demo`: a whole server in this process, and engines that talk to it through its real socket.
//!
//! Twelve engine workers (four tenants times three kinds of transport) serve conversations that grow turn by turn after
//! one shared system prompt. Each turn looks the prompt up, retrieves the hits, and stores the rest.
//!
//! 1. Everything fits, and every hit must be complete.
//! 2. Far more is stored than fits, and the cache has to evict.
//! 3. With `--l2`, a second server retrieves prompts from a directory.
//!
//! Every retrieved chunk is compared with the bytes of its tenant and its whole prefix, and tenants keep looking up each
//! other's prompts. The command succeeds only if all answers were correct.

mod conversation;
mod display;
mod engine;
mod ledger;
mod report;
mod tally;
mod tier;
mod workload;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use kvtier_client::Connection;
use kvtier_common::error::Error;
use kvtier_server::{Server, ServerConfig};

use crate::cli::stop::{self, INTERRUPTED};
use display::Display;
use engine::Kind;
use report::{Phase, Report};
use tally::Faults;
use workload::{EngineGroup, Setup, TENANTS};

/// Prefix of pool names; the process id follows.
const POOL_PREFIX: &str = "kvtier_demo_";

/// Share of L1 that the first phase may fill: below the watermark at which the server starts to evict.
const MAX_FILL: f64 = 0.75;

/// Bytes stored in the second phase, at least, as a multiple of L1's size.
const OVERCOMMIT: u64 = 2;

/// Arguments of `kvtier demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Seconds of the two phases together, 0 to 3600; each runs at least once
    #[arg(long, default_value_t = 8.0, value_parser = seconds)]
    seconds: f64,
    /// Turns per conversation
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    turns: u32,
    /// Seed of the conversations and their order
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Size of the server's L1 in GiB
    #[arg(long, value_name = "GB", default_value_t = 0.25, value_parser = kvtier_server::config::parse_gib)]
    l1_size_gb: f64,
    /// Directory for a second tier: at the end, a server with it retrieves prompts after L1 was emptied. Its files stay
    #[arg(long, value_name = "DIR")]
    l2: Option<String>,
    /// Print the result as JSON instead of tables
    #[arg(long)]
    json: bool,
}

fn seconds(text: &str) -> kvtier_common::error::Result<f64> {
    match text.parse() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(seconds),
        Ok(_) => Err(Error::refused("give 0 to 3600 seconds")),
        Err(_) => Err(Error::refused("give a number")),
    }
}

/// Runs the demo. Exit code 0 if all answers were correct, 1 if not, 130 after Ctrl-C.
pub fn run(args: &DemoArgs) -> anyhow::Result<ExitCode> {
    let stop = stop::stop_flag()?;
    let config = server_config(args, None)?;
    // Before the demo starts, so that a directory that cannot be used is reported at once.
    let tiered = args.l2.as_deref().map(|dir| server_config(args, Some(dir)));
    let tiered = tiered.transpose()?;
    let _log = kvtier_server::logging::init(&config).context("no thread for the log")?;
    let server = Server::start(config)?;
    let outcome = play(args, &server, Arc::clone(&stop));
    server.stop();
    let mut report = outcome?;
    if let Some(config) = tiered.filter(|_| !report.interrupted) {
        let server = Server::start(config)?;
        let outcome = recall(args, &server, stop, &mut report);
        server.stop();
        outcome?;
    }
    report.print(args.json).context("cannot write the report")?;
    Ok(match (report.interrupted, report.ok) {
        (true, _) => ExitCode::from(INTERRUPTED),
        (false, true) => ExitCode::SUCCESS,
        (false, false) => ExitCode::FAILURE,
    })
}

/// The configuration of a server without flags, except for its ports, its size, the name of its pool, and its tier.
fn server_config(args: &DemoArgs, l2: Option<&str>) -> anyhow::Result<ServerConfig> {
    // A demo that was killed has not removed its pool, and no other one uses its name.
    kvtier_server::remove_stale_pools(POOL_PREFIX);
    let (size, pool) = (
        format!("--l1-size-gb={}", args.l1_size_gb),
        format!("--shm-name={POOL_PREFIX}{}", std::process::id()),
    );
    let adapter = l2.map(|dir| {
        let adapter = serde_json::json!({ "type": "fs", "base_path": dir });
        format!("--l2-adapter={adapter}")
    });
    let mut flags = vec![
        "--port=0",
        "--http-port=0",
        // Its L1 ends with it, also where the environment names a directory.
        "--state-dir=none",
        "--log-level=warn",
        &size,
        &pool,
    ];
    flags.extend(adapter.as_deref());
    let mut config = ServerConfig::from_flags(&flags)?;
    if let Some(l2) = &config.l2 {
        l2.preflight()?;
    }
    // If /dev/shm is small, the demo runs without the pool, as a server without flags does.
    config.shm_required = false;
    Ok(config)
}

fn play(args: &DemoArgs, server: &Server, stop: Arc<AtomicBool>) -> anyhow::Result<Report> {
    let began = Instant::now();
    let config = server.engine().config();
    let chunk_tokens = config.chunk_size as usize;
    let max_chunks = conversation::max_chunks(args.turns, chunk_tokens);
    let setup = setup(args, server, stop);
    let capacity = (config.l1_bytes / (chunk_tokens as u64 * engine::TOKEN_BYTES)) as usize;
    let shared = conversation::shared_chunks(chunk_tokens);
    // Engines whose pages the server copies share no objects with the others, so their shared part counts again.
    let needed = TENANTS.len() * (Kind::ALL.len() * (max_chunks - shared) + 2 * shared);
    anyhow::ensure!(
        needed as f64 <= capacity as f64 * MAX_FILL,
        "--turns {}: the first phase may need {needed} chunks, and L1 has {capacity}; give fewer turns or a larger \
         --l1-size-gb",
        args.turns
    );
    let mut groups = Kind::ALL
        .iter()
        .zip(0..)
        .map(|(kind, number)| EngineGroup::start(&setup, *kind, number, max_chunks))
        .collect::<Result<Vec<_>, _>>()
        .context("an engine could not register")?;
    let mut report = Report::new(args.seed, &config, groups[0].chunk_bytes());
    let display = Display::new(
        args.seconds,
        groups.iter().map(|group| group.latencies.kind),
    );
    let half = Duration::from_secs_f64(args.seconds / 2.0);

    let mut phase = Phase::begin("all fits", server);
    while phase.rounds == 0 || (phase.elapsed() < half && !setup.is_stopped()) {
        side_by_side(&setup, &display, &mut groups, |group| {
            group.converse(&setup)
        });
        phase.rounds += 1;
        clear(&setup, server, &mut report.faults);
    }
    phase.end(server, &mut groups);
    if phase.evicted_objects > 0 {
        report.faults.push(format!(
            "{} objects were evicted although everything fits",
            phase.evicted_objects
        ));
    }
    report.phases.push(phase);

    if !setup.is_stopped() {
        let mut phase = Phase::begin("under pressure", server);
        let (start, least) = (
            phase.began,
            config.l1_bytes * OVERCOMMIT / groups.len() as u64,
        );
        // Twice as many conversations as fit, at half of their length on average.
        let at_once =
            (2 * capacity / (TENANTS.len() * groups.len()) / (max_chunks / 2).max(1)).max(2);
        side_by_side(&setup, &display, &mut groups, |group| {
            group.overcommit(&setup, at_once, |stored| {
                stored >= least && start.elapsed() >= half
            })
        });
        phase.rounds = 1;
        phase.end(server, &mut groups);
        if phase.evicted_objects == 0 && !setup.is_stopped() {
            report
                .faults
                .push("no object was evicted although far more was stored than fits".to_owned());
        }
        clear(&setup, server, &mut report.faults);
        report.phases.push(phase);
    }
    display.finish();
    for group in &mut groups {
        if let Err(error) = group.stop() {
            report
                .faults
                .push(format!("an engine could not unregister: {error}"));
        }
        report.latencies.push(group.latencies.clone());
        report.faults.add(std::mem::take(&mut group.faults));
    }
    check_leaks(server, &mut report.faults);
    report.close(began.elapsed(), setup.is_stopped());
    Ok(report)
}

fn setup(args: &DemoArgs, server: &Server, stop: Arc<AtomicBool>) -> Setup {
    Setup {
        endpoint: server.endpoint().to_owned(),
        seed: args.seed,
        turns: args.turns,
        chunk_tokens: server.engine().config().chunk_size as usize,
        system: conversation::system_prompt(args.seed),
        ledgers: Default::default(),
        stop,
        progress: workload::Progress::default(),
    }
}

/// Plays the part with a second tier, on a server that has one.
fn recall(
    args: &DemoArgs,
    server: &Server,
    stop: Arc<AtomicBool>,
    report: &mut Report,
) -> anyhow::Result<()> {
    let began = Instant::now();
    let setup = setup(args, server, stop);
    let max_chunks = conversation::max_chunks(args.turns, setup.chunk_tokens);
    report.recall = Some(tier::play(&setup, server, max_chunks, &mut report.faults)?);
    check_leaks(server, &mut report.faults);
    report.close(report.took + began.elapsed(), setup.is_stopped());
    Ok(())
}

/// Runs `serve` for all groups, each on its own thread.
fn side_by_side<F>(setup: &Setup, display: &Display, groups: &mut [EngineGroup], serve: F)
where
    F: Fn(&mut EngineGroup) -> Result<(), kvtier_client::ClientError> + Sync,
{
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups
            .iter_mut()
            .map(|group| {
                let serve = &serve;
                scope.spawn(move || {
                    if let Err(error) = serve(group) {
                        group.faults.push(format!("an engine failed: {error}"));
                    }
                })
            })
            .collect();
        while threads.iter().any(|thread| !thread.is_finished()) {
            display.show(&setup.progress);
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}

/// Clears the cache, as `reset_prefix_cache` of vLLM does; nothing is leased any more, so nothing may stay.
fn clear(setup: &Setup, server: &Server, faults: &mut Faults) {
    let cleared =
        Connection::connect(&setup.endpoint).and_then(|mut connection| connection.clear(false));
    if let Err(error) = cleared {
        faults.push(format!("the cache could not be cleared: {error}"));
        return;
    }
    setup.ledgers.iter().for_each(ledger::Ledger::clear);
    let left = server.engine().readings();
    if left.objects + left.used_bytes > 0 {
        faults.push(format!(
            "{} objects and {} bytes stayed after a clear ({} objects leased)",
            left.objects, left.used_bytes, left.leased_objects
        ));
    }
}

/// Checks for leaks after all engines have unregistered.
fn check_leaks(server: &Server, faults: &mut Faults) {
    let left = server.engine().readings();
    for (what, count) in [
        ("engines", left.instances),
        ("sessions", left.sessions),
        ("leased objects", left.leased_objects),
        ("staged bytes", left.staged_bytes),
        ("accounting errors", left.accounting_errors),
    ] {
        if count > 0 {
            faults.push(format!("{count} {what} are left in the server"));
        }
    }
    if let Some(reason) = server.health().reason() {
        faults.push(format!("the server is not healthy: {reason}"));
    }
}
