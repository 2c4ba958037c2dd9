//! An engine worker of any kind: it looks prompts up, retrieves and compares chunks, and stores them.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use kvtier_client::{
    Connection, EngineDrivenWorker, LmcacheDrivenSpec, LmcacheDrivenWorker, Prompt, Scope,
    Transport,
};

use super::context::{Context, block_tokens, geometry};
use super::record::RunOutcome;
use crate::pattern;

/// The way of an engine's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EngineKind {
    /// The engine copies, into and out of the server's shared pool if there is one.
    Pool,
    /// The engine sends and receives pickled chunks.
    Pickle,
    /// The server copies, out of and into the engine's pages.
    Pages,
}

impl EngineKind {
    /// The kind of engines that copy by themselves, as the arguments want it.
    pub(crate) fn of(context: &Context) -> Self {
        if context.args.pickle {
            Self::Pickle
        } else {
            Self::Pool
        }
    }
}

/// A prompt and the seeds of its whole chunks.
pub(crate) struct PromptJob {
    pub(crate) prompt: Prompt,
    pub(crate) seeds: Vec<u64>,
}

impl PromptJob {
    pub(crate) fn new(tenant: &str, tokens: &[u32], chunk_tokens: usize) -> Self {
        Self {
            prompt: Prompt::new(tokens),
            seeds: pattern::chunk_seeds(tenant, tokens, chunk_tokens),
        }
    }
}

/// Chunks that were copied by one request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moved {
    pub(crate) latency: Duration,
    pub(crate) bytes: u64,
}

enum Worker {
    EngineDriven(EngineDrivenWorker),
    /// Chunks are stored from some blocks, and retrieved into others.
    LmcacheDriven {
        worker: LmcacheDrivenWorker,
        sources: Vec<i64>,
        targets: Vec<i64>,
    },
}

/// A registered worker.
pub(crate) struct Engine {
    worker: Worker,
    /// The chunks of the next store, or the one that was read last.
    buffer: Vec<u8>,
    has_stored: bool,
}

impl Engine {
    /// Registers. A request has at most `max_chunks` chunks.
    pub(crate) fn start(
        context: &Context,
        kind: EngineKind,
        scope: &Scope,
        chunk_bytes: u64,
        max_chunks: u64,
    ) -> anyhow::Result<Self> {
        let worker = match kind {
            EngineKind::Pages => paged(context, scope, chunk_bytes, max_chunks)?,
            kind => Worker::EngineDriven(context.engine_driven(
                scope,
                chunk_bytes,
                kind == EngineKind::Pickle,
            )?),
        };
        Ok(Self {
            worker,
            buffer: Vec::new(),
            has_stored: false,
        })
    }

    /// The actual way of its bytes: without a shared pool, engines that copy by themselves pickle.
    pub(crate) fn kind(&self) -> EngineKind {
        match &self.worker {
            Worker::EngineDriven(worker) => match worker.transport() {
                Transport::SharedPool => EngineKind::Pool,
                Transport::Pickle => EngineKind::Pickle,
            },
            Worker::LmcacheDriven { .. } => EngineKind::Pages,
        }
    }

    /// Name of the row for this operation.
    pub(crate) fn row_name(&self, operation: &str) -> String {
        match self.kind() {
            EngineKind::Pool => format!("engine-driven {operation} (shm)"),
            EngineKind::Pickle => format!("engine-driven {operation} (pickle)"),
            EngineKind::Pages => format!("lmcache-driven {operation}"),
        }
    }

    pub(crate) fn chunk_bytes(&self) -> usize {
        match &self.worker {
            Worker::EngineDriven(worker) => worker.chunk_bytes(),
            Worker::LmcacheDriven { worker, .. } => worker.chunk_bytes(),
        }
    }

    fn chunk_tokens(&self) -> u64 {
        let tokens = match &self.worker {
            Worker::EngineDriven(worker) => worker.chunk_tokens(),
            Worker::LmcacheDriven { worker, .. } => worker.chunk_tokens(),
        };
        tokens as u64
    }

    /// Contiguous bytes in both the pages and the chunk: a block of one plane of one layer, or all of them.
    pub(crate) fn run_bytes(&self, context: &Context) -> Option<usize> {
        let Worker::LmcacheDriven { worker, .. } = &self.worker else {
            return None;
        };
        let all = worker.chunk_bytes() / (2 * worker.spec().layers as usize);
        let blocks = worker.blocks_per_chunk() as usize;
        Some(if context.args.ordered_blocks {
            all
        } else {
            all / blocks
        })
    }

