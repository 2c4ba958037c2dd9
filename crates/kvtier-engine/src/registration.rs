//! Workers come and go: registration, pings, unregistration.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_device::{
    Engine as DeviceEngine, GroupSpec, KvAxisOrder, KvLayout, KvListLayout, LayoutHints,
    MemorySpec, TensorSpec,
};
use kvtier_proto::descriptor::TensorDescriptor;
use kvtier_proto::generation::Release;
use kvtier_proto::operation::Operation;
use kvtier_proto::request::{EngineDrivenContext, EngineGroupInfo, InstanceId, Registration};
use kvtier_proto::response::{EngineDriven, Response, ResponseKind};

use super::devices::Devices;
use super::instances::{Instance, Mode, Unserved};
use super::layout::{EngineDrivenLayout, ModelLayout};
use super::lookup::check_name;
use super::tensors::tensor_spec;
use super::{Answer, Caller, Engine, Reply};
use kvtier_config::WindowedClients;

/// World sizes that fit a rank's place in an object key.
const WORLD_SIZES: std::ops::RangeInclusive<u32> = 1..=256;

fn check_model(model_name: &str, world_size: u32) -> Result<(), String> {
    check_name("model_name", model_name)?;
    kvtier_core::object_key::check_model_name(model_name).map_err(|error| error.to_string())?;
    if !WORLD_SIZES.contains(&world_size) {
        return Err(format!("world_size is {world_size}; allowed: 1 to 256"));
    }
    Ok(())
}

impl Engine {
    /// A ping; schedulers and probes have no instance.
    pub(super) fn ping(&self, caller: Caller, instance: Option<InstanceId>) -> Answer {
        let now = self.now();
        let known = instance.and_then(|id| self.instances.get(id));
        let is_copying = || known.as_ref().is_some_and(|worker| worker.is_retrieving());
        if self
            .refusals
            .refuses_ping(caller.connection, is_copying, now)
        {
            if let Some(worker) = &known {
                worker.seen(now);
            }
            return Answer::from(Response::Bool(false)).because("refused_retrieve");
        }
        let known = match instance {
            None => {
                self.lookups.heard(caller.connection);
                // Without a reaper they would never be forgotten.
                if self.config.worker_reap_timeout.is_some() {
                    self.scheduler_pings.lock().insert(caller.connection, now);
                }
                true
            }
            Some(id) => self.instances.ping(id, now),
        };
        if !known && let Some(id) = instance {
            tracing::info!(
                instance = id.0,
                "ping of an unknown worker: told to register again"
            );
        }
        Answer::from(Response::Bool(known))
    }

    /// A ping of a client that is not served. It is answered "no": the client sends no store and no lookup while it is
    /// unhealthy, and drops a transfer that is not answered.
    pub fn ping_of_unserved(&self, caller: Caller) -> Answer {
        self.refusals
            .refuses_ping(caller.connection, || false, self.now());
        Answer::from(Response::Bool(false)).because("older_generation")
    }

    /// Refuses a retrieve, or another transfer, of a client that does not notice or not survive a "no": by its next
    /// ping. `held` is answered when it has taken note.
    pub fn refuse_by_ping(&self, caller: Caller, held: Option<Reply>) {
        self.refusals.add(caller.connection, held, self.now());
    }

    /// Whether answers are held until their clients notice a refused ping. Sends those that are due.
    pub fn holds_answers(&self) -> bool {
        drop(self.refusals.due(self.now()));
        self.refusals.holds_answers()
    }

    /// Forgets what is known of a connection that has ended, and of nothing else: a client that reconnects is another
    /// connection.
    pub fn forget_connection(&self, connection: u64) {
        self.chunk_sizes.forget(connection);
        self.refusals.forget(connection);
    }

    /// Entries of connections.
    #[cfg(any(test, feature = "testing"))]
    pub fn known_connections(&self) -> usize {
        self.chunk_sizes.len() + self.refusals.len()
    }

