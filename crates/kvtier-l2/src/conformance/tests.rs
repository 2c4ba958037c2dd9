//! Tests of the suite: adapters that break one obligation each, and the cases that detect it.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvtier_common::sync::Mutex;
use kvtier_core::object_key::ObjectKey;
use serde_json::Value;

use super::*;
use crate::adapter::{Capabilities, ListPage, Listed, Loaded, Recovered, Stored};
use crate::error::{ErrorKind, L2Error};
use crate::mock::{MemoryStore, Mock};
use crate::object::{LoadItem, ObjectSpec, StoreItem};
use crate::wrap::checksum::{ChecksumCache, Checksums};

/// Broken obligation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// Answers are given in the wrong order.
    Reversed,
    /// One bad item fails all.
    AllOrNothing,
    /// Another layout is loaded.
    LayoutBlind,
    /// Objects of tenants are the same.
    SaltBlind,
    /// A load answers before it has written.
    EarlyAnswer,
    /// A load writes to buffers after dropping their holds.
    LateWrite,
    /// A store reads from buffers after dropping their holds.
    LateRead,
    /// Bytes of an equal object count again.
    CountsTwice,
    /// Pages overlap.
    Overlap,
    /// A listing is cut off.
    OnePage,
    /// A recovery does not stop.
    Deaf,
    /// Nothing is there after closing it.
    Forgetful,
    /// Closing it does not wait.
    HastyClose,
    /// A delete tells nothing.
    BlindDelete,
    /// Bytes are not compared.
    Unchecked,
}

/// A mock with a fault, injected into its calls or its answers.
struct Broken {
    inner: Arc<Mock>,
    fault: Fault,
}

impl Broken {
    fn object(&self, mut object: ObjectSpec) -> ObjectSpec {
        match self.fault {
            Fault::LayoutBlind => object.layout = 0,
            Fault::SaltBlind => {
                let key = &object.key;
                let (hash, model) = (key.chunk_hash(), key.model_name().clone());
                let key = ObjectKey::new(hash, model, key.kv_rank(), key.object_group_id(), "");
                object.key = key.unwrap();
            }
            _ => {}
        }
        object
    }

    fn results<T>(&self, mut results: Vec<Result<T, L2Error>>) -> Vec<Result<T, L2Error>> {
        let bad = results
            .iter()
            .find_map(|result| result.as_ref().err().cloned());
        match (self.fault, bad) {
            (Fault::Reversed, _) => results.reverse(),
            (Fault::AllOrNothing, Some(error)) => {
                results
                    .iter_mut()
                    .for_each(|result| *result = Err(error.clone()));
            }
            _ => {}
        }
        results
    }
}

