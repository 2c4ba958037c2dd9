//! The state machine behind the lock: its parts and the steps that operations consist of.

use super::clock::{TICKS_PER_SECOND, ticks};
use super::counters::{Counters, Tally, Totals};
use super::events::{EventLog, StoredChunk, counted};
use super::index::Index;
use super::losses::{LossCause, Losses};
use super::namespaces::NamespaceTable;
use super::pins::PinnedObjects;
use super::slab::{GrantOrigin, ObjectSlot, Slab, SlotRef, SlotState};
use super::warm::WarmVictims;
use super::{CacheConfig, ExtentAllocator, Page, Removed, ResidentObject};
use crate::eviction::{Candidate, EvictionPolicy};
use crate::group_row::GroupRow;
use crate::hashing::ChunkHash;
use crate::ledger::{Journal, Object, ObjectState};
use crate::object_key::Namespace;
use foldhash::quality::RandomState;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Pinned objects of a tenant over its limit that are examined for one that is not leased.
const OWN_EXAMINED: usize = 4096;

/// Chunks of a prompt.
pub(super) type Chunks = HashSet<ChunkHash, RandomState>;

/// State of a cache. Every method is one step under the lock.
#[derive(Debug)]
pub(super) struct CacheState<A> {
    pub(super) allocator: A,
    pub(super) slab: Slab,
    pub(super) index: Index,
    pub(super) namespaces: NamespaceTable,
    /// The order of those that are neither leased nor pinned.
    pub(super) policy: Box<dyn EvictionPolicy>,
    pub(super) pinned: PinnedObjects,
    pub(super) counters: Counters,
    /// Resident objects with leases.
    pub(super) leased: Tally,
    /// Objects that a tier could not store.
    pub(super) unstored: usize,
    pub(super) totals: Totals,
    pub(super) accounting_errors: u64,
    /// The latest time passed in, in ticks; releases come without one.
    pub(super) clock: u32,
    pub(super) warm: WarmVictims,
    /// Chunks of the prompt that is being reserved: a victim among them refuses the store, so that they can be held.
    pub(super) kept_prompt: Option<Chunks>,
    /// Start of the next search for a run, in bytes from the arena's start.
    pub(super) hand: u64,
    /// Evicted objects that were not taken yet; `None` unless they are reported.
    pub(super) evicted: Option<Vec<ResidentObject>>,
    /// What the next process finds, if anything survives this one.
    pub(super) journal: Option<Box<dyn Journal>>,
    /// What was evicted, removed or refused.
    pub(super) losses: Losses,
    /// The log for routers, if there is one.
    pub(super) events: Option<Box<EventLog>>,
}

impl<A: ExtentAllocator> CacheState<A> {
    pub(super) fn new(allocator: A, config: CacheConfig) -> Self {
        Self {
            allocator,
            slab: Slab::default(),
            index: Index::default(),
            namespaces: NamespaceTable::new(config.quotas),
            policy: config.eviction.build(),
            pinned: PinnedObjects::new(config.max_pinned_share),
            counters: Counters::default(),
            leased: Tally::default(),
            unstored: 0,
            totals: Totals::default(),
            accounting_errors: 0,
            clock: 0,
            warm: WarmVictims::default(),
            kept_prompt: None,
            hand: 0,
            evicted: config.report_evicted.then(Vec::new),
            journal: None,
            losses: Losses::default(),
            events: (config.event_log_size > 0)
                .then(|| Box::new(EventLog::new(config.event_log_size))),
        }
    }

    /// Advances the clock; it never goes back.
    pub(super) fn advance_clock(&mut self, now: Duration) {
        self.clock = self.clock.max(ticks(now));
    }

    /// The resident object of this key.
    pub(super) fn find(&self, namespace: u32, hash: &ChunkHash) -> Option<u32> {
        self.index
            .find(self.index.fingerprint(namespace, hash), |number| {
                let slot = self.slab.at(number);
                slot.hash == *hash && slot.namespace == namespace
            })
    }

    pub(super) fn candidate(&self, number: u32, slot: &ObjectSlot) -> Candidate {
        Candidate {
            slot: number,
            tenant: self.namespaces.tenant_of(slot.namespace),
        }
    }

    /// Bytes that an object takes, rounding included.
    pub(super) fn footprint(&self, number: u32) -> u64 {
        self.allocator.footprint(self.slab.at(number).extent.len)
    }

