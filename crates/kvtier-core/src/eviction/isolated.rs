//! One order for each tenant; among tenants, the object that was used longest ago leaves first.

use super::list::{Links, List, NONE};
use super::{Candidate, EvictionPolicy};

/// Tenants compared at once. With up to so many to choose from, the order is exactly that of LRU; with more, the oldest
/// of some is taken, in turn, so that the cost does not grow with the tenants.
const COMPARED: usize = 8;

/// A tenant's list.
#[derive(Clone, Copy, Debug)]
struct Tenant {
    list: List,
    /// Its place among those who may lose an object; `NONE` if it may not.
    open_at: u32,
    protected: bool,
}

impl Default for Tenant {
    fn default() -> Self {
        Self {
            list: List::default(),
            open_at: NONE,
            protected: false,
        }
    }
}

/// A tenant that may lose an object, with what a comparison needs, so that one reads neighbours in memory only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Open {
    salt: u32,
    /// When its oldest object was used.
    oldest_used: u64,
}

/// Who loses objects, up to which use: the tenant compared with it has an older one then. So a tenant's objects leave in
/// runs, as they came, and what they share is in the processor's cache.
#[derive(Clone, Copy, Debug)]
struct Loser {
    salt: u32,
    until: u64,
}

const NOBODY: Loser = Loser {
    salt: NONE,
    until: 0,
};

/// A list for each tenant. The fact of a slot is the number of its use, counted over all slots. 16 bytes a slot, 24 a
/// tenant, 16 for each that may lose an object.
#[derive(Debug)]
pub struct IsolatedLru {
    links: Links<u64>,
    /// By the salt's number.
    tenants: Vec<Tenant>,
    /// Tenants that have something and are not protected.
    open: Vec<Open>,
    /// Where in `open` the next comparison starts.
    turn: usize,
    loser: Loser,
    uses: u64,
    len: usize,
}

impl Default for IsolatedLru {
    fn default() -> Self {
        Self {
            links: Links::default(),
            tenants: Vec::new(),
            open: Vec::new(),
            turn: 0,
            loser: NOBODY,
            uses: 0,
            len: 0,
        }
    }
}

impl IsolatedLru {
    fn know(&mut self, salt: u32) {
        if salt as usize >= self.tenants.len() {
            self.tenants.resize(salt as usize + 1, Tenant::default());
        }
    }

    fn unlink(&mut self, Candidate { slot, salt }: Candidate) {
        let list = &mut self.tenants[salt as usize].list;
        self.links.unlink(list, slot);
        self.len -= 1;
    }

    fn push(&mut self, Candidate { slot, salt }: Candidate) {
        self.uses += 1;
        let list = &mut self.tenants[salt as usize].list;
        self.links.push(list, slot, self.uses);
        self.len += 1;
    }

    /// When a slot that is in a list was used.
    fn used(&self, slot: u32) -> u64 {
        self.links.get(slot).unwrap_or(0)
    }

    /// After a tenant's list or protection has changed: whether it may lose an object, and when that was used.
    fn settle(&mut self, salt: u32) {
        let Tenant {
            list: List { oldest, .. },
            open_at,
            protected,
        } = self.tenants[salt as usize];
        let may_lose = oldest != NONE && !protected;
        match (may_lose, open_at) {
            (false, NONE) => {}
            (true, NONE) => {
                let oldest_used = self.used(oldest);
                self.tenants[salt as usize].open_at = self.open.len() as u32;
                self.open.push(Open { salt, oldest_used });
                if oldest_used < self.loser.until {
                    self.loser = NOBODY;
                }
            }
            (true, at) => self.open[at as usize].oldest_used = self.used(oldest),
            (false, at) => {
                self.tenants[salt as usize].open_at = NONE;
                self.open.swap_remove(at as usize);
                if let Some(moved) = self.open.get(at as usize) {
                    self.tenants[moved.salt as usize].open_at = at;
                }
            }
        }
    }

    /// The next object of the loser, while it is one.
    fn losing(&self) -> Option<u32> {
        let Loser { salt, until } = self.loser;
        let tenant = self.tenants.get(salt as usize)?;
        let open = self.open.get(tenant.open_at as usize)?;
        (open.oldest_used <= until).then_some(tenant.list.oldest)
    }

    /// Compares some tenants.
    fn choose(&mut self) -> Option<u32> {
        let many = self.open.len();
        if many <= COMPARED {
            self.turn = 0;
        } else {
            self.turn %= many;
        }
        let (mut first, mut second) = (None::<Open>, u64::MAX);
        for step in 0..many.min(COMPARED) {
            let at = self.turn + step;
            let open = self.open[if at < many { at } else { at - many }];
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
        let salt = first?.salt;
        self.loser = Loser {
            salt,
            until: second,
        };
        Some(self.tenants[salt as usize].list.oldest)
    }
}

impl EvictionPolicy for IsolatedLru {
    fn name(&self) -> &'static str {
        super::EvictionKind::IsolatedLru.name()
    }

    fn insert(&mut self, candidate: Candidate, _: bool) {
        let Candidate { slot, salt } = candidate;
        self.links.grow_to(slot);
        self.know(salt);
        if self.links.contains(slot) {
            self.unlink(candidate);
        }
        self.push(candidate);
        self.settle(salt);
    }

