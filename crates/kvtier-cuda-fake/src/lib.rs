//! A strict fake of the CUDA driver library (`libcuda.so.1`), for tests on machines without a GPU.
//!
//! The cdylib exports driver functions with the signatures of `cuda.h`. Device memory is POSIX shared memory, streams are
//! threads, copies are `memcpy`, and the copy kernel is its own source compiled for the processor; so several processes
//! can share memory and events through IPC handles, as with a GPU. It shows nothing about speed, nor about driver behaviour
//! that is not documented. Dependents of the crate also get `kvcopy_host` of `kvcopy_host.cpp`, which runs the kernel
//! without a driver.
//!
//! # Strict
//! Only the fake driver can read addresses of device memory, and they are never reused. Incorrect calls are answered with
//! the driver's code and recorded as a *violation*: no current context or the wrong one, handles that
//! are unknown or destroyed, ranges outside a live allocation, mapping or registration, things closed or freed twice or
//! while a stream uses them, a process opening its own IPC handle, contexts that end with something left. A batch is copied in
//! reverse, sources of access order ANY are read at the call, and a kernel that accesses other memory poisons its
//! context. Device memory starts as zeros, and default streams are ordinary ones: a stream created with flag 0 does not wait
//! for them.
//!
//! # Functions for tests
//! * `uint64_t fake_driver_count(const char *name)`: calls of a function since the start or the last `clear`. Also
//!   `violations`; work that a stream began: `h2d`, `d2h` or `kernel` (kernels, fills, and copies inside the device);
//!   `pageable`: asynchronous copies from or to host memory that is not registered, which wait as the
//!   driver's do; `batched`: copies in batches; and live objects: `live.memory` (allocations, openings
//!   and reservations), `live.physical`, `live.host`, `live.streams`, `live.events`, `live.modules`, `live.contexts`;
//!   `registered.untouched`: pages that had no memory when they were registered, which the driver touches while its other calls wait.
//! * `uint64_t fake_driver_violations(char *to, size_t bytes)`: their number; writes as many lines of their text as fit.
//! * `int fake_driver_script(const char *text)`: the settings below, separated by `;`; 1, and a violation, if they cannot be
//!   read. The variable `KVTIER_CUDA_FAKE` has some that are read at the first call, and aborts the process if they are wrong.
//! * The variable `KVTIER_CUDA_FAKE_LOUD` sends violations to stderr, too.
//!
//! | setting | meaning |
//! | --- | --- |
//! | `fail FUNCTION=CODE@WHEN` | these calls answer CODE and do nothing; FUNCTION may also be a kernel, for its launches |
//! | `hold NAME@WHEN`, `release` | these calls of a function, or pieces of work `h2d`, `d2h` or `kernel`, block until `release` |
//! | `devices=N` | number of devices, 0 to 16, from the next `cuInit` on, which removes none; 1 at the start |
//! | `memory=BYTES` | of each device; 8 GiB at the start |
//! | `driver=VERSION` | 1000 * major + 10 * minor; 12080 at the start |
//! | `reset`, `clear` | no fault or hold is left; no count and violation is |
//!
//! WHEN is a number K, the K-th from now, or `K+`, all from the K-th on; without it, all.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "the crate is a C interface: callers' pointers are what its documentation says; other reasons are written down"
)]

mod abi;
mod api;
mod event;
mod host;
mod journal;
mod kernel;
mod script;
mod segment;
mod space;
mod stream;
mod world;

use std::path::PathBuf;

/// Path of this crate's library, for a test to load: `$KVTIER_CUDA_FAKE_LIB`, or beside the test's executable.
///
/// # Errors
/// The searched paths, if it is at none of them.
pub fn fake_driver_path() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("KVTIER_CUDA_FAKE_LIB") {
        return Ok(path.into());
    }
    let exe = std::env::current_exe().map_err(|e| e.to_string())?;
    let looked = exe
        .ancestors()
        .skip(1)
        .take(2)
        .flat_map(|folder| [folder.to_owned(), folder.join("deps")]);
    let names: Vec<PathBuf> = looked
        .map(|folder| folder.join("libkvtier_cuda_fake.so"))
        .collect();
    match names.iter().find(|path| path.exists()) {
        Some(path) => Ok(path.clone()),
        None => Err(format!("the fake CUDA driver is at none of {names:?}")),
    }
}