    pub(crate) fn connection(&mut self) -> &mut Connection {
        match &mut self.worker {
            Worker::EngineDriven(worker) => worker.connection(),
            Worker::LmcacheDriven { worker, .. } => worker.connection(),
        }
    }

    /// Chunks of the longest cached prefix.
    pub(crate) fn lookup(&mut self, job: &PromptJob, request: &str) -> anyhow::Result<usize> {
        let hits = match &mut self.worker {
            Worker::EngineDriven(worker) => worker.lookup(&job.prompt, request)?,
            Worker::LmcacheDriven { worker, .. } => worker.lookup(&job.prompt, request)?,
        };
        Ok(hits as usize)
    }

    /// Retrieves the first `chunks` chunks, which a lookup must have found; none for a miss. `wrong` is called for each
    /// that has not the bytes of its seed.
    pub(crate) fn retrieve(
        &mut self,
        job: &PromptJob,
        request: &str,
        chunks: usize,
        mut wrong: impl FnMut(usize),
    ) -> anyhow::Result<Option<Moved>> {
        let range = 0..chunks as u64 * self.chunk_tokens();
        let Self { worker, buffer, .. } = self;
        match worker {
            Worker::EngineDriven(worker) => {
                let mut checking = Duration::ZERO;
                let start = Instant::now();
                let got = worker.retrieve(&job.prompt, range, request, |index, bytes| {
                    let check = Instant::now();
                    if !pattern::matches(job.seeds[index as usize], bytes) {
                        wrong(index as usize);
                    }
                    checking += check.elapsed();
                })?;
                let latency = start.elapsed() - checking;
                Ok(got.map(|got| Moved {
                    latency,
                    bytes: got.bytes,
                }))
            }
            Worker::LmcacheDriven {
                worker, targets, ..
            } => {
                let size = worker.chunk_bytes();
                let per_chunk = worker.blocks_per_chunk() as usize;
                let targets = &targets[..chunks * per_chunk];
                // Old bytes are never taken for retrieved ones.
                buffer.clear();
                buffer.resize(size, 0xA5);
                for blocks in targets.chunks_exact(per_chunk) {
                    worker.write_chunk(blocks, buffer)?;
                }
                let start = Instant::now();
                let retrieved = worker.retrieve(&job.prompt, range, request, targets, 0)?;
                let latency = start.elapsed();
                if !retrieved {
                    return Ok(None);
                }
                for (index, blocks) in targets.chunks_exact(per_chunk).enumerate() {
                    worker.read_chunk(blocks, buffer)?;
                    if !pattern::matches(job.seeds[index], buffer) {
                        wrong(index);
                    }
                }
                let bytes = (chunks * size) as u64;
                Ok(Some(Moved { latency, bytes }))
            }
        }
    }

    /// Prepares a store: writes the chunks of these seeds where it takes them from.
    pub(crate) fn fill(&mut self, seeds: &[u64]) -> anyhow::Result<()> {
        let size = self.chunk_bytes();
        self.buffer.resize(seeds.len() * size, 0);
        for (bytes, seed) in self.buffer.chunks_exact_mut(size).zip(seeds) {
            pattern::fill(*seed, bytes);
        }
        if let Worker::LmcacheDriven {
            worker, sources, ..
        } = &mut self.worker
        {
            let blocks = sources.chunks_exact(worker.blocks_per_chunk() as usize);
            for (blocks, bytes) in blocks.zip(self.buffer.chunks_exact(size)) {
                worker.write_chunk(blocks, bytes)?;
            }
        }
        Ok(())
    }

    /// Stores the chunks from `first` on, which were prepared; none if the server could not. The server may take fewer.
    pub(crate) fn store(
        &mut self,
        job: &PromptJob,
        request: &str,
        first: usize,
    ) -> anyhow::Result<Option<Moved>> {
        let size = self.chunk_bytes();
        let (start, end) = (first as u64, job.seeds.len() as u64);
        let range = start * self.chunk_tokens()..end * self.chunk_tokens();
        self.has_stored = true;
        let start = Instant::now();
        let stored = match &mut self.worker {
            Worker::EngineDriven(worker) => {
                let chunk = |index: u64| &self.buffer[index as usize * size..][..size];
                Some(worker.store(&job.prompt, range, request, chunk)?.bytes)
            }
            Worker::LmcacheDriven {
                worker, sources, ..
            } => {
                let chunks = job.seeds.len() - first;
                let blocks = &sources[..chunks * worker.blocks_per_chunk() as usize];
                let stored = worker.store(&job.prompt, range, request, blocks)?;
                stored.then_some((chunks * size) as u64)
            }
        };
        let latency = start.elapsed();
        Ok(stored.map(|bytes| Moved { latency, bytes }))
    }

