//! Chunks that a store of several groups leaves out.

use std::ops::Range;

/// Most runs of one store, which keeps them until its COMMIT. A group of windows or states has a few.
const MAX_RUNS: usize = 1024;

/// Per group, the chunks of a range that its worker does not write, as increasing runs of positions. Without a group, none is
/// left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Skipped(Vec<Vec<Range<usize>>>);

impl Skipped {
    /// Makes it of lists of positions, one per group, or none. `None` unless each list increases and stays below `count`, and there are
    /// few runs.
    pub fn new(lists: &[Vec<i64>], groups: usize, count: usize) -> Option<Self> {
        if !lists.is_empty() && lists.len() != groups {
            return None;
        }
        let (mut skipped, mut left) = (Vec::new(), MAX_RUNS);
        for list in lists {
            let mut runs: Vec<Range<usize>> = Vec::new();
            for position in list {
                let position = usize::try_from(*position).ok();
                let position = position.filter(|position| *position < count)?;
                match runs.last_mut() {
                    Some(last) if position < last.end => return None,
                    Some(last) if position == last.end => last.end += 1,
                    _ => {
                        left = left.checked_sub(1)?;
                        runs.push(position..position + 1);
                    }
                }
            }
            skipped.push(runs);
        }
        Some(Self(skipped))
    }

    /// The positions below `count` that a group writes.
    pub fn written(&self, group: usize, count: usize) -> Vec<usize> {
        let (mut written, mut from) = (Vec::new(), 0);
        for run in self.0.get(group).into_iter().flatten() {
            written.extend(from..run.start);
            from = run.end;
        }
        written.extend(from..count);
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_chunks_are_those_not_skipped() {
        let skipped = Skipped::new(&[vec![], vec![0, 1, 4], vec![5]], 3, 6).unwrap();
        assert_eq!(skipped.written(0, 6), [0, 1, 2, 3, 4, 5]);
        assert_eq!(skipped.written(1, 6), [2, 3, 5]);
        assert_eq!(skipped.written(2, 6), [0, 1, 2, 3, 4]);
        let none = Skipped::new(&[], 3, 2).unwrap();
        assert_eq!(none.written(2, 2), [0, 1]);
    }

    #[test]
    fn skipped_lists_are_checked() {
        for list in [vec![-1], vec![6], vec![1, 1], vec![1, 0], vec![i64::MAX]] {
            assert_eq!(
                Skipped::new(std::slice::from_ref(&list), 1, 6),
                None,
                "{list:?}"
            );
        }
        assert_eq!(Skipped::new(&[vec![]], 2, 6), None);
        let sparse =
            |runs: i64| Skipped::new(&[(0..runs).map(|run| run * 2).collect()], 1, 1 << 20);
        assert!(sparse(1024).is_some());
        assert_eq!(sparse(1025), None);
        // One run, however long.
        assert!(Skipped::new(&[(0..100_000).collect()], 1, 100_000).is_some());
    }
}
