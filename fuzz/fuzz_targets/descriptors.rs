//! A registered tensor: the descriptor, or the pickled wrapper of an old client.

#![no_main]

use kvtier_proto::descriptor::TensorDescriptor;
use kvtier_proto::pickle::{PickleLimits, read_registration};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| {
    let descriptor = match TensorDescriptor::decode(body) {
        Ok(TensorDescriptor::Legacy { pickle }) => read_registration(&pickle, &PickleLimits::default()),
        other => other,
    };
    let Ok(descriptor) = descriptor else { return };
    if let Some(metadata) = descriptor.metadata() {
        metadata.byte_span().expect("checked while decoding");
    }
    let mut encoded = Vec::new();
    descriptor.encode(&mut encoded);
    assert_eq!(TensorDescriptor::decode(&encoded), Ok(descriptor));
});
