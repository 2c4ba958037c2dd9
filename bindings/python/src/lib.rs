//! The native part of the Python package `kvtier`: kvtier-client, which releases the GIL while it waits, and workers that
//! copy KV pages. `python/kvtier/_native.pyi` documents the interface.

mod client;
mod errors;
mod future;
mod kv_events;
mod prompt;
mod worker;

use pyo3::prelude::*;

#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<client::Client>()?;
    module.add_class::<future::Future>()?;
    module.add_class::<kv_events::KvEvents>()?;
    module.add_class::<prompt::Prompt>()?;
    module.add_class::<worker::Worker>()?;
    errors::register(module)
}
