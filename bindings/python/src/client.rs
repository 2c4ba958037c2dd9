//! The client for Python.

use std::time::Duration;

use kvtier_client::{ChunkTerms, Client as Native, Health, InstanceId, Scope, Settings};
use kvtier_proto::key::check_salt;
use kvtier_proto::key_settings::KeySettings;
use kvtier_proto::request::AllocationRecord;
use kvtier_proto::session::SessionAction;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::{Disconnected, TimedOut, exception};
use crate::future::{Future, MAX_WAIT, seconds, wait_in_slices};
use crate::kv_events::KvEvents;
use crate::prompt::Prompt;

#[pyclass(frozen, weakref, module = "kvtier")]
pub struct Client {
    native: Native,
}

impl Client {
    pub fn native(&self) -> &Native {
        &self.native
    }

    /// The scope of a scheduler's keys: model, world, tenant, and the agreed chunk size where the server reads it.
    fn scope(
        &self,
        model_name: String,
        world_size: u32,
        num_kv_readers: i64,
        cache_salt: String,
    ) -> Scope {
        Scope {
            model_name,
            world_size,
            cache_salt,
            chunk_tokens: self.native.named_chunk_tokens(),
            num_kv_readers,
            settings: None,
        }
    }
}

/// A positive span in seconds, from an argument.
fn positive(name: &str, span: f64) -> PyResult<Duration> {
    let most = MAX_WAIT.as_secs_f64();
    if span > 0.0 && span <= most {
        return Ok(seconds(span));
    }
    Err(PyValueError::new_err(format!(
        "{name}: {span}; allowed are seconds above 0, at most {most}"
    )))
}

