//! Conversions of single values, as `torch.Tensor.to` has them: to the nearest value, ties to even.

use kvtier_common::floats::{E4M3, E5M2_INFINITE, F16, Minifloat, decode_bf16};

use crate::object::Element;

/// A format of one byte: sign, exponent, mantissa.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fp8Format {
    /// 4 bits of exponent (bias 7), 3 of mantissa; no infinity, largest value 448, which larger ones become.
    E4M3,
    /// 5 bits of exponent (bias 15), 2 of mantissa; largest value 57344, then infinity.
    E5M2,
}

impl Fp8Format {
    /// Returns the format's name in torch and in LMCache's configuration.
    pub(in crate::transform) const fn name(self) -> &'static str {
        match self {
            Self::E4M3 => "float8_e4m3fn",
            Self::E5M2 => "float8_e5m2",
        }
    }

    const fn float(self) -> Minifloat {
        match self {
            Self::E4M3 => E4M3,
            Self::E5M2 => E5M2_INFINITE,
        }
    }

    /// Returns the code of the nearest value.
    pub(super) fn code(self, value: f32) -> u8 {
        self.float().encode(value) as u8
    }

    /// Returns the value of a code.
    pub(super) fn value(self, code: u8) -> f32 {
        let sign = if code & 0x80 != 0 { -1.0 } else { 1.0 };
        match (self, code & 0x7f) {
            (Self::E5M2, 0x7c) => f32::INFINITY.copysign(sign),
            _ => self.float().decode(code.into()).copysign(sign),
        }
    }
}

/// Returns the value of 16 bits of a type.
pub(super) fn widened(element: Element, bits: u16) -> f32 {
    match element {
        Element::BFloat16 => decode_bf16(bits.to_le_bytes()),
        _ => half(bits),
    }
}

fn half(bits: u16) -> f32 {
    let sign = if bits & 0x8000 != 0 { -1.0 } else { 1.0 };
    let magnitude = match bits & 0x7fff {
        0x7c00 => f32::INFINITY,
        magnitude => F16.decode(magnitude.into()),
    };
    magnitude.copysign(sign)
}

/// Returns the 16 bits that the value of a code has in a type; each type has all of them.
pub(super) fn narrowed(element: Element, format: Fp8Format, code: u8) -> u16 {
    let value = format.value(code);
    let sign = u16::from(code & 0x80) << 8;
    let is_nan = value.is_nan();
    match (element, format) {
        // The NaNs of torch, so that files are the same.
        (Element::BFloat16, _) if is_nan => 0x7fc0,
        (Element::Float16, Fp8Format::E4M3) if is_nan => sign | 0x7f80,
        (Element::Float16, Fp8Format::E5M2) if is_nan => u16::from(code) << 8 | 0x200,
        (Element::BFloat16, _) => (value.to_bits() >> 16) as u16,
        (Element::Float16, _) => sign | F16.encode(value.abs()) as u16,
    }
}
