use std::collections::HashMap;

use kvtier_device::{
    CudaAllocation, CudaStorage, Engine, GroupSpec, KvAxisOrder, KvLayout, KvListLayout,
    LayoutHints, MemorySpec, TensorSpec,
};
use kvtier_l2::Element;
use kvtier_proto::descriptor::Dtype;
use kvtier_proto::request::{EngineDrivenContext, GroupLayout, InstanceId};

use super::super::layout::ModelLayout;
use super::*;

fn avx512() -> Processor {
    Processor("x86_64 avx512f".into())
}

fn amx() -> Processor {
    Processor("x86_64 avx512f amx_tile".into())
}

/// A registration whose every field can be changed; four layers.
#[derive(Clone)]
struct Registered {
    engine: Engine,
    hints: LayoutHints,
    on_gpu: bool,
    dtype: (&'static str, u64),
    shape: Vec<u64>,
    groups: Vec<GroupSpec>,
    chunk_tokens: u64,
    separate: bool,
    processor: Processor,
    row_stride: Option<u64>,
    storage_offset: u64,
}

/// What vLLM registers: `[blocks, slots, heads, K and V]` on GPUs, `[blocks, heads, slots, K and V]` on CPUs.
fn registered(on_gpu: bool) -> Registered {
    let order = if on_gpu {
        KvAxisOrder::Nhd
    } else {
        KvAxisOrder::Hnd
    };
    Registered {
        engine: Engine::Vllm,
        hints: LayoutHints {
            kv_layout: Some(order),
            ..LayoutHints::default()
        },
        on_gpu,
        dtype: ("bfloat16", 2),
        shape: if on_gpu {
            vec![64, 16, 2, 8]
        } else {
            vec![64, 2, 16, 8]
        },
        groups: vec![GroupSpec::full_attention(vec![0, 1, 2, 3], 16)],
        chunk_tokens: 64,
        separate: true,
        processor: avx512(),
        row_stride: None,
        storage_offset: 0,
    }
}

impl Registered {
    fn layout(&self) -> KvLayout {
        let mut stride = vec![1; self.shape.len()];
        for at in (0..stride.len() - 1).rev() {
            stride[at] = stride[at + 1] * self.shape[at + 1];
        }
        if let Some(row) = self.row_stride {
            let at = stride.len() - 2;
            stride[at] = row;
            for outer in (0..at).rev() {
                stride[outer] = stride[outer + 1] * self.shape[outer + 1];
            }
        }
        let tensor = |index| TensorSpec {
            memory: if self.on_gpu {
                MemorySpec::Cuda(Box::new(CudaStorage {
                    device_uuid: String::new(),
                    allocation: CudaAllocation::Raw { handle: [0; 64] },
                    offset: 0,
                    bytes: 1 << 20,
                }))
            } else {
                MemorySpec::CpuShm {
                    name: format!("/lmcache_kv_1_{index}"),
                    nbytes: 1 << 20,
                }
            },
            dtype_size: self.dtype.1,
            dtype_name: self.dtype.0.into(),
            shape: self.shape.clone(),
            stride: stride.clone(),
            storage_offset: self.storage_offset,
        };
        let tensors: Vec<_> = (0..4).map(tensor).collect();
        KvLayout::detect(
            &tensors,
            self.engine,
            &self.hints,
            &self.groups,
            self.chunk_tokens,
            self.separate,
        )
        .unwrap()
    }

    fn fingerprint(&self) -> u64 {
        of_pages(&self.layout(), &self.processor)
    }

