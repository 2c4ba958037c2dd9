//! Tenants: the names they have inside, and the table of their quotas, which is kept in a file.
//!
//! It must never know how a tier holds or evicts objects: tiers are given to it as [`QuotaTier`].
mod file;
mod listing;
mod look;
mod quotas;
mod salts;
mod table;
mod tier;

pub use file::{QuotaFile, QuotaPlace};
pub use listing::only_set;
pub use look::{InTier, Look};
pub use quotas::{Changes, Opened, Quotas, preflight};
pub use salts::Salts;
pub use table::{MAX_TENANTS, TenantEntry, TenantTable, TierEntry};
pub use tier::QuotaTier;
