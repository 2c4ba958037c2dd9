//! One load for each object, however many requests want it.
//!
//! The mutex guards the table of loads under way; nothing is done under it but looking up.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use kvtier_l2::ObjectSpec;
use parking_lot::Mutex;
use tokio::sync::watch;

/// Identity and layout: objects of other layouts are other objects.
type Name = (kvtier_core::ObjectKey, u64);

/// Loads under way.
#[derive(Clone, Default)]
pub struct Flights {
    table: Arc<Mutex<HashMap<Name, watch::Receiver<()>>>>,
}

/// A load that its owner has to do. Dropping it tells those who wait that it is over, one way or the other.
pub struct Flight {
    flights: Flights,
    name: Name,
    /// Dropped with the flight, which wakes the others.
    _over: watch::Sender<()>,
}

/// Who loads an object.
pub enum Boarded {
    /// The caller.
    Own(Flight),
    /// Somebody else; closed once that is over.
    Others(watch::Receiver<()>),
}

impl Flights {
    /// Joins the load of an object, or begins it.
    pub fn board(&self, object: &ObjectSpec) -> Boarded {
        let name = (object.key.clone(), object.layout);
        match self.table.lock().entry(name) {
            Entry::Occupied(entry) => Boarded::Others(entry.get().clone()),
            Entry::Vacant(entry) => {
                let (over, receiver) = watch::channel(());
                let name = entry.key().clone();
                entry.insert(receiver);
                Boarded::Own(Flight {
                    flights: self.clone(),
                    name,
                    _over: over,
                })
            }
        }
    }

    /// Loads under way.
    pub fn len(&self) -> usize {
        self.table.lock().len()
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.flights.table.lock().remove(&self.name);
    }
}

/// Waits until somebody else's load is over.
pub async fn over(mut flight: watch::Receiver<()>) {
    // Nothing is ever sent: the only news is that the sender is gone.
    while flight.changed().await.is_ok() {}
}
