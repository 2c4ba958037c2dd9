//! The copy kernel: its source, compiled for the processor, is run on addresses that were checked.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use crate::abi::*;
use crate::world::{MemoryKind, world};

pub(crate) struct Module {
    pub device: usize,
    pub ptx: String,
}

pub(crate) struct Function {
    pub module: u64,
    pub device: usize,
    pub name: String,
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
}

/// What a kernel touches, held while it runs, and what is wrong with it.
struct KernelMemory {
    device: usize,
    held: Vec<Arc<dyn Any + Send + Sync>>,
    why: String,
}

impl KernelMemory {
    /// Returns the address at which the fake driver sees memory that a kernel may touch, 0 if the kernel may not.
    fn find(&mut self, address: u64, bytes: u64) -> u64 {
        let state = world().state.lock();
        match state.touch(self.device, address, bytes, "kernel") {
            Ok(found) => {
                let usable = match found.kind {
                    MemoryKind::Device => true,
                    MemoryKind::Registered(flags) => flags & HOST_REGISTER_DEVICEMAP != 0,
                    MemoryKind::Pageable => false,
                };
                self.held.extend(found.held);
                if usable {
                    return found.at as u64;
                }
                self.why = format!("host memory at {address:#x} is not registered with DEVICEMAP");
            }
            Err(Fault::Wrong(_, why)) => self.why = why,
            Err(Fault::Code(code)) => self.why = format!("code {code}"),
        }
        0
    }

    /// Locates items or tiles.
    fn table(&mut self, address: u64, bytes: u64) -> Result<*mut c_void, CUresult> {
        match self.find(address, bytes) {
            0 => Err(ERROR_ILLEGAL_ADDRESS),
            at => Ok(std::ptr::with_exposed_provenance_mut(at as usize)),
        }
    }
}

extern "C" fn resolve(to: *mut c_void, address: u64, bytes: u64) -> u64 {
    // SAFETY: `copy` below passes its `KernelMemory`, which has no other user meanwhile.
    unsafe { &mut *to.cast::<KernelMemory>() }.find(address, bytes)
}

impl Launch {
    pub(crate) fn run(self) {
        let mut memory = KernelMemory {
            device: self.device,
            held: Vec::new(),
            why: "a tile or an item cannot be right".into(),
        };
        if let Err(code) = self.copy(&mut memory) {
            let line = format!("kvcopy_{}: {} ({code})", self.unit, memory.why);
            world().journal.violation(line);
            // Every later call of this device's context fails with it; by then it has been noted.
            world().state.lock().devices()[self.device].poison = code;
        }
    }

    fn copy(&self, memory: &mut KernelMemory) -> Result<(), CUresult> {
        let (item_bytes, tile_bytes) = unsafe { (standin_item_bytes(), standin_tile_bytes()) };
        let (n, unit) = (self.n_tiles, self.unit);
        // The kernel reads items and tiles with 16-byte loads.
        if !(self.items | self.tiles).is_multiple_of(16) {
            return Err(ERROR_MISALIGNED_ADDRESS);
        }
        let tiles = memory.table(self.tiles, u64::from(n) * tile_bytes)?;
        let bytes = unsafe { standin_items(tiles, n) } * item_bytes;
        let items = memory.table(self.items, bytes)?;
        let mut own = vec![0_u128; bytes.div_ceil(16) as usize];
        let to = std::ptr::from_mut(memory).cast();
        // SAFETY: tiles and items were found with their sizes; the copy of the items is as long.
        let code = unsafe {
            std::ptr::copy_nonoverlapping(
                items.cast::<u8>(),
                own.as_mut_ptr().cast(),
                bytes as usize,
            );
            standin_translate(own.as_mut_ptr().cast(), tiles, n, unit, resolve, to)
        };
        if code != SUCCESS {
            return Err(code);
        }
        world().pass("kernel");
        let (items, unit) = (own.as_ptr().cast(), unit as i32);
        // SAFETY: every address was replaced by one that is mapped, and is held.
        unsafe { kvcopy_launch_host(unit, self.grid, self.block, items, tiles, n) };
        Ok(())
    }
}
