//! What every test begins with.

use std::ops::Deref;
use std::sync::MutexGuard;

use kvtier_client::proto::descriptor::{Cuda, CudaHandle, Dtype, TensorDescriptor, TensorMetadata};
use kvtier_client::proto::request::{EngineType, LayoutHints, Registration, Request, Store};
use kvtier_client::proto::response::Response;
use kvtier_client::{ClientError, Connection, InstanceId, Scope, Ticket};
use kvtier_cuda_fake::fake_driver_path;
use kvtier_device::cuda::GpuOptions;

use crate::exporter::{Exporter, FakeDriver, UUID, unhex};
use crate::support::{CHUNK, TestServer, prompt, range};

/// Pages of a worker, one token each, and their bytes.
const BLOCKS: u64 = 64;
const PAGE: u64 = 64;

/// A server with one thread for transfers, over the fake driver, which no other process uses.
pub struct Bed {
    server: TestServer,
    pub fake_driver: FakeDriver,
    _alone: MutexGuard<'static, ()>,
}

impl Bed {
    pub fn start() -> Self {
        Self::with(|_| {})
    }

    /// With what no flag says of how GPUs are used.
    pub fn with(options: impl FnOnce(&mut GpuOptions)) -> Self {
        Self::with_flags(&[], options)
    }

    /// Starts a server with more flags.
    pub fn with_flags(more: &[&str], options: impl FnOnce(&mut GpuOptions)) -> Self {
        let (fake_driver, alone) = FakeDriver::alone();
        fake_driver.script("reset; clear; devices=2");
        Self {
            server: serve(more, options),
            fake_driver,
            _alone: alone,
        }
    }

    /// The next process of the server, with these flags.
    pub fn restart(self, more: &[&str]) -> Self {
        drop(self.server);
        Self {
            server: serve(more, |_| {}),
            ..self
        }
    }

    /// Allocations that are open on the first GPU, if it is in use, as `/status` has it.
    pub fn open_allocations(&self) -> Option<usize> {
        let status = self.server.engine().admin().status(true);
        let gpus = status.devices.cuda?.gpus?.gpus;
        gpus[0].state.as_ref()?.open_allocations
    }

    /// Stores that have not ended on the first GPU, which is in use.
    pub fn stores_in_flight(&self) -> u64 {
        let gpus = self.server.readings().gpus;
        gpus[0].readings.as_ref().unwrap().in_flight[0]
    }

    /// Waits until L1 is pinned: a copy of other memory waits in a call of the driver.
    pub fn pinned(&self) {
        wait(|| self.server.readings().pinned_bytes == self.server.readings().capacity_bytes);
    }

    /// Waits until the driver was called so often.
    pub fn called(&self, function: &str, times: u64) {
        wait(|| self.fake_driver.count(function) >= times);
    }

    /// Stops the server while a call hangs, which the driver releases then.
    pub fn ends_with_a_hang(self) {
        drop(self.server);
        self.fake_driver.script("release");
        wait(|| self.fake_driver.count("live.contexts") == 0);
        assert_eq!(self.fake_driver.violations(), "");
    }

    /// Stops the server: nothing is open then, and everything was done by the rules of the driver.
    pub fn ends_clean(self) {
        self.server.assert_sound();
        drop(self.server);
        assert_eq!(self.fake_driver.violations(), "");
        for what in [
            "memory", "physical", "host", "streams", "events", "contexts",
        ] {
            assert_eq!(self.fake_driver.count(&format!("live.{what}")), 0, "{what}");
        }
    }
}

fn serve(more: &[&str], options: impl FnOnce(&mut GpuOptions)) -> TestServer {
    let driver = fake_driver_path().unwrap();
    let own = [
        "--cuda-driver",
        driver.to_str().unwrap(),
        "--max-gpu-workers",
        "1",
        "--gpu-event-timeout-seconds",
        "600",
    ];
    TestServer::start_with(&[&own, more].concat(), |config| {
        options(&mut config.cuda.as_mut().unwrap().gpu);
    })
}

