//! Checks of registrations, of both transfer modes.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_common::error::{Error, Result};
use kvtier_device::{
    Engine as DeviceEngine, GroupSpec, KvAxisOrder, KvLayout, KvListLayout, LayoutHints,
    MemorySpec, TensorSpec,
};
use kvtier_memory::Arena;
use kvtier_proto::descriptor::TensorDescriptor;
use kvtier_proto::generation::Release;
use kvtier_proto::inline::InlineForm;
use kvtier_proto::operation::Operation;
use kvtier_proto::request::{
    EngineDrivenContext, EngineGroupInfo, HELD_BLOCKS, InstanceId, Registration,
};
use kvtier_proto::response::ResponseKind;

use super::super::context::{Context, check_name};
use super::super::instances::{
    EngineDrivenGroup, EngineDrivenLayout, Instance, Mode, ModelLayout, RegisteredPages, Unserved,
};
use super::super::{Caller, EngineAnswer};
use super::kept::KeptMemory;
use super::tensors::tensor_spec;
use kvtier_config::WindowedClients;

/// A registration's operation, and the kind of its answer.
pub(super) type RegistrationKind = (Operation, ResponseKind);

pub(super) const PAGES: RegistrationKind = (Operation::RegisterKvCache, ResponseKind::Nothing);
pub(super) const ENGINE_DRIVEN: RegistrationKind =
    (Operation::RegisterEngineDriven, ResponseKind::EngineDriven);

/// World sizes that fit a rank's place in an object key.
const WORLD_SIZES: std::ops::RangeInclusive<u32> = 1..=256;

fn check_model(model_name: &str, world_size: u32) -> Result<()> {
    check_name("model_name", model_name)?;
    kvtier_core::object_key::check_model_name(model_name).map_err(Error::refused)?;
    if !WORLD_SIZES.contains(&world_size) {
        return Err(Error::refused(format!(
            "world_size is {world_size}; allowed: 1 to 256"
        )));
    }
    Ok(())
}

/// The layout of the pages of a registration.
///
/// # Errors
/// One line: the field, its value, and what is allowed.
pub fn layout(
    caller: Caller,
    registration: &Registration<'_>,
    chunk_size: NonZeroUsize,
    separate_object_groups: bool,
) -> Result<KvLayout> {
    let tensors = registration
        .tensors
        .iter()
        .map(tensor_spec)
        .collect::<Result<Vec<_>, _>>()?;
    let engine = DeviceEngine::from_name(registration.engine.name()).ok_or_else(|| {
        Error::refused(format!(
            "engine type {:?} is unknown",
            registration.engine.name()
        ))
    })?;
    let groups: Vec<_> = registration.groups.iter().map(group_spec).collect();
    let mut layout_hints = hints(&registration.hints);
    let is_pickled = |it: &TensorDescriptor| matches!(it, TensorDescriptor::Legacy { .. });
    let is_in_host = |it: &TensorSpec| matches!(it.memory, MemorySpec::CpuShm { .. });
    if registration.tensors.iter().any(is_pickled) && tensors.iter().any(is_in_host) {
        layout_hints.kv_layout = cpu_layout_hint(caller.release, layout_hints.kv_layout)?;
    }
    KvLayout::detect(
        &tensors,
        engine,
        &layout_hints,
        &groups,
        chunk_size.get() as u64,
        separate_object_groups,
    )
    .map_err(Error::refused)
}

/// A checked registration of a worker whose pages the server copies.
pub(super) struct Newcomer {
    pub(super) id: InstanceId,
    releases: &'static str,
    is_again: bool,
    pub(super) model_name: String,
    world_size: u32,
    pub(super) layout: KvLayout,
    registered: RegisteredPages,
}

