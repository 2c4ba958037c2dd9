//! Names that mean something on their own connection only.
//!
//! | releases | name | here |
//! | --- | --- | --- |
//! | up to 0.5.2 | a worker is its process id, which a worker in another container may have too | [`WorkerNames`] gives the worker of each connection an id of its own |
//! | up to 0.4.7 | a ping names no worker | it is of the last worker that its connection named |
//! | 0.4.2, 0.4.3 | a lookup is answered with a number, which asks for its result | [`LookupNumbers`] |
//!
//! A worker whose connection was lost comes back on another one and does not register again. It keeps its id if no other
//! worker has its name. Else it is unknown, and its pings are refused once, at which releases from 0.4.5 on register again:
//! transfers into the pages of another engine are worse than misses.
//!
//! Each mutex guards its table; nothing is acquired inside.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use kvtier_proto::request::InstanceId;
use kvtier_proto::wire::Reader;
use kvtier_sync::Mutex;

/// Process ids are smaller. What is larger is a random id, or one that a client chose with care.
const PROCESS_IDS: std::ops::Range<i64> = 0..1 << 32;

/// Names of workers known at most. Each is some 50 bytes.
const MAX_NAMES: usize = 65_536;

/// The same of one name: containers of a fleet that chose the same process id.
const MAX_SAME: usize = 256;

/// Lookups of a connection whose results can be asked for by number.
const MAX_LOOKUPS: usize = 4096;

/// Bits of the first number of a lookup: a client knows hits by number for as long as it lives, also over a restart of this
/// server, so the numbers of two servers must not meet.
const NUMBER_BITS: u32 = 40;

struct Named {
    id: InstanceId,
    connection: u64,
    is_connected: bool,
}

#[derive(Default)]
struct Names {
    by_name: HashMap<i64, Vec<Named>>,
    len: usize,
    serial: i64,
}

impl Names {
    fn own(&self, connection: u64, name: i64) -> Option<InstanceId> {
        let same = self.by_name.get(&name)?;
        let mine = same.iter().find(|it| it.connection == connection);
        mine.map(|it| it.id)
    }

    fn remove(&mut self, name: i64, which: impl Fn(&Named) -> bool) {
        if let Some(same) = self.by_name.get_mut(&name) {
            let before = same.len();
            same.retain(|it| !which(it));
            self.len -= before - same.len();
            if same.is_empty() {
                self.by_name.remove(&name);
            }
        }
    }

    /// Keeps a name of a worker for the connection, taken over from the one that it had before if that is certain.
    fn bind(&mut self, connection: u64, name: i64) -> InstanceId {
        if let Some([only]) = self.by_name.get_mut(&name).map(Vec::as_mut_slice)
            && !only.is_connected
        {
            (only.connection, only.is_connected) = (connection, true);
            return only.id;
        }
        self.serial += 1;
        let id = InstanceId((self.serial << 32) | name);
        if self.len >= MAX_NAMES {
            // Mostly workers that ended long ago. One that comes back is unknown.
            self.by_name.retain(|_, same| {
                same.retain(|it| it.is_connected);
                !same.is_empty()
            });
            self.len = self.by_name.values().map(Vec::len).sum();
        }
        let is_full = self.len >= MAX_NAMES;
        let same = self.by_name.entry(name).or_default();
        // Beyond the bounds a worker is unknown.
        if !is_full && same.len() < MAX_SAME {
            same.push(Named {
                id,
                connection,
                is_connected: true,
            });
            self.len += 1;
        }
        id
    }
}

/// Ids of the workers that are named by process ids.
#[derive(Default)]
pub struct WorkerNames {
    names: Mutex<Names>,
}

impl WorkerNames {
    /// The id of the worker that a connection calls `name`. `is_registered` is whether a worker is still known.
    pub fn id(
        &self,
        connection: u64,
        name: InstanceId,
        is_registered: impl Fn(InstanceId) -> bool,
    ) -> InstanceId {
        if !PROCESS_IDS.contains(&name.0) {
            return name;
        }
        let names = self.names.lock();
        if let Some(id) = names.own(connection, name.0) {
            return id;
        }
        let lost = names.by_name.get(&name.0).into_iter().flatten();
        let lost = lost.filter(|it| !it.is_connected).map(|it| it.id);
        let lost: Vec<_> = lost.collect();
        drop(names);
        let gone: Vec<_> = lost.into_iter().filter(|id| !is_registered(*id)).collect();
        let mut names = self.names.lock();
        names.remove(name.0, |it| !it.is_connected && gone.contains(&it.id));
        names.bind(connection, name.0)
    }

