//! Reads a block in the order of its tensor's dimensions.

use kvtier_memory::CopyLoop;

use crate::geometry::{BlockPart, Plane};

/// Calls `visit` with the offset in memory and the bytes of each contiguous run of a block, in the order of the tensor's
/// dimensions, which is that of descending strides.
///
/// # Errors
/// The error of `visit`.
pub(crate) fn visit_block_runs<E>(
    plane: &Plane,
    id: u32,
    mut visit: impl FnMut(u64, u64) -> Result<(), E>,
) -> Result<(), E> {
    let block = plane.base + u64::from(id) * plane.block_stride;
    for part in &plane.parts {
        let (bytes, [outer, inner]) = physical(part);
        for i in 0..outer.count {
            for j in 0..inner.count {
                let steps = i * outer.segment_stride + j * inner.segment_stride;
                visit(block + part.engine_offset + steps, bytes)?;
            }
        }
    }
    Ok(())
}

/// A part's loops in the engine's order, contiguous steps merged into one run.
fn physical(part: &BlockPart) -> (u64, [CopyLoop; 2]) {
    let mut loops = part.loops;
    loops.sort_by_key(|step| std::cmp::Reverse(step.segment_stride));
    let mut bytes = part.bytes;
    for step in loops.iter_mut().rev() {
        if step.count > 1 {
            if step.segment_stride != bytes {
                break;
            }
            bytes *= step.count;
        }
        *step = CopyLoop::ONCE;
    }
    (bytes, loops)
}
