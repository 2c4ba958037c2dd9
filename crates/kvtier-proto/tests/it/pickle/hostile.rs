//! Hostile pickles: refused, without a panic and without taking more memory than their size allows.

use kvtier_proto::descriptor::TensorDescriptor;
use kvtier_proto::pickle::{PickleLimits, read_registration, read_tensors};
use proptest::prelude::*;
use serde_json::Value;

use super::support::{gathered, hex_field};

/// Real messages to start from: lists of tensors and wrappers.
fn seeds() -> Vec<Vec<u8>> {
    let lists: Value = serde_json::from_str(include_str!("../../vectors/pickle.json")).unwrap();
    let wrappers: Value =
        serde_json::from_str(include_str!("../../vectors/legacy_wrappers.json")).unwrap();
    let written: Value = serde_json::from_str(include_str!("../../vectors/written.json")).unwrap();
    [(&lists, "cases"), (&wrappers, "rows"), (&written, "rows")]
        .iter()
        .flat_map(|(vectors, rows)| vectors[rows].as_array().unwrap())
        .map(|row| hex_field(row, "pickle"))
        .collect()
}

/// Reads the message every way there is, and walks over whatever it gives.
fn exercise(message: &[u8]) {
    let limits = PickleLimits {
        max_opcodes: 10_000,
        max_tensors: 64,
    };
    if let Ok(tensors) = read_tensors(message, &limits) {
        for tensor in &tensors {
            assert!(tensor.byte_len() <= tensor.data.len());
            gathered(tensor);
        }
    }
    if let Ok(descriptor) = read_registration(message, &limits) {
        descriptor.metadata().unwrap().byte_span().unwrap();
        // What a wrapper becomes must be a descriptor that could have been sent.
        let mut body = Vec::new();
        descriptor.encode(&mut body);
        assert_eq!(TensorDescriptor::decode(&body).unwrap(), descriptor);
    }
}

proptest! {
    #[test]
    fn random_bytes_do_no_harm(message in proptest::collection::vec(any::<u8>(), 0..400)) {
        exercise(&message);
    }

    // proves: docs/compare.md#hostile-peers
    #[test]
    fn random_opcodes_do_no_harm(
        steps in proptest::collection::vec(
            prop_oneof![
                4 => proptest::sample::select(&b"()]}tu.aesbRNQ\x81\x85\x86\x87\x88\x89\x93\x94"[..]).prop_map(|opcode| vec![opcode]),
                2 => (proptest::sample::select(&b"Khq"[..]), 0u8..6).prop_map(|(opcode, byte)| vec![opcode, byte]),
                1 => Just(b"\x8c\x05torch\x8c\x08bfloat16\x93".to_vec()),
                1 => Just(b"ctorch._utils\n_rebuild_tensor_v2\n".to_vec()),
                1 => Just(b"clmcache.v1.platform.cpu.shm\nCpuShmTensorWrapper\n".to_vec()),
            ],
            0..200,
        )
    ) {
        exercise(&[&[0x80, 4], steps.concat().as_slice()].concat());
    }

    // proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
    #[test]
    fn changed_pickles_do_no_harm(
        seed in any::<proptest::sample::Index>(),
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
        cut in proptest::option::of(any::<proptest::sample::Index>()),
    ) {
        let seeds = seeds();
        let mut message = seed.get(&seeds).clone();
        for (at, byte) in changes {
            let at = at.index(message.len());
            message[at] = byte;
        }
        if let Some(cut) = cut {
            message.truncate(cut.index(message.len()));
        }
        exercise(&message);
    }

    #[test]
    fn strided_tensors_are_gathered_in_row_major_order(
        shape in proptest::collection::vec(1u8..5, 0..4),
        order in any::<u64>(),
        offset in 0u8..3,
    ) {
        // A dense tensor whose axes are stored in another order: the product is at most 64.
        let mut axes: Vec<usize> = (0..shape.len()).collect();
        axes.sort_by_key(|&axis| order.rotate_left(17 * axis as u32) & 0xffff);
        let mut strides = vec![0u8; shape.len()];
        let mut elements = 1u8;
        for &axis in &axes {
            strides[axis] = elements;
            elements *= shape[axis];
        }
        let data: Vec<u8> = (0..elements + offset).collect();
        let message = flat_storage(&data, offset, &shape, &strides);
        let tensors = read_tensors(&message, &PickleLimits::default()).unwrap();

        let mut expected = Vec::new();
        for position in 0..elements {
            let (mut rest, mut at) = (position, offset);
            for axis in (0..shape.len()).rev() {
                at += rest % shape[axis] * strides[axis];
                rest /= shape[axis];
            }
            expected.push(data[usize::from(at)]);
        }
        prop_assert_eq!(gathered(&tensors[0]), expected);
    }
}