    fn withdraw(&mut self, candidate: Candidate) {
        if self.links.contains(candidate.slot) {
            self.unlink(candidate);
            self.settle(candidate.salt);
        }
    }

    fn touch(&mut self, candidate: Candidate) {
        if self.links.contains(candidate.slot) {
            self.unlink(candidate);
            self.push(candidate);
            self.settle(candidate.salt);
        }
    }

    fn victim(&mut self) -> Option<u32> {
        self.losing().or_else(|| self.choose())
    }

    fn isolates(&self) -> bool {
        true
    }

    fn victim_of(&self, salt: u32) -> Option<u32> {
        self.tenants.get(salt as usize)?.list.oldest()
    }

    fn protect(&mut self, salt: u32, protected: bool) {
        self.know(salt);
        self.tenants[salt as usize].protected = protected;
        self.settle(salt);
    }

    fn upcoming(&self, salt: Option<u32>, limit: usize, slots: &mut Vec<u32>) {
        let first = match salt {
            Some(salt) => self.victim_of(salt),
            None => self.losing(),
        };
        slots.extend(self.links.from(first).take(limit));
    }

    fn len(&self) -> usize {
        self.len
    }

    fn order(&self) -> Result<Vec<u32>, String> {
        let mut order = Vec::with_capacity(self.len);
        for (salt, tenant) in self.tenants.iter().enumerate() {
            let slots = self.links.check(&tenant.list);
            let slots = slots.map_err(|error| format!("tenant {salt}: {error}"))?;
            if !slots.is_sorted_by(|(used, _), (later, _)| used < later) {
                return Err(format!(
                    "tenant {salt} was used in another order: {slots:?}"
                ));
            }
            order.extend(slots);
            let may_lose = tenant.list.len > 0 && !tenant.protected;
            let open = Open {
                salt: salt as u32,
                oldest_used: self.used(tenant.list.oldest),
            };
            let is_open = self.open.get(tenant.open_at as usize) == Some(&open);
            if may_lose != is_open {
                return Err(format!("tenant {salt} may lose objects or not: {tenant:?}"));
            }
        }
        let open = self.tenants.iter().filter(|tenant| tenant.open_at != NONE);
        if order.len() != self.len || open.count() != self.open.len() {
            return Err(format!(
                "the lists hold {} slots; expected {}",
                order.len(),
                self.len
            ));
        }
        order.sort_unstable();
        Ok(order.into_iter().map(|(_, slot)| slot).collect())
    }

    fn bookkeeping_bytes(&self) -> usize {
        self.links.bookkeeping_bytes()
            + self.tenants.capacity() * size_of::<Tenant>()
            + self.open.capacity() * size_of::<Open>()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Lru;
    use super::*;
    use proptest::prelude::*;

    fn of(salt: u32, slot: u32) -> Candidate {
        Candidate { slot, salt }
    }

    /// Takes the victims one after the other.
    fn drain(policy: &mut dyn EvictionPolicy, salt_of: impl Fn(u32) -> u32) -> Vec<u32> {
        let mut left = Vec::new();
        while let Some(slot) = policy.victim() {
            policy.withdraw(of(salt_of(slot), slot));
            left.push(slot);
        }
        left
    }

    #[test]
    fn a_tenant_loses_its_own_oldest() {
        let mut policy = IsolatedLru::default();
        for (salt, slot) in [(0, 1), (1, 2), (0, 3), (1, 9000)] {
            policy.insert(of(salt, slot), false);
        }
        policy.touch(of(1, 2));
        assert_eq!(policy.victim_of(1), Some(9000));
        assert_eq!(policy.victim_of(0), Some(1));
        assert_eq!(policy.victim_of(7), None);
        assert_eq!(policy.order().unwrap(), [1, 3, 9000, 2]);
    }

    #[test]
    fn what_is_protected_is_named_for_its_tenant_only() {
        let mut policy = IsolatedLru::default();
        policy.insert(of(0, 1), false);
        policy.protect(0, true);
        policy.protect(5, true);
        policy.insert(of(5, 7), false);
        assert_eq!(policy.victim(), None);
        policy.withdraw(of(5, 7));
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
    fn all_leave_in_the_end_however_many_tenants() {
        let mut policy = IsolatedLru::default();
        for slot in 0..1000 {
            policy.insert(of(slot % 100, slot), false);
        }
        let left = drain(&mut policy, |slot| slot % 100);
        assert_eq!(left.len(), 1000);
        assert!(policy.order().unwrap().is_empty());
        // Not the exact order, but never a young tenant's while older ones are left.
        let late = left[..300].iter().filter(|&&slot| slot >= 900).count();
        assert_eq!(late, 0, "the youngest left among the first");
    }

    proptest! {
        /// With few tenants the order is that of one list.
        #[test]
        fn few_tenants_are_one_lru(
            steps in prop::collection::vec((0..3u8, 0..COMPARED as u32, 0..40u32), 0..200)
        ) {
            let (mut isolated, mut lru) = (IsolatedLru::default(), Lru::default());
            for (step, salt, slot) in steps {
                // A slot belongs to one tenant while it lives.
                let candidate = of(salt, salt * 40 + slot);
                for policy in [&mut isolated as &mut dyn EvictionPolicy, &mut lru] {
                    match step {
                        0 => policy.insert(candidate, false),
                        1 => policy.withdraw(candidate),
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
