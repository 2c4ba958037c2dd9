//! Staging budget: bytes of L1 that workers have reserved for stores and not committed, in every transfer mode, and that
//! their uncommitted retrieves keep from eviction.
//!
//! Nothing of a staged store is readable, and it took the place of something that was. So all workers together have at
//! most the limit, a quarter of L1, staged at once, for as long as they do not commit, and the budget is asked before
//! anything is evicted. Bytes are those that the allocator takes, rounded up to `--l1-align-bytes`.
//!
//! | owner | share |
//! | --- | --- |
//! | one worker | [`WORKER_RATIO`] times what stays free: alone seven eighths of the limit |
//! | one tenant | [`TENANT_RATIO`] times what stays free, and no more than its quota |
//! | an instance with nothing staged | at least one object, while the limit leaves it |
//!
//! A share that depends on what stays free leaves some of it for newcomers, however many workers never commit. A worker
//! that has registered under another id keeps what its earlier registrations have not committed in its share. Such a
//! departed registration is indistinguishable from a replica, another worker of the same model, world size and number,
//! so it does not keep a live instance from its first object.
//!
//! Retrieves have a ledger of their own, without tenants: they evict nothing, and what they lease stays readable. Several
//! may lease the same object, so one is refused only if its instance has others and more than the limit is leased in all.
//! The first one may be as large as L1, as a prompt may; if it is not committed, its leases end after two write TTLs
//! ([`super::prepared`]). Chunks that are sent pickled stay in the ledger until they are sent, or their connection ends; their charge
//! stays with the instance's id, whatever becomes of the instance.
//!
//! The mutex guards the ledgers. A store reserves its memory while it is held, so that no two stores take the same
//! share; the cache's lock is taken inside it, never around it.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use kvtier_common::sync::Mutex;
use kvtier_core::Namespace;
use kvtier_device::Direction;
use kvtier_proto::request::InstanceId;

use super::super::instances::Instance;
use kvtier_common::sync::RateLimited;

/// A worker may have this many times the bytes that stay free.
const WORKER_RATIO: u64 = 7;

/// A tenant may have this many times the bytes that stay free.
const TENANT_RATIO: u64 = 15;

/// What a worker is beyond its instance id.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct WorkerName {
    model_name: Arc<str>,
    world_size: u32,
    worker: u32,
}

/// Worker whose share of the budget a transfer takes.
#[derive(Debug, Clone)]
pub struct WorkerShare {
    instance: InstanceId,
    name: WorkerName,
}

impl WorkerShare {
    /// The share of an instance that is the worker of this number.
    pub fn of(instance: &Instance, worker: u32) -> Self {
        Self {
            instance: instance.id,
            name: WorkerName {
                model_name: Arc::clone(&instance.model_name),
                world_size: instance.world_size,
                worker,
            },
        }
    }
}

/// Bytes by holder; those that hold none are not kept.
#[derive(Default)]
struct StagedBytes {
    bytes: u64,
    instances: HashMap<InstanceId, u64>,
    /// What workers hold whose instance has left.
    departed: HashMap<WorkerName, u64>,
    tenants: HashMap<Box<str>, u64>,
}

fn add<K: Eq + Hash>(map: &mut HashMap<K, u64>, key: K, bytes: u64) {
    *map.entry(key).or_default() += bytes;
}

fn subtract<K: Eq + Hash>(map: &mut HashMap<K, u64>, key: &K, bytes: u64) {
    if let Some(held) = map.get_mut(key) {
        *held -= bytes;
        if *held == 0 {
            map.remove(key);
        }
    }
}

/// Bytes that a holder of `own` bytes may take of `free` ones, so that it has at most `ratio` times what stays free.
fn share(ratio: u64, free: u64, own: u64) -> u64 {
    ratio.saturating_mul(free).saturating_sub(own) / (ratio + 1)
}