impl Newcomer {
    /// Checks a registration, without touching the worker's memory; returns nothing if the worker is registered like this already.
    pub(super) fn check(
        context: &Context,
        caller: Caller,
        registration: &Registration<'_>,
    ) -> Result<Option<Self>> {
        let config = context.config();
        if !config.supported_transfer_mode.allows_lmcache_driven() {
            return Err(Error::refused(
                "this server runs with --supported-transfer-mode engine_driven; lmcache_driven workers cannot register",
            ));
        }
        check_model(registration.model_name, registration.world_size)?;
        if let Some(instance) = context.instances.get(registration.instance)
            && instance.provisional.is_none()
            && has_pages(
                &instance,
                registration.model_name,
                registration.world_size,
                &registered(registration),
            )
        {
            instance.seen(context.now());
            return Ok(None);
        }
        if registration.tensors.is_empty() {
            return Err(Error::refused(
                "the list of tensors is empty; allowed: one tensor per layer",
            ));
        }
        let chunk_size = context.chunk_size(registration.hints.chunk_tokens);
        let layout = layout(
            caller,
            registration,
            chunk_size,
            config.separate_object_groups,
        )?;
        check_block_tokens(&layout, registration.hints.logical_block_tokens)?;
        Ok(Some(Self {
            id: registration.instance,
            releases: caller.releases,
            is_again: !caller.knows_chunk_size,
            model_name: registration.model_name.to_owned(),
            world_size: registration.world_size,
            layout,
            registered: registered(registration),
        }))
    }

    /// Whether its memory can be opened again.
    pub(super) fn is_lasting(&self) -> bool {
        let memories = self.layout.memories();
        memories.iter().all(MemorySpec::is_lasting)
    }

    /// Opens the worker's pages.
    pub(super) fn open(self, context: &Context) -> Result<Instance> {
        let Self {
            id,
            releases,
            is_again,
            model_name,
            world_size,
            layout,
            registered,
        } = self;
        let config = context.config();
        let model = ModelLayout::of_pages(&layout).with_byte_kind(config.byte_kind(&model_name));
        let is_held = holds_blocks(&registered.hints);
        let unserved = unserved(context, !is_held && has_windows(&layout));
        let mode = Mode::LmcacheDriven {
            memory: context.devices.open(layout)?,
            registered,
        };
        // Its silence counts from here on: opening may have taken long.
        let now = context.now();
        let mut instance = Instance::new(id, &model_name, world_size, mode, model, now);
        (instance.unserved, instance.releases) = (unserved, releases);
        instance.is_again = is_again;
        Ok(instance)
    }
}

/// Why a worker has no cache; `may_be_reused` if blocks that it stores may be other requests' by then.
fn unserved(context: &Context, may_be_reused: bool) -> Option<Unserved> {
    let is_refused = context.config().windowed_clients == WindowedClients::Refuse;
    (is_refused && may_be_reused).then_some(Unserved::Windowed)
}

/// Checks the registration of a worker that copies by itself; also returns whether it may map the pool.
pub(super) fn engine_driven(
    context: &Context,
    caller: Caller,
    registration: &EngineDrivenContext<'_>,
) -> Result<(Instance, bool)> {
    let config = context.config();
    if !config.supported_transfer_mode.allows_engine_driven() {
        return Err(Error::refused(
            "this server runs with --supported-transfer-mode lmcache_driven; engine_driven workers cannot register",
        ));
    }
    check_model(registration.model_name, registration.world_size)?;
    let layout = EngineDrivenLayout::new(
        registration,
        context.chunk_size(registration.chunk_tokens).get() as u64,
    )?;
    let may_map = may_map_pool(context, caller, registration)?;
    let kind = config.byte_kind(registration.model_name);
    let model = layout.model().with_byte_kind(kind);
    let is_windowed = layout.groups.iter().any(EngineDrivenGroup::is_windowed);
    let mode = Mode::EngineDriven {
        layout,
        pickles: AtomicBool::new(!may_map),
        form: registration.inline_form(),
    };
    let mut instance = Instance::new(
        registration.instance,
        registration.model_name,
        registration.world_size,
        mode,
        model,
        context.now(),
    );
    (instance.releases, instance.is_again) = (caller.releases, !caller.knows_chunk_size);
    instance.unserved = unserved(context, is_windowed);
    Ok((instance, may_map))
}

