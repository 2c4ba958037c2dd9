//! Why a lookup misses: where each chunk of a prompt is, or what became of it.
//!
//! Nothing here counts as a use. What a chunk lacks in L1 and the tiers is looked for, in this order: losses that the caches
//! remember; other layouts, chunk sizes and world sizes; other models of the same tenant; other tenants, only for a caller
//! that may see them all. A caller that may not sees nothing of other tenants, and no step depends on them.

mod losses;
mod place;
mod resolve;
mod words;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use kvtier_common::error::Error;
use kvtier_core::cache::Loss;
use kvtier_core::object_key::{KeyError, KeyScope};
use kvtier_core::window::{ChunkBitmap, longest_prefix};
use kvtier_core::{ChunkHash, GroupRow, Namespace};
use kvtier_observe::api::{
    ExplainRequest, ExplainedLookup, Explanation, Load, PrefixMatch, RecentLookup,
};
use kvtier_store::tiers::Located;

use super::super::context::Context;
use super::super::lookups::{self, Lookups};
use super::prefetch_jobs::MAX_TOKENS;
use place::ExplainedPlace;
use resolve::Subject;

/// Precision of the time of a loss.
const TICK: Duration = Duration::from_millis(100);

/// Most objects of one prompt: its chunks, times object groups, ranks and layouts.
const MAX_OBJECTS: usize = 1 << 18;

/// Lookups of an answer.
const MAX_LOOKUPS: usize = 16;

/// Tenants that a caller may see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TenantView {
    /// The tenant that it names.
    One,
    /// All tenants.
    All,
}

/// Why there is no explanation.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// Names that no object can have.
    #[error("{0}")]
    Key(#[from] KeyError),
    /// A name that is too long, or one that the caller may not give.
    #[error("{0}")]
    Name(Error),
    /// The prompt is too long.
    #[error("too many token_ids in a single request (limit={MAX_TOKENS}, got={0})")]
    TooManyTokens(usize),
    /// The prompt has too many objects.
    #[error(
        "token_ids make {chunks} chunks of each of {rows} ranks and object groups; allowed: at most {MAX_OBJECTS} objects \
         together"
    )]
    TooManyObjects {
        /// Chunks of the prompt.
        chunks: usize,
        /// Objects per chunk.
        rows: usize,
    },
    /// A field must be given, or has a value that nothing has.
    #[error(
        "{field} is {}; allowed for model_name='{model_name}': {}",
        asked.as_deref().unwrap_or("left out"),
        allowed.join(", ")
    )]
    Choice {
        /// Name of the field.
        field: &'static str,
        /// Value of the field; `None` if it was left out.
        asked: Option<String>,
        /// Model name asked for.
        model_name: String,
        /// What is allowed.
        allowed: Vec<String>,
    },
}

/// Place of an object, or why it is missing.
#[derive(Debug, Clone, PartialEq)]
enum ChunkState {
    L1,
    /// Number of the tier that has the object.
    Tier(usize),
    Missing(Missing),
}

/// Why an object is missing.
#[derive(Debug, Clone, PartialEq)]
enum Missing {
    /// The place of this number lost or refused it.
    Lost(usize, Loss),
    /// Stored in another layout, which is this one.
    Layout(u64),
    Other(Other),
    NotAsked,
    NeverSeen,
}

/// How else a chunk is stored.
#[derive(Debug, Clone, PartialEq)]
enum Other {
    ChunkSize(usize),
    Model(Arc<str>),
    WorldSize(u32),
    Salt(Arc<str>),
}

/// A namespace that is searched for chunks, and their hashes there.
struct Search<'a> {
    other: Other,
    place: &'a ExplainedPlace<'a>,
    namespace: &'a Namespace,
    hashes: &'a [ChunkHash],
    chunk_size: usize,
}

/// Explanations of lookups, for operators and for the metrics.
pub struct Explanations {
    context: Arc<Context>,
    lookups: Arc<Lookups>,
}

impl Explanations {
    pub(super) fn new(context: &Arc<Context>, lookups: &Arc<Lookups>) -> Self {
        Self {
            context: Arc::clone(context),
            lookups: Arc::clone(lookups),
        }
    }

