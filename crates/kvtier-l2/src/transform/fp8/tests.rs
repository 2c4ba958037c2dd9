//! Tables and bytes as torch and LMCache have them.

use sha2::{Digest as _, Sha256};

use super::*;
use crate::conformance::{Memory, object};

fn digest(bytes: impl IntoIterator<Item = u8>) -> String {
    let bytes: Vec<_> = bytes.into_iter().collect();
    hex::encode(Sha256::digest(&bytes))
}

#[test]
fn tables_are_those_of_torch() {
    // Of torch 2.11 on CPU: `arange(65536).to(int16).view(T).to(F)`, and `arange(256).to(uint8).view(F).to(T)`.
    for (element, format, codes, values) in [
        (
            Element::BFloat16,
            Fp8Format::E4M3,
            "556222ae80c3498b4da64795f283e77962f1045e2525faaededd4e0a5b1ae212",
            "15e7e4f7f07a1a04e832bfcea81d297a794c9e60824e4f72ab5537c9050f26c7",
        ),
        (
            Element::BFloat16,
            Fp8Format::E5M2,
            "875dd70a7c02e2f8dd7ba693a8764c02ec0242f5849d693f3e8e48f9f21d9ff7",
            "d6e0c4cfe40a633142ae7efca8a782ba24232c4ef2197ddd57df87ea1894ef90",
        ),
        (
            Element::Float16,
            Fp8Format::E4M3,
            "5fca763e3fe00eb890d13c36d5e9095d0560974190fb3cc477a68d5ce3869624",
            "c81eb9389835971f22b6a6939307beeb5a003f2dd063d98f7a9a3af3e0b04f40",
        ),
        (
            Element::Float16,
            Fp8Format::E5M2,
            "92a1a336edf246100fcc85e3c61ae285755320768b7bd16a7a573cda0ee19a19",
            "bf959bba531d710d2b5d71e932621a33446ec87c6101addb8f805116ff7b7671",
        ),
    ] {
        let tables = Tables::new(element, format);
        assert_eq!(digest(tables.codes), codes, "{element:?} {format:?}");
        let bytes = tables.values.into_iter().flat_map(u16::to_le_bytes);
        assert_eq!(digest(bytes), values, "{element:?} {format:?}");
    }
}

fn of(element: Option<Element>, len: u64) -> ObjectSpec {
    let mut object = object(1, len);
    object.layout = Element::in_layout(object.layout, element);
    object
}

fn encoded(format: Fp8Format, object: &ObjectSpec, plain: &[u8]) -> Result<Vec<u8>, ErrorKind> {
    let fp8 = Fp8::new(format);
    let from = Memory::new(object.len.max(1)).filled(plain);
    let mut stored = vec![0xa5; fp8.stored_len(object.len).unwrap() as usize];
    let result = fp8.encode(object, &from, &mut stored);
    result.map(|()| stored).map_err(|error| error.kind())
}

#[test]
fn bytes_are_those_of_lmcache() {
    // Of LMCache 0.5.6; bfloat16 and float16 have the same codes for these.
    let values = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        0.0625,
        0.001_953_1,
        0.000_976_56,
        3.3,
        17.2,
        447.0,
        448.0,
        449.0,
        464.0,
        480.0,
        1e4,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        1.0625,
        1.1875,
        0.0156,
    ];
    // Rounded to bfloat16, to the nearest.
    let bits = |value: f32| ((value.to_bits() + 0x7fff + (value.to_bits() >> 16 & 1)) >> 16) as u16;
    let plain: Vec<u8> = values
        .into_iter()
        .flat_map(|value| bits(value).to_le_bytes())
        .collect();
    let object = of(Some(Element::BFloat16), plain.len() as u64);
    for (format, codes) in [
        (
            Fp8Format::E4M3,
            "008038bc18010045597e7e7e7e7e7e7efe7f383a08",
        ),
        (
            Fp8Format::E5M2,
            "00803cbe2c1814434c5f5f5f5f60717cfc7f3c3d24",
        ),
    ] {
        let stored = encoded(format, &object, &plain).unwrap();
        assert_eq!(hex::encode(stored), codes, "{format:?}");
    }
}

#[test]
fn rounded_values_come_back_across_chunks_and_stay_as_they_are() {
    for element in [Element::BFloat16, Element::Float16] {
        let plain: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for len in [2, 2 * CHUNK + 2, plain.len()] {
            let (object, plain) = (of(Some(element), len as u64), &plain[..len]);
            let fp8 = Fp8::new(Fp8Format::E4M3);
            let decoded = |mut stored: Vec<u8>| {
                let to = Memory::new(object.len.max(1)).buffer(object.len);
                fp8.decode(&object, &mut stored, &to).unwrap();
                let mut bytes = Vec::new();
                to.read_into(0, object.len, &mut bytes).unwrap();
                bytes
            };
            let stored = encoded(Fp8Format::E4M3, &object, plain).unwrap();
            let once = decoded(stored.clone());
            let each = plain
                .as_chunks()
                .0
                .iter()
                .zip(&stored)
                .zip(once.as_chunks().0);
            for ((value, code), back) in each {
                let value = number::widened(element, u16::from_le_bytes(*value));
                assert_eq!(*code, Fp8Format::E4M3.code(value));
                let back = number::widened(element, u16::from_le_bytes(*back));
                // Half of the last place of 4 bits, or of the smallest value.
                let nearest = back.is_nan()
                    || value.abs() > 448.0
                    || (value - back).abs() <= (value.abs() / 16.0).max(1.0 / 1024.0);
                assert!(nearest, "{value} as {back}");
            }
            // All but the sign of a bfloat16 NaN is stored exactly a second time.
            let twice = decoded(encoded(Fp8Format::E4M3, &object, &once).unwrap());
            assert_eq!(twice, once);
        }
    }
}

#[test]
fn values_of_other_types_are_refused() {
    let object = of(None, 64);
    assert_eq!(
        encoded(Fp8Format::E5M2, &object, &[0; 64]),
        Err(ErrorKind::Refused)
    );
    let fp8 = Fp8::new(Fp8Format::E5M2);
    assert!(fp8.check(&object).is_err());
    let to = Memory::new(64).buffer(64);
    let error = fp8.decode(&object, &mut [0; 32], &to).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    let half = of(Some(Element::Float16), 64);
    assert!(fp8.check(&half).is_ok());
    let error = fp8.decode(&half, &mut [0; 31], &to).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert_eq!(fp8.stored_len(65), None, "half a value");
}
