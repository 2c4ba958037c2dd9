//! Workers whose pages the server copies.
//!
//! A transfer without a reply must not end while the server may still read or write the pages, since the engine reuses
//! them then: see [`super::server_transfers`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_client::{Client as Native, ClientError, InstanceId, Scope, SharedPool};
use kvtier_proto::deadline;
use kvtier_proto::key::EncodedTokens;
use kvtier_proto::request::{
    EngineType, HELD_BLOCKS, LayoutHints, Registration, Request, Retrieve, Store,
};
use kvtier_proto::response::Response;
use rustix::time::{ClockId, clock_gettime};

use super::state::{Core, Done, Transfer};

/// Registers the pages. Such a worker uses no pool.
pub fn register(
    core: &Core,
    client: &Native,
    instance: InstanceId,
    scope: &Scope,
) -> Result<SharedPool, ClientError> {
    client
        .register_kv_cache(Registration {
            instance,
            tensors: core.geometry.descriptors.clone(),
            model_name: &scope.model_name,
            world_size: scope.world_size,
            engine: EngineType::Vllm,
            hints: LayoutHints {
                kv_layout: core.geometry.hint,
                chunk_tokens: scope.chunk_tokens,
                held_blocks: core.geometry.holds_blocks.then_some(HELD_BLOCKS),
                ..LayoutHints::default()
            },
            groups: core.geometry.groups.clone(),
        })
        .join()?;
    Ok(SharedPool::Absent)
}

/// The time of the system's monotonic clock, which is the server's too.
fn monotonic() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    // It starts at zero and never goes back.
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Submits a transfer; it finishes when the server has copied.
pub fn submit(core: &Arc<Core>, transfer: &Transfer) {
    let id = transfer.id;
    let Some(registered) = core.current() else {
        return core.finish(id, Err("the worker is not registered".to_owned()));
    };
    let instance = registered.instance;
    // A server that was stopped meanwhile must not start a transfer past its deadline.
    let left = || transfer.deadline.saturating_duration_since(Instant::now());
    let deadline = deadline::from_left(monotonic, left);
    let scope = registered.scope_of(transfer, Some(deadline));
    let left = left();
    let key = scope.worker_key(
        core.worker_id,
        &transfer.prompt,
        transfer.range.clone(),
        &transfer.request_id,
    );
    let request: Request<'_, EncodedTokens<'_>> = if transfer.is_store {
        Request::Store(Store {
            key,
            instance,
            block_ids: transfer.block_ids.clone(),
            event_handle: &transfer.event,
        })
    } else {
        Request::Retrieve(Retrieve {
            key,
            instance,
            block_ids: transfer.block_ids.clone(),
            event_handle: &transfer.event,
            skip_first_n_tokens: i64::try_from(transfer.skip).unwrap_or(i64::MAX),
        })
    };
    core.server_transfers.begin(id, instance, transfer.deadline);
    let shared = Arc::clone(core);
    core.client.submit_then(&request, left, move |reply| {
        let outcome = reply.and_then(|reply| match reply.response()? {
            Response::Transfer(verdict) => {
                Ok(verdict.ok.then(|| verdict.event_handle.into_owned()))
            }
            _ => Err(ClientError::Unexpected {
                operation: reply.operation(),
                message: "an event and a verdict were expected".to_owned(),
            }),
        });
        let result = match outcome {
            Ok(Some(event)) => Ok(Done {
                event,
                chunks: None,
            }),
            Ok(None) => Err("the server refused it".to_owned()),
            Err(error @ (ClientError::TooMany { .. } | ClientError::Encode { .. })) => {
                Err(error.to_string())
            }
            Err(error) => {
                shared.unanswered(id, error.to_string());
                return shared.renew(instance);
            }
        };
        shared.server_transfers.end(id);
        shared.finish(id, result);
    });
}
