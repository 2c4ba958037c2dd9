//! Prefetch jobs: a prompt is loaded into L1 before a request asks for it.
//!
//! The mutex guards the table of jobs; only reads and writes of the table run under it, and no other
//! lock is acquired inside.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use kvtier_common::sync::Mutex;
use kvtier_core::cache::{ChunkTokens, Counted};
use kvtier_core::object_key::{KeyError, KeyScope, MAX_WORLD_SIZE, check_cache_salt};

use super::super::context::Context;
use super::super::instances::{Unserved, rows};
use super::super::lookups::{self, Lookups};
use kvtier_store::tiers::{L2, PrefetchRequest};

/// Most tokens of a prompt.
pub(super) const MAX_TOKENS: usize = 1_000_000;

/// Prefetches that are running or queued.
const MAX_PENDING: usize = 16;

/// Results that are remembered.
const MAX_RESULTS: usize = 1024;

/// Time for which a result is remembered.
const RESULT_TTL: Duration = Duration::from_secs(600);

/// Why no job was started.
#[derive(Debug, thiserror::Error)]
pub enum PrefetchError {
    /// Nothing of the model's workers is served.
    #[error("nothing of model_name='{model_name}' is served: {}", unserved.name())]
    NotServed {
        /// Model name asked for.
        model_name: String,
        /// Why.
        unserved: Unserved,
    },
    /// No worker of the model is registered.
    #[error(
        "no layout registered for model_name='{model_name}' world_size={world_size}; the model has not allocated KV \
         cache on this node yet"
    )]
    NoLayout {
        /// Model name asked for.
        model_name: String,
        /// World size asked for.
        world_size: i64,
    },
    /// No worker of the model has this chunk size, or none was asked for and they have several.
    #[error(
        "chunk_size is {}; allowed for model_name='{model_name}': {}, the chunk sizes of its workers",
        asked.map_or_else(|| "left out".to_owned(), |asked| asked.to_string()),
        sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
    )]
    ChunkSize {
        /// Model name asked for.
        model_name: String,
        /// Chunk size asked for; `None` if it was left out.
        asked: Option<u32>,
        /// Chunk sizes of the model's workers.
        sizes: BTreeSet<u64>,
    },
    /// No tier below L1 is configured.
    #[error("no L2 adapters configured")]
    NoTiers,
    /// No request named the session, or it is forgotten by now.
    #[error(
        "session: {0:?} is not remembered of the tenant that cache_salt names; allowed: a name that a request of it had lately, since the start"
    )]
    UnknownSession(String),
    /// Names that no object can have.
    #[error("{0}")]
    Key(#[from] KeyError),
    /// The prompt is too long.
    #[error("too many token_ids in a single request (limit={MAX_TOKENS}, got={0})")]
    TooManyTokens(usize),
    /// Too many prefetches are pending.
    #[error(
        "{MAX_PENDING} prefetches are pending, which is the limit; try again when one of them is completed"
    )]
    TooManyPending,
}

/// State of a prefetch job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefetchJob {
    /// Queued or running.
    Pending,
    /// Completed, with this result.
    Done(PrefetchResult),
}

/// Result of a prefetch job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefetchResult {
    /// Objects of the prompt in L1 that a lookup would find.
    pub found_keys: usize,
    /// Objects that a lookup would find if all of it were there.
    pub total_keys: usize,
    /// Chunks of the prefix that L1 has.
    pub found_chunks: usize,
    /// Objects that were loaded for it.
    pub loaded_keys: usize,
}

/// Prefetch jobs, as operators start and watch them.
pub struct PrefetchJobs {
    context: Arc<Context>,
    lookups: Arc<Lookups>,
    table: Arc<PrefetchTable>,
}

impl PrefetchJobs {
    pub(super) fn new(context: &Arc<Context>, lookups: &Arc<Lookups>) -> Self {
        Self {
            context: Arc::clone(context),
            lookups: Arc::clone(lookups),
            table: Arc::default(),
        }
    }

