//! Start of a worker: its arguments, and its first registration.

use std::sync::{Arc, mpsc};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use super::geometry::{Geometry, Group, Storage, Tensor};
use super::state::{Core, Mode};
use super::{engine_driven, registration};
use crate::errors::exception;
use crate::future::{MAX_WAIT, wait_in_slices};

/// Checks the mode and the pages of a worker.
pub fn parse_mode_and_geometry(
    mode: &str,
    storages: &[Storage],
    tensors: &[Tensor],
    groups: Vec<Group>,
    kv_layout: Option<&str>,
    chunk_tokens: u64,
    holds_blocks: bool,
) -> PyResult<(Mode, Geometry)> {
    let mode = match mode {
        "engine_driven" => Mode::Engine,
        "lmcache_driven" => Mode::Server,
        other => {
            return Err(PyValueError::new_err(format!(
                "mode: {other:?}; allowed are engine_driven and lmcache_driven"
            )));
        }
    };
    let geometry = Geometry::new(
        storages,
        tensors,
        groups,
        kv_layout,
        chunk_tokens,
        holds_blocks,
    )?;
    if mode == Mode::Engine {
        engine_driven::check(&geometry)?;
    }
    Ok((mode, geometry))
}

/// Registers on a thread of its own, so that Ctrl-C works meanwhile.
pub fn register_in_slices(py: Python<'_>, core: &Arc<Core>) -> PyResult<()> {
    let thread = |name: &str, work: Box<dyn FnOnce() + Send>| {
        let started = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(work);
        started.map_err(|error| PyRuntimeError::new_err(format!("no thread: {error}")))
    };
    let (sender, receiver) = mpsc::channel();
    let registering = Arc::clone(core);
    thread(
        "kvtier-register",
        Box::new(move || {
            // After a signal there is no receiver.
            let _ = sender.send(registration::register(&registering, &registering.client));
        }),
    )?;
    let arrived = move |slice| match receiver.recv_timeout(slice) {
        Err(mpsc::RecvTimeoutError::Timeout) => None,
        outcome => Some(outcome),
    };
    let outcome = wait_in_slices(py, MAX_WAIT, arrived);
    if outcome.is_err() {
        let core = Arc::clone(core);
        thread("kvtier-stop", Box::new(move || registration::stop(&core)))?;
    }
    match outcome? {
        Some(Ok(registered)) => registered.map_err(|error| exception(&error)),
        _ => Err(PyRuntimeError::new_err(
            "the registration has panicked, which is a bug",
        )),
    }
}
