//! Registrations of a worker, and their ends.

use std::sync::Arc;

use kvtier_client::{Client as Native, ClientError, InstanceId, Scope};
use kvtier_proto::chunk::{self, CHUNK_TOKENS_FEATURE};
use kvtier_proto::operation::Operation;
use kvtier_proto::request::HELD_BLOCKS_FEATURE;

use super::instance_ids::InstanceIds;
use super::state::{Core, Mode, Registered};
use super::{engine_driven, server_driven};

/// Registers under a new instance id, and unregisters the earlier ones; the pages stay as they are.
pub fn register(core: &Core, client: &Native) -> Result<(), ClientError> {
    let mut ids = core.instance_ids.lock();
    if ids.has_stopped {
        return Ok(());
    }
    // No transfer uses an earlier registration meanwhile.
    *core.registered.lock() = None;
    loop {
        let connections = client.connections();
        let scope = scope(core, client)?;
        let instance = ids.next();
        let pool = match core.mode {
            Mode::Engine => engine_driven::register(core, client, instance, &scope)?,
            Mode::Server => server_driven::register(core, client, instance, &scope)?,
        };
        // In this order: lookups are answered for a model that has a worker.
        unregister(core, client, &mut ids, Some(instance))?;
        // A connection that was made meanwhile, for example the first one, may lead to another server.
        if connections == client.connections() {
            ids.registered();
            client.set_instance(Some(instance));
            *core.registered.lock() = Some(Arc::new(Registered {
                instance,
                scope,
                connections,
                pool,
            }));
            return Ok(());
        }
    }
}

/// Unregisters for good, and waits until the server has released all pages.
pub fn stop(core: &Core) {
    let mut ids = core.instance_ids.lock();
    ids.has_stopped = true;
    *core.registered.lock() = None;
    let client = &core.client;
    client.set_instance(None);
    client.on_recover(client.connections(), Box::new(|_| Ok(())));
    // A failure is ignored: the server also notices by itself.
    let _ = unregister(core, client, &mut ids, None);
    ids.clear();
    drop(ids);
    core.wait_for_pages();
}

/// Unregisters this worker's instance ids except `kept`. After its answer the server touches no pages for them.
///
/// The server at the address is the one that was registered with, or was started after that one had ended.
fn unregister(
    core: &Core,
    client: &Native,
    ids: &mut InstanceIds,
    kept: Option<InstanceId>,
) -> Result<(), ClientError> {
    while let Some(instance) = ids.any_except(kept) {
        match core.mode {
            Mode::Engine => client.unregister_engine_driven(instance).join()?,
            Mode::Server => client.unregister_kv_cache(instance).join()?,
        }
        ids.remove(instance);
        core.server_transfers.instance_released(instance);
        core.finish_released();
    }
    Ok(())
}

/// Returns the scope of a registration with this server: it names the chunk size if the server reads that. Asks for the
/// server's optional features; held blocks and a chunk size other than its default need one each.
///
/// The question also notifies the server that this client accepts a refusal's text. Without it a refused registration of pages
/// looks like an accepted one, since clients of releases before 0.5.5 accept no text.
fn scope(core: &Core, client: &Native) -> Result<Scope, ClientError> {
    let features = match client.get_experimental().join() {
        Err(error @ (ClientError::Timeout { .. } | ClientError::Disconnected { .. })) => {
            return Err(error);
        }
        features => features.unwrap_or_default(),
    };
    let has = |feature: &str| features.iter().any(|it| it == feature);
    if core.geometry.holds_blocks && !has(HELD_BLOCKS_FEATURE) {
        return Err(ClientError::Unexpected {
            operation: Operation::GetExperimental,
            message: format!(
                "the server does not have {HELD_BLOCKS_FEATURE}, which models with sliding windows need; use kvtier's server in a \
                 version that has it"
            ),
        });
    }
    let named = chunk::allowed(core.chunk_tokens).filter(|_| has(CHUNK_TOKENS_FEATURE));
    if named.is_none() {
        let default = client.get_chunk_size().join()? as u64;
        if default != core.chunk_tokens {
            return Err(ClientError::Argument {
                field: "chunk_tokens",
                message: format!(
                    "{}; the server has chunks of {default} tokens",
                    core.chunk_tokens
                ),
            });
        }
    }
    Ok(Scope {
        chunk_tokens: named,
        ..core.scope.clone()
    })
}