    fn page_bound(&self) -> bool {
        ModelLayout::of_pages(&self.layout()).page_bound
    }
}

/// A field of a registration and a change of it.
type Change = (&'static str, fn(&mut Registered));

/// Changes after which an engine must not see what it stored before, wherever its pages are.
const ALWAYS: [Change; 14] = [
    ("chunk size", |r| r.chunk_tokens = 128),
    ("engine type", |r| {
        r.engine = Engine::Sglang;
        r.hints.kv_list_layout = Some(KvListLayout::Unified);
    }),
    ("dtype", |r| r.dtype = ("float16", 2)),
    ("opaque dtype", |r| r.dtype = ("uint8", 1)),
    ("K and V planes", |r| r.shape = vec![2, 64, 16, 2, 8]),
    ("latent vectors", |r| r.shape = vec![64, 16, 16]),
    ("head size", |r| *r.shape.last_mut().unwrap() = 4),
    ("other heads of the same sum", |r| {
        let two = r.shape.iter().position(|extent| *extent == 2).unwrap();
        r.shape[two] = 4;
        r.shape[3] = 4;
    }),
    ("fewer layers", |r| {
        r.groups[0].layer_indices = vec![0, 1, 2]
    }),
    ("other layers", |r| {
        r.groups[0].layer_indices = vec![0, 1, 3]
    }),
    ("window", |r| r.groups[0].sliding_window_tokens = 128),
    ("short window", |r| r.groups[0].sliding_window_tokens = 32),
    ("recurrent state", |r| r.groups[0].recurrent_state = true),
    ("extra group tag", |r| {
        r.groups[0].extra_object_group_tag = 1
    }),
];

/// Changes of a page's interior.
const OF_PAGES: [Change; 3] = [
    ("block size", |r| {
        let slots = r.shape.iter().position(|extent| *extent == 16).unwrap();
        r.shape[slots] = 32;
        r.groups[0].tokens_per_block = 32;
    }),
    ("order of heads and slots", |r| {
        let heads_first = r.hints.kv_layout.unwrap().heads_first();
        r.hints.kv_layout = Some(if heads_first {
            KvAxisOrder::Nhd
        } else {
            KvAxisOrder::Hnd
        });
        r.shape.swap(1, 2);
    }),
    ("gaps between rows", |r| r.row_stride = Some(12)),
];

/// Changes that leave every byte of an object where it is.
const NEVER: [Change; 3] = [
    ("number of blocks", |r| r.shape[0] = 32),
    ("storage offset", |r| r.storage_offset = 64),
    ("number of the engine's group", |r| {
        r.groups[0].engine_group_id = 7
    }),
];

fn changed(base: &Registered, change: &Change) -> Registered {
    let mut changed = base.clone();
    change.1(&mut changed);
    changed
}

/// All of these differ from each other and from the base.
fn assert_apart(base: &Registered, changes: &[&Change]) {
    let mut seen = HashMap::from([(base.fingerprint(), "nothing")]);
    for change in changes {
        let fingerprint = changed(base, change).fingerprint();
        if let Some(other) = seen.insert(fingerprint, change.0) {
            panic!("{} is as {other}", change.0);
        }
    }
}

/// None of these differs from the base.
fn assert_same(base: &Registered, changes: &[Change]) {
    for change in changes {
        let fingerprint = changed(base, change).fingerprint();
        assert_eq!(fingerprint, base.fingerprint(), "{}", change.0);
    }
}

// proves: docs/identity.md#bound-pages
// proves: docs/identity.md#the-fingerprint
#[test]
fn cpu_pages_differ_by_every_field_that_moves_bytes() {
    let changes: Vec<_> = ALWAYS.iter().chain(&OF_PAGES).collect();
    assert_apart(&registered(false), &changes);
}

// proves: docs/identity.md#the-digest-of-kvtierconnector
// proves: docs/identity.md#the-fingerprint
#[test]
fn gpu_pages_of_numbers_share_across_page_interiors() {
    let base = registered(true);
    assert_apart(&base, &ALWAYS.iter().collect::<Vec<_>>());
    assert!(!base.page_bound());
    assert_same(&base, &OF_PAGES);
}

// proves: docs/identity.md#bound-pages
#[test]
fn gpu_pages_of_untyped_bytes_differ_by_their_interior() {
    for dtype in [("uint8", 1), ("int8", 1), ("float4_e2m1fn_x2", 1)] {
        let mut base = registered(true);
        base.dtype = dtype;
        assert!(base.page_bound());
        assert_apart(&base, &OF_PAGES.iter().collect::<Vec<_>>());
    }
}

// proves: docs/identity.md#the-fingerprint
#[test]
fn untyped_bytes_differ_by_their_named_kind() {
    let layout = |dtype: (&'static str, u64), kind: Option<&str>| {
        let mut base = registered(true);
        base.dtype = dtype;
        let layout = ModelLayout::of_pages(&base.layout()).with_byte_kind(kind);
        (layout.fingerprint, layout.unnamed_bytes)
    };
    for dtype in [("uint8", 1), ("int8", 1), ("float4_e2m1fn_x2", 1)] {
        let (unnamed, is_unnamed) = layout(dtype, None);
        assert!(is_unnamed);
        let kinds = ["fp8_e4m3", "fp8_e5m2"].map(|kind| layout(dtype, Some(kind)));
        assert!(kinds.iter().all(|(_, is_unnamed)| !is_unnamed));
        assert_ne!(kinds[0].0, kinds[1].0);
        assert!(kinds.iter().all(|(kind, _)| *kind != unnamed));
        assert_eq!(layout(dtype, Some("fp8_e5m2")), kinds[1]);
    }
    // A type that is registered needs no name.
    for dtype in [("bfloat16", 2), ("float8_e5m2", 1)] {
        assert_eq!(layout(dtype, Some("fp8_e5m2")), layout(dtype, None));
        assert!(!layout(dtype, None).1);
    }
}

// proves: docs/identity.md#bound-pages
// proves: docs/identity.md#the-fingerprint
#[test]
fn gpu_pages_of_several_tokens_per_slot_differ_by_their_interior() {
    let mut base = registered(true);
    base.groups[0].tokens_per_block = 32;
    assert!(base.page_bound());
    let other: Change = ("other ratio", |r| {
        r.shape[1] = 32;
        r.groups[0].tokens_per_block = 64;
    });
    assert_apart(&base, &[&other]);
}

// proves: docs/identity.md#the-fingerprint
#[test]
fn what_moves_no_byte_changes_nothing() {
    for on_gpu in [false, true] {
        assert_same(&registered(on_gpu), &NEVER);
    }
}

// proves: docs/identity.md#the-fingerprint
#[test]
fn layers_of_two_groups_differ_by_their_split() {
    let split = |first: &[i64], second: &[i64]| {
        let mut two = registered(true);
        two.groups = [(0, first), (1, second)]
            .map(|(id, layers)| GroupSpec {
                engine_group_id: id,
                ..GroupSpec::full_attention(layers.to_vec(), 16)
            })
            .to_vec();
        two.fingerprint()
    };
    assert_ne!(split(&[0, 1], &[2, 3]), split(&[0, 2], &[1, 3]));
}

// proves: docs/identity.md#the-fingerprint
#[test]
fn only_cpu_pages_differ_by_processor() {
    let on = |on_gpu, processor: Processor| {
        let mut on = registered(on_gpu);
        on.processor = processor;
        on.fingerprint()
    };
    assert_ne!(on(false, avx512()), on(false, amx()));
    assert_eq!(on(true, avx512()), on(true, amx()));
}

// proves: docs/identity.md#the-fingerprint
#[test]
fn processor_is_read_from_cpuinfo() {
    let of = |architecture, text: &str| Processor::from_cpuinfo(architecture, text).0;
    let amx = "model name\t: x\nflags\t\t: fpu avx512f amx_bf16 amx_tile\n";
    assert_eq!(of("x86_64", amx), "x86_64 avx512f amx_tile");
    assert_eq!(of("x86_64", "flags\t: fpu avx2 avx512fx\n"), "x86_64");
    assert_eq!(of("aarch64", "Features\t: fp asimd sve\n"), "aarch64");
    assert_eq!(of("x86_64", ""), "x86_64");
    assert!(Processor::of_host().0.starts_with(std::env::consts::ARCH));
}

fn engine_driven() -> EngineDrivenContext<'static> {
    EngineDrivenContext {
        instance: InstanceId(1),
        model_name: "model",
        world_size: 1,
        block_size: 128,
        num_layers: 4,
        hidden_dim_size: 256,
        dtype: "bfloat16",
        use_mla: false,
        chunk_tokens: None,
        num_physical_slots: None,
        groups: None,
        takes_pool: true,
    }
}

// proves: docs/identity.md#the-fingerprint
#[test]
fn engine_driven_differs_by_every_field_that_moves_bytes() {
    let of = |chunk_size, processor: Processor, change: fn(&mut EngineDrivenContext<'_>)| {
        let mut context = engine_driven();
        change(&mut context);
        let layout = EngineDrivenLayout::new(&context, chunk_size).unwrap();
        assert!(layout.model().page_bound);
        of_engine_driven(&layout, &processor)
    };
    let all = [
        of(256, avx512(), |_| {}),
        of(256, amx(), |_| {}),
        of(512, avx512(), |_| {}),
        of(256, avx512(), |c| c.block_size = 32),
        of(256, avx512(), |c| c.num_layers = 8),
        of(256, avx512(), |c| c.hidden_dim_size = 512),
        of(256, avx512(), |c| c.dtype = "float16"),
        of(256, avx512(), |c| c.use_mla = true),
        of(256, avx512(), |c| c.num_physical_slots = Some(128)),
        registered(false).fingerprint(),
    ];
    let distinct: std::collections::HashSet<_> = all.iter().collect();
    assert_eq!(distinct.len(), all.len());
    // The same geometry, said in other words.
    let spelled = of(256, avx512(), |c| c.num_physical_slots = Some(256));
    assert_eq!(spelled, all[0]);
}

/// Registers full attention of two planes, and latents of a window.
fn grouped() -> EngineDrivenContext<'static> {
    let full = GroupLayout {
        num_layers: 4,
        hidden_dim_size: 256,
        dtype: "bfloat16",
        tokens_per_block: 16,
        window_tokens: 256,
        kv_size: 2,
        window_chunks: 0,
        recurrent: false,
    };
    let latent = GroupLayout {
        window_tokens: 128,
        kv_size: 1,
        window_chunks: 1,
        ..full.clone()
    };
    EngineDrivenContext {
        groups: Some(vec![full, latent]),
        ..engine_driven()
    }
}

