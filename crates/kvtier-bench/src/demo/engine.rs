//! An engine worker of any kind: lookup, retrieve, store.

use std::time::{Duration, Instant};

use kvtier_client::{
    ClientError, Connection, EngineDrivenSpec, EngineDrivenWorker, InstanceId, LmcacheDrivenSpec,
    LmcacheDrivenWorker, Prompt, Scope, Transport,
};

use crate::pattern;

/// Model name of the engines that copy by themselves.
pub(super) const MODEL: &str = "kvtier/demo";

/// Model name of the engines whose pages the server copies: their objects have the format of their pages, so they share
/// none with the others.
const PAGES_MODEL: &str = "kvtier/demo-pages";

/// KV geometry: layers, heads, values per head. In bfloat16 a chunk of 256 tokens has 512 KiB.
const LAYERS: u64 = 4;
const HEADS: u64 = 2;
const HEAD_SIZE: u64 = 64;

/// KV bytes per token.
pub(super) const TOKEN_BYTES: u64 = 2 * LAYERS * HEADS * HEAD_SIZE * 2;

/// The way of an engine's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The engine copies, into and out of the server's shared pool.
    Pool,
    /// The engine sends and receives pickled chunks.
    Pickle,
    /// The server copies, out of and into the engine's pages.
    Pages,
}

impl Kind {
    pub(super) const ALL: [Self; 3] = [Self::Pool, Self::Pickle, Self::Pages];

    /// Name of the kind in the report.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Pool => "engine-driven, shared pool",
            Self::Pickle => "engine-driven, pickled",
            Self::Pages => "lmcache-driven",
        }
    }
}

enum Worker {
    EngineDriven(EngineDrivenWorker),
    LmcacheDriven(LmcacheDrivenWorker),
}

/// A registered worker of one tenant.
pub(super) struct Engine {
    worker: Worker,
    /// The chunks of one transfer.
    buffer: Vec<u8>,
    /// Contents of pages before a retrieve, so that old bytes are never taken for retrieved ones.
    blank: Vec<u8>,
    has_stored: bool,
}

impl Engine {
    /// Connects and registers. `max_chunks` is the number of chunks of the longest prompt.
    pub(super) fn start(
        endpoint: &str,
        kind: Kind,
        instance: i64,
        tenant: &str,
        max_chunks: usize,
    ) -> Result<Self, ClientError> {
        let connection = Connection::connect(endpoint)?;
        let model = if kind == Kind::Pages {
            PAGES_MODEL
        } else {
            MODEL
        };
        let (instance, scope) = (InstanceId(instance), Scope::new(model).with_salt(tenant));
        let worker = match kind {
            Kind::Pool | Kind::Pickle => {
                let spec = EngineDrivenSpec {
                    force_pickle: kind == Kind::Pickle,
                    ..EngineDrivenSpec::new(instance, scope, LAYERS, HEADS * HEAD_SIZE)
                };
                Worker::EngineDriven(EngineDrivenWorker::register(connection, spec)?)
            }
            Kind::Pages => {
                let mut spec = LmcacheDrivenSpec::new(instance, scope, LAYERS, HEADS, HEAD_SIZE, 0);
                let mut connection = connection;
                let per_chunk = connection.get_chunk_size()? as u64 / spec.block_tokens;
                // Block 0 is the null block.
                spec.blocks = 1 + per_chunk * max_chunks as u64;
                Worker::LmcacheDriven(LmcacheDrivenWorker::register(connection, spec)?)
            }
        };
        let mut engine = Self {
            worker,
            buffer: Vec::new(),
            blank: Vec::new(),
            has_stored: false,
        };
        engine.blank = vec![0xA5; engine.chunk_bytes()];
        Ok(engine)
    }

    /// The actual way of its bytes: without a shared pool, engines that copy by themselves pickle.
    pub(super) fn kind(&self) -> Kind {
        match &self.worker {
            Worker::EngineDriven(worker) if worker.transport() == Transport::SharedPool => {
                Kind::Pool
            }
            Worker::EngineDriven(_) => Kind::Pickle,
            Worker::LmcacheDriven(_) => Kind::Pages,
        }
    }

    /// Whether hits can be retrieved. A server with a pool offers it to all engines, and learns from an engine's first
    /// pickled chunk that it does not use the pool; until then the engine's retrieves are misses.
    pub(super) fn can_retrieve(&self) -> bool {
        self.kind() != Kind::Pickle || self.has_stored
    }

    pub(super) fn chunk_bytes(&self) -> usize {
        match &self.worker {
            Worker::EngineDriven(worker) => worker.chunk_bytes(),
            Worker::LmcacheDriven(worker) => worker.chunk_bytes(),
        }
    }

