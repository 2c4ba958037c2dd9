//! Workers: stores and retrieves that are submitted, run without the GIL, and polled for their results.
//!
//! The mutex guards the threads of a worker that copies by itself; those of its results are acquired inside.

mod engine_driven;
mod geometry;
mod instance_ids;
mod pages;
mod registration;
mod server_driven;
mod server_transfers;
mod start;
mod state;

use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

use kvtier_client::{Client as Native, Scope, SharedPool};
use kvtier_common::sync::{Condvar, Mutex};
use kvtier_proto::key::check_salt;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::client::Client;
use crate::future::{seconds, used_after_fork};
use crate::prompt::Prompt;
use geometry::{Group, Storage, Tensor};
use instance_ids::InstanceIds;
use server_transfers::ServerTransfers;
use start::{parse_mode_and_geometry, register_in_slices};
use state::{Core, FinishedTransfers, Mode, Transfer};

/// A finished transfer for Python: id, device event, error, chunks.
type FinishedTuple<'py> = (u64, Bound<'py, PyBytes>, Option<String>, Option<Vec<u64>>);

/// The threads of a worker that copies by itself.
#[derive(Default)]
struct Threads {
    stores: Option<mpsc::Sender<Transfer>>,
    retrieves: Option<mpsc::Sender<Transfer>>,
    handles: Vec<JoinHandle<()>>,
}

#[pyclass(frozen, module = "kvtier")]
pub struct Worker {
    core: Arc<Core>,
    threads: Mutex<Threads>,
    /// The process that has the threads; a fork of it has none.
    owner: u32,
    /// Keeps the pages alive. It is dropped after [`Worker::drop`] has ended the copies: if the garbage collector breaks
    /// a cycle, the pages might be freed first otherwise.
    _keep: Option<Py<PyAny>>,
}