    /// A worker shows its pages.
    pub(super) fn register_pages(
        self: &Arc<Self>,
        caller: Caller,
        registration: &Registration<'_>,
        reply: Reply,
    ) {
        let newcomer = match self.newcomer(caller.release, registration) {
            Ok(Some(newcomer)) => newcomer,
            Ok(None) => return reply.answer(Answer::nothing()),
            Err(text) => {
                let (id, model_name) = (registration.instance, registration.model_name);
                return reply.answer(refuse_pages(id, model_name, &text));
            }
        };
        let on_gpu = self.instances.is_on_gpu(newcomer.id) || Devices::is_on_gpu(&newcomer.layout);
        self.about_worker(on_gpu, reply, move |engine| {
            let (id, model_name) = (newcomer.id, newcomer.model_name.clone());
            match engine.take_in(newcomer) {
                Ok(()) => Answer::nothing(),
                Err(text) => refuse_pages(id, &model_name, &text),
            }
        });
    }

    /// What a registration says, checked as far as that goes without touching the worker's memory; nothing if the worker
    /// is registered like this already.
    fn newcomer(
        &self,
        release: Release,
        registration: &Registration<'_>,
    ) -> Result<Option<Newcomer>, String> {
        if !self.config.transfer_mode.allows_lmcache_driven() {
            return Err("this server runs with --supported-transfer-mode engine_driven; lmcache_driven workers cannot register".into());
        }
        check_model(registration.model_name, registration.world_size)?;
        if let Some(instance) = self.instances.get(registration.instance)
            && is_same(&instance, registration)
        {
            instance.seen(self.now());
            return Ok(None);
        }
        if registration.tensors.is_empty() {
            return Err("the list of tensors is empty; allowed: one tensor a layer".into());
        }
        let tensors = registration
            .tensors
            .iter()
            .map(tensor_spec)
            .collect::<Result<Vec<_>, _>>()?;
        let engine = DeviceEngine::from_name(registration.engine.name())
            .ok_or_else(|| format!("engine type {:?} is unknown", registration.engine.name()))?;
        let groups: Vec<_> = registration.groups.iter().map(group_spec).collect();
        let mut layout_hints = hints(&registration.hints);
        if registration.tensors.iter().any(is_pickled) && tensors.iter().any(is_in_host_memory) {
            layout_hints.kv_layout = cpu_layout_hint(release, layout_hints.kv_layout)?;
        }
        let layout = KvLayout::detect(
            &tensors,
            engine,
            &layout_hints,
            &groups,
            u64::from(self.config.chunk_size),
            self.config.separate_object_groups,
        )
        .map_err(|error| error.to_string())?;
        Ok(Some(Newcomer {
            id: registration.instance,
            model_name: registration.model_name.to_owned(),
            world_size: registration.world_size,
            layout,
            tensors: registration.tensors.clone(),
            hints: registration.hints,
            groups: registration.groups.clone(),
        }))
    }

    /// Opens a worker's pages, and knows it from then on.
    fn take_in(&self, newcomer: Newcomer) -> Result<(), String> {
        let Newcomer {
            id,
            model_name,
            world_size,
            layout,
            tensors,
            hints,
            groups,
        } = newcomer;
        let model = ModelLayout::of_pages(&layout);
        let layers = layout.num_layers();
        let unserved = match self.config.windowed_clients {
            WindowedClients::Refuse => has_windows(&layout).then_some(Unserved::Windowed),
            WindowedClients::Allow => None,
        };
        let mode = Mode::LmcacheDriven {
            memory: self.devices.open(layout)?,
            tensors,
            hints,
            groups,
        };
        // From here on it may fall silent: opening may have taken long.
        let now = self.now();
        let mut instance = Instance::new(id, &model_name, world_size, mode, model, now);
        instance.unserved = unserved;
        let device = instance.device();
        self.admit(instance)?;
        tracing::info!(
            model = model_name,
            world_size,
            device,
            "Registered KV cache for {} {id} with {layers} layers",
            if device == "cpu" {
                "CPU worker"
            } else {
                "GPU ID"
            },
        );
        if unserved == Some(Unserved::Windowed) {
            tracing::warn!(
                instance = id.0,
                model = model_name,
                "registered without a cache: some of its layers have sliding windows or recurrent states, and its \
                 connector has blocks of such layers stored that the engine may have reused by then, so hits could be \
                 wrong; nothing of it is stored or served unless --windowed-clients allow is given"
            );
        }
        Ok(())
    }

