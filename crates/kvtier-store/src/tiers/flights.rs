//! Single-flight: one load per object, however many requests want it.
//!
//! The mutex guards the table of in-flight loads; only reads and writes of the table run under it, and no
//! other lock is acquired inside.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use kvtier_common::sync::Mutex;
use kvtier_l2::ObjectSpec;
use tokio::sync::watch;

/// Identity and layout: objects of other layouts are other objects.
type Name = (kvtier_core::ObjectKey, u64);

/// In-flight loads.
#[derive(Clone, Default)]
pub struct Flights {
    table: Arc<Mutex<HashMap<Name, watch::Receiver<()>>>>,
}

/// A load that its owner has to do. Dropping it wakes the requests that wait for it, whether it succeeded or not.
pub struct Flight {
    flights: Flights,
    name: Name,
    /// Dropped with the flight, which wakes the others.
    _over: watch::Sender<()>,
}

/// The request that loads an object.
pub enum Claimed {
    /// The caller.
    Own(Flight),
    /// Another request; closed once its load is over.
    Others(watch::Receiver<()>),
}

impl Flights {
    /// Joins the load of an object, or begins it.
    pub fn claim(&self, object: &ObjectSpec) -> Claimed {
        let name = (object.key.clone(), object.layout);
        match self.table.lock().entry(name) {
            Entry::Occupied(entry) => Claimed::Others(entry.get().clone()),
            Entry::Vacant(entry) => {
                let (over, receiver) = watch::channel(());
                let name = entry.key().clone();
                entry.insert(receiver);
                Claimed::Own(Flight {
                    flights: self.clone(),
                    name,
                    _over: over,
                })
            }
        }
    }

    /// The number of in-flight loads.
    pub fn len(&self) -> usize {
        self.table.lock().len()
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.flights.table.lock().remove(&self.name);
    }
}

/// Waits until another request's load is over.
pub async fn over(mut flight: watch::Receiver<()>) {
    // Nothing is ever sent: the only event is that the sender is dropped.
    while flight.changed().await.is_ok() {}
}
