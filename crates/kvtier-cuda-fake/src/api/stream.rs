//! Streams, host functions, and waiting for and writing values in device memory.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use super::exports;
use crate::abi::*;
use crate::stream::{Stream, until};
use crate::world::{IN_HOST_FUNCTION, State, only, unknown, world};

/// The 64-bit value at a device address, and the guard of its memory.
fn number(state: &mut State, at: u64) -> Outcome<(crate::space::Found, &'static AtomicU64)> {
    let device = state.current()?;
    if !at.is_multiple_of(8) {
        return Err(wrong!(
            ERROR_INVALID_VALUE,
            "{at:#x} is not a multiple of 8"
        ));
    }
    let found = state.space.find(at, 8, device, "the value")?;
    // SAFETY: `found` goes with it into the stream's work, and keeps the memory mapped.
    let number = unsafe { AtomicU64::from_ptr(found.at.cast()) };
    Ok((found, number))
}

exports! {
    fn cuStreamCreateWithPriority(to: *mut u64, flags: u32, priority: i32) {
        let mut state = world().state.lock();
        let device = state.current()?;
        only(flags, 1)?;
        _ = priority; // out of range is no error; and there is none here
        let handle = state.handle();
        put(to, handle)?;
        state.streams.insert(handle, Stream::start(device));
        Ok(())
    }

    fn cuStreamCreate(to: *mut u64, flags: u32) {
        match cuStreamCreateWithPriority(to, flags, 0) {
            SUCCESS => Ok(()),
            code => Err(Fault::Code(code)),
        }
    }

    fn cuStreamDestroy_v2(stream: u64) {
        let mut state = world().state.lock();
        state.current()?;
        let stream = state.streams.remove(&stream).ok_or_else(|| unknown("stream", stream))?;
        stream.close();
        Ok(())
    }

    fn cuStreamQuery(stream: u64) {
        let stream = world().state.lock().stream(stream)?;
        if stream.is_idle() { Ok(()) } else { Err(Fault::Code(ERROR_NOT_READY)) }
    }

    fn cuStreamSynchronize(stream: u64) {
        let stream = world().state.lock().stream(stream)?;
        stream.wait(stream.last());
        world().state.lock().current().map(drop)
    }

    fn cuStreamWaitEvent(stream: u64, event: u64, flags: u32) {
        let mut state = world().state.lock();
        let stream = state.stream(stream)?;
        only(flags, 1)?;
        let event = state.event(event)?;
        let (record, up_to, stuck) = (event.record.clone(), event.record.last(), event.stuck);
        stream.push(Box::new(move || until(|| !stuck && record.is_complete(up_to))));
        Ok(())
    }

    fn cuStreamWaitValue64_v2(stream: u64, at: u64, value: u64, flags: u32) {
        let mut state = world().state.lock();
        let stream = state.stream(stream)?;
        let (found, number) = number(&mut state, at)?;
        let held = found.held;
        let met: fn(u64, u64) -> bool = match flags {
            0 => |now, value| now.wrapping_sub(value) as i64 >= 0,
            1 => |now, value| now == value,
            2 => |now, value| now & value != 0,
            3 => |now, value| !(now | value) != 0,
            _ => return Err(wrong!(ERROR_INVALID_VALUE, "flags {flags}")),
        };
        stream.push(Box::new(move || {
            until(|| met(number.load(Ordering::Acquire), value));
            drop(held);
        }));
        Ok(())
    }

    fn cuStreamWriteValue64_v2(stream: u64, at: u64, value: u64, flags: u32) {
        let mut state = world().state.lock();
        let stream = state.stream(stream)?;
        only(flags, 1)?;
        let (found, number) = number(&mut state, at)?;
        let held = found.held;
        stream.push(Box::new(move || {
            number.store(value, Ordering::Release);
            drop(held);
        }));
        Ok(())
    }

    fn cuLaunchHostFunc(stream: u64, function: Option<extern "C" fn(*mut c_void)>, data: *mut c_void) {
        let stream = world().state.lock().stream(stream)?;
        let Some(function) = function else {
            return Err(wrong!(ERROR_INVALID_VALUE, "no function"));
        };
        let data = data.addr();
        stream.push(Box::new(move || {
            IN_HOST_FUNCTION.set(true);
            function(std::ptr::with_exposed_provenance_mut(data));
            IN_HOST_FUNCTION.set(false);
        }));
        Ok(())
    }
}
