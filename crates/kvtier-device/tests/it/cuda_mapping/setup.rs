//! Fixture: the driver and the allocations of its first GPU.

use std::ops::Deref;
use std::sync::{Arc, MutexGuard};

use kvtier_cuda_fake::fake_driver_path;
use kvtier_device::cuda::allocations::Allocations;
use kvtier_device::cuda::driver::{Context, DevicePtr, Driver, HostBuffer, Stream};
use kvtier_device::cuda::uuid::Gpus;

use crate::exporter::FakeDriver;

/// Exclusive use of the driver, with the first of two GPUs in use.
pub struct Bench {
    pub allocations: Arc<Allocations>,
    pub gpus: Gpus,
    fake_driver: FakeDriver,
    _alone: MutexGuard<'static, ()>,
}

impl Bench {
    pub fn new() -> Self {
        let (fake_driver, alone) = FakeDriver::alone();
        fake_driver.script("devices=2");
        let driver = Driver::load(Some(&fake_driver_path().unwrap())).unwrap();
        let gpus = Gpus::find(&driver).unwrap();
        let context = Context::retain(&gpus.all()[0].device).unwrap();
        let bench = Self {
            allocations: Allocations::new(context).unwrap(),
            gpus,
            fake_driver,
            _alone: alone,
        };
        bench.script("reset; clear");
        bench
    }

    pub fn context(&self) -> &Arc<Context> {
        self.allocations.context()
    }

    /// Bytes of the GPU, read by copying them.
    pub fn read(&self, at: DevicePtr, bytes: usize) -> Vec<u8> {
        let _current = self.context().enter().unwrap();
        let stream = Stream::new(self.context(), 0).unwrap();
        let host = HostBuffer::new(self.context(), bytes).unwrap();
        // SAFETY: the fake driver refuses what is not mapped; the buffer is as long.
        unsafe { stream.copy_to_host(host.base().as_ptr(), at, bytes) }.unwrap();
        stream.synchronize().unwrap();
        // SAFETY: the copy is done, and the buffer has no other user.
        unsafe { std::slice::from_raw_parts(host.base().as_ptr(), bytes) }.to_vec()
    }

    /// Asserts that nothing is open and no violation was recorded.
    pub fn is_clean(&self) {
        assert_eq!(self.violations(), "");
        self.nothing_is_left();
    }

    pub fn nothing_is_left(&self) {
        assert_eq!(self.allocations.open_count(), 0);
        for what in ["memory", "physical", "host", "streams", "events"] {
            assert_eq!(self.count(&format!("live.{what}")), 0, "{what}");
        }
    }
}

impl Deref for Bench {
    type Target = FakeDriver;

    fn deref(&self) -> &FakeDriver {
        &self.fake_driver
    }
}
