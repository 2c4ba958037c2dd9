//! Client errors as Python exceptions.

use kvtier_client::ClientError;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;

create_exception!(
    kvtier,
    KvTierError,
    PyException,
    "A request failed; subclasses say how."
);
create_exception!(
    kvtier,
    TimedOut,
    KvTierError,
    "There was no reply within the deadline, or the server has stopped answering heartbeats."
);
create_exception!(
    kvtier,
    Disconnected,
    KvTierError,
    "The connection was lost before the reply, or the client was closed."
);
create_exception!(
    kvtier,
    Refused,
    KvTierError,
    "The server answered with an error, or with no."
);

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("KvTierError", py.get_type::<KvTierError>())?;
    module.add("TimedOut", py.get_type::<TimedOut>())?;
    module.add("Disconnected", py.get_type::<Disconnected>())?;
    module.add("Refused", py.get_type::<Refused>())
}

/// The exception of an error. Invalid arguments are a `ValueError`.
pub fn exception(error: &ClientError) -> PyErr {
    let text = error.to_string();
    match error {
        ClientError::Timeout { .. }
        | ClientError::Pending { .. }
        | ClientError::Degraded { .. } => TimedOut::new_err(text),
        ClientError::Disconnected { .. } | ClientError::Closed { .. } => {
            Disconnected::new_err(text)
        }
        ClientError::Server { .. } | ClientError::Refused { .. } => Refused::new_err(text),
        ClientError::Argument { .. } | ClientError::Connect { .. } | ClientError::Encode { .. } => {
            PyValueError::new_err(text)
        }
        _ => KvTierError::new_err(text),
    }
}
