//! Several devices, and several drivers.

use std::ffi::c_int;

use crate::driver::*;

/// Makes the context of another device current.
fn enter(device: c_int) {
    let mut context = 0_u64;
    assert_eq!(OK, call!(cuInit(0 => u32)));
    assert_eq!(
        OK,
        call!(cuDevicePrimaryCtxRetain(&mut context => *mut u64, device => c_int))
    );
    assert_eq!(OK, call!(cuCtxSetCurrent(context => u64)));
}

fn register(bytes: &[u8], flags: u32) -> c_int {
    call!(cuMemHostRegister_v2(bytes.as_ptr() => *const u8, bytes.len() => usize, flags => u32))
}

fn unregister(bytes: &[u8]) -> c_int {
    call!(cuMemHostUnregister(bytes.as_ptr() => *const u8))
}

#[test]
fn objects_belong_to_one_device() {
    let _alone = alone();
    let (first, event, at, host) = (stream(), event(2), device_memory(64), vec![1_u8; 64]);
    script("devices=2");
    enter(1);
    violated(sync(first), 201, "the stream is of device 0");
    violated(
        to_device(at, &host, first),
        201,
        "the stream is of device 0",
    );
    violated(call!(cuMemFree_v2(at => u64)), 201, "memory of device 0");
    let second = stream();
    violated(
        to_device(at, &host, second),
        1,
        "memory of device 0, touched by device 1",
    );
    violated(
        call!(cuEventRecord(event => u64, second => u64)),
        400,
        "the event is of device 0",
    );
    // Waiting for another device's event is what events are for.
    assert_eq!(
        OK,
        call!(cuStreamWaitEvent(second => u64, event => u64, 0 => u32))
    );
    assert_eq!((OK, OK), (query(event), sync(second)));
    let mut count = 0;
    assert_eq!(OK, call!(cuDeviceGetCount(&mut count => *mut c_int)));
    assert_eq!(2, count);
    script("devices=1");
}

#[test]
fn portable_host_memory_is_for_all_devices() {
    let _alone = alone();
    let host = vec![1_u8; 4096];
    script("devices=2");
    enter(1);
    let (stream, at) = (stream(), device_memory(4096));
    for (flags, pageable) in [(2, 1), (3, 0)] {
        enter(0);
        assert_eq!(OK, register(&host, flags));
        enter(1);
        assert_eq!(OK, to_device(at, &host, stream));
        assert_eq!((OK, pageable), (sync(stream), count("pageable")));
        assert_eq!(OK, unregister(&host));
        script("clear");
    }
    script("devices=1");
}
