//! Format detection: from the engine, tensor ranks, a few sizes, and hints.

use std::collections::HashMap;

use crate::error::LayoutError;
use crate::format::{INDEXER_SCALE_BYTES, INDEXER_VALUE_BYTES, KvFormat};
use crate::geometry::{Layer, MAX_LAYERS, View, truncated};
use crate::spec::{Engine, KvListLayout, LayoutHints, MemorySpec, TensorSpec};

/// The layers of a registration and the distinct memories that contain them.
pub(crate) struct Detected {
    pub layers: Vec<Layer>,
    pub memories: Vec<MemorySpec>,
    /// One tensor holds all layers.
    pub one_tensor: bool,
}

/// Interprets every tensor by the engine's conventions.
pub(crate) fn detect(
    tensors: &[TensorSpec],
    engine: Engine,
    hints: &LayoutHints,
) -> Result<Detected, LayoutError> {
    if tensors.is_empty() || tensors.len() as u64 > 2 * MAX_LAYERS {
        return Err(LayoutError::new(
            "kv_caches",
            format!("{} tensors", tensors.len()),
            format!("1 to {} tensors", 2 * MAX_LAYERS),
        ));
    }
    let (views, memories) = views(tensors)?;
    let heads_first = hints.kv_layout.map_or_else(
        || {
            tensors
                .iter()
                .all(|tensor| matches!(tensor.memory, MemorySpec::CpuShm { .. }))
        },
        |order| order.heads_first(),
    );
    let mut one_tensor = false;
    let layers = match engine {
        Engine::Vllm => match one_tensor_format(&views, hints) {
            Some(format) => {
                one_tensor = true;
                views[0].layers(format)?
            }
            None => {
                let mut layers = Vec::with_capacity(views.len());
                for view in views {
                    let (view, format) = vllm_layer(view, heads_first)?;
                    layers.append(&mut view.layers(format)?);
                }
                layers
            }
        },
        Engine::Atom => uniform_layers(views, engine, |view| {
            (view.shape.len() == 3).then_some(KvFormat::NL_X_NB_BS_HS)
        })?,
        Engine::Sglang => sglang(views, hints)?,
        Engine::Trtllm => {
            one_tensor = true;
            trtllm(views, hints)?
        }
        Engine::Mock => {
            return Err(unknown_shape(
                engine,
                &views[0],
                "an engine with a known layout",
            ));
        }
    };
    Ok(Detected {
        layers,
        memories,
        one_tensor,
    })
}

/// Checked views and their memories: one per segment name, of the largest size stated for it; one per tensor for memory
/// without a name.
fn views(tensors: &[TensorSpec]) -> Result<(Vec<View>, Vec<MemorySpec>), LayoutError> {
    let mut memories: Vec<MemorySpec> = Vec::new();
    let mut known: HashMap<&str, usize> = HashMap::new();
    let mut views = Vec::with_capacity(tensors.len());
    for (index, tensor) in tensors.iter().enumerate() {
        let (memory, memory_bytes) = match &tensor.memory {
            MemorySpec::CpuShm { name, nbytes } => {
                let memory = *known.entry(name).or_insert(memories.len());
                match memories.get_mut(memory) {
                    Some(MemorySpec::CpuShm { nbytes: most, .. }) => *most = (*most).max(*nbytes),
                    _ => memories.push(tensor.memory.clone()),
                }
                (memory, Some(*nbytes))
            }
            // Whether two of these share an allocation is known only when they are opened.
            MemorySpec::Cuda(storage) => {
                memories.push(tensor.memory.clone());
                (memories.len() - 1, Some(storage.bytes))
            }
            MemorySpec::Unsupported { .. } => {
                memories.push(tensor.memory.clone());
                (memories.len() - 1, None)
            }
        };
        let view = View {
            tensor: index,
            memory,
            memory_bytes,
            dtype_size: tensor.dtype_size,
            dtype_name: tensor.dtype_name.clone(),
            shape: tensor.shape.clone(),
            stride: tensor.stride.clone(),
            storage_offset: tensor.storage_offset,
        };
        view.check()?;
        views.push(view);
    }
    Ok((views, memories))
}

