//! The system's allocator.

/// Size from which on a block has pages of its own, which are returned when it is freed. glibc raises it to 32 MiB by itself, and then
/// one small block above them keeps the pages of all messages of a burst.
#[cfg(target_env = "gnu")]
const MIN_MAPPED_BYTES: i32 = 256 << 10;

/// Returns the pages of large blocks to the system as soon as they are freed, for the whole process. Only glibc needs it.
pub fn return_large_blocks() {
    #[cfg(target_env = "gnu")]
    // SAFETY: both change a number of the allocator under its own lock; no block that is in use is touched.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MIN_MAPPED_BYTES);
        // Twice that, as glibc keeps them when it raises the other one.
        libc::mallopt(libc::M_TRIM_THRESHOLD, 2 * MIN_MAPPED_BYTES);
    }
}
