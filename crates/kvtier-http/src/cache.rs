//! Routes that act on the cache: clear it, and checksum an engine's pages.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Extension;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::Semaphore;
use utoipa::ToSchema;

use super::audit::{Audited, Begun, audited};
use super::body::{TierName, optional};
use super::payload::Payload;
use super::{ApiError, ApiState, DetailBody, JsonAnswer, detail, engine, run_blocking};
use kvtier_engine::ChecksumError;

/// Checksums read every byte of their blocks, so one request runs at a time.
static CHECKSUMS: Semaphore = Semaphore::const_new(1);

/// Objects to drop.
#[derive(Deserialize, ToSchema)]
struct Clear {
    /// Only `l1` can be cleared as a whole.
    #[serde(default = "TierName::l1")]
    #[schema(value_type = Option<String>)]
    tier: TierName,
    /// Whether leased objects are dropped too; `false` by default.
    force: Option<bool>,
}

/// Result of a clear.
#[derive(Serialize, ToSchema)]
pub(super) struct ClearResult {
    /// Always `ok`.
    status: &'static str,
    /// What was dropped.
    cleared: Cleared,
}

/// Dropped objects.
#[derive(Clone, Copy, Serialize, ToSchema)]
struct Cleared {
    /// Always `l1`.
    tier: &'static str,
    /// Dropped objects.
    objects: usize,
    /// Bytes of the dropped objects.
    bytes: u64,
    /// Objects kept because of a lease.
    kept: usize,
}

/// Drops the objects of L1: those without a lease, or all of them with `force`.
///
/// A forced clear hides leased objects at once; their memory is freed when the last lease ends, so a transfer in flight
/// still reads right bytes.
#[utoipa::path(post, path = "/cache/clear", request_body = Option<Clear>, responses(
    (status = 200, description = "Cleared", body = ClearResult),
    (status = 400, description = "That tier cannot be cleared", body = DetailBody),
    (status = 422, description = "Body of the wrong shape", body = DetailBody),
))]
pub(super) async fn clear(
    api: ApiState,
    Extension(begun): Extension<Begun>,
    body: Payload,
) -> Result<Audited<ClearResult>, ApiError> {
    let read = body.read(optional::<Clear>);
    let Clear { tier, force } = read.await??;
    let (tier, force) = (tier.0, force.unwrap_or(false));
    if tier != "l1" {
        let text = format!("tier '{tier}' not supported; only 'l1'");
        return Err(detail(StatusCode::BAD_REQUEST, text));
    }
    let engine = Arc::clone(engine(&api)?);
    let did = format!("force {force}");
    begun.set(&did);
    let cleared = run_blocking(move || engine.admin().clear(force)).await?;
    let cleared = Cleared {
        tier,
        objects: cleared.objects,
        bytes: cleared.bytes,
        kept: cleared.kept,
    };
    let did = format!("{did}: {}", json!(cleared));
    let status = "ok";
    Ok(audited(did, ClearResult { status, cleared }))
}

/// Pages to checksum.
#[derive(Deserialize, ToSchema)]
struct ChecksumRequest {
    /// The worker; 0 by default.
    instance_id: Option<i64>,
    /// Blocks of its pages.
    #[schema(required = true)]
    block_ids: Option<Vec<i64>>,
    /// Block ids per checksum.
    #[schema(required = true)]
    chunk_size: Option<i64>,
    /// Whether each layer has checksums of its own; `false` by default.
    layerwise: Option<bool>,
}

/// MD5 checksums of pages.
#[derive(Serialize, ToSchema)]
pub(super) struct Checksums {
    /// Always `success`.
    status: &'static str,
    /// Block ids per checksum.
    chunk_size: i64,
    /// Number of checksums, per layer with `layerwise`.
    num_chunks: usize,
    /// Hexadecimal digits of the checksums.
    chunk_checksums: ChunkChecksums,
    /// Whether each layer has checksums of its own.
    layerwise: bool,
    /// Runs of consecutive ids; one single run is written without a list around it.
    block_id_ranges: Vec<BlockIds>,
}

/// Checksums in the order of the block ids.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
enum ChunkChecksums {
    /// Over all layers.
    OfAllLayers(Vec<String>),
    /// By layer, as in `layer_0`.
    Layerwise(BTreeMap<String, Vec<String>>),
}