    /// Starts to load a prompt; returns the id of the job and the number of chunks, or nothing if there is no whole chunk.
    /// `chunk_size` is in tokens; it may be left out if all workers of the model have the same.
    ///
    /// # Errors
    /// See [`PrefetchError`].
    pub fn start(
        &self,
        model_name: &str,
        world_size: i64,
        cache_salt: &str,
        token_ids: &[u32],
        chunk_size: Option<u32>,
    ) -> Result<Option<(String, usize)>, PrefetchError> {
        let workers = u32::try_from(world_size).ok();
        let workers = workers.filter(|workers| (1..=MAX_WORLD_SIZE).contains(workers));
        let instances = &self.context.instances;
        let model = Arc::from(model_name);
        let sizes = workers
            .map(|workers| instances.chunk_sizes(&model, workers))
            .unwrap_or_default();
        let chosen = match chunk_size {
            Some(asked) => sizes.get(&asked.into()),
            None => sizes.first().filter(|_| sizes.len() == 1),
        };
        if chosen.is_none() && !sizes.is_empty() {
            return Err(PrefetchError::ChunkSize {
                model_name: model_name.into(),
                asked: chunk_size,
                sizes,
            });
        }
        let chunk_size = chosen.and_then(|size| NonZeroUsize::new(usize::try_from(*size).ok()?));
        let instances = workers.zip(chunk_size).and_then(|(workers, chunk_size)| {
            let found = instances.of_workers(&model, workers, 0..workers, chunk_size)?;
            Some((found, chunk_size))
        });
        let (Some(workers), Some((instances, chunk_size))) = (workers, instances) else {
            return Err(PrefetchError::NoLayout {
                model_name: model_name.into(),
                world_size,
            });
        };
        if let Some(unserved) = lookups::unserved(&instances) {
            return Err(PrefetchError::NotServed {
                model_name: model_name.into(),
                unserved,
            });
        }
        let l2 = self.context.l2.as_ref().ok_or(PrefetchError::NoTiers)?;
        check_cache_salt(cache_salt)?;
        let salt = self.context.salts.of_operator(cache_salt);
        let scope = KeyScope::new(model_name, &salt, workers, None)?;
        if token_ids.len() > MAX_TOKENS {
            return Err(PrefetchError::TooManyTokens(token_ids.len()));
        }
        if token_ids.len() < chunk_size.get() {
            return Ok(None);
        }
        let hasher = self.lookups.prompts.hasher();
        let hashes = hasher.hash_chunks(chunk_size, token_ids);
        let tokens = ChunkTokens {
            parent: None,
            tokens: token_ids[..hashes.len() * chunk_size.get()].into(),
        };
        let request = PrefetchRequest {
            rows: rows(&scope, &instances),
            scope,
            hashes: hashes.into(),
            is_object_keys: false,
            tokens: Some(Arc::new(tokens)),
            counted: Counted::ALL,
            span: None,
        };
        self.spawn(l2, request).map(Some)
    }

    /// Starts to load the last prompt of an agent's session, as [`PrefetchJobs::start`] does. It is announced to no subscriber of
    /// events, since its tokens are not known.
    ///
    /// # Errors
    /// See [`PrefetchError`].
    pub fn start_session(
        &self,
        cache_salt: &str,
        session: &str,
    ) -> Result<(String, usize), PrefetchError> {
        let l2 = self.context.l2.as_ref().ok_or(PrefetchError::NoTiers)?;
        let salt = self.context.salts.of_operator(cache_salt);
        let prompt = self.context.sessions.recall(&salt, session);
        let prompt = prompt.ok_or_else(|| PrefetchError::UnknownSession(session.into()))?;
        let rows = self.context.rows(&prompt.scope, prompt.chunk_size);
        if rows.is_empty() {
            return Err(PrefetchError::NoLayout {
                model_name: prompt.scope.model_name().to_string(),
                world_size: prompt.scope.world_size().into(),
            });
        }
        let request = PrefetchRequest {
            rows,
            scope: prompt.scope,
            hashes: prompt.hashes,
            is_object_keys: false,
            tokens: None,
            counted: Counted::ALL,
            span: None,
        };
        let begun = self.spawn(l2, request)?;
        self.context.metrics.session_action("prefetch");
        Ok(begun)
    }

    /// Enters a job and runs it in its turn; returns its id and the number of chunks.
    fn spawn(
        &self,
        l2: &Arc<L2>,
        request: PrefetchRequest,
    ) -> Result<(String, usize), PrefetchError> {
        let entry = self.table.enter(self.context.now())?;
        let begun = (entry.id.clone(), request.hashes.len());
        let (l2, clock) = (Arc::clone(l2), Arc::clone(&self.context.clock));
        let request = Arc::new(request);
        let handle = l2.handle().clone();
        handle.spawn(async move {
            let all = Arc::clone(&entry.all);
            let _turn = all.turn.lock().await;
            let result = load(&l2, &request).await;
            tracing::debug!(?result, "a prefetch job has ended");
            entry.done(clock.now(), result);
        });
        Ok(begun)
    }

    /// The state of a job, until ten minutes after its end.
    pub fn get(&self, id: &str) -> Option<PrefetchJob> {
        let mut jobs = self.table.jobs.lock();
        jobs.forget(self.context.now());
        jobs.by_id.get(id).copied()
    }
}

/// All prefetch jobs that are known, shared with the tasks that load.
#[derive(Default)]
struct PrefetchTable {
    jobs: Mutex<KnownJobs>,
    /// Held by the job that runs: one at a time, so that lookups of engines are not delayed for long.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct KnownJobs {
    by_id: HashMap<String, PrefetchJob>,
    /// Jobs that have ended and the times of their ends, oldest first.
    done: VecDeque<(Duration, String)>,
}

