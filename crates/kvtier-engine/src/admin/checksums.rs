//! Checksums of a worker's own pages, for comparing before a store and after a retrieve.

use kvtier_device::EngineMemory;
use md5::{Digest, Md5};

/// Blocks of one request: a million tokens in blocks of 16. A request reads them all.
const MAX_BLOCKS: usize = 65_536;

/// Why there are no checksums.
#[derive(Debug, thiserror::Error)]
pub enum ChecksumError {
    /// No such worker.
    #[error("instance_id {0} not registered")]
    UnknownInstance(i64),
    /// The worker copies by itself.
    #[error("{0}")]
    NotSupported(String),
    /// A value that is not allowed.
    #[error("{0}")]
    BadRequest(String),
}

fn refused(error: impl ToString) -> ChecksumError {
    ChecksumError::BadRequest(error.to_string())
}

/// MD5 in hex of the blocks of each chunk, as [`Admin::checksums`](super::Admin::checksums) returns them.
pub(super) fn checksums(
    memory: &dyn EngineMemory,
    block_ids: &[i64],
    chunk_size: i64,
    layerwise: bool,
) -> Result<Vec<Vec<String>>, ChecksumError> {
    if block_ids.is_empty() {
        return Err(refused("block_ids is required"));
    }
    if block_ids.len() > MAX_BLOCKS {
        return Err(refused(format!(
            "block_ids has {} ids; allowed: at most {MAX_BLOCKS}",
            block_ids.len()
        )));
    }
    let chunk_size = usize::try_from(chunk_size)
        .ok()
        .filter(|size| *size > 0)
        .ok_or_else(|| refused("chunk_size must be positive"))?;
    let layout = memory.layout();
    let layers: Vec<_> = layout.grouped_layers().collect();
    let mut sums = vec![Vec::new(); if layerwise { layers.len() } else { 1 }];
    for chunk in block_ids.chunks(chunk_size) {
        let mut digest = Md5::new();
        for (index, layer) in layers.iter().enumerate() {
            let group = layout.group_of_layer(*layer).map_err(refused)?;
            let widen = group.dtype_name == "bfloat16";
            memory
                .read_blocks(*layer, chunk, &mut |bytes| {
                    if widen {
                        digest.update(widened(bytes))
                    } else {
                        digest.update(bytes)
                    }
                })
                .map_err(refused)?;
            if layerwise {
                sums[index].push(hex::encode(digest.finalize_reset()));
            }
        }
        if !layerwise {
            sums[0].push(hex::encode(digest.finalize()));
        }
    }
    Ok(sums)
}

/// bfloat16 as float32: the same bits, above sixteen zeros.
fn widened(bytes: &[u8]) -> Vec<u8> {
    bytes
        .chunks_exact(2)
        .flat_map(|value| [0, 0, value[0], value[1]])
        .collect()
}
