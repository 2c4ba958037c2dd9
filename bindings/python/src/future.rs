//! Results that are still to come, as Python sees them.

use std::time::{Duration, Instant};

use kvtier_client::ClientError;
use parking_lot::Mutex;
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyType};

use crate::errors::{KvTierError, exception};

/// Longest wait that is given to the system at once.
pub const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// Longest wait between two looks at Python's signals.
const SLICE: Duration = Duration::from_millis(50);

/// Runs `step` without the GIL and with a slice of the time each, until it returns something or `patience` is over.
///
/// # Errors
/// What a signal's handler raised, such as KeyboardInterrupt.
pub fn wait_in_slices<T: Send>(
    py: Python<'_>,
    patience: Duration,
    mut step: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    let until = Instant::now() + patience;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let done = py.detach(|| step(left.min(SLICE)));
        if done.is_some() || left.is_zero() {
            return Ok(done);
        }
        py.check_signals()?;
    }
}

/// The error of whatever would wait for threads that a fork of their process does not have.
pub fn used_after_fork() -> PyErr {
    KvTierError::new_err("used after fork; make another client in this process")
}

/// What an operation answers.
#[derive(Clone)]
pub enum Value {
    Nothing,
    Bool(bool),
    Int(u64),
    Text(String),
    Texts(Vec<String>),
    Transfer(bool, Vec<u8>),
}

impl Value {
    fn to_python(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self {
            Self::Nothing => Ok(py.None()),
            Self::Bool(value) => value.into_py_any(py),
            Self::Int(value) => value.into_py_any(py),
            Self::Text(value) => value.into_py_any(py),
            Self::Texts(value) => value.into_py_any(py),
            Self::Transfer(ok, event) => (*ok, PyBytes::new(py, event)).into_py_any(py),
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

impl From<Option<u64>> for Value {
    fn from(value: Option<u64>) -> Self {
        value.map_or(Self::Nothing, Self::Int)
    }
}

/// A future of whatever type.
trait Awaited: Send + Sync {
    fn is_ready(&self) -> bool;
    fn wait_ready(&self, patience: Duration);
    fn try_take(&self) -> Option<Result<Value, ClientError>>;
}

impl<T: Into<Value> + Send> Awaited for kvtier_client::Future<T> {
    fn is_ready(&self) -> bool {
        kvtier_client::Future::is_ready(self)
    }

    fn wait_ready(&self, patience: Duration) {
        kvtier_client::Future::wait_ready(self, patience);
    }

    fn try_take(&self) -> Option<Result<Value, ClientError>> {
        Some(kvtier_client::Future::try_take(self)?.map(Into::into))
    }
}

enum State {
    Waiting,
    Done(Result<Value, ClientError>),
    Cancelled,
}

#[pyclass(frozen, module = "kvtier")]
pub struct Future {
    awaited: Box<dyn Awaited>,
    state: Mutex<State>,
    /// The process in which the result arrives.
    owner: u32,
}

impl Future {
    pub fn new<T: Into<Value> + Send + 'static>(future: kvtier_client::Future<T>) -> Self {
        Self {
            awaited: Box::new(future),
            state: Mutex::new(State::Waiting),
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

    fn given(state: &State, py: Python<'_>) -> Option<PyResult<Py<PyAny>>> {
        match state {
            State::Waiting => None,
            State::Done(Ok(value)) => Some(value.to_python(py)),
            State::Done(Err(error)) => Some(Err(exception(error))),
            State::Cancelled => Some(Err(KvTierError::new_err("cancelled"))),
        }
    }
}

#[pymethods]
impl Future {
    /// Whether the result is there. Never waits.
    fn done(&self) -> PyResult<bool> {
        self.check_owner()?;
        Ok(match *self.state.lock() {
            State::Waiting => self.awaited.is_ready(),
            State::Done(_) | State::Cancelled => true,
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
        if let Some(given) = Self::given(&self.state.lock(), py) {
            return given;
        }
        let patience = timeout.map_or(LONGEST_WAIT, seconds);
        wait_in_slices(py, patience, |slice| {
            self.awaited.wait_ready(slice);
            // Another thread may have taken the result, or cancelled.
            let is_over = || !matches!(*self.state.lock(), State::Waiting);
            (self.awaited.is_ready() || is_over()).then_some(())
        })?;
        // Several threads may have waited; it is taken once.
        let mut state = self.state.lock();
        if matches!(*state, State::Waiting)
            && let Some(result) = self.awaited.try_take()
        {
            *state = State::Done(result);
        }
        Self::given(&state, py).unwrap_or_else(|| {
            Err(PyTimeoutError::new_err(format!(
                "no result within {} s",
                patience.as_secs_f64()
            )))
        })
    }

    /// Gives the result up; the server may still do what it was asked.
    fn cancel(&self) -> PyResult<()> {
        self.check_owner()?;
        let mut state = self.state.lock();
        if matches!(*state, State::Waiting) {
            *state = State::Cancelled;
        }
        Ok(())
    }
}

/// A span in seconds, of at most [`LONGEST_WAIT`]; negative and undefined spans are none.
pub fn seconds(span: f64) -> Duration {
    if span > 0.0 {
        Duration::try_from_secs_f64(span).map_or(LONGEST_WAIT, |span| span.min(LONGEST_WAIT))
    } else {
        Duration::ZERO
    }
}