/// Whether a worker may write into slots of the pool: one of another chunk size would write past their ends, and one that
/// does not learn of the pool takes slots for a miss.
///
/// A client that has the chunk size from this process, or names its own, has the right one, whatever its pages are like.
/// Another one is checked by `num_physical_slots`; if its release does not send that, by the shapes of pickled data at each
/// store.
fn may_map_pool(
    context: &Context,
    caller: Caller,
    registration: &EngineDrivenContext<'_>,
) -> Result<bool> {
    let chunk_size = i64::from(context.config().chunk_size);
    match registration.num_physical_slots {
        _ if !registration.takes_pool => Ok(false),
        _ if caller.knows_chunk_size || registration.chunk_tokens.is_some() => Ok(true),
        None => Ok(false),
        Some(slots) if slots == chunk_size => Ok(true),
        Some(slots) => Err(Error::refused(format!(
            "num_physical_slots is {slots}; allowed of a client that reconnected: {chunk_size}, the chunk size of this \
             server. Restart the engine, or the server with the former --chunk-size"
        ))),
    }
}

/// Device, inode and bytes of the pool, for a worker that may map it.
pub(super) fn pool(arena: &Arena, may_map: bool) -> Vec<u64> {
    let file = arena.shm_name().filter(|_| may_map);
    let file = file.and_then(|_| arena.file_id());
    let numbers = file.map(|file| file.numbers());
    numbers.map_or_else(Vec::new, |[device, inode]| vec![device, inode, arena.len()])
}

/// The memory of a worker as the next process has to find it.
pub(super) fn kept_memory(arena: &Arena, instance: &Instance) -> KeptMemory {
    match &instance.mode {
        Mode::LmcacheDriven { memory, .. } => KeptMemory {
            pages: memory.identity(),
            ..KeptMemory::default()
        },
        Mode::EngineDriven { pickles, .. } => KeptMemory {
            pool: pool(arena, !pickles.load(Ordering::Relaxed)),
            ..KeptMemory::default()
        },
    }
}

pub(super) fn engine_driven_layout(
    instance: &Instance,
) -> Option<(&EngineDrivenLayout, InlineForm)> {
    match &instance.mode {
        Mode::EngineDriven { layout, form, .. } => Some((layout, *form)),
        Mode::LmcacheDriven { .. } => None,
    }
}

/// Logs a worker that is in the table.
pub(super) fn log_registered(instance: &Instance) {
    let (id, model, world_size) = (instance.id, &*instance.model_name, instance.world_size);
    if instance.layout.unnamed_bytes && !has_digest(model) {
        tracing::warn!(
            instance = id.0,
            model,
            "registered pages of untyped bytes: engines with other kinds of them (fp8_e4m3 and fp8_e5m2, for instance) would \
             load each other's, and answer wrongly; if all engines of this model have one --kv-cache-dtype, give --byte-pages \
             MODEL=DTYPE, else give each kind a model name of its own"
        );
    }
    match instance.pages() {
        None => tracing::info!(
            model,
            world_size,
            "Registered non-GPU context for instance {id}"
        ),
        Some(pages) => {
            let (device, layers) = (pages.device(), pages.layout().num_layers());
            tracing::info!(
                model,
                world_size,
                device,
                "Registered KV cache for {} {id} with {layers} layers",
                if device == "cpu" {
                    "CPU worker"
                } else {
                    "GPU ID"
                },
            );
        }
    }
    if instance.unserved == Some(Unserved::Windowed) {
        tracing::warn!(
            instance = id.0,
            model,
            "registered without a cache: some of its layers have sliding windows or recurrent states, and its \
             connector has blocks of such layers stored that the engine may have reused by then, so hits could be \
             wrong; nothing of it is stored or served unless --windowed-clients allow is given"
        );
    }
}

/// Whether a model's name has a digest of all that its KV depends on, as kvtier's connector makes it: 16 hex digits behind a `#`.
fn has_digest(model: &str) -> bool {
    let is_digest =
        |part: &str| part.len() == 16 && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    model.split('#').skip(1).any(is_digest)
}

fn registered(registration: &Registration<'_>) -> RegisteredPages {
    RegisteredPages {
        tensors: registration.tensors.clone(),
        hints: registration.hints,
        groups: registration.groups.clone(),
    }
}

