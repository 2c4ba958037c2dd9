//! What became of chunks that are missing, as far as L1 and the tiers remember it.

use std::sync::Arc;

use kvtier_core::cache::Loss;
use kvtier_core::{ChunkHash, Namespace};

use super::{ChunkState, ExplainedPlace, Missing, Subject, missing};

/// What became of these chunks, wherever they are now: the last loss of each, or nothing.
pub(super) fn losses(
    places: &[ExplainedPlace<'_>],
    chunks: &[&(Arc<Namespace>, ChunkHash)],
) -> Vec<ChunkState> {
    let asked = chunks
        .iter()
        .map(|(it, hash)| (it, std::slice::from_ref(hash)));
    let asked: Vec<_> = asked.collect();
    let mut found = vec![ChunkState::Missing(Missing::NeverSeen); chunks.len()];
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
pub(super) fn states(
    places: &[ExplainedPlace<'_>],
    chunks: &[&(Arc<Namespace>, ChunkHash)],
) -> Vec<ChunkState> {
    let mut found = losses(places, chunks);
    for (number, place) in places.iter().enumerate().rev() {
        for (state, (namespace, hash)) in found.iter_mut().zip(chunks) {
            if place.contains(namespace, std::slice::from_ref(hash)) == [true] {
                *state = match number {
                    0 => ChunkState::L1,
                    number => ChunkState::Tier(number - 1),
                };
            }
        }
    }
    found
}

/// The later one of what is known and this loss in the place of this number.
fn note_loss(state: &mut ChunkState, place: usize, loss: Option<Loss>) {
    let Some(loss) = loss else { return };
    let is_later = match state {
        ChunkState::Missing(Missing::Lost(_, known)) => loss.ago < known.ago,
        _ => true,
    };
    if is_later {
        *state = ChunkState::Missing(Missing::Lost(place, loss));
    }
}

/// The last loss of each missing chunk, of all places.
pub(super) fn find_losses(
    subject: &Subject,
    places: &[ExplainedPlace<'_>],
    hashes: &[ChunkHash],
    found: &mut [Vec<ChunkState>],
) {
    let missing: Vec<_> = found.iter().map(|states| missing(states)).collect();
    let hashes_of = |chunks: &Vec<usize>| chunks.iter().map(|chunk| hashes[*chunk]).collect();
    let hashes: Vec<Vec<_>> = missing.iter().map(hashes_of).collect();
    let asked = subject.rows.iter().zip(&hashes);
    let asked: Vec<_> = asked
        .map(|(row, hashes)| (&row.namespace, &hashes[..]))
        .collect();
    for (number, place) in places.iter().enumerate() {
        let rows = found.iter_mut().zip(&missing).zip(place.losses(&asked));
        for ((states, chunks), losses) in rows {
            for (chunk, loss) in chunks.iter().zip(losses) {
                note_loss(&mut states[*chunk], number, loss);
            }
        }
    }
}
