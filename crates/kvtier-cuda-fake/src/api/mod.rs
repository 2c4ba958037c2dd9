//! The exported functions, by topic, as documented by NVIDIA.

mod control;
mod copy;
mod device;
mod event;
mod ipc;
mod launch;
mod memory;
mod stream;
mod vmm;

use crate::abi::{
    CUresult, CudaResult, ERROR_NOT_INITIALIZED, ERROR_NOT_PERMITTED, Fault, SUCCESS, wrong,
};
use crate::world::{IN_HOST_FUNCTION, world};

/// Defines exported functions, and a list of their names.
macro_rules! exports {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($arg: $ty),*) -> $crate::abi::CUresult {
                $crate::api::enter(stringify!($name), || $body)
            }
        )*
        pub(super) const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}
use exports;

/// Whether the name is an exported function, a kernel, or a kind of work on streams.
pub(crate) fn knows(name: &str) -> bool {
    let functions = [
        device::NAMES,
        memory::NAMES,
        vmm::NAMES,
        ipc::NAMES,
        copy::NAMES,
        stream::NAMES,
        event::NAMES,
        launch::NAMES,
    ];
    matches!(name, "h2d" | "d2h" | "kernel")
        || crate::kernel::unit(name).is_some()
        || functions.concat().contains(&name)
}

/// Functions that may be called before `cuInit`.
const EARLY: [&str; 5] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
];

/// Entry of every call: counts it, applies the script, and records violations.
fn enter(name: &'static str, body: impl FnOnce() -> CudaResult) -> CUresult {
    let world = world();
    if let Some(code) = world.pass(name) {
        return code;
    }
    let outcome = if IN_HOST_FUNCTION.get() {
        Err(wrong!(
            ERROR_NOT_PERMITTED,
            "called in a host function of a stream"
        ))
    } else if !EARLY.contains(&name) && world.state.lock().devices.is_none() {
        Err(wrong!(ERROR_NOT_INITIALIZED, "called before cuInit"))
    } else {
        body()
    };
    match outcome {
        Ok(()) => SUCCESS,
        Err(Fault::Code(code)) => code,
        Err(Fault::Wrong(code, why)) => {
            world.journal.violation(format!("{name}: {why} ({code})"));
            code
        }
    }
}