    /// Looks a request's prompt up, which was due at `start`; returns the hits.
    pub(crate) fn look_up(
        &mut self,
        job: &PromptJob,
        request: &str,
        start: Instant,
        outcome: &mut RunOutcome,
    ) -> anyhow::Result<usize> {
        let (hits, all) = (self.lookup(job, request)?, job.seeds.len());
        outcome.lookups.success(start.elapsed(), 0);
        if hits > all {
            outcome
                .lookups
                .mismatch(|| format!("{hits} chunks hit of a prompt of {all}"));
        }
        let hits = hits.min(all);
        outcome.asked_tokens += job.prompt.len() as u64;
        outcome.hit_tokens += hits as u64 * self.chunk_tokens();
        Ok(hits)
    }

    /// Completes a request after its lookup: retrieves the hits, stores the rest, and ends the session.
    pub(crate) fn complete(
        &mut self,
        job: &PromptJob,
        request: &str,
        hits: usize,
        outcome: &mut RunOutcome,
    ) -> anyhow::Result<()> {
        // A server with a pool offers it to all engines, and learns from an engine's first pickled chunk that it does not use
        // the pool; until then the engine's retrieves are misses.
        let may_miss = self.kind() == EngineKind::Pickle && !self.has_stored;
        let retrieves = &mut outcome.retrieves;
        if hits > 0 {
            let wrong = |chunk| retrieves.mismatch(|| format!("chunk {chunk} of {request}"));
            match self.retrieve(job, request, hits, wrong)? {
                Some(moved) => retrieves.success(moved.latency, moved.bytes),
                None if may_miss => {}
                None => retrieves.failure(|| format!("{hits} chunks were found, then missed")),
            }
        }
        if hits < job.seeds.len() {
            self.fill(&job.seeds[hits..])?;
            match self.store(job, request, hits)? {
                // A full server may take fewer chunks, which the hit rate shows.
                Some(moved) => outcome.stores.success(moved.latency, moved.bytes),
                None => outcome
                    .stores
                    .failure(|| "a store was answered with false".to_owned()),
            }
        }
        Ok(self.connection().end_session(request)?)
    }

    /// Unregisters.
    pub(crate) fn close(self) -> anyhow::Result<()> {
        let closed = match self.worker {
            Worker::EngineDriven(worker) => worker.close(),
            Worker::LmcacheDriven { worker, .. } => worker.close(),
        };
        closed.map(drop).context("unregistering a worker")
    }
}

/// A worker with the null block and twice the blocks of a request, in random order, like those of an engine's allocator after
/// a while, unless `--ordered-blocks`.
fn paged(
    context: &Context,
    scope: &Scope,
    chunk_bytes: u64,
    max_chunks: u64,
) -> anyhow::Result<Worker> {
    let chunk_tokens = context.chunk_tokens as u64;
    let (layers, hidden) = geometry(chunk_bytes, chunk_tokens)?;
    let (heads, head_size) = match hidden {
        hidden if hidden.is_multiple_of(128) => (hidden / 128, 128),
        hidden => (1, hidden),
    };
    let block = block_tokens(chunk_tokens);
    let half = max_chunks * (chunk_tokens / block);
    let instance = context.instance();
    let (scope, blocks) = (scope.clone(), 1 + 2 * half);
    let mut spec = LmcacheDrivenSpec::new(instance, scope, layers, heads, head_size, blocks);
    spec.block_tokens = block;
    let worker = LmcacheDrivenWorker::register(context.connect()?, spec)
        .context("registering a worker whose pages the server copies")?;
    let shuffled = |first: u64| {
        let mut ids: Vec<i64> = (first as i64..(first + half) as i64).collect();
        if !context.args.ordered_blocks {
            ids.sort_by_key(|id| pattern::mix(context.args.seed ^ *id as u64));
        }
        ids
    };
    Ok(Worker::LmcacheDriven {
        worker,
        sources: shuffled(1),
        targets: shuffled(1 + half),
    })
}
