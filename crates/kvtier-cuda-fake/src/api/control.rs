//! What only the fake driver has: scripts, counts and violations.

use std::ffi::{CStr, c_char, c_int};

use crate::abi::{ERROR_INVALID_VALUE, SUCCESS, put_text};
use crate::world::world;

fn text<'a>(at: *const c_char) -> &'a str {
    unsafe { CStr::from_ptr(at) }.to_str().unwrap_or_default()
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_script(script: *const c_char) -> c_int {
    let (world, script) = (world(), text(script));
    // `clear` is about the journal, which is not the script's.
    let is_clear = |statement: &&str| statement.trim() == "clear";
    if script.split(';').any(|statement| is_clear(&statement)) {
        world.journal.clear();
    }
    let rest: Vec<_> = script.split(';').filter(|s| !is_clear(s)).collect();
    match world.script.lock().apply(&rest.join(";"), super::knows) {
        Ok(()) => SUCCESS,
        Err(why) => {
            let line = format!("fake_driver_script: {why}");
            world.journal.violation(line);
            ERROR_INVALID_VALUE
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_count(name: *const c_char) -> u64 {
    let (world, name) = (world(), text(name));
    let mut state = world.state.lock();
    (match name {
        "live.memory" => state.space.regions.len(),
        "live.host" => state.host.0.len(),
        "live.streams" => state.streams.len(),
        "live.events" => state.events.len(),
        "live.modules" => state.modules.len(),
        "live.physical" => state.physical.len(),
        "live.contexts" => state.devices().iter().filter(|d| d.retained > 0).count(),
        "violations" => world.journal.violations().len(),
        _ => return world.journal.count(name),
    }) as u64
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_violations(to: *mut c_char, bytes: usize) -> u64 {
    let all = world().journal.violations();
    put_text(&all.join("\n"), to, bytes);
    all.len() as u64
}