    /// Adds a lease that counts as a use.
    pub(super) fn lease(&mut self, number: u32) -> SlotRef {
        self.slab.at_mut(number).note_use();
        self.hold(number)
    }

    /// Adds a lease on an object that is resident, or leased already.
    pub(super) fn hold(&mut self, number: u32) -> SlotRef {
        let slot = self.slab.at_mut(number);
        let reference = SlotRef {
            slot: number,
            generation: slot.generation(),
        };
        let is_stale = slot.use_at(self.clock);
        match slot.leases.checked_add(1) {
            Some(leases) => slot.leases = leases,
            // The count is full: the object will be freed early or never, and the error count shows it.
            None => self.accounting_errors += 1,
        }
        let is_first = slot.leases == 1 && slot.state() == SlotState::Resident;
        if is_stale {
            self.record_life(number);
        }
        if is_first {
            let bytes = self.footprint(number);
            self.leased.add(bytes);
            let candidate = self.candidate(number, self.slab.at(number));
            self.count_leased(candidate.tenant, |leased| leased.checked_add(bytes));
            self.policy.remove(candidate);
        }
        reference
    }

    /// Drops a lease. With the last one a resident object joins the eviction order, as the youngest unless it is to be evicted
    /// first, and a doomed one is freed.
    pub(super) fn end_lease(&mut self, reference: SlotRef) {
        let number = reference.slot;
        if self.slab.get(reference).is_none_or(|slot| slot.leases == 0) {
            self.accounting_errors += 1;
            return;
        }
        let slot = self.slab.at_mut(number);
        slot.leases -= 1;
        if slot.leases > 0 {
            return;
        }
        let is_stale = slot.use_at(self.clock);
        if slot.state() != SlotState::Resident {
            self.free(number);
            return;
        }
        let (is_special, was_used) = (is_stale || slot.is_special(), slot.take_use());
        let bytes = self.footprint(number);
        self.leased.sub(bytes, &mut self.accounting_errors);
        let candidate = self.candidate(number, self.slab.at(number));
        self.count_leased(candidate.tenant, |leased| leased.checked_sub(bytes));
        if is_special {
            self.end_special_lease(candidate, was_used, is_stale);
        } else {
            self.policy.insert(candidate, was_used);
        }
    }

    /// Inserts an object into the eviction order unless it is pinned, and updates it in the ledger if its time or its grant there is
    /// out of date.
    #[cold]
    fn end_special_lease(&mut self, candidate: Candidate, was_used: bool, is_stale: bool) {
        if self.slab.at_mut(candidate.slot).take_grant() || is_stale {
            self.record_life(candidate.slot);
        }
        let slot = self.slab.at_mut(candidate.slot);
        match (slot.is_pinned(), was_used) {
            (true, true) => slot.note_use(),
            (true, false) => {}
            (false, false) if slot.is_evicted_first() => self.policy.insert_first(candidate),
            (false, _) => {
                slot.evict_as_others();
                self.policy.insert(candidate, was_used);
            }
        }
    }

    /// Updates a resident object in the ledger.
    #[cold]
    fn record_life(&mut self, number: u32) {
        let slot = self.slab.at(number);
        if let Some(journal) = &mut self.journal
            && slot.state() == SlotState::Resident
        {
            let state = if slot.is_granted() {
                ObjectState::Read
            } else {
                ObjectState::Resident
            };
            journal.update(number, state, slot.used_at);
        }
    }

    /// Records an object in the ledger, if there is one.
    #[inline]
    fn record(
        journal: &mut Option<Box<dyn Journal>>,
        namespaces: &NamespaceTable,
        number: u32,
        slot: &ObjectSlot,
        state: ObjectState,
    ) {
        if let Some(journal) = journal {
            let object = Object {
                hash: &slot.hash,
                namespace: slot.namespace,
                extent: slot.extent,
                used_at: slot.used_at,
            };
            journal.insert(number, &object, state, namespaces);
        }
    }

