//! Futures for Python.
//!
//! The mutex guards the result; that of the client's future is acquired inside.

use std::time::{Duration, Instant};

use kvtier_client::ClientError;
use kvtier_common::sync::Mutex;
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;
use pyo3::types::PyType;

use crate::errors::{KvTierError, exception};

/// Longest wait passed to the system.
pub const MAX_WAIT: Duration = Duration::from_secs(24 * 3600);

/// Longest wait between two checks for Python's signals.
const SLICE: Duration = Duration::from_millis(50);

/// Runs `step` again and again without the GIL, each time for a slice of `timeout`, until it returns something.
///
/// # Errors
/// The exception of a signal's handler, such as KeyboardInterrupt.
pub fn wait_in_slices<T: Send>(
    py: Python<'_>,
    timeout: Duration,
    mut step: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    let until = Instant::now() + timeout;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let done = py.detach(|| step(left.min(SLICE)));
        if done.is_some() || left.is_zero() {
            return Ok(done);
        }
        py.check_signals()?;
    }
}

/// The error of a call that would wait for threads that a forked process does not have.
pub fn used_after_fork() -> PyErr {
    KvTierError::new_err("used after fork; make another client in this process")
}

/// Answer of an operation.
#[derive(Clone)]
pub enum Value {
    Nothing,
    Bool(bool),
    Int(u64),
    Text(String),
    Texts(Vec<String>),
    Bools(Vec<bool>),
}

impl Value {
    fn to_python(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self {
            Self::Nothing => Ok(py.None()),
            Self::Bool(value) => value.into_py_any(py),
            Self::Int(value) => value.into_py_any(py),
            Self::Text(value) => value.into_py_any(py),
            Self::Texts(value) => value.into_py_any(py),
            Self::Bools(value) => value.into_py_any(py),
        }
    }
}

impl From<()> for Value {
    fn from((): ()) -> Self {
        Self::Nothing
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        Self::Int(value)
    }
}

impl From<usize> for Value {
    fn from(value: usize) -> Self {
        Self::Int(value as u64)
    }
}

impl From<String> for Value {
    fn from(value: String) -> Self {
        Self::Text(value)
    }
}

impl From<Vec<String>> for Value {
    fn from(value: Vec<String>) -> Self {
        Self::Texts(value)
    }
}

impl From<Vec<bool>> for Value {
    fn from(value: Vec<bool>) -> Self {
        Self::Bools(value)
    }
}

impl From<Option<u64>> for Value {
    fn from(value: Option<u64>) -> Self {
        value.map_or(Self::Nothing, Self::Int)
    }
}

/// A future of any type.
trait AnyFuture: Send + Sync {
    fn is_ready(&self) -> bool;
    fn wait_ready(&self, timeout: Duration);
    fn try_take(&self) -> Option<Result<Value, ClientError>>;
}

impl<T: Into<Value> + Send> AnyFuture for kvtier_client::Future<T> {
    fn is_ready(&self) -> bool {
        kvtier_client::Future::is_ready(self)
    }

    fn wait_ready(&self, timeout: Duration) {
        kvtier_client::Future::wait_ready(self, timeout);
    }

    fn try_take(&self) -> Option<Result<Value, ClientError>> {
        Some(kvtier_client::Future::try_take(self)?.map(Into::into))
    }
}

enum CallState {
    Waiting,
    Done(Result<Value, ClientError>),
    Cancelled,
}

#[pyclass(frozen, module = "kvtier")]
pub struct Future {
    inner: Box<dyn AnyFuture>,
    state: Mutex<CallState>,
    /// The process in which the result arrives.
    owner: u32,
}

impl Future {
    pub fn new<T: Into<Value> + Send + 'static>(future: kvtier_client::Future<T>) -> Self {
        Self {
            inner: Box::new(future),
            state: Mutex::new(CallState::Waiting),
            owner: std::process::id(),
        }
    }

    fn check_owner(&self) -> PyResult<()> {
        if std::process::id() == self.owner {
            Ok(())
        } else {
            Err(used_after_fork())
        }
    }

    fn outcome(state: &CallState, py: Python<'_>) -> Option<PyResult<Py<PyAny>>> {
        match state {
            CallState::Waiting => None,
            CallState::Done(Ok(value)) => Some(value.to_python(py)),
            CallState::Done(Err(error)) => Some(Err(exception(error))),
            CallState::Cancelled => Some(Err(KvTierError::new_err("cancelled"))),
        }
    }
}

#[pymethods]
impl Future {
    /// Whether the result has arrived. Never waits.
    fn done(&self) -> PyResult<bool> {
        self.check_owner()?;
        Ok(match *self.state.lock() {
            CallState::Waiting => self.inner.is_ready(),
            CallState::Done(_) | CallState::Cancelled => true,
        })
    }

    /// `Future[int]` is a type for type checkers.
    #[classmethod]
    fn __class_getitem__<'py>(
        cls: &Bound<'py, PyType>,
        item: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let types = cls.py().import("types")?;
        types.getattr("GenericAlias")?.call1((cls, item))
    }

    #[pyo3(signature = (timeout=None))]
    fn result(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        self.check_owner()?;
        if let Some(outcome) = Self::outcome(&self.state.lock(), py) {
            return outcome;
        }
        let timeout = timeout.map_or(MAX_WAIT, seconds);
        wait_in_slices(py, timeout, |slice| {
            self.inner.wait_ready(slice);
            // Another thread may have taken the result, or cancelled.
            let is_over = || !matches!(*self.state.lock(), CallState::Waiting);
            (self.inner.is_ready() || is_over()).then_some(())
        })?;
        // Several threads may have waited; it is taken once.
        let mut state = self.state.lock();
        if matches!(*state, CallState::Waiting)
            && let Some(result) = self.inner.try_take()
        {
            *state = CallState::Done(result);
        }
        Self::outcome(&state, py).unwrap_or_else(|| {
            Err(PyTimeoutError::new_err(format!(
                "no result within {} s",
                timeout.as_secs_f64()
            )))
        })
    }

    /// Drops the result; the server may still serve the request.
    fn cancel(&self) -> PyResult<()> {
        self.check_owner()?;
        let mut state = self.state.lock();
        if matches!(*state, CallState::Waiting) {
            *state = CallState::Cancelled;
        }
        Ok(())
    }
}

/// A span in seconds, of at most [`MAX_WAIT`]; 0 for negative and undefined spans.
pub fn seconds(span: f64) -> Duration {
    if span > 0.0 {
        Duration::try_from_secs_f64(span).map_or(MAX_WAIT, |span| span.min(MAX_WAIT))
    } else {
        Duration::ZERO
    }
}
