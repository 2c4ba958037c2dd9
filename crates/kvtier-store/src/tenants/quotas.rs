//! What tenants may have: one table for all tiers, kept in a file, enforced by each tier that keeps tenants apart.
//!
//! The table is there before the first tier is, so nothing is evicted by a quota that is not known yet.
//!
//! | lock | guards | inside |
//! | --- | --- | --- |
//! | `turn` | the file and the quotas of the tiers, one writer at a time | the others, and those of the tiers' caches |
//! | `table` | which table is the current one | none |
//! | `default_limit` | the limit of tenants without a quota | none |

use std::path::Path;
use std::sync::Arc;

use kvtier_common::error::{Error, Result};
use kvtier_common::state::{StateDir, existing_file};
use kvtier_common::sync::{Mutex, RwLock};
use kvtier_core::object_key::ShownSalt;
use kvtier_core::quota::{Grant, QuotaConfig, QuotaMode};

use kvtier_config::{Limit, QuotaSettings, ServerConfig, TierPlace};

use crate::tenants::{
    Look, MAX_TENANTS, QuotaFile, QuotaPlace, QuotaTier, Salts, TenantEntry, TenantTable,
};

/// The table as it was read, for the code that opens the tiers.
pub struct Opened {
    settings: QuotaSettings,
    places: Vec<TierPlace>,
    file: Option<QuotaFile>,
    table: TenantTable,
}

impl Opened {
    /// Reads the file of `--quota-file`, or else the one in the state directory, if there is one.
    ///
    /// # Errors
    /// One line: the file cannot be used, or shares are unavailable.
    pub fn open(config: &ServerConfig, state: Option<&StateDir>, salts: &Salts) -> Result<Self> {
        let in_state = |state: &StateDir| state.file(QuotaPlace::FILE).map(QuotaPlace::in_state);
        let place = match (&config.quotas.file, state) {
            (Some(path), _) => Some(QuotaPlace::given(path)),
            (None, state) => state.map(in_state).transpose()?,
        };
        let (file, table) = match &place {
            None => (None, TenantTable::default()),
            Some(place) => {
                let (file, read) = QuotaFile::open(place.clone())?;
                if place.path.exists() || config.quotas.file.is_some() {
                    tracing::info!(tenants = read.len(), file = %file.path().display(), "read the quotas");
                }
                let table = prepared(config, place, salts, read.clone())?;
                // At once: salts in clear must not stay, nor limits without the place they are for.
                if table != read {
                    file.save(&table).map_err(|error| {
                        Error::io(
                            "what was read there has to be written again, and cannot be",
                            error,
                        )
                        .context(place)
                        .hint("make it writable")
                    })?;
                }
                (Some(file), table)
            }
        };
        Ok(Self {
            settings: config.quotas.clone(),
            places: config.places(),
            file,
            table,
        })
    }

