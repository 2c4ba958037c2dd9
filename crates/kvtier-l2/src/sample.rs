//! Objects to try a tier with, whatever its configuration: bfloat16 values that every serde stores without a loss.

use kvtier_core::random::SplitMix64;

use crate::object::Element;

/// Layout of such objects.
pub const LAYOUT: u64 = Element::in_layout(1, Some(Element::BFloat16));

/// Four values with exponents of -3 and mantissas of 0.
const BASE: u64 = 0x3e00_3e00_3e00_3e00;
/// The bits that are random: sign, two of the exponent, two of the mantissa.
const NOISE: u64 = 0x81e0_81e0_81e0_81e0;

/// Returns `len` bytes of values from ±0.125 to ±1.75; equal seeds, equal bytes.
#[must_use]
pub fn values(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len.next_multiple_of(8)];
    for (at, four) in (0..).zip(bytes.chunks_exact_mut(8)) {
        four.copy_from_slice(&(SplitMix64::nth(seed, at) & NOISE | BASE).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
