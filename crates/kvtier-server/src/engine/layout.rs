//! The objects of a model as the cache sees them: object groups, windows, sizes, and a fingerprint of the bytes' shape.

use std::hash::{DefaultHasher, Hash, Hasher};

use kvtier_device::{KvLayout, MemorySpec};
use kvtier_l2::PAGE_BOUND;
use kvtier_proto::descriptor::Dtype;
use kvtier_proto::request::EngineDrivenContext;

/// One object group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupLayout {
    /// Number of the group, part of the object key.
    pub id: u32,
    /// Chunks needed at the end of a prefix; `None` is all of them.
    pub window: Option<u32>,
    /// Bytes of one object.
    pub object_bytes: u64,
}

/// What lookups must know of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelLayout {
    /// The object groups.
    pub groups: Vec<GroupLayout>,
    /// Stands for shape and type of every array in an object. Two workers whose objects differ in layout never see each
    /// other's, even under one model name.
    pub fingerprint: u64,
    /// Whether objects fit only pages like those they were stored from. One without a fingerprint, as LMCache's files
    /// are, must then not be loaded: nothing says which pages it is from.
    pub page_bound: bool,
}

/// One array of an object: `[planes, layers, slots, hidden]` of a dtype, and its layers' positions in the registration
/// unless they are the first ones in order.
type ArrayShape<'a> = ([u64; 4], &'a str, Option<&'a [usize]>);

/// Fixed keys: equal layouts have equal fingerprints in every process.
fn fingerprint<'a>(arrays: impl Iterator<Item = (usize, ArrayShape<'a>)>) -> u64 {
    let mut hasher = DefaultHasher::new();
    for array in arrays {
        array.hash(&mut hasher);
    }
    hasher.finish()
}

impl ModelLayout {
    /// With [`PAGE_BOUND`] in the fingerprint as `page_bound` says, so that tiers know it wherever the fingerprint is.
    #[must_use]
    pub fn with_page_bound_bit(mut self) -> Self {
        self.fingerprint &= !PAGE_BOUND;
        if self.page_bound {
            self.fingerprint |= PAGE_BOUND;
        }
        self
    }

    /// Of a worker whose pages we copy.
    pub fn of_pages(layout: &KvLayout) -> Self {
        let groups = layout.object_groups();
        let arrays = groups.iter().flat_map(|group| {
            let kernel_groups = group
                .kernel_groups
                .iter()
                .map(|index| &layout.kernel_groups()[*index]);
            kernel_groups.map(|kernel| {
                let layers = &kernel.layer_indices;
                let in_order = layers.iter().copied().eq(0..layers.len());
                (
                    group.index,
                    (
                        kernel.object_shape(),
                        kernel.dtype_name.as_str(),
                        (!in_order).then_some(layers.as_slice()),
                    ),
                )
            })
        });
        let fingerprint = fingerprint(arrays);
        let groups = groups
            .iter()
            .map(|group| GroupLayout {
                // Both are bounded by the number of layers of a registration.
                id: u32::try_from(group.index).unwrap_or(u32::MAX),
                window: group
                    .window_chunks
                    .map(|window| u32::try_from(window).unwrap_or(u32::MAX)),
                object_bytes: group.object_bytes,
            })
            .collect();
        let in_cpu_memory = |memory: &MemorySpec| !matches!(memory, MemorySpec::Cuda(_));
        Self {
            groups,
            fingerprint,
            page_bound: layout.memories().iter().any(in_cpu_memory),
        }
    }
}

/// Objects of a worker that copies by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineDrivenLayout {
    /// Type of the values.
    pub dtype: Dtype,
    /// `[layers, slots, hidden]` of one plane, `[2, layers, slots, hidden]` of two.
    pub shape: Vec<u64>,
    /// Bytes of one object.
    pub object_bytes: u64,
    /// As registered, for `/status`.
    pub block_size: i64,
    /// As registered; "one plane" rather than MLA.
    pub use_mla: bool,
}

impl EngineDrivenLayout {
    /// Checks what a worker registers.
    ///
    /// # Errors
    /// Names the field, its value and what is allowed.
    pub fn new(context: &EngineDrivenContext<'_>, chunk_size: u64) -> Result<Self, String> {
        let positive = |name: &str, value: i64| match u64::try_from(value) {
            Ok(value) if value > 0 && value <= 1 << 32 => Ok(value),
            _ => Err(format!("{name} is {value}; allowed: 1 to 4294967296")),
        };
        let dtype = Dtype::from_name(context.dtype).ok_or_else(|| {
            format!(
                "dtype_str is {:?}; allowed: a torch dtype such as bfloat16",
                context.dtype
            )
        })?;
        let layers = positive("num_layers", context.num_layers)?;
        let hidden = positive("hidden_dim_size", context.hidden_dim_size)?;
        let slots = match context.num_physical_slots {
            Some(slots) => positive("num_physical_slots", slots)?,
            None => chunk_size,
        };
        let planes = if context.use_mla { 1 } else { 2 };
        let object_bytes = [planes, layers, slots, hidden]
            .iter()
            .try_fold(dtype.item_size(), |bytes, extent| {
                bytes.checked_mul(*extent)
            })
            .filter(|bytes| *bytes <= 1 << 40)
            .ok_or_else(|| {
                "num_layers x slots x hidden_dim_size: an object may have at most 2^40 bytes"
                    .to_string()
            })?;
        let mut shape = vec![layers, slots, hidden];
        if planes == 2 {
            shape.insert(0, 2);
        }
        Ok(Self {
            dtype,
            shape,
            object_bytes,
            block_size: context.block_size,
            use_mla: context.use_mla,
        })
    }

    /// What lookups must know.
    pub fn model(&self) -> ModelLayout {
        let [.., layers, slots, hidden] = self.shape[..] else {
            unreachable!("the shape has three or four extents")
        };
        let planes = if self.use_mla { 1 } else { 2 };
        ModelLayout {
            groups: vec![GroupLayout {
                id: 0,
                window: None,
                object_bytes: self.object_bytes,
            }],
            fingerprint: fingerprint(std::iter::once((
                0,
                ([planes, layers, slots, hidden], self.dtype.name(), None),
            ))),
            page_bound: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvtier_device::{Engine, GroupSpec, KvAxisOrder, LayoutHints, TensorSpec};

    fn fingerprint_of(groups: [&[i64]; 2]) -> u64 {
        let tensor = TensorSpec {
            memory: MemorySpec::CpuShm {
                name: "/lmcache_kv_1_1".into(),
                nbytes: 1 << 20,
            },
            dtype_size: 2,
            dtype_name: "bfloat16".into(),
            shape: vec![2, 8, 16, 2, 4],
            stride: vec![1024, 128, 8, 4, 1],
            storage_offset: 0,
        };
        let hints = LayoutHints {
            kv_layout: Some(KvAxisOrder::Nhd),
            ..LayoutHints::default()
        };
        let groups = (0..).zip(groups);
        let groups: Vec<_> = groups
            .map(|(id, layers)| GroupSpec {
                engine_group_id: id,
                ..GroupSpec::full_attention(layers.to_vec(), 0)
            })
            .collect();
        let tensors = vec![tensor; 4];
        let layout = KvLayout::detect(&tensors, Engine::Vllm, &hints, &groups, 32, true).unwrap();
        ModelLayout::of_pages(&layout).fingerprint
    }

    #[test]
    fn equal_arrays_of_other_layers_are_another_layout() {
        assert_ne!(
            fingerprint_of([&[0, 1], &[2, 3]]),
            fingerprint_of([&[0, 2], &[1, 3]])
        );
    }
}
