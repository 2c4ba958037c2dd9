//! Pickles: real ones read as Python reads them, ours are what Python reads, and hostile ones do no harm.

mod hostile;
mod legacy_wrappers;
mod lists;
mod mixed;
mod storage_streams;
mod support;
mod written;