    /// A worker that copies by itself.
    pub(super) fn register_engine_driven(
        &self,
        caller: Caller,
        context: &EngineDrivenContext<'_>,
    ) -> Answer {
        match self.try_register_engine_driven(caller, context) {
            Ok(pool) => Answer::from(Response::EngineDriven(pool)),
            Err(text) => {
                tracing::warn!(
                    instance = context.instance.0,
                    model = context.model_name,
                    error = text,
                    "registration refused"
                );
                Answer::refusal_with(
                    Operation::RegisterEngineDriven,
                    ResponseKind::EngineDriven,
                    "bad_registration",
                    &text,
                )
            }
        }
    }

    fn try_register_engine_driven(
        &self,
        caller: Caller,
        context: &EngineDrivenContext<'_>,
    ) -> Result<EngineDriven<'static>, String> {
        if !self.config.transfer_mode.allows_engine_driven() {
            return Err("this server runs with --supported-transfer-mode lmcache_driven; engine_driven workers cannot register".into());
        }
        check_model(context.model_name, context.world_size)?;
        let layout = EngineDrivenLayout::new(context, u64::from(self.config.chunk_size))?;
        let may_map = self.may_map_pool(caller, context)?;
        let now = self.now();
        let same = self.instances.get(context.instance).filter(|instance| {
            *instance.model_name == *context.model_name
                && instance.world_size == context.world_size
                && matches!(&instance.mode, Mode::EngineDriven { layout: known, .. } if *known == layout)
        });
        match same {
            Some(instance) => {
                instance.seen(now);
                if let Mode::EngineDriven { pickles, .. } = &instance.mode {
                    // It may be able to map the pool now.
                    pickles.store(!may_map, Ordering::Relaxed);
                }
            }
            None => {
                let model = layout.model();
                let mode = Mode::EngineDriven {
                    layout,
                    pickles: AtomicBool::new(!may_map),
                };
                self.admit(Instance::new(
                    context.instance,
                    context.model_name,
                    context.world_size,
                    mode,
                    model,
                    now,
                ))?;
                tracing::info!(
                    model = context.model_name,
                    world_size = context.world_size,
                    "Registered non-GPU context for instance {}",
                    context.instance
                );
            }
        }
        let arena = &self.l1.arena;
        Ok(match arena.shm_name().filter(|_| may_map) {
            Some(name) => EngineDriven {
                shm_name: name.trim_start_matches('/').to_string().into(),
                pool_size: arena.len(),
            },
            None => EngineDriven {
                shm_name: "".into(),
                pool_size: 0,
            },
        })
    }

    /// Whether a worker may write into slots of the pool: one of another chunk size would write past their ends.
    ///
    /// A client that has the chunk size from this process has the right one, whatever its pages are like. Of another one,
    /// `num_physical_slots` tells; where a release does not send that, the shapes of pickled data do at each store.
    fn may_map_pool(
        &self,
        caller: Caller,
        context: &EngineDrivenContext<'_>,
    ) -> Result<bool, String> {
        let chunk_size = i64::from(self.config.chunk_size);
        match context.num_physical_slots {
            _ if caller.knows_chunk_size => Ok(true),
            None => Ok(false),
            Some(slots) if slots == chunk_size => Ok(true),
            Some(slots) => Err(format!(
                "num_physical_slots is {slots}; allowed of a client that reconnected: {chunk_size}, the chunk size of this \
                 server. Restart the engine, or the server with the former --chunk-size"
            )),
        }
    }

    fn admit(&self, instance: Instance) -> Result<(), String> {
        let (id, on_gpu) = (instance.id, instance.is_on_gpu());
        if let Some(earlier) = self.instances.insert(instance)? {
            // Another process, or the same one with other memory. The earlier one may still be copying by itself.
            if let Err(error) = self.instances.wait_for_left(earlier.id) {
                tracing::error!("{error}");
            }
            let transfers = self
                .transfers
                .abandon(id, self.now() + self.config.write_ttl);
            tracing::info!(
                instance = id.0,
                transfers,
                "a new registration replaced the one under this instance id"
            );
            match on_gpu {
                // A worker on a GPU is registered apart already, and may need the memory as soon as it is answered.
                true => drop(earlier),
                false => self.let_go(vec![earlier]),
            }
        }
        Ok(())
    }

    /// A worker leaves; what it had borrowed is not committed, and comes back once its copies must have ended. The
    /// answer is that we copy none of its pages and never will, whichever connection has asked for it, also when
    /// another has unregistered it before or it had fallen silent; or that this cannot be said.
    pub(super) fn unregister(self: &Arc<Self>, operation: Operation, id: InstanceId, reply: Reply) {
        let on_gpu = self.instances.is_on_gpu(id);
        self.about_worker(on_gpu, reply, move |engine| engine.take_out(operation, id));
    }

    fn take_out(&self, operation: Operation, id: InstanceId) -> Answer {
        // In this order: no transfer begins for an instance that was removed.
        let instance = self.instances.remove(id);
        let left = self.instances.wait_for_left(id);
        let transfers = self
            .transfers
            .abandon(id, self.now() + self.config.write_ttl);
        if let Some(instance) = instance {
            self.release_unreadable(&instance);
            tracing::info!(transfers, "Unregistered instance {id}");
        }
        match left {
            Ok(()) => Answer::nothing(),
            Err(error) => {
                tracing::error!("{}: {error}", operation.name());
                // A client that takes no text has timed out long before.
                Answer::error(error, "still_copying")
            }
        }
    }

    /// Drops instances. The last owner of an instance releases its pages, and may have to wait for a driver.
    pub(super) fn let_go(&self, instances: Vec<Arc<Instance>>) {
        let is_last = |instance: &Arc<Instance>| Arc::strong_count(instance) == 1;
        let slow = |instance: &Arc<Instance>| is_last(instance) && instance.is_on_gpu();
        if instances.iter().any(slow) {
            self.apart.run(move || drop(instances));
        }
    }

    /// Releases the lookups of a model if the removed worker was the last that could read what they found.
    pub(super) fn release_unreadable(&self, gone: &Instance) {
        let (model, world_size) = (&gone.model_name, gone.world_size);
        if !self.instances.serves(model, world_size) {
            self.lookups.sweep(|lookup| {
                lookup.scope.model_name() == model && lookup.scope.world_size() == world_size
            });
        }
    }
}

