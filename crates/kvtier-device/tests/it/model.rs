//! A naive model of pages and objects: one element at a time, from the written rules, with none of
//! the planner's code. And a random registration to hold against it.

use kvtier_core::random::SplitMix64;
use kvtier_device::{
    Direction, Engine, GroupSpec, KvAxisOrder, KvFormat, KvLayout, KvListLayout, LayoutHints,
    MemorySpec, PlannedCopy, TensorSpec,
};

/// Strides of a tight tensor, in elements.
pub fn row_major(shape: &[u64]) -> Vec<u64> {
    let mut stride = vec![1; shape.len()];
    for at in (0..shape.len().saturating_sub(1)).rev() {
        stride[at] = stride[at + 1] * shape[at + 1];
    }
    stride
}

/// Runs copies over plain byte vectors; a copy outside them panics.
pub fn apply(
    copies: &[PlannedCopy],
    memories: &mut [Vec<u8>],
    object: &mut [u8],
    direction: Direction,
) {
    for PlannedCopy { memory, copy } in copies {
        let [one, a, b, c] = copy.loops;
        assert_eq!(one.count, 1);
        for i in 0..a.count {
            for j in 0..b.count {
                for k in 0..c.count {
                    let engine = copy.segment_offset
                        + i * a.segment_stride
                        + j * b.segment_stride
                        + k * c.segment_stride;
                    let at = copy.arena_offset
                        + i * a.arena_stride
                        + j * b.arena_stride
                        + k * c.arena_stride;
                    let engine = engine as usize..(engine + copy.inner_bytes) as usize;
                    let at = at as usize..(at + copy.inner_bytes) as usize;
                    match direction {
                        Direction::Store => {
                            object[at].copy_from_slice(&memories[*memory][engine]);
                        }
                        Direction::Retrieve => {
                            memories[*memory][engine].copy_from_slice(&object[at]);
                        }
                    }
                }
            }
        }
    }
}

/// Random sizes, choices and bytes.
pub struct Random(SplitMix64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    pub fn next(&mut self) -> u64 {
        self.0.next()
    }

    /// A number from `low` to `high`, both possible.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    pub fn chance(&mut self, one_in: u64) -> bool {
        self.next().is_multiple_of(one_in)
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        *self.0.choose(from)
    }

    pub fn bytes(&mut self, count: u64) -> Vec<u8> {
        self.0.bytes(count as usize)
    }
}

/// One kernel group of a random registration.
pub struct Group {
    pub format: KvFormat,
    pub slots: u64,
    pub tokens_per_block: u64,
    pub heads: u64,
    pub head_size: u64,
    pub dtype: (&'static str, u64),
    pub layers: Vec<usize>,
    pub ids: Vec<i64>,
}

/// A random registration, its memory, and block ids for a request.
pub struct Case {
    pub engine: Engine,
    pub hints: LayoutHints,
    pub tensors: Vec<TensorSpec>,
    pub specs: Vec<GroupSpec>,
    pub groups: Vec<Group>,
    pub chunk_tokens: u64,
    pub chunks: usize,
    pub skip_tokens: u64,
    pub separate: bool,
    /// Bytes by shared-memory name, in the order names first appear.
    pub memories: Vec<(String, Vec<u8>)>,
}

impl Case {
    pub fn layout(&self) -> KvLayout {
        KvLayout::detect(
            &self.tensors,
            self.engine,
            &self.hints,
            &self.specs,
            self.chunk_tokens,
            self.separate,
        )
        .unwrap()
    }

    pub fn block_ids(&self) -> Vec<Vec<i64>> {
        self.groups.iter().map(|group| group.ids.clone()).collect()
    }

