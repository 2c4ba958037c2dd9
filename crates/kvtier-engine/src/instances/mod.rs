//! Registered workers, and how long each has been silent.
//!
//! The lock guards the tables; an instance is handed out by reference count, so a transfer that runs while its instance
//! unregisters keeps its mappings to the end. One that has left stays known by its id until its last copy has ended, so
//! a request that asks whether its pages are free receives the right answer.

mod fingerprint;
mod gate;
mod layout;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvtier_device::EngineMemory;
use kvtier_device::cuda::owner::Owner;
use kvtier_error::{Error, ErrorKind, Result};
use kvtier_proto::descriptor::TensorDescriptor;
use kvtier_proto::generation::Release;
use kvtier_proto::request::{EngineGroupInfo, InstanceId, LayoutHints};
use kvtier_sync::RwLock;
use serde::{Deserialize, Serialize};

use super::handed::millis;

pub use gate::CopyGuard;
use gate::Gate;
pub use layout::{EngineDrivenLayout, ModelLayout};

/// Unknown instances whose pings we remember.
const MAX_UNKNOWN: usize = 4096;

/// Workers registered at most. Each maps segments of its own, and a fleet has some dozens on a host.
const MAX_INSTANCES: usize = 4096;

/// Layouts of one worker that a lookup is for at most. Each costs a lookup of its own; a fleet has one or two.
const MAX_LAYOUTS: usize = 8;

/// How long an unregistration waits for the last copies of its worker's pages. The longest copies take seconds.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);

/// How a worker's bytes travel.
pub enum Mode {
    /// We copy between its pages and the arena.
    LmcacheDriven {
        /// Its pages.
        memory: Arc<dyn EngineMemory>,
        /// To recognise the same registration.
        registered: RegisteredPages,
    },
    /// It copies by itself.
    EngineDriven {
        /// Its objects.
        layout: EngineDrivenLayout,
        /// It sent pickled data although it was offered the pool, so it cannot map the pool.
        pickles: AtomicBool,
    },
}

/// Pages as their worker has described them.
#[derive(Default, PartialEq)]
pub struct RegisteredPages {
    pub tensors: Vec<TensorDescriptor>,
    pub hints: LayoutHints,
    pub groups: Vec<EngineGroupInfo>,
}

/// Why a registered worker has no cache. Nothing of it is stored or served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unserved {
    /// It keeps only windows or states of some layers, and does not hold the blocks that it has stores read.
    Windowed,
}

impl Unserved {
    /// For metric labels and `/status`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Windowed => "windowed_client",
        }
    }
}

/// A worker that registered with an earlier process of the server, and whose client does not notice that the answers to some of
/// its requests went with that one. It is served until its next ping, which is answered "no": the client then drops what it
/// waits for, and registers again.
#[derive(Debug, Clone, Copy)]
pub struct Provisional {
    /// When the client may have dropped transfers that are still on their way, so that their pages are another request's.
    pub until: Duration,
}

/// Pings of a worker.
struct Pings {
    /// Milliseconds.
    last: AtomicU64,
    /// The shortest time between two, milliseconds; `u64::MAX` before the second.
    gap: AtomicU64,
}

/// A registered worker.
pub struct Instance {
    /// Chosen by the worker.
    pub id: InstanceId,
    /// Its model.
    pub model_name: Arc<str>,
    /// Workers that share the model's KV.
    pub world_size: u32,
    /// How its bytes travel.
    pub mode: Mode,
    /// Its objects.
    pub layout: ModelLayout,
    /// Why it has no cache; `None` for a worker that is served.
    pub unserved: Option<Unserved>,
    /// Releases of LMCache that its client may be of.
    pub releases: &'static str,
    /// Whether it registered on a connection that began at an earlier server.
    pub is_again: bool,
    /// That it has not registered with this process, and its client has to.
    pub provisional: Option<Provisional>,
    /// When the connection by which alone it is known has ended.
    lost: OnceLock<Instant>,
    /// When it left the table.
    left: OnceLock<Instant>,
    /// Counts the times at which the client dropped its stores in flight: their pages may belong to other requests.
    dropped_stores: AtomicU64,
    /// Its number in the world, known from its first transfer: a registration does not tell.
    worker: OnceLock<u32>,
    last_seen: AtomicU64,
    pinged: AtomicBool,
    pings: Pings,
    /// One reference for each retrieve in flight into its pages, and one of its own.
    retrieves: Arc<()>,
    gate: Arc<Gate>,
}

