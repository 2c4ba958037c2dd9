//! Isolated LRU: one order per tenant; among tenants, the least recently used object is evicted first.

use super::list::{Links, List, NONE};
use super::{Candidate, EvictionPolicy};
use crate::violation::Violation;

/// Tenants compared at once. With up to this many evictable tenants the order is exactly that of LRU; with more, some are
/// compared at a time, in turn, so that the cost does not grow with the tenants.
const COMPARED: usize = 8;

/// List of a tenant.
#[derive(Clone, Copy, Debug)]
struct TenantOrder {
    list: List,
    /// Index in the list of evictable tenants; `NONE` if the tenant is not evictable.
    evictable_at: u32,
    protected: bool,
}

impl Default for TenantOrder {
    fn default() -> Self {
        Self {
            list: List::default(),
            evictable_at: NONE,
            protected: false,
        }
    }
}

/// A tenant that may lose an object, with what a comparison needs, so that comparisons read adjacent memory only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Evictable {
    tenant: u32,
    /// When its oldest object was used.
    oldest_used: u64,
}

/// The tenant to evict from, up to the use `until`: from then on a tenant compared with it has an older object. So a
/// tenant's objects are evicted in runs, as they came, and their shared metadata is in the processor's cache.
#[derive(Clone, Copy, Debug)]
struct Loser {
    tenant: u32,
    until: u64,
}

const NO_LOSER: Loser = Loser {
    tenant: NONE,
    until: 0,
};

/// One list per tenant. The fact of a slot is the number of its use, counted over all slots. 16 bytes per slot, 32 per
/// tenant, 16 more per evictable one.
#[derive(Debug)]
pub struct IsolatedLru {
    links: Links<u64>,
    /// Tenants by number.
    tenants: Vec<TenantOrder>,
    /// Tenants that have objects and are not protected.
    evictable: Vec<Evictable>,
    /// Index in `evictable` at which the next comparison starts.
    turn: usize,
    loser: Loser,
    uses: u64,
    /// Uses of objects inserted as first, all before `uses`.
    first_uses: u64,
    len: usize,
}

/// `uses` of an empty order.
const FIRST_USE: u64 = 1 << 63;

impl Default for IsolatedLru {
    fn default() -> Self {
        Self {
            links: Links::default(),
            tenants: Vec::new(),
            evictable: Vec::new(),
            turn: 0,
            loser: NO_LOSER,
            uses: FIRST_USE,
            first_uses: 0,
            len: 0,
        }
    }
}

impl IsolatedLru {
    fn grow_to(&mut self, tenant: u32) {
        if tenant as usize >= self.tenants.len() {
            self.tenants
                .resize(tenant as usize + 1, TenantOrder::default());
        }
    }

    fn unlink(&mut self, Candidate { slot, tenant }: Candidate) {
        let list = &mut self.tenants[tenant as usize].list;
        self.links.unlink(list, slot);
        self.len -= 1;
    }

    fn push(&mut self, Candidate { slot, tenant }: Candidate) {
        self.uses += 1;
        let list = &mut self.tenants[tenant as usize].list;
        self.links.push(list, slot, self.uses);
        self.len += 1;
    }

    /// When a slot that is in a list was used.
    fn used(&self, slot: u32) -> u64 {
        self.links.get(slot).unwrap_or(0)
    }

    /// Updates the list of evictable tenants after a tenant's list or protection changed.
    fn update_evictable(&mut self, tenant: u32) {
        let TenantOrder {
            list: List { oldest, .. },
            evictable_at,
            protected,
        } = self.tenants[tenant as usize];
        let may_lose = oldest != NONE && !protected;
        match (may_lose, evictable_at) {
            (false, NONE) => {}
            (true, NONE) => {
                let oldest_used = self.used(oldest);
                self.tenants[tenant as usize].evictable_at = self.evictable.len() as u32;
                self.evictable.push(Evictable {
                    tenant,
                    oldest_used,
                });
                if oldest_used < self.loser.until {
                    self.loser = NO_LOSER;
                }
            }
            (true, at) => self.evictable[at as usize].oldest_used = self.used(oldest),
            (false, at) => {
                self.tenants[tenant as usize].evictable_at = NONE;
                self.evictable.swap_remove(at as usize);
                if let Some(moved) = self.evictable.get(at as usize) {
                    self.tenants[moved.tenant as usize].evictable_at = at;
                }
            }
        }
    }

