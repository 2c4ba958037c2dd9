//! An engine's pages of one size, opened, and transfers of them that are checked and timed.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use kvtier_device::cuda::CudaDevice;
use kvtier_device::{
    BlockTable, ChunkCopy, ChunkRequest, Device, Direction, EngineMemory, KvAxisOrder, KvLayout,
    LayoutHints, MemorySpec, TensorSpec, Transfer,
};
use kvtier_memory::{Arena, Extent};

use crate::engine::{Engine, word};
use crate::{Result, Settings};

const CHUNK_TOKENS: u64 = 256;
const BLOCK_TOKENS: u64 = 16;
/// Blocks of a chunk.
const BLOCKS: u64 = CHUNK_TOKENS / BLOCK_TOKENS;
/// As many layers as a model of 70 billion parameters.
const MOST_LAYERS: u64 = 80;
/// Longer than any transfer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// When a transfer ended, and the bytes it moved or why it failed.
type Ended = (Instant, std::result::Result<u64, String>);

/// How many pages of one size there are. One block is a page in each layer, as with MLA.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Bytes of a page.
    pub page: u64,
    /// Layers.
    pub layers: u64,
    /// Chunks of a transfer.
    pub chunks: u64,
}

impl Shape {
    /// For transfers of about the settings' bytes.
    pub fn new(page: u64, settings: &Settings) -> Self {
        let layers = settings.chunk_bytes / (BLOCKS * page);
        let layers = layers.clamp(1, MOST_LAYERS);
        Self {
            page,
            layers,
            chunks: (settings.bytes / (BLOCKS * page * layers)).max(1),
        }
    }

    /// The fewest bytes that adjoin: one chunk, one layer, one run of [`crate::link::SMALL`] bytes when ids are in order.
    pub fn small() -> Self {
        Self {
            page: crate::link::SMALL / BLOCKS,
            layers: 1,
            chunks: 1,
        }
    }

    /// Bytes of a chunk.
    pub fn chunk_bytes(&self) -> u64 {
        BLOCKS * self.page * self.layers
    }

    /// Bytes of a transfer.
    pub fn bytes(&self) -> u64 {
        self.chunk_bytes() * self.chunks
    }

    /// Blocks of a transfer. The engine has twice as many: those that are stored, and those that are written.
    fn blocks(&self) -> u64 {
        BLOCKS * self.chunks
    }
}

/// The order of block ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ids {
    /// As an engine that has served for a while gives them.
    Random,
    /// In order: pages of a layer adjoin.
    Consecutive,
}

impl Ids {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Random, Self::Consecutive];

    /// In the results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::Consecutive => "consecutive",
        }
    }

    /// `count` numbers from 0 on, always in the same order.
    fn take(self, count: u64) -> Vec<i64> {
        let mut ids: Vec<i64> = (0..count as i64).collect();
        if self == Self::Random {
            ids.sort_by_key(|id| word(*id as u64));
        }
        ids
    }
}

/// Pages, open.
pub struct Pages {
    shape: Shape,
    arena: Arc<Arena>,
    memory: Box<dyn EngineMemory>,
    /// Ids that are stored, and ids that are written by retrieves.
    ids: [Vec<i64>; 2],
}

impl Pages {
    /// Opens the engine's pages as pages of this shape.
    pub fn open(
        device: &CudaDevice,
        arena: &Arc<Arena>,
        engine: &Engine,
        shape: Shape,
        ids: Ids,
    ) -> Result<Self> {
        let blocks = 2 * shape.blocks();
        let bytes = blocks * shape.page;
        let elements = shape.page / BLOCK_TOKENS / 2;
        let tensors: Vec<TensorSpec> = (0..shape.layers)
            .map(|layer| TensorSpec {
                memory: MemorySpec::Cuda(Box::new(engine.storage(layer * bytes, bytes))),
                dtype_size: 2,
                dtype_name: "bfloat16".into(),
                shape: vec![blocks, BLOCK_TOKENS, elements],
                stride: vec![BLOCK_TOKENS * elements, elements, 1],
                storage_offset: 0,
            })
            .collect();
        let hints = LayoutHints {
            kv_layout: Some(KvAxisOrder::Nhd),
            ..LayoutHints::default()
        };
        let engine = kvtier_device::Engine::Vllm;
        let layout = KvLayout::detect(&tensors, engine, &hints, &[], CHUNK_TOKENS, false)?;
        let mut stored = ids.take(blocks);
        let written = stored.split_off(shape.blocks() as usize);
        Ok(Self {
            shape,
            arena: Arc::clone(arena),
            memory: device.open(Arc::new(layout))?,
            ids: [stored, written],
        })
    }