impl Instance {
    /// A worker that has just registered.
    pub fn new(
        id: InstanceId,
        model_name: &str,
        world_size: u32,
        mode: Mode,
        layout: ModelLayout,
        now: Duration,
    ) -> Self {
        Self {
            id,
            model_name: model_name.into(),
            world_size,
            mode,
            layout: layout.for_tiers(),
            unserved: None,
            releases: "",
            is_again: false,
            provisional: None,
            lost: OnceLock::new(),
            left: OnceLock::new(),
            dropped_stores: AtomicU64::new(0),
            worker: OnceLock::new(),
            last_seen: AtomicU64::new(millis(now)),
            pinged: AtomicBool::new(false),
            pings: Pings {
                last: AtomicU64::new(0),
                gap: AtomicU64::new(u64::MAX),
            },
            retrieves: Arc::default(),
            gate: Arc::default(),
        }
    }

    /// Guard for a transfer: held while the instance's pages are copied.
    ///
    /// # Errors
    /// If the instance copies by itself, if it has left and its pages may belong to another request, or if it has too
    /// many transfers in flight.
    pub fn copying(self: &Arc<Self>) -> Result<CopyGuard> {
        let pages = self.pages().ok_or_else(|| {
            Error::refused(
                "the instance is registered for engine-driven transfers; allowed: prepare and commit",
            )
        })?;
        // Read before the loss is looked for, which comes before its count.
        let dropped_stores = self.dropped_stores.load(Ordering::Acquire);
        if self.lost.get().is_some() {
            return Err(Error::refused("the instance has lost its connection"));
        }
        Ok(CopyGuard {
            dropped_stores,
            memory: Arc::clone(pages),
            instance: Arc::clone(self),
            _guard: self.gate.enter()?,
        })
    }

    /// Starts no more copies of its pages, for any connection; those that run end soon.
    pub fn stop(&self) {
        self.gate.close();
        if let Some(pages) = self.pages() {
            pages.stop();
        }
    }

