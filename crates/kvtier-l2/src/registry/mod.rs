//! Registry of adapters by the name of their type.
//!
//! Which types are built in is said in `kvtier-config`; one of another program is added by [`Registry::add`].

mod absent;
mod reference;
#[cfg(test)]
mod tests;
mod translation;

use std::fmt;
use std::sync::Arc;

use serde_json::error::Category;
use serde_json::{Map, Value};

use crate::config::{
    AdapterConfig, COMMON, Common, ConfigError, Fallback, Key, Options, Shape, clip, json,
    refuse_rest,
};
use crate::error::L2Error;
use crate::wrap::Guards;
use crate::{Adapter, redact, transform, wrap};

pub use translation::{Translated, Translation};

/// Opens an adapter.
pub type Open = fn(&AdapterConfig, &Registry) -> Result<Arc<dyn Adapter>, L2Error>;

/// Type of adapters: its name, its keys and its constructor.
#[derive(Clone, Copy)]
pub struct AdapterType {
    name: &'static str,
    base: Option<&'static str>,
    summary: &'static str,
    keys: &'static [Key],
    translation: Translation,
    check: fn(&Options) -> Result<(), ConfigError>,
    guards_parts: Option<CheckGuards>,
    ineffective: Ineffective,
    open: Open,
}

/// Checks the guards of a configuration against its other keys.
pub type CheckGuards = fn(&Options, &Guards) -> Result<(), ConfigError>;

/// Returns the keys of a configuration that are set without effect, each with the reason: "persist_enabled changes nothing:
/// ...". The function returns whether a key is set.
pub type Ineffective = fn(&AdapterConfig, &dyn Fn(&str) -> bool) -> Vec<&'static str>;

impl AdapterType {
    /// Returns a type with a name, a summary of one line, its keys beyond [`COMMON`], and its constructor.
    ///
    /// `open` is called within a tokio runtime. It may read a disk, but does not wait for a remote backend, which may come up
    /// after the server. The registry is for adapters that wrap another one.
    #[must_use]
    pub const fn new(
        name: &'static str,
        summary: &'static str,
        keys: &'static [Key],
        open: Open,
    ) -> Self {
        Self {
            name,
            base: None,
            summary,
            keys,
            translation: Translation::NONE,
            check: |_| Ok(()),
            guards_parts: None,
            ineffective: |_, _| Vec::new(),
            open,
        }
    }

    /// Returns the same type under another name.
    #[must_use]
    pub const fn named(self, name: &'static str, summary: &'static str) -> Self {
        let base = match self.base {
            Some(base) => base,
            None => self.name,
        };
        Self {
            name,
            base: Some(base),
            summary,
            ..self
        }
    }

    /// Takes configurations of another program too.
    #[must_use]
    pub const fn translating(self, translation: Translation) -> Self {
        Self {
            translation,
            ..self
        }
    }

    /// Adds a check of its options that its keys cannot express; see [`Options::refuse`].
    #[must_use]
    pub const fn check(self, check: fn(&Options) -> Result<(), ConfigError>) -> Self {
        Self { check, ..self }
    }

    /// Has no breaker and no retries around it: its parts have guards of their own, and one part could turn off the others.
    #[must_use]
    pub const fn guarding_parts(self, check: CheckGuards) -> Self {
        Self {
            guards_parts: Some(check),
            ..self
        }
    }

    /// Adds warnings about keys without effect.
    #[must_use]
    pub const fn ineffective(self, ineffective: Ineffective) -> Self {
        Self {
            ineffective,
            ..self
        }
    }

    /// Returns the type's name: the `type` in a configuration.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns a summary of one line.
    #[must_use]
    pub fn summary(&self) -> &'static str {
        self.summary
    }

    /// Returns the keys beyond [`COMMON`] that a configuration of this type may have.
    pub fn keys(&self) -> impl Iterator<Item = &'static Key> + use<> {
        let Translation { keys, hidden, .. } = self.translation;
        let own = self.keys.iter();
        keys.iter()
            .chain(own.filter(move |key| !hidden.contains(&key.name)))
    }
}

impl fmt::Debug for AdapterType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AdapterType({})", self.name)
    }
}

/// The types of adapters.
#[derive(Debug, Clone)]
pub struct Registry {
    types: Vec<AdapterType>,
}

impl Registry {
    /// Returns a registry of these types. No two may have one name.
    #[must_use]
    pub fn of(types: &[AdapterType]) -> Self {
        Self {
            types: types.to_vec(),
        }
    }

