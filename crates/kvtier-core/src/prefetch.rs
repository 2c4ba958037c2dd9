//! Planning of a prefetch: which objects to ask the tiers for, and which of them to load.
//!
//! A prefetch looks for the longest prefix that L1 and the tiers can serve together. It asks for what L1 lacks only,
//! from the front, and stops where no tier can help: behind a chunk that a full-attention row has nowhere, no longer
//! prefix can end.

use crate::window::{ChunkBitmap, RowPresence, longest_prefix, needed};
use std::ops::Range;

/// One object of a prefetch: a row, and a chunk counted from the prompt's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cell {
    /// The row: an object group on a rank.
    pub row: usize,
    /// The chunk.
    pub chunk: usize,
}

/// What is known so far of the objects of a prompt.
#[derive(Clone, Debug)]
pub struct PrefetchPlan {
    windows: Vec<Option<u32>>,
    chunks: usize,
    found: Vec<ChunkBitmap>,
}

impl PrefetchPlan {
    /// Nothing is found yet. One window a row; `None` is full attention.
    pub fn new(windows: impl IntoIterator<Item = Option<u32>>, chunks: usize) -> Self {
        let windows: Vec<_> = windows.into_iter().collect();
        let found = vec![ChunkBitmap::with_capacity(chunks); windows.len()];
        Self {
            windows,
            chunks,
            found,
        }
    }

    /// Chunks of the prompt.
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// Notes that an object is in L1 or in a tier.
    pub fn found(&mut self, cell: Cell) {
        if cell.chunk < self.chunks
            && let Some(row) = self.found.get_mut(cell.row)
        {
            row.set(cell.chunk);
        }
    }

    /// Notes that an object is not where it was found.
    pub fn lost(&mut self, cell: Cell) {
        if let Some(row) = self.found.get_mut(cell.row) {
            row.unset(cell.chunk);
        }
    }

    /// The objects among these chunks that are not found yet and that a longer prefix would need, chunk by chunk.
    pub fn wanted(&self, chunks: Range<usize>) -> Vec<Cell> {
        let end = chunks.end.min(self.chunks).min(self.limit(chunks.start));
        (chunks.start..end)
            .flat_map(|chunk| (0..self.found.len()).map(move |row| Cell { row, chunk }))
            .filter(|cell| !self.found[cell.row].get(cell.chunk))
            .collect()
    }

    /// Where no longer prefix can end once everything before `asked` was asked for everywhere: the first chunk below
    /// it that a full-attention row lacks.
    fn limit(&self, asked: usize) -> usize {
        let rows = self.windows.iter().zip(&self.found);
        rows.filter(|(window, _)| window.is_none())
            .map(|(_, row)| row.leading())
            .filter(|leading| *leading < asked)
            .min()
            .unwrap_or(usize::MAX)
    }

    /// Chunks of the longest prefix that what was found can serve.
    pub fn hit(&self) -> usize {
        let rows: Vec<_> = self
            .windows
            .iter()
            .zip(&self.found)
            .map(|(window, present)| RowPresence {
                window: *window,
                present,
            })
            .collect();
        longest_prefix(&rows)
    }

    /// The objects that a prefix of `hit` chunks needs, chunk by chunk.
    pub fn needed(&self, hit: usize) -> Vec<Cell> {
        let rows = || self.windows.iter().enumerate();
        (0..hit)
            .flat_map(|chunk| {
                rows()
                    .filter(move |(_, window)| needed(**window, hit).contains(&chunk))
                    .map(move |(row, _)| Cell { row, chunk })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(cells: &[Cell]) -> Vec<(usize, usize)> {
        cells.iter().map(|cell| (cell.row, cell.chunk)).collect()
    }

    fn find(plan: &mut PrefetchPlan, row: usize, chunks: impl IntoIterator<Item = usize>) {
        for chunk in chunks {
            plan.found(Cell { row, chunk });
        }
    }

    #[test]
    fn only_what_is_not_found_is_wanted() {
        let mut plan = PrefetchPlan::new([None, None], 3);
        find(&mut plan, 0, [0, 2]);
        find(&mut plan, 1, [0]);
        assert_eq!(cells(&plan.wanted(0..9)), [(0, 1), (1, 1), (1, 2)]);
    }

    #[test]
    fn behind_a_gap_nothing_is_wanted() {
        let mut plan = PrefetchPlan::new([None], 10);
        find(&mut plan, 0, [0, 1, 5]);
        assert_eq!(plan.wanted(0..4).len(), 2);
        // 0..4 was asked for, and chunk 2 is nowhere.
        assert_eq!(plan.wanted(4..8), []);
        assert_eq!(plan.hit(), 2);
        find(&mut plan, 0, [2, 3]);
        assert_eq!(cells(&plan.wanted(4..8)), [(0, 4), (0, 6), (0, 7)]);
    }

    #[test]
    fn a_window_bridges_its_own_gaps_but_not_those_of_others() {
        let mut plan = PrefetchPlan::new([None, Some(2)], 6);
        find(&mut plan, 0, 0..6);
        find(&mut plan, 1, [4, 5]);
        assert_eq!(plan.hit(), 6);
        assert_eq!(
            cells(&plan.needed(6)),
            [
                (0, 0),
                (0, 1),
                (0, 2),
                (0, 3),
                (0, 4),
                (1, 4),
                (0, 5),
                (1, 5)
            ]
        );
        plan.lost(Cell { row: 1, chunk: 4 });
        assert_eq!(plan.hit(), 0);
        plan.lost(Cell { row: 0, chunk: 5 });
        assert_eq!(plan.hit(), 0);
    }

    #[test]
    fn cells_that_are_none_change_nothing() {
        let mut plan = PrefetchPlan::new([None], 1);
        for (row, chunk) in [(0, 1), (1, 0), (usize::MAX, usize::MAX)] {
            plan.found(Cell { row, chunk });
            plan.lost(Cell { row, chunk });
        }
        assert_eq!((plan.hit(), plan.wanted(0..2).len()), (0, 1));
    }
}
