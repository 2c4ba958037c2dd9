//! `--l1-manager`: LMCache's JSON form of L1's size.

use kvtier_common::error::Result;
use serde_json::{Map, Value};

use super::checks::{gib, refuse};

/// Fields that ask for what is so anyway, or name what there is one of.
const WITHOUT_CHOICE: [&str; 3] = ["tag", "use_lazy", "init_size_gb"];

/// Fields for which there is a flag.
const FLAGS: [(&str, &str); 7] = [
    ("align_bytes", "--l1-align-bytes"),
    ("shm_name", "--shm-name"),
    ("use_hugepages", "--l1-use-hugepages"),
    ("read_ttl_seconds", "--l1-read-ttl-seconds"),
    ("write_ttl_seconds", "--l1-write-ttl-seconds"),
    ("eviction", "--eviction-policy"),
    ("eviction_policy", "--eviction-policy"),
];

/// The size of L1 in GiB; `None` without the flag.
pub(super) fn size_gb(managers: &[String]) -> Result<Option<f64>> {
    let refuse = |value: &str, allowed: &str| refuse("l1-manager", value, allowed);
    let text = match managers {
        [] => return Ok(None),
        [text] => text,
        [_, second, ..] => return Err(refuse(second, "there is one L1; give the flag once")),
    };
    let form = r#"give {"type": "DRAM", "size_gb": GIB}"#;
    let manager: Map<String, Value> = serde_json::from_str(text).map_err(|_| refuse(text, form))?;
    for (field, value) in &manager {
        let field = field.as_str();
        match field {
            "type" if value == "DRAM" => {}
            "type" => return Err(refuse(&format!("type {value}"), "L1 is host memory: DRAM")),
            "size_gb" => {}
            field if WITHOUT_CHOICE.contains(&field) => {}
            field => {
                let flag = FLAGS.iter().find(|(known, _)| *known == field);
                let allowed = match flag {
                    Some((_, flag)) => format!("give {flag} in its place"),
                    None => form.to_owned(),
                };
                return Err(refuse(&format!("field {field:?}"), &allowed));
            }
        }
    }
    let size = manager.get("size_gb").and_then(Value::as_f64);
    match (manager.contains_key("type"), size) {
        (true, Some(size)) => gib("l1-manager", size).map(|_| Some(size)),
        _ => Err(refuse(text, form)),
    }
}

#[cfg(test)]
mod tests {
    use crate::{GIB, L1Origin, ServerConfig};

    #[test]
    fn a_dram_manager_sets_the_size_of_l1() {
        for manager in [
            r#"{"type": "DRAM", "size_gb": 2}"#,
            r#"{"type": "DRAM", "size_gb": 2.0, "tag": "x", "use_lazy": false, "init_size_gb": 1}"#,
        ] {
            let config = ServerConfig::from_flags(&["--l1-manager", manager]).unwrap();
            assert_eq!(
                (config.l1_bytes, config.l1_origin),
                (2 * GIB, L1Origin::Given)
            );
            assert!(config.ignored.is_empty());
        }
    }

    #[test]
    fn other_managers_and_fields_are_refused() {
        let dram = r#"{"type": "DRAM", "size_gb": 2}"#;
        for (flags, told) in [
            (
                vec![r#"{"type": "GDS", "size_gb": 2}"#],
                r#"type "GDS" is not allowed; L1 is host memory: DRAM"#,
            ),
            (
                vec![r#"{"type": "DRAM"}"#],
                r#"give {"type": "DRAM", "size_gb": GIB}"#,
            ),
            (vec![r#"{"size_gb": 2}"#], "give {"),
            (
                vec![r#"{"type": "DRAM", "size_gb": 0}"#],
                "--l1-manager: 0 is not allowed; give a size in GiB above 0",
            ),
            (
                vec![r#"{"type": "DRAM", "size_gb": 2, "align_bytes": 64}"#],
                "give --l1-align-bytes in its place",
            ),
            (
                vec![r#"{"type": "DRAM", "size_gb": 2, "colour": 1}"#],
                r#"field "colour" is not allowed; give {"#,
            ),
            (vec!["x"], "give {"),
            (vec![dram, "--l1-manager", dram], "give the flag once"),
            (vec![dram, "--l1-size-gb", "2"], "give one of them"),
        ] {
            let flags = [vec!["--l1-manager"], flags].concat();
            let error = ServerConfig::from_flags(&flags).unwrap_err().to_string();
            assert!(
                error.starts_with("--l1-manager") && error.contains(told),
                "{error}"
            );
        }
    }
}
