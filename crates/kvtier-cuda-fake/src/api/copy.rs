//! Copies and fills.

use std::ffi::c_void;
use std::sync::Arc;

use super::exports;
use crate::abi::*;
use crate::host::Place;
use crate::segment::Held;
use crate::stream::{Direction, Stream};
use crate::world::{State, world};

/// One side of a copy, found and held.
struct Side {
    at: *mut u8,
    kind: SideKind,
}

enum SideKind {
    Device { _held: Held },
    Registered { _users: Arc<()> },
    Pageable,
}

/// Bytes that a stream moves.
struct Piece {
    dst: Side,
    src: Side,
    bytes: usize,
    /// Content of the source at the call, for a copy whose source may be read out of order.
    early: Option<Vec<u8>>,
}

// The piece holds both sides, and any thread may access their bytes, as with a real device.
unsafe impl Send for Piece {}

impl Piece {
    fn direction(&self) -> Direction {
        match (&self.src.kind, &self.dst.kind) {
            (SideKind::Device { .. }, SideKind::Device { .. }) => Direction::Kernel,
            (SideKind::Device { .. }, _) => Direction::DeviceToHost,
            _ => Direction::HostToDevice,
        }
    }

    fn is_pageable(&self) -> bool {
        matches!(self.src.kind, SideKind::Pageable) || matches!(self.dst.kind, SideKind::Pageable)
    }

    fn run(&self) {
        let src = self
            .early
            .as_ref()
            .map_or(self.src.at.cast_const(), Vec::as_ptr);
        // SAFETY: both sides were found with this size, and are held.
        unsafe { std::ptr::copy(src, self.dst.at, self.bytes) };
    }
}

/// Kind of memory that an address must be in.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Must {
    Device,
    Host,
    Either,
}

fn side(
    state: &State,
    device: usize,
    at: u64,
    bytes: u64,
    must: Must,
    what: &str,
) -> Outcome<Side> {
    if state.space.covers(at) || must == Must::Device {
        if must == Must::Host {
            return Err(wrong!(
                ERROR_INVALID_VALUE,
                "{what}: {at:#x} is a device address"
            ));
        }
        let found = state.space.find(at, bytes, device, what)?;
        return Ok(Side {
            at: found.at,
            kind: SideKind::Device { _held: found.held },
        });
    }
    let kind = match state.host.find(at, bytes, device, what)? {
        Place::Registered { users, .. } => SideKind::Registered { _users: users },
        Place::Pageable => SideKind::Pageable,
    };
    Ok(Side {
        at: std::ptr::with_exposed_provenance_mut(at as usize),
        kind,
    })
}

fn piece(
    state: &State,
    device: usize,
    dst: (u64, Must),
    src: (u64, Must),
    bytes: u64,
) -> Outcome<Piece> {
    Ok(Piece {
        dst: side(state, device, dst.0, bytes, dst.1, "destination")?,
        src: side(state, device, src.0, bytes, src.1, "source")?,
        bytes: bytes as usize,
        early: None,
    })
}

/// Puts copies of one direction on a stream. With pageable memory the driver waits for them, and so does this.
fn push(stream: &Arc<Stream>, state: &mut State, pieces: Vec<Piece>) -> Option<u64> {
    let direction = pieces.first()?.direction();
    let engines = state.devices()[stream.device].engines.clone();
    let pageable = pieces.iter().any(Piece::is_pageable);
    let bytes = pieces.iter().map(|p| p.bytes as u64).sum();
    let place = stream.push(Box::new(move || {
        engines.run(direction, bytes, || {
            for piece in &pieces {
                piece.run();
            }
        });
        drop(pieces);
    }));
    if pageable {
        world().journal.add("pageable", 1);
    }
    pageable.then_some(place)
}

