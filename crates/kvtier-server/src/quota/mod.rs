//! What tenants may have: one table for all tiers, kept in a file, enforced by each tier that keeps tenants apart.
//!
//! The table is there before the first tier is, so nothing is evicted by a quota that is not known yet.

mod file;
mod limit;
mod table;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crossbeam_channel::{Sender, bounded};
use kvtier_core::cache::{Cache, Page, SaltUsage};
use kvtier_core::quota::{Grant, QuotaConfig, QuotaMode};
use kvtier_l2::tier::Tier;
use parking_lot::{Mutex, RwLock};

pub use file::QuotaFile;
pub(crate) use limit::MAX_BYTES;
pub use limit::{Limit, parse_size};
pub use table::{Entry, MAX_TENANTS, Table, TierEntry};

use crate::config::{Place, QuotaSettings, ServerConfig};
use crate::engine::{Clock, L1Allocator, Salts};
use crate::l2::L2;

/// Objects evicted under one hold of L1's lock.
const SLICE: usize = 1024;

/// Tenants asked for under one hold of a lock.
const PAGE: usize = 1024;

/// The table as it was read, for those who open the tiers.
pub(crate) struct Opened {
    settings: QuotaSettings,
    places: Vec<Place>,
    file: Option<QuotaFile>,
    table: Table,
}

impl Opened {
    /// Reads the file, if there is to be one.
    ///
    /// # Errors
    /// One line: a file that cannot be used, shares that cannot be had.
    pub fn open(config: &ServerConfig, salts: &Salts) -> Result<Self, String> {
        let (file, table) = match &config.quotas.file {
            None => (None, Table::default()),
            Some(path) => {
                let (file, table) = QuotaFile::open(path)?;
                tracing::info!(tenants = table.len(), file = %file.path().display(), "read the quotas");
                (Some(file), table)
            }
        };
        // What was set before salts were hashed still holds.
        let table = table.renamed(|salt| salts.of_operator(salt).into());
        check_reserved(config, &table)?;
        Ok(Self {
            settings: config.quotas.clone(),
            places: config.places(),
            file,
            table,
        })
    }

    /// How a tier deals with limits, but for watermark and ratio. One that does not keep tenants apart has none.
    pub fn config(&self, tier: &str) -> QuotaConfig {
        let (mode, default_limit) = match self.isolates(tier) {
            true => (self.settings.mode, self.settings.default_limit.0),
            false => (QuotaMode::Soft, None),
        };
        QuotaConfig {
            mode,
            default_limit,
            ..QuotaConfig::default()
        }
    }

    /// What tenants were granted in a tier.
    pub fn grants(&self, tier: &str) -> impl Iterator<Item = (&str, Grant)> {
        let isolates = self.isolates(tier);
        self.table.grants(tier).filter(move |_| isolates)
    }

    fn isolates(&self, tier: &str) -> bool {
        let mut places = self.places.iter();
        places.any(|place| &*place.name == tier && place.isolates)
    }
}

/// Why a server would not start with its quotas, told without changing anything.
pub fn obstacle(config: &ServerConfig) -> Option<String> {
    let table = QuotaFile::peek(config.quotas.file.as_deref()?);
    table.and_then(|table| check_reserved(config, &table)).err()
}

/// Tiers may have become smaller since shares were reserved.
fn check_reserved(config: &ServerConfig, table: &Table) -> Result<(), String> {
    for place in config.places() {
        let checked = place.check_reserved(table.reserved(&place.name));
        checked.map_err(|what| {
            format!(
                "--quota-file: {what}; enlarge the tier, or reserve less while it is large enough"
            )
        })?;
    }
    Ok(())
}

/// Why an entry is as it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// It cannot be so.
    #[error("{0}")]
    Refused(String),
    /// The file could not be written.
    #[error("the quotas could not be written: {0}; nothing was changed")]
    NotWritten(String),
}

/// A change that waits to be written.
struct Waiting {
    salt: Arc<str>,
    entry: Option<Entry>,
    /// Takes whether there was an entry before.
    answer: Sender<Result<bool, ChangeError>>,
}

/// A change that was made.
struct Accepted {
    salt: Arc<str>,
    entry: Option<Arc<Entry>>,
    existed: bool,
    answer: Sender<Result<bool, ChangeError>>,
}

/// See the module.
pub struct Quotas {
    settings: QuotaSettings,
    places: Vec<Place>,
    file: Option<QuotaFile>,
    cache: Cache<L1Allocator>,
    l2: Option<Arc<L2>>,
    clock: Arc<Clock>,
    /// Guards which table is the current one, no longer than that takes to read or to set.
    table: RwLock<Arc<Table>>,
    waiting: Mutex<Vec<Waiting>>,
    /// Whose turn it is to write the file. Only those who change quotas wait for it; who reads or enforces them does not.
    /// With the reserved shares of each tier together.
    turn: Mutex<Vec<u128>>,
}