/// Calls a callback of [`Client::on_recover`].
fn recovered(py: Python<'_>, callback: &Py<PyAny>) -> Result<(), Option<String>> {
    let obstacle = callback
        .call0(py)
        .and_then(|obstacle| obstacle.extract::<Option<String>>(py));
    match obstacle {
        Ok(None) => Ok(()),
        Ok(obstacle) => Err(obstacle),
        Err(error)
            if error.is_instance_of::<TimedOut>(py) || error.is_instance_of::<Disconnected>(py) =>
        {
            Err(None)
        }
        Err(error) => Err(Some(error.value(py).to_string())),
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (url, *, timeout=10.0, heartbeat=5.0, block_tokens=None, chunk_tokens=None))]
    fn new(
        py: Python<'_>,
        url: &str,
        timeout: f64,
        heartbeat: f64,
        block_tokens: Option<u64>,
        chunk_tokens: Option<u64>,
    ) -> PyResult<Self> {
        if let (None, Some(chunk_tokens)) = (block_tokens, chunk_tokens) {
            return Err(PyValueError::new_err(format!(
                "chunk_tokens: {chunk_tokens}; block_tokens is needed too"
            )));
        }
        let settings = Settings {
            timeout: positive("timeout", timeout)?,
            heartbeat: positive("heartbeat", heartbeat)?.max(Duration::from_millis(1)),
            chunk: block_tokens.map(|block_tokens| ChunkTerms {
                block_tokens,
                chunk_tokens,
            }),
            ..Settings::default()
        };
        let native = py
            .detach(|| Native::connect_with(url, settings))
            .map_err(|error| exception(&error))?;
        Ok(Self { native })
    }

    #[getter]
    fn url(&self) -> &str {
        self.native.endpoint()
    }

    #[getter]
    fn timeout(&self) -> f64 {
        self.native.timeout().as_secs_f64()
    }

    #[setter]
    fn set_timeout(&self, timeout: f64) -> PyResult<()> {
        self.native.set_timeout(positive("timeout", timeout)?);
        Ok(())
    }

    #[getter]
    fn health(&self) -> &'static str {
        self.native.health().name()
    }

    #[getter]
    fn is_healthy(&self) -> bool {
        self.native.health() == Health::Healthy
    }

    #[getter]
    fn is_unreachable(&self) -> bool {
        self.native.is_unreachable()
    }

    #[getter]
    fn connections(&self) -> u64 {
        self.native.connections()
    }

    #[getter]
    fn in_flight(&self) -> usize {
        self.native.in_flight()
    }

    #[getter]
    fn chunk_tokens(&self) -> Option<u64> {
        self.native.chunk_tokens()
    }

    #[getter]
    fn named_chunk_tokens(&self) -> Option<u32> {
        self.native.named_chunk_tokens()
    }

    #[getter]
    fn obstacle(&self) -> Option<String> {
        self.native.obstacle()
    }

    fn wait_healthy(&self, py: Python<'_>, patience: f64) -> PyResult<bool> {
        if self.native.is_forked() {
            return Ok(false);
        }
        let healthy = |slice| self.native.wait_healthy(slice).then_some(());
        Ok(wait_in_slices(py, seconds(patience), healthy)?.is_some())
    }

    /// The callback is called on a thread of the client's. It returns why the server cannot be used, or None.
    fn on_recover(&self, callback: Py<PyAny>) {
        let hook = move |_: &Native| {
            Python::try_attach(|py| recovered(py, &callback)).unwrap_or(Err(None))
        };
        // No connection has this number, so the hook is called on the current one too.
        self.native.on_recover(0, Box::new(hook));
    }

    /// The callback gets the new state's name, on a thread of the client's.
    fn on_health(&self, callback: Py<PyAny>) {
        self.native.on_health(Box::new(move |health| {
            // None if the interpreter is ending: the state is dropped.
            Python::try_attach(|py| {
                if let Err(error) = callback.call1(py, (health.name(),)) {
                    error.write_unraisable(py, None);
                }
            });
        }));
    }

    fn kv_events(&self, model_name: &str) -> PyResult<KvEvents> {
        KvEvents::follow(&self.native, model_name).map_err(|error| exception(&error))
    }

    fn close(&self) {
        self.native.close();
    }

    fn get_chunk_size(&self) -> Future {
        Future::new(self.native.get_chunk_size())
    }

    fn get_experimental(&self) -> Future {
        Future::new(self.native.get_experimental())
    }

    fn noop(&self) -> Future {
        Future::new(self.native.noop())
    }

    #[pyo3(signature = (instance=None))]
    fn ping(&self, instance: Option<i64>) -> Future {
        Future::new(self.native.ping(instance.map(InstanceId)))
    }

    #[pyo3(signature = (force=false))]
    fn clear(&self, force: bool) -> Future {
        Future::new(self.native.clear(force))
    }

    fn end_session(&self, request_id: &str) -> Future {
        Future::new(self.native.end_session(request_id))
    }

    /// `records`: (request id, new block ids, new token ids).
    fn report_block_allocation(
        &self,
        instance: i64,
        model_name: &str,
        records: Vec<(String, Vec<i64>, Vec<i64>)>,
    ) -> Future {
        let records = records
            .iter()
            .map(|(request_id, blocks, tokens)| AllocationRecord {
                request_id,
                new_block_ids: blocks.clone(),
                new_token_ids: tokens.clone(),
            })
            .collect();
        Future::new(
            self.native
                .report_block_allocation(InstanceId(instance), model_name, records),
        )
    }

    /// Chunks of the longest cached prefix of `prompt[..end]`.
    #[pyo3(signature = (prompt, end, request_id, model_name, world_size=1, num_kv_readers=1, cache_salt=String::new(),
        timeout=None, traceparent=None, keep_seconds=None, peer=None, session=None, session_action=None))]
    #[expect(clippy::too_many_arguments, reason = "named arguments in Python")]
    fn lookup(
        &self,
        prompt: &Prompt,
        end: u64,
        request_id: &str,
        model_name: String,
        world_size: u32,
        num_kv_readers: i64,
        cache_salt: String,
        timeout: Option<f64>,
        traceparent: Option<&str>,
        keep_seconds: Option<u32>,
        peer: Option<&str>,
        session: Option<&str>,
        session_action: Option<&str>,
    ) -> PyResult<Future> {
        check_salt(&cache_salt)
            .map_err(|error| PyValueError::new_err(format!("cache_salt: {error}")))?;
        let timeout = timeout.map_or_else(|| self.native.timeout(), seconds);
        let scope = self.scope(model_name, world_size, num_kv_readers, cache_salt);
        let scope = scope.with_settings(KeySettings {
            keep_seconds,
            peer,
            session,
            session_action: session_action.and_then(SessionAction::from_name),
            traceparent,
            ..KeySettings::default()
        });
        let key = scope.scheduler_key(prompt.encoded(), 0..end, request_id);
        Ok(Future::new(self.native.lookup_hits_within(&key, timeout)))
    }

    /// Finds the objects of a prompt of keys that are cached.
    #[pyo3(signature = (prompt, request_id, model_name, world_size=1, worker_id=None, cache_salt=String::new(), timeout=None))]
    #[expect(clippy::too_many_arguments, reason = "named arguments in Python")]
    fn find(
        &self,
        prompt: &Prompt,
        request_id: &str,
        model_name: String,
        world_size: u32,
        worker_id: Option<u32>,
        cache_salt: String,
        timeout: Option<f64>,
    ) -> PyResult<Future> {
        check_salt(&cache_salt)
            .map_err(|error| PyValueError::new_err(format!("cache_salt: {error}")))?;
        let timeout = timeout.map_or_else(|| self.native.timeout(), seconds);
        let object_tokens = prompt.object_tokens().ok_or_else(|| {
            PyValueError::new_err("prompt: it has tokens; Prompt.from_keys is needed")
        })?;
        let mut scope = self.scope(model_name, world_size, 1, cache_salt);
        scope.chunk_tokens = Some(object_tokens);
        let (prompt, range) = (prompt.encoded(), 0..prompt.encoded().len() as u64);
        let key = match worker_id {
            Some(worker) => scope.worker_key(worker, prompt, range, request_id),
            None => scope.scheduler_key(prompt, range, request_id),
        };
        Ok(Future::new(self.native.find(&key, timeout)))
    }

    #[pyo3(signature = (prompt, start, end, request_id, model_name, world_size=1, num_kv_readers=1, cache_salt=String::new()))]
    #[expect(clippy::too_many_arguments, reason = "named arguments in Python")]
    fn free_lookup_locks(
        &self,
        prompt: &Prompt,
        start: u64,
        end: u64,
        request_id: &str,
        model_name: String,
        world_size: u32,
        num_kv_readers: i64,
        cache_salt: String,
    ) -> Future {
        let scope = self.scope(model_name, world_size, num_kv_readers, cache_salt);
        let key = scope.scheduler_key(prompt.encoded(), start..end, request_id);
        Future::new(self.native.free_lookup_locks(&key))
    }
}
