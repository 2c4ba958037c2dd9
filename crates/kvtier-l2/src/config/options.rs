//! Checked values of keys.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value};

use super::error::ConfigError;
use super::key::{Fallback, Key, Setting, Shape};
use super::{AdapterConfig, GIB, clip, refuse_rest};
use crate::redact;

/// Checked values of a list of keys, with defaults.
#[derive(Clone, PartialEq)]
pub struct Options {
    owner: String,
    settings: BTreeMap<&'static str, Setting>,
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |(key, setting): (&&str, &Setting)| match setting {
            _ if redact::is_secret(key) => format!("{key}: {}", redact::HIDDEN),
            Setting::Object(map) => {
                let shown = redact::value(&Value::Object(map.clone()));
                format!("{key}: {shown}")
            }
            _ => format!("{key}: {}", redact::text(&format!("{setting:?}"))),
        };
        f.debug_list()
            .entries(self.settings.iter().map(shown))
            .finish()
    }
}

/// Type of a value.
pub trait FromSetting<'a>: Sized {
    #[doc(hidden)]
    fn of(options: &'a Options, key: &str) -> Option<Self>;
}

macro_rules! from_setting {
    ($($type:ty: $pattern:pat => $value:expr;)*) => {$(
        impl<'a> FromSetting<'a> for $type {
            fn of(options: &'a Options, key: &str) -> Option<Self> {
                match options.settings.get(key)? {
                    $pattern => $value,
                    _ => None,
                }
            }
        }
    )*};
}

from_setting! {
    bool: Setting::Switch(on) => Some(*on);
    i64: Setting::Integer(number) => Some(*number);
    u64: Setting::Integer(number) => u64::try_from(*number).ok();
    u32: Setting::Integer(number) => u32::try_from(*number).ok();
    usize: Setting::Integer(number) => usize::try_from(*number).ok();
    f64: Setting::Number(number) => Some(*number);
    &'a str: Setting::Text(text) => Some(text);
    String: Setting::Text(text) => Some(text.clone());
    &'a [i64]: Setting::Integers(list) => Some(list);
    &'a [f64]: Setting::Numbers(list) => Some(list);
    &'a [String]: Setting::Texts(list) => Some(list);
    &'a Map<String, Value>: Setting::Object(map) => Some(map);
    &'a AdapterConfig: Setting::Adapter(config) => Some(config);
    &'a [Options]: Setting::Tables(list) => Some(list);
    &'a BTreeMap<String, String>: Setting::Params(params) => Some(params);
}

impl Options {
    /// Removes the values of `keys` from `map`. A JSON null is an unset key. Errors start with `owner`.
    pub(crate) fn take(
        owner: &str,
        keys: &[Key],
        map: &mut Map<String, Value>,
    ) -> Result<Self, ConfigError> {
        Self::take_with(owner, keys, map, &|_| {
            Err(ConfigError::new("an adapter cannot be configured here"))
        })
    }

    /// [`Self::take`] with `nested` to parse the configuration of another adapter.
    pub(crate) fn take_with(
        owner: &str,
        keys: &[Key],
        map: &mut Map<String, Value>,
        nested: &dyn Fn(&Value) -> Result<AdapterConfig, ConfigError>,
    ) -> Result<Self, ConfigError> {
        let mut settings = BTreeMap::new();
        for key in keys {
            let given = map.remove(key.name).filter(|value| !value.is_null());
            let setting = match given {
                None if key.fallback == Fallback::Required => {
                    return Err(ConfigError::new(format!(
                        "{owner}: key {:?} is missing; give {}",
                        key.name,
                        key.allowed()
                    )));
                }
                None => key.unset(),
                Some(value) => Some(setting(owner, key, &value, nested)?),
            };
            if let Some(setting) = setting {
                settings.insert(key.name, setting);
            }
        }
        Ok(Self {
            owner: owner.to_owned(),
            settings,
        })
    }

    /// Sets the text of `key`.
    pub fn set_text(&mut self, key: &'static str, text: &str) {
        self.settings.insert(key, Setting::Text(text.to_owned()));
    }

