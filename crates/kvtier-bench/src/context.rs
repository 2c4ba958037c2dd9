//! Context of all scenarios: the server, names unique to the run, pacing, and the stop flag.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvtier_client::proto::descriptor::Dtype;
use kvtier_client::{
    Connection, EngineDrivenSpec, EngineDrivenWorker, InstanceId, Options, Prompt, Scope,
};

use super::args::LoadArgs;
use super::record::Recorder;
use crate::cli::address::expect_listener;
use crate::pattern;

/// Context of one run.
pub(crate) struct Context {
    pub(crate) args: LoadArgs,
    /// Address of the server.
    pub(crate) url: String,
    /// Tokens per chunk of the server.
    pub(crate) chunk_tokens: usize,
    /// Part of all names of this run, so that chunks of earlier runs never hit.
    run: u64,
    pub(crate) stop: Arc<AtomicBool>,
    instances: AtomicI64,
    requests: AtomicU64,
}

impl Context {
    /// Asks the server for its chunk size. A server that does not answer ends the run here.
    pub(crate) fn new(args: LoadArgs, stop: Arc<AtomicBool>) -> anyhow::Result<Self> {
        let url = args.url().to_owned();
        expect_listener(&url, args.timeout)?;
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let nanos = since.map_or(0, |span| span.as_nanos() as u64);
        let run = pattern::mix(nanos ^ (u64::from(std::process::id()) << 48));
        let mut context = Self {
            args,
            url,
            chunk_tokens: 0,
            run,
            stop,
            // Outside the range of process ids, which real workers use.
            instances: AtomicI64::new((1 << 40) | ((run >> 24) as i64 & 0xff_ffff_f000)),
            requests: AtomicU64::new(0),
        };
        context.chunk_tokens = context.connect()?.get_chunk_size()?;
        Ok(context)
    }

    /// A new connection.
    pub(crate) fn connect(&self) -> anyhow::Result<Connection> {
        let options = Options {
            timeout: self.args.timeout,
            ..Options::default()
        };
        Ok(Connection::connect_with(&self.url, options)?)
    }

    /// Model and tenant of one scenario. The tenant is unique to the run.
    pub(crate) fn scope(&self, scenario: &str) -> Scope {
        Scope::new(format!("kvtier-bench-{scenario}")).with_salt(format!("bench-{:016x}", self.run))
    }

    /// An unused instance id.
    pub(crate) fn instance(&self) -> InstanceId {
        InstanceId(self.instances.fetch_add(1, Ordering::Relaxed))
    }

    /// An unused request id.
    pub(crate) fn request_id(&self) -> String {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        format!("bench-{:016x}-{number}", self.run)
    }

    /// Random tokens, the same for the same seed and number.
    pub(crate) fn tokens(&self, number: u64, count: usize) -> Vec<u32> {
        pattern::tokens(pattern::mix(self.args.seed ^ pattern::mix(number)), count)
    }

    /// Whether a signal has stopped the run.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// A registered worker with small chunks, for scenarios that do not measure copies.
    pub(crate) fn small_worker(&self, scope: &Scope) -> anyhow::Result<EngineDrivenWorker> {
        self.engine_driven(scope, self.args.small_chunk_bytes, self.args.pickle)
    }

    /// A registered worker that copies by itself, with chunks of this size.
    pub(crate) fn engine_driven(
        &self,
        scope: &Scope,
        chunk_bytes: u64,
        force_pickle: bool,
    ) -> anyhow::Result<EngineDrivenWorker> {
        let (layers, hidden) = geometry(chunk_bytes, self.chunk_tokens as u64)?;
        let mut spec = EngineDrivenSpec::new(self.instance(), scope.clone(), layers, hidden);
        spec.dtype = Dtype::BFloat16;
        spec.force_pickle = force_pickle;
        spec.block_tokens = block_tokens(self.chunk_tokens as u64);
        EngineDrivenWorker::register(self.connect()?, spec).context(
            "registering a worker that copies by itself (LMCache's server takes such workers only with \
             `--supported-transfer-mode auto`)",
        )
    }

