//! Windows: the longest prefix that every row can serve, and the chunks that a row must hold for it.
//!
//! A row is one object group on one rank ([`GroupRow`]). A full-attention row needs every chunk of the prefix; a row with a window
//! of `w` chunks needs only the last `w` of them.

use crate::group_row::GroupRow;
use std::ops::Range;

/// Bitmap of the chunks of one row that are present; chunks never set are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkBitmap {
    words: Vec<u64>,
}

impl ChunkBitmap {
    /// No chunk is present.
    pub fn new() -> Self {
        Self::default()
    }

    /// No chunk is present yet, with capacity for `chunks`.
    pub fn with_capacity(chunks: usize) -> Self {
        Self {
            words: Vec::with_capacity(chunks.div_ceil(64)),
        }
    }

    /// Clears the bitmap but keeps the memory.
    pub fn clear(&mut self) {
        self.words.clear();
    }

    /// Marks one chunk as present. Memory grows to hold the highest chunk marked.
    pub fn set(&mut self, chunk: usize) {
        let word = chunk / 64;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (chunk % 64);
    }

    /// Marks one chunk as absent.
    pub fn unset(&mut self, chunk: usize) {
        if let Some(word) = self.words.get_mut(chunk / 64) {
            *word &= !(1 << (chunk % 64));
        }
    }

    /// Marks all chunks from this one on as absent.
    pub fn truncate(&mut self, chunks: usize) {
        self.words.truncate(chunks.div_ceil(64));
        if !chunks.is_multiple_of(64)
            && let Some(last) = self.words.get_mut(chunks / 64)
        {
            *last &= (1 << (chunks % 64)) - 1;
        }
    }

    /// Whether a chunk is present.
    pub fn get(&self, chunk: usize) -> bool {
        self.words
            .get(chunk / 64)
            .is_some_and(|word| word >> (chunk % 64) & 1 == 1)
    }

    /// How many chunks are present in a row from chunk 0 on.
    pub fn leading(&self) -> usize {
        match self.words.iter().position(|&word| word != u64::MAX) {
            Some(at) => at * 64 + self.words[at].trailing_ones() as usize,
            None => self.words.len() * 64,
        }
    }

    /// The highest present chunk, plus one; 0 when there is none.
    fn end(&self) -> usize {
        match self.words.iter().rposition(|&word| word != 0) {
            Some(at) => at * 64 + 64 - self.words[at].leading_zeros() as usize,
            None => 0,
        }
    }

    /// The highest absent chunk within `range`.
    fn last_absent(&self, range: Range<usize>) -> Option<usize> {
        let mut end = range.end;
        while end > range.start {
            let word_start = (end - 1) / 64 * 64;
            let word = self.words.get(word_start / 64).copied().unwrap_or(0);
            // Only bits below `end` count; those above are taken as present.
            let used = end - word_start;
            let absent = !word & (u64::MAX >> (64 - used));
            if absent != 0 {
                let chunk = word_start + 63 - absent.leading_zeros() as usize;
                return (chunk >= range.start).then_some(chunk);
            }
            end = word_start;
        }
        None
    }
}

/// The number of chunks in the longest prefix for which every row has the chunks that it [needs](needed); 0 without
/// rows. `present` has the chunks of each row.
///
/// Allocates nothing.
pub fn longest_prefix(rows: &[GroupRow], present: &[ChunkBitmap]) -> usize {
    let longest = |(row, present): (&GroupRow, &ChunkBitmap)| match row.window {
        None => present.leading(),
        Some(_) => present.end(),
    };
    let mut hit = rows.iter().zip(present).map(longest).min().unwrap_or(0);
    // An absent chunk inside some row's window rules out every length that ends above it: a shorter prefix's window
    // starts lower, so it contains that chunk too until the prefix ends below it. Rows are checked in turn until all
    // of them agree on the same length.
    let mut agreed = 0;
    let mut turn = 0;
    while hit > 0 && agreed < rows.len() {
        let (row, present) = (&rows[turn], &present[turn]);
        turn = (turn + 1) % rows.len();
        match row
            .window
            .and_then(|_| present.last_absent(needed(row.window, hit)))
        {
            Some(absent) => {
                hit = absent;
                agreed = 0;
            }
            None => agreed += 1,
        }
    }
    hit
}

/// The chunks a row with this window must hold to serve a prefix of `hit` chunks. `None` = all; 0 counts as 1.
pub fn needed(window: Option<u32>, hit: usize) -> Range<usize> {
    match window {
        None => 0..hit,
        Some(window) => hit.saturating_sub(window.max(1) as usize)..hit,
    }
}
