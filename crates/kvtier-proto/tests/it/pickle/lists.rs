//! Every row of `pickle.json`: lists of tensors that real PyTorch pickled.

use super::support::{gathered, hex_field};
use kvtier_proto::pickle::{PickleLimits, read_tensors};
use serde_json::{Value, json};

#[test]
fn every_pickled_list_reads_as_pytorch_reads_it() {
    let vectors: Value = serde_json::from_str(include_str!("../../vectors/pickle.json")).unwrap();
    for row in vectors["cases"].as_array().unwrap() {
        let name = row["name"].as_str().unwrap();
        let message = hex_field(row, "pickle");
        let outcome = read_tensors(&message, &PickleLimits::default());
        match name {
            // Protocol 2 has no bytes: it asks for a call that builds them from text. No release sends it.
            "protocol_2" => {
                let error = outcome.unwrap_err();
                assert!(error.message.contains("_codecs"), "{error}");
            }
            // Calls functions of one's choice.
            "handmade_frombuffer" => {
                let error = outcome.unwrap_err();
                assert!(error.message.contains("reshape"), "{error}");
            }
            // The same list as one_bf16.
            "protocol_3" | "protocol_4" | "protocol_5" => {
                let expected = vectors["cases"][0]["tensors"][0]["bytes"].as_str().unwrap();
                assert_eq!(vectors["cases"][0]["name"], "one_bf16");
                assert_eq!(hex::encode(gathered(&outcome.unwrap()[0])), expected);
            }
            _ => {
                let expected = row["tensors"]
                    .as_array()
                    .unwrap_or_else(|| panic!("unknown row {name}"));
                let tensors = outcome.unwrap();
                assert_eq!(tensors.len(), expected.len(), "{name}");
                for (tensor, expected) in tensors.iter().zip(expected) {
                    let found = json!({
                        "dtype": format!("torch.{}", tensor.dtype),
                        "shape": tensor.shape,
                        "stride": tensor.strides,
                        "bytes": hex::encode(gathered(tensor)),
                    });
                    assert_eq!(&found, expected, "{name}");
                    assert_eq!(tensor.is_contiguous(), name != "non_contiguous", "{name}");
                }
            }
        }
    }
}
