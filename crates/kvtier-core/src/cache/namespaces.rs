//! The namespaces that have objects, interned as small numbers.

use super::interner::{Interner, SHARED_COUNTERS, name_bytes};
use super::tenant::Tenants;
use crate::hashing::ChunkHash;
use crate::ledger::Namespaces;
use crate::object_key::Namespace;
use crate::quota::QuotaConfig;
use foldhash::quality::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;

#[derive(Debug)]
struct Model {
    name: Arc<str>,
    namespaces: u32,
}

#[derive(Debug)]
struct NamespaceEntry {
    /// Namespace with the strings that the table shares.
    namespace: Arc<Namespace>,
    model: u32,
    tenant: u32,
    users: u64,
    /// The namespace's hash.
    identity: u64,
    /// [`NamespaceTable::hash`] of it.
    hash: u64,
}

impl Namespaces for NamespaceTable {
    fn namespace(&self, number: u32) -> Option<&Namespace> {
        self.get(number).map(Arc::as_ref)
    }
}

fn first_word(hash: &ChunkHash) -> u64 {
    let (words, _) = hash.0.as_chunks::<8>();
    u64::from_le_bytes(words[0])
}

/// [`NamespaceTable::identity`] of keys of one namespace, which may have no objects, in the table with this seed.
pub(super) fn identities(
    seed: &RandomState,
    namespace: &Namespace,
    hashes: &[ChunkHash],
) -> Vec<u64> {
    let of_namespace = seed.hash_one(namespace);
    let identity = |hash: &ChunkHash| of_namespace ^ first_word(hash);
    hashes.iter().map(identity).collect()
}

/// All namespaces that have objects, and the names they share. A namespace is removed with its last user, a name with
/// its last namespace.
#[derive(Debug, Default)]
pub(super) struct NamespaceTable {
    pub(super) seed: RandomState,
    models: Interner<Model>,
    pub(super) tenants: Tenants,
    namespaces: Interner<NamespaceEntry>,
    /// Heap bytes of all model names.
    name_bytes: usize,
}

impl NamespaceTable {
    pub(super) fn new(quotas: QuotaConfig) -> Self {
        Self {
            tenants: Tenants::new(quotas),
            ..Self::default()
        }
    }

    /// The hash of a namespace in the table: without its layout, so that all layouts of a name are found by it.
    fn hash(&self, namespace: &Namespace) -> u64 {
        self.seed.hash_one(namespace.name())
    }

    /// The number of a namespace, if it has objects.
    pub(super) fn find(&self, namespace: &Namespace) -> Option<u32> {
        self.namespaces
            .find(self.hash(namespace), |entry| *entry.namespace == *namespace)
    }

    /// The numbers of the namespaces that differ from this one in their layout at most.
    pub(super) fn of_any_layout(&self, namespace: &Namespace) -> impl Iterator<Item = u32> {
        let numbers = self.namespaces.of_hash(self.hash(namespace));
        numbers.filter(|number| {
            let found = self.get(*number);
            found.is_some_and(|found| found.name() == namespace.name())
        })
    }

    /// The number of a namespace, inserted if it has no objects yet, with one more user.
    pub(super) fn open(&mut self, namespace: &Namespace) -> u32 {
        let number = match self.find(namespace) {
            Some(number) => number,
            None => self.insert(namespace),
        };
        self.add_user(number);
        number
    }

    fn insert(&mut self, namespace: &Namespace) -> u32 {
        let entry = self.entry(namespace);
        self.namespaces
            .insert(entry.hash, entry, |entry| entry.hash)
    }

    /// Inserts the namespaces of an earlier process, all of them different, under their numbers and with one user each.
    pub(super) fn restore(&mut self, namespaces: &[Option<Arc<Namespace>>]) {
        for namespace in namespaces {
            let entry = namespace.as_ref().map(|namespace| {
                let mut entry = self.entry(namespace);
                entry.users = 1;
                (entry.hash, entry)
            });
            self.namespaces.append(entry, |entry| entry.hash);
        }
    }