impl KnownJobs {
    fn forget(&mut self, now: Duration) {
        while let Some((at, _)) = self.done.front()
            && (self.done.len() > MAX_RESULTS || now.saturating_sub(*at) > RESULT_TTL)
        {
            if let Some((_, id)) = self.done.pop_front() {
                self.by_id.remove(&id);
            }
        }
    }
}

/// A job in the table; one that is dropped without a result is removed.
struct PrefetchJobRow {
    all: Arc<PrefetchTable>,
    id: String,
}

impl PrefetchJobRow {
    fn done(self, now: Duration, result: PrefetchResult) {
        let mut jobs = self.all.jobs.lock();
        if let Some(state) = jobs.by_id.get_mut(&self.id) {
            *state = PrefetchJob::Done(result);
            jobs.done.push_back((now, self.id.clone()));
            jobs.forget(now);
        }
    }
}

impl Drop for PrefetchJobRow {
    fn drop(&mut self) {
        let mut jobs = self.all.jobs.lock();
        if jobs.by_id.get(&self.id) == Some(&PrefetchJob::Pending) {
            jobs.by_id.remove(&self.id);
        }
    }
}

impl PrefetchTable {
    fn enter(self: &Arc<Self>, now: Duration) -> Result<PrefetchJobRow, PrefetchError> {
        let mut jobs = self.jobs.lock();
        jobs.forget(now);
        if jobs.by_id.len() - jobs.done.len() >= MAX_PENDING {
            return Err(PrefetchError::TooManyPending);
        }
        let id = format!("{:016x}{:016x}", random(), random());
        jobs.by_id.insert(id.clone(), PrefetchJob::Pending);
        Ok(PrefetchJobRow {
            all: Arc::clone(self),
            id,
        })
    }
}

/// Names only have to differ.
fn random() -> u64 {
    RandomState::new().hash_one(0)
}

/// Loads a prompt. A request's prefetch has a deadline, since the request waits for it. No request waits for this one,
/// so it continues while objects arrive; those already in L1 are held meanwhile, so that they are not evicted for the
/// rest.
async fn load(l2: &Arc<L2>, request: &Arc<PrefetchRequest>) -> PrefetchResult {
    let chunks = request.hashes.len();
    let mut found = l2.prefetch(request, || false).await;
    let mut loaded_keys = found.loaded.len();
    while !found.loaded.is_empty() && found.lookup.hit_chunks < chunks {
        let more = l2.prefetch(request, || false).await;
        loaded_keys += more.loaded.len();
        if more.lookup.hit_chunks <= found.lookup.hit_chunks {
            break;
        }
        found = more;
    }
    let needed = |window: Option<u32>| window.map_or(chunks, |window| chunks.min(window as usize));
    PrefetchResult {
        found_keys: found.lookup.lease.held(),
        total_keys: request.rows.iter().map(|row| needed(row.window)).sum(),
        found_chunks: found.lookup.hit_chunks,
        loaded_keys,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    #[test]
    fn pending_jobs_have_a_limit_and_dropped_ones_are_removed() {
        let all = Arc::new(PrefetchTable::default());
        let mut pending: Vec<_> = (0..MAX_PENDING)
            .map(|_| all.enter(NOW).expect("there is capacity"))
            .collect();
        let refused = all.enter(NOW).map(|entry| entry.id.clone()).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "16 prefetches are pending, which is the limit; try again when one of them is completed"
        );
        let abandoned = pending.remove(0);
        let id = abandoned.id.clone();
        drop(abandoned);
        assert!(!all.jobs.lock().by_id.contains_key(&id));
        // One that is completed frees its slot too, and is still known.
        let done = pending.remove(0);
        let id = done.id.clone();
        done.done(NOW, PrefetchResult::default());
        assert_eq!(
            all.jobs.lock().by_id[&id],
            PrefetchJob::Done(PrefetchResult::default())
        );
        pending.extend((0..2).map(|_| all.enter(NOW).expect("there is capacity")));
        assert!(all.enter(NOW).is_err());
    }

    #[test]
    fn results_are_kept_up_to_number_and_age() {
        let all = Arc::new(PrefetchTable::default());
        let mut ids = Vec::new();
        for _ in 0..MAX_RESULTS + 10 {
            let entry = all.enter(NOW).expect("there is capacity");
            ids.push(entry.id.clone());
            entry.done(NOW, PrefetchResult::default());
        }
        let known = |id: &String| all.jobs.lock().by_id.contains_key(id);
        assert_eq!(ids.iter().filter(|id| known(id)).count(), MAX_RESULTS);
        assert!(!known(&ids[9]) && known(&ids[10]));
        all.jobs.lock().forget(NOW + RESULT_TTL);
        assert!(known(&ids[10]));
        all.jobs.lock().forget(NOW + RESULT_TTL + NOW);
        assert_eq!(all.jobs.lock().by_id.len(), 0);
    }
}