    /// The next object of the current loser.
    fn losing(&self) -> Option<u32> {
        let Loser { tenant, until } = self.loser;
        let tenant = self.tenants.get(tenant as usize)?;
        let open = self.evictable.get(tenant.evictable_at as usize)?;
        (open.oldest_used <= until).then_some(tenant.list.oldest)
    }

    /// Compares some tenants and makes the one with the oldest object the loser. Returns that object.
    fn choose(&mut self) -> Option<u32> {
        let many = self.evictable.len();
        if many <= COMPARED {
            self.turn = 0;
        } else {
            self.turn %= many;
        }
        let (mut first, mut second) = (None::<Evictable>, u64::MAX);
        for step in 0..many.min(COMPARED) {
            let at = self.turn + step;
            let open = self.evictable[if at < many { at } else { at - many }];
            match first {
                Some(older) if older.oldest_used < open.oldest_used => {
                    second = second.min(open.oldest_used);
                }
                _ => {
                    second = first.map_or(second, |younger| younger.oldest_used);
                    first = Some(open);
                }
            }
        }
        self.turn += COMPARED;
        let tenant = first?.tenant;
        self.loser = Loser {
            tenant,
            until: second,
        };
        Some(self.tenants[tenant as usize].list.oldest)
    }
}

impl EvictionPolicy for IsolatedLru {
    fn name(&self) -> &'static str {
        super::EvictionKind::IsolatedLru.name()
    }

    fn insert(&mut self, candidate: Candidate, _: bool) {
        let Candidate { slot, tenant } = candidate;
        self.links.grow_to(slot);
        self.grow_to(tenant);
        if self.links.contains(slot) {
            self.unlink(candidate);
        }
        self.push(candidate);
        self.update_evictable(tenant);
    }

    fn insert_first(&mut self, candidate: Candidate) {
        let Candidate { slot, tenant } = candidate;
        self.links.grow_to(slot);
        self.grow_to(tenant);
        if self.links.contains(slot) {
            self.unlink(candidate);
        }
        self.first_uses += 1;
        let list = &mut self.tenants[tenant as usize].list;
        self.links.push_first(list, slot, self.first_uses);
        self.len += 1;
        self.update_evictable(tenant);
        // It may be older than what the current loser has.
        self.loser = NO_LOSER;
    }

    fn remove(&mut self, candidate: Candidate) {
        if self.links.contains(candidate.slot) {
            self.unlink(candidate);
            self.update_evictable(candidate.tenant);
        }
    }

    fn touch(&mut self, candidate: Candidate) {
        if self.links.contains(candidate.slot) {
            self.unlink(candidate);
            self.push(candidate);
            self.update_evictable(candidate.tenant);
        }
    }

    fn victim(&mut self) -> Option<u32> {
        self.losing().or_else(|| self.choose())
    }

    fn isolates(&self) -> bool {
        true
    }

    fn victim_of(&self, tenant: u32) -> Option<u32> {
        self.tenants.get(tenant as usize)?.list.oldest()
    }

    fn protect(&mut self, tenant: u32, protected: bool) {
        self.grow_to(tenant);
        self.tenants[tenant as usize].protected = protected;
        self.update_evictable(tenant);
    }

    fn upcoming(&self, tenant: Option<u32>, limit: usize, slots: &mut Vec<u32>) {
        let first = match tenant {
            Some(tenant) => self.victim_of(tenant),
            None => self.losing(),
        };
        slots.extend(self.links.from(first).take(limit));
    }

    fn len(&self) -> usize {
        self.len
    }

    fn order(&self) -> Result<Vec<u32>, Violation> {
        let mut order = Vec::with_capacity(self.len);
        for (number, tenant) in self.tenants.iter().enumerate() {
            let slots = self.links.check(&tenant.list);
            let slots = slots.map_err(|error| Violation(format!("tenant {number}: {error}")))?;
            if !slots.is_sorted_by(|(used, _), (later, _)| used < later) {
                return Err(Violation(format!(
                    "tenant {number} is not in the order of use: {slots:?}"
                )));
            }
            order.extend(slots);
            let may_lose = tenant.list.len > 0 && !tenant.protected;
            let open = Evictable {
                tenant: number as u32,
                oldest_used: self.used(tenant.list.oldest),
            };
            let is_listed = self.evictable.get(tenant.evictable_at as usize) == Some(&open);
            if may_lose != is_listed {
                return Err(Violation(format!(
                    "the list of tenants to evict from is wrong about tenant {number}: {tenant:?}"
                )));
            }
        }
        let open = self
            .tenants
            .iter()
            .filter(|tenant| tenant.evictable_at != NONE);
        if order.len() != self.len || open.count() != self.evictable.len() {
            return Err(Violation(format!(
                "the lists hold {} slots; expected {}",
                order.len(),
                self.len
            )));
        }
        order.sort_unstable();
        Ok(order.into_iter().map(|(_, slot)| slot).collect())
    }

    fn bookkeeping_bytes(&self) -> usize {
        self.links.bookkeeping_bytes()
            + self.tenants.capacity() * size_of::<TenantOrder>()
            + self.evictable.capacity() * size_of::<Evictable>()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Lru;
    use super::*;
    use proptest::prelude::*;

    fn of(tenant: u32, slot: u32) -> Candidate {
        Candidate { slot, tenant }
    }

    /// Removes the victims one after the other.
    fn drain(policy: &mut dyn EvictionPolicy, tenant_of: impl Fn(u32) -> u32) -> Vec<u32> {
        let mut left = Vec::new();
        while let Some(slot) = policy.victim() {
            policy.remove(of(tenant_of(slot), slot));
            left.push(slot);
        }
        left
    }

    // proves: docs/compare.md#l1-in-host-memory
    #[test]
    fn victim_of_tenant_is_its_own_oldest() {
        let mut policy = IsolatedLru::default();
        for (tenant, slot) in [(0, 1), (1, 2), (0, 3), (1, 9000)] {
            policy.insert(of(tenant, slot), false);
        }
        policy.touch(of(1, 2));
        assert_eq!(policy.victim_of(1), Some(9000));
        assert_eq!(policy.victim_of(0), Some(1));
        assert_eq!(policy.victim_of(7), None);
        assert_eq!(policy.order().unwrap(), [1, 3, 9000, 2]);
    }

    #[test]
    fn protected_objects_are_victims_of_their_tenant_only() {
        let mut policy = IsolatedLru::default();
        policy.insert(of(0, 1), false);
        policy.protect(0, true);
        policy.protect(5, true);
        policy.insert(of(5, 7), false);
        assert_eq!(policy.victim(), None);
        policy.remove(of(5, 7));
        policy.insert(of(0, 2), false);
        assert_eq!(policy.victim(), None);
        assert_eq!(policy.victim_of(0), Some(1));
        policy.insert(of(1, 3), false);
        assert_eq!(policy.victim(), Some(3));
        policy.protect(0, false);
        assert_eq!(policy.victim(), Some(1));
        assert_eq!(policy.order().unwrap(), [1, 2, 3]);
    }

    #[test]
    fn all_objects_are_evicted_with_many_tenants() {
        let mut policy = IsolatedLru::default();
        for slot in 0..1000 {
            policy.insert(of(slot % 100, slot), false);
        }
        let left = drain(&mut policy, |slot| slot % 100);
        assert_eq!(left.len(), 1000);
        assert!(policy.order().unwrap().is_empty());
        // Not the exact order, but never a young object while much older ones are left.
        let late = left[..300].iter().filter(|&&slot| slot >= 900).count();
        assert_eq!(late, 0, "the youngest were evicted among the first");
    }

    proptest! {
        /// With few tenants the order is that of one list.
        #[test]
        fn few_tenants_equal_one_lru(
            steps in prop::collection::vec((0..4u8, 0..COMPARED as u32, 0..40u32), 0..200)
        ) {
            let (mut isolated, mut lru) = (IsolatedLru::default(), Lru::default());
            for (step, tenant, slot) in steps {
                // A slot belongs to one tenant while it lives.
                let candidate = of(tenant, tenant * 40 + slot);
                for policy in [&mut isolated as &mut dyn EvictionPolicy, &mut lru] {
                    match step {
                        0 => policy.insert(candidate, false),
                        1 => policy.remove(candidate),
                        2 => policy.insert_first(candidate),
                        _ => policy.touch(candidate),
                    }
                }
                prop_assert_eq!(isolated.order(), lru.order());
                prop_assert_eq!(isolated.victim(), lru.victim());
                prop_assert_eq!(isolated.len(), lru.len());
            }
            let expected = lru.order().unwrap();
            prop_assert_eq!(drain(&mut isolated, |slot| slot / 40), expected);
        }
    }
}