    /// [`Instance::stop`], and waits until nothing is copied.
    ///
    /// # Errors
    /// One line, if copies still run at `until`: their device does not respond.
    fn drain(&self, until: Instant) -> Result<()> {
        self.stop();
        match self.gate.wait(until) {
            0 => Ok(()),
            copying => Err(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "{copying} transfers of instance {} have not ended since it left; its pages are not free",
                    self.id
                ),
            )),
        }
    }

    /// Time within which its client has abandoned no transfer; `None` if that is not bounded.
    ///
    /// # Errors
    /// It has passed.
    pub fn patience(&self, now: Duration) -> Result<Option<Duration>> {
        match self.provisional.map(|provisional| provisional.until) {
            Some(until) if until <= now => Err(Error::refused(
                "the worker registered with an earlier process of the server, and its client may have abandoned the request",
            )),
            until => Ok(until.map(|until| until - now)),
        }
    }

    /// Whether it copies by itself and cannot map the pool.
    pub fn pickles(&self) -> bool {
        match &self.mode {
            Mode::EngineDriven { pickles, .. } => pickles.load(Ordering::Relaxed),
            Mode::LmcacheDriven { .. } => false,
        }
    }

    /// Counts as one that pings, from now on.
    pub fn expect_pings(&self) {
        self.pinged.store(true, Ordering::Relaxed);
    }

    /// When it last pinged, and the shortest time between two pings; `None` before the first.
    pub fn pings(&self) -> Option<(Duration, Option<Duration>)> {
        let last = self.pings.last.load(Ordering::Relaxed);
        let gap = self.pings.gap.load(Ordering::Relaxed);
        let gap = (gap < u64::MAX).then(|| Duration::from_millis(gap));
        (last > 0).then(|| (Duration::from_millis(last), gap))
    }

    fn ping(&self, now: Duration) {
        self.expect_pings();
        self.seen(now);
        let last = self.pings.last.swap(millis(now), Ordering::Relaxed);
        if last > 0 {
            let gap = millis(now).saturating_sub(last);
            self.pings.gap.fetch_min(gap, Ordering::Relaxed);
        }
    }

    /// Whether it has left and nothing is copied.
    pub fn is_drained(&self) -> bool {
        self.gate.is_drained()
    }

    /// Whether it has left and its pages may still be copied, for at most [`DRAIN_TIMEOUT`]: a device that does not respond must not
    /// keep its client from registering again.
    fn is_draining(&self) -> bool {
        let left = self.left.get();
        left.is_some_and(|left| left.elapsed() < DRAIN_TIMEOUT) && !self.is_drained()
    }

    /// Whether the driver of a GPU is needed to release its pages.
    pub fn is_on_gpu(&self) -> bool {
        self.device() != "cpu"
    }

    /// Its pages, unless it copies by itself.
    pub fn pages(&self) -> Option<&Arc<dyn EngineMemory>> {
        match &self.mode {
            Mode::LmcacheDriven { memory, .. } => Some(memory),
            Mode::EngineDriven { .. } => None,
        }
    }

    /// Name of the device that its pages are on, for the metrics.
    pub fn device(&self) -> &'static str {
        self.pages().map_or("cpu", |pages| pages.device())
    }

    /// The event of the answer to a transfer, given the one of the request.
    pub fn answer_event<'a>(&'a self, asked: &'a [u8], release: Release) -> &'a [u8] {
        let Some(pages) = self.pages() else {
            return asked;
        };
        match pages.answer_event(asked) {
            [] if !release.takes_empty_event() => pages.complete_event(),
            event => event,
        }
    }

    /// To be held while a retrieve is in flight.
    pub fn retrieving(&self) -> Arc<()> {
        Arc::clone(&self.retrieves)
    }

    /// Notes that no client can name it any more.
    pub fn lose(&self) {
        let _ = self.lost.set(Instant::now());
        self.drop_stores();
    }

    /// Notes that the client drops its stores in flight: none of them may be committed.
    pub fn drop_stores(&self) {
        self.dropped_stores.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether retrieves are in flight after the connection was lost, for at most [`DRAIN_TIMEOUT`]: a device that does not
    /// respond must not keep other workers from registering.
    fn is_lost_and_retrieving(&self) -> bool {
        let lost = self.lost.get();
        lost.is_some_and(|lost| lost.elapsed() < DRAIN_TIMEOUT) && self.is_retrieving()
    }

    /// Whether its objects are of one latent vector per token, which several ranks read.
    pub fn is_mla(&self) -> bool {
        match &self.mode {
            Mode::LmcacheDriven { memory, .. } => {
                let mut groups = memory.layout().kernel_groups().iter();
                groups.any(|group| group.format.is_mla())
            }
            Mode::EngineDriven { layout, .. } => layout.use_mla,
        }
    }

    /// Whether retrieves into its pages are in flight.
    pub fn is_retrieving(&self) -> bool {
        Arc::strong_count(&self.retrieves) > 1
    }

    /// Notes a sign of life.
    pub fn seen(&self, now: Duration) {
        self.last_seen.fetch_max(millis(now), Ordering::Relaxed);
    }

    fn may_be(&self, worker: u32) -> bool {
        self.worker.get().is_none_or(|known| *known == worker)
    }

    fn silent_for(&self, now: Duration) -> Duration {
        now.saturating_sub(Duration::from_millis(
            self.last_seen.load(Ordering::Relaxed),
        ))
    }
}

