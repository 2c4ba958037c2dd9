//! Definitions of configuration keys, for their checks and their documentation.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;

use serde_json::{Map, Value};

use super::error::ConfigError;

/// Key of an adapter's configuration.
///
/// Values are checked against the definition before the adapter sees them, and the documentation is generated from it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Key {
    /// Name in JSON and TOML.
    pub name: &'static str,
    /// Allowed values.
    pub shape: Shape,
    /// Value if unset.
    pub fallback: Fallback,
    /// Unit of a number, such as "ms"; empty if there is none.
    pub unit: &'static str,
    /// Help text, one line.
    pub help: &'static str,
}

/// Allowed values of a key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Shape {
    /// `true` or `false`.
    Switch,
    /// A whole number of a closed range.
    Integer {
        /// Smallest.
        min: i64,
        /// Largest.
        max: i64,
    },
    /// A number of an interval.
    Number(Interval),
    /// Text with at least one character.
    Text,
    /// A path: see [`is_path`].
    Path,
    /// Text that may be empty.
    AnyText,
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// A list of whole numbers with a minimum.
    Integers {
        /// Smallest.
        min: i64,
    },
    /// A list of numbers of an interval.
    Numbers(Interval),
    /// A list of texts, each with at least one character.
    Texts,
    /// The configuration of another adapter, with its own `type`.
    Adapter,
    /// An object whose keys are defined elsewhere.
    Object,
    /// An object of texts, numbers and switches, which are taken as texts: parameters of another program.
    Params,
    /// A list of objects with these keys.
    Tables(&'static [Key]),
}

/// Help text of a key of LMCache's that is accepted and changes nothing.
pub const WITHOUT_EFFECT: &str = "LMCache's; changes nothing";

/// Allowed paths, as text to follow the word "give".
pub const ALLOWED_PATH: &str = "a path written out, without ~ or $ at its start and without NUL";

/// Whether a path of any configuration is allowed. Nothing replaces the abbreviations of shells in files and JSON: a directory
/// of that name would be created.
#[must_use]
pub fn is_path(path: impl AsRef<OsStr>) -> bool {
    let path = path.as_ref().as_encoded_bytes();
    !matches!(path.first(), None | Some(b'~' | b'$')) && !path.contains(&0)
}

/// Value of an unset key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fallback {
    /// The key is required.
    Required,
    /// None; a list is empty.
    Nothing,
    /// A switch.
    Switch(bool),
    /// A whole number.
    Integer(i64),
    /// A number.
    Number(f64),
    /// A text.
    Text(&'static str),
}

/// Interval of numbers, closed above, open or closed below.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    from: f64,
    without_from: bool,
    to: f64,
}

impl Interval {
    /// Numbers above `from`.
    #[must_use]
    pub const fn above(from: f64) -> Self {
        Self {
            from,
            without_from: true,
            to: f64::INFINITY,
        }
    }

    /// Numbers from `from` on.
    #[must_use]
    pub const fn from(from: f64) -> Self {
        Self {
            from,
            without_from: false,
            to: f64::INFINITY,
        }
    }

    /// The interval up to `to`, included.
    #[must_use]
    pub const fn up_to(self, to: f64) -> Self {
        Self { to, ..self }
    }

    fn contains(self, number: f64) -> bool {
        let low = if self.without_from {
            number > self.from
        } else {
            number >= self.from
        };
        low && number <= self.to && number.is_finite()
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if self.without_from { "above" } else { "from" };
        write!(f, "{word} {}", self.from)?;
        if self.to.is_finite() {
            write!(f, " up to {}", self.to)
        } else {
            Ok(())
        }
    }
}

/// A checked value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Setting {
    Switch(bool),
    Integer(i64),
    Number(f64),
    Text(String),
    Integers(Vec<i64>),
    Numbers(Vec<f64>),
    Texts(Vec<String>),
    Object(Map<String, Value>),
    Adapter(Box<super::AdapterConfig>),
    Tables(Vec<super::Options>),
    Params(BTreeMap<String, String>),
}

