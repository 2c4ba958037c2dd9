//! Requests without bytes of objects: lookups, deletes, listings, free space.

use std::sync::Arc;

use kvtier_core::object_key::{KeyShape, ObjectKey};
use serde::de::DeserializeOwned;
use tokio::task::JoinSet;

use super::message::{self, Deleted, MAX_BATCH, MAX_CURSOR, ObjectResult, Request};
use super::metadata;
use super::session::{ProcessConnection, RequestClass};
use super::{ProcessTier, name_of};
use kvtier_l2::{
    BoxFuture, ErrorKind, L2Error, ListPage, Listed, ObjectSpec, Recovered, recover_pages,
};

/// Bytes of keys per request: a fraction of a frame, as JSON may write a character by six.
const MAX_KEYS_BYTES: usize = 512 << 10;

/// What is asked about keys.
#[derive(Clone, Copy)]
enum Question {
    Lookup,
    Delete,
}

impl Question {
    fn name(self) -> &'static str {
        match self {
            Self::Lookup => "lookup",
            Self::Delete => "delete",
        }
    }
}

/// Requests about keys to one connection of a tier.
pub(super) struct KeyRequests<'a> {
    pub(super) tier: &'a ProcessTier,
    pub(super) session: Arc<ProcessConnection>,
}

