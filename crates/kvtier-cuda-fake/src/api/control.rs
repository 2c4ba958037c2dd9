//! What only the fake driver has: scripts, counts and violations.

use std::ffi::{CStr, c_char, c_int};

use crate::abi::{ERROR_INVALID_VALUE, SUCCESS};
use crate::world::world;

fn text<'a>(at: *const c_char) -> Option<&'a str> {
    if at.is_null() {
        return None;
    }
    unsafe { CStr::from_ptr(at) }.to_str().ok()
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_script(script: *const c_char) -> c_int {
    let world = world();
    let Some(script) = text(script) else {
        return ERROR_INVALID_VALUE;
    };
    // `clear` is about the journal, which is not the script's.
    let (clears, rest): (Vec<_>, Vec<_>) =
        script.split([';', '\n']).partition(|s| s.trim() == "clear");
    if !clears.is_empty() {
        world.journal.clear();
    }
    match world.script.lock().apply(&rest.join(";"), super::knows) {
        Ok(()) => SUCCESS,
        Err(why) => {
            world
                .journal
                .violation(format!("fake_driver_script: {why}"));
            ERROR_INVALID_VALUE
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_count(name: *const c_char) -> u64 {
    let world = world();
    let Some(name) = text(name) else { return 0 };
    let Some(what) = name.strip_prefix("live.") else {
        return world.journal.count(name);
    };
    let mut state = world.state.lock();
    (match what {
        "memory" => state.space.regions().count(),
        "host" => state.host.len(),
        "streams" => state.streams.len(),
        "events" => state.events.len(),
        "modules" => state.modules.len(),
        "physical" => state.physical.len(),
        "contexts" => state.devices().iter().filter(|d| d.retained > 0).count(),
        _ => 0,
    }) as u64
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_violations(to: *mut c_char, bytes: usize) -> u64 {
    let all = world().journal.violations();
    if !to.is_null() && bytes > 0 {
        let text = all.join("\n");
        let n = text.len().min(bytes - 1);
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), n);
            to.add(n).write(0);
        }
    }
    all.len() as u64
}
