//! Workers that copy by themselves: into slots of the server's shared pool, or with pickled messages.

mod transfer;

use std::ops::Range;

use kvtier_proto::descriptor::Dtype;
use kvtier_proto::key::EncodedTokens;
use kvtier_proto::request::{EngineDrivenContext, InstanceId, Request};

pub use transfer::{
    ChunkFormat, ChunkSink, ChunkSource, EngineDrivenTransfer, Retrieval, SharedPool,
    TransferServer,
};

use crate::calls::Keyless;
use crate::connection::Connection;
use crate::error::ClientError;
use crate::key::{Prompt, Scope};
use crate::message::ClientReply;
use crate::worker::{Worker, WorkerSpec};

/// Registration of a worker that copies by itself.
#[derive(Debug, Clone)]
pub struct EngineDrivenSpec {
    /// Number of the worker, different from that of any other worker of the server.
    pub instance: InstanceId,
    /// Model, world and tenant of its keys.
    pub scope: Scope,
    /// Rank of the worker in the world.
    pub worker_id: u32,
    /// Tokens per block; must divide the chunk.
    pub block_tokens: u64,
    /// Number of layers.
    pub layers: u64,
    /// Values of one token in one plane of one layer.
    pub hidden: u64,
    /// Type of the values.
    pub dtype: Dtype,
    /// Whether keys and values share one plane (MLA or fused) instead of having one each.
    pub one_plane: bool,
    /// Token slots per chunk; none means one per token.
    pub slots_per_chunk: Option<u64>,
    /// Whether to send chunks pickled even if the server has a shared pool.
    pub force_pickle: bool,
}

impl EngineDrivenSpec {
    /// Two planes of bfloat16, blocks of 16 tokens.
    #[must_use]
    pub fn new(instance: InstanceId, scope: Scope, layers: u64, hidden: u64) -> Self {
        Self {
            instance,
            scope,
            worker_id: 0,
            block_tokens: 16,
            layers,
            hidden,
            dtype: Dtype::BFloat16,
            one_plane: false,
            slots_per_chunk: None,
            force_pickle: false,
        }
    }

    /// The format of a chunk, of shape `[2, layers, slots, hidden]`, without the 2 for one plane.
    ///
    /// # Errors
    /// [`ClientError::Argument`] for a geometry without bytes.
    pub fn format(&self, chunk_tokens: u64) -> Result<ChunkFormat, ClientError> {
        let slots = self.slots_per_chunk.unwrap_or(chunk_tokens);
        let mut shape = vec![self.layers, slots, self.hidden];
        if !self.one_plane {
            shape.insert(0, 2);
        }
        ChunkFormat::new(self.dtype, shape)
    }

    /// The registration as it is sent.
    ///
    /// # Errors
    /// [`ClientError::Argument`] for numbers that the protocol cannot express.
    pub fn context(&self) -> Result<EngineDrivenContext<'_>, ClientError> {
        let signed = |field, value: u64| {
            i64::try_from(value).map_err(|_| ClientError::Argument {
                field,
                message: format!("{value} is larger than {}", i64::MAX),
            })
        };
        Ok(EngineDrivenContext {
            instance: self.instance,
            model_name: &self.scope.model_name,
            world_size: self.scope.world_size,
            block_size: signed("block_tokens", self.block_tokens)?,
            num_layers: signed("layers", self.layers)?,
            hidden_dim_size: signed("hidden", self.hidden)?,
            dtype: self.dtype.name(),
            use_mla: self.one_plane,
            num_physical_slots: self
                .slots_per_chunk
                .map(|slots| signed("slots_per_chunk", slots))
                .transpose()?,
            chunk_tokens: self.scope.chunk_tokens,
            groups: None,
            takes_pool: true,
        })
    }
}

/// The way of chunks between worker and server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// In place, through the server's shared pool.
    SharedPool,
    /// Pickled, inside messages.
    Pickle,
}

