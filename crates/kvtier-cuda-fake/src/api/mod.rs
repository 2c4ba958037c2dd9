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

use std::ffi::c_void;

use crate::abi::{
    CUresult, ERROR_NOT_INITIALIZED, ERROR_NOT_PERMITTED, Fault, Outcome, SUCCESS, wrong,
};
use crate::script::{Act, When};
use crate::stream::until;
use crate::world::{IN_HOST_FUNCTION, world};

/// Defines exported functions, and a table of them.
macro_rules! exports {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($arg: $ty),*) -> $crate::abi::CUresult {
                $crate::api::enter(stringify!($name), || $body)
            }
        )*
        pub(super) const TABLE: &[(&str, $crate::api::Pointer)] =
            &[$((stringify!($name), $crate::api::Pointer($name as *const std::ffi::c_void))),*];
    };
}
use exports;

pub(crate) struct Pointer(*const c_void);
// Functions do not change.
unsafe impl Sync for Pointer {}

fn table() -> impl Iterator<Item = &'static (&'static str, Pointer)> {
    [
        device::TABLE,
        memory::TABLE,
        vmm::TABLE,
        ipc::TABLE,
        copy::TABLE,
        stream::TABLE,
        event::TABLE,
        launch::TABLE,
    ]
    .into_iter()
    .flatten()
}

/// Whether the name is an exported function or a kernel.
pub(crate) fn knows(name: &str) -> bool {
    crate::kernel::unit(name).is_some() || table().any(|(known, _)| *known == name)
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
fn enter(name: &'static str, body: impl FnOnce() -> Outcome) -> CUresult {
    let world = world();
    world.journal.add(name, 1);
    let (act, held) = {
        let mut script = world.script.lock();
        (
            script.act(name),
            script.held.get_mut(name).is_some_and(When::hit),
        )
    };
    if held {
        until(|| !world.script.lock().held.contains_key(name));
    }
    match act {
        Some(Act::Fail(code)) => return code,
        Some(Act::Die) => _ = unsafe { libc::kill(libc::getpid(), libc::SIGKILL) },
        None => {}
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
