//! The process that owns the memory of a registration, if that can be proven. Its exit is noticed at once, without a
//! timeout.
//!
//! PyTorch's counter files have a process id in their names. That is only a hint: ids are local to a PID namespace and
//! reused, and a name can be forged. So three steps prove the owner, and without all of them there is none:
//! 1. Open a pidfd, which never refers to another process.
//! 2. Check that the process has mapped these very files, as the PyTorch that counts in them has.
//! 3. Check that it is still alive, so that step 2 has inspected this process.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvtier_memory::has_mapped;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::ref_counter::{file_of, process_of};
use crate::spec::{CudaAllocation, MemorySpec};

/// A proven process, by its pidfd; it may have exited.
#[derive(Debug, Clone)]
pub struct Owner(Arc<OwnedFd>);

impl Owner {
    /// The one process that owns all of these memories; `None` if that cannot be proven.
    pub fn identify(memories: &[MemorySpec]) -> Option<Self> {
        let names: Option<BTreeSet<_>> = memories.iter().map(counter_file).collect();
        let names = names?;
        let mut processes = names.iter().map(|name| process_of(name));
        let named = processes.next()??;
        if !processes.all(|other| other == Some(named)) || named == std::process::id() as i32 {
            return None;
        }
        let process = pidfd_open(Pid::from_raw(named)?, PidfdFlags::empty()).ok()?;
        let files: Option<Vec<_>> = names.iter().map(|name| file_of(name)).collect();
        let has_mapped = has_mapped(number_in_proc(&process)?, files?);
        let owner = Self(Arc::new(process));
        let lives = Self::exited(std::slice::from_ref(&owner)) == Some(vec![false]);
        (has_mapped && lives).then_some(owner)
    }

    /// Whether each owner has exited, by one system call; `None` if it fails.
    pub fn exited(owners: &[Self]) -> Option<Vec<bool>> {
        let fds = owners.iter().map(|owner| PollFd::new(owner, PollFlags::IN));
        let mut fds: Vec<_> = fds.collect();
        let at_once = Timespec::default();
        poll(&mut fds, Some(&at_once)).ok()?;
        let readable = |fd: &PollFd<'_>| fd.revents().contains(PollFlags::IN);
        Some(fds.iter().map(readable).collect())
    }
}

impl PartialEq for Owner {
    /// Whether both are the same proof; unequal ones may be of one process.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Readable when the process has exited.
impl AsFd for Owner {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Name of the reference counter file of a memory.
fn counter_file(memory: &MemorySpec) -> Option<&[u8]> {
    match memory {
        MemorySpec::Cuda(storage) => match &storage.allocation {
            CudaAllocation::Torch { ref_counter, .. } => {
                ref_counter.as_ref().map(|(name, _)| name.as_slice())
            }
            CudaAllocation::Raw { .. } | CudaAllocation::Vmm { .. } => None,
        },
        MemorySpec::CpuShm { .. } | MemorySpec::Unsupported { .. } => None,
    }
}

/// Id of the process in the `/proc` mounted here, which may belong to another PID namespace than ours.
fn number_in_proc(process: &OwnedFd) -> Option<u32> {
    let info = format!("/proc/self/fdinfo/{}", process.as_raw_fd());
    let info = std::fs::read_to_string(info).ok()?;
    let number = info.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    // 0 and -1: not visible there.
    number.trim().parse().ok().filter(|number| *number > 0)
}
