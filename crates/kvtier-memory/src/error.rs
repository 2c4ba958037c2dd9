//! Errors of arenas.

use std::io;

use crate::fault::TableFull;

/// Why an arena could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// The size is zero, or too large for this machine's addresses.
    #[error("invalid arena size of {bytes} bytes: allowed are 1 to {}", isize::MAX)]
    Size {
        /// Bytes requested.
        bytes: u64,
    },
    /// The name cannot name a segment.
    #[error("shared memory name {name:?} {reason}")]
    Name {
        /// The requested name.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A running process has an arena of that name.
    #[error("shared memory {name:?} belongs to a running server: choose another name")]
    NameInUse {
        /// The full name.
        name: String,
    },
    /// A process of another user has an arena of that name.
    #[error("shared memory {name:?} is locked, and of user {user}: choose another name")]
    NameOfUser {
        /// The full name.
        name: String,
        /// Id of that user.
        user: u32,
    },
    /// The file system has too little free space.
    #[error(
        "{bytes} bytes do not fit in the {available} bytes free in {place} \
         (in a container, raise the size of /dev/shm)"
    )]
    OutOfMemory {
        /// Bytes requested.
        bytes: u64,
        /// Bytes free.
        available: u64,
        /// Directory of the file system.
        place: String,
    },
    /// There are not enough huge pages.
    #[error("{needed} huge pages of 2 MiB are needed and {free} are free ({})", more_hugepages(*needed, *free))]
    Hugepages {
        /// Pages needed, besides those that the arena has already.
        needed: u64,
        /// Pages free, and reserved for no mapping.
        free: u64,
    },
    /// A system call failed.
    #[error("cannot {action} the arena in {place}: {source}")]
    System {
        /// The failed action.
        action: &'static str,
        /// Place of the arena: a path, the name of a segment, or "memory".
        place: String,
        /// The system's error.
        source: io::Error,
    },
    /// The fault guard is full.
    #[error("the arena cannot be guarded: {0}")]
    Guard(#[from] TableFull),
}

/// What to do for more huge pages.
fn more_hugepages(needed: u64, free: u64) -> &'static str {
    if free < needed {
        "set vm.nr_hugepages"
    } else {
        "raise the hugetlb limit of the cgroup, or the size of the hugetlbfs mount"
    }
}
