//! Modules and the copy kernel.

use std::ffi::{CString, c_char, c_int, c_void};

use crate::driver::*;

const PTX: &str = include_str!("../../../kvtier-device/src/cuda/kernel/kvcopy.ptx");

fn load(ptx: &str) -> (c_int, u64) {
    let (ptx, mut module) = (CString::new(ptx).unwrap(), 0);
    let code = call!(cuModuleLoadDataEx(
        &mut module => *mut u64, ptx.as_ptr() => *const c_char, 0 => u32, 0 => usize, 0 => usize));
    (code, module)
}

fn function(module: u64, name: &str) -> (c_int, u64) {
    let (name, mut function) = (CString::new(name).unwrap(), 0);
    let code = call!(cuModuleGetFunction(&mut function => *mut u64, module => u64, name.as_ptr() => *const c_char));
    (code, function)
}

/// `Item` and `Tile` of kvcopy.cu, of one run.
#[repr(C)]
#[derive(Clone, Copy)]
struct Plan {
    src_dst: [u64; 2],
    strides: [u64; 6],
    counts: [u32; 4],
    steps: [u32; 4],
    tile: [u32; 4],
}

/// Copies `units` of 16 bytes as the kernel does.
fn launch(function: u64, (dst, src, units): (u64, u64, u32), plan_at: u64, stream: u64) -> c_int {
    let plan = Plan {
        src_dst: [src, dst],
        strides: [0; 6],
        counts: [1, 1, 1, units],
        steps: [0, 0, 0, 32],
        tile: [0, 0, units, 1],
    };
    // SAFETY: plain numbers without padding.
    let bytes =
        unsafe { std::slice::from_raw_parts((&raw const plan).cast::<u8>(), size_of::<Plan>()) };
    assert_eq!(OK, to_device(plan_at, bytes, stream));
    let (items, tiles, n) = (plan_at, plan_at + 96, 1_u32);
    let params: [*const c_void; 3] = [
        (&raw const items).cast(),
        (&raw const tiles).cast(),
        (&raw const n).cast(),
    ];
    call!(cuLaunchKernel(
        function => u64, 2 => u32, 1 => u32, 1 => u32, 64 => u32, 1 => u32, 1 => u32, 0 => u32, stream => u64,
        params.as_ptr() => *const *const c_void, 0 => usize))
}

/// A context that a kernel poisoned is of no more use, and others are not to meet it.
fn heal() {
    while count("live.contexts") > 0 {
        assert_eq!(OK, call!(cuDevicePrimaryCtxRelease_v2(0 => c_int)));
    }
    script("clear");
    current();
}

#[test]
fn the_kernel_copies_between_host_and_device() {
    let _alone = alone();
    let (stream, at, plan, host) = (
        stream(),
        device_memory(1 << 16),
        device_memory(4096),
        host_memory(1 << 16),
    );
    let kvcopy = function(load(PTX).1, "kvcopy_16").1;
    host.iter_mut()
        .enumerate()
        .for_each(|(i, byte)| *byte = (i * 7) as u8);
    let source = host.as_ptr() as u64;
    assert_eq!(OK, launch(kvcopy, (at + 64, source, 1000), plan, stream));
    assert_eq!(OK, sync(stream));
    assert!(host[..16000] == contents(at + 64, 16000));
    assert_eq!(vec![0; 64], contents(at, 64));
    let back = host_memory(16000);
    assert_eq!(
        OK,
        launch(kvcopy, (back.as_ptr() as u64, at + 64, 1000), plan, stream)
    );
    assert_eq!(OK, sync(stream));
    assert!(host[..16000] == *back);
    clean();
}

#[test]
fn kernel_out_of_bounds_poisons_its_context() {
    let _alone = alone();
    let memory = vec![0_u8; 4096];
    let memory = (memory.as_ptr() as u64).next_multiple_of(16);
    for (offset, flags, code, what) in [
        (1, 2, 716, "cannot be right"),
        (4096 - 16, 2, 700, "beyond the 4096 bytes"),
        (0, 0, 700, "not registered with DEVICEMAP"),
        (0, 1, 700, "not registered with DEVICEMAP"),
    ] {
        let (stream, at, plan) = (stream(), device_memory(4096), device_memory(4096));
        let kvcopy = function(load(PTX).1, "kvcopy_16").1;
        if flags != 0 {
            assert_eq!(
                OK,
                call!(cuMemHostRegister_v2(memory => u64, 32 => usize, flags => u32))
            );
        }
        assert_eq!(OK, launch(kvcopy, (at + offset, memory, 2), plan, stream));
        violated(sync(stream), code, what);
        assert_eq!(code, call!(cuMemAlloc_v2(&mut 0 => *mut u64, 8 => usize)));
        heal();
        assert_eq!(OK, call!(cuMemAlloc_v2(&mut 0 => *mut u64, 8 => usize)));
    }
}

#[test]
fn modules_and_launches_are_checked() {
    let _alone = alone();
    assert_eq!(218, load("no PTX at all").0);
    assert_eq!(218, load(&PTX[..PTX.len() / 2]).0);
    let module = load(PTX).1;
    assert_eq!(500, function(module, "kvcopy_32").0);
    let kvcopy = function(module, "kvcopy_16").1;
    clean();
    let stream = stream();
    let launch = |function: u64, grid: u32, block: u32, params: usize| {
        call!(cuLaunchKernel(
            function => u64, grid => u32, 1 => u32, 1 => u32, block => u32, 1 => u32, 1 => u32, 0 => u32,
            stream => u64, params => usize, 0 => usize))
    };
    violated(launch(kvcopy, 0, 64, 0), 1, "0 blocks of 64");
    violated(launch(kvcopy, 1, 2048, 0), 1, "1 blocks of 2048");
    violated(launch(kvcopy, 1, 64, 0), 1, "kernelParams");
    assert_eq!(OK, call!(cuModuleUnload(module => u64)));
    violated(launch(kvcopy, 1, 64, 0), 400, "no function");
    violated(call!(cuModuleUnload(module => u64)), 400, "no module");
}

#[test]
fn released_context_frees_its_objects() {
    let _alone = alone();
    heal();
    let (stream, at, _host) = (stream(), device_memory(8), host_memory(8));
    assert_eq!(OK, call!(cuDevicePrimaryCtxRelease_v2(0 => c_int)));
    let left = "ended with 3 objects left";
    assert!(violations()[0].contains(left), "{:?}", violations());
    script("clear");
    violated(sync(stream), 201, "was released");
    violated(
        call!(cuDevicePrimaryCtxRelease_v2(0 => c_int)),
        201,
        "is not retained",
    );
    current();
    violated(call!(cuMemFree_v2(at => u64)), 1, "no allocation starts");
    violated(sync(stream), 400, "is no stream");
}
