//! Fixed-rate lossless code of bfloat16 values.
//!
//! Exponents of KV are close together; signs and mantissas are noise. A block of 64 values has the largest exponent in a
//! byte, and per value 4 bits of how far below it the exponent is:
//!
//! | code | exponent |
//! | --- | --- |
//! | 0 to 13 | the block's minus the code |
//! | 14 | 0: zeroes and the smallest values |
//! | 15 | in a byte of its own behind the codes; at most one in 32 values, and 16 more |
//!
//! So the length of the result follows from that of the values.

/// Values per block.
const BLOCK: usize = 64;

const ZERO: u8 = 14;
const ESCAPE: u8 = 15;

/// Lengths of the parts for a number of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Parts {
    pub noise: usize,
    pub codes: usize,
    pub bases: usize,
    pub escapes: usize,
}

impl Parts {
    pub(super) fn of(values: usize) -> Self {
        Self {
            noise: values,
            codes: values.div_ceil(2),
            bases: values.div_ceil(BLOCK),
            escapes: values.div_ceil(32) + 16,
        }
    }

    pub(super) fn total(self) -> usize {
        self.noise + self.codes + self.bases + self.escapes
    }
}

/// The parts of an object: what is still to be written or read.
pub(super) struct Planes<T> {
    pub noise: T,
    pub codes: T,
    pub bases: T,
    pub escapes: T,
}

impl<'a> Planes<&'a mut [u8]> {
    /// Splits `all`, whose length is that of the parts.
    pub(super) fn split_mut(all: &'a mut [u8], parts: Parts) -> Option<Self> {
        let (noise, all) = all.split_at_mut_checked(parts.noise)?;
        let (codes, all) = all.split_at_mut_checked(parts.codes)?;
        let (bases, escapes) = all.split_at_mut_checked(parts.bases)?;
        (escapes.len() == parts.escapes).then_some(Self {
            noise,
            codes,
            bases,
            escapes,
        })
    }
}

impl<'a> Planes<&'a [u8]> {
    /// Splits `all`, whose length is that of the parts.
    pub(super) fn split(all: &'a [u8], parts: Parts) -> Option<Self> {
        let (noise, all) = all.split_at_checked(parts.noise)?;
        let (codes, all) = all.split_at_checked(parts.codes)?;
        let (bases, escapes) = all.split_at_checked(parts.bases)?;
        (escapes.len() == parts.escapes).then_some(Self {
            noise,
            codes,
            bases,
            escapes,
        })
    }
}

/// Encodes the values `plain`, of 2 bytes each, as block number `first` and those behind it. `plain` has whole blocks unless it
/// is the end. Returns the number of escapes used so far, `None` if there are too many.
pub(super) fn encode(
    plain: &[u8],
    first: usize,
    to: &mut Planes<&mut [u8]>,
    mut escapes: usize,
) -> Option<usize> {
    for (number, block) in (first..).zip(plain.chunks(2 * BLOCK)) {
        let mut exponents = [0_u8; BLOCK];
        let mut noise = [0_u8; BLOCK];
        let values = block.len() / 2;
        for (at, value) in block.chunks_exact(2).enumerate() {
            let value = u16::from_le_bytes([value[0], value[1]]);
            exponents[at] = (value >> 7) as u8;
            noise[at] = ((value >> 8) & 0x80) as u8 | (value & 0x7f) as u8;
        }
        let base = exponents.iter().copied().max().unwrap_or_default();
        let mut codes = [0_u8; BLOCK];
        let mut rare = 0_u8;
        for (code, exponent) in codes.iter_mut().zip(exponents) {
            let below = base - exponent;
            let is_rare = below >= ZERO;
            *code = if is_rare { ESCAPE } else { below };
            *code = if exponent == 0 { ZERO } else { *code };
            rare += u8::from(*code == ESCAPE);
        }
        // Behind the last value the codes are 0, whatever the base.
        codes[values..].fill(0);
        if rare > 0 {
            for at in (0..values).filter(|&at| codes[at] == ESCAPE) {
                *to.escapes.get_mut(escapes)? = exponents[at];
                escapes += 1;
            }
        }
        let at = number * BLOCK;
        *to.bases.get_mut(number)? = base;
        to.noise
            .get_mut(at..at + values)?
            .copy_from_slice(&noise[..values]);
        let packed = to.codes.get_mut(at / 2..at / 2 + values.div_ceil(2))?;
        for (packed, pair) in packed.iter_mut().zip(codes.chunks_exact(2)) {
            *packed = pair[0] | (pair[1] << 4);
        }
    }
    Some(escapes)
}

/// Decodes values from block `first` on into `plain`. Returns the number of escapes used so far, `None` if the planes are too
/// short. Never panics, whatever they hold.
pub(super) fn decode(
    from: &Planes<&[u8]>,
    first: usize,
    plain: &mut [u8],
    mut escapes: usize,
) -> Option<usize> {
    for (number, block) in (first..).zip(plain.chunks_mut(2 * BLOCK)) {
        let (values, at) = (block.len() / 2, number * BLOCK);
        let base = *from.bases.get(number)?;
        let noise = from.noise.get(at..at + values)?;
        let packed = from.codes.get(at / 2..at / 2 + values.div_ceil(2))?;
        let mut exponents = [0_u8; BLOCK];
        let mut has_escape = false;
        for (pair, packed) in exponents.chunks_exact_mut(2).zip(packed) {
            for (exponent, code) in pair.iter_mut().zip([packed & 15, packed >> 4]) {
                has_escape |= code == ESCAPE;
                *exponent = if code == ZERO {
                    0
                } else {
                    base.wrapping_sub(code)
                };
            }
        }
        if has_escape {
            for (index, exponent) in exponents[..values].iter_mut().enumerate() {
                let code = (packed[index / 2] >> (index % 2 * 4)) & 15;
                if code == ESCAPE {
                    *exponent = *from.escapes.get(escapes)?;
                    escapes += 1;
                }
            }
        }
        for ((value, noise), exponent) in block.chunks_exact_mut(2).zip(noise).zip(exponents) {
            let (noise, exponent) = (u16::from(*noise), u16::from(exponent));
            let bits = ((noise & 0x80) << 8) | (exponent << 7) | (noise & 0x7f);
            value.copy_from_slice(&bits.to_le_bytes());
        }
    }
    Some(escapes)
}
