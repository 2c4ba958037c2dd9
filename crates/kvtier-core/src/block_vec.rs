//! A table that grows without moving what is in it.

use std::ops::{Index, IndexMut};

/// Entries by number, in blocks of `BLOCK`: growing costs one allocation of fixed size under the lock, whatever the length.
#[derive(Debug)]
pub(crate) struct BlockVec<T, const BLOCK: usize> {
    blocks: Vec<Box<[T]>>,
}

impl<T, const BLOCK: usize> Default for BlockVec<T, BLOCK> {
    fn default() -> Self {
        Self { blocks: Vec::new() }
    }
}

impl<T, const BLOCK: usize> BlockVec<T, BLOCK> {
    /// Grows until there is an entry of this number; `new` makes the ones in between.
    pub(crate) fn grow_to(&mut self, number: u32, new: impl FnMut() -> T + Copy) {
        while number as usize / BLOCK >= self.blocks.len() {
            let block = std::iter::repeat_with(new).take(BLOCK);
            self.blocks.push(block.collect());
        }
    }

    /// The entry, if the table has grown that far.
    pub(crate) fn get(&self, number: u32) -> Option<&T> {
        let block = self.blocks.get(number as usize / BLOCK)?;
        block.get(number as usize % BLOCK)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.blocks.iter().flatten()
    }

    pub(crate) fn bookkeeping_bytes(&self) -> usize {
        self.blocks.len() * BLOCK * size_of::<T>() + self.blocks.capacity() * size_of::<Box<[T]>>()
    }
}

/// An entry that the table has grown to.
impl<T, const BLOCK: usize> Index<u32> for BlockVec<T, BLOCK> {
    type Output = T;

    fn index(&self, number: u32) -> &T {
        &self.blocks[number as usize / BLOCK][number as usize % BLOCK]
    }
}

impl<T, const BLOCK: usize> IndexMut<u32> for BlockVec<T, BLOCK> {
    fn index_mut(&mut self, number: u32) -> &mut T {
        &mut self.blocks[number as usize / BLOCK][number as usize % BLOCK]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growing_moves_no_entry() {
        let mut table = BlockVec::<u32, 4>::default();
        assert_eq!(table.get(0), None);
        table.grow_to(3, || 7);
        table[3] = 9;
        let address = &raw const table[3];
        assert_eq!(table.get(4), None);
        table.grow_to(400, || 7);
        assert_eq!((table[3], &raw const table[3]), (9, address));
        assert_eq!(table.iter().filter(|&&entry| entry == 7).count(), 403);
        assert!(table.bookkeeping_bytes() >= 404 * 4);
    }
}
