//! Configurations of another program, as keys of the type that does the same here.

use serde_json::{Map, Value};

use crate::config::{ConfigError, Key, Options};

/// Keys of another program that stand for keys of the type.
#[derive(Clone, Copy)]
pub struct Translation {
    /// Keys of the other program.
    pub keys: &'static [Key],
    /// Keys of the type that those stand for, or that have one value in it: a configuration cannot have them itself.
    pub hidden: &'static [&'static str],
    /// Translates the values of [`Self::keys`].
    pub translate: fn(&Options) -> Result<Translated, ConfigError>,
}

/// A translated configuration.
#[derive(Debug, Default)]
pub struct Translated {
    /// Values of hidden keys; those that are missing are unset.
    pub values: Map<String, Value>,
    /// Warnings for its user, one line each.
    pub warnings: Vec<String>,
}

impl Translation {
    /// A configuration that needs none.
    pub(super) const NONE: Self = Self {
        keys: &[],
        hidden: &[],
        translate: |_| Ok(Translated::default()),
    };

    /// Replaces the keys of the other program in `map`; returns the warnings.
    pub(super) fn apply(
        &self,
        owner: &str,
        map: &mut Map<String, Value>,
    ) -> Result<Vec<String>, ConfigError> {
        let theirs = Options::take(owner, self.keys, map)?;
        let translated = (self.translate)(&theirs)?;
        map.extend(translated.values);
        Ok(translated.warnings)
    }
}
