//! Names of tenants, where a frontend puts a prefix before them in salts.

use std::borrow::Cow;

/// Names that no tenant has behind a prefix: none, and those that mean something else in paths and metrics.
const RESERVED: [&str; 5] = ["", "_default", "other", ".", ".."];

/// Names of tenants for operators. Keys have the whole salt.
///
/// | salt | name |
/// | --- | --- |
/// | the prefix and `acme` | `acme` |
/// | `acme` | `@acme` |
///
/// No salt has an `@`, so no two salts share a name. Without a prefix each salt is its name.
#[derive(Clone, Debug, Default)]
pub struct TenantNames {
    prefix: Box<str>,
}

impl TenantNames {
    /// Names of salts with this prefix.
    pub fn new(prefix: &str) -> Self {
        Self {
            prefix: prefix.into(),
        }
    }

    /// The name of the tenant with this salt; empty for none.
    pub fn name<'a>(&self, salt: &'a str) -> Cow<'a, str> {
        match salt.strip_prefix(&*self.prefix) {
            _ if salt.is_empty() || self.prefix.is_empty() => salt.into(),
            Some(name) if !RESERVED.contains(&name) => name.into(),
            _ => format!("@{salt}").into(),
        }
    }

    /// Whether a salt has the prefix twice: its name looks like the salt of another tenant, which was meant.
    pub fn has_prefix_twice(&self, salt: &str) -> bool {
        let name = salt.strip_prefix(&*self.prefix);
        !self.prefix.is_empty() && name.is_some_and(|name| name.starts_with(&*self.prefix))
    }

    /// The salt of the tenant with this name.
    pub fn salt<'a>(&self, name: &'a str) -> Cow<'a, str> {
        match name.strip_prefix('@') {
            Some(salt) if !salt.is_empty() => salt.into(),
            None if !self.prefix.is_empty() => format!("{}{name}", self.prefix).into(),
            _ => name.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_salts_share_a_name() {
        let names = TenantNames::new("front:");
        let named = [
            ("front:acme", "acme"),
            ("acme", "@acme"),
            ("front:front:acme", "front:acme"),
            ("front:", "@front:"),
            ("front:_default", "@front:_default"),
            ("front:other", "@front:other"),
            ("_default", "@_default"),
            ("front:..", "@front:.."),
            ("Front:acme", "@Front:acme"),
        ];
        for (salt, name) in named {
            assert_eq!((&*names.name(salt), &*names.salt(name)), (name, salt));
        }
        assert_eq!(names.name(""), "");
    }

    #[test]
    fn salts_are_names_without_a_prefix() {
        let names = TenantNames::default();
        for salt in ["acme", "front:acme", "..", "_default"] {
            assert_eq!((&*names.name(salt), &*names.salt(salt)), (salt, salt));
        }
        assert_eq!(
            (&*names.salt("@_default"), &*names.salt("@")),
            ("_default", "@")
        );
    }
}