/// vLLM's tensor of all layers `[NB, NL, 2, BS, NH, HS]`: the only tensor, rank 6, K and V in the
/// third dimension. `[2, NB, NH, 1, BS, HS]` is a model of one layer in format 15.
fn one_tensor_format(views: &[View], hints: &LayoutHints) -> Option<KvFormat> {
    let [view] = views else { return None };
    let shape: &[u64; 6] = view.shape.as_slice().try_into().ok()?;
    let one_layer = shape[0] == 2 && shape[3] == 1;
    if shape[2] != 2 || one_layer {
        return None;
    }
    // Without a hint this is token-major for any memory, unlike per-layer tensors.
    Some(
        if hints.kv_layout.is_some_and(|order| order.heads_first()) {
            KvFormat::NB_NL_TWO_NH_BS_HS
        } else {
            KvFormat::NB_NL_TWO_BS_NH_HS
        },
    )
}

/// One vLLM layer tensor. The singleton dimension of indexer pages is removed.
fn vllm_layer(mut view: View, heads_first: bool) -> Result<(View, KvFormat), LayoutError> {
    let pick = |hnd, nhd| if heads_first { hnd } else { nhd };
    let indexer_row = view.dtype_name == "uint8"
        && view.dtype_size == 1
        && view.shape.last() == Some(&(INDEXER_VALUE_BYTES + INDEXER_SCALE_BYTES));
    let format = match view.shape.as_slice() {
        [_, _, _] if indexer_row => KvFormat::NL_X_NB_BSV_BSS,
        [_, _, _] => KvFormat::NL_X_NB_BS_HS,
        [_, one, _, _] | [_, _, one, _] if indexer_row && *one == 1 => {
            let at = if view.shape[1] == 1 { 1 } else { 2 };
            view.drop_singleton(at);
            KvFormat::NL_X_NB_BSV_BSS
        }
        [_, _, _, _] => pick(KvFormat::NL_X_NB_NH_BS_CS, KvFormat::NL_X_NB_BS_NH_CS),
        [2, _, _, _, _] => pick(
            KvFormat::NL_X_TWO_NB_NH_BS_HS,
            KvFormat::NL_X_TWO_NB_BS_NH_HS,
        ),
        [_, 2, _, _, _] => pick(
            KvFormat::NL_X_NB_TWO_NH_BS_HS,
            KvFormat::NL_X_NB_TWO_BS_NH_HS,
        ),
        [2, _, _, 1, _, _] => KvFormat::NL_X_TWO_NB_NH_ONE_BS_HS,
        _ => {
            return Err(unknown_shape(
                Engine::Vllm,
                &view,
                "rank 3; rank 4; rank 5 with a first or second dimension of 2; rank 6 as \
                 [2, NB, NH, 1, BS, HS] or, as the only tensor, [NB, NL, 2, BS, NH, HS]",
            ));
        }
    };
    Ok((view, format))
}

/// One tensor per layer, all with the same format rule.
fn uniform_layers(
    views: Vec<View>,
    engine: Engine,
    format: impl Fn(&View) -> Option<KvFormat>,
) -> Result<Vec<Layer>, LayoutError> {
    let mut layers = Vec::with_capacity(views.len());
    for view in views {
        let format =
            format(&view).ok_or_else(|| unknown_shape(engine, &view, "rank 3: [NB, BS, HS]"))?;
        layers.append(&mut view.layers(format)?);
    }
    Ok(layers)
}

