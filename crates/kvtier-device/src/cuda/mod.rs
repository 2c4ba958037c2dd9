//! Engines whose pages are in the memory of NVIDIA GPUs.
//!
//! Everything goes through the driver's own library, which is looked for when it is first needed: building needs no
//! toolkit, and a machine without a GPU needs no library.
//!
//! Facts about handles of PyTorch are those of its releases up to 2.13; facts about the driver are those of CUDA 12.8.

pub mod allocations;
mod device;
mod device_copy;
pub mod driver;
mod error;
pub mod events;
mod gpu;
pub mod handle;
pub mod kernel;
pub mod owner;
pub mod ref_counter;
mod slot;
pub mod storages;
pub mod uuid;

pub use device::{CudaDevice, CudaOptions, DeviceStatus};
pub use device_copy::{
    DeviceCopies, DeviceCopy, DeviceRun, PieceLimits, PinnedPieces, Place, RunLengths,
};
pub use error::{CudaError, code};
pub use gpu::{
    Executor, GpuOptions, GpuReadings, Moved, PinningStatus, Profile, RUN_BUCKETS, Rates,
    TRIED_RUNS,
};