impl Key {
    const fn new(name: &'static str, shape: Shape, help: &'static str) -> Self {
        Self {
            name,
            shape,
            fallback: Fallback::Nothing,
            unit: "",
            help,
        }
    }

    /// Returns a switch, off unless set otherwise by [`Self::or`].
    #[must_use]
    pub const fn switch(name: &'static str, help: &'static str) -> Self {
        Self::new(name, Shape::Switch, help).or(Fallback::Switch(false))
    }

    /// Returns a key of a whole number from `min` to `max`.
    #[must_use]
    pub const fn integer(name: &'static str, min: i64, max: i64, help: &'static str) -> Self {
        Self::new(name, Shape::Integer { min, max }, help)
    }

    /// Returns a key of a number.
    #[must_use]
    pub const fn number(name: &'static str, interval: Interval, help: &'static str) -> Self {
        Self::new(name, Shape::Number(interval), help)
    }

    /// Returns a key of a text that is not empty.
    #[must_use]
    pub const fn text(name: &'static str, help: &'static str) -> Self {
        Self::new(name, Shape::Text, help)
    }

    /// Returns a key of a path.
    #[must_use]
    pub const fn path(name: &'static str, help: &'static str) -> Self {
        Self::new(name, Shape::Path, help)
    }

    /// Returns a key of any shape.
    #[must_use]
    pub const fn of(name: &'static str, shape: Shape, help: &'static str) -> Self {
        Self::new(name, shape, help)
    }

    /// Makes the key required.
    #[must_use]
    pub const fn required(self) -> Self {
        self.or(Fallback::Required)
    }

    /// Sets its value if unset.
    #[must_use]
    pub const fn or(self, fallback: Fallback) -> Self {
        Self { fallback, ..self }
    }

    /// Sets its unit.
    #[must_use]
    pub const fn unit(self, unit: &'static str) -> Self {
        Self { unit, ..self }
    }

    /// Returns the allowed values as text to follow the word "give".
    #[must_use]
    pub fn allowed(&self) -> String {
        match self.shape {
            Shape::Switch => "true or false".into(),
            Shape::Integer { min, max } => format!("a whole number {}", WholeNumber(min, max)),
            Shape::Number(interval) => format!("a number {interval}"),
            Shape::Text => "a text that is not empty".into(),
            Shape::Path => ALLOWED_PATH.into(),
            Shape::AnyText => "a text".into(),
            Shape::OneOf(words) => one_of(words),
            Shape::Integers { min } => {
                format!("a list of whole numbers {}", WholeNumber(min, i64::MAX))
            }
            Shape::Numbers(interval) => format!("a list of numbers {interval}"),
            Shape::Texts => "a list of texts that are not empty".into(),
            Shape::Adapter => "an adapter's object with a \"type\"".into(),
            Shape::Object => "an object".into(),
            Shape::Params => "an object of texts, numbers, true and false".into(),
            Shape::Tables(_) => "a list of objects".into(),
        }
    }

    /// Returns its value if unset as text.
    #[must_use]
    pub fn default_text(&self) -> String {
        match (self.fallback, self.shape) {
            (Fallback::Required, _) => "required".into(),
            (
                Fallback::Nothing,
                Shape::Integers { .. } | Shape::Numbers(_) | Shape::Texts | Shape::Tables(_),
            ) => "[]".into(),
            (Fallback::Nothing, Shape::Params) => "{}".into(),
            (Fallback::Nothing, _) => "unset".into(),
            (Fallback::Switch(on), _) => on.to_string(),
            (Fallback::Integer(number), _) => number.to_string(),
            (Fallback::Number(number), _) => number.to_string(),
            (Fallback::Text(text), _) => format!("{text:?}"),
        }
    }