/// One copy; `sync` waits for it.
fn copy(dst: (u64, Must), src: (u64, Must), bytes: usize, stream: u64, sync: bool) -> Outcome {
    let mut state = world().state.lock();
    let stream = state.stream(stream)?;
    if bytes == 0 {
        return Ok(());
    }
    let piece = piece(&state, stream.device, dst, src, bytes as u64)?;
    if sync {
        let engines = state.devices()[stream.device].engines.clone();
        let place = stream.push(Box::new(move || {
            engines.run(piece.direction(), piece.bytes as u64, || piece.run())
        }));
        drop(state);
        stream.wait(place);
        return world().state.lock().current().map(drop);
    }
    let place = push(&stream, &mut state, vec![piece]);
    drop(state);
    if let Some(place) = place {
        stream.wait(place);
    }
    Ok(())
}

/// The order of a batch's copy: the last group of attributes that starts at or before it.
fn order(attributes: &[CopyAttributes], starts: &[usize], index: usize) -> u32 {
    let group = starts.partition_point(|&start| start <= index);
    attributes[group - 1].order
}

fn batch(
    state: &State,
    device: usize,
    (dsts, srcs, sizes): (&[u64], &[u64], &[usize]),
    attributes: (&[CopyAttributes], &[usize]),
    fail: *mut usize,
) -> Outcome<Vec<Piece>> {
    let mut pieces = Vec::with_capacity(sizes.len());
    for (index, ((&dst, &src), &bytes)) in dsts.iter().zip(srcs).zip(sizes).enumerate() {
        let made = if bytes == 0 {
            Err(wrong!(
                ERROR_INVALID_VALUE,
                "copy {index} of the batch has 0 bytes"
            ))
        } else {
            piece(
                state,
                device,
                (dst, Must::Either),
                (src, Must::Either),
                bytes as u64,
            )
        };
        let mut piece = match made {
            Ok(piece) => piece,
            Err(fault) => {
                if !fail.is_null() {
                    put(fail, index)?;
                }
                return Err(fault);
            }
        };
        // Read at the call: later writes to the source are missing.
        if (2..=ORDER_ANY).contains(&order(attributes.0, attributes.1, index)) {
            // SAFETY: found with this size, and held.
            piece.early = Some(unsafe { std::slice::from_raw_parts(piece.src.at, bytes) }.to_vec());
        }
        pieces.push(piece);
    }
    Ok(pieces)
}

