//! `fp8`: objects of 16-bit floating-point values in one byte per value, rounded. LMCache's form: the values in their order,
//! without a head, a scale or a checksum.
//!
//! Only objects whose layout names the type of their values are stored: bytes of another type would come back as other
//! values.

mod number;
#[cfg(test)]
mod tests;

use serde_json::{Map, Value};

use super::Transform;
use crate::error::{ErrorKind, L2Error};
use crate::object::{Buffer, Element, ObjectSpec};
pub(crate) use number::Fp8Format;

/// Values that are converted at once.
const CHUNK: usize = 16 << 10;

/// Conversion of values to one format.
pub(super) struct Fp8 {
    format: Fp8Format,
    bfloat16: Tables,
    float16: Tables,
}

struct Tables {
    /// Codes of all values.
    codes: Vec<u8>,
    /// Values of all codes.
    values: Vec<u16>,
}

impl Tables {
    fn new(element: Element, format: Fp8Format) -> Self {
        let code = |bits| format.code(number::widened(element, bits));
        let value = |code| number::narrowed(element, format, code);
        Self {
            codes: (0..=u16::MAX).map(code).collect(),
            values: (0..=u8::MAX).map(value).collect(),
        }
    }
}

impl Fp8 {
    pub(super) fn new(format: Fp8Format) -> Self {
        Self {
            format,
            bfloat16: Tables::new(Element::BFloat16, format),
            float16: Tables::new(Element::Float16, format),
        }
    }

    fn tables(&self, object: &ObjectSpec) -> Result<&Tables, L2Error> {
        match object.element() {
            Some(Element::BFloat16) => Ok(&self.bfloat16),
            Some(Element::Float16) => Ok(&self.float16),
            None => Err(L2Error::new(
                ErrorKind::Refused,
                "its values are neither all bfloat16 nor all float16, which fp8 stores",
            )),
        }
    }
}

impl Transform for Fp8 {
    fn kind(&self) -> &'static str {
        "fp8"
    }

    fn fingerprint(&self) -> String {
        format!("fp8 {}", self.format.name())
    }

    fn verifies(&self) -> bool {
        false
    }

    fn check(&self, object: &ObjectSpec) -> Result<(), L2Error> {
        self.tables(object).map(|_| ())
    }

    fn stored_len(&self, len: u64) -> Option<u64> {
        len.is_multiple_of(2).then_some(len / 2)
    }

    fn encode(&self, object: &ObjectSpec, from: &Buffer, to: &mut [u8]) -> Result<(), L2Error> {
        let codes = &self.tables(object)?.codes;
        let mut values = vec![0; 2 * CHUNK];
        let mut at = 0;
        for to in to.chunks_mut(CHUNK) {
            let values = &mut values[..2 * to.len()];
            from.read(at, values)?;
            at += values.len() as u64;
            for (value, code) in values.as_chunks().0.iter().zip(to) {
                *code = codes[usize::from(u16::from_le_bytes(*value))];
            }
        }
        Ok(())
    }

    fn decode(&self, object: &ObjectSpec, from: &mut [u8], to: &Buffer) -> Result<(), L2Error> {
        let table = &self.tables(object)?.values;
        if self.stored_len(object.len) != Some(from.len() as u64) {
            return Err(L2Error::new(ErrorKind::Corrupt, "has another length"));
        }
        let mut values = vec![0; 2 * CHUNK];
        let mut at = 0;
        for codes in from.chunks(CHUNK) {
            let values = &mut values[..2 * codes.len()];
            for (code, value) in codes.iter().zip(values.as_chunks_mut().0) {
                *value = table[usize::from(*code)].to_le_bytes();
            }
            to.write(at, values)?;
            at += values.len() as u64;
        }
        Ok(())
    }

    fn report(&self, status: &mut Map<String, Value>) {
        status.insert("fp8_dtype".into(), self.format.name().into());
    }
}
