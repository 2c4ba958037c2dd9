//! For tests: an engine, and workers whose pages are nowhere.

use std::any::Any;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use kvtier_common::sync::Mutex;
use kvtier_core::ChunkHash;
use kvtier_core::prompt::Prompt;
use kvtier_device::{DeviceError, Done, EngineMemory, KvLayout, OnSubmitted, Transfer};
use kvtier_proto::descriptor::Dtype;
use kvtier_proto::generation::Release;
use kvtier_proto::inline::InlineForm;
use kvtier_proto::key::CacheKey;
use kvtier_proto::request::{InstanceId, Store};

use super::context::Context;
use super::instances::{EngineDrivenGroup, EngineDrivenLayout, Instance, Mode, ModelLayout};
use super::{Caller, Engine, EngineAnswer, Reply};
use kvtier_config::ServerConfig;
use kvtier_observe::metrics::Metrics;

/// A client of 0.5.5 or later that has the chunk size.
pub const CALLER: Caller = Caller {
    connection: 1,
    release: Release::Since0_5_5,
    releases: "0.5.6",
    knows_chunk_size: true,
    negotiates_chunk_size: false,
    registers_again: Some(true),
    names_workers: true,
};

/// An engine with 12 MiB of L1, chunks of one token, and these flags.
pub fn engine(flags: &[&str]) -> Engine {
    engine_with(flags, |context| context)
}

/// [`engine`] with a context that the test has changed.
pub fn engine_with(flags: &[&str], change: impl FnOnce(Context) -> Context) -> Engine {
    let mut all = vec![
        "--shm-name",
        "",
        "--l1-size-gb",
        "0.01",
        "--l1-restore",
        "off",
    ];
    all.extend(["--chunk-size", "1"]);
    all.extend(flags);
    let config = Arc::new(ServerConfig::from_flags(&all).unwrap());
    let (context, quotas) = Engine::open(config, Arc::new(Metrics::new())).unwrap();
    Engine::over(change(context), quotas)
}

/// Pages of a device whose transfers move a byte, or fail, at once. It reports an event before.
pub struct TestPages {
    pub layout: Arc<KvLayout>,
    pub fails: bool,
    pub numa_node: Option<u32>,
    /// Offsets in the arena of the chunks of its transfers.
    pub places: Mutex<Vec<u64>>,
    /// Transfers that are held until the test ends them, if there are to be any.
    pub held: Mutex<Option<Vec<Done>>>,
    /// Kind of the device. Pages are on a GPU unless it is "cpu".
    pub device: &'static str,
    /// Dropped with the pages.
    pub closed: Mutex<Option<Box<dyn Any + Send>>>,
}

impl TestPages {
    /// Four pages of one token, `page_bytes` each.
    pub fn new(page_bytes: u64) -> Self {
        let tensor = kvtier_device::TensorSpec {
            memory: kvtier_device::MemorySpec::CpuShm {
                name: "/none".into(),
                nbytes: 4 * page_bytes,
            },
            dtype_size: 1,
            dtype_name: "uint8".into(),
            shape: vec![4, 1, page_bytes],
            stride: vec![page_bytes, page_bytes, 1],
            storage_offset: 0,
        };
        let engine = kvtier_device::Engine::Vllm;
        let hints = kvtier_device::LayoutHints::default();
        let layout = KvLayout::detect(&[tensor], engine, &hints, &[], 1, true).unwrap();
        Self {
            layout: Arc::new(layout),
            fails: false,
            numa_node: None,
            places: Mutex::default(),
            held: Mutex::default(),
            device: "test",
            closed: Mutex::default(),
        }
    }

    /// Registers a worker that has them.
    pub fn register(self, engine: &Engine, id: i64) -> Arc<Self> {
        let pages = Arc::new(self);
        let instance = pages.instance(id, engine.context.now());
        assert!(engine.context.instances.insert(instance).unwrap().is_none());
        pages
    }

