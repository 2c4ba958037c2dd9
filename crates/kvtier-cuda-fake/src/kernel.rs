//! The copy kernel: its PTX is checked, and its source, compiled for the processor, is run.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::abi::{
    CUresult, ERROR_ILLEGAL_ADDRESS, ERROR_INVALID_PTX, ERROR_MISALIGNED_ADDRESS,
    ERROR_UNSUPPORTED_PTX_VERSION, Fault, HOST_REGISTER_DEVICEMAP,
};
use crate::host::Place;
use crate::segment::Held;
use crate::stream::{Direction, Engines};
use crate::world::world;

pub(crate) struct Module {
    pub device: usize,
    pub entries: Vec<String>,
}

pub(crate) struct Function {
    pub module: u64,
    pub device: usize,
    pub name: String,
}

/// The kernels in PTX that a driver of this version would take.
pub(crate) fn entries(ptx: &str, driver: i32) -> Result<Vec<String>, (CUresult, String)> {
    let directive = |name: &str| {
        ptx.lines().find_map(|line| {
            line.trim()
                .strip_prefix(name)?
                .split_whitespace()
                .next()
                .map(str::to_owned)
        })
    };
    let refuse = |why: &str| Err((ERROR_INVALID_PTX, why.to_owned()));
    let (Some(version), Some(target)) = (directive(".version "), directive(".target ")) else {
        return refuse("no .version or .target");
    };
    // The PTX of CUDA 11, 12 and 13 is 7, 8 and 9.
    let major = version
        .split('.')
        .next()
        .and_then(|major| major.parse::<i32>().ok());
    if major.is_none_or(|major| major + 4 > driver / 1000) {
        return Err((
            ERROR_UNSUPPORTED_PTX_VERSION,
            format!(".version {version} with a driver {driver}"),
        ));
    }
    let sm = target
        .strip_prefix("sm_")
        .and_then(|sm| sm.trim_end_matches(',').parse::<i32>().ok());
    if sm.is_none_or(|sm| sm > 90) {
        return refuse(&format!(".target {target} on a device of sm_90"));
    }
    let entries: Vec<String> = ptx
        .lines()
        .filter_map(|line| line.split_once(".entry "))
        .map(|(_, name)| name.trim().trim_end_matches('(').to_owned())
        .collect();
    if entries.is_empty() || ptx.matches('{').count() != ptx.matches('}').count() {
        return refuse("no kernel, or not all of it");
    }
    Ok(entries)
}

/// The unit of `kvcopy_UNIT`.
pub(crate) fn unit(name: &str) -> Option<u32> {
    let unit = name.strip_prefix("kvcopy_")?.parse().ok()?;
    matches!(unit, 1 | 2 | 4 | 8 | 16).then_some(unit)
}

type Resolve = extern "C" fn(to: *mut c_void, address: u64, bytes: u64) -> u64;

// `kernel.cpp`.
unsafe extern "C" {
    /// How many items the tiles name.
    fn standin_items(tiles: *const c_void, n_tiles: u32) -> u64;
    fn standin_item_bytes() -> u64;
    fn standin_tile_bytes() -> u64;
    /// Replaces the addresses of items by those that `resolve` returns; result code 0, 700 or 716.
    fn standin_translate(
        items: *mut c_void,
        tiles: *const c_void,
        n_tiles: u32,
        unit: u32,
        resolve: Resolve,
        to: *mut c_void,
    ) -> i32;
    fn kvcopy_launch_host(
        unit: i32,
        grid: u32,
        block: u32,
        items: *const c_void,
        tiles: *const c_void,
        n_tiles: u32,
    ) -> i64;
}

pub(crate) struct Launch {
    pub unit: u32,
    pub grid: u32,
    pub block: u32,
    pub items: u64,
    pub tiles: u64,
    pub n_tiles: u32,
    pub device: usize,
    pub engines: Arc<Engines>,
}

/// What a kernel touches, held while it runs.
struct Touched {
    device: usize,
    memory: Vec<Held>,
    host: Vec<Arc<()>>,
    bytes: u64,
    why: String,
}