// proves: docs/identity.md#the-fingerprint
#[test]
fn engine_driven_groups_differ_by_every_field() {
    type Change = fn(&mut EngineDrivenContext<'_>, &mut GroupLayout<'_>);
    let of = |change: Change| {
        let mut context = grouped();
        let mut groups = context.groups.take().unwrap();
        change(&mut context, &mut groups[1]);
        context.groups = Some(groups);
        let layout = EngineDrivenLayout::new(&context, 256).unwrap();
        of_engine_driven(&layout, &avx512())
    };
    let all = [
        of(|_, _| {}),
        of(|_, group| group.num_layers = 8),
        of(|_, group| group.hidden_dim_size = 512),
        of(|_, group| group.dtype = "float16"),
        of(|_, group| group.tokens_per_block = 32),
        of(|_, group| group.window_tokens = 64),
        of(|_, group| group.kv_size = 2),
        of(|_, group| group.window_chunks = 2),
        of(|_, group| group.window_chunks = 0),
        of(|_, group| group.recurrent = true),
        of(|context, _| context.block_size = 16),
    ];
    let distinct: std::collections::HashSet<_> = all.iter().collect();
    assert_eq!(distinct.len(), all.len());
    // The same in other words: 0 planes are those of the context, and no window is the chunk.
    let spelled = of(|context, group| (context.use_mla, group.kv_size) = (true, 0));
    assert_eq!(spelled, all[0]);
    // Groups in another order have other numbers.
    let mut swapped = grouped();
    swapped.groups.as_mut().unwrap().reverse();
    let swapped = EngineDrivenLayout::new(&swapped, 256).unwrap();
    assert_ne!(of_engine_driven(&swapped, &avx512()), all[0]);
}

