//! The code and its frame.

use proptest::prelude::*;

use super::*;
use crate::conformance::{Memory, content, object};

fn encoded(object: &ObjectSpec, plain: &[u8]) -> Result<Vec<u8>, ErrorKind> {
    let from = Memory::new(object.len.max(1)).filled(plain);
    // As scratch memory is, with the bytes of something else.
    let mut stored = vec![0xa5; Compress.stored_len(object.len).unwrap() as usize];
    let result = Compress.encode(object, &from, &mut stored);
    result.map(|()| stored).map_err(|error| error.kind())
}

fn decoded(object: &ObjectSpec, stored: &[u8]) -> Result<Vec<u8>, ErrorKind> {
    let to = Memory::new(object.len.max(1)).buffer(object.len);
    let mut plain = Vec::new();
    let result = Compress.decode(object, &mut stored.to_vec(), &to);
    to.read_into(0, object.len, &mut plain).unwrap();
    result.map(|()| plain).map_err(|error| error.kind())
}

fn bf16(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    let bits = values
        .into_iter()
        .map(|value| (value.to_bits() >> 16) as u16);
    bits.flat_map(u16::to_le_bytes).collect()
}

#[test]
fn length_follows_from_that_of_the_object() {
    assert_eq!(Compress.stored_len(2 << 20), Some(40 + 1_622_032));
    assert_eq!(Compress.stored_len(1), Some(40 + 16 + 1));
    assert_eq!(Compress.stored_len(u64::MAX), None);
}

#[test]
fn special_values_come_back_bit_by_bit() {
    let subnormal = f32::from_bits(1 << 16);
    let special = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        f32::MAX,
        f32::MIN_POSITIVE,
        subnormal,
        f32::NAN,
        f32::NEG_INFINITY,
    ];
    // Each in a block of its own, as all others of the block of an infinity are rare.
    let spaced = special
        .into_iter()
        .flat_map(|value| [value].into_iter().chain([0.0; 63]));
    let plain = bf16(spaced.chain((0..900).map(|at| at as f32 / 7.0)));
    for cut in [0, 1, 17, 1000] {
        let plain = &plain[..plain.len() - cut];
        let object = object(1, plain.len() as u64);
        let stored = encoded(&object, plain).unwrap();
        assert_eq!(decoded(&object, &stored), Ok(plain.to_vec()));
    }
    let zeroes = vec![0; 100_001];
    let object = object(2, 100_001);
    assert_eq!(
        decoded(&object, &encoded(&object, &zeroes).unwrap()),
        Ok(zeroes)
    );
}

#[test]
fn object_with_too_many_rare_exponents_is_refused() {
    let spread = |values: usize, every: usize| {
        let value = |at: usize| if at.is_multiple_of(every) { 1e30 } else { 1e-3 };
        bf16((0..values).map(value))
    };
    // One large value makes all others of its block rare.
    let plain = spread(64 * 1000, 64);
    let object = object(1, plain.len() as u64);
    assert_eq!(encoded(&object, &plain), Err(ErrorKind::Refused));
    let plain = spread(64 * 1000, 64 * 50);
    assert_eq!(
        decoded(&object, &encoded(&object, &plain).unwrap()),
        Ok(plain)
    );
}

#[test]
fn changed_bit_is_detected_or_harmless() {
    let object = object(1, 2001);
    let plain = content(&object);
    let stored = encoded(&object, &plain).unwrap();
    let mut harmless = 0;
    for bit in 0..stored.len() * 8 {
        let mut flipped = stored.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        match decoded(&object, &flipped) {
            Err(kind) => assert_eq!(kind, ErrorKind::Corrupt),
            Ok(back) => {
                assert_eq!(back, plain, "bit {bit}");
                harmless += 1;
            }
        }
    }
    // Those of the escapes that the object does not use.
    assert!(harmless <= 8 * Parts::of(1000).escapes, "{harmless}");
    for len in [0, 39, 40, stored.len() - 1] {
        assert_eq!(decoded(&object, &stored[..len]), Err(ErrorKind::Corrupt));
    }
    let extended = [&stored[..], &[0]].concat();
    assert_eq!(decoded(&object, &extended), Err(ErrorKind::Corrupt));
}

#[test]
fn bytes_of_another_object_are_corrupt() {
    let one = object(1, 2000);
    let stored = encoded(&one, &content(&one)).unwrap();
    let others = [
        object(2, 2000),
        ObjectSpec {
            layout: one.layout + 1,
            ..one.clone()
        },
    ];
    for other in others {
        assert_eq!(decoded(&other, &stored), Err(ErrorKind::Corrupt));
    }
}

proptest! {
    #[test]
    fn any_bytes_come_back_or_are_refused(plain in prop::collection::vec(any::<u8>(), 1..70_000)) {
        let object = object(1, plain.len() as u64);
        match encoded(&object, &plain) {
            Ok(stored) => prop_assert_eq!(decoded(&object, &stored), Ok(plain)),
            Err(kind) => prop_assert_eq!(kind, ErrorKind::Refused),
        }
    }

    #[test]
    fn close_values_always_fit(
        scale in -30_i32..30,
        mantissas in prop::collection::vec((0_u32..1 << 23, 0_i32..13, any::<bool>()), 1..40_000),
    ) {
        let value = |(mantissa, exponent, sign): (u32, i32, bool)| {
            let size = (1.0 + mantissa as f32 / (1 << 23) as f32) * ((exponent + scale) as f32).exp2();
            if sign { -size } else { size }
        };
        let plain = bf16(mantissas.into_iter().map(value));
        let object = object(1, plain.len() as u64);
        let stored = encoded(&object, &plain);
        prop_assert!(stored.is_ok());
        prop_assert_eq!(decoded(&object, &stored.unwrap()), Ok(plain));
    }

    #[test]
    fn hostile_bytes_never_panic(len in 1_u64..5000, noise in prop::collection::vec(any::<u8>(), 1..300)) {
        let object = object(1, len);
        let stored = Compress.stored_len(len).unwrap() as usize;
        let bytes: Vec<u8> = noise.iter().copied().cycle().take(stored).collect();
        prop_assert_eq!(decoded(&object, &bytes), Err(ErrorKind::Corrupt));
        prop_assert_eq!(decoded(&object, &noise).is_ok(), false);
    }
}
