//! Streams, events, and what needs a context.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::*;

#[test]
fn a_stream_keeps_its_order() {
    let _alone = alone();
    let (stream, at) = (stream(), device_memory(64));
    let (first, second) = (host_memory(64), host_memory(64));
    first.fill(1);
    second.fill(2);
    script("hold h2d");
    assert_eq!(OK, to_device(at, first, stream));
    assert_eq!(
        OK,
        call!(cuMemsetD8Async(at => u64, 9 => u8, 32 => usize, stream => u64))
    );
    assert_eq!(OK, to_device(at + 16, &second[..8], stream));
    assert_eq!(600, call!(cuStreamQuery(stream => u64)));
    script("release");
    assert_eq!(OK, sync(stream));
    assert_eq!(OK, call!(cuStreamQuery(stream => u64)));
    let expected = [[9; 16].as_slice(), &[2; 8], &[9; 8], &[1; 32]].concat();
    assert_eq!(expected, contents(at, 64));
    clean();
}

#[test]
fn event_covers_the_work_before_its_record() {
    let _alone = alone();
    let (stream, other, at, from) = (stream(), stream(), device_memory(8), host_memory(8));
    let event = event(2);
    assert_eq!(OK, query(event), "never recorded");
    record(event, stream);
    assert_eq!(OK, call!(cuEventSynchronize(event => u64)));
    script("hold h2d");
    assert_eq!(OK, to_device(at, from, stream));
    assert_eq!(OK, query(event));
    record(event, stream);
    assert_eq!(600, query(event));
    assert_eq!(
        OK,
        call!(cuStreamWaitEvent(other => u64, event => u64, 0 => u32))
    );
    assert_eq!(600, call!(cuStreamQuery(other => u64)));
    script("release");
    assert_eq!(OK, sync(other));
    assert_eq!(OK, query(event));
    clean();
}

#[test]
fn only_timing_events_measure_time() {
    let _alone = alone();
    let (stream, start, end, plain) = (stream(), event(0), event(0), event(2));
    let mut milliseconds = -1.0;
    let mut elapsed = |start, end| call!(cuEventElapsedTime(&mut milliseconds => *mut f32, start => u64, end => u64));
    violated(elapsed(start, end), 400, "never recorded");
    record(start, stream);
    record(end, stream);
    record(plain, stream);
    assert_eq!(OK, sync(stream));
    violated(elapsed(start, plain), 400, "has no time");
    assert_eq!(OK, elapsed(start, end));
    assert!(milliseconds >= 0.0);
    violated(
        call!(cuEventCreate(&mut 0 => *mut u64, 4 => u32)),
        1,
        "INTERPROCESS needs DISABLE_TIMING",
    );
}

#[test]
fn destroyed_handles_are_unknown() {
    let _alone = alone();
    let (stream, event) = (stream(), event(2));
    assert_eq!(OK, call!(cuEventDestroy_v2(event => u64)));
    violated(query(event), 400, "is no event");
    violated(call!(cuEventDestroy_v2(event => u64)), 400, "is no event");
    violated(
        call!(cuEventRecord(event => u64, stream => u64)),
        400,
        "is no event",
    );
    assert_eq!(OK, call!(cuStreamDestroy_v2(stream => u64)));
    violated(sync(stream), 400, "is no stream");
    violated(
        call!(cuStreamDestroy_v2(stream => u64)),
        400,
        "is no stream",
    );
}

#[test]
fn destroyed_stream_finishes_its_work() {
    let _alone = alone();
    let (stream, at, from, event) = (stream(), device_memory(8), host_memory(8), event(2));
    from.fill(7);
    script("hold h2d");
    assert_eq!(OK, to_device(at, from, stream));
    record(event, stream);
    assert_eq!(OK, call!(cuStreamDestroy_v2(stream => u64)));
    script("release");
    assert_eq!(OK, call!(cuEventSynchronize(event => u64)));
    assert_eq!(vec![7; 8], contents(at, 8));
    clean();
}

static SEEN: AtomicU64 = AtomicU64::new(0);

extern "C" fn host_function(data: *mut c_void) {
    // Calls of the driver are forbidden here.
    let code = call!(cuCtxGetCurrent(&mut 0 => *mut u64));
    SEEN.store(data.addr() as u64 + code as u64, Ordering::SeqCst);
}

#[test]
fn host_function_runs_in_order_without_driver_calls() {
    let _alone = alone();
    let stream = stream();
    let launch = call!(cuLaunchHostFunc(
        stream => u64, host_function => extern "C" fn(*mut c_void), 10_000 => usize));
    assert_eq!(OK, launch);
    assert_eq!(OK, sync(stream));
    violated(
        SEEN.load(Ordering::SeqCst) as c_int - 10_000,
        800,
        "in a host function",
    );
}

#[test]
fn every_thread_needs_the_right_context() {
    let _alone = alone();
    let (stream, at, event) = (stream(), device_memory(8), event(2));
    std::thread::spawn(move || {
        violated(
            call!(cuMemAlloc_v2(&mut 0 => *mut u64, 8 => usize)),
            201,
            "no context is current",
        );
        violated(call!(cuMemFree_v2(at => u64)), 201, "no context is current");
        violated(sync(stream), 201, "no context is current");
        violated(
            call!(cuEventRecord(event => u64, stream => u64)),
            201,
            "no context is current",
        );
        violated(
            call!(cuCtxSetCurrent(77 => u64)),
            201,
            "no context that is retained",
        );
        assert_eq!(OK, query(event));
        current();
        assert_eq!(OK, call!(cuMemFree_v2(at => u64)));
        clean();
    })
    .join()
    .unwrap();
}