/// Result of a store.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stored {
    /// Positions in the range of the chunks that were sent. The others were cached, or there was no space for them;
    /// pickled stores always send all.
    pub chunks: Vec<u64>,
    /// Bytes of the stored chunks.
    pub bytes: u64,
}

/// Result of a retrieve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retrieved {
    /// Number of chunks.
    pub chunks: u64,
    /// Bytes of the retrieved chunks.
    pub bytes: u64,
}

impl WorkerSpec for EngineDrivenSpec {
    type Memory = Chunks;

    fn instance(&self) -> InstanceId {
        self.instance
    }

    fn scope(&self) -> &Scope {
        &self.scope
    }

    fn worker_id(&self) -> u32 {
        self.worker_id
    }

    fn unregistration(&self) -> Keyless<'static> {
        Keyless::UnregisterEngineDriven {
            instance: self.instance,
        }
    }
}

/// Format of a worker's chunks, and the server's pool if it is mapped.
#[derive(Debug)]
pub struct Chunks {
    format: ChunkFormat,
    pool: SharedPool,
}

/// A registered worker that copies by itself, on a blocking connection. Dropping it unregisters.
pub type EngineDrivenWorker = Worker<EngineDrivenSpec>;

impl EngineDrivenWorker {
    /// Asks for the chunk size and registers. If the server has a pool that cannot be opened here, chunks are pickled, as
    /// with the LMCache 0.5.6 client; see [`EngineDrivenWorker::transport`].
    ///
    /// # Errors
    /// As [`Connection::call`]; [`ClientError::Argument`] for a geometry without bytes.
    pub fn register(
        mut connection: Connection,
        spec: EngineDrivenSpec,
    ) -> Result<Self, ClientError> {
        let chunk_tokens = spec.scope.agree(&mut connection)?;
        let format = spec.format(chunk_tokens as u64)?;
        let registered = connection.register_engine_driven(spec.context()?)?;
        let pool = SharedPool::open(&registered, spec.force_pickle);
        let chunks = Chunks { format, pool };
        Ok(Self::new(connection, spec, chunk_tokens, chunks))
    }

    /// The way of its chunks.
    #[must_use]
    pub fn transport(&self) -> Transport {
        match self.memory.pool.segment() {
            Some(_) => Transport::SharedPool,
            None => Transport::Pickle,
        }
    }

    /// Bytes per chunk.
    #[must_use]
    pub fn chunk_bytes(&self) -> usize {
        self.memory.format.bytes() as usize
    }

    /// Sets the tenant of later stores and retrieves.
    pub fn set_salt(&mut self, salt: impl Into<String>) {
        self.spec.scope.cache_salt = salt.into();
    }

    /// Stores the chunks of `range`, which must consist of whole chunks. `source` is called for each chunk that the server
    /// wants, with its position in the range; it returns the chunk's [`EngineDrivenWorker::chunk_bytes`] bytes.
    ///
    /// # Errors
    /// As [`EngineDrivenTransfer::store`].
    pub fn store<B: AsRef<[u8]>>(
        &mut self,
        prompt: &Prompt,
        range: Range<u64>,
        request_id: &str,
        source: impl FnMut(u64) -> B,
    ) -> Result<Stored, ClientError> {
        let chunks = self.chunks_of(&range)?;
        let mut source = Source {
            source,
            chunk_bytes: self.chunk_bytes(),
        };
        let sent = self.transfer(prompt, range, request_id, |transfer, server| {
            transfer.store(server, &mut source)
        })?;
        let sent = sent.unwrap_or_else(|| (0..chunks).collect());
        Ok(Stored {
            bytes: sent.len() as u64 * self.memory.format.bytes(),
            chunks: sent,
        })
    }