/// What the next process needs of a worker beyond its registration. Times are milliseconds before or after the hand-over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerState {
    pub id: i64,
    /// Its number in the world, if it is known.
    pub worker: Option<u32>,
    /// Time since its last sign of life.
    pub silent_for: u64,
    pub has_pinged: bool,
    /// Time since its last ping, and the shortest time between two.
    pub last_ping: Option<u64>,
    pub ping_interval: Option<u64>,
    /// How long it is still served if it has to register again.
    pub provisional_for: Option<u64>,
    /// It cannot map the pool.
    pub pickles: bool,
}

impl Instance {
    /// Its state for the next process.
    pub fn state(&self, now: Duration) -> WorkerState {
        let pings = self.pings();
        WorkerState {
            id: self.id.0,
            worker: self.worker.get().copied(),
            silent_for: millis(self.silent_for(now)),
            has_pinged: self.pinged.load(Ordering::Relaxed),
            last_ping: pings.map(|(last, _)| millis(now.saturating_sub(last))),
            ping_interval: pings.and_then(|(_, interval)| interval).map(millis),
            provisional_for: self
                .provisional
                .map(|provisional| millis(provisional.until.saturating_sub(now))),
            pickles: self.pickles(),
        }
    }

    /// Goes on as the earlier process has left it.
    pub fn resume(&mut self, state: &WorkerState, now: Duration) {
        let before = |age: u64| now.saturating_sub(Duration::from_millis(age));
        if let Some(worker) = state.worker {
            self.worker = worker.into();
        }
        self.last_seen = millis(before(state.silent_for)).into();
        self.pinged = state.has_pinged.into();
        self.pings = Pings {
            last: state.last_ping.map_or(0, |age| millis(before(age))).into(),
            gap: state.ping_interval.unwrap_or(u64::MAX).into(),
        };
        self.provisional = state.provisional_for.map(|left| Provisional {
            until: now.saturating_add(Duration::from_millis(left)),
        });
        if let Mode::EngineDriven { pickles, .. } = &self.mode {
            pickles.store(state.pickles, Ordering::Relaxed);
        }
    }
}

/// Registrations of one model and world size.
#[derive(Default)]
struct SameModel {
    /// Oldest first.
    instances: Vec<Arc<Instance>>,
    /// Object groups of all their layouts.
    groups: usize,
}

impl SameModel {
    fn count_groups(&mut self) {
        let mut layouts: Vec<_> = self.instances.iter().map(|it| &it.layout).collect();
        layouts.sort_unstable_by_key(|layout| layout.fingerprint);
        layouts.dedup_by_key(|layout| layout.fingerprint);
        self.groups = layouts.iter().map(|layout| layout.groups.len()).sum();
    }
}

#[derive(Default)]
struct Tables {
    by_id: HashMap<InstanceId, Arc<Instance>>,
    /// Registrations of each model and world size.
    by_model: HashMap<(Arc<str>, u32), SameModel>,
    /// Instances that pinged and are unknown: whether the last answer was "no".
    unknown: HashMap<InstanceId, bool>,
    /// Instances that have left, were replaced or fell silent, and whose pages may still be copied.
    draining: Vec<Arc<Instance>>,
}

impl Tables {
    fn remove(&mut self, id: InstanceId) -> Option<Arc<Instance>> {
        let instance = self.by_id.remove(&id)?;
        let _ = instance.left.set(Instant::now());
        let key = (Arc::clone(&instance.model_name), instance.world_size);
        if let Some(same) = self.by_model.get_mut(&key) {
            same.instances.retain(|other| other.id != id);
            same.count_groups();
            if same.instances.is_empty() {
                self.by_model.remove(&key);
            }
        }
        if instance.pages().is_some() {
            self.draining.push(Arc::clone(&instance));
        }
        Some(instance)
    }
}

/// All registered workers.
#[derive(Default)]
pub struct Instances {
    tables: RwLock<Tables>,
}

