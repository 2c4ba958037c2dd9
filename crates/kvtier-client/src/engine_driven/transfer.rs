//! One store or retrieve of a worker that copies by itself, whatever its pages are and however it calls the server.
//!
//! | step | store | retrieve |
//! | --- | --- | --- |
//! | prepare | the server reserves slots | the server leases slots, or sends the chunks pickled |
//! | copy | pages to slots, or to a pickled message | slots or message to pages |
//! | commit | the chunks become readable | the leases end |
//!
//! A transfer that fails after its prepare was sent notifies the server, which then frees the slots at once. Before each
//! chunk, [`TransferServer::check`] decides whether it may still be copied.

use kvtier_memory::{AccessError, ForeignSegment};
use kvtier_proto::descriptor::Dtype;
use kvtier_proto::key::EncodedTokens;
use kvtier_proto::operation::Operation;
use kvtier_proto::pickle::{self, PickleLimits, TensorToWrite};
use kvtier_proto::request::{ABORT_STORE, InstanceId, Request};
use kvtier_proto::response::{ChunkSlot, EngineDriven, PrepareRetrieve, Response, StoreTarget};

use crate::answers;
use crate::error::ClientError;
use crate::key::Key;
use crate::message::ClientReply;

/// The chunks of a store, counted from the start of its range.
pub trait ChunkSource {
    /// Called once, before the first chunk is read.
    ///
    /// # Errors
    /// Why they must not be read (any more).
    fn begin(&mut self) -> Result<(), ClientError> {
        Ok(())
    }

    /// Passes the bytes of a chunk to `put`, in pieces, each with its offset in the chunk.
    ///
    /// # Errors
    /// Those of `put`, and why the chunk cannot be read.
    fn read<P>(&mut self, chunk: usize, put: P) -> Result<(), ClientError>
    where
        P: FnMut(u64, &[u8]) -> Result<(), ClientError>;

    /// Called once, after the last chunk was read.
    fn end(&mut self) {}
}

/// The pages of a retrieve. Chunks are counted from the start of its range.
pub trait ChunkSink {
    /// Writes the bytes of a chunk into its pages: `read` copies those at an offset of the chunk, in any order.
    ///
    /// # Errors
    /// Why the chunk cannot be written; errors of `read` are passed on.
    fn write<R>(&mut self, chunk: usize, read: R) -> Result<(), ClientError>
    where
        R: FnMut(u64, &mut [u8]) -> Result<(), ClientError>;
}

/// The server of a transfer.
pub trait TransferServer {
    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// As [`Connection::call`](crate::Connection::call).
    fn call(
        &mut self,
        request: &Request<'_, EncodedTokens<'_>>,
    ) -> Result<ClientReply, ClientError>;

    /// Sends a request, without waiting, that ends a transfer without success.
    fn notify(&mut self, request: &Request<'_, EncodedTokens<'_>>);

    /// Checks that the next chunk may be copied.
    ///
    /// # Errors
    /// Why the transfer has to be abandoned.
    fn check(&mut self) -> Result<(), ClientError> {
        Ok(())
    }
}

/// Type, shape and size of a worker's chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkFormat {
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: u64,
}

impl ChunkFormat {
    /// The format of chunks of this type and shape.
    ///
    /// # Errors
    /// [`ClientError::Argument`] if they have no bytes, or too many.
    pub fn new(dtype: Dtype, shape: Vec<u64>) -> Result<Self, ClientError> {
        let tensor = TensorToWrite {
            dtype,
            shape: &shape,
        };
        match tensor.byte_len().filter(|bytes| *bytes > 0) {
            Some(bytes) => Ok(Self {
                dtype,
                bytes: bytes as u64,
                shape,
            }),
            None => Err(ClientError::Argument {
                field: "geometry",
                message: format!("a chunk of shape {shape:?} has no bytes, or too many"),
            }),
        }
    }