impl Deref for Bed {
    type Target = TestServer;

    fn deref(&self) -> &TestServer {
        &self.server
    }
}

/// Waits for what another thread or process does. The runner ends a test that waits for nothing.
pub fn wait(mut is_so: impl FnMut() -> bool) {
    while !is_so() {
        std::thread::sleep(std::time::Duration::from_micros(100));
    }
}

/// A worker whose pages are an allocation of another process.
pub struct Worker {
    pub id: InstanceId,
    pub scope: Scope,
    pub connection: Connection,
    handle: Vec<u8>,
    /// File and index of its PyTorch's counter.
    pub counter: Option<(Vec<u8>, u64)>,
}

impl Worker {
    /// Not registered yet.
    pub fn new(bed: &Bed, engine: &mut Exporter, id: i64, model: &str) -> Self {
        let answer = engine.ask(&format!("alloc {} 0", BLOCKS * PAGE));
        let (_, handle) = answer.split_once(' ').unwrap();
        Self {
            id: InstanceId(id),
            scope: Scope::new(model),
            connection: bed.connect(),
            handle: [b"\x03c", unhex(handle).as_slice()].concat(),
            counter: None,
        }
    }

    pub fn send_registration(&mut self) -> Ticket {
        let tensor = TensorDescriptor::Cuda(Cuda {
            handle: CudaHandle {
                device: 0,
                memory: Some(self.handle.clone()),
                storage_bytes: BLOCKS * PAGE,
                storage_offset_bytes: 0,
                ref_counter: self.counter.clone().map(|(name, _)| name),
                ref_counter_index: self.counter.as_ref().map_or(0, |(_, index)| *index),
                event: None,
                event_sync_required: false,
            },
            metadata: TensorMetadata {
                dtype: Dtype::UInt8,
                shape: vec![BLOCKS, 1, PAGE],
                stride: vec![PAGE, PAGE, 1],
                storage_offset: 0,
                device_uuid: UUID.to_owned(),
            },
        });
        let registration = Registration {
            instance: self.id,
            tensors: vec![tensor],
            model_name: &self.scope.model_name,
            world_size: self.scope.world_size,
            engine: EngineType::Vllm,
            hints: LayoutHints {
                chunk_tokens: self.scope.chunk_tokens,
                ..LayoutHints::default()
            },
            groups: Vec::new(),
        };
        let request: Request<'_, Vec<u32>> = Request::RegisterKvCache(registration);
        self.connection.send(&request).unwrap()
    }

    pub fn send_unregistration(&mut self) -> Ticket {
        let request: Request<'_, Vec<u32>> = Request::UnregisterKvCache { instance: self.id };
        self.connection.send(&request).unwrap()
    }

    /// Sends a store of one chunk, of a prompt that no other seed has.
    pub fn send_store(&mut self, seed: u32, event: &[u8]) -> Ticket {
        let prompt = prompt(seed, 1);
        let store = Store {
            key: self.scope.worker_key(0, &prompt, range(0..1), "r"),
            instance: self.id,
            block_ids: vec![(0..CHUNK as i64).collect()],
            event_handle: event,
        };
        self.connection.send(&Request::Store(store)).unwrap()
    }

    /// Waits for the answer to a registration or an unregistration, which says nothing.
    pub fn done(&mut self, ticket: Ticket) {
        self.connection.receive(ticket).unwrap();
    }

    /// Waits for the text of a refused registration.
    pub fn refused(&mut self, ticket: Ticket) {
        let refused = self.connection.receive(ticket);
        assert!(
            matches!(refused, Err(ClientError::Server { .. })),
            "{refused:?}"
        );
    }

    /// Whether a store was.
    pub fn has_stored(&mut self, ticket: Ticket) -> bool {
        let reply = self.connection.receive(ticket).unwrap();
        match reply.response().unwrap() {
            Response::Transfer(transfer) => transfer.ok,
            other => panic!("{other:?}"),
        }
    }
}
