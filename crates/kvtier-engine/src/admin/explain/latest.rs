//! The latest lookups of all tenants, and why they found no more: for people, and counted.

use std::sync::Arc;
use std::time::Duration;

use kvtier_core::cache::Loss;
use kvtier_core::{ChunkHash, Namespace};
use kvtier_observe::api::RecentLookup;

use super::{Admin, ExplainedPlace, Found, Missing, words};

/// Precision of the time of a loss.
const TICK: Duration = Duration::from_millis(100);

impl Admin {
    /// At most `limit` of the latest lookups, the latest first. What a lookup missed is looked for as it is now, where its
    /// first rank and object group would have it.
    pub fn latest_lookups(&self, limit: usize) -> Vec<RecentLookup> {
        let latest = self.lookups.recent.latest(limit, |_| true);
        let missing = latest.iter().filter_map(|lookup| lookup.missing.as_ref());
        let missing: Vec<_> = missing.collect();
        let places = self.places();
        let mut texts = states(&places, &missing).into_iter();
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
        for (lost, miss) in losses(&places, &chunks).into_iter().zip(&misses) {
            // Later ones are of a store behind the lookup.
            let age = now.saturating_sub(miss.at);
            match lost {
                Found::Missing(Missing::Lost(place, loss)) if loss.ago + TICK >= age => {
                    let (reason, cause) = words::reason(loss.cause);
                    let cause = cause.unwrap_or_default();
                    metrics.missed(reason, cause, places[place].name(), 1);
                }
                _ => metrics.missed("never_seen", "", "", 1),
            }
        }
    }
}

/// What became of these chunks, wherever they are now: the last loss of each, or nothing.
fn losses(places: &[ExplainedPlace<'_>], chunks: &[&(Arc<Namespace>, ChunkHash)]) -> Vec<Found> {
    let asked = chunks
        .iter()
        .map(|(it, hash)| (it, std::slice::from_ref(hash)));
    let asked: Vec<_> = asked.collect();
    let mut found = vec![Found::Missing(Missing::NeverSeen); chunks.len()];
    if chunks.is_empty() {
        return found;
    }
    for (number, place) in places.iter().enumerate() {
        for (state, losses) in found.iter_mut().zip(place.losses(&asked)) {
            note_loss(state, number, losses.into_iter().flatten().next());
        }
    }
    found
}

/// State of each of these chunks: its place, or what became of it.
fn states(places: &[ExplainedPlace<'_>], chunks: &[&(Arc<Namespace>, ChunkHash)]) -> Vec<Found> {
    let mut found = losses(places, chunks);
    for (number, place) in places.iter().enumerate().rev() {
        for (state, (namespace, hash)) in found.iter_mut().zip(chunks) {
            if place.contains(namespace, std::slice::from_ref(hash)) == [true] {
                *state = match number {
                    0 => Found::L1,
                    number => Found::Tier(number - 1),
                };
            }
        }
    }
    found
}

/// The later one of what is known and this loss in the place of this number.
pub(super) fn note_loss(state: &mut Found, place: usize, loss: Option<Loss>) {
    let Some(loss) = loss else { return };
    let is_later = match state {
        Found::Missing(Missing::Lost(_, known)) => loss.ago < known.ago,
        _ => true,
    };
    if is_later {
        *state = Found::Missing(Missing::Lost(place, loss));
    }
}