impl Instances {
    /// Inserts a worker; returns the earlier registration under its id.
    ///
    /// # Errors
    /// One line, if there are too many.
    pub fn insert(&self, instance: Instance) -> Result<Option<Arc<Instance>>> {
        let instance = Arc::new(instance);
        let mut tables = self.tables.write();
        if tables.by_id.len() >= MAX_INSTANCES && !tables.by_id.contains_key(&instance.id) {
            return Err(Error::refused(format!(
                "{MAX_INSTANCES} workers are registered; no more are allowed"
            )));
        }
        let earlier = tables.remove(instance.id);
        tables.unknown.remove(&instance.id);
        let key = (Arc::clone(&instance.model_name), instance.world_size);
        let same = tables.by_model.entry(key).or_default();
        same.instances.push(Arc::clone(&instance));
        same.count_groups();
        tables.by_id.insert(instance.id, instance);
        Ok(earlier)
    }

    /// The worker of this id.
    pub fn get(&self, id: InstanceId) -> Option<Arc<Instance>> {
        self.tables.read().by_id.get(&id).cloned()
    }

    /// Whether the driver of a GPU is needed to release pages of this id.
    pub fn is_on_gpu(&self, id: InstanceId) -> bool {
        let tables = self.tables.read();
        let draining = tables.draining.iter().filter(|instance| instance.id == id);
        let mut all = draining.chain(tables.by_id.get(&id));
        all.any(|instance| instance.is_on_gpu())
    }

    /// Removes a worker.
    pub fn remove(&self, id: InstanceId) -> Option<Arc<Instance>> {
        self.tables.write().remove(id)
    }

    /// Waits until no pages are copied of any instance that had this id and was removed.
    ///
    /// # Errors
    /// One line, if some still are after [`DRAIN_TIMEOUT`], or too many wait already.
    pub fn drain(&self, id: InstanceId) -> Result<()> {
        self.drain_until(id, Instant::now() + DRAIN_TIMEOUT)
    }

    fn drain_until(&self, id: InstanceId, until: Instant) -> Result<()> {
        let tables = self.tables.read();
        let draining = tables.draining.iter().filter(|instance| instance.id == id);
        let draining: Vec<_> = draining.cloned().collect();
        drop(tables);
        let drained = draining
            .iter()
            .try_for_each(|instance| instance.drain(until));
        drop(self.take_drained_where(|instance| instance.id == id));
        drained
    }

    /// Removes and returns the departed instances that are drained: dropping them may take long.
    pub fn take_drained(&self) -> Vec<Arc<Instance>> {
        self.take_drained_where(|_| true)
    }

    fn take_drained_where(&self, which: impl Fn(&Instance) -> bool) -> Vec<Arc<Instance>> {
        let mut tables = self.tables.write();
        let is_drained =
            |instance: &mut Arc<Instance>| which(instance) && instance.gate.is_drained();
        tables.draining.extract_if(.., is_drained).collect()
    }

    /// For each of these workers the registrations whose layouts a lookup is for, one per layout, newest first; `None` if the
    /// model has none, or one worker has more than [`MAX_LAYOUTS`].
    ///
    /// The engine of a scheduler is unknown, so a hit must be resident in the layout of every engine that may have asked: workers of one number differ in layout when engines of different block sizes share a model name.
    /// An instance whose number is not known yet may be any worker; pipeline stages of unequal length are, until each
    /// has named its number in its first transfer.
    pub fn of_workers(
        &self,
        model_name: &Arc<str>,
        world_size: u32,
        workers: Range<u32>,
        chunk_tokens: NonZeroUsize,
    ) -> Option<Vec<Vec<Arc<Instance>>>> {
        let tables = self.tables.read();
        // The key is built only to look it up; a reference count is all it costs.
        let same = tables.by_model.get(&(Arc::clone(model_name), world_size))?;
        let same = &same.instances;
        let of_size = |it: &&Arc<Instance>| it.layout.chunk_tokens == chunk_tokens.get() as u64;
        let newest = same.iter().rev().find(of_size)?;
        let one_per_layout = |worker| {
            let mut layouts: Vec<Arc<Instance>> = Vec::new();
            let of_worker = |it: &&Arc<Instance>| it.may_be(worker) && of_size(it);
            for instance in same.iter().rev().filter(of_worker) {
                let known =
                    |other: &Arc<Instance>| other.layout.fingerprint == instance.layout.fingerprint;
                if !layouts.iter().any(known) {
                    layouts.push(Arc::clone(instance));
                }
                if layouts.len() > MAX_LAYOUTS {
                    return None;
                }
            }
            if layouts.is_empty() {
                layouts.push(Arc::clone(newest));
            }
            Some(layouts)
        };
        workers.map(one_per_layout).collect()
    }

