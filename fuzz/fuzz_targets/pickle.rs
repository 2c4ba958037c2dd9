//! Tensors in a message: a pickled list, or an envelope in MessagePack.

#![no_main]

use kvtier_proto::inline::InlineForm;
use kvtier_proto::pickle::{PickleLimits, TensorToWrite, WriteError, read_tensors, write_tensors};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|message: &[u8]| {
    for group in InlineForm::Envelope.read(message).unwrap_or_default() {
        assert!(group.positions.is_none_or(|positions| positions.len() == group.tensors.len()));
        for tensor in group.tensors {
            assert_eq!(tensor.contiguous_bytes(), Some(tensor.data));
        }
    }
    let limits = PickleLimits {
        max_tensors: 64,
        ..PickleLimits::default()
    };
    let Ok(tensors) = read_tensors(message, &limits) else {
        return;
    };
    let mut elements = Vec::new();
    for tensor in &tensors {
        assert!(tensor.byte_len() <= tensor.data.len());
        let mut gathered = Vec::new();
        tensor.gather_into(&mut gathered);
        assert_eq!(gathered.len(), tensor.byte_len());
        if let Some(contiguous) = tensor.contiguous_bytes() {
            assert_eq!(contiguous, gathered);
        }
        elements.push(gathered);
    }
    // What came from outside can be sent back, and then reads the same.
    let plan: Vec<_> = tensors
        .iter()
        .map(|tensor| TensorToWrite {
            dtype: tensor.dtype,
            shape: &tensor.shape,
        })
        .collect();
    let written = write_tensors::<WriteError>(&plan, |index, out| {
        out.extend_from_slice(&elements[index]);
        Ok(())
    });
    let Ok(written) = written else { return };
    let again = read_tensors(&written, &limits).expect("our own bytes");
    assert_eq!(again.len(), tensors.len());
    for ((again, tensor), elements) in again.iter().zip(&tensors).zip(&elements) {
        assert_eq!((again.dtype, &again.shape), (tensor.dtype, &tensor.shape));
        assert_eq!(again.contiguous_bytes(), Some(elements.as_slice()));
    }
});
