//! The cache as one would write it without thinking of speed: lists searched from end to end.

use super::FirstFit;
use kvtier_core::cache::{ArenaPiece, Extent, ExtentAllocator, KeyOutcome};
use kvtier_core::quota::{Grant, QuotaConfig, QuotaMode};
use std::collections::BTreeMap;

/// Namespace and chunk, by number.
pub type Key = (usize, u32);
/// An object for as long as it has memory.
pub type Id = usize;

#[derive(Debug)]
pub struct Object {
    pub key: Key,
    pub extent: Extent,
    pub leases: u32,
    /// When its pin ends.
    pub pinned_until: Option<u64>,
    /// The number of its pin.
    pub pin: u64,
    /// Whether it is to be evicted first.
    pub goes_first: bool,
}

/// What the model knows of limits, where tenants have orders of their own.
#[derive(Debug, Default)]
pub struct Quotas {
    pub config: QuotaConfig,
    pub grants: BTreeMap<usize, Grant>,
    /// Tenants over quota, in the order of the list.
    pub over: Vec<usize>,
}

#[derive(Debug)]
pub struct Model {
    pub memory: FirstFit,
    evicts: bool,
    /// The tenant of a namespace.
    pub tenant_of: fn(usize) -> usize,
    pub quotas: Option<Quotas>,
    /// Bytes of each tenant's largest object since it last had none.
    largest: BTreeMap<usize, u64>,
    pub over_quota: u64,
    next: Id,
    pub objects: BTreeMap<Id, Object>,
    pub staged: Vec<Id>,
    pub resident: BTreeMap<Key, Id>,
    /// Resident objects without leases, the next to be evicted first.
    pub order: Vec<Id>,
    pub evicted: u64,
    pub refused: u64,
    pub max_pinned_share: f64,
    pub pins_refused: u64,
    pins: u64,
}

/// What a writer holds: the request, the position in it, and the object.
pub type ModelStaged = (usize, usize, Id);

impl Model {
    pub fn new(memory: FirstFit, evicts: bool, tenant_of: fn(usize) -> usize) -> Self {
        Self {
            memory,
            evicts,
            tenant_of,
            quotas: None,
            largest: BTreeMap::new(),
            over_quota: 0,
            next: 0,
            objects: BTreeMap::new(),
            staged: Vec::new(),
            resident: BTreeMap::new(),
            order: Vec::new(),
            evicted: 0,
            refused: 0,
            max_pinned_share: 0.0,
            pins_refused: 0,
            pins: 0,
        }
    }

    /// Bytes that an object takes, rounding included.
    fn footprint(&self, id: Id) -> u64 {
        self.memory.footprint(self.objects[&id].extent.len)
    }

