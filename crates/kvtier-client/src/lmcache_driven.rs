//! Workers whose pages the server copies: KV tensors in a POSIX segment.

use std::ops::Range;

use kvtier_memory::OwnSegment;
use kvtier_proto::descriptor::{CpuShm, Dtype, TensorDescriptor, TensorMetadata};
use kvtier_proto::request::{
    EngineGroupInfo, EngineType, HELD_BLOCKS, InstanceId, KvLayoutName, LayoutHints, Registration,
};

use crate::calls::Keyless;
use crate::connection::Connection;
use crate::engine_driven::whole_chunks;
use crate::error::ClientError;
use crate::key::{Prompt, Scope};
use crate::worker::{Worker, WorkerSpec};

/// Registration of a worker whose pages the server copies: per layer a tensor `[2, blocks, block_tokens, heads,
/// head_size]`, one after another in one segment.
#[derive(Debug, Clone)]
pub struct LmcacheDrivenSpec {
    /// Number of the worker, different from that of any other worker of the server.
    pub instance: InstanceId,
    /// Model, world and tenant of its keys.
    pub scope: Scope,
    /// Rank of the worker in the world.
    pub worker_id: u32,
    /// Number of layers.
    pub layers: u64,
    /// Number of blocks. Block 0 is the null block of engines, whose contents are never stored.
    pub blocks: u64,
    /// Tokens per block; must divide the chunk.
    pub block_tokens: u64,
    /// Number of KV heads.
    pub heads: u64,
    /// Values per head.
    pub head_size: u64,
    /// Type of the values.
    pub dtype: Dtype,
    /// Tokens of the layers' sliding window; `None` is full attention.
    pub window_tokens: Option<i64>,
    /// Whether the layers keep a state instead of the KV of every token.
    pub recurrent_state: bool,
    /// Whether no block is changed while it is stored, and -1 stands for blocks that the worker does not have.
    pub holds_blocks: bool,
}

impl LmcacheDrivenSpec {
    /// bfloat16, blocks of 16 tokens.
    #[must_use]
    pub fn new(
        instance: InstanceId,
        scope: Scope,
        layers: u64,
        heads: u64,
        head_size: u64,
        blocks: u64,
    ) -> Self {
        Self {
            instance,
            scope,
            worker_id: 0,
            layers,
            blocks,
            block_tokens: 16,
            heads,
            head_size,
            dtype: Dtype::BFloat16,
            window_tokens: None,
            recurrent_state: false,
            holds_blocks: false,
        }
    }

    /// Bytes of one block in one plane of one layer.
    fn piece_bytes(&self) -> Option<u64> {
        self.block_tokens
            .checked_mul(self.heads)?
            .checked_mul(self.head_size)?
            .checked_mul(self.dtype.item_size())
    }

    fn segment_bytes(&self) -> Option<u64> {
        self.piece_bytes()?
            .checked_mul(self.blocks)?
            .checked_mul(2)?
            .checked_mul(self.layers)
    }
}

impl WorkerSpec for LmcacheDrivenSpec {
    type Memory = Pages;

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
        Keyless::UnregisterKvCache {
            instance: self.instance,
        }
    }
}

/// Pages of a worker that the server copies.
#[derive(Debug)]
pub struct Pages {
    segment: OwnSegment,
    piece_bytes: u64,
}

/// A registered worker whose pages the server copies. Dropping it unregisters and removes its segment.
pub type LmcacheDrivenWorker = Worker<LmcacheDrivenSpec>;

impl LmcacheDrivenWorker {
    /// Asks for the chunk size, creates the segment and registers it.
    ///
    /// # Errors
    /// As [`Connection::call`]; [`ClientError::Segment`]; [`ClientError::Argument`] for a geometry without bytes, or
    /// blocks that do not divide the chunk.
    pub fn register(
        mut connection: Connection,
        spec: LmcacheDrivenSpec,
    ) -> Result<Self, ClientError> {
        let chunk_tokens = spec.scope.agree(&mut connection)?;
        if spec.block_tokens == 0 || !(chunk_tokens as u64).is_multiple_of(spec.block_tokens) {
            return Err(ClientError::Argument {
                field: "block_tokens",
                message: format!(
                    "{} does not divide the chunk of {chunk_tokens} tokens",
                    spec.block_tokens
                ),
            });
        }
        let (Some(piece_bytes), Some(bytes)) = (spec.piece_bytes(), spec.segment_bytes()) else {
            return Err(ClientError::Argument {
                field: "geometry",
                message: "the tensors have more than 2^64 bytes".to_owned(),
            });
        };
        let segment = OwnSegment::create(bytes)?;
        connection.register_kv_cache(registration(&spec, &segment, bytes))?;
        let pages = Pages {
            segment,
            piece_bytes,
        };
        Ok(Self::new(connection, spec, chunk_tokens, pages))
    }

    /// Bytes per chunk.
    #[must_use]
    pub fn chunk_bytes(&self) -> usize {
        (self.memory.piece_bytes * self.blocks_per_chunk() * 2 * self.spec.layers) as usize
    }

    /// Blocks per chunk.
    #[must_use]
    pub fn blocks_per_chunk(&self) -> u64 {
        self.chunk_tokens as u64 / self.spec.block_tokens
    }

    /// Name of the worker's segment, with its slash.
    #[must_use]
    pub fn segment_name(&self) -> &str {
        self.memory.segment.name()
    }

