//! Copies and fills.

use std::ffi::c_void;

use super::exports;
use crate::abi::*;
use crate::stream::Stream;
use crate::world::{MemoryKind, Touched, WorldState, world};

/// Bytes that a stream moves.
struct Copy {
    dst: Touched,
    src: Touched,
    bytes: usize,
    /// Content of the source at the call, for a copy whose source may be read out of order.
    early: Option<Vec<u8>>,
}

impl Copy {
    /// The kind of work, as scripts name it.
    fn work(&self) -> &'static str {
        match (self.src.kind, self.dst.kind) {
            (MemoryKind::Device, MemoryKind::Device) => "kernel",
            (MemoryKind::Device, _) => "d2h",
            _ => "h2d",
        }
    }

    fn is_pageable(&self) -> bool {
        [self.src.kind, self.dst.kind].contains(&MemoryKind::Pageable)
    }

    fn run(&self) {
        let early = self.early.as_ref().map(Vec::as_ptr);
        let src = early.unwrap_or(self.src.at.cast_const());
        // SAFETY: both sides were found with this size, and are held.
        unsafe { std::ptr::copy(src, self.dst.at, self.bytes) };
    }
}

/// An address, and whether it must be one of a device.
type Side = (u64, Option<bool>);

fn side(
    state: &WorldState,
    device: usize,
    (at, must): Side,
    bytes: usize,
    what: &str,
) -> CudaResult<Touched> {
    let found = state.touch(device, at, bytes as u64, what)?;
    let why = match must {
        Some(true) if found.kind != MemoryKind::Device => "not in a live allocation or mapping",
        Some(false) if found.kind == MemoryKind::Device => "a device address",
        _ => return Ok(found),
    };
    Err(wrong!(ERROR_INVALID_VALUE, "{what} at {at:#x}: {why}"))
}

fn prepare(
    state: &WorldState,
    device: usize,
    dst: Side,
    src: Side,
    bytes: usize,
) -> CudaResult<Copy> {
    Ok(Copy {
        dst: side(state, device, dst, bytes, "destination")?,
        src: side(state, device, src, bytes, "source")?,
        bytes,
        early: None,
    })
}

/// Puts copies of one direction on a stream; returns the position to wait for with pageable memory, as the driver does.
fn push(stream: &Stream, copies: Vec<Copy>) -> Option<u64> {
    let work = copies.first()?.work();
    let pageable = copies.iter().any(Copy::is_pageable);
    let place = stream.push(Box::new(move || {
        world().pass(work);
        copies.iter().for_each(Copy::run);
    }));
    pageable.then_some(place)
}

/// One copy; `sync` waits for it.
fn copy(dst: Side, src: Side, bytes: usize, stream: u64, sync: bool) -> CudaResult {
    let mut state = world().state.lock();
    let stream = state.stream(stream)?;
    if bytes == 0 {
        return Ok(());
    }
    let copy = prepare(&state, stream.device, dst, src, bytes)?;
    let place = push(&stream, vec![copy]);
    drop(state);
    if place.is_some() && !sync {
        world().journal.add("pageable", 1);
    }
    let end = if sync { stream.last() } else { 0 };
    stream.wait(place.unwrap_or(end));
    Ok(())
}

exports! {
    fn cuMemcpyAsync(dst: u64, src: u64, bytes: usize, stream: u64) {
        copy((dst, None), (src, None), bytes, stream, false)
    }

    fn cuMemcpyHtoDAsync_v2(dst: u64, src: *const c_void, bytes: usize, stream: u64) {
        copy((dst, Some(true)), (src as u64, Some(false)), bytes, stream, false)
    }

    fn cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: u64, bytes: usize, stream: u64) {
        copy((dst as u64, Some(false)), (src, Some(true)), bytes, stream, false)
    }

    fn cuMemcpyHtoD_v2(dst: u64, src: *const c_void, bytes: usize) {
        copy((dst, Some(true)), (src as u64, Some(false)), bytes, 0, true)
    }

    fn cuMemcpyDtoH_v2(dst: *mut c_void, src: u64, bytes: usize) {
        copy((dst as u64, Some(false)), (src, Some(true)), bytes, 0, true)
    }

    // The signature of 12.8, with `fail`.
    fn cuMemcpyBatchAsync(
        dsts: *const u64, srcs: *const u64, sizes: *const usize, count: usize,
        attributes: *const CopyAttributes, starts: *const usize, groups: usize,
        fail: *mut usize, stream: u64,
    ) {
        put(fail, usize::MAX)?;
        if stream <= 2 || count == 0 || groups != 1 {
            return Err(wrong!(ERROR_INVALID_VALUE, "{count} copies with {groups} attributes on stream {stream}"));
        }
        let (dsts, srcs, sizes) = (array(dsts, count, "dsts")?, array(srcs, count, "srcs")?, array(sizes, count, "sizes")?);
        let (order, start) = (array(attributes, 1, "attrs")?[0].order, array(starts, 1, "attrsIdxs")?[0]);
        if !(1..=ORDER_ANY).contains(&order) || start != 0 {
            return Err(wrong!(ERROR_INVALID_VALUE, "srcAccessOrder {order} from copy {start} on"));
        }
        let mut state = world().state.lock();
        let stream = state.stream(stream)?;
        let mut copies = Vec::with_capacity(count);
        for (index, ((&dst, &src), &bytes)) in dsts.iter().zip(srcs).zip(sizes).enumerate() {
            put(fail, index)?;
            if bytes == 0 {
                return Err(wrong!(ERROR_INVALID_VALUE, "copy {index} of the batch has 0 bytes"));
            }
            let mut copy = prepare(&state, stream.device, (dst, None), (src, None), bytes)?;
            // Read at the call: later writes to the source are missing.
            if order > 1 {
                // SAFETY: found with this size, and held.
                copy.early = Some(unsafe { std::slice::from_raw_parts(copy.src.at, bytes) }.to_vec());
            }
            copies.push(copy);
        }
        put(fail, usize::MAX)?;
        world().journal.add("batched", count as u64);
        // The order within a batch is unspecified; reversing it exposes callers that rely on it.
        copies.reverse();
        if copies.iter().any(|copy| copy.work() != copies[0].work()) {
            return Err(wrong!(ERROR_NOT_SUPPORTED, "a batch of two directions"));
        }
        let place = push(&stream, copies);
        drop(state);
        world().journal.add("pageable", u64::from(place.is_some()));
        stream.wait(place.unwrap_or(0));
        Ok(())
    }

    fn cuMemsetD8Async(dst: u64, value: u8, bytes: usize, stream: u64) {
        let mut state = world().state.lock();
        let stream = state.stream(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let to = side(&state, stream.device, (dst, Some(true)), bytes, "destination")?;
        stream.push(Box::new(move || {
            let to = to;
            world().pass("kernel");
            // SAFETY: found with this size, and held.
            unsafe { to.at.write_bytes(value, bytes) };
        }));
        Ok(())
    }
}
