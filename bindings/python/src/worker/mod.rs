//! Workers: stores and retrieves that are submitted, run without the GIL, and are asked for when they have finished.

mod engine_driven;
mod geometry;
mod handed;
mod numbers;
mod pages;
mod server_driven;
mod start;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvtier_client::{Client as Native, ClientError, InstanceId, Prompt as Encoded, Scope};
use kvtier_memory::ForeignSegment;
use kvtier_proto::key::check_salt;
use parking_lot::{Condvar, Mutex};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::client::Client;
use crate::future::{seconds, used_after_fork};
use crate::prompt::Prompt;
use geometry::{Geometry, Group, Storage, Tensor};
use handed::Handed;
use numbers::Numbers;
use start::{described, register_in_slices};

/// Who copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// The worker itself, to and from the server's pool, or in messages.
    Engine,
    /// The server, from and to the engine's pages.
    Server,
}

/// A store or a retrieve on its way.
struct Transfer {
    /// The caller's number for it.
    id: u64,
    is_store: bool,
    prompt: Encoded,
    range: Range<u64>,
    request_id: String,
    cache_salt: String,
    /// One list for each group.
    block_ids: Vec<Vec<i64>>,
    /// Tokens at the front of the range that must not be written.
    skip: u64,
    event: Vec<u8>,
    deadline: Instant,
}

/// How a transfer ended.
struct Finished {
    id: u64,
    outcome: Result<Done, String>,
}

/// A transfer that the server has said yes to.
#[derive(Default)]
struct Done {
    /// The device event behind which the copy is complete.
    event: Vec<u8>,
    /// Of a store, the positions in its range of the chunks that the server took; none where it does not say.
    chunks: Option<Vec<u64>>,
}

/// A transfer's end for Python.
type Ended<'py> = (u64, Bound<'py, PyBytes>, Option<String>, Option<Vec<u64>>);

/// What the server knows of this worker since its last registration.
struct Registered {
    instance: InstanceId,
    /// [`Native::connections`] at the time: later ones lead to a server that may not know it.
    connections: u64,
    pool: Pool,
}

/// The server's pool as this worker sees it; neither where chunks travel in messages anyway.
#[derive(Default)]
struct Pool {
    segment: Option<ForeignSegment>,
    /// Why a pool that the server has cannot be opened here.
    obstacle: Option<String>,
}

/// What the Python object and the threads share.
struct Core {
    client: Native,
    scope: Scope,
    worker_id: u32,
    numbers: Mutex<Numbers>,
    mode: Mode,
    chunk_tokens: u64,
    force_pickle: bool,
    geometry: Geometry,
    registered: Mutex<Option<Arc<Registered>>>,
    handed: Handed,
    finished: Mutex<Vec<Finished>>,
    arrived: Condvar,
    /// Stores whose pages this process has not read yet, and whether it is at it.
    unread: Mutex<HashMap<u64, bool>>,
}

impl Core {
    /// The registration, if it is one with the server that is connected now.
    fn current(&self) -> Option<Arc<Registered>> {
        let registered = self.registered.lock().clone()?;
        (registered.connections == self.client.connections()).then_some(registered)
    }

    fn finish(&self, id: u64, outcome: Result<Vec<u8>, String>) {
        let done = |event| Done {
            event,
            chunks: None,
        };
        self.finish_with(id, outcome.map(done));
    }

    fn finish_with(&self, id: u64, outcome: Result<Done, String>) {
        self.unread.lock().remove(&id);
        self.finished.lock().push(Finished { id, outcome });
        self.arrived.notify_all();
    }

    /// Finishes what was not answered and whose pages are free.
    fn finish_free(&self) {
        for (id, error) in self.handed.take_free() {
            self.finish(id, Err(error));
        }
    }

    /// The server has not answered; the transfer finishes when its pages are free.
    fn unanswered(&self, id: u64, error: String) {
        self.handed.unanswered(id, error);
        // Who waits has to look when that is.
        drop(self.finished.lock());
        self.arrived.notify_all();
    }

