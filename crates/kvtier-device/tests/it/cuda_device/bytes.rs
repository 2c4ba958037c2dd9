//! Every byte is where the naive model has it, and no other byte is touched: random registrations of all formats, in both
//! directions, by every executor, and with the arena pinned, not pinned, in many pieces, and while it is pinned.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use kvtier_device::cuda::{Executor, GpuOptions};
use kvtier_device::{
    BlockTable, ChunkCopy, ChunkRequest, Device, Direction, Engine, EngineMemory, KvAxisOrder,
    KvFormat, KvLayout, MemorySpec, TensorSpec, Transfer,
};
use kvtier_memory::Extent;

use super::setup::{Server, Ticket, content, storage};
use crate::exporter::Exporter;
use crate::model::{Case, Random, random_case};

/// Bytes of the arena where transfers wait until it is pinned.
const ARENA: u64 = 2 << 20;

/// A case's memory on the GPU, registered.
pub struct RegisteredCase {
    pub memory: Box<dyn EngineMemory>,
    layout: Arc<KvLayout>,
    /// Numbers of the engine's allocations, by the case's memories.
    numbers: Vec<usize>,
}

impl RegisteredCase {
    pub fn new(server: &Server, engine: &mut Exporter, case: &mut Case) -> Self {
        // What a CPU's tensors are taken for without a hint.
        let first = case.groups[0].format;
        if case.engine == Engine::Vllm && first != KvFormat::NB_NL_TWO_BS_NH_HS {
            case.hints.kv_layout.get_or_insert(KvAxisOrder::Hnd);
        }
        let allocations: Vec<_> = case
            .memories
            .iter()
            .map(|(name, bytes)| {
                let (number, handle) = engine.export(bytes.len() as u64);
                engine.write(number, bytes);
                (name, number, storage(0, handle, bytes.len() as u64))
            })
            .collect();
        let on_gpu = |tensor: &TensorSpec| {
            let MemorySpec::CpuShm { name, .. } = &tensor.memory else {
                panic!("not shared memory")
            };
            let (.., memory) = allocations
                .iter()
                .find(|(other, ..)| *other == name)
                .unwrap();
            TensorSpec {
                memory: memory.clone(),
                ..tensor.clone()
            }
        };
        let tensors: Vec<_> = case.tensors.iter().map(on_gpu).collect();
        let layout = KvLayout::detect(
            &tensors,
            case.engine,
            &case.hints,
            &case.specs,
            case.chunk_tokens,
            case.separate,
        );
        let layout = Arc::new(layout.unwrap());
        for (kernel, group) in layout.kernel_groups().iter().zip(&case.groups) {
            assert_eq!(kernel.format, group.format);
        }
        let numbers = allocations.iter().map(|(_, number, _)| *number).collect();
        Self {
            memory: server.cuda.open(Arc::clone(&layout)).unwrap(),
            layout,
            numbers,
        }
    }

    pub fn read(&self, engine: &mut Exporter, case: &Case) -> Vec<Vec<u8>> {
        let memories = self.numbers.iter().zip(&case.memories);
        memories
            .map(|(number, (_, bytes))| engine.read(*number, 0, bytes.len()))
            .collect()
    }

    fn run(&self, server: &Server, case: &Case, chunks: &[ChunkCopy], direction: Direction) -> u64 {
        let transfer = Transfer {
            arena: Arc::clone(&server.arena),
            blocks: BlockTable::check(&self.layout, &case.block_ids(), case.chunks).unwrap(),
            chunks: chunks.to_vec(),
            direction,
            deadline: None,
            event: Vec::new(),
        };
        Ticket::of(&*self.memory, transfer).end().unwrap()
    }
}

