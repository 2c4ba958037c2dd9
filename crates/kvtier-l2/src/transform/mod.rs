//! Transformations of objects between a tier and its adapter: the key `serde`.
//!
//! A [`Transform`] changes the bytes of one object; `Transformed` makes an adapter of an adapter and a transformation. It
//! lies between the adapter (with its checksums, which are those of the transformed bytes) and the limits of its calls.
//!
//! The adapter sees objects of another length and another layout: a fingerprint of the object's layout and of the
//! transformation, so that bytes of another transformation are never taken for these where the adapter keeps layouts.
//! [`PAGE_BOUND`] stays as it is; the values have no [`Element`] any more.

mod adapter;
pub(crate) mod aesgcm;
mod compress;
pub(crate) mod fp8;
mod scratch;
#[cfg(test)]
mod tests;
mod workers;

use std::sync::Arc;

use kvtier_memory::checksum::checksum64;
use serde_json::{Map, Value};

use aesgcm::AesGcm;
use compress::Compress;
use fp8::Fp8;

use crate::Adapter;
use crate::config::{SerdeConfig, SerdeKind};
use crate::error::L2Error;
use crate::object::{Buffer, Element, ObjectSpec, PAGE_BOUND};

/// Transformation of the bytes of one object. Its calls block; they run on workers.
trait Transform: Send + Sync + 'static {
    /// Returns the transformation's `type` in the configuration.
    fn kind(&self) -> &'static str;

    /// Text that differs between all transformations with different bytes: its type and parameters.
    fn fingerprint(&self) -> String;

    /// Whether its loads detect every change of the bytes, and bytes of another object.
    fn verifies(&self) -> bool;

    /// Refuses an object that it cannot transform, whatever its bytes; such an object is also a miss.
    ///
    /// # Errors
    /// [`Refused`](crate::ErrorKind::Refused), with the reason.
    fn check(&self, _object: &ObjectSpec) -> Result<(), L2Error> {
        Ok(())
    }

    /// Returns the length of the transformed object of `len` bytes, `None` if there is none:
    /// it is too long, or is not whole values. Objects of different lengths have different ones.
    fn stored_len(&self, len: u64) -> Option<u64>;

    /// Transforms the bytes of `from` into `to`, which has [`Self::stored_len`] bytes.
    fn encode(&self, object: &ObjectSpec, from: &Buffer, to: &mut [u8]) -> Result<(), L2Error>;

    /// Transforms `from` back into `to`. The contents of `from` are undefined afterwards.
    ///
    /// # Errors
    /// [`Corrupt`](crate::ErrorKind::Corrupt) for bytes that are not what was stored,
    /// [`Refused`](crate::ErrorKind::Refused) for those that cannot be read with this configuration.
    fn decode(&self, object: &ObjectSpec, from: &mut [u8], to: &Buffer) -> Result<(), L2Error>;

    /// Adds its part to the status.
    fn report(&self, status: &mut Map<String, Value>);
}

/// Returns `adapter` with the transformations around it; the first of the list is the first at a store.
///
/// # Errors
/// If a key file cannot be used.
pub(crate) fn transformed(
    adapter: Arc<dyn Adapter>,
    configs: &[SerdeConfig],
) -> Result<Arc<dyn Adapter>, L2Error> {
    let mut outer = adapter;
    for config in configs.iter().rev() {
        outer = Arc::new(adapter::Transformed::new(
            outer,
            open(config)?,
            config.workers,
            config.scratch_bytes,
        ));
    }
    Ok(outer)
}

/// Whether one of the transformations verifies what it loads, so that an adapter needs no checksums in memory.
pub(crate) fn verifies(configs: &[SerdeConfig]) -> bool {
    configs.iter().any(|config| match &config.kind {
        SerdeKind::Compress => true,
        SerdeKind::Fp8(_) => false,
        SerdeKind::AesGcm { frame, .. } => *frame == aesgcm::AesFrame::Bound,
    })
}

/// Opens a transformation; reads its key files.
fn open(config: &SerdeConfig) -> Result<Arc<dyn Transform>, L2Error> {
    match &config.kind {
        SerdeKind::Compress => Ok(Arc::new(Compress)),
        SerdeKind::Fp8(format) => Ok(Arc::new(Fp8::new(*format))),
        SerdeKind::AesGcm { frame, bits, paths } => {
            let paths: Vec<_> = paths.iter().map(String::as_str).collect();
            Ok(Arc::new(AesGcm::open(*frame, *bits, &paths)?))
        }
    }
}

/// Returns the layout of the transformed bytes of an object of `layout`.
fn stored_layout(layout: u64, fingerprint: &str) -> u64 {
    let text = format!(
        "kvtier transform {fingerprint} {:016x}",
        layout & !PAGE_BOUND
    );
    let stored = (checksum64(text.as_bytes()) & !PAGE_BOUND) | (layout & PAGE_BOUND);
    Element::in_layout(stored, None)
}
