//! Workers that copy by themselves: into slots of the server's pool and out of them, or with pickled messages.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::time::Instant;

use kvtier_client::{Client as Native, ClientError, Future, InstanceId, Key, Prompt};
use kvtier_device::{BlockTable, KernelGroup};
use kvtier_memory::ForeignSegment;
use kvtier_proto::descriptor::Dtype;
use kvtier_proto::key::EncodedTokens;
use kvtier_proto::operation::Operation;
use kvtier_proto::pickle::{self, Limits, TensorToWrite};
use kvtier_proto::request::{ABORT_STORE, EngineDrivenContext, Request};
use kvtier_proto::response::Slot;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::geometry::Geometry;
use super::handed::MARGIN;
use super::pages::{CopyError, Pages};
use super::{Core, Done, Pool, Registered, Transfer, left};

/// Such a worker has one group of layers in this process's memory.
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
        // Whatever goes wrong in a transfer, it ends, and the next one has its turn.
        let done = catch_unwind(AssertUnwindSafe(|| {
            if transfer.is_store {
                store(core, &transfer)
            } else {
                retrieve(core, &transfer).map(|()| None)
            }
        }))
        .unwrap_or_else(|_| Err("the copy panicked, which is a bug".to_owned()));
        let done = done.map(|chunks| Done {
            event: Vec::new(),
            chunks,
        });
        core.finish_with(transfer.id, done);
    }
}

impl Core {
    fn pages(&self) -> Result<(&Pages, &KernelGroup), String> {
        let pages = self.geometry.pages.as_ref();
        pages
            .and_then(|pages| Some((pages, pages.layout.kernel_groups().first()?)))
            .ok_or_else(|| "the pages are not in CPU memory".to_owned())
    }

    /// Registers and opens the server's pool, if it has one that can be reached.
    pub fn register_engine_driven(
        &self,
        client: &Native,
        instance: InstanceId,
    ) -> Result<Pool, ClientError> {
        let argument = |message: String| ClientError::Argument {
            field: "kv_caches",
            message,
        };
        let (_, group) = self.pages().map_err(argument)?;
        let signed = |value: u64| {
            i64::try_from(value).map_err(|_| argument(format!("{value} is larger than an int64")))
        };
        let told = client
            .register_engine_driven(EngineDrivenContext {
                instance,
                model_name: &self.scope.model_name,
                world_size: self.scope.world_size,
                block_size: signed(group.tokens_per_block)?,
                num_layers: signed(group.layer_indices.len() as u64)?,
                hidden_dim_size: signed(group.hidden_size())?,
                dtype: &group.dtype_name,
                use_mla: group.kv_size == 1,
                num_physical_slots: Some(signed(group.slots_per_chunk)?),
            })
            .join()?;
        if told.shm_name.is_empty() {
            return Ok(Pool::default());
        }
        // Out of reach (another container, another user): chunks travel in messages then.
        let pool = if self.force_pickle {
            Pool::default()
        } else {
            match ForeignSegment::open_pool(&told.shm_name, told.pool_size) {
                Ok(segment) => {
                    return Ok(Pool {
                        segment: Some(segment),
                        obstacle: None,
                    });
                }
                Err(error) => Pool {
                    segment: None,
                    obstacle: Some(error.to_string()),
                },
            }
        };
        self.tell_no_pool(client, instance)?;
        Ok(pool)
    }

    /// Has the server know that this worker cannot reach the pool: else it would lend slots to one that only loads.
    ///
    /// A server takes it from a store that came in a message, so it is sent one, of nothing.
    fn tell_no_pool(&self, client: &Native, instance: InstanceId) -> Result<(), ClientError> {
        let prompt = Prompt::new(&[]);
        let key = self
            .scope
            .worker_key(self.worker_id, &prompt, 0..0, "kvtier-no-pool");
        let nothing = pickle::write_tensors(&[], |_, _| Ok::<(), ClientError>(()))?;
        match client.commit_store(&key, instance, &nothing).join() {
            Err(error @ (ClientError::Timeout { .. } | ClientError::Disconnected { .. })) => {
                Err(error)
            }
            // Another server may refuse it, and waits for the first store of something.
            _ => Ok(()),
        }
    }
}