    /// Waits for something that has finished, up to `until`.
    fn wait_for_finished(&self, until: Instant) {
        loop {
            self.finish_free();
            let mut finished = self.finished.lock();
            if !finished.is_empty() || Instant::now() >= until {
                return;
            }
            let next = self
                .handed
                .next_free()
                .map_or(until, |next| next.min(until));
            self.arrived.wait_until(&mut finished, next);
        }
    }

    /// Waits until the server has let go of all pages, at the latest a moment behind the last deadline.
    fn wait_for_pages(&self) {
        loop {
            self.finish_free();
            let mut finished = self.finished.lock();
            if self.handed.is_empty() {
                return;
            }
            match self.handed.next_free() {
                Some(next) => drop(self.arrived.wait_until(&mut finished, next)),
                None => self.arrived.wait(&mut finished),
            }
        }
    }

    fn scope_of(&self, transfer: &Transfer) -> Scope {
        self.scope.clone().with_salt(transfer.cache_salt.clone())
    }
}

/// Has the server know that this client takes a refusal's text. Without it a refused registration of pages looks like an
/// accepted one, since clients of releases before 0.5.5 take no text.
fn introduce(client: &Native) -> Result<(), ClientError> {
    match client.get_experimental().join() {
        Err(error @ (ClientError::Timeout { .. } | ClientError::Disconnected { .. })) => Err(error),
        // Whatever was answered, the question was asked.
        _ => Ok(()),
    }
}

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
    /// The process that has the threads; a fork of it has not.
    owner: u32,
    /// What keeps the pages where they are. It goes when [`Worker::drop`] has ended the copies: of a cycle that the
    /// collector takes apart, the pages might go first.
    _keep: Option<Py<PyAny>>,
}

#[pymethods]
impl Worker {
    /// Registers, with the GIL released; each of the three or four requests that this takes is waited for up to the
    /// client's timeout, and the first that has no answer ends it.
    ///
    /// The tensors behind `storages` must stay where they are until `shutdown` has returned. `keep` is held as long.
    #[new]
    #[pyo3(signature = (client, *, storages, tensors, groups, kv_layout, mode, chunk_tokens, instance, model_name,
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
        instance: i64,
        model_name: String,
        world_size: u32,
        worker_id: u32,
        num_kv_readers: i64,
        force_pickle: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let (mode, geometry) = described(
            mode,
            &storages,
            &tensors,
            groups,
            kv_layout.as_deref(),
            chunk_tokens,
        )?;
        let native = client.native().clone();
        let core = Arc::new(Core {
            client: native.clone(),
            scope: Scope {
                model_name,
                world_size,
                cache_salt: String::new(),
                num_kv_readers,
            },
            worker_id,
            numbers: Mutex::new(Numbers::new(instance)),
            mode,
            chunk_tokens,
            force_pickle,
            geometry,
            registered: Mutex::new(None),
            handed: Handed::default(),
            finished: Mutex::default(),
            arrived: Condvar::new(),
            unread: Mutex::default(),
        });
        register_in_slices(py, &core)?;
        let told = core
            .registered
            .lock()
            .as_ref()
            .map(|known| known.connections);
        let known = Arc::downgrade(&core);
        let again = move |client: &Native| {
            // A worker that is gone has nothing to register.
            let registered = known.upgrade().map_or(Ok(()), |core| core.register(client));
            registered.map_err(|error| error.obstacle())
        };
        native.on_recover(told.unwrap_or_default(), Box::new(again));
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

    /// Checks what a worker would be made of, without a server.
    #[staticmethod]
    #[pyo3(signature = (*, storages, tensors, groups, kv_layout, mode, chunk_tokens))]
    fn check(
        storages: Vec<Storage>,
        tensors: Vec<Tensor>,
        groups: Vec<Group>,
        kv_layout: Option<String>,
        mode: &str,
        chunk_tokens: u64,
    ) -> PyResult<()> {
        let layout = kv_layout.as_deref();
        described(mode, &storages, &tensors, groups, layout, chunk_tokens).map(drop)
    }

