//! How the tenants of requests are called inside: by their salts, or by keyed hashes of them.
//!
//! Whatever has a scope, and so all that is stored, listed, counted or logged, has only that name.

use std::borrow::Cow;

use kvtier_common::error::{Error, Result};
use kvtier_core::object_key::{KeyError, KeyScope, SaltKey, TenantNames, check_cache_salt};
use kvtier_proto::key::CacheKey;

use kvtier_config::TenantSettings;

/// Names of tenants: their salts, or keyed hashes of them.
#[derive(Debug)]
pub struct Salts {
    key: Option<SaltKey>,
    /// Names that operators read and write.
    pub names: TenantNames,
}

impl Salts {
    /// Names hashed with this key, if there is one.
    pub fn of(key: Option<SaltKey>) -> Self {
        Self {
            key,
            names: TenantNames::default(),
        }
    }

    /// Names as configured.
    ///
    /// # Errors
    /// One line: a secret that cannot be read.
    pub fn open(settings: &TenantSettings) -> Result<Self> {
        let key = settings.salt_key()?;
        if let Some(key) = &key {
            tracing::info!(secret = key.fingerprint(), "cache salts are hashed");
        }
        let names = settings.names();
        Ok(Self { key, names })
    }

    /// A number that stands for these names: other names have another, as far as 32 bits allow.
    pub fn number(&self) -> u64 {
        let text = self.key.as_ref().map(SaltKey::fingerprint);
        let number = text.and_then(|text| u64::from_str_radix(&text, 16).ok());
        number.map_or(0, |number| number | 1 << 32)
    }

    /// The name of the tenant of a client. One whose salt looks like a hash is no other tenant.
    pub fn of_client<'a>(&self, salt: &'a str) -> Cow<'a, str> {
        match &self.key {
            None => salt.into(),
            Some(key) => key.hashed(salt).into(),
        }
    }

    /// The name of a tenant that an operator means, by its salt or by the hash that listings show.
    pub fn of_operator<'a>(&self, salt: &'a str) -> Cow<'a, str> {
        match &self.key {
            None => salt.into(),
            Some(key) => key.hashed_once(salt),
        }
    }

    /// The name of a tenant that a reader of listings means: [`of_operator`](Self::of_operator) would let it test which salt a
    /// hash belongs to.
    ///
    /// # Errors
    /// A salt, where salts are hashed.
    pub fn of_reader<'a>(&self, name: &'a str) -> Result<Cow<'a, str>> {
        if self.key.is_none() || SaltKey::is_hash(name) {
            return Ok(name.into());
        }
        Err(Error::refused(
            "cache_salt: with --hash-salts only an admin's token may give a salt; allowed for a token that reads: its hash as \
             GET /quota?all=true has it, h1- and 32 hex digits",
        ))
    }

    /// Scope of the objects that a request means.
    ///
    /// # Errors
    /// A key whose names cannot be.
    pub fn scope<T>(&self, key: &CacheKey<'_, T>) -> Result<KeyScope, KeyError> {
        check_cache_salt(key.cache_salt)?;
        let salt = self.of_client(key.cache_salt);
        KeyScope::new(key.model_name, &salt, key.world_size, key.worker_id)
    }
}