    /// Whether a worker of a model is like that.
    pub fn any_of(
        &self,
        model_name: &Arc<str>,
        world_size: u32,
        is_so: impl Fn(&Instance) -> bool,
    ) -> bool {
        let key = (Arc::clone(model_name), world_size);
        let tables = self.tables.read();
        let same = tables.by_model.get(&key);
        same.is_some_and(|same| same.instances.iter().any(|instance| is_so(instance)))
    }

    /// Object groups of all layouts that workers of a model are registered with: at least the rows per rank of its lookups.
    pub fn groups(&self, model_name: &str, world_size: u32) -> usize {
        let tables = self.tables.read();
        let same = tables.by_model.get(&(model_name.into(), world_size));
        same.map_or(0, |same| same.groups)
    }

    /// Tokens per chunk of the workers of a model: each size once, in order.
    pub fn chunk_sizes(&self, model_name: &Arc<str>, world_size: u32) -> BTreeSet<u64> {
        let tables = self.tables.read();
        let same = tables.by_model.get(&(Arc::clone(model_name), world_size));
        let sizes = |same: &SameModel| {
            same.instances
                .iter()
                .map(|it| it.layout.chunk_tokens)
                .collect()
        };
        same.map(sizes).unwrap_or_default()
    }

    /// Whether any worker of a model is registered.
    pub fn serves(&self, model_name: &Arc<str>, world_size: u32) -> bool {
        self.any_of(model_name, world_size, |_| true)
    }

    /// Notes the number of an instance's worker. The first time, returns another instance of this number with another layout.
    pub fn learn(&self, instance: &Instance, worker: u32) -> Option<Arc<Instance>> {
        if instance.worker.set(worker).is_err() {
            return None;
        }
        let key = (Arc::clone(&instance.model_name), instance.world_size);
        let tables = self.tables.read();
        let mut same = tables.by_model.get(&key)?.instances.iter();
        let differs = |other: &&Arc<Instance>| {
            other.worker.get() == Some(&worker)
                && other.layout.chunk_tokens == instance.layout.chunk_tokens
                && other.layout.fingerprint != instance.layout.fingerprint
        };
        same.find(differs).cloned()
    }

    /// Notes a worker's ping; returns whether the answer is that it is known.
    ///
    /// The first ping of an unknown worker is answered "no": its client turns unhealthy and registers again at the
    /// next "yes". Answering "no" again would only keep it unhealthy, so the answers alternate.
    pub fn ping(&self, id: InstanceId, now: Duration) -> bool {
        if let Some(instance) = self.tables.read().by_id.get(&id) {
            instance.ping(now);
            return true;
        }
        // A "no" lets the client use the pages for other requests.
        if self.is_draining(id) {
            return true;
        }
        let mut tables = self.tables.write();
        if tables.unknown.len() >= MAX_UNKNOWN && !tables.unknown.contains_key(&id) {
            // Which ones are forgotten does not matter: at worst one of them is answered "no" again.
            tables.unknown.clear();
        }
        let was_refused = tables.unknown.entry(id).or_default();
        *was_refused = !*was_refused;
        !*was_refused
    }

    /// Whether retrieves of lost workers are in flight.
    pub fn has_lost_retrieves(&self) -> bool {
        let tables = self.tables.read();
        let all = tables.by_id.values().chain(&tables.draining);
        all.into_iter()
            .any(|instance| instance.is_lost_and_retrieving())
    }

    /// Notes a sign of life of all workers.
    pub fn all_seen(&self, now: Duration) {
        let tables = self.tables.read();
        tables.by_id.values().for_each(|each| each.seen(now));
    }