/// A pickled list of one uint8 tensor with these axes over that storage.
fn flat_storage(data: &[u8], offset: u8, shape: &[u8], strides: &[u8]) -> Vec<u8> {
    let lists: Value = serde_json::from_str(include_str!("../../vectors/pickle.json")).unwrap();
    let row = lists["cases"]
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["name"] == "one_u8")
        .unwrap();
    let real = hex_field(row, "pickle");
    let stream_start = 93 - 4 + 1 + 4;
    let stream = &real[stream_start..][..258];
    assert_eq!(real[stream_start - 5], b'B');
    // 16 bytes end the stream: a count and 8 elements. The record names the count as the byte behind `K`.
    let mut head = stream[..258 - 16].to_vec();
    let count = head
        .windows(4)
        .rposition(|bytes| bytes == [b'K', 8, b'N', b't'])
        .unwrap();
    head[count + 1] = data.len() as u8;
    let stream = [&head, &(data.len() as u64).to_le_bytes()[..], data].concat();

    let mut message = real[..stream_start - 4].to_vec();
    // The frame's length is no longer true.
    assert_eq!(message[2], 0x95);
    message.drain(2..11);
    message.extend_from_slice(&(stream.len() as u32).to_le_bytes());
    message.extend_from_slice(&stream);
    message.extend_from_slice(&[0x85, b'R', b'K', offset]);
    for axes in [shape, strides] {
        message.push(b'(');
        axes.iter()
            .for_each(|&axis| message.extend_from_slice(&[b'K', axis]));
        message.push(b't');
    }
    message.extend_from_slice(b"\x89\x8c\x0bcollections\x8c\x0bOrderedDict\x93)RtRa.");
    message
}

#[test]
fn view_must_stay_inside_storage_without_repeats() {
    let data = [0; 24];
    let read = |offset, shape: &[u8], strides: &[u8]| {
        read_tensors(
            &flat_storage(&data, offset, shape, strides),
            &PickleLimits::default(),
        )
        .map(|_| ())
    };
    read(0, &[2, 3, 4], &[12, 4, 1]).unwrap();
    read(12, &[12], &[1]).unwrap();
    read(200, &[0, 9], &[200, 200]).unwrap();
    read(13, &[12], &[1]).unwrap_err();
    read(0, &[2, 3, 5], &[12, 4, 1]).unwrap_err();
    // 255 * 255 elements from one byte.
    read(0, &[255, 255], &[0, 0]).unwrap_err();
    read(0, &[2, 2], &[1]).unwrap_err();
}

#[test]
fn many_tensors_over_one_storage_are_refused() {
    let one = flat_storage(&[7; 200], 0, &[200], &[1]);
    let body = &one[2 + 1 + 1..one.len() - 2];
    assert_eq!(one[..4], *b"\x80\x04]\x94");
    // The tensor into the memo, then the same tensor three times more.
    let repeated = |times: usize| {
        let more = b"h\x00".repeat(times);
        [b"\x80\x04](".as_slice(), body, b"q\x00", &more, b"e."].concat()
    };
    let read =
        |times| read_tensors(&repeated(times), &PickleLimits::default()).map(|list| list.len());
    assert_eq!(read(1), Ok(2));
    assert!(read(40).unwrap_err().message.contains("more bytes"));
}

