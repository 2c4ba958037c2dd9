//! Spaces: everything of an object's identity but the chunk hash, interned as small numbers.

use super::counters::Counters;
use foldhash::quality::RandomState;
use hashbrown::HashTable;
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

/// Things with small numbers, which are reused once a thing is forgotten.
#[derive(Debug)]
struct Numbered<T> {
    entries: Vec<Option<T>>,
    free: Vec<u32>,
    table: HashTable<u32>,
}

impl<T> Default for Numbered<T> {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            table: HashTable::new(),
        }
    }
}

impl<T> Numbered<T> {
    fn find(&self, hash: u64, mut is_it: impl FnMut(&T) -> bool) -> Option<u32> {
        self.table
            .find(hash, |&number| self.get(number).is_some_and(&mut is_it))
            .copied()
    }

    fn get(&self, number: u32) -> Option<&T> {
        self.entries.get(number as usize)?.as_ref()
    }

    fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.entries.get_mut(number as usize)?.as_mut()
    }

    fn insert(&mut self, hash: u64, thing: T, rehash: impl Fn(&T) -> u64) -> u32 {
        let number = self.free.pop().unwrap_or(self.entries.len() as u32);
        match self.entries.get_mut(number as usize) {
            Some(entry) => *entry = Some(thing),
            None => self.entries.push(Some(thing)),
        }
        let entries = &self.entries;
        self.table.insert_unique(hash, number, |&other| {
            entries[other as usize].as_ref().map_or(0, &rehash)
        });
        number
    }

    fn remove(&mut self, hash: u64, number: u32) -> Option<T> {
        let found = self.table.find_entry(hash, |&other| other == number).ok()?;
        found.remove();
        self.free.push(number);
        self.entries[number as usize].take()
    }

    fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    fn bookkeeping_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Option<T>>()
            + self.free.capacity() * size_of::<u32>()
            + self.table.allocation_size()
    }
}

#[derive(Debug)]
struct Model {
    name: Arc<str>,
    spaces: u32,
}

/// A tenant while it has anything in the cache.
#[derive(Debug)]
pub(super) struct Salt {
    pub(super) name: Arc<str>,
    spaces: u32,
    pub(super) counters: Counters,
}

#[derive(Debug)]
struct Entry {
    model: u32,
    salt: u32,
    kv_rank: u64,
    object_group_id: u32,
    layout: u64,
    users: u64,
}

/// All spaces that have objects, and the names they share. A space is forgotten with its last user, a name with its
/// last space.
#[derive(Debug, Default)]
pub(super) struct Spaces {
    seed: RandomState,
    models: Numbered<Model>,
    salts: Numbered<Salt>,
    spaces: Numbered<Entry>,
    /// Heap bytes of all names.
    name_bytes: usize,
}

/// Heap bytes of a shared name: the text and two counters.
fn name_bytes(name: &str) -> usize {
    name.len() + 2 * size_of::<usize>()
}

impl Spaces {
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
            cache_salt: &self.salts.get(entry.salt)?.name,
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
        let hash = seed.hash_one(space.cache_salt);
        let salts = &mut self.salts;
        let salt = salts
            .find(hash, |salt| &*salt.name == space.cache_salt)
            .unwrap_or_else(|| {
                let entry = Salt {
                    name: Arc::from(space.cache_salt),
                    spaces: 0,
                    counters: Counters::default(),
                };
                self.name_bytes += name_bytes(space.cache_salt);
                salts.insert(hash, entry, |s| seed.hash_one(&*s.name))
            });
        if let Some(model) = models.get_mut(model) {
            model.spaces += 1;
        }
        if let Some(salt) = salts.get_mut(salt) {
            salt.spaces += 1;
        }
        let entry = Entry {
            model,
            salt,
            kv_rank: space.kv_rank,
            object_group_id: space.object_group_id,
            layout: space.layout,
            users: 0,
        };
        let (models, salts) = (&self.models, &self.salts);
        self.spaces.insert(seed.hash_one(space), entry, |entry| {
            let (Some(model), Some(salt)) = (models.get(entry.model), salts.get(entry.salt)) else {
                return 0;
            };
            seed.hash_one(Space {
                model_name: &model.name,
                kv_rank: entry.kv_rank,
                object_group_id: entry.object_group_id,
                layout: entry.layout,
                cache_salt: &salt.name,
            })
        })
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
        if let Some(salt) = self.salts.get_mut(entry.salt) {
            salt.spaces -= 1;
            if salt.spaces == 0 {
                if salt.counters != Counters::default() {
                    *errors += 1;
                }
                let hash = self.seed.hash_one(&*salt.name);
                self.name_bytes -= name_bytes(&salt.name);
                self.salts.remove(hash, entry.salt);
            }
        }
    }

    /// The tenant of a space.
    pub(super) fn salt_of(&self, space: u32) -> u32 {
        self.spaces.get(space).map_or(u32::MAX, |entry| entry.salt)
    }

    /// The counters of a space's tenant.
    pub(super) fn counters_of(&mut self, space: u32) -> Option<&mut Counters> {
        let salt = self.spaces.get(space)?.salt;
        self.salts.get_mut(salt).map(|salt| &mut salt.counters)
    }

    pub(super) fn owned(&self, space: u32) -> Option<OwnedSpace> {
        let entry = self.spaces.get(space)?;
        Some(OwnedSpace {
            model_name: Arc::clone(&self.models.get(entry.model)?.name),
            kv_rank: entry.kv_rank,
            object_group_id: entry.object_group_id,
            layout: entry.layout,
            cache_salt: Arc::clone(&self.salts.get(entry.salt)?.name),
        })
    }

    pub(super) fn salt(&self, name: &str) -> Option<&Salt> {
        let number = self
            .salts
            .find(self.seed.hash_one(name), |salt| &*salt.name == name)?;
        self.salts.get(number)
    }

    /// The tenants with their numbers, from one number on.
    pub(super) fn salts_from(&self, from: u32) -> impl Iterator<Item = (u32, &Salt)> {
        let entries = self.salts.entries.iter().zip(0..).skip(from as usize);
        entries.filter_map(|(salt, number)| Some((number, salt.as_ref()?)))
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

    pub(super) fn salts_len(&self) -> usize {
        self.salts.len()
    }

    pub(super) fn models_len(&self) -> usize {
        self.models.len()
    }

    pub(super) fn bookkeeping_bytes(&self) -> usize {
        self.models.bookkeeping_bytes()
            + self.salts.bookkeeping_bytes()
            + self.spaces.bookkeeping_bytes()
            + self.name_bytes
    }
}