    fn chunk_tokens(&self) -> u64 {
        match &self.worker {
            Worker::EngineDriven(worker) => worker.chunk_tokens() as u64,
            Worker::LmcacheDriven(worker) => worker.chunk_tokens() as u64,
        }
    }

    pub(super) fn connection(&mut self) -> &mut Connection {
        match &mut self.worker {
            Worker::EngineDriven(worker) => worker.connection(),
            Worker::LmcacheDriven(worker) => worker.connection(),
        }
    }

    /// Chunks of the prompt's longest cached prefix.
    pub(super) fn lookup(&mut self, prompt: &Prompt, request: &str) -> Result<usize, ClientError> {
        let chunks = match &mut self.worker {
            Worker::EngineDriven(worker) => worker.lookup(prompt, request)?,
            Worker::LmcacheDriven(worker) => worker.lookup(prompt, request)?,
        };
        Ok(chunks as usize)
    }

    /// Retrieves the first `chunks` chunks, which a lookup must have found; returns the latency and the bytes, or none for
    /// a miss.
    pub(super) fn retrieve(
        &mut self,
        prompt: &Prompt,
        request: &str,
        chunks: usize,
    ) -> Result<Option<(Duration, &[u8])>, ClientError> {
        let range = 0..chunks as u64 * self.chunk_tokens();
        self.buffer.clear();
        let buffer = &mut self.buffer;
        match &mut self.worker {
            Worker::EngineDriven(worker) => {
                let began = Instant::now();
                let retrieved = worker.retrieve(prompt, range, request, |_, bytes| {
                    buffer.extend_from_slice(bytes);
                })?;
                let took = began.elapsed();
                Ok(retrieved.map(|_| (took, &*self.buffer)))
            }
            Worker::LmcacheDriven(worker) => {
                let blocks = blocks(worker, 0..chunks);
                let per_chunk = worker.blocks_per_chunk() as usize;
                for blocks in blocks.chunks(per_chunk) {
                    worker.write_chunk(blocks, &self.blank)?;
                }
                let began = Instant::now();
                let retrieved = worker.retrieve(prompt, range, request, &blocks, 0)?;
                let took = began.elapsed();
                if !retrieved {
                    return Ok(None);
                }
                let mut chunk = Vec::new();
                for blocks in blocks.chunks(per_chunk) {
                    worker.read_chunk(blocks, &mut chunk)?;
                    buffer.extend_from_slice(&chunk);
                }
                Ok(Some((took, &*self.buffer)))
            }
        }
    }

    /// Stores the chunks from `first` on, with the bytes of their seeds; returns the latency, and the bytes sent.
    pub(super) fn store(
        &mut self,
        prompt: &Prompt,
        request: &str,
        first: usize,
        seeds: &[u64],
    ) -> Result<(Duration, u64), ClientError> {
        let len = self.chunk_bytes();
        let start = first as u64 * self.chunk_tokens();
        let range = start..start + seeds.len() as u64 * self.chunk_tokens();
        self.buffer.resize(seeds.len() * len, 0);
        for (bytes, seed) in self.buffer.chunks_exact_mut(len).zip(seeds) {
            pattern::fill(*seed, bytes);
        }
        self.has_stored = true;
        let buffer = &self.buffer;
        match &mut self.worker {
            Worker::EngineDriven(worker) => {
                let began = Instant::now();
                let stored = worker.store(prompt, range, request, |index| {
                    &buffer[index as usize * len..][..len]
                })?;
                Ok((began.elapsed(), stored.bytes))
            }
            Worker::LmcacheDriven(worker) => {
                let blocks = blocks(worker, first..first + seeds.len());
                let per_chunk = worker.blocks_per_chunk() as usize;
                for (blocks, bytes) in blocks.chunks(per_chunk).zip(buffer.chunks_exact(len)) {
                    worker.write_chunk(blocks, bytes)?;
                }
                let began = Instant::now();
                if !worker.store(prompt, range, request, &blocks)? {
                    return Err(ClientError::Refused {
                        operation: kvtier_client::proto::operation::Operation::Store,
                    });
                }
                Ok((began.elapsed(), buffer.len() as u64))
            }
        }
    }

    /// Unregisters.
    pub(super) fn stop(self) -> Result<(), ClientError> {
        match self.worker {
            Worker::EngineDriven(worker) => worker.close().map(drop),
            Worker::LmcacheDriven(worker) => worker.close().map(drop),
        }
    }
}

/// The blocks of a prompt's chunks, which follow the null block.
fn blocks(worker: &LmcacheDrivenWorker, chunks: std::ops::Range<usize>) -> Vec<i64> {
    let per_chunk = worker.blocks_per_chunk();
    let block = |chunk: usize| 1 + (chunk as u64 * per_chunk) as i64;
    (block(chunks.start)..block(chunks.end)).collect()
}
