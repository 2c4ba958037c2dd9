//! Elements of tensors, and their conversion from and to `f32`.

/// Type of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Float {
    /// 32 bits.
    F32,
    /// The upper half of 32 bits.
    Bf16,
    /// 16 bits by IEEE 754.
    F16,
    /// `float8_e4m3fn`: finite and one NaN.
    E4m3,
    /// `float8_e5m2`.
    E5m2,
}

impl Float {
    /// The type of elements of at least 16 bits with torch's name, without prefix.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "float32" => Some(Self::F32),
            "bfloat16" => Some(Self::Bf16),
            "float16" => Some(Self::F16),
            _ => None,
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::E4m3 | Self::E5m2 => 1,
        }
    }
}

/// Value of a bfloat16.
pub fn decode_bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// The nearest bfloat16, ties to even.
pub fn encode_bf16(value: f32) -> [u8; 2] {
    let bits = value.to_bits();
    let rounded = if value.is_nan() {
        bits | 0x40_0000
    } else {
        bits + 0x7fff + (bits >> 16 & 1)
    };
    ((rounded >> 16) as u16).to_le_bytes()
}

/// A sign, an exponent and a mantissa in at most 16 bits.
#[derive(Debug, Clone, Copy)]
pub struct Minifloat {
    sign: u32,
    mantissa_bits: u32,
    /// Exponent of the smallest normal number.
    min_exponent: i32,
    /// The lowest code that is no number.
    special: u32,
    /// Code of what is too large.
    overflow: u32,
    nan: u32,
}

/// [`Float::F16`]. What is too large becomes infinite.
pub const F16: Minifloat = Minifloat {
    sign: 0x8000,
    mantissa_bits: 10,
    min_exponent: -14,
    special: 0x7c00,
    overflow: 0x7c00,
    nan: 0x7e00,
};

/// [`Float::E4m3`]. What is too large becomes the largest number, as in the quantization of engines.
pub const E4M3: Minifloat = Minifloat {
    sign: 0x80,
    mantissa_bits: 3,
    min_exponent: -6,
    special: 0x7f,
    overflow: 0x7e,
    nan: 0x7f,
};

/// [`Float::E5m2`]. What is too large becomes the largest number, as in the quantization of engines.
pub const E5M2: Minifloat = Minifloat {
    sign: 0x80,
    mantissa_bits: 2,
    min_exponent: -14,
    special: 0x7c,
    overflow: 0x7b,
    nan: 0x7e,
};

/// `float8_e5m2` as torch converts to it: what is too large becomes infinite.
pub const E5M2_INFINITE: Minifloat = Minifloat {
    overflow: 0x7c,
    nan: 0x7f,
    ..E5M2
};

/// `f32` of a power of two from -126 to 127.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

impl Minifloat {
    /// Value of a code; NaN for infinities too, because no rotation makes numbers from them.
    pub const fn decode(self, code: u32) -> f32 {
        let magnitude = code & (self.sign - 1);
        if magnitude >= self.special {
            return f32::NAN;
        }
        // A subnormal of this type is one of f32 here; the product is exact.
        let shifted = f32::from_bits(magnitude << (23 - self.mantissa_bits));
        let value = shifted * power_of_two(self.min_exponent + 126);
        if code & self.sign == 0 { value } else { -value }
    }

    /// Code of the nearest number, ties to even.
    pub fn encode(self, value: f32) -> u32 {
        let bits = value.to_bits();
        let sign = if bits >> 31 == 0 { 0 } else { self.sign };
        if value.is_nan() {
            return sign | self.nan;
        }
        let exponent = ((bits >> 23 & 0xff) as i32 - 127).max(self.min_exponent);
        // In units of the last place; a float of 2^23 and more has no fraction.
        let units = value.abs() * power_of_two(self.mantissa_bits as i32 - exponent);
        let units = (units + 8_388_608.0).to_bits() & 0x7f_ffff;
        let code = (((exponent - self.min_exponent) as u32) << self.mantissa_bits) + units;
        let code = if code >= self.special || code > self.overflow {
            self.overflow
        } else {
            code
        };
        sign | code
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every code comes back, and a value between two goes to the nearest, ties to the even one.
    fn check(float: Minifloat) {
        let value = |code| f64::from(float.decode(code));
        let last = float.overflow.min(float.special - 1);
        for code in 0..=last {
            for sign in [0, float.sign] {
                assert_eq!(float.encode(float.decode(code | sign)), code | sign);
            }
            if code < last {
                let middle = f64::midpoint(value(code), value(code + 1));
                assert_eq!(float.encode(middle as f32), code + (code & 1), "{code:#x}");
                let above = f32::from_bits((middle as f32).to_bits() + 1);
                assert_eq!(float.encode(above), code + 1, "{code:#x}");
                let below = f32::from_bits((middle as f32).to_bits() - 1);
                assert_eq!(float.encode(below), code, "{code:#x}");
            }
        }
        assert_eq!(float.encode(f32::MAX), float.overflow);
        assert_eq!(float.encode(f32::NEG_INFINITY), float.sign | float.overflow);
        assert_eq!(float.encode(f32::NAN) & !float.sign, float.nan);
        assert!(float.decode(float.nan).is_nan());
        assert_eq!(float.encode(f32::from_bits(1)), 0);
    }

    #[test]
    fn codes_are_the_nearest_numbers() {
        check(F16);
        check(E4M3);
        check(E5M2);
        check(E5M2_INFINITE);
        // Known values of torch.
        assert_eq!(F16.encode(1.0), 0x3c00);
        assert_eq!((F16.encode(65504.0), F16.encode(65520.0)), (0x7bff, 0x7c00));
        assert_eq!((E4M3.encode(1.0), E4M3.encode(448.0)), (0x38, 0x7e));
        assert_eq!(
            (E4M3.decode(1), E5M2.decode(1)),
            (1.0 / 512.0, 1.0 / 65536.0)
        );
        assert_eq!((E5M2.encode(-1.0), E5M2.encode(57344.0)), (0xbc, 0x7b));
    }

    #[test]
    fn bfloat16_rounds_to_even() {
        let code = |value| u16::from_le_bytes(encode_bf16(value));
        for high in (0..=0xffff_u16).filter(|high| high & 0x7f80 != 0x7f80) {
            let value = decode_bf16(high.to_le_bytes());
            assert_eq!(code(value), high);
            let tie = f32::from_bits(value.to_bits() | 0x8000);
            assert_eq!(code(tie), high + (high & 1));
            assert_eq!(code(f32::from_bits(tie.to_bits() - 1)), high);
        }
        assert_eq!(code(f32::INFINITY), 0x7f80);
        assert!(decode_bf16(encode_bf16(f32::from_bits(0x7f80_0001))).is_nan());
    }
}