    fn bytes<'a>(&self, ids: impl IntoIterator<Item = &'a Id>) -> u64 {
        ids.into_iter().map(|id| self.footprint(*id)).sum()
    }

    pub fn resident_bytes(&self) -> u64 {
        self.bytes(self.resident.values())
    }

    pub fn staged_bytes(&self) -> u64 {
        self.bytes(&self.staged)
    }

    pub fn leased(&self) -> usize {
        let leased = |id: &&Id| self.objects[id].leases > 0;
        self.resident.values().filter(leased).count()
    }

    pub fn is_resident(&self, id: Id) -> bool {
        self.resident.get(&self.objects[&id].key) == Some(&id)
    }

    /// A lease that counts as a use.
    pub fn lease(&mut self, id: Id) {
        self.objects.get_mut(&id).unwrap().goes_first = false;
        self.hold(id);
    }

    fn hold(&mut self, id: Id) {
        self.objects.get_mut(&id).unwrap().leases += 1;
        self.order.retain(|&other| other != id);
    }

    /// Puts an object in its place in the order, unless it is leased or pinned.
    fn enter_order(&mut self, id: Id) {
        let object = &self.objects[&id];
        if object.leases > 0 || object.pinned_until.is_some() {
            return;
        }
        let first = |id: &Id| self.objects[id].goes_first;
        let at = if object.goes_first {
            self.order.iter().take_while(|id| first(id)).count()
        } else {
            self.order.len()
        };
        self.order.insert(at, id);
    }

    fn is_own(&self, id: Id, tenant: usize) -> bool {
        (self.tenant_of)(self.objects[&id].key.0) == tenant
    }

    fn pinned(&self) -> Vec<Id> {
        let ids = self.resident.values().copied();
        ids.filter(|id| self.objects[id].pinned_until.is_some())
            .collect()
    }

    pub fn pinned_bytes(&self) -> u64 {
        self.bytes(&self.pinned())
    }

    pub fn pin(&mut self, id: Id, until: u64) {
        if !self.evicts {
            return;
        }
        let object = &self.objects[&id];
        let tenant = (self.tenant_of)(object.key.0);
        if object.pinned_until.is_none() {
            let share = |bytes: u64| (bytes as f64 * self.max_pinned_share) as u64;
            let own: Vec<_> = self.pinned();
            let own = own.iter().filter(|id| self.is_own(**id, tenant));
            let (own, bytes) = (self.bytes(own), self.footprint(id));
            let limit = self.limit(tenant).unwrap_or(u64::MAX);
            let is_within = self.pinned_bytes() + bytes <= share(self.memory.capacity())
                && (limit == u64::MAX || own + bytes <= share(limit));
            if !is_within {
                self.pins_refused += 1;
                return;
            }
        }
        self.order.retain(|&other| other != id);
        let object = self.objects.get_mut(&id).unwrap();
        object.goes_first = false;
        if object.pinned_until < Some(until) {
            self.pins += 1;
            (object.pinned_until, object.pin) = (Some(until), self.pins);
        }
    }

    /// The pinned object whose pin ends first; of one deadline the last.
    fn first_pin(&self, is_included: impl Fn(Id) -> bool) -> Option<Id> {
        let pinned = self.pinned().into_iter().filter(|id| is_included(*id));
        pinned.min_by_key(|id| {
            let object = &self.objects[id];
            (object.pinned_until, std::cmp::Reverse(object.pin))
        })
    }

    fn end_pin(&mut self, id: Id) {
        self.objects.get_mut(&id).unwrap().pinned_until = None;
        self.enter_order(id);
    }

    pub fn end_pins(&mut self, now: u64) -> usize {
        let is_due = |model: &Self, id| model.objects[&id].pinned_until <= Some(now);
        let mut ended = 0;
        while let Some(id) = self.first_pin(|id| is_due(self, id)) {
            self.end_pin(id);
            ended += 1;
        }
        ended
    }

    /// A tenant's next victim; a pinned one if there is no other.
    fn own_victim(&self, tenant: usize) -> Option<Id> {
        self.quotas.as_ref()?;
        let victim = self.oldest_of(tenant).map(|at| self.order[at]);
        victim.or_else(|| {
            self.first_pin(|id| self.is_own(id, tenant) && self.objects[&id].leases == 0)
        })
    }

    pub fn end_lease(&mut self, id: Id) {
        let object = self.objects.get_mut(&id).unwrap();
        object.leases -= 1;
        if object.leases == 0 {
            if self.is_resident(id) {
                self.enter_order(id);
            } else {
                self.free(id);
            }
        }
    }

    fn free(&mut self, id: Id) {
        let object = self.objects.remove(&id).unwrap();
        self.memory.free(object.extent);
        self.rebalance((self.tenant_of)(object.key.0));
    }

    /// All bytes of a tenant that have memory.
    pub fn tenant_bytes(&self, tenant: usize) -> u64 {
        let own = |id: &&Id| (self.tenant_of)(self.objects[*id].key.0) == tenant;
        self.bytes(self.objects.keys().filter(own))
    }

    pub fn limit(&self, tenant: usize) -> Option<u64> {
        let quotas = self.quotas.as_ref()?;
        let grant = quotas.grants.get(&tenant);
        grant.map_or(quotas.config.default_limit, |grant| grant.limit)
    }

    /// Whether the tenant is over quota: from the watermark on, until a ratio of that is evicted.
    fn rebalance(&mut self, tenant: usize) {
        let (bytes, limit) = (self.tenant_bytes(tenant), self.limit(tenant));
        if bytes == 0 {
            self.largest.remove(&tenant);
        }
        let Some(quotas) = &mut self.quotas else {
            return;
        };
        let at = quotas.over.iter().position(|&other| other == tenant);
        let (starts, ends) = match (limit, quotas.config.mode) {
            (None, _) => (false, true),
            (Some(limit), QuotaMode::Strict) => (bytes > limit, bytes <= limit),
            (Some(limit), QuotaMode::Soft) => {
                let reserved = quotas.grants.get(&tenant).map_or(0, |grant| grant.reserved);
                let watermark = limit as f64 * quotas.config.watermark;
                let low = (watermark * (1.0 - quotas.config.ratio)).floor();
                let starts = bytes > reserved && bytes as f64 >= watermark;
                let ends = bytes as f64 <= low || bytes <= reserved;
                (starts, ends && !starts)
            }
        };
        match at {
            None if starts => quotas.over.push(tenant),
            Some(at) if ends => drop(quotas.over.swap_remove(at)),
            _ => {}
        }
    }

    pub fn set_grant(&mut self, tenant: usize, grant: Option<Grant>) {
        let quotas = self.quotas.as_mut().unwrap();
        match grant {
            Some(grant) => drop(quotas.grants.insert(tenant, grant)),
            None => drop(quotas.grants.remove(&tenant)),
        }
        self.rebalance(tenant);
    }

    /// The place in the order of a tenant's next victim.
    fn oldest_of(&self, tenant: usize) -> Option<usize> {
        let own = |id: &Id| (self.tenant_of)(self.objects[id].key.0) == tenant;
        self.quotas.as_ref()?;
        self.order.iter().position(own)
    }

    /// The place in the order of the first that its tenant's share does not keep.
    fn oldest_unprotected(&self) -> Option<usize> {
        self.order
            .iter()
            .position(|id| !self.is_protected((self.tenant_of)(self.objects[id].key.0)))
    }

    /// Whether a tenant's share keeps its objects.
    fn is_protected(&self, tenant: usize) -> bool {
        let reserved = self.reserved(tenant);
        let largest = self.largest.get(&tenant).copied().unwrap_or(0);
        let own = self
            .resident
            .values()
            .filter(|id| self.is_own(**id, tenant));
        reserved > 0 && self.bytes(own) < reserved + largest
    }

    /// The tenant over its quota that loses objects first for a store of this tenant.
    fn over_quota_for(&self, tenant: usize) -> Option<usize> {
        let over = self.quotas.iter().flat_map(|quotas| &quotas.over);
        let own = over.clone().copied().filter(|&other| other == tenant);
        let mut over = own.chain(over.rev().copied());
        over.find(|&tenant| self.oldest_of(tenant).is_some())
    }

    /// The place in the order of the next victim for a store of this tenant, but for what only it may evict.
    fn victim_for(&self, tenant: usize) -> Option<usize> {
        match self.over_quota_for(tenant) {
            Some(over) => self.oldest_of(over),
            None => self.oldest_unprotected(),
        }
    }

    fn reserved(&self, tenant: usize) -> u64 {
        let quotas = self.quotas.as_ref();
        let grant = quotas.and_then(|quotas| quotas.grants.get(&tenant));
        grant.map_or(0, |grant| grant.reserved)
    }

    /// Whether a piece is free or its object may be evicted for a store of this tenant. `left` has the evictable bytes of tenants
    /// with a reserved share.
    fn is_movable(
        &self,
        piece: &ArenaPiece,
        tenant: usize,
        with_pinned: bool,
        left: &mut BTreeMap<usize, u64>,
    ) -> bool {
        let Some(id) = piece.owner.map(|owner| owner as Id) else {
            return true;
        };
        let is_unleased = self.is_resident(id) && self.objects[&id].leases == 0;
        let is_evictable = self.order.contains(&id) || with_pinned && is_unleased;
        if !is_evictable {
            return false;
        }
        let of = (self.tenant_of)(self.objects[&id].key.0);
        let is_over = self.quotas.iter().any(|quotas| quotas.over.contains(&of));
        if of == tenant || is_over || self.reserved(of) == 0 {
            return true;
        }
        let own = |id: &&Id| (self.tenant_of)(self.objects[*id].key.0) == of;
        let resident = self.bytes(self.resident.values().filter(own));
        let left = left
            .entry(of)
            .or_insert(resident.saturating_sub(self.reserved(of)));
        match left.checked_sub(self.footprint(id)) {
            Some(less) => *left = less,
            None => return false,
        }
        true
    }

    /// The cheapest of the shortest runs in a stretch, with its cost, if it is cheaper than `than`. As all objects are
    /// equally idle, the cost is their bytes.
    fn compare(&self, stretch: &[ArenaPiece], len: u64, cheapest: &mut Option<(u64, Vec<Id>)>) {
        let bytes =
            |pieces: &[ArenaPiece]| pieces.iter().map(|piece| piece.extent.len).sum::<u64>();
        for end in 1..=stretch.len() {
            let start = (0..end).rev().find(|&at| bytes(&stretch[at..end]) >= len);
            let Some(start) = start else { continue };
            let members = stretch[start..end].iter().filter_map(|piece| piece.owner);
            let members: Vec<_> = members.map(|owner| owner as Id).collect();
            let cost = self.bytes(&members);
            if cheapest.as_ref().is_none_or(|(least, _)| cost < *least) {
                *cheapest = Some((cost, members));
            }
        }
    }

    /// The objects of the cheapest run for an object of this length: around the next victims, or else anywhere.
    fn cheapest_run(&self, tenant: usize, len: u64, is_over: bool) -> Option<Vec<Id>> {
        let source = if is_over {
            Some(tenant)
        } else {
            self.over_quota_for(tenant)
        };
        let next = self.oldest_unprotected().map(|at| self.order[at]);
        let of = |id: Id| (self.tenant_of)(self.objects[&id].key.0);
        let source = source.or(match (&self.quotas, next) {
            (Some(_), Some(next)) => Some(of(next)),
            (_, None) => Some(tenant),
            (None, Some(_)) => None,
        });
        let seeds = self.order.iter();
        let seeds = seeds.filter(|id| source.is_none_or(|source| of(**id) == source));
        let pieces = self.memory.pieces();
        let mut cheapest = None;
        for seed in seeds.take(8) {
            let at = pieces
                .iter()
                .position(|piece| piece.owner == Some(*seed as u32));
            let (before, after) = pieces.split_at(at.unwrap());
            let mut left = BTreeMap::new();
            let mut side = |pieces: &mut dyn Iterator<Item = &ArenaPiece>| {
                let (mut stretch, mut bytes) = (Vec::new(), 0);
                for piece in pieces {
                    if !self.is_movable(piece, tenant, false, &mut left) {
                        break;
                    }
                    stretch.push(*piece);
                    bytes += piece.extent.len;
                    if bytes >= len {
                        break;
                    }
                }
                stretch
            };
            let right = side(&mut after.iter());
            let mut stretch = side(&mut before.iter().rev());
            stretch.reverse();
            stretch.extend(right);
            self.compare(&stretch, len, &mut cheapest);
        }
        if cheapest.is_none() {
            self.sweep(tenant, len, false, &mut cheapest);
        }
        cheapest.map(|(_, members)| members)
    }

    fn pinned_run(&self, tenant: usize, len: u64) -> Option<Vec<Id>> {
        let mut cheapest = None;
        if !self.pinned().is_empty() {
            self.sweep(tenant, len, true, &mut cheapest);
        }
        cheapest.map(|(_, members)| members)
    }

    fn sweep(
        &self,
        tenant: usize,
        len: u64,
        with_pinned: bool,
        cheapest: &mut Option<(u64, Vec<Id>)>,
    ) {
        let (mut stretch, mut left) = (Vec::new(), BTreeMap::new());
        for piece in &self.memory.pieces() {
            if self.is_movable(piece, tenant, with_pinned, &mut left) {
                stretch.push(*piece);
            } else {
                self.compare(&stretch, len, cheapest);
                (stretch, left) = Default::default();
            }
        }
        self.compare(&stretch, len, cheapest);
    }

    pub fn evict_over_quota(&mut self, objects: usize) -> (usize, u64) {
        let mut evicted = (0, 0);
        let mut passed_over = 0;
        while evicted.0 < objects && passed_over < objects {
            let over = &self.quotas.as_ref().unwrap().over;
            let at = over.len().checked_sub(1 + passed_over);
            let Some(&tenant) = at.and_then(|at| over.get(at)) else {
                break;
            };
            match self.own_victim(tenant) {
                Some(id) => evicted = (evicted.0 + 1, evicted.1 + self.evict_one(id)),
                None => passed_over += 1,
            }
        }
        evicted
    }

    fn touch(&mut self, id: Id) {
        self.objects.get_mut(&id).unwrap().goes_first = false;
        self.order.retain(|&other| other != id);
        self.enter_order(id);
    }

    fn go_first(&mut self, id: Id) {
        self.objects.get_mut(&id).unwrap().goes_first = true;
        self.order.retain(|&other| other != id);
        self.enter_order(id);
    }

    pub fn evict_all_first(&mut self, namespace: usize, chunks: &[u32]) -> (usize, usize) {
        let (mut first, mut held) = (0, 0);
        for chunk in chunks.iter().rev() {
            let Some(&id) = self.resident.get(&(namespace, *chunk)) else {
                continue;
            };
            let object = &self.objects[&id];
            if object.leases > 0 || object.pinned_until.is_some() {
                held += 1;
            } else {
                first += usize::from(!object.goes_first);
                self.go_first(id);
            }
        }
        (first, held)
    }

    pub fn touch_all(&mut self, namespace: usize, chunks: &[u32]) -> usize {
        let ids: Vec<_> = chunks
            .iter()
            .filter_map(|&c| self.resident.get(&(namespace, c)))
            .copied()
            .collect();
        for &id in ids.iter().rev() {
            self.touch(id);
        }
        ids.len()
    }

    fn allocate(&mut self, tenant: usize, len: u64) -> Result<Extent, KeyOutcome> {
        let unleased = |id: &&Id| self.objects[*id].leases == 0;
        let evictable = self.bytes(self.resident.values().filter(unleased));
        let all = self.bytes(self.objects.keys());
        let movable = if self.evicts { all - evictable } else { all };
        // With nothing to evict, both ways of saying no are the same.
        let taken = self.memory.footprint(len);
        if self.evicts && taken > self.memory.capacity().saturating_sub(movable) {
            return Err(KeyOutcome::NoMemory);
        }
        let mut kept = u64::MAX;
        let strict = |quotas: &Quotas| quotas.config.mode == QuotaMode::Strict;
        if self.quotas.as_ref().is_some_and(strict)
            && let Some(limit) = self.limit(tenant)
        {
            if taken > limit {
                return Err(KeyOutcome::OverQuota);
            }
            let own = |id: &&Id| (self.tenant_of)(self.objects[*id].key.0) == tenant;
            let movable = self.bytes(self.resident.values().filter(unleased).filter(own));
            if self.tenant_bytes(tenant) - movable + taken > limit {
                return Err(KeyOutcome::OverQuota);
            }
            kept = limit - taken;
            if self.tenant_bytes(tenant) > kept && self.own_victim(tenant).is_none() {
                return Err(KeyOutcome::OverQuota);
            }
        }
        let extent = self.make_hole(tenant, kept, len)?;
        while self.tenant_bytes(tenant) > kept {
            let own = self.own_victim(tenant).unwrap();
            self.evict_one(own);
        }
        Ok(extent)
    }

    fn make_hole(&mut self, tenant: usize, kept: u64, len: u64) -> Result<Extent, KeyOutcome> {
        let (mut run, mut small_victims) = (None, 0);
        loop {
            if let Some(extent) = self.memory.allocate(len, self.next as u32) {
                return Ok(extent);
            }
            let is_over = self.tenant_bytes(tenant) > kept;
            let id = |at: usize| self.order[at];
            let victim = if is_over {
                self.own_victim(tenant)
            } else {
                self.victim_for(tenant).map(id)
            };
            let own = self.oldest_of(tenant).map(id);
            let victim = victim.or(own).filter(|_| self.evicts);
            let taken = self.memory.footprint(len);
            if let Some(victim) = victim.filter(|victim| self.footprint(*victim) >= taken) {
                self.evict_one(victim);
                continue;
            }
            if run.is_none() {
                let found = victim.and_then(|_| self.cheapest_run(tenant, len, is_over));
                let found = found.or_else(|| self.pinned_run(tenant, len));
                run = Some(found.ok_or(KeyOutcome::NoMemory)?);
            }
            let (used, capacity) = (self.memory.used(), self.memory.capacity());
            let is_next = capacity - used < len + capacity / 16 && small_victims < 64;
            let has_share = |id: Id| self.reserved((self.tenant_of)(self.objects[&id].key.0)) > 0;
            if let Some(victim) = victim.filter(|victim| is_next && !has_share(*victim)) {
                small_victims += 1;
                self.evict_one(victim);
                continue;
            }
            for member in run.take().unwrap() {
                if self.objects.contains_key(&member) {
                    self.evict_one(member);
                }
            }
        }
    }

    fn evict_one(&mut self, id: Id) -> u64 {
        self.order.retain(|&other| other != id);
        self.resident.remove(&self.objects[&id].key);
        let bytes = self.footprint(id);
        self.free(id);
        self.evicted += 1;
        bytes
    }

    pub fn evict(&mut self, bytes: u64, objects: usize) -> (usize, u64) {
        let mut evicted = (0, 0);
        while evicted.1 < bytes && evicted.0 < objects {
            let Some(at) = self.oldest_unprotected().filter(|_| self.evicts) else {
                break;
            };
            evicted = (evicted.0 + 1, evicted.1 + self.evict_one(self.order[at]));
        }
        evicted
    }

    pub fn reserve(
        &mut self,
        requests: &[(usize, Vec<u32>, u64)],
    ) -> (Vec<KeyOutcome>, Vec<ModelStaged>) {
        let mut held = Vec::new();
        for (request, (namespace, chunks, _)) in requests.iter().enumerate() {
            for (position, &chunk) in chunks.iter().enumerate() {
                if let Some(&id) = self.resident.get(&(*namespace, chunk)) {
                    self.lease(id);
                    held.push((position, request, id));
                }
            }
        }
        let (mut outcomes, mut staged) = (Vec::new(), Vec::new());
        for (request, (namespace, chunks, len)) in requests.iter().enumerate() {
            for (position, &chunk) in chunks.iter().enumerate() {
                if held
                    .iter()
                    .any(|held| (held.0, held.1) == (position, request))
                {
                    outcomes.push(KeyOutcome::AlreadyResident);
                    continue;
                }
                let tenant = (self.tenant_of)(*namespace);
                match self.allocate(tenant, *len) {
                    Ok(extent) => {
                        let object = Object {
                            key: (*namespace, chunk),
                            extent,
                            leases: 0,
                            pinned_until: None,
                            pin: 0,
                            goes_first: false,
                        };
                        self.objects.insert(self.next, object);
                        let largest = self.largest.entry(tenant).or_default();
                        *largest = (*largest).max(self.memory.footprint(*len));
                        self.rebalance(tenant);
                        self.staged.push(self.next);
                        staged.push((request, position, self.next));
                        self.next += 1;
                        outcomes.push(KeyOutcome::Reserved(extent));
                    }
                    Err(why) => {
                        match why {
                            KeyOutcome::OverQuota => self.over_quota += 1,
                            _ => self.refused += 1,
                        }
                        outcomes.push(why);
                    }
                }
            }
        }
        held.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        for (_, _, id) in held {
            self.end_lease(id);
        }
        (outcomes, staged)
    }

    /// Returns the counts (inserted, duplicates, aborted), and with `lease` the objects leased, in `staged`'s order.
    pub fn commit(
        &mut self,
        staged: &[ModelStaged],
        keep: impl Fn(usize) -> bool,
        lease: bool,
        goes_first: bool,
    ) -> ((usize, usize, usize), Vec<Id>) {
        let mut order: Vec<usize> = (0..staged.len()).collect();
        order.sort_by(|&a, &b| {
            let (a, b) = (staged[a], staged[b]);
            b.1.cmp(&a.1).then(a.0.cmp(&b.0))
        });
        let mut counts = (0, 0, 0);
        let (mut leased, mut inserted) = (vec![0; staged.len()], Vec::new());
        for at in order {
            let id = staged[at].2;
            self.staged.retain(|&other| other != id);
            let key = self.objects[&id].key;
            let mut now_resident = id;
            if !keep(at) {
                counts.2 += 1;
                self.free(id);
                continue;
            } else if let Some(&first) = self.resident.get(&key) {
                counts.1 += 1;
                self.free(id);
                self.touch(first);
                now_resident = first;
            } else {
                counts.0 += 1;
                self.resident.insert(key, id);
                self.enter_order(id);
                inserted.push(id);
            }
            if lease {
                self.hold(now_resident);
                leased[at] = now_resident;
            }
        }
        for id in inserted.into_iter().filter(|_| goes_first) {
            self.go_first(id);
        }
        (counts, if lease { leased } else { Vec::new() })
    }

    /// Tries every length from the longest. Returns it, and per row where its chunks start and what they are.
    pub fn lookup(
        &mut self,
        rows: &[(usize, Option<u32>)],
        chunks: &[u32],
    ) -> (usize, Vec<(usize, Vec<Id>)>) {
        let first = |window: Option<u32>, hit: usize| match window {
            None => 0,
            Some(window) => hit.saturating_sub(window.max(1) as usize),
        };
        let serves = |hit: &usize| {
            !rows.is_empty()
                && rows.iter().all(|&(namespace, window)| {
                    let needed = &chunks[first(window, *hit)..*hit];
                    needed
                        .iter()
                        .all(|&chunk| self.resident.contains_key(&(namespace, chunk)))
                })
        };
        let hit = (1..=chunks.len()).rev().find(serves).unwrap_or(0);
        let rows: Vec<_> = rows
            .iter()
            .map(|&(namespace, window)| {
                let start = first(window, hit);
                let needed = chunks[start..hit].iter();
                (
                    start,
                    needed
                        .map(|&c| self.resident[&(namespace, c)])
                        .collect::<Vec<_>>(),
                )
            })
            .collect();
        for (_, ids) in &rows {
            for &id in ids {
                self.lease(id);
            }
        }
        (hit, rows)
    }

    pub fn remove(&mut self, key: Key, force: bool) -> Option<bool> {
        let &id = self.resident.get(&key)?;
        if self.objects[&id].leases > 0 && !force {
            return Some(false);
        }
        self.resident.remove(&key);
        self.order.retain(|&other| other != id);
        if self.objects[&id].leases == 0 {
            self.free(id);
        }
        Some(true)
    }
}
