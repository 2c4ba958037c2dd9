//! Virtual memory management.

use std::ffi::c_int;

use crate::driver::*;

pub(crate) const GRANULE: u64 = 2 << 20;

#[repr(C)]
pub(crate) struct Prop(u32, u32, u32, i32, u64, u64);

pub(crate) fn create(bytes: u64, kinds: u32) -> (c_int, u64) {
    let (prop, mut handle) = (Prop(1, kinds, 1, 0, 0, 0), 0);
    let code =
        call!(cuMemCreate(&mut handle => *mut u64, bytes => u64, &prop => *const Prop, 0 => u64));
    (code, handle)
}

pub(crate) fn reserve(bytes: u64) -> u64 {
    let mut at = 0;
    assert_eq!(
        OK,
        call!(cuMemAddressReserve(
        &mut at => *mut u64, bytes => u64, 0 => u64, 0 => u64, 0 => u64))
    );
    at
}

pub(crate) fn map(at: u64, bytes: u64, handle: u64) -> c_int {
    call!(cuMemMap(at => u64, bytes => u64, 0 => u64, handle => u64, 0 => u64))
}

pub(crate) fn unmap(at: u64, bytes: u64) -> c_int {
    call!(cuMemUnmap(at => u64, bytes => u64))
}

pub(crate) fn allow(at: u64, bytes: u64) -> c_int {
    let access = [1_u32, 0, 3];
    call!(cuMemSetAccess(at => u64, bytes => u64, &access => *const [u32; 3], 1 => usize))
}

fn release(handle: u64) -> c_int {
    call!(cuMemRelease(handle => u64))
}

#[test]
fn memory_is_mapped_in_pieces() {
    let _alone = alone();
    let (stream, host) = (stream(), host_memory(100));
    let (first, second) = (create(GRANULE, 1).1, create(2 * GRANULE, 1).1);
    let at = reserve(4 * GRANULE);
    violated(to_device(at, host, stream), 1, "nothing is mapped");
    assert_eq!(OK, map(at, GRANULE, first));
    violated(to_device(at, host, stream), 1, "without access");
    assert_eq!(OK, map(at + GRANULE, 2 * GRANULE, second));
    assert_eq!(OK, allow(at, 3 * GRANULE));
    host.fill(5);
    let across = at + GRANULE - 50;
    assert_eq!(OK, to_device(across, host, stream));
    assert_eq!(OK, sync(stream));
    assert_eq!(vec![5; 100], contents(across, 100));
    clean();
    violated(
        to_device(at + 3 * GRANULE - 50, host, stream),
        1,
        "nothing is mapped",
    );
    let (mut base, mut bytes) = (0, 0);
    let range = call!(cuMemGetAddressRange_v2(&mut base => *mut u64, &mut bytes => *mut u64, across + 99 => u64));
    assert_eq!((OK, at + GRANULE, 2 * GRANULE), (range, base, bytes));
    // What was released stays while it is mapped.
    assert_eq!((OK, OK), (release(first), release(second)));
    assert_eq!(vec![5; 100], contents(across, 100));
    violated(unmap(at + GRANULE, GRANULE), 211, "no mapping of");
    violated(
        call!(cuMemAddressFree(at => u64, 4 * GRANULE => u64)),
        1,
        "still has 2 mappings",
    );
    assert_eq!(OK, unmap(at, GRANULE));
    assert_eq!(OK, unmap(at + GRANULE, 2 * GRANULE));
    violated(unmap(at, GRANULE), 211, "no mapping of");
    violated(to_device(across, host, stream), 1, "nothing is mapped");
    assert_eq!(OK, call!(cuMemAddressFree(at => u64, 4 * GRANULE => u64)));
    violated(
        call!(cuMemAddressFree(at => u64, 4 * GRANULE => u64)),
        1,
        "no reservation",
    );
}

#[test]
fn wrong_sizes_and_handles_are_refused() {
    let _alone = alone();
    violated(create(GRANULE + 1, 1).0, 1, "in granules of");
    let (handle, at) = (create(GRANULE, 1).1, reserve(2 * GRANULE));
    violated(map(at, 2 * GRANULE, handle), 1, "of an allocation of");
    violated(
        map(at + GRANULE, GRANULE, 99),
        400,
        "no physical allocation",
    );
    violated(
        map(at + 2 * GRANULE, GRANULE, handle),
        1,
        "not in a reservation",
    );
    assert_eq!(OK, map(at, GRANULE, handle));
    violated(map(at, GRANULE, handle), 208, "something is mapped");
    assert_eq!(OK, unmap(at, GRANULE));
    assert_eq!(OK, release(handle));
    violated(release(handle), 400, "no physical allocation");
    violated(
        call!(cuMemImportFromShareableHandle(&mut 0 => *mut u64, 0 => usize, 1 => u32)),
        1,
        "no exported allocation",
    );
}