    /// Retrieves the chunks of `range`, which must have been looked up under the same request. `take` is called for
    /// each chunk in order, with its position in the range and its bytes. None means a miss: `take` was not called.
    ///
    /// # Errors
    /// As [`EngineDrivenTransfer::retrieve`].
    pub fn retrieve(
        &mut self,
        prompt: &Prompt,
        range: Range<u64>,
        request_id: &str,
        take: impl FnMut(u64, &[u8]),
    ) -> Result<Option<Retrieved>, ClientError> {
        let chunks = self.chunks_of(&range)?;
        let mut sink = Sink {
            take,
            chunk: vec![0; self.chunk_bytes()],
        };
        let retrieval = self.transfer(prompt, range, request_id, |transfer, server| {
            transfer.retrieve(server, &mut sink)
        })?;
        Ok((retrieval == Retrieval::Complete).then_some(Retrieved {
            chunks,
            bytes: chunks * self.memory.format.bytes(),
        }))
    }

    fn chunks_of(&self, range: &Range<u64>) -> Result<u64, ClientError> {
        whole_chunks(range, self.chunk_tokens as u64)
    }

    fn transfer<R>(
        &mut self,
        prompt: &Prompt,
        range: Range<u64>,
        request_id: &str,
        run: impl FnOnce(EngineDrivenTransfer<'_>, &mut Connection) -> Result<R, ClientError>,
    ) -> Result<R, ClientError> {
        let chunks = self.chunks_of(&range)? as usize;
        let (connection, spec, memory) = self.parts();
        let key = spec
            .scope
            .worker_key(spec.worker_id, prompt, range, request_id);
        let transfer = EngineDrivenTransfer {
            format: &memory.format,
            pool: &memory.pool,
            key: &key,
            instance: spec.instance,
            chunks,
        };
        run(transfer, connection)
    }
}

impl TransferServer for Connection {
    fn call(
        &mut self,
        request: &Request<'_, EncodedTokens<'_>>,
    ) -> Result<ClientReply, ClientError> {
        Self::call(self, request)
    }

    fn notify(&mut self, request: &Request<'_, EncodedTokens<'_>>) {
        Self::notify(self, request);
    }
}

/// Chunks of a store, from a function.
struct Source<F> {
    source: F,
    chunk_bytes: usize,
}

impl<B: AsRef<[u8]>, F: FnMut(u64) -> B> ChunkSource for Source<F> {
    fn read<P>(&mut self, chunk: usize, mut put: P) -> Result<(), ClientError>
    where
        P: FnMut(u64, &[u8]) -> Result<(), ClientError>,
    {
        let bytes = (self.source)(chunk as u64);
        let bytes = bytes.as_ref();
        if bytes.len() != self.chunk_bytes {
            return Err(ClientError::Argument {
                field: "source",
                message: format!(
                    "returned {} bytes, a chunk has {}",
                    bytes.len(),
                    self.chunk_bytes
                ),
            });
        }
        put(0, bytes)
    }
}

/// Chunks of a retrieve, for a function.
struct Sink<F> {
    take: F,
    chunk: Vec<u8>,
}

impl<F: FnMut(u64, &[u8])> ChunkSink for Sink<F> {
    fn write<R>(&mut self, chunk: usize, mut read: R) -> Result<(), ClientError>
    where
        R: FnMut(u64, &mut [u8]) -> Result<(), ClientError>,
    {
        read(0, &mut self.chunk)?;
        (self.take)(chunk as u64, &self.chunk);
        Ok(())
    }
}

/// Number of chunks in a range of tokens.
///
/// # Errors
/// [`ClientError::Argument`] unless it consists of whole chunks.
pub fn whole_chunks(range: &Range<u64>, chunk_tokens: u64) -> Result<u64, ClientError> {
    if range.start > range.end
        || !range.start.is_multiple_of(chunk_tokens)
        || !range.end.is_multiple_of(chunk_tokens)
    {
        return Err(ClientError::Argument {
            field: "range",
            message: format!("{range:?} does not consist of whole chunks of {chunk_tokens} tokens"),
        });
    }
    Ok((range.end - range.start) / chunk_tokens)
}