exports! {
    fn cuMemcpyAsync(dst: u64, src: u64, bytes: usize, stream: u64) {
        copy((dst, Must::Either), (src, Must::Either), bytes, stream, false)
    }

    fn cuMemcpyHtoDAsync_v2(dst: u64, src: *const c_void, bytes: usize, stream: u64) {
        copy((dst, Must::Device), (src as u64, Must::Host), bytes, stream, false)
    }

    fn cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: u64, bytes: usize, stream: u64) {
        copy((dst as u64, Must::Host), (src, Must::Device), bytes, stream, false)
    }

    fn cuMemcpyDtoDAsync_v2(dst: u64, src: u64, bytes: usize, stream: u64) {
        copy((dst, Must::Device), (src, Must::Device), bytes, stream, false)
    }

    fn cuMemcpyHtoD_v2(dst: u64, src: *const c_void, bytes: usize) {
        copy((dst, Must::Device), (src as u64, Must::Host), bytes, 0, true)
    }

    fn cuMemcpyDtoH_v2(dst: *mut c_void, src: u64, bytes: usize) {
        copy((dst as u64, Must::Host), (src, Must::Device), bytes, 0, true)
    }

    fn cuMemcpy2DAsync_v2(what: *const Copy2D, stream: u64) {
        let what = &array(what, 1, "the copy")?[0];
        let mut state = world().state.lock();
        let stream = state.stream(stream)?;
        let row = |kind, host, device, x: usize, y: usize, pitch: usize| match kind {
            1 => Ok(((host, Must::Host), x + y * pitch)),
            2 => Ok(((device, Must::Device), x + y * pitch)),
            4 => Ok(((device, Must::Either), x + y * pitch)),
            _ => Err(wrong!(ERROR_INVALID_VALUE, "memory of type {kind}")),
        };
        let w = what;
        let (src, src_offset) = row(w.src_kind, w.src_host as u64, w.src_device, w.src_x, w.src_y, w.src_pitch)?;
        let (dst, dst_offset) = row(w.dst_kind, w.dst_host as u64, w.dst_device, w.dst_x, w.dst_y, w.dst_pitch)?;
        if w.height > 1 && (w.src_pitch < w.src_x + w.width || w.dst_pitch < w.dst_x + w.width) {
            return Err(wrong!(
                ERROR_INVALID_VALUE, "pitches {} and {} for rows of {} bytes", w.src_pitch, w.dst_pitch, w.width
            ));
        }
        let mut pieces = Vec::with_capacity(w.height);
        if w.width > 0 {
            for y in 0..w.height {
                let dst = (dst.0 + (dst_offset + y * w.dst_pitch) as u64, dst.1);
                let src = (src.0 + (src_offset + y * w.src_pitch) as u64, src.1);
                pieces.push(piece(&state, stream.device, dst, src, w.width as u64)?);
            }
        }
        let place = push(&stream, &mut state, pieces);
        drop(state);
        if let Some(place) = place {
            stream.wait(place);
        }
        Ok(())
    }

    // The signature of 12.8, with `fail`.
    fn cuMemcpyBatchAsync(
        dsts: *const u64, srcs: *const u64, sizes: *const usize, count: usize,
        attributes: *const CopyAttributes, starts: *const usize, groups: usize,
        fail: *mut usize, stream: u64,
    ) {
        if !world().script.lock().batch {
            return Err(wrong!(ERROR_NOT_SUPPORTED, "this driver has none"));
        }
        if !fail.is_null() {
            put(fail, usize::MAX)?;
        }
        if stream <= 2 {
            return Err(wrong!(ERROR_INVALID_VALUE, "on the default stream"));
        }
        if count == 0 || groups == 0 || groups > count {
            return Err(wrong!(ERROR_INVALID_VALUE, "{count} copies with {groups} attributes"));
        }
        let copies = (array(dsts, count, "dsts")?, array(srcs, count, "srcs")?, array(sizes, count, "sizes")?);
        let (attributes, starts) = (array(attributes, groups, "attrs")?, array(starts, groups, "attrsIdxs")?);
        if starts[0] != 0 || !starts.is_sorted_by(|a, b| a < b) || starts[groups - 1] >= count {
            return Err(wrong!(ERROR_INVALID_VALUE, "attrsIdxs {starts:?} for {count} copies"));
        }
        for a in attributes {
            if !(1..=ORDER_ANY).contains(&a.order) || a.flags > 1 {
                return Err(wrong!(ERROR_INVALID_VALUE, "srcAccessOrder {}, flags {}", a.order, a.flags));
            }
        }
        let mut state = world().state.lock();
        let stream = state.stream(stream)?;
        let mut pieces = batch(&state, stream.device, copies, (attributes, starts), fail)?;
        world().journal.add("batched", count as u64);
        // The order within a batch is unspecified; reversing it exposes callers that rely on it.
        pieces.reverse();
        let mut directions = [Direction::HostToDevice, Direction::DeviceToHost, Direction::Kernel].map(|d| {
            let (these, rest) = std::mem::take(&mut pieces).into_iter().partition(|p| p.direction() == d);
            pieces = rest;
            these
        });
        let places: Vec<_> = directions.iter_mut()
            .filter_map(|these| push(&stream, &mut state, std::mem::take(these)))
            .collect();
        drop(state);
        for place in places {
            stream.wait(place);
        }
        Ok(())
    }

    fn cuMemsetD8Async(dst: u64, value: u8, bytes: usize, stream: u64) {
        let mut state = world().state.lock();
        let stream = state.stream(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let to = side(&state, stream.device, dst, bytes as u64, Must::Device, "destination")?;
        let from = Side { at: std::ptr::null_mut(), kind: SideKind::Pageable };
        let fill = Piece { dst: to, src: from, bytes, early: None };
        let engines = state.devices()[stream.device].engines.clone();
        stream.push(Box::new(move || {
            let fill = fill;
            // SAFETY: found with this size, and held.
            engines.run(Direction::Kernel, bytes as u64, || unsafe { fill.dst.at.write_bytes(value, bytes) });
        }));
        Ok(())
    }
}