    /// Explains what a lookup of a prompt would find.
    ///
    /// # Errors
    /// See [`ExplainError`].
    pub fn explain(
        &self,
        request: &ExplainRequest,
        view: TenantView,
    ) -> Result<Explanation, ExplainError> {
        let places = self.places();
        let subject = Subject::resolve(&self.context, request, view, &places)?;
        let tokens = &request.token_ids;
        let hashes = self.hashes(&subject, tokens)?;
        let chunks = hashes.len();
        let in_l1 = contained(&subject, &places[0], &hashes);
        let located = self.locate(&subject, &hashes, &in_l1);
        let mut found = states(&in_l1, &located);
        let (hit_l1, hit) = match subject.refused {
            Some(_) => (0, 0),
            None => hits(&subject.rows, &found),
        };
        losses::find_losses(&subject, &places, &hashes, &mut found);
        find_layouts(&subject, &places, &hashes, &mut found);
        self.find_others(&subject, &places, &hashes, tokens, &mut found);
        mark_unasked(&located, &mut found);

        let tokens_of = |chunks: usize| (chunks * subject.chunk_size.get()) as u64;
        let tiers = &places[1..];
        let failed = located.failed.iter();
        let failed = failed.map(|(tier, error)| (tiers[*tier].name().to_owned(), error.clone()));
        let remembered = places.iter().map(|place| {
            let seconds = place.losses_since().map(|since| since.as_secs());
            (place.name().to_owned(), seconds)
        });
        let mut explanation = Explanation {
            summary: String::new(),
            model_name: subject.scope.model_name().to_string(),
            model_names: subject.names.iter().map(ToString::to_string).collect(),
            world_size: subject.scope.world_size(),
            chunk_size: tokens_of(1),
            tokens: tokens.len() as u64,
            chunks: chunks as u64,
            hit_tokens: tokens_of(hit),
            hit_tokens_l1: tokens_of(hit_l1),
            refused: subject.refused.map(str::to_owned),
            rows: words::rows(&subject, &places, &found),
            failed_tiers: failed.collect(),
            remembered_seconds: remembered.collect(),
            recent_lookups: self.recent_lookups(&subject, hashes.first()),
        };
        explanation.summary = words::summary(&explanation, subject.has_left);
        Ok(explanation)
    }

    /// Returns how much of a prompt a lookup would find, as far as L1 and the indexes of the tiers know: no backend is asked,
    /// and namespaces of other engines are not read, as an explanation does.
    ///
    /// # Errors
    /// See [`ExplainError`].
    pub(super) fn match_prefix(
        &self,
        request: &ExplainRequest,
        view: TenantView,
        load: Load,
    ) -> Result<PrefixMatch, ExplainError> {
        let subject = Subject::resolve(&self.context, request, view, &[])?;
        let hashes = self.hashes(&subject, &request.token_ids)?;
        let (mut hit_l1, mut hit) = (0, 0);
        if subject.refused.is_none() {
            let in_l1 = contained(&subject, &self.places()[0], &hashes);
            let located = self.indexed(&subject, &hashes, &in_l1);
            (hit_l1, hit) = hits(&subject.rows, &states(&in_l1, &located));
        }
        let chunk_size = subject.chunk_size.get();
        Ok(PrefixMatch {
            chunk_size: chunk_size as u64,
            chunks: hashes.len() as u64,
            hit_tokens: (hit * chunk_size) as u64,
            hit_tokens_l1: (hit_l1 * chunk_size) as u64,
            refused: subject.refused.map(str::to_owned),
            load,
        })
    }

    /// At most `limit` of the latest lookups, the latest first. What a lookup missed is looked for as it is now, where its
    /// first rank and object group would have it.
    pub fn latest(&self, limit: usize) -> Vec<RecentLookup> {
        let latest = self.lookups.recent.latest(limit, |_| true);
        let missing = latest.iter().filter_map(|lookup| lookup.missing.as_ref());
        let missing: Vec<_> = missing.collect();
        let places = self.places();
        let mut texts = losses::states(&places, &missing).into_iter();
        let now = self.context.now();
        let mut shown = Vec::with_capacity(latest.len());
        for lookup in &latest {
            let found = lookup.missing.as_ref().and_then(|_| texts.next());
            shown.push(RecentLookup {
                seconds_ago: now.saturating_sub(lookup.at).as_secs(),
                model_name: lookup.model_name.to_string(),
                cache_salt: lookup.cache_salt.to_string(),
                tokens: lookup.tokens,
                hit_tokens: lookup.hit_tokens,
                refused: lookup.refused.map(str::to_owned),
                missing: found.map(|found| words::text(&places, &found)),
            });
        }
        shown
    }

