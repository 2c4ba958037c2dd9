//! Every row of `pickle_inner_storage.json`: the streams inside pickled tensors.

use super::support::hex_field;
use kvtier_proto::pickle::{PickleLimits, read_tensors};
use serde_json::Value;

/// A pickled list of one flat tensor over that stream.
fn around(stream: &[u8], count: u8, dtype: Option<&str>) -> Vec<u8> {
    let mut message = b"\x80\x04](\x8c\x0ctorch._utils\x8c\x12_rebuild_tensor_v".to_vec();
    message.push(if dtype.is_some() { b'3' } else { b'2' });
    message.extend_from_slice(b"\x93(\x8c\x0dtorch.storage\x8c\x10_load_from_bytes\x93B");
    message.extend_from_slice(&(stream.len() as u32).to_le_bytes());
    message.extend_from_slice(stream);
    message.extend_from_slice(&[0x85, b'R', b'K', 0, b'K', count, 0x85, b'K', 1, 0x85, 0x89]);
    message.extend_from_slice(b"\x8c\x0bcollections\x8c\x0bOrderedDict\x93)R");
    if let Some(dtype) = dtype {
        message.extend_from_slice(&[0x8c, 5]);
        message.extend_from_slice(b"torch");
        message.extend_from_slice(&[0x8c, dtype.len() as u8]);
        message.extend_from_slice(dtype.as_bytes());
        message.push(0x93);
    }
    message.extend_from_slice(b"tRe.");
    message
}

#[test]
fn every_stream_gives_its_elements() {
    let vectors: Value =
        serde_json::from_str(include_str!("../../vectors/pickle_inner_storage.json")).unwrap();
    for (name, row) in vectors.as_object().unwrap() {
        let (expected, named) = match name.as_str() {
            "one_bf16" | "view_of_bigger_storage" => ("bfloat16", None),
            "one_f16" => ("float16", None),
            "one_f32" => ("float32", None),
            "one_u8" => ("uint8", None),
            "one_fp8" => ("float8_e4m3fn", Some("float8_e4m3fn")),
            other => panic!("unknown row {other}"),
        };
        let stream = hex_field(row, "blob");
        let tail = hex_field(row, "tail_hex");
        let (count, elements) = tail.split_first_chunk::<8>().unwrap();
        let count = u8::try_from(u64::from_le_bytes(*count)).unwrap();

        let message = around(&stream, count, named);
        let tensors = read_tensors(&message, &PickleLimits::default()).unwrap();
        assert_eq!(tensors.len(), 1);
        assert_eq!(tensors[0].dtype.name(), expected);
        assert_eq!(tensors[0].contiguous_bytes().unwrap(), elements, "{name}");

        // One byte less or more, or one element too many, and nothing is read.
        let longer = [stream.as_slice(), &[0]].concat();
        for wrong in [
            around(&stream[..stream.len() - 1], count, named),
            around(&longer, count, named),
            around(&stream, count + 1, named),
        ] {
            read_tensors(&wrong, &PickleLimits::default()).unwrap_err();
        }
    }
}
