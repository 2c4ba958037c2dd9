//! Element types of tensors, by their PyTorch 2.13 names.

use crate::wire::{DecodeError, name_shown};

/// Declares [`Dtype`] from one table: variant, name on the wire, bytes of one element.
macro_rules! dtypes {
    ($($variant:ident $name:literal $size:literal)*) => {
        /// Element type of a tensor.
        ///
        /// The names are those of `torch.dtype` without the `torch.` prefix; the set and the item sizes are those of
        /// PyTorch 2.13. Types below one byte (`int4`, `bits1x8` ...) count as one byte an element, as PyTorch
        /// stores them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Dtype {
            $(#[doc = concat!("`torch.", $name, "`, ", stringify!($size), " byte(s) an element.")] $variant,)*
        }

        impl Dtype {
            /// Every type, in the alphabetical order of the names.
            pub const ALL: &'static [Dtype] = &[$(Dtype::$variant),*];

            /// The name on the wire, for example `bfloat16`.
            pub const fn name(self) -> &'static str {
                match self { $(Dtype::$variant => $name),* }
            }

            /// Bytes of one element, 1 to 16.
            pub const fn item_size(self) -> u64 {
                match self { $(Dtype::$variant => $size),* }
            }

            /// The type of that name (without `torch.`), if there is one.
            pub fn from_name(name: &str) -> Option<Dtype> {
                match name { $($name => Some(Dtype::$variant),)* _ => None }
            }
        }
    };
}

dtypes! {
    BFloat16 "bfloat16" 2
    Bits16 "bits16" 2
    Bits1x8 "bits1x8" 1
    Bits2x4 "bits2x4" 1
    Bits4x2 "bits4x2" 1
    Bits8 "bits8" 1
    Bool "bool" 1
    Complex128 "complex128" 16
    Complex32 "complex32" 4
    Complex64 "complex64" 8
    Float16 "float16" 2
    Float32 "float32" 4
    Float4E2m1fnX2 "float4_e2m1fn_x2" 1
    Float64 "float64" 8
    Float8E4m3fn "float8_e4m3fn" 1
    Float8E4m3fnuz "float8_e4m3fnuz" 1
    Float8E5m2 "float8_e5m2" 1
    Float8E5m2fnuz "float8_e5m2fnuz" 1
    Float8E8m0fnu "float8_e8m0fnu" 1
    Int1 "int1" 1
    Int16 "int16" 2
    Int2 "int2" 1
    Int3 "int3" 1
    Int32 "int32" 4
    Int4 "int4" 1
    Int5 "int5" 1
    Int6 "int6" 1
    Int64 "int64" 8
    Int7 "int7" 1
    Int8 "int8" 1
    QInt32 "qint32" 4
    QInt8 "qint8" 1
    QUInt2x4 "quint2x4" 1
    QUInt4x2 "quint4x2" 1
    QUInt8 "quint8" 1
    UInt1 "uint1" 1
    UInt16 "uint16" 2
    UInt2 "uint2" 1
    UInt3 "uint3" 1
    UInt32 "uint32" 4
    UInt4 "uint4" 1
    UInt5 "uint5" 1
    UInt6 "uint6" 1
    UInt64 "uint64" 8
    UInt7 "uint7" 1
    UInt8 "uint8" 1
}

impl Dtype {
    /// The type of that name; the error names `field`, the text and a few of the allowed names.
    pub fn parse(field: &'static str, name: &str) -> Result<Dtype, DecodeError> {
        Dtype::from_name(name).ok_or_else(|| {
            DecodeError::at(
                field,
                format!(
                    "{:?} is not an element type of PyTorch (bfloat16, float16, float32, uint8, float8_e4m3fn, ...)",
                    name_shown(name)
                ),
            )
        })
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