    /// Adds a type.
    ///
    /// # Errors
    /// If the name is registered already, or one of its keys is there twice.
    pub fn add(&mut self, new: AdapterType) -> Result<(), ConfigError> {
        if self.find(new.name).is_some() {
            return Err(ConfigError::new(format!(
                "type {:?} is registered already; give another name",
                new.name
            )));
        }
        let mut names: Vec<_> = COMMON
            .iter()
            .chain(new.keys())
            .map(|key| key.name)
            .collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(ConfigError::new(format!(
                "type {:?}: key {:?} is there twice, perhaps as a common key; give another name",
                new.name, twice[0]
            )));
        }
        self.types.push(new);
        Ok(())
    }

    /// The types, in the order they were added.
    #[must_use]
    pub fn types(&self) -> &[AdapterType] {
        &self.types
    }

    /// Returns a page of Markdown with the keys of all types. A type under another name has only what differs.
    #[must_use]
    pub fn reference_markdown(&self) -> String {
        reference::markdown(self)
    }

    fn find(&self, name: &str) -> Option<&AdapterType> {
        self.types.iter().find(|known| known.name == name)
    }

    /// [`Self::parse`] of JSON text.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub fn parse_json(&self, text: &str) -> Result<AdapterConfig, ConfigError> {
        let value = json::parse(text).map_err(|error| match error.classify() {
            Category::Data => ConfigError::new(format!("{error}; give each key once")),
            _ => ConfigError::new(format!(
                "{:?} is not JSON ({error}); give an object with a \"type\"",
                clip(text)
            )),
        })?;
        self.parse(&value)
    }

    /// Checks a configuration without opening anything.
    ///
    /// # Errors
    /// The first mistake in it.
    pub fn parse(&self, value: &Value) -> Result<AdapterConfig, ConfigError> {
        let Value::Object(map) = value else {
            return Err(ConfigError::new(format!(
                "{} is not allowed; give an object with a \"type\"",
                clip(&redact::value(value).to_string())
            )));
        };
        let given = |key: &str| map.get(key).is_some_and(|value| !value.is_null());
        let mut map = map.clone();
        let kind = self.kind(&map)?;
        let owner = format!("type {:?}", kind.name);
        self.inherit(kind, &mut map);
        let common = Common::take(&owner, &mut map)?;
        // First, since a misspelt key is a missing one too.
        refuse_rest(&owner, &map, COMMON.iter().chain(kind.keys()))?;
        let translated = kind.translation.apply(&owner, &mut map)?;
        let options = Options::take_with(&owner, kind.keys, &mut map, &|inner| self.parse(inner))?;
        (kind.check)(&options)?;
        if let Some(check) = kind.guards_parts {
            check(&options, &common.guards)?;
        }
        if let Some(inner) = options.find::<&AdapterConfig>("inner")
            && !inner.serde.is_empty()
            && inner.serde != common.serde
        {
            return Err(ConfigError::new(format!(
                "{owner}: key \"serde\" differs from that of its inner adapter; give it once"
            )));
        }
        let mut config = AdapterConfig {
            kind: kind.name,
            name: common.name,
            shared: common.shared,
            persist_enabled: common.persist_enabled,
            serde: common.serde,
            eviction: common.eviction,
            guards: common.guards,
            options,
            warnings: common.warnings,
        };
        if config.never_fills() {
            config.warnings.push(format!(
                "{owner}: eviction changes nothing without a capacity to take a share of; give one, such as max_capacity_gb"
            ));
        }
        let ineffective = (kind.ineffective)(&config, &given).into_iter();
        let lines = translated.into_iter().chain(ineffective.map(Into::into));
        let lines = lines.map(|line| format!("{owner}: {line}"));
        config.warnings.extend(lines);
        Ok(config)
    }

    fn kind(&self, map: &Map<String, Value>) -> Result<&AdapterType, ConfigError> {
        let name = match map.get("type") {
            Some(Value::String(name)) => name.as_str(),
            other => {
                return Err(ConfigError::new(format!(
                    "key \"type\": {} is not allowed; give one of {}",
                    clip(&redact::value(other.unwrap_or(&Value::Null)).to_string()),
                    self.names()
                )));
            }
        };
        if let Some(kind) = self.find(name) {
            return Ok(kind);
        }
        Err(ConfigError::new(match absent::alternative_to(name) {
            Some(instead) => format!("type {name:?} is not built into kvtier; {instead}"),
            None => format!(
                "type {:?} is unknown; known types are {}",
                clip(name),
                self.names()
            ),
        }))
    }

    fn names(&self) -> String {
        let names: Vec<_> = self.types.iter().map(|kind| kind.name).collect();
        names.join(", ")
    }

    /// Copies common keys that are set only for the inner adapter to the outer one, where they have an effect.
    fn inherit(&self, kind: &AdapterType, map: &mut Map<String, Value>) {
        for key in kind.keys.iter().filter(|key| key.shape == Shape::Adapter) {
            let Some(Value::Object(inner)) = map.get(key.name).cloned() else {
                continue;
            };
            let mut inner = inner;
            if let Some(inner_kind) = inner
                .get("type")
                .and_then(Value::as_str)
                .and_then(|name| self.find(name))
            {
                self.inherit(&inner_kind.clone(), &mut inner);
            }
            for common in COMMON
                .iter()
                .filter(|key| key.fallback != Fallback::Required)
            {
                if let Some(value) = inner.get(common.name) {
                    map.entry(common.name).or_insert_with(|| value.clone());
                }
            }
        }
    }

    /// Opens an adapter with its transformations and its guards: [`wrap::guard`]. To be called within a tokio runtime.
    ///
    /// # Errors
    /// Those of the adapter's constructor.
    pub fn open(&self, config: &AdapterConfig) -> Result<Arc<dyn Adapter>, L2Error> {
        let adapter = self.open_bare(config)?;
        let mut guards = config.guards;
        if self
            .find(config.kind)
            .is_some_and(|kind| kind.guards_parts.is_some())
        {
            (guards.retries, guards.breaker_failures) = (0, 0);
        }
        if config.serde.is_empty() {
            return Ok(wrap::guard(adapter, &guards));
        }
        // Checksums are those of the transformed bytes, which may be all that can be compared.
        let checked = if transform::verifies(&config.serde) {
            adapter
        } else {
            wrap::checked(adapter, &guards)
        };
        let transformed = transform::transformed(checked, &config.serde)?;
        Ok(wrap::limited(transformed, &guards))
    }

    /// Opens an adapter without guards and transformations, to be wrapped by another one.
    ///
    /// # Errors
    /// Those of the adapter's constructor.
    pub fn open_bare(&self, config: &AdapterConfig) -> Result<Arc<dyn Adapter>, L2Error> {
        let kind = self.find(config.kind).ok_or_else(|| {
            L2Error::new(
                crate::ErrorKind::Unsupported,
                format!("type {:?} is not registered", config.kind),
            )
        })?;
        (kind.open)(config, self)
    }
}
