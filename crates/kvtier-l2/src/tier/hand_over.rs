//! Hand-over: what a tier knows of its backend, for the next process.
//!
//! The index, which may have millions of objects, comes behind the rest, when the next process serves already: as a listing in the
//! order of eviction, [`OBJECT_BYTES`] per object. It is taken as the listing of a [recovery](super::recovery) would be: until
//! then, keys are looked up in the backend. If it does not come, the backend is listed.

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

/// State of a tier while it is paused. Its index and descriptors are beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierState {
    name: String,
    namespaces: Vec<Namespace>,
    /// Deletes that wait: the key, the bytes, and whether an earlier one may still be executed.
    pending_deletes: Vec<(KeyState, u64, bool)>,
    /// Keys of the index whose store or delete was not answered.
    indeterminate: Vec<KeyState>,
    adapter: Value,
    /// Descriptors of the adapter.
    pub descriptors: usize,
}

/// What an index is of, but for its objects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexState {
    /// Whether it has all that the backend had at the start.
    pub(super) is_recovered: bool,
    namespaces: Vec<Namespace>,
    objects: u64,
}

/// A key: the number of its namespace, and its chunk hash.
type KeyState = (u32, ChunkHash);

/// The state of a tier, as the next process receives it.
pub struct TierHandOver {
    /// What is known but for the index.
    pub state: TierState,
    /// Descriptors of its adapter.
    pub descriptors: Vec<OwnedFd>,
}

/// The index of a tier, as the next process receives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexHandOver {
    /// What it is of.
    pub state: IndexState,
    /// Its objects, [`OBJECT_BYTES`] each.
    pub objects: Vec<u8>,
}

impl IndexState {
    /// Bytes of all objects.
    pub fn object_bytes(&self) -> u64 {
        self.objects.saturating_mul(OBJECT_BYTES as u64)
    }
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
    ///
    /// # Errors
    /// Some are missing or have no namespace.
    pub(super) fn list(self) -> Result<(Vec<Listed>, Recovered), L2Error> {
        let namespaces: Vec<_> = self
            .state
            .namespaces
            .iter()
            .cloned()
            .map(Arc::new)
            .collect();
        let objects = self.objects.chunks_exact(OBJECT_BYTES).zip(0..);
        let listed = objects.map(|(object, used_at)| {
            let (key, bytes) = Self::read(&namespaces, object)?;
            Some(Listed {
                key,
                bytes,
                used_at,
            })
        });
        let listed: Option<Vec<_>> = listed.collect();
        let is_whole = self.objects.len() as u64 == self.state.object_bytes();
        let listed = listed.filter(|_| is_whole);
        let listed =
            listed.ok_or_else(|| refused("objects of it are missing or have no namespace"))?;
        let recovered = Recovered {
            objects: listed.len() as u64,
            bytes: listed
                .iter()
                .fold(0, |sum, object| sum.saturating_add(object.bytes)),
            ..Recovered::default()
        };
        Ok((listed, recovered))
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

    /// The state for the next process, but for the index. To be called while the tier is paused and no delete is in flight.
    ///
    /// # Errors
    /// The adapter cannot be handed over.
    pub fn hand_over(&self) -> Result<TierHandOver, L2Error> {
        self.add_evicted();
        let AdapterHandOver { state, descriptors } = self.adapter.hand_over()?;
        let mut names = Names::default();
        let (pending, indeterminate) = self.states.unanswered();
        let pending = pending.into_iter();
        let pending = pending.map(|(key, bytes, is_late)| (names.key(&key), bytes, is_late));
        let pending_deletes = pending.collect();
        let indeterminate = indeterminate.iter().map(|key| names.key(key)).collect();
        Ok(TierHandOver {
            state: TierState {
                name: self.name().to_owned(),
                pending_deletes,
                indeterminate,
                adapter: state,
                descriptors: descriptors.len(),
                namespaces: names.all,
            },
            descriptors,
        })
    }

    /// The index for the next process. To be called while the tier is paused.
    pub fn index_hand_over(&self) -> IndexHandOver {
        let ordered = self.index.ordered();
        let mut objects = Vec::with_capacity(ordered.objects.len() * OBJECT_BYTES);
        for object in &ordered.objects {
            objects.extend_from_slice(&object.namespace.to_le_bytes());
            objects.extend_from_slice(&object.chunk_hash.0);
            objects.extend_from_slice(&object.bytes.to_le_bytes());
        }
        let namespaces = ordered.namespaces.iter();
        IndexHandOver {
            state: IndexState {
                is_recovered: !self.is_recovering(),
                namespaces: namespaces.map(|it| Namespace::clone(it)).collect(),
                objects: ordered.objects.len() as u64,
            },
            objects,
        }
    }

    /// Goes on, from [`Adapter::take`](crate::Adapter::take) on, with the state of another process. Nothing in the backend is
    /// changed. Its index is for [`Tier::recover_handed`].
    ///
    /// # Errors
    /// The first part that does not fit.
    pub fn adopt_state(&self, handed: TierHandOver) -> Result<(), L2Error> {
        let TierHandOver { state, descriptors } = handed;
        if state.name != self.name() {
            return Err(refused(format!(
                "its tier is {:?}; this server has {:?} in that place",
                state.name,
                self.name()
            )));
        }
        let namespaces: Vec<_> = state.namespaces.into_iter().map(Arc::new).collect();
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
        Ok(())
    }
}