    /// Forgets the name of a worker that its connection unregisters.
    pub fn forget(&self, connection: u64, name: InstanceId) {
        let mut names = self.names.lock();
        names.remove(name.0, |it| it.connection == connection);
    }

    /// Notes that a connection has ended.
    pub fn connection_ended(&self, connection: u64) {
        let mut names = self.names.lock();
        let all = names.by_name.values_mut().flatten();
        all.filter(|it| it.connection == connection)
            .for_each(|it| it.is_connected = false);
    }
}

/// Request ids of a connection's lookups by their numbers.
#[derive(Default)]
pub struct LookupNumbers {
    by_number: Mutex<BTreeMap<i64, Arc<str>>>,
}

impl LookupNumbers {
    /// Notes which lookup a number is of. The oldest are forgotten beyond a bound: their results are 0.
    pub fn insert(&self, number: i64, request_id: &str) {
        let mut by_number = self.by_number.lock();
        if by_number.len() >= MAX_LOOKUPS {
            by_number.pop_first();
        }
        by_number.insert(number, request_id.into());
    }

    /// The request id of a lookup.
    pub fn get(&self, number: i64) -> Option<Arc<str>> {
        self.by_number.lock().get(&number).cloned()
    }

    /// Forgets the lookups of a request that has ended.
    pub fn forget(&self, request_id: &str) {
        let mut by_number = self.by_number.lock();
        by_number.retain(|_, known| **known != *request_id);
    }
}

/// Where the numbers of this process begin.
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

    const PROCESS: InstanceId = InstanceId(77);

    fn known(_: InstanceId) -> bool {
        true
    }

    #[test]
    fn equal_process_ids_of_two_connections_are_two_workers() {
        let names = WorkerNames::default();
        let [first, second] = [1, 2].map(|connection| names.id(connection, PROCESS, known));
        assert_ne!(first, second);
        assert!(first != PROCESS && second != PROCESS);
        assert_eq!(names.id(1, PROCESS, known), first);
        assert_eq!(names.id(2, PROCESS, known), second);
        names.forget(1, PROCESS);
        assert_eq!(names.id(2, PROCESS, known), second);
    }

    #[test]
    fn reconnected_worker_keeps_its_id_if_its_name_is_unique() {
        let names = WorkerNames::default();
        let id = names.id(1, PROCESS, known);
        names.connection_ended(1);
        assert_eq!(names.id(2, PROCESS, known), id);
        // Its first connection may have ended without that being noticed yet.
        let unknown = names.id(3, PROCESS, known);
        assert_ne!(unknown, id);
    }

    #[test]
    fn reconnected_worker_is_unknown_if_another_has_its_name() {
        let names = WorkerNames::default();
        let ids = [1, 2].map(|connection| names.id(connection, PROCESS, known));
        names.connection_ended(1);
        assert!(!ids.contains(&names.id(3, PROCESS, known)));
        names.connection_ended(2);
        assert!(!ids.contains(&names.id(4, PROCESS, known)));
        // Once the other has ended, which its registration shows, there is no doubt.
        names.connection_ended(3);
        names.connection_ended(4);
        assert_eq!(names.id(5, PROCESS, |id| id == ids[0]), ids[0]);
    }

    #[test]
    fn random_ids_stay_as_they_are() {
        let names = WorkerNames::default();
        for id in [1 << 32, i64::MAX, -1, i64::MIN].map(InstanceId) {
            assert_eq!(names.id(1, id, known), id);
        }
        assert_eq!(names.names.lock().len, 0);
    }

    #[test]
    fn names_are_bounded() {
        let names = WorkerNames::default();
        let len = || names.names.lock().len;
        for connection in 0..=MAX_SAME as u64 {
            names.id(connection, PROCESS, known);
        }
        assert_eq!(len(), MAX_SAME);
        for process in 0..=(MAX_NAMES - MAX_SAME) as i64 {
            names.id(0, InstanceId(1000 + process), known);
        }
        assert_eq!(len(), MAX_NAMES);
        // Those of ended connections give way.
        names.connection_ended(0);
        names.id(MAX_SAME as u64, InstanceId(1), known);
        assert_eq!(len(), MAX_SAME);
    }

    #[test]
    fn lookups_are_known_by_number_until_their_request_ends() {
        let lookups = LookupNumbers::default();
        lookups.insert(5, "a");
        lookups.insert(6, "b");
        assert_eq!(lookups.get(5).as_deref(), Some("a"));
        lookups.forget("a");
        assert_eq!(lookups.get(5), None);
        assert_eq!(lookups.get(6).as_deref(), Some("b"));
        for number in 7..7 + MAX_LOOKUPS as i64 {
            lookups.insert(number, "c");
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
