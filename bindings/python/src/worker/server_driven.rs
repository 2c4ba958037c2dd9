//! Workers whose pages the server copies.
//!
//! A transfer without a reply must not end while the server may still read or write the pages, since the engine gives
//! them to others then. So the pages are taken away from the server first: it does that behind the copies of the same
//! connection, and its word for it is the word that none is under way.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kvtier_client::{Client as Native, ClientError};
use kvtier_proto::deadline;
use kvtier_proto::key::EncodedTokens;
use kvtier_proto::request::{EngineType, LayoutHints, Registration, Request, Retrieve, Store};
use kvtier_proto::response::Response;

use super::{Core, Pool, Transfer};

/// How long the blocks of a store are kept from the engine's other requests until the server has let go of them. They
/// cost room, no request waits for them.
const STORE_FENCE: Duration = Duration::from_secs(24 * 3600);

impl Core {
    /// Shows the server where the pages are.
    pub fn register_server_driven(&self, client: &Native) -> Result<Pool, ClientError> {
        client
            .register_kv_cache(Registration {
                instance: self.instance,
                tensors: self.geometry.descriptors.clone(),
                model_name: &self.scope.model_name,
                world_size: self.scope.world_size,
                engine: EngineType::Vllm,
                hints: LayoutHints {
                    kv_layout: self.geometry.hint,
                    ..LayoutHints::default()
                },
                groups: self.geometry.groups.clone(),
            })
            .join()?;
        Ok(Pool::default())
    }
}

/// Has the server copy; the transfer finishes when it has.
pub fn submit(core: &Arc<Core>, transfer: &Transfer) {
    let id = transfer.id;
    if core.current().is_none() {
        return core.finish(id, Err("the worker is not registered".to_owned()));
    }
    let scope = core.scope_of(transfer);
    // A server that was stopped meanwhile must not begin what was given up.
    let left = transfer.deadline.saturating_duration_since(Instant::now());
    let settings = deadline::encode(SystemTime::now() + left);
    let mut key = scope.worker_key(
        core.worker_id,
        &transfer.prompt,
        transfer.range.clone(),
        &transfer.request_id,
    );
    key.request_configs = Some(&settings);
    let request: Request<'_, EncodedTokens<'_>> = if transfer.is_store {
        Request::Store(Store {
            key,
            instance: core.instance,
            block_ids: transfer.block_ids.clone(),
            event_handle: &transfer.event,
        })
    } else {
        Request::Retrieve(Retrieve {
            key,
            instance: core.instance,
            block_ids: transfer.block_ids.clone(),
            event_handle: &transfer.event,
            skip_first_n_tokens: i64::try_from(transfer.skip).unwrap_or(i64::MAX),
        })
    };
    let fence = if transfer.is_store {
        STORE_FENCE
    } else {
        core.client.timeout()
    };
    let core = Arc::clone(core);
    let client = core.client.clone();
    client.submit_then(&request, client.timeout(), move |reply| {
        let outcome = reply.and_then(|reply| match reply.response()? {
            Response::Transfer(verdict) => {
                Ok(verdict.ok.then(|| verdict.event_handle.into_owned()))
            }
            _ => Err(ClientError::Unexpected {
                operation: reply.operation(),
                message: "an event and a verdict were expected".to_owned(),
            }),
        });
        match outcome {
            Ok(Some(event)) => core.finish(id, Ok(event)),
            Ok(None) => core.finish(id, Err("the server refused it".to_owned())),
            Err(error @ ClientError::Timeout { .. }) => take_pages_away(&core, id, &error, fence),
            // Without its connection the server is gone, and copies nothing.
            Err(error) => core.finish(id, Err(error.to_string())),
        }
    });
}

fn take_pages_away(core: &Arc<Core>, id: u64, error: &ClientError, fence: Duration) {
    *core.registered.lock() = None;
    let text = error.to_string();
    let then = Arc::clone(core);
    let request: Request<'_, EncodedTokens<'_>> = Request::UnregisterKvCache {
        instance: core.instance,
    };
    core.client.submit_then(&request, fence, move |_| {
        then.finish(id, Err(text));
        then.client.recover_again();
    });
}
