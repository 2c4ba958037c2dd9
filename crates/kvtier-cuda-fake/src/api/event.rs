//! Events.

use std::time::Instant;

use super::exports;
use crate::abi::*;
use crate::event::{self, Event, EventRecord};
use crate::segment::Segment;
use crate::stream::until;
use crate::world::{only, unknown, world};

static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);

exports! {
    fn cuEventCreate(to: *mut u64, flags: u32) {
        let mut state = world().state.lock();
        let device = state.current()?;
        only(flags, 7)?;
        if flags & EVENT_INTERPROCESS != 0 && flags & EVENT_DISABLE_TIMING == 0 {
            return Err(wrong!(ERROR_INVALID_VALUE, "INTERPROCESS needs DISABLE_TIMING"));
        }
        _ = &*START;
        let handle = state.handle();
        let (segment, fd) = Segment::create('e', handle, event::BYTES)?;
        let event = Event { record: EventRecord::of(&fd)?, flags, device, segment: Some(segment) };
        state.events.insert(handle, event);
        put(to, handle)
    }

    fn cuEventDestroy_v2(event: u64) {
        let mut state = world().state.lock();
        state.current()?;
        state.events.remove(&event).map(drop).ok_or_else(|| unknown("event", event))
    }

    fn cuEventRecord(event: u64, stream: u64) {
        let mut state = world().state.lock();
        let stream = state.stream(stream)?;
        let event = state.event(event)?;
        if event.device != stream.device {
            return Err(wrong!(
                ERROR_INVALID_HANDLE, "the event is of device {}, the stream of {}", event.device, stream.device
            ));
        }
        let record = event.record.clone();
        let number = record.record();
        stream.push(Box::new(move || record.complete(number, START.elapsed().as_nanos() as u64)));
        Ok(())
    }

    fn cuEventQuery(event: u64) {
        // Of all, this needs no current context.
        let mut state = world().state.lock();
        let device = state.event(event)?.device;
        state.healthy(device)?;
        if state.event(event)?.is_complete() { Ok(()) } else { Err(Fault::Code(ERROR_NOT_READY)) }
    }

    fn cuEventSynchronize(event: u64) {
        let mut state = world().state.lock();
        state.current()?;
        let record = state.event(event)?.record.clone();
        drop(state);
        let up_to = record.last();
        until(|| record.is_complete(up_to));
        world().state.lock().current().map(drop)
    }

    fn cuEventElapsedTime(milliseconds: *mut f32, start: u64, end: u64) {
        let mut state = world().state.lock();
        state.current()?;
        let mut stamps = [0.0; 2];
        for (stamp, handle) in stamps.iter_mut().zip([start, end]) {
            let event = state.event(handle)?;
            if event.flags & EVENT_DISABLE_TIMING != 0 || event.record.last() == 0 {
                return Err(wrong!(ERROR_INVALID_HANDLE, "{handle:#x} has no time, or was never recorded"));
            }
            if !event.is_complete() {
                return Err(Fault::Code(ERROR_NOT_READY));
            }
            *stamp = event.record.nanoseconds() as f64;
        }
        put(milliseconds, ((stamps[1] - stamps[0]) / 1e6) as f32)
    }
}