    /// A worker that has them.
    pub fn instance(self: &Arc<Self>, id: i64, now: Duration) -> Instance {
        let mode = Mode::LmcacheDriven {
            memory: Arc::clone(self) as _,
            registered: Default::default(),
        };
        let layout = ModelLayout::of_pages(&self.layout);
        Instance::new(InstanceId(id), "model", 1, mode, layout, now)
    }
}

impl EngineMemory for TestPages {
    fn layout(&self) -> &Arc<KvLayout> {
        &self.layout
    }

    fn is_current(&self) -> bool {
        true
    }

    fn identity(&self) -> Vec<u64> {
        Vec::new()
    }

    fn device(&self) -> &'static str {
        self.device
    }

    fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    fn transfer(&self, transfer: Transfer, done: Done) {
        let places = transfer.chunks.iter().map(|chunk| chunk.extent.offset);
        self.places.lock().extend(places);
        if let Some(held) = &mut *self.held.lock() {
            return held.push(done);
        }
        done(if self.fails {
            Err(DeviceError::Stopped)
        } else {
            Ok(1)
        });
    }

    fn transfer_with_event(&self, transfer: Transfer, begun: OnSubmitted, done: Done) {
        begun(b"event");
        self.transfer(transfer, done);
    }

    fn answer_event<'a>(&self, _: &'a [u8]) -> &'a [u8] {
        &[]
    }

    fn read_blocks(
        &self,
        _: usize,
        _: &[i64],
        _: &mut dyn FnMut(&[u8]),
    ) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Registers a worker that copies by itself.
pub fn copies_itself(engine: &Engine, id: i64) {
    let mode = Mode::EngineDriven {
        layout: EngineDrivenLayout {
            groups: vec![EngineDrivenGroup {
                dtype: Dtype::from_name("uint8").unwrap(),
                shape: vec![1, 1, 1],
                object_bytes: 1,
                tokens_per_block: 1,
                window: None,
                is_recurrent: false,
            }],
            chunk_tokens: 1,
            block_size: 1,
            use_mla: true,
        },
        pickles: AtomicBool::new(false),
        form: InlineForm::Pickle,
    };
    let layout = ModelLayout {
        groups: Vec::new(),
        fingerprint: 0,
        chunk_tokens: 1,
        page_bound: false,
        element: None,
        unnamed_bytes: false,
    };
    let instance = Instance::new(
        InstanceId(id),
        "other",
        1,
        mode,
        layout,
        engine.context.now(),
    );
    assert!(engine.context.instances.insert(instance).unwrap().is_none());
}

/// The key of a prompt of these chunks, all of them different.
pub fn key(chunks: Range<u8>) -> CacheKey<'static, Prompt> {
    CacheKey {
        model_name: "model",
        world_size: 1,
        worker_id: Some(0),
        chunk_tokens: None,
        start: 0,
        end: chunks.len() as u64,
        tokens: Prompt {
            token_count: chunks.len(),
            chunk_size: NonZeroUsize::MIN,
            hashes: chunks.map(|chunk| ChunkHash([chunk; 32])).collect(),
            tokens: Default::default(),
            is_object_keys: false,
        },
        request_id: "request",
        cache_salt: "",
        request_configs: None,
        num_kv_readers: None,
    }
}

/// Stores these chunks, three at most, for a worker. The answer comes when it is there.
pub fn store(engine: &Engine, id: i64, chunks: Range<u8>) -> Receiver<EngineAnswer> {
    let store = Store {
        block_ids: vec![(1..).take(chunks.len()).collect()],
        key: key(chunks),
        instance: InstanceId(id),
        event_handle: b"",
    };
    let (reply, answers) = reply();
    engine.transfers.store(CALLER, &store, reply);
    answers
}

/// A reply, and what is answered with it.
pub fn reply() -> (Reply, Receiver<EngineAnswer>) {
    let (answers, receiver) = channel();
    let target =
        move |answer: Option<EngineAnswer>| answers.send(answer.unwrap()).unwrap_or_default();
    (Reply::new(target), receiver)
}