/// The result of a call, at the transfer's deadline at the latest.
fn within<T>(transfer: &Transfer, call: Future<T>) -> Result<T, String> {
    result_by(transfer.deadline, call)
}

fn result_by<T>(deadline: Instant, call: Future<T>) -> Result<T, String> {
    let waited = left(deadline).and_then(|left| call.wait(left));
    match waited {
        Some(result) => result.map_err(|error| error.to_string()),
        None => {
            let operation = call.operation();
            call.cancel();
            Err(format!("{operation}: no reply within the deadline"))
        }
    }
}

/// What both directions start with.
struct Ready<'a> {
    pages: &'a Pages,
    group: &'a KernelGroup,
    blocks: BlockTable,
    chunks: usize,
}

fn ready<'a>(core: &'a Core, transfer: &Transfer) -> Result<Ready<'a>, String> {
    let (pages, group) = core.pages()?;
    let range = &transfer.range;
    let chunk = core.chunk_tokens;
    if range.start > range.end
        || !range.start.is_multiple_of(chunk)
        || !range.end.is_multiple_of(chunk)
    {
        return Err(format!(
            "{range:?} does not consist of whole chunks of {chunk} tokens"
        ));
    }
    let chunks = ((range.end - range.start) / chunk) as usize;
    let blocks = BlockTable::check(&pages.layout, &transfer.block_ids, chunks)
        .map_err(|error| error.to_string())?;
    in_time(transfer)?;
    Ok(Ready {
        pages,
        group,
        blocks,
        chunks,
    })
}

/// Behind the deadline of a transfer the server may have taken this worker for dead, and have lent its slots to others.
fn in_time(transfer: &Transfer) -> Result<(), String> {
    match left(transfer.deadline) {
        Some(_) => Ok(()),
        None => Err("it is past its deadline".to_owned()),
    }
}

impl Core {
    /// Whether a store's pages are still what is to be stored; says that they are being read from now on.
    fn read_pages(&self, id: u64, begin: bool) -> Result<(), String> {
        match self.unread.lock().get_mut(&id) {
            Some(begun) => {
                *begun = begin;
                Ok(())
            }
            None => Err("its blocks went to others before they were read".to_owned()),
        }
    }
}

/// The chunks that the server took, if it says which.
fn store(core: &Arc<Core>, transfer: &Transfer) -> Result<Option<Vec<u64>>, String> {
    core.read_pages(transfer.id, false)?;
    let ready = ready(core, transfer)?;
    let registered = core.current().ok_or("the worker is not registered")?;
    let scope = core.scope_of(transfer);
    let key = scope.worker_key(
        core.worker_id,
        &transfer.prompt,
        transfer.range.clone(),
        &transfer.request_id,
    );
    let lent = Lent::maybe(core, &registered, &key);
    let prepared = within(
        transfer,
        core.client.prepare_store(&key, registered.instance),
    )?;
    core.read_pages(transfer.id, true)?;
    let mut taken = None;
    let data = match (prepared.target, &registered.pool.segment) {
        (Some(target), Some(pool)) => {
            if target.slots.is_empty() {
                // All of it is cached, or there is no room.
                lent.ended();
                return Ok(Some(Vec::new()));
            }
            // A server that came meanwhile has another pool: what it lent is not in this one.
            if registered.connections != core.client.connections() {
                return Err("the server was replaced meanwhile".to_owned());
            }
            if target.slots.len() != target.chunk_indices.len() {
                return Err("the server gave slots without positions".to_owned());
            }
            for (slot, &index) in target.slots.iter().zip(&target.chunk_indices) {
                let chunk = usize::try_from(index)
                    .ok()
                    .filter(|chunk| *chunk < ready.chunks)
                    .ok_or_else(|| format!("the server wants chunk {index} of {}", ready.chunks))?;
                check_slot(&ready, slot)?;
                in_time(transfer)?;
                ready
                    .pages
                    .gather(&ready.blocks, chunk, |offset, bytes| {
                        pool.write(slot.offset.saturating_add(offset), bytes)
                    })
                    .map_err(copy_error)?;
            }
            taken = Some(target.chunk_indices);
            Vec::new()
        }
        _ => pickled(&ready)?,
    };
    core.unread.lock().remove(&transfer.id);
    // A moment longer than the deadline: memory that was lent and written is worth the wait for the reply.
    let committed = core.client.commit_store(&key, registered.instance, &data);
    let is_committed = result_by(transfer.deadline + MARGIN, committed)?;
    lent.ended();
    if is_committed {
        Ok(taken)
    } else {
        Err("commit_store: the server refused it".to_owned())
    }
}

