//! A worker whose pages are on a GPU of the fake driver, in an engine's process.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use kvtier_client::proto::descriptor::{Cuda, CudaHandle, Dtype, TensorDescriptor, TensorMetadata};
use kvtier_client::proto::request::{
    EngineType, LayoutHints, Registration, Request, Retrieve, Store,
};
use kvtier_client::proto::response::Response;
use kvtier_client::{ClientError, Connection, InstanceId, Scope, Ticket};
use kvtier_cuda_fake::fake_driver_path;

use crate::exporter::{Counters, Exporter, UUID, hex, unhex};
use crate::prompts::{CHUNK, CHUNKS, bytes, prompt, scope, whole};
use crate::server::{Server, wait_until};

/// Bytes of a page, which is one token.
const PAGE: u64 = 64;

/// Pages of a prompt: stored from the first, retrieved into those behind them.
const PAGES: u64 = CHUNKS * CHUNK as u64;

const BLOCKS: u64 = 2 * PAGES;

/// Flags of a server over the fake driver.
pub(crate) fn gpu_flags() -> [String; 2] {
    let driver = fake_driver_path().unwrap();
    let driver = driver.to_str().unwrap().to_owned();
    ["--cuda-driver".to_owned(), driver]
}

/// The worker and its engine.
pub(crate) struct GpuWorker {
    pub(crate) id: InstanceId,
    pub(crate) engine: Exporter,
    scope: Scope,
    connection: Connection,
    /// Its allocation in the engine.
    number: String,
    handle: Vec<u8>,
    counters: (Counters, File),
}

impl GpuWorker {
    /// Registered with a server.
    pub(crate) fn register(server: &Server, id: i64) -> Self {
        let mut worker = Self::new(server, id);
        worker.registers().unwrap();
        worker
    }

    /// Not registered yet.
    pub(crate) fn new(server: &Server, id: i64) -> Self {
        let mut engine = Exporter::start();
        let answer = engine.ask(&format!("alloc {} 0", BLOCKS * PAGE));
        let (number, handle) = answer.split_once(' ').unwrap();
        let file = engine.counters();
        let mut options = File::options();
        let counters = options.read(true).write(true);
        let counters = counters.open(format!("/dev/shm{}", file.0)).unwrap();
        let mut scope = scope("gpu");
        scope.model_name += "/gpu";
        scope.chunk_tokens = Some(CHUNK as u32);
        Self {
            id: InstanceId(id),
            scope,
            connection: server.connect(),
            number: number.to_owned(),
            handle: [b"\x03c", unhex(handle).as_slice()].concat(),
            counters: (file, counters),
            engine,
        }
    }

    /// With an expandable segment, whose descriptors are of its engine's process.
    pub(crate) fn in_segment(server: &Server, id: i64) -> Self {
        let mut worker = Self::new(server, id);
        let answer = worker.engine.ask("segments 1");
        let numbers: Vec<u64> = answer
            .split(' ')
            .map(|number| number.parse().unwrap())
            .collect();
        let mut handle = b"\x03e".to_vec();
        handle.extend(worker.engine.pid().to_le_bytes());
        handle.extend([0; 4]);
        handle.extend(numbers[0].to_le_bytes());
        handle.extend(1_u64.to_le_bytes());
        handle.extend(1_i32.to_le_bytes());
        handle.extend([0; 4]);
        handle.extend((numbers[1] as i32).to_le_bytes());
        worker.handle = handle;
        worker
    }