    /// Notes that a client may copy the memory of these objects by itself from now on, until they are committed, aborted or
    /// released. A later call renews the time of a grant that the ledger has.
    pub(super) fn grant(&mut self, slots: impl Iterator<Item = SlotRef>) {
        if self.journal.is_none() {
            return;
        }
        for reference in slots {
            let number = reference.slot;
            if self.slab.get(reference).is_none() {
                continue;
            }
            let tick = self.clock;
            let slot = self.slab.at_mut(number);
            let was_granted = slot.is_granted();
            slot.grant();
            match (slot.state(), &mut self.journal) {
                (SlotState::Resident, _) if was_granted => {}
                (SlotState::Resident, _) => self.record_life(number),
                (_, Some(journal)) if was_granted => {
                    slot.used_at = tick;
                    journal.update(number, ObjectState::Withheld, tick);
                }
                (_, journal) => {
                    slot.used_at = tick;
                    Self::record(
                        journal,
                        &self.namespaces,
                        number,
                        slot,
                        ObjectState::Withheld,
                    );
                }
            }
        }
    }

    /// Positions of objects in this order by their grant: one entry per namespace and time.
    pub(super) fn by_grant(
        &self,
        slots: impl Iterator<Item = SlotRef>,
    ) -> Vec<(GrantOrigin, Vec<usize>)> {
        let mut grants: BTreeMap<(u32, u32), Vec<usize>> = BTreeMap::new();
        for (at, reference) in slots.enumerate() {
            let slot = self.slab.at(reference.slot);
            grants
                .entry((slot.namespace, slot.used_at))
                .or_default()
                .push(at);
        }
        let grants = grants.into_iter().filter_map(|((namespace, tick), at)| {
            let origin = GrantOrigin {
                namespace: Arc::clone(self.namespaces.get(namespace)?),
                granted_at: Duration::from_secs(tick.into()) / TICKS_PER_SECOND,
            };
            Some((origin, at))
        });
        grants.collect()
    }

    /// Drops one user of a namespace.
    pub(super) fn drop_user(&mut self, namespace: u32) {
        self.namespaces
            .drop_user(namespace, &mut self.accounting_errors);
        if let Some(journal) = &mut self.journal
            && self.namespaces.get(namespace).is_none()
        {
            journal.forget_namespace(namespace);
        }
    }

    fn count_leased(&mut self, tenant: u32, change: impl FnOnce(u64) -> Option<u64>) {
        let tenant = self.namespaces.tenants.get_mut(tenant);
        match tenant.and_then(|tenant| Some((change(tenant.leased)?, tenant))) {
            Some((leased, tenant)) => tenant.leased = leased,
            None => self.accounting_errors += 1,
        }
    }

    /// Records a use of a resident object.
    pub(super) fn touch(&mut self, number: u32) {
        if self.slab.at_mut(number).use_at(self.clock) {
            self.record_life(number);
        }
        let slot = self.slab.at_mut(number);
        if slot.is_held() {
            slot.note_use();
            return;
        }
        slot.evict_as_others();
        let candidate = self.candidate(number, self.slab.at(number));
        self.policy.touch(candidate);
    }

    /// Makes a resident object the youngest of those that may be evicted, unless it is to be evicted first.
    pub(super) fn renew(&mut self, number: u32) {
        if !self.slab.at(number).is_held() {
            let reference = self.hold(number);
            self.end_lease(reference);
        }
    }

    /// Puts the resident ones of these first in the eviction order, in this order; a leased one, after its leases.
    pub(super) fn evict_first(&mut self, committed: impl Iterator<Item = SlotRef>) {
        for reference in committed {
            // The others were duplicates, or aborted.
            if self.slab.get(reference).is_none() {
                continue;
            }
            if self.put_first(reference.slot).is_none() {
                self.slab.at_mut(reference.slot).evict_first();
            }
        }
    }

    /// Puts a resident object first in the eviction order. Returns whether it was not; `None` for one that is leased or pinned.
    pub(super) fn put_first(&mut self, number: u32) -> Option<bool> {
        let slot = self.slab.at_mut(number);
        if slot.is_held() {
            return None;
        }
        let is_new = !slot.is_evicted_first();
        slot.evict_first();
        let candidate = self.candidate(number, self.slab.at(number));
        self.policy.insert_first(candidate);
        Some(is_new)
    }

