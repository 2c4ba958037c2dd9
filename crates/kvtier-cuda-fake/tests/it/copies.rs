//! The rules of copies: host memory and batches.

use std::ffi::c_int;

use crate::driver::*;

fn register(bytes: &[u8]) -> c_int {
    call!(cuMemHostRegister_v2(bytes.as_ptr() => *const u8, bytes.len() => usize, 3 => u32))
}

fn unregister(bytes: &[u8]) -> c_int {
    call!(cuMemHostUnregister(bytes.as_ptr() => *const u8))
}

#[test]
fn host_memory_is_registered_once() {
    let _alone = alone();
    let memory = vec![0_u8; 8192];
    assert_eq!(OK, register(&memory[1000..3000]));
    violated(register(&memory[2999..4000]), 712, "overlap");
    violated(register(&memory[..1001]), 712, "overlap");
    violated(unregister(&memory[1001..]), 713, "nothing starts");
    assert_eq!(OK, register(&memory[3000..4000]));
    assert_eq!(OK, unregister(&memory[1000..]));
    violated(unregister(&memory[1000..]), 713, "nothing starts");
    assert_eq!(OK, unregister(&memory[3000..]));
    // SAFETY: nothing is read there.
    let nowhere = unsafe { std::slice::from_raw_parts(0x1000 as *const u8, 8) };
    violated(register(nowhere), 1, "not host memory");
}

#[test]
fn a_copy_across_two_registrations_is_refused() {
    let _alone = alone();
    let (stream, at, memory) = (stream(), device_memory(8192), vec![0_u8; 8192]);
    assert_eq!(OK, register(&memory[..4096]));
    violated(
        to_device(at, &memory[4000..4200], stream),
        1,
        "partly outside the registration",
    );
    assert_eq!(OK, register(&memory[4096..]));
    violated(
        to_device(at, &memory, stream),
        1,
        "partly outside the registration",
    );
    assert_eq!(OK, to_device(at, &memory[4096..], stream));
    assert_eq!(OK, sync(stream));
    assert_eq!((OK, OK), (unregister(&memory), unregister(&memory[4096..])));
    assert_eq!(0, count("pageable"));
}

#[test]
fn pageable_copy_waits() {
    let _alone = alone();
    let (stream, at, memory) = (stream(), device_memory(64), vec![3_u8; 64]);
    assert_eq!(OK, to_device(at, &memory, stream));
    // No call waited for the stream.
    assert_eq!(
        (OK, 1, 1),
        (
            call!(cuStreamQuery(stream => u64)),
            count("h2d"),
            count("pageable")
        )
    );
    clean();
}

#[test]
fn freeing_memory_in_use_is_a_violation() {
    let _alone = alone();
    let (stream, at, memory) = (stream(), device_memory(64), vec![3_u8; 64]);
    assert_eq!(OK, register(&memory));
    script("hold h2d");
    assert_eq!(OK, to_device(at, &memory, stream));
    violated(unregister(&memory), OK, "still has work");
    violated(call!(cuMemFree_v2(at => u64)), OK, "still has work");
    script("release");
    assert_eq!(OK, sync(stream));
}

#[test]
fn device_pointer_needs_mapped_host_memory() {
    let _alone = alone();
    let memory = vec![0_u8; 64];
    let pointer = || {
        let mut at = 0_u64;
        let code = call!(cuMemHostGetDevicePointer_v2(&mut at => *mut u64, memory.as_ptr() => *const u8, 0 => u32));
        (code, at)
    };
    violated(pointer().0, 1, "not registered");
    assert_eq!(
        OK,
        call!(cuMemHostRegister_v2(memory.as_ptr() => *const u8, 64 => usize, 1 => u32))
    );
    violated(pointer().0, 1, "without DEVICEMAP");
    assert_eq!(OK, unregister(&memory));
    assert_eq!(OK, register(&memory));
    assert_eq!((OK, memory.as_ptr() as u64), pointer());
    assert_eq!(OK, unregister(&memory));
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Attributes(u32, [u32; 5]);

/// A batch with one order for all: what the call answers, and the copy it says it failed at.
fn batch(copies: &[(u64, u64, usize)], order: u32, stream: u64) -> (c_int, usize) {
    let dsts: Vec<u64> = copies.iter().map(|c| c.0).collect();
    let srcs: Vec<u64> = copies.iter().map(|c| c.1).collect();
    let sizes: Vec<usize> = copies.iter().map(|c| c.2).collect();
    let (attributes, first, mut failed) = (Attributes(order, [0; 5]), 0_usize, 0);
    let code = call!(cuMemcpyBatchAsync(
        dsts.as_ptr() => *const u64, srcs.as_ptr() => *const u64, sizes.as_ptr() => *const usize,
        copies.len() => usize, &attributes => *const Attributes, &first => *const usize, 1 => usize,
        &mut failed => *mut usize, stream => u64));
    (code, failed)
}

#[test]
fn batch_order_is_reversed() {
    let _alone = alone();
    let (stream, at, from) = (stream(), device_memory(64), host_memory(64));
    from.iter_mut()
        .enumerate()
        .for_each(|(i, byte)| *byte = i as u8);
    let host = from.as_ptr() as u64;
    assert_eq!(
        (OK, usize::MAX),
        batch(&[(at, host, 16), (at + 16, host + 40, 8)], 1, stream)
    );
    assert_eq!(OK, sync(stream));
    assert_eq!([&from[..16], &from[40..48]].concat(), contents(at, 24));
    // The last of the list does not win.
    assert_eq!(
        OK,
        batch(&[(at, host + 1, 1), (at, host + 2, 1)], 1, stream).0
    );
    assert_eq!(OK, sync(stream));
    assert_eq!(vec![1], contents(at, 1));
    assert_eq!(4, count("batched"));
    clean();
    let (code, index) = batch(&[(at, host, 16), (at + 60, host, 8)], 1, stream);
    violated(code, 1, "beyond the 64 bytes");
    assert_eq!(1, index);
    violated(batch(&[(at, host, 0)], 1, stream).0, 1, "0 bytes");
    violated(batch(&[(at, host, 1)], 0, stream).0, 1, "srcAccessOrder 0");
    violated(batch(&[(at, host, 1)], 1, 0).0, 1, "on stream 0");
    violated(batch(&[], 1, stream).0, 1, "0 copies");
}

#[test]
fn batch_of_any_order_misses_earlier_writes() {
    let _alone = alone();
    let (stream, at, host) = (stream(), device_memory(64), host_memory(64));
    for (order, seen) in [(1, 7), (3, 0)] {
        script("hold h2d");
        host[..8].fill(7);
        host[8..].fill(0);
        assert_eq!(
            OK,
            call!(cuMemsetD8Async(at => u64, 0 => u8, 8 => usize, 0 => u64))
        );
        assert_eq!(OK, call!(cuStreamSynchronize(0 => u64)));
        assert_eq!(OK, to_device(at, &host[..8], stream));
        assert_eq!(
            OK,
            batch(&[(host[8..].as_ptr() as u64, at, 8)], order, stream).0
        );
        script("release");
        assert_eq!(OK, sync(stream));
        assert_eq!([seen; 8], host[8..16]);
    }
    clean();
}
