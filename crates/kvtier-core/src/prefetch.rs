//! Planning of a prefetch: which objects to look up in the tiers, and which of them to load.
//!
//! A prefetch finds the longest prefix that L1 and the tiers can serve together. It looks up only what L1 lacks, from
//! the front, and stops where no tier can help: behind a chunk that a full-attention row has nowhere, no longer prefix
//! can end.

use crate::group_row::GroupRow;
use crate::window::{ChunkBitmap, longest_prefix, needed};
use std::ops::Range;
use std::sync::Arc;

/// One object of a prefetch: a row, and a chunk counted from the prompt's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cell {
    /// Number of the row.
    pub row: usize,
    /// The chunk.
    pub chunk: usize,
}

/// Plan of a prefetch: which objects of a prompt were found so far.
#[derive(Clone, Debug)]
pub struct PrefetchPlan {
    rows: Arc<[GroupRow]>,
    chunks: usize,
    found: Vec<ChunkBitmap>,
    /// Whether each chunk is worth having by itself, and not only as part of a prefix.
    is_each: bool,
}

impl PrefetchPlan {
    /// Returns a plan for these rows of a prompt of `chunks` chunks, with nothing found yet.
    pub fn new(rows: Arc<[GroupRow]>, chunks: usize) -> Self {
        let found = vec![ChunkBitmap::with_capacity(chunks); rows.len()];
        Self {
            rows,
            chunks,
            found,
            is_each: false,
        }
    }

    /// The plan for chunks that are worth having one by one.
    pub fn of_each(rows: Arc<[GroupRow]>, chunks: usize) -> Self {
        Self {
            is_each: true,
            ..Self::new(rows, chunks)
        }
    }

    /// Chunks of the prompt.
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// Records that an object is in L1 or in a tier.
    pub fn found(&mut self, cell: Cell) {
        if cell.chunk < self.chunks
            && let Some(row) = self.found.get_mut(cell.row)
        {
            row.set(cell.chunk);
        }
    }

    /// Records that an object is no longer where it was found.
    pub fn lost(&mut self, cell: Cell) {
        if let Some(row) = self.found.get_mut(cell.row) {
            row.unset(cell.chunk);
        }
    }

    /// The objects of these chunks that were not found yet and that a longer prefix would need, chunk by chunk.
    pub fn wanted(&self, chunks: Range<usize>) -> Vec<Cell> {
        let end = chunks.end.min(self.chunks).min(self.limit(chunks.start));
        (chunks.start..end)
            .flat_map(|chunk| (0..self.found.len()).map(move |row| Cell { row, chunk }))
            .filter(|cell| !self.found[cell.row].get(cell.chunk))
            .collect()
    }

    /// The end of the longest prefix possible once everything before `asked` was looked up everywhere: the first chunk
    /// below it that a full-attention row lacks.
    fn limit(&self, asked: usize) -> usize {
        if self.is_each {
            return usize::MAX;
        }
        let rows = self.rows.iter().zip(&self.found);
        rows.filter(|(row, _)| row.window.is_none())
            .map(|(_, found)| found.leading())
            .filter(|leading| *leading < asked)
            .min()
            .unwrap_or(usize::MAX)
    }

    /// Chunks of the longest prefix that the objects found can serve.
    pub fn hit(&self) -> usize {
        longest_prefix(&self.rows, &self.found)
    }

    /// The objects to have in L1 of what was found, chunk by chunk, that take at most `capacity` bytes; `footprint` returns the bytes
    /// that an object of a length takes.
    pub fn needed_within(&self, capacity: u64, footprint: impl Fn(u64) -> u64) -> Vec<Cell> {
        if !self.is_each {
            return self.needed(self.hit_within(capacity, footprint));
        }
        let sizes = self.rows.iter().map(|row| footprint(row.object_bytes));
        let chunk_bytes: u64 = sizes.sum();
        let is_found = |chunk: &usize| self.found.iter().all(|row| row.get(*chunk));
        let chunks = (0..self.chunks).filter(is_found);
        let most = capacity.checked_div(chunk_bytes).unwrap_or(0);
        chunks
            .take(usize::try_from(most).unwrap_or(usize::MAX))
            .flat_map(|chunk| (0..self.rows.len()).map(move |row| Cell { row, chunk }))
            .collect()
    }

