//! A backend that does as a test says.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvtier_core::{ChunkHash, ObjectKey};
use kvtier_l2::{
    Adapter, BoxFuture, Buffer, Capabilities, ErrorKind, L2Error, ListPage, Listed, LoadItem,
    Loaded, ObjectSpec, Recovered, StoreItem, Stored,
};
use kvtier_memory::{Arena, ArenaKind, Extent};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

/// Bytes it takes beyond those of the object, as a trailer would.
pub const OVERHEAD: u64 = 16;

/// An object's key, its bytes, and when it was used.
type Object = (ObjectKey, Vec<u8>, u64);

#[derive(Default)]
pub struct Memory {
    pub objects: Mutex<BTreeMap<String, Object>>,
    /// Keys that can be neither stored nor loaded nor deleted.
    pub refused: Mutex<HashSet<String>>,
    pub deleted: Mutex<Vec<ObjectKey>>,
    /// How deletes fail, all of them.
    pub no_delete: Mutex<Option<ErrorKind>>,
    /// Permits to delete, and to store; nobody needs one if there is none of them.
    pub delete_gate: Option<Semaphore>,
    pub store_gate: Option<Semaphore>,
    /// Stores are done and not answered in time.
    pub late: AtomicBool,
    pub free: AtomicU64,
    pub bounded: AtomicBool,
    /// How the question for room fails.
    pub no_room_told: Mutex<Option<ErrorKind>>,
    /// Bytes more than foreseen.
    pub surprise: AtomicU64,
    /// The most bytes that each cache salt has had after a store.
    pub most: Mutex<BTreeMap<String, u64>>,
    pub lookups: AtomicU64,
    pub stores: AtomicU64,
    pub shared: bool,
    pub read_only: bool,
    /// Permits to end `recover`; none at first.
    pub recovery: Option<Semaphore>,
    /// How each `recover` fails when it has told what is there; `None` is a panic.
    pub recoveries: Mutex<VecDeque<Option<ErrorKind>>>,
}

fn name(key: &ObjectKey) -> String {
    format!("{key:?}")
}

impl Memory {
    pub fn shared() -> Self {
        Self {
            shared: true,
            ..Self::default()
        }
    }

    /// As if another process had stored it, or this one before a restart.
    pub fn put(&self, key: &ObjectKey, len: usize, used_at: u64) {
        let bytes = vec![7; len];
        self.objects
            .lock()
            .insert(name(key), (key.clone(), bytes, used_at));
    }

    pub fn has(&self, key: &ObjectKey) -> bool {
        self.objects.lock().contains_key(&name(key))
    }

    pub fn bytes(&self) -> u64 {
        let objects = self.objects.lock();
        objects.values().map(|object| size(&object.1)).sum()
    }

    pub fn bytes_of(&self, salt: &str) -> u64 {
        let objects = self.objects.lock();
        let of_it = objects
            .values()
            .filter(|object| &**object.0.cache_salt() == salt);
        of_it.map(|object| size(&object.1)).sum()
    }

    pub fn refuse(&self, key: &ObjectKey) {
        self.refused.lock().insert(name(key));
    }
}

fn size(bytes: &[u8]) -> u64 {
    bytes.len() as u64 + OVERHEAD
}