impl StagedBytes {
    fn own(&self, worker: &WorkerShare) -> u64 {
        let departed = self.departed.get(&worker.name).copied();
        let own = self.instances.get(&worker.instance).copied();
        own.unwrap_or(0) + departed.unwrap_or(0)
    }

    /// Whether this instance holds bytes of its own.
    fn has_some(&self, worker: &WorkerShare) -> bool {
        self.instances.contains_key(&worker.instance)
    }

    /// Bytes that a worker may take for a tenant, in objects of `object_bytes` bytes.
    fn allowance(
        &self,
        limit: u64,
        worker: &WorkerShare,
        tenant: Option<&str>,
        object_bytes: u64,
    ) -> u64 {
        let free = limit.saturating_sub(self.bytes);
        let own = self.own(worker);
        let of_tenant = tenant.map_or(u64::MAX, |tenant| {
            let own = self.tenants.get(tenant).copied();
            share(TENANT_RATIO, free, own.unwrap_or(0))
        });
        let allowance = share(WORKER_RATIO, free, own).min(of_tenant);
        let has_first = !self.has_some(worker) && object_bytes <= free;
        if has_first {
            allowance.max(object_bytes)
        } else {
            allowance
        }
    }

    fn add(&mut self, worker: &WorkerShare, tenant: Option<&str>, bytes: u64) {
        if bytes == 0 {
            return;
        }
        self.bytes += bytes;
        add(&mut self.instances, worker.instance, bytes);
        if let Some(tenant) = tenant {
            match self.tenants.get_mut(tenant) {
                Some(held) => *held += bytes,
                None => drop(self.tenants.insert(tenant.into(), bytes)),
            }
        }
    }
}

#[derive(Default)]
struct StagingLedgers {
    stores: StagedBytes,
    retrieves: StagedBytes,
}

/// What all workers have, and how much that may be.
pub struct StagingBudget {
    limit: u64,
    ledgers: Mutex<StagingLedgers>,
    warning: RateLimited,
}

impl StagingBudget {
    /// Budget for an L1 with this limit of staged bytes.
    pub fn new(limit: u64) -> Self {
        Self {
            limit,
            ledgers: Mutex::default(),
            warning: RateLimited::per_second(),
        }
    }

    /// Bytes that may be staged at once.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes that stores have staged.
    pub fn staged_bytes(&self) -> u64 {
        self.ledgers.lock().stores.bytes
    }

    /// Runs `reserve` with the bytes that a store of this worker may take; it returns what it took.
    ///
    /// # Errors
    /// Those of `reserve`; nothing is taken then.
    pub fn stage<T, E>(
        self: &Arc<Self>,
        worker: &WorkerShare,
        tenant: &str,
        object_bytes: u64,
        reserve: impl FnOnce(u64) -> Result<(T, u64), E>,
    ) -> Result<(T, Charge), E> {
        let mut ledgers = self.ledgers.lock();
        let stores = &mut ledgers.stores;
        let allowance = stores.allowance(self.limit, worker, Some(tenant), object_bytes);
        let (reserved, bytes) = reserve(allowance)?;
        stores.add(worker, Some(tenant), bytes);
        let charge = self.charge(worker, Some(tenant), bytes);
        Ok((reserved, charge))
    }

    /// Takes the bytes that a retrieve of this worker leases; `None` when it may not, as its instance has others and more
    /// than the limit is leased in all.
    pub fn lease(
        self: &Arc<Self>,
        worker: &WorkerShare,
        bytes: u64,
        leased_bytes: impl FnOnce() -> u64,
    ) -> Option<Charge> {
        let mut ledgers = self.ledgers.lock();
        let retrieves = &mut ledgers.retrieves;
        let allowance = retrieves.allowance(self.limit, worker, None, bytes);
        if bytes > allowance && retrieves.has_some(worker) && leased_bytes() > self.limit {
            return None;
        }
        retrieves.add(worker, None, bytes);
        Some(self.charge(worker, None, bytes))
    }