    /// Memory and byte of an element of a group's layer.
    fn engine_byte(
        &self,
        group: &Group,
        layer: usize,
        [kv, block, slot, head, d]: [u64; 5],
    ) -> (usize, u64) {
        use KvFormat as F;
        let l = group.layers[layer] as u64;
        let separate_v = self.tensors.len() as u64 / 2;
        let (tensor, index): (u64, Vec<u64>) = match group.format {
            F::NB_NL_TWO_BS_NH_HS => (0, vec![block, l, kv, slot, head, d]),
            F::NB_NL_TWO_NH_BS_HS if self.engine == Engine::Vllm => {
                (0, vec![block, l, kv, head, slot, d])
            }
            // TensorRT-LLM's last dimension is flat: heads, slots, elements.
            F::NB_NL_TWO_NH_BS_HS => (
                0,
                vec![
                    block,
                    l,
                    kv,
                    (head * group.slots + slot) * group.head_size + d,
                ],
            ),
            F::NL_X_TWO_NB_BS_NH_HS => (l, vec![kv, block, slot, head, d]),
            F::NL_X_TWO_NB_NH_BS_HS => (l, vec![kv, block, head, slot, d]),
            F::NL_X_TWO_NB_NH_ONE_BS_HS => (l, vec![kv, block, head, 0, slot, d]),
            F::NL_X_NB_TWO_BS_NH_HS => (l, vec![block, kv, slot, head, d]),
            F::NL_X_NB_TWO_NH_BS_HS => (l, vec![block, kv, head, slot, d]),
            F::NL_X_NB_BS_HS => (l, vec![block, slot, d]),
            F::NL_X_NB_BS_NH_CS | F::NL_X_NB_BS_NH_HS => (l, vec![block, slot, head, d]),
            F::NL_X_NB_NH_BS_CS => (l, vec![block, head, slot, d]),
            // K list then V list of [NB*BS, NH, HS].
            F::TWO_X_NL_X_NB_BS_NH_HS => (
                kv * separate_v + l,
                vec![block * group.slots + slot, head, d],
            ),
            // A page is the values of all slots, then the scales of all slots.
            F::NL_X_NB_BSV_BSS => {
                let byte = if d < 128 {
                    slot * 128 + d
                } else {
                    group.slots * 128 + slot * 4 + (d - 128)
                };
                let tensor = &self.tensors[l as usize];
                let page = tensor.storage_offset + block * tensor.stride[0] + byte;
                return (self.memory(tensor), page);
            }
            other => panic!("no model of {other}"),
        };
        let tensor = &self.tensors[tensor as usize];
        assert_eq!(index.len(), tensor.shape.len());
        let mut element = tensor.storage_offset;
        for (at, position) in index.iter().enumerate() {
            assert!(*position < tensor.shape[at]);
            element += position * tensor.stride[at];
        }
        (self.memory(tensor), element * tensor.dtype_size)
    }

    fn memory(&self, tensor: &TensorSpec) -> usize {
        let MemorySpec::CpuShm { name, .. } = &tensor.memory else {
            panic!("not shared memory")
        };
        self.memories
            .iter()
            .position(|(other, _)| other == name)
            .unwrap()
    }

