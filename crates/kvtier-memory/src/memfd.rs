//! Memory without a name that is shared with one other process by its descriptor.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::Advice;
use xxhash_rust::xxh3::Xxh3;

use crate::access::AccessError;
use crate::arena::Arena;
use crate::error::ArenaError;
use crate::mapping::{MapError, Mapping};
use kvtier_common::extent::Extent;

/// Bytes that are hashed and copied at a time, by way of private memory in the first-level cache.
const PIECE: usize = 16 << 10;

/// Shared memory of a fixed size. The other process may write it at any moment, so bytes are checked by
/// what was copied, never by what lies there.
#[derive(Debug)]
pub struct SharedSegment {
    file: OwnedFd,
    mapping: Mapping,
}

impl SharedSegment {
    /// Creates a segment of at least `bytes` bytes, rounded up to whole pages, without touching any.
    ///
    /// # Errors
    /// See [`ArenaError`].
    pub fn create(bytes: u64) -> Result<Self, ArenaError> {
        let len = usize::try_from(bytes)
            .ok()
            .filter(|len| *len > 0)
            .and_then(|len| len.checked_next_multiple_of(rustix::param::page_size()))
            .filter(|len| *len <= isize::MAX as usize)
            .ok_or(ArenaError::Size { bytes })?;
        let system = |action, error: rustix::io::Errno| ArenaError::System {
            action,
            place: "shared memory".to_owned(),
            source: error.into(),
        };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("kvtier-tier", flags)
            .map_err(|error| system("create", error))?;
        rustix::fs::ftruncate(&file, len as u64).map_err(|error| system("size", error))?;
        // Otherwise the other process could take pages away under our mapping.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(|error| system("seal", error))?;
        let mapping =
            Mapping::shared(file.as_fd(), len, "segment").map_err(|error| match error {
                MapError::System(error) => system("map", error),
                MapError::Guard(full) => ArenaError::Guard(full),
            })?;
        let base = mapping.base().as_ptr().cast();
        // SAFETY: the range is our mapping, and the advice does not change its contents.
        let _ = unsafe { rustix::mm::madvise(base, len, Advice::LinuxDontDump) };
        Ok(Self { file, mapping })
    }

    /// Descriptor to be passed to the other process.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Bytes of the segment.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a segment is never empty")]
    pub fn len(&self) -> u64 {
        self.mapping.len()
    }

    /// Copies `extent` of `arena` to offset `at`. Returns the 128-bit xxh3 of the bytes copied.
    ///
    /// # Errors
    /// [`AccessError::OutOfBounds`] (nothing was copied), [`AccessError::Poisoned`].
    pub fn copy_in(&self, at: u64, arena: &Arena, extent: Extent) -> Result<u128, AccessError> {
        let to = Extent::new(at, extent.len);
        copy(arena.mapping(), extent, &self.mapping, to)
    }

    /// Copies the bytes from offset `at` on to `extent` of `arena`, each read once. Returns the 128-bit xxh3 of the bytes that
    /// were written there.
    ///
    /// # Errors
    /// As [`Self::copy_in`].
    pub fn copy_out(&self, at: u64, arena: &Arena, extent: Extent) -> Result<u128, AccessError> {
        let from = Extent::new(at, extent.len);
        copy(&self.mapping, from, arena.mapping(), extent)
    }
}

/// Copies between two extents of one length.
fn copy(from: &Mapping, source: Extent, to: &Mapping, target: Extent) -> Result<u128, AccessError> {
    let first = from.locate(source.offset, source.len)?;
    let last = to.locate(target.offset, source.len)?;
    let len = source.len as usize;
    let mut hasher = Xxh3::new();
    let mut buffer = [0_u8; PIECE];
    let mut done = 0;
    while done < len {
        let piece = PIECE.min(len - done);
        // SAFETY: `done + piece <= len` bytes from `first` were checked, and `buffer`, which is private, takes a piece.
        unsafe {
            std::ptr::copy_nonoverlapping(first.as_ptr().add(done), buffer.as_mut_ptr(), piece);
        }
        hasher.update(&buffer[..piece]);
        // SAFETY: as above, for `last`.
        unsafe {
            std::ptr::copy_nonoverlapping(buffer.as_ptr(), last.as_ptr().add(done), piece);
        }
        done += piece;
    }
    from.check_poison(source)?;
    to.check_poison(target)?;
    Ok(hasher.digest128())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ArenaKind;
    use crate::checksum::checksum128;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at * 31 % 251) as u8).collect()
    }

    #[test]
    fn bytes_go_there_and_back_with_their_checksum() {
        let arena = Arena::create(ArenaKind::Anonymous, 1 << 20).unwrap();
        let segment = SharedSegment::create(1 << 20).unwrap();
        for len in [0, 1, PIECE - 1, PIECE, PIECE + 1, 100_000] {
            let (from, to) = (
                Extent::new(4096, len as u64),
                Extent::new(500_000, len as u64),
            );
            arena.write(from, 0, &bytes(len)).unwrap();
            arena
                .write(Extent::new(499_999, 200_002), 0, &[7; 200_002])
                .unwrap();
            let sum = segment.copy_in(12_345, &arena, from).unwrap();
            assert_eq!(sum, checksum128(&bytes(len)));
            assert_eq!(segment.copy_out(12_345, &arena, to), Ok(sum));
            let mut read = Vec::new();
            arena
                .read_into(Extent::new(499_999, 200_002), 0, len as u64 + 2, &mut read)
                .unwrap();
            assert_eq!(read[1..=len], bytes(len));
            assert_eq!((read[0], read[len + 1]), (7, 7));
        }
    }

    // proves: docs/troubleshoot.md#second-tiers
    #[test]
    fn size_is_fixed_and_shared_by_descriptor() {
        let segment = SharedSegment::create(5000).unwrap();
        let page = rustix::param::page_size() as u64;
        assert_eq!(segment.len(), 5000_u64.next_multiple_of(page));
        for len in [0, segment.len() + page] {
            let changed = rustix::fs::ftruncate(segment.descriptor(), len);
            assert_eq!(changed, Err(rustix::io::Errno::PERM));
        }
        rustix::io::pwrite(segment.descriptor(), b"theirs", 100).unwrap();
        let arena = Arena::create(ArenaKind::Anonymous, 4096).unwrap();
        let sum = segment.copy_out(100, &arena, Extent::new(0, 6)).unwrap();
        assert_eq!(sum, checksum128(b"theirs"));
    }

    #[test]
    fn ranges_outside_are_refused() {
        let arena = Arena::create(ArenaKind::Anonymous, 4096).unwrap();
        let segment = SharedSegment::create(4096).unwrap();
        let len = segment.len();
        for (at, extent) in [
            (len, Extent::new(0, 1)),
            (u64::MAX, Extent::new(0, 2)),
            (0, Extent::new(arena.len(), 1)),
        ] {
            assert!(segment.copy_in(at, &arena, extent).is_err());
            assert!(segment.copy_out(at, &arena, extent).is_err());
        }
        assert!(SharedSegment::create(0).is_err());
        assert!(SharedSegment::create(u64::MAX).is_err());
    }
}