    /// Bytes per chunk.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn tensor(&self) -> TensorToWrite<'_> {
        TensorToWrite {
            dtype: self.dtype,
            shape: &self.shape,
        }
    }

    fn check_slot(&self, operation: Operation, slot: &ChunkSlot<'_>) -> Result<(), ClientError> {
        if slot.length == self.bytes
            && *slot.shape == *self.shape
            && slot.dtype == self.dtype.name()
        {
            return Ok(());
        }
        Err(ClientError::Unexpected {
            operation,
            message: format!(
                "a slot has {} bytes, shape {:?} and type {}; registered were {} bytes, {:?} and {}",
                slot.length, slot.shape, slot.dtype, self.bytes, self.shape, self.dtype
            ),
        })
    }
}

/// The server's shared pool, as a worker sees it.
#[derive(Debug, Default)]
pub enum SharedPool {
    /// The server has none.
    #[default]
    Absent,
    /// The worker has it mapped.
    Mapped(ForeignSegment),
    /// The worker does not use it: it cannot be opened here, which is the obstacle, or pickling was chosen.
    Unused {
        /// Why it cannot be opened, such as another container or user.
        obstacle: Option<String>,
    },
}

impl SharedPool {
    /// Opens the pool of a registration, unless its chunks are to be pickled.
    #[must_use]
    pub fn open(registered: &EngineDriven<'_>, force_pickle: bool) -> Self {
        if registered.shm_name.is_empty() {
            return Self::Absent;
        }
        if force_pickle {
            return Self::Unused { obstacle: None };
        }
        match ForeignSegment::open_pool(&registered.shm_name, registered.pool_size) {
            Ok(segment) => Self::Mapped(segment),
            Err(error) => Self::Unused {
                obstacle: Some(error.to_string()),
            },
        }
    }

    /// The mapped pool.
    #[must_use]
    pub fn segment(&self) -> Option<&ForeignSegment> {
        match self {
            Self::Mapped(segment) => Some(segment),
            Self::Absent | Self::Unused { .. } => None,
        }
    }
}

/// Whether a retrieve succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retrieval {
    /// All chunks were written into the pages.
    Complete,
    /// Some chunk was not cached; no page was written.
    Miss,
    /// The server leased slots of a pool that is not mapped here; no page was written.
    PoolNotMapped,
}

/// One store or retrieve.
#[derive(Debug, Clone, Copy)]
pub struct EngineDrivenTransfer<'a> {
    /// Format of the chunks.
    pub format: &'a ChunkFormat,
    /// The server's pool.
    pub pool: &'a SharedPool,
    /// Identity and range of the chunks.
    pub key: &'a Key<'a>,
    /// The worker's number.
    pub instance: InstanceId,
    /// Number of chunks in the range.
    pub chunks: usize,
}