    /// Counts the misses of lookups since the last call by what had become of the chunk. The memory of each place is read
    /// once for all of them.
    pub(crate) fn count_misses(&self) {
        let (misses, forgotten) = self.lookups.recent.take_uncounted();
        let metrics = &self.context.metrics;
        if forgotten > 0 {
            metrics.missed("unknown", "", "", forgotten);
        }
        if misses.is_empty() {
            return;
        }
        let places = self.places();
        let now = self.context.now();
        let chunks: Vec<_> = misses.iter().map(|miss| &miss.chunk).collect();
        for (lost, miss) in losses::losses(&places, &chunks).into_iter().zip(&misses) {
            // Later ones are of a store behind the lookup.
            let age = now.saturating_sub(miss.at);
            match lost {
                ChunkState::Missing(Missing::Lost(place, loss)) if loss.ago + TICK >= age => {
                    let (reason, cause) = words::reason(loss.cause);
                    let cause = cause.unwrap_or_default();
                    metrics.missed(reason, cause, places[place].name(), 1);
                }
                _ => metrics.missed("never_seen", "", "", 1),
            }
        }
    }

    /// L1, then the tiers.
    fn places(&self) -> Vec<ExplainedPlace<'_>> {
        let policy = self.context.config().eviction_policy;
        let l1 = ExplainedPlace::L1(&self.context.l1.cache, policy);
        let tiers = self.context.l2.iter().flat_map(|l2| l2.tiers());
        let tiers = tiers.map(ExplainedPlace::Tier);
        std::iter::once(l1).chain(tiers).collect()
    }

    fn hashes(&self, subject: &Subject, tokens: &[u32]) -> Result<Arc<[ChunkHash]>, ExplainError> {
        let hasher = self.lookups.prompts.hasher();
        let hashes = hasher.hash_chunks(subject.chunk_size, tokens);
        let (chunks, rows) = (hashes.len(), subject.rows.len());
        if chunks.saturating_mul(rows) > MAX_OBJECTS {
            return Err(ExplainError::TooManyObjects { chunks, rows });
        }
        Ok(hashes.into())
    }

    fn indexed(&self, subject: &Subject, hashes: &[ChunkHash], in_l1: &[Vec<bool>]) -> Located {
        match &self.context.l2 {
            Some(l2) => Located::indexed(l2, &subject.rows, hashes, in_l1),
            None => Located {
                tiers: vec![vec![None; hashes.len()]; subject.rows.len()],
                asked: hashes.len(),
                failed: Vec::new(),
            },
        }
    }

    fn locate(&self, subject: &Subject, hashes: &Arc<[ChunkHash]>, in_l1: &[Vec<bool>]) -> Located {
        let indexed = || self.indexed(subject, hashes, in_l1);
        // Of a refused lookup it is unknown what the backends would be asked for: the layout is that of a worker.
        let Some(l2) = self
            .context
            .l2
            .as_ref()
            .filter(|_| subject.refused.is_none())
        else {
            return indexed();
        };
        let (asking, rows, in_l1) = (Arc::clone(l2), Arc::clone(&subject.rows), in_l1.to_vec());
        let hashes_asked = Arc::clone(hashes);
        let task = async move { Located::find(&asking, &rows, &hashes_asked, &in_l1).await };
        // Where adapters live; cancelled if the server stops meanwhile.
        let task = l2.handle().spawn(task);
        l2.handle().block_on(task).unwrap_or_else(|_| indexed())
    }

    fn find_others(
        &self,
        subject: &Subject,
        places: &[ExplainedPlace<'_>],
        hashes: &[ChunkHash],
        tokens: &[u32],
        found: &mut [Vec<ChunkState>],
    ) {
        let unexplained: BTreeSet<_> = found.iter().flat_map(|states| never_seen(states)).collect();
        let hasher = self.lookups.prompts.hasher();
        let of_size = |size: &std::num::NonZeroUsize| (*size, hasher.hash_chunks(*size, tokens));
        let by_size: Vec<_> = subject.other_sizes.iter().map(of_size).collect();
        let own_size = subject.chunk_size.get();
        let mut searches = Vec::new();
        let known = || subject.known.iter().map(|(at, it)| (&places[*at], &**it));
        let of_tenant = || known().filter(|(_, it)| it.cache_salt() == subject.scope.cache_salt());
        for (size, hashes) in &by_size {
            let of_model =
                of_tenant().filter(|(_, it)| it.model_name() == subject.scope.model_name());
            searches.extend(of_model.map(|(place, namespace)| Search {
                other: Other::ChunkSize(size.get()),
                place,
                namespace,
                hashes,
                chunk_size: size.get(),
            }));
        }
        let mut search = |(place, namespace), other| {
            searches.push(Search {
                other,
                place,
                namespace,
                hashes,
                chunk_size: own_size,
            });
        };
        for it in of_tenant() {
            let world_size = resolve::world_size(it.1);
            if it.1.model_name() == subject.scope.model_name()
                && world_size != subject.scope.world_size()
            {
                search(it, Other::WorldSize(world_size));
            }
        }
        for it in of_tenant() {
            if it.1.model_name() != subject.scope.model_name() {
                search(it, Other::Model(Arc::clone(it.1.model_name())));
            }
        }
        for it in known() {
            if it.1.cache_salt() != subject.scope.cache_salt()
                && it.1.model_name() == subject.scope.model_name()
            {
                search(it, Other::Salt(Arc::clone(it.1.cache_salt())));
            }
        }
        let others = searched(&searches, own_size, unexplained);
        for states in found {
            for chunk in never_seen(states) {
                if let Some(other) = others.get(&chunk) {
                    states[chunk] = ChunkState::Missing(Missing::Other(other.clone()));
                }
            }
        }
    }

    fn recent_lookups(&self, subject: &Subject, first: Option<&ChunkHash>) -> Vec<ExplainedLookup> {
        let of_subject = |lookup: &lookups::RecentLookup| {
            lookup.cache_salt == *subject.scope.cache_salt()
                && resolve::is_named(&lookup.model_name, &subject.plain_name)
        };
        let now = self.context.now();
        let shown = |lookup: lookups::RecentLookup| ExplainedLookup {
            seconds_ago: now.saturating_sub(lookup.at).as_secs(),
            model_name: lookup.model_name.to_string(),
            tokens: lookup.tokens,
            hit_tokens: lookup.hit_tokens,
            same_start: first.is_some() && lookup.first.as_ref() == first,
            refused: lookup.refused.map(str::to_owned),
        };
        let latest = self.lookups.recent.latest(MAX_LOOKUPS, of_subject);
        latest.into_iter().map(shown).collect()
    }
}

