//! Registered workers, and how long each has been silent.
//!
//! The lock guards the tables; an instance is handed out by reference count, so a transfer that runs while its instance
//! unregisters keeps its mappings to the end. One that has left stays known by its id until its last copy has ended, so
//! a request that asks whether its pages are free receives the right answer.

mod rest;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvtier_device::EngineMemory;
use kvtier_device::cuda::owner::Owner;
use kvtier_proto::descriptor::TensorDescriptor;
use kvtier_proto::generation::Release;
use kvtier_proto::request::{EngineGroupInfo, InstanceId, LayoutHints};
use kvtier_sync::RwLock;

use super::layout::{EngineDrivenLayout, ModelLayout};
use super::refusal::Refusal;
pub use rest::Copying;
use rest::Rest;

/// Unknown instances whose pings we remember.
const MAX_UNKNOWN: usize = 4096;

/// Workers registered at most. Each maps segments of its own, and a fleet has some dozens on a host.
const MAX_INSTANCES: usize = 4096;

/// Layouts of one worker that a lookup is for at most. Each costs a lookup of its own; a fleet has one or two.
const MAX_LAYOUTS: usize = 8;

/// How long a worker that leaves is kept waiting for the last copies of its pages. The longest copies take seconds.
const LAST_COPIES: Duration = Duration::from_secs(60);

/// How a worker's bytes travel.
pub enum Mode {
    /// We copy between its pages and the arena.
    LmcacheDriven {
        /// Its pages.
        memory: Arc<dyn EngineMemory>,
        /// As registered, to recognise the same registration.
        tensors: Vec<TensorDescriptor>,
        /// As registered.
        hints: LayoutHints,
        /// As registered.
        groups: Vec<EngineGroupInfo>,
    },
    /// It copies by itself.
    EngineDriven {
        /// Its objects.
        layout: EngineDrivenLayout,
        /// It sent pickled data although it was offered the pool, so it cannot map the pool.
        pickles: AtomicBool,
    },
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
    /// Its number in the world, known from its first transfer: a registration does not tell.
    worker: OnceLock<u32>,
    last_seen: AtomicU64,
    pinged: AtomicBool,
    /// One reference for each retrieve whose bytes are on their way into its pages, and ours.
    retrieves: Arc<()>,
    rest: Arc<Rest>,
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
            layout: layout.with_page_bound_bit(),
            unserved: None,
            worker: OnceLock::new(),
            last_seen: AtomicU64::new(millis(now)),
            pinged: AtomicBool::new(false),
            retrieves: Arc::default(),
            rest: Rest::new(),
        }
    }

    /// Guard for a transfer: held while the instance's pages are copied.
    ///
    /// # Errors
    /// If the instance copies by itself, if it has left and its pages may belong to another request, or if it has too
    /// many transfers in flight.
    pub fn copying(self: &Arc<Self>) -> Result<Copying, Refusal> {
        let Mode::LmcacheDriven { memory, .. } = &self.mode else {
            return Err(Refusal::Failed(
                "the instance is registered for engine-driven transfers; allowed: prepare and commit".into(),
            ));
        };
        Ok(Copying {
            memory: Arc::clone(memory),
            instance: Arc::clone(self),
            _counted: self.rest.count()?,
        })
    }

    /// Has no copy of its pages begin any more, whatever connection asked for it; those that run end soon.
    pub fn stop(&self) {
        self.rest.stop();
        if let Mode::LmcacheDriven { memory, .. } = &self.mode {
            memory.stop();
        }
    }

    /// [`Instance::stop`], and waits until nothing is copied.
    ///
    /// # Errors
    /// One line, when something is at `until`: a device that does not answer any more.
    fn leave(&self, until: Instant) -> Result<(), String> {
        self.stop();
        match self.rest.wait(until) {
            0 => Ok(()),
            copying => Err(format!(
                "{copying} transfers of instance {} have not ended since it left; its pages are not free",
                self.id
            )),
        }
    }

    /// Whether the driver of a GPU is needed to release its pages.
    pub fn is_on_gpu(&self) -> bool {
        self.device() != "cpu"
    }

    /// The process whose memory its pages are, where that is certain.
    fn owner(&self) -> Option<Owner> {
        match &self.mode {
            Mode::LmcacheDriven { memory, .. } => memory.owner(),
            Mode::EngineDriven { .. } => None,
        }
    }

    /// Whether its process is known to have ended, where its memory itself tells.
    fn has_ended(&self) -> bool {
        match &self.mode {
            Mode::LmcacheDriven { memory, .. } => memory.has_ended(),
            Mode::EngineDriven { .. } => false,
        }
    }

    /// Name of the device that its pages are on, for the metrics.
    pub fn device(&self) -> &'static str {
        match &self.mode {
            Mode::LmcacheDriven { memory, .. } => memory.device(),
            Mode::EngineDriven { .. } => "cpu",
        }
    }

    /// The event that a transfer is answered with, given the one it was asked with.
    pub fn answer_event<'a>(&'a self, asked: &'a [u8], release: Release) -> &'a [u8] {
        match &self.mode {
            Mode::LmcacheDriven { memory, .. } => match memory.answer_event(asked) {
                [] if !release.takes_empty_event() => memory.complete_event(),
                event => event,
            },
            Mode::EngineDriven { .. } => asked,
        }
    }

    /// To be held while the bytes of a retrieve are on their way.
    pub fn retrieving(&self) -> Arc<()> {
        Arc::clone(&self.retrieves)
    }

    /// Whether bytes of retrieves are on their way into its pages.
    pub fn is_retrieving(&self) -> bool {
        Arc::strong_count(&self.retrieves) > 1
    }

    /// It gave a sign of life.
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

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[derive(Default)]
struct Tables {
    by_id: HashMap<InstanceId, Arc<Instance>>,
    /// Registrations of each model and world size, oldest first.
    by_model: HashMap<(Arc<str>, u32), Vec<Arc<Instance>>>,
    /// Instances that pinged and are unknown: whether the last answer told them so.
    unknown: HashMap<InstanceId, bool>,
    /// Instances that have left, were replaced or fell silent, and whose pages may still be copied.
    leaving: Vec<Arc<Instance>>,
}

