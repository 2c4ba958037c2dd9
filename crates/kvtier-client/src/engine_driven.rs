//! A worker that copies by itself: into slots of the server's shared pool, or with pickled messages.

use std::ops::Range;

use kvtier_memory::{AccessError, ForeignSegment};
use kvtier_proto::descriptor::Dtype;
use kvtier_proto::operation::Operation;
use kvtier_proto::pickle::{self, Limits, TensorToWrite};
use kvtier_proto::request::{EngineDrivenContext, InstanceId, Request};
use kvtier_proto::response::{Response, Slot};

use crate::answers::wrong;
use crate::connection::{Connection, Reply};
use crate::error::ClientError;
use crate::key::{Key, Prompt, Scope};

/// What an [`EngineDrivenWorker`] is.
#[derive(Debug, Clone)]
pub struct EngineDrivenSpec {
    /// Its number; any that no other worker of the server has.
    pub instance: InstanceId,
    /// Model, world and tenant of its keys.
    pub scope: Scope,
    /// Its rank in the world.
    pub worker_id: u32,
    /// Tokens in one block; must divide the chunk.
    pub block_tokens: u64,
    /// Layers.
    pub layers: u64,
    /// Values of one token in one plane of one layer.
    pub hidden: u64,
    /// Type of the values.
    pub dtype: Dtype,
    /// Whether keys and values share one plane (MLA or fused) instead of having one each.
    pub one_plane: bool,
    /// Token slots of one chunk; none means one a token.
    pub slots_per_chunk: Option<u64>,
    /// Whether to send chunks pickled even where the server has a shared pool.
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

    /// Shape of one chunk: `[2, layers, slots, hidden]`, without the 2 for one plane.
    fn shape(&self, chunk_tokens: usize) -> Vec<u64> {
        let slots = self.slots_per_chunk.unwrap_or(chunk_tokens as u64);
        let mut shape = vec![self.layers, slots, self.hidden];
        if !self.one_plane {
            shape.insert(0, 2);
        }
        shape
    }
}

/// How chunks travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// In place, through the server's shared pool.
    SharedPool,
    /// Pickled, inside messages.
    Pickle,
}

/// What a store did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stored {
    /// Which chunks of the range were sent, counted from its start. The rest was cached, or had no room; pickled
    /// stores always send all.
    pub chunks: Vec<u64>,
    /// Bytes of them.
    pub bytes: u64,
}

/// What a retrieve gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retrieved {
    /// Chunks.
    pub chunks: u64,
    /// Bytes of them.
    pub bytes: u64,
}

/// A registered worker that copies by itself. Dropping it unregisters.
#[derive(Debug)]
pub struct EngineDrivenWorker {
    connection: Option<Connection>,
    spec: EngineDrivenSpec,
    chunk_tokens: usize,
    shape: Vec<u64>,
    chunk_bytes: usize,
    pool: Option<ForeignSegment>,
    /// One retrieved chunk.
    buffer: Vec<u8>,
}