impl KeyRequests<'_> {
    /// Returns the bytes at the tier per object that can be loaded.
    pub(super) async fn lookup(&self, batch: Vec<ObjectSpec>) -> Result<Vec<Option<u64>>, L2Error> {
        let names = batch.iter().map(|object| name_of(&object.key)).collect();
        let entries = self.ask::<Option<ObjectResult>>(Question::Lookup, names);
        let mut found = vec![None; batch.len()];
        for (number, entry) in entries.await? {
            if let (Some(object), Some(place)) = (batch.get(number), found.get_mut(number)) {
                let is_there = match entry {
                    Some(entry) => self.is_loadable(object, &entry)?,
                    None => false,
                };
                let bytes = object
                    .len
                    .saturating_add(self.session.welcome.overhead_bytes);
                *place = is_there.then_some(bytes);
            }
        }
        Ok(found)
    }

    fn is_loadable(&self, object: &ObjectSpec, entry: &ObjectResult) -> Result<bool, L2Error> {
        if let Some(error) = entry.failure("lookup") {
            return match error.kind() {
                ErrorKind::Busy | ErrorKind::Unavailable => {
                    Err(self.tier.link.error(error.kind(), &error.to_string()))
                }
                _ => Ok(false),
            };
        }
        if entry.len != Some(object.len) {
            return Ok(false);
        }
        let metadata = metadata::of(entry.meta(), object);
        let needs_layout = self.tier.needs_layout();
        Ok(self.tier.counters.is_loadable(metadata, needs_layout))
    }

    pub(super) async fn delete(
        &self,
        keys: Vec<ObjectKey>,
    ) -> Result<Vec<Result<bool, L2Error>>, L2Error> {
        if !self.session.welcome.features.delete {
            return Err(self.unsupported("delete"));
        }
        let names = keys.iter().map(name_of).collect();
        let deleted = self.ask::<Deleted>(Question::Delete, names);
        // One that is too long for the tier was never there.
        let mut results: Vec<_> = keys.iter().map(|_| Ok(false)).collect();
        for (number, deleted) in deleted.await? {
            let result = match deleted {
                Deleted::Was(was) => Ok(was),
                Deleted::Failed(entry) => match entry.failure("delete") {
                    Some(error) if error.kind() == ErrorKind::NotFound => Ok(false),
                    Some(error) => Err(self.tier.link.error(error.kind(), &error.to_string())),
                    None => {
                        let what = "delete: a result is neither true, false nor an error";
                        Err(self.tier.link.error(ErrorKind::Unavailable, what))
                    }
                },
            };
            if let Some(place) = results.get_mut(number) {
                *place = result;
            }
        }
        Ok(results)
    }

    /// Asks about keys, in as few requests as possible, all at once. Returns results by number, in any order; keys that are too
    /// long for the tier have none.
    async fn ask<T: DeserializeOwned + Send + 'static>(
        &self,
        question: Question,
        names: Vec<String>,
    ) -> Result<Vec<(usize, T)>, L2Error> {
        let mut groups: Vec<(usize, Vec<(usize, String)>)> = Vec::new();
        for (number, name) in names.into_iter().enumerate() {
            if self.tier.check_name(&self.session.welcome, &name).is_err() {
                continue;
            }
            match groups.last_mut() {
                Some((bytes, group))
                    if group.len() < self.session.welcome.max_batch
                        && *bytes + name.len() <= MAX_KEYS_BYTES =>
                {
                    *bytes += name.len();
                    group.push((number, name));
                }
                _ => groups.push((name.len(), vec![(number, name)])),
            }
        }
        let mut tasks = JoinSet::new();
        for (_, group) in groups {
            let session = Arc::clone(&self.session);
            tasks.spawn(async move {
                let permit = session.permit(RequestClass::Keys).await?;
                let keys: Vec<_> = group.iter().map(|(_, name)| &**name).collect();
                let request = match question {
                    Question::Lookup => Request::Lookup { keys: &keys },
                    Question::Delete => Request::Delete { keys: &keys },
                };
                let answered = session.call(&request, permit, None).await?;
                let results = message::results::<T>(question.name(), &answered.body, keys.len());
                let results = results.map_err(|what| session.violate(what))?;
                let results = results.map_err(|error| session.named(&error))?;
                let numbers = group.iter().map(|(number, _)| *number);
                Ok::<_, L2Error>(numbers.zip(results).collect::<Vec<_>>())
            });
        }
        let mut all = Vec::new();
        while let Some(ended) = tasks.join_next().await {
            let lost = |_| {
                self.tier
                    .link
                    .error(ErrorKind::Unavailable, "the call has ended early")
            };
            let part = ended.map_err(lost)?;
            all.extend(part?);
        }
        Ok(all)
    }

    /// A page of a listing, and the number of other objects in it.
    pub(super) async fn page(
        &self,
        from: Option<&str>,
        limit: usize,
    ) -> Result<(ListPage, u64), L2Error> {
        if !self.session.welcome.features.list {
            return Err(self.unsupported("list"));
        }
        if from.is_some_and(|from| from.len() > MAX_CURSOR) {
            let what = "not a position of a listing; give one that it returned";
            return Err(self.tier.link.error(ErrorKind::Refused, what));
        }
        let request = Request::List {
            cursor: from,
            limit: limit.clamp(1, MAX_BATCH),
        };
        let permit = self.session.permit(RequestClass::Keys).await?;
        let answered = self.session.call(&request, permit, None).await?;
        let page = message::page(&answered.body).map_err(|what| self.session.violate(what))?;
        let page = page.map_err(|error| self.tier.link.error(error.kind(), &error.to_string()))?;
        if page.next.is_some() && page.next.as_deref() == from {
            return Err(self
                .tier
                .link
                .error(ErrorKind::Unavailable, "list: the tier repeats a page"));
        }
        let (mut objects, mut foreign) = (Vec::new(), 0);
        for entry in page.objects {
            // Another spelling of the same object is not where the object is looked for.
            let key = ObjectKey::parse_name(&entry.key, Some(KeyShape::Grouped)).ok();
            match key.filter(|key| name_of(key) == entry.key) {
                Some(key) => objects.push(Listed {
                    key,
                    bytes: entry
                        .len
                        .saturating_add(self.session.welcome.overhead_bytes),
                    used_at: entry.used_at.unwrap_or(0),
                }),
                None => foreign += 1,
            }
        }
        let page = ListPage {
            objects,
            next: page.next,
        };
        Ok((page, foreign))
    }

    /// Passes all objects to `found`, until that returns false. A tier that cannot list has none to pass.
    pub(super) async fn recover(
        &self,
        found: &(dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> Result<Recovered, L2Error> {
        if !self.session.welcome.features.list {
            return Ok(Recovered::default());
        }
        let page = |from: Option<String>| -> BoxFuture<'_, _> {
            Box::pin(async move { self.page(from.as_deref(), MAX_BATCH).await })
        };
        let circles = || {
            let what = "list: the tier goes round in circles";
            self.tier.link.error(ErrorKind::Unavailable, what)
        };
        recover_pages(page, found, circles).await
    }

    pub(super) async fn free_bytes(&self) -> Result<Option<u64>, L2Error> {
        if !self.session.welcome.features.free_bytes {
            return Ok(None);
        }
        let permit = self.session.permit(RequestClass::Keys).await?;
        let answered = self.session.call(&Request::FreeBytes, permit, None).await?;
        let free =
            message::free_bytes(&answered.body).map_err(|what| self.session.violate(what))?;
        free.map_err(|error| self.tier.link.error(error.kind(), &error.to_string()))
    }

    fn unsupported(&self, what: &str) -> L2Error {
        let what = format!("{what}: the tier cannot do that");
        self.tier.link.error(ErrorKind::Unsupported, &what)
    }
}