#[pymethods]
impl Worker {
    /// Registers, with the GIL released. Each of the three or four requests is waited for up to the client's timeout; the
    /// first one without an answer ends it.
    ///
    /// The tensors of `storages` must stay in place until `shutdown` has returned. `keep` is held as long.
    #[new]
    #[pyo3(signature = (client, *, storages, tensors, groups, kv_layout, mode, chunk_tokens, holds_blocks, instance, model_name,
        world_size=1, worker_id=0, num_kv_readers=1, force_pickle=false, keep=None))]
    #[expect(clippy::too_many_arguments, reason = "named arguments in Python")]
    fn new(
        py: Python<'_>,
        client: &Client,
        storages: Vec<Storage>,
        tensors: Vec<Tensor>,
        groups: Vec<Group>,
        kv_layout: Option<String>,
        mode: &str,
        chunk_tokens: u64,
        holds_blocks: bool,
        instance: i64,
        model_name: String,
        world_size: u32,
        worker_id: u32,
        num_kv_readers: i64,
        force_pickle: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let (mode, geometry) = parse_mode_and_geometry(
            mode,
            &storages,
            &tensors,
            groups,
            kv_layout.as_deref(),
            chunk_tokens,
            holds_blocks,
        )?;
        let native = client.native().clone();
        let core = Arc::new(Core {
            client: native.clone(),
            scope: Scope {
                world_size,
                num_kv_readers,
                ..Scope::new(model_name)
            },
            worker_id,
            instance_ids: Mutex::new(InstanceIds::new(instance)),
            mode,
            chunk_tokens,
            force_pickle,
            geometry,
            registered: Mutex::new(None),
            server_transfers: ServerTransfers::default(),
            finished: Mutex::default(),
            changed: Condvar::new(),
            unread: Mutex::default(),
        });
        register_in_slices(py, &core)?;
        let registered_on = core
            .registered
            .lock()
            .as_ref()
            .map(|registered| registered.connections);
        let weak = Arc::downgrade(&core);
        let register_again = move |client: &Native| {
            // A worker that was dropped has nothing to register.
            let core = weak.upgrade();
            let registered = core.map_or(Ok(()), |core| registration::register(&core, client));
            registered.map_err(|error| error.obstacle())
        };
        native.on_recover(registered_on.unwrap_or_default(), Box::new(register_again));
        let mut threads = Threads::default();
        if mode == Mode::Engine {
            let mut start = |name: &str| {
                let (sender, receiver) = mpsc::channel();
                let core = Arc::clone(&core);
                let handle = std::thread::Builder::new()
                    .name(name.to_owned())
                    .spawn(move || engine_driven::run(&core, &receiver))
                    .map_err(|error| PyRuntimeError::new_err(format!("no thread: {error}")))?;
                threads.handles.push(handle);
                Ok::<_, PyErr>(sender)
            };
            let (stores, retrieves) = (start("kvtier-store")?, start("kvtier-load")?);
            (threads.stores, threads.retrieves) = (Some(stores), Some(retrieves));
        }
        Ok(Self {
            core,
            threads: Mutex::new(threads),
            owner: std::process::id(),
            _keep: keep,
        })
    }

    /// Checks the arguments of a worker, without a server.
    #[staticmethod]
    #[pyo3(signature = (*, storages, tensors, groups, kv_layout, mode, chunk_tokens, holds_blocks))]
    fn check(
        storages: Vec<Storage>,
        tensors: Vec<Tensor>,
        groups: Vec<Group>,
        kv_layout: Option<String>,
        mode: &str,
        chunk_tokens: u64,
        holds_blocks: bool,
    ) -> PyResult<()> {
        let layout = kv_layout.as_deref();
        parse_mode_and_geometry(
            mode,
            &storages,
            &tensors,
            groups,
            layout,
            chunk_tokens,
            holds_blocks,
        )
        .map(drop)
    }

    /// The way of the bytes: `pool`, `pickle`, or `server` if the server copies; none while not registered.
    #[getter]
    fn transport(&self) -> Option<&'static str> {
        self.check_owner().ok()?;
        let registered = self.core.registered.lock().clone()?;
        Some(match (self.core.mode, registered.pool.segment()) {
            (Mode::Server, _) => "server",
            (Mode::Engine, Some(_)) => "pool",
            (Mode::Engine, None) => "pickle",
        })
    }

    /// Why the server's pool cannot be opened here; none if it can be, or if there is none.
    #[getter]
    fn pool_obstacle(&self) -> Option<String> {
        self.check_owner().ok()?;
        let registered = self.core.registered.lock().clone()?;
        match &registered.pool {
            SharedPool::Unused { obstacle } => obstacle.clone(),
            SharedPool::Absent | SharedPool::Mapped(_) => None,
        }
    }

    /// Whether the server that is connected now knows this worker.
    #[getter]
    fn is_registered(&self) -> bool {
        self.check_owner().is_ok() && self.core.current().is_some()
    }

    /// Bytes per chunk of this worker; none if only the server knows.
    #[getter]
    fn chunk_bytes(&self) -> Option<u64> {
        self.core
            .geometry
            .pages
            .as_ref()
            .map(pages::Pages::chunk_bytes)
    }

    #[pyo3(signature = (id, prompt, start, end, request_id, cache_salt, block_ids, *, is_store, skip=None, event=vec![],
        timeout=None, keep_seconds=None, session=None))]
    #[expect(clippy::too_many_arguments, reason = "named arguments in Python")]
    fn submit(
        &self,
        id: u64,
        prompt: &Prompt,
        start: &Bound<'_, PyAny>,
        end: &Bound<'_, PyAny>,
        request_id: &Bound<'_, PyAny>,
        cache_salt: &Bound<'_, PyAny>,
        block_ids: &Bound<'_, PyAny>,
        is_store: bool,
        skip: Option<&Bound<'_, PyAny>>,
        event: Vec<u8>,
        timeout: Option<f64>,
        keep_seconds: Option<&Bound<'_, PyAny>>,
        session: Option<String>,
    ) -> PyResult<()> {
        self.check_owner()?;
        // An invalid argument ends this transfer; an exception would leave the caller with half a batch in flight.
        let parsed = || -> Result<_, String> {
            Ok((
                argument::<u64>("start", start)?..argument("end", end)?,
                argument("request_id", request_id)?,
                argument("cache_salt", cache_salt).and_then(|salt: String| {
                    check_salt(&salt).map_err(|error| format!("cache_salt: {error}"))?;
                    Ok(salt)
                })?,
                argument("block_ids", block_ids)?,
                skip.map_or(Ok(0), |skip| argument("skip_first_n_tokens", skip))?,
                keep_seconds
                    .map(|seconds| argument("keep_seconds", seconds))
                    .transpose()?,
            ))
        };
        let (range, request_id, cache_salt, block_ids, skip, keep_seconds) = match parsed() {
            Ok(parsed) => parsed,
            Err(error) => {
                self.core.finish(id, Err(error));
                return Ok(());
            }
        };
        let transfer = Transfer {
            id,
            is_store,
            prompt: prompt.encoded().clone(),
            range,
            request_id,
            cache_salt,
            block_ids,
            skip,
            event,
            deadline: Instant::now() + timeout.map_or_else(|| self.core.client.timeout(), seconds),
            keep_seconds,
            session,
        };
        match self.core.mode {
            Mode::Server => server_driven::submit(&self.core, &transfer),
            Mode::Engine => {
                let threads = self.threads.lock();
                let queue = if is_store {
                    self.core.unread.lock().insert(id, false);
                    &threads.stores
                } else {
                    &threads.retrieves
                };
                if queue
                    .as_ref()
                    .is_none_or(|queue| queue.send(transfer).is_err())
                {
                    self.core
                        .finish(id, Err("the worker was shut down".to_owned()));
                }
            }
        }
        Ok(())
    }

    /// The ones of these stores whose pages may still be read; the others do not start to read their pages any more.
    fn release_pages(&self, mut ids: Vec<u64>) -> PyResult<Vec<u64>> {
        self.check_owner()?;
        // If the server reads them, its progress is not known here.
        if self.core.mode == Mode::Engine {
            let mut unread = self.core.unread.lock();
            ids.retain(|id| match unread.get(id) {
                Some(true) => true,
                Some(false) => {
                    unread.remove(id);
                    false
                }
                None => false,
            });
        }
        Ok(ids)
    }

    /// Takes the transfers that have finished since the last call: (id, device event, error, positions of the chunks that
    /// the server of a store took, if it says which). Waits up to `patience` seconds for one.
    #[pyo3(signature = (patience=0.0))]
    fn take_finished<'py>(
        &self,
        py: Python<'py>,
        patience: f64,
    ) -> PyResult<Vec<FinishedTuple<'py>>> {
        self.check_owner()?;
        let until = Instant::now() + seconds(patience);
        if patience > 0.0 {
            py.detach(|| self.core.wait_for_finished(until));
        } else {
            self.core.finish_released();
        }
        let finished = std::mem::take(&mut *self.core.finished.lock());
        let tuples = finished
            .into_iter()
            .map(|FinishedTransfers { id, outcome }| match outcome {
                Ok(done) => (id, PyBytes::new(py, &done.event), None, done.chunks),
                Err(error) => (id, PyBytes::new(py, &[]), Some(error), None),
            });
        Ok(tuples.collect())
    }

    /// Finishes the transfers, ends the threads and unregisters. It waits for, in this order:
    ///
    /// 1. each transfer, up to a second after its deadline;
    /// 2. a running registration;
    /// 3. the server's answer to each unregistration, mostly one, up to the client's timeout, until one has no answer;
    /// 4. pages that the server may still touch, up to a second after the deadline of their transfer.
    fn shutdown(&self, py: Python<'_>) {
        if self.check_owner().is_ok() {
            py.detach(|| self.stop());
        }
    }
}