    /// Moves bytes from one tally to another, in the sums and for the tenant.
    #[inline(always)]
    pub(super) fn account(&mut self, namespace: u32, bytes: u64, from: SlotState, to: SlotState) {
        let errors = &mut self.accounting_errors;
        let mut apply = |counters: &mut Counters| {
            match from {
                SlotState::Free => {}
                SlotState::Staged => counters.staged.sub(bytes, errors),
                SlotState::Resident => counters.resident.sub(bytes, errors),
                SlotState::Doomed => counters.doomed.sub(bytes, errors),
            }
            match to {
                SlotState::Free => {}
                SlotState::Staged => counters.staged.add(bytes),
                SlotState::Resident => counters.resident.add(bytes),
                SlotState::Doomed => counters.doomed.add(bytes),
            }
        };
        apply(&mut self.counters);
        let tenant = self.namespaces.tenant_of(namespace);
        match self.namespaces.tenants.count(tenant, bytes, apply) {
            Ok(None) => {}
            Ok(Some(protected)) => self.policy.protect(tenant, protected),
            Err(()) => self.accounting_errors += 1,
        }
    }

    /// Frees an object that is neither in the index nor in the eviction order.
    pub(super) fn free(&mut self, number: u32) {
        let slot = self.slab.at(number);
        let (namespace, extent, state) = (slot.namespace, slot.extent, slot.state());
        self.account(namespace, self.footprint(number), state, SlotState::Free);
        // Before its memory can be another's.
        if let Some(journal) = &mut self.journal {
            journal.remove(number);
        }
        self.allocator.free(extent);
        if self.unstored > 0 {
            self.unstored -= usize::from(self.slab.at_mut(number).take_unstored());
        }
        self.slab.free(number);
        self.drop_user(namespace);
    }

    /// Whether the reference is to a staged object; if not, it counts as an error.
    fn is_staged(&mut self, reference: SlotRef) -> bool {
        let slot = self.slab.get(reference);
        let is_staged = slot.is_some_and(|slot| slot.state() == SlotState::Staged);
        if !is_staged {
            self.accounting_errors += 1;
        }
        is_staged
    }

    /// Frees a staged object.
    pub(super) fn abort(&mut self, reference: SlotRef) {
        if self.is_staged(reference) {
            self.totals.aborted += 1;
            self.free(reference.slot);
        }
    }

    /// Makes a staged object resident, or frees it if its key is resident already. Returns the key's resident slot, and
    /// whether it is the staged one.
    pub(super) fn admit(&mut self, reference: SlotRef) -> Option<(u32, bool)> {
        if !self.is_staged(reference) {
            return None;
        }
        let number = reference.slot;
        let slot = self.slab.at(number);
        let (namespace, hash, bytes) = (slot.namespace, slot.hash, self.footprint(number));
        if let Some(first) = self.find(namespace, &hash) {
            self.totals.duplicates += 1;
            self.free(number);
            self.touch(first);
            return Some((first, false));
        }
        self.totals.committed += 1;
        self.account(namespace, bytes, SlotState::Staged, SlotState::Resident);
        let key = self.index.fingerprint(namespace, &hash);
        self.index.insert(key, number);
        let slot = self.slab.at_mut(number);
        slot.set_state(SlotState::Resident);
        slot.used_at = self.clock;
        slot.take_grant();
        let (journal, namespaces) = (&mut self.journal, &self.namespaces);
        Self::record(journal, namespaces, number, slot, ObjectState::Resident);
        let candidate = self.candidate(number, self.slab.at(number));
        if let Some(tenant) = self.namespaces.tenants.get_mut(candidate.tenant) {
            tenant.totals.committed.add(bytes);
        }
        let identity = self.namespaces.identity(namespace, &hash);
        self.policy.admit(candidate, identity);
        self.policy.insert(candidate, false);
        Some((number, true))
    }

    /// Removes a resident object, and its pin; it is freed now, or with its last lease. Returns its bytes.
    pub(super) fn remove_object(&mut self, number: u32) -> u64 {
        if self.slab.at(number).is_pinned() {
            self.take_pin(number);
        }
        let slot = self.slab.at(number);
        let (namespace, bytes, leases) = (slot.namespace, self.footprint(number), slot.leases);
        let key = self.index.fingerprint(namespace, &slot.hash);
        let candidate = self.candidate(number, slot);
        if !self.index.remove(key, number) {
            self.accounting_errors += 1;
        }
        if let Some(events) = &mut self.events
            && let Some(known) = self.namespaces.get(namespace)
        {
            events.removed(known, &slot.hash);
        }
        if leases == 0 {
            self.policy.remove(candidate);
            self.free(number);
        } else {
            self.leased.sub(bytes, &mut self.accounting_errors);
            self.count_leased(candidate.tenant, |leased| leased.checked_sub(bytes));
            self.account(namespace, bytes, SlotState::Resident, SlotState::Doomed);
            let slot = self.slab.at_mut(number);
            slot.set_state(SlotState::Doomed);
            let (is_granted, used_at) = (slot.is_granted(), slot.used_at);
            match &mut self.journal {
                Some(journal) if is_granted => {
                    journal.update(number, ObjectState::Withheld, used_at);
                }
                Some(journal) => journal.remove(number),
                None => {}
            }
        }
        bytes
    }