    /// Writes a chunk into blocks. `bytes` is `[2, layers, chunk tokens, heads * head_size]`, row-major, as the
    /// server keeps it.
    ///
    /// # Errors
    /// [`ClientError::Argument`] for other lengths or block ids, [`ClientError::Access`].
    pub fn write_chunk(&mut self, blocks: &[i64], bytes: &[u8]) -> Result<(), ClientError> {
        if bytes.len() != self.chunk_bytes() {
            return Err(ClientError::Argument {
                field: "bytes",
                message: format!("{} bytes, a chunk has {}", bytes.len(), self.chunk_bytes()),
            });
        }
        let offsets = self.pieces(blocks)?;
        for (offset, piece) in offsets
            .into_iter()
            .zip(bytes.chunks_exact(self.memory.piece_bytes as usize))
        {
            self.memory.segment.as_segment().write(offset, piece)?;
        }
        Ok(())
    }

    /// Replaces the contents of `buffer` by the chunk in `blocks`, laid out as for
    /// [`LmcacheDrivenWorker::write_chunk`].
    ///
    /// # Errors
    /// [`ClientError::Argument`] for other block ids, [`ClientError::Access`].
    pub fn read_chunk(&self, blocks: &[i64], buffer: &mut Vec<u8>) -> Result<(), ClientError> {
        buffer.clear();
        for offset in self.pieces(blocks)? {
            self.memory
                .segment
                .as_segment()
                .read_into(offset, self.memory.piece_bytes, buffer)?;
        }
        Ok(())
    }

    /// Stores all blocks of `range`, which must consist of whole chunks. False means a fatal error.
    ///
    /// # Errors
    /// As [`Connection::store`].
    pub fn store(
        &mut self,
        prompt: &Prompt,
        range: Range<u64>,
        request_id: &str,
        blocks: &[i64],
    ) -> Result<bool, ClientError> {
        whole_chunks(&range, self.chunk_tokens as u64)?;
        let (connection, spec, _) = self.parts();
        let key = spec
            .scope
            .worker_key(spec.worker_id, prompt, range, request_id);
        connection.store(&key, spec.instance, &[blocks.to_vec()])
    }

    /// Retrieves the chunks of `range`, which must have been looked up under the same request, into blocks, except the
    /// blocks of the first `skip_first_n_tokens`. False means that some chunk was not cached.
    ///
    /// # Errors
    /// As [`Connection::retrieve`].
    pub fn retrieve(
        &mut self,
        prompt: &Prompt,
        range: Range<u64>,
        request_id: &str,
        blocks: &[i64],
        skip_first_n_tokens: u64,
    ) -> Result<bool, ClientError> {
        whole_chunks(&range, self.chunk_tokens as u64)?;
        let (connection, spec, _) = self.parts();
        let key = spec
            .scope
            .worker_key(spec.worker_id, prompt, range, request_id);
        let blocks = [blocks.to_vec()];
        connection.retrieve(&key, spec.instance, &blocks, skip_first_n_tokens)
    }

    /// Offsets in the segment of all pieces of a chunk, in the order of the chunk's bytes.
    fn pieces(&self, blocks: &[i64]) -> Result<Vec<u64>, ClientError> {
        let allowed = 0..self.spec.blocks as i64;
        if blocks.len() as u64 != self.blocks_per_chunk()
            || blocks.iter().any(|block| !allowed.contains(block))
        {
            return Err(ClientError::Argument {
                field: "blocks",
                message: format!(
                    "{blocks:?} are not {} blocks in {allowed:?}",
                    self.blocks_per_chunk()
                ),
            });
        }
        let plane = self.memory.piece_bytes * self.spec.blocks;
        let mut offsets = Vec::with_capacity(blocks.len() * 2 * self.spec.layers as usize);
        for kv in 0..2 {
            for layer in 0..self.spec.layers {
                let start = (layer * 2 + kv) * plane;
                offsets.extend(
                    blocks
                        .iter()
                        .map(|&block| start + block as u64 * self.memory.piece_bytes),
                );
            }
        }
        Ok(offsets)
    }
}

fn registration<'a>(
    spec: &'a LmcacheDrivenSpec,
    segment: &OwnSegment,
    bytes: u64,
) -> Registration<'a> {
    let shape = [
        2,
        spec.blocks,
        spec.block_tokens,
        spec.heads,
        spec.head_size,
    ];
    let mut stride = [1; 5];
    for axis in (0..4).rev() {
        stride[axis] = stride[axis + 1] * shape[axis + 1];
    }
    let layer_values = stride[0] * shape[0];
    let tensors = (0..spec.layers)
        .map(|layer| {
            TensorDescriptor::CpuShm(CpuShm {
                shm_name: segment.name().to_owned(),
                nbytes: bytes,
                metadata: TensorMetadata {
                    dtype: spec.dtype,
                    shape: shape.to_vec(),
                    stride: stride.to_vec(),
                    storage_offset: layer * layer_values,
                    device_uuid: "cpu".to_owned(),
                },
            })
        })
        .collect();
    Registration {
        instance: spec.instance,
        tensors,
        model_name: &spec.scope.model_name,
        world_size: spec.scope.world_size,
        engine: EngineType::Vllm,
        hints: LayoutHints {
            kv_layout: Some(KvLayoutName::Nhd),
            held_blocks: spec.holds_blocks.then_some(HELD_BLOCKS),
            chunk_tokens: spec.scope.chunk_tokens,
            ..LayoutHints::default()
        },
        groups: vec![EngineGroupInfo {
            engine_group_id: 0,
            layer_indices: (0..spec.layers as i64).collect(),
            tokens_per_block: spec.block_tokens as i64,
            sw_size_tokens: spec.window_tokens.unwrap_or(-1),
            extra_object_group_tag: 0,
            recurrent_state: spec.recurrent_state,
        }],
    }
}