impl EngineDrivenWorker {
    /// Asks for the chunk size and registers. When the server has a pool that cannot be opened here, chunks travel
    /// pickled, as with the LMCache 0.5.6 client; [`EngineDrivenWorker::transport`] says so.
    ///
    /// # Errors
    /// As [`Connection::call`]; [`ClientError::Argument`] for a geometry without bytes.
    pub fn register(
        mut connection: Connection,
        spec: EngineDrivenSpec,
    ) -> Result<Self, ClientError> {
        let chunk_tokens = connection.get_chunk_size()?;
        let shape = spec.shape(chunk_tokens);
        let chunk_bytes = TensorToWrite {
            dtype: spec.dtype,
            shape: &shape,
        }
        .byte_len()
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| ClientError::Argument {
            field: "geometry",
            message: format!("a chunk of shape {shape:?} has no bytes, or too many"),
        })?;
        let signed = |field, value: u64| {
            i64::try_from(value).map_err(|_| ClientError::Argument {
                field,
                message: format!("{value} is larger than {}", i64::MAX),
            })
        };
        let context = EngineDrivenContext {
            instance: spec.instance,
            model_name: &spec.scope.model_name,
            world_size: spec.scope.world_size,
            block_size: signed("block_tokens", spec.block_tokens)?,
            num_layers: signed("layers", spec.layers)?,
            hidden_dim_size: signed("hidden", spec.hidden)?,
            dtype: spec.dtype.name(),
            use_mla: spec.one_plane,
            num_physical_slots: spec
                .slots_per_chunk
                .map(|slots| signed("slots_per_chunk", slots))
                .transpose()?,
        };
        let told = connection.register_engine_driven(context)?;
        let pool = if told.shm_name.is_empty() || spec.force_pickle {
            None
        } else {
            ForeignSegment::open_pool(&told.shm_name, told.pool_size).ok()
        };
        Ok(Self {
            connection: Some(connection),
            spec,
            chunk_tokens,
            shape,
            chunk_bytes,
            pool,
            buffer: Vec::new(),
        })
    }

    /// How chunks travel.
    #[must_use]
    pub fn transport(&self) -> Transport {
        match self.pool {
            Some(_) => Transport::SharedPool,
            None => Transport::Pickle,
        }
    }

    /// Tokens in a chunk.
    #[must_use]
    pub fn chunk_tokens(&self) -> usize {
        self.chunk_tokens
    }

    /// Bytes of a chunk.
    #[must_use]
    pub fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// What it was made of.
    #[must_use]
    pub fn spec(&self) -> &EngineDrivenSpec {
        &self.spec
    }

    /// From now on the worker stores and retrieves for this tenant.
    pub fn set_salt(&mut self, salt: impl Into<String>) {
        self.spec.scope.cache_salt = salt.into();
    }

    /// The connection, for other requests of the same process.
    pub fn connection(&mut self) -> &mut Connection {
        self.connection
            .as_mut()
            .expect("only close and drop take the connection")
    }

    /// This worker's key for a range of a prompt.
    #[must_use]
    pub fn key<'a>(
        &'a self,
        prompt: &'a Prompt,
        range: Range<u64>,
        request_id: &'a str,
    ) -> Key<'a> {
        self.spec
            .scope
            .worker_key(self.spec.worker_id, prompt, range, request_id)
    }

    /// Looks a range up with the key of a scheduler; returns hit chunks, counted from the prompt's start.
    ///
    /// # Errors
    /// As [`Connection::lookup_hits`].
    pub fn lookup(&mut self, prompt: &Prompt, request_id: &str) -> Result<u64, ClientError> {
        let scope = self.spec.scope.clone();
        let range = prompt.whole_chunks(self.chunk_tokens);
        let asked = range.end / self.chunk_tokens as u64;
        self.connection()
            .lookup_chunks(&scope.scheduler_key(prompt, range, request_id), asked)
    }

    /// Stores the chunks of `range`, which must consist of whole chunks. `source` is called for each chunk the server
    /// wants, with its position in the range; it gives the [`EngineDrivenWorker::chunk_bytes`] bytes of the chunk.
    ///
    /// # Errors
    /// As [`Connection::call`]; [`ClientError::Refused`] when the commit is answered with false; [`ClientError::Pool`].
    pub fn store<B: AsRef<[u8]>>(
        &mut self,
        prompt: &Prompt,
        range: Range<u64>,
        request_id: &str,
        mut source: impl FnMut(u64) -> B,
    ) -> Result<Stored, ClientError> {
        let chunks = self.chunks_of(&range)?;
        let scope = self.spec.scope.clone();
        let key = scope.worker_key(self.spec.worker_id, prompt, range, request_id);
        let instance = self.spec.instance;
        let target = self.connection().prepare_store(&key, instance)?.target;
        let (sent, data) = match (target, &self.pool) {
            (Some(target), Some(pool)) => {
                if target.slots.len() != target.chunk_indices.len() {
                    return Err(ClientError::Unexpected {
                        operation: Operation::PrepareStore,
                        message: format!(
                            "{} slots came with {} positions",
                            target.slots.len(),
                            target.chunk_indices.len()
                        ),
                    });
                }
                if target.slots.is_empty() {
                    return Ok(Stored::default());
                }
                for (slot, &index) in target.slots.iter().zip(&target.chunk_indices) {
                    self.check_slot(Operation::PrepareStore, slot)?;
                    if index >= chunks {
                        return Err(ClientError::Unexpected {
                            operation: Operation::PrepareStore,
                            message: format!("chunk {index} of {chunks} is wanted"),
                        });
                    }
                    let bytes = source(index);
                    pool.write(slot.offset, self.check_bytes(bytes.as_ref())?)
                        .map_err(|error| pool_error(pool, &error))?;
                }
                (target.chunk_indices, Vec::new())
            }
            // Without slots, or without a pool to write them to, all chunks travel in the message.
            _ => ((0..chunks).collect(), self.pickled(chunks, source)?),
        };
        if !self.connection().commit_store(&key, instance, &data)? {
            return Err(ClientError::Refused {
                operation: Operation::CommitStore,
            });
        }
        Ok(Stored {
            bytes: sent.len() as u64 * self.chunk_bytes as u64,
            chunks: sent,
        })
    }

    /// Retrieves the chunks of `range`, which must have been looked up under the same request. `take` is called for
    /// each chunk in order, with its position in the range and its bytes. None means a miss: nothing was taken.
    ///
    /// # Errors
    /// As [`Connection::call`]; [`ClientError::Pool`].
    pub fn retrieve(
        &mut self,
        prompt: &Prompt,
        range: Range<u64>,
        request_id: &str,
        mut take: impl FnMut(u64, &[u8]),
    ) -> Result<Option<Retrieved>, ClientError> {
        let chunks = self.chunks_of(&range)?;
        let scope = self.spec.scope.clone();
        let key = scope.worker_key(self.spec.worker_id, prompt, range, request_id);
        let instance = self.spec.instance;
        let reply = self.connection().call(&Request::PrepareRetrieve {
            key: key.clone(),
            instance,
        })?;
        let outcome = self.take_chunks(&reply, chunks, &mut take);
        // Also after a miss and after an error: whatever was leased is given back.
        self.connection().commit_retrieve(&key, instance)?;
        Ok(outcome?.then_some(Retrieved {
            chunks,
            bytes: chunks * self.chunk_bytes as u64,
        }))
    }

    /// Unregisters and hands the connection back.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn close(mut self) -> Result<Connection, ClientError> {
        let mut connection = self
            .connection
            .take()
            .expect("only close and drop take the connection");
        connection.unregister_engine_driven(self.spec.instance)?;
        Ok(connection)
    }

    fn chunks_of(&self, range: &Range<u64>) -> Result<u64, ClientError> {
        whole_chunks(range, self.chunk_tokens as u64)
    }

    fn check_slot(&self, operation: Operation, slot: &Slot<'_>) -> Result<(), ClientError> {
        if slot.length == self.chunk_bytes as u64
            && *slot.shape == *self.shape
            && slot.dtype == self.spec.dtype.name()
        {
            return Ok(());
        }
        Err(ClientError::Unexpected {
            operation,
            message: format!(
                "a slot has {} bytes, shape {:?} and type {}; registered were {} bytes, {:?} and {}",
                slot.length, slot.shape, slot.dtype, self.chunk_bytes, self.shape, self.spec.dtype
            ),
        })
    }

    fn check_bytes<'b>(&self, bytes: &'b [u8]) -> Result<&'b [u8], ClientError> {
        if bytes.len() == self.chunk_bytes {
            return Ok(bytes);
        }
        Err(ClientError::Argument {
            field: "source",
            message: format!(
                "gave {} bytes, a chunk has {}",
                bytes.len(),
                self.chunk_bytes
            ),
        })
    }

    fn pickled<B: AsRef<[u8]>>(
        &self,
        chunks: u64,
        mut source: impl FnMut(u64) -> B,
    ) -> Result<Vec<u8>, ClientError> {
        let tensor = TensorToWrite {
            dtype: self.spec.dtype,
            shape: &self.shape,
        };
        pickle::write_tensors(&vec![tensor; chunks as usize], |index, out| {
            out.extend_from_slice(self.check_bytes(source(index as u64).as_ref())?);
            Ok(())
        })
    }

    /// Gives the chunks of a prepared retrieve to `take`; false for a miss.
    fn take_chunks(
        &mut self,
        reply: &Reply,
        chunks: u64,
        take: &mut impl FnMut(u64, &[u8]),
    ) -> Result<bool, ClientError> {
        let answer = match reply.response()? {
            Response::PrepareRetrieve(answer) => answer,
            other => return Err(wrong(reply, "slots", &other)),
        };
        let count = |came: usize| {
            if came as u64 == chunks {
                return Ok(());
            }
            Err(ClientError::Unexpected {
                operation: Operation::PrepareRetrieve,
                message: format!("{came} chunks came, {chunks} were asked for"),
            })
        };
        if !answer.success {
            return Ok(false);
        }
        if !answer.data.is_empty() {
            let tensors =
                pickle::read_tensors(&answer.data, &Limits::default()).map_err(|source| {
                    ClientError::Reply {
                        operation: Operation::PrepareRetrieve,
                        source,
                    }
                })?;
            count(tensors.len())?;
            for (index, tensor) in tensors.iter().enumerate() {
                if tensor.dtype != self.spec.dtype || tensor.shape != self.shape {
                    return Err(ClientError::Unexpected {
                        operation: Operation::PrepareRetrieve,
                        message: format!(
                            "chunk {index} has shape {:?} and type {}; registered were {:?} and {}",
                            tensor.shape, tensor.dtype, self.shape, self.spec.dtype
                        ),
                    });
                }
                match tensor.contiguous_bytes() {
                    Some(bytes) => take(index as u64, bytes),
                    None => {
                        self.buffer.clear();
                        tensor.gather_into(&mut self.buffer);
                        take(index as u64, &self.buffer);
                    }
                }
            }
            return Ok(true);
        }
        let slots = answer.slots.unwrap_or_default();
        let Some(pool) = &self.pool else {
            // Slots that cannot be reached are of no use; the client of LMCache 0.5.6 calls this a miss.
            return Ok(false);
        };
        if slots.is_empty() {
            return Ok(false);
        }
        count(slots.len())?;
        for (index, slot) in slots.iter().enumerate() {
            self.check_slot(Operation::PrepareRetrieve, slot)?;
            self.buffer.clear();
            pool.read_into(slot.offset, self.chunk_bytes as u64, &mut self.buffer)
                .map_err(|error| pool_error(pool, &error))?;
            take(index as u64, &self.buffer);
        }
        Ok(true)
    }
}

impl Drop for EngineDrivenWorker {
    fn drop(&mut self) {
        if let Some(mut connection) = self.connection.take() {
            // Sent, not waited for: the server may be the reason for the drop.
            if let Ok(ticket) = connection.send::<Vec<u32>>(&Request::UnregisterEngineDriven {
                instance: self.spec.instance,
            }) {
                connection.forget(ticket);
            }
        }
    }
}

fn pool_error(pool: &ForeignSegment, error: &AccessError) -> ClientError {
    ClientError::Pool {
        name: pool.name().to_owned(),
        message: error.to_string(),
    }
}

/// Chunks of a range of tokens, which must consist of whole ones.
pub(crate) fn whole_chunks(range: &Range<u64>, chunk_tokens: u64) -> Result<u64, ClientError> {
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
