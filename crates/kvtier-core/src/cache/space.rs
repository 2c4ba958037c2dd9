//! Spaces: everything of an object's identity but the chunk hash, interned as small numbers.

use super::numbered::Numbered;
use super::tenant::Tenants;
use crate::hashing::ChunkHash;
use crate::quota::QuotaConfig;
use foldhash::quality::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;

/// One model, rank, object group, layout and tenant. All fields take part in identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Space<'a> {
    /// The model's name as the engine gave it.
    pub model_name: &'a str,
    /// World size and rank, packed; see [`crate::kv_rank`].
    pub kv_rank: u64,
    /// The object group.
    pub object_group_id: u32,
    /// Shape and type of the object's arrays, as a fingerprint: objects laid out differently are different objects.
    pub layout: u64,
    /// The tenant; empty for none.
    pub cache_salt: &'a str,
}

/// [`Space`] with names of its own.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnedSpace {
    /// The model's name as the engine gave it.
    pub model_name: Arc<str>,
    /// World size and rank, packed; see [`crate::kv_rank`].
    pub kv_rank: u64,
    /// The object group.
    pub object_group_id: u32,
    /// Shape and type of the object's arrays, as a fingerprint: objects laid out differently are different objects.
    pub layout: u64,
    /// The tenant; empty for none.
    pub cache_salt: Arc<str>,
}

impl OwnedSpace {
    /// The same, borrowed.
    pub fn as_space(&self) -> Space<'_> {
        Space {
            model_name: &self.model_name,
            kv_rank: self.kv_rank,
            object_group_id: self.object_group_id,
            layout: self.layout,
            cache_salt: &self.cache_salt,
        }
    }
}

#[derive(Debug)]
struct Model {
    name: Arc<str>,
    spaces: u32,
}

#[derive(Debug)]
struct Entry {
    model: u32,
    salt: u32,
    kv_rank: u64,
    object_group_id: u32,
    layout: u64,
    users: u64,
    /// The hash of all that names it.
    hash: u64,
}

/// All spaces that have objects, and the names they share. A space is forgotten with its last user, a name with its
/// last space.
#[derive(Debug, Default)]
pub(super) struct Spaces {
    seed: RandomState,
    models: Numbered<Model>,
    pub(super) tenants: Tenants,
    spaces: Numbered<Entry>,
    /// Heap bytes of all names.
    name_bytes: usize,
}

/// Heap bytes of a shared name: the text and two counters.
pub(super) fn name_bytes(name: &str) -> usize {
    name.len() + 2 * size_of::<usize>()
}

impl Spaces {
    pub(super) fn new(quotas: QuotaConfig) -> Self {
        Self {
            tenants: Tenants::new(quotas),
            ..Self::default()
        }
    }

    fn hash(&self, space: &Space<'_>) -> u64 {
        self.seed.hash_one(space)
    }

    /// The number of a space, if it has objects.
    pub(super) fn find(&self, space: &Space<'_>) -> Option<u32> {
        self.spaces.find(self.hash(space), |entry| {
            self.borrow(entry).is_some_and(|known| known == *space)
        })
    }

