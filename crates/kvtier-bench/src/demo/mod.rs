//! `kvtier demo`: a whole server in this process, and engines that talk to it through its real socket.
//!
//! Twelve engine workers (four tenants times three kinds of transport) serve conversations that grow turn by turn after
//! one shared system prompt. Each turn looks the prompt up, retrieves the hits, and stores the rest.
//!
//! 1. Everything fits, and every hit must be complete.
//! 2. Far more is stored than fits, and the cache has to evict.
//! 3. With `--l2`, a second server retrieves prompts from a directory.
//! 4. With `--blend`, a server that blends finds passages in the middle of a prompt.
//!
//! Every retrieved chunk is compared with the bytes of its tenant and its whole prefix, and tenants keep looking up each
//! other's prompts. The command succeeds only if all answers were correct.

mod blend;
mod conversation;
mod group;

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use indicatif::ProgressBar;
use kvtier_common::error::Error;
use kvtier_server::{Server, ServerConfig};

use crate::args::LoadArgs;
use crate::cli::stop::{INTERRUPTED, stop_flag};
use crate::context::Context;
use crate::engine::EngineKind;
use crate::record::{Recorder, Row, RunOutcome};
use crate::report::Report;
use conversation::Conversation;
use group::{ChunkLedger, Group, TENANTS, TOKEN_BYTES, engine};

/// Prefix of pool names; the process id follows.
const POOL_PREFIX: &str = "kvtier_demo_";

/// Share of L1 that the first phase may fill: below the watermark at which the server starts to evict.
const MAX_FILL: f64 = 0.75;

/// Bytes stored in the second phase, at least, as a multiple of L1's size.
const OVERCOMMIT: u64 = 2;

/// Time for the tier to write the conversations.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// Interval between two checks for that.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

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
    /// At the end, a server with `--engine-type blend` finds stored passages in the middle of another prompt
    #[arg(long)]
    blend: bool,
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
///
/// # Errors
/// If a server cannot be started, or an engine cannot register.
pub fn run(args: &DemoArgs) -> anyhow::Result<ExitCode> {
    let (stop, began) = (stop_flag()?, Instant::now());
    let config = server_config(args, &[])?;
    // Before the demo starts, so that a directory that cannot be used is reported at once.
    let tiered = args.l2.as_ref().map(|dir| {
        let adapter = serde_json::json!({ "type": "fs", "base_path": dir });
        server_config(args, &[&format!("--l2-adapter={adapter}")])
    });
    let tiered = tiered.transpose()?;
    let blending = args
        .blend
        .then(|| server_config(args, &["--engine-type=blend"]));
    let blending = blending.transpose()?;
    let _log = kvtier_server::logging::init(&config).context("no thread for the log")?;
    let tokens = config.chunk_size as usize;
    let mut report = Report::new("kvtier demo".to_owned(), "", tokens, args.seed);
    on_server(config, args, &stop, &mut report, |demo, report| {
        demo.play(report)
    })?;
    if let Some(config) = tiered.filter(|_| report.aborted.is_none()) {
        on_server(config, args, &stop, &mut report, |demo, report| {
            demo.recall(report)
        })?;
    }
    if let Some(config) = blending.filter(|_| report.aborted.is_none()) {
        on_server(config, args, &stop, &mut report, blend::play)?;
    }
    let (seconds, seed) = (began.elapsed().as_secs_f64(), args.seed);
    let json = args.json.then_some("-".as_ref());
    report.print(json).context("cannot write the report")?;
    let (verdict, code) = match (report.is_good(), report.aborted.is_some()) {
        (true, _) => ("All answers were correct.", ExitCode::SUCCESS),
        (false, true) => ("Interrupted.", ExitCode::from(INTERRUPTED)),
        (false, false) => ("NOT all answers were correct.", ExitCode::FAILURE),
    };
    if !args.json {
        let mut out = crate::cli::out::stdout();
        writeln!(out, "{verdict} ({seconds:.1} s, seed {seed})")?;
    }
    Ok(code)
}

/// The configuration of a server without flags, except for its ports, its size, the name of its pool, and these.
fn server_config(args: &DemoArgs, more: &[&str]) -> anyhow::Result<ServerConfig> {
    // A demo that was killed has not removed its pool, and no other one uses its name.
    kvtier_server::remove_stale_pools(POOL_PREFIX);
    let (size, pool) = (
        format!("--l1-size-gb={}", args.l1_size_gb),
        format!("--shm-name={POOL_PREFIX}{}", std::process::id()),
    );
    let mut flags = vec![
        "--port=0",
        "--http-port=0",
        // Its L1 ends with it, also where the environment names a directory.
        "--state-dir=none",
        "--log-level=warn",
        &size,
        &pool,
    ];
    flags.extend(more);
    let mut config = ServerConfig::from_flags(&flags)?;
    if let Some(l2) = &config.l2 {
        l2.preflight()?;
    }
    // If /dev/shm is small, the demo runs without the pool, as a server without flags does.
    config.shm_required = false;
    Ok(config)
}