    fn charge(self: &Arc<Self>, worker: &WorkerShare, tenant: Option<&str>, bytes: u64) -> Charge {
        Charge {
            budget: Arc::clone(self),
            worker: worker.clone(),
            has_departed: false,
            tenant: tenant.map(Box::from),
            bytes,
        }
    }

    fn own(&self, worker: &WorkerShare) -> u64 {
        self.ledgers.lock().stores.own(worker)
    }

    /// Logs a store of this worker that was refused, once per second at most.
    pub fn warn(&self, worker: &WorkerShare, object_bytes: u64) {
        let Some(suppressed_lines) = self.warning.permit(std::time::Instant::now()) else {
            return;
        };
        let limit_bytes = self.limit;
        let cause = if object_bytes > limit_bytes {
            "objects are larger than a quarter of L1; refusing until --l1-size-gb is larger"
        } else {
            "staged and not committed bytes are at the limit; refusing until some are committed"
        };
        tracing::warn!(
            model = ?worker.name.model_name,
            instance = worker.instance.0,
            object_bytes,
            bytes = self.own(worker),
            all_bytes = self.staged_bytes(),
            limit_bytes,
            suppressed_lines,
            "store refused: {cause}"
        );
    }

    /// Charges memory in this namespace that a client of an earlier process was granted, whatever the limit: to its worker
    /// and tenant for a store, to its worker for a retrieve.
    pub fn inherit(
        self: &Arc<Self>,
        namespace: &Namespace,
        direction: Direction,
        bytes: u64,
    ) -> Charge {
        // Packed by `kv_rank`.
        let rank = namespace.kv_rank();
        let worker = WorkerShare {
            instance: InstanceId(0),
            name: WorkerName {
                model_name: Arc::clone(namespace.model_name()),
                world_size: (rank >> 24) as u32,
                worker: (rank & 0xff) as u32,
            },
        };
        let tenant = (direction == Direction::Store).then_some(&**namespace.cache_salt());
        let mut charge = self.charge(&worker, tenant, bytes);
        let mut ledgers = self.ledgers.lock();
        charge.ledger(&mut ledgers).add(&worker, tenant, bytes);
        drop(ledgers);
        charge.depart();
        charge
    }
}

/// What one transfer has taken of the budget, until it has ended. To be dropped after its memory.
pub struct Charge {
    budget: Arc<StagingBudget>,
    worker: WorkerShare,
    has_departed: bool,
    /// Tenant of a store; `None` for a retrieve.
    tenant: Option<Box<str>>,
    bytes: u64,
}