impl EngineDrivenTransfer<'_> {
    /// Stores the chunks. Returns the positions of those that the server took; none if it does not say which, since all
    /// were sent pickled.
    ///
    /// # Errors
    /// As [`TransferServer::call`], [`TransferServer::check`] and [`ChunkSource::read`]; [`ClientError::Refused`] if the
    /// server answers the commit with "no"; [`ClientError::Pool`].
    pub fn store(
        &self,
        server: &mut impl TransferServer,
        source: &mut impl ChunkSource,
    ) -> Result<Option<Vec<u64>>, ClientError> {
        let mut prepared = PreparedChunks::new(server, self.commit_store(ABORT_STORE));
        let reply = prepared.server.call(&Request::PrepareStore {
            key: self.key.clone(),
            instance: self.instance,
            skipped_chunks: Vec::new(),
        })?;
        let target = answers::prepare_store(&reply)?.target;
        source.begin()?;
        let (taken, data) = match (target, self.pool.segment()) {
            (Some(target), Some(_)) if target.slots.is_empty() => {
                // All chunks are cached, or there is no free space.
                prepared.end();
                return Ok(Some(Vec::new()));
            }
            (Some(target), Some(pool)) => {
                self.write_slots(&target, pool, prepared.server, source)?;
                (Some(target.chunk_indices), Vec::new())
            }
            _ => (None, self.pickled(prepared.server, source)?),
        };
        source.end();
        let reply = prepared.server.call(&self.commit_store(&data))?;
        let is_committed = answers::truth(&reply)?;
        prepared.end();
        if is_committed {
            Ok(taken)
        } else {
            Err(ClientError::Refused {
                operation: Operation::CommitStore,
            })
        }
    }

    /// Retrieves the chunks, which must have been looked up under the key's request.
    ///
    /// # Errors
    /// As [`TransferServer::call`], [`TransferServer::check`] and [`ChunkSink::write`]; [`ClientError::Refused`] if the
    /// server does not confirm the lease, so that the bytes may be wrong; [`ClientError::Pool`].
    pub fn retrieve(
        &self,
        server: &mut impl TransferServer,
        sink: &mut impl ChunkSink,
    ) -> Result<Retrieval, ClientError> {
        // After a miss as well: the server releases what it has leased.
        let mut prepared = PreparedChunks::new(server, self.commit_retrieve());
        let reply = prepared.server.call(&Request::PrepareRetrieve {
            key: self.key.clone(),
            instance: self.instance,
        })?;
        let retrieval = match reply.response()? {
            Response::PrepareRetrieve(answer) => self.load(&answer, prepared.server, sink)?,
            other => return Err(answers::wrong(&reply, "slots", &other)),
        };
        if retrieval != Retrieval::Complete {
            return Ok(retrieval);
        }
        let server = prepared.end();
        if answers::truth(&server.call(&self.commit_retrieve())?)? {
            Ok(retrieval)
        } else {
            Err(ClientError::Refused {
                operation: Operation::CommitRetrieve,
            })
        }
    }

    fn commit_store<'b>(&'b self, data: &'b [u8]) -> Request<'b, EncodedTokens<'b>> {
        Request::CommitStore {
            key: self.key.clone(),
            instance: self.instance,
            data,
        }
    }

    fn commit_retrieve(&self) -> Request<'_, EncodedTokens<'_>> {
        Request::CommitRetrieve {
            key: self.key.clone(),
            instance: self.instance,
        }
    }

    /// Copies the chunks that the server wants into its slots.
    fn write_slots(
        &self,
        target: &StoreTarget<'_>,
        pool: &ForeignSegment,
        server: &mut impl TransferServer,
        source: &mut impl ChunkSource,
    ) -> Result<(), ClientError> {
        let unexpected = |message: String| ClientError::Unexpected {
            operation: Operation::PrepareStore,
            message,
        };
        let (slots, positions) = (target.slots.len(), target.chunk_indices.len());
        if slots != positions {
            let message = format!("{slots} slots came with {positions} positions");
            return Err(unexpected(message));
        }
        for (slot, &index) in target.slots.iter().zip(&target.chunk_indices) {
            self.format.check_slot(Operation::PrepareStore, slot)?;
            let chunk = usize::try_from(index).ok();
            let chunk = chunk.filter(|chunk| *chunk < self.chunks).ok_or_else(|| {
                unexpected(format!("the server wants chunk {index} of {}", self.chunks))
            })?;
            server.check()?;
            source.read(chunk, |offset, piece| {
                // Beyond it is another object.
                if offset.saturating_add(piece.len() as u64) > slot.length {
                    return Err(unexpected(format!(
                        "chunk {index} has more bytes than its slot, {}",
                        slot.length
                    )));
                }
                pool.write(slot.offset.saturating_add(offset), piece)
                    .map_err(|error| pool_error(pool, &error))
            })?;
        }
        Ok(())
    }

    /// All chunks in one message.
    fn pickled(
        &self,
        server: &mut impl TransferServer,
        source: &mut impl ChunkSource,
    ) -> Result<Vec<u8>, ClientError> {
        let tensors = vec![self.format.tensor(); self.chunks];
        pickle::write_tensors(&tensors, |chunk, out| {
            server.check()?;
            let start = out.len();
            out.resize(start + self.format.bytes as usize, 0);
            let bytes = &mut out[start..];
            source.read(chunk, |offset, piece| {
                bytes[offset as usize..][..piece.len()].copy_from_slice(piece);
                Ok(())
            })
        })
    }

    /// Copies the chunks of a prepared retrieve into the pages.
    fn load(
        &self,
        answer: &PrepareRetrieve<'_>,
        server: &mut impl TransferServer,
        sink: &mut impl ChunkSink,
    ) -> Result<Retrieval, ClientError> {
        if !answer.success {
            return Ok(Retrieval::Miss);
        }
        if !answer.data.is_empty() {
            return self.load_pickled(&answer.data, server, sink);
        }
        let slots = answer.slots.as_deref().unwrap_or_default();
        if slots.is_empty() {
            return Ok(Retrieval::Miss);
        }
        let Some(pool) = self.pool.segment() else {
            return Ok(Retrieval::PoolNotMapped);
        };
        self.check_count(slots.len())?;
        for (chunk, slot) in slots.iter().enumerate() {
            self.format.check_slot(Operation::PrepareRetrieve, slot)?;
            server.check()?;
            sink.write(chunk, |offset, to| {
                pool.read(slot.offset.saturating_add(offset), to)
                    .map_err(|error| pool_error(pool, &error))
            })?;
        }
        Ok(Retrieval::Complete)
    }

    fn load_pickled(
        &self,
        data: &[u8],
        server: &mut impl TransferServer,
        sink: &mut impl ChunkSink,
    ) -> Result<Retrieval, ClientError> {
        let operation = Operation::PrepareRetrieve;
        let tensors = pickle::read_tensors(data, &PickleLimits::default())
            .map_err(|source| ClientError::Reply { operation, source })?;
        self.check_count(tensors.len())?;
        let mut gathered = Vec::new();
        for (chunk, tensor) in tensors.iter().enumerate() {
            if tensor.dtype != self.format.dtype || tensor.shape != self.format.shape {
                return Err(ClientError::Unexpected {
                    operation,
                    message: format!(
                        "chunk {chunk} has shape {:?} and type {}; registered were {:?} and {}",
                        tensor.shape, tensor.dtype, self.format.shape, self.format.dtype
                    ),
                });
            }
            server.check()?;
            let bytes = match tensor.contiguous_bytes() {
                Some(bytes) => bytes,
                None => {
                    gathered.clear();
                    tensor.gather_into(&mut gathered);
                    &gathered
                }
            };
            sink.write(chunk, |offset, to| {
                to.copy_from_slice(&bytes[offset as usize..][..to.len()]);
                Ok(())
            })?;
        }
        Ok(Retrieval::Complete)
    }

    fn check_count(&self, count: usize) -> Result<(), ClientError> {
        if count == self.chunks {
            return Ok(());
        }
        Err(ClientError::Unexpected {
            operation: Operation::PrepareRetrieve,
            message: format!("{count} chunks came, {} were asked for", self.chunks),
        })
    }
}

/// A transfer that the server has prepared, or may have. Dropped before its end, it notifies the server.
struct PreparedChunks<'a, S: TransferServer> {
    server: &'a mut S,
    abort: Option<Request<'a, EncodedTokens<'a>>>,
}

impl<'a, S: TransferServer> PreparedChunks<'a, S> {
    fn new(server: &'a mut S, abort: Request<'a, EncodedTokens<'a>>) -> Self {
        Self {
            server,
            abort: Some(abort),
        }
    }

    /// Marks the transfer as ended: the server knows it, or a commit follows.
    fn end(&mut self) -> &mut S {
        self.abort = None;
        self.server
    }
}

impl<S: TransferServer> Drop for PreparedChunks<'_, S> {
    fn drop(&mut self) {
        if let Some(abort) = &self.abort {
            self.server.notify(abort);
        }
    }
}

fn pool_error(pool: &ForeignSegment, error: &AccessError) -> ClientError {
    ClientError::Pool {
        name: pool.name().to_owned(),
        message: error.to_string(),
    }
}
