//! L1 bytes: where cached KV data lies in host memory, and every way bytes get in and out of it.
//!
//! * [`Arena`]: one large block of memory (anonymous, POSIX shared memory, huge pages or a file).
//! * [`FreeExtents`]: which byte ranges ([`Extent`]) of an arena are free. All of its bookkeeping
//!   lies outside the arena, so a process that writes to shared memory cannot corrupt it.
//! * [`SharedWords`]: 64-bit words in shared memory that outlive the process.
//! * [`ForeignSegment`]: memory that a client created and shares with us.
//! * [`SharedSegment`]: memory that we create and share with one process by its descriptor.
//! * [`copy_affine`] and [`copy_runs`]: the one copy between the two.
//! * [`Arena::read_file`] and [`Arena::write_file`]: files straight to and from an arena.
//! * [`Arena::receive`] and [`socket::send_slices`]: the same for sockets.
//! * [`uring::Ring`]: the same, several at a time from one thread; it owns what the system still works on.
//! * [`return_large_blocks`]: the setting of the system's allocator for them.
//! * [`fault`]: a peer that truncates its segment gets an error, not our process.
//!
//! This crate must never know what the bytes mean: no keys, no layouts, no leases, no protocol.
//! The caller decides when an extent may be touched.
//!
//! # Memory that others write
//!
//! Arenas in shared memory and foreign segments are mapped by other processes, which may write
//! them at any moment whatever was agreed. Rust references promise that this does not happen, so
//! this crate never makes a `&[u8]` or `&mut [u8]` over such memory: bytes move through raw
//! pointers into or out of private buffers, and nothing is ever parsed in place. (The one exception,
//! [`Arena::bytes_mut`], is for anonymous memory that nothing else can reach while it is borrowed.) A racing writer
//! can thus give torn bytes, never a broken program. That the bytes are *not* torn is the
//! promise of the cache above: an extent is not read before it is committed, nor written
//! afterwards.

mod access;
pub mod arena;
pub mod checksum;
pub mod copy;
mod error;
pub mod fault;
mod file;
mod heap;
mod hugetlbfs;
mod kept_files;
mod mapping;
mod memfd;
mod numa;
mod prefault;
mod process;
pub mod segment;
mod shm_file;
pub mod socket;
pub mod uring;
mod words;

pub use access::{AccessError, within};
pub use arena::{Arena, ArenaKind};
pub use copy::{AffineCopy, CopyLoop, Direction, MAX_LOOPS, Run, copy_affine, copy_runs};
pub use error::ArenaError;
pub use file::{FileError, close_file};
pub use heap::return_large_blocks;
pub use hugetlbfs::{NoHugetlbfs, hugetlbfs_mounts};
pub use kept_files::{Holder, KeptFile};
pub use kvtier_common::extent::{Extent, FreeExtents};
pub use memfd::SharedSegment;
pub use numa::NumaError;
pub use prefault::{PrefaultEnd, PrefaultError, PrefaultProgress};
pub use process::{exit_at_once, has_mapped};
pub use segment::{ForeignSegment, OwnSegment, SegmentError};
pub use shm_file::{FileId, SHM, SHM_PREFIX, Space, pool_name, remove_kept, remove_stale_pools};
pub use words::SharedWords;