/// Plays a part of the demo on a server of its own.
fn on_server(
    config: ServerConfig,
    args: &DemoArgs,
    stop: &Arc<AtomicBool>,
    report: &mut Report,
    part: impl FnOnce(&Demo<'_>, &mut Report) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let server = Server::start(config)?;
    let load = LoadArgs::of(server.endpoint(), args.seed);
    let outcome = Context::new(load, Arc::clone(stop)).and_then(|context| {
        let milliseconds = (args.seconds * 1000.0) as u64;
        let demo = Demo {
            args,
            server: &server,
            bar: context.bar("demo", milliseconds),
            began: Instant::now(),
            context,
            ledgers: Default::default(),
        };
        part(&demo, report)?;
        demo.bar.finish_and_clear();
        if demo.context.is_stopped() {
            report.abort("interrupted".to_owned());
        }
        report.add(demo.leaks());
        Ok(())
    });
    server.stop();
    outcome
}

/// A part of the demo, on its server.
struct Demo<'a> {
    args: &'a DemoArgs,
    server: &'a Server,
    context: Context,
    bar: ProgressBar,
    began: Instant,
    /// One of the engines that copy by themselves, and one of the others, which share nothing with them.
    ledgers: [ChunkLedger; 2],
}

impl Demo<'_> {
    fn chunk_tokens(&self) -> usize {
        self.context.chunk_tokens
    }

    fn max_chunks(&self) -> usize {
        conversation::max_chunks(self.args.turns, self.chunk_tokens())
    }

    fn ledger(&self, kind: EngineKind) -> &ChunkLedger {
        &self.ledgers[usize::from(kind == EngineKind::Pages)]
    }

    fn chunk_bytes(&self) -> u64 {
        (self.chunk_tokens() * TOKEN_BYTES) as u64
    }

    /// Plays both phases.
    fn play(&self, report: &mut Report) -> anyhow::Result<()> {
        const KINDS: [EngineKind; 3] = [EngineKind::Pool, EngineKind::Pickle, EngineKind::Pages];
        let (max_chunks, engines) = (self.max_chunks(), KINDS.len() * TENANTS.len());
        let l1_bytes = self.server.engine().config().l1_bytes;
        let capacity = (l1_bytes / self.chunk_bytes()) as usize;
        let shared = conversation::shared_chunks(self.chunk_tokens());
        // Engines whose pages the server copies share no objects with the others, so their shared part counts again.
        let needed = TENANTS.len() * (KINDS.len() * (max_chunks - shared) + 2 * shared);
        anyhow::ensure!(
            needed as f64 <= capacity as f64 * MAX_FILL,
            "--turns {}: the first phase may need {needed} chunks, and L1 has {capacity}; give fewer turns or a larger \
             --l1-size-gb",
            self.args.turns
        );
        let groups = KINDS.map(|kind| Group::start(self, kind));
        let mut groups = groups.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        let tenants = TENANTS.len();
        eprintln!("kvtier demo: {tenants} tenants with {engines} engines, one server");
        let half = Duration::from_secs_f64(self.args.seconds / 2.0);

        self.phase("all fits", false, report, &mut groups, |groups, faults| {
            while {
                side_by_side(groups, |group| group.converse(self));
                self.clear(faults);
                self.began.elapsed() < half && !self.context.is_stopped()
            } {}
        });
        // Twice as many conversations as fit, at half of their length on average.
        let at_once = (2 * capacity / engines / (max_chunks / 2).max(1)).max(2);
        let (start, least) = (Instant::now(), l1_bytes * OVERCOMMIT / KINDS.len() as u64);
        let is_enough = |stored| stored >= least && start.elapsed() >= half;
        self.phase(
            "under pressure",
            true,
            report,
            &mut groups,
            |groups, faults| {
                side_by_side(groups, |group| group.overcommit(self, at_once, is_enough));
                self.clear(faults);
            },
        );
        for mut group in groups {
            let name = |operation: &str| group.row_name(operation);
            group.total.report(report, self.began.elapsed(), name);
            group.stop()?;
        }
        Ok(())
    }

    /// Plays a phase, unless the demo was stopped; adds its row. Objects have to be evicted, or must not.
    fn phase(
        &self,
        name: &str,
        evicts: bool,
        report: &mut Report,
        groups: &mut [Group],
        play: impl FnOnce(&mut [Group], &mut Recorder),
    ) {
        if self.context.is_stopped() {
            return;
        }
        let evicted = || self.server.engine().admin().readings().evicted_objects;
        let (before, mut faults) = (evicted(), Recorder::default());
        play(groups, &mut faults);
        let evicted = evicted() - before;
        if evicts != (evicted > 0) && !self.context.is_stopped() {
            faults.failure(|| format!("{evicted} objects were evicted"));
        }
        let (mut all, mut foreign) = (RunOutcome::default(), (0, 0));
        for group in groups {
            let outcome = std::mem::take(&mut group.outcome);
            all.add(outcome.clone());
            group.total.add(outcome);
            let (lookups, retrieves) = std::mem::take(&mut group.foreign);
            foreign = (foreign.0 + lookups, foreign.1 + retrieves);
            faults.add(std::mem::take(&mut group.faults));
        }
        let chunks = |bytes: u64| (bytes / self.chunk_bytes()) as f64;
        let row = faults.row(name, Duration::ZERO);
        report.add(
            row.fact("requests", all.lookups.count() as f64)
                .fact("tokens asked", all.asked_tokens as f64)
                .fact("tokens hit", all.hit_tokens as f64)
                .fact("hit rate", all.hit_rate())
                .fact("chunks stored", chunks(all.stores.bytes))
                .fact("chunks compared", chunks(all.retrieves.bytes))
                .fact("lookups by other tenants", foreign.0 as f64)
                .fact("retrieves refused to other tenants", foreign.1 as f64)
                .fact("evicted objects", evicted as f64),
        );
    }

    /// Plays the part with a second tier: conversations are written there, L1 is emptied, and every prompt has to be retrieved
    /// with its bytes.
    fn recall(&self, report: &mut Report) -> anyhow::Result<()> {
        let mut played = Vec::new();
        for (tenant, number) in TENANTS.into_iter().zip(1..) {
            let mut engine = engine(self, EngineKind::Pages, tenant)?;
            let (turns, tokens) = (self.args.turns, self.chunk_tokens());
            let conversation = Conversation::new(self.args.seed, number, turns);
            let job = conversation.job(tenant, turns as usize - 1, tokens);
            let job = job.context("a conversation has turns")?;
            let request = self.context.request_id();
            // The tier may have a part from an earlier demo.
            let hits = engine.lookup(&job, &request)?;
            if let Some(missed @ [_, ..]) = job.seeds.get(hits..) {
                engine.fill(missed)?;
                engine.store(&job, &request, hits)?;
            }
            engine.connection().end_session(&request)?;
            played.push((engine, job));
        }
        let (mut outcome, is_empty) = (RunOutcome::default(), self.empty_l1()?);
        for (mut engine, job) in played {
            let request = self.context.request_id();
            if is_empty {
                let hits = engine.look_up(&job, &request, Instant::now(), &mut outcome)?;
                let all = job.seeds.len();
                if hits < all {
                    let lookups = &mut outcome.lookups;
                    lookups.failure(|| format!("the tier returned {hits} chunks of {all}"));
                }
                engine.complete(&job, &request, hits, &mut outcome)?;
            }
            engine.close()?;
        }
        let compared = (outcome.retrieves.bytes / self.chunk_bytes()) as f64;
        outcome.report(report, self.began.elapsed(), |name| format!("tier {name}"));
        report.add(Row::of_facts("tier, with L1 emptied").fact("chunks compared", compared));
        Ok(())
    }

    /// Clears L1 until it is empty: objects that the tier has not written stay. False after a signal.
    fn empty_l1(&self) -> anyhow::Result<bool> {
        let began = Instant::now();
        while !self.context.is_stopped() {
            self.server.engine().admin().clear(false);
            let left = self.server.engine().admin().readings().objects;
            if left == 0 {
                return Ok(true);
            }
            anyhow::ensure!(
                began.elapsed() < WRITE_TIMEOUT,
                "the tier has not written {left} objects within {WRITE_TIMEOUT:?}"
            );
            std::thread::sleep(CHECK_INTERVAL);
        }
        Ok(false)
    }

    /// Clears the cache, as `reset_prefix_cache` of vLLM does; nothing is leased any more, so nothing may stay.
    fn clear(&self, faults: &mut Recorder) {
        let clear = || anyhow::Ok(self.context.connect()?.clear(false)?);
        if let Err(error) = clear() {
            return faults.failure(|| format!("the cache could not be cleared: {error}"));
        }
        for ledger in &self.ledgers {
            ledger.started.clear();
            ledger.stored.clear();
        }
        let left = self.server.engine().admin().readings();
        if left.objects + left.used_bytes > 0 {
            let (objects, leased) = (left.objects, left.leased_objects);
            faults.failure(|| format!("{objects} objects stayed after a clear ({leased} leased)"));
        }
    }

    /// The row of what is left in the server after all engines have unregistered: nothing.
    fn leaks(&self) -> Row {
        let (left, mut faults) = (self.server.engine().admin().readings(), Recorder::default());
        for (what, count) in [
            ("engines", left.instances),
            ("sessions", left.sessions),
            ("leased objects", left.leased_objects),
            ("staged bytes", left.staged_bytes),
            ("accounting errors", left.accounting_errors),
        ] {
            if count > 0 {
                faults.failure(|| format!("{count} {what} are left in the server"));
            }
        }
        if let Some(reason) = self.server.health().reason() {
            faults.failure(|| format!("the server is not healthy: {reason}"));
        }
        faults.row("server at the end", Duration::ZERO)
    }
}

/// Runs `serve` for all groups, each on its own thread.
fn side_by_side<F>(groups: &mut [Group], serve: F)
where
    F: Fn(&mut Group) -> anyhow::Result<()> + Sync,
{
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(|| {
                if let Err(error) = serve(group) {
                    group
                        .faults
                        .failure(|| format!("an engine failed: {error:#}"));
                }
            });
        }
    });
}