    /// How a tier deals with limits, but for watermark and ratio. One that does not keep tenants apart has none.
    pub fn config(&self, tier: &str) -> QuotaConfig {
        let (mode, default_limit) = if self.isolates(tier) {
            (self.settings.mode, self.settings.default_limit.0)
        } else {
            (QuotaMode::Soft, None)
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

/// Checks that a server could start with its quotas; changes nothing.
///
/// # Errors
/// As [`Opened::open`], or a secret that cannot be read.
pub fn preflight(config: &ServerConfig) -> Result<()> {
    let state = &config.state;
    let in_state = || existing_file(state.base.as_ref().ok()?, &state.instance, QuotaPlace::FILE);
    let place = match &config.quotas.file {
        Some(path) => Some(QuotaPlace::given(path)),
        None => in_state().map(QuotaPlace::in_state),
    };
    let Some(place) = place else {
        return Ok(());
    };
    let salts = Salts::of(config.tenants.salt_key()?);
    prepared(config, &place, &salts, QuotaFile::peek(place.clone())?).map(drop)
}

/// The table as it holds now: by the names that tenants have, and for the tiers it was meant for.
fn prepared(
    config: &ServerConfig,
    place: &QuotaPlace,
    salts: &Salts,
    table: TenantTable,
) -> Result<TenantTable> {
    // What was set before salts were hashed still holds.
    let table = table
        .renamed(|salt| salts.of_operator(salt).into())
        .map_err(|name| {
            Error::refused(format!(
                "{}: {name} has an entry, and so has the salt that it is the hash of",
                place.flag
            ))
            .hint("start without --hash-salts and delete one of them")
        })?;
    let places = config.places();
    let now = |tier: &str| place_of(&places, tier);
    // What is no longer named is forgotten first.
    let table = table.placed(|_| None);
    for (tier, then) in table.places() {
        if let Some(now) = now(tier).filter(|now| now != then) {
            return Err(Error::refused(format!(
                "{}: it has limits of its own for tier {tier}, which was in {then} and is in {now} now; give that \
                 adapter another \"name\", and \"name\": {tier:?} to the one in {then} if there still is one",
                place.flag
            )));
        }
    }
    let table = table.placed(now);
    for (salt, entry) in table.iter() {
        let salt = ShownSalt(salt);
        check_entry(&places, entry)
            .map_err(|error| error.context(format!("{}: tenant {salt}", place.flag)))?;
    }
    check_reserved(config, place, &table)?;
    Ok(table)
}

/// Checks that no tier's share is more than its limit.
fn check_entry(places: &[TierPlace], entry: &TenantEntry) -> Result<()> {
    for TierPlace { name, .. } in places {
        let Grant { limit, reserved } = entry.of_tier(name);
        if let Some(limit) = limit
            && reserved > limit
        {
            let (reserved, limit) = (Limit(Some(reserved)), Limit(Some(limit)));
            return Err(Error::refused(format!(
                "{name}: {reserved} reserved is more than the limit of {limit}"
            )));
        }
    }
    Ok(())
}

/// Location of a tier, if it is one whose place can be another.
fn place_of(places: &[TierPlace], tier: &str) -> Option<String> {
    let found = places.iter().find(|place| &*place.name == tier)?;
    found.location.clone()
}

/// Tiers may have become smaller since shares were reserved.
fn check_reserved(config: &ServerConfig, kept: &QuotaPlace, table: &TenantTable) -> Result<()> {
    for place in config.places() {
        let checked = place.check_reserved(table.reserved(&place.name));
        checked.map_err(|what| {
            what.context(kept.flag)
                .hint("enlarge the tier, or reserve less while it is large enough")
        })?;
    }
    Ok(())
}

fn not_written(error: Error) -> Error {
    error
        .context("the quotas could not be written")
        .hint("nothing was changed")
}

/// Whether this number of tenants is allowed, and the shares of all together. What was so before may stay so.
fn check_together(tenants: usize, will_be: usize, before: &Shares, sums: &[u128]) -> Result<()> {
    if will_be > tenants && will_be > MAX_TENANTS {
        return Err(Error::refused(format!(
            "there would be {will_be} tenants with a quota, and may be {MAX_TENANTS} at most"
        )));
    }
    let sums = before.reserved.iter().zip(sums);
    for (place, (before, sum)) in before.places.iter().zip(sums) {
        if sum > before {
            place.check_reserved(*sum)?;
        }
    }
    Ok(())
}

/// Entries to set, or with `None` to take away.
pub type Changes = Vec<(Arc<str>, Option<TenantEntry>)>;

/// Quotas of all tenants in all tiers.
pub struct Quotas {
    settings: QuotaSettings,
    places: Vec<TierPlace>,
    file: Option<QuotaFile>,
    /// What tenants without a quota of their own may have.
    default_limit: RwLock<Limit>,
    /// The tier of each place.
    tiers: Vec<Box<dyn QuotaTier>>,
    /// Guards which table is the current one, no longer than that takes to read or to set.
    table: RwLock<Arc<TenantTable>>,
    /// Turn to write the file. Only changes of quotas and of capacities wait for it; reads and enforcement do not.
    turn: Mutex<Shares>,
}

/// Reserved shares, and what there is to reserve.
struct Shares {
    /// Sum of the reserved shares, per tier.
    reserved: Vec<u128>,
    /// The tiers with their capacities now.
    places: Vec<TierPlace>,
}

impl Quotas {
    /// The quotas of these tiers, L1 first. Each tier has its grants already.
    pub fn new(opened: Opened, tiers: Vec<Box<dyn QuotaTier>>) -> Self {
        let Opened {
            settings,
            places,
            file,
            table,
        } = opened;
        let is_place = |tier: &String| places.iter().any(|place| *place.name == **tier);
        let elsewhere = |entry: &TenantEntry| entry.tiers.keys().any(|tier| !is_place(tier));
        let tenants = table.iter().filter(|(_, entry)| elsewhere(entry)).count();
        if tenants > 0 {
            tracing::warn!(tenants, "quotas name tiers that are not there");
        }
        let reserved = places.iter().map(|place| table.reserved(&place.name));
        Self {
            turn: Mutex::new(Shares {
                reserved: reserved.collect(),
                places: places.clone(),
            }),
            default_limit: RwLock::new(settings.default_limit),
            settings,
            places,
            file,
            tiers,
            table: RwLock::new(Arc::new(table)),
        }
    }

    /// What a limit means: `soft` or `strict`.
    pub fn mode_name(&self) -> &'static str {
        self.settings.mode_name()
    }

    /// What tenants without a quota of their own may have.
    pub fn default_limit(&self) -> Limit {
        *self.default_limit.read()
    }

    /// Sets what tenants without a quota of their own may have, in each tier that keeps tenants apart. L1 has evicted what
    /// has become too much when this returns; the tiers below have begun to.
    pub fn set_default_limit(&self, limit: Limit) {
        *self.default_limit.write() = limit;
        let isolating = self.places.iter().zip(&self.tiers);
        for (_, tier) in isolating.filter(|(place, _)| place.isolates) {
            tier.set_default_limit(limit.0);
            tier.enforce();
        }
    }

    /// Uses the capacities of these tiers, which are the same ones, from here on.
    ///
    /// # Errors
    /// More is reserved in a tier than its capacity; nothing has changed.
    pub fn set_capacities(&self, places: Vec<TierPlace>) -> Result<()> {
        let mut turn = self.turn.lock();
        for (place, reserved) in places.iter().zip(&turn.reserved) {
            place.check_reserved(*reserved)?;
        }
        turn.places = places;
        Ok(())
    }

    /// The tiers as they were at the start, L1 first.
    pub fn places(&self) -> &[TierPlace] {
        &self.places
    }

    /// File that keeps the table.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_ref().map(QuotaFile::path)
    }

    /// Whether what is set outlives the process.
    pub fn is_persistent(&self) -> bool {
        self.file.is_some()
    }

    /// The table as it is now.
    pub fn table(&self) -> Arc<TenantTable> {
        Arc::clone(&self.table.read())
    }

    /// Sets the entry of a tenant, or with `None` removes it; returns whether there was one. As [`Self::change_all`].
    ///
    /// # Errors
    /// Then everything is as it was.
    pub fn change(&self, salt: &str, entry: Option<TenantEntry>) -> Result<bool> {
        let existed = self.change_all(vec![(salt.into(), entry)])?;
        Ok(existed > 0)
    }

    /// Makes all of these changes, or none; says how many entries were there before. They are written when this returns,
    /// and L1 has evicted what has become too much; the tiers below have begun to.
    ///
    /// May wait for the disk.
    ///
    /// # Errors
    /// Then everything is as it was.
    pub fn change_all(&self, changes: Changes) -> Result<usize> {
        for entry in changes.iter().filter_map(|(_, entry)| entry.as_ref()) {
            self.check(entry)?;
        }
        let mut shares = self.turn.lock();
        let before = self.table();
        let mut table = TenantTable::clone(&before);
        let mut sums = shares.reserved.clone();
        let mut existed = 0;
        let mut salts = Vec::with_capacity(changes.len());
        for (salt, entry) in changes {
            if let Some(entry) = &entry {
                table.place(entry, |tier| place_of(&self.places, tier));
            }
            let old = table.set(&salt, entry);
            let new = table.get(&salt);
            for (place, sum) in self.places.iter().zip(&mut sums) {
                let share = |entry: Option<&Arc<TenantEntry>>| {
                    u128::from(entry.map_or(0, |entry| entry.of_tier(&place.name).reserved))
                };
                *sum = *sum + share(new) - share(old.as_ref());
            }
            existed += usize::from(old.is_some());
            salts.push(salt);
        }
        check_together(before.len(), table.len(), &shares, &sums)?;
        if let Some(file) = self.file.as_ref().filter(|_| table != *before) {
            file.save(&table).map_err(|error| {
                let path = file.path().display().to_string();
                tracing::error!(%error, file = path, "the quotas could not be written");
                not_written(Error::io(path, error))
            })?;
        }
        shares.reserved = sums;
        let table = Arc::new(table);
        *self.table.write() = Arc::clone(&table);
        for salt in salts {
            self.grant(&salt, table.get(&salt).map(|entry| &**entry));
        }
        drop(shares);
        for tier in &self.tiers {
            tier.enforce();
        }
        Ok(existed)
    }

    /// Whether an entry can be, whatever others have.
    ///
    /// # Errors
    /// Names the tier whose share is more than its limit.
    pub fn check(&self, entry: &TenantEntry) -> Result<()> {
        check_entry(&self.places, entry)
    }

    /// Evicts from L1 what exceeds quotas. Returns the number of objects.
    pub fn enforce_l1(&self) -> usize {
        self.tiers.first().map_or(0, |l1| l1.enforce())
    }

    /// The tiers, L1 first.
    pub fn tiers(&self) -> impl Iterator<Item = &dyn QuotaTier> {
        self.tiers.iter().map(|tier| &**tier)
    }

    /// Sets the grant of a tenant in each tier that isolates tenants.
    fn grant(&self, salt: &str, entry: Option<&TenantEntry>) {
        for (place, tier) in self.places.iter().zip(&self.tiers) {
            if place.isolates {
                tier.set_grant(salt, entry.map(|entry| entry.of_tier(&place.name)));
            }
        }
    }

    /// What tenants have and may have, as it is now.
    pub fn look(&self) -> Look<'_> {
        let deleting = self.tiers.iter().map(|tier| tier.deleting());
        Look::new(self, deleting.collect())
    }
}

impl std::fmt::Debug for Quotas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Quotas")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
