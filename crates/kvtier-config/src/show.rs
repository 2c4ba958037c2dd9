//! The configuration as `GET /config` tells it: each flag with its value, and no secret.

use clap::ArgMatches;
use clap::parser::ValueSource;
use serde_json::{Map, Value};

use super::command::command;

/// Sections of LMCache 0.5.6's `/config` that have the flags of a heading.
const SECTIONS: &[(&str, &str)] = &[
    ("Request server", "mp"),
    ("L1", "storage_manager"),
    ("L2", "storage_manager"),
    ("HTTP", "http"),
    ("Traces", "observability"),
    ("Logs", "observability"),
];

/// Every flag's value by section and name, with `_` for `-`; null where a flag without a default is not given. Flags that
/// are only known and those about the command itself are left out. Secrets are in it.
pub(super) fn values(given: &ArgMatches) -> Value {
    let mut all = Map::new();
    for arg in command().get_arguments().filter(|arg| !arg.is_hide_set()) {
        let (Some(name), Some(heading)) = (arg.get_long(), arg.get_help_heading()) else {
            continue;
        };
        let section = SECTIONS.iter().find(|(known, _)| *known == heading);
        if heading == "Configuration" {
            continue;
        }
        let section = section.map_or_else(
            || heading.to_lowercase().replace(' ', "_"),
            |(_, section)| (*section).to_owned(),
        );
        let id = arg.get_id().as_str();
        let shown = if arg.get_action().takes_values() {
            let raw = given.get_raw(id).into_iter().flatten();
            let values: Vec<_> = raw.map(|text| value(&text.to_string_lossy())).collect();
            match values.as_slice() {
                _ if matches!(arg.get_action(), clap::ArgAction::Append) => Value::Array(values),
                [] => Value::Null,
                [only] => only.clone(),
                _ => Value::Array(values),
            }
        } else {
            let is_set = given.value_source(id) == Some(ValueSource::CommandLine);
            Value::Bool(is_set && given.get_flag(id))
        };
        let section = all.entry(section).or_insert_with(|| Map::new().into());
        section[name.replace('-', "_")] = shown;
    }
    Value::Object(all)
}

/// JSON where the text is that, as numbers and adapters are.
fn value(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| text.into())
}

#[cfg(test)]
mod tests {
    use crate::ServerConfig;
    use serde_json::json;

    #[test]
    fn every_flag_is_told_and_no_secret_is() {
        let adapter = r#"{"type": "fs", "base_path": "/tmp/redis://me:MARK@h/x"}"#;
        let config = ServerConfig::from_flags(&[
            "--chunk-size",
            "16",
            "--l1-size-gb",
            "0.5",
            "--l1-use-hugepages",
            "--shm-name",
            "",
            "--l2-adapter",
            adapter,
        ]);
        let shown = config.unwrap().shown;
        assert_eq!(shown["mp"]["chunk_size"], json!(16));
        assert_eq!(shown["mp"]["max_workers"], json!(null));
        assert_eq!(shown["mp"]["shm_name"], json!(""));
        assert_eq!(shown["storage_manager"]["l1_use_hugepages"], json!(true));
        assert_eq!(shown["storage_manager"]["no_l1_prefault"], json!(false));
        let adapters = json!([{ "type": "fs", "base_path": "/tmp/redis://***@h/x" }]);
        assert_eq!(shown["storage_manager"]["l2_adapter"], adapters);
        assert_eq!(shown["http"]["http_host"], json!("127.0.0.1"));
        assert_eq!(shown["observability"]["log_format"], json!("text"));
        assert!(shown.get("configuration").is_none());
    }
}