/// Memory that the server has lent to a store, or may have: it lends it to nobody else until it hears of its end.
struct Lent<'a> {
    core: &'a Arc<Core>,
    instance: InstanceId,
    key: &'a Key<'a>,
    has_ended: bool,
}

impl<'a> Lent<'a> {
    fn maybe(core: &'a Arc<Core>, registered: &Registered, key: &'a Key<'a>) -> Self {
        Self {
            core,
            instance: registered.instance,
            key,
            has_ended: false,
        }
    }

    /// The server has heard of it.
    fn ended(mut self) {
        self.has_ended = true;
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let abort = Request::CommitStore {
                key: self.key.clone(),
                instance: self.instance,
                data: ABORT_STORE,
            };
            tell_or_renew(self.core, self.instance, &abort);
        }
    }
}

/// Tells the server something that it must not miss. Without an answer the worker gets another number: the server takes
/// back what it has lent to this one.
fn tell_or_renew(core: &Arc<Core>, instance: InstanceId, request: &Request<'_, EncodedTokens<'_>>) {
    let then = Arc::clone(core);
    core.client
        .submit_then(request, core.client.timeout(), move |reply| {
            if reply.is_err() {
                then.renew(instance);
            }
        });
}

fn retrieve(core: &Arc<Core>, transfer: &Transfer) -> Result<(), String> {
    let ready = ready(core, transfer)?;
    let registered = core.current().ok_or("the worker is not registered")?;
    let scope = core.scope_of(transfer);
    let key = scope.worker_key(
        core.worker_id,
        &transfer.prompt,
        transfer.range.clone(),
        &transfer.request_id,
    );
    let loaded = load(core, transfer, &ready, &registered, &key);
    // Also after a miss and after an error: whatever was leased is given back.
    if loaded.is_err() {
        let commit = Request::CommitRetrieve {
            key: key.clone(),
            instance: registered.instance,
        };
        tell_or_renew(core, registered.instance, &commit);
        return loaded;
    }
    let committed = core.client.commit_retrieve(&key, registered.instance);
    // A server that does not confirm the lease may have given the memory to others while it was read.
    match within(transfer, committed) {
        Ok(true) => Ok(()),
        Ok(false) => Err("commit_retrieve: the server refused it".to_owned()),
        Err(error) => {
            core.renew(registered.instance);
            Err(error)
        }
    }
}

