//! Routes that act on the cache: clear it, and checksum an engine's pages.

use std::sync::Arc;

use axum::Json;
use axum::http::StatusCode;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::audit::{Told, told};
use super::body::Body;
use super::payload::Payload;
use super::{ApiError, State, TIERS, apart, engine};
use kvtier_engine::ChecksumError;

/// Checksums read every byte they are asked about, so one request at a time does.
static CHECKSUMS: Semaphore = Semaphore::const_new(1);

/// Drops the objects of L1: those without a lease, or all of them with `force`.
///
/// Body, all optional: `{"tier": "l1", "force": false}`. A forced clear hides leased objects at once; their memory
/// returns when the last lease goes, so a transfer under way still reads right bytes.
#[utoipa::path(post, path = "/cache/clear", request_body = Option<Value>, responses(
    (status = 200, description = "Cleared; counts of what went and what was kept because of a lease", body = Value),
    (status = 400, description = "That tier cannot be cleared", body = Value),
    (status = 422, description = "Body of the wrong shape", body = Value),
))]
pub(super) async fn clear(api: State, body: Payload) -> Result<Told, ApiError> {
    let read = body.read(|bytes| {
        let body = Body::parse(bytes)?;
        Ok((
            body.one_of("tier", &TIERS, "l1")?,
            body.bool("force", false)?,
        ))
    });
    let (tier, force) = read.await??;
    if tier != "l1" {
        return Err(ApiError::Detail(
            StatusCode::BAD_REQUEST,
            format!("tier '{tier}' not supported; only 'l1'"),
        ));
    }
    let engine = Arc::clone(engine(&api)?);
    let cleared = apart(move || engine.clear(force)).await?;
    let counts = json!({ "tier": "l1", "objects": cleared.objects, "bytes": cleared.bytes, "kept": cleared.kept });
    let did = format!("force {force}: {counts}");
    Ok(told(did, json!({ "status": "ok", "cleared": counts })))
}

/// MD5 of an engine's own KV blocks, to compare before a store and after a retrieve.
///
/// Body: `{"block_ids": [int], "chunk_size": int, "instance_id": int, "layerwise": bool}`. Every `chunk_size` block ids
/// make one checksum over the blocks of each layer in layer order; bfloat16 counts as float32.
#[utoipa::path(post, path = "/cache/checksums", request_body = Value, responses(
    (status = 200, description = "Checksums", body = Value),
    (status = 400, description = "A value is not allowed", body = Value),
    (status = 404, description = "That instance is not registered", body = Value),
    (status = 422, description = "Body of the wrong shape", body = Value),
))]
pub(super) async fn checksums(api: State, body: Payload) -> Result<Json<Value>, ApiError> {
    let engine = Arc::clone(engine(&api)?);
    // First of all: what waits is a body, which counts, and not what was parsed of it. Never closed.
    let turn = CHECKSUMS.acquire().await;
    let asked = body.read(Asked::parse).await??;
    let (asked, result) = apart(move || {
        // Goes on after its client has disconnected.
        let _turn = turn;
        let ids = &asked.block_ids;
        let admin = engine.admin();
        let result = admin.checksums(asked.instance_id, ids, asked.chunk_size, asked.layerwise);
        (asked, result)
    })
    .await?;
    let Asked {
        block_ids,
        chunk_size,
        layerwise,
        ..
    } = asked;
    let layers = result.map_err(|error| {
        let status = match &error {
            ChecksumError::UnknownInstance(_) => StatusCode::NOT_FOUND,
            ChecksumError::NotSupported(_) => StatusCode::NOT_IMPLEMENTED,
            ChecksumError::BadRequest(_) => StatusCode::BAD_REQUEST,
        };
        ApiError::Detail(status, error.to_string())
    })?;
    let chunk_checksums = if layerwise {
        let named = layers
            .iter()
            .enumerate()
            .map(|(index, sums)| (format!("layer_{index}"), json!(sums)));
        Value::Object(named.collect())
    } else {
        json!(layers.first().cloned().unwrap_or_default())
    };
    Ok(Json(json!({
        "status": "success",
        "chunk_size": chunk_size,
        "num_chunks": block_ids.len().div_ceil(usize::try_from(chunk_size).unwrap_or(1).max(1)),
        "chunk_checksums": chunk_checksums,
        "layerwise": layerwise,
        "block_id_ranges": ranges(&block_ids),
    })))
}

/// A request for checksums.
struct Asked {
    instance_id: i64,
    block_ids: Vec<i64>,
    chunk_size: i64,
    layerwise: bool,
}

impl Asked {
    fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let body = Body::parse(bytes)?;
        let asked = Self {
            block_ids: body.ints("block_ids")?,
            chunk_size: body.int("chunk_size", 0)?,
            instance_id: body.int("instance_id", 0)?,
            layerwise: body.bool("layerwise", false)?,
        };
        match body.has("block_ids") {
            true => Ok(asked),
            // Rather than that instance 0, which the request did not name, is not registered.
            false => Err(ApiError::Detail(
                StatusCode::BAD_REQUEST,
                "block_ids is required".to_owned(),
            )),
        }
    }
}

/// Runs of consecutive ids as `[first, last]`, single ids as they are.
fn ranges(ids: &[i64]) -> Vec<Value> {
    let mut out = Vec::new();
    let mut rest = ids;
    while let Some(&first) = rest.first() {
        let run = 1 + rest
            .windows(2)
            .take_while(|pair| pair[0].checked_add(1) == Some(pair[1]))
            .count();
        let last = rest[run - 1];
        out.push(if run == 1 {
            json!(first)
        } else {
            json!([first, last])
        });
        rest = &rest[run..];
    }
    // One single run is written without a list around it, as LMCache does.
    match out.as_slice() {
        [Value::Array(only)] => only.clone(),
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