impl Quotas {
    pub(crate) fn new(
        opened: Opened,
        cache: Cache<L1Allocator>,
        l2: Option<Arc<L2>>,
        clock: Arc<Clock>,
    ) -> Self {
        let Opened {
            settings,
            places,
            file,
            table,
        } = opened;
        let is_place = |tier: &String| places.iter().any(|place| *place.name == **tier);
        let elsewhere = |entry: &Entry| entry.tiers.keys().any(|tier| !is_place(tier));
        let tenants = table.iter().filter(|(_, entry)| elsewhere(entry)).count();
        if tenants > 0 {
            tracing::warn!(tenants, "quotas name tiers that are not there");
        }
        let reserved = places.iter().map(|place| table.reserved(&place.name));
        Self {
            turn: Mutex::new(reserved.collect()),
            settings,
            places,
            file,
            cache,
            l2,
            clock,
            table: RwLock::new(Arc::new(table)),
            waiting: Mutex::default(),
        }
    }

    /// How limits are meant, and where they are kept.
    pub fn settings(&self) -> &QuotaSettings {
        &self.settings
    }

    /// The tiers, L1 first.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// Whether what is set outlives the process.
    pub fn is_persistent(&self) -> bool {
        self.file.is_some()
    }

    /// The table as it is now.
    pub fn table(&self) -> Arc<Table> {
        Arc::clone(&self.table.read())
    }

    /// Sets the entry of a tenant, or with `None` takes it away; says whether there was one. It is written when this
    /// returns, and L1 has evicted what has become too much; the tiers below have begun to.
    ///
    /// May wait for the disk. Changes that come meanwhile are written together.
    ///
    /// # Errors
    /// Then everything is as it was.
    pub fn change(&self, salt: &str, entry: Option<Entry>) -> Result<bool, ChangeError> {
        let (answer, outcome) = bounded(1);
        self.waiting.lock().push(Waiting {
            salt: salt.into(),
            entry,
            answer,
        });
        let mut turn = self.turn.lock();
        // Whoever had the turn before may have written this one too.
        let waiting = std::mem::take(&mut *self.waiting.lock());
        if !waiting.is_empty() {
            self.write(waiting, &mut turn);
        }
        drop(turn);
        let lost = |_| Err(ChangeError::NotWritten("an error of this server".into()));
        let existed = outcome.recv().unwrap_or_else(lost)?;
        self.enforce_l1();
        if let Some(l2) = &self.l2 {
            l2.enforce_quotas();
        }
        Ok(existed)
    }

    /// Evicts from L1 what tenants have too much; gives the number of objects.
    pub fn enforce_l1(&self) -> usize {
        let mut total = 0;
        loop {
            match self.cache.evict_over_quota(self.clock.now(), SLICE).objects {
                0 => return total,
                evicted => total += evicted,
            }
        }
    }

    fn write(&self, waiting: Vec<Waiting>, reserved: &mut Vec<u128>) {
        let accepted = match &self.file {
            // Large tables are not copied where nothing can fail.
            None => {
                let mut table = self.table.write();
                self.admit(waiting, Arc::make_mut(&mut table), reserved).0
            }
            Some(file) => {
                let mut table = Table::clone(&self.table());
                let before = reserved.clone();
                let (accepted, is_other) = self.admit(waiting, &mut table, reserved);
                if is_other && let Err(error) = file.save(&table) {
                    let path = file.path().display();
                    tracing::error!(%error, file = %path, "the quotas could not be written");
                    let error = ChangeError::NotWritten(format!("{path}: {error}"));
                    for change in accepted {
                        let _ = change.answer.send(Err(error.clone()));
                    }
                    *reserved = before;
                    return;
                }
                *self.table.write() = Arc::new(table);
                accepted
            }
        };
        for change in accepted {
            self.grant(&change.salt, change.entry.as_deref());
            let _ = change.answer.send(Ok(change.existed));
        }
    }

    /// Makes the changes that can be, and refuses the others; says whether anything is other than before.
    fn admit(
        &self,
        waiting: Vec<Waiting>,
        table: &mut Table,
        reserved: &mut [u128],
    ) -> (Vec<Accepted>, bool) {
        let (mut accepted, mut is_other) = (Vec::new(), false);
        for change in waiting {
            let Waiting {
                salt,
                entry,
                answer,
            } = change;
            match self.check(table, reserved, &salt, entry.as_ref()) {
                Ok(()) => {
                    let before = table.set(&salt, entry);
                    let entry = table.get(&salt).cloned();
                    is_other |= before != entry;
                    accepted.push(Accepted {
                        salt,
                        entry,
                        existed: before.is_some(),
                        answer,
                    });
                }
                Err(error) => drop(answer.send(Err(error))),
            }
        }
        (accepted, is_other)
    }

