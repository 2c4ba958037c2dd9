//! Label values that clients choose.
//!
//! The lock guards the set; no other is acquired inside.

use std::collections::HashSet;
use std::sync::Arc;

use kvtier_common::sync::RwLock;
use kvtier_core::object_key::TenantNames;

/// Longest name that becomes a label value, bytes.
const MAX_BYTES: usize = 256;

/// A bounded set of names: what is new once it is full, or too long, is called `other`.
///
/// Every name makes series of its own, for good, in this process and in whatever scrapes it.
pub struct Names {
    /// Guards the set, nothing else.
    known: RwLock<HashSet<Arc<str>>>,
    limit: usize,
    other: Arc<str>,
    tenants: TenantNames,
}

impl Names {
    /// For at most `limit` names.
    pub fn new(limit: usize) -> Self {
        Self {
            known: RwLock::default(),
            limit,
            other: "other".into(),
            tenants: TenantNames::default(),
        }
    }

    /// For at most `limit` tenants, given by their salts.
    pub fn of_tenants(limit: usize, tenants: TenantNames) -> Self {
        Self {
            tenants,
            ..Self::new(limit)
        }
    }

    /// The label value for a name.
    pub fn label(&self, name: &str) -> Arc<str> {
        let name = &*self.tenants.name(name);
        if let Some(known) = self.known.read().get(name) {
            return Arc::clone(known);
        }
        let mut known = self.known.write();
        if known.len() >= self.limit || name.len() > MAX_BYTES {
            return Arc::clone(&self.other);
        }
        let name: Arc<str> = name.into();
        known.insert(Arc::clone(&name));
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_keep_their_label_when_the_set_is_full() {
        let names = Names::new(2);
        assert_eq!(
            ["a", "b", "c", "a"].map(|name| names.label(name)),
            ["a", "b", "other", "a"].map(Arc::from)
        );
    }

    #[test]
    fn overlong_name_takes_no_place() {
        let names = Names::new(1);
        assert_eq!(&*names.label(&"x".repeat(257)), "other");
        assert_eq!(&*names.label("a"), "a");
    }
}
