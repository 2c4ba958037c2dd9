//! Objects that are stored or loaded by one call.

use kvtier_memory::uring::Tail;

use super::{Engine, Work, lost};
use kvtier_l2::L2Error;

/// Objects, those of them that are in flight, and their results.
pub(crate) struct Batch<Place, Item, InFlight, Done> {
    /// Files or device that the objects are in.
    pub place: Place,
    pub items: Vec<Item>,
    pub begun: usize,
    pub in_flight: Vec<Option<InFlight>>,
    pub results: Vec<Result<Done, L2Error>>,
    /// Tails that are not in use.
    pub tails: Vec<Tail>,
}

impl<Place, Item, InFlight, Done> Batch<Place, Item, InFlight, Done> {
    pub(crate) fn new(place: Place, items: Vec<Item>) -> Self {
        Self {
            place,
            begun: 0,
            in_flight: items.iter().map(|_| None).collect(),
            results: items.iter().map(|_| Err(lost())).collect(),
            tails: Vec::new(),
            items,
        }
    }

    /// Returns one result per object, in order.
    pub(crate) fn run(mut self, engine: &dyn Engine) -> Vec<Result<Done, L2Error>>
    where
        Self: Work,
    {
        engine.run(&mut self);
        self.results
    }
}