    /// Begins a transfer between ids (0: stored, 1: written) and a half of the arena.
    pub fn begin(&self, direction: Direction, ids: usize, half: u64) -> Result<Receiver<Ended>> {
        let chunks = self.shape.chunks as usize;
        let layout = self.memory.layout();
        let chunk = |chunk: usize| ChunkCopy {
            request: ChunkRequest {
                object_group: 0,
                chunk,
                skip_tokens: 0,
            },
            extent: self.extent(half, chunk as u64),
        };
        let transfer = Transfer {
            arena: Arc::clone(&self.arena),
            blocks: BlockTable::check(layout, &[&self.ids[ids]], chunks)?,
            chunks: (0..chunks).map(chunk).collect(),
            direction,
            deadline: None,
            event: Vec::new(),
        };
        let (tell, hear) = channel();
        let done = move |result: std::result::Result<u64, kvtier_device::DeviceError>| {
            // A receiver that was dropped has reported its error.
            let _ = tell.send((Instant::now(), result.map_err(|error| error.to_string())));
        };
        self.memory.transfer(transfer, Box::new(done));
        Ok(hear)
    }

    /// When a transfer ended. It must have moved all bytes.
    pub fn end(&self, ended: &Receiver<Ended>) -> Result<Instant> {
        let (at, result) = ended
            .recv_timeout(TIMEOUT)
            .map_err(|error| format!("no end of a transfer: {error}"))?;
        let (moved, bytes) = (result?, self.shape.bytes());
        if moved != bytes {
            return Err(format!("{moved} bytes were moved of {bytes}").into());
        }
        Ok(at)
    }

    /// One transfer, from the call to the end.
    pub fn run(&self, direction: Direction, ids: usize, half: u64) -> Result<Duration> {
        let began = Instant::now();
        let ended = self.begin(direction, ids, half)?;
        Ok(self.end(&ended)? - began)
    }

    /// Stores, retrieves into other pages, and stores those: both times every byte must be right.
    pub fn check(&self) -> Result<()> {
        let all = self.arena.whole();
        let base = self.arena.address(all, 0, all.len)?;
        // SAFETY: the arena is private memory of this process, and nothing is in flight.
        unsafe { base.as_ptr().write_bytes(0xa5, all.len as usize) };
        self.run(Direction::Store, 0, 0)?;
        self.compare(0)?;
        self.run(Direction::Retrieve, 1, 0)?;
        self.run(Direction::Store, 1, 1)?;
        self.compare(1)
    }

    /// Time from the last byte of a stored chunk, as a thread sees it that looks at the arena, to the end.
    pub fn delay_of_store(&self) -> Result<Duration> {
        let bytes = self.shape.bytes();
        let all = Extent::new(0, bytes);
        let base = self.arena.address(all, 0, bytes)?.cast::<u64>();
        let words_of_page = (self.shape.page / 8) as usize;
        // The end of each page.
        let places = (0..bytes as usize / 8).skip(words_of_page - 1);
        let places = places.step_by(words_of_page);
        for at in places.clone() {
            // SAFETY: inside the arena, which starts at a page; nothing is in flight.
            unsafe { base.add(at).write_volatile(0) };
        }
        let deadline = Instant::now() + TIMEOUT;
        let ended = self.begin(Direction::Store, 0, 0)?;
        for at in places {
            // SAFETY: as above, but for copies of the GPU that write whole words.
            while unsafe { base.add(at).read_volatile() } == 0 {
                if Instant::now() > deadline {
                    return Err(format!("word {at} of a stored chunk did not arrive").into());
                }
                std::hint::spin_loop();
            }
        }
        let last = Instant::now();
        Ok(self.end(&ended)?.saturating_duration_since(last))
    }

    fn extent(&self, half: u64, chunk: u64) -> Extent {
        let bytes = self.shape.chunk_bytes();
        Extent::new(half * self.arena.len() / 2 + chunk * bytes, bytes)
    }

    /// Whether a half of the arena holds the pages that are stored.
    fn compare(&self, half: u64) -> Result<()> {
        let words_of_page = self.shape.page / 8;
        let words_of_layer = 2 * self.shape.blocks() * words_of_page;
        for (chunk, ids) in self.ids[0].chunks(BLOCKS as usize).enumerate() {
            let extent = self.extent(half, chunk as u64);
            let base = self.arena.address(extent, 0, extent.len)?;
            // SAFETY: inside the arena, aligned, and nothing is in flight.
            let object = unsafe {
                std::slice::from_raw_parts(
                    base.cast::<u64>().as_ptr().cast_const(),
                    extent.len as usize / 8,
                )
            };
            let pages =
                (0..self.shape.layers).flat_map(|layer| ids.iter().map(move |id| (layer, id)));
            for (bytes, (layer, id)) in object.chunks(words_of_page as usize).zip(pages) {
                let first = layer * words_of_layer + *id as u64 * words_of_page;
                if bytes.iter().zip(first..).any(|(is, at)| *is != word(at)) {
                    return Err(
                        format!("wrong bytes: chunk {chunk}, layer {layer}, block {id}").into(),
                    );
                }
            }
        }
        Ok(())
    }
}