// proves: docs/identity.md#the-fingerprint
#[test]
fn engine_driven_without_groups_is_shared_by_releases() {
    let of = |groups| {
        let context = EngineDrivenContext {
            groups,
            ..engine_driven()
        };
        let layout = EngineDrivenLayout::new(&context, 256).unwrap();
        (of_engine_driven(&layout, &avx512()), layout.groups.len())
    };
    assert_eq!(of(None), of(Some(Vec::new())));
    assert_ne!(of(None).0, of(grouped().groups).0);
}

#[test]
fn engine_driven_lone_group_is_refused() {
    let mut context = grouped();
    context.groups.as_mut().unwrap().remove(0);
    let refused = EngineDrivenLayout::new(&context, 256).unwrap_err();
    assert!(refused.to_string().contains("group_layouts has 1 group"));
}

#[test]
fn engine_driven_groups_are_checked() {
    let refused = |change: fn(&mut GroupLayout<'_>)| {
        let mut context = grouped();
        change(&mut context.groups.as_mut().unwrap()[1]);
        EngineDrivenLayout::new(&context, 256)
            .unwrap_err()
            .to_string()
    };
    for (field, error) in [
        ("num_layers", refused(|group| group.num_layers = 0)),
        (
            "hidden_dim_size",
            refused(|group| group.hidden_dim_size = -1),
        ),
        ("dtype_str", refused(|group| group.dtype = "no")),
        ("window_tokens", refused(|group| group.window_tokens = -1)),
        ("kv_size", refused(|group| group.kv_size = 3)),
        ("window_chunks", refused(|group| group.window_chunks = -1)),
        ("2^40", refused(|group| group.num_layers = 1 << 32)),
    ] {
        assert!(error.contains(field), "{field}: {error}");
    }
}