    /// Whether an entry can be so; counts what it reserves if it can.
    fn check(
        &self,
        table: &Table,
        reserved: &mut [u128],
        salt: &str,
        entry: Option<&Entry>,
    ) -> Result<(), ChangeError> {
        let refuse = |what: String| Err(ChangeError::Refused(what));
        let before = table.get(salt);
        if before.is_none() && entry.is_some() && table.len() >= MAX_TENANTS {
            return refuse(format!(
                "there are {MAX_TENANTS} tenants with a quota, the most there may be"
            ));
        }
        let mut sums = Vec::with_capacity(reserved.len());
        for (place, sum) in self.places.iter().zip(&*reserved) {
            let of_tier = |entry: &Entry| entry.of_tier(&place.name);
            let Grant { limit, reserved } = entry.map(of_tier).unwrap_or_default();
            let name = &place.name;
            if let Some(limit) = limit
                && entry.is_some()
                && reserved > limit
            {
                return refuse(format!(
                    "{name}: {reserved} reserved bytes are more than the limit of {limit}"
                ));
            }
            let old = before.map_or(0, |entry| of_tier(entry).reserved);
            let sum = sum - u128::from(old) + u128::from(reserved);
            if reserved > old
                && let Err(what) = place.check_reserved(sum)
            {
                return refuse(what);
            }
            sums.push(sum);
        }
        reserved.copy_from_slice(&sums);
        Ok(())
    }

    /// Tells the tiers.
    fn grant(&self, salt: &str, entry: Option<&Entry>) {
        for (number, place) in self.places.iter().enumerate() {
            if !place.isolates {
                continue;
            }
            let grant = entry.map(|entry| entry.of_tier(&place.name));
            match self.tier(number) {
                None => self.cache.set_grant(salt, grant),
                Some(tier) => tier.set_grant(salt, grant),
            }
        }
    }

    /// The tier of a place; `None` for L1, which is the first one.
    fn tier(&self, place: usize) -> Option<&Arc<Tier>> {
        self.l2.as_ref()?.tiers().get(place.checked_sub(1)?)
    }

    /// What tenants have and may have, as it is now.
    pub fn look(&self) -> Look<'_> {
        let leaving = |place| {
            self.tier(place)
                .map(|tier| tier.leaving_by_salt())
                .unwrap_or_default()
        };
        Look {
            quotas: self,
            table: self.table(),
            leaving: (0..self.places.len()).map(leaving).collect(),
        }
    }
}

impl std::fmt::Debug for Quotas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Quotas")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// A look at the tenants. The table is that of one moment, what they have is asked for one by one.
pub struct Look<'a> {
    quotas: &'a Quotas,
    table: Arc<Table>,
    /// Bytes by salt that each tier gave up and has not deleted yet.
    leaving: Vec<BTreeMap<Arc<str>, u64>>,
}

/// A tenant in one tier.
#[derive(Debug, Clone)]
pub struct InTier<'a> {
    /// The tier.
    pub place: &'a Place,
    /// What holds there: its entry, or the default.
    pub grant: Grant,
    /// Its bytes, those being written and those being deleted included.
    pub bytes: u64,
    /// What the tier counts of it, as long as it knows the tenant.
    pub usage: Option<SaltUsage>,
}

impl Look<'_> {
    /// The table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// A tenant in each tier, L1 first.
    pub fn tenant(&self, salt: &str) -> Vec<InTier<'_>> {
        let entry = self.table.get(salt);
        let default = Grant {
            limit: self.quotas.settings.default_limit.0,
            reserved: 0,
        };
        let in_tier = |(number, place): (usize, &Place)| {
            let usage = match self.quotas.tier(number) {
                None => self.quotas.cache.salt_usage(salt),
                Some(tier) => tier.tenant(salt),
            };
            let leaving = self.leaving[number].get(salt).copied().unwrap_or(0);
            let counted = usage.as_ref().map_or(0, |usage| usage.counted_bytes);
            InTier {
                place: &self.quotas.places[number],
                grant: entry.map_or(default, |entry| entry.of_tier(&place.name)),
                bytes: counted + leaving,
                usage,
            }
        };
        self.quotas.places.iter().enumerate().map(in_tier).collect()
    }

    /// All tenants that have an entry or anything anywhere, in order.
    pub fn known(&self) -> BTreeSet<Arc<str>> {
        let mut known: BTreeSet<_> = self
            .table
            .iter()
            .map(|(salt, _)| Arc::clone(salt))
            .collect();
        let mut add = |page: &dyn Fn(u32) -> Page<SaltUsage>| {
            let mut from = Some(0);
            while let Some(start) = from {
                let page = page(start);
                known.extend(page.entries.into_iter().map(|usage| usage.salt));
                from = page.next;
            }
        };
        for number in 0..self.quotas.places.len() {
            match self.quotas.tier(number) {
                None => add(&|from| self.quotas.cache.salts(from, PAGE)),
                Some(tier) => add(&|from| tier.tenants(from, PAGE)),
            }
        }
        for leaving in &self.leaving {
            known.extend(leaving.keys().cloned());
        }
        known
    }
}