fn load(
    core: &Core,
    transfer: &Transfer,
    ready: &Ready<'_>,
    registered: &Registered,
    key: &Key<'_>,
) -> Result<(), String> {
    let answer = within(
        transfer,
        core.client.prepare_retrieve(key, registered.instance),
    )?;
    if !answer.success {
        return Err("the server does not have all of it any more".to_owned());
    }
    let came = |count: usize| {
        if count == ready.chunks {
            Ok(())
        } else {
            Err(format!(
                "{count} chunks came, {} were asked for",
                ready.chunks
            ))
        }
    };
    if !answer.data.is_empty() {
        let tensors = pickle::read_tensors(&answer.data, &Limits::default())
            .map_err(|error| error.to_string())?;
        came(tensors.len())?;
        let mut gathered = Vec::new();
        for (chunk, tensor) in tensors.iter().enumerate() {
            if tensor.dtype.name() != ready.group.dtype_name || tensor.shape != shape(ready.group) {
                return Err(format!(
                    "chunk {chunk} has shape {:?} and type {}; registered were {:?} and {}",
                    tensor.shape,
                    tensor.dtype,
                    shape(ready.group),
                    ready.group.dtype_name
                ));
            }
            let bytes = match tensor.contiguous_bytes() {
                Some(bytes) => bytes,
                None => {
                    gathered.clear();
                    tensor.gather_into(&mut gathered);
                    &gathered
                }
            };
            scatter(ready, transfer, chunk, bytes)?;
        }
        return Ok(());
    }
    let slots = answer.slots.unwrap_or_default();
    came(slots.len())?;
    let Some(pool) = &registered.pool.segment else {
        return Err("the server lent slots of a pool that is out of reach here".to_owned());
    };
    if registered.connections != core.client.connections() {
        return Err("the server was replaced meanwhile".to_owned());
    }
    let mut bytes = Vec::new();
    for (chunk, slot) in slots.iter().enumerate() {
        check_slot(ready, slot)?;
        in_time(transfer)?;
        bytes.clear();
        pool.read_into(slot.offset, slot.length, &mut bytes)
            .map_err(|error| error.to_string())?;
        scatter(ready, transfer, chunk, &bytes)?;
    }
    Ok(())
}

fn scatter(
    ready: &Ready<'_>,
    transfer: &Transfer,
    chunk: usize,
    bytes: &[u8],
) -> Result<(), String> {
    if bytes.len() as u64 != ready.pages.chunk_bytes() {
        return Err(format!(
            "chunk {chunk} has {} bytes; a chunk has {}",
            bytes.len(),
            ready.pages.chunk_bytes()
        ));
    }
    ready
        .pages
        .scatter(&ready.blocks, chunk, transfer.skip, bytes)
        .map_err(copy_error)
}

/// Shape of a chunk: without the planes when there is one.
fn shape(group: &KernelGroup) -> Vec<u64> {
    group.object_shape()[usize::from(group.kv_size == 1)..].to_vec()
}

fn check_slot(ready: &Ready<'_>, slot: &Slot<'_>) -> Result<(), String> {
    let expected = ready.pages.chunk_bytes();
    if slot.length == expected
        && *slot.shape == *shape(ready.group)
        && slot.dtype == ready.group.dtype_name
    {
        return Ok(());
    }
    Err(format!(
        "a slot has {} bytes, shape {:?} and type {}; registered were {expected} bytes, {:?} and {}",
        slot.length,
        slot.shape,
        slot.dtype,
        shape(ready.group),
        ready.group.dtype_name
    ))
}

/// All chunks of the range in one message.
fn pickled(ready: &Ready<'_>) -> Result<Vec<u8>, String> {
    let shape = shape(ready.group);
    let dtype = Dtype::from_name(&ready.group.dtype_name)
        .ok_or_else(|| format!("{} cannot be pickled", ready.group.dtype_name))?;
    let tensor = TensorToWrite {
        dtype,
        shape: &shape,
    };
    let bytes = usize::try_from(ready.pages.chunk_bytes()).map_err(|error| error.to_string())?;
    pickle::write_tensors(&vec![tensor; ready.chunks], |chunk, out| {
        let start = out.len();
        out.resize(start + bytes, 0);
        let place = &mut out[start..];
        ready
            .pages
            .gather(&ready.blocks, chunk, |offset, piece| {
                place[offset as usize..][..piece.len()].copy_from_slice(piece);
                Ok::<(), std::convert::Infallible>(())
            })
            .map_err(|error| ClientError::Unexpected {
                operation: Operation::CommitStore,
                message: copy_error(error),
            })
    })
    .map_err(|error| error.to_string())
}

fn copy_error<E: std::fmt::Display>(error: CopyError<E>) -> String {
    match error {
        CopyError::Closed => "the worker is gone".to_owned(),
        CopyError::Plan(error) => error.to_string(),
        CopyError::Other(error) => error.to_string(),
    }
}
