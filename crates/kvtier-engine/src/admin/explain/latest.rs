//! The latest lookups of all tenants, and why they found no more.

use std::sync::Arc;

use kvtier_api::RecentLookup;
use kvtier_core::cache::Loss;
use kvtier_core::{ChunkHash, Namespace};

use super::{Admin, Found, Missing, Place, words};

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
}

/// Where these chunks are, or what became of them.
fn states(places: &[Place<'_>], chunks: &[&(Arc<Namespace>, ChunkHash)]) -> Vec<Found> {
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
    for (number, place) in places.iter().enumerate().rev() {
        for (state, (namespace, hashes)) in found.iter_mut().zip(&asked) {
            if place.contains(namespace, hashes) == [true] {
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