impl Touched {
    /// Returns the address at which the fake driver sees memory that a kernel may touch, 0 if the kernel may not.
    fn find(&mut self, address: u64, bytes: u64) -> u64 {
        let state = world().state.lock();
        let found = if state.space.covers(address) {
            state
                .space
                .find(address, bytes, self.device, "kernel")
                .map(|found| {
                    self.memory.push(found.held);
                    found.at as u64
                })
        } else {
            match state.host.find(address, bytes, self.device, "kernel") {
                Ok(Place::Registered { users, flags }) if flags & HOST_REGISTER_DEVICEMAP != 0 => {
                    self.host.push(users);
                    Ok(address)
                }
                Ok(_) => {
                    self.why = format!(
                        "kernel: host memory at {address:#x} is not registered with DEVICEMAP"
                    );
                    Ok(0)
                }
                Err(fault) => Err(fault),
            }
        };
        self.bytes += bytes;
        found.unwrap_or_else(|fault| {
            if let Fault::Wrong(_, why) = fault {
                self.why = why;
            }
            0
        })
    }
}

extern "C" fn resolve(to: *mut c_void, address: u64, bytes: u64) -> u64 {
    // SAFETY: `translate` below passes its `Touched`, which has no other user meanwhile.
    unsafe { &mut *to.cast::<Touched>() }.find(address, bytes)
}

impl Launch {
    pub(crate) fn run(self) {
        let mut touched = Touched {
            device: self.device,
            memory: Vec::new(),
            host: Vec::new(),
            bytes: 0,
            why: String::new(),
        };
        if self.n_tiles == 0 {
            return;
        }
        if let Err(code) = self.copy(&mut touched) {
            let line = format!("kvcopy_{}: {} ({code})", self.unit, touched.why);
            world().journal.violation(line);
            // Every later call of this device's context fails with it; by then it has been noted.
            self.engines.poison.store(code, Ordering::Release);
        }
    }

    fn copy(&self, touched: &mut Touched) -> Result<(), CUresult> {
        let (item_bytes, tile_bytes) = unsafe { (standin_item_bytes(), standin_tile_bytes()) };
        let read = |touched: &mut Touched, address: u64, bytes: u64| {
            if !address.is_multiple_of(16) {
                touched.why = format!("items or tiles at {address:#x}");
                return Err(ERROR_MISALIGNED_ADDRESS);
            }
            match touched.find(address, bytes) {
                0 => Err(ERROR_ILLEGAL_ADDRESS),
                at => Ok(std::ptr::with_exposed_provenance_mut::<c_void>(at as usize)),
            }
        };
        let tiles = read(touched, self.tiles, u64::from(self.n_tiles) * tile_bytes)?;
        let n_items = unsafe { standin_items(tiles, self.n_tiles) };
        let items = read(touched, self.items, n_items * item_bytes)?;
        let mut own = vec![0_u128; (n_items * item_bytes).div_ceil(16) as usize];
        unsafe {
            std::ptr::copy_nonoverlapping(
                items.cast(),
                own.as_mut_ptr().cast::<u8>(),
                (n_items * item_bytes) as usize,
            )
        };
        touched.bytes = 0;
        let to = std::ptr::from_mut(touched).cast();
        match unsafe {
            standin_translate(
                own.as_mut_ptr().cast(),
                tiles,
                self.n_tiles,
                self.unit,
                resolve,
                to,
            )
        } {
            0 => {}
            code => {
                if touched.why.is_empty() {
                    touched.why = "a tile or an item cannot be right".into();
                }
                return Err(code);
            }
        }
        // Both sides were counted.
        self.engines.run(Direction::Kernel, touched.bytes / 2, || {
            let items = own.as_ptr().cast();
            unsafe {
                kvcopy_launch_host(
                    self.unit as i32,
                    self.grid,
                    self.block,
                    items,
                    tiles,
                    self.n_tiles,
                )
            };
        });
        Ok(())
    }
}
