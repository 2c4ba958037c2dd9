//! What several tests of pickles share.

use kvtier_proto::tensor::InlineTensor;
use serde_json::Value;

/// The bytes a row has under `key`.
pub fn hex_field(row: &Value, key: &str) -> Vec<u8> {
    hex::decode(
        row[key]
            .as_str()
            .unwrap_or_else(|| panic!("{key} of {row}")),
    )
    .unwrap()
}

/// The elements of a tensor; checks on the way that all ways to them agree.
pub fn gathered(tensor: &InlineTensor<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    tensor.gather_into(&mut bytes);
    assert_eq!(bytes.len(), tensor.byte_len());
    if let Some(whole) = tensor.contiguous_bytes() {
        assert_eq!(whole, bytes);
    }
    assert_eq!(tensor.contiguous_bytes().is_some(), tensor.is_contiguous());
    bytes
}
