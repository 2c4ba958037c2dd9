//! Fixture: a server's device, an engine's pages, and transfers between them.

use std::ops::Deref;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use kvtier_cuda_fake::fake_driver_path;
use kvtier_device::cuda::driver::{Context, Driver};
use kvtier_device::cuda::{CudaDevice, CudaOptions, GpuOptions, GpuReadings};
use kvtier_device::{
    BlockTable, ChunkCopy, ChunkRequest, CudaAllocation, CudaStorage, Device, DeviceError,
    Direction, Engine, EngineMemory, KvLayout, LayoutHints, MemorySpec, Placement, TensorSpec,
    Transfer,
};
use kvtier_memory::{Arena, ArenaKind, Extent};

use crate::exporter::{Exporter, FakeDriver, UUID, unhex};
use crate::model::{Random, row_major};

/// Longer than anything here takes, and than a test may.
const FOR_EVER: Duration = Duration::from_secs(600);

/// The device of a server, with exclusive use of the fake driver with two GPUs.
pub struct Server {
    pub cuda: CudaDevice,
    pub arena: Arc<Arena>,
    pub rest: Rest,
}

/// What is left of a [`Server`] without its device.
pub struct Rest {
    fake_driver: FakeDriver,
    _alone: MutexGuard<'static, ()>,
}

impl Server {
    /// `script` is in force before anything is done with the driver.
    pub fn with(script: &str, gpu: GpuOptions, arena_bytes: u64) -> Self {
        let (fake_driver, alone) = FakeDriver::alone();
        fake_driver.script("reset; clear; devices=2");
        fake_driver.script(script);
        let arena = Arc::new(Arena::create(ArenaKind::Anonymous, arena_bytes).unwrap());
        let library = Some(fake_driver_path().unwrap());
        let options = CudaOptions { library, gpu };
        Self {
            cuda: CudaDevice::find(&options, Arc::clone(&arena)).unwrap(),
            arena,
            rest: Rest {
                fake_driver,
                _alone: alone,
            },
        }
    }

    pub fn new() -> Self {
        Self::with("", GpuOptions::default(), 1 << 20)
    }

    /// What the first GPU does.
    pub fn readings(&self) -> GpuReadings {
        self.cuda.status()[0].readings.clone().unwrap()
    }

    /// Waits until nothing is on any stream.
    pub fn wait_idle(&self) {
        let driver = Driver::load(Some(&fake_driver_path().unwrap())).unwrap();
        for device in driver.devices().unwrap() {
            Context::retain(&device).unwrap().synchronize().unwrap();
        }
    }

    /// Waits until pinning is over.
    pub fn pinned(&self) {
        wait(|| self.cuda.pinning().is_some_and(|status| !status.is_running));
    }

    /// Drops the device; nothing is open any more then, and everything was done by the rules.
    pub fn ends_clean(self) {
        self.without_device().is_clean();
    }

    pub fn without_device(self) -> Rest {
        drop(self.cuda);
        self.rest
    }
}

impl Rest {
    pub fn is_clean(&self) {
        assert_eq!(self.violations(), "");
        for what in [
            "memory", "physical", "host", "streams", "events", "modules", "contexts",
        ] {
            assert_eq!(self.count(&format!("live.{what}")), 0, "{what}");
        }
    }
}

impl Deref for Server {
    type Target = FakeDriver;

    fn deref(&self) -> &FakeDriver {
        &self.rest.fake_driver
    }
}

impl Deref for Rest {
    type Target = FakeDriver;

    fn deref(&self) -> &FakeDriver {
        &self.fake_driver
    }
}

/// Waits for what another thread or process does. The runner ends a test that waits for nothing.
pub fn wait(mut is_so: impl FnMut() -> bool) {
    while !is_so() {
        std::thread::sleep(Duration::from_micros(100));
    }
}

impl Exporter {
    /// Allocates memory that other processes may open; returns its number and handle.
    pub fn export(&mut self, bytes: u64) -> (usize, [u8; 64]) {
        self.export_on(0, bytes)
    }

    /// Allocates memory on one of two GPUs that other processes may open; returns its number and handle.
    pub fn export_on(&mut self, gpu: u8, bytes: u64) -> (usize, [u8; 64]) {
        let answer = self.ask(&format!("alloc {bytes} {gpu}"));
        let (number, handle) = answer.split_once(' ').unwrap();
        (number.parse().unwrap(), unhex(handle).try_into().unwrap())
    }

    pub fn write(&mut self, number: usize, bytes: &[u8]) {
        self.ask(&format!("write {number} {}", crate::exporter::hex(bytes)));
    }

    pub fn read(&mut self, number: usize, offset: u64, len: usize) -> Vec<u8> {
        self.bytes(&format!("read {number} {offset} {len}"))
    }
}

/// All of an exported allocation of the first GPU, or the second.
pub fn storage(gpu: u8, handle: [u8; 64], bytes: u64) -> MemorySpec {
    let mut device_uuid = UUID.to_owned();
    device_uuid.pop();
    device_uuid.push(char::from(b'0' + gpu));
    MemorySpec::Cuda(Box::new(CudaStorage {
        device_uuid,
        allocation: CudaAllocation::Raw { handle },
        offset: 0,
        bytes,
    }))
}

/// One layer of pages of equal size, each one copy: a chunk is its blocks' bytes.
pub struct Pages {
    pub memory: Arc<dyn EngineMemory>,
    pub layout: Arc<KvLayout>,
    /// Number of the engine's allocation, and what is in it.
    pub number: usize,
    pub content: Vec<u8>,
    page: u64,
    blocks: u64,
}