impl Adapter for Broken {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        let one = |item: StoreItem| StoreItem {
            object: self.object(item.object),
            from: item.from,
        };
        let batch: Vec<_> = batch.into_iter().map(one).collect();
        Box::pin(async move {
            if self.fault == Fault::LateRead {
                // The buffers outlive their holds, and are read once the holds are dropped.
                let late = batch.into_iter().map(|item| {
                    let from = crate::Buffer::new(
                        item.from.arena().clone(),
                        item.from.extent(),
                        Arc::new(()),
                    );
                    StoreItem {
                        object: item.object,
                        from,
                    }
                });
                let late: Vec<_> = late.collect();
                let inner = self.inner.clone();
                let work = tokio::spawn(async move {
                    tokio::task::yield_now().await;
                    inner.store(late).await
                });
                return work.await.unwrap();
            }
            let stored = self.results(self.inner.store(batch).await);
            let one = |stored: Stored| match self.fault {
                Fault::CountsTwice => Stored::Written(stored.bytes()),
                _ => stored,
            };
            stored.into_iter().map(|result| result.map(one)).collect()
        })
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        let batch = batch
            .into_iter()
            .map(|object| self.object(object))
            .collect();
        self.inner.lookup(batch)
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        let one = |item: LoadItem| LoadItem {
            object: self.object(item.object),
            to: item.to,
        };
        let batch: Vec<_> = batch.into_iter().map(one).collect();
        Box::pin(async move {
            let loose = |item: &LoadItem| LoadItem {
                object: item.object.clone(),
                to: crate::Buffer::new(item.to.arena().clone(), item.to.extent(), Arc::new(())),
            };
            match self.fault {
                Fault::EarlyAnswer => {
                    let objects = batch.iter().map(|item| item.object.clone()).collect();
                    let found = self.inner.lookup(objects).await.unwrap();
                    let inner = self.inner.clone();
                    tokio::spawn(async move { inner.load(batch).await });
                    let one = |there: Option<u64>| match there {
                        Some(_) => Ok(Loaded { verified: true }),
                        None => Err(L2Error::new(ErrorKind::NotFound, "missing")),
                    };
                    found.into_iter().map(one).collect()
                }
                Fault::LateWrite => {
                    let late: Vec<_> = batch.iter().map(loose).collect();
                    drop(batch);
                    let inner = self.inner.clone();
                    let work = tokio::spawn(async move {
                        for _ in 0..20 {
                            tokio::task::yield_now().await;
                        }
                        inner.load(late).await
                    });
                    work.await.unwrap()
                }
                _ => self.results(self.inner.load(batch).await),
            }
        })
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        Box::pin(async move {
            let deleted = self.results(self.inner.delete(keys).await);
            let one = |there: bool| there || self.fault == Fault::BlindDelete;
            deleted.into_iter().map(|result| result.map(one)).collect()
        })
    }

    fn list(&self, from: Option<String>, limit: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        Box::pin(async move {
            let mut page = self.inner.list(from.clone(), limit).await?;
            match self.fault {
                Fault::OnePage => page.next = None,
                Fault::Overlap if from.is_some() => {
                    let first = self.inner.list(None, 1).await?;
                    page.objects.extend(first.objects);
                }
                _ => {}
            }
            Ok(page)
        })
    }

    fn recover<'a>(
        &'a self,
        found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
        Box::pin(async move {
            if self.fault != Fault::Deaf {
                return self.inner.recover(found).await;
            }
            let each = |part: Vec<Listed>| {
                part.into_iter().for_each(|listed| {
                    found(vec![listed]);
                });
                true
            };
            self.inner.recover(&each).await
        })
    }

    fn status(&self) -> Value {
        self.inner.status()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            if self.fault != Fault::HastyClose {
                self.inner.close().await;
            }
        })
    }
}

/// A store behind a broken adapter.
struct Store {
    store: Mutex<Arc<MemoryStore>>,
    sums: Arc<ChecksumCache>,
    fault: Fault,
}

impl Store {
    fn new(fault: Fault) -> Self {
        Self {
            store: Mutex::new(Arc::new(MemoryStore::new(1 << 30))),
            sums: Arc::new(ChecksumCache::new(1 << 10)),
            fault,
        }
    }
}

impl Subject for Store {
    fn open(&self) -> BoxFuture<'_, Arc<dyn Adapter>> {
        let mut store = self.store.lock();
        if self.fault == Fault::Forgetful {
            *store = Arc::new(MemoryStore::new(1 << 30));
        }
        let inner = Arc::new(Mock::new(store.clone(), 1e11));
        let broken = Broken {
            inner,
            fault: self.fault,
        };
        // Without checksums, so that each fault is visible.
        if self.fault != Fault::None {
            return Box::pin(async move { Arc::new(broken) as _ });
        }
        let checked = Checksums::new(Arc::new(broken), self.sums.clone(), false);
        Box::pin(async move { Arc::new(checked) as _ })
    }

    fn damage(&self, key: &ObjectKey, how: Damage) -> bool {
        self.store.lock().damage(key, how)
    }
}

/// Returns the cases among these that detect the fault.
async fn found_by(fault: Fault, cases: &[&str]) -> BTreeSet<&'static str> {
    let report = check_some(|| Store::new(fault), |name| cases.contains(&name)).await;
    assert_eq!(
        report.cases().count(),
        cases.len(),
        "a case of {cases:?} is missing"
    );
    report.failed().map(|(name, _)| name).collect()
}

