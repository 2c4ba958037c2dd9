//! Reading an answer of a server of another release, or of another maker.

use serde::de::DeserializeOwned;
use serde_json::{Error, Value};
use serde_path_to_error::{Path, Segment, deserialize};

/// Limit of fields and elements that are left out.
const MAX_LEFT_OUT: usize = 100;

/// Returns the value as `T`. A field or element of another type than expected, `null` among them, is left out, as if it were
/// missing.
///
/// # Errors
/// The value as a whole is of another type, or more than 100 of its parts are.
pub fn from_value<T: DeserializeOwned>(mut value: Value) -> Result<T, Error> {
    for _ in 0..MAX_LEFT_OUT {
        match deserialize(&value) {
            Ok(read) => return Ok(read),
            Err(error) if remove(&mut value, error.path()) => {}
            Err(error) => return Err(error.into_inner()),
        }
    }
    serde_json::from_value(value)
}

/// Removes what is at this place; returns whether there was anything.
fn remove(value: &mut Value, path: &Path) -> bool {
    let mut at = value;
    let mut segments = path.iter().peekable();
    while let Some(segment) = segments.next() {
        let is_last = segments.peek().is_none();
        let next = match (segment, at) {
            (Segment::Map { key }, Value::Object(fields)) if is_last => {
                return fields.remove(key).is_some();
            }
            (Segment::Seq { index }, Value::Array(elements)) if is_last => {
                let is_there = *index < elements.len();
                if is_there {
                    elements.remove(*index);
                }
                return is_there;
            }
            (Segment::Map { key }, Value::Object(fields)) => fields.get_mut(key),
            (Segment::Seq { index }, Value::Array(elements)) => elements.get_mut(*index),
            _ => None,
        };
        match next {
            Some(next) => at = next,
            None => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::Status;

    #[test]
    fn odd_fields_are_left_out_and_the_rest_is_read() {
        let status: Status = from_value(json!({
            "is_healthy": true,
            "server": "kvtier",
            "p2p_state": null,
            "active_p2p_lookup_jobs": "many",
            "storage_manager": {
                "l1_manager": { "total_object_count": -1, "memory_used_bytes": 7 },
                "l2_eviction_controller": null,
                "l2_adapters": [3, { "is_healthy": true }],
            },
        }))
        .unwrap();
        assert!(status.is_healthy && status.server == "kvtier");
        assert_eq!(status.storage_manager.l1_manager.memory_used_bytes, 7);
        assert_eq!(status.storage_manager.l1_manager.total_object_count, 0);
        assert_eq!(status.storage_manager.l2_adapters.len(), 1);
    }

    #[test]
    fn value_of_another_type_is_refused() {
        assert!(from_value::<Status>(json!(7)).is_err());
    }
}
