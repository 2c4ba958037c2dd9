//! Pins: objects that are out of the eviction order until a deadline.

use super::Candidate;
use super::list::{Links, List};
use crate::violation::Violation;
use std::collections::{BTreeMap, BTreeSet};

/// Deadlines of objects, in ticks. Objects of one tenant and one deadline are a list in the order of their insertion, which is
/// that of a prompt; of such a list the last one ends first. 12 bytes per slot once there was a pin, and two entries per list.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    /// The fact is the deadline.
    links: Links<u32>,
    /// Lists by tenant and deadline.
    lists: BTreeMap<(u32, u32), List>,
    /// Deadline and tenant of each list.
    deadlines: BTreeSet<(u32, u32)>,
}

impl Pins {
    /// The deadline of an object; `None` if it has no pin.
    pub(crate) fn deadline(&self, slot: u32) -> Option<u32> {
        self.links.get(slot)
    }

    /// Pins an object, which has no pin.
    pub(crate) fn insert(&mut self, Candidate { slot, tenant }: Candidate, deadline: u32) {
        self.links.grow_to(slot);
        let list = self.lists.entry((tenant, deadline)).or_insert_with(|| {
            self.deadlines.insert((deadline, tenant));
            List::default()
        });
        self.links.push(list, slot, deadline);
    }

    /// Removes the pin of an object, if it has one.
    pub(crate) fn remove(&mut self, Candidate { slot, tenant }: Candidate) {
        let Some(deadline) = self.links.get(slot) else {
            return;
        };
        let Some(list) = self.lists.get_mut(&(tenant, deadline)) else {
            return;
        };
        self.links.unlink(list, slot);
        if list.oldest().is_none() {
            self.lists.remove(&(tenant, deadline));
            self.deadlines.remove(&(deadline, tenant));
        }
    }

    /// The object whose pin ends first, if its deadline is at most `tick`.
    pub(crate) fn first_until(&self, tick: u32) -> Option<u32> {
        let &(deadline, tenant) = self.deadlines.first()?;
        (deadline <= tick).then(|| self.lists[&(tenant, deadline)].newest)
    }

    /// The pinned objects of a tenant, in the order in which their pins end.
    pub(crate) fn of(&self, tenant: u32) -> impl Iterator<Item = u32> {
        let lists = self.lists.range((tenant, 0)..=(tenant, u32::MAX));
        lists.flat_map(|(_, list)| self.links.newest_first(list))
    }

    /// All pinned objects, each with its tenant and deadline.
    ///
    /// # Errors
    /// A list or a deadline that contradicts the others.
    pub(crate) fn check(&self) -> Result<Vec<(u32, u32, u32)>, Violation> {
        let mut pinned = Vec::new();
        for (&(tenant, deadline), list) in &self.lists {
            let slots = self.links.check(list)?;
            let is_known = self.deadlines.contains(&(deadline, tenant));
            if slots.is_empty() || !is_known || slots.iter().any(|(fact, _)| *fact != deadline) {
                return Err(Violation(format!(
                    "tenant {tenant} at {deadline}: {slots:?}, {is_known}"
                )));
            }
            pinned.extend(slots.iter().map(|(_, slot)| (*slot, tenant, deadline)));
        }
        if self.lists.len() == self.deadlines.len() {
            Ok(pinned)
        } else {
            Err(Violation(format!(
                "deadlines without pins: {:?}",
                self.deadlines
            )))
        }
    }

    pub(crate) fn bookkeeping_bytes(&self) -> usize {
        let per_list = size_of::<((u32, u32), List)>() + size_of::<(u32, u32)>();
        self.links.bookkeeping_bytes() + self.lists.len() * per_list
    }
}
