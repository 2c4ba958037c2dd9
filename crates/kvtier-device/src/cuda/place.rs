//! Placement on a GPU: a thread per request rotates keys in host memory, and the GPU's threads copy them to the pages.

use std::sync::Arc;
use std::sync::mpsc::channel;

use super::gpu::{Completion, Gpu, GpuJob, Pages};
use crate::blocks::BlockTable;
use crate::device::{DeviceError, Done, Transfer};
use crate::placement::Placement;
use crate::plan::Direction;

/// Bytes that are rotated, then copied while the thread waits: a few milliseconds of work.
const BATCH_BYTES: u64 = 4 << 20;

/// Starts a placement on a thread of its own, so that a driver that hangs blocks no other request.
pub(super) fn place(gpu: Arc<Gpu>, pages: Arc<Pages>, placement: Placement, done: Done) {
    let completion = Completion::new(done);
    let run = move || {
        let result = run(&gpu, &pages, &placement);
        // The callback may expect that the pages are closed with the last transfer.
        drop((pages, gpu, placement));
        completion.finish(result);
    };
    // Without a thread, the closure is dropped, which reports a failure.
    let _ = std::thread::Builder::new()
        .name("kvtier-place".into())
        .spawn(run);
}

fn run(gpu: &Gpu, pages: &Arc<Pages>, placement: &Placement) -> Result<u64, DeviceError> {
    let no_ids = vec![[0; 0]; pages.layout.kernel_groups().len()];
    let no_blocks = BlockTable::check(&pages.layout, &no_ids, 0)?;
    let mut event = placement.event.clone();
    let mut moved = 0;
    placement.visit_batches(&pages.layout, BATCH_BYTES, |batch| {
        let transfer = Transfer {
            arena: Arc::clone(&batch.rows),
            blocks: no_blocks.clone(),
            chunks: Vec::new(),
            direction: Direction::Retrieve,
            deadline: placement.deadline,
            // The pages are ready for all batches after the first.
            event: std::mem::take(&mut event),
        };
        let (end, ended) = channel();
        let done: Done = Box::new(move |result| {
            // The receiver waits.
            let _ = end.send(result);
        });
        let timeout = gpu.options().event_timeout;
        let job = GpuJob::new(Arc::clone(pages), transfer, timeout, done);
        gpu.submit_copies(job.with_copies(&batch.copies)?);
        let lost = |_| DeviceError::Broken("the transfer was lost".into());
        moved += ended.recv().map_err(lost)??;
        Ok(())
    })?;
    Ok(moved)
}
