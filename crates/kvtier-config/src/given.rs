//! Values of flags as they were given, and as two configurations are compared: by flag, and of adapters by key.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;

use serde_json::Value;

use super::ServerConfig;

/// The flag of adapters, and a key of theirs that bounds nothing if it is 0.
pub(super) const ADAPTER: &str = "l2-adapter";
pub(super) const CAPACITY: &str = "max_capacity_gb";

/// Floats below this are exact integers if they have no fraction.
const EXACT: f64 = (1_u64 << 53) as f64;

/// Values by flag, without the dashes in front.
pub(super) type Values = BTreeMap<String, Value>;

/// The command line, and the value of each flag, secrets included.
#[derive(Clone, Default)]
pub struct Given {
    pub(super) arguments: Vec<OsString>,
    pub(super) has_file: bool,
    pub(super) values: Values,
}

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Given").finish_non_exhaustive()
    }
}

impl Given {
    /// `values` by section and name as [`super::show::values`] has them.
    pub(super) fn new(arguments: Vec<OsString>, has_file: bool, values: &Value) -> Self {
        Self {
            arguments,
            has_file,
            values: with_whole_numbers(flags_by_name(values)),
        }
    }
}

/// Returns the flags, for adapters with their tiers' names, and each key as a flag of its own: `l2-adapter fs-0 type`.
/// Without a `max_capacity_gb` that bounds nothing.
pub(super) fn by_key(config: &ServerConfig, mut flags: Values) -> Values {
    let Some(Value::Array(given)) = flags.remove(ADAPTER) else {
        return flags;
    };
    let adapters = config.l2.iter().flat_map(|l2| &l2.adapters);
    let mut tiers = Vec::new();
    for (adapter, given) in adapters.zip(given) {
        let name = adapter.tier();
        add_keys(&mut flags, &format!("{ADAPTER} {name} "), given);
        if adapter.capacity_bytes().is_none() {
            flags.remove(&format!("{ADAPTER} {name} {CAPACITY}"));
        }
        tiers.push(name);
    }
    flags.insert(ADAPTER.into(), tiers.into());
    flags
}

/// Values as they are compared: 1.0 is 1.
fn with_whole_numbers(values: Values) -> Values {
    let pairs = values.into_iter();
    pairs.map(|(name, value)| (name, whole(value))).collect()
}

fn whole(value: Value) -> Value {
    match value {
        Value::Number(number) => match number.as_f64() {
            // Exact, and read from text with a point in it.
            Some(float) if number.is_f64() && float.fract() == 0.0 && float.abs() < EXACT => {
                Value::from(float as i64)
            }
            _ => Value::Number(number),
        },
        Value::Array(values) => values.into_iter().map(whole).collect(),
        Value::Object(values) => values
            .into_iter()
            .map(|(name, value)| (name, whole(value)))
            .collect(),
        other => other,
    }
}

/// Adds the keys of an object, those of objects inside with a dot between.
fn add_keys(flags: &mut Values, prefix: &str, object: Value) {
    let Value::Object(keys) = object else { return };
    for (key, value) in keys {
        match value {
            Value::Null => {}
            Value::Object(_) => add_keys(flags, &format!("{prefix}{key}."), value),
            value => drop(flags.insert(format!("{prefix}{key}"), value)),
        }
    }
}

/// The flags of all sections of a configuration as `GET /config` has it.
pub fn flags_by_name(sections: &Value) -> BTreeMap<String, Value> {
    let sections = sections.as_object().into_iter();
    let sections = sections.flat_map(|all| all.values());
    let flags = sections.filter_map(Value::as_object).flatten();
    flags
        .map(|(name, value)| (name.replace('_', "-"), value.clone()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn whole_numbers_have_one_form() {
        let read = json!({"a": 1.0, "b": [-2.0, 2.5, 1e300], "c": u64::MAX, "d": "1.0"});
        let form = json!({"a": 1, "b": [-2, 2.5, 1e300], "c": u64::MAX, "d": "1.0"});
        assert_eq!(whole(read), form);
        assert_eq!(whole(form.clone()), form);
    }
}