/// Whether the place has each chunk, by row.
fn contained(
    subject: &Subject,
    place: &ExplainedPlace<'_>,
    hashes: &[ChunkHash],
) -> Vec<Vec<bool>> {
    let rows = subject.rows.iter();
    rows.map(|row| place.contains(&row.namespace, hashes))
        .collect()
}

fn states(in_l1: &[Vec<bool>], located: &Located) -> Vec<Vec<ChunkState>> {
    let state = |(in_l1, tier): (&bool, &Option<usize>)| match (in_l1, tier) {
        (true, _) => ChunkState::L1,
        (false, Some(tier)) => ChunkState::Tier(*tier),
        (false, None) => ChunkState::Missing(Missing::NeverSeen),
    };
    let rows = in_l1.iter().zip(&located.tiers);
    rows.map(|(in_l1, tiers)| in_l1.iter().zip(tiers).map(state).collect())
        .collect()
}

/// Chunks of the prefix that L1 serves, and of the one that L1 and the tiers serve together.
fn hits(rows: &[GroupRow], found: &[Vec<ChunkState>]) -> (usize, usize) {
    let hit = |is_there: fn(&ChunkState) -> bool| {
        let bitmap = |states: &Vec<ChunkState>| {
            let mut bitmap = ChunkBitmap::with_capacity(states.len());
            let present = states.iter().enumerate().filter(|(_, it)| is_there(it));
            present.for_each(|(chunk, _)| bitmap.set(chunk));
            bitmap
        };
        let present: Vec<_> = found.iter().map(bitmap).collect();
        longest_prefix(rows, &present)
    };
    (
        hit(|it| *it == ChunkState::L1),
        hit(|it| !matches!(it, ChunkState::Missing(_))),
    )
}

