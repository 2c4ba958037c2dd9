//! Workers that copy by themselves: into slots of the server's pool and out of them, or with pickled messages.
//!
//! [`EngineDrivenTransfer`] has the steps of a transfer; here are its pages, its deadline, and its thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kvtier_client::{
    ChunkSink, ChunkSource, Client as Native, ClientError, ClientReply, EngineDrivenSpec,
    EngineDrivenTransfer, InstanceId, Prompt, Retrieval, Scope, SharedPool, TransferServer,
    whole_chunks,
};
use kvtier_device::{BlockTable, KernelGroup};
use kvtier_proto::descriptor::Dtype;
use kvtier_proto::key::EncodedTokens;
use kvtier_proto::operation::Operation;
use kvtier_proto::pickle;
use kvtier_proto::request::Request;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::geometry::Geometry;
use super::pages::{CopyError, Pages};
use super::server_transfers::COPY_MARGIN;
use super::state::{Core, Done, Registered, Transfer};

/// Checks that a worker has one group of layers in this process's memory.
pub fn check(geometry: &Geometry) -> PyResult<()> {
    let Some(pages) = &geometry.pages else {
        return Err(PyValueError::new_err(
            "mode: engine_driven copies CPU memory only; use lmcache_driven for tensors on a GPU",
        ));
    };
    let groups = pages.layout.kernel_groups();
    if let [group] = groups
        && group.window_tokens.is_none()
        && Dtype::from_name(&group.dtype_name).is_some()
    {
        return Ok(());
    }
    Err(PyValueError::new_err(format!(
        "mode: engine_driven serves models with one group of full-attention layers, this one has {}; use lmcache_driven",
        groups.len()
    )))
}

/// Runs transfers in order until the queue is closed.
pub fn run(core: &Arc<Core>, queue: &mpsc::Receiver<Transfer>) {
    while let Ok(transfer) = queue.recv() {
        // A panic ends the transfer, not the thread.
        let outcome = catch_unwind(AssertUnwindSafe(|| copy(core, &transfer)))
            .unwrap_or_else(|_| Err("the copy panicked, which is a bug".to_owned()));
        let done = outcome.map(|chunks| Done {
            event: Vec::new(),
            chunks,
        });
        core.finish(transfer.id, done);
    }
}

fn invalid(message: String) -> ClientError {
    ClientError::Argument {
        field: "kv_caches",
        message,
    }
}

fn abandoned(reason: impl Into<String>) -> ClientError {
    ClientError::Abandoned {
        reason: reason.into(),
    }
}

/// The pages and their only group.
fn only_group(core: &Core) -> Result<(&Pages, &KernelGroup), ClientError> {
    let pages = core.geometry.pages.as_ref();
    pages
        .and_then(|pages| Some((pages, pages.layout.kernel_groups().first()?)))
        .ok_or_else(|| invalid("the pages are not in CPU memory".to_owned()))
}

/// The registration of the worker under an instance id.
fn spec(core: &Core, instance: InstanceId, scope: &Scope) -> Result<EngineDrivenSpec, ClientError> {
    let (_, group) = only_group(core)?;
    let dtype = Dtype::from_name(&group.dtype_name)
        .ok_or_else(|| invalid(format!("{} is no type of the protocol", group.dtype_name)))?;
    Ok(EngineDrivenSpec {
        instance,
        scope: scope.clone(),
        worker_id: core.worker_id,
        block_tokens: group.tokens_per_block,
        layers: group.layer_indices.len() as u64,
        hidden: group.hidden_size(),
        dtype,
        one_plane: group.kv_size == 1,
        slots_per_chunk: Some(group.slots_per_chunk),
        force_pickle: core.force_pickle,
    })
}

/// Registers, and opens the server's pool, if it has one that can be opened here.
pub fn register(
    core: &Core,
    client: &Native,
    instance: InstanceId,
    scope: &Scope,
) -> Result<SharedPool, ClientError> {
    let spec = spec(core, instance, scope)?;
    let registered = client.register_engine_driven(spec.context()?).join()?;
    let pool = SharedPool::open(&registered, spec.force_pickle);
    if let SharedPool::Unused { .. } = pool {
        report_unused_pool(core, client, instance, scope)?;
    }
    Ok(pool)
}

/// Reports to the server that this worker does not use the pool. Otherwise the server would lease slots to a worker
/// that only retrieves.
///
/// The server learns it from a pickled store, so the worker sends an empty one.
fn report_unused_pool(
    core: &Core,
    client: &Native,
    instance: InstanceId,
    scope: &Scope,
) -> Result<(), ClientError> {
    let prompt = Prompt::new(&[]);
    let key = scope.worker_key(core.worker_id, &prompt, 0..0, "kvtier-no-pool");
    let nothing = pickle::write_tensors(&[], |_, _| Ok::<(), ClientError>(()))?;
    match client.commit_store(&key, instance, &nothing).join() {
        Err(error @ (ClientError::Timeout { .. } | ClientError::Disconnected { .. })) => Err(error),
        // Another server may refuse it, and learns it from the first real store.
        _ => Ok(()),
    }
}

/// Runs a transfer. Returns the chunks that the server of a store took, if it says which.
fn copy(core: &Arc<Core>, transfer: &Transfer) -> Result<Option<Vec<u64>>, String> {
    try_copy(core, transfer).map_err(|error| error.to_string())
}

