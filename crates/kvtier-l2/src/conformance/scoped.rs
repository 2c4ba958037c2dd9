//! A part of a backing store: its objects have a word of their own before the model's name. So the suite can run on a store
//! that has other objects, and clean up.
//!
//! The mutex guards what was stored.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvtier_common::sync::Mutex;
use kvtier_core::object_key::ObjectKey;
use serde_json::Value;

use super::Subject;
use crate::adapter::{
    Adapter, BoxFuture, Capabilities, ListPage, Listed, Loaded, Recovered, Stored, forward,
};
use crate::error::L2Error;
use crate::object::{LoadItem, ObjectSpec, StoreItem};

/// A word before models, and the keys that were stored with it.
#[derive(Debug)]
struct Scope {
    prefix: String,
    stored: Mutex<BTreeSet<ObjectKey>>,
}

impl Scope {
    fn with_model(key: &ObjectKey, model: String) -> ObjectKey {
        let (rank, group) = (key.kv_rank(), key.object_group_id());
        let salt = Arc::clone(key.cache_salt());
        let scoped = ObjectKey::new(key.chunk_hash(), model, rank, group, salt);
        scoped.expect("a valid key with a longer or shorter model")
    }

    fn inner(&self, key: &ObjectKey) -> ObjectKey {
        Self::with_model(key, format!("{}{}", self.prefix, key.model_name()))
    }

    fn object(&self, object: ObjectSpec) -> ObjectSpec {
        ObjectSpec {
            key: self.inner(&object.key),
            ..object
        }
    }

    /// Returns what is listed of this part.
    fn outer(&self, listed: Listed) -> Option<Listed> {
        let model = listed.key.model_name().strip_prefix(&*self.prefix)?;
        Some(Listed {
            key: Self::with_model(&listed.key, model.to_owned()),
            ..listed
        })
    }
}

/// A store that the suite uses a part of.
pub struct Scoped<S> {
    inner: S,
    scope: Arc<Scope>,
}

impl<S: Subject> Scoped<S> {
    /// Returns the part of `inner` whose models begin with `prefix`, which has no `@`.
    #[must_use]
    pub fn new(inner: S, prefix: &str) -> Self {
        Self {
            inner,
            scope: Arc::new(Scope {
                prefix: prefix.to_owned(),
                stored: Mutex::default(),
            }),
        }
    }

    /// Returns a handle that removes what is stored through this subject.
    #[must_use]
    pub fn cleanup(&self) -> Cleanup {
        Cleanup(Arc::clone(&self.scope))
    }
}

/// Removes what was stored in a part of a store.
#[derive(Debug)]
pub struct Cleanup(Arc<Scope>);

impl Cleanup {
    /// Deletes all of it. Returns how many objects are left since they could not be deleted.
    pub async fn run(self, adapter: &dyn Adapter) -> usize {
        let keys: Vec<_> = std::mem::take(&mut *self.0.stored.lock())
            .into_iter()
            .collect();
        if !adapter.capabilities().delete {
            return keys.len();
        }
        let deleted = adapter.delete(keys).await;
        deleted.iter().filter(|result| result.is_err()).count()
    }
}

impl<S: Subject> Subject for Scoped<S> {
    fn open(&self) -> BoxFuture<'_, Arc<dyn Adapter>> {
        Box::pin(async {
            let adapter: Arc<dyn Adapter> = Arc::new(ScopedAdapter {
                inner: self.inner.open().await,
                scope: Arc::clone(&self.scope),
            });
            adapter
        })
    }

    fn may_list_twice(&self) -> bool {
        self.inner.may_list_twice()
    }
}

struct ScopedAdapter {
    inner: Arc<dyn Adapter>,
    scope: Arc<Scope>,
}

impl Adapter for ScopedAdapter {
    forward!(
        kind,
        capabilities,
        size_of,
        free_bytes,
        check,
        prefer,
        status,
        close
    );

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        let scoped = |item: StoreItem| StoreItem {
            object: self.scope.object(item.object),
            from: item.from,
        };
        let batch: Vec<_> = batch.into_iter().map(scoped).collect();
        let keys = batch.iter().map(|item| item.object.key.clone());
        self.scope.stored.lock().extend(keys);
        self.inner.store(batch)
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        let batch = batch.into_iter().map(|object| self.scope.object(object));
        self.inner.lookup(batch.collect())
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        let scoped = |item: LoadItem| LoadItem {
            object: self.scope.object(item.object),
            to: item.to,
        };
        self.inner.load(batch.into_iter().map(scoped).collect())
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        let keys = keys.iter().map(|key| self.scope.inner(key));
        self.inner.delete(keys.collect())
    }

    fn list(&self, from: Option<String>, limit: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        Box::pin(async move {
            let page = self.inner.list(from, limit).await?;
            let objects = page.objects.into_iter();
            Ok(ListPage {
                objects: objects.filter_map(|one| self.scope.outer(one)).collect(),
                next: page.next,
            })
        })
    }

    fn recover<'a>(
        &'a self,
        found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
        Box::pin(async move {
            let own = Mutex::new(Recovered::default());
            let pass = |page: Vec<Listed>| {
                let page: Vec<_> = page
                    .into_iter()
                    .filter_map(|one| self.scope.outer(one))
                    .collect();
                let mut sums = own.lock();
                sums.objects += page.len() as u64;
                sums.bytes += page.iter().map(|one| one.bytes).sum::<u64>();
                drop(sums);
                // Of pages without own objects the suite knows nothing.
                page.is_empty() || found(page)
            };
            self.inner.recover(&pass).await?;
            Ok(own.into_inner())
        })
    }
}