    fn borrow<'a>(&'a self, entry: &Entry) -> Option<Space<'a>> {
        Some(Space {
            model_name: &self.models.get(entry.model)?.name,
            kv_rank: entry.kv_rank,
            object_group_id: entry.object_group_id,
            layout: entry.layout,
            cache_salt: &self.tenants.get(entry.salt)?.name,
        })
    }

    /// The number of a space, made if need be, with one more user.
    pub(super) fn open(&mut self, space: &Space<'_>) -> u32 {
        let number = match self.find(space) {
            Some(number) => number,
            None => self.make(space),
        };
        self.add_user(number);
        number
    }

    fn make(&mut self, space: &Space<'_>) -> u32 {
        let seed = &self.seed;
        let hash = seed.hash_one(space.model_name);
        let models = &mut self.models;
        let model = models
            .find(hash, |model| &*model.name == space.model_name)
            .unwrap_or_else(|| {
                let name = Arc::from(space.model_name);
                self.name_bytes += name_bytes(space.model_name);
                models.insert(hash, Model { name, spaces: 0 }, |m| seed.hash_one(&*m.name))
            });
        let salt = self.tenants.open(space.cache_salt);
        if let Some(model) = models.get_mut(model) {
            model.spaces += 1;
        }
        let entry = Entry {
            model,
            salt,
            kv_rank: space.kv_rank,
            object_group_id: space.object_group_id,
            layout: space.layout,
            users: 0,
            hash: seed.hash_one(space),
        };
        self.spaces.insert(entry.hash, entry, |entry| entry.hash)
    }

    pub(super) fn add_user(&mut self, number: u32) {
        if let Some(entry) = self.spaces.get_mut(number) {
            entry.users += 1;
        }
    }

    /// One user less; with the last one the space is forgotten. An unknown space is counted as an error.
    pub(super) fn drop_user(&mut self, number: u32, errors: &mut u64) {
        let Some(entry) = self.spaces.get_mut(number) else {
            *errors += 1;
            return;
        };
        entry.users -= 1;
        if entry.users == 0 {
            self.forget(number, errors);
        }
    }

    #[cold]
    fn forget(&mut self, number: u32, errors: &mut u64) {
        let space = self.spaces.get(number).and_then(|entry| self.borrow(entry));
        let hash = space.map(|space| self.hash(&space));
        let Some(entry) = hash.and_then(|hash| self.spaces.remove(hash, number)) else {
            *errors += 1;
            return;
        };
        if let Some(model) = self.models.get_mut(entry.model) {
            model.spaces -= 1;
            if model.spaces == 0 {
                let hash = self.seed.hash_one(&*model.name);
                self.name_bytes -= name_bytes(&model.name);
                self.models.remove(hash, entry.model);
            }
        }
        self.tenants.close(entry.salt, errors);
    }

    /// A hash of an object's key that stays the same when its space was forgotten meanwhile.
    pub(super) fn identity(&self, space: u32, hash: &ChunkHash) -> u64 {
        let space = self.spaces.get(space).map_or(0, |entry| entry.hash);
        let (words, _) = hash.0.as_chunks::<8>();
        space ^ u64::from_le_bytes(words[0])
    }

    /// The tenant of a space.
    pub(super) fn salt_of(&self, space: u32) -> u32 {
        self.spaces.get(space).map_or(u32::MAX, |entry| entry.salt)
    }

    pub(super) fn owned(&self, space: u32) -> Option<OwnedSpace> {
        let entry = self.spaces.get(space)?;
        Some(OwnedSpace {
            model_name: Arc::clone(&self.models.get(entry.model)?.name),
            kv_rank: entry.kv_rank,
            object_group_id: entry.object_group_id,
            layout: entry.layout,
            cache_salt: Arc::clone(&self.tenants.get(entry.salt)?.name),
        })
    }

    /// The spaces with their numbers, from one number on.
    pub(super) fn spaces_from(&self, from: u32) -> impl Iterator<Item = (u32, OwnedSpace)> {
        let numbers = from..self.spaces.entries.len() as u32;
        numbers.filter_map(|number| Some((number, self.owned(number)?)))
    }

    /// The spaces' numbers and users.
    pub(super) fn users(&self) -> impl Iterator<Item = (u32, u64)> {
        let entries = self.spaces.entries.iter().zip(0..);
        entries.filter_map(|(entry, number)| Some((number, entry.as_ref()?.users)))
    }

    pub(super) fn spaces_len(&self) -> usize {
        self.spaces.len()
    }

    pub(super) fn models_len(&self) -> usize {
        self.models.len()
    }

    pub(super) fn bookkeeping_bytes(&self) -> usize {
        self.models.bookkeeping_bytes()
            + self.tenants.bookkeeping_bytes()
            + self.spaces.bookkeeping_bytes()
            + self.name_bytes
    }
}