    /// Runs the requests of one client of a latency scenario; returns their results, and the time from the first measured one.
    pub(crate) fn measure(
        &self,
        name: &str,
        mut request: impl FnMut(Turn, &mut Recorder) -> anyhow::Result<()>,
    ) -> anyhow::Result<(Recorder, Duration)> {
        let bar = self.bar(name, self.bar_total());
        let (mut recorder, mut pace) = (Recorder::default(), self.pace(&bar));
        while let Some(turn) = pace.next() {
            request(turn, &mut recorder)?;
        }
        bar.finish_and_clear();
        Ok((recorder, pace.measured()))
    }

    /// The progress bar of a scenario, on a terminal only.
    pub(crate) fn bar(&self, name: &str, total: u64) -> ProgressBar {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{msg:24} [{bar:40}] {percent:>3} % {elapsed}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style.progress_chars("=> "));
        bar.set_message(name.to_owned());
        bar
    }

    /// The loop of one client of a latency scenario.
    pub(crate) fn pace(&self, bar: &ProgressBar) -> Pace<'_> {
        Pace::new(self, bar.clone(), self.args.rate)
    }

    /// Length of a latency scenario's bar: requests or milliseconds.
    pub(crate) fn bar_total(&self) -> u64 {
        match self.args.requests {
            Some(requests) => requests,
            None => self.args.duration.as_millis() as u64,
        }
    }
}

/// Layers, and values per token, of chunks of this size with two planes of bfloat16.
pub(crate) fn geometry(chunk_bytes: u64, chunk_tokens: u64) -> anyhow::Result<(u64, u64)> {
    let row = 4 * chunk_tokens;
    let values = chunk_bytes / row;
    anyhow::ensure!(
        values > 0 && chunk_bytes.is_multiple_of(row),
        "a chunk of {chunk_bytes} bytes is not possible: with the server's {chunk_tokens} tokens per chunk, allowed are \
         multiples of {row} bytes"
    );
    let layers = [4, 2, 1]
        .into_iter()
        .find(|layers| values.is_multiple_of(*layers))
        .unwrap_or(1);
    Ok((layers, values / layers))
}

/// Tokens per block: 16 as in vLLM, or a smaller divisor of the chunk.
pub(crate) fn block_tokens(chunk_tokens: u64) -> u64 {
    [16, 8, 4, 2]
        .into_iter()
        .find(|block| chunk_tokens.is_multiple_of(*block))
        .unwrap_or(1)
}

/// The loop of one client: its end, the time of each request, and the warm-up.
pub(crate) struct Pace<'c> {
    context: &'c Context,
    bar: ProgressBar,
    /// Requests left, and the number of them that are measured; the others warm up.
    requests: Option<(u64, u64)>,
    measured_from: Instant,
    end: Instant,
    interval: Option<Duration>,
    due: Instant,
    done: u64,
    first_measured: Option<Instant>,
}

impl<'c> Pace<'c> {
    /// A loop without end, until the run is stopped; every request is measured.
    pub(crate) fn endless(context: &'c Context, rate: Option<f64>) -> Self {
        let now = Instant::now();
        let mut pace = Self::new(context, ProgressBar::hidden(), rate);
        pace.requests = None;
        pace.measured_from = now;
        // Longer than any run; not so long that the clock overflows.
        pace.end = now + Duration::from_secs(100 * 365 * 86_400);
        pace
    }

    fn new(context: &'c Context, bar: ProgressBar, rate: Option<f64>) -> Self {
        let now = Instant::now();
        let warm_up = context.args.duration / 10;
        Self {
            context,
            bar,
            requests: context
                .args
                .requests
                .map(|wanted| (wanted + (wanted / 10).min(100), wanted)),
            measured_from: now + warm_up,
            end: now + warm_up + context.args.duration,
            interval: rate.map(|rate| Duration::from_secs_f64(1.0 / rate)),
            due: now,
            done: 0,
            first_measured: None,
        }
    }

