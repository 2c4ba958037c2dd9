//! No eviction: a full cache refuses.

use super::{Candidate, EvictionPolicy};
use crate::violation::Violation;

/// Policy that never names a victim.
#[derive(Debug, Default)]
pub struct Noop(());

impl EvictionPolicy for Noop {
    fn name(&self) -> &'static str {
        "noop"
    }

    fn evicts(&self) -> bool {
        false
    }

    fn insert(&mut self, _: Candidate, _: bool) {}

    fn insert_first(&mut self, _: Candidate) {}

    fn remove(&mut self, _: Candidate) {}

    fn touch(&mut self, _: Candidate) {}

    fn victim(&mut self) -> Option<u32> {
        None
    }

    fn upcoming(&self, _: Option<u32>, _: usize, _: &mut Vec<u32>) {}

    fn len(&self) -> usize {
        0
    }

    fn order(&self) -> Result<Vec<u32>, Violation> {
        Ok(Vec::new())
    }

    fn bookkeeping_bytes(&self) -> usize {
        0
    }
}
