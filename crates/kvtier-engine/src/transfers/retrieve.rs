//! A retrieve: the server copies from the arena into a worker's pages.

use std::sync::Arc;

use kvtier_common::error::{Error, ErrorKind, Result};
use kvtier_device::{ChunkCopy, ChunkRequest, Transfer};

use super::super::instances::Instance;
use super::worker_range::WorkerRange;
use super::{CopyRequest, InFlight, TransferWork, Transfers};

impl Transfers {
    /// Leases what the range needs, and plans the copies.
    pub(super) fn plan_retrieve(
        &self,
        request: &CopyRequest<'_>,
        instance: &Arc<Instance>,
    ) -> Result<(Transfer, InFlight)> {
        let CopyRequest {
            key, skip_tokens, ..
        } = *request;
        // Counted first: a ping is only refused while none is counted.
        let retrieving = instance.retrieving();
        if self
            .refused_retrieves
            .is_refusing(request.caller.connection)
        {
            return Err(not_held());
        }
        let (mut transfer, range, guard) = self.begin(request, instance)?;
        let skip_tokens = u64::try_from(skip_tokens).map_err(|_| {
            Error::refused(format!(
                "skip_first_n_tokens is {skip_tokens}; allowed: at least 0"
            ))
        })?;
        let leases = if range.chunks.is_empty() {
            Vec::new()
        } else {
            self.lease(instance, key, &range).ok_or_else(|| {
                let chunks = range.chunks.len() as u64;
                let metrics = &self.context.metrics;
                metrics.not_found("l1_retrieve", key.model_name, chunks);
                not_held()
            })?
        };
        // From here on the transfer has leases of its own, and is not refused.
        self.release(instance.id, key, &range);
        for group in &leases {
            let extents = group.lease.extents().iter().zip(group.chunks.clone());
            transfer
                .chunks
                .extend(extents.map(|(extent, chunk)| ChunkCopy {
                    request: ChunkRequest {
                        object_group: group.object_group as usize,
                        chunk: chunk - range.chunks.start,
                        skip_tokens,
                    },
                    extent: *extent,
                }));
        }
        let work = TransferWork::Retrieve {
            _leases: leases,
            _retrieving: retrieving,
        };
        Ok((transfer, request.in_flight(work, range, guard)))
    }

    /// Counts the chunks of a range as loaded; returns their number.
    pub(super) fn count_loaded(&self, range: &WorkerRange) -> usize {
        let (scope, chunks) = (&range.scope, range.chunks.len());
        self.context.metrics.loaded(
            scope.model_name(),
            scope.cache_salt(),
            range.worker,
            chunks as u64,
        );
        chunks
    }
}

fn not_held() -> Error {
    let message = "no lookup of its request has found these chunks, or they were evicted";
    Error::new(ErrorKind::NotHeld, message)
}