/// Blocks of a chunk that is one piece if none of them is adjacent to another, and bytes of such a block.
pub const PIECE: [u64; 2] = [4096, 16];

impl Pages {
    /// Registers `blocks` pages of `page` bytes with `per_chunk` per chunk and random content. On return, pinning has ended
    /// and the counters are cleared.
    pub fn register(
        server: &Server,
        engine: &mut Exporter,
        [blocks, page, per_chunk]: [u64; 3],
    ) -> Self {
        let pages = Self::on(0, server, engine, [blocks, page, per_chunk]).unwrap();
        server.pinned();
        server.script("clear");
        pages
    }

    /// Pages of `pieces` chunks of one piece each.
    pub fn pieces(server: &Server, engine: &mut Exporter, pieces: u64) -> Self {
        let [blocks, page] = PIECE;
        Self::register(server, engine, [pieces * blocks, page, blocks])
    }

    pub fn on(
        gpu: u8,
        server: &Server,
        engine: &mut Exporter,
        [blocks, page, per_chunk]: [u64; 3],
    ) -> Result<Self, DeviceError> {
        let bytes = blocks * page;
        let (number, handle) = engine.export_on(gpu, bytes);
        let content = Random::new(number as u64).bytes(bytes);
        engine.write(number, &content);
        let shape = vec![blocks, 1, page];
        let tensor = TensorSpec {
            memory: storage(gpu, handle, bytes),
            dtype_size: 1,
            dtype_name: "uint8".into(),
            stride: row_major(&shape),
            shape,
            storage_offset: 0,
        };
        let hints = LayoutHints::default();
        let layout = KvLayout::detect(&[tensor], Engine::Vllm, &hints, &[], per_chunk, false);
        let layout = Arc::new(layout.unwrap());
        let memory = server.cuda.open(Arc::clone(&layout))?;
        Ok(Self {
            memory: memory.into(),
            layout,
            number,
            content,
            page,
            blocks,
        })
    }

    pub fn object_bytes(&self) -> u64 {
        self.layout.object_groups()[0].object_bytes
    }

    /// Blocks from the last one back, so that none adjoins the one before it.
    pub fn backwards(&self, chunks: u64) -> Vec<i64> {
        let count = chunks * self.object_bytes() / self.page;
        (0..count).map(|at| (self.blocks - 1 - at) as i64).collect()
    }

    /// The pages of these blocks, one behind the other.
    pub fn gather(&self, ids: &[i64]) -> Vec<u8> {
        let page = self.page as usize;
        let page_of = |id: &i64| &self.content[*id as usize * page..][..page];
        ids.iter().flat_map(page_of).copied().collect()
    }

    /// A store of `chunks` chunks, from the last block back.
    pub fn store(&self, server: &Server, chunks: u64) -> Transfer {
        self.transfer(server, Direction::Store, &self.backwards(chunks))
    }

    /// A retrieve of the same chunks as [`Pages::store`].
    pub fn retrieve(&self, server: &Server, chunks: u64) -> Transfer {
        self.transfer(server, Direction::Retrieve, &self.backwards(chunks))
    }

    /// Chunks of one request, their objects one behind the other from the start of the arena.
    pub fn transfer(&self, server: &Server, direction: Direction, ids: &[i64]) -> Transfer {
        let chunks = ids.len() * self.page as usize / self.object_bytes() as usize;
        let chunk = |chunk: usize| ChunkCopy {
            request: ChunkRequest {
                object_group: 0,
                chunk,
                skip_tokens: 0,
            },
            extent: Extent::new(chunk as u64 * self.object_bytes(), self.object_bytes()),
        };
        Transfer {
            arena: Arc::clone(&server.arena),
            blocks: BlockTable::check(&self.layout, &[ids], chunks).unwrap(),
            chunks: (0..chunks).map(chunk).collect(),
            direction,
            deadline: None,
            event: Vec::new(),
        }
    }

    pub fn begin(&self, transfer: Transfer) -> Ticket {
        Ticket::of(&*self.memory, transfer)
    }

    /// Begins and waits.
    pub fn run(&self, transfer: Transfer) -> Result<u64, DeviceError> {
        self.begin(transfer).end()
    }
}

/// The end of a transfer, to be waited for.
pub struct Ticket(Receiver<Result<u64, DeviceError>>);

impl Ticket {
    pub fn of(memory: &dyn EngineMemory, transfer: Transfer) -> Self {
        let (say, hear) = mpsc::channel();
        memory.transfer(transfer, Box::new(move |result| say.send(result).unwrap()));
        Self(hear)
    }

    pub fn of_placement(memory: &dyn EngineMemory, placement: Placement) -> Self {
        let (say, hear) = mpsc::channel();
        memory.place(placement, Box::new(move |result| say.send(result).unwrap()));
        Self(hear)
    }

    /// Waits for the end, which is reported exactly once.
    pub fn end(self) -> Result<u64, DeviceError> {
        let result = self.0.recv_timeout(FOR_EVER).unwrap();
        assert_eq!(
            self.0.recv_timeout(FOR_EVER).unwrap_err(),
            mpsc::RecvTimeoutError::Disconnected
        );
        result
    }

    pub fn has_ended(&self) -> bool {
        !matches!(self.0.try_recv(), Err(mpsc::TryRecvError::Empty))
    }
}

/// A moment that has passed.
pub fn past() -> Instant {
    Instant::now() - Duration::from_millis(1)
}

/// Bytes of the arena from its start on.
pub fn content(arena: &Arena, bytes: u64) -> Vec<u8> {
    let mut content = Vec::new();
    arena
        .read_into(Extent::new(0, bytes), 0, bytes, &mut content)
        .unwrap();
    content
}
