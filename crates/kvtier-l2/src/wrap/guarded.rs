//! An adapter with a guard around it.

use std::future::Future;
use std::sync::Arc;

use kvtier_core::object_key::ObjectKey;
use serde_json::{Map, Value};

use super::call::{Call, DeleteCall, FreeCall, ListCall, LoadCall, LookupCall, StoreCall};
use crate::adapter::{
    Adapter, BoxFuture, Capabilities, ListPage, Listed, Loaded, Recovered, Stored,
};
use crate::error::L2Error;
use crate::object::{LoadItem, ObjectSpec, StoreItem};

/// Behaviour around each call, whatever its operation.
pub(super) trait Guard: Send + Sync + 'static {
    /// Runs the call.
    fn run<C: Call>(
        &self,
        inner: &Arc<dyn Adapter>,
        call: C,
    ) -> impl Future<Output = C::Answer> + Send;

    /// Adds its part to the adapter's status.
    fn report(&self, status: &mut Map<String, Value>);

    /// Closes the adapter.
    fn close(&self, inner: &Arc<dyn Adapter>) -> impl Future<Output = ()> + Send {
        async move { inner.close().await }
    }
}

/// An adapter with a guard around its calls. A recovery is not guarded: it runs in the background without a deadline.
struct Guarded<G> {
    inner: Arc<dyn Adapter>,
    guard: G,
}

/// Returns `inner` with `guard` around its calls.
pub(super) fn around<G: Guard>(guard: G, inner: Arc<dyn Adapter>) -> Arc<dyn Adapter> {
    Arc::new(Guarded { inner, guard })
}

impl<G: Guard> Adapter for Guarded<G> {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        Box::pin(self.guard.run(&self.inner, StoreCall(batch)))
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        Box::pin(self.guard.run(&self.inner, LookupCall(batch)))
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        Box::pin(self.guard.run(&self.inner, LoadCall(batch)))
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        Box::pin(self.guard.run(&self.inner, DeleteCall(keys)))
    }

    fn list(&self, from: Option<String>, limit: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        Box::pin(self.guard.run(&self.inner, ListCall { from, limit }))
    }

    fn recover<'a>(
        &'a self,
        found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
        self.inner.recover(found)
    }

    fn size_of(&self, len: u64) -> u64 {
        self.inner.size_of(len)
    }

    fn free_bytes(&self) -> BoxFuture<'_, Result<Option<u64>, L2Error>> {
        Box::pin(self.guard.run(&self.inner, FreeCall))
    }

    fn check(&self) -> BoxFuture<'_, ()> {
        self.inner.check()
    }

    fn status(&self) -> Value {
        let mut status = self.inner.status();
        if let Some(status) = status.as_object_mut() {
            self.guard.report(status);
        }
        status
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.guard.close(&self.inner))
    }
}