impl Tables {
    fn take(&mut self, id: InstanceId) -> Option<Arc<Instance>> {
        let instance = self.by_id.remove(&id)?;
        let key = (Arc::clone(&instance.model_name), instance.world_size);
        if let Some(same) = self.by_model.get_mut(&key) {
            same.retain(|other| other.id != id);
            if same.is_empty() {
                self.by_model.remove(&key);
            }
        }
        if matches!(instance.mode, Mode::LmcacheDriven { .. }) {
            self.leaving.push(Arc::clone(&instance));
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
    /// Takes a worker in; gives the earlier registration under its id.
    ///
    /// # Errors
    /// One line, when there are too many.
    pub fn insert(&self, instance: Instance) -> Result<Option<Arc<Instance>>, String> {
        let instance = Arc::new(instance);
        let mut tables = self.tables.write();
        if tables.by_id.len() >= MAX_INSTANCES && !tables.by_id.contains_key(&instance.id) {
            return Err(format!(
                "{MAX_INSTANCES} workers are registered; no more are allowed"
            ));
        }
        let earlier = tables.take(instance.id);
        tables.unknown.remove(&instance.id);
        let key = (Arc::clone(&instance.model_name), instance.world_size);
        tables
            .by_model
            .entry(key)
            .or_default()
            .push(Arc::clone(&instance));
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
        let leaving = tables.leaving.iter().filter(|instance| instance.id == id);
        let mut all = leaving.chain(tables.by_id.get(&id));
        all.any(|instance| instance.is_on_gpu())
    }

    /// Lets a worker go.
    pub fn remove(&self, id: InstanceId) -> Option<Arc<Instance>> {
        self.tables.write().take(id)
    }

    /// Waits until no pages are copied of any instance that had this id and was removed.
    ///
    /// # Errors
    /// One line, when some still are after [`LAST_COPIES`], or too many wait already.
    pub fn wait_for_left(&self, id: InstanceId) -> Result<(), String> {
        self.wait_until_left(id, Instant::now() + LAST_COPIES)
    }

    fn wait_until_left(&self, id: InstanceId, until: Instant) -> Result<(), String> {
        let tables = self.tables.read();
        let leaving = tables.leaving.iter().filter(|instance| instance.id == id);
        let leaving: Vec<_> = leaving.cloned().collect();
        drop(tables);
        let left = leaving
            .iter()
            .try_for_each(|instance| instance.leave(until));
        drop(self.forget(|instance| instance.id == id));
        left
    }

    /// Forgets instances that have left and rest, and gives them: dropping them may take long.
    pub fn forget_left(&self) -> Vec<Arc<Instance>> {
        self.forget(|_| true)
    }

    fn forget(&self, which: impl Fn(&Instance) -> bool) -> Vec<Arc<Instance>> {
        let mut tables = self.tables.write();
        let leaving = &mut tables.leaving;
        let rest = leaving.extract_if(.., |instance| which(instance) && instance.rest.is_at_rest());
        rest.collect()
    }

    /// For each of these workers the registrations whose layouts a lookup is for, one per layout, newest first; `None` when
    /// there is none for the model, or one has more than [`MAX_LAYOUTS`].
    ///
    /// Which engine a scheduler belongs to is unknown, so what is found must be there in the layout of every engine that
    /// may have asked: workers of one number differ in layout when engines of different block sizes share a model name.
    /// An instance whose number is not known yet may be any worker; pipeline stages of unequal length are, until each
    /// has named its number in its first transfer.
    pub fn of_workers(
        &self,
        model_name: &Arc<str>,
        world_size: u32,
        workers: Range<u32>,
    ) -> Option<Vec<Vec<Arc<Instance>>>> {
        let tables = self.tables.read();
        // The key is built only to look it up; a reference count is all it costs.
        let same = tables.by_model.get(&(Arc::clone(model_name), world_size))?;
        let one_per_layout = |worker| {
            let mut layouts: Vec<Arc<Instance>> = Vec::new();
            for instance in same.iter().rev().filter(|instance| instance.may_be(worker)) {
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
                layouts.extend(same.last().cloned());
            }
            Some(layouts)
        };
        workers.map(one_per_layout).collect()
    }

    /// Whether any worker of a model is registered.
    pub fn serves(&self, model_name: &Arc<str>, world_size: u32) -> bool {
        let key = (Arc::clone(model_name), world_size);
        self.tables.read().by_model.contains_key(&key)
    }

    /// An instance said which worker it is; the first time, gives another one of this number with another layout.
    pub fn learn(&self, instance: &Instance, worker: u32) -> Option<Arc<Instance>> {
        if instance.worker.set(worker).is_err() {
            return None;
        }
        let key = (Arc::clone(&instance.model_name), instance.world_size);
        let tables = self.tables.read();
        let mut same = tables.by_model.get(&key)?.iter();
        let differs = |other: &&Arc<Instance>| {
            other.worker.get() == Some(&worker)
                && other.layout.fingerprint != instance.layout.fingerprint
        };
        same.find(differs).cloned()
    }

    /// A worker's ping: whether we know it, as far as it should learn.
    ///
    /// The first ping of a worker we do not know is answered "no": its client turns unhealthy and registers again at the
    /// next "yes". Answering "no" again would only keep it unhealthy, so the answers alternate.
    pub fn ping(&self, id: InstanceId, now: Duration) -> bool {
        if let Some(instance) = self.tables.read().by_id.get(&id) {
            instance.pinged.store(true, Ordering::Relaxed);
            instance.seen(now);
            return true;
        }
        let mut tables = self.tables.write();
        if tables.unknown.len() >= MAX_UNKNOWN && !tables.unknown.contains_key(&id) {
            // Which ones are forgotten does not matter: at worst one of them is answered "no" again.
            tables.unknown.clear();
        }
        let told = tables.unknown.entry(id).or_default();
        *told = !*told;
        !*told
    }

    /// All workers gave a sign of life.
    pub fn all_seen(&self, now: Duration) {
        let tables = self.tables.read();
        tables.by_id.values().for_each(|each| each.seen(now));
    }

    /// Takes out the workers that have been silent for too long.
    pub fn reap(
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
        ids.into_iter().filter_map(|id| tables.take(id)).collect()
    }

    /// Removes and returns the workers whose process has ended, as far as that is detectable.
    pub fn take_ended(&self) -> Vec<Arc<Instance>> {
        let all = self.all();
        let owned = all.iter().filter_map(|each| Some((each, each.owner()?)));
        let (owned, owners): (Vec<_>, Vec<_>) = owned.unzip();
        let ended = Owner::exited(&owners).unwrap_or_default();
        let ended = owned.into_iter().zip(ended).filter(|(_, ended)| *ended);
        let ended: Vec<_> = ended
            .map(|(instance, _)| instance)
            .chain(all.iter().filter(|instance| instance.has_ended()))
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
                same.then(|| tables.take(instance.id))?
            })
            .collect()
    }

    /// Every worker, by id.
    pub fn all(&self) -> Vec<Arc<Instance>> {
        let mut all: Vec<_> = self.tables.read().by_id.values().cloned().collect();
        all.sort_by_key(|instance| instance.id);
        all
    }

    /// How many workers are registered.
    pub fn len(&self) -> usize {
        self.tables.read().by_id.len()
    }
}