    /// Begins later by `part` of the interval between two requests, so that clients do not all send at once.
    pub(crate) fn shifted(mut self, part: f64) -> Self {
        self.due += self.interval.unwrap_or_default().mul_f64(part);
        self
    }

    /// Waits until the next request is due; none at the end of the loop.
    pub(crate) fn next(&mut self) -> Option<Turn> {
        if self.context.is_stopped() {
            return None;
        }
        let now = Instant::now();
        let measured = match &mut self.requests {
            Some((0, _)) => return None,
            Some((left, wanted)) => {
                *left -= 1;
                *left < *wanted
            }
            None if now >= self.end => return None,
            None => now >= self.measured_from,
        };
        self.done += 1;
        if measured && self.first_measured.is_none() {
            self.first_measured = Some(now);
        }
        if self.requests.is_some() {
            self.bar.inc(u64::from(measured));
        } else {
            let position = now.saturating_duration_since(self.measured_from);
            self.bar.set_position(position.as_millis() as u64);
        }
        let Some(interval) = self.interval else {
            return Some(Turn {
                due: None,
                measured,
                number: self.done,
            });
        };
        let due = self.due;
        self.due += interval;
        if let Some(early) = due.checked_duration_since(now) {
            std::thread::sleep(early);
        }
        Some(Turn {
            due: Some(due),
            measured,
            number: self.done,
        })
    }

    /// Time since the first measured request.
    pub(crate) fn measured(&self) -> Duration {
        self.first_measured
            .map_or(Duration::ZERO, |first| first.elapsed())
    }
}

/// One request of a loop.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turn {
    due: Option<Instant>,
    /// Whether it is measured; the first ones warm up.
    pub(crate) measured: bool,
    /// Counted from 1.
    pub(crate) number: u64,
}

impl Turn {
    /// The start of its latency: when it was due, or now.
    pub(crate) fn start(&self) -> Instant {
        self.due.unwrap_or_else(Instant::now)
    }
}

/// Stores a prompt's chunks and waits until a lookup finds all of them (LMCache's server answers a store some time
/// before its chunks can be retrieved).
pub(crate) fn make_resident(
    worker: &mut EngineDrivenWorker,
    context: &Context,
    tokens: &[u32],
) -> anyhow::Result<Prompt> {
    let chunk_tokens = worker.chunk_tokens();
    let prompt = Prompt::new(tokens);
    let range = prompt.whole_chunks(chunk_tokens);
    let chunks = range.end / chunk_tokens as u64;
    let seeds = pattern::chunk_seeds("", tokens, chunk_tokens);
    let size = worker.chunk_bytes();
    let request = context.request_id();
    let stored = worker.store(&prompt, range.clone(), &request, |index| {
        pattern::chunk(seeds[index as usize], size)
    })?;
    worker.connection().end_session(&request)?;
    let deadline = Instant::now() + context.args.timeout;
    loop {
        let request = context.request_id();
        let hits = worker.lookup(&prompt, &request)?;
        let scope = worker.spec().scope.clone();
        let connection = worker.connection();
        connection.free_lookup_locks(&scope.scheduler_key(&prompt, range.clone(), &request))?;
        connection.end_session(&request)?;
        if hits == chunks {
            return Ok(prompt);
        }
        anyhow::ensure!(
            Instant::now() < deadline,
            "a prompt of {chunks} chunks was stored ({} were taken), but {:?} later a lookup finds {hits}; does the \
             server have space for it?",
            stored.chunks.len(),
            context.args.timeout
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The result of a thread; its panic continues here.
pub(crate) fn joined<T>(outcome: std::thread::Result<anyhow::Result<T>>) -> anyhow::Result<T> {
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
