//! Events.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::exports;
use crate::abi::*;
use crate::event::Event;
use crate::stream::until;
use crate::world::{only, world};

static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);

fn record(event: u64, stream: u64) -> Outcome {
    let mut state = world().state.lock();
    let stream = state.stream(stream)?;
    let event = state.event(event)?;
    if event.device != stream.device {
        return Err(wrong!(
            ERROR_INVALID_HANDLE,
            "the event is of device {}, the stream of {}",
            event.device,
            stream.device
        ));
    }
    let (record, stamp) = (event.record.clone(), event.stamp.clone());
    let number = record.record();
    let never = world()
        .script
        .lock()
        .event_never
        .as_mut()
        .is_some_and(|when| when.hit());
    stream.push(Box::new(move || {
        if !never {
            stamp.store(START.elapsed().as_nanos() as u64, Ordering::Release);
            record.complete(number);
        }
    }));
    Ok(())
}

exports! {
    fn cuEventCreate(to: *mut u64, flags: u32) {
        let mut state = world().state.lock();
        let device = state.current()?;
        only(flags, 7)?;
        if flags & EVENT_INTERPROCESS != 0 && flags & EVENT_DISABLE_TIMING == 0 {
            return Err(wrong!(ERROR_INVALID_VALUE, "INTERPROCESS needs DISABLE_TIMING"));
        }
        _ = &*START;
        let record = state.slots.take()?;
        let event = Event { record, flags, device, imported: false, stuck: false, stamp: Default::default() };
        let handle = state.handle();
        state.events.insert(handle, event);
        put(to, handle)
    }

    fn cuEventDestroy_v2(event: u64) {
        let mut state = world().state.lock();
        state.current()?;
        let event = state.events.remove(&event).ok_or_else(|| crate::world::unknown("event", event))?;
        if !event.imported {
            state.slots.release(&event.record);
        }
        Ok(())
    }

    fn cuEventRecord(event: u64, stream: u64) {
        record(event, stream)
    }

    fn cuEventRecordWithFlags(event: u64, stream: u64, flags: u32) {
        only(flags, 1)?;
        record(event, stream)
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
        let event = state.event(event)?;
        let (record, up_to, stuck) = (event.record.clone(), event.record.last(), event.stuck);
        drop(state);
        until(|| !stuck && record.is_complete(up_to));
        world().state.lock().current().map(drop)
    }

    fn cuEventElapsedTime(milliseconds: *mut f32, start: u64, end: u64) {
        let mut state = world().state.lock();
        state.current()?;
        let mut stamps = [0; 2];
        for (stamp, handle) in stamps.iter_mut().zip([start, end]) {
            let event = state.event(handle)?;
            if event.flags & EVENT_DISABLE_TIMING != 0 || event.record.last() == 0 {
                return Err(wrong!(ERROR_INVALID_HANDLE, "{handle:#x} has no time, or was never recorded"));
            }
            if !event.is_complete() {
                return Err(Fault::Code(ERROR_NOT_READY));
            }
            *stamp = event.stamp.load(Ordering::Acquire);
        }
        put(milliseconds, (stamps[1] as f64 - stamps[0] as f64) as f32 / 1e6)
    }
}
