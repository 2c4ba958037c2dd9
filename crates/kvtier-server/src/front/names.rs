//! Names that mean something on their own connection only.
//!
//! | releases | name | here |
//! | --- | --- | --- |
//! | up to 0.5.2 | a worker is its process id, which a worker in another container may have too | [`WorkerNames`] gives the worker of each connection an id of its own |
//! | up to 0.4.7 | a ping names no worker | it is of the last worker that its connection named |
//! | 0.4.2, 0.4.3 | a lookup is answered with a number, which asks for its result | [`LookupNumbers`] |
//!
//! A worker whose connection was lost is unknown on its next one, whatever it calls itself: a transfer into the pages of another
//! engine is worse than a miss. Its first ping is refused, at which releases from 0.4.5 on register again.
//!
//! Each mutex guards its table; nothing is acquired inside.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvtier_proto::request::InstanceId;
use kvtier_proto::wire::Reader;

use kvtier_common::sync::Mutex;
use kvtier_common::sync::budget::Charge;

/// Process ids are smaller. What is larger is a random id.
const PROCESS_IDS: std::ops::Range<i64> = 0..1 << 32;

/// Workers of a connection that are known by their names; an adapter has one.
const MAX_WORKERS: usize = 16;

/// Lookups of a connection whose results can be asked for by number.
const MAX_LOOKUPS: usize = 4096;

/// Bits of the first number of a lookup: a client knows hits by number for as long as it lives, also over a restart of this
/// server, so the numbers of two servers must not meet.
const NUMBER_BITS: u32 = 40;

/// Ids of workers that no client can guess, and that are no process ids.
#[derive(Default)]
pub struct RandomIds {
    random: RandomState,
    serial: AtomicU64,
}

impl RandomIds {
    fn next(&self) -> InstanceId {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let random = self.random.hash_one(serial) >> 2;
        InstanceId(random as i64 | 1 << 62)
    }
}

#[derive(Default)]
struct NamedWorkers {
    known: Vec<(i64, InstanceId)>,
    last: Option<InstanceId>,
}

/// The workers of a connection.
pub struct WorkerNames {
    ids: Arc<RandomIds>,
    workers: Mutex<NamedWorkers>,
    may_have_worker: AtomicBool,
    is_registering: AtomicBool,
}

impl WorkerNames {
    /// None yet.
    pub fn new(ids: Arc<RandomIds>) -> Self {
        Self {
            ids,
            workers: Mutex::default(),
            may_have_worker: AtomicBool::new(true),
            is_registering: AtomicBool::new(false),
        }
    }

    /// The id of the worker that the connection calls `name`; nothing beyond a bound.
    pub fn id(&self, name: InstanceId) -> Option<InstanceId> {
        let mut workers = self.workers.lock();
        let known = workers.known.iter().find(|(known, _)| *known == name.0);
        let id = match known {
            Some((_, id)) => *id,
            None if workers.known.len() == MAX_WORKERS => return None,
            None => {
                let id = if PROCESS_IDS.contains(&name.0) {
                    self.ids.next()
                } else {
                    name
                };
                workers.known.push((name.0, id));
                id
            }
        };
        workers.last = Some(id);
        Some(id)
    }

    /// Forgets a worker that its connection unregisters.
    pub fn forget(&self, name: InstanceId) {
        let mut workers = self.workers.lock();
        workers.known.retain(|(known, _)| *known != name.0);
        workers.last = None;
    }

    /// The worker that the connection named last.
    pub fn last(&self) -> Option<InstanceId> {
        self.workers.lock().last
    }

    /// The ids of all of them.
    pub fn own(&self) -> Vec<InstanceId> {
        self.workers
            .lock()
            .known
            .iter()
            .map(|(_, id)| *id)
            .collect()
    }

    /// Notes a request that only schedulers send: the connection has no worker.
    pub fn note_scheduler(&self) {
        self.may_have_worker.store(false, Ordering::Relaxed);
    }

    /// The id of an unknown worker, once, if the connection may have a worker that an earlier server knew.
    pub fn unknown(&self) -> Option<InstanceId> {
        let is_first = self.may_have_worker.swap(false, Ordering::Relaxed);
        is_first.then(|| self.ids.next())
    }

    /// Notes that a registration begins. Until it is answered, the worker is not unknown.
    pub fn begin_registration(&self) {
        self.is_registering.store(true, Ordering::Relaxed);
    }

    /// Notes that it was answered.
    pub fn end_registration(&self) {
        self.is_registering.store(false, Ordering::Relaxed);
    }

    /// Whether a registration is in flight.
    pub fn is_registering(&self) -> bool {
        self.is_registering.load(Ordering::Relaxed)
    }
}

