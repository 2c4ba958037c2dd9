//! One tensor that travels in a message.

use crate::descriptor::{Dtype, MAX_RANK};

/// One tensor of a message: a view into its bytes.
///
/// Checked on reading: the ranks agree (at most [`MAX_RANK`]), every element lies inside `data`, and there are at most
/// as many elements as `data` holds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InlineTensor<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Elements along each axis.
    pub shape: Vec<u64>,
    /// Distance between neighbours along each axis, in elements.
    pub strides: Vec<u64>,
    /// Elements of `data` before the first element of the tensor.
    pub storage_offset: u64,
    /// The whole storage.
    pub data: &'a [u8],
}

impl<'a> InlineTensor<'a> {
    /// A tensor that is all of `data`, which has as many bytes as its elements.
    pub(crate) fn contiguous(dtype: Dtype, shape: Vec<u64>, data: &'a [u8]) -> Self {
        let mut strides = vec![1; shape.len()];
        for axis in (1..shape.len()).rev() {
            // An empty axis has no elements to step over.
            strides[axis - 1] = shape[axis].max(1).saturating_mul(strides[axis]);
        }
        Self {
            dtype,
            shape,
            strides,
            storage_offset: 0,
            data,
        }
    }

    /// Bytes of the tensor's elements, without gaps.
    pub fn byte_len(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        // Checked on reading: not more than `data` has.
        self.shape.iter().product::<u64>() as usize * self.dtype.item_size() as usize
    }

    /// Whether the elements lie without gaps in row-major order.
    pub fn is_contiguous(&self) -> bool {
        self.solid_axes().0 == 0
    }

    /// The elements in row-major order, if they lie so in the message. None asks for [`Self::for_each_run`].
    pub fn contiguous_bytes(&self) -> Option<&'a [u8]> {
        self.is_contiguous().then(|| {
            let start = self.storage_offset as usize * self.dtype.item_size() as usize;
            match self.byte_len() {
                0 => &[],
                len => &self.data[start..start + len],
            }
        })
    }

    /// Passes on all bytes of the tensor in row-major order, in the longest pieces that lie together in the message.
    pub fn for_each_run(&self, mut take: impl FnMut(&'a [u8])) {
        if self.shape.contains(&0) {
            return;
        }
        let (outer_axes, run_elements) = self.solid_axes();
        let item = self.dtype.item_size();
        let run_bytes = (run_elements * item) as usize;
        let outer = &self.shape[..outer_axes];
        let mut index = [0u64; MAX_RANK];
        let mut element = self.storage_offset;
        loop {
            let start = (element * item) as usize;
            take(&self.data[start..start + run_bytes]);
            // The next position of the outer axes, counting like an odometer.
            let mut axis = outer_axes;
            loop {
                if axis == 0 {
                    return;
                }
                axis -= 1;
                index[axis] += 1;
                element += self.strides[axis];
                if index[axis] < outer[axis] {
                    break;
                }
                element -= self.strides[axis] * index[axis];
                index[axis] = 0;
            }
        }
    }

    /// Appends all bytes of the tensor in row-major order: [`Self::byte_len`] bytes.
    pub fn gather_into(&self, out: &mut Vec<u8>) {
        out.reserve(self.byte_len());
        self.for_each_run(|run| out.extend_from_slice(run));
    }

    /// How many leading axes must be walked, and how many elements the axes behind them have without a gap.
    fn solid_axes(&self) -> (usize, u64) {
        if self.shape.contains(&0) {
            return (0, 0);
        }
        let mut elements = 1;
        for axis in (0..self.shape.len()).rev() {
            // The stride of an axis of length 1 is never used.
            if self.shape[axis] != 1 && self.strides[axis] != elements {
                return (axis + 1, elements);
            }
            elements *= self.shape[axis];
        }
        (0, elements)
    }
}

/// Type and shape of a tensor to write; its elements are contiguous and row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorToWrite<'s> {
    /// Element type.
    pub dtype: Dtype,
    /// Elements along each axis, at most [`MAX_RANK`] axes.
    pub shape: &'s [u64],
}

impl TensorToWrite<'_> {
    /// Bytes of the elements; None when they do not fit an i64, as Python's sizes must.
    pub fn byte_len(&self) -> Option<usize> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let bytes = self
            .shape
            .iter()
            .try_fold(self.dtype.item_size(), |bytes, &length| {
                bytes.checked_mul(length)
            })?;
        usize::try_from(i64::try_from(bytes).ok()?).ok()
    }
}