#[test]
fn tiers_round_no_states_of_engine_driven() {
    let element = |change: fn(&mut GroupLayout<'_>)| {
        let mut context = grouped();
        change(&mut context.groups.as_mut().unwrap()[1]);
        let layout = EngineDrivenLayout::new(&context, 256).unwrap();
        layout.model().element
    };
    assert_eq!(element(|_| {}), Some(Element::BFloat16));
    assert_eq!(element(|group| group.recurrent = true), None);
    assert_eq!(element(|group| group.dtype = "float16"), None);
}

#[test]
fn tiers_know_the_type_of_values_that_they_may_round() {
    let of = |change: fn(&mut Registered)| {
        let mut registered = registered(true);
        change(&mut registered);
        let layout = ModelLayout::of_pages(&registered.layout()).for_tiers();
        let element = layout.element;
        assert_eq!(
            Element::in_layout(layout.fingerprint, element),
            layout.fingerprint
        );
        element
    };
    assert_eq!(of(|_| {}), Some(Element::BFloat16));
    assert_eq!(of(|r| r.dtype = ("float16", 2)), Some(Element::Float16));
    assert_eq!(of(|r| r.dtype = ("float32", 4)), None);
    assert_eq!(of(|r| r.dtype = ("uint8", 1)), None);
    assert_eq!(of(|r| r.groups[0].recurrent_state = true), None);
    let copied = |dtype| {
        let mut context = engine_driven();
        context.dtype = dtype;
        EngineDrivenLayout::new(&context, 256)
            .unwrap()
            .model()
            .element
    };
    assert_eq!(copied("float16"), Some(Element::Float16));
    assert_eq!(copied("float8_e4m3fn"), None);
}

/// Objects in tiers have these values in their trailers: a change of one needs another [`VERSION`]. They were computed
/// from the table in the module's documentation, by another implementation.
// proves: docs/identity.md#the-fingerprint
#[test]
fn values_of_version_2_are_pinned() {
    assert_eq!(VERSION, 2);
    assert_eq!(registered(true).fingerprint(), 0xf1a3_3b8d_a30e_7010);
    assert_eq!(registered(false).fingerprint(), 0x1f10_c830_9b9e_d0a5);
    let layout = EngineDrivenLayout::new(&engine_driven(), 256).unwrap();
    assert_eq!(layout.groups[0].dtype, Dtype::BFloat16);
    assert_eq!(of_engine_driven(&layout, &amx()), 0x5a75_ff47_0323_b7f7);
}
