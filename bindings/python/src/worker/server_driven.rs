//! Workers whose pages the server copies.
//!
//! A transfer without a reply must not end while the server may still read or write the pages, since the engine gives
//! them to others then: see [`super::handed`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_client::{Client as Native, ClientError, InstanceId};
use kvtier_proto::deadline;
use kvtier_proto::key::EncodedTokens;
use kvtier_proto::request::{EngineType, LayoutHints, Registration, Request, Retrieve, Store};
use kvtier_proto::response::Response;
use rustix::time::{ClockId, clock_gettime};

use super::{Core, Pool, Transfer};

impl Core {
    /// Shows the server where the pages are.
    pub fn register_server_driven(
        &self,
        client: &Native,
        instance: InstanceId,
    ) -> Result<Pool, ClientError> {
        client
            .register_kv_cache(Registration {
                instance,
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

/// The time of the system's monotonic clock, which the server has too.
fn monotonic() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    // It starts at nought and never goes back.
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Has the server copy; the transfer finishes when it has.
pub fn submit(core: &Arc<Core>, transfer: &Transfer) {
    let id = transfer.id;
    let Some(registered) = core.current() else {
        return core.finish(id, Err("the worker is not registered".to_owned()));
    };
    let instance = registered.instance;
    let scope = core.scope_of(transfer);
    // A server that was stopped meanwhile must not begin what was given up.
    let left = || transfer.deadline.saturating_duration_since(Instant::now());
    let settings = deadline::encode(deadline::from_left(monotonic, left));
    let left = left();
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
    core.handed.begin(id, instance, transfer.deadline);
    let then = Arc::clone(core);
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
        let verdict = match outcome {
            Ok(Some(event)) => Ok(event),
            Ok(None) => Err("the server refused it".to_owned()),
            Err(error @ (ClientError::TooMany { .. } | ClientError::Encode { .. })) => {
                Err(error.to_string())
            }
            Err(error) => {
                then.unanswered(id, error.to_string());
                return then.renew(instance);
            }
        };
        then.handed.end(id);
        then.finish(id, verdict);
    });
}
