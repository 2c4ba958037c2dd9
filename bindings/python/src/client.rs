//! The client.

use std::time::Duration;

use kvtier_client::{Client as Native, Health, InstanceId, Scope, Settings};
use kvtier_proto::request::AllocationRecord;
use pyo3::prelude::*;

use crate::errors::exception;
use crate::future::{Future, seconds};
use crate::prompt::Prompt;

#[pyclass(frozen, module = "kvtier")]
pub struct Client {
    native: Native,
}

impl Client {
    pub fn native(&self) -> &Native {
        &self.native
    }
}

/// Whose keys: model, world, tenant.
fn scope(model_name: String, world_size: u32, num_kv_readers: i64, cache_salt: String) -> Scope {
    Scope {
        model_name,
        world_size,
        cache_salt,
        num_kv_readers,
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (url, *, timeout=10.0, heartbeat=5.0))]
    fn new(py: Python<'_>, url: &str, timeout: f64, heartbeat: f64) -> PyResult<Self> {
        let settings = Settings {
            timeout: seconds(timeout),
            heartbeat: seconds(heartbeat).max(Duration::from_millis(1)),
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
    fn set_timeout(&self, span: f64) {
        self.native.set_timeout(seconds(span));
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
    fn connections(&self) -> u64 {
        self.native.connections()
    }

    #[getter]
    fn in_flight(&self) -> usize {
        self.native.in_flight()
    }

    fn wait_healthy(&self, py: Python<'_>, patience: f64) -> bool {
        py.detach(|| self.native.wait_healthy(seconds(patience)))
    }

    /// The callback gets the new state's name, on a thread of the client's.
    fn on_health(&self, callback: Py<PyAny>) {
        self.native.on_health(Box::new(move |health| {
            // None when the interpreter is ending: nobody is there to be told.
            Python::try_attach(|py| {
                if let Err(error) = callback.call1(py, (health.name(),)) {
                    error.write_unraisable(py, None);
                }
            });
        }));
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
    #[pyo3(signature = (prompt, end, request_id, model_name, world_size=1, num_kv_readers=1, cache_salt=String::new()))]
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
    ) -> Future {
        let scope = scope(model_name, world_size, num_kv_readers, cache_salt);
        let key = scope.scheduler_key(prompt.encoded(), 0..end, request_id);
        Future::new(self.native.lookup_hits(&key))
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
        let scope = scope(model_name, world_size, num_kv_readers, cache_salt);
        let key = scope.scheduler_key(prompt.encoded(), start..end, request_id);
        Future::new(self.native.free_lookup_locks(&key))
    }
}