    /// Chunks of the longest prefix whose objects were found and take at most `capacity` bytes; `footprint` returns the bytes that
    /// an object of a length takes.
    fn hit_within(&self, capacity: u64, footprint: impl Fn(u64) -> u64) -> usize {
        let hit = self.hit();
        let sizes: Vec<_> = self
            .rows
            .iter()
            .map(|row| footprint(row.object_bytes))
            .collect();
        let fits = |hit: usize| {
            let rows = self.rows.iter().zip(&sizes);
            let bytes = rows.map(|(row, size)| needed(row.window, hit).len() as u64 * size);
            bytes.sum::<u64>() <= capacity
        };
        if fits(hit) {
            return hit;
        }
        let mut found = self.found.clone();
        let most = (0..hit).rev().find(|hit| fits(*hit)).unwrap_or(0);
        found.iter_mut().for_each(|row| row.truncate(most));
        longest_prefix(&self.rows, &found)
    }

    /// The objects that a prefix of `hit` chunks needs, chunk by chunk.
    fn needed(&self, hit: usize) -> Vec<Cell> {
        let rows = || self.rows.iter().enumerate();
        (0..hit)
            .flat_map(|chunk| {
                rows()
                    .filter(move |(_, row)| needed(row.window, hit).contains(&chunk))
                    .map(move |(row, _)| Cell { row, chunk })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object_key::Namespace;

    fn plan<const ROWS: usize>(windows: [Option<u32>; ROWS], chunks: usize) -> PrefetchPlan {
        let namespace = Arc::new(Namespace::new("m", 1, 0, 0, "").unwrap());
        let row = |window| GroupRow {
            namespace: Arc::clone(&namespace),
            window,
            object_bytes: 1,
        };
        PrefetchPlan::new(windows.map(row).into(), chunks)
    }

    fn cells(cells: &[Cell]) -> Vec<(usize, usize)> {
        cells.iter().map(|cell| (cell.row, cell.chunk)).collect()
    }

    fn find(plan: &mut PrefetchPlan, row: usize, chunks: impl IntoIterator<Item = usize>) {
        for chunk in chunks {
            plan.found(Cell { row, chunk });
        }
    }

    #[test]
    fn wanted_excludes_found_objects() {
        let mut plan = plan([None, None], 3);
        find(&mut plan, 0, [0, 2]);
        find(&mut plan, 1, [0]);
        assert_eq!(cells(&plan.wanted(0..9)), [(0, 1), (1, 1), (1, 2)]);
    }

    #[test]
    fn gap_of_full_attention_row_ends_wanted() {
        let mut plan = plan([None], 10);
        find(&mut plan, 0, [0, 1, 5]);
        assert_eq!(plan.wanted(0..4).len(), 2);
        // 0..4 was looked up, and chunk 2 is nowhere.
        assert_eq!(plan.wanted(4..8), []);
        assert_eq!(plan.hit(), 2);
        find(&mut plan, 0, [2, 3]);
        assert_eq!(cells(&plan.wanted(4..8)), [(0, 4), (0, 6), (0, 7)]);
    }

    #[test]
    fn window_skips_gaps_of_its_own_row_only() {
        let mut plan = plan([None, Some(2)], 6);
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
    fn hit_ends_where_capacity_does() {
        let mut plan = plan([None, Some(2)], 6);
        find(&mut plan, 0, 0..6);
        find(&mut plan, 1, [1, 2, 3, 4, 5]);
        // Objects of a byte take two; a prefix of n chunks has n and two of them.
        for (capacity, expected) in [(16, 6), (15, 5), (12, 4), (11, 3), (9, 0)] {
            assert_eq!(
                plan.hit_within(capacity, |bytes| 2 * bytes),
                expected,
                "{capacity}"
            );
        }
        plan.lost(Cell { row: 1, chunk: 3 });
        assert_eq!(plan.hit_within(14, |bytes| 2 * bytes), 3);
    }

    #[test]
    fn each_chunk_is_wanted_whatever_is_missing_before_it() {
        let rows = plan([None, None], 5).rows;
        let mut plan = PrefetchPlan::of_each(rows, 5);
        find(&mut plan, 0, [1, 3, 4]);
        find(&mut plan, 1, [1, 2, 4]);
        assert_eq!(
            cells(&plan.wanted(2..4)),
            [(0, 2), (1, 3)],
            "chunk 0 is nowhere"
        );
        let within = |capacity| cells(&plan.needed_within(capacity, |bytes| 2 * bytes));
        assert_eq!(within(u64::MAX), [(0, 1), (1, 1), (0, 4), (1, 4)]);
        assert_eq!(within(7), [(0, 1), (1, 1)]);
    }

    #[test]
    fn unknown_cells_are_ignored() {
        let mut plan = plan([None], 1);
        for (row, chunk) in [(0, 1), (1, 0), (usize::MAX, usize::MAX)] {
            plan.found(Cell { row, chunk });
            plan.lost(Cell { row, chunk });
        }
        assert_eq!((plan.hit(), plan.wanted(0..2).len()), (0, 1));
    }
}