/// Block ids.
#[derive(Debug, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
enum BlockIds {
    /// A single one.
    One(i64),
    /// The first and the last one of a run.
    Run([i64; 2]),
}

/// MD5 of an engine's own KV blocks, to compare before a store and after a retrieve.
///
/// Every `chunk_size` block ids make one checksum over the blocks of each layer in layer order; bfloat16 counts as float32.
#[utoipa::path(post, path = "/cache/checksums", request_body = ChecksumRequest, responses(
    (status = 200, description = "Checksums", body = Checksums),
    (status = 400, description = "A value is not allowed", body = DetailBody),
    (status = 404, description = "That instance is not registered", body = DetailBody),
    (status = 422, description = "Body of the wrong shape", body = DetailBody),
))]
pub(super) async fn checksums(
    api: ApiState,
    body: Payload,
) -> Result<JsonAnswer<Checksums>, ApiError> {
    let engine = Arc::clone(engine(&api)?);
    // Before the body is parsed: a waiting body counts in the budget, its values do not. Never closed.
    let turn = CHECKSUMS.acquire().await;
    let read = body.read(optional::<ChecksumRequest>);
    let request = read.await??;
    // Otherwise the error would be that instance 0, which the request did not name, is not registered.
    let missing = || detail(StatusCode::BAD_REQUEST, "block_ids is required");
    let block_ids = request.block_ids.ok_or_else(missing)?;
    let (instance, chunk_size) = (
        request.instance_id.unwrap_or(0),
        request.chunk_size.unwrap_or(0),
    );
    let layerwise = request.layerwise.unwrap_or(false);
    let (block_ids, result) = run_blocking(move || {
        // Held until the end, also after the client has disconnected.
        let _turn = turn;
        let result = engine
            .admin()
            .checksums(instance, &block_ids, chunk_size, layerwise);
        (block_ids, result)
    })
    .await?;
    let layers = result.map_err(|error| {
        let status = match &error {
            ChecksumError::UnknownInstance(_) => StatusCode::NOT_FOUND,
            ChecksumError::NotSupported(_) => StatusCode::NOT_IMPLEMENTED,
            ChecksumError::BadRequest(_) => StatusCode::BAD_REQUEST,
        };
        detail(status, error.to_string())
    })?;
    let chunk_checksums = if layerwise {
        let layers = layers.into_iter().enumerate();
        let layers = layers.map(|(index, sums)| (format!("layer_{index}"), sums));
        ChunkChecksums::Layerwise(layers.collect())
    } else {
        ChunkChecksums::OfAllLayers(layers.into_iter().next().unwrap_or_default())
    };
    Ok(JsonAnswer(Checksums {
        status: "success",
        chunk_size,
        num_chunks: block_ids
            .len()
            .div_ceil(usize::try_from(chunk_size).unwrap_or(1).max(1)),
        chunk_checksums,
        layerwise,
        block_id_ranges: ranges(&block_ids),
    }))
}

/// Runs of consecutive ids as `[first, last]`, single ids as they are.
fn ranges(ids: &[i64]) -> Vec<BlockIds> {
    let mut out = Vec::new();
    let mut rest = ids;
    while let Some(&first) = rest.first() {
        let run = 1 + rest
            .windows(2)
            .take_while(|pair| pair[0].checked_add(1) == Some(pair[1]))
            .count();
        let last = rest[run - 1];
        out.push(match run {
            1 => BlockIds::One(first),
            _ => BlockIds::Run([first, last]),
        });
        rest = &rest[run..];
    }
    // One single run is written without a list around it, as LMCache does.
    match out.as_slice() {
        [BlockIds::Run(only)] => only.map(BlockIds::One).into(),
        _ => out,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_written_as_lmcache_writes_them() {
        assert_eq!(json!(ranges(&[0, 1, 2, 3, 8])), json!([[0, 3], 8]));
        assert_eq!(json!(ranges(&[0, 1])), json!([0, 1]));
        assert_eq!(json!(ranges(&[5])), json!([5]));
        assert_eq!(json!(ranges(&[])), json!([]));
        assert_eq!(json!(ranges(&[i64::MAX, 0])), json!([i64::MAX, 0]));
    }
}
