//! Objects that are stored or loaded by one call.

use kvtier_memory::uring::Tail;

use super::files::{Files, LookupScope};
use super::io::{self, Work};
use crate::error::L2Error;

/// Objects, those of them that are in flight, and their results.
pub(super) struct Batch<'a, Item, InFlight, Done> {
    pub files: &'a Files,
    pub scope: LookupScope,
    pub items: Vec<Item>,
    pub begun: usize,
    pub in_flight: Vec<Option<InFlight>>,
    pub results: Vec<Result<Done, L2Error>>,
    /// Tails that are not in use.
    pub tails: Vec<Tail>,
}

impl<'a, Item, InFlight, Done> Batch<'a, Item, InFlight, Done> {
    pub(super) fn new(files: &'a Files, items: Vec<Item>) -> Self {
        Self {
            files,
            scope: files.lookup_scope(),
            begun: 0,
            in_flight: items.iter().map(|_| None).collect(),
            results: items.iter().map(|_| Err(io::lost())).collect(),
            tails: Vec::new(),
            items,
        }
    }

    /// Returns one result per object, in order.
    pub(super) fn run(mut self) -> Vec<Result<Done, L2Error>>
    where
        Self: Work,
    {
        self.files.engine.run(&mut self);
        self.results
    }
}