fn chunks_that(states: &[ChunkState], is_meant: fn(&ChunkState) -> bool) -> Vec<usize> {
    let chunks = states.iter().enumerate();
    let chunks = chunks.filter(|(_, state)| is_meant(state));
    chunks.map(|(chunk, _)| chunk).collect()
}

fn missing(states: &[ChunkState]) -> Vec<usize> {
    chunks_that(states, |state| matches!(state, ChunkState::Missing(_)))
}

/// The missing chunks without a reason so far.
fn never_seen(states: &[ChunkState]) -> Vec<usize> {
    chunks_that(states, |state| {
        *state == ChunkState::Missing(Missing::NeverSeen)
    })
}

/// Objects of L1 in other layouts.
fn find_layouts(
    subject: &Subject,
    places: &[ExplainedPlace<'_>],
    hashes: &[ChunkHash],
    found: &mut [Vec<ChunkState>],
) {
    for (row, states) in subject.rows.iter().zip(found) {
        let own = &row.namespace;
        let in_l1 = subject.known.iter().filter(|(place, _)| *place == 0);
        let others = in_l1.map(|(_, it)| it).filter(|it| {
            it.layout() != own.layout() && it.without_layout() == own.without_layout()
        });
        for other in others {
            let open = never_seen(states);
            let wanted: Vec<_> = open.iter().map(|chunk| hashes[*chunk]).collect();
            let resident = places[0].contains(other, &wanted);
            for (chunk, _) in open.into_iter().zip(resident).filter(|(_, is)| *is) {
                states[chunk] = ChunkState::Missing(Missing::Layout(other.layout()));
            }
        }
    }
}

/// How chunks are stored elsewhere, as far as they are. A namespace without the first of them is passed over: prefixes are
/// stored from their start.
fn searched(
    searches: &[Search<'_>],
    own_size: usize,
    mut open: BTreeSet<usize>,
) -> HashMap<usize, Other> {
    let mut others = HashMap::new();
    for search in searches {
        let hash = |chunk: usize| {
            let at = chunk * own_size / search.chunk_size;
            Some((chunk, *search.hashes.get(at)?))
        };
        let Some((_, first)) = open.first().and_then(|chunk| hash(*chunk)) else {
            continue;
        };
        if search.place.contains(search.namespace, &[first]) != [true] {
            continue;
        }
        let wanted = open.iter().filter_map(|chunk| hash(*chunk));
        let (chunks, hashes): (Vec<_>, Vec<_>) = wanted.unzip();
        let there = search.place.contains(search.namespace, &hashes);
        for (chunk, _) in chunks.into_iter().zip(there).filter(|(_, is)| *is) {
            open.remove(&chunk);
            others.insert(chunk, search.other.clone());
        }
    }
    others
}

/// Marks chunks that a tier may have which was not asked or did not answer.
fn mark_unasked(located: &Located, found: &mut [Vec<ChunkState>]) {
    let from = if located.failed.is_empty() {
        located.asked
    } else {
        0
    };
    for states in found {
        for chunk in never_seen(states).into_iter().filter(|it| *it >= from) {
            states[chunk] = ChunkState::Missing(Missing::NotAsked);
        }
    }
}

/// Seconds, minutes, hours or days, for people.
fn ago(ago: Duration) -> String {
    match ago.as_secs() {
        seconds @ 0..120 => format!("{seconds} s ago"),
        seconds @ 120..7200 => format!("{} min ago", seconds / 60),
        seconds @ 7200..172_800 => format!("{} h ago", seconds / 3600),
        seconds => format!("{} days ago", seconds / 86_400),
    }
}