    /// Removes and returns the workers that have been silent for too long.
    pub fn take_silent(
        &self,
        now: Duration,
        pinged: Duration,
        never_pinged: Duration,
    ) -> Vec<Arc<Instance>> {
        let dead = |instance: &Instance| {
            let limit = if instance.pinged.load(Ordering::Relaxed) {
                pinged
            } else {
                never_pinged
            };
            instance.silent_for(now) > limit
        };
        // If no worker is dead, the read lock suffices, so other readers need not end first. Nothing is dropped here
        // that needs the driver.
        let dead_ids = |tables: &Tables| {
            let all = tables.by_id.values();
            let dead = all.filter(|instance| dead(instance));
            dead.map(|instance| instance.id).collect::<Vec<_>>()
        };
        if dead_ids(&self.tables.read()).is_empty() {
            return Vec::new();
        }
        let mut tables = self.tables.write();
        let ids = dead_ids(&tables);
        ids.into_iter().filter_map(|id| tables.remove(id)).collect()
    }

    /// Removes and returns the worker of this id if it is [provisional](Provisional).
    pub fn take_provisional(&self, id: InstanceId) -> Option<Arc<Instance>> {
        let is_provisional = |tables: &Tables| {
            let instance = tables.by_id.get(&id);
            instance.is_some_and(|it| it.provisional.is_some())
        };
        if !is_provisional(&self.tables.read()) {
            return None;
        }
        let mut tables = self.tables.write();
        is_provisional(&tables).then(|| tables.remove(id))?
    }

    /// Whether pages of a worker of this id that has left may still be copied.
    fn is_draining(&self, id: InstanceId) -> bool {
        let tables = self.tables.read();
        let mut draining = tables.draining.iter().filter(|it| it.id == id);
        draining.any(|instance| instance.is_draining())
    }

    /// Removes and returns the workers whose process has ended, as far as that is detectable, and those that no client can
    /// name any more.
    pub fn take_ended(&self) -> Vec<Arc<Instance>> {
        let all = self.all();
        let owned = all
            .iter()
            .filter_map(|each| Some((each, each.pages()?.owner()?)));
        let (owned, owners): (Vec<_>, Vec<_>) = owned.unzip();
        let ended = Owner::exited(&owners).unwrap_or_default();
        let ended = owned.into_iter().zip(ended).filter(|(_, ended)| *ended);
        let lost = all.iter().filter(|each| each.lost.get().is_some());
        let ended: Vec<_> = ended
            .map(|(instance, _)| instance)
            .chain(lost)
            .chain(
                all.iter()
                    .filter(|each| each.pages().is_some_and(|pages| pages.has_ended())),
            )
            .collect();
        if ended.is_empty() {
            return Vec::new();
        }
        let mut tables = self.tables.write();
        ended
            .into_iter()
            .filter_map(|instance| {
                // Another one may have taken its place since.
                let same = Arc::ptr_eq(tables.by_id.get(&instance.id)?, instance);
                same.then(|| tables.remove(instance.id))?
            })
            .collect()
    }

    /// Every worker, by id.
    pub fn all(&self) -> Vec<Arc<Instance>> {
        let mut all: Vec<_> = self.tables.read().by_id.values().cloned().collect();
        all.sort_by_key(|instance| instance.id);
        all
    }

    /// Every worker; those of one model in the order of their registrations.
    pub fn in_order(&self) -> Vec<Arc<Instance>> {
        let tables = self.tables.read();
        let same = tables.by_model.values();
        same.flat_map(|same| same.instances.iter().cloned())
            .collect()
    }

    /// Whether pages of a worker, or of one that has left, are being copied.
    pub fn are_copying(&self) -> bool {
        let tables = self.tables.read();
        let all = tables.by_id.values().chain(&tables.draining);
        all.into_iter().any(|instance| instance.gate.is_entered())
    }

    /// How many workers are registered.
    pub fn len(&self) -> usize {
        self.tables.read().by_id.len()
    }
}