    fn entry(&mut self, namespace: &Namespace) -> NamespaceEntry {
        let seed = &self.seed;
        let name = namespace.model_name();
        let hash = seed.hash_one(&**name);
        let models = &mut self.models;
        let model = models
            .find(hash, |model| model.name == *name)
            .unwrap_or_else(|| {
                self.name_bytes += name_bytes(name);
                let model = Model {
                    name: Arc::clone(name),
                    namespaces: 0,
                };
                models.insert(hash, model, |m| seed.hash_one(&*m.name))
            });
        let (tenant, cache_salt) = self.tenants.open(namespace.cache_salt());
        let mut model_name = name;
        if let Some(model) = models.get_mut(model) {
            model.namespaces += 1;
            model_name = &model.name;
        }
        NamespaceEntry {
            namespace: Arc::new(namespace.with_names(model_name, &cache_salt)),
            model,
            tenant,
            users: 0,
            identity: seed.hash_one(namespace),
            hash: seed.hash_one(namespace.name()),
        }
    }

    pub(super) fn add_user(&mut self, number: u32) {
        if let Some(entry) = self.namespaces.get_mut(number) {
            entry.users += 1;
        }
    }

    /// Drops one user; with the last one the namespace is removed. An unknown namespace counts as an error.
    pub(super) fn drop_user(&mut self, number: u32, errors: &mut u64) {
        let Some(entry) = self.namespaces.get_mut(number) else {
            *errors += 1;
            return;
        };
        entry.users -= 1;
        if entry.users == 0 {
            self.remove(number, errors);
        }
    }

    #[cold]
    fn remove(&mut self, number: u32, errors: &mut u64) {
        let hash = self.namespaces.get(number).map(|entry| entry.hash);
        let Some(entry) = hash.and_then(|hash| self.namespaces.remove(hash, number)) else {
            *errors += 1;
            return;
        };
        if let Some(model) = self.models.get_mut(entry.model) {
            model.namespaces -= 1;
            if model.namespaces == 0 {
                let hash = self.seed.hash_one(&*model.name);
                self.name_bytes -= name_bytes(&model.name);
                self.models.remove(hash, entry.model);
            }
        }
        self.tenants.close(entry.tenant, errors);
    }

    /// A hash of an object's key that stays the same if its namespace was removed and inserted again in between.
    pub(super) fn identity(&self, namespace: u32, hash: &ChunkHash) -> u64 {
        let entry = self.namespaces.get(namespace);
        entry.map_or(0, |entry| entry.identity) ^ first_word(hash)
    }

    /// The tenant of a namespace.
    pub(super) fn tenant_of(&self, namespace: u32) -> u32 {
        let entry = self.namespaces.get(namespace);
        entry.map_or(u32::MAX, |entry| entry.tenant)
    }

    /// The namespace of a number.
    pub(super) fn get(&self, number: u32) -> Option<&Arc<Namespace>> {
        Some(&self.namespaces.get(number)?.namespace)
    }

    /// The namespaces with their numbers, from one number on.
    pub(super) fn from(&self, from: u32) -> impl Iterator<Item = (u32, &Arc<Namespace>)> {
        let numbers = from..self.namespaces.entries.len() as u32;
        numbers.filter_map(|number| Some((number, self.get(number)?)))
    }

    /// The namespaces' numbers and users.
    pub(super) fn users(&self) -> impl Iterator<Item = (u32, u64)> {
        let entries = self.namespaces.entries.iter().zip(0..);
        entries.filter_map(|(entry, number)| Some((number, entry.as_ref()?.users)))
    }

    /// How many namespaces have objects.
    pub(super) fn len(&self) -> usize {
        self.namespaces.len()
    }

    /// How many model names they have.
    pub(super) fn models_len(&self) -> usize {
        self.models.len()
    }

    pub(super) fn bookkeeping_bytes(&self) -> usize {
        self.models.bookkeeping_bytes()
            + self.tenants.bookkeeping_bytes()
            + self.namespaces.bookkeeping_bytes()
            + self.len() * (size_of::<Namespace>() + SHARED_COUNTERS)
            + self.name_bytes
    }
}