    /// Sets the whole number of `key`.
    pub fn set_integer(&mut self, key: &'static str, number: i64) {
        self.settings.insert(key, Setting::Integer(number));
    }

    /// Returns the value of `key`, `None` if it is unset and has no default.
    ///
    /// The type must be that of the key's [`Shape`]: a whole number is read as `i64`, `u64`, `u32` or `usize`, a number
    /// as `f64`, a text as `&str` or `String`, a list as a slice.
    #[must_use]
    pub fn find<'a, T: FromSetting<'a>>(&'a self, key: &str) -> Option<T> {
        let value = T::of(self, key);
        assert!(
            value.is_some() || !self.settings.contains_key(key),
            "{}: key {key:?} is not of type {}",
            self.owner,
            std::any::type_name::<T>()
        );
        value
    }

    /// Returns the value of `key`, which is required or has a default.
    ///
    /// # Panics
    /// If it is neither, is not among the type's keys, or is of another type: bugs of the adapter that show when it is first
    /// opened.
    #[must_use]
    pub fn get<'a, T: FromSetting<'a>>(&'a self, key: &str) -> T {
        match self.find(key) {
            Some(value) => value,
            None => panic!(
                "{}: there is no key {key:?} that always has a value",
                self.owner
            ),
        }
    }

    /// Returns the value of a key in GiB as bytes.
    ///
    /// # Panics
    /// As [`Self::get`].
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "sizes that matter are far below 2^53, and the cast saturates"
    )]
    pub fn gib(&self, key: &str) -> u64 {
        (self.get::<f64>(key) * GIB as f64) as u64
    }

    /// Returns the error for the value of `key`, for checks that a [`Shape`] cannot express; `allowed` follows the word
    /// "give".
    #[must_use]
    pub fn refuse(&self, key: &str, allowed: &str) -> ConfigError {
        let value = match self.settings.get(key) {
            None => Value::Null,
            Some(Setting::Switch(on)) => (*on).into(),
            Some(Setting::Integer(number)) => (*number).into(),
            Some(Setting::Number(number)) => (*number).into(),
            Some(Setting::Text(text)) => text.as_str().into(),
            Some(Setting::Integers(list)) => list.as_slice().into(),
            Some(Setting::Numbers(list)) => list.as_slice().into(),
            Some(Setting::Texts(list)) => list.as_slice().into(),
            Some(Setting::Object(map)) => Value::Object(map.clone()),
            Some(Setting::Adapter(config)) => config.kind.into(),
            Some(Setting::Params(params)) => serde_json::json!(params),
            Some(Setting::Tables(list)) => format!("{} objects", list.len()).into(),
        };
        ConfigError::value(&self.owner, key, &value, allowed)
    }
}

/// Parses the value of `key`.
fn setting(
    owner: &str,
    key: &Key,
    value: &Value,
    nested: &dyn Fn(&Value) -> Result<AdapterConfig, ConfigError>,
) -> Result<Setting, ConfigError> {
    let refused = || ConfigError::value(owner, key.name, value, key.allowed());
    match key.shape {
        Shape::Adapter => match nested(value) {
            Ok(config) => Ok(Setting::Adapter(Box::new(config))),
            Err(error) => Err(ConfigError::new(format!(
                "{owner}: key {:?}: {error}",
                key.name
            ))),
        },
        Shape::Tables(keys) => {
            let tables = value.as_array().ok_or_else(refused)?.iter().enumerate();
            let table = |(at, value): (usize, &Value)| {
                let owner = format!("{owner}: {}[{at}]", key.name);
                let Value::Object(map) = value else {
                    let line = format!(
                        "{owner}: {} is not an object; give one",
                        clip(&redact::value(value).to_string())
                    );
                    return Err(ConfigError::new(line));
                };
                let mut map = map.clone();
                let options = Options::take(&owner, keys, &mut map)?;
                refuse_rest(&owner, &map, keys)?;
                Ok(options)
            };
            tables
                .map(table)
                .collect::<Result<_, _>>()
                .map(Setting::Tables)
        }
        _ => key.read(value).ok_or_else(refused),
    }
}
