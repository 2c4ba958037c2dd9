//! Invariants that hold whenever the lock is free: one function per rule.

use super::ExtentAllocator;
use super::counters::{Counters, Tally};
use super::slab::SlotState;
use super::state::CacheState;
use crate::violation::Violation;
use std::collections::HashMap;

/// A broken invariant: a bug in the cache.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cache invariant {invariant} is broken: {details}")]
pub struct BrokenInvariant {
    /// Name of the function that checks it.
    pub invariant: &'static str,
    /// What was found instead.
    pub details: String,
}

type Checked = Result<(), Violation>;
type Check<A> = (&'static str, fn(&CacheState<A>) -> Checked);

fn same<T: PartialEq + std::fmt::Debug>(what: &str, counted: T, known: T) -> Checked {
    if counted == known {
        return Ok(());
    }
    Err(Violation(format!(
        "{what}: counted {counted:?}, known {known:?}"
    )))
}

/// Checks all of them.
pub(super) fn check<A: ExtentAllocator>(state: &CacheState<A>) -> Result<(), BrokenInvariant> {
    let checks: [Check<A>; 13] = [
        ("bytes_within_capacity", bytes_within_capacity),
        ("extents_disjoint", extents_disjoint),
        ("sums_match_slots", sums_match_slots),
        ("tenants_match_slots", tenants_match_slots),
        ("tenants_over_quota_known", tenants_over_quota_known),
        ("namespaces_match_slots", namespaces_match_slots),
        ("index_matches_slots", index_matches_slots),
        ("slots_all_known", slots_all_known),
        ("eviction_order_complete", eviction_order_complete),
        ("pins_match_slots", pins_match_slots),
        ("unstored_match_slots", unstored_match_slots),
        ("announced_chunks_resident", announced_chunks_resident),
        ("no_accounting_errors", no_accounting_errors),
    ];
    for (invariant, rule) in checks {
        let broken = |Violation(details)| BrokenInvariant { invariant, details };
        rule(state).map_err(broken)?;
    }
    Ok(())
}

/// Objects take the bytes that are allocated, and no more than the capacity, which only a byte sum can lower.
fn bytes_within_capacity(state: &CacheState<impl ExtentAllocator>) -> Checked {
    let Counters {
        staged,
        resident,
        doomed,
    } = state.counters;
    let objects = staged.bytes + resident.bytes + doomed.bytes;
    let (used, capacity) = (state.allocator.used(), state.allocator.capacity());
    if objects == used && (used <= capacity || !state.allocator.is_addressed()) {
        return Ok(());
    }
    Err(Violation(format!(
        "objects have {objects} bytes; {used} are allocated of {capacity}"
    )))
}

/// Objects that a tier could not store are counted.
fn unstored_match_slots(state: &CacheState<impl ExtentAllocator>) -> Checked {
    let unstored = state.slab.iter().filter(|(_, slot)| slot.is_unstored());
    same("objects to store again", state.unstored, unstored.count())
}

/// No two objects share a byte.
fn extents_disjoint(state: &CacheState<impl ExtentAllocator>) -> Checked {
    let live = state
        .slab
        .iter()
        .filter(|(_, s)| s.state() != SlotState::Free);
    let mut extents: Vec<_> = live.map(|(_, slot)| slot.extent).collect();
    extents.sort_unstable();
    for pair in extents.windows(2) {
        if pair[0].offset + pair[0].len > pair[1].offset {
            return Err(Violation(format!(
                "{:?} and {:?} overlap",
                pair[0], pair[1]
            )));
        }
    }
    Ok(())
}

fn recount(state: &CacheState<impl ExtentAllocator>, mut add: impl FnMut(u32, SlotState, u64)) {
    for (number, slot) in state.slab.iter() {
        if slot.state() != SlotState::Free {
            add(slot.namespace, slot.state(), state.footprint(number));
        }
    }
}

/// The sums match the slots.
fn sums_match_slots(state: &CacheState<impl ExtentAllocator>) -> Checked {
    let mut counted = Counters::default();
    recount(state, |_, state, bytes| count(&mut counted, state, bytes));
    same("sums", counted, state.counters)?;
    let mut leased = Tally::default();
    for (number, slot) in state.slab.iter() {
        if slot.state() == SlotState::Resident && slot.leases > 0 {
            leased.add(state.footprint(number));
        }
    }
    same("leased", leased, state.leased)
}

/// Every tenant's counters match its slots, and only tenants with slots or a grant are known.
fn tenants_match_slots(state: &CacheState<impl ExtentAllocator>) -> Checked {
    let mut counted: HashMap<u32, Counters> = HashMap::new();
    recount(state, |namespace, of, bytes| {
        let tenant = state.namespaces.tenant_of(namespace);
        count(counted.entry(tenant).or_default(), of, bytes);
    });
    let known = state.namespaces.tenants.from(0);
    let known = known.map(|(number, tenant)| (number, tenant.counters));
    // A tenant with a grant is known without a slot.
    let known = known.filter(|(_, counters)| *counters != Counters::default());
    same("tenants", counted, known.collect())
}

/// The list of tenants over quota has exactly those; each tenant's leased bytes match its slots.
fn tenants_over_quota_known(state: &CacheState<impl ExtentAllocator>) -> Checked {
    let mut leased: HashMap<u32, u64> = HashMap::new();
    for (number, slot) in state.slab.iter() {
        if slot.state() == SlotState::Resident && slot.leases > 0 {
            let tenant = state.namespaces.tenant_of(slot.namespace);
            *leased.entry(tenant).or_default() += state.footprint(number);
        }
    }
    let known = state.namespaces.tenants.from(0);
    let known = known.map(|(number, tenant)| (number, tenant.leased));
    same(
        "leased of tenants",
        leased,
        known.filter(|(_, bytes)| *bytes > 0).collect(),
    )?;
    state.namespaces.tenants.check()
}

/// The users of every namespace are its slots, and only namespaces with slots are known.
fn namespaces_match_slots(state: &CacheState<impl ExtentAllocator>) -> Checked {
    let mut counted: HashMap<u32, u64> = HashMap::new();
    recount(state, |namespace, _, _| {
        *counted.entry(namespace).or_default() += 1
    });
    let namespaces = counted.len();
    same(
        "users of namespaces",
        counted,
        state.namespaces.users().collect(),
    )?;
    if state.namespaces.models_len() > namespaces {
        return Err(Violation("a model name without a namespace".to_owned()));
    }
    Ok(())
}

/// The index has every resident object and no other.
fn index_matches_slots(state: &CacheState<impl ExtentAllocator>) -> Checked {
    let mut resident = 0;
    for (number, slot) in state.slab.iter() {
        if slot.state() == SlotState::Resident {
            same(
                "found",
                state.find(slot.namespace, &slot.hash),
                Some(number),
            )?;
            resident += 1;
        }
    }
    same("entries", resident, state.index.len())
}

/// A slot is live or in the list of free ones; only resident and doomed ones have leases, doomed ones always.
fn slots_all_known(state: &CacheState<impl ExtentAllocator>) -> Checked {
    let mut live = 0;
    for (number, slot) in state.slab.iter() {
        let leases_allowed = match slot.state() {
            SlotState::Free | SlotState::Staged => slot.leases == 0,
            SlotState::Resident => true,
            SlotState::Doomed => slot.leases > 0,
        };
        if !leases_allowed {
            return Err(Violation(format!("slot {number} is {slot:?}")));
        }
        live += usize::from(slot.state() != SlotState::Free);
    }
    same("live slots", live, state.slab.live())?;
    same(
        "free slots",
        state.slab.count_free()?,
        state.slab.slots() - live,
    )
}

/// The eviction order has every resident object without a lease or pin, once, and no other.
fn eviction_order_complete(state: &CacheState<impl ExtentAllocator>) -> Checked {
    let mut order = state.policy.order()?;
    same("length of the order", order.len(), state.policy.len())?;
    order.sort_unstable();
    let evictable = state.slab.iter().filter(|(_, slot)| {
        slot.state() == SlotState::Resident && !slot.is_held() && state.policy.evicts()
    });
    let evictable: Vec<u32> = evictable.map(|(number, _)| number).collect();
    same("evictable slots", evictable, order)
}

/// Only resident objects have pins, which match their slots and the sums.
fn pins_match_slots(state: &CacheState<impl ExtentAllocator>) -> Checked {
    let mut listed: Vec<_> = state.pinned.pins.check()?;
    listed.sort_unstable();
    let (mut pinned, mut of_tenants) = (Vec::new(), HashMap::<u32, u64>::new());
    let mut sum = Tally::default();
    for (number, slot) in state.slab.iter().filter(|(_, slot)| slot.is_pinned()) {
        let tenant = state.namespaces.tenant_of(slot.namespace);
        same("pinned slot", slot.state(), SlotState::Resident)?;
        let deadline = state.pinned.pins.deadline(number).unwrap_or(0);
        pinned.push((number, tenant, deadline));
        sum.add(state.footprint(number));
        *of_tenants.entry(tenant).or_default() += state.footprint(number);
    }
    same("pins", pinned, listed)?;
    same("pinned", sum, state.pinned.tally)?;
    let known = state.namespaces.tenants.from(0);
    let known = known.map(|(number, tenant)| (number, tenant.pinned));
    let known = known.filter(|(_, bytes)| *bytes > 0);
    same("pinned of tenants", of_tenants, known.collect())
}

/// A chunk that is announced has all objects that it was announced for.
fn announced_chunks_resident(state: &CacheState<impl ExtentAllocator>) -> Checked {
    let mut announced = state.events.iter().flat_map(|log| log.announced());
    let absent = announced.find(|(hash, row)| {
        let number = state.namespaces.find(&row.namespace);
        number.is_none_or(|number| state.find(number, hash).is_none())
    });
    match absent {
        Some((hash, row)) => Err(Violation(format!("chunk {hash:?} of {row:?}"))),
        None => Ok(()),
    }
}

/// No accounting error occurred so far.
fn no_accounting_errors(state: &CacheState<impl ExtentAllocator>) -> Checked {
    same("accounting errors", state.accounting_errors, 0)
}

fn count(counters: &mut Counters, state: SlotState, bytes: u64) {
    match state {
        SlotState::Free => {}
        SlotState::Staged => counters.staged.add(bytes),
        SlotState::Resident => counters.resident.add(bytes),
        SlotState::Doomed => counters.doomed.add(bytes),
    }
}