fn try_copy(core: &Arc<Core>, transfer: &Transfer) -> Result<Option<Vec<u64>>, ClientError> {
    let (pages, _) = only_group(core)?;
    let chunks = whole_chunks(&transfer.range, core.chunk_tokens)? as usize;
    let blocks = BlockTable::check(&pages.layout, &transfer.block_ids, chunks)
        .map_err(|error| abandoned(error.to_string()))?;
    let mut pages = TransferPages {
        core,
        transfer,
        pages,
        blocks,
    };
    if transfer.is_store {
        pages.mark_unread(false)?;
    }
    let registered = core
        .current()
        .ok_or_else(|| abandoned("the worker is not registered"))?;
    let mut server = DeadlineServer {
        core,
        registered: &registered,
        deadline: transfer.deadline,
    };
    server.check_deadline()?;
    let scope = registered.scope_of(transfer, None);
    let key = scope.worker_key(
        core.worker_id,
        &transfer.prompt,
        transfer.range.clone(),
        &transfer.request_id,
    );
    let format = spec(core, registered.instance, &scope)?.format(core.chunk_tokens)?;
    let steps = EngineDrivenTransfer {
        format: &format,
        pool: &registered.pool,
        key: &key,
        instance: registered.instance,
        chunks,
    };
    if transfer.is_store {
        return steps.store(&mut server, &mut pages);
    }
    match steps.retrieve(&mut server, &mut pages)? {
        Retrieval::Complete => Ok(None),
        Retrieval::Miss => Err(abandoned("some chunk is not cached any more")),
        Retrieval::PoolNotMapped => Err(abandoned(
            "the server leased slots of a pool that is not mapped here",
        )),
    }
}

/// What is left until a deadline; none if it has passed.
fn left(deadline: Instant) -> Option<Duration> {
    Some(deadline.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
}

/// The server of a transfer that ends at its deadline.
struct DeadlineServer<'a> {
    core: &'a Arc<Core>,
    registered: &'a Registered,
    deadline: Instant,
}

impl DeadlineServer<'_> {
    /// After the deadline the server may have considered this worker dead, and reserved its slots for others.
    fn check_deadline(&self) -> Result<(), ClientError> {
        match left(self.deadline) {
            Some(_) => Ok(()),
            None => Err(abandoned("the transfer is past its deadline")),
        }
    }
}

impl TransferServer for DeadlineServer<'_> {
    fn call(
        &mut self,
        request: &Request<'_, EncodedTokens<'_>>,
    ) -> Result<ClientReply, ClientError> {
        let operation = request.operation();
        let deadline = match operation {
            // Slots that were reserved and written are worth a longer wait for the reply.
            Operation::CommitStore => self.deadline + COPY_MARGIN,
            _ => self.deadline,
        };
        let client = &self.core.client;
        let reply = client.submit_for_reply(request, client.timeout());
        let waited = left(deadline).and_then(|left| reply.wait(left));
        let result = waited.unwrap_or_else(|| {
            reply.cancel();
            Err(abandoned(format!(
                "{operation}: no reply within the deadline"
            )))
        });
        // The server may still hold the leases.
        if operation == Operation::CommitRetrieve && result.is_err() {
            self.core.renew(self.registered.instance);
        }
        result
    }

    /// If the server does not answer, the worker registers under another instance id: the server then frees what it
    /// holds for this one.
    fn notify(&mut self, request: &Request<'_, EncodedTokens<'_>>) {
        let core = Arc::clone(self.core);
        let instance = self.registered.instance;
        let client = &self.core.client;
        client.submit_then(request, client.timeout(), move |reply| {
            if reply.is_err() {
                core.renew(instance);
            }
        });
    }

    fn check(&mut self) -> Result<(), ClientError> {
        // A server that was started meanwhile has another pool: its slots are not in this one.
        if !self.core.is_current(self.registered) {
            return Err(abandoned("the server was replaced during the transfer"));
        }
        self.check_deadline()
    }
}

/// Pages of a transfer.
struct TransferPages<'a> {
    core: &'a Core,
    transfer: &'a Transfer,
    pages: &'a Pages,
    blocks: BlockTable,
}

impl TransferPages<'_> {
    /// Sets whether a store's pages are being read, unless the engine has taken them back before they were.
    fn mark_unread(&self, reading: bool) -> Result<(), ClientError> {
        match self.core.unread.lock().get_mut(&self.transfer.id) {
            Some(is_reading) => {
                *is_reading = reading;
                Ok(())
            }
            None => Err(abandoned("its blocks were reused before they were read")),
        }
    }
}

impl ChunkSource for TransferPages<'_> {
    fn begin(&mut self) -> Result<(), ClientError> {
        self.mark_unread(true)
    }

    fn read<P>(&mut self, chunk: usize, put: P) -> Result<(), ClientError>
    where
        P: FnMut(u64, &[u8]) -> Result<(), ClientError>,
    {
        let gathered = self.pages.gather(&self.blocks, chunk, put);
        gathered.map_err(|error| match error {
            CopyError::Other(error) => error,
            CopyError::Closed => abandoned("the worker was dropped"),
            CopyError::Plan(error) => abandoned(error.to_string()),
        })
    }

    fn end(&mut self) {
        self.core.unread.lock().remove(&self.transfer.id);
    }
}

impl ChunkSink for TransferPages<'_> {
    fn write<R>(&mut self, chunk: usize, read: R) -> Result<(), ClientError>
    where
        R: FnMut(u64, &mut [u8]) -> Result<(), ClientError>,
    {
        let scattered = self
            .pages
            .scatter(&self.blocks, chunk, self.transfer.skip, read);
        scattered.map_err(|error| match error {
            CopyError::Other(error) => error,
            CopyError::Closed => abandoned("the worker was dropped"),
            CopyError::Plan(error) => abandoned(error.to_string()),
        })
    }
}
