//! The writer against `written.json`: pickles that real PyTorch loaded into the tensors they should be.
//!
//! `check_written.py` beside the vectors is what checked them; it needs PyTorch and is run by hand.

use kvtier_proto::descriptor::Dtype;
use kvtier_proto::pickle::{
    PickleLimits, TensorToWrite, WriteError, read_tensors, write_around_elements, write_tensors,
};
use serde_json::{Value, json};

use super::support::hex_field;

/// Type, shape and elements.
type Tensor = (Dtype, Vec<u64>, Vec<u8>);

fn written(tensors: &[Tensor]) -> Vec<u8> {
    let plan: Vec<_> = tensors
        .iter()
        .map(|(dtype, shape, _)| TensorToWrite {
            dtype: *dtype,
            shape,
        })
        .collect();
    let message = write_tensors::<WriteError>(&plan, |index, out| {
        out.extend_from_slice(&tensors[index].2);
        Ok(())
    })
    .unwrap();
    assert_eq!(message.capacity(), message.len());

    let mut around = b"before".to_vec();
    let (places, size) = write_around_elements(&mut around, &plan).unwrap();
    assert_eq!(size, message.len());
    for (place, (_, _, elements)) in places.iter().zip(tensors).rev() {
        around.splice(place..place, elements.iter().copied());
    }
    assert!(around[6..] == message && around.starts_with(b"before"));
    message
}

/// Reads our own pickle; the tensors must come back.
fn assert_reads_back(message: &[u8], tensors: &[Tensor]) {
    let read = read_tensors(message, &PickleLimits::default()).unwrap();
    assert_eq!(read.len(), tensors.len());
    for (read, (dtype, shape, elements)) in read.iter().zip(tensors) {
        assert_eq!((read.dtype, &read.shape), (*dtype, shape));
        assert_eq!(read.contiguous_bytes().unwrap(), elements);
    }
}

fn vectors() -> Value {
    serde_json::from_str(include_str!("../../vectors/written.json")).unwrap()
}

#[test]
fn every_recorded_pickle_is_written_again_and_read() {
    for row in vectors()["rows"].as_array().unwrap() {
        let tensors: Vec<Tensor> = row["tensors"]
            .as_array()
            .unwrap()
            .iter()
            .map(|tensor| {
                let dtype = Dtype::from_name(tensor["dtype"].as_str().unwrap()).unwrap();
                let shape = tensor["shape"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|axis| axis.as_u64().unwrap())
                    .collect();
                (dtype, shape, hex_field(tensor, "elements"))
            })
            .collect();
        let message = written(&tensors);
        assert_eq!(
            hex::encode(&message),
            row["pickle"].as_str().unwrap(),
            "{}",
            row["name"]
        );
        assert_reads_back(&message, &tensors);
    }
}

/// The rows of the vectors, from the writer: one for each type, and the odd shapes.
fn rows() -> Vec<(String, Vec<Tensor>)> {
    let tensor = |dtype: Dtype, shape: &[u64], first: u8| {
        let bytes = TensorToWrite { dtype, shape }.byte_len().unwrap();
        // Bytes below 0x78 make no NaN in any float type, and 0 and 1 are what a bool may be.
        let most = if dtype == Dtype::Bool { 2 } else { 0x78 };
        let elements = (0..bytes)
            .map(|at| (first as usize + at) as u8 % most)
            .collect();
        (dtype, shape.to_vec(), elements)
    };
    let mut rows = vec![
        ("empty_list".to_owned(), vec![]),
        ("scalar".to_owned(), vec![tensor(Dtype::Float32, &[], 1)]),
        (
            "no_elements".to_owned(),
            vec![
                tensor(Dtype::Float16, &[0, 4], 0),
                tensor(Dtype::Float16, &[3, 0], 0),
            ],
        ),
        (
            "long_axis".to_owned(),
            vec![tensor(Dtype::UInt8, &[300], 5)],
        ),
        (
            "several_types".to_owned(),
            vec![
                tensor(Dtype::BFloat16, &[2, 1, 2, 4], 1),
                tensor(Dtype::Float8E4m3fn, &[1, 2, 4], 2),
                tensor(Dtype::BFloat16, &[2, 1, 2, 4], 3),
            ],
        ),
    ];
    for &dtype in Dtype::ALL {
        let shape = [2, 3, 2];
        let tensor_to_write = TensorToWrite {
            dtype,
            shape: &shape,
        };
        if write_around_elements(&mut Vec::new(), &[tensor_to_write]).is_ok() {
            rows.push((dtype.name().to_owned(), vec![tensor(dtype, &shape, 7)]));
        }
    }
    rows
}

/// Prints the vectors; check the output with `check_written.py` before recording it.
#[test]
#[ignore = "prints new vectors"]
fn print_vectors() {
    let rows: Vec<_> = rows()
        .into_iter()
        .map(|(name, tensors)| {
            let described: Vec<_> = tensors
                .iter()
                .map(|(dtype, shape, elements)| {
                    json!({"dtype": dtype.name(), "shape": shape, "elements": hex::encode(elements)})
                })
                .collect();
            json!({"name": name, "tensors": described, "pickle": hex::encode(written(&tensors))})
        })
        .collect();
    println!("{}", json!({ "rows": rows }));
}

#[test]
fn the_vectors_have_every_case_of_the_writer() {
    let vectors = vectors();
    let recorded: Vec<_> = vectors["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["name"].as_str().unwrap())
        .collect();
    let rows = rows();
    let ours: Vec<_> = rows.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(recorded, ours);
}

#[test]
fn elements_of_another_size_are_refused() {
    let shape = [2];
    let plan = [TensorToWrite {
        dtype: Dtype::UInt8,
        shape: &shape,
    }; 2];
    for wrong in [1, 3] {
        let error = write_tensors::<WriteError>(&plan, |index, out| {
            out.resize(out.len() + if index == 0 { 2 } else { wrong }, 0);
            Ok(())
        })
        .unwrap_err();
        assert_eq!(
            error,
            WriteError::Elements {
                index: 1,
                expected: 2,
                written: wrong
            }
        );
    }
}

#[test]
fn tensors_python_could_not_load_are_refused() {
    let cases: [(Dtype, &[u64]); 5] = [
        (Dtype::QInt8, &[2]),
        (Dtype::UInt8, &[1 << 63]),
        (Dtype::UInt8, &[1 << 32, 1 << 32]),
        (Dtype::UInt8, &[1 << 63, 0]),
        (Dtype::UInt8, &[1; 17]),
    ];
    for (dtype, shape) in cases {
        let mut out = b"before".to_vec();
        write_around_elements(&mut out, &[TensorToWrite { dtype, shape }]).unwrap_err();
        assert_eq!(out, b"before");
    }
}
