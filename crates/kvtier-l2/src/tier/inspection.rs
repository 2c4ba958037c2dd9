//! What a tier has and had, for people: nothing here leases, counts as a use or changes the index.

use std::sync::Arc;
use std::time::Duration;

use kvtier_core::cache::{Loss, Page};
use kvtier_core::{ChunkHash, Namespace};

use super::Tier;
use crate::error::L2Error;
use crate::object::ObjectSpec;

impl Tier {
    /// Whether the backend may have objects that the index lacks, so that a lookup asks it.
    pub fn may_have_more(&self) -> bool {
        self.adapter.capabilities().shared || self.is_recovering()
    }

    /// Whether the index has each of these objects.
    pub fn indexes(&self, namespace: &Namespace, hashes: &[ChunkHash]) -> Vec<bool> {
        self.index.contains(namespace, hashes)
    }

    /// Whether the backend has each of these objects.
    ///
    /// # Errors
    /// As [`Adapter::lookup`](crate::Adapter::lookup).
    pub async fn backend_has(&self, objects: Vec<ObjectSpec>) -> Result<Vec<bool>, L2Error> {
        let found = self.adapter.lookup(objects).await?;
        Ok(found.iter().map(Option::is_some).collect())
    }

    /// The last loss of each of these objects, as far as it is remembered; ask for all in one call.
    pub fn losses(&self, asked: &[(&Arc<Namespace>, &[ChunkHash])]) -> Vec<Vec<Option<Loss>>> {
        self.index.losses(asked)
    }

    /// How far back [`Tier::losses`] remembers; `None` if nothing was forgotten yet.
    pub fn losses_since(&self) -> Option<Duration> {
        self.index.losses_since()
    }

    /// The namespaces with objects in the index, at most `limit` of them; start with `from` 0.
    pub fn namespaces(&self, from: u32, limit: usize) -> Page<Arc<Namespace>> {
        self.index.namespaces(from, limit)
    }
}