impl Charge {
    fn ledger<'a>(&self, ledgers: &'a mut StagingLedgers) -> &'a mut StagedBytes {
        match self.tenant {
            Some(_) => &mut ledgers.stores,
            None => &mut ledgers.retrieves,
        }
    }

    /// Bytes that the transfer's memory takes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Notes that the instance has left; the worker keeps the bytes in its share.
    pub fn depart(&mut self) {
        if std::mem::replace(&mut self.has_departed, true) {
            return;
        }
        let mut ledgers = self.budget.ledgers.lock();
        let ledger = self.ledger(&mut ledgers);
        subtract(&mut ledger.instances, &self.worker.instance, self.bytes);
        add(&mut ledger.departed, self.worker.name.clone(), self.bytes);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut ledgers = self.budget.ledgers.lock();
        let ledger = self.ledger(&mut ledgers);
        ledger.bytes -= self.bytes;
        if self.has_departed {
            subtract(&mut ledger.departed, &self.worker.name, self.bytes)
        } else {
            subtract(&mut ledger.instances, &self.worker.instance, self.bytes)
        }
        if let Some(tenant) = &self.tenant {
            subtract(&mut ledger.tenants, tenant, self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(instance: i64) -> WorkerShare {
        WorkerShare {
            instance: InstanceId(instance),
            name: WorkerName {
                model_name: "m".into(),
                world_size: 1,
                worker: u32::try_from(instance % 1000).unwrap(),
            },
        }
    }

    fn budget(limit: u64) -> Arc<StagingBudget> {
        Arc::new(StagingBudget::new(limit))
    }

    /// Stages objects of one byte, as many as are allowed.
    fn stage(budget: &Arc<StagingBudget>, worker: &WorkerShare, tenant: &str, most: u64) -> Charge {
        let take = |allowance: u64| Ok::<_, ()>(((), allowance.min(most)));
        budget.stage(worker, tenant, 1, take).unwrap().1
    }

    #[test]
    fn single_worker_takes_most_and_leaves_some_for_newcomers() {
        let budget = budget(1600);
        let hog = stage(&budget, &worker(1), "a", u64::MAX);
        assert_eq!(hog.bytes, 1400);
        assert_eq!(stage(&budget, &worker(1), "a", u64::MAX).bytes, 0);
        assert_eq!(stage(&budget, &worker(2), "a", u64::MAX).bytes, 100);
        assert_eq!(stage(&budget, &worker(2), "b", u64::MAX).bytes, 175);
        drop(hog);
        assert_eq!(stage(&budget, &worker(2), "a", u64::MAX).bytes, 1400);
    }

    #[test]
    fn thousand_workers_stay_within_the_limit() {
        let budget = budget(1600);
        let charges: Vec<_> = (0..1000)
            .map(|number| stage(&budget, &worker(number), "a", u64::MAX))
            .collect();
        assert_eq!(budget.staged_bytes(), 1600);
        drop(charges);
        let ledgers = budget.ledgers.lock();
        assert_eq!(ledgers.stores.bytes, 0);
        assert!(ledgers.stores.instances.is_empty() && ledgers.stores.tenants.is_empty());
    }

    #[test]
    fn departed_bytes_stay_in_the_share_of_the_worker() {
        let budget = budget(1600);
        let mut hog = stage(&budget, &worker(1), "a", u64::MAX);
        hog.depart();
        hog.depart();
        // Another registration of the same worker: its first object.
        let first = stage(&budget, &worker(1001), "b", u64::MAX);
        assert_eq!(first.bytes, 1);
        assert_eq!(stage(&budget, &worker(1001), "b", u64::MAX).bytes, 0);
        assert_eq!(stage(&budget, &worker(2), "b", u64::MAX).bytes, 174);
        drop(first);
        assert_eq!(stage(&budget, &worker(1001), "b", u64::MAX).bytes, 1);
        drop(hog);
        assert_eq!(stage(&budget, &worker(1001), "b", u64::MAX).bytes, 1400);
        assert!(budget.ledgers.lock().stores.departed.is_empty());
    }

    #[test]
    fn first_object_is_staged_up_to_the_limit() {
        let take = |allowance: u64| Ok::<_, ()>(((), allowance));
        for (object_bytes, allowed) in [(10, 10), (11, 8)] {
            let budget = budget(10);
            let (_, first) = budget.stage(&worker(1), "a", object_bytes, take).unwrap();
            assert_eq!(first.bytes, allowed, "an object of {object_bytes}");
        }
    }

    #[test]
    fn retrieve_is_refused_only_beside_others_and_while_much_is_leased() {
        let budget = budget(100);
        let first = budget.lease(&worker(1), 500, || 500);
        assert!(first.is_some(), "one at a time, however large");
        assert!(budget.lease(&worker(1), 1, || 101).is_none());
        assert!(budget.lease(&worker(1), 500, || 100).is_some());
        assert!(budget.lease(&worker(2), 1, || 101).is_some());
        drop(first);
        let mut gone = budget.lease(&worker(1), 500, || 500).unwrap();
        gone.depart();
        let replica = budget.lease(&worker(1001), 500, || 1000);
        assert!(replica.is_some(), "the departed one is another process");
        assert_eq!(budget.staged_bytes(), 0);
    }
}
