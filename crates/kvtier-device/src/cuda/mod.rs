//! CUDA backend: engine pages in the memory of NVIDIA GPUs.
//!
//! All calls go to the driver library, which is loaded when the backend is created: building needs no toolkit, and a
//! machine without a GPU needs no library.
//!
//! Statements about PyTorch's handles hold for its releases up to 2.13, statements about the driver for CUDA 12.8.

pub mod allocations;
mod device;
mod device_copy;
pub mod driver;
mod error;
pub mod events;
mod gpu;
mod gpu_slot;
pub mod handle;
pub mod kernel;
pub mod owner;
mod place;
pub mod ref_counter;
pub mod storages;
pub mod uuid;

pub use device::{CudaDevice, CudaOptions, DeviceStatus};
pub use device_copy::{
    AddressRange, DeviceCopies, DeviceCopy, DeviceRun, PieceLimits, PinnedPieces, RunLengths,
};
pub use error::{CudaError, code};
pub use gpu::{
    Executor, GpuOptions, GpuReadings, Moved, PinningStatus, Profile, RUN_BUCKETS, Rates,
    TRIED_RUNS,
};