#[test]
fn long_texts_are_refused() {
    let text = |length: u32| {
        let text = vec![b'x'; length as usize];
        [b"\x80\x04X".as_slice(), &length.to_le_bytes(), &text, b"."].concat()
    };
    let read = |length| {
        read_tensors(&text(length), &PickleLimits::default())
            .unwrap_err()
            .message
    };
    assert!(read(1024).contains("not a list"));
    assert!(read(1025).contains("at most 1024"));
}

#[test]
fn the_limits_hold() {
    let lists: Value = serde_json::from_str(include_str!("../../vectors/pickle.json")).unwrap();
    let two = hex_field(&lists["cases"][1], "pickle");
    let read = |max_opcodes, max_tensors| {
        read_tensors(
            &two,
            &PickleLimits {
                max_opcodes,
                max_tensors,
            },
        )
        .map(|list| list.len())
    };
    assert_eq!(read(1000, 2), Ok(2));
    assert!(read(1000, 1).unwrap_err().message.contains("at most 1"));
    assert!(read(60, 2).unwrap_err().message.contains("60 steps"));

    // Steps, not bytes, are what a long run of cheap opcodes costs.
    let many = [b"\x80\x04".as_slice(), &[b'N'; 100_000], b"."].concat();
    let limits = PickleLimits {
        max_opcodes: 1000,
        max_tensors: 1,
    };
    assert!(
        read_tensors(&many, &limits)
            .unwrap_err()
            .message
            .contains("1000 steps")
    );
}

// proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
// proves: docs/compare.md#hostile-peers
#[test]
fn tricks_with_the_machine_are_refused() {
    let cases: [(&str, &[u8]); 12] = [
        ("nothing", b""),
        ("no result", b"\x80\x04."),
        ("old protocol", b"\x80\x01]."),
        ("two results", b"\x80\x04]]."),
        ("open mark", b"\x80\x04(]."),
        ("below a mark", b"\x80\x04](N\x86."),
        ("append below a mark", b"\x80\x04](Na."),
        ("memo jump", b"\x80\x04]r\xff\xff\xff\x7f."),
        ("memo read", b"\x80\x04h\x00."),
        ("long integer", b"\x80\x04\x8a\x09123456789."),
        (
            "bytes past the end",
            b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\xff.",
        ),
        ("something behind", b"\x80\x04].]"),
    ];
    for (name, message) in cases {
        assert!(
            read_tensors(message, &PickleLimits::default()).is_err(),
            "{name}"
        );
    }
    // A list inside itself is just a list that holds no tensor.
    read_tensors(b"\x80\x04]\x94h\x00a.", &PickleLimits::default()).unwrap_err();
    let deep = [b"\x80\x04".as_slice(), &[b'('; 1000], b"."].concat();
    assert!(
        read_tensors(&deep, &PickleLimits::default())
            .unwrap_err()
            .message
            .contains("nested")
    );
}

#[test]
fn errors_stay_short() {
    let text = [
        b"\x80\x04\x8c\xff".as_slice(),
        &[b'x'; 255],
        b"\x8c\x01y\x93.",
    ]
    .concat();
    let bytes = [
        b"\x80\x04B\x40\x42\x0f\x00".as_slice(),
        &[b'x'; 1_000_000],
        b".",
    ]
    .concat();
    for message in [text, bytes] {
        for error in [
            read_tensors(&message, &PickleLimits::default()).unwrap_err(),
            read_registration(&message, &PickleLimits::default()).unwrap_err(),
        ] {
            assert!(error.to_string().len() < 400, "{error}");
        }
    }
}
