//! Transfers whose bytes travel inside messages: of workers without the pool.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvtier_core::cache::Extent;
use kvtier_device::Direction;
use kvtier_memory::{AccessError, Arena};
use kvtier_proto::inline::ChunksToWrite;
use kvtier_proto::pickle::WriteError;
use kvtier_proto::response::InlineHit;
use kvtier_proto::tensor::{InlineTensor, TensorToWrite};

use super::super::EngineAnswer;
use super::super::payload::{LeasedChunks, Payload};
use super::staging::Charge;
use super::store::MAX_FURTHER_PIECES;
use super::traced::TransferVolume;
use super::worker_copy::{DEVICE, WorkerCopy};
use super::worker_range::GroupLease;

/// Stores the chunks that a worker sends.
pub(super) fn commit(copy: &WorkerCopy<'_>, data: &[u8]) -> Result<TransferVolume, &'static str> {
    let context = &*copy.transfers.context;
    let (request, instance) = (copy.key.request_id, copy.instance.id.0);
    let (layout, pickles, form) = copy.worker();
    let refused = |error: &dyn std::fmt::Display| {
        tracing::warn!(request, instance, %error, "commit_store: the data was refused");
        "bad_data"
    };
    let sent = form.read(data).map_err(|error| refused(&error))?;
    if sent.len() != layout.groups.len() {
        let (sent, groups) = (sent.len(), layout.groups.len());
        return Err(refused(&format!(
            "chunks of {sent} groups; allowed: of {groups}"
        )));
    }
    if copy.has_pool() {
        pickles.store(true, Ordering::Relaxed);
        tracing::info!(
            instance,
            "this worker cannot map the pool; its data travels inside messages from now on"
        );
    }
    context.metrics.store(DEVICE, false);
    let count = copy.range.chunks.len();
    let groups = copy.group_chunks(|group| match &sent[group].positions {
        None => Ok((0..count).collect()),
        Some(positions) => {
            let inside = positions.iter().map(|position| {
                let position = usize::try_from(*position).ok();
                position.filter(|position| *position < count)
            });
            let inside = inside.collect::<Option<_>>();
            inside.ok_or_else(|| refused(&format!("a chunk index of {count} or more")))
        }
    })?;
    // Whether the bytes of each object are in place.
    let mut written: Vec<Vec<bool>> = sent
        .iter()
        .map(|group| vec![false; group.tensors.len()])
        .collect();
    let mut moved = TransferVolume::default();
    for further_pieces in (0..=MAX_FURTHER_PIECES).rev() {
        let store = copy.stage("commit_store", groups.clone(), further_pieces);
        let store = match store {
            Err("staging_full") if moved.chunks > 0 => break,
            store => store?,
        };
        for staged in store.reservation.staged() {
            let (group, position) = (staged.request as usize, staged.position as usize);
            let wanted = &layout.groups[group];
            let fits = |tensor: &&InlineTensor<'_>| {
                tensor.dtype == wanted.dtype && tensor.shape == wanted.shape
            };
            if let Some(tensor) = sent[group].tensors.get(position).filter(fits) {
                written[group][position] = write(&context.l1.arena, tensor, staged.extent).is_ok();
            }
        }
        moved += store.moved();
        let (wanted, has_remainder) = (store.reservation.len(), store.has_remainder);
        let committed = store.commit(context, &copy.range, |staged| {
            let written = written[staged.request as usize].get(staged.position as usize);
            written.is_some_and(|written| *written)
        });
        let missing = committed.aborted;
        if missing > 0 {
            tracing::warn!(
                request,
                instance,
                missing,
                wanted,
                "commit_store: some chunks were missing or had another shape or dtype than registered"
            );
            copy.stored(moved);
            return Err("bad_data");
        }
        if !has_remainder {
            break;
        }
    }
    copy.stored(moved);
    Ok(moved)
}

fn write(arena: &Arena, tensor: &InlineTensor<'_>, extent: Extent) -> Result<(), AccessError> {
    let mut at = 0;
    let mut result = Ok(());
    tensor.for_each_run(|run| {
        if result.is_ok() {
            result = arena.write(extent, at, run);
            at += run.len() as u64;
        }
    });
    result
}

/// The answer to a retrieve with the chunks in it.
///
/// # Errors
/// The reason for the metrics.
pub(super) fn answer(
    copy: &WorkerCopy<'_>,
    leases: Vec<GroupLease>,
    charge: Charge,
) -> Result<EngineAnswer, &'static str> {
    let request = copy.key.request_id;
    match payload(copy, leases, charge) {
        Ok(Some(payload)) => {
            copy.transfers.context.metrics.retrieve(DEVICE, true);
            copy.trace(Direction::Retrieve, copy.started, Ok(copy.retrieved()));
            Ok(EngineAnswer {
                payload: Some(payload),
                ..EngineAnswer::nothing()
            })
        }
        Ok(None) => {
            tracing::warn!(
                request,
                "prepare_retrieve: the chunks are 4 GiB or more, which no message holds"
            );
            Err("too_large")
        }
        Err(error) => {
            tracing::warn!(request, %error, "prepare_retrieve failed");
            Err("retrieve_failed")
        }
    }
}

/// The frame with the chunks, leased until it is sent; `None` if they are too large for one.
fn payload(
    copy: &WorkerCopy<'_>,
    leases: Vec<GroupLease>,
    charge: Charge,
) -> Result<Option<Payload>, InlineError> {
    let (layout, _, form) = copy.worker();
    let arena = &copy.transfers.context.l1.arena;
    let start = copy.range.chunks.start;
    let (mut groups, mut extents) = (Vec::new(), Vec::new());
    for group in &leases {
        let objects = &layout.groups[group.object_group as usize];
        let tensor = TensorToWrite {
            dtype: objects.dtype,
            shape: &objects.shape,
        };
        let [first, end] = [group.chunks.start, group.chunks.end].map(|it| (it - start) as u64);
        groups.push(ChunksToWrite {
            tensor,
            positions: first..end,
        });
        for extent in group.lease.extents() {
            if tensor.byte_len() != Some(extent.len as usize) {
                return Err(InlineError::Length(extent.len));
            }
            extents.push(*extent);
        }
    }
    let Some(hit) = InlineHit::new(form, &groups)? else {
        return Ok(None);
    };
    for extent in &extents {
        // The thread that sends them must not wait for the disk, nor meet lost pages in the middle of a frame.
        arena.populate(*extent)?;
    }
    let chunks = LeasedChunks {
        arena: Arc::clone(arena),
        places: hit.places.into_iter().zip(extents).collect(),
        leases: leases.into_iter().map(|group| group.lease).collect(),
        charge,
    };
    Ok(Some(Payload::with_chunks(hit.text, chunks)))
}

/// Why chunks could not be sent.
#[derive(Debug, thiserror::Error)]
enum InlineError {
    #[error(transparent)]
    Form(#[from] WriteError),
    #[error("a chunk of {0} bytes has another length than registered")]
    Length(u64),
    #[error(transparent)]
    Memory(#[from] AccessError),
}
