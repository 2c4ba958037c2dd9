//! Device memory, host memory, and copies between them.

use crate::driver::*;

#[test]
fn bytes_survive_a_round_trip() {
    let _alone = alone();
    let (stream, at) = (stream(), device_memory(1 << 20));
    let (out, back) = (host_memory(1 << 20), host_memory(1 << 20));
    out.iter_mut()
        .enumerate()
        .for_each(|(i, byte)| *byte = i as u8);
    assert_eq!(OK, to_device(at, out, stream));
    assert_eq!(OK, to_host(back, at, stream));
    assert_eq!(OK, sync(stream));
    assert!(out == back);
    assert_eq!(1, count("cuMemAlloc_v2"));
    assert_eq!(0, count("pageable"));
    clean();
}

#[test]
fn access_outside_allocations_is_refused() {
    let _alone = alone();
    let (stream, at, host) = (stream(), device_memory(100), host_memory(4096));
    violated(
        to_device(at, &host[..101], stream),
        1,
        "beyond the 100 bytes",
    );
    violated(
        to_device(at + 99, &host[..2], stream),
        1,
        "beyond the 100 bytes",
    );
    violated(
        to_device(at + 100, &host[..1], stream),
        1,
        "not in a live allocation",
    );
    violated(
        to_device(host.as_ptr() as u64, &host[..1], stream),
        1,
        "not in a live allocation",
    );
    assert_eq!(OK, call!(cuMemFree_v2(at => u64)));
    violated(
        to_device(at, &host[..1], stream),
        1,
        "not in a live allocation",
    );
    violated(call!(cuMemFree_v2(at => u64)), 1, "or it was freed");
    let mut base = 0;
    violated(
        call!(cuMemGetAddressRange_v2(&mut base => *mut u64, std::ptr::null_mut() => *mut usize, at => u64)),
        1,
        "not in a live",
    );
    let again = device_memory(100);
    assert_ne!(at, again);
    let mut bytes = 0;
    let range = call!(cuMemGetAddressRange_v2(&mut base => *mut u64, &mut bytes => *mut usize, again + 50 => u64));
    assert_eq!((OK, again, 100), (range, base, bytes));
    clean();
}