#[tokio::test]
async fn each_fault_is_found_by_its_cases() {
    let expected: &[(Fault, &[&str])] = &[
        (Fault::Reversed, &["round_trip"]),
        (
            Fault::AllOrNothing,
            &["round_trip", "a_bad_item_fails_alone"],
        ),
        (Fault::LayoutBlind, &["other_layouts_are_never_ok"]),
        (
            Fault::SaltBlind,
            &[
                "tenants_and_models_are_apart",
                "odd_keys_are_kept_or_refused",
            ],
        ),
        (Fault::EarlyAnswer, &["round_trip"]),
        (Fault::LateWrite, &["dropped_loads_release_their_buffers"]),
        (Fault::LateRead, &["dropped_stores_leave_all_or_nothing"]),
        (Fault::CountsTwice, &["bytes_agree_at_every_step"]),
        (Fault::Overlap, &["a_listing_in_pages_is_complete"]),
        (Fault::OnePage, &["a_listing_in_pages_is_complete"]),
        (Fault::Deaf, &["recovery_stops_when_requested"]),
        (
            Fault::Forgetful,
            &["reopens_what_was_stored", "recovers_what_was_stored"],
        ),
        (Fault::HastyClose, &["close_waits_for_work"]),
        (
            Fault::BlindDelete,
            &["round_trip", "same_key_twice_in_one_batch"],
        ),
        (
            Fault::Unchecked,
            &[
                "damaged_objects_are_never_ok",
                "damage_while_closed_is_never_ok",
            ],
        ),
    ];
    for (fault, cases) in expected {
        let found_by = found_by(*fault, cases).await;
        let expected: BTreeSet<_> = cases.iter().copied().collect();
        assert_eq!(found_by, expected, "{fault:?}");
        assert_eq!(
            self::found_by(Fault::None, cases).await.len(),
            0,
            "without it"
        );
    }
}

#[tokio::test]
async fn a_case_is_reported_by_its_name() {
    let make = || Store::new(Fault::OnePage);
    let chosen = ["round_trip", "a_listing_in_pages_is_complete"];
    let report = check_some(make, |name| chosen.contains(&name)).await;
    let failed: Vec<_> = report.failed().collect();
    assert_eq!(failed.len(), 1);
    assert_eq!(failed[0].0, "a_listing_in_pages_is_complete");
    let text = report.to_string();
    assert_eq!(
        text,
        format!(
            "ok      round_trip\nFAILED  a_listing_in_pages_is_complete: {}\n",
            failed[0].1
        )
    );
}

/// A part of a store that has objects of others.
struct SharedStore(Arc<MemoryStore>);

impl Subject for SharedStore {
    fn open(&self) -> BoxFuture<'_, Arc<dyn Adapter>> {
        let mock: Arc<dyn Adapter> = Arc::new(Mock::new(self.0.clone(), 1e11));
        let sums = Arc::new(ChecksumCache::new(1 << 10));
        let checked = Checksums::new(mock, sums, false);
        Box::pin(async move { Arc::new(checked) as _ })
    }
}

#[tokio::test]
async fn part_of_a_store_passes_and_is_cleaned() {
    let store = Arc::new(MemoryStore::new(1 << 30));
    let adapter = SharedStore(store.clone()).open().await;
    let memory = Memory::new(1 << 20);
    // Also one that another part could have.
    let others = [
        object(1, 4096),
        object_with(2, 4096, "other/org/model", "tenant"),
    ];
    for object in &others {
        let item = StoreItem {
            object: object.clone(),
            from: memory.filled(&content(object)),
        };
        assert!(adapter.store(vec![item]).await[0].is_ok());
    }
    let mut cleanups = Vec::new();
    let mut number = 0;
    let make = || {
        number += 1;
        let part = Scoped::new(SharedStore(store.clone()), &format!("part/{number}/"));
        cleanups.push(part.cleanup());
        part
    };
    // This mock forgets checksums when it is opened again.
    let chosen = |name: &str| {
        matches!(
            name,
            "round_trip"
                | "tenants_and_models_are_apart"
                | "odd_keys_are_kept_or_refused"
                | "a_listing_in_pages_is_complete"
                | "bytes_agree_at_every_step"
                | "recovers_what_was_stored"
                | "recovery_stops_when_requested"
        )
    };
    let report = check_some(make, chosen).await;
    assert!(report.failed().next().is_none(), "\n{report}");
    for cleanup in cleanups {
        assert_eq!(cleanup.run(&*adapter).await, 0);
    }
    let left = adapter.list(None, 10_000).await.unwrap();
    let left: BTreeSet<_> = left.objects.into_iter().map(|listed| listed.key).collect();
    assert_eq!(left, others.map(|object| object.key).into());
}
