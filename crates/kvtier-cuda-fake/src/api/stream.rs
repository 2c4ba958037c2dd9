//! Streams, host functions, and writing values in device memory.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use super::exports;
use crate::abi::*;
use crate::stream::{Stream, until};
use crate::world::{IN_HOST_FUNCTION, only, unknown, world};

exports! {
    fn cuStreamCreateWithPriority(to: *mut u64, flags: u32, priority: i32) {
        let mut state = world().state.lock();
        let device = state.current()?;
        only(flags, 1)?;
        _ = priority; // out of range is no error; and there is none here
        let handle = state.handle();
        state.streams.insert(handle, Stream::start(device));
        put(to, handle)
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
        // Queued work still runs.
        state.streams.remove(&stream).map(drop).ok_or_else(|| unknown("stream", stream))
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
        let record = state.event(event)?.record.clone();
        let up_to = record.last();
        stream.push(Box::new(move || until(|| record.is_complete(up_to))));
        Ok(())
    }

    fn cuStreamWriteValue64_v2(stream: u64, at: u64, value: u64, flags: u32) {
        let mut state = world().state.lock();
        let stream = state.stream(stream)?;
        only(flags, 1)?;
        if !at.is_multiple_of(8) {
            return Err(wrong!(ERROR_INVALID_VALUE, "{at:#x} is not a multiple of 8"));
        }
        let (to, held) = state.space.find(at, 8, stream.device, "the value")?;
        // SAFETY: aligned, and mapped while it is held, which is until it is written.
        let number: &'static AtomicU64 = unsafe { AtomicU64::from_ptr(to.cast()) };
        stream.push(Box::new(move || {
            number.store(value, Ordering::Release);
            drop(held);
        }));
        Ok(())
    }

    fn cuLaunchHostFunc(stream: u64, function: extern "C" fn(*mut c_void), data: *mut c_void) {
        let stream = world().state.lock().stream(stream)?;
        let data = data.expose_provenance();
        stream.push(Box::new(move || {
            IN_HOST_FUNCTION.set(true);
            function(std::ptr::with_exposed_provenance_mut(data));
            IN_HOST_FUNCTION.set(false);
        }));
        Ok(())
    }
}
