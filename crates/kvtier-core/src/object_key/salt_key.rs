//! Keyed hashes that take the place of cache salts.

use std::borrow::Cow;
use std::fmt;

/// What hashed salts begin with; the number is that of the scheme.
const PREFIX: &str = "h1-";

/// Hex digits behind it.
const DIGITS: usize = 32;

/// Separates the keys made here from those that others make of the same secret.
const CONTEXT: &str = "kvtier 2026 cache salts";

/// Makes hashed salts from a secret: `h1-` and 32 hex digits, the first half of a keyed BLAKE3.
///
/// Keyed, because salts are often names that can be guessed: with a plain hash, they could be found by trying from
/// the names in a directory. The same secret gives the same hashes in every process, so servers that share it share tenants.
#[derive(Clone)]
pub struct SaltKey([u8; 32]);

impl SaltKey {
    /// The key made from a secret of any length.
    pub fn new(secret: &[u8]) -> Self {
        Self(blake3::derive_key(CONTEXT, secret))
    }

    /// The salt that stands for a tenant's. No salt stays none.
    pub fn hashed(&self, salt: &str) -> String {
        if salt.is_empty() {
            return String::new();
        }
        let hash = blake3::keyed_hash(&self.0, salt.as_bytes());
        format!("{PREFIX}{}", &hash.to_hex()[..DIGITS])
    }

    /// [`hashed`](Self::hashed) for a caller that may name tenants by their hashes, as listings show them.
    pub fn hashed_once<'a>(&self, salt: &'a str) -> Cow<'a, str> {
        if Self::is_hash(salt) {
            salt.into()
        } else {
            self.hashed(salt).into()
        }
    }

    /// Whether a name has the form of a hashed salt. No salt is its own hash.
    pub fn is_hash(name: &str) -> bool {
        let digits = name.strip_prefix(PREFIX).unwrap_or_default();
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        name.is_empty() || digits.len() == DIGITS && digits.bytes().all(is_digit)
    }

    /// Distinguishes two keys without revealing either.
    pub fn fingerprint(&self) -> String {
        let hash = blake3::keyed_hash(&self.0, b"");
        hash.to_hex()[..8].to_owned()
    }
}

impl fmt::Debug for SaltKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SaltKey({})", self.fingerprint())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object_key::check_cache_salt;

    #[test]
    fn salt_hashes_are_stable_salts() {
        let key = SaltKey::new(b"a secret of an operator");
        let hashed = key.hashed("acme");
        assert_eq!(hashed, "h1-0ed40699fdc9acdcec884817ad88c9a8");
        check_cache_salt(&hashed).unwrap();
        assert_eq!(key.hashed(""), "");
        assert_ne!(SaltKey::new(b"another").hashed("acme"), hashed);
        assert_ne!(key.hashed("acme2"), hashed);
    }

    #[test]
    fn hashed_salt_is_kept_by_hashed_once_only() {
        let key = SaltKey::new(b"secret");
        let hashed = key.hashed("acme");
        assert_eq!(key.hashed_once(&hashed), hashed);
        assert_eq!(key.hashed_once("acme"), hashed);
        assert_ne!(key.hashed(&hashed), hashed);
        for other in [
            "h1-",
            "h1-xyz",
            &hashed.to_uppercase(),
            &format!("{hashed}0"),
        ] {
            assert_eq!(key.hashed_once(other), key.hashed(other));
        }
    }
}