    /// Returns its value if unset; `None` is no value.
    pub(super) fn unset(&self) -> Option<Setting> {
        Some(match (self.fallback, self.shape) {
            (_, Shape::Integers { .. }) => Setting::Integers(Vec::new()),
            (_, Shape::Numbers(_)) => Setting::Numbers(Vec::new()),
            (_, Shape::Texts) => Setting::Texts(Vec::new()),
            (_, Shape::Tables(_)) => Setting::Tables(Vec::new()),
            (Fallback::Nothing, Shape::Params) => Setting::Params(BTreeMap::new()),
            (Fallback::Required | Fallback::Nothing, _) => return None,
            (Fallback::Switch(on), _) => Setting::Switch(on),
            (Fallback::Integer(number), _) => Setting::Integer(number),
            (Fallback::Number(number), _) => Setting::Number(number),
            (Fallback::Text(text), _) => Setting::Text(text.into()),
        })
    }

    /// Returns `value` as a setting if it is allowed. Not for [`Shape::Adapter`] and [`Shape::Tables`], only for what they
    /// contain.
    pub(super) fn read(&self, value: &Value) -> Option<Setting> {
        let integer =
            |value: &Value, min, max| value.as_i64().filter(|number| (min..=max).contains(number));
        let number = |value: &Value, interval: Interval| {
            value.as_f64().filter(|number| interval.contains(*number))
        };
        match self.shape {
            Shape::Switch => value.as_bool().map(Setting::Switch),
            Shape::Integer { min, max } => integer(value, min, max).map(Setting::Integer),
            Shape::Number(interval) => number(value, interval).map(Setting::Number),
            Shape::Text | Shape::Path | Shape::AnyText | Shape::OneOf(_) => value
                .as_str()
                .filter(|text| match self.shape {
                    Shape::Text => !text.is_empty(),
                    Shape::Path => is_path(text),
                    Shape::OneOf(words) => words.contains(text),
                    _ => true,
                })
                .map(|text| Setting::Text(text.into())),
            Shape::Integers { min } => value
                .as_array()?
                .iter()
                .map(|value| integer(value, min, i64::MAX))
                .collect::<Option<_>>()
                .map(Setting::Integers),
            Shape::Numbers(interval) => value
                .as_array()?
                .iter()
                .map(|value| number(value, interval))
                .collect::<Option<_>>()
                .map(Setting::Numbers),
            Shape::Params => value
                .as_object()?
                .iter()
                .map(|(key, value)| Some((key.clone(), as_text(value)?)))
                .collect::<Option<_>>()
                .map(Setting::Params),
            Shape::Texts => value
                .as_array()?
                .iter()
                .map(|value| {
                    let text = value.as_str().filter(|text| !text.is_empty());
                    text.map(str::to_owned)
                })
                .collect::<Option<_>>()
                .map(Setting::Texts),
            Shape::Object => value.as_object().cloned().map(Setting::Object),
            Shape::Adapter | Shape::Tables(_) => None,
        }
    }
}

/// Returns a value of [`Shape::Params`] as text.
fn as_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(on) => Some(on.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

/// Range of whole numbers in words, without the limits of the type.
struct WholeNumber(i64, i64);

impl fmt::Display for WholeNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0, self.1) {
            (i64::MIN, i64::MAX) => f.write_str("of 64 bits"),
            (min, i64::MAX) => write!(f, "from {min} on"),
            (min, max) => write!(f, "from {min} to {max}"),
        }
    }
}

/// Returns a choice of words as text.
#[must_use]
pub fn one_of(words: &[&str]) -> String {
    match words.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => words.concat(),
    }
}

/// Refuses unknown keys of `map`.
pub(crate) fn refuse_rest<'a>(
    owner: &str,
    map: &Map<String, Value>,
    known: impl IntoIterator<Item = &'a Key>,
) -> Result<(), ConfigError> {
    let known: Vec<_> = known.into_iter().map(|key| key.name).collect();
    let Some(key) = map.keys().find(|key| !known.contains(&key.as_str())) else {
        return Ok(());
    };
    Err(ConfigError::new(format!(
        "{owner}: key {:?} is unknown; known keys are {}",
        super::error::clip(key),
        known.join(", ")
    )))
}