impl Adapter for Memory {
    fn kind(&self) -> &'static str {
        "memory"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            delete: true,
            list: self.recovery.is_some(),
            shared: self.shared,
            verifies: true,
            read_only: self.read_only,
        }
    }

    fn size_of(&self, len: u64) -> u64 {
        len + OVERHEAD
    }

    fn free_bytes(&self) -> BoxFuture<'_, Result<Option<u64>, L2Error>> {
        Box::pin(async move {
            if let Some(kind) = *self.no_room_told.lock() {
                return Err(L2Error::new(kind, "as the test says"));
            }
            let is_bounded = self.bounded.load(Ordering::Relaxed);
            Ok(is_bounded.then(|| self.free.load(Ordering::Relaxed)))
        })
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        Box::pin(async move {
            let store = |item: StoreItem| {
                self.stores.fetch_add(1, Ordering::Relaxed);
                let key = item.object.key;
                if self.refused.lock().contains(&name(&key)) {
                    return Err(L2Error::new(ErrorKind::Refused, "as the test says"));
                }
                let mut bytes = Vec::new();
                item.from.read_into(0, item.object.len, &mut bytes).unwrap();
                let written = size(&bytes) + self.surprise.load(Ordering::Relaxed);
                let salt = key.cache_salt().to_string();
                self.objects.lock().insert(name(&key), (key, bytes, 0));
                let now = self.bytes_of(&salt);
                let mut most = self.most.lock();
                let most = most.entry(salt).or_default();
                *most = now.max(*most);
                if self.late.load(Ordering::Relaxed) {
                    return Err(L2Error::new(ErrorKind::Deadline, "as the test says"));
                }
                Ok(Stored::Written(written))
            };
            if let Some(gate) = &self.store_gate {
                gate.acquire().await.unwrap().forget();
            }
            batch.into_iter().map(store).collect()
        })
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        Box::pin(async move {
            self.lookups
                .fetch_add(batch.len() as u64, Ordering::Relaxed);
            let objects = self.objects.lock();
            let find = |object: &ObjectSpec| Some(size(&objects.get(&name(&object.key))?.1));
            Ok(batch.iter().map(find).collect())
        })
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        Box::pin(async move {
            let (objects, refused) = (self.objects.lock(), self.refused.lock());
            let load = |item: LoadItem| match objects.get(&name(&item.object.key)) {
                Some(_) if refused.contains(&name(&item.object.key)) => {
                    Err(L2Error::new(ErrorKind::Refused, "as the test says"))
                }
                None => Err(L2Error::new(ErrorKind::NotFound, "gone")),
                Some((_, bytes, _)) if bytes.len() as u64 != item.object.len => {
                    Err(L2Error::new(ErrorKind::Corrupt, "wrong length"))
                }
                Some((_, bytes, _)) => {
                    item.to.write(0, bytes).unwrap();
                    Ok(Loaded { verified: true })
                }
            };
            batch.into_iter().map(load).collect()
        })
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        Box::pin(async move {
            if let Some(gate) = &self.delete_gate {
                gate.acquire().await.unwrap().forget();
            }
            if let Some(kind) = *self.no_delete.lock() {
                let error = || Err(L2Error::new(kind, "as the test says"));
                return keys.iter().map(|_| error()).collect();
            }
            let delete = |key: &ObjectKey| match self.refused.lock().contains(&name(key)) {
                true => Err(L2Error::new(ErrorKind::Refused, "as the test says")),
                false => Ok(self.objects.lock().remove(&name(key)).is_some()),
            };
            let results = keys.iter().map(delete).collect();
            self.deleted.lock().extend(keys);
            results
        })
    }

    fn list(&self, _: Option<String>, _: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        Box::pin(async { Err(L2Error::new(ErrorKind::Unsupported, "no listing")) })
    }

    fn recover<'a>(
        &'a self,
        found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
        Box::pin(async move {
            let listed: Vec<_> = self
                .objects
                .lock()
                .values()
                .map(|(key, bytes, used_at)| Listed {
                    key: key.clone(),
                    bytes: size(bytes),
                    used_at: *used_at,
                })
                .collect();
            let recovered = Recovered {
                objects: listed.len() as u64,
                bytes: listed.iter().map(|object| object.bytes).sum(),
                ..Recovered::default()
            };
            found(listed);
            match self.recoveries.lock().pop_front() {
                Some(Some(kind)) => return Err(L2Error::new(kind, "as the test says")),
                Some(None) => panic!("as the test says"),
                None => {}
            }
            if let Some(gate) = &self.recovery {
                let _ = gate.acquire().await;
            }
            Ok(recovered)
        })
    }

    fn status(&self) -> Value {
        json!({ "is_healthy": true, "type": "memory" })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

/// Memory of L1 for the objects of a test.
pub struct Bytes(Arc<Arena>);

impl Bytes {
    pub fn new() -> Self {
        Self(Arc::new(
            Arena::create(ArenaKind::Anonymous, 1 << 20).unwrap(),
        ))
    }

    pub fn buffer(&self, len: u64) -> Buffer {
        Buffer::new(Arc::clone(&self.0), Extent::new(0, len), Arc::new(()))
    }

    pub fn to_store(&self, key: &ObjectKey, len: u64) -> StoreItem {
        StoreItem {
            object: spec(key, len),
            from: self.buffer(len),
        }
    }

    pub fn to_load(&self, key: &ObjectKey, len: u64) -> LoadItem {
        LoadItem {
            object: spec(key, len),
            to: self.buffer(len),
        }
    }
}

pub fn spec(key: &ObjectKey, len: u64) -> ObjectSpec {
    ObjectSpec {
        key: key.clone(),
        len,
        layout: 1,
    }
}

pub fn key(number: u8, salt: &str) -> ObjectKey {
    ObjectKey::new(ChunkHash([number; 32]), "some/model", 0x0100_0100, 0, salt).unwrap()
}