    /// Calls `visit(memory, engine byte, object byte)` for every byte of one chunk object.
    pub fn each_byte(
        &self,
        kernel_groups: &[usize],
        chunk: usize,
        skip_tokens: u64,
        mut visit: impl FnMut(usize, u64, u64),
    ) {
        let mut group_start = 0;
        for group in kernel_groups.iter().map(|group| &self.groups[*group]) {
            let per_chunk = self.chunk_tokens / group.tokens_per_block;
            let rows = per_chunk * group.slots;
            let kv_size = kv_size(group.format);
            let layers = group.layers.len() as u64;
            let hidden = group.heads * group.head_size;
            let size = group.dtype.1;
            for kv in 0..kv_size {
                for layer in 0..layers {
                    for row in 0..rows {
                        let (j, slot) = (row / group.slots, row % group.slots);
                        let in_range = chunk as u64 * per_chunk + j;
                        if (in_range + 1) * group.tokens_per_block <= skip_tokens {
                            continue;
                        }
                        let block = group.ids[in_range as usize] as u64;
                        for head in 0..group.heads {
                            for d in 0..group.head_size {
                                let index = [kv, block, slot, head, d];
                                let (memory, engine) =
                                    self.engine_byte(group, layer as usize, index);
                                let position = ((kv * layers + layer) * rows + row) * hidden
                                    + head * group.head_size
                                    + d;
                                for byte in 0..size {
                                    let at = group_start + position * size + byte;
                                    visit(memory, engine + byte, at);
                                }
                            }
                        }
                    }
                }
            }
            group_start += kv_size * layers * rows * hidden * size;
        }
    }
}

pub fn kv_size(format: KvFormat) -> u64 {
    use KvFormat as F;
    match format {
        F::NL_X_NB_BS_HS
        | F::NL_X_NB_BS_NH_CS
        | F::NL_X_NB_NH_BS_CS
        | F::NL_X_NB_BSV_BSS
        | F::NL_X_NB_BS_NH_HS => 1,
        _ => 2,
    }
}

const DTYPES: [(&str, u64); 4] = [
    ("uint8", 1),
    ("bfloat16", 2),
    ("float32", 4),
    ("float64", 8),
];

/// A random registration. `unique` makes its memory names differ from those of other tests.
pub fn random_case(seed: u64, unique: &str) -> Case {
    use KvFormat as F;
    let random = &mut Random::new(seed);
    let mut hints = LayoutHints::default();
    let (engine, choices): (Engine, &[F]) = match random.within(0, 9) {
        0 => {
            hints.kv_layout = random.pick(&[None, Some(KvAxisOrder::Nhd)]);
            (Engine::Vllm, &[F::NB_NL_TWO_BS_NH_HS])
        }
        1 => {
            hints.kv_layout = Some(KvAxisOrder::Hnd);
            (Engine::Vllm, &[F::NB_NL_TWO_NH_BS_HS])
        }
        2 => (Engine::Trtllm, &[F::NB_NL_TWO_NH_BS_HS]),
        3 => {
            hints.kv_list_layout = Some(KvListLayout::Separate);
            (Engine::Sglang, &[F::TWO_X_NL_X_NB_BS_NH_HS])
        }
        4 => {
            hints.kv_list_layout = Some(KvListLayout::Unified);
            (Engine::Sglang, &[F::NL_X_NB_BS_HS, F::NL_X_NB_BS_NH_HS])
        }
        5 | 6 => {
            hints.kv_layout = Some(random.pick(&[KvAxisOrder::Nhd, KvAxisOrder::Blnhc]));
            (
                Engine::Vllm,
                &[
                    F::NL_X_TWO_NB_BS_NH_HS,
                    F::NL_X_NB_TWO_BS_NH_HS,
                    F::NL_X_NB_BS_NH_CS,
                    F::NL_X_NB_BS_HS,
                    F::NL_X_NB_BSV_BSS,
                    F::NL_X_TWO_NB_NH_ONE_BS_HS,
                ],
            )
        }
        _ => {
            hints.kv_layout =
                random.pick(&[None, Some(KvAxisOrder::Hnd), Some(KvAxisOrder::Blhnc)]);
            (
                Engine::Vllm,
                &[
                    F::NL_X_TWO_NB_NH_BS_HS,
                    F::NL_X_NB_TWO_NH_BS_HS,
                    F::NL_X_NB_NH_BS_CS,
                    F::NL_X_NB_BS_HS,
                    F::NL_X_NB_BSV_BSS,
                    F::NL_X_TWO_NB_NH_ONE_BS_HS,
                ],
            )
        }
    };
    let one_group = choices.len() == 1;
    let group_count = if one_group {
        1
    } else {
        random.within(1, 3) as usize
    };
    // Layers go to the groups in turn, so that groups interleave and come in order.
    let mut layer_lists = vec![Vec::new(); group_count];
    let mut layers = 0;
    for round in 0..random.within(1, 3) {
        for list in &mut layer_lists {
            if round == 0 || !random.chance(3) {
                list.push(layers);
                layers += 1;
            }
        }
    }
    let chunks = random.within(1, 3) as usize;
    // Every tokens_per_block below divides 24.
    let chunk_tokens = 24 * random.within(1, 2);
    let groups: Vec<Group> = layer_lists
        .into_iter()
        .map(|layers| {
            let format = random.pick(choices);
            let slots = random.pick(&[1, 2, 3, 4, 6]);
            let mut heads = random.within(1, 4);
            let mut head_size = random.within(1, 5);
            let mut dtype = random.pick(&DTYPES);
            match format {
                F::NL_X_NB_BS_HS => heads = 1,
                F::NL_X_NB_BSV_BSS => (heads, head_size, dtype) = (1, 132, DTYPES[0]),
                _ => {}
            }
            let needed = chunks as u64 * chunk_tokens;
            let tokens_per_block = slots * random.pick(&[1, 2]);
            let needed = needed / tokens_per_block;
            let num_blocks = needed.max(3) + random.within(0, 4);
            let mut ids: Vec<i64> = (0..num_blocks as i64).collect();
            let swaps = random.pick(&[0, 0, 1, 3, num_blocks]);
            for _ in 0..swaps {
                let (a, b) = (
                    random.within(0, num_blocks - 1),
                    random.within(0, num_blocks - 1),
                );
                ids.swap(a as usize, b as usize);
            }
            let from = random.within(0, num_blocks - needed) as usize;
            let ids = ids[from..from + needed as usize].to_vec();
            Group {
                format,
                slots,
                tokens_per_block,
                heads,
                head_size,
                dtype,
                layers,
                ids,
            }
        })
        .collect();
    let mut case = Case {
        engine,
        hints,
        tensors: Vec::new(),
        specs: Vec::new(),
        chunk_tokens,
        chunks,
        skip_tokens: random.pick(&[0, 0, 1]) * random.within(0, chunks as u64 * chunk_tokens + 3),
        separate: random.chance(2),
        memories: Vec::new(),
        groups,
    };
    case.specs = case
        .groups
        .iter()
        .enumerate()
        .map(|(at, g)| spec(random, at, g, &case))
        .collect();
    place(&mut case, layers, random, unique);
    case
}

fn spec(random: &mut Random, at: usize, group: &Group, case: &Case) -> GroupSpec {
    let blocks = [
        group.tokens_per_block,
        case.chunk_tokens,
        case.chunk_tokens + 1,
    ];
    let as_slots = group.tokens_per_block == group.slots && random.chance(2);
    GroupSpec {
        engine_group_id: at as i64,
        layer_indices: group.layers.iter().map(|layer| *layer as i64).collect(),
        tokens_per_block: if as_slots {
            0
        } else {
            group.tokens_per_block as i64
        },
        sliding_window_tokens: if random.chance(2) {
            -1
        } else {
            random.pick(&blocks) as i64
        },
        extra_object_group_tag: i64::from(random.chance(6)),
        recurrent_state: random.chance(6),
    }
}

/// Chooses shapes, strides and places for all tensors, and fills their memory.
pub fn place(case: &mut Case, layers: usize, random: &mut Random, unique: &str) {
    use KvFormat as F;
    let one = &case.groups[0];
    let most = |group: &Group| 1 + *group.ids.iter().max().unwrap() as u64;
    let mut views: Vec<(Vec<u64>, (&str, u64))> = Vec::new();
    if case.engine == Engine::Trtllm {
        case.hints.num_kv_heads = Some(one.heads);
        case.hints.tokens_per_block = Some(one.slots);
        case.hints.head_dim = Some(one.head_size);
        let flat = one.heads * one.slots * one.head_size;
        views.push((
            vec![most(one) + random.within(0, 2), layers as u64, 2, flat],
            one.dtype,
        ));
    } else if matches!(one.format, F::NB_NL_TWO_BS_NH_HS | F::NB_NL_TWO_NH_BS_HS) {
        let inner = if one.format == F::NB_NL_TWO_BS_NH_HS {
            [one.slots, one.heads]
        } else {
            [one.heads, one.slots]
        };
        // Two blocks of one would read as another format.
        let num_blocks = most(one).max(3) + random.within(0, 2);
        views.push((
            vec![
                num_blocks,
                layers as u64,
                2,
                inner[0],
                inner[1],
                one.head_size,
            ],
            one.dtype,
        ));
    } else if one.format == F::TWO_X_NL_X_NB_BS_NH_HS {
        case.hints.tokens_per_block = Some(one.slots);
        let num_blocks = most(one) + random.within(0, 2);
        let shape = vec![num_blocks * one.slots, one.heads, one.head_size];
        views = vec![(shape, one.dtype); 2 * layers];
    } else {
        for layer in 0..layers {
            let group = case
                .groups
                .iter()
                .find(|group| group.layers.contains(&layer))
                .unwrap();
            // Layers may differ in their number of blocks; two would read as another format.
            let nb = most(group).max(3) + random.within(0, 2);
            let Group {
                slots: bs,
                heads: nh,
                head_size: hs,
                ..
            } = *group;
            let shape = match group.format {
                F::NL_X_TWO_NB_BS_NH_HS => vec![2, nb, bs, nh, hs],
                F::NL_X_TWO_NB_NH_BS_HS => vec![2, nb, nh, bs, hs],
                F::NL_X_TWO_NB_NH_ONE_BS_HS => vec![2, nb, nh, 1, bs, hs],
                F::NL_X_NB_TWO_BS_NH_HS => vec![nb, 2, bs, nh, hs],
                F::NL_X_NB_TWO_NH_BS_HS => vec![nb, 2, nh, bs, hs],
                F::NL_X_NB_BS_HS => vec![nb, bs, hs],
                F::NL_X_NB_BS_NH_CS | F::NL_X_NB_BS_NH_HS => vec![nb, bs, nh, hs],
                F::NL_X_NB_NH_BS_CS => vec![nb, nh, bs, hs],
                F::NL_X_NB_BSV_BSS => match random.within(0, 2) {
                    0 => vec![nb, bs, 132],
                    1 => vec![nb, 1, bs, 132],
                    _ => vec![nb, bs, 1, 132],
                },
                other => panic!("no shape for {other}"),
            };
            views.push((shape, group.dtype));
        }
    }
    let shared = random.chance(2);
    let padded = random.chance(2);
    for (index, (shape, (dtype_name, dtype_size))) in views.into_iter().enumerate() {
        let mut stride = row_major(&shape);
        if padded {
            stride[0] += random.within(0, 7);
        }
        for at in 1..shape.len() {
            // What the stride of a single element says means nothing.
            if shape[at] == 1 && random.chance(4) {
                stride[at] = random.next();
            }
        }
        let name = if shared {
            format!("/kvtier_device_{unique}_0")
        } else {
            format!("/kvtier_device_{unique}_{index}")
        };
        let known = case.memories.iter().position(|(other, _)| *other == name);
        let at = known.unwrap_or_else(|| {
            case.memories.push((name.clone(), Vec::new()));
            case.memories.len() - 1
        });
        let memory = &mut case.memories[at].1;
        let storage_offset = (memory.len() as u64).div_ceil(dtype_size) + random.within(0, 5);
        let last: u64 = shape
            .iter()
            .zip(&stride)
            .map(|(size, stride)| (size - 1).saturating_mul(*stride))
            .sum();
        let end = (storage_offset + last + 1) * dtype_size + random.within(0, 9);
        let more = end - memory.len() as u64;
        memory.extend(random.bytes(more));
        case.tensors.push(TensorSpec {
            memory: MemorySpec::CpuShm { name, nbytes: 0 },
            dtype_size,
            dtype_name: dtype_name.into(),
            shape,
            stride,
            storage_offset,
        });
    }
    let sizes: Vec<(String, u64)> = case
        .memories
        .iter()
        .map(|(name, bytes)| (name.clone(), bytes.len() as u64))
        .collect();
    for tensor in &mut case.tensors {
        if let MemorySpec::CpuShm { name, nbytes } = &mut tensor.memory {
            *nbytes = sizes.iter().find(|(other, _)| other == name).unwrap().1;
        }
    }
}