/// Request ids of a connection's lookups by their numbers.
#[derive(Default)]
pub struct LookupNumbers {
    by_number: Mutex<BTreeMap<i64, (Arc<str>, Charge)>>,
}

impl LookupNumbers {
    /// Notes which lookup a number is of, with the charge for its bytes. The oldest are forgotten beyond a bound: their
    /// results are 0.
    pub fn insert(&self, number: i64, request_id: &str, charge: Charge) {
        let mut by_number = self.by_number.lock();
        if by_number.len() >= MAX_LOOKUPS {
            by_number.pop_first();
        }
        by_number.insert(number, (request_id.into(), charge));
    }

    /// The request id of a lookup.
    pub fn get(&self, number: i64) -> Option<Arc<str>> {
        let by_number = self.by_number.lock();
        by_number.get(&number).map(|(id, _)| Arc::clone(id))
    }

    /// Forgets the lookups of a request that has ended.
    pub fn forget(&self, request_id: &str) {
        let mut by_number = self.by_number.lock();
        by_number.retain(|_, (known, _)| **known != *request_id);
    }
}

/// Returns the first number of this process.
pub fn first_number() -> i64 {
    let random = RandomState::new().hash_one(());
    (random >> (u64::BITS - NUMBER_BITS)) as i64
}

/// The number of the lookup with this uid frame: a client never uses a uid twice.
pub fn lookup_number(first: i64, uid: &[u8]) -> i64 {
    let uid: i64 = Reader::new(uid).int().unwrap_or_default();
    first.wrapping_add(uid) & i64::MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvtier_common::sync::budget::Budget;

    const PROCESS: InstanceId = InstanceId(77);

    // proves: docs/clients.md#releases
    #[test]
    fn equal_process_ids_of_two_connections_are_two_workers() {
        let ids = Arc::<RandomIds>::default();
        let [first, second] = [(); 2].map(|()| WorkerNames::new(Arc::clone(&ids)));
        let id = first.id(PROCESS).unwrap();
        assert_ne!(Some(id), second.id(PROCESS));
        assert!(!PROCESS_IDS.contains(&id.0) && id.0 > 0);
        assert_eq!((first.id(PROCESS), first.last()), (Some(id), Some(id)));
        assert_eq!(first.own(), [id]);
        first.forget(PROCESS);
        assert_eq!((first.last(), first.own()), (None, vec![]));
        assert_ne!(first.id(PROCESS), Some(id));
    }

    #[test]
    fn random_ids_stay_as_they_are() {
        let names = WorkerNames::new(Arc::default());
        for id in [1 << 32, i64::MAX, -1, i64::MIN].map(InstanceId) {
            assert_eq!((names.id(id), names.last()), (Some(id), Some(id)));
            assert!(names.own().contains(&id));
        }
    }

    #[test]
    fn workers_of_a_connection_are_bounded() {
        let names = WorkerNames::new(Arc::default());
        for process in 0..MAX_WORKERS as i64 {
            assert!(names.id(InstanceId(process)).is_some());
        }
        assert_eq!(names.id(PROCESS), None);
        assert!(names.id(InstanceId(0)).is_some());
        assert_eq!(names.own().len(), MAX_WORKERS);
    }

    #[test]
    fn unknown_worker_is_there_once_and_never_of_a_scheduler() {
        let names = WorkerNames::new(Arc::default());
        assert!(names.unknown().is_some() && names.unknown().is_none());
        let names = WorkerNames::new(Arc::default());
        names.note_scheduler();
        assert_eq!(names.unknown(), None);
    }

    #[test]
    fn lookups_are_known_by_number_until_their_request_ends() {
        let lookups = LookupNumbers::default();
        let budget = Budget::new(1 << 20);
        let charge = || budget.take(1).unwrap();
        lookups.insert(5, "a", charge());
        lookups.insert(6, "b", charge());
        assert_eq!(lookups.get(5).as_deref(), Some("a"));
        lookups.forget("a");
        assert_eq!(lookups.get(5), None);
        assert_eq!(lookups.get(6).as_deref(), Some("b"));
        for number in 7..7 + MAX_LOOKUPS as i64 {
            lookups.insert(number, "c", charge());
        }
        assert_eq!(lookups.get(6), None);
        assert_eq!(lookups.by_number.lock().len(), MAX_LOOKUPS);
    }

    #[test]
    fn numbers_of_lookups_differ_by_uid() {
        let first = first_number();
        assert!((0..1 << NUMBER_BITS).contains(&first));
        let [a, b] = [&[1u8][..], &[0xcd, 1, 0]].map(|uid| lookup_number(first, uid));
        assert_eq!((a - first, b - first), (1, 256));
        assert_eq!(lookup_number(first, b"\xc1"), first);
    }
}
