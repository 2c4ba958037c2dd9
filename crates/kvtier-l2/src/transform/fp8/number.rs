//! Conversions of single values, as `torch.Tensor.to` has them: to the nearest value, ties to even.

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

    const fn mantissa_bits(self) -> u32 {
        match self {
            Self::E4M3 => 3,
            Self::E5M2 => 2,
        }
    }

    const fn bias(self) -> i32 {
        match self {
            Self::E4M3 => 7,
            Self::E5M2 => 15,
        }
    }

    /// Code of the largest magnitude that is not NaN.
    const fn largest(self) -> u8 {
        match self {
            Self::E4M3 => 0x7e,
            Self::E5M2 => 0x7c,
        }
    }

    /// Returns the code of the nearest value.
    pub(super) fn code(self, value: f32) -> u8 {
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        if value.is_nan() {
            return sign | 0x7f;
        }
        let magnitude = value.abs();
        // In units of the last place of the value's binade, or of the smallest one; exact, as these are powers of two.
        let exponent = (magnitude.to_bits() >> 23) as i32 - 127;
        let smallest = 1 - self.bias();
        let binade = exponent.max(smallest);
        let unit = binade - self.mantissa_bits() as i32;
        let units = (f64::from(magnitude) * 2f64.powi(-unit)).round_ties_even();
        // A value that is rounded up to the next binade carries into the exponent.
        let implied = f64::from(1_u32 << self.mantissa_bits());
        let code = f64::from(binade - smallest) * implied + units;
        let code = if code < f64::from(self.largest()) {
            code as u8
        } else {
            self.largest()
        };
        sign | code
    }

    /// Returns the value of a code.
    pub(super) fn value(self, code: u8) -> f32 {
        let sign = if code & 0x80 != 0 { -1.0 } else { 1.0 };
        let magnitude = code & 0x7f;
        if magnitude > self.largest() {
            return f32::NAN.copysign(sign);
        }
        if self == Self::E5M2 && magnitude == self.largest() {
            return f32::INFINITY * sign;
        }
        let bits = self.mantissa_bits();
        let exponent = i32::from(magnitude >> bits);
        let mantissa = f32::from(magnitude & ((1 << bits) - 1));
        let implied = f32::from(1_u8 << bits);
        let units = if exponent > 0 {
            mantissa + implied
        } else {
            mantissa
        };
        let unit = exponent.max(1) - self.bias() - bits as i32;
        sign * units * 2f32.powi(unit)
    }
}

/// Returns the value of 16 bits of a type.
pub(super) fn widened(element: Element, bits: u16) -> f32 {
    match element {
        Element::BFloat16 => f32::from_bits(u32::from(bits) << 16),
        _ => half(bits),
    }
}

fn half(bits: u16) -> f32 {
    let sign = if bits & 0x8000 != 0 { -1.0 } else { 1.0 };
    let exponent = i32::from(bits >> 10 & 0x1f);
    let mantissa = f32::from(bits & 0x3ff);
    match exponent {
        0x1f if mantissa == 0.0 => f32::INFINITY * sign,
        0x1f => f32::NAN.copysign(sign),
        0 => sign * mantissa * 2f32.powi(-24),
        _ => sign * (mantissa + 1024.0) * 2f32.powi(exponent - 25),
    }
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
        (Element::Float16, _) => sign | half_bits(value.abs()),
    }
}

fn half_bits(magnitude: f32) -> u16 {
    if magnitude.is_infinite() {
        return 0x7c00;
    }
    if magnitude < 2f32.powi(-14) {
        return (magnitude * 2f32.powi(24)) as u16;
    }
    let exponent = (magnitude.to_bits() >> 23) + 15 - 127;
    (exponent << 10 | magnitude.to_bits() >> 13 & 0x3ff) as u16
}