    /// Evicts one object; returns the bytes that it took. Of a tenant over quota, that is the cause.
    pub(super) fn evict_slot(&mut self, number: u32, mut cause: LossCause) -> u64 {
        let bytes = self.footprint(number);
        let slot = self.slab.at(number);
        let ObjectSlot {
            hash, namespace, ..
        } = *slot;
        let object_bytes = slot.extent.len;
        self.totals.last_evicted_idle_ticks = self.clock - slot.used_at.min(self.clock);
        let candidate = self.candidate(number, slot);
        if let Some(evicted) = &mut self.evicted
            && let Some(namespace) = self.namespaces.get(namespace)
        {
            evicted.push(ResidentObject {
                chunk_hash: hash,
                namespace: Arc::clone(namespace),
                bytes: object_bytes,
                leases: 0,
            });
        }
        if let Some(tenant) = self.namespaces.tenants.get_mut(candidate.tenant) {
            tenant.totals.evicted.add(bytes);
            if tenant.is_over() {
                cause = LossCause::Quota;
            }
        }
        self.totals.evicted.add(bytes);
        let identity = self.namespaces.identity(namespace, &hash);
        self.losses.record(identity, self.clock, cause);
        self.remove_object(number);
        self.policy.evicted(candidate, identity);
        bytes
    }

    /// Notes that an object of a namespace that is known was not stored, or was removed.
    #[cold]
    pub(super) fn lose(&mut self, namespace: u32, hash: &ChunkHash, cause: LossCause) {
        let key = self.namespaces.identity(namespace, hash);
        self.losses.record(key, self.clock, cause);
    }

    /// See [`super::Cache::announce`].
    pub(super) fn announce(
        &mut self,
        rows: &Arc<[GroupRow]>,
        hashes: &[ChunkHash],
        chunks: Vec<StoredChunk>,
    ) {
        let Some(mut log) = self.events.take() else {
            return;
        };
        let rows = &log.shared(rows);
        let numbers = counted(rows).map(|row| self.namespaces.find(&row.namespace));
        if let Some(numbers) = numbers.collect::<Option<Vec<_>>>() {
            for (hash, stored) in hashes.iter().zip(chunks) {
                let is_resident = |number: &u32| self.find(*number, hash).is_some();
                if !log.knows(hash, rows) && numbers.iter().all(is_resident) {
                    log.stored(*hash, rows, stored);
                }
            }
        }
        self.events = Some(log);
    }

    /// Whether an object is of the prompt that is being stored, as far as its chunk says.
    #[inline]
    pub(super) fn is_kept(&self, number: u32) -> bool {
        let prompt = self.kept_prompt.as_ref();
        prompt.is_some_and(|prompt| prompt.contains(&self.slab.at(number).hash))
    }

    /// Whether the object of a key is still resident.
    pub(super) fn is_resident(&self, reference: SlotRef) -> bool {
        let slot = self.slab.get(reference);
        slot.is_some_and(|slot| slot.state() == SlotState::Resident)
    }

    /// Pins a resident object until a deadline, or extends its pin. Counts a refusal if the shares do not allow it.
    pub(super) fn pin(&mut self, number: u32, deadline: u32) {
        let slot = self.slab.at(number);
        if slot.state() != SlotState::Resident || !self.policy.evicts() {
            return;
        }
        let candidate = self.candidate(number, slot);
        match self.pinned.pins.deadline(number) {
            Some(known) if known >= deadline => return,
            Some(_) => self.pinned.pins.remove(candidate),
            None => {
                let (capacity, bytes) = (self.allocator.capacity(), self.footprint(number));
                let tenant = self.namespaces.tenants.get_mut(candidate.tenant);
                if !self.pinned.add(capacity, tenant, bytes) {
                    return;
                }
                self.slab.at_mut(number).pin();
                self.policy.remove(candidate);
            }
        }
        self.pinned.pins.insert(candidate, deadline);
    }

