//! What tenants were granted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvtier_core::quota::Grant;
use serde::{Deserialize, Serialize};

use kvtier_config::Limit;

/// Most tenants that have an entry.
pub const MAX_TENANTS: usize = 1_000_000;

/// What one tenant was granted. It holds for each tier on its own, unless there is something else for that tier.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantEntry {
    /// Limit in bytes.
    pub limit: Limit,
    /// Bytes that others cannot evict.
    pub reserved: u64,
    /// Exceptions by the name of the tier, such as `l1` or `fs-0`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tiers: BTreeMap<String, TierEntry>,
}

/// What holds for one tier instead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierEntry {
    /// Limit in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<Limit>,
    /// Bytes that others cannot evict.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved: Option<u64>,
}

impl TenantEntry {
    /// What holds for one tier.
    pub fn of_tier(&self, tier: &str) -> Grant {
        let own = self.tiers.get(tier).copied().unwrap_or_default();
        Grant {
            limit: own.limit.unwrap_or(self.limit).0,
            reserved: own.reserved.unwrap_or(self.reserved),
        }
    }
}

/// The entries by cache salt. Cloning shares them.
///
/// ```
/// use kvtier_config::Limit;
/// use kvtier_store::tenants::{TenantEntry, TenantTable};
///
/// let mut table = TenantTable::default();
/// table.set("tenant", Some(TenantEntry {
///     limit: Limit(Some(1 << 30)),
///     reserved: 1 << 20,
///     ..TenantEntry::default()
/// }));
/// let grants: Vec<_> = table.grants("l1").map(|(salt, grant)| (salt, grant.limit)).collect();
/// assert_eq!(grants, [("tenant", Some(1 << 30))]);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantTable {
    entries: BTreeMap<Arc<str>, Arc<TenantEntry>>,
    /// Locations of the tiers that entries name, so that what was meant for one directory never holds for another.
    places: BTreeMap<String, String>,
}

impl TenantTable {
    /// The entry of a tenant.
    pub fn get(&self, salt: &str) -> Option<&Arc<TenantEntry>> {
        self.entries.get(salt)
    }

    /// All entries, in the order of the salts.
    pub fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &Arc<TenantEntry>)> {
        self.entries.iter()
    }

    /// The salts behind this one, or from the first one on.
    pub fn behind(&self, salt: Option<&str>) -> impl Iterator<Item = &Arc<str>> {
        use std::ops::Bound;
        let from = salt.map_or(Bound::Unbounded, Bound::Excluded);
        self.entries
            .range::<str, _>((from, Bound::Unbounded))
            .map(|(salt, _)| salt)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Sets an entry, or takes it away; gives the one before.
    pub fn set(&mut self, salt: &str, entry: Option<TenantEntry>) -> Option<Arc<TenantEntry>> {
        match entry {
            Some(entry) => self.entries.insert(salt.into(), Arc::new(entry)),
            None => self.entries.remove(salt),
        }
    }

    /// Table with the same entries under other names.
    ///
    /// # Errors
    /// The first name that two of them would have.
    pub fn renamed(self, name: impl Fn(&str) -> Arc<str>) -> Result<Self, Arc<str>> {
        let mut entries = BTreeMap::new();
        for (salt, entry) in self.entries {
            let name = name(&salt);
            if entries.insert(Arc::clone(&name), entry).is_some() {
                return Err(name);
            }
        }
        let places = self.places;
        Ok(Self { entries, places })
    }

    /// Locations of the tiers that entries name.
    pub fn places(&self) -> &BTreeMap<String, String> {
        &self.places
    }

    /// Table with these locations.
    #[must_use]
    pub fn with_places(self, places: BTreeMap<String, String>) -> Self {
        Self { places, ..self }
    }

    /// Takes note of where the tiers are now that one entry names.
    pub(super) fn place(&mut self, entry: &TenantEntry, place: impl Fn(&str) -> Option<String>) {
        for tier in entry.tiers.keys() {
            if let Some(place) = place(tier) {
                self.places.insert(tier.clone(), place);
            }
        }
    }

    /// Forgets, or takes note of, places until they are those of the tiers that entries name.
    pub(super) fn placed(mut self, place: impl Fn(&str) -> Option<String>) -> Self {
        let named = self.entries.values().flat_map(|entry| entry.tiers.keys());
        let named: BTreeSet<_> = named.cloned().collect();
        let mut places = BTreeMap::new();
        for tier in named {
            if let Some(place) = place(&tier).or_else(|| self.places.remove(&tier)) {
                places.insert(tier, place);
            }
        }
        self.with_places(places)
    }

    /// What holds for the tenants in one tier.
    pub fn grants(&self, tier: &str) -> impl Iterator<Item = (&str, Grant)> {
        self.entries
            .iter()
            .map(move |(salt, entry)| (&**salt, entry.of_tier(tier)))
    }

    /// The reserved shares of one tier together.
    pub fn reserved(&self, tier: &str) -> u128 {
        self.grants(tier)
            .map(|(_, grant)| u128::from(grant.reserved))
            .sum()
    }
}

impl<S: Into<Arc<str>>> FromIterator<(S, TenantEntry)> for TenantTable {
    fn from_iter<I: IntoIterator<Item = (S, TenantEntry)>>(entries: I) -> Self {
        let entries = entries.into_iter();
        let entries = entries
            .map(|(salt, entry)| (salt.into(), Arc::new(entry)))
            .collect();
        Self {
            entries,
            places: BTreeMap::new(),
        }
    }
}