/// A worker that wants to be known, with what it said.
struct Newcomer {
    id: InstanceId,
    model_name: String,
    world_size: u32,
    layout: KvLayout,
    tensors: Vec<TensorDescriptor>,
    hints: kvtier_proto::request::LayoutHints,
    groups: Vec<EngineGroupInfo>,
}

fn is_pickled(tensor: &TensorDescriptor) -> bool {
    matches!(tensor, TensorDescriptor::Legacy { .. })
}

fn is_in_host_memory(tensor: &TensorSpec) -> bool {
    matches!(tensor.memory, MemorySpec::CpuShm { .. })
}

/// The order of axes of pickled tensors in CPU memory, given the hint: heads first up to 0.5.4, whatever it says.
fn cpu_layout_hint(
    release: Release,
    hint: Option<KvAxisOrder>,
) -> Result<Option<KvAxisOrder>, String> {
    let heads_first = KvAxisOrder::from_name("HND");
    match release.hints_cpu_layout() {
        Some(true) => Ok(hint),
        Some(false) => Ok(heads_first),
        None if hint.is_none() || hint == heads_first => Ok(heads_first),
        None => Err(
            "kv_layout is not HND; allowed of a reconnected client whose release is not known: HND. Restart the engine"
                .into(),
        ),
    }
}

/// Whether some layers keep only the end of a prompt.
fn has_windows(layout: &KvLayout) -> bool {
    let mut groups = layout.kernel_groups().iter();
    groups.any(|group| group.window_tokens.is_some() || group.recurrent_state)
}

fn refuse_pages(id: InstanceId, model: &str, text: &str) -> Answer {
    tracing::warn!(instance = id.0, model, error = text, "registration refused");
    Answer::refusal_with(
        Operation::RegisterKvCache,
        ResponseKind::Nothing,
        "bad_registration",
        &text,
    )
}

fn is_same(instance: &Instance, registration: &Registration<'_>) -> bool {
    *instance.model_name == *registration.model_name
        && instance.world_size == registration.world_size
        && matches!(
            &instance.mode,
            Mode::LmcacheDriven { memory, tensors, hints, groups }
                if *tensors == registration.tensors && *hints == registration.hints && *groups == registration.groups
                    && memory.is_current()
        )
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
    }
}