impl Worker {
    fn check_owner(&self) -> PyResult<()> {
        if std::process::id() == self.owner {
            Ok(())
        } else {
            Err(used_after_fork())
        }
    }

    fn stop(&self) {
        let handles = {
            let mut threads = self.threads.lock();
            threads.stores = None;
            threads.retrieves = None;
            std::mem::take(&mut threads.handles)
        };
        for handle in handles {
            // A thread that panicked has nothing left to finish.
            let _ = handle.join();
        }
        registration::stop(&self.core);
    }
}

impl Drop for Worker {
    /// Without a shutdown the pages may be freed next, so nothing may touch them after this.
    fn drop(&mut self) {
        if std::process::id() != self.owner {
            return;
        }
        if let Some(pages) = &self.core.geometry.pages {
            pages.close();
        }
        // The threads need no GIL, but others do.
        if Python::try_attach(|py| py.detach(|| self.stop())).is_none() {
            self.stop();
        }
    }
}

/// An argument, converted; the error names it.
fn argument<'py, T: FromPyObjectOwned<'py>>(
    name: &str,
    value: &Bound<'py, PyAny>,
) -> Result<T, String> {
    let extracted = value.extract::<T>().map_err(Into::<PyErr>::into);
    extracted.map_err(|error| format!("{name}: {error}"))
}
