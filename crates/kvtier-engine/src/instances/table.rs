//! Table of the registered workers, by id and by model.
//!
//! The lock guards the tables; of other locks only those below it in the order are acquired inside. An instance is handed out by reference count, so a transfer that runs while its instance
//! unregisters keeps its mappings to the end. One that has left stays known by its id until its last copy has ended, so
//! a request that asks whether its pages are free receives the right answer.

#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvtier_common::error::{Error, Result};
use kvtier_common::sync::RwLock;
use kvtier_device::cuda::owner::Owner;
use kvtier_proto::request::InstanceId;

use super::{DRAIN_TIMEOUT, Instance};

/// Unknown instances whose pings we remember.
const MAX_UNKNOWN: usize = 4096;

/// Workers registered at most. Each maps segments of its own, and a fleet has some dozens on a host.
const MAX_INSTANCES: usize = 4096;

/// Layouts of one worker that a lookup is for at most. Each costs a lookup of its own; a fleet has one or two.
const MAX_LAYOUTS: usize = 8;

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
struct InstanceTables {
    by_id: HashMap<InstanceId, Arc<Instance>>,
    /// Registrations of each model and world size.
    by_model: HashMap<(Arc<str>, u32), SameModel>,
    /// Instances that pinged and are unknown: whether the last answer was "no".
    unknown: HashMap<InstanceId, bool>,
    /// Instances that have left, were replaced or fell silent, and whose pages may still be copied.
    draining: Vec<Arc<Instance>>,
}

impl InstanceTables {
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
    tables: RwLock<InstanceTables>,
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
        let dead_ids = |tables: &InstanceTables| {
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

    /// Removes and returns the worker of this id if it is [provisional](super::Provisional).
    pub fn take_provisional(&self, id: InstanceId) -> Option<Arc<Instance>> {
        let is_provisional = |tables: &InstanceTables| {
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

    /// How many workers are registered.
    pub fn len(&self) -> usize {
        self.tables.read().by_id.len()
    }
}