    pub(crate) fn registers(&mut self) -> Result<(), ClientError> {
        let tensor = TensorDescriptor::Cuda(Cuda {
            handle: CudaHandle {
                device: 0,
                memory: Some(self.handle.clone()),
                storage_bytes: BLOCKS * PAGE,
                storage_offset_bytes: 0,
                ref_counter: Some(self.counters.0.0.clone().into()),
                ref_counter_index: 0,
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
        self.connection.call(&request).map(drop)
    }

    /// Registers its pages under another id, too.
    pub(crate) fn registers_as(&mut self, id: i64) {
        let own = std::mem::replace(&mut self.id, InstanceId(id));
        self.registers().unwrap();
        self.id = own;
    }

    pub(crate) fn unregister(&mut self) {
        let request: Request<'_, Vec<u32>> = Request::UnregisterKvCache { instance: self.id };
        self.connection.call(&request).unwrap();
    }

    /// The same on another connection.
    pub(crate) fn reconnect(&mut self, server: &Server) {
        self.connection = server.connect();
    }

    /// How often its memory is used, as the file of its PyTorch has it.
    pub(crate) fn count(&self) -> i64 {
        let mut bytes = [0; 8];
        self.counters.1.read_exact_at(&mut bytes, 64).unwrap();
        i64::from_ne_bytes(bytes)
    }

    /// The bytes of a prompt.
    fn content(number: u64) -> Vec<u8> {
        let len = CHUNK * PAGE as usize;
        let chunks = (0..CHUNKS).map(|chunk| bytes("gpu", number, chunk, len));
        chunks.flatten().collect()
    }

    /// Writes a prompt to its pages, and sends its store, behind this event.
    pub(crate) fn send_store(&mut self, number: u64, event: &[u8]) -> Ticket {
        let content = hex(&Self::content(number));
        self.engine.ask(&format!("write {} {content}", self.number));
        let prompt = prompt(number);
        let request = Request::Store(Store {
            key: self.scope.worker_key(0, &prompt, whole(), "s"),
            instance: self.id,
            block_ids: vec![(0..PAGES as i64).collect()],
            event_handle: event,
        });
        self.connection.send(&request).unwrap()
    }

    /// Whether a transfer succeeded, whose event is waited for if it has one.
    pub(crate) fn is_done(&mut self, ticket: Ticket) -> bool {
        let reply = self.connection.receive(ticket).unwrap();
        let Response::Transfer(transfer) = reply.response().unwrap() else {
            panic!("{reply:?}")
        };
        if !transfer.event_handle.is_empty() {
            let event = hex(&transfer.event_handle);
            self.engine.ask(&format!("open {event}"));
            wait_until("the event", || self.engine.ask("complete") == "true");
        }
        transfer.ok
    }

    pub(crate) fn store(&mut self, number: u64) {
        let stored = self.send_store(number, b"");
        assert!(self.is_done(stored), "{number}");
    }

    /// Chunks of a prompt that are found.
    pub(crate) fn lookup(&mut self, number: u64, request: &str) -> u64 {
        let prompt = prompt(number);
        let key = self.scope.scheduler_key(&prompt, whole(), request);
        self.connection.lookup_hits(&key).unwrap()
    }

    /// Retrieves a prompt that was looked up, every byte of it.
    pub(crate) fn retrieve(&mut self, number: u64, request: &str) {
        let zeros = "00".repeat((BLOCKS * PAGE) as usize);
        self.engine.ask(&format!("write {} {zeros}", self.number));
        let prompt = prompt(number);
        let retrieve = Request::Retrieve(Retrieve {
            key: self.scope.worker_key(0, &prompt, whole(), request),
            instance: self.id,
            block_ids: vec![(PAGES as i64..BLOCKS as i64).collect()],
            event_handle: b"",
            skip_first_n_tokens: 0,
        });
        let ticket = self.connection.send(&retrieve).unwrap();
        assert!(self.is_done(ticket), "{number}");
        let read = format!("read {} 0 {}", self.number, BLOCKS * PAGE);
        let found = self.engine.bytes(&read);
        let (before, behind) = found.split_at((PAGES * PAGE) as usize);
        assert!(before.iter().all(|byte| *byte == 0), "{number}");
        assert!(behind == Self::content(number), "{number}: wrong bytes");
    }

    /// Finds and retrieves a prompt.
    pub(crate) fn read(&mut self, number: u64) {
        let request = format!("r{number}");
        assert_eq!(self.lookup(number, &request), CHUNKS, "{number}");
        self.retrieve(number, &request);
        self.connection.end_session(&request).unwrap();
    }
}