    /// How bytes travel: `pool`, `pickle`, or `server` where the server copies; none while not registered.
    #[getter]
    fn transport(&self) -> Option<&'static str> {
        self.check_owner().ok()?;
        let registered = self.core.registered.lock().clone()?;
        Some(match (self.core.mode, &registered.pool.segment) {
            (Mode::Server, _) => "server",
            (Mode::Engine, Some(_)) => "pool",
            (Mode::Engine, None) => "pickle",
        })
    }

    /// Why the server's pool cannot be opened here; none where it can, or where there is none.
    #[getter]
    fn pool_obstacle(&self) -> Option<String> {
        self.check_owner().ok()?;
        let registered = self.core.registered.lock().clone()?;
        registered.pool.obstacle.clone()
    }

    /// Whether the server that is connected now knows this worker.
    #[getter]
    fn is_registered(&self) -> bool {
        self.check_owner().is_ok() && self.core.current().is_some()
    }

    /// Bytes of one chunk of this worker; none where only the server can tell.
    #[getter]
    fn chunk_bytes(&self) -> Option<u64> {
        self.core
            .geometry
            .pages
            .as_ref()
            .map(pages::Pages::chunk_bytes)
    }

    #[pyo3(signature = (id, prompt, start, end, request_id, cache_salt, block_ids, *, is_store, skip=None, event=vec![],
        timeout=None))]
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
    ) -> PyResult<()> {
        self.check_owner()?;
        // What cannot be meant ends this transfer; an exception would leave the caller with half a batch under way.
        let described = || -> Result<_, String> {
            Ok((
                argument::<u64>("start", start)?..argument("end", end)?,
                argument("request_id", request_id)?,
                argument("cache_salt", cache_salt).and_then(|salt: String| {
                    check_salt(&salt).map_err(|error| format!("cache_salt: {error}"))?;
                    Ok(salt)
                })?,
                argument("block_ids", block_ids)?,
                skip.map_or(Ok(0), |skip| argument("skip_first_n_tokens", skip))?,
            ))
        };
        let (range, request_id, cache_salt, block_ids, skip) = match described() {
            Ok(described) => described,
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

    /// Those of these stores whose pages may still be read; none of the others begins to read its pages any more.
    fn release_pages(&self, mut ids: Vec<u64>) -> PyResult<Vec<u64>> {
        self.check_owner()?;
        // Where the server reads them, nobody here knows how far it is.
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

    /// What has finished since the last call: (id, device event, error, positions of the chunks that a store's server
    /// took where it says so). Waits up to `patience` seconds for something.
    #[pyo3(signature = (patience=0.0))]
    fn take_finished<'py>(&self, py: Python<'py>, patience: f64) -> PyResult<Vec<Ended<'py>>> {
        self.check_owner()?;
        let until = Instant::now() + seconds(patience);
        if patience > 0.0 {
            py.detach(|| self.core.wait_for_finished(until));
        } else {
            self.core.finish_free();
        }
        let finished = std::mem::take(&mut *self.core.finished.lock());
        let ended = finished
            .into_iter()
            .map(|Finished { id, outcome }| match outcome {
                Ok(done) => (id, PyBytes::new(py, &done.event), None, done.chunks),
                Err(error) => (id, PyBytes::new(py, &[]), Some(error), None),
            });
        Ok(ended.collect())
    }

    /// Finishes what is under way, ends the threads and unregisters.
    ///
    /// It waits, one after the other: for each transfer up to a second behind its deadline; for a registration that is
    /// under way; for the server's answer to each unregistration, mostly one, up to the client's timeout, and for none
    /// behind the first that has no answer; and for pages that the server may be at up to a second behind their deadline.
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
            // A thread that panicked has nothing more to finish.
            let _ = handle.join();
        }
        self.core.stop();
    }
}

impl Drop for Worker {
    /// Whoever drops it without a shutdown may free the pages next: nobody may touch them then.
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

/// An argument as what it has to be, or what is wrong with it.
fn argument<'py, T: FromPyObjectOwned<'py>>(
    name: &str,
    value: &Bound<'py, PyAny>,
) -> Result<T, String> {
    let extracted = value.extract::<T>().map_err(Into::<PyErr>::into);
    extracted.map_err(|error| format!("{name}: {error}"))
}

/// What is left until a deadline; none when it has passed.
fn left(deadline: Instant) -> Option<Duration> {
    Some(deadline.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
}
