//! Hand-over: what a tier knows of its backend, for the next process.
//!
//! The index is handed over as a listing in the order of eviction, [`OBJECT_BYTES`] per object, beside the rest. The next
//! process takes it after it has everything, as it would the listing of a [recovery](super::recovery): until then, keys are
//! looked up in the backend.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvtier_core::ChunkHash;
use kvtier_core::object_key::{Namespace, ObjectKey};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::OwnedRwLockReadGuard;

use super::{Listed, Recovery, Tier};
use crate::adapter::{AdapterHandOver, Recovered};
use crate::error::{ErrorKind, L2Error};

/// Bytes of one object of the index: its namespace (4), its chunk hash and its length (8), little-endian.
pub const OBJECT_BYTES: usize = 12 + ChunkHash::LEN;

/// State of a tier while it is paused. Objects of its index and descriptors are beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierState {
    name: String,
    /// Whether the index has all that the backend had at the start.
    is_recovered: bool,
    namespaces: Vec<Namespace>,
    /// Objects of the index.
    pub objects: u64,
    /// Deletes that wait: the key, the bytes, and whether an earlier one may still be executed.
    pending_deletes: Vec<(KeyState, u64, bool)>,
    /// Keys of the index whose store or delete was not answered.
    indeterminate: Vec<KeyState>,
    adapter: Value,
    /// Descriptors of the adapter.
    pub descriptors: usize,
}

/// A key: the number of its namespace, and its chunk hash.
type KeyState = (u32, ChunkHash);

/// The state of a tier, as the next process receives it.
pub struct TierHandOver {
    /// Its state but for the index.
    pub state: TierState,
    /// The objects of its index, [`OBJECT_BYTES`] each.
    pub objects: Vec<u8>,
    /// Descriptors of its adapter.
    pub descriptors: Vec<OwnedFd>,
}

/// Index of the process before, for [`Tier::recover`].
pub struct IndexHandOver {
    namespaces: Vec<Arc<Namespace>>,
    objects: Vec<u8>,
    pub(super) is_recovered: bool,
}

impl IndexHandOver {
    fn read(namespaces: &[Arc<Namespace>], object: &[u8]) -> Option<(ObjectKey, u64)> {
        let (namespace, rest) = object.split_first_chunk()?;
        let (hash, bytes) = rest.split_first_chunk()?;
        let namespace = namespaces.get(u32::from_le_bytes(*namespace) as usize)?;
        let bytes = u64::from_le_bytes(bytes.try_into().ok()?);
        Some((ObjectKey::of(namespace, ChunkHash(*hash)), bytes))
    }

    /// The objects, as a recovery finds them, and their sums.
    pub(super) fn list(&self) -> (Vec<Listed>, Recovered) {
        let objects = self.objects.chunks_exact(OBJECT_BYTES).zip(0..);
        let listed = objects.filter_map(|(object, used_at)| {
            let (key, bytes) = Self::read(&self.namespaces, object)?;
            Some(Listed {
                key,
                bytes,
                used_at,
            })
        });
        let listed: Vec<_> = listed.collect();
        let recovered = Recovered {
            objects: listed.len() as u64,
            bytes: listed
                .iter()
                .fold(0, |sum, object| sum.saturating_add(object.bytes)),
            ..Recovered::default()
        };
        (listed, recovered)
    }
}

/// Namespaces by their number in a state.
#[derive(Default)]
struct Names {
    numbers: BTreeMap<Arc<Namespace>, u32>,
    all: Vec<Namespace>,
}

impl Names {
    fn number(&mut self, namespace: &Arc<Namespace>) -> u32 {
        if let Some(number) = self.numbers.get(namespace) {
            return *number;
        }
        let number = u32::try_from(self.all.len()).unwrap_or(u32::MAX);
        self.numbers.insert(Arc::clone(namespace), number);
        self.all.push(Namespace::clone(namespace));
        number
    }

    fn key(&mut self, key: &ObjectKey) -> KeyState {
        (self.number(key.namespace()), key.chunk_hash())
    }
}

fn refused(what: impl Into<String>) -> L2Error {
    L2Error::new(ErrorKind::Refused, what)
}

impl Tier {
    /// Lets work on the backend begin, unless the tier is paused, and keeps it from being paused.
    pub async fn begin_work(&self) -> OwnedRwLockReadGuard<()> {
        Arc::clone(&self.work).read_owned().await
    }

