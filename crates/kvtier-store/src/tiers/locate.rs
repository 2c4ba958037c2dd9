//! Location of a prompt in the tiers, for people: nothing is loaded, leased or counted.

use std::sync::Arc;

use kvtier_core::prefetch::{Cell, PrefetchPlan};
use kvtier_core::{ChunkHash, GroupRow};
use kvtier_l2::tier::Tier;
use tokio::time::{Instant, timeout_at};

use super::L2;
use super::prefetch::{FIRST_SLICE, LAST_SLICE, objects};

/// Location of a prompt's objects in the tiers.
#[derive(Debug)]
pub struct Located {
    /// Per row and chunk, the number of the first tier that has the object.
    pub tiers: Vec<Vec<Option<usize>>>,
    /// Chunks from this one on were only looked for in the indexes of the tiers, as a lookup would not ask for them.
    pub asked: usize,
    /// Tiers that did not answer: their numbers and why.
    pub failed: Vec<(usize, String)>,
}

impl Located {
    /// Looks in the tiers for the objects of a prompt that L1 does not have: in their indexes, and in backends that may have
    /// more than those, up to the chunk behind which no lookup asks. `in_l1` has the chunks of each row.
    pub async fn find(
        l2: &L2,
        rows: &Arc<[GroupRow]>,
        hashes: &[ChunkHash],
        in_l1: &[Vec<bool>],
    ) -> Self {
        let mut located = Self::indexed(l2, rows, hashes, in_l1);
        let mut plan = PrefetchPlan::new(Arc::clone(rows), hashes.len());
        for (row, (in_l1, in_tiers)) in in_l1.iter().zip(&located.tiers).enumerate() {
            for (chunk, (in_l1, in_tier)) in in_l1.iter().zip(in_tiers).enumerate() {
                if *in_l1 || in_tier.is_some() {
                    plan.found(Cell { row, chunk });
                }
            }
        }
        let until = Instant::now() + l2.config().lookup_timeout;
        let mut open: Vec<(usize, &Arc<Tier>)> = l2.tiers().iter().enumerate().collect();
        open.retain(|(_, tier)| tier.may_have_more());
        let (mut from, mut slice) = (0, FIRST_SLICE);
        while from < hashes.len() {
            let asked = from..from + slice;
            if plan.wanted(asked.clone()).is_empty() && plan.hit() < from {
                break;
            }
            (from, slice) = (asked.end, LAST_SLICE.min(4 * slice));
            let mut failed = Vec::new();
            for (number, tier) in &open {
                let wanted = objects(rows, hashes, &plan.wanted(asked.clone()));
                if wanted.is_empty() {
                    break;
                }
                let (cells, objects): (Vec<_>, Vec<_>) = wanted.into_iter().unzip();
                let found = match timeout_at(until, tier.backend_has(objects)).await {
                    Ok(Ok(found)) => found,
                    Ok(Err(error)) => {
                        failed.push((*number, error.to_string()));
                        continue;
                    }
                    Err(_) => {
                        failed.push((*number, "it did not answer in time".to_owned()));
                        continue;
                    }
                };
                for (cell, _) in cells.into_iter().zip(found).filter(|(_, found)| *found) {
                    plan.found(cell);
                    located.tiers[cell.row][cell.chunk] = Some(*number);
                }
            }
            open.retain(|(number, _)| failed.iter().all(|(other, _)| other != number));
            located.failed.append(&mut failed);
            located.asked = from.min(hashes.len());
        }
        if open.is_empty() && located.failed.is_empty() {
            located.asked = hashes.len();
        }
        located
    }

    /// [`Located::find`] in the indexes alone.
    pub fn indexed(l2: &L2, rows: &[GroupRow], hashes: &[ChunkHash], in_l1: &[Vec<bool>]) -> Self {
        let mut tiers = vec![vec![None; hashes.len()]; rows.len()];
        for ((row, in_l1), places) in rows.iter().zip(in_l1).zip(&mut tiers) {
            let namespace = row.namespace.without_layout();
            for (number, tier) in l2.tiers().iter().enumerate() {
                let indexed = tier.indexes(&namespace, hashes).into_iter();
                for ((place, in_l1), indexed) in places.iter_mut().zip(in_l1).zip(indexed) {
                    if indexed && !in_l1 && place.is_none() {
                        *place = Some(number);
                    }
                }
            }
        }
        Self {
            tiers,
            asked: if l2.tiers().iter().any(|tier| tier.may_have_more()) {
                0
            } else {
                hashes.len()
            },
            failed: Vec::new(),
        }
    }
}