fn sglang(mut views: Vec<View>, hints: &LayoutHints) -> Result<Vec<Layer>, LayoutError> {
    let engine = Engine::Sglang;
    match hints.kv_list_layout {
        Some(KvListLayout::Unified) => {
            let mut layers = Vec::with_capacity(views.len());
            for view in views {
                let format = match view.shape.len() {
                    3 => KvFormat::NL_X_NB_BS_HS,
                    4 => KvFormat::NL_X_NB_BS_NH_HS,
                    _ => {
                        return Err(unknown_shape(
                            engine,
                            &view,
                            "rank 3: [NB, BS, HS], or rank 4: [NB, BS, NH, HS], with \
                             kv_list_layout unified",
                        ));
                    }
                };
                layers.append(&mut view.layers(format)?);
            }
            Ok(layers)
        }
        Some(KvListLayout::Separate) => {
            let tokens = required_hint(hints.tokens_per_block, "tokens_per_block", engine)?;
            if !views.len().is_multiple_of(2) {
                return Err(LayoutError::new(
                    "kv_caches",
                    format!("{} tensors", views.len()),
                    "an even number: all K tensors, then all V tensors (kv_list_layout k_v)",
                ));
            }
            for view in &mut views {
                if view.shape.len() != 3 || !view.split(0, tokens) {
                    return Err(unknown_shape(
                        engine,
                        view,
                        "rank 3: [NB*BS, NH, HS] with BS = hint tokens_per_block and \
                         kv_list_layout k_v",
                    ));
                }
            }
            join_k_and_v(&views)
        }
        None => Err(LayoutError::new(
            "layout_hints.kv_list_layout",
            format!(
                "absent (engine sglang, shape {:?})",
                truncated(&views[0].shape)
            ),
            "k_v or unified",
        )),
    }
}

/// Appends the plane of V tensor `l` to that of K tensor `l`.
fn join_k_and_v(views: &[View]) -> Result<Vec<Layer>, LayoutError> {
    let (keys, values) = views.split_at(views.len() / 2);
    let mut layers = Vec::with_capacity(keys.len());
    for (k, v) in keys.iter().zip(values) {
        if k.shape != v.shape || k.dtype_name != v.dtype_name || k.dtype_size != v.dtype_size {
            return Err(LayoutError::new(
                format!("kv_caches[{}].shape", v.tensor),
                format!("{:?} {}", v.shape, v.dtype_name),
                format!(
                    "{:?} {}, as its K tensor {}",
                    k.shape, k.dtype_name, k.tensor
                ),
            ));
        }
        let format = KvFormat::TWO_X_NL_X_NB_BS_NH_HS;
        let mut joined = k.layers(format)?;
        for (layer, other) in joined.iter_mut().zip(v.layers(format)?) {
            layer.planes.extend(other.planes);
        }
        layers.append(&mut joined);
    }
    Ok(layers)
}

/// TensorRT-LLM's pool `[NB, NL, 2, NH*BS*HS]`, re-viewed with the three hints.
fn trtllm(mut views: Vec<View>, hints: &LayoutHints) -> Result<Vec<Layer>, LayoutError> {
    let engine = Engine::Trtllm;
    let heads = required_hint(hints.num_kv_heads, "num_kv_heads", engine)?;
    let tokens = required_hint(hints.tokens_per_block, "tokens_per_block", engine)?;
    let head_dim = required_hint(hints.head_dim, "head_dim", engine)?;
    let count = views.len();
    let view = &mut views[0];
    let flat = tokens
        .checked_mul(head_dim)
        .and_then(|block| block.checked_mul(heads));
    let fits = count == 1
        && view.shape.len() == 4
        && view.shape.last().copied() == flat
        && view.split(3, tokens * head_dim)
        && view.split(4, head_dim);
    if !fits {
        return Err(unknown_shape(
            engine,
            view,
            "one tensor [NB, NL, 2, num_kv_heads * tokens_per_block * head_dim]",
        ));
    }
    view.layers(KvFormat::NB_NL_TWO_NH_BS_HS)
}

fn required_hint(value: Option<u64>, name: &str, engine: Engine) -> Result<u64, LayoutError> {
    value.filter(|value| *value > 0).ok_or_else(|| {
        LayoutError::new(
            format!("layout_hints.{name}"),
            value.map_or_else(|| "absent".to_owned(), |value| value.to_string()),
            format!("at least 1 (engine {})", engine.name()),
        )
    })
}

fn unknown_shape(engine: Engine, view: &View, allowed: &str) -> LayoutError {
    LayoutError::new(
        format!("kv_caches[{}] of engine {}", view.tensor, engine.name()),
        format!(
            "of dtype {} and shape {:?}",
            view.dtype_name,
            truncated(&view.shape)
        ),
        allowed,
    )
}