    /// Checks that its adapter can be handed over.
    ///
    /// # Errors
    /// Why not.
    pub fn check_hand_over(&self) -> Result<(), L2Error> {
        self.adapter.hand_over().map(drop)
    }

    /// The number of deletes that were sent and not answered.
    pub fn deletes_in_flight(&self) -> usize {
        self.states.deletes_in_flight()
    }

    /// The state for the next process. To be called while the tier is paused and no delete is in flight.
    ///
    /// # Errors
    /// The adapter cannot be handed over.
    pub fn hand_over(&self) -> Result<TierHandOver, L2Error> {
        self.add_evicted();
        let AdapterHandOver { state, descriptors } = self.adapter.hand_over()?;
        let ordered = self.index.ordered();
        let mut names = Names::default();
        let namespaces = ordered.namespaces.iter();
        let numbers: Vec<_> = namespaces
            .map(|namespace| names.number(namespace))
            .collect();
        let mut objects = Vec::with_capacity(ordered.objects.len() * OBJECT_BYTES);
        for object in &ordered.objects {
            let number = numbers[object.namespace as usize];
            objects.extend_from_slice(&number.to_le_bytes());
            objects.extend_from_slice(&object.chunk_hash.0);
            objects.extend_from_slice(&object.bytes.to_le_bytes());
        }
        let (pending, indeterminate) = self.states.unanswered();
        let pending = pending.into_iter();
        let pending = pending.map(|(key, bytes, is_late)| (names.key(&key), bytes, is_late));
        let pending_deletes = pending.collect();
        let indeterminate = indeterminate.iter().map(|key| names.key(key)).collect();
        Ok(TierHandOver {
            state: TierState {
                name: self.name().to_owned(),
                is_recovered: !self.is_recovering(),
                objects: ordered.objects.len() as u64,
                pending_deletes,
                indeterminate,
                adapter: state,
                descriptors: descriptors.len(),
                namespaces: names.all,
            },
            objects,
            descriptors,
        })
    }

    /// Goes on, from [`Adapter::take`](crate::Adapter::take) on, with the state of another process. Nothing in the backend is
    /// changed. The result is for [`Tier::recover`].
    ///
    /// # Errors
    /// The first part that does not fit.
    pub fn adopt_state(&self, handed: TierHandOver) -> Result<IndexHandOver, L2Error> {
        let TierHandOver {
            state,
            objects,
            descriptors,
        } = handed;
        if state.name != self.name() {
            return Err(refused(format!(
                "its tier is {:?}; this server has {:?} in that place",
                state.name,
                self.name()
            )));
        }
        let namespaces: Vec<_> = state.namespaces.into_iter().map(Arc::new).collect();
        let count = u64::try_from(objects.len() / OBJECT_BYTES).unwrap_or(u64::MAX);
        let are_whole = count == state.objects && objects.len().is_multiple_of(OBJECT_BYTES);
        let is_known = |object: &[u8]| IndexHandOver::read(&namespaces, object).is_some();
        if !are_whole || !objects.chunks_exact(OBJECT_BYTES).all(is_known) {
            return Err(refused(format!(
                "{}: objects of its index are missing or have no namespace",
                self.name()
            )));
        }
        let key = |(namespace, hash): &KeyState| {
            let namespace = namespaces.get(*namespace as usize);
            let namespace = namespace.ok_or_else(|| refused("a key has no namespace"))?;
            Ok(ObjectKey::of(namespace, *hash))
        };
        let pending = state.pending_deletes.iter();
        let pending = pending.map(|(name, bytes, is_late)| Ok((key(name)?, *bytes, *is_late)));
        let pending = pending.collect::<Result<Vec<_>, L2Error>>()?;
        let indeterminate = state.indeterminate.iter().map(key);
        let indeterminate = indeterminate.collect::<Result<Vec<_>, L2Error>>()?;
        self.adapter.adopt(AdapterHandOver {
            state: state.adapter,
            descriptors,
        })?;
        self.states.resume(pending, indeterminate);
        self.recovery.send_replace(Recovery::Running);
        Ok(IndexHandOver {
            namespaces,
            objects,
            is_recovered: state.is_recovered,
        })
    }
}