/// One random registration, both ways.
fn check(server: &Server, engine: &mut Exporter, seed: u64, formats: &mut BTreeSet<String>) {
    let mut case = random_case(seed, "cuda_device");
    let random = &mut Random::new(!seed);
    let registered = RegisteredCase::new(server, engine, &mut case);
    if server.arena.len() == ARENA {
        server.pinned();
    }
    formats.extend(case.groups.iter().map(|group| group.format.to_string()));

    // Extents in an order of their own, some adjoining and some apart, anywhere.
    let mut chunks = Vec::new();
    let mut end = random.within(0, 5000);
    for object in registered.layout.object_groups() {
        for chunk in 0..case.chunks {
            end += random.pick(&[0, 0, 1, 16]);
            chunks.push(ChunkCopy {
                request: ChunkRequest {
                    object_group: object.index,
                    chunk,
                    skip_tokens: case.skip_tokens,
                },
                extent: Extent::new(end, object.object_bytes),
            });
            end += object.object_bytes;
        }
    }
    end += 100;
    assert!(end <= ARENA);
    let groups = |chunk: &ChunkCopy| {
        &registered.layout.object_groups()[chunk.request.object_group].kernel_groups
    };

    let fresh = random.bytes(end);
    server.arena.write(Extent::new(0, end), 0, &fresh).unwrap();
    let mut expected: Vec<_> = case
        .memories
        .iter()
        .map(|(_, bytes)| bytes.clone())
        .collect();
    let mut bytes = 0;
    for chunk in &chunks {
        let ChunkCopy { request, extent } = chunk;
        case.each_byte(
            groups(chunk),
            request.chunk,
            case.skip_tokens,
            |memory, to, from| {
                expected[memory][to as usize] = fresh[(extent.offset + from) as usize];
                bytes += 1;
            },
        );
    }
    let moved = registered.run(server, &case, &chunks, Direction::Retrieve);
    let pages = registered.read(engine, &case);
    assert!(pages == expected, "seed {seed}: retrieve");
    assert_eq!(moved, bytes, "seed {seed}: retrieve");
    assert!(content(&server.arena, end) == fresh, "seed {seed}: objects");

    // A window's worth of null blocks in front.
    for group in &mut case.groups {
        let nulls = random.within(0, group.ids.len() as u64) as usize;
        group.ids[..nulls].fill(0);
    }
    let (mut expected, mut bytes) = (fresh, 0);
    for chunk in &mut chunks {
        chunk.request.skip_tokens = 0;
        let offset = chunk.extent.offset;
        case.each_byte(groups(chunk), chunk.request.chunk, 0, |memory, from, to| {
            expected[(offset + to) as usize] = pages[memory][from as usize];
            bytes += 1;
        });
    }
    let moved = registered.run(server, &case, &chunks, Direction::Store);
    assert!(
        content(&server.arena, end) == expected,
        "seed {seed}: store"
    );
    assert_eq!(moved, bytes, "seed {seed}: store");
    assert!(
        registered.read(engine, &case) == pages,
        "seed {seed}: pages"
    );
}

/// Many registrations with one device; gives the executors that moved something.
fn check_all(
    script: &str,
    options: GpuOptions,
    arena: u64,
    seeds: Range<u64>,
) -> Vec<&'static str> {
    let server = Server::with(script, options, arena);
    let mut engine = Exporter::start();
    let mut formats = BTreeSet::new();
    let many = seeds.end - seeds.start >= 60;
    for seed in seeds {
        check(&server, &mut engine, seed, &mut formats);
    }
    if many {
        assert_eq!(formats.len(), 13, "{formats:?}");
    }
    let moved = server.readings().moved;
    let used: BTreeSet<_> = moved
        .iter()
        .map(|(_, executor, _)| executor.name())
        .collect();
    server.ends_clean();
    used.into_iter().collect()
}

fn forced(executor: Executor) -> GpuOptions {
    GpuOptions {
        executor: Some(executor),
        ..GpuOptions::default()
    }
}

#[test]
fn plain_executor_copies_every_byte() {
    let used = check_all("", forced(Executor::Plain), ARENA, 0..60);
    assert_eq!(used, ["plain"]);
}

#[test]
fn batch_executor_copies_every_byte() {
    let used = check_all("", forced(Executor::Batch), ARENA, 0..60);
    assert_eq!(used, ["batch"]);
}

#[test]
fn kernel_executor_copies_every_byte() {
    let used = check_all("", forced(Executor::Kernel), ARENA, 0..60);
    assert_eq!(used, ["kernel"]);
}

#[test]
fn staged_executor_copies_every_byte() {
    let used = check_all("", forced(Executor::Staged), ARENA, 0..60);
    assert_eq!(used, ["staged"]);
}

#[test]
fn fastest_executor_copies_every_byte() {
    let used = check_all("", GpuOptions::default(), ARENA, 0..60);
    assert!(!used.is_empty());
}

/// Without pinned memory, the kernel cannot access it, and batches give way to plain copies.
#[test]
fn unpinnable_arena_is_copied() {
    let script = "fail cuMemHostRegister_v2=2";
    for (executor, expected) in [
        (Executor::Plain, ["plain"].as_slice()),
        (Executor::Batch, &["plain"]),
        (Executor::Kernel, &["staged"]),
        (Executor::Staged, &["staged"]),
    ] {
        let used = check_all(script, forced(executor), ARENA, 100..130);
        assert_eq!(used, expected, "{executor:?}");
    }
    let used = check_all(script, GpuOptions::default(), ARENA, 100..130);
    assert!(
        !used.contains(&"kernel") && !used.contains(&"batch"),
        "{used:?}"
    );
}

/// No copy of the driver's reaches over a border, and the kernel over none either.
#[test]
fn arena_of_many_pieces_is_copied() {
    for executor in Executor::ALL {
        let options = GpuOptions {
            pin_bytes: 4096,
            ..forced(executor)
        };
        let used = check_all("", options, ARENA, 200..230);
        assert!(used.contains(&executor.name()), "{used:?}");
    }
}

#[test]
fn arena_is_copied_while_pinning() {
    for executor in Executor::ALL {
        let options = GpuOptions {
            pin_bytes: 4096,
            ..forced(executor)
        };
        check_all("", options, 64 << 20, 300..310);
    }
}