/// The order of axes of pickled tensors in CPU memory, given the hint: heads first up to 0.5.4, whatever it says.
fn cpu_layout_hint(release: Release, hint: Option<KvAxisOrder>) -> Result<Option<KvAxisOrder>> {
    let heads_first = KvAxisOrder::from_name("HND");
    match release.hints_cpu_layout() {
        Some(true) => Ok(hint),
        Some(false) => Ok(heads_first),
        None if hint.is_none() || hint == heads_first => Ok(heads_first),
        None => Err(Error::refused(
            "kv_layout is not HND; allowed of a reconnected client whose release is not known: HND. Restart the engine",
        )),
    }
}

/// Refuses blocks of several pages: without a description of groups, block ids cannot be mapped to pages.
fn check_block_tokens(layout: &KvLayout, hint: Option<i64>) -> Result<()> {
    let slots = layout.kernel_groups().iter().map(|it| it.slots_per_block);
    let block = hint.and_then(|tokens| u64::try_from(tokens).ok());
    match (block, slots.min()) {
        (Some(block), Some(slots)) if slots < block => Err(Error::refused(format!(
            "inference_engine_logical_block_size is {block}; allowed: at most {slots}, the slots of a page"
        ))),
        _ => Ok(()),
    }
}

/// Whether some layers keep only the end of a prompt.
fn has_windows(layout: &KvLayout) -> bool {
    let mut groups = layout.kernel_groups().iter();
    groups.any(|group| group.window_tokens.is_some() || group.recurrent_state)
}

/// Logs and answers a registration that is refused.
pub(super) fn refused(
    kind: RegistrationKind,
    id: InstanceId,
    model: &str,
    error: &Error,
) -> EngineAnswer {
    tracing::warn!(instance = id.0, model, %error, "registration refused");
    EngineAnswer::refusal_with(kind.0, kind.1, "bad_registration", error)
}

/// Whether a worker is registered with these pages.
fn has_pages(
    instance: &Instance,
    model_name: &str,
    world_size: u32,
    registered: &RegisteredPages,
) -> bool {
    *instance.model_name == *model_name
        && instance.world_size == world_size
        && matches!(
            &instance.mode,
            Mode::LmcacheDriven { memory, registered: known } if known == registered && memory.is_current()
        )
}

/// Whether both are registered with the same pages.
pub(super) fn is_same(known: &Instance, instance: &Instance) -> bool {
    match &instance.mode {
        Mode::LmcacheDriven { registered, .. } => {
            has_pages(known, &instance.model_name, instance.world_size, registered)
        }
        Mode::EngineDriven { .. } => false,
    }
}

fn group_spec(info: &EngineGroupInfo) -> GroupSpec {
    GroupSpec {
        engine_group_id: info.engine_group_id,
        layer_indices: info.layer_indices.clone(),
        tokens_per_block: info.tokens_per_block,
        sliding_window_tokens: info.sw_size_tokens,
        extra_object_group_tag: info.extra_object_group_tag,
        recurrent_state: info.recurrent_state,
    }
}

fn hints(hints: &kvtier_proto::request::LayoutHints) -> LayoutHints {
    let positive = |value: Option<i64>| value.and_then(|value| u64::try_from(value).ok());
    LayoutHints {
        kv_layout: hints
            .kv_layout
            .and_then(|layout| KvAxisOrder::from_name(layout.name())),
        num_kv_heads: positive(hints.num_kv_heads),
        tokens_per_block: positive(hints.tokens_per_block),
        kv_list_layout: hints
            .kv_list_layout
            .and_then(|layout| KvListLayout::from_name(layout.name())),
        head_dim: positive(hints.head_dim),
        held_blocks: holds_blocks(hints),
    }
}

/// Whether the client reuses no block while a transfer of it is in flight. Other versions of that promise are not known here,
/// so they are none.
fn holds_blocks(hints: &kvtier_proto::request::LayoutHints) -> bool {
    hints.held_blocks == Some(HELD_BLOCKS)
}
