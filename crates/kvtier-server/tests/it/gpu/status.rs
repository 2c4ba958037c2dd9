//! What `/status` reports of GPUs: every field and its type.

use serde_json::{Value, json};

use super::setup::{Bed, Worker, wait};
use crate::exporter::Exporter;

/// The value with 0 for each number, and without the names of executors, which a trial chooses.
fn masked(key: &str, value: &Value) -> Value {
    match value {
        Value::String(_) if key == "executor" => json!("*"),
        Value::Object(fields) => {
            let fields = fields.iter();
            let fields = fields.map(|(key, value)| (key.clone(), masked(key, value)));
            Value::Object(fields.collect())
        }
        Value::Array(list) => list.iter().map(|value| masked("", value)).collect(),
        Value::Number(_) => json!(0),
        value => value.clone(),
    }
}

#[test]
fn status_of_gpus_has_the_recorded_fields() {
    let bed = Bed::start();
    let mut engine = Exporter::start();
    let mut worker = Worker::new(&bed, &mut engine, 1, "gpu/status");
    let registered = worker.send_registration();
    worker.done(registered);
    let stored = worker.send_store(1, b"");
    assert!(worker.has_stored(stored));
    let devices = || json!(bed.engine().admin().status(true).devices);
    wait(|| devices()["cuda"]["pinning"]["under_way"] == false);
    let devices = masked("", &devices());
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/vectors/answers_gpu.json"
    );
    if std::env::var_os("KVTIER_WRITE_DOCS").is_some() {
        std::fs::write(path, format!("{devices:#}\n")).unwrap();
    }
    let recorded: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(devices, recorded);
    bed.ends_clean();
}
