//! Loading the driver library: found, missing, too old, or another library.

use std::path::Path;

use kvtier_device::cuda::driver::{Context, DeviceBuffer, Driver, Module, Stream};
use kvtier_device::cuda::{CudaError, code};

use super::setup::Bench;
use crate::exporter::{Exporter, UUID};

#[test]
fn all_functions_and_gpus_are_found() {
    let bench = Bench::new();
    let driver = bench.context().driver();
    assert_eq!(driver.missing(), Vec::<&str>::new());
    assert!(driver.has_batch_copy());
    let [gpu, other] = bench.gpus.all() else {
        panic!("not two GPUs")
    };
    assert_ne!(other.uuid, gpu.uuid);
    assert_eq!(other.device.ordinal(), 1);
    assert_eq!((gpu.uuid.as_str(), gpu.device.ordinal()), (UUID, 0));
    assert_eq!((gpu.name.as_str(), gpu.numa_node), ("kvtier fake GPU", -1));
    assert_eq!(
        (gpu.pci_bus_id.as_str(), gpu.total_bytes),
        ("cafe:17:00.0", 8 << 30)
    );
    bench.is_clean();
}

#[test]
fn old_driver_has_no_batch_copy() {
    assert_eq!(
        Exporter::with_script("driver=12070").ask("batches"),
        "false"
    );
    assert_eq!(
        Exporter::with_script("fail cuGetProcAddress_v2=500").ask("batches"),
        "false"
    );
    assert_eq!(Exporter::with_script("driver=13000").ask("batches"), "true");
}

#[test]
fn missing_library_differs_from_wrong_library() {
    let none = Driver::load(Some(Path::new("/nowhere/libcuda.so.1"))).unwrap_err();
    // The dynamic linker's own words.
    assert!(
        none.to_string().contains("No such file or directory"),
        "{none}"
    );
    assert!(matches!(none, CudaError::Library { .. }), "{none}");
    assert!(none.to_string().contains("/nowhere/libcuda.so.1"), "{none}");
    let other = Driver::load(Some(Path::new("libc.so.6"))).unwrap_err();
    assert_eq!(other, CudaError::Missing { function: "cuInit" });
    assert_eq!(other.to_string(), "the CUDA driver has no function cuInit");
}

#[test]
fn driver_errors_keep_the_drivers_text() {
    let bench = Bench::new();
    bench.script("fail cuMemAlloc_v2=2@1");
    let error = DeviceBuffer::new(bench.context(), 64).unwrap_err();
    assert_eq!(error.code(), Some(code::OUT_OF_MEMORY));
    let text = error.to_string();
    assert!(
        text.starts_with("cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY"),
        "{text}"
    );
    assert!(text.ends_with("(2)"), "{text}");
    // SAFETY: it is no code at all.
    let error = unsafe { Module::load(bench.context(), c"none") }.unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("cuModuleLoadDataEx: CUDA_ERROR"),
        "{error}"
    );
    assert!(
        error.to_string().contains("no kernel, or not all of it"),
        "{error}"
    );
    bench.nothing_is_left();
}

/// Calls that need a context restore the previous one: a thread of one GPU may drop objects of another.
#[test]
fn calls_restore_the_threads_context() {
    let bench = Bench::new();
    let first = bench.context();
    let second = Context::retain(&bench.gpus.all()[1].device).unwrap();
    let stream = Stream::new(&second, 0).unwrap();
    let memory = DeviceBuffer::new(&second, 64).unwrap();
    // SAFETY: the memory is ours, and lives until the stream is idle.
    let fill = || unsafe { stream.fill(memory.base(), 1, 64) };
    second.make_current().unwrap();
    drop(DeviceBuffer::new(first, 64).unwrap());
    {
        let _current = first.enter().unwrap();
        drop(DeviceBuffer::new(&second, 64).unwrap());
    }
    fill().unwrap();
    stream.synchronize().unwrap();
    assert_eq!(bench.violations(), "");
    // A thread that has none has none again.
    std::thread::scope(|scope| {
        let error = scope.spawn(|| {
            drop(DeviceBuffer::new(&second, 64).unwrap());
            fill().unwrap_err()
        });
        assert_eq!(error.join().unwrap().code(), Some(code::INVALID_CONTEXT));
    });
    drop((stream, memory));
    bench.nothing_is_left();
}