    /// Removes an object's pin without inserting it into the eviction order.
    #[cold]
    fn take_pin(&mut self, number: u32) {
        let bytes = self.footprint(number);
        let candidate = self.candidate(number, self.slab.at(number));
        self.slab.at_mut(number).unpin();
        let tenant = self.namespaces.tenants.get_mut(candidate.tenant);
        let errors = &mut self.accounting_errors;
        self.pinned.remove(candidate, tenant, bytes, errors);
    }

    /// Ends an object's pin: unless it is leased, it joins the eviction order as if it was used now.
    fn end_pin(&mut self, number: u32) {
        self.take_pin(number);
        let slot = self.slab.at_mut(number);
        if slot.leases == 0 {
            let was_used = slot.take_use();
            let candidate = self.candidate(number, self.slab.at(number));
            self.policy.insert(candidate, was_used);
        }
    }

    /// See [`super::Cache::end_pins`].
    pub(super) fn end_pins(&mut self, tick: u32, limit: usize) -> usize {
        for ended in 0..limit {
            match self.pinned.pins.first_until(tick) {
                Some(number) => self.end_pin(number),
                None => return ended,
            }
        }
        limit
    }

    /// The next victim of a tenant whose limit demands one: pinned if there is no other.
    // A store of a tenant within its limit does not pay for it.
    #[inline(never)]
    pub(super) fn own_victim(&self, tenant: u32) -> Option<u32> {
        let victim = self.policy.victim_of(tenant);
        victim.or_else(|| self.own_pinned(tenant))
    }

    #[cold]
    fn own_pinned(&self, tenant: u32) -> Option<u32> {
        let pinned = self
            .policy
            .isolates()
            .then(|| self.pinned.pins.of(tenant))?;
        let mut examined = pinned.take(OWN_EXAMINED);
        examined.find(|number| self.slab.at(*number).leases == 0)
    }

    /// See [`super::Cache::remove`] and [`super::Cache::unload`].
    pub(super) fn remove(
        &mut self,
        namespace: &Namespace,
        hashes: &[ChunkHash],
        force: bool,
        cause: Option<LossCause>,
    ) -> Removed {
        let mut removed = Removed::default();
        for hash in hashes {
            // The namespace is removed with its last object, so it is looked up again for each.
            let number = self.namespaces.find(namespace);
            match number.and_then(|namespace| self.find(namespace, hash)) {
                Some(number) => self.remove_one(number, force, cause, &mut removed),
                None => removed.missing += 1,
            }
        }
        removed
    }

    fn remove_one(
        &mut self,
        number: u32,
        force: bool,
        cause: Option<LossCause>,
        removed: &mut Removed,
    ) {
        let slot = self.slab.at(number);
        // What a tier has is unloaded to save memory only.
        let is_kept = slot.leases > 0 || slot.is_pinned() && cause.is_none();
        if is_kept && !force {
            removed.kept += 1;
            return;
        }
        if let Some(cause) = cause {
            let (namespace, hash) = (slot.namespace, slot.hash);
            self.lose(namespace, &hash, cause);
        }
        removed.bytes += self.remove_object(number);
        removed.objects += 1;
        self.totals.removed += 1;
    }

    /// Removes the resident objects among these slots.
    pub(super) fn clear(&mut self, slots: Range<u32>, force: bool, removed: &mut Removed) {
        for number in slots {
            if self.slab.at(number).state() == SlotState::Resident {
                self.remove_one(number, force, Some(LossCause::Removed), removed);
            }
        }
    }

    /// See [`super::Cache::objects`].
    pub(super) fn objects(&self, from: u32, limit: usize) -> Page<ResidentObject> {
        let slots = self.slab.slots() as u32;
        let end = from
            .saturating_add(u32::try_from(limit).unwrap_or(u32::MAX))
            .min(slots);
        let resident = (from..end).filter_map(|number| {
            let slot = self.slab.at(number);
            if slot.state() != SlotState::Resident {
                return None;
            }
            Some(ResidentObject {
                chunk_hash: slot.hash,
                namespace: Arc::clone(self.namespaces.get(slot.namespace)?),
                bytes: slot.extent.len,
                leases: slot.leases,
            })
        });
        Page {
            entries: resident.collect(),
            next: (end < slots).then_some(end),
        }
    }
}
